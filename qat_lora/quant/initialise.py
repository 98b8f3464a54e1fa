"""From a full-precision weight to codes and scales: three starts, each exact about what it minimises.

* `absmax`: scale from the largest weight, round to nearest. What most tools mean by "quantised"; the yardstick.
* `mse`: the clip that loses least squared weight error, round to nearest.
* `gptq`: error-compensated rounding. Column by column, the rounding error is pushed onto the columns not yet
  rounded, along the inverse second moment of the inputs, so that the *output* changes least. At 2 bits this is
  worth more than everything that training with few tokens can do afterwards.

All arithmetic is float64 on the way: the inverse of a nearly singular second moment is where float32 versions
of GPTQ break, and one layer at a time the cost does not matter.

Source: Frantar et al., GPTQ (arXiv 2210.17323), with scales chosen by importance-weighted clipping.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from qat_lora.errors import ConfigError
from qat_lora.quant.codes import code_values, decode, encode
from qat_lora.quant.scales import (
    Scales,
    absmax_scale,
    away_from_zero,
    expand,
    low_rank_scales,
    mse_scale,
)
from qat_lora.quant.spec import QuantSpec

Method = Literal["absmax", "mse", "gptq"]
METHODS: tuple[str, ...] = get_args(Method)
DAMPING = 0.01  # added to the second moment's diagonal, as a share of its mean: GPTQ's own default
LARGEST = 32_000.0  # weight whose scale is surely a float16 number, with every code book and scale search
BLOCK = 128  # columns rounded before their joint error is pushed on: fewer, larger matrix products


class QuantisedWeight(NamedTuple):
    """A weight as codes and scales."""

    codes_OI: Tensor
    """uint8 indices into `values`."""
    values: Tensor
    """float32 code book."""
    scales: Scales
    """float16 numbers held as float32."""

    def dense(self, spec: QuantSpec) -> Tensor:
        """Return codes times scales, float32 [O, I]."""
        out_features, in_features = self.codes_OI.shape
        return decode(self.codes_OI, self.values) * expand(self.scales, spec.group_size, out_features, in_features)


def quantise_weight(
    weight_OI: Tensor, spec: QuantSpec, method: Method, second_moment_II: Tensor | None = None
) -> QuantisedWeight:
    """Quantise one weight matrix.

    Args:
        weight_OI: the weight, any float type.
        spec: how to store it.
        method: `absmax`, `mse` or `gptq`.
        second_moment_II: mean of x xᵀ over calibration tokens; needed by `gptq`, used for importance by `mse`.

    Raises:
        ConfigError: unknown method, `gptq` without calibration, or a weight that is not finite or too large.
    """
    if method not in METHODS:
        raise ConfigError(f"init: {method!r} is unknown; allowed: {', '.join(METHODS)}")
    if not torch.isfinite(weight_OI).all():
        raise ConfigError("weight: holds NaN or infinite entries; check the checkpoint")
    if weight_OI.abs().max() > LARGEST:
        raise ConfigError(f"weight: holds entries above {LARGEST:g}, whose scales float16 cannot hold")
    if method == "gptq":
        if second_moment_II is None:
            raise ConfigError("init: gptq needs calibration text; give --dataset, or choose mse or absmax")
        return _gptq(weight_OI.double(), spec, second_moment_II.double())
    weight = weight_OI.float()
    importance = None if second_moment_II is None or method == "absmax" else second_moment_II.diagonal().float()
    scales = _scales(weight, spec, method, importance)
    per_weight = away_from_zero(expand(scales, spec.group_size, *weight.shape))
    values = _half(code_values(spec)).to(weight.device)
    return QuantisedWeight(encode(weight / per_weight, values), values, scales)


def _scales(weight_OI: Tensor, spec: QuantSpec, method: Method, importance_I: Tensor | None) -> Scales:
    if spec.sharing == "lowrank":
        return tuple(_half(s) for s in low_rank_scales(weight_OI, spec))
    if method == "absmax":
        return (_half(absmax_scale(weight_OI, spec)),)
    return (_half(mse_scale(weight_OI, spec, importance_I)),)


def _half(tensor: Tensor) -> Tensor:
    """Round to what is stored, so that codes are chosen for the scales that will be loaded."""
    return tensor.half().float()


def _gptq(weight_OI: Tensor, spec: QuantSpec, second_moment_II: Tensor) -> QuantisedWeight:
    weight = weight_OI.clone()
    out_features, in_features = weight.shape
    importance = second_moment_II.diagonal()
    size = spec.group_size if spec.sharing == "group" else None
    scale_columns = None
    if size is None:  # scales that span columns are fixed before rounding begins
        scales = _scales(weight.float(), spec, "gptq", importance.float())
        per_weight = away_from_zero(expand(scales, spec.group_size, out_features, in_features)).double()
        scale_columns = per_weight.expand(out_features, in_features)
    inverse_root = _inverse_root(second_moment_II)
    values = _half(code_values(spec)).to(weight)
    codes = torch.zeros(weight.shape, dtype=torch.uint8, device=weight.device)
    group_scales: list[Tensor] = []
    step = size or BLOCK
    for start in range(0, in_features, step):
        stop = min(start + step, in_features)
        if size is not None:  # a group's scale is chosen from the weights as compensation has left them
            block = QuantSpec(bits=spec.bits, code=spec.code, sharing="channel")
            scale = _half(mse_scale(weight[:, start:stop].float(), block, importance[start:stop].float()))
            group_scales.append(scale)
            columns = scale.double().expand(-1, stop - start)
        else:
            assert scale_columns is not None
            columns = scale_columns[:, start:stop]
        errors = torch.zeros_like(weight[:, start:stop])
        for j in range(start, stop):
            code = encode(weight[:, j] / columns[:, j - start], values)
            codes[:, j] = code
            rounded = decode(code, values) * columns[:, j - start]
            error = (weight[:, j] - rounded) / inverse_root[j, j]
            weight[:, j + 1 : stop] -= error[:, None] * inverse_root[j, j + 1 : stop]
            errors[:, j - start] = error
        weight[:, stop:] -= errors @ inverse_root[start:stop, stop:]
    if size is not None:
        scales = (torch.cat(group_scales, dim=1),)
    return QuantisedWeight(codes, values.float(), scales)


def _inverse_root(second_moment_II: Tensor) -> Tensor:
    """Return the upper Cholesky factor of the damped inverse second moment."""
    damped = second_moment_II.clone()
    mean = damped.diagonal().mean().clamp_min(1e-12)
    damped.diagonal().add_(DAMPING * mean)
    return torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(damped)), upper=True)
