"""All positions at once, the vocabulary block by block: the fast walk where a processor's caches decide.

A matrix product of few rows is slow on a CPU, because each one repacks the whole weight and streams it from memory.
With a frozen head nothing needs the softmax's normaliser before the end: the hidden states' gradient is linear in
the exponentials, so they are multiplied by the block's weight at once, relative to the largest logit so far, and
what was added up before is rescaled when a larger one comes. That is FlashAttention with the output head as both keys
and values. The weight is read once, a block of it is still in the cache for the second product, and the passes over
logits run on pieces that fit the second-level cache.

A trained head needs the final normaliser for each entry of its gradient, so the vocabulary is walked twice: once for
the sums, once for the gradients, with one product more than `chunks` has. It is faster all the same, and smaller: each
block of the head's gradient is finished where it is made, instead of a float32 copy of the whole being read and
written again for every chunk of positions.

The K entries of a teacher's head stay out of the sum (see `chunks`); their part of the gradient is known only at the
end. The exact KL has no place here: a second softmax, the teacher's, would have to be rescaled along, and its pull on
the hidden states costs a fourth product where `chunks` needs three.

Source: FlashAttention (Dao et al., 2022), Algorithm 1; online softmax (Milakov and Gimelshein, 2018).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from qat_lora.losses.fused.gradients import Group, Shares, Task, Walked, safe_ids, shares

PIECE_BYTES = 2**21
"""Wide logits that the elementwise passes work on at a time: two cores' second-level cache."""


def sweepable(groups: list[Group]) -> bool:
    """Return whether one softmax serves all terms, so that the vocabulary can be walked."""
    return len(groups) == 1 and not groups[0].dense


def walk_vocabulary(task: Task, block_vocab: int) -> Walked:
    """Return sums and gradients; `block_vocab` entries are projected at once, for all positions."""
    (group,) = task.groups
    count = task.hidden_NH.shape[0]
    everything = slice(None)
    point_ids = [safe_ids(term.ids_ND, everything, task.mask_N) for _, term in group.points]
    head_ids = [] if group.ids_NK is None else [safe_ids(group.ids_NK, everything, task.mask_N)]
    ids = head_ids + point_ids
    z = [torch.zeros(x.shape, dtype=task.wide, device=x.device) for x in ids]
    trains = task.want_weight or task.want_bias

    # From the lowest finite number, not -inf, so that a tail that is (still) empty gives zeros instead of NaN.
    top_N1 = task.hidden_NH.new_full((count, 1), torch.finfo(task.wide).min, dtype=task.wide)
    sum_N1 = torch.zeros_like(top_N1)
    pull_NH = torch.zeros(task.hidden_NH.shape, dtype=task.wide, device=top_N1.device)  # Σ_tail exp(z - top) · weight
    for block in _blocks(task, block_vocab):
        at = [block.positions(x) for x in ids]
        outside_NK = block.excluded(head_ids, task.wide)
        before_N1 = top_N1.clone()
        for rows, z_CB, slope_CB in block.pieces(task, group.temperature):
            for entry, (at_NE, here_NE) in enumerate(at):
                z[entry][rows] = torch.where(here_NE[rows], z_CB.gather(1, at_NE[rows]), z[entry][rows])
            if outside_NK is not None:
                z_CB.scatter_add_(1, at[0][0][rows], outside_NK[rows])
            top_C1 = torch.maximum(top_N1[rows], z_CB.amax(1, keepdim=True))
            z_CB.sub_(top_C1).exp_()
            sum_N1[rows] = sum_N1[rows] * (top_N1[rows] - top_C1).exp() + z_CB.sum(1, keepdim=True)
            top_N1[rows] = top_C1
            if task.want_hidden and not trains:
                block.logits_NB[rows] = z_CB if slope_CB is None else z_CB.mul_(slope_CB)
        if task.want_hidden and not trains:
            pull_NH.mul_((before_N1 - top_N1).exp_()).add_(block.logits_NB @ block.weight_BH)

    head_z_NK = z[0] if head_ids else None
    log_tail_N = (top_N1 + sum_N1.log())[:, 0]
    part = shares(group, head_z_NK, z[len(head_ids) :], log_tail_N, task.scales, everything, task.mask_N)
    if not task.wanted:
        return Walked(part.losses, None, None, None)
    share_N1 = part.tail_C[:, None] / sum_N1.clamp_min(1)  # the sum is at least 1, or 0 for an empty tail
    if trains:
        return _spread(task, group, part, ids, bool(head_ids), top_N1, share_N1, block_vocab)
    pull_NH.mul_(share_N1)
    for ids_NE, grad_NE, z_NE in zip(ids, _at_ids(part), z, strict=True):
        if task.softcap is not None:
            grad_NE = grad_NE * (1 - (z_NE * (group.temperature / task.softcap)).square())
        weights_NE = grad_NE.to(task.weight_VH.dtype)
        pull_NH.add_(
            torch.nn.functional.embedding_bag(ids_NE, task.weight_VH, mode="sum", per_sample_weights=weights_NE)
        )
    return Walked(part.losses, pull_NH.mul_(task.logit_scale).to(task.hidden_NH.dtype), None, None)


