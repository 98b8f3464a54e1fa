"""Distances between a student and a teacher of whom only the top-K entries and the mass of the rest are known.

Every estimator takes the student's log-probabilities of the top-K ids and its log mass outside them, log(1 - b), and
the same two of the teacher, log t and log m, and returns the loss with its gradient. One view makes them all alike: the
tail is one more outcome, the K+1st, and its gradient is shared among its tokens by the student's probabilities there:

    dz_j = topk_NK[j] on the top K,     dz_j = tail_N · p_j / (1 - b) elsewhere,     b = Σ_topK p.

The usual form, dz_j = α p_j + sparse, is the same on paper, but for the ghost bucket α = 1 - m/(1-b), and when a
student has (nearly) no mass left outside the top K that is infinity times zero. Shares stay finite at any logits.
Gradients are with respect to z/T, the softened logits; T² and weights are the caller's (derivations: docs/numerics.md).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from qat_lora.types import LMHead, SparseTeacher


class Estimate(NamedTuple):
    """A loss at N positions and its gradient with respect to the softened logits."""

    loss_N: Tensor
    topk_NK: Tensor  # gradient at the top-K ids
    tail_N: Tensor  # gradient of the tail as a whole; a token of the tail gets the share p_j / (1 - b) of it


Estimator = Callable[[Tensor, Tensor, Tensor, Tensor], Estimate]


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of softmax and sums: float32, or float64 for float64 products."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def weighted(weight: Tensor, value: Tensor) -> Tensor:
    """Return weight · value with 0 · inf = 0, as lim x log x asks for; a NaN on either side survives."""
    return torch.where(weight == 0, torch.zeros_like(value), weight * value)


def log_add(first: Tensor, second: Tensor) -> Tensor:
    """Return log(exp(first) + exp(second)); `torch.logaddexp` does the same but leaves the device on XLA."""
    return torch.stack([first, second]).logsumexp(0)


def ghost(log_p_NK: Tensor, log_rest_N: Tensor, log_t_NK: Tensor, log_m_N: Tensor) -> Estimate:
    """Forward KL with the tail as one bucket: Σ_topK t log(t/p) + m log(m/(1-b)).

    On the top K the gradient is p - t, that of the full KL; on the tail it moves the whole mass, not its shape.
    Never more than the full KL, from which it lacks m · KL(teacher's tail ‖ student's tail).
    """
    t_NK, m_N = log_t_NK.exp(), log_m_N.exp()
    mass_N = t_NK.sum(-1) + m_N
    loss_N = weighted(t_NK, log_t_NK - log_p_NK).sum(-1) + weighted(m_N, log_m_N - log_rest_N)
    return Estimate(loss_N, mass_N[:, None] * log_p_NK.exp() - t_NK, mass_N * log_rest_N.exp() - m_N)


def renorm(log_p_NK: Tensor, log_rest_N: Tensor, log_t_NK: Tensor, log_m_N: Tensor) -> Estimate:
    """Forward KL between both sides renormalised over the top K; blind to mass that leaks into the tail."""
    log_q_NK = log_p_NK - log_p_NK.logsumexp(-1, keepdim=True)
    log_s_NK = log_t_NK - log_t_NK.logsumexp(-1, keepdim=True)
    s_NK = log_s_NK.exp()
    loss_N = weighted(s_NK, log_s_NK - log_q_NK).sum(-1)
    return Estimate(loss_N, log_q_NK.exp() - s_NK, torch.zeros_like(loss_N))


def reverse(log_p_NK: Tensor, log_rest_N: Tensor, log_t_NK: Tensor, log_m_N: Tensor) -> Estimate:
    """Reverse KL over K+1 outcomes: Σ_topK p log(p/t) + (1-b) log((1-b)/m); seeks modes, infinite where t or m is 0."""
    p_NK, rest_N = log_p_NK.exp(), log_rest_N.exp()
    ratio_NK, ratio_N = log_p_NK - log_t_NK, log_rest_N - log_m_N
    loss_N = weighted(p_NK, ratio_NK).sum(-1) + weighted(rest_N, ratio_N)
    return Estimate(loss_N, weighted(p_NK, ratio_NK - loss_N[:, None]), weighted(rest_N, ratio_N - loss_N))


def jsd(log_p_NK: Tensor, log_rest_N: Tensor, log_t_NK: Tensor, log_m_N: Tensor, share: float) -> Estimate:
    """Generalised JSD over the K+1 outcomes: β KL(t ‖ r) + (1-β) KL(p ‖ r), r = βt + (1-β)p, β the share.

    Towards β = 0 it behaves as the forward KL, towards 1 as the reverse (GKD; Agarwal et al., 2024, equation 1).
    """
    log_p, log_t, log_r = _mixed(log_p_NK, log_rest_N, log_t_NK, log_m_N, share)
    parts = share * weighted(log_t.exp(), log_t - log_r) + (1 - share) * weighted(log_p.exp(), log_p - log_r)
    return _by_slope(parts, log_p, (1 - share) * (log_p - log_r))


def skew(log_p_NK: Tensor, log_rest_N: Tensor, log_t_NK: Tensor, log_m_N: Tensor, share: float) -> Estimate:
    """Skew forward KL over the K+1 outcomes: KL(t ‖ αt + (1-α)p), α the share (DistiLLM; Ko et al., 2024)."""
    log_p, log_t, log_r = _mixed(log_p_NK, log_rest_N, log_t_NK, log_m_N, share)
    return _by_slope(weighted(log_t.exp(), log_t - log_r), log_p, (share - 1) * (log_t - log_r).exp())


def skew_reverse(log_p_NK: Tensor, log_rest_N: Tensor, log_t_NK: Tensor, log_m_N: Tensor, share: float) -> Estimate:
    """Skew reverse KL over the K+1 outcomes: KL(p ‖ (1-α)t + αp), α the share (same source); finite, unlike reverse."""
    log_p, _, log_r = _mixed(log_p_NK, log_rest_N, log_t_NK, log_m_N, 1 - share)
    ratio = log_p - log_r
    return _by_slope(weighted(log_p.exp(), ratio), log_p, ratio - share * ratio.exp())


def _mixed(
    log_p_NK: Tensor, log_rest_N: Tensor, log_t_NK: Tensor, log_m_N: Tensor, share: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log p, log t and log(share · t + (1 - share) · p), each [N, K+1] with the tail last."""
    log_p = torch.cat([log_p_NK, log_rest_N[:, None]], 1)
    log_t = torch.cat([log_t_NK, log_m_N[:, None]], 1)
    return log_p, log_t, log_add(log_t + math.log(share), log_p + math.log1p(-share))


