"""The fused loss between its walks: what is walked through, and the loss and gradient of each softmax.

However logits are walked through, a softmax is three things: the logits at the top-K ids and the points' ids, and the
log of the sum over all others. From these, all of size [positions, K], come every loss and gradient; only the tail's is
spread over the vocabulary, by exponentials that the walk holds anyway. A `DenseTerm` alone needs every logit.
"""

from collections.abc import Callable, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qat_lora.losses.estimators import DenseTerm, KLTerm, PointTerm, Term, TopKTerm, log_add, weighted, wide_dtype
from qat_lora.types import LMHead


class Group(NamedTuple):
    """Terms that share one softmax: equal temperature, and one top K or none; next to a dense term, none."""

    temperature: float | Tensor  # a tensor in a group of a dense term alone
    ids_NK: Tensor | None
    topk: list[tuple[int, TopKTerm]]  # each term with its index among all terms
    points: list[tuple[int, PointTerm]]
    dense: list[tuple[int, DenseTerm]]
    kl: list[tuple[int, KLTerm]]

    @property
    def indices(self) -> list[int]:
        """The terms, in the order in which their sums are made."""
        return [index for index, _ in (*self.topk, *self.points, *self.kl, *self.dense)]


class Wanted(NamedTuple):
    """Which gradients are asked for."""

    hidden: bool
    weight: bool = False
    bias: bool = False


class Task(NamedTuple):
    """One call of the fused loss, ready for a walk."""

    hidden_NH: Tensor  # in the dtype of the products, zero where masked
    lm_head: LMHead  # of `real_vocabulary`, in the same dtype
    groups: list[Group]
    scales: list[float | Tensor]  # weight · T² of each term
    mask_N: Tensor  # bool, or float: the positions' weights
    wanted: Wanted

    @property
    def wide(self) -> torch.dtype:
        """Of softmax and sums."""
        return wide_dtype(self.hidden_NH.dtype)


class Walked(NamedTuple):
    """The result of a walk; gradients that were not asked for are None."""

    sums: dict[int, Tensor]  # a sum for each term's index, without weight and T²
    hidden_NH: Tensor | None = None
    weight_VH: Tensor | None = None
    bias_V: Tensor | None = None


class GroupGradient(NamedTuple):
    """A group's losses, and gradients with respect to the logits, with weight · T² in them and zero where masked."""

    sums: dict[int, Tensor]  # as in `Walked`
    tail_C: Tensor  # gradient of the tail as a whole
    entries: list[Tensor]  # what to add to the gradient at each of `entry_ids`; fewer where the last are only read


def real_vocabulary(lm_head: LMHead, dtype: torch.dtype, wide: torch.dtype) -> LMHead:
    """Return an output head without padding, its weight in the dtype of the products, its bias in the wide one."""
    vocab, bias_V = lm_head.vocab_size, lm_head.bias_V
    bias_V = None if bias_V is None else bias_V[:vocab].to(wide)
    return replace(lm_head, weight_VH=lm_head.weight_VH[:vocab].to(dtype), bias_V=bias_V)


def head_zeros(task: Task) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of an output head's weight and bias, still zero, as far as they are wanted."""
    weight_VH, wide = task.lm_head.weight_VH, task.wide
    d_weight = torch.zeros_like(weight_VH, dtype=wide) if task.wanted.weight else None
    return d_weight, torch.zeros_like(weight_VH[:, 0], dtype=wide) if task.wanted.bias else None


def lm_head_logits(hidden_CH: Tensor, lm_head: LMHead, wide: torch.dtype) -> Tensor:
    """Return logits = c · tanh(s (h Wᵀ + b) / c) in the wide dtype."""
    return full_logits(hidden_CH @ lm_head.weight_VH.t(), lm_head, wide)[0]


