"""Weights that train inside their own quantiser: a float weight, rounded in every forward, straight-through behind.

Codes cannot train, since rounding has no slope; so a float weight is kept as well, the *latent* weight, and the layer
computes with the nearest code times its scale (`fake_quantize`). `Latent` trains the weight itself, as EfficientQAT and
ParetoQ do; `LatentChange` a low-rank change of it, as LR-QAT: the codes of the sum *are* the result. A latent weight
starts at the point of its code's cell nearest to the full-precision weight, to keep an error-compensated start's codes.

Gradients through the rounding are conventions; ParetoQ found these best at each width:

* `integer`, `asymmetric` and `lut`: LSQ. Inside the range dŵ/dw = 1 and dŵ/ds = q - w/s; outside 0 and the end q.
* `half` (2 bits): the same with the range widened by half a step ("stretched elastic"), so that all cells are equally
  wide; ending it at the outermost code would freeze a third of the weights.

The forward is code value times scale, in `QuantLinear`'s order: trained weights and their saved codes agree to the last
bit, which w + (ŵ - w).detach() would not. LSQ's factor on the scale's gradient is left out: AdamW cancels it.

Sources: LR-QAT (arXiv 2406.06385) for the low-rank form; LSQ (1902.08153); ParetoQ (2502.02631); LSQ+ (2004.09576).
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from qat_lora.quant.codes import decode, nearest
from qat_lora.quant.scales import TINY, away_from_zero
from qat_lora.quant.spec import QuantSpec
from qat_lora.runtime.precision import exact_addmm

Gradient = Literal["lsq", "ste"]
MARGIN = 0.2  # of half a cell: starts on the border itself would cross it in the first step, all at once


class _FakeQuantize(torch.autograd.Function):
    """Ŵ = nearest code value of W / S, times S."""

    @staticmethod
    def forward(
        ctx: Any, weight: Tensor, scale: Tensor, values: Tensor, zero: Tensor | None, ends: Any, spec: QuantSpec
    ) -> Tensor:
        ratio = weight / away_from_zero(scale)
        q, codes = nearest(ratio if zero is None else ratio + zero, values, spec)
        q = q if zero is None else q - zero
        ctx.save_for_backward(ratio, q, codes, scale, *ends)
        ctx.entries = values.numel()
        return q * scale

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = gradients
        ratio, q, codes, scale, low, high = ctx.saved_tensors
        inside = (ratio >= low) & (ratio <= high)
        to_weight = to_scale = to_values = to_zero = None
        if ctx.needs_input_grad[0]:
            to_weight = gradient * inside
        if ctx.needs_input_grad[1]:
            to_scale = (gradient * (q - ratio * inside)).sum_to_size(scale.shape)
        if ctx.needs_input_grad[2]:
            scaled = gradient * scale
            to_values = torch.stack([(scaled * (codes == k)).sum() for k in range(ctx.entries)])
        if ctx.needs_input_grad[3]:  # inside the range the codes shift with it
            to_zero = (-gradient * scale * ~inside).sum_to_size(scale.shape)
        return to_weight, to_scale, to_values, to_zero, None, None


class _StraightThrough(torch.autograd.Function):
    """Apply a function; the gradient passes as if nothing had happened (STE)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        return function(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


def fake_quantize(
    weight_OI: Tensor,
    scale_OI: Tensor,
    spec: QuantSpec,
    values: Tensor,
    zero_OI: Tensor | None = None,
    gradient: Gradient = "lsq",
) -> Tensor:
    """Return the weight as `spec` would store it, differentiable in weight, scale, code book and zero points.

    Scales and zero points are [O, I] or what broadcasts to it; `values` is the sorted code book, or a table that
    trains. By `ste`, the older rule, weights beyond the range train as if they were inside.
    """
    values = values.to(weight_OI.dtype)
    margin = 0.5 if spec.code == "half" else 0.0
    ends = values[0].detach() - margin, values[-1].detach() + margin
    if zero_OI is not None:
        ends = ends[0] - zero_OI.detach(), ends[1] - zero_OI.detach()
    if gradient == "ste":
        ends = values.new_full((), -torch.inf), values.new_full((), torch.inf)
    return _FakeQuantize.apply(weight_OI, scale_OI, values, zero_OI, ends, spec)


def round_through(x: Tensor) -> Tensor:
    """Round to the nearest whole number with the straight-through gradient."""
    return _StraightThrough.apply(x, torch.round)


def as_stored(x: Tensor) -> Tensor:
    """Round a scale or table to float16, as it will be stored, with the straight-through gradient."""
    return _StraightThrough.apply(x, lambda tensor: tensor.half().to(tensor.dtype))


class Latent(nn.Module):
    """A float weight [O, I] that trains and is rounded in every forward."""

    def __init__(self, weight_OI: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_OI)

    def trained(self) -> dict[str, nn.Parameter]:
        """Return what trains, by name."""
        return {"latent": self.weight}

    def forward(self, scale_OI: Tensor) -> Tensor:
        """Return the weight as it is before rounding."""
        return self.weight


class LatentChange(nn.Module):
    """A frozen position [O, I] among the code values, and a low-rank change of it that trains.

    In units of the scale, so that a scale that trains leaves the codes alone (KL 0.36; in the weight's own units 0.48).
    """

    unit: Tensor

    def __init__(self, position_OI: Tensor, unit: Tensor, rank: int, alpha: float | None = None) -> None:
        """Take the position W / s and the layer's mean scale, which gives B A the unit of an adapter's."""
        super().__init__()
        self.scaling = (alpha or rank) / rank
        self.weight = nn.Parameter(position_OI, requires_grad=False)
        self.register_buffer("unit", unit)
        out_features, in_features = position_OI.shape
        self.lora_A = nn.Parameter(position_OI.new_empty(rank, in_features))
        self.lora_B = nn.Parameter(position_OI.new_zeros(out_features, rank))
        nn.init.kaiming_uniform_(self.lora_A, a=math.sqrt(5))

    def trained(self) -> dict[str, nn.Parameter]:
        """Return what trains, by name."""
        return {"lora_A": self.lora_A, "lora_B": self.lora_B}

    def forward(self, scale_OI: Tensor) -> Tensor:
        """Return the weight as it is before rounding."""
        return exact_addmm(self.weight, self.lora_B / self.unit, self.lora_A, self.scaling) * scale_OI


class Range(nn.Module):
    """Scales and zero points of asymmetric codes, trained as the ends of ranges (LSQ+), each by what it clips."""

    def __init__(self, scale: Tensor, zero: Tensor, bits: int) -> None:
        super().__init__()
        self.most = 2**bits - 1
        self.low = nn.Parameter(-zero * scale)
        self.high = nn.Parameter((self.most - zero) * scale)

    def forward(self) -> tuple[Tensor, Tensor]:
        """Return scales and integer zero points [rows, G], as they will be stored."""
        scale = as_stored(((self.high - self.low) / self.most).clamp_min(TINY))
        return scale, round_through(-self.low / scale).clamp(0, self.most)


def start_near(weight_OI: Tensor, codes_OI: Tensor, scale_OI: Tensor, book: Tensor) -> Tensor:
    """Return the point nearest to a weight among those that round to the given uint8 codes, float32 [O, I]."""
    scale, codes = away_from_zero(scale_OI), codes_OI.long()
    gaps = book.diff() / 2
    below = torch.cat([gaps.new_full((1,), torch.inf), gaps])[codes] * (1 - MARGIN)
    above = torch.cat([gaps, gaps.new_full((1,), torch.inf)])[codes] * (1 - MARGIN)
    centre = book[codes]
    return (weight_OI.float() / scale).clamp(centre - below, centre + above) * scale


class LookUp(torch.autograd.Function):
    """Code values of given codes, with a gradient for the table; autograd's own backward sorts [O, I] numbers."""

    @staticmethod
    def forward(ctx: Any, book: Tensor, codes_OI: Tensor) -> Tensor:
        """Return the values [O, I]."""
        ctx.save_for_backward(codes_OI)
        ctx.entries = len(book)
        return decode(codes_OI, book)

    @staticmethod
    def backward(ctx: Any, grad_OI: Tensor) -> tuple[Tensor, None]:
        """Return the table's gradient: summed row by row first, in parallel."""
        by_row = grad_OI.new_zeros(grad_OI.shape[0], ctx.entries)
        return by_row.scatter_add_(1, ctx.saved_tensors[0].long(), grad_OI).sum(0), None
