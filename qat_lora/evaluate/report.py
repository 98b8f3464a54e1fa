"""The report card of an evaluation: its schema as JSON, and the same tables for the terminal, as Markdown and as HTML.

What a reader must know to trust a number (protocol, tokens, overlap with the training cache) is above the tables and
not in a footnote, since numbers travel and footnotes do not.

Pictures have a panel for each question, a model in the same colour in all, the teacher in grey. Bars lie, so that names
of any length can be read; error bars are the bootstrap's 95 %. The HTML page needs no other file, for whoever is sent
it: pictures inlined, no script. It reads on a telephone: tables scroll in their own boxes, text of the models wraps,
samples stand side by side where there is room. Labels of its picture of size and KL, an SVG, keep their size.
"""

import base64
import html
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import yaml

from qat_lora.cache.tools import overlap
from qat_lora.files.finite import json_text
from qat_lora.files.folders import write_text
from qat_lora.files.pictures import COLOURS, FAINT, INK, drawn_to

SCHEMA = "qat-lora eval 1"
"""Of `report.json`. Keys: `schema`; `setup` (teacher, protocol, length, stride, dtype, device, resamples); `texts` (by
name: rows, tokens, source); `models` (by name: ppl, nll, kl, top1, tokens, accuracy, ece, bits_per_weight, and
`interval` with the 95 % limits of each figure); `calibration` (by model: tokens, confidence and accuracy of 15 bins);
`pairs` (differences between students, paired); `domains` (by text, by model: like `models`); and, null where not asked
for, `generation`, `overlap`, `tasks`. `damage` by student: percentiles of `kl` and of `delta_p`, with its mean and rms;
`changed_top1`; `documents` (count, percentiles of their mean KL, the ten worst); the ten `worst_tokens` (text before
it, token, both models' top-1 tokens). Keys may be added; a change of meaning changes the number."""

FEW_ROWS = 20  # below this, a bootstrap has too little to draw from
COLUMNS = {2: 2, 4: 2}  # panels side by side, by how many there are; else 3
LEAST_TOKENS = 20  # of a calibration bin that is drawn
Panel = Callable[[Any], None]  # draws on an axis of matplotlib
WIDTH, HEIGHT, LEFT, FLOOR = 360, 240, 44, 205  # of the picture; where its axes are


@cache
def wording() -> dict[str, Any]:
    """Return what `report.yaml` holds: the columns of each table, the protocols in words, the legend."""
    return dict(yaml.safe_load(Path(__file__).with_name("report.yaml").read_text(encoding="utf-8")))


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
    found = ((task, metric) for task, metrics in next(iter(tasks.values())).items() for metric in metrics)
    named = [(task, metric) for task, metric in found if not metric.endswith("_stderr")]
    body = [[task, metric, *(f"{of[task][metric]:.4f}" for of in tasks.values())] for task, metric in named]
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


def html_report(report: Mapping[str, Any], title: str, picture: Path) -> str:
    """Return a report (`report.SCHEMA`), with `samples` by model if it has them, and a PNG if there is one, as HTML."""
    parts = ["<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>"]
    style = Path(__file__).with_name("page.css").read_text(encoding="utf-8")
    parts += [_tag("title", [title]), f"<style>{style}</style>", _tag("h1", [title]), _sizes(report["models"])]
    parts += [_tag("h2", [name]) + _table(rows, "wide") for name, rows in tables(report).items()]
    if samples := report.get("samples"):
        columns = (f"<div>{_tag('h3', [name])}{_tag('pre', texts)}</div>" for name, texts in samples.items())
        parts += ["<h2>The same prompts, continued</h2><div class=side>", *columns, "</div>"]
    parts += [_tag("h2", [name]) + _table(rows, "text") for name, rows in worst_tokens(report).items()]
    if picture.is_file():
        data = base64.b64encode(picture.read_bytes()).decode("ascii")
        parts.append(f"<h2>Pictures</h2><div class=wide><img alt='' src='data:image/png;base64,{data}'></div>")
    return "\n".join([*parts, _tag("p", [*notes(report), wording()["legend"]])]) + "\n"


def _tag(name: str, texts: Sequence[str]) -> str:
    return "".join(f"<{name}>{html.escape(text)}</{name.split()[0]}>" for text in texts)


