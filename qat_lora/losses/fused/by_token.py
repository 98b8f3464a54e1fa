"""A few positions at a time, the whole vocabulary for each: the walk that serves every term, output head and device.

A chunk's logits become its loss and its gradients on the spot. On a GPU and on XLA, where a product of some hundred
rows is as fast as any, this is also the faster walk: three products with a trained output head, where `by_vocab` needs
four.

Numerical core, see `_sparse_chunk`: the top-K logits are taken out *before* the exponential, so the tail is summed on
its own scale. log(1 - b) is then accurate at any size; 1 - Σ p would be noise below 1e-7.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qat_lora.losses.estimators import DenseTerm
from qat_lora.losses.fused.gradients import (
    Group,
    Task,
    Walked,
    entry_ids,
    group_gradient,
    keep,
    lm_head_logits,
    real_vocabulary,
)

Chunk = tuple[dict[int, Tensor], Tensor | None]
"""Each term's loss sum, and the gradient with respect to the chunk's logits where one is wanted."""


def walk_positions(task: Task, chunk_tokens: int) -> Walked:
    """Return sums and gradients; `chunk_tokens` positions are projected at once."""
    wanted, weight_VH, logit_scale = task.wanted, task.lm_head.weight_VH, task.lm_head.logit_scale
    d_weight = torch.zeros_like(weight_VH, dtype=task.wide) if wanted.weight else None
    d_bias = torch.zeros_like(weight_VH[:, 0], dtype=task.wide) if wanted.bias else None
    d_hidden: list[Tensor] = []
    sums: dict[int, list[Tensor]] = {}
    # A zero that depends on the chunk before. XLA sees all chunks at once, and would otherwise compute the exponentials
    # of every one before the first product with them: [tokens, vocabulary] after all.
    nothing = task.hidden_NH.new_zeros(())
    for start in range(0, task.hidden_NH.shape[0], chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        hidden_CH = task.hidden_NH[rows] + nothing
        logits_CV, slope_CV = lm_head_logits(hidden_CH, task.lm_head, task.wide, any(wanted))
        grad_CV: Tensor | None = None
        for group in task.groups:
            softened_CV = _soften(logits_CV, group.temperature, in_place=group is task.groups[-1])
            part, part_CV = (_dense_chunk if group.dense else _sparse_chunk)(softened_CV, group, task, rows)
            for index, loss in part.items():
                sums.setdefault(index, []).append(loss)
            grad_CV = part_CV if grad_CV is None or part_CV is None else grad_CV.add_(part_CV)
        if grad_CV is None:
            nothing = (0.0 * loss).nan_to_num(0.0).to(hidden_CH.dtype)
            continue
        if slope_CV is not None:
            grad_CV.mul_(slope_CV)
        if logit_scale != 1.0:
            grad_CV.mul_(logit_scale)
        if wanted.hidden:
            d_hidden.append(grad_CV.to(task.hidden_NH.dtype) @ weight_VH)
            nothing = (0.0 * d_hidden[-1][0, 0]).nan_to_num(0.0)
        if d_weight is not None:
            d_weight.addmm_(grad_CV.t(), hidden_CH.to(task.wide))
        if d_bias is not None:
            d_bias.add_(grad_CV.sum(0))
    added = {index: torch.stack(parts).sum() for index, parts in sums.items()}
    return Walked(added, torch.cat(d_hidden) if wanted.hidden else None, d_weight, d_bias)


def _soften(logits_CV: Tensor, temperature: float, *, in_place: bool) -> Tensor:
    """Return logits / T, which may be overwritten; the argument is overwritten only if `in_place`."""
    if in_place:
        return logits_CV if temperature == 1.0 else logits_CV.div_(temperature)
    return logits_CV.clone() if temperature == 1.0 else logits_CV / temperature


def _sparse_chunk(z_CV: Tensor, group: Group, task: Task, rows: slice) -> Chunk:
    """Top-K and point terms; overwrites `z_CV`."""
    ids = entry_ids(group, task.mask_N[rows], rows)
    entry_z = [z_CV.gather(1, ids_CE) for ids_CE in ids]
    if group.ids_NK is not None:
        z_CV.scatter_(1, ids[0], float("-inf"))
    max_C1 = z_CV.amax(1, keepdim=True)  # of the tail, so that its largest entry becomes exp(0)
    max_C1 = torch.where(max_C1 == float("-inf"), torch.zeros_like(max_C1), max_C1)  # an empty tail
    tail_CV = z_CV.sub_(max_C1).exp_()
    sum_C = tail_CV.sum(1)
    part = group_gradient(task, group, entry_z, max_C1[:, 0] + sum_C.log(), rows)
    if not any(task.wanted):
        return part.sums, None
    share_C = part.tail_C / sum_C.clamp_min(1)  # the sum is at least 1, or 0 for an empty tail
    grad_CV = tail_CV.mul_(share_C[:, None])
    for ids_CE, grad_CE in zip(ids, part.entries, strict=True):
        grad_CV.scatter_add_(1, ids_CE, grad_CE)
    return part.sums, grad_CV


def _dense_chunk(z_CV: Tensor, group: Group, task: Task, rows: slice) -> Chunk:
    """The exact KL, Σ_V t log(t/p) with dz = p - t, and point terms next to it; overwrites `z_CV`."""
    mask_C = task.mask_N[rows]
    log_p_CV = z_CV.sub_(z_CV.logsumexp(1, keepdim=True))
    ids = entry_ids(group, mask_C, rows)
    zero_C = torch.zeros_like(log_p_CV[:, 0])  # the log of the softmax's sum, since log p is normalised
    part = group_gradient(task, group, [log_p_CV.gather(1, ids_CD) for ids_CD in ids], zero_C, rows)
    ((index, term),) = group.dense
    log_t_CV = _teacher_log_probs(term.hidden_NH[rows].masked_fill(~mask_C[:, None], 0), term, task.wide)
    t_CV = log_t_CV.exp()
    distance_CV = log_t_CV.sub_(log_p_CV).masked_fill_(t_CV == 0, 0).mul_(t_CV)
    sums = part.sums | {index: keep(distance_CV.sum(1), mask_C).sum()}
    if not any(task.wanted):
        return sums, None
    share_C = keep(zero_C + task.scales[index], mask_C) / group.temperature
    grad_CV = log_p_CV.exp_().mul_((part.tail_C + share_C)[:, None]).sub_(t_CV.mul_(share_C[:, None]))
    for ids_CD, grad_CD in zip(ids, part.entries, strict=True):
        grad_CV.scatter_add_(1, ids_CD, grad_CD)
    return sums, grad_CV


def _teacher_log_probs(hidden_CH: Tensor, term: DenseTerm, wide: torch.dtype) -> Tensor:
    """Return the softened teacher's log-probabilities over its whole vocabulary [positions, V]."""
    dtype = term.lm_head.weight_VH.dtype
    logits_CV, _ = lm_head_logits(hidden_CH.to(dtype), real_vocabulary(term.lm_head, dtype, wide), wide)
    z_CV = _soften(logits_CV, term.temperature, in_place=True)
    return z_CV.sub_(z_CV.logsumexp(1, keepdim=True))
