"""The report card of an evaluation: its one schema as JSON, Markdown, and a page that stands alone.

The page holds its picture inside, so it can be sent as one file; it loads nothing and runs no script. What a reader
must know to trust a number (protocol, tokens, overlap with the training cache) stands above the table and not in a
footnote, since numbers travel and footnotes do not.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from typing import Any

from qat_lora.cache.tools import overlap
from qat_lora.evaluate import break_even
from qat_lora.evaluate.report import markdown_table

SCHEMA = "qat-lora eval 1"
"""Of `report.json`. Keys: `schema`; `setup` (teacher, protocol, length, stride, dtype, device, resamples); `texts` (by
name: rows, tokens, source); `models` (by name: ppl, nll, kl, top1, tokens, accuracy, ece, bits_per_weight, and
`interval` with the 95 % limits of each figure); `calibration` (by model: tokens, confidence and accuracy of 15 bins);
`pairs` (differences between students, paired); `domains` (by text, by model: like `models`); and, null where not asked
for, `generation`, `overlap`, `break_even`, `tasks`. Keys may be added; a change of meaning changes the number."""

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
    if report["break_even"]:
        parts += ["## Cache or live teacher", "\n".join(f"* {x}" for x in break_even.summary(report["break_even"]))]
    return "\n\n".join(parts) + "\n"


def page(report: Mapping[str, Any], png: bytes | None) -> str:
    """Return the report as one HTML file, its picture inside."""
    body = ["<h1>Evaluation</h1>", f'<p class="sub">teacher: {html.escape(str(report["setup"]["teacher"]))}</p>']
    for line in notes(report):
        warns = line.startswith("Warning")
        body.append(f'<p class="{"warn" if warns else "note"}">{html.escape(line)}</p>')
    head, *others = tables(report)
    body.append(_table(head[1]))
    if png:
        body.append(f'<img alt="scores" src="data:image/png;base64,{base64.b64encode(png).decode()}">')
    for heading, rows in others:
        body += [f"<h2>{html.escape(heading)}</h2>", _table(rows)]
    if report["break_even"]:
        lines = "".join(f"<li>{html.escape(x)}</li>" for x in break_even.summary(report["break_even"]))
        body += ["<h2>Cache or live teacher</h2>", f"<ul>{lines}</ul>"]
    body.append(f"<footer>{html.escape(LEGEND)}</footer>")
    return _PAGE.format(style=_STYLE, body="\n".join(body))


LEGEND = (
    "KL to teacher: mean KL(teacher, model) over the full vocabulary, nats a token; 0 is the teacher itself. "
    "Same top-1: positions where both have the same likeliest token. "
    "Right: positions where that token is the text's. "
    "ECE: how far the likeliest token's probability is from how often it is right. "
    "Bits a weight: of the quantised layers, adapter included."
)
_PAGE = (
    '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
    "<title>Evaluation</title>\n<style>{style}</style></head>\n<body>\n{body}\n</body></html>\n"
)
_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1f2933; max-width: 1080px; margin: 36px auto; padding: 0 20px }
h1 { font-size: 26px; margin: 0 } h2 { font-size: 17px; margin: 32px 0 8px }
.sub { color: #616e7c; margin: 2px 0 18px } .note { margin: 4px 0; color: #3e4c59 }
.warn { background: #fff3c4; border-left: 4px solid #cb912f; padding: 8px 12px; margin: 10px 0 }
@page { size: A3; margin: 10mm }
table { border-collapse: collapse; width: 100%; margin: 14px 0; font-variant-numeric: tabular-nums }
th, td { padding: 6px 10px; text-align: right; white-space: nowrap; border-bottom: 1px solid #e4e7eb }
th { font-weight: 600; color: #52606d; border-bottom: 2px solid #9aa5b1 }
th:first-child, td:first-child { text-align: left }
img { width: 100%; margin: 14px 0 } ul { padding-left: 20px }
footer { color: #7b8794; font-size: 13px; margin-top: 28px; border-top: 1px solid #e4e7eb; padding-top: 12px }
"""


def _table(rows: Sequence[Sequence[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in rows[0])
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows[1:])
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