def full_logits(
    product_CV: Tensor, lm_head: LMHead, wide: torch.dtype, with_slope: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the same from products h Wᵀ, to be overwritten, -inf in padding; on request a cap's slope 1 - tanh²."""
    logits_CV, slope_CV = finish_logits(product_CV, lm_head.bias_V, lm_head, wide, with_slope)
    if (rows := product_CV.shape[1]) > lm_head.vocab_size:
        beyond_V = torch.arange(rows, dtype=torch.int32, device=product_CV.device) >= lm_head.vocab_size
        logits_CV = logits_CV.masked_fill(beyond_V, float("-inf"))
    return logits_CV, slope_CV


def finish_logits(
    product: Tensor, bias: Tensor | None, lm_head: LMHead, wide: torch.dtype, with_slope: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the same for some entries, from their products h Wᵀ, which may be overwritten, and biases."""
    logits = product.to(wide)
    if bias is not None:
        logits.add_(bias)
    if lm_head.logit_scale != 1.0:
        logits.mul_(lm_head.logit_scale)
    if lm_head.softcap is None:
        return logits, None
    tanh = logits.div_(lm_head.softcap).tanh_()
    slope = 1 - tanh.square() if with_slope else None
    return tanh.mul_(lm_head.softcap), slope


def with_tensors(task: Task, per_row: Callable[[Tensor], Tensor], whole: Callable[[Tensor], Tensor]) -> Task:
    """Return a task with each tensor replaced, in one order: positions' (`_N…`) by `per_row`, others by `whole`."""
    made: dict[int, Tensor] = {}  # terms go on sharing what they share

    def change(tensor: Tensor, name: str) -> Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = (per_row if "_N" in name else whole)(tensor)
        return made[id(tensor)]

    return _replaced(task, "", change)


def _replaced(value: Any, name: str, change: Callable[[Tensor, str], Tensor]) -> Any:
    # No closure: one that calls itself would keep a loop's placeholders alive beyond the next sync of XLA.
    if isinstance(value, Tensor):
        return change(value, name)
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{f.name: _replaced(getattr(value, f.name), f.name, change) for f in fields(value)})
    if isinstance(value, tuple | list):
        names = getattr(value, "_fields", None)
        items = [_replaced(item, name, change) for item, name in zip(value, names or [""] * len(value), strict=True)]
        return type(value)(*items) if names else type(value)(items)
    return value


def is_number(temperature: float | Tensor, number: float) -> bool:
    """Return whether a temperature is this number; one that is a tensor may be any, and is not read."""
    return not isinstance(temperature, Tensor) and temperature == number


_JOINS = {PointTerm: 1, KLTerm: 2}  # the terms that join others, in this order


def group_terms(terms: Sequence[Term]) -> list[Group]:
    """Sort terms into as few softmax passes as their temperatures and top-K ids allow; ValueError: none for KL."""
    groups: list[Group] = []
    for index, term in sorted(enumerate(terms), key=lambda pair: _JOINS.get(type(pair[1]), 0)):
        if isinstance(term, KLTerm):
            fits = [g for g in groups if g.ids_NK is term.teacher.ids_NK]
            fits += [g for g in groups if g.ids_NK is None and g.points and is_number(g.temperature, 1.0)]
            if not fits:
                raise ValueError("kl: no term has its top-K ids, and none has labels or draws at temperature 1")
            fits[0].kl.append((index, term))
            continue
        if isinstance(term, DenseTerm):
            held, dtype = term.lm_head, term.lm_head.weight_VH.dtype
            term = replace(term, lm_head=real_vocabulary(held, dtype, wide_dtype(dtype)))
            groups.append(Group(term.temperature, None, [], [], [(index, term)], []))
            continue
        ids = term.teacher.ids_NK if isinstance(term, TopKTerm) else None
        same = [g for g in groups if is_number(g.temperature, term.temperature) and (ids is None or g.ids_NK is ids)]
        if not same:
            groups += (same := [Group(term.temperature, ids, [], [], [], [])])
        if isinstance(term, TopKTerm):
            same[0].topk.append((index, term))
        else:
            same[0].points.append((index, term))
    return groups


def entry_ids(group: Group, mask_N: Tensor) -> list[Tensor]:
    """Return the ids whose logits a group reads: the top K's, if any, each point term's, and `kl`'s that are others.

    Those of `kl` are last, since they get no gradient.
    """
    ids = [] if group.ids_NK is None else [group.ids_NK]
    ids += [term.ids_ND for _, term in group.points]
    for _, term in group.kl:
        if group.ids_NK is None:
            ids.append(term.ids_NE)
        elif term.draw_ids_ND is not None:
            ids.append(term.draw_ids_ND)
    return [x.long().masked_fill(skipped(mask_N)[:, None], 0) for x in ids]  # where masked, an id that exists


def group_gradient(task: Task, group: Group, entry_z: Sequence[Tensor], *log_tails_C: Tensor) -> GroupGradient:
    """Return losses and gradients of a group, from z/T at `entry_ids`, log Σ exp(z/T) of the rest, and log Σ exp(z)."""
    mask_C, (log_tail_C, *log_tail_1_C) = task.mask_N, log_tails_C
    topk_z, other_z = (entry_z[:1], entry_z[1:]) if group.topk else ((), entry_z)
    point_z, kl_z = other_z[: len(group.points)], iter(other_z[len(group.points) :])
    log_z_C = log_add(topk_z[0].logsumexp(1), log_tail_C) if topk_z else log_tail_C  # log Σ_V exp(z/T)
    log_rest_C = log_tail_C - log_z_C  # log(1 - b)
    log_p_CK = topk_z[0] - log_z_C[:, None] if topk_z else log_tail_C.new_zeros(len(log_tail_C), 0)
    sums: dict[int, Tensor] = {}
    tail_C, topk_CK, point_grads = torch.zeros_like(log_tail_C), torch.zeros_like(log_p_CK), []
    for index, topk in group.topk:
        log_t_CK = topk.teacher.log_probs_NK.to(log_p_CK.dtype)
        estimate = topk.estimator(log_p_CK, log_rest_C, log_t_CK, topk.teacher.log_tail_N.to(log_p_CK.dtype))
        sums[index] = keep(estimate.loss_N, mask_C).sum()
        tail_C = tail_C + task.scales[index] * estimate.tail_N
        topk_CK = topk_CK + task.scales[index] * estimate.topk_NK
    for (index, points), z_CD in zip(group.points, point_z, strict=True):
        # -Σ_D w log p, whose gradient is (Σ_D w) p_j everywhere, and -w at the points.
        weights_CD = points.weights_ND.to(z_CD.dtype)
        sums[index] = keep(weighted(weights_CD, log_z_C[:, None] - z_CD).sum(1), mask_C).sum()
        mass_C = task.scales[index] * weights_CD.sum(1)
        tail_C = tail_C + mass_C * log_rest_C.exp()
        topk_CK = topk_CK + mass_C[:, None] * log_p_CK.exp()
        point_grads.append(-task.scales[index] * weights_CD)
    for index, kl in group.kl:
        own_z = [*topk_z]
        if not topk_z or kl.draw_ids_ND is not None:
            own_z.append(next(kl_z))
        z_CE, log_z_1_C = torch.cat(own_z, 1), log_z_C
        log_rest_1_C = log_rest_C if topk_z else None
        if log_tail_1_C:
            z_CE = z_CE * group.temperature
            log_z_1_C = log_add((topk_z[0] * group.temperature).logsumexp(1), log_tail_1_C[0])
            log_rest_1_C = log_tail_1_C[0] - log_z_1_C
        sums[index] = keep(kl.loss(z_CE - log_z_1_C[:, None], log_rest_1_C), mask_C).sum()
    back = 1 / group.temperature  # d(z/T)/dz; with the T² of `scales` a softened term is scaled by T
    entries = [topk_CK, *point_grads] if group.topk else point_grads
    return GroupGradient(sums, keep(tail_C, mask_C) * back, [keep(grad_CE, mask_C) * back for grad_CE in entries])


def keep(value: Tensor, mask_C: Tensor) -> Tensor:
    """Zero the masked rows, whatever they hold; where the mask is one of weights, multiply the others by them."""
    mask = mask_C if value.dim() == 1 else mask_C[:, None]
    if mask.is_floating_point():
        mask, value = mask != 0, value * mask.to(value.dtype)
    return torch.where(mask, value, torch.zeros_like(value))


def skipped(mask_N: Tensor) -> Tensor:
    """Return where positions do not count."""
    return mask_N == 0 if mask_N.is_floating_point() else ~mask_N
