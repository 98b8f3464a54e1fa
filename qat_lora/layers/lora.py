"""The recovery adapter: a low-rank correction of a linear layer that stays as it is.

y = base(x) + (alpha / r) B A x, with A [R, I] and B [O, R] in float32 whatever the base computes in. Our own module,
because recovery needs three things that PEFT's layers lack: a start from the quantisation error, a base of packed
codes, and a forward of few operations: layers that read one input (queries, keys and values; gate and up) multiply it
with their A's in one product (`SharedInput`), scaling is done on the R numbers of a position, and B's product is added
to the base's output where it stands. In PEFT's form an adapter reads its input seven times a layer and its output three
times each. Names and files are PEFT's (`models/adapter.py`), so the result loads there.
"""

import itertools
import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qat_lora.config import HELP, common, option, settings
from qat_lora.layers.quant_linear import joined_weight
from qat_lora.runtime.precision import exact_matmul


@settings
class LoraConfig:
    """Shape of the recovery adapter."""

    recovery_r: int | None = common(None, HELP["recovery_r"], unit="rank", min=1)
    recovery_alpha: float | None = option(None, HELP["recovery_alpha"], unit="default: rank", above=0)
    lora_targets: str = option("", "regular expression of the linear layers that get an adapter", unit="default: all")
    mlp_only: bool = option(False, "adapters on the MLP layers only")
    dropout: float = option(0.0, "dropout on the adapter's input while training", unit="probability", min=0, below=1)

    @property
    def rank(self) -> int:
        """The rank where layers have no ranks of their own."""
        return self.recovery_r or 16

    @property
    def alpha(self) -> float:
        """The scaling numerator of that rank, the rank unless it was given."""
        return float(self.rank) if self.recovery_alpha is None else self.recovery_alpha


class Factors(NamedTuple):
    """A low-rank start: correction = b_OR @ a_RI, columns in order of importance, so any rank is a slice."""

    a_RI: Tensor
    b_OR: Tensor


Starts = dict[str, Factors]  # of adapters, by layer name


class LoraLinear(nn.Module):
    """A linear layer with a recovery adapter."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float, dropout: float = 0.0) -> None:
        super().__init__()
        device = next(base.parameters()).device
        self.base = base
        self.scaling = alpha / rank
        self.dropout: nn.Module = nn.Dropout(dropout) if dropout else nn.Identity()
        self.shared: SharedInput | None = None
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
        return self.scaling * exact_matmul(self.lora_B, self.lora_A)

    def forward(self, x: Tensor) -> Tensor:
        """Apply base and adapter; the adapter computes in the input's type (or autocast's)."""
        return self.alone(x) if self.shared is None else self.shared.output(self, x)

    def alone(self, x: Tensor) -> Tensor:
        """Apply base and adapter, whatever others may share."""
        low = self.scaled(nn.functional.linear(self.dropout(x), self.lora_A.to(_adapter_dtype(x))))
        return _added(self.base(x), low, self.lora_B)

    def scaled(self, low: Tensor) -> Tensor:
        """Return what the A's made, scaled."""
        return low if self.scaling == 1.0 else low * self.scaling


def _adapter_dtype(x: Tensor) -> torch.dtype:
    return torch.float32 if torch.is_autocast_enabled(x.device.type) else x.dtype


def _added(y: Tensor, low: Tensor, b_OR: Tensor) -> Tensor:
    """Return y + low Bᵀ, in one product."""
    rows, low_NR = y.reshape(-1, y.shape[-1]), low.reshape(-1, low.shape[-1])
    return torch.addmm(rows, low_NR, b_OR.to(low.dtype).t()).view(y.shape)


# Layers of one module that read the same tensor, in the order of their calls; other names go by themselves.
TOGETHER = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


def of_one_input(names: Collection[str]) -> list[tuple[str, ...]]:
    """Return those of layers that are `TOGETHER`."""
    paths = dict.fromkeys(name.rpartition(".")[0] for name in names)
    whole = [tuple(f"{path}.{part}".removeprefix(".") for part in parts) for path in paths for parts in TOGETHER]
    return [found for members in whole if (found := tuple(name for name in members if name in names))]


class SharedInput:
    """Adapters that are called one after the other with one tensor; the first computes for all.

    All A's are one product; so are bases that lie together (`quant_linear.join_dense`) and, where a compiler fuses, the
    B's, with zeros where a B meets another's A. Called alone or with another tensor, a member computes for itself.
    """

    def __init__(self, members: list[LoraLinear]) -> None:
        self.members = members
        self._input: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()

    def output(self, member: LoraLinear, x: Tensor) -> Tensor:
        """Return what a member makes of x."""
        if member is self.members[0]:
            self._outputs = self._compute(x)
            self._input = x
        if self._input is not x:
            return member.alone(x)
        output = next(y for other, y in zip(self.members, self._outputs, strict=True) if other is member)
        if member is self.members[-1]:
            self._input, self._outputs = None, ()
        return output

    def _compute(self, x: Tensor) -> tuple[Tensor, ...]:
        first, dtype = self.members[0], _adapter_dtype(x)
        ranks = [member.lora_A.shape[0] for member in self.members]
        a_RI = torch.cat([member.lora_A for member in self.members]).to(dtype)
        low = first.scaled(nn.functional.linear(x, a_RI))
        weight_OI = joined_weight([member.base for member in self.members])
        if weight_OI is None:
            bases: Any = [member.base(x) for member in self.members]
        else:
            autocast = torch.is_autocast_enabled(x.device.type)
            y = nn.functional.linear(x, weight_OI if autocast else weight_OI.to(x.dtype))
            sizes = [member.base.out_features for member in self.members]
            if torch.compiler.is_compiling() and len(set(ranks)) == 1:
                return _added(y, low, self._block_b(sizes, ranks[0])).split(sizes, -1)
            bases = y.split(sizes, -1)
        lows = low.split(ranks, -1)
        return tuple(_added(y, low, m.lora_B) for y, low, m in zip(bases, lows, self.members, strict=True))

    def _block_b(self, sizes: list[int], rank: int) -> Tensor:
        """Return the B's on the diagonal of one matrix [sum of O, members x R]."""
        b_OR = torch.cat([member.lora_B for member in self.members])
        rows = torch.arange(len(b_OR), device=b_OR.device)
        ends = list(itertools.accumulate(sizes))
        own = torch.stack([(rows >= end - size) & (rows < end) for size, end in zip(sizes, ends, strict=True)], 1)
        return (b_OR[:, None] * own[:, :, None].to(b_OR.dtype)).flatten(1)


def share_inputs(layers: Mapping[str, LoraLinear]) -> None:
    """Let adapters of `TOGETHER` share the product with their input; dropout gives each an input of its own."""
    for names in of_one_input(layers):
        members = [layers[name] for name in names]
        if len(members) > 1 and all(isinstance(member.dropout, nn.Identity) for member in members):
            shared = SharedInput(members)
            for member in members:
                member.shared = shared
