"""Rows of chat layouts to messages; WikiText lines joined to articles."""

from typing import get_args

import pytest

from qat_lora.data.layouts import CHATS, Format, articles, starts_with_title, title_of
from qat_lora.errors import TextError


@pytest.mark.parametrize(
    ("line", "title"),
    [
        (" = Homarus gammarus = \n", "Homarus gammarus"),
        (" = E = ", "E"),
        (" = E = mc2 = ", "E = mc2"),
        (" = = Description = = \n", None),
        (" = = = Deep = = = \n", None),
        ("x = 1 = 2", None),
        (" = \n", None),
        (" = = ", None),
        ("", None),
        (" a sentence with = signs = in it ", None),
    ],
)
def test_titles(line, title):
    assert title_of(line) == title


def test_articles_hold_every_line_once_and_begin_at_titles():
    lines = ["before\n", " \n", " = A = \n", " \n", " a \n", " = = S = = \n", " b \n", " = B = \n", " c \n"]
    found = list(articles(lines))
    assert [title for title, _ in found] == ["", "A", "B"]
    joined = "".join(text for _, text in found)
    assert joined == "".join(line if line.strip() else "\n" for line in lines)


def test_rows_and_lines_give_the_same_articles():
    rows = ["", " = A = \n", "", " a \n", "", " = B = \n", "", " b \n"]  # as datasets has them
    lines = [" \n", " = A = \n", " \n", " a \n", " \n", " = B = \n", " \n", " b \n"]  # as the files have them
    assert list(articles(rows)) == list(articles(lines))
    assert [title for title, _ in articles(rows)] == ["A", "B"]


def test_the_first_line_that_is_not_blank_tells():
    assert starts_with_title(["\n", " ", " = A = \n", "x"])
    assert not starts_with_title(["x = 1\n", " = A = \n"])
    assert not starts_with_title([])


@pytest.mark.parametrize(
    ("layout", "row", "expected"),
    [
        ("alpaca", {"instruction": "q", "input": "", "output": "a"}, ["user:q", "assistant:a"]),
        ("alpaca", {"instruction": "q", "output": "a"}, ["user:q", "assistant:a"]),
        ("alpaca", {"instruction": "q", "input": "i", "output": "a"}, ["user:q\n\ni", "assistant:a"]),
        ("openhermes", {"instruction": "q", "input": None, "output": "a"}, ["user:q", "assistant:a"]),
        (
            "openhermes",
            {"system_prompt": None, "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            ["user:q", "assistant:a"],
        ),
        (
            "sharegpt",
            {"system_prompt": "s", "conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
            ["system:s", "user:q", "assistant:a"],
        ),
        (
            "sharegpt",
            {
                "conversations": [
                    {"from": "system", "value": "s"},
                    {"from": "gpt", "value": "cut"},
                    {"from": "human", "value": "q", "weight": None},
                    {"from": "gpt", "value": "a"},
                ]
            },
            ["system:s", "user:q", "assistant:a"],
        ),
        ("sharegpt", {"conversations": [{"from": "gpt", "value": "cut"}]}, []),
        ("messages", {"messages": [{"role": "user", "content": "q", "name": None}]}, ["user:q"]),
    ],
)
def test_layouts(layout, row, expected):
    assert [f"{m['role']}:{m['content']}" for m in CHATS[layout](row, "row")] == expected


@pytest.mark.parametrize(
    ("layout", "row", "message"),
    [
        ("messages", {"text": "x", "id": 1}, "row 7: no field 'messages'; fields there: text, id"),
        ("sharegpt", {}, "no field 'conversations'; fields there: none"),
        ("alpaca", {"instruction": "q"}, "no field 'output'; fields there: instruction"),
        ("alpaca", {"instruction": 3, "output": "a"}, "field 'instruction' holds int; allowed: text"),
        ("messages", {"messages": "x"}, "field 'messages' is not a list of {'role', 'content'} turns"),
        ("messages", {"messages": [{"role": "user"}]}, "no field 'content'; fields there: role"),
        ("messages", {"messages": [{"role": "user", "content": None}]}, "field 'content' holds NoneType"),
        ("sharegpt", {"conversations": [{"from": "dog", "value": "x"}]}, "unknown speaker 'dog'; allowed: system"),
    ],
)
def test_bad_layouts(layout, row, message):
    with pytest.raises(TextError, match=message):
        CHATS[layout](row, "row 7")


def test_every_layout_can_be_asked_for():
    assert set(get_args(Format)) == {"auto", "text", "wikitext", *CHATS}
