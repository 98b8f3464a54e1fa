"""What one of several builders reads: its own files or row groups, so that all of them read the text once."""

import json
from pathlib import Path

import pytest

from qat_lora.data.packing import pack_rows, share, take_eval
from qat_lora.data.sources import TextConfig, describe_source, open_documents, own_text

BUILDERS = 4


def _encode(document):
    return [([ord(c) for c in document.text], [1] * len(document.text))]


def _texts(count, words=30):
    return [f"document {i:05d} " + "x" * (words + i % 7) + "\n" for i in range(count)]


def _folder(path, kind, files=7):
    path.mkdir()
    texts = _texts(90 * files)
    for i in range(files):
        part = texts[90 * i : 90 * (i + 1)]
        if kind == "jsonl":
            (path / f"{i}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
        elif kind == "txt":
            (path / f"{i}.txt").write_text("".join(part))
        elif kind == "parquet":
            arrow = pytest.importorskip("pyarrow")
            import pyarrow.parquet as parquet

            (path / "all.parquet").unlink(missing_ok=True)
            parquet.write_table(arrow.table({"text": texts}), path / "all.parquet", row_group_size=90)
    return TextConfig(dataset=str(path), format="text"), texts


def _read_bytes():
    counts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(counts["rchar"])


@pytest.mark.parametrize("kind", ["jsonl", "parquet", "txt"])
def test_each_document_is_one_builders(tmp_path, kind):
    config, _ = _folder(tmp_path / "t", kind)
    whole = [(d.text, d.name) for d in open_documents(config)]
    for first in (0, 1, 3) if kind == "txt" else (0, 1, 200):
        found = []
        for builder in range(BUILDERS):
            own = own_text(config, builder, BUILDERS)
            assert own.kind == ("row groups" if kind == "parquet" else "files") and len(own.pieces) == 7
            documents = list(own.open(config, first, 0))
            assert [d.text for d in own.open(config, first, 2)] == [d.text for d in documents[2:]]
            found += [(d.text, d.name) for d in documents]
        assert sorted(found) == sorted(whole[first:])
    dealt = [own_text(config, builder, BUILDERS).mine for builder in range(BUILDERS)]
    assert sorted(sum(dealt, [])) == list(range(7)) and max(map(len, dealt)) == 2


def test_the_text_is_read_once(tmp_path):
    """Bytes that leave the file system, fingerprint included; dealing documents out reads everything every time."""
    config, _ = _folder(tmp_path / "t", "jsonl", files=16)
    size = sum(file.stat().st_size for file in (tmp_path / "t").iterdir())
    ends, read = 16 * 1024, []
    for builder in range(BUILDERS):
        before = _read_bytes()
        own = own_text(config, builder, BUILDERS)
        describe_source(config, ends_only=True)
        assert sum(1 for _ in own.open(config, 0, 0)) == 4 * 90
        read.append(_read_bytes() - before)
    assert max(read) < size / BUILDERS + ends + 8192 and sum(read) < size + BUILDERS * (ends + 8192)
    before = _read_bytes()
    for builder in range(BUILDERS):  # the way that this replaces
        describe_source(config)
        assert sum(1 for _ in share(lambda start: open_documents(config, start), 0, builder, BUILDERS)(0)) == 4 * 90
    assert _read_bytes() - before > 2 * BUILDERS * size * 0.9


def test_row_groups_of_others_are_not_read(tmp_path, monkeypatch):
    config, _ = _folder(tmp_path / "t", "parquet")
    import pyarrow.parquet as parquet

    real, groups = parquet.ParquetFile.iter_batches, []

    def counted(self, *rows, row_groups, **settings):
        groups.append(tuple(row_groups))
        return real(self, *rows, row_groups=row_groups, **settings)

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", counted)
    own = own_text(config, 1, BUILDERS)
    assert sum(1 for _ in own.open(config, 0, 0)) == 90 * len(own.mine)
    assert groups == [(i,) for i in own.mine]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_cursors_go_on_and_say_how_much_is_done(tmp_path, kind):
    config, _ = _folder(tmp_path / "t", kind)
    _, first = take_eval(lambda start: open_documents(config, start), _encode, 64, 3)
    own = own_text(config, 2, BUILDERS)
    rows = list(pack_rows(own.open(config, first, 0), _encode, 64))
    shares = [row.cursor["share"] for row in rows[:-1]]
    assert shares == sorted(shares) and shares[0] < 0.05 and shares[-1] > 0.97
    assert all(abs(done - i / len(rows)) < 0.03 for i, done in enumerate(shares))
    for at in (0, 11, len(rows) - 2):
        cursor = rows[at].cursor
        again = list(pack_rows(own.open(config, first, cursor["document"]), _encode, 64, cursor))
        assert [row.cursor for row in again] == [row.cursor for row in rows[at + 1 :]]
        assert all((one.input_ids == other.input_ids).all() for one, other in zip(again, rows[at + 1 :], strict=True))
    assert all("share" not in row.cursor for row in pack_rows(open_documents(config), _encode, 64))


def test_where_documents_are_dealt_out_as_before(tmp_path):
    config, _ = _folder(tmp_path / "t", "jsonl", files=3)
    assert own_text(config, 0, 1) is None and own_text(config, 0, 4) is None and own_text(config, 0, 3) is not None
    config, _ = _folder(tmp_path / "p", "parquet", files=3)
    assert own_text(config, 0, 4) is None and own_text(config, 0, 3).kind == "row groups"
    assert own_text(TextConfig(dataset=str(tmp_path / "p"), format="wikitext"), 0, 3) is None  # articles span groups
    assert own_text(TextConfig(dataset="a-name-of/the-hub"), 0, 3) is None


def test_the_description_of_a_fleets_text(tmp_path):
    config, _ = _folder(tmp_path / "t", "jsonl")
    before = describe_source(config, ends_only=True)
    assert json.loads(before)["kind"] == "files by their ends" and before != describe_source(config)
    file = tmp_path / "t" / "3.jsonl"
    text = file.read_text()
    for change in (text + "\n", text.replace("document", "dokument", 1)):
        file.write_text(change)
        assert describe_source(config, ends_only=True) != before
    file.write_text(text)
    assert describe_source(config, ends_only=True) == before
