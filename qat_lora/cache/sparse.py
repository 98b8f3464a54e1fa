"""From a teacher's logits to what a cache keeps of them: the head, the sums over head and tail, draws.

`topk` and two `logsumexp` over 151,936 entries cost a CPU half as much as the forward of a 0.6 B teacher that made the
logits. Two things bring that to a few per cent. The largest entry of every short stretch of the vocabulary is found
first, and only the K stretches with the largest ones are ranked: the K largest logits are all in them. And on a device
whose cache is small beside the logits (`piece_bytes`), all passes over a few positions follow one another in it.

The tail's sum runs over the tail alone, relative to its own largest entry. As 1 - Σ of the head it would be rounding
noise wherever it is small, and small is the usual case.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from qat_lora.cache.draws import draw
from qat_lora.types import temperature_key

_WIDTH_STEP = 16  # entries of one vector instruction


def top_entries(logits_NV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest entries of each row and their int64 indices, largest first, as `torch.topk` does."""
    count, vocab = logits_NV.shape
    width = math.isqrt(vocab // k) // _WIDTH_STEP * _WIDTH_STEP
    stretches = vocab // width if width else 0
    if stretches < 2 * k:
        return torch.topk(logits_NV, k, dim=-1, sorted=True)
    whole = stretches * width
    body_NSW = logits_NV[:, :whole].unflatten(1, (stretches, width))
    chosen_NK1 = torch.topk(body_NSW.amax(-1), k, dim=-1, sorted=False).indices[..., None]
    offsets_W = torch.arange(width, device=logits_NV.device)
    rest = torch.arange(whole, vocab, device=logits_NV.device).expand(count, -1)
    values = torch.cat([body_NSW.gather(1, chosen_NK1.expand(-1, -1, width)).flatten(1), logits_NV[:, whole:]], 1)
    indices = torch.cat([(chosen_NK1 * width + offsets_W).flatten(1), rest], 1)
    top = torch.topk(values, k, dim=-1, sorted=True)
    return top.values, indices.gather(1, top.indices)


def sparse_arrays(
    logits_NV: Tensor,
    top_k: int,
    temperatures: Sequence[float],
    uniforms: Mapping[str, Tensor],
    piece_bytes: int | None = None,
) -> dict[str, Tensor]:
    """Return what is kept of some positions' logits, which are overwritten.

    Args:
        logits_NV: float32 logits of the real vocabulary.
        top_k: K; 0 for draws only.
        temperatures: of the sums.
        uniforms: random numbers [N, D, 2] for `tail_draw_ids` and `draw_ids`, as far as they are to be drawn.
        piece_bytes: float32 logits that are worked on at a time; None for all at once.
    """
    vocab = logits_NV.shape[-1]
    rows = len(logits_NV) if piece_bytes is None else max(1, piece_bytes // (4 * vocab))
    pieces = []
    for start in range(0, len(logits_NV), rows):
        part = slice(start, start + rows)
        numbers = {name: values[part] for name, values in uniforms.items()}
        pieces.append(_piece(logits_NV[part], top_k, temperatures, numbers))
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def _piece(
    logits_NV: Tensor, top_k: int, temperatures: Sequence[float], uniforms: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the arrays of a piece."""
    arrays = {"draw_ids": draw(logits_NV, uniforms["draw_ids"])} if "draw_ids" in uniforms else {}
    if not top_k:
        return arrays
    head_NK, ids_NK = top_entries(logits_NV, top_k)
    shifted_NK = head_NK - head_NK[:, :1]
    arrays |= {"head_ids": ids_NK.to(torch.int32), "head_logits": shifted_NK}
    tail_NV = logits_NV.scatter_(-1, ids_NK, -torch.inf)
    if "tail_draw_ids" in uniforms:
        arrays["tail_draw_ids"] = draw(tail_NV, uniforms["tail_draw_ids"])
    largest_N1 = tail_NV.amax(-1, keepdim=True)
    largest_N1 = torch.where(largest_N1 == -torch.inf, head_NK[:, :1], largest_N1)  # an empty tail stays empty
    tail_NV.sub_(largest_N1)
    for number, temperature in enumerate(temperatures):
        last = number == len(temperatures) - 1
        softened_NV = tail_NV if last else tail_NV.clone()
        if temperature != 1.0:
            softened_NV.div_(temperature)
        log_tail_N = (largest_N1 - head_NK[:, :1])[:, 0] / temperature + softened_NV.exp_().sum(-1).log()
        # Not logaddexp, whose last bit depends on the place in the vector: a resumed build must give the same bytes.
        lse_N = torch.logsumexp(torch.cat([shifted_NK / temperature, log_tail_N[:, None]], 1), dim=-1)
        arrays[temperature_key("lse", temperature)] = lse_N
        arrays[temperature_key("log_tail", temperature)] = log_tail_N - lse_N
    return arrays
