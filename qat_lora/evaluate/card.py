"""The report card of an evaluation: its one schema as JSON, Markdown, and a page that stands alone.

The page holds its picture inside, so it can be sent as one file; it loads nothing and runs no script. What a reader
must know to trust a number (protocol, tokens, overlap with the training cache) stands above the table and not in a
footnote, since numbers travel and footnotes do not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from qat_lora.cache.tools import overlap
from qat_lora.evaluate.report import markdown_table

SCHEMA = "qat-lora eval 1"
"""Of `report.json`. Keys: `schema`; `setup` (teacher, protocol, length, stride, dtype, device, resamples); `texts` (by
name: rows, tokens, source); `models` (by name: ppl, nll, kl, top1, tokens, accuracy, ece, bits_per_weight, and
`interval` with the 95 % limits of each figure); `calibration` (by model: tokens, confidence and accuracy of 15 bins);
`pairs` (differences between students, paired); `domains` (by text, by model: like `models`); and, null where not asked
for, `generation`, `overlap`, `tasks`. Keys may be added; a change of meaning changes the number."""

PROTOCOLS = {
    "packed": "documents packed into rows of {length} tokens, attention within documents",
    "sliding": "windows of {length} tokens moved on by {stride}, every token scored once",
    "blocks2048": "blocks of 2,048 tokens across documents, as in the quantisation papers",
}
FEW_ROWS = 20
"""Below this, a bootstrap has too little to draw from."""
HEADER = ("model", "perplexity", "95 %", "KL to teacher", "95 %", "same top-1", "right", "ECE", "bits/weight")


def score_rows(models: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return header and rows of text cells, one row a model, with the limits of perplexity and KL."""
    rows = [list(HEADER)]
    for name, of in models.items():
        limits = of["interval"]
        bits = of.get("bits_per_weight")
        known = name != "teacher"
        rows.append(
            [
                name,
                f"{of['ppl']:,.2f}",
                f"{limits['ppl'][0]:,.2f}–{limits['ppl'][1]:,.2f}",
                f"{of['kl']:.4f}" if known else "-",
                f"{limits['kl'][0]:.4f}–{limits['kl'][1]:.4f}" if known else "-",
                f"{of['top1']:.1%}" if known else "-",
                f"{of['accuracy']:.1%}",
                f"{of['ece']:.1%}",
                "-" if bits is None else f"{bits:.2f}",
            ]
        )
    return rows


def pair_rows(pairs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return header and rows of text cells on the differences between students."""

    def cell(of: Mapping[str, Any]) -> str:
        low, high = of["interval"]
        return f"{of['difference']:+.4f} ({low:+.4f} to {high:+.4f})" + ("" if of["clear"] else ", not clear")

    body = [[f"{p['second']} less {p['first']}", cell(p["kl"]), cell(p["nll"])] for p in pairs]
    return [["students", "KL", "nll"], *body]


def domain_rows(domains: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return header and rows of text cells: a row a text and model."""
    rows = [["text", "model", "perplexity", "KL to teacher", "same top-1", "tokens"]]
    for text, models in domains.items():
        for name, of in models.items():
            own = [f"{of['kl']:.4f}", f"{of['top1']:.1%}"] if name != "teacher" else ["-", "-"]
            rows.append([text, name, f"{of['ppl']:,.2f}", *own, f"{of['tokens']:,}"])
    return rows


def generation_rows(generation: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    """Return header and rows of text cells on greedy continuations."""
    rows = [["model", "repeated 4-grams", "distinct tokens", "distinct pairs", "ended", "mean tokens"]]
    for name, of in generation.items():
        shares = [f"{of[key]:.1%}" for key in ("repetition", "distinct_1", "distinct_2", "termination")]
        rows.append([name, *shares, f"{of['tokens']:.0f}"])
    return rows


def task_rows(tasks: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[list[str]]:
    """Return header and rows of text cells: a row a task and metric, a column a model."""
    names = list(tasks)
    rows = [["task", "metric", *names]]
    for task, metrics in tasks[names[0]].items():
        for metric in metrics:
            if not metric.endswith("_stderr"):
                rows.append([task, metric, *(f"{tasks[name][task][metric]:.4f}" for name in names)])
    return rows


def notes(report: Mapping[str, Any]) -> list[str]:
    """Return what a reader must know before the table, a line each."""
    setup = report["setup"]
    texts = ", ".join(f"{name} ({of['rows']:,} rows, {of['tokens']:,} tokens)" for name, of in report["texts"].items())
    lines = [
        f"Text: {texts}.",
        f"Protocol: {setup['protocol']} ({PROTOCOLS[setup['protocol']].format(**setup)}). {setup['dtype']} on "
        f"{setup['device']}. Intervals: 95 %, {setup['resamples']:,} bootstrap draws of rows, the same for all models.",
    ]
    rows = sum(of["rows"] for of in report["texts"].values())
    if rows < FEW_ROWS:
        lines.append(f"Warning: {rows} rows are few: the intervals come out too narrow; give more --eval-rows or text.")
    if report["overlap"]:
        line = overlap.summary(report["overlap"])
        lines.append(line[0].upper() + line[1:] + ".")
    else:
        lines.append("Overlap with the training cache was not looked at (--kd-cache-dir).")
    return lines


def tables(report: Mapping[str, Any]) -> list[tuple[str, list[list[str]]]]:
    """Return the tables that a report has data for, by heading."""
    found = [("Scores", score_rows(report["models"]))]
    if report["pairs"]:
        found.append(("Differences between students, paired", pair_rows(report["pairs"])))
    if len(report["domains"]) > 1:
        found.append(("By text", domain_rows(report["domains"])))
    if report["generation"]:
        found.append(("Greedy generation", generation_rows(report["generation"])))
    if report["tasks"]:
        found.append(("Tasks (lm-eval harness)", task_rows(report["tasks"])))
    return found


def markdown(report: Mapping[str, Any], picture: str | None) -> str:
    """Return the report as Markdown; `picture` is the file name of its plots."""
    parts = ["# Evaluation", "\n".join(f"* {line}" for line in notes(report))]
    if picture:
        parts.append(f"![scores with intervals, calibration and texts]({picture})")
    for heading, rows in tables(report):
        parts += [f"## {heading}", markdown_table(rows)]
    parts.append(LEGEND)
    return "\n\n".join(parts) + "\n"


LEGEND = (
    "KL to teacher: mean KL(teacher, model) over the full vocabulary, nats a token; 0 is the teacher itself. "
    "Same top-1: positions where both have the same likeliest token. "
    "Right: positions where that token is the text's. "
    "ECE: how far the likeliest token's probability is from how often it is right. "
    "Bits a weight: of the quantised layers, adapter included."
)
