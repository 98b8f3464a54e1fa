"""The command over `benchmarks/table.py`, which belongs to the repository and is not installed with the package."""

import importlib.util
from pathlib import Path
from typing import Any

import click

import qat_lora
from qat_lora.errors import ConfigError


def load_table() -> Any:
    """Import `benchmarks/table.py` by its path; ConfigError: this is an installed package without its repository."""
    file = Path(qat_lora.__file__).resolve().parents[1] / "benchmarks" / "table.py"
    spec = importlib.util.spec_from_file_location("benchmarks.table", file)
    if not file.is_file() or spec is None or spec.loader is None:
        why = "the benchmark programs come with the repository and not with the package"
        raise ConfigError(f"bench: {why}; clone it and install with pip install -e .")
    table = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(table)
    return table


@click.command("bench", context_settings={"ignore_unknown_options": True})
@click.argument("name", required=False)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def bench(name: str | None, arguments: tuple[str, ...]) -> None:
    """Show what was claimed, asked and reached in one table, or run the benchmark NAME with its own arguments."""
    if code := load_table().main([] if name is None else [name, *arguments]):
        raise SystemExit(code)
