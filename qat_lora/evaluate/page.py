"""The report as one HTML page that needs no other file, for whoever is sent it: pictures inlined, no script.

It reads on a telephone: tables scroll in their own boxes, text of the models wraps, samples stand side by side where
there is room. The picture of size and KL is SVG, so that its labels keep their size when the page narrows.
"""

import base64
import html
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qat_lora.evaluate.plots import colours_of
from qat_lora.evaluate.report import notes, tables, wording, worst_tokens
from qat_lora.files.pictures import FAINT, INK

WIDTH, HEIGHT, LEFT, FLOOR = 360, 240, 44, 205  # of the picture; where its axes are


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
        text(x + 8, free + 4, f"{name[:24]} {10**kl:.3g}")
    return "".join([*parts, "</svg>"])
