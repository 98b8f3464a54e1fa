"""The report of a comparison: a table for the terminal, Markdown, JSON, and one picture."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qat_lora.evaluate.plots import colours_of
from qat_lora.extras import pyplot
from qat_lora.files.finite import json_text
from qat_lora.files.folders import atomic_file, write_text

COLUMNS: tuple[tuple[str, str, str], ...] = (
    ("ppl", "perplexity", ",.2f"),
    ("nll", "nll", ".4f"),
    ("kl", "KL to teacher", ".4f"),
    ("top1", "same top-1", ".1%"),
    ("bits_per_weight", "bits/weight", ".2f"),
)


def table_rows(scores: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return header and rows of text cells, one row a model."""
    rows = [["model", *(title for _, title, _ in COLUMNS)]]
    for name, values in scores.items():
        cells = [format(values[key], form) if values.get(key) is not None else "-" for key, _, form in COLUMNS]
        rows.append([name, *cells])
    return rows


def text_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as aligned text, names left and numbers right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]

    def line(row: Sequence[str]) -> str:
        cells = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:], widths[1:], strict=True))]
        return "  ".join(cells).rstrip()

    return "\n".join([line(rows[0]), "  ".join("-" * w for w in widths), *map(line, rows[1:])])


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as a Markdown table."""
    head, *body = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([head, "|---" + "|---:" * (len(rows[0]) - 1) + "|", *body])


def save_json(data: Any, path: Path) -> None:
    """Write JSON with two spaces of indent.

    Raises:
        ModelError: a number in it is NaN or infinite; the message says which.
    """
    write_text(path, json_text(data, path, indent=2) + "\n")


def plot_scores(
    scores: Mapping[str, Mapping[str, Any]], out: Path, draw_training: Callable[[Any], None] | None = None
) -> None:
    """Draw perplexity and KL of the models, and beside them the training curve where there is one.

    Args:
        scores: by model name; `ppl` and, but for the teacher, `kl`.
        out: the PNG to write.
        draw_training: draws the training curve on an axis.
    """
    plt = pyplot()
    panels = 3 if draw_training else 2
    figure, axes = plt.subplots(1, panels, figsize=(4.6 * panels, 4.2), layout="constrained")
    names, colours = list(scores), colours_of(scores)
    students = [name for name in names if scores[name].get("kl")]
    for axis, key, who, title in (
        (axes[0], "ppl", names, "held-out perplexity (lower is better)"),
        (axes[1], "kl", students, "held-out KL to the teacher, nats per token"),
    ):
        values = [scores[name][key] for name in who]
        heights = [value if math.isfinite(value) else 0.0 for value in values]  # a ruined model: its label says so
        bars = axis.bar(who, heights, color=[colours[name] for name in who])
        axis.bar_label(bars, [f"{value:,.3g}" for value in values])
        axis.set_title(title, fontsize=10)
        axis.tick_params(axis="x", rotation=15)
        axis.margins(y=0.12)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].axhline(scores[names[0]]["ppl"], color="grey", lw=0.8, ls="--")
    if draw_training:
        draw_training(axes[2])
    with atomic_file(out) as draft:
        figure.savefig(draft, dpi=120)
    plt.close(figure)
