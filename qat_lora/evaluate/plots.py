"""The pictures of an evaluation: a panel for each question, a model in the same colour in all, the teacher in grey.

Bars lie, so that names of any length can be read; error bars are the bootstrap's 95 %.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from qat_lora.files.pictures import COLOURS, FAINT, INK, drawn_to

COLUMNS = {2: 2, 4: 2}  # panels side by side, by how many there are; else 3
LEAST_TOKENS = 20  # of a calibration bin that is drawn
Panel = Callable[[Any], None]  # draws on an axis of matplotlib


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
        same = partial(bars, names=students, figure="top1", title="Same likeliest token as the teacher")
        panels = [partial(bars, names=students, figure="kl", title="KL to the teacher, nats a token"), *panels, same]
    panels.append(partial(_calibration, bins=report["calibration"], models=models, colours=colours))
    if students and len(domains) > 1:
        by_text = partial(_by_text, domains=domains, names=students, colours=colours)
        panels += [partial(by_text, figure=figure) for figure in ("kl", "ppl")]
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


def _by_text(
    axis: Any, domains: Mapping[str, Any], names: Sequence[str], colours: Mapping[str, str], figure: str
) -> None:
    """Draw each student's KL, or its perplexity over the teacher's: texts alone differ far more than models do."""
    axis.set_title("KL by text, nats a token" if figure == "kl" else "Perplexity over the teacher's, by text")
    step = 0.8 / len(names)
    for (i, models), (place, name) in itertools.product(enumerate(domains.values()), enumerate(names)):
        y, value = i - 0.4 + step * (place + 0.5), _finite(models[name][figure])
        value = value if figure == "kl" else value / (_finite(models["teacher"]["ppl"]) or 1.0)
        axis.barh(y, value, height=0.72 / len(names), color=colours[name])
        if figure == "kl":
            _limits(axis, y, models[name]["interval"]["kl"], lw=0.9)
    _names(axis, list(domains))
    if figure == "kl":
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
