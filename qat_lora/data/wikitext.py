"""WikiText as articles: its lines joined until the next title.

WikiText is distributed as lines, and the Hugging Face copies make every line a row of its own. Taken as documents
those lines are orphans: a model sees sentences without their article, and a shuffle mixes articles. The title
lines ` = Title = ` (subtitles have more equals signs: ` = = History = = `) say where an article begins, which is
all that is needed to put the articles together again.

Source: Merity et al. 2016, "Pointer Sentinel Mixture Models" (the WikiText corpora).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from qat_lora.data.file_rows import ROW_CHARS, too_long

TITLE = re.compile(r"\s*= ([^=](?:.*[^=])?) =\s*")


class Article(NamedTuple):
    """One article: its title ("" for text before the first title) and its text, title line included."""

    title: str
    text: str


def title_of(line: str) -> str | None:
    """Return the title if a line begins an article, else None."""
    match = TITLE.fullmatch(line)
    return match[1].strip() if match else None


def starts_with_title(lines: Iterable[str]) -> bool:
    """Tell whether the first line that is not blank is an article's title."""
    first = next((line for line in lines if line.strip()), "")
    return title_of(first) is not None


def articles(lines: Iterable[str]) -> Iterator[Article]:
    """Join lines to articles; a blank line stays a blank line, blank text before the first title is left out.

    The files mark a blank line by a space and the Hugging Face rows by nothing; both come out as "", so that
    the same corpus gives the same articles from either.

    Raises:
        TextError: an article of more than `ROW_CHARS` characters, as text has that is no WikiText.
    """
    title, body, size = "", list[str](), 0
    for line in lines:
        new_title = title_of(line)
        if new_title is not None:
            if any(body):
                yield Article(title, "\n".join(body) + "\n")
            title, body, size = new_title, [], 0
        content = line.rstrip("\r\n")
        size += len(content) + 1
        if size > ROW_CHARS:
            raise too_long(f"the article {title!r}")
        body.append(content if content.strip() else "")
    if any(body):
        yield Article(title, "\n".join(body) + "\n")
