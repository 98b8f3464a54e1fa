"""Scales and zero points of asymmetric codes: a range [low, high] per group that always holds zero.

s = (high - low) / (2^b - 1) and z = round(-low / s), so that zero itself is a code: weights of exactly zero stay.
The zero point takes `bits` bits. Formats that store the range's lower end as a float instead (GGUF's Q4_1) spend 16
on it, and lose the exact zero.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qat_lora.quant.codes import decode, encode
from qat_lora.quant.scales import CLIP_GRID, TINY, Cost, grouped
from qat_lora.quant.spec import QuantSpec


def range_scale(weight_OI: Tensor, spec: QuantSpec, cost: Cost | None) -> tuple[Tensor, Tensor]:
    """Return float16-exact scales and whole zero points, both [rows, G].

    Args:
        weight_OI: the weight.
        spec: asymmetric codes.
        cost: the clipped range that costs least is taken; without a cost the range holds every weight.
    """
    most = 2**spec.bits - 1
    members = grouped(weight_OI, spec)
    low, high = members.amin(-1).clamp_max(0), members.amax(-1).clamp_min(0)
    values = torch.arange(most + 1, dtype=weight_OI.dtype, device=weight_OI.device)

    def at(share: float) -> tuple[Tensor, Tensor]:
        scale = ((high - low) * share / most).clamp_min(TINY).half().to(weight_OI.dtype)
        return scale, (-low * share / scale).round().clamp(0, most)

    best_scale, best_zero = at(1.0)
    if cost is None:
        return best_scale, best_zero
    least = torch.full_like(low, torch.inf)
    for share in torch.linspace(1.0, 0.2, CLIP_GRID).tolist():
        scale, zero = at(share)
        codes = decode(encode(members / scale[..., None] + zero[..., None], values), values)
        error = cost((codes - zero[..., None]) * scale[..., None] - members)
        better = error < least
        best_scale, best_zero = torch.where(better, scale, best_scale), torch.where(better, zero, best_zero)
        least = torch.where(better, error, least)
    return best_scale, best_zero
