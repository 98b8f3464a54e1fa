"""Which format and which adapter rank every layer of a model gets, so that its bytes come to a target.

A point is what one layer may be: its bytes, and what that costs the predictions in nats. The costs of layers add up, so
from the smallest points on the step with the most gain for a byte is taken, over all layers, as long as one fits. From
a point of a convex hull that step leads to the hull's next, so these are the best choices at their totals (one price
per byte, a Lagrangian), until the first step that is too large; the last gap takes what still fits. An integer program
would gain a share of that step, and a rule by name (more bits for `down_proj`) knows neither model nor target.

Source: bit allocation along convex hulls, Shoham and Gersho 1988.
"""

import re
from collections.abc import Sequence
from typing import Literal

import numpy as np

from qat_lora.config import HELP, common, option, settings
from qat_lora.errors import ConfigError

Engine = Literal["any", "llama.cpp", "mlx", "vllm"]


@settings
class TargetConfig:
    """The size that a student shall have."""

    target_size: str | None = common(None, HELP["target_size"])
    target_bits: float | None = option(None, "the same as bits over all weights of the model", unit="bits", above=0)
    engine: Engine = option("any", "engine whose formats are allowed and whose files are counted", alias="for")

    def __post_init__(self) -> None:
        if None not in (self.target_size, self.target_bits):
            raise ConfigError("target_bits: --target-size says it already; give one of the two")
        if self.engine != "any" and not self.name:
            raise ConfigError(f"engine: --for {self.engine} counts nothing without --target-size or --target-bits")
        self.bytes(0)

    @property
    def name(self) -> str:
        """What is wanted; empty where a preset decides."""
        return self.target_size or ("" if self.target_bits is None else f"{self.target_bits:g}bits")

    def bytes(self, weights: int) -> int:
        """Return the bytes that a model of so many weights may take; ConfigError where it is no size."""
        if self.target_size is None:
            return int((self.target_bits or 0) * weights / 8)
        if found := re.fullmatch(r"(\d+(?:\.\d+)?) ?([kMG])B", self.target_size):
            return round(float(found[1]) * 1000 ** ("kMG".index(found[2]) + 1))
        raise ConfigError(f"target_size: {self.target_size!r} is no size; give kB, MB or GB, for example 232MB")


def allocate(layers: Sequence[str], bytes_P: np.ndarray, costs_P: np.ndarray, budget_bytes: int) -> list[int]:
    """Return one point of each layer, within a budget beside which no better fits; ConfigError: the least exceed it."""
    layers_P = np.unique(layers, return_inverse=True)[1]
    order = np.lexsort((costs_P, bytes_P, layers_P))
    chosen_L = order[np.unique(layers_P[order], return_index=True)[1]]
    left = budget_bytes - int(bytes_P[chosen_L].sum())
    if left < 0:
        raise ConfigError(f"budget: {budget_bytes:,} bytes are {-left:,} too few")
    while True:
        more_P = bytes_P - bytes_P[chosen_L][layers_P]
        gain_P = costs_P[chosen_L][layers_P] - costs_P
        fits_P = (more_P > 0) & (more_P <= left) & (gain_P > 0)
        if not fits_P.any():
            return sorted(chosen_L.tolist())
        best = int(np.argmax(np.where(fits_P, gain_P / np.maximum(more_P, 1), -1.0)))
        chosen_L[layers_P[best]], left = best, left - int(more_P[best])
