"""From a full-precision weight to codes and scales: five methods, named by what each minimises.

* `absmax`: scale from the largest weight, round to nearest. What most tools mean by "quantised"; the yardstick.
* `mse`: the clip with the least squared weight error, each input weighted by its second moment where text is given.
* `awq`: the clip that disturbs the outputs least, group by group (AWQ's clip search), round to nearest.
* `gptq`: error-compensated rounding, so that the *output* changes least.
* `descent`: from there, coordinate descent over the codes alternates with least-squares scales until output errors
  stop falling. At 2 bits this is worth more than all that training on few tokens can do afterwards.

Source: AWQ (arXiv 2306.00978) for the clip search; the module `gptq` for the others.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from qat_lora.errors import ConfigError
from qat_lora.quant.codes import code_values, decode, first_value, nearest
from qat_lora.quant.gptq import BLOCK, Curvature, Grid, Steps, descend, gptq, refit_parts, refit_scales, slope_of
from qat_lora.quant.scales import (
    Cost,
    Meaning,
    Scales,
    absmax_scale,
    away_from_zero,
    clip_scale,
    expand,
    importance_cost,
    low_rank_scales,
    meaning,
    multiples,
    output_cost,
    range_scale,
    step_scales,
    stored,
)
from qat_lora.quant.spec import SUPER, QuantSpec
from qat_lora.runtime.loop import Number, Tensors, part, whole_parts
from qat_lora.runtime.xla.runtime import xla_mark_step

Method = Literal["absmax", "mse", "awq", "gptq", "descent"]
METHODS: tuple[str, ...] = get_args(Method)
COMPENSATED = ("gptq", "descent")
NEED_TEXT = ("awq", *COMPENSATED)
LARGEST = 32_000.0  # weight whose scale fits float16 with every code book and scale search
ROUNDS, SWEEPS = 3, 2  # of scale refits, and of descent after each


class QuantizedWeight(NamedTuple):
    """A weight as codes and scales."""

    codes_OI: Tensor  # uint8 indices into `values`
    values: Tensor  # float32 code book
    scales: Scales  # float16 numbers held as float32
    whole: Scales = ()  # whole numbers [rows, G] as float32, by the names in `QuantSpec.whole`

    def to(self, device: torch.device) -> QuantizedWeight:
        """Return the same on another device."""
        if self.codes_OI.device == device:
            return self
        xla_mark_step()  # one graph for all that is read
        scales, whole = (tuple(x.to(device) for x in numbers) for numbers in (self.scales, self.whole))
        return QuantizedWeight(self.codes_OI.to(device), self.values.to(device), scales, whole)

    def split(self, layers: int) -> list[QuantizedWeight]:
        """Return the parts of layers whose rows lie one under the other; scales must be by channel or group."""
        if layers == 1:
            return [self]
        parts = zip(*(x.chunk(layers) for x in (self.codes_OI, *self.scales, *self.whole)), strict=True)
        end = 1 + len(self.scales)
        return [QuantizedWeight(part[0], self.values, part[1:end], part[end:]) for part in parts]

    @classmethod
    def joined(cls, layers: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """Return what `split` took apart."""
        if len(layers) == 1:
            return layers[0]
        scales, whole = (
            tuple(map(torch.cat, zip(*numbers, strict=True)))
            for numbers in ([layer.scales for layer in layers], [layer.whole for layer in layers])
        )
        return cls(torch.cat([layer.codes_OI for layer in layers]), layers[0].values, scales, whole)

    def meaning(self, spec: QuantSpec) -> Meaning:
        """Return what code values stand for."""
        return meaning(spec, self.scales, self.whole, *self.codes_OI.shape)

    def grid(self, spec: QuantSpec, dtype: torch.dtype = torch.float64) -> Grid:
        """Return the meaning of the codes, a minimum as a zero point."""
        scale, zero, minimum = self.meaning(spec)
        scale, shape = away_from_zero(scale).to(dtype), self.codes_OI.shape
        zero = zero if minimum is None else minimum.to(dtype) / scale
        zero = None if zero is None else zero.to(dtype).expand(shape)
        return Grid(self.values.to(dtype), scale.expand(shape), zero, first_value(spec))

    def dense(self, spec: QuantSpec) -> Tensor:
        """Return what the codes stand for, float32 [O, I], computed as `QuantLinear` does."""
        return self.meaning(spec).of(decode(self.codes_OI, self.values))


def quantize_weight(
    weight_OI: Tensor,
    spec: QuantSpec,
    method: Method,
    calibration: Tensor | Curvature | None = None,
    rounds: int = ROUNDS,
) -> QuantizedWeight:
    """Quantise one weight matrix of any float type.

    `calibration` is the mean of x xᵀ over calibration tokens [I, I], or its curvature where it serves several calls, or
    several layers; needed by `awq`, `gptq` and `descent`, used for importance by `mse`. `rounds` are of `descent`.

    ConfigError: unknown method, one that lacks its calibration, or a weight that is not finite or too large.
    """
    if method not in METHODS:
        raise ConfigError(f"init: {method!r} is unknown; allowed: {', '.join(METHODS)}")
    largest = float(weight_OI.abs().max())
    if not math.isfinite(largest):
        raise ConfigError("weight: holds NaN or infinite entries; check the checkpoint")
    if largest > LARGEST:
        raise ConfigError(f"weight: holds entries above {LARGEST:g}, whose scales float16 cannot hold")
    if method in NEED_TEXT and calibration is None:
        raise ConfigError(f"init: {method} needs calibration text; give --dataset, or choose mse or absmax")
    spec.check_width("weight", weight_OI.shape[1])
    weight = weight_OI.float()
    curvature = Curvature(calibration) if isinstance(calibration, Tensor) else calibration
    if method in COMPENSATED:
        assert curvature is not None
        start = _compensated(weight, spec, curvature)
        return start if method == "gptq" else refine(weight, spec, start, curvature, rounds)
    if method == "absmax":
        return _rounded(weight, spec)
    if method == "awq":
        assert curvature is not None
        moment_II = curvature.second_moment_LII[0].float()
        return _rounded(weight, spec, moment_II.diagonal(), output_cost(weight, spec, moment_II))
    importance = None if curvature is None else _importance(curvature, weight)
    return _rounded(weight, spec, importance, importance_cost(weight, spec, importance))


def refine(
    weight_RI: Tensor, spec: QuantSpec, start: QuantizedWeight, curvature: Curvature, rounds: int = ROUNDS
) -> QuantizedWeight:
    """Return a start after rounds of refitted scales and coordinate descent; the output error never rises.

    Low-rank scales stay as they are: the least-squares problem of a row is no longer small.
    """
    weight, moment, now = weight_RI.float(), curvature.narrow_LII, start
    grid = now.grid(spec, torch.float32)
    slope = slope_of(weight, grid.dense(now.codes_OI), moment)
    levels = () if spec.sharing == "lowrank" else ("scales", "whole") if spec.step_bits else ("scales",)
    for _ in range(rounds):
        for level in levels:
            now = _refitted(now, spec, level, slope, moment)
            grid = now.grid(spec, torch.float32)
            slope = slope_of(weight, grid.dense(now.codes_OI), moment)
        codes, slope = descend(slope, moment, grid, now.codes_OI, SWEEPS)
        now = now._replace(codes_OI=codes)
    return now


def _refitted(now: QuantizedWeight, spec: QuantSpec, level: str, slope: Tensor, moment: Tensor) -> QuantizedWeight:
    """Return a weight whose scales, or with `whole` the multiples of a K-quant, are refitted to its codes."""
    if spec.step_bits is None:
        grid = now.grid(spec, torch.float32)
        return now._replace(scales=(refit_scales(slope, moment, grid, now.codes_OI, now.scales[0], spec),))
    assert spec.group_size is not None
    shape, q = now.codes_OI.shape, decode(now.codes_OI, now.values)
    if level == "scales":
        numbers, others, width, steps = now.scales, now.whole, spec.group_size, Steps(SUPER, stored, stored, (0.0,))
    else:
        numbers, others, width = now.whole, now.scales, SUPER
        steps = Steps(spec.group_size, partial(multiples, spec, 1), partial(multiples, spec, 0), (-0.5, 0.5))
    units = [expand((x,), width, *shape).expand(shape) for x in others]
    bases = [q * units[0], -units[1] if len(units) > 1 else torch.zeros_like(q)]
    both = [numbers[0], numbers[-1]]  # without minima the second has no effect
    found = tuple(refit_parts(slope, moment, bases, both, steps)[: len(numbers)])
    return now._replace(scales=found) if level == "scales" else now._replace(whole=found)


def _importance(curvature: Curvature, weight_RI: Tensor) -> Tensor:
    """Return the mean square of every weight's input, or what broadcasts to it, float32."""
    importance_LI = curvature.second_moment_LII.diagonal(dim1=1, dim2=2).float()
    layers = len(importance_LI)
    return importance_LI if layers == 1 else importance_LI.repeat_interleave(len(weight_RI) // layers, 0)


def _scales(weight_RI: Tensor, spec: QuantSpec, importance: Tensor | None, cost: Cost | None) -> tuple[Scales, Scales]:
    """Return stored scales and whole numbers: float16 ones, so that codes are chosen for what will be loaded."""
    if spec.sharing == "lowrank":
        return tuple(s.half().float() for s in low_rank_scales(weight_RI, spec, importance)), ()
    if spec.step_bits is not None:
        return step_scales(weight_RI, spec, cost)
    if spec.code == "asymmetric":
        scale, zeros = range_scale(weight_RI, spec, cost)
        return (scale,), (zeros,)
    scale = absmax_scale(weight_RI, spec) if cost is None else clip_scale(weight_RI, spec, cost)
    return (scale.half().float(),), ()


def _rounded(
    weight_RI: Tensor, spec: QuantSpec, importance: Tensor | None = None, cost: Cost | None = None
) -> QuantizedWeight:
    """Return the codes nearest to a weight, or to some groups' columns, with the scales that cost least."""
    values, (scales, whole) = code_values(spec).to(weight_RI.device), _scales(weight_RI, spec, importance, cost)
    scale, zero, minimum = meaning(spec, scales, whole, *weight_RI.shape)
    ratio = (weight_RI if minimum is None else weight_RI + minimum) / away_from_zero(scale)
    ratio = ratio if zero is None else ratio + zero
    return QuantizedWeight(nearest(ratio, values, spec)[1], values, scales, whole)


def _compensated(weight_RI: Tensor, spec: QuantSpec, curvature: Curvature) -> QuantizedWeight:
    """Return the GPTQ start; the scale of a group is chosen from its weights as compensation has left them."""
    importance, root = _importance(curvature, weight_RI), curvature.inverse_root_LII
    wide = weight_RI.to(root.dtype)
    if spec.sharing != "group":  # scales that span columns are fixed before rounding begins
        whole = _rounded(weight_RI, spec, importance, importance_cost(weight_RI, spec, importance))
        grid = whole.grid(spec, root.dtype)

        def fixed(number: Number, _: Tensor, given: Tensors) -> tuple[Grid, Tensors]:
            return grid.of(given).by_column(number, BLOCK), []

        return whole._replace(codes_OI=gptq(wide, root, BLOCK, fixed, grid.whole(BLOCK).parts())[0])
    assert spec.group_size is not None
    size = SUPER if spec.step_bits else spec.group_size  # the groups of a K-quant get their scales together

    def chosen(number: Number, left_RC: Tensor, given: Tensors) -> tuple[Grid, Tensors]:
        left, importance = left_RC.float(), part(given[0], number, size, 1)
        found = _rounded(left, spec, importance, importance_cost(left, spec, importance))
        return found.grid(spec, root.dtype).by_column(0, left.shape[1]), [*found.scales, *found.whole]

    codes, kept = gptq(wide, root, size, chosen, [whole_parts(importance, size, 1)])
    numbers = tuple(x.transpose(0, 1).flatten(1) for x in kept)  # by block first
    end = len(numbers) - len(spec.whole)
    return QuantizedWeight(codes, code_values(spec).to(weight_RI.device), numbers[:end], numbers[end:])
