"""The table of benchmark results, and running a program by name.

`python tests/commands/test_commands_bench.py` renews the table of benchmarks/README.md after a new result.
"""

import json
import re
from pathlib import Path

import pytest

from qat_lora import cli
from qat_lora.commands.repository import load_program
from qat_lora.errors import ConfigError

bench = load_program("table", "bench")
README = Path(__file__).resolve().parents[2] / "benchmarks" / "README.md"
BLOCK = re.compile(r"(?<=<!-- qat-lora bench -->\n).*?(?=<!-- end -->)", re.S)

PROGRAM = '''"""Speed of nothing.

    python benchmarks/nothing.py --row-count 3 \\\\
        --out benchmarks/results/nothing.json
"""
import argparse
import sys

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--row-count", type=int, default=3)
    parser.add_argument("--out")
    sys.exit(parser.parse_args().row_count)
'''

FIGURES = """
- section: Nothing
  figures:
  - {figure: new over old, result: nothing_small, value: runs/k=2/ratio, at_most: 1.5, format: "{:.2f} ×",
     beside: {theirs: runs/k=4/ratio, paper: "2 (published)"}}
  - {figure: the same at least, result: nothing_small, value: runs/k=2/ratio, at_least: 1.5, format: "{:.2f}"}
  - {figure: sound, result: nothing_small, value: sound, at_least: 1, format: "{}"}
  - {figure: gone, result: nothing_small, value: runs/k=9/ratio, format: "{}"}
  - {figure: to come, result: nothing_large, value: x, at_most: 3, format: "{}", beside: {theirs: y}}
"""
COMMAND = "python benchmarks/nothing.py --row-count 3 --out benchmarks/results/nothing.json"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "nothing.py").write_text(PROGRAM)
    (tmp_path / "figures.yaml").write_text(FIGURES)
    result = {"date": "2026-01-02", "machine": "m", "torch": "2.9", "sound": True}
    result["runs"] = [{"k": 4, "ratio": 3.0}, {"k": 2, "ratio": 1.25}]
    (tmp_path / "results" / "nothing_small.json").write_text(json.dumps(result))
    (tmp_path / "results" / "stray.json").write_text("[1]")
    return tmp_path


def test_a_row_a_figure_with_what_the_files_say(folder):
    ((title, rows),) = bench.sections(folder)
    where = "2026-01-02; m; torch 2.9"
    assert title == "Nothing" and bench.without_figure(folder) == ["stray"]
    assert rows == [
        ["new over old", "≤ 1.50 ×", "1.25 ×", "theirs 3.00 ×; paper 2 (published)", where, COMMAND],
        ["the same at least", "≥ 1.50", "1.25 (missed)", "-", where, COMMAND],
        ["sound", "yes", "yes", "-", where, COMMAND],
        ["gone", "-", "not in the result", "-", where, COMMAND],
        ["to come", "≤ 3", "not run yet", "-", "-", COMMAND],
    ]
    text = bench.markdown_table(folder)
    assert "| the same at least | ≥ 1.50 | **1.25 (missed)** |" in text and text.count(COMMAND) == 1
    assert bench.terminal_table(folder).splitlines()[-1] == "more results: stray"


def test_a_program_runs_with_its_own_arguments_and_exit_code(folder):
    assert bench.run_benchmark(folder, "nothing", ["--row-count", "5"]) == 5
    with pytest.raises(ConfigError, match="no program 'nothin'; allowed: nothing"):
        bench.run_benchmark(folder, "nothin", [])


def test_the_repository_lists_its_own_and_a_bare_package_says_why_not(capfd, monkeypatch, tmp_path):
    cli.main(["bench"])
    out = capfd.readouterr().out
    assert out.startswith("KD CACHE") and "fused loss, time over its two unavoidable products" in out
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", "no_such_program", "--anything"])
    assert caught.value.code == 2 and "no_such_program" in capfd.readouterr().err
    monkeypatch.setattr("qat_lora.__file__", str(tmp_path / "qat_lora" / "__init__.py"))
    with pytest.raises(ConfigError, match="clone it"):
        load_program("table", "bench")


def test_the_readme_shows_what_the_results_say():
    """Nothing is written by hand there; see the top of this file."""
    shown = BLOCK.search(README.read_text(encoding="utf-8"))
    assert shown and shown[0] == table()


def table() -> str:
    return f"\n{bench.markdown_table(README.parent)}\n\n"


if __name__ == "__main__":
    README.write_text(BLOCK.sub(lambda _: table(), README.read_text(encoding="utf-8")), encoding="utf-8")
