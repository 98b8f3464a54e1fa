"""Where the toys of the tests lie, and what their programs find; a module of its own, since `conftest` is not alone."""

import os
from pathlib import Path
from typing import NamedTuple

FAST_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
"""XLA's flags for a compiler that is quicker, on a CPU three times, than its code is slow at a toy's size."""


class Tiny(NamedTuple):
    teacher: Path
    text: Path
    held_out: Path


def clean_environment(**variables: str) -> dict[str, str]:
    """Return the variables of this process without those that choose a device or a group; one thread a program."""
    chosen = ("PJRT", "XLA", "TPU", "USE_", "RANK", "WORLD", "LOCAL")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(chosen)}
    return kept | {"XLA_FLAGS": FAST_COMPILE, "OMP_NUM_THREADS": "1"} | variables
