"""Rows of local files, apart from where they come from: what is a row, when it is parsed, what its fields mean."""

import json

import pytest

from qat_lora.errors import TextError
from qat_lora.text.rows import Row, file_rows, layout_of, text_of


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
    with pytest.raises(TextError, match="has no field 'text'; fields there: body, other"):
        text_of(row(body="x", other=1), "text")
    with pytest.raises(TextError, match="holds int; allowed: text"):
        text_of(row(body=3), "body")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(TextError, match=r"gone\.jsonl cannot be read"):
        list(file_rows("gone.jsonl", tmp_path / "gone.jsonl"))
