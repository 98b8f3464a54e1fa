"""The recovery adapter: a low-rank correction of a linear layer that stays as it is.

y = base(x) + (alpha / r) B A x, with A [R, I] and B [O, R] in float32 whatever the base computes in. Our own module
rather than PEFT's, because recovery needs three things that PEFT's layers lack: a start from the quantisation error, a
base of packed codes, and a forward without a branch or dictionary look-up per adapter, which XLA would trace each time.
Names and files are PEFT's (`models/adapter.py`), so the result loads there.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from qat_lora.config import option, settings
from qat_lora.errors import ConfigError


@settings
class LoraConfig:
    """Shape of the recovery adapter."""

    recovery_r: int = option(16, "rank of the recovery adapter", unit="rank")
    recovery_alpha: float | None = option(
        None, "scaling numerator; the adapter counts alpha / rank", unit="default: rank", above=0
    )
    lora_targets: str = option("", "regular expression of the linear layers that get an adapter", unit="default: all")
    mlp_only: bool = option(False, "adapters on the MLP layers only")
    dropout: float = option(0.0, "dropout on the adapter's input while training", unit="probability")

    def __post_init__(self) -> None:
        if self.recovery_r < 1:
            raise ConfigError(f"recovery_r: {self.recovery_r} is not a rank; give 1 or more (8 or 16 are usual)")
        if not 0 <= self.dropout < 1:
            raise ConfigError(f"dropout: {self.dropout} is not a probability below 1")

    @property
    def alpha(self) -> float:
        """The scaling numerator, the rank unless it was given."""
        return float(self.recovery_r) if self.recovery_alpha is None else self.recovery_alpha


class Factors(NamedTuple):
    """A low-rank start: correction = b_OR @ a_RI, columns in order of importance, so any rank is a slice."""

    a_RI: Tensor
    b_OR: Tensor

    def half(self) -> Factors:
        """Return the factors as they are stored, float16."""
        return Factors(self.a_RI.half(), self.b_OR.half())


class LoraLinear(nn.Module):
    """A linear layer with a recovery adapter."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, dropout: float = 0.0) -> None:
        super().__init__()
        device = next(base.parameters()).device
        self.base = base
        self.scaling = alpha / rank
        self.dropout: nn.Module = nn.Dropout(dropout) if dropout else nn.Identity()
        self.lora_A = nn.Parameter(torch.empty(rank, base.in_features, dtype=torch.float32, device=device))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank, dtype=torch.float32, device=device))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))
        self.train(base.training)  # a new module is in training mode, which would be dropout in a model being scored

    def start_from(self, factors: Factors) -> None:
        """Set the adapter to the leading columns of a low-rank correction; further ones keep A random and B zero."""
        rank = min(self.lora_A.shape[0], factors.a_RI.shape[0])
        with torch.no_grad():
            self.lora_A[:rank].copy_(factors.a_RI[:rank])
            self.lora_B[:, :rank].copy_(factors.b_OR[:, :rank] / self.scaling)

    def delta(self) -> Tensor:
        """Return what the adapter adds to the weight, float32 [O, I]."""
        return self.scaling * (self.lora_B @ self.lora_A)

    def forward(self, x: Tensor) -> Tensor:
        """Apply base and adapter; the adapter computes in the input's type (or autocast's)."""
        h = self.dropout(x)
        dtype = torch.float32 if torch.is_autocast_enabled(x.device.type) else x.dtype
        low = nn.functional.linear(nn.functional.linear(h, self.lora_A.to(dtype)), self.lora_B.to(dtype))
        return self.base(x) + self.scaling * low
