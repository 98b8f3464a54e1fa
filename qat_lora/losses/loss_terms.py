"""The terms of an objective: what `fused_linear_kd` is asked to add up.

Three kinds cover every loss. A `HeadTerm` compares the student with a teacher's head and tail mass, by one of the
estimators. A `PointTerm` is a cross-entropy -Σ w log p at a few given ids: a label (`ce`, `hard_top1`), draws from
the teacher (`sampled`), or draws from its tail beside an exact head (`hybrid`). Point ids may repeat and may
coincide with the head: every entry counts. A `DenseTerm` is the exact KL (`full`) to a teacher whose logits are made
on the way, from its hidden states and output head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from qat_lora.losses.estimators import Estimator, ghost, head_part
from qat_lora.types import LMHead, SparseTeacher


@dataclass(frozen=True, eq=False)
class HeadTerm:
    """A distance to a sparse teacher, softened by the teacher's temperature and scaled by weight · T²."""

    teacher: SparseTeacher
    estimator: Estimator = ghost
    weight: float | Tensor = 1.0
    name: str = "kd"

    @property
    def temperature(self) -> float:
        """The temperature at which the teacher's numbers were taken."""
        return self.teacher.temperature


@dataclass(frozen=True, eq=False)
class PointTerm:
    """A cross-entropy with weights at given ids, int64 [N, D] and float [N, D]; scaled by weight · T²."""

    ids_ND: Tensor
    weights_ND: Tensor
    weight: float | Tensor = 1.0
    name: str = "ce"
    temperature: float = 1.0


@dataclass(frozen=True, eq=False)
class DenseTerm:
    """The forward KL over the whole vocabulary, softened by a temperature and scaled by weight · T².

    The teacher gets no gradient. Its head has the student's vocabulary; its width is its own.
    """

    hidden_NH: Tensor
    head: LMHead
    weight: float | Tensor = 1.0
    name: str = "kd"
    temperature: float = 1.0


Term = HeadTerm | PointTerm | DenseTerm


def label_term(labels_N: Tensor, weight: float | Tensor = 1.0, name: str = "ce") -> PointTerm:
    """Return plain cross-entropy at one label a position (`ce`, and `hard_top1` with the teacher's first)."""
    ids_ND = labels_N.long()[:, None]
    return PointTerm(ids_ND, torch.ones_like(ids_ND, dtype=torch.float32), weight, name)


def sampled_term(
    ids_ND: Tensor, counts_ND: Tensor, weight: float | Tensor = 1.0, temperature: float = 1.0, name: str = "kd"
) -> PointTerm:
    """Return random-sampling KD: the teacher is its own draws, with weight count / draws. Unbiased.

    Args:
        ids_ND: distinct ids drawn from the teacher at `temperature`; fill up with any id and count 0.
        counts_ND: how often each was drawn.

    Source: Sparse Logit Sampling (Anshumann et al., 2025).
    """
    counts_ND = counts_ND.float()
    return PointTerm(ids_ND, counts_ND / counts_ND.sum(-1, keepdim=True), weight, name, temperature)


def hybrid_terms(
    teacher: SparseTeacher,
    draw_ids_ND: Tensor,
    draw_weights_ND: Tensor,
    weight: float | Tensor = 1.0,
    name: str = "kd",
) -> tuple[HeadTerm, PointTerm]:
    """Return an exact head plus draws from the tail, each worth m / D: an unbiased gradient of the full KL.

    The value lacks the teacher's entropy on its tail, a constant, so it doesn't reach zero at p = t.
    """
    return (
        HeadTerm(teacher, head_part, weight, name),
        PointTerm(draw_ids_ND, draw_weights_ND, weight, name, teacher.temperature),
    )
