"""Tokens drawn from the teacher: from its tail (for the `hybrid` estimator) or from all of it (`sampled`).

A draw is a pure function of the seed, the row's tokens and the teacher's probabilities. So a build that was killed, or
that runs with another batch size or beside other builders, stores the same draws; a device's own random numbers would
make every resumed cache another one. The random numbers are made on the host (`uniforms`), two a draw; the choice is
made on the device.

It inverts the cumulative distribution in two steps: a block of about √V tokens, then a token of that block, each with
a number of its own. One float32 cumulative sum over 151,936 tokens is wrong by up to some 1e-4 of the whole in its
rear, and a single 24-bit number cannot tell apart tokens below 6e-8; sums of 390 numbers are exact to 1e-6 of
themselves. (Gumbel noise would do too, but needs V random numbers a draw instead of two.)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def draw(log_weights_NV: Tensor, uniforms_ND2: Tensor) -> Tensor:
    """Draw tokens with repetition, in proportion to exp(log_weights).

    Args:
        log_weights_NV: float32, -inf where a token must not be drawn.
        uniforms_ND2: two numbers in [0, 1) for each draw.

    Returns:
        int32 [N, D]; 0 where no token can be drawn.
    """
    largest_N1 = log_weights_NV.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    return draw_weighted(torch.exp(log_weights_NV - largest_N1), uniforms_ND2)


def draw_weighted(weights_NV: Tensor, uniforms_ND2: Tensor) -> Tensor:
    """Draw tokens as `draw` does, in proportion to weights of which the largest is 1."""
    vocab_size = weights_NV.shape[-1]
    width = math.isqrt(vocab_size - 1) + 1 if vocab_size > 1 else 1
    weights_NV = torch.nn.functional.pad(weights_NV, (0, -vocab_size % width))
    blocks_NGS = weights_NV.reshape(len(weights_NV), -1, width)
    masses_NG = blocks_NGS.sum(-1)
    block_ND = _invert(masses_NG.cumsum(-1)[:, None], uniforms_ND2[..., 0])
    chosen_NDS = blocks_NGS.gather(1, block_ND[..., None].expand(-1, -1, width))
    token_ND = _invert(chosen_NDS.cumsum(-1), uniforms_ND2[..., 1])
    drawn_ND = block_ND * width + token_ND
    return torch.where(masses_NG.sum(-1, keepdim=True) > 0, drawn_ND, 0).to(torch.int32)


def _invert(cumulative: Tensor, uniform_ND: Tensor) -> Tensor:
    """Return the first index at which a cumulative sum [N, 1 or D, n] exceeds a part of its end.

    Counted, not searched: every device counts, and an entry without weight cannot be the first to exceed anything.
    """
    reached = cumulative <= uniform_ND[..., None] * cumulative[..., -1:]
    return reached.sum(-1).clamp(max=cumulative.shape[-1] - 1)