def _spread(
    task: Task,
    group: Group,
    part: Shares,
    ids: list[Tensor],
    has_head: bool,
    top_N1: Tensor,
    share_N1: Tensor,
    block_vocab: int,
) -> Walked:
    """Walk again, with the normaliser known, and finish each block's gradients."""
    d_hidden = torch.zeros(task.hidden_NH.shape, dtype=task.wide, device=task.hidden_NH.device)
    d_weight = torch.empty_like(task.weight_VH) if task.want_weight else None
    d_bias = torch.zeros(task.weight_VH.shape[:1], dtype=task.wide, device=d_hidden.device)
    for block in _blocks(task, block_vocab):
        at = [block.positions(x) for x in ids]
        outside_NK = block.excluded(ids[:1] if has_head else [], task.wide)
        given = [grad.masked_fill(~here, 0) for grad, (_, here) in zip(_at_ids(part), at, strict=True)]
        for rows, z_CB, slope_CB in block.pieces(task, group.temperature):
            if outside_NK is not None:
                z_CB.scatter_add_(1, at[0][0][rows], outside_NK[rows])
            z_CB.sub_(top_N1[rows]).exp_().mul_(share_N1[rows])
            for (at_NE, _), grad_NE in zip(at, given, strict=True):
                z_CB.scatter_add_(1, at_NE[rows], grad_NE[rows])
            if slope_CB is not None:
                z_CB.mul_(slope_CB)
            if task.logit_scale != 1.0:
                z_CB.mul_(task.logit_scale)
            d_bias[block.span].add_(z_CB.sum(0))
            block.logits_NB[rows] = z_CB
        if task.want_hidden:
            d_hidden.add_(block.logits_NB @ block.weight_BH)
        if d_weight is not None:
            torch.mm(block.logits_NB.t(), task.hidden_NH, out=d_weight[block.span])
    return Walked(
        part.losses,
        d_hidden.to(task.hidden_NH.dtype) if task.want_hidden else None,
        d_weight,
        d_bias if task.want_bias else None,
    )


class _Block:
    """The logits of one block of the vocabulary, as the product gave them."""

    def __init__(self, task: Task, start: int, block_vocab: int, store: Tensor) -> None:
        self.start = start
        self.weight_BH = task.weight_VH[start : start + block_vocab]
        self.size = self.weight_BH.shape[0]
        self.span = slice(start, start + self.size)
        count = task.hidden_NH.shape[0]
        self.logits_NB = torch.mm(
            task.hidden_NH, self.weight_BH.t(), out=store[: count * self.size].view(count, self.size)
        )

    def positions(self, ids_NE: Tensor) -> tuple[Tensor, Tensor]:
        """Return where ids stand in the block, clamped into it, and which of them really do."""
        at_NE = (ids_NE - self.start).clamp_(0, self.size - 1)
        return at_NE, (ids_NE >= self.start) & (ids_NE < self.start + self.size)

    def excluded(self, head_ids: list[Tensor], wide: torch.dtype) -> Tensor | None:
        """Return what takes a head's ids out of the sum when added: -inf here, zero for ids of another block."""
        if not head_ids:
            return None
        here_NK = self.positions(head_ids[0])[1]
        return torch.zeros(here_NK.shape, dtype=wide, device=here_NK.device).masked_fill_(here_NK, float("-inf"))

    def pieces(self, task: Task, temperature: float) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Yield some rows' softened logits, free to overwrite, and the soft-cap's slope where there is one."""
        piece_rows = max(1, PIECE_BYTES // (task.wide.itemsize * self.size))
        for first in range(0, task.hidden_NH.shape[0], piece_rows):
            rows = slice(first, first + piece_rows)
            z_CB = self.logits_NB[rows].to(task.wide, copy=True)
            if task.bias_V is not None:
                z_CB.add_(task.bias_V[self.span])
            if task.softcap is None:
                if task.logit_scale != temperature:
                    z_CB.mul_(task.logit_scale / temperature)
                yield rows, z_CB, None
                continue
            z_CB.mul_(task.logit_scale / task.softcap).tanh_()
            slope_CB = z_CB.square().neg_().add_(1) if task.wanted else None
            yield rows, z_CB.mul_(task.softcap / temperature), slope_CB


def _blocks(task: Task, block_vocab: int) -> Iterator[_Block]:
    vocab = task.weight_VH.shape[0]
    # One buffer for all: a fresh one costs page faults.
    store = task.hidden_NH.new_empty(task.hidden_NH.shape[0] * min(block_vocab, vocab))
    for start in range(0, vocab, block_vocab):
        yield _Block(task, start, block_vocab, store)


def _at_ids(part: Shares) -> list[Tensor]:
    """Return the gradients at the head's ids, where there is a head, and at each point term's."""
    return part.points if part.head_CK is None else [part.head_CK, *part.points]
