"""All positions at once, the vocabulary block by block: the fast walk for a frozen head on a CPU.

A matrix product of few rows is slow there, because each one repacks the whole weight and streams it from memory.
With a frozen head nothing needs the softmax's normaliser before the end: the hidden states' gradient is linear in
the exponentials, so they are multiplied by the block's weight at once, relative to the largest logit so far, and
what was added up before is rescaled when a larger one comes. That is FlashAttention with the output head as both keys
and values. The weight is read once, a block of it is still in the cache for the second product, and the passes over
logits run on pieces that fit the second-level cache. A trained head needs the final normaliser for each entry of
its gradient and goes through `fused` in chunks of positions.

The K entries of the head stay out of the sum (see `fused`); their part of the gradient, known only at the end, is a
weighted sum of K rows of the weight.

Source: FlashAttention (Dao et al., 2022), Algorithm 1; online softmax (Milakov and Gimelshein, 2018).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from qat_lora.losses.groups import Group, Shares, safe_ids, shares

PIECE_BYTES = 2**21
"""Wide logits that the elementwise passes work on at a time: two cores' second-level cache."""


def sweep_vocabulary(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    logit_scale: float,
    group: Group,
    scales: Sequence[float | Tensor],
    mask_N: Tensor,
    wide: torch.dtype,
    block_vocab: int,
    want: bool,
) -> tuple[dict[int, Tensor], Tensor | None]:
    """Return each term's loss sum and, if wanted, the hidden states' gradient in their dtype."""
    count, vocab = hidden_NH.shape[0], weight_VH.shape[0]
    everything = slice(None)
    point_ids = [safe_ids(term.ids_ND, everything, mask_N) for _, term in group.points]
    head_ids = [] if group.ids_NK is None else [safe_ids(group.ids_NK, everything, mask_N)]
    ids = head_ids + point_ids
    z = [torch.zeros(x.shape, dtype=wide, device=x.device) for x in ids]

    # From the lowest finite number, not -inf, so that a tail that is (still) empty gives zeros instead of NaN.
    top_N1 = hidden_NH.new_full((count, 1), torch.finfo(wide).min, dtype=wide)
    sum_N1 = torch.zeros_like(top_N1)
    pull_NH = torch.zeros(hidden_NH.shape, dtype=wide, device=hidden_NH.device)  # Σ_tail exp(z - top) · weight
    store = hidden_NH.new_empty(count * min(block_vocab, vocab))  # one buffer: a fresh one costs page faults
    piece_rows = max(1, PIECE_BYTES // (wide.itemsize * min(block_vocab, vocab)))
    for start in range(0, vocab, block_vocab):
        weight_BH = weight_VH[start : start + block_vocab]
        size = weight_BH.shape[0]
        block_NB = torch.mm(hidden_NH, weight_BH.t(), out=store[: count * size].view(count, size))
        bias_B = None if bias_V is None else bias_V[start : start + size]
        at = [(x - start).clamp_(0, size - 1) for x in ids]
        here = [(x >= start) & (x < start + size) for x in ids]
        # Added, not written: an id of another block adds nothing to whichever entry it was clamped to.
        out_NK = torch.zeros_like(z[0]).masked_fill_(here[0], float("-inf")) if head_ids else None
        before_N1 = top_N1.clone()
        for first in range(0, count, piece_rows):
            rows = slice(first, first + piece_rows)
            z_CB = block_NB[rows].to(wide, copy=True)
            if bias_B is not None:
                z_CB.add_(bias_B)
            if logit_scale != group.temperature:
                z_CB.mul_(logit_scale / group.temperature)
            for entry, (at_NE, here_NE) in enumerate(zip(at, here, strict=True)):
                z[entry][rows] = torch.where(here_NE[rows], z_CB.gather(1, at_NE[rows]), z[entry][rows])
            if out_NK is not None:
                z_CB.scatter_add_(1, at[0][rows], out_NK[rows])
            top_C1 = torch.maximum(top_N1[rows], z_CB.amax(1, keepdim=True))
            z_CB.sub_(top_C1).exp_()
            sum_N1[rows] = sum_N1[rows] * (top_N1[rows] - top_C1).exp() + z_CB.sum(1, keepdim=True)
            top_N1[rows] = top_C1
            if want:
                block_NB[rows] = z_CB
        if want:
            pull_NH.mul_((before_N1 - top_N1).exp_()).add_(block_NB @ weight_BH)

    head_z_NK = z[0] if head_ids else None
    log_tail_N = (top_N1 + sum_N1.log())[:, 0]
    part = shares(group, head_z_NK, z[len(head_ids) :], log_tail_N, scales, everything, mask_N)
    if not want:
        return part.losses, None
    pull_NH.mul_(part.tail_C[:, None] / sum_N1.clamp_min(1))  # the sum is at least 1, or 0 for an empty tail
    for ids_NE, grad_NE in zip(ids, _at_ids(part), strict=True):
        pull_NH.add_(
            torch.nn.functional.embedding_bag(
                ids_NE, weight_VH, mode="sum", per_sample_weights=grad_NE.to(weight_VH.dtype)
            )
        )
    return part.losses, pull_NH.mul_(logit_scale).to(hidden_NH.dtype)


def _at_ids(part: Shares) -> list[Tensor]:
    """Return the gradients at the head's ids, where there is a head, and at each point term's."""
    return part.points if part.head_CK is None else [part.head_CK, *part.points]