def _by_slope(parts: Tensor, log_p: Tensor, slope: Tensor) -> Estimate:
    """Return the estimate whose loss is the sum of parts, with dL/dp but for a constant: dz = p (slope - Σ p slope)."""
    p = log_p.exp()
    pull = weighted(p, slope)
    gradient = pull - p * pull.sum(1, keepdim=True)
    return Estimate(parts.sum(1), gradient[:, :-1], gradient[:, -1])


def topk_part(log_p_NK: Tensor, log_rest_N: Tensor, log_t_NK: Tensor, log_m_N: Tensor) -> Estimate:
    """The top K's part of the forward KL, Σ_topK t log(t/p), for use with draws from the tail (`hybrid`).

    Alone it is the truncated KL, which pushes mass into the top K until the tail is empty, and can be negative.
    """
    t_NK = log_t_NK.exp()
    mass_N = t_NK.sum(-1)
    loss_N = weighted(t_NK, log_t_NK - log_p_NK).sum(-1)
    return Estimate(loss_N, mass_N[:, None] * log_p_NK.exp() - t_NK, mass_N * log_rest_N.exp())


ESTIMATORS: dict[str, Estimator] = {"ghost": ghost, "renorm": renorm, "reverse": reverse}  # by their names in settings
MIXTURES = {"jsd": (jsd, 0.5), "skew": (skew, 0.1), "skew_reverse": (skew_reverse, 0.1)}  # with their papers' shares
IN_KERNEL = (ghost, renorm, reverse, topk_part)  # that `fused/triton_kernel.py` has too, by the same names


@dataclass(frozen=True, eq=False)
class TopKTerm:
    """A distance to a sparse teacher, softened by the teacher's temperature and scaled by weight · T²."""

    teacher: SparseTeacher
    estimator: Estimator = ghost
    weight: float | Tensor = 1.0
    name: str = "kd"

    @property
    def temperature(self) -> float:
        """The temperature of the teacher's numbers."""
        return self.teacher.temperature


@dataclass(frozen=True, eq=False)
class PointTerm:
    """A cross-entropy -Σ w log p at labels or draws, which may repeat and be top-K ids; scaled by weight · T²."""

    ids_ND: Tensor  # int64
    weights_ND: Tensor  # float
    weight: float | Tensor = 1.0
    name: str = "ce"
    temperature: float = 1.0


@dataclass(frozen=True, eq=False)
class DenseTerm:
    """The forward KL over the whole vocabulary, which both share, times weight · T²; the teacher has no gradient.

    T may be a tensor: both softmaxes are made here, at any temperature, so one that changes compiles no graph.
    """

    hidden_NH: Tensor
    lm_head: LMHead
    weight: float | Tensor = 1.0
    name: str = "kd"
    temperature: float | Tensor = 1.0


