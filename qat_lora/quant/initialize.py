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
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from qat_lora.errors import ConfigError
from qat_lora.quant.codes import code_values, counts_from, decode, encode
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

Method = Literal["absmax", "mse", "awq", "gptq", "descent"]
METHODS: tuple[str, ...] = get_args(Method)
NEED_TEXT = ("awq", "gptq", "descent")
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

    def grid(self, spec: QuantSpec, dtype: torch.dtype = torch.float64) -> Grid:
        """Return the meaning of the codes."""
        shape = self.codes_OI.shape
        scale = away_from_zero(expand(self.scales, spec.group_size, *shape)).to(dtype).expand(shape)
        zero = None
        if self.zeros is not None:
            zero = expand((self.zeros,), spec.group_size, *shape).to(dtype).expand(shape)
        return Grid(self.values.to(dtype), scale, zero, counts_from(self.values))

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
        calibration: mean of x xᵀ over calibration tokens [I, I], or its curvature where it serves several calls;
            needed by `awq`, `gptq` and `descent`, used for importance by `mse`.
        rounds: of `descent`.

    Raises:
        ConfigError: unknown method, one that lacks its calibration, or a weight that is not finite or too large.
    """
    if method not in METHODS:
        raise ConfigError(f"init: {method!r} is unknown; allowed: {', '.join(METHODS)}")
    if not torch.isfinite(weight_OI).all():
        raise ConfigError("weight: holds NaN or infinite entries; check the checkpoint")
    if weight_OI.abs().max() > LARGEST:
        raise ConfigError(f"weight: holds entries above {LARGEST:g}, whose scales float16 cannot hold")
    if method in NEED_TEXT and calibration is None:
        raise ConfigError(f"init: {method} needs calibration text; give --dataset, or choose mse or absmax")
    weight = weight_OI.float()
    curvature = Curvature(calibration) if isinstance(calibration, Tensor) else calibration
    if method in ("gptq", "descent"):
        assert curvature is not None
        start = _compensated(weight, spec, curvature)
        return start if method == "gptq" else refine(weight, spec, start, curvature, rounds)
    moment = None if method == "absmax" or curvature is None else curvature.second_moment_II.float()
    return _rounded(weight, spec, method, moment)


def refine(
    weight_OI: Tensor, spec: QuantSpec, start: QuantizedWeight, curvature: Curvature, rounds: int = ROUNDS
) -> QuantizedWeight:
    """Return a start after rounds of refitted scales and coordinate descent; the output error never rises.

    Low-rank scales stay as they are: the least-squares problem of a row is no longer small.
    """
    weight, moment, now = weight_OI.float(), curvature.narrow_II, start
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


def _scales(
    weight_OI: Tensor, spec: QuantSpec, method: Method, moment_II: Tensor | None
) -> tuple[Scales, Tensor | None]:
    """Return stored scales and zero points: float16 numbers, so that codes are chosen for what will be loaded."""
    importance = None if moment_II is None else moment_II.diagonal()
    if spec.sharing == "lowrank":
        return tuple(s.half().float() for s in low_rank_scales(weight_OI, spec, importance)), None
    cost: Cost | None = None
    if method == "awq":
        assert moment_II is not None
        cost = output_cost(weight_OI, spec, moment_II)
    elif method != "absmax":
        cost = importance_cost(weight_OI, spec, importance)
    if spec.code == "asymmetric":
        scale, zeros = range_scale(weight_OI, spec, cost)
        return (scale,), zeros
    scale = absmax_scale(weight_OI, spec) if cost is None else clip_scale(weight_OI, spec, cost)
    return (scale.half().float(),), None


def _rounded(weight_OI: Tensor, spec: QuantSpec, method: Method, moment_II: Tensor | None) -> QuantizedWeight:
    """Return the codes nearest to a weight, or to the columns of one group, with the scales that a method chooses."""
    values, (scales, zeros) = code_values(spec).to(weight_OI.device), _scales(weight_OI, spec, method, moment_II)
    ratio = weight_OI / away_from_zero(expand(scales, spec.group_size, *weight_OI.shape))
    ratio = ratio if zeros is None else ratio + expand((zeros,), spec.group_size, *weight_OI.shape)
    return QuantizedWeight(encode(ratio, values), values, scales, zeros)


def _compensated(weight_OI: Tensor, spec: QuantSpec, curvature: Curvature) -> QuantizedWeight:
    """Return the GPTQ start; the scale of a group is chosen from its weights as compensation has left them."""
    moment, wide = curvature.second_moment_II.float(), weight_OI.double()
    if spec.sharing != "group":  # scales that span columns are fixed before rounding begins
        whole = _rounded(weight_OI, spec, "gptq", moment)
        grid = whole.grid(spec)
        codes = gptq(wide, curvature.inverse_root_II, BLOCK, lambda start, stop, _: grid.by_column(start, stop))
        return whole._replace(codes_OI=codes)
    assert spec.group_size is not None
    one_group = dataclasses.replace(spec, sharing="channel", group_size=None)
    groups: list[QuantizedWeight] = []

    def grid_of(start: int, stop: int, left_OI: Tensor) -> Grid:
        groups.append(_rounded(left_OI.float(), one_group, "gptq", moment[start:stop, start:stop]))
        return groups[-1].grid(one_group).by_column(0, stop - start)

    codes = gptq(wide, curvature.inverse_root_II, spec.group_size, grid_of)
    zeros = [group.zeros for group in groups if group.zeros is not None]
    scale = torch.cat([group.scales[0] for group in groups], 1)
    return QuantizedWeight(codes, groups[0].values, (scale,), torch.cat(zeros, 1) if zeros else None)
