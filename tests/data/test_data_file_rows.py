"""Rows of local files, apart from where they come from: what is a row, when it is parsed, what its fields mean."""

import json
import random

import pyarrow
import pyarrow.parquet
import pytest

from qat_lora.data import file_rows as room
from qat_lora.data.file_rows import Row, file_rows, well_formed
from qat_lora.data.layouts import layout_of, text_of
from qat_lora.errors import TextError


def row(**fields):
    return Row("a.jsonl:1", lambda: fields)


def test_the_same_rows_from_lines_and_from_an_array(tmp_path):
    data = [{"text": "one"}, {"text": "zwei ä"}, {"text": None}]
    lines, array, lines_in_json = (tmp_path / name for name in ("a.jsonl", "a.json", "b.json"))
    text = "\n\n".join(json.dumps(fields, ensure_ascii=False) for fields in data) + "\n"
    lines.write_text("\ufeff" + text, encoding="utf-8")
    lines_in_json.write_text(text, encoding="utf-8")
    array.write_text(" \n" + json.dumps(data, indent=1), encoding="utf-8")
    for file in (lines, array, lines_in_json):
        assert [found.load() for found in file_rows(file.name, file)] == data
    assert [found.name for found in file_rows("x", lines)] == ["x:1", "x:3", "x:5"]
    assert [found.name for found in file_rows("x", array)] == ["x[0]", "x[1]", "x[2]"]


def test_a_row_is_parsed_only_when_it_is_used(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('{"text": 1\n[]\n{"text": "fine"}\n', encoding="utf-8")
    first, second, third = file_rows("a.jsonl", file)
    assert third.load() == {"text": "fine"}
    with pytest.raises(TextError, match=r"a\.jsonl:1 is not JSON"):
        first.load()
    with pytest.raises(TextError, match=r"a\.jsonl:2 holds list; a row is an object"):
        second.load()


@pytest.mark.parametrize(
    ("fields", "layout"),
    [
        ({"text": "x"}, "text"),
        ({"messages": [], "text": "x"}, "messages"),
        ({"conversations": [], "text": "x"}, "sharegpt"),
        ({"instruction": "i", "output": "o", "text": "x"}, "alpaca"),
        ({"instruction": "i"}, "text"),
    ],
)
def test_layout(fields, layout):
    assert layout_of(row(**fields)) == layout


def test_text_of_a_field():
    assert text_of(row(body="x", other=1), "body") == "x"
    assert text_of(row(body=None), "body") == ""
    with pytest.raises(TextError, match="no field 'text'; fields there: body, other"):
        text_of(row(body="x", other=1), "text")
    with pytest.raises(TextError, match="holds int; allowed: text"):
        text_of(row(body=3), "body")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(TextError, match=r"gone\.jsonl cannot be read"):
        list(file_rows("gone.jsonl", tmp_path / "gone.jsonl"))


# Any bytes


def load(path):
    return [found.load() for found in file_rows(path.name, path)]


LONE = '{"text": "a\\ud800b\\ud83d\\ude00\\udc00", "\\udfff": [{"\\ud800x": "\\ude00\\ud83d"}], "n": 1}'
MENDED = {"text": "a\ufffdb\U0001f600\ufffd", "\ufffd": [{"\ufffdx": "\ufffd\ufffd"}], "n": 1}


@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_a_lone_surrogate_becomes_a_replacement_in_fields_and_names(tmp_path, name):
    (tmp_path / name).write_text(f"[{LONE}]" if name == "a.json" else LONE)
    assert "\ud800" in json.loads(LONE)["text"]  # the control: JSON allows it
    assert load(tmp_path / name) == [MENDED]
    with pytest.raises(TextError, match="no field 'body'; fields there: text, \ufffd, n") as caught:
        text_of(next(file_rows(name, tmp_path / name)), "body")
    str(caught.value).encode()


def test_well_formed_text_is_not_copied():
    for text in ("plain", "über", "日本語 \U0001f600 \ufffd \0 \ufeff"):
        assert well_formed(text) is text
    assert well_formed("\udcffa") == "\ufffda"


def test_parquet_text_that_is_not_utf8(tmp_path):
    texts = pyarrow.array([b"fine", b"na\xefve", None, b"\xed\xa0\x80"]).view("string")
    nested = pyarrow.ListArray.from_arrays(pyarrow.array([0, 1, 2, 3, 4], "int32"), texts)
    pyarrow.parquet.write_table(pyarrow.table({"n": [1, 2, 3, 4], "text": texts}), tmp_path / "a.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"n": [1, 2, 3, 4], "turns": nested}), tmp_path / "b.parquet")
    assert [row["text"] for row in load(tmp_path / "a.parquet")] == ["fine", "na\ufffdve", None, "\ufffd" * 3]
    with pytest.raises(TextError, match=r"b\.parquet: field 'turns' holds bytes that are not UTF-8"):
        load(tmp_path / "b.parquet")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("[" * 100_000, "nested too deeply"),
        ('{"a": ' * 700 + "1" + "}" * 700, "nested too deeply"),
        ('{"text": ' + "1" * 5000 + "}", "Exceeds the limit"),
        ('{"text": "a\nb"}', "Unterminated string|Invalid control character"),
        ('{"text": "a"', "Expecting"),
        ("\0\0\0", "Expecting value"),
    ],
)
@pytest.mark.parametrize("name", ["a.jsonl", "a.json"])
def test_rows_that_cannot_be_read_are_one_line_with_their_place(tmp_path, name, row, message):
    (tmp_path / name).write_text(f'[{{"text": "fine"}}, {row}]' if name == "a.json" else f'{{"text": "fine"}}\n{row}')
    place = r"a\.json\[1\]" if name == "a.json" else r"a\.jsonl:2"
    with pytest.raises(TextError, match=rf"dataset: {place} is not JSON that can be read: .*({message})") as caught:
        load(tmp_path / name)
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


