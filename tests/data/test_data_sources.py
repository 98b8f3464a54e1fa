"""Sources: which documents, in which order, under which number; and what bad input says."""

import errno
import json
import os
import pathlib
import sys

import datasets
import pyarrow
import pyarrow.parquet
import pytest

from qat_lora.config import from_dict, leaves
from qat_lora.data import layouts, sources
from qat_lora.data.sources import TextConfig, describe_source, open_documents
from qat_lora.errors import MissingExtraError, TextError


def read(path, start=0, **settings):
    return list(open_documents(TextConfig(dataset=str(path), **settings), start))


def texts(path, **settings):
    return [document.text for document in read(path, **settings)]


def put(folder, **files):
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def put_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


ROWS = [{"text": "one"}, {"text": ""}, {"text": None}, {"text": "four\n\nlines"}, {"text": "\u00fcnf"}]
ROW_TEXTS = ["one", "", "", "four\n\nlines", "\u00fcnf"]


def test_settings_are_flat_and_built_from_plain_values():
    names = [leaf.name for leaf in leaves(TextConfig)]
    assert len(names) == len(set(names))
    assert all(leaf.field.metadata["help"] for leaf in leaves(TextConfig))
    assert from_dict(TextConfig, {"dataset": "x", "glob": "*.md, *.txt"}).glob == ("*.md", "*.txt")


def test_a_plain_file_is_one_document(tmp_path):
    put(tmp_path, a_txt="first\r\nsecond\rthird\n")
    assert read(tmp_path / "a.txt") == [("first\nsecond\nthird\n", None, "a.txt", None, 1.0)]


def test_bytes_that_are_not_utf8_are_replaced_and_a_mark_at_the_start_is_dropped(tmp_path):
    put(tmp_path, a_py=b"\xef\xbb\xbf# na\xefve and a dozen more letters\n")
    assert texts(tmp_path / "a.py") == ["# na\ufffdve and a dozen more letters\n"]


def test_a_large_file_is_read_in_parts_that_make_the_text_of_a_small_one(tmp_path, monkeypatch):
    data = b"\xef\xbb\xbfone\r\ntwo\rna\xefve \xed\xa0\x80 \xef\xbb\xbf" + "日本\r\n".encode() * 50
    put(tmp_path, a_txt=data)
    [small] = read(tmp_path / "a.txt")
    for size in (1, 2, 3, 7):
        monkeypatch.setattr(sources, "WINDOW_CHARS", size)
        [large] = read(tmp_path / "a.txt")
        assert isinstance(large.text, pathlib.Path) and not large.is_blank
        assert "".join(large.parts()) == small.text
        assert max(map(len, large.parts())) <= size


def test_a_file_name_that_is_not_utf8(tmp_path):
    (tmp_path / "na\udcefve.txt").write_text("text")
    [document] = read(tmp_path)
    assert document.name == "na\ufffdve.txt" and describe_source(TextConfig(dataset=str(tmp_path)))


def test_an_article_that_is_too_long_is_refused_with_its_title(tmp_path, monkeypatch):
    monkeypatch.setattr(layouts, "ROW_CHARS", 100)
    put(tmp_path, a_txt=" = Short = \ntext\n = Long = \n" + "line of text\n" * 20)
    with pytest.raises(TextError, match="the article 'Long' has more than .* characters; divide it"):
        read(tmp_path / "a.txt")
    assert texts(tmp_path / "a.txt", format="text")


def test_a_folder_is_read_in_the_order_of_relative_paths(tmp_path):
    put(tmp_path, b_txt="b", a__z_md="az", a_txt="a", B_py="B", skip_bin="no", _git__x_txt="hidden", c__d__e_rst="e")
    assert [d.name for d in read(tmp_path)] == ["B.py", "a.txt", "a/z.md", "b.txt", "c/d/e.rst"]
    assert texts(tmp_path, glob=("*.txt", "a*")) == ["a", "b"]


