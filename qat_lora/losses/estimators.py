"""Distances between a student and a teacher of whom only K entries and the mass of the rest are known.

Every function here takes the student's log-probabilities on the head, its log mass outside, and the teacher's same
two, and returns the loss with its gradient. The view that makes them all alike: the tail is one more outcome, the
K+1st. A loss over K+1 outcomes has a gradient for each, and the tail's is shared among its tokens in proportion to
the student's own probabilities there:

    dz_j = head_NK[j] on the head,     dz_j = tail_N · p_j / (1 - b) elsewhere,     b = Σ_head p.

The usual form, dz_j = α p_j + sparse, is the same on paper, but for the ghost bucket α = 1 - m/(1-b), and when a
student has (nearly) no mass left outside the head that is infinity times zero. Shares stay finite at any logits.

Gradients are with respect to z/T, the softened logits; T² and weights are the caller's. Each is the exact
derivative of its loss also where the teacher's numbers don't add up to one by a rounding.

Derivations: docs/numerics.md. `log_rest` is the student's log(1 - b), `log_m` the teacher's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor


class Estimate(NamedTuple):
    """A loss at N positions and its gradient with respect to the softened logits."""

    loss_N: Tensor
    head_NK: Tensor
    """Gradient at the head's ids."""
    tail_N: Tensor
    """Gradient of the tail as a whole; a token outside the head gets the share p_j / (1 - b) of it."""


Estimator = Callable[[Tensor, Tensor, Tensor, Tensor], Estimate]


def weighted(weight: Tensor, value: Tensor) -> Tensor:
    """Return weight · value with 0 · inf = 0, as lim x log x asks for; a NaN on either side survives."""
    return torch.where(weight == 0, torch.zeros_like(value), weight * value)


def log_add(first: Tensor, second: Tensor) -> Tensor:
    """Return log(exp(first) + exp(second)); `torch.logaddexp` does the same but leaves the device on XLA."""
    return torch.stack([first, second]).logsumexp(0)


def ghost(log_p_NK: Tensor, log_rest_N: Tensor, log_t_NK: Tensor, log_m_N: Tensor) -> Estimate:
    """Forward KL with the tail as one bucket: Σ_S t log(t/p) + m log(m/(1-b)).

    On the head the gradient is p - t, that of the full KL; on the tail it moves the whole mass, not its shape.
    Never more than the full KL, from which it lacks m · KL(teacher's tail ‖ student's tail).
    """
    t_NK, m_N = log_t_NK.exp(), log_m_N.exp()
    mass_N = t_NK.sum(-1) + m_N
    loss_N = weighted(t_NK, log_t_NK - log_p_NK).sum(-1) + weighted(m_N, log_m_N - log_rest_N)
    return Estimate(loss_N, mass_N[:, None] * log_p_NK.exp() - t_NK, mass_N * log_rest_N.exp() - m_N)


def renorm(log_p_NK: Tensor, log_rest_N: Tensor, log_t_NK: Tensor, log_m_N: Tensor) -> Estimate:
    """Forward KL between both sides renormalised over the head; blind to mass that leaks into the tail."""
    log_q_NK = log_p_NK - log_p_NK.logsumexp(-1, keepdim=True)
    log_s_NK = log_t_NK - log_t_NK.logsumexp(-1, keepdim=True)
    s_NK = log_s_NK.exp()
    loss_N = weighted(s_NK, log_s_NK - log_q_NK).sum(-1)
    return Estimate(loss_N, log_q_NK.exp() - s_NK, torch.zeros_like(loss_N))


def reverse(log_p_NK: Tensor, log_rest_N: Tensor, log_t_NK: Tensor, log_m_N: Tensor) -> Estimate:
    """Reverse KL over the K+1 outcomes: Σ_S p log(p/t) + (1-b) log((1-b)/m); seeks the teacher's modes.

    Infinite where the student has mass and the teacher has none.
    """
    p_NK, rest_N = log_p_NK.exp(), log_rest_N.exp()
    ratio_NK, ratio_N = log_p_NK - log_t_NK, log_rest_N - log_m_N
    loss_N = weighted(p_NK, ratio_NK).sum(-1) + weighted(rest_N, ratio_N)
    return Estimate(loss_N, weighted(p_NK, ratio_NK - loss_N[:, None]), weighted(rest_N, ratio_N - loss_N))


def head_part(log_p_NK: Tensor, log_rest_N: Tensor, log_t_NK: Tensor, log_m_N: Tensor) -> Estimate:
    """The head's part of the forward KL, Σ_S t log(t/p), for use with draws from the tail (`hybrid`).

    Alone it is the truncated KL, which pushes mass into the head until the tail is empty and can be negative.
    """
    t_NK = log_t_NK.exp()
    mass_N = t_NK.sum(-1)
    loss_N = weighted(t_NK, log_t_NK - log_p_NK).sum(-1)
    return Estimate(loss_N, mass_N[:, None] * log_p_NK.exp() - t_NK, mass_N * log_rest_N.exp())


ESTIMATORS: dict[str, Estimator] = {"ghost": ghost, "renorm": renorm, "reverse": reverse}
"""The estimators that need nothing beyond the head and the tail's mass, by the name used in settings."""
