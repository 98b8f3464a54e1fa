"""Fake-quantisation: a float weight that computes as its quantised self, with gradients for weight, scale and table.

Rounding has no useful derivative, so each gradient is a convention. Ours, by code book, is the choice that ParetoQ
found best at each width:

* `integer` and `asymmetric` (3 bits and more): LSQ. Inside the range dŵ/dw = 1 and dŵ/ds = q - w/s; outside 0 and q,
  q being the end of the range that the weight is clipped to.
* `half` (2 bits): "stretched elastic" quantisation, which is LSQ on balanced half-integers with the range widened
  by half a step, -2^(b-1) to 2^(b-1), so that the outermost cells are as wide as the others. With zero among four
  codes one level would be wasted; ending the range at the outermost code would freeze a third of the weights.
* `lut`: LSQ with the table's ends as range. dŵ/dv_k = s for the weights that take entry k, so the table trains too.

The forward is code value times scale, in the order in which `QuantLinear` multiplies, so a trained weight and its
saved codes give the same numbers to the last bit. Composed from `round` and `detach` (w + (ŵ - w).detach(), as most
tools do it) the sum would round once more, and LSQ would keep five tensors of the weight's size.

Sources: LSQ (arXiv 1902.08153); ParetoQ (arXiv 2502.02631); range learning, LSQ+ (arXiv 2004.09576).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from qat_lora.quant.codes import nearest
from qat_lora.quant.scales import TINY, away_from_zero
from qat_lora.quant.spec import QuantSpec


class _FakeQuantise(torch.autograd.Function):
    """Ŵ = nearest code value of W / S, times S."""

    @staticmethod
    def forward(
        ctx: Any,
        weight: Tensor,
        scale: Tensor,
        values: Tensor,
        zero: Tensor | None,
        ends: tuple[Tensor, Tensor],
        spec: QuantSpec,
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
        to_weight = to_scale = to_values = None
        if ctx.needs_input_grad[0]:
            to_weight = gradient * inside
        if ctx.needs_input_grad[1]:
            to_scale = (gradient * (q - ratio * inside)).sum_to_size(scale.shape)
        if ctx.needs_input_grad[2]:
            scaled = gradient * scale
            to_values = torch.stack([(scaled * (codes == k)).sum() for k in range(ctx.entries)])
        return to_weight, to_scale, to_values, None, None, None


class _ScaleGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0] * ctx.factor, None


class _RoundThrough(torch.autograd.Function):
    """Round to the nearest whole number; the gradient passes as if nothing had happened (STE)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0]


def fake_quantise(
    weight_OI: Tensor, scale_OI: Tensor, spec: QuantSpec, values: Tensor, zero_OI: Tensor | None = None
) -> Tensor:
    """Return the weight as `spec` would store it, differentiable in weight, scale and code book.

    Args:
        weight_OI: latent weight.
        scale_OI: scale of every weight, or something that broadcasts to it (`scales.expand`, itself differentiable).
        spec: code book.
        values: sorted code book (`codes.code_values(spec)`, or a table that trains).
        zero_OI: fixed zero points of asymmetric codes; `fake_quantise_range` learns them.
    """
    values = values.to(weight_OI.dtype)
    margin = 0.5 if spec.code == "half" else 0.0
    ends = values[0].detach() - margin, values[-1].detach() + margin
    if zero_OI is not None:
        ends = ends[0] - zero_OI, ends[1] - zero_OI
    return _FakeQuantise.apply(weight_OI, scale_OI, values, zero_OI, ends, spec)


def lsq_factor(spec: QuantSpec, out_features: int, in_features: int) -> float:
    """Return LSQ's gradient scale 1 / sqrt(N Qp): N weights share a stored number, Qp is the largest code value.

    It makes a scale's update, relative to its size, as large as a weight's. Low-rank factors count as many
    weights each as there are weights to a factor entry.
    """
    sharing = out_features * in_features / spec.scale_count(out_features, in_features)
    largest = {"half": (2**spec.bits - 1) / 2, "integer": 2 ** (spec.bits - 1) - 1, "lut": 1.0}
    return 1 / math.sqrt(sharing * largest.get(spec.code, 2**spec.bits - 1))


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Return x unchanged, to the bit, with its gradient multiplied by a factor (`lsq_factor`)."""
    return _ScaleGradient.apply(x, factor)


def round_through(x: Tensor) -> Tensor:
    """Round to the nearest whole number with the straight-through gradient."""
    return _RoundThrough.apply(x)


def fake_quantise_range(weight: Tensor, low: Tensor, high: Tensor, bits: int) -> Tensor:
    """Return asymmetric fake-quantised weights with both ends of their range learned.

    s = (high - low) / (2^b - 1), z = round(-low / s), ŵ = s (clip(round(w / s) + z, 0, 2^b - 1) - z). A weight above
    the range pulls on `high`, one below on `low`.

    Args:
        weight: latent weight.
        low, high: ends of the range, broadcast to the weight; `low` ≤ 0 ≤ `high`, so that zero is a code.
        bits: bits of a code.
    """
    most = 2**bits - 1
    scale = ((high - low) / most).clamp_min(TINY)
    zero = round_through(-low / scale).clamp(0, most)
    return scale * ((round_through(weight / scale) + zero).clamp(0, most) - zero)
