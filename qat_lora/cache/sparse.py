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

from qat_lora.cache.draws import draw, draw_weighted
from qat_lora.types import temperature_key


def top_entries(logits_NV: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k largest entries of each row and their int64 indices, largest first, as `torch.topk` does."""
    count, vocab = logits_NV.shape
    size = math.isqrt(vocab // k)
    groups = vocab // max(1, size)
    if groups < 2 * k:
        return torch.topk(logits_NV, k, dim=-1, sorted=True)
    # Group g holds the entries g, g + groups, g + 2 groups ...: so its largest is found by whole vectors.
    body_NSG = logits_NV[:, : size * groups].unflatten(1, (size, groups))
    chosen_NK = torch.topk(body_NSG.amax(1), k, dim=-1, sorted=False).indices
    steps_S1 = groups * torch.arange(size, device=logits_NV.device)[:, None]
    rest = torch.arange(size * groups, vocab, device=logits_NV.device).expand(count, -1)
    indices = torch.cat([(chosen_NK[:, None] + steps_S1).flatten(1), rest], 1)
    top = torch.topk(logits_NV.gather(1, indices), k, dim=-1, sorted=True)
    return top.values, indices.gather(1, top.indices)


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
    rows = len(logits_NV) if piece_bytes is None else max(1, piece_bytes // (4 * vocab))
    wide = logits_NV.dtype == torch.float32
    # One buffer for all pieces: fresh memory costs a page fault for every 4 kB.
    buffer_RV = logits_NV[:0] if wide else logits_NV.new_empty(min(rows, len(logits_NV)), vocab, dtype=torch.float32)
    pieces = []
    for start in range(0, len(logits_NV), rows):
        part_RV = logits_NV[start : start + rows]
        numbers = {name: values[start : start + rows] for name, values in uniforms.items()}
        part_RV = part_RV if wide else buffer_RV[: len(part_RV)].copy_(part_RV)
        pieces.append(_piece(part_RV, top_k, temperatures, numbers))
    return {name: torch.cat([piece[name] for piece in pieces]) for name in pieces[0]}


def _piece(
    logits_NV: Tensor, top_k: int, temperatures: Sequence[float], uniforms: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return the arrays of a piece."""
    arrays = {"draw_ids": draw(logits_NV, uniforms["draw_ids"])} if "draw_ids" in uniforms else {}
    if not top_k:
        return arrays
    ranked, indices = top_entries(logits_NV, min(top_k + 1, logits_NV.shape[-1]))  # one more: the tail's largest
    head_NK, ids_NK = ranked[:, :top_k], indices[:, :top_k].contiguous()
    shifted_NK = head_NK - head_NK[:, :1]
    arrays |= {"head_ids": ids_NK.to(torch.int32), "head_logits": shifted_NK}
    tail_NV = logits_NV.scatter_(-1, ids_NK, -torch.inf)
    largest_N1 = ranked[:, -1:]
    largest_N1 = torch.where(largest_N1 == -torch.inf, head_NK[:, :1], largest_N1)  # a tail of -inf stays one
    tail_NV.sub_(largest_N1)
    for number, temperature in enumerate(temperatures):
        last = number == len(temperatures) - 1
        softened_NV = tail_NV if last else tail_NV.clone()
        if temperature != 1.0:
            softened_NV.div_(temperature)
        weights_NV = softened_NV.exp_()
        if temperature == 1.0 and "tail_draw_ids" in uniforms:
            arrays["tail_draw_ids"] = draw_weighted(weights_NV, uniforms["tail_draw_ids"])
        log_tail_N = (largest_N1 - head_NK[:, :1])[:, 0] / temperature + weights_NV.sum(-1).log()
        # Not logaddexp, whose last bit depends on the place in the vector: a resumed build must give the same bytes.
        lse_N = torch.logsumexp(torch.cat([shifted_NK / temperature, log_tail_N[:, None]], 1), dim=-1)
        arrays[temperature_key("lse", temperature)] = lse_N
        arrays[temperature_key("log_tail", temperature)] = log_tail_N - lse_N
    return arrays