def test_files_from_lists_the_files_in_its_own_order(tmp_path):
    folder = put(tmp_path / "lib", a_py="A", b_py="B", c__d_py="D")
    (tmp_path / "held-out.txt").write_text("c/d.py\n\na.py\n")
    assert texts(folder, files_from=str(tmp_path / "held-out.txt")) == ["D", "A"]


@pytest.mark.parametrize("start", range(7))
def test_start_goes_on_at_that_document_of_a_mixed_folder(tmp_path, start):
    put(tmp_path, a_txt="A", z_txt="", c_txt=" = T = \nx\n = U = \ny\n")
    put_rows(tmp_path / "b.jsonl", [{"text": "r0"}, {"text": "r1"}])
    everything = ["A", "r0", "r1", " = T = \nx\n", " = U = \ny\n", ""]
    assert [d.text for d in read(tmp_path, start)] == everything[start:]


def test_skipping_a_json_line_does_not_parse_it(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "fine"}\n{broken\n{"text": "also fine"}\n')
    assert [d.text for d in read(tmp_path / "a.jsonl", 2)] == ["also fine"]
    with pytest.raises(TextError, match=r"a\.jsonl:2 is not JSON"):
        read(tmp_path / "a.jsonl")


def test_rows_are_the_same_from_every_kind_of_file(tmp_path):
    put_rows(tmp_path / "lines.jsonl", ROWS)
    put_rows(tmp_path / "lines.json", ROWS)
    (tmp_path / "array.json").write_text(json.dumps(ROWS, indent=1))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "table.parquet")
    saved = datasets.Dataset.from_list(ROWS)
    saved.save_to_disk(str(tmp_path / "saved"))
    datasets.DatasetDict(train=saved.select([0]), test=saved).save_to_disk(str(tmp_path / "splits"))
    for name in ("lines.jsonl", "lines.json", "array.json", "table.parquet", "saved", "splits"):
        for start in range(len(ROWS) + 1):
            documents = read(tmp_path / name, start, split="test" if name == "splits" else "train")
            assert [d.text for d in documents] == ROW_TEXTS[start:], name


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("start", [0, 2])
def test_a_name_is_asked_of_the_hub_with_every_setting(monkeypatch, streaming, start):
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        found = datasets.Dataset.from_list(ROWS)
        return found.to_iterable_dataset() if streaming else found

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    settings = {"dataset_config": "c", "dataset_revision": "r", "split": "validation", "streaming": streaming}
    assert [d.text for d in read("owner/corpus", start, **settings)] == ROW_TEXTS[start:]
    assert asked == [
        (("owner/corpus", "c"), {"split": "validation", "revision": "r", "streaming": streaming}),
    ]


def test_wikitext_of_the_hub_is_joined_to_articles_without_being_told(monkeypatch):
    lines = ["", " = A = \n", "", " text of a \n", " = = Part = = \n", " more \n", "", " = B = \n", " text of b \n"]
    found = datasets.Dataset.from_list([{"text": line} for line in lines])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: found)
    expected = [" = A = \n\n text of a \n = = Part = = \n more \n\n", " = B = \n text of b \n"]
    assert texts("wikitext") == expected
    assert [d.text for d in read("wikitext", 1)] == expected[1:]
    assert len(texts("wikitext", format="text")) == len(lines)


def test_chat_rows_become_messages(tmp_path):
    alpaca = put_rows(tmp_path / "a.jsonl", [{"instruction": "Add", "input": "1 2", "output": "3", "text": "###"}])
    [document] = read(alpaca)
    assert document.text is None
    assert document.messages == [{"role": "user", "content": "Add\n\n1 2"}, {"role": "assistant", "content": "3"}]
    assert texts(alpaca, format="text") == ["###"]
    assert texts(alpaca, format="text", text_field="output") == ["3"]


