"""The report card of an evaluation: its schema as JSON, and the same tables for the terminal and as Markdown.

What a reader must know to trust a number (protocol, tokens, overlap with the training cache) is above the tables and
not in a footnote, since numbers travel and footnotes do not.
"""

import functools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from qat_lora.cache.tools import overlap
from qat_lora.files.finite import json_text
from qat_lora.files.folders import write_text

SCHEMA = "qat-lora eval 1"
"""Of `report.json`. Keys: `schema`; `setup` (teacher, protocol, length, stride, dtype, device, resamples); `texts` (by
name: rows, tokens, source); `models` (by name: ppl, nll, kl, top1, tokens, accuracy, ece, bits_per_weight, and
`interval` with the 95 % limits of each figure); `calibration` (by model: tokens, confidence and accuracy of 15 bins);
`pairs` (differences between students, paired); `domains` (by text, by model: like `models`); and, null where not asked
for, `generation`, `overlap`, `tasks`. `damage` by student: percentiles of `kl` and of `delta_p`, with its mean and rms;
`changed_top1`; `documents` (count, percentiles of their mean KL, the ten worst); the ten `worst_tokens` (text before
it, token, both models' top-1 tokens). Keys may be added; a change of meaning changes the number."""

FEW_ROWS = 20  # below this, a bootstrap has too little to draw from


@functools.cache
def wording() -> dict[str, Any]:
    """Return what `report.yaml` holds: the columns of each table, the protocols in words, the legend."""
    words: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("report.yaml").read_text(encoding="utf-8"))
    return words


def table_rows(scores: Mapping[str, Mapping[str, Any]], table: str = "models") -> list[list[str]]:
    """Return header and rows of text cells, one row a model; a missing figure is `-`, a list of limits a range."""
    columns = wording()[table]

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


def score_rows(models: Mapping[str, Mapping[str, Any]], table: str = "scores") -> list[list[str]]:
    """Return header and rows of text cells, one row a model; the teacher is not compared with itself."""
    flat = {}
    for name, of in models.items():
        flat[name] = {**of, **{f"{figure} limits": limits for figure, limits in of["interval"].items()}}
        if name == "teacher":
            flat[name] |= dict.fromkeys(("kl", "kl limits", "top1"))
    return table_rows(flat, table)


def pair_rows(pairs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return header and rows of text cells on the differences between students."""

    def cell(of: Mapping[str, Any]) -> str:
        low, high = of["interval"]
        return f"{of['difference']:+.4f} ({low:+.4f} to {high:+.4f})" + ("" if of["clear"] else ", not clear")

    body = [[f"{p['second']} less {p['first']}", cell(p["kl"]), cell(p["nll"])] for p in pairs]
    return [["students", "KL", "nll"], *body]


def domain_rows(domains: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return header and rows of text cells: a row for each text and model."""
    tables = {text: score_rows(models, "domains") for text, models in domains.items()}
    header = next(iter(tables.values()))[0]
    return [["text", *header], *([text, *row] for text, rows in tables.items() for row in rows[1:])]


def damage_rows(damage: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return header and rows of text cells: a row for each student's tokens, and one for its documents if there are."""
    rows = {}
    for name, of in damage.items():
        rows[name] = of["delta_p"] | of["kl"] | {"changed_top1": of["changed_top1"]}
        if of["documents"]["kl"]:
            rows[f"{name}: means of {of['documents']['count']:,} documents"] = of["documents"]["kl"]
    return table_rows(rows, "damage")


def worst_tokens(report: Mapping[str, Any]) -> dict[str, list[list[str]]]:
    """Return rows of students' worst tokens by heading, {} for an earlier version's; text as Python writes it."""

    def row(of: Mapping[str, Any]) -> list[str]:
        said = (f"{of[model]!r} {of[f'{model}_p']:.0%}" for model in ("teacher", "student"))
        return [f"{of['kl']:.2f}", repr(of["before"])[1:-1][-40:], repr(of["token"]), *said]

    header = ["KL", "after", "the text", "teacher", "student"]
    damage = report.get("damage", {})
    return {f"Worst tokens of {name}": [header, *map(row, of["worst_tokens"])] for name, of in damage.items()}


def task_rows(tasks: Mapping[str, Mapping[str, Mapping[str, float]]]) -> list[list[str]]:
    """Return header and rows of text cells: a row for each task and metric, a column for each model."""
    body = [
        [task, metric, *(f"{of[task][metric]:.4f}" for of in tasks.values())]
        for task, metrics in next(iter(tasks.values())).items()
        for metric in metrics
        if not metric.endswith("_stderr")
    ]
    return [["task", "metric", *tasks], *body]


def notes(report: Mapping[str, Any]) -> list[str]:
    """Return the lines that a reader must know before the tables."""
    setup = report["setup"]
    texts = ", ".join(f"{name} ({of['rows']:,} rows, {of['tokens']:,} tokens)" for name, of in report["texts"].items())
    protocol = wording()["protocols"][setup["protocol"]].format(**setup)
    lines = [
        f"Text: {texts}.",
        f"Protocol: {setup['protocol']} ({protocol}). {setup['dtype']} on "
        f"{setup['device']}. Intervals: 95 %, {setup['resamples']:,} bootstrap draws of rows, the same for all models.",
    ]
    rows = sum(of["rows"] for of in report["texts"].values())
    if rows < FEW_ROWS:
        lines.append(f"Warning: {rows} rows are few: the intervals come out too narrow; give more --eval-rows or text.")
    seen = overlap.summary(report["overlap"]) if report["overlap"] else ""
    not_seen = "Overlap with the training cache was not looked at (--kd-cache-dir)."
    return [*lines, f"{seen[0].upper()}{seen[1:]}." if seen else not_seen]


def tables(report: Mapping[str, Any]) -> dict[str, list[list[str]]]:
    """Return the tables that a report has data for, by heading."""
    found = {"Scores": score_rows(report["models"])}
    if damage := report.get("damage"):
        found["KL of single tokens, and of documents"] = damage_rows(damage)
    if report["pairs"]:
        found["Differences between students, paired"] = pair_rows(report["pairs"])
    if len(report["domains"]) > 1:
        found["By text"] = domain_rows(report["domains"])
    if report["generation"]:
        found["Greedy generation"] = table_rows(report["generation"], "generation")
    if report["tasks"]:
        found["Tasks (lm-eval harness)"] = task_rows(report["tasks"])
    return found


def terminal_report(report: Mapping[str, Any]) -> str:
    """Return the report for the terminal, where the end is what is read: tables, then notes."""
    shown = worst_tokens(report) | tables(report)
    return "\n\n".join([*(f"{title}\n{text_table(rows)}" for title, rows in shown.items()), "\n".join(notes(report))])


def markdown_report(report: Mapping[str, Any], picture: str | None) -> str:
    """Return the report as Markdown; `picture` is the file name of its plots."""
    parts = ["# Evaluation", "\n".join(f"* {line}" for line in notes(report))]
    if picture:
        parts.append(f"![scores with intervals, calibration and texts]({picture})")
    parts += [f"## {title}\n\n{markdown_table(rows)}" for title, rows in tables(report).items()]
    parts += [f"## {title}\n\n```text\n{text_table(rows)}\n```" for title, rows in worst_tokens(report).items()]
    return "\n\n".join([*parts, wording()["legend"]]) + "\n"
