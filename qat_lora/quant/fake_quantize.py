"""Fake quantisation: a float weight that computes as its quantised self, with gradients for weight, scale and table.

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

Where the range of asymmetric codes is learned (`layers.latent.Range`), dŵ/dz is 0 inside the range, where codes shift
with the zero point, and -s outside. `ste` instead of LSQ is the older rule for trained weights: the gradient passes
everywhere. LSQ's factor 1 / sqrt(N Q) on the gradient of a scale is left out: AdamW divides every gradient by its own
size, so a constant factor changes no step.

Sources: LSQ (arXiv 1902.08153); ParetoQ (arXiv 2502.02631); range learning, LSQ+ (arXiv 2004.09576).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from qat_lora.quant.codes import nearest
from qat_lora.quant.scales import away_from_zero
from qat_lora.quant.spec import QuantSpec

Gradient = Literal["lsq", "ste"]


class _FakeQuantize(torch.autograd.Function):
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
        to_weight = to_scale = to_values = to_zero = None
        if ctx.needs_input_grad[0]:
            to_weight = gradient * inside
        if ctx.needs_input_grad[1]:
            to_scale = (gradient * (q - ratio * inside)).sum_to_size(scale.shape)
        if ctx.needs_input_grad[2]:
            scaled = gradient * scale
            to_values = torch.stack([(scaled * (codes == k)).sum() for k in range(ctx.entries)])
        if ctx.needs_input_grad[3]:
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
    """Return the weight as `spec` would store it, differentiable in weight, scale and code book.

    Args:
        weight_OI: latent weight.
        scale_OI: scale of every weight, or something that broadcasts to it (`scales.expand`, itself differentiable).
        spec: code book.
        values: sorted code book (`codes.code_values(spec)`, or a table that trains).
        zero_OI: zero points of asymmetric codes, shaped like the scale.
        gradient: `lsq`, or `ste`, which lets weights beyond the range train as if they were inside.
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


def half_through(x: Tensor) -> Tensor:
    """Round to float16, the stored type, in the tensor's own type and with the straight-through gradient."""
    return _StraightThrough.apply(x, lambda tensor: tensor.half().to(tensor.dtype))
