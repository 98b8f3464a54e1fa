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

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from qat_lora.errors import ConfigError
from qat_lora.quant.codes import code_values, decode, first_value, nearest
from qat_lora.quant.gptq import BLOCK, Curvature, Grid, descend, gptq, refit_scales, slope_of
from qat_lora.quant.scales import (
    Cost,
    Scales,
    absmax_scale,
    away_from_zero,
    clip_scale,
    expand,
    importance_cost,
    low_rank_scales,
    output_cost,
    range_scale,
)
from qat_lora.quant.spec import QuantSpec
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

    codes_OI: Tensor
    """uint8 indices into `values`."""
    values: Tensor
    """float32 code book."""
    scales: Scales
    """float16 numbers held as float32."""
    zeros: Tensor | None = None
    """Whole zero points [rows, G] as float32, with asymmetric codes."""

    def to(self, device: torch.device) -> QuantizedWeight:
        """Return the same on another device."""
        if self.codes_OI.device == device:
            return self
        xla_mark_step()  # one graph for all that is read
        zeros = None if self.zeros is None else self.zeros.to(device)
        scales = tuple(scale.to(device) for scale in self.scales)
        return QuantizedWeight(self.codes_OI.to(device), self.values.to(device), scales, zeros)

    def split(self, layers: int) -> list[QuantizedWeight]:
        """Return the parts of layers whose rows lie one under the other; scales must be by channel or group."""
        if layers == 1:
            return [self]
        zeros = [None] * layers if self.zeros is None else self.zeros.chunk(layers)
        parts = zip(self.codes_OI.chunk(layers), self.scales[0].chunk(layers), zeros, strict=True)
        return [QuantizedWeight(codes, self.values, (scale,), zero) for codes, scale, zero in parts]

    @classmethod
    def joined(cls, layers: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """Return what `split` took apart."""
        if len(layers) == 1:
            return layers[0]
        codes, scales = [layer.codes_OI for layer in layers], [layer.scales[0] for layer in layers]
        zeros = [layer.zeros for layer in layers if layer.zeros is not None]
        return cls(torch.cat(codes), layers[0].values, (torch.cat(scales),), torch.cat(zeros) if zeros else None)

    def grid(self, spec: QuantSpec, dtype: torch.dtype = torch.float64) -> Grid:
        """Return the meaning of the codes."""
        shape = self.codes_OI.shape
        scale = away_from_zero(expand(self.scales, spec.group_size, *shape)).to(dtype).expand(shape)
        zero = None
        if self.zeros is not None:
            zero = expand((self.zeros,), spec.group_size, *shape).to(dtype).expand(shape)
        return Grid(self.values.to(dtype), scale, zero, first_value(spec))

    def dense(self, spec: QuantSpec) -> Tensor:
        """Return codes times scales, float32 [O, I], computed as `QuantLinear` does."""
        shape = self.codes_OI.shape
        chosen = decode(self.codes_OI, self.values)
        if self.zeros is not None:
            chosen = chosen - expand((self.zeros,), spec.group_size, *shape)
        return chosen * expand(self.scales, spec.group_size, *shape)


def quantize_weight(
    weight_OI: Tensor,
    spec: QuantSpec,
    method: Method,
    calibration: Tensor | Curvature | None = None,
    rounds: int = ROUNDS,
) -> QuantizedWeight:
    """Quantise one weight matrix.

    Args:
        weight_OI: the weight, any float type.
        spec: how to store it.
        method: one of `METHODS`.
        calibration: mean of x xᵀ over calibration tokens [I, I], or its curvature where it serves several calls, or
            several layers; needed by `awq`, `gptq` and `descent`, used for importance by `mse`.
        rounds: of `descent`.

    Raises:
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
    for _ in range(rounds):
        if spec.sharing != "lowrank":
            fitted = refit_scales(slope, moment, grid, now.codes_OI, now.scales[0], spec)
            now = now._replace(scales=(fitted,))
            grid = now.grid(spec, torch.float32)
            slope = slope_of(weight, grid.dense(now.codes_OI), moment)
        codes, slope = descend(slope, moment, grid, now.codes_OI, SWEEPS)
        now = now._replace(codes_OI=codes)
    return now


def _importance(curvature: Curvature, weight_RI: Tensor) -> Tensor:
    """Return the mean square of every weight's input, or what broadcasts to it, float32."""
    importance_LI = curvature.second_moment_LII.diagonal(dim1=1, dim2=2).float()
    layers = len(importance_LI)
    return importance_LI if layers == 1 else importance_LI.repeat_interleave(len(weight_RI) // layers, 0)


def _scales(
    weight_RI: Tensor, spec: QuantSpec, importance: Tensor | None, cost: Cost | None
) -> tuple[Scales, Tensor | None]:
    """Return stored scales and zero points: float16 numbers, so that codes are chosen for what will be loaded."""
    if spec.sharing == "lowrank":
        return tuple(s.half().float() for s in low_rank_scales(weight_RI, spec, importance)), None
    if spec.code == "asymmetric":
        scale, zeros = range_scale(weight_RI, spec, cost)
        return (scale,), zeros
    scale = absmax_scale(weight_RI, spec) if cost is None else clip_scale(weight_RI, spec, cost)
    return (scale.half().float(),), None


def _rounded(
    weight_RI: Tensor, spec: QuantSpec, importance: Tensor | None = None, cost: Cost | None = None
) -> QuantizedWeight:
    """Return the codes nearest to a weight, or to the columns of one group, with the scales that cost least."""
    values, (scales, zeros) = code_values(spec).to(weight_RI.device), _scales(weight_RI, spec, importance, cost)
    ratio = weight_RI / away_from_zero(expand(scales, spec.group_size, *weight_RI.shape))
    ratio = ratio if zeros is None else ratio + expand((zeros,), spec.group_size, *weight_RI.shape)
    return QuantizedWeight(nearest(ratio, values, spec)[1], values, scales, zeros)


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
    size, one_group = spec.group_size, dataclasses.replace(spec, sharing="channel", group_size=None)

    def chosen(number: Number, left_RC: Tensor, given: Tensors) -> tuple[Grid, Tensors]:
        left, importance = left_RC.float(), part(given[0], number, size, 1)
        group = _rounded(left, one_group, importance, importance_cost(left, one_group, importance))
        kept = [*group.scales, *([] if group.zeros is None else [group.zeros])]
        return group.grid(one_group, root.dtype).by_column(0, left.shape[1]), kept

    codes, kept = gptq(wide, root, size, chosen, [whole_parts(importance, size, 1)])
    scale, *zeros = (x.squeeze(2).T.contiguous() for x in kept)
    return QuantizedWeight(codes, code_values(spec).to(weight_RI.device), (scale,), *zeros)