# Any size


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "b.json"])
def test_a_row_that_is_too_long_is_refused_with_its_place(tmp_path, monkeypatch, name):
    monkeypatch.setattr(room, "ROW_CHARS", 1000)
    monkeypatch.setattr(room, "_READ_CHARS", 64)
    rows = ['{"text": "' + "x" * 900 + '"}', '{"text": "' + "y" * 5000 + '"}']
    (tmp_path / name).write_text(f"[{','.join(rows)}]" if name == "a.json" else "\n".join(rows) + "\n")
    found = file_rows(name, tmp_path / name)
    assert len(next(found).load()["text"]) == 900
    place = r"a\.json\[1\]" if name == "a.json" else rf"{name}:2"
    with pytest.raises(TextError, match=rf"{place} has more than 1,000 characters; divide it"):
        next(found)


@pytest.mark.parametrize("step", [2, 7, 64])
def test_an_array_is_the_same_however_it_is_read(tmp_path, monkeypatch, step):
    draw = random.Random(step)
    data = [
        {"text": 'é\U0001f600\\"]},[{' * draw.randrange(9), "n": draw.choice([-1.5e300, 123456, None, True, []])}
        for _ in range(40)
    ]
    data[3:3] = [12345, "text", None, [1]]  # no rows, told when they are used
    monkeypatch.setattr(room, "_READ_CHARS", step)
    for indent, ascii_only in ((None, True), (2, False)):
        (tmp_path / "a.json").write_text(json.dumps(data, indent=indent, ensure_ascii=ascii_only) + " \n", "utf-8")
        rows = list(file_rows("a.json", tmp_path / "a.json"))
        assert len(rows) == len(data)
        assert [row.load() for i, row in enumerate(rows) if not 3 <= i < 7] == data[:3] + data[7:]
        with pytest.raises(TextError, match=r"a\.json\[3\] holds int"):
            rows[3].load()
    for broken in ("[", "[1,", "[1,]", "[1 2]", "[1] 2", "[1", '[{"a": 1}'):
        (tmp_path / "a.json").write_text(broken)
        with pytest.raises(TextError, match=r"a\.json\[\d\] is not JSON"):
            list(file_rows("a.json", tmp_path / "a.json"))
    (tmp_path / "a.json").write_text(" [ ] ")
    assert list(file_rows("a.json", tmp_path / "a.json")) == []


def test_an_array_is_not_read_ahead(tmp_path):
    file = tmp_path / "a.json"
    file.write_text("[" + ",".join('{"text": "' + "x" * 1000 + '"}' for _ in range(5000)) + ", broken")
    rows = file_rows("a.json", file)
    assert len(next(rows).load()["text"]) == 1000  # 5 MB and a fault behind it
    with pytest.raises(TextError, match=r"a\.json\[5000\] is not JSON"):
        list(rows)


def test_parquet_rows_are_decoded_a_few_at_a_time(tmp_path, monkeypatch):
    file = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": [f"{i:04}" * 250 for i in range(400)]}), file)
    asked = []
    given = pyarrow.parquet.ParquetFile.iter_batches
    monkeypatch.setattr(room, "_PARQUET_BYTES", 20_000)
    monkeypatch.setattr(
        pyarrow.parquet.ParquetFile, "iter_batches", lambda self, *of: asked.append(of[0]) or given(self, *of)
    )
    assert [row["text"][:4] for row in load(file)] == [f"{i:04}" for i in range(400)]
    assert 1 <= asked[0] <= 40
