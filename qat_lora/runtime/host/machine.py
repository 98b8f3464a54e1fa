"""What a result says of its making: day, machine and versions, without which no later figure compares with it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
from datetime import date
from pathlib import Path

PACKAGES = ("torch", "torch_xla", "transformers", "numpy")


def made_with(cpuinfo: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Return `date`, `machine` (cores that this process may use, and their model) and `versions`.

    The model comes from /proc where there is one, as `lscpu` has it; elsewhere from what Python knows.
    """
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(encoding="utf-8"), re.M)
    except OSError:
        found = None
    model = found[1] if found else platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    here = {name: importlib.metadata.version(name) for name in PACKAGES if importlib.util.find_spec(name)}
    versions = {"Python": platform.python_version()} | here
    return {
        "date": date.today().isoformat(),
        "machine": f"{cores} core{'s' * (cores > 1)} of {model}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
