"""From a teacher's logits to what a cache keeps of them: the head, the sums over head and tail, draws.

`topk` and two `logsumexp` over 151,936 entries cost a CPU half as much as the forward of a 0.6 B teacher that made the
logits. Two things bring that to a few per cent. The vocabulary is divided into small groups, the largest entry of each
is found, and only the K groups with the largest ones are ranked: the K largest logits are all in them. And on a device
whose cache is small beside the logits (`piece_bytes`), all passes over a few positions follow one another in it.

The tail's sum runs over the tail alone, relative to its own largest entry. As 1 - Σ of the head it would be rounding
noise wherever it is small, and small is the usual case.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from qat_lora.cache.build.draws import draw, draw_weighted
from qat_lora.types import temperature_key

_RANKED = 16
"""Entries for each one wanted up to which ranking all of them is quicker than dividing them up."""


def top_entries(logits_NV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest entries of each row and their int64 indices, largest first, as `torch.topk` does."""
    count, vocab = logits_NV.shape
    if vocab < _RANKED * k:
        return torch.topk(logits_NV, k, dim=-1, sorted=True)
    size = math.isqrt(vocab // k)
    groups = vocab // size
    # Group g holds the entries g, g + groups, g + 2 groups ...: so its largest is found by whole vectors.
    body_NSG = logits_NV[:, : size * groups].unflatten(1, (size, groups))
    chosen_NK = top_entries(body_NSG.amax(1), k)[1]
    steps_S1 = groups * torch.arange(size, device=logits_NV.device)[:, None]
    rest = torch.arange(size * groups, vocab, device=logits_NV.device).expand(count, -1)
    indices = torch.cat([(chosen_NK[:, None] + steps_S1).flatten(1), rest], 1)
    values, places = top_entries(logits_NV.gather(1, indices), k)
    return values, indices.gather(1, places)


def sparse_arrays(
    logits_NV: Tensor,
    top_k: int,
    temperatures: Sequence[float],
    uniforms: Mapping[str, Tensor],
    piece_bytes: int | None = None,
) -> dict[str, Tensor]:
    """Return what is kept of some positions' logits, which may be overwritten.

    Args:
        logits_NV: logits of the real vocabulary, any float type.
        top_k: K; 0 for draws only.
        temperatures: of the sums.
        uniforms: random numbers [N, D, 2] for `tail_draw_ids` and `draw_ids`, as far as they are to be drawn.
        piece_bytes: float32 logits that are worked on at a time; None for all at once.
    """
    vocab = logits_NV.shape[-1]
    if piece_bytes is None:
        return _piece(logits_NV.float(), top_k, temperatures, uniforms)
    rows = min(len(logits_NV), max(1, piece_bytes // (4 * vocab)))
    # Two buffers for all pieces: fresh memory costs a page fault for every 4 kB, more than what is done in it.
    copy_RV, weights_RV = (logits_NV.new_empty(rows, vocab, dtype=torch.float32) for _ in ("logits", "weights"))
    pieces = []
    for start in range(0, len(logits_NV), rows):
        part_RV = logits_NV[start : start + rows]
        count = len(part_RV)
        numbers = {name: values[start : start + rows] for name, values in uniforms.items()}
        part_RV = part_RV if part_RV.dtype == torch.float32 else copy_RV[:count].copy_(part_RV)
        pieces.append(_piece(part_RV, top_k, temperatures, numbers, weights_RV[:count]))
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def _piece(
    logits_NV: Tensor,
    top_k: int,
    temperatures: Sequence[float],
    uniforms: Mapping[str, Tensor],
    weights_NV: Tensor | None = None,
) -> dict[str, Tensor]:
    """Return the arrays of a piece; `weights_NV` is memory to work in."""
    arrays = {"draw_ids": draw(logits_NV, uniforms["draw_ids"])} if "draw_ids" in uniforms else {}
    if not top_k:
        return arrays
    vocab = logits_NV.shape[-1]
    ranked, indices = top_entries(logits_NV, min(top_k + 1, vocab))  # one more: the tail's largest
    head_NK, ids_NK = ranked[:, :top_k], indices[:, :top_k].contiguous()
    shifted_NK = head_NK - head_NK[:, :1]
    arrays |= {"head_ids": ids_NK.to(torch.int32), "head_logits": shifted_NK}
    largest_N1 = ranked[:, -1:] if top_k < vocab else torch.full_like(ranked[:, -1:], -torch.inf)
    tail_NV = logits_NV.scatter_(-1, ids_NK, -torch.inf)
    for temperature in temperatures:
        # softmax and not exp: on a CPU it costs half of the subtraction and the exp that it takes the place of. What
        # its rounding leaves out of one, the sum puts back.
        softened_NV = tail_NV if temperature == 1.0 else tail_NV / temperature
        weights_NV = torch.softmax(softened_NV, dim=-1, out=weights_NV)
        if temperature == 1.0 and "tail_draw_ids" in uniforms:
            arrays["tail_draw_ids"] = draw_weighted(weights_NV, uniforms["tail_draw_ids"])
        log_sum_N = (weights_NV.sum(-1) / weights_NV.gather(-1, indices[:, -1:])[:, 0]).log()
        log_tail_N = (largest_N1 - head_NK[:, :1])[:, 0] / temperature + log_sum_N
        log_tail_N = torch.where(largest_N1[:, 0] == -torch.inf, -torch.inf, log_tail_N)
        # Not logaddexp, whose last bit depends on the place in the vector: a resumed build must give the same bytes.
        lse_N = torch.logsumexp(torch.cat([shifted_NK / temperature, log_tail_N[:, None]], 1), dim=-1)
        arrays[temperature_key("lse", temperature)] = lse_N
        arrays[temperature_key("log_tail", temperature)] = log_tail_N - lse_N
    return arrays
