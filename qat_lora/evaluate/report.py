"""The report card of an evaluation: its schema as JSON, and the same tables for the terminal and as Markdown.

What a reader must know to trust a number (protocol, tokens, overlap with the training cache) is above the tables and
not in a footnote, since numbers travel and footnotes do not.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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

Columns = Sequence[tuple[str, str, str]]  # figure, heading and format of each column
PERPLEXITY, KL, TOP1 = ("ppl", "perplexity", ",.2f"), ("kl", "KL to teacher", ".4f"), ("top1", "same top-1", ".1%")
BITS = ("bits_per_weight", "bits/weight", ".2f")
SIZE, ALL_BITS = ("size_mb", "MB", ",.1f"), ("bits_over_all_weights", "bits, whole file", ".2f")
COLUMNS: Columns = (PERPLEXITY, ("nll", "nll", ".4f"), KL, TOP1, BITS, SIZE, ALL_BITS)
PPL_LIMITS, KL_LIMITS = ("ppl limits", "95 %", ",.2f"), ("kl limits", "95 %", ".4f")
ACCURACY, ECE = ("accuracy", "right", ".1%"), ("ece", "ECE", ".1%")
SCORES: Columns = (PERPLEXITY, PPL_LIMITS, KL, KL_LIMITS, TOP1, ACCURACY, ECE, BITS, SIZE, ALL_BITS)
DOMAINS: Columns = (PERPLEXITY, KL, TOP1, ("tokens", "tokens", ","))
PROTOCOLS = {
    "packed": "documents packed into rows of {length} tokens, attention within documents",
    "sliding": "windows of {length} tokens moved on by {stride}, every token scored once",
    "blocks2048": "blocks of 2,048 tokens across documents, as in the quantisation papers",
}
FEW_ROWS = 20  # below this, a bootstrap has too little to draw from
DAMAGE: Columns = (
    *((name, name + " %" * (name[0] == "9"), ".4f") for name in ("median", "90", "99", "99.9", "largest")),
    *(("changed_top1", "changed top-1", ".2%"), ("mean", "mean Δp", "+.3%"), ("rms", "RMS Δp", ".3%")),
)
DISTINCT = ("distinct_1", "distinct tokens", ".1%"), ("distinct_2", "distinct pairs", ".1%")
ENDS = ("termination", "ended", ".1%"), ("tokens", "mean tokens", ".0f")
GENERATION: Columns = (("repetition", "repeated 4-grams", ".1%"), *DISTINCT, *ENDS)
LEGEND = (
    "KL to teacher: mean KL(teacher, model) over the full vocabulary, nats a token; 0 is the teacher itself. "
    "Same top-1: positions where both have the same likeliest token. "
    "Right: positions where that token is the text's. "
    "ECE: how far the likeliest token's probability is from how often it is right. "
    "Δp: the student's probability of the text's token less the teacher's. "
    "Bits a weight: of the quantised layers, adapter included; MB and bits of the whole file: embedding and norms, too."
)


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


def score_rows(models: Mapping[str, Mapping[str, Any]], columns: Columns = SCORES) -> list[list[str]]:
    """Return header and rows of text cells, one row a model; the teacher is not compared with itself."""
    flat = {}
    for name, of in models.items():
        flat[name] = {**of, **{f"{figure} limits": limits for figure, limits in of["interval"].items()}}
        if name == "teacher":
            flat[name] |= dict.fromkeys(("kl", "kl limits", "top1"))
    return table_rows(flat, columns)


def pair_rows(pairs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """Return header and rows of text cells on the differences between students."""

    def cell(of: Mapping[str, Any]) -> str:
        low, high = of["interval"]
        return f"{of['difference']:+.4f} ({low:+.4f} to {high:+.4f})" + ("" if of["clear"] else ", not clear")

    body = [[f"{p['second']} less {p['first']}", cell(p["kl"]), cell(p["nll"])] for p in pairs]
    return [["students", "KL", "nll"], *body]


def domain_rows(domains: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return header and rows of text cells: a row for each text and model."""
    tables = {text: score_rows(models, DOMAINS) for text, models in domains.items()}
    header = next(iter(tables.values()))[0]
    return [["text", *header], *([text, *row] for text, rows in tables.items() for row in rows[1:])]


def damage_rows(damage: Mapping[str, Mapping[str, Any]]) -> list[list[str]]:
    """Return header and rows of text cells: a row for each student's tokens, and one for its documents if there are."""
    rows = {}
    for name, of in damage.items():
        rows[name] = of["delta_p"] | of["kl"] | {"changed_top1": of["changed_top1"]}
        if of["documents"]["kl"]:
            rows[f"{name}: means of {of['documents']['count']:,} documents"] = of["documents"]["kl"]
    return table_rows(rows, DAMAGE)


def worst_tokens(report: Mapping[str, Any]) -> dict[str, str]:
    """Return tables of students' worst tokens by heading, {} for an earlier version's; text as Python writes it."""

    def row(of: Mapping[str, Any]) -> list[str]:
        said = (f"{of[model]!r} {of[f'{model}_p']:.0%}" for model in ("teacher", "student"))
        return [f"{of['kl']:.2f}", repr(of["before"])[1:-1][-40:], repr(of["token"]), *said]

    header = ["KL", "after", "the text", "teacher", "student"]
    rows = {name: [header, *map(row, of["worst_tokens"])] for name, of in report.get("damage", {}).items()}
    return {f"Worst tokens of {name}": text_table(of) for name, of in rows.items()}


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
    lines = [
        f"Text: {texts}.",
        f"Protocol: {setup['protocol']} ({PROTOCOLS[setup['protocol']].format(**setup)}). {setup['dtype']} on "
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
        found["Greedy generation"] = table_rows(report["generation"], GENERATION)
    if report["tasks"]:
        found["Tasks (lm-eval harness)"] = task_rows(report["tasks"])
    return found


def terminal_report(report: Mapping[str, Any]) -> str:
    """Return the report for the terminal, where the end is what is read: tables, then notes."""
    shown = worst_tokens(report) | {title: text_table(rows) for title, rows in tables(report).items()}
    return "\n\n".join([*(f"{title}\n{text}" for title, text in shown.items()), "\n".join(notes(report))])


def markdown_report(report: Mapping[str, Any], picture: str | None) -> str:
    """Return the report as Markdown; `picture` is the file name of its plots."""
    parts = ["# Evaluation", "\n".join(f"* {line}" for line in notes(report))]
    if picture:
        parts.append(f"![scores with intervals, calibration and texts]({picture})")
    parts += [f"## {title}\n\n{markdown_table(rows)}" for title, rows in tables(report).items()]
    parts += [f"## {title}\n\n```text\n{text}\n```" for title, text in worst_tokens(report).items()]
    return "\n\n".join([*parts, LEGEND]) + "\n"
