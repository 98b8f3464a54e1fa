"""The pictures of a report card: one panel a question, every model in one colour throughout, the teacher in grey.

Bars lie down, so that names of any length are read without turning the head; error bars are the bootstrap's 95 %.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from qat_lora.extras import pyplot
from qat_lora.files.folders import atomic_file

INK, FAINT = "#1f2933", "#9aa5b1"
COLOURS = ("#0b6e99", "#d9730d", "#448361", "#9065b0", "#c14c8a", "#cb912f", "#337ea9", "#787774")
STYLE = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "legend.fontsize": 8,
}
COLUMNS = {2: 2, 4: 2}  # panels side by side, by how many there are; else 3


def colours_of(models: Iterable[str]) -> dict[str, str]:
    """Return the colour of every model, by its place among the students; that of the teacher is grey."""
    students = (name for name in models if name != "teacher")
    return {"teacher": FAINT, **dict(zip(students, itertools.cycle(COLOURS), strict=False))}


def plot_report(report: Mapping[str, Any], out: Path) -> None:
    """Draw the panels that a report has data for as one PNG.

    Args:
        report: see `card.SCHEMA`.
        out: the PNG.

    Raises:
        MissingExtraError: matplotlib is not installed.
    """
    plt = pyplot()
    models = report["models"]
    students = [name for name in models if name != "teacher"]
    colours = colours_of(models)
    panels: list[Callable[[Any], None]] = [lambda axis: _bars(axis, models, list(models), "ppl", colours, "Perplexity")]
    if students:
        same = "Same likeliest token as the teacher"
        panels = [
            lambda axis: _bars(axis, models, students, "kl", colours, "KL to the teacher, nats a token"),
            *panels,
            lambda axis: _bars(axis, models, students, "top1", colours, same, percent=True),
        ]
    panels.append(lambda axis: _calibration(axis, report["calibration"], models, colours))
    if students and len(report["domains"]) > 1:
        panels.append(lambda axis: _groups(axis, report["domains"], students, colours))
        panels.append(lambda axis: _ratios(axis, report["domains"], students, colours))
    if report["generation"]:
        panels.append(lambda axis: _generation(axis, report["generation"], colours))
    columns = COLUMNS.get(len(panels), 3)
    rows = -(-len(panels) // columns)
    with plt.rc_context(STYLE):
        height = max(2.7, 0.36 * len(models) + 1.3)
        figure, axes = plt.subplots(rows, columns, figsize=(4.2 * columns, height * rows), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.12, h_pad=0.12)
        spare = list(axes.flat)
        for draw in panels:
            draw(spare.pop(0))
        for axis in spare:
            axis.axis("off")
        with atomic_file(out) as draft:
            figure.savefig(draft, dpi=150)
        plt.close(figure)


def _finite(value: float | None) -> float:
    return value if value is not None and math.isfinite(value) else 0.0  # a ruined model: its label says so


def _bars(
    axis: Any,
    models: Mapping[str, Any],
    names: list[str],
    key: str,
    colours: Mapping[str, str],
    title: str,
    percent: bool = False,
) -> None:
    """Draw a bar a model, first on top, with its interval and its value."""
    axis.set_title(title)
    values = [_finite(models[name][key]) for name in names]
    limits = [models[name]["interval"][key] for name in names]
    ends = [max(value, _finite(high)) for value, (_, high) in zip(values, limits, strict=True)]
    far = max(ends, default=0.0) or 1.0
    for y, (name, value, (low, high), end) in enumerate(zip(names, values, limits, ends, strict=True)):
        axis.barh(y, value, height=0.62, color=colours[name])
        if math.isfinite(low) and math.isfinite(high):
            axis.plot([low, high], [y, y], color=INK, lw=1.1, marker="|", ms=6, mew=1.1)
        shown = format(models[name][key], ".1%" if percent else ",.4g")
        axis.annotate(shown, (end, y), xytext=(6, 0), textcoords="offset points", va="center", fontsize=8.5)
    _names(axis, names)
    axis.set_xlim(0, far * 1.24)
    if percent:
        axis.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}" if value <= 1 else "")


def _names(axis: Any, names: list[str]) -> None:
    axis.set_yticks(range(len(names)), [name if len(name) <= 22 else name[:21] + "…" for name in names])
    axis.set_ylim(len(names) - 0.5, -0.5)
    axis.tick_params(axis="y", length=0)


def _calibration(axis: Any, calibration: Mapping[str, Any], models: Mapping[str, Any], colours: Any) -> None:
    """Draw how often the likeliest token is right against its probability; bins under 20 tokens are left out."""
    axis.set_title("Calibration of the likeliest token")
    axis.plot([0, 1], [0, 1], color=FAINT, lw=0.9, ls=(0, (4, 3)))
    for name, bins in calibration.items():
        points = [
            (c, a) for n, c, a in zip(bins["tokens"], bins["confidence"], bins["accuracy"], strict=True) if n >= 20
        ]
        label = f"{name} (ECE {models[name]['ece']:.1%})"
        xs, ys = zip(*points, strict=True) if points else ((), ())
        axis.plot(xs, ys, color=colours[name], marker="o", ms=3.2, lw=1.4, label=label)
    axis.set(xlim=(0, 1), ylim=(0, 1), xlabel="probability given", ylabel="share right")
    axis.legend(loc="upper left", handlelength=1.4)


def _groups(axis: Any, domains: Mapping[str, Any], names: list[str], colours: Mapping[str, str]) -> None:
    """Draw the KL of every text, a bar a student, with intervals."""
    axis.set_title("KL by text, nats a token")
    for name, y, of in _places(domains, names):
        axis.barh(y, _finite(of["kl"]), height=0.72 / len(names), color=colours[name])
        low, high = of["interval"]["kl"]
        if math.isfinite(low) and math.isfinite(high):
            axis.plot([low, high], [y, y], color=INK, lw=0.9)
    _names(axis, list(domains))
    axis.set_xlim(0, None)


def _ratios(axis: Any, domains: Mapping[str, Any], names: list[str], colours: Mapping[str, str]) -> None:
    """Draw how many times the teacher's perplexity each student has; texts alone differ far more than models do."""
    axis.set_title("Perplexity over the teacher's, by text")
    for name, y, of in _places(domains, names):
        teacher = list(domains.values())[round(y)]["teacher"]
        ratio = _finite(of["ppl"]) / (_finite(teacher["ppl"]) or 1.0)
        axis.barh(y, ratio, height=0.72 / len(names), color=colours[name])
    axis.axvline(1, color=INK, lw=0.9, ls=(0, (4, 3)))
    _names(axis, list(domains))
    axis.xaxis.set_major_formatter(lambda value, _: f"{value:g} ×")


def _places(domains: Mapping[str, Any], names: list[str]) -> Iterator[tuple[str, float, Mapping[str, Any]]]:
    """Yield student, height on the axis and figures: a group of bars a text."""
    step = 0.8 / len(names)
    for i, of in enumerate(domains.values()):
        for place, name in enumerate(names):
            yield name, i - 0.4 + step * (place + 0.5), of[name]


def _generation(axis: Any, generation: Mapping[str, Any], colours: Mapping[str, str]) -> None:
    """Draw how much of the greedy continuations repeats, and say how many end."""
    axis.set_title("Greedy text: repeated 4-grams")
    names = list(generation)
    for y, name in enumerate(names):
        share, ended = generation[name]["repetition"], generation[name]["termination"]
        axis.barh(y, share, height=0.62, color=colours[name])
        label = f"{share:.0%}, {ended:.0%} end"
        axis.annotate(label, (share, y), xytext=(5, 0), textcoords="offset points", va="center", fontsize=8.5)
    _names(axis, names)
    axis.set_xlim(0, 1.4)
    axis.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"])
