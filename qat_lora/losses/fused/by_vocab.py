"""All positions at once, the vocabulary block by block: the faster walk where a processor's caches decide.

A product of few rows is slow on a CPU, because each one repacks the whole weight and streams it from memory. With a
frozen output head a block's exponentials, relative to the largest logit so far, are multiplied by its weight at once,
and the sum over earlier blocks is rescaled when a larger logit comes: FlashAttention (Dao et al., 2022, Algorithm 1)
with the output head as both keys and values. On two cores it is 2.4 times as fast as `by_token`.

    m' = max(m, max_B z),    l' = l · exp(m - m') + Σ_B exp(z - m'),    O' = O · exp(m - m') + exp(z_B - m') W_B.

Top-K entries stay out of the sums. The exact KL, with a second softmax to rescale along, has no place here, nor has a
trained output head: each entry of its gradient needs the final normaliser, and so a second walk.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from qat_lora.losses.fused.gradients import Group, Task, Walked, entry_ids, group_gradient

LINE = 64  # logits of a block are a multiple: rows that begin within cache lines slow its product down by a third
PIECE_BYTES = 2**21  # wide logits that the elementwise passes work on at a time: two cores' second-level cache


def vocabulary_serves(task: Task) -> bool:
    """Return whether one softmax serves all terms and the output head is frozen, so that the vocabulary is walked."""
    return len(task.groups) == 1 and not task.groups[0].dense and not (task.wanted.weight or task.wanted.bias)


def walk_vocabulary(task: Task, block_vocab: int) -> Walked:
    """Return sums and gradients; `block_vocab` entries, whole `LINE`s, are projected at once, for all positions."""
    (group,), lm_head = task.groups, task.lm_head
    ids = entry_ids(group, task.mask_N)
    entry_z = [torch.zeros(x.shape, dtype=task.wide, device=x.device) for x in ids]
    # m from the lowest finite number, not -inf, so that a tail that is (still) empty gives zeros instead of NaN.
    m_N1 = task.hidden_NH.new_full((len(task.hidden_NH), 1), torch.finfo(task.wide).min, dtype=task.wide)
    l_N1 = torch.zeros_like(m_N1)
    l_1_N1, at_1 = torch.zeros_like(m_N1), bool(group.kl) and group.temperature != 1.0  # l at temperature 1
    o_NH = torch.zeros_like(task.hidden_NH, dtype=task.wide)
    for block in _blocks(task, group, ids, block_vocab):
        before_N1 = m_N1.clone()
        for rows, z_CB, slope_CB in block.pieces():
            for z_NE, (at_NE, inside_NE) in zip(entry_z, block.places, strict=True):
                z_NE[rows] = torch.where(inside_NE[rows], z_CB.gather(1, at_NE[rows]), z_NE[rows])
            block.remove_topk(z_CB, rows)
            m_C1 = torch.maximum(m_N1[rows], z_CB.amax(1, keepdim=True))
            z_CB.sub_(m_C1)
            if at_1:
                fade_C1 = ((m_N1[rows] - m_C1) * group.temperature).exp_()
                l_1_N1[rows] = l_1_N1[rows] * fade_C1 + (z_CB * group.temperature).exp_().sum(1, keepdim=True)
            z_CB.exp_()
            l_N1[rows] = l_N1[rows] * (m_N1[rows] - m_C1).exp() + z_CB.sum(1, keepdim=True)
            m_N1[rows] = m_C1
            if task.wanted.hidden:
                block.logits_NB[rows] = z_CB if slope_CB is None else z_CB.mul_(slope_CB)
        if task.wanted.hidden:
            o_NH.mul_((before_N1 - m_N1).exp_()).add_(block.logits_NB @ block.weight_BH)

    tails = (1.0, l_N1), (group.temperature, l_1_N1)
    log_tails = [(m_N1 * factor + sum_N1.log())[:, 0] for factor, sum_N1 in tails[: 1 + at_1]]
    part = group_gradient(task, group, entry_z, *log_tails)
    if not task.wanted.hidden:
        return Walked(part.sums)
    o_NH.mul_(part.tail_C[:, None] / l_N1.clamp_min(1))  # l is at least 1, or 0 for an empty tail
    for ids_NE, grad_NE, z_NE in zip(ids, part.entries, entry_z, strict=False):  # the last are only read
        if lm_head.softcap is not None:
            grad_NE = grad_NE * (1 - (z_NE * (group.temperature / lm_head.softcap)).square())
        grad_NE = grad_NE.to(lm_head.weight_VH.dtype)
        o_NH.add_(torch.nn.functional.embedding_bag(ids_NE, lm_head.weight_VH, mode="sum", per_sample_weights=grad_NE))
    return Walked(part.sums, o_NH.mul_(lm_head.logit_scale).to(task.hidden_NH.dtype))


def _blocks(task: Task, group: Group, ids: Sequence[Tensor], block_vocab: int) -> Iterator[_Block]:
    vocab, block_vocab = task.lm_head.vocab_size, max(block_vocab // LINE * LINE, min(block_vocab, LINE))
    store = task.hidden_NH.new_empty(len(task.hidden_NH) * min(block_vocab, vocab))  # a fresh one costs page faults
    for start in range(0, vocab, block_vocab):
        yield _Block(task, group, ids, slice(start, min(start + block_vocab, vocab)), store)


class _Block:
    """The products of one block of the vocabulary, and the places of the terms' entries in it."""

    def __init__(self, task: Task, group: Group, ids: Sequence[Tensor], span: slice, store: Tensor) -> None:
        self.span, self._task, self._temperature = span, task, group.temperature
        self.weight_BH = task.lm_head.weight_VH[span]
        count, size = len(task.hidden_NH), len(self.weight_BH)
        self.logits_NB = store[: count * size].view(count, size)  # scale and soft-cap are still to come
        torch.mm(task.hidden_NH, self.weight_BH.t(), out=self.logits_NB)
        self.places = [((x - span.start).clamp_(0, size - 1), (x >= span.start) & (x < span.stop)) for x in ids]
        """For each tensor of ids the columns, clamped into the block, and whether the ids really are in it."""
        self._topk_NK: Tensor | None = None  # -inf for the top-K entries in the block
        if group.ids_NK is not None:
            inside_NK = self.places[0][1]
            self._topk_NK = torch.zeros_like(inside_NK, dtype=task.wide).masked_fill_(inside_NK, float("-inf"))

    def remove_topk(self, z_CB: Tensor, rows: slice) -> None:
        """Set the logits of the top-K entries to -inf, so that they stay out of the sums."""
        if self._topk_NK is not None:
            z_CB.scatter_add_(1, self.places[0][0][rows], self._topk_NK[rows])

    def pieces(self) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Yield some rows' logits z/T, free to overwrite, in one pass, and the soft-cap's slope where there is one."""
        lm_head, wide, temperature = self._task.lm_head, self._task.wide, self._temperature
        piece_rows = max(1, PIECE_BYTES // (wide.itemsize * self.logits_NB.shape[1]))
        for first in range(0, len(self.logits_NB), piece_rows):
            rows = slice(first, first + piece_rows)
            z_CB, slope_CB = self.logits_NB[rows].to(wide, copy=True), None
            if lm_head.bias_V is not None:
                z_CB.add_(lm_head.bias_V[self.span])
            if lm_head.softcap is not None:
                z_CB.mul_(lm_head.logit_scale / lm_head.softcap).tanh_()
                slope_CB = z_CB.square().neg_().add_(1) if self._task.wanted.hidden else None
                z_CB.mul_(lm_head.softcap / temperature)
            elif lm_head.logit_scale != temperature:
                z_CB.mul_(lm_head.logit_scale / temperature)
            yield rows, z_CB, slope_CB