def test_the_description_follows_the_text_and_not_its_place(tmp_path):
    def describe(name, **settings):
        return describe_source(TextConfig(dataset=str(tmp_path / name), **settings))

    for name in ("one", "two"):
        put(tmp_path / name, a_txt="aa", b_txt="b", c_bin="c")
    first = describe("one")
    assert first == describe("two") == describe("one")
    assert str(tmp_path) not in first and json.loads(first)["bytes"] == 3
    put(tmp_path / "two", c_bin="other")
    assert describe("two") == first
    assert describe("one", format="text") != first
    assert describe("one", glob=("a.txt",)) != first
    put(tmp_path / "two", a_txt="ab")
    put(tmp_path / "moved", a_txt="a", b_txt="ab")
    put(tmp_path / "renamed", a_txt="aa", d_txt="b")
    assert len({describe(name) for name in ("one", "two", "moved", "renamed")}) == 4


def test_the_description_of_a_dataset(tmp_path):
    hub = TextConfig(dataset="owner/corpus", split="test", dataset_revision="abc")
    assert {"dataset": "owner/corpus", "split": "test", "revision": "abc"}.items() <= json.loads(
        describe_source(hub)
    ).items()
    described = []
    for name, rows in (("a", ROWS), ("b", ROWS), ("c", ROWS[1:])):
        datasets.Dataset.from_list(rows).save_to_disk(str(tmp_path / name))
        described.append(json.loads(describe_source(TextConfig(dataset=str(tmp_path / name)))))
    assert described[0] == described[0] | {"kind": "saved dataset", "split": "train"}
    assert described[2]["sha256"] != described[0]["sha256"]


@pytest.mark.parametrize("name", ["./nothing", "~/nothing", "/nothing/there", "corpus.txt", "a/b/c", "x.parquet"])
def test_a_missing_path_is_not_asked_of_the_hub(monkeypatch, name):
    monkeypatch.setattr(datasets, "load_dataset", None)
    for ask in (open_documents, describe_source):
        with pytest.raises(TextError, match=f"dataset: {name}: no such file or folder"):
            ask(TextConfig(dataset=name))


def test_no_dataset_given():
    with pytest.raises(TextError, match="dataset: not given"):
        open_documents(TextConfig())


def test_a_hub_that_fails_is_one_line(monkeypatch):
    def load_dataset(*args, **kwargs):
        raise ValueError("BuilderConfig 'x' not found.\n  Available: ['y']")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(TextError, match=r"corpus cannot be loaded: BuilderConfig 'x' not found\. Available: \['y'\]"):
        open_documents(TextConfig(dataset="corpus"))


