"""The committed benchmark results in one table, read off the files themselves, and a way to run a program again.

A table kept by hand claims what somebody remembers; this one shows what is in `benchmarks/results`. A program says in
its docstring how it is run, and in its arguments what was merely set: the numbers of a result that no argument sets
are its figures. The programs belong to the repository and are not installed with the package.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import qat_lora
from qat_lora.errors import ConfigError

SHOWN = 3  # figures of a result
CIRCUMSTANCES = {"date", "machine", "versions", "threads", "load_before", "seconds"}


class Program(NamedTuple):
    """A benchmark program, as its source describes it."""

    claim: str
    command: str
    arguments: frozenset[str]


def benchmarks_folder() -> Path:
    """Return the folder of the programs.

    Raises:
        ConfigError: this is an installed package without its repository.
    """
    folder = Path(qat_lora.__file__).resolve().parents[1] / "benchmarks"
    if not (folder / "results").is_dir():
        raise ConfigError(
            "bench: the benchmark programs come with the repository and not with the package; "
            "clone it and install with pip install -e ."
        )
    return folder


def programs(folder: Path) -> dict[str, Program]:
    """Return the programs by name, read off their syntax trees; nothing of them is run."""
    return {file.stem: _describe(file) for file in sorted(folder.glob("*.py"))}


def _describe(file: Path) -> Program:
    tree = ast.parse(file.read_text(encoding="utf-8"))
    lines = (ast.get_docstring(tree) or "").splitlines()
    commands = [line.strip() for line in lines if line.strip().startswith(("python ", "qat-lora "))]
    words = [
        node.args[0].value
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and getattr(node.func, "attr", "") == "add_argument"
        and node.args
        and isinstance(node.args[0], ast.Constant)
    ]
    arguments = frozenset(str(word).lstrip("-").replace("-", "_") for word in words)
    command = commands[0] if commands else f"python benchmarks/{file.name} --help"
    return Program(lines[0] if lines else "", command, arguments)


def table_rows(folder: Path) -> list[list[str]]:
    """Return header and rows of text cells, one row a result; what a file does not say is `-`."""
    known = programs(folder)
    rows = [["result", "figures", "date", "machine", "versions", "command"]]
    for file in sorted((folder / "results").glob("*.json")):
        result = json.loads(file.read_text(encoding="utf-8"))
        result = result if isinstance(result, dict) else {}
        maker = max((name for name in known if file.stem.startswith(name)), key=len, default=None)
        said = [str(result.get(name, "-")) for name in ("date", "machine", "versions")]
        command = known[maker].command if maker else "see benchmarks/README.md"
        rows.append([file.stem, _figures(result, known[maker].arguments if maker else frozenset()), *said, command])
    return rows


def render(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as lines, all columns beginning at one place."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    padded = (zip(row, widths, strict=True) for row in rows)
    return "\n".join("  ".join(cell.ljust(width) for cell, width in row).rstrip() for row in padded)


def _figures(result: dict[str, Any], arguments: frozenset[str]) -> str:
    found = [
        f"{name} {value:,.4g}"
        for name, value in result.items()
        if isinstance(value, int | float) and not isinstance(value, bool) and name not in CIRCUMSTANCES | arguments
    ]
    found.sort(key=lambda text: not ("over" in text or "recovered" in text or "per_" in text))  # ratios and rates first
    return ", ".join(found[:SHOWN]) or "-"


def run_benchmark(folder: Path, name: str, arguments: Sequence[str]) -> int:
    """Run a program with this Python and return its exit code.

    Raises:
        ConfigError: there is no such program.
    """
    known = programs(folder)
    if name not in known:
        raise ConfigError(f"bench: there is no program {name!r}; allowed: {', '.join(known)}")
    return subprocess.run([sys.executable, str(folder / f"{name}.py"), *arguments], check=False).returncode
