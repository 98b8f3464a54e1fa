"""WikiText lines joined to articles."""

import pytest

from qat_lora.data.wikitext import articles, starts_with_title, title_of


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
    assert [article.title for article in found] == ["", "A", "B"]
    joined = "".join(article.text for article in found)
    assert joined == "".join(line if line.strip() else "\n" for line in lines)


def test_rows_and_lines_give_the_same_articles():
    rows = ["", " = A = \n", "", " a \n", "", " = B = \n", "", " b \n"]  # as datasets has them
    lines = [" \n", " = A = \n", " \n", " a \n", " \n", " = B = \n", " \n", " b \n"]  # as the files have them
    assert list(articles(rows)) == list(articles(lines))
    assert [article.title for article in articles(rows)] == ["A", "B"]


def test_the_first_line_that_is_not_blank_tells():
    assert starts_with_title(["\n", " ", " = A = \n", "x"])
    assert not starts_with_title(["x = 1\n", " = A = \n"])
    assert not starts_with_title([])
