"""From a full-precision weight to codes and scales: five methods, named by what each minimises.

* `absmax`: scale from the largest weight, round to nearest. What most tools mean by "quantised"; the yardstick.
* `mse`: the clip with the least squared weight error, each input weighted by its second moment where text is given.
* `awq`: the clip that disturbs the outputs least, group by group (AWQ's clip search), round to nearest.
* `gptq`: error-compensated rounding. Column by column, the rounding error is pushed onto the columns not yet
  rounded, along the inverse second moment of the inputs, so that the *output* changes least.
* `descent`: from there, coordinate descent over the codes alternates with least-squares scales until output errors
  stop falling. At 2 bits this is worth more than all that training on few tokens can do afterwards.

Source: AWQ (arXiv 2306.00978) for the clip search; `gptq` names the others.
"""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from qat_lora.errors import ConfigError
from qat_lora.quant.codes import code_values, encode
from qat_lora.quant.gptq import BLOCK, Curvature, Grid, descend, gptq, make_grid, refit_scales, slope_of
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
        out_features, in_features = self.codes_OI.shape
        return make_grid(self.values, self.scales, self.zeros, spec.group_size, (out_features, in_features), dtype)

    def dense(self, spec: QuantSpec) -> Tensor:
        """Return codes times scales, float32 [O, I], computed as `QuantLinear` does."""
        out_features, in_features = self.codes_OI.shape
        chosen = self.values[self.codes_OI.long()]
        if self.zeros is not None:
            chosen = chosen - expand((self.zeros,), spec.group_size, out_features, in_features)
        return chosen * expand(self.scales, spec.group_size, out_features, in_features)


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
    values, (scales, zeros) = code_values(spec).to(weight.device), _scales(weight, spec, method, moment)
    return QuantizedWeight(_nearest_codes(weight, values, scales, zeros, spec), values, scales, zeros)


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
    """Return stored scales and zero points of a weight, or of the columns of one group."""
    importance = None if moment_II is None else moment_II.diagonal()
    if spec.sharing == "lowrank":
        return tuple(_half(s) for s in low_rank_scales(weight_OI, spec, importance_I=importance)), None
    cost: Cost | None = None
    if method == "awq":
        assert moment_II is not None
        cost = output_cost(weight_OI, spec, moment_II)
    elif method != "absmax":
        cost = importance_cost(weight_OI, spec, importance)
    if spec.code == "asymmetric":
        scale, zeros = range_scale(weight_OI, spec, cost)
        return (_half(scale),), zeros
    return (_half(absmax_scale(weight_OI, spec) if cost is None else clip_scale(weight_OI, spec, cost)),), None


def _half(tensor: Tensor) -> Tensor:
    """Round to float16, so that codes are chosen for the scales that will be loaded."""
    return tensor.half().float()


def _nearest_codes(weight_OI: Tensor, values: Tensor, scales: Scales, zeros: Tensor | None, spec: QuantSpec) -> Tensor:
    """Return the codes nearest to a weight."""
    shape = weight_OI.shape[0], weight_OI.shape[1]
    ratio = weight_OI / away_from_zero(expand(scales, spec.group_size, *shape))
    return encode(ratio if zeros is None else ratio + expand((zeros,), spec.group_size, *shape), values)


def _compensated(weight_OI: Tensor, spec: QuantSpec, curvature: Curvature) -> QuantizedWeight:
    """Return the GPTQ start; the scale of a group is chosen from its weights as compensation has left them."""
    moment, inverse_root = curvature.second_moment_II.float(), curvature.inverse_root_II
    values = code_values(spec).to(weight_OI.device)
    if spec.sharing != "group":  # scales that span columns are fixed before rounding begins
        scales, zeros = _scales(weight_OI, spec, "gptq", moment)
        whole = QuantizedWeight(torch.zeros_like(weight_OI, dtype=torch.uint8), values, scales, zeros)
        grid = whole.grid(spec)
        codes = gptq(weight_OI.double(), inverse_root, BLOCK, lambda start, stop, _: grid.columns(start, stop))
        return whole._replace(codes_OI=codes)
    assert spec.group_size is not None
    one_group = dataclasses.replace(spec, sharing="channel", group_size=None)
    found: list[tuple[Tensor, Tensor | None]] = []

    def grid_of(start: int, stop: int, members: Tensor) -> Grid:
        (scale,), zero = _scales(members.float(), one_group, "gptq", moment[start:stop, start:stop])
        found.append((scale, zero))
        return make_grid(values, (scale,), zero, None, (members.shape[0], members.shape[1]))

    codes = gptq(weight_OI.double(), inverse_root, spec.group_size, grid_of)
    zeros = torch.cat([zero for _, zero in found if zero is not None], 1) if spec.code == "asymmetric" else None
    return QuantizedWeight(codes, values, (torch.cat([scale for scale, _ in found], 1),), zeros)
