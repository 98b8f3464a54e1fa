"""The command over `benchmarks/table.py`; programs there belong to the repository and are not installed."""

import importlib
import sys
import types
from pathlib import Path
from typing import Any

import click

import qat_lora
from qat_lora.errors import ConfigError


def load_program(name: str, asked: str) -> Any:
    """Import a module of `benchmarks/` for the command that is `asked`; ConfigError: the repository is not here."""
    folder = Path(qat_lora.__file__).resolve().parents[1] / "benchmarks"
    if not folder.is_dir():
        why = "the benchmark programs come with the repository and not with the package"
        raise ConfigError(f"{asked}: {why}; clone it and install with pip install -e .")
    package = types.ModuleType("benchmarks")
    package.__path__ = [str(folder)]
    sys.modules.setdefault("benchmarks", package)
    return importlib.import_module(f"benchmarks.{name}")


@click.command("bench", context_settings={"ignore_unknown_options": True})
@click.argument("name", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(name: str | None, arguments: tuple[str, ...]) -> None:
    """Show what was claimed, asked and reached in one table, or run the benchmark NAME with its own arguments."""
    if code := load_program("table", "bench").main([] if name is None else [name, *arguments]):
        raise SystemExit(code)
