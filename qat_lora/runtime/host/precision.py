"""Which floating type is fast on a device; speed only, never a change of what a run means."""

from __future__ import annotations

from pathlib import Path

import torch


def fast_dtype(device: torch.device, cpuinfo: Path = Path("/proc/cpuinfo")) -> torch.dtype:
    """Return bfloat16 where the hardware multiplies it faster than float32, else float32.

    Accelerators all do. A CPU does where it has dot-product instructions for it; without them bfloat16 is
    emulated, and slow. Where that cannot be seen (no /proc), float32.
    """
    if device.type != "cpu":
        return torch.bfloat16
    try:
        flags = cpuinfo.read_text(encoding="utf-8")
    except OSError:
        return torch.float32
    return torch.bfloat16 if "avx512_bf16" in flags or "amx_bf16" in flags else torch.float32