def _table(rows: Sequence[Sequence[str]], kind: str) -> str:
    lines = [_tag("th", rows[0]), *(_tag("td", row) for row in rows[1:])]
    return f"<div class={kind}><table>{''.join(f'<tr>{line}</tr>' for line in lines)}</table></div>"


def _sizes(models: Mapping[str, Mapping[str, Any]]) -> str:
    """Return KL (in decades) against bits of the whole file as SVG; empty where no student has both."""
    places = {name: (of.get("bits_over_all_weights"), of["kl"]) for name, of in models.items() if name != "teacher"}
    points = {name: (x, math.log10(y)) for name, (x, y) in places.items() if x and y and 0 < y < math.inf}
    if not points:
        return ""
    most, low = 1.4 * max(x for x, _ in points.values()), math.floor(min(y for _, y in points.values()))
    rise = (FLOOR - 20) / max(1, math.ceil(max(y for _, y in points.values())) - low)
    colours, parts = colours_of(models), [f"<svg viewBox='0 0 {WIDTH} {HEIGHT}' font-size=11 fill='{INK}'>"]

    def text(x: float, y: float, shown: str, anchor: str = "start") -> None:
        parts.append(f"<text x='{x:.0f}' y='{y:.0f}' text-anchor={anchor}>{html.escape(shown)}</text>")

    for decade in range(low, low + round((FLOOR - 20) / rise) + 1):
        y = FLOOR - rise * (decade - low)
        parts.append(f"<path d='M{LEFT} {y:.0f}H{WIDTH}' stroke='{FAINT}' stroke-width='.5'/>")
        text(LEFT - 6, y + 4, f"{10.0**decade:g}", "end")
    for bits in range(0, int(most) + 1, max(1, round(most / 6))):
        text(LEFT + (WIDTH - LEFT) * bits / most, FLOOR + 16, str(bits), "middle")
    text(LEFT, 12, "KL to the teacher, nats a token")
    text(WIDTH, HEIGHT - 4, "bits a weight, whole file", "end")
    free = FLOOR + 13.0
    for name, (bits, kl) in sorted(points.items(), key=lambda item: item[1][1]):
        x, y = LEFT + (WIDTH - LEFT) * bits / most, FLOOR - rise * (kl - low)
        parts.append(f"<circle cx='{x:.0f}' cy='{y:.0f}' r='5' fill='{colours[name]}'/>")
        free = min(y, free - 13)  # labels of equal students stand above each other
        side, anchor = (8, "start") if x < WIDTH / 2 else (-8, "end")  # to where there is room
        text(x + side, free + 4, f"{name[:24]} {10**kl:.3g}", anchor)
    return "".join([*parts, "</svg>"])


def colours_of(models: Iterable[str]) -> dict[str, str]:
    """Return the colour of every model: grey for the teacher, for a student by its place among the students."""
    students = (name for name in models if name != "teacher")
    return {"teacher": FAINT, **dict(zip(students, itertools.cycle(COLOURS), strict=False))}