@dataclass(frozen=True, eq=False)
class KLTerm(TopKTerm):
    """The KL at temperature 1, for the log: no gradient; beside the same ids as top K, or labels or draws at T = 1.

    With D draws from the tail it is Σ_topK t log(t/p) - m/D Σ_d log p, unbiased but for the teacher's entropy on its
    tail, a constant that is the caller's to subtract. Without draws it is the lower bound `ghost`.
    """

    weight: float = 0.0
    name: str = "kl"
    draw_ids_ND: Tensor | None = None  # int64

    @property
    def ids_NE(self) -> Tensor:
        """The ids whose logits are read: top K, then draws."""
        ids_NK = self.teacher.ids_NK
        return ids_NK if self.draw_ids_ND is None else torch.cat([ids_NK, self.draw_ids_ND], 1)

    def loss(self, log_p_NE: Tensor, log_rest_N: Tensor | None) -> Tensor:
        """Return the value at N positions from log p at `ids_NE`, and log(1 - b), which only `ghost` reads.

        Without log(1 - b), the noise of 1 - Σ p is in `ghost`, some 1e-6 in float32.
        """
        log_t_NK, log_m_N = (x.to(log_p_NE.dtype) for x in self.teacher[1:3])
        if self.draw_ids_ND is not None:
            entries, draws = log_t_NK.shape[1], self.draw_ids_ND.shape[1]
            log_p_NK, log_p_ND = log_p_NE.split([entries, draws], 1)
            topk_N = weighted(log_t_NK.exp(), log_t_NK - log_p_NK).sum(1)
            return topk_N - weighted(log_m_N.exp(), log_p_ND.mean(1))
        if log_rest_N is None:
            log_rest_N = (1 - log_p_NE.exp().sum(1)).clamp_min(torch.finfo(log_p_NE.dtype).eps).log()
        return ghost(log_p_NE, log_rest_N, log_t_NK, log_m_N).loss_N


Term = TopKTerm | PointTerm | DenseTerm | KLTerm


def label_term(labels_N: Tensor, weight: float | Tensor = 1.0, name: str = "ce") -> PointTerm:
    """Return plain cross-entropy with one label a position (`ce`, and `hard_top1` with the teacher's top-1)."""
    ids_ND = labels_N.long()[:, None]
    return PointTerm(ids_ND, torch.ones_like(ids_ND, dtype=torch.float32), weight, name)


def sampled_term(ids_ND: Tensor, weight: float | Tensor = 1.0, temperature: float = 1.0, name: str = "kd") -> PointTerm:
    """Return unbiased KD by draws from the teacher at `temperature` (Sparse Logit Sampling; Anshumann et al., 2025)."""
    shares_ND = torch.full_like(ids_ND, 1 / ids_ND.shape[1], dtype=torch.float32)
    return PointTerm(ids_ND, shares_ND, weight, name, temperature)


def hybrid_terms(teacher: SparseTeacher, draw_ids_ND: Tensor, weight: float | Tensor = 1.0) -> list[Term]:
    """Return an exact top K plus D draws from the tail, each worth m / D: an unbiased gradient of the full KL.

    The value lacks the teacher's entropy on its tail, a constant, so it does not reach zero at p = t; a cache's
    `tail_entropy` is that constant.
    """
    shares_N1 = teacher.log_tail_N.exp()[:, None] / draw_ids_ND.shape[1]
    draws = PointTerm(draw_ids_ND, shares_N1.expand(draw_ids_ND.shape), weight, "kd", teacher.temperature)
    return [TopKTerm(teacher, topk_part, weight), draws]


def kd_soft_ce(student_logits: Tensor, teacher_logits: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the mean soft cross-entropy -Σ softmax(teacher/T) · log_softmax(student/T), times T², as a scalar.

    Both arguments are [..., V]; the mean is over all leading positions, so drop masked ones first or use
    `fused_linear_kd`. The gradient goes to the student only. The minimum is the teacher's entropy times T², not zero.
    Static shapes, no host read: safe on XLA. ValueError where shapes differ, or the temperature is not positive.
    """
    if student_logits.shape != teacher_logits.shape:
        what = f"student {tuple(student_logits.shape)} and teacher {tuple(teacher_logits.shape)} differ"
        remedy = "both must have one shape, so slice padded vocabulary entries off the wider one"
        raise ValueError(f"kd_soft_ce: {what}; {remedy}")
    if not temperature > 0:
        raise ValueError(f"temperature {temperature}: expected a number above 0")
    wide = wide_dtype(torch.promote_types(student_logits.dtype, teacher_logits.dtype))
    teacher = torch.softmax(teacher_logits.detach().to(wide) / temperature, dim=-1)
    log_student = torch.log_softmax(student_logits.to(wide) / temperature, dim=-1)
    return -weighted(teacher, log_student).sum(-1).mean() * temperature**2


def hidden_error_sum(student: Tensor, teacher: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Return the relative squared error of hidden states [..., H], summed over positions, and how many counted.

    At a position: mean over H of (student - teacher)², divided by the mean over H of teacher². Models differ in the
    scale of their hidden states by orders of magnitude, also within a row (massive activations); relative, 1 is what a
    student of zeros would have, everywhere, so that a weight means the same for every model.
    """
    wide, keep = wide_dtype(torch.promote_types(student.dtype, teacher.dtype)), mask.bool()[..., None]
    # Masked before the square: a NaN in padding would come back through its derivative.
    student, teacher = student.masked_fill(~keep, 0), teacher.masked_fill(~keep, 0).detach().to(wide)
    scale = teacher.square().mean(-1).clamp_min(torch.finfo(torch.float32).tiny)
    loss = (student.to(wide) - teacher).square().mean(-1) / scale
    return torch.where(mask.bool(), loss * mask, torch.zeros_like(loss)).sum(), mask.sum(dtype=torch.float32)