def test_a_missing_extra_names_the_install_command(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'qat-lora\[hub\]'"):
        open_documents(TextConfig(dataset="corpus"))
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(MissingExtraError, match=r"pip install 'qat-lora\[hub\]'"):
        open_documents(TextConfig(dataset=str(tmp_path / "a.parquet")))


@pytest.mark.parametrize("files", [{"a_txt": ""}, {"a_txt": " \n", "b_jsonl": '{"text": "\\n"}\n'}, {"a_jsonl": ""}])
def test_blank_text_is_refused_when_opened(tmp_path, files):
    with pytest.raises(TextError, match="is empty: .* documents, all blank"):
        open_documents(TextConfig(dataset=str(put(tmp_path, **files))))


def test_a_folder_without_text(tmp_path):
    put(tmp_path, a_bin="x")
    with pytest.raises(TextError, match=r"no file in .* matches \*\*/\*\.txt"):
        open_documents(TextConfig(dataset=str(tmp_path)))
    with pytest.raises(TextError, match="glob: /etc/"):
        open_documents(TextConfig(dataset=str(tmp_path), glob=("/etc/*",)))


def test_bad_lists_of_files(tmp_path):
    folder, listed = put(tmp_path / "lib", a_py="A"), tmp_path / "list.txt"
    config = TextConfig(dataset=str(folder), files_from=str(listed))
    with pytest.raises(TextError, match="files_from: .* cannot be read"):
        open_documents(config)
    listed.write_text("\n")
    with pytest.raises(TextError, match="lists no file"):
        open_documents(config)
    listed.write_text("a.py\nb.py\nc.py\n")
    with pytest.raises(TextError, match=r"files_from: b\.py, listed in .*, is not in .*\(2 so\)"):
        open_documents(config)
    with pytest.raises(TextError, match="files_from: lists files of a folder"):
        open_documents(TextConfig(dataset=str(folder / "a.py"), files_from=str(listed)))


@pytest.mark.parametrize("data", ["text".encode("utf-16"), "текст".encode("cp1251"), b"\x7fELF\0\0"])
def test_a_file_that_is_not_text(tmp_path, data):
    put(tmp_path, a_txt="text comes first", b_txt=data)
    for ask in (open_documents, describe_source):  # before the first document is read
        with pytest.raises(TextError, match=r"b\.txt is not UTF-8 text"):
            ask(TextConfig(dataset=str(tmp_path)))


def test_python_sources_in_an_old_encoding_are_read(tmp_path):
    put(tmp_path, a_py="x = 'текст'".encode("cp1251"))
    assert texts(tmp_path) == ["x = '\ufffd\ufffd\ufffd\ufffd\ufffd'"]


@pytest.mark.parametrize(
    ("name", "content", "settings", "message"),
    [
        ("a.jsonl", '{"content": "x", "id": 1}', {}, r"^text_field: .*no field 'text'; fields there: content, id"),
        ("a.jsonl", '{"text": ["x"]}', {}, "text_field: a.jsonl:1: field 'text' holds list"),
        (
            "a.jsonl",
            '{"text": "x"}',
            {"weight_field": "w"},
            "weight_field: a.jsonl:1: w is None; allowed: a number from 0",
        ),
        ("a.jsonl", '{"text": "x", "w": -1}', {"weight_field": "w"}, "weight_field: a.jsonl:1: w is -1"),
        ("a.jsonl", '{"text": "x", "w": NaN}', {"weight_field": "w"}, "weight_field: a.jsonl:1: w is nan"),
        ("a.jsonl", '{"text": "x", "w": true}', {"weight_field": "w"}, "weight_field: a.jsonl:1: w is True"),
        ("a.txt", "x", {"weight_field": "w"}, "weight_field: needs rows .*, and a.txt is plain text"),
        ("a.jsonl", '{"text": " = A = ", "w": 1}', {"weight_field": "w", "format": "wikitext"}, "lines of articles"),
        ("a.jsonl", "[1]", {}, "a.jsonl:1 holds list; a row is an object"),
        ("a.json", "[1]", {}, r"a.json\[0\] holds int"),
        ("a.json", "[{]", {}, r"a.json\[0\] is not JSON"),
        ("a.jsonl", '{"text": "x"}', {"format": "alpaca"}, "a.jsonl:1: no field 'instruction'; fields there: text"),
        ("a.txt", "x", {"format": "messages"}, "format: messages needs rows .* a.txt is plain text"),
        ("a.parquet", "x", {}, "a.parquet is not a Parquet file"),
    ],
)
def test_bad_rows(tmp_path, name, content, settings, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(TextError, match=message) as caught:
        open_documents(TextConfig(dataset=str(tmp_path / name), **settings))
    assert "\n" not in str(caught.value)


def test_an_unknown_split_of_a_saved_dataset(tmp_path):
    datasets.DatasetDict(train=datasets.Dataset.from_list(ROWS)).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(TextError, match="split: .* has no 'test'; splits there: train"):
        open_documents(TextConfig(dataset=str(tmp_path / "saved"), split="test"))


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
@pytest.mark.parametrize("settings", [{}, {"format": "text"}, {"format": "wikitext"}])
def test_a_file_without_permission(monkeypatch, tmp_path, name, settings):
    def refuse(*args, **kwargs):  # root may read everything, so a mode of 0 would prove nothing
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    (tmp_path / name).write_text("x")
    monkeypatch.setattr(pathlib.Path, "open", refuse)
    with pytest.raises(TextError, match=f"{name} cannot be read: Permission denied"):
        open_documents(TextConfig(dataset=str(tmp_path / name), **settings))
