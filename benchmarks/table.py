"""The committed results in one table, read from the files themselves, and a way to run a program again by name.

    python benchmarks/table.py

A table kept by hand claims what somebody remembers. `figures.yaml` says what is claimed, what was asked for and where
in a result the number is; the number itself comes from `results/`. A result that is missing is shown as not run. The
terminal's table and that of `README.md` come from the same rows. `qat-lora bench` runs this program.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from qat_lora.errors import ConfigError
from qat_lora.terminal import echo

HEADER = ("figure", "asked", "reached", "beside it", "when, where, with", "command")
NOT_RUN, NOT_IN_RESULT = "not run yet", "not in the result"


class Program(NamedTuple):
    """A benchmark program, as its source describes it."""

    claim: str
    command: str


def programs(folder: Path) -> dict[str, Program]:
    """Return the programs by name, read from their syntax trees; none is run."""
    return {file.stem: _describe(file) for file in sorted(folder.glob("*.py"))}


def _describe(file: Path) -> Program:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    lines = (ast.get_docstring(tree) or "").splitlines()
    commands = [
        " ".join(f"{line} {after}".replace("\\ ", " ").split() if line.endswith("\\") else line.split())
        for line, after in zip(lines, [*lines[1:], ""], strict=True)
        if line.strip().startswith(("python ", "qat-lora "))
    ]
    command = commands[0] if commands else f"python benchmarks/{file.name} --help"
    return Program(lines[0] if lines else "", command)


def sections(folder: Path) -> Iterator[tuple[str, list[list[str]]]]:
    """Yield the sections of `figures.yaml` with their rows of text cells, in the order of `HEADER`."""
    known = programs(folder)
    for section in _figures(folder):
        yield section["section"], [_row(folder, known, figure) for figure in section["figures"]]


def without_figure(folder: Path) -> list[str]:
    """Return the results that no figure is read from."""
    named = {figure["result"] for section in _figures(folder) for figure in section["figures"]}
    return sorted({file.stem for file in (folder / "results").glob("*.json")} - named)


def _figures(folder: Path) -> list[dict[str, Any]]:
    return yaml.safe_load((folder / "figures.yaml").read_text(encoding="utf-8"))


def _row(folder: Path, known: Mapping[str, Program], figure: Mapping[str, Any]) -> list[str]:
    name = figure["result"]
    maker = max((program for program in known if name.startswith(program)), key=len, default=None)
    command = known[maker].command if maker else figure["said"]["command"]
    file = folder / "results" / f"{name}.json"
    if not file.is_file():
        return [figure["figure"], _asked(figure), NOT_RUN, _beside({}, figure), "-", command]
    result = json.loads(file.read_text(encoding="utf-8"))
    value = look_up(result, figure["value"])
    reached = NOT_IN_RESULT if value is None else f"{_shown(value, figure)}{_verdict(value, figure)}"
    return [figure["figure"], _asked(figure), reached, _beside(result, figure), _circumstances(result, figure), command]


def look_up(result: Any, path: str) -> Any:
    """Return the value at a path in a result, None where there is none.

    A segment is a key, or for a list `name=value,...`: its first item with these values.
    """
    for segment in path.split("/"):
        if isinstance(result, list):
            wanted = dict(pair.split("=", 1) for pair in segment.split(","))
            result = next((item for item in result if all(str(item.get(k)) == v for k, v in wanted.items())), None)
        else:
            result = result.get(segment) if isinstance(result, dict) else None
        if result is None:
            return None
    return result


def _shown(value: Any, figure: Mapping[str, Any]) -> str:
    return {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(figure["format"]).format(value)


def _asked(figure: Mapping[str, Any]) -> str:
    for name, sign in (("at_most", "≤"), ("at_least", "≥")):
        if name in figure:
            yes = figure["format"] == "{}" and name == "at_least"
            return "yes" if yes else f"{sign} {str(figure['format']).format(figure[name])}"
    return "-"


def _verdict(value: float, figure: Mapping[str, Any]) -> str:
    """Return ` (missed)` for a number outside the bounds that were asked for."""
    fine = value <= figure.get("at_most", value) and value >= figure.get("at_least", value)
    return "" if fine else " (missed)"


def _beside(result: Mapping[str, Any], figure: Mapping[str, Any]) -> str:
    """Return the numbers of other tools: measured in the same run, or published."""
    found = []
    for name, said in figure.get("beside", {}).items():
        value = look_up(result, said)
        measured = isinstance(value, int | float)
        if measured or " " in said or "%" in said:  # a path has neither; without its result it says nothing
            found.append(f"{name} {_shown(value, figure) if measured else said}")
    return "; ".join(found) or "-"


def _circumstances(result: Mapping[str, Any], figure: Mapping[str, Any]) -> str:
    said = dict(figure.get("said", {})) | {key: value for key, value in result.items() if value}
    machine, versions = said.get("machine"), said.get("versions")
    if isinstance(machine, Mapping):
        machine = ", ".join(f"{key} {value}" for key, value in machine.items())
    if isinstance(versions, Mapping):
        versions = ", ".join(f"{key} {value}" for key, value in versions.items())
    if versions is None and "torch" in said:
        versions = f"torch {said['torch']}"
    return "; ".join(str(value) for value in (said.get("date"), machine, versions) if value) or "-"


def terminal_table(folder: Path) -> str:
    """Return all sections as aligned lines."""
    tables = list(sections(folder))
    rows = [list(HEADER), *(row for _, rows in tables for row in rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines: list[str] = []
    for title, found in tables:
        lines += ["", title.upper()] if lines else [title.upper()]
        for row in (list(HEADER), *found):
            lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    lines += ["", f"more results: {', '.join(without_figure(folder)) or 'none'}"]
    return "\n".join(lines)


def markdown_table(folder: Path) -> str:
    """Return all sections as one Markdown table, and below it each command once."""
    lines = [f"| {' | '.join(HEADER[:-1])} |", "|---|---|---|---|---|"]
    commands: dict[str, None] = {}
    for title, rows in sections(folder):
        lines.append(f"| **{title}** | | | | |")
        for row in rows:
            cells = [cell.replace("|", "\\|") for cell in row]
            cells[2] = f"**{cells[2]}**" if cells[2].endswith("(missed)") else cells[2]
            lines.append(f"| {' | '.join(cells[:-1])} |")
            commands[row[-1]] = None
    others = ", ".join(f"`{name}`" for name in without_figure(folder)) or "none"
    made_by = (f"    {command}" for command in commands)
    return "\n".join([*lines, "", f"Results without a line here: {others}.", "", "Made by:", "", *made_by])


def run_benchmark(folder: Path, name: str, arguments: Sequence[str]) -> int:
    """Run a program with this Python and return its exit code.

    Raises:
        ConfigError: there is no such program.
    """
    known = programs(folder)
    if name not in known:
        raise ConfigError(f"bench: there is no program {name!r}; allowed: {', '.join(known)}")
    return subprocess.run([sys.executable, str(folder / f"{name}.py"), *arguments], check=False).returncode


def main(arguments: Sequence[str]) -> int:
    """Print the table, or run the program that the first word names with the other words; return the exit code."""
    folder = Path(__file__).resolve().parent
    if arguments:
        return run_benchmark(folder, arguments[0], arguments[1:])
    echo(terminal_table(folder))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
