"""Fake quantisation: a float weight that computes as its quantised self, with gradients for weight, scale and table.

Rounding has no useful derivative, so gradients are conventions; ParetoQ found these best at each width:

* `integer`, `asymmetric` and `lut`: LSQ. Inside the range dŵ/dw = 1 and dŵ/ds = q - w/s; outside 0 and the end q.
* `half` (2 bits): the same with the range widened by half a step ("stretched elastic"), so that all cells are equally
  wide; ending it at the outermost code would freeze a third of the weights.

The forward is code value times scale, in `QuantLinear`'s order: trained weights and their saved codes agree to the last
bit, which w + (ŵ - w).detach() would not. LSQ's factor on the scale's gradient is left out: AdamW cancels it.

Sources: LSQ (arXiv 1902.08153); ParetoQ (arXiv 2502.02631); range learning, LSQ+ (arXiv 2004.09576).
"""

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
