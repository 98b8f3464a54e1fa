"""What each of several builders reads: its own files or row groups, together the whole text, no document twice."""

import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from qat_lora.data import sources
from qat_lora.data.packing import Encoder, pack_rows
from qat_lora.data.sources import TextConfig, describe_source, open_documents, own_documents, units


def folder(path, count=24):
    path.mkdir()
    for i in range(count):
        name = path / f"{i:02d}.{'jsonl' if i % 3 == 0 else 'txt'}"
        text = f"text {i} " + "x" * (7 * i % 50)
        name.write_text("".join(f'{{"text": "{text} {j}"}}\n' for j in range(3)) if i % 3 == 0 else text)
    return TextConfig(dataset=str(path), format="text")


def texts(documents):
    return ["".join(document.parts()) for document in documents]


def opened(monkeypatch):
    """Note which files are opened."""
    seen, real = [], sources._file_loads
    monkeypatch.setattr(sources, "_file_loads", lambda c, name, *rest: seen.append(name) or real(c, name, *rest))
    return seen


@pytest.mark.parametrize("first", [0, 1, 5])
def test_builders_read_their_own_files_and_together_all(tmp_path, monkeypatch, first):
    config = folder(tmp_path / "t")
    dealt = units(config, 3)
    whole, seen, read = texts(open_documents(config)), opened(monkeypatch), []
    for builder in range(3):
        series = own_documents(config, dealt, first, builder, 3)
        own = texts(series(0))
        read.append(set(seen))
        for start in (1, len(own) - 1, len(own)):
            assert texts(series(start)) == own[start:]
        seen.clear()
        texts(series(0))
        read[-1] = set(seen)
        seen.clear()
        whole += own
    assert sorted(whole) == sorted(whole[:40] + whole[first:40]) and len(whole) == 80 - first
    assert not (read[0] & read[1] or read[0] & read[2] or read[1] & read[2])
    sizes = [sum((tmp_path / "t" / name).stat().st_size for name in names) for names in read]
    assert max(sizes) < 1.2 * min(sizes)


def test_a_builder_goes_on_at_a_cursor(tmp_path):
    config = folder(tmp_path / "t")
    series = own_documents(config, units(config, 2), 0, 1, 2)

    @Encoder
    def encode(document):
        ids = list("".join(document.parts()).encode())
        return iter([(ids, [1] * len(ids))])

    rows = list(pack_rows(series(0), encode, 16))
    for i in (0, 4, len(rows) - 2):
        cursor = rows[i].cursor
        again = list(pack_rows(series(cursor["document"]), encode, 16, cursor))
        assert [row.input_ids.tolist() for row in again] == [row.input_ids.tolist() for row in rows[i + 1 :]]


def test_a_parquet_file_is_divided_at_its_row_groups(tmp_path, monkeypatch):
    rows = pyarrow.table({"text": [f"row {i}" for i in range(40)]})
    pyarrow.parquet.write_table(rows, tmp_path / "t.parquet", row_group_size=5)
    config = TextConfig(dataset=str(tmp_path / "t.parquet"))
    dealt = units(config, 4)
    assert [unit.group for unit in dealt] == list(range(8))
    parts = [list(own_documents(config, dealt, 3, builder, 4)(0)) for builder in range(4)]
    assert sorted(int(text[4:]) for part in parts for text in texts(part)) == list(range(3, 40))
    assert [document.name for part in parts for document in part if document.text == "row 7"] == ["t.parquet[7]"]
    assert units(config, 9) is None and units(config, 1) is None  # every n-th document


def test_articles_are_not_cut_at_row_groups(tmp_path):
    lines = [" = A = \n", "a\n", " = B = \n", "b\n"]
    pyarrow.parquet.write_table(pyarrow.table({"text": lines}), tmp_path / "t.parquet", row_group_size=1)
    assert units(TextConfig(dataset=str(tmp_path / "t.parquet")), 2) is None


def test_the_text_is_known_by_names_and_sizes(tmp_path):
    config = folder(tmp_path / "t")
    before = describe_source(config, units(config, 2))
    assert before == describe_source(config, units(config, 3)) != describe_source(config)
    (tmp_path / "t/01.txt").write_text("a text of another length")
    assert describe_source(config, units(config, 2)) != before


def test_of_a_bucket_a_builder_copies_its_own_files_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]
    sources.fetched.cache_clear()
    for i in range(6):
        memory.pipe_file(f"/bucket/books/{'more/' * (i % 2)}{i}.txt", f"book {i}".encode())
    memory.pipe_file("/bucket/books/.hidden.txt", b"no")
    memory.pipe_file("/bucket/books/x.bin", b"no")
    config = TextConfig(dataset="memory://bucket/books", format="text")
    dealt = units(config, 3)
    assert [unit.name for unit in dealt] == ["0.txt", "2.txt", "4.txt", "more/1.txt", "more/3.txt", "more/5.txt"]
    assert len(texts(own_documents(config, dealt, 0, 1, 3)(0))) == 2
    assert len([file for file in (tmp_path / "cache").rglob("*.txt")]) == 2
