"""A few positions at a time, the whole vocabulary for each: the walk that serves every term, head and device.

A chunk's logits become its loss and its gradients on the spot. On a GPU and on XLA, where a product of some hundred
rows is as fast as any, this is also the quickest walk: three products with a trained head, where `sweep` needs four.

Numerical core, see `_sparse_chunk`: the head's logits are taken out *before* the exponential, so the tail is summed on
its own scale. log(1 - b) is then accurate at any size; 1 - Σ p would be noise below 1e-7.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from qat_lora.losses.fused.gradients import Group, Task, Walked, keep, safe_ids, shares
from qat_lora.losses.loss_terms import DenseTerm

Chunk = tuple[dict[int, Tensor], Tensor | None]
"""Each term's loss sum and the gradient with respect to the unsoftened logits."""


def walk_positions(task: Task, chunk_tokens: int) -> Walked:
    """Return sums and gradients; `chunk_tokens` positions are projected at once."""
    wide, device = task.wide, task.weight_VH.device
    d_weight = torch.zeros(task.weight_VH.shape, dtype=wide, device=device) if task.want_weight else None
    d_bias = torch.zeros(task.weight_VH.shape[:1], dtype=wide, device=device) if task.want_bias else None
    d_hidden: list[Tensor] = []
    sums: dict[int, list[Tensor]] = {}
    # A zero that the chunk before has to be finished for. XLA sees all chunks at once, and would make the exponentials
    # of every one before the first product with them: [tokens, vocabulary] after all.
    nothing = task.hidden_NH.new_zeros(())
    for start in range(0, task.hidden_NH.shape[0], chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        hidden_CH = task.hidden_NH[rows] + nothing
        logits_CV, slope_CV = project(
            hidden_CH, task.weight_VH, task.bias_V, task.logit_scale, task.softcap, wide, task.wanted
        )
        grad_CV: Tensor | None = None
        for position, group in enumerate(task.groups):
            last = position == len(task.groups) - 1
            softened_CV = _soften(logits_CV, group.temperature, in_place=last)
            chunk: Callable[[Tensor, Group, Task, slice], Chunk] = _dense_chunk if group.dense else _sparse_chunk
            losses, part_CV = chunk(softened_CV, group, task, rows)
            for index, loss in losses.items():
                sums.setdefault(index, []).append(loss)
            grad_CV = part_CV if grad_CV is None or part_CV is None else grad_CV.add_(part_CV)
        if grad_CV is None:
            nothing = (0.0 * loss).nan_to_num(0.0).to(hidden_CH.dtype)
            continue
        if slope_CV is not None:
            grad_CV.mul_(slope_CV)
        if task.logit_scale != 1.0:
            grad_CV.mul_(task.logit_scale)
        if task.want_hidden:
            d_hidden.append(grad_CV.to(task.hidden_NH.dtype) @ task.weight_VH)
            nothing = (0.0 * d_hidden[-1][0, 0]).nan_to_num(0.0)
        if d_weight is not None:
            d_weight.addmm_(grad_CV.t(), hidden_CH.to(wide))
        if d_bias is not None:
            d_bias.add_(grad_CV.sum(0))
    added = {index: torch.stack(parts).sum() for index, parts in sums.items()}
    return Walked(added, torch.cat(d_hidden) if task.want_hidden else None, d_weight, d_bias)


def project(
    hidden_CH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    logit_scale: float,
    softcap: float | None,
    wide: torch.dtype,
    want: bool,
) -> tuple[Tensor, Tensor | None]:
    """Return the chunk's logits in the wide dtype, and the soft-cap's slope where there is one."""
    logits_CV = (hidden_CH @ weight_VH.t()).to(wide)
    if bias_V is not None:
        logits_CV.add_(bias_V)
    if logit_scale != 1.0:
        logits_CV.mul_(logit_scale)
    if softcap is None:
        return logits_CV, None
    tanh_CV = logits_CV.div_(softcap).tanh_()
    slope_CV = 1 - tanh_CV.square() if want else None
    return tanh_CV.mul_(softcap), slope_CV


def _soften(logits_CV: Tensor, temperature: float, *, in_place: bool) -> Tensor:
    """Divide by the temperature; the result may be overwritten, the argument only if `in_place`."""
    if in_place:
        return logits_CV if temperature == 1.0 else logits_CV.div_(temperature)
    return logits_CV.clone() if temperature == 1.0 else logits_CV / temperature


def _sparse_chunk(z_CV: Tensor, group: Group, task: Task, rows: slice) -> Chunk:
    """Head and point terms; overwrites `z_CV`."""
    mask_C = task.mask_N[rows]
    point_ids = [safe_ids(term.ids_ND, rows, mask_C) for _, term in group.points]
    point_z = [z_CV.gather(1, ids_CD) for ids_CD in point_ids]
    head_z_CK = None
    if group.ids_NK is not None:
        ids_CK = safe_ids(group.ids_NK, rows, mask_C)
        head_z_CK = z_CV.gather(1, ids_CK)
        z_CV.scatter_(1, ids_CK, float("-inf"))
    top_C1 = z_CV.amax(1, keepdim=True)  # of the tail, so that its largest entry becomes exp(0)
    top_C1 = torch.where(top_C1 == float("-inf"), torch.zeros_like(top_C1), top_C1)  # an empty tail
    tail_CV = z_CV.sub_(top_C1).exp_()
    sum_C = tail_CV.sum(1)
    part = shares(group, head_z_CK, point_z, top_C1[:, 0] + sum_C.log(), task.scales, rows, mask_C)
    if not task.wanted:
        return part.losses, None
    share_C = part.tail_C / sum_C.clamp_min(1)  # the sum is at least 1, or 0 for an empty tail
    grad_CV = tail_CV.mul_(share_C[:, None])
    if part.head_CK is not None:
        grad_CV.scatter_(1, ids_CK, part.head_CK)
    for ids_CD, grad_CD in zip(point_ids, part.points, strict=True):
        grad_CV.scatter_add_(1, ids_CD, grad_CD)
    return part.losses, grad_CV


def _dense_chunk(z_CV: Tensor, group: Group, task: Task, rows: slice) -> Chunk:
    """The exact KL, with dz = p - t, and the points beside it; overwrites `z_CV`."""
    mask_C = task.mask_N[rows]
    log_p_CV = z_CV.sub_(z_CV.logsumexp(1, keepdim=True))
    point_ids = [safe_ids(term.ids_ND, rows, mask_C) for _, term in group.points]
    point_z = [log_p_CV.gather(1, ids_CD) for ids_CD in point_ids]
    no_loss_C = torch.zeros_like(log_p_CV[:, 0])  # also the log of the softmax's sum, since log p is normalised
    part = shares(group, None, point_z, no_loss_C, task.scales, rows, mask_C)
    losses, pull_C = dict(part.losses), part.tail_C
    ((index, term),) = group.dense
    log_t_CV = _teacher_log_probs(term.hidden_NH[rows].masked_fill(~mask_C[:, None], 0), term, task.wide)
    t_CV = log_t_CV.exp()
    distance_CV = log_t_CV.sub_(log_p_CV).masked_fill_(t_CV == 0, 0).mul_(t_CV)
    losses[index] = keep(distance_CV.sum(1), mask_C).sum()
    if not task.wanted:
        return losses, None
    share_C = keep(no_loss_C + task.scales[index], mask_C) / group.temperature
    grad_CV = log_p_CV.exp_().mul_((pull_C + share_C)[:, None]).sub_(t_CV.mul_(share_C[:, None]))
    for ids_CD, grad_CD in zip(point_ids, part.points, strict=True):
        grad_CV.scatter_add_(1, ids_CD, grad_CD)
    return losses, grad_CV


def _teacher_log_probs(hidden_CH: Tensor, term: DenseTerm, wide: torch.dtype) -> Tensor:
    """Return the softened teacher over its whole vocabulary, [positions, V], in the wide dtype."""
    head = term.head
    weight_VH = head.weight_VH[: head.vocab_size].detach()
    bias_V = None if head.bias_V is None else head.bias_V[: head.vocab_size].detach().to(wide)
    logits_CV, _ = project(
        hidden_CH.detach().to(weight_VH.dtype), weight_VH, bias_V, head.logit_scale, head.softcap, wide, False
    )
    softened_CV = _soften(logits_CV, term.temperature, in_place=True)
    return softened_CV.sub_(softened_CV.logsumexp(1, keepdim=True))
