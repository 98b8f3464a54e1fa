"""Pictures have one palette: no other file of ours names a colour, and the style ends with the picture."""

import re
from pathlib import Path

import pytest

from qat_lora.files.pictures import COLOURS, FAINT, STYLE, drawn_to

ROOT = Path(__file__).resolve().parents[2]
OTHERS = re.compile(r"""["'](#[0-9a-fA-F]{6}|C[0-9][-o:]*|tab:\w+)["']|colou?r=["']|\bplt\.(plot|hist|bar)\(""")


def test_colours_are_named_in_one_place():
    files = [file for folder in ("qat_lora", "benchmarks") for file in sorted((ROOT / folder).rglob("*.py"))]
    found = {file.relative_to(ROOT).as_posix() for file in files if OTHERS.search(file.read_text(encoding="utf-8"))}
    assert found == {"qat_lora/files/pictures.py"}


def test_a_picture_is_whole_or_not_there_and_its_style_ends_with_it(tmp_path):
    pyplot = pytest.importorskip("matplotlib.pyplot")
    before = {name: pyplot.rcParams[name] for name in STYLE}
    with drawn_to(tmp_path / "a.png", size=(2, 1)) as (_, axes):
        (line,) = axes[0, 0].plot([0, 1])
        assert line.get_color() == COLOURS[0] and pyplot.rcParams["axes.edgecolor"] == FAINT
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG" and {n: pyplot.rcParams[n] for n in STYLE} == before
    with pytest.raises(ZeroDivisionError), drawn_to(tmp_path / "b.png", size=(2, 1)) as (_, axes):
        axes[0, 0].plot([0, 1 / 0])
    assert [file.name for file in tmp_path.iterdir()] == ["a.png"] and not pyplot.get_fignums()