def plot_report(report: Mapping[str, Any], out: Path, *more: Panel) -> None:
    """Draw the panels that a report (`report.SCHEMA`) has data for, and more, as one PNG, which needs matplotlib."""
    models, domains = report["models"], report["domains"]
    students = [name for name in models if name != "teacher"]
    colours = colours_of(models)
    bars = partial(_bars, models=models, colours=colours)
    panels: list[Panel] = [partial(bars, names=list(models), figure="ppl", title="Perplexity")]
    if students:
        kl = partial(bars, names=students, figure="kl", title="KL to the teacher, nats a token")
        top1 = partial(bars, names=students, figure="top1", title="Same likeliest token as the teacher")
        panels = [kl, *panels, top1]
    panels.append(partial(_calibration, bins=report["calibration"], models=models, colours=colours))
    if students and len(domains) > 1:
        by_text = partial(_by_text, texts=domains, names=students, colours=colours)
        panels += [partial(by_text, what=what) for what in ("kl", "ppl")]
    if report["generation"]:
        panels.append(partial(_generation, generation=report["generation"], colours=colours))
    panels += more
    columns = COLUMNS.get(len(panels), 3)
    rows = -(-len(panels) // columns)
    height = max(2.7, 0.36 * len(models) + 1.3)
    with drawn_to(out, rows, columns, size=(4.2 * columns, height * rows)) as (figure, axes):
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
        for axis, draw in itertools.zip_longest(axes.flat, panels):
            draw(axis) if draw else axis.axis("off")


def _finite(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else 0.0  # of a ruined model; its label shows the number


def _limits(axis: Any, y: float, limits: Sequence[float], **form: Any) -> None:
    if limits and all(map(math.isfinite, limits)):
        axis.plot(limits, [y, y], color=INK, **form)


def _label(axis: Any, text: str, x: float, y: float) -> None:
    axis.annotate(text, (x, y), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8.5)


def _names(axis: Any, names: Sequence[str]) -> None:
    axis.set_yticks(range(len(names)), [name if len(name) <= 22 else name[:21] + "…" for name in names])
    axis.set_ylim(max(len(names), 1) - 0.5, -0.5)
    axis.tick_params(axis="y", length=0)


def _bars(
    axis: Any, models: Mapping[str, Any], colours: Mapping[str, str], names: Sequence[str], figure: str, title: str
) -> None:
    percent = figure == "top1"
    axis.set_title(title)
    far = 0.0
    for y, name in enumerate(names):
        value, limits = models[name][figure], models[name].get("interval", {}).get(figure, ())
        axis.barh(y, _finite(value), height=0.62, color=colours[name])
        _limits(axis, y, limits, lw=1.1, marker="|", ms=6, mew=1.1)
        end = max(map(_finite, (value, *limits)))
        _label(axis, format(value, ".1%" if percent else ",.4g"), end, y)
        far = max(far, end)
    _names(axis, names)
    axis.set_xlim(0, (far or 1.0) * 1.24)
    if percent:
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}" if value <= 1 else "")


def _calibration(axis: Any, bins: Mapping[str, Any], models: Mapping[str, Any], colours: Mapping[str, str]) -> None:
    axis.set_title("Calibration of the likeliest token")
    axis.plot([0, 1], [0, 1], color=FAINT, lw=0.9, ls=(0, (4, 3)))
    for name, of in bins.items():
        columns = zip(of["tokens"], of["confidence"], of["accuracy"], strict=True)
        points = [(confidence, right) for tokens, confidence, right in columns if tokens >= LEAST_TOKENS]
        xs, ys = zip(*points, strict=True) if points else ((), ())
        label = f"{name} (ECE {models[name]['ece']:.1%})"
        axis.plot(xs, ys, color=colours[name], marker="o", ms=3.2, lw=1.4, label=label)
    axis.set(xlim=(0, 1), ylim=(0, 1), xlabel="probability given", ylabel="share right")
    axis.legend(loc="upper left", handlelength=1.4)


def _by_text(axis: Any, texts: Mapping[str, Any], names: Sequence[str], colours: Mapping[str, str], what: str) -> None:
    """Draw each student's KL, or its perplexity over the teacher's: texts alone differ far more than models do."""
    axis.set_title("KL by text, nats a token" if what == "kl" else "Perplexity over the teacher's, by text")
    step = 0.8 / len(names)
    for (i, models), (place, name) in itertools.product(enumerate(texts.values()), enumerate(names)):
        y, value = i - 0.4 + step * (place + 0.5), _finite(models[name][what])
        value = value if what == "kl" else value / (_finite(models["teacher"]["ppl"]) or 1.0)
        axis.barh(y, value, height=0.72 / len(names), color=colours[name])
        if what == "kl":
            _limits(axis, y, models[name]["interval"]["kl"], lw=0.9)
    _names(axis, list(texts))
    if what == "kl":
        axis.set_xlim(0, None)
    else:
        axis.axvline(1, color=INK, lw=0.9, ls=(0, (4, 3)))
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:g} ×")


def _generation(axis: Any, generation: Mapping[str, Any], colours: Mapping[str, str]) -> None:
    axis.set_title("Greedy text: repeated 4-grams")
    for y, (name, of) in enumerate(generation.items()):
        axis.barh(y, of["repetition"], height=0.62, color=colours[name])
        _label(axis, f"{of['repetition']:.0%}, {of['termination']:.0%} end", of["repetition"], y)
    _names(axis, list(generation))
    axis.set_xlim(0, 1.4)
    axis.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
