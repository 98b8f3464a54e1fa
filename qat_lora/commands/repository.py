"""The commands over what comes with the repository: its examples, which the wheel carries too, and its benchmarks.

The wheel carries recipes, notebooks and scripts (`setup.py`), since a download by version could fetch what does not fit
the installed package. Files are written and never replaced: one that was changed is the user's own.
"""

import importlib
import sys
import types
from pathlib import Path
from typing import Any

import qat_lora
from qat_lora.errors import ConfigError
from qat_lora.files.folders import write_new
from qat_lora.terminal import echo

FOLDERS = {"recipes": "*.*", "notebooks": "*.ipynb", "scripts": "*.py"}


def home() -> Path:
    """Return the folder that holds the examples: in an installed package its own, else that of the clone."""
    package = Path(qat_lora.__file__).resolve().parent
    return package / "examples" if (package / "examples").is_dir() else package.parent


def examples(out: str) -> None:
    """Copy what is not there yet; ConfigError: this installation has none."""
    found = [file for folder, pattern in FOLDERS.items() for file in sorted((home() / folder).glob(pattern))]
    if not found:
        raise ConfigError(f"examples: {home()} holds none; install the wheel, or work in a clone")
    written, changed = 0, []
    for file in found:
        target = Path(out) / file.parent.name / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            write_new(target, [file.read_bytes()], "example")
            written += 1
        except FileExistsError:
            changed += [] if target.read_bytes() == file.read_bytes() else [str(target)]
    echo(f"{written} of {len(found)} files written to {', '.join(str(Path(out) / folder) for folder in FOLDERS)}")
    if changed:
        echo(f"left as they are, other than ours: {', '.join(changed)}")


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


def bench(name: str | None, arguments: tuple[str, ...]) -> None:
    """Show the table of figures, or run a benchmark."""
    if code := load_program("table", "bench").main([] if name is None else [name, *arguments]):
        raise SystemExit(code)
