"""The machine: which floating type it is fast at, and its name for results, without which no figures compare."""

import importlib.metadata
import importlib.util
import os
import platform
import re
from datetime import date
from pathlib import Path

import torch

PACKAGES = ("torch", "torch_xla", "transformers", "numpy")
CPUINFO = Path("/proc/cpuinfo")


def fast_dtype(device: torch.device, cpuinfo: Path = CPUINFO) -> torch.dtype:
    """Return bfloat16 where the hardware multiplies it faster than float32, else float32.

    Accelerators all do, a CPU where it has dot-product instructions for it, which can be seen in /proc.
    """
    if device.type != "cpu":
        return torch.bfloat16
    try:
        flags = cpuinfo.read_text(encoding="utf-8")
    except OSError:
        return torch.float32
    return torch.bfloat16 if "avx512_bf16" in flags or "amx_bf16" in flags else torch.float32


def made_with(cpuinfo: Path = CPUINFO) -> dict[str, str]:
    """Return `date`, `machine` (cores that this process may use, and their model) and `versions`."""
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
