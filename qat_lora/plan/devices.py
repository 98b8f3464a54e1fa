"""The devices that a run can be estimated for: memory, its rate, peak rate of products and price of one chip.

Rates are the makers' for dense products in bfloat16; the CPU's here are measured. In float32 a card multiplies in
TF32, at half that rate; a TPU rounds to bfloat16 in one pass by default, so only its bytes double. A T4's product units
have neither type. Prices are on-demand list prices of mid-2025 (TPUs at Google Cloud, cards elsewhere): check them.
"""

import re
import timeit
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch
import yaml

from qat_lora.errors import ConfigError
from qat_lora.runtime.launch.select import free_memory_bytes

Attention = Literal["tiled", "fused", "blocked", "xla"]  # which decides what a training step keeps (`plan/step.py`)
_ATTENTION: dict[str, Attention] = {"cpu": "tiled", "mps": "blocked", "tpu": "xla", "xla": "xla"}


@dataclass(frozen=True)
class Device:
    """One or several equal chips."""

    name: str
    device: str  # what `--device` calls it
    memory_gb: float  # of one chip, in 10^9 bytes
    tflops: float  # peak rate of one chip in bfloat16, 10^12 operations a second
    gbps: float  # rate of its memory, 10^9 bytes a second
    usd_per_hour: float  # list price of one chip; 0 where there is none
    float32_share: float = 1.0  # of the rate in bfloat16, for products of float32
    chips: int = 1


_TABLE = yaml.safe_load(Path(__file__).with_name("devices.yaml").read_text(encoding="utf-8"))
KNOWN = {name: Device(name, **figures) for name, figures in _TABLE.items()}
DEFAULT = ("v5e-1", "v6e-1", "v6e-4", "h100", "h200", "laptop")


def named(names: tuple[str, ...]) -> list[Device]:
    """Return devices by name (`v6e-4`: four chips; `h100`: one), the usual for none; ConfigError for an unknown one."""
    found = []
    for name in names or DEFAULT:
        match = re.fullmatch(r"([a-z0-9]+?)(?:-([1-9]\d*))?", name.lower())
        if match is None or match[1] not in KNOWN:
            known = ", ".join(KNOWN)
            raise ConfigError(f"for: {name!r} is unknown; allowed: {known}, each with -N for N chips, such as v6e-4")
        found.append(replace(KNOWN[match[1]], name=name.lower(), chips=int(match[2] or 1)))
    return found


def likely(device: str, chips: int) -> list[Device]:
    """Return the usual chips or cards behind `--device`, as many as a run takes; this CPU, for several none."""
    if device in ("tpu", "xla"):
        return named((f"v5e-{chips}", f"v6e-{chips}"))
    if device == "cuda":
        return named(tuple(kind if chips == 1 else f"{kind}-{chips}" for kind in ("a100", "h100", "h200")))
    return [here()] if chips == 1 else []


def here() -> Device:
    """Return this CPU: its rates in float32 on the threads that a run takes, the best of five tries of some 10 ms."""
    factor_NN, copied_NN, into_NN = torch.ones(1024, 1024), torch.ones(4096, 4096), torch.ones(4096, 4096)
    calls = (lambda: factor_NN @ factor_NN, lambda: into_NN.copy_(copied_NN))
    product_s, copy_s = (min(timeit.repeat(call, number=1, repeat=5)) for call in calls)
    rates = 2e-12 * len(factor_NN) ** 3 / product_s, 2e-9 * copied_NN.nbytes / copy_s
    return Device("this CPU", "cpu", 1e-9 * (free_memory_bytes() or 16e9), *rates, usd_per_hour=0.0)


def attention_on(device: str) -> Attention:
    """Return the attention kernel on `--device`."""
    return _ATTENTION.get(device, "fused")
