"""What is walked through, and terms that share a softmax: what each gives once the mass of the tail is known.

However the logits are walked through (`chunks`: positions, `sweep`: vocabulary), a softmax ends up as three things: the
logits at a head's ids, the logits at the points' ids, and the log of the sum over the rest. From these, all of size
[positions, K], come every loss and every gradient; only the tail's gradient has to be spread over the vocabulary, in
proportion to the exponentials that the walk already holds. A `DenseTerm` alone needs every logit (`chunks`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qat_lora.losses.estimators import log_add, weighted
from qat_lora.losses.loss_terms import DenseTerm, HeadTerm, PointTerm, Term


class Group(NamedTuple):
    """Terms that can share one softmax: equal temperature, and one head or none; beside a dense term, none."""

    temperature: float
    ids_NK: Tensor | None
    heads: list[tuple[int, HeadTerm]]
    points: list[tuple[int, PointTerm]]
    dense: list[tuple[int, DenseTerm]]


class Task(NamedTuple):
    """One call of the fused loss, made ready for a walk: real vocabulary only, masked positions blanked."""

    hidden_NH: Tensor
    """In the dtype of the products, zero where masked."""
    weight_VH: Tensor
    """In the same dtype."""
    bias_V: Tensor | None
    logit_scale: float
    softcap: float | None
    groups: list[Group]
    scales: list[float | Tensor]
    """weight · T² of each term."""
    mask_N: Tensor
    wide: torch.dtype
    """Of softmax and sums: float32, or float64 for float64 products."""
    want_hidden: bool
    want_weight: bool
    want_bias: bool

    @property
    def wanted(self) -> bool:
        """True if any gradient is."""
        return self.want_hidden or self.want_weight or self.want_bias


class Walked(NamedTuple):
    """What a walk brings back; gradients that nobody wants are None."""

    sums: dict[int, Tensor]
    """A sum for each term's index, without weight and T²."""
    hidden_NH: Tensor | None
    weight_VH: Tensor | None
    bias_V: Tensor | None


class Shares(NamedTuple):
    """Loss sums, and gradients with respect to the unsoftened logits with weights and T² in, zero where masked."""

    losses: dict[int, Tensor]
    """A sum for each term's index, without weight and T²."""
    tail_C: Tensor
    """Gradient of the tail as a whole."""
    head_CK: Tensor | None
    """Gradient at the head's ids."""
    points: list[Tensor]
    """What each point term adds to the gradient at its ids."""


def group_terms(terms: Sequence[Term]) -> list[Group]:
    """Sort terms into as few softmax passes as their temperatures and heads allow."""
    groups: list[Group] = []
    for index, term in enumerate(terms):
        if isinstance(term, HeadTerm):
            ids = term.teacher.ids_NK
            same = [g for g in groups if g.temperature == term.temperature and g.ids_NK is ids]
            group = same[0] if same else Group(term.temperature, ids, [], [], [])
            group.heads.append((index, term))
            if not same:
                groups.append(group)
        elif isinstance(term, DenseTerm):
            groups.append(Group(term.temperature, None, [], [], [(index, term)]))
    for index, term in enumerate(terms):
        if isinstance(term, PointTerm):
            near = [g for g in groups if g.temperature == term.temperature]
            if not near:
                near = [Group(term.temperature, None, [], [], [])]
                groups += near
            near[0].points.append((index, term))
    return groups


def shares(
    group: Group,
    head_z_CK: Tensor | None,
    point_z: Sequence[Tensor],
    log_tail_C: Tensor,
    scales: Sequence[float | Tensor],
    rows: slice,
    mask_C: Tensor,
) -> Shares:
    """Return what a group's terms make of some positions' softened logits."""
    log_total_C = log_tail_C if head_z_CK is None else log_add(head_z_CK.logsumexp(1), log_tail_C)
    log_rest_C = log_tail_C - log_total_C
    losses: dict[int, Tensor] = {}
    tail_C = torch.zeros_like(log_tail_C)
    head_CK: Tensor | None = None
    if head_z_CK is not None:
        log_p_CK = head_z_CK - log_total_C[:, None]
    for index, distance in group.heads:
        teacher = distance.teacher
        estimate = distance.estimator(
            log_p_CK,
            log_rest_C,
            teacher.log_probs_NK[rows].to(log_p_CK.dtype),
            teacher.log_tail_N[rows].to(log_p_CK.dtype),
        )
        losses[index] = keep(estimate.loss_N, mask_C).sum()
        tail_C = tail_C + scales[index] * estimate.tail_N
        scaled_CK = scales[index] * estimate.head_NK
        head_CK = scaled_CK if head_CK is None else head_CK + scaled_CK
    back = 1 / group.temperature  # d(z/T)/dz; with the T² of `scales` a softened term is scaled by T
    point_grads = []
    for (index, points), z_CD in zip(group.points, point_z, strict=True):
        weights_CD = points.weights_ND[rows].to(z_CD.dtype)
        losses[index] = keep(weighted(weights_CD, log_total_C[:, None] - z_CD).sum(1), mask_C).sum()
        mass_C = scales[index] * weights_CD.sum(1)
        tail_C = tail_C + mass_C * log_rest_C.exp()
        if head_CK is not None:
            head_CK = head_CK + mass_C[:, None] * log_p_CK.exp()
        point_grads.append(keep(-scales[index] * weights_CD, mask_C) * back)
    head_CK = None if head_CK is None else keep(head_CK, mask_C) * back
    return Shares(losses, keep(tail_C, mask_C) * back, head_CK, point_grads)


def safe_ids(ids_NK: Tensor, rows: slice, mask_C: Tensor) -> Tensor:
    """Return some positions' ids, with a harmless one where masked."""
    return ids_NK[rows].long().masked_fill(~mask_C[:, None], 0)


def keep(value: Tensor, mask_C: Tensor) -> Tensor:
    """Zero the masked rows, whatever they hold."""
    mask = mask_C if value.dim() == 1 else mask_C[:, None]
    return torch.where(mask, value, torch.zeros_like(value))
