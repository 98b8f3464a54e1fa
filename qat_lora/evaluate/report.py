"""Scores as tables of text cells, for the terminal and for Markdown, and as JSON."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qat_lora.files.finite import json_text
from qat_lora.files.folders import write_text

Columns = Sequence[tuple[str, str, str]]  # figure, heading and format of each column
PERPLEXITY, KL, TOP1 = ("ppl", "perplexity", ",.2f"), ("kl", "KL to teacher", ".4f"), ("top1", "same top-1", ".1%")
BITS = ("bits_per_weight", "bits/weight", ".2f")
SIZE, ALL_BITS = ("size_mb", "MB", ",.1f"), ("bits_over_all_weights", "bits, whole file", ".2f")
COLUMNS: Columns = (PERPLEXITY, ("nll", "nll", ".4f"), KL, TOP1, BITS, SIZE, ALL_BITS)


def table_rows(scores: Mapping[str, Mapping[str, Any]], columns: Columns = COLUMNS) -> list[list[str]]:
    """Return header and rows of text cells, one row a model; a missing figure is `-`, a list of limits a range."""

    def cell(value: Any, form: str) -> str:
        if isinstance(value, list):
            return "–".join(format(limit, form) for limit in value)
        return "-" if value is None else format(value, form)

    body = [[name, *(cell(of.get(figure), form) for figure, _, form in columns)] for name, of in scores.items()]
    return [["model", *(heading for _, heading, _ in columns)], *body]


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as aligned text, names left and numbers right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
        return "  ".join(cells).rstrip()

    return "\n".join([line(rows[0]), "  ".join("-" * w for w in widths), *map(line, rows[1:])])


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a Markdown table."""
    header, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([header, "|---" + "|---:" * (len(rows[0]) - 1) + "|", *body])


def save_json(data: Any, path: Path) -> None:
    """Write JSON with two spaces of indent; ModelError names a number in it that is NaN or infinite."""
    write_text(path, json_text(data, path, indent=2) + "\n")
