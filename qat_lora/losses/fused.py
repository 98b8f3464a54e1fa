"""From hidden states and output head to loss and gradient, without ever holding [tokens, vocabulary].

With a vocabulary of 150k, the logits of a few rows of text outweigh the model. So the last linear map belongs to
the loss: positions go through it a chunk at a time, and because the gradient of every term is known in closed form
(`estimators`), each chunk becomes its hidden-state gradient on the spot and is forgotten. Backward only scales.
A frozen head on a CPU is walked through by blocks of the vocabulary instead (`sweep`), to the same result.
Compared with recomputing chunks under autograd (activation checkpointing of the head) this saves one of three
matrix products and all of autograd's [chunk, vocabulary] temporaries; compared with a kernel library it also runs
on CPU and XLA, knows the tail, and does no work for a head that is frozen.

Numerical core, see `_softmax_chunk`: the head's logits are taken out *before* the exponential, so the tail is
summed on its own scale. log(1 - b) is then accurate at any size; 1 - Σ p would be noise below 1e-7.

Everything is static: shapes depend on N, V and the chunk size alone, and nothing is read back from the device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qat_lora.losses.groups import Group, group_terms, safe_ids, shares
from qat_lora.losses.sweep import sweep_vocabulary
from qat_lora.losses.terms import HeadTerm, Term
from qat_lora.types import OutputHead

CHUNK_BYTES = 32 * 2**20


class LossSum(NamedTuple):
    """A loss added up over positions; divide by the global token count once, after accumulation."""

    loss_sum: Tensor
    """0-d float32 (float64 for float64 inputs), differentiable: Σ over terms of weight · term."""
    token_count: Tensor
    """0-d float32: positions that counted."""
    terms: dict[str, Tensor]
    """Each term's sum by name, T² included and weight not, detached: for logging."""


def fused_linear_kd(
    hidden_NH: Tensor,
    head: OutputHead,
    terms: Sequence[Term],
    mask_N: Tensor | None = None,
    *,
    chunk_tokens: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> LossSum:
    """Add up terms over all positions of a micro-batch, differentiable in the hidden states (and a trained head).

    Works in the dtype of the head's weight (under autocast: in its dtype) with float32 softmax and sums. The
    head's weight and bias get a gradient only if they ask for one; it is accumulated in float32.

    Args:
        hidden_NH: last hidden states, one for each position.
        head: the student's output head; rows from `vocab_size` on are never touched.
        terms: what to add up; ids must be below `vocab_size`, and distinct within a head.
        mask_N: True where a position counts; elsewhere hidden states and targets may hold anything.
        chunk_tokens: positions that are projected at once; by default as many as fit `chunk_bytes`.
        chunk_bytes: size of one chunk of float32 logits. Two to three of them exist at the peak; the sweep of a
            frozen head on a CPU holds as many logits, in the dtype of the products, once.

    Raises:
        ValueError: no terms, or shapes that don't fit each other.
    """
    count, vocab = hidden_NH.shape[0], head.vocab_size
    _check(hidden_NH, head, terms, mask_N)
    if mask_N is None:
        mask_N = torch.ones(count, dtype=torch.bool, device=hidden_NH.device)
    mask_N = mask_N.bool()
    if chunk_tokens is None:
        chunk_tokens = max(1, chunk_bytes // (4 * vocab))
    chunks = max(1, -(-count // chunk_tokens))
    chunk_tokens = max(1, -(-count // chunks))  # even chunks: one shape, or two, and none of them tiny

    device = hidden_NH.device.type
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else head.weight_VH.dtype
    with torch.autocast(device, enabled=False) if autocast else contextlib.nullcontext():
        loss_sum, sums_T = _FusedLinearKD.apply(
            hidden_NH, head.weight_VH, head.bias_V, head, tuple(terms), mask_N, dtype, chunk_tokens
        )
    by_name: dict[str, Tensor] = {}
    for index, term in enumerate(terms):
        by_name[term.name] = by_name[term.name] + sums_T[index] if term.name in by_name else sums_T[index]
    return LossSum(loss_sum, mask_N.sum(dtype=torch.float32), by_name)


class _FusedLinearKD(torch.autograd.Function):
    """Loss and gradients in the forward pass; the backward pass multiplies them by the incoming scalar."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        head: OutputHead,
        terms: tuple[Term, ...],
        mask_N: Tensor,
        dtype: torch.dtype,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        want_hidden, want_weight, want_bias = ctx.needs_input_grad[:3]
        want = want_hidden or want_weight or want_bias
        vocab, wide = head.vocab_size, torch.float64 if dtype == torch.float64 else torch.float32
        masked_NH = hidden_NH.to(dtype).masked_fill(~mask_N[:, None], 0)  # even a NaN must not leak from padding
        real_VH = weight_VH[:vocab].to(dtype)
        real_V = None if bias_V is None else bias_V[:vocab].to(wide)
        d_weight = torch.zeros(weight_VH.shape, dtype=wide, device=weight_VH.device) if want_weight else None
        d_bias = torch.zeros(bias_V.shape, dtype=wide, device=bias_V.device) if want_bias else None  # type: ignore[union-attr]
        groups, scales = group_terms(terms), [term.weight * term.temperature**2 for term in terms]

        d_hidden: list[Tensor] = []
        sums: list[list[Tensor]] = [[] for _ in terms]
        # Where a processor's caches decide, a frozen head takes the walk that suits them (`sweep`), with as many
        # logits at a time. Its many small steps would make a long XLA graph.
        plain = len(groups) == 1 and head.softcap is None
        swept = plain and not want_weight and not want_bias and masked_NH.is_cpu
        if swept:
            block_vocab = max(1, chunk_tokens * vocab // max(1, masked_NH.shape[0]))
            losses, pull_NH = sweep_vocabulary(
                masked_NH, real_VH, real_V, head.logit_scale, groups[0], scales, mask_N, wide, block_vocab, want_hidden
            )
            sums = [[losses[index]] for index in range(len(terms))]
            d_hidden += [] if pull_NH is None else [pull_NH.to(hidden_NH.dtype)]
        for start in range(0, 0 if swept else masked_NH.shape[0], chunk_tokens):
            rows = slice(start, start + chunk_tokens)
            hidden_CH = masked_NH[rows]
            logits_CV, slope_CV = _project(hidden_CH, real_VH, real_V, head, wide, want)
            grad_CV: Tensor | None = None
            for position, group in enumerate(groups):
                last = position == len(groups) - 1
                softened_CV = _soften(logits_CV, group.temperature, in_place=last)
                losses, part_CV = _softmax_chunk(softened_CV, group, scales, rows, mask_N[rows], want)
                for index, loss in losses.items():
                    sums[index].append(loss)
                grad_CV = part_CV if grad_CV is None or part_CV is None else grad_CV.add_(part_CV)
            if grad_CV is None:
                continue
            if slope_CV is not None:
                grad_CV.mul_(slope_CV)
            if head.logit_scale != 1.0:
                grad_CV.mul_(head.logit_scale)
            if want_hidden:
                d_hidden.append((grad_CV.to(dtype) @ real_VH).to(hidden_NH.dtype))
            if d_weight is not None:
                d_weight[:vocab].addmm_(grad_CV.t(), hidden_CH.to(wide))
            if d_bias is not None:
                d_bias[:vocab].add_(grad_CV.sum(0))

        parts_T = zip(sums, terms, strict=True)
        sums_T = torch.stack([torch.stack(parts).sum() * term.temperature**2 for parts, term in parts_T])
        loss_sum = torch.stack([sums_T[index] * term.weight for index, term in enumerate(terms)]).sum()
        ctx.save_for_backward(
            torch.cat(d_hidden) if want_hidden else None,
            None if d_weight is None else d_weight.to(weight_VH.dtype),
            None if d_bias is None else d_bias.to(bias_V.dtype),  # type: ignore[union-attr]
        )
        ctx.mark_non_differentiable(sums_T)
        return loss_sum, sums_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor, _d_sums: Tensor) -> tuple[Tensor | None, ...]:
        grads = [None if grad is None else grad * d_loss.to(grad.dtype) for grad in ctx.saved_tensors]
        return (*grads, None, None, None, None, None)


def _project(
    hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, head: OutputHead, wide: torch.dtype, want: bool
) -> tuple[Tensor, Tensor | None]:
    """Return the chunk's logits in the wide dtype, and the soft-cap's slope where there is one."""
    logits_CV = (hidden_CH @ weight_VH.t()).to(wide)
    if bias_V is not None:
        logits_CV.add_(bias_V)
    if head.logit_scale != 1.0:
        logits_CV.mul_(head.logit_scale)
    if head.softcap is None:
        return logits_CV, None
    tanh_CV = logits_CV.div_(head.softcap).tanh_()
    slope_CV = 1 - tanh_CV.square() if want else None
    return tanh_CV.mul_(head.softcap), slope_CV


def _soften(logits_CV: Tensor, temperature: float, *, in_place: bool) -> Tensor:
    """Divide by the temperature; the result may be overwritten, the argument only if `in_place`."""
    if in_place:
        return logits_CV if temperature == 1.0 else logits_CV.div_(temperature)
    return logits_CV.clone() if temperature == 1.0 else logits_CV / temperature


def _softmax_chunk(
    z_CV: Tensor,
    group: Group,
    scales: Sequence[float | Tensor],
    rows: slice,
    mask_C: Tensor,
    want: bool,
) -> tuple[dict[int, Tensor], Tensor | None]:
    """Return each term's loss sum and the gradient with respect to the unsoftened logits; overwrites `z_CV`."""
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
    part = shares(group, head_z_CK, point_z, top_C1[:, 0] + sum_C.log(), scales, rows, mask_C)
    if not want:
        return part.losses, None
    share_C = part.tail_C / sum_C.clamp_min(1)  # the sum is at least 1, or 0 for an empty tail
    grad_CV = tail_CV.mul_(share_C[:, None])
    if part.head_CK is not None:
        grad_CV.scatter_(1, ids_CK, part.head_CK)
    for ids_CD, grad_CD in zip(point_ids, part.points, strict=True):
        grad_CV.scatter_add_(1, ids_CD, grad_CD)
    return part.losses, grad_CV


def _check(hidden_NH: Tensor, head: OutputHead, terms: Sequence[Term], mask_N: Tensor | None) -> None:
    """Refuse shapes that broadcasting would otherwise quietly accept."""
    if hidden_NH.dim() != 2 or head.weight_VH.dim() != 2 or hidden_NH.shape[1] != head.weight_VH.shape[1]:
        raise ValueError(
            f"hidden states {tuple(hidden_NH.shape)} and output head {tuple(head.weight_VH.shape)}: "
            "expected [positions, width] and [vocabulary, width]; flatten the hidden states first"
        )
    if not 0 < head.vocab_size <= head.weight_VH.shape[0]:
        raise ValueError(f"vocab_size {head.vocab_size}: the output head has {head.weight_VH.shape[0]} rows")
    if not terms:
        raise ValueError("terms: none given; pass at least one HeadTerm or PointTerm")
    count = hidden_NH.shape[0]
    if mask_N is not None and mask_N.shape != (count,):
        raise ValueError(f"mask {tuple(mask_N.shape)}: expected one entry for each of {count} positions")
    for term in terms:
        if isinstance(term, HeadTerm):
            ids, values, tail = term.teacher.ids_NK, term.teacher.log_probs_NK, term.teacher.log_tail_N
            fits = ids.dim() == 2 and ids.shape == values.shape and tail.shape == (count,)
        else:
            ids, values, fits = term.ids_ND, term.weights_ND, term.ids_ND.dim() == 2
        if not fits or ids.shape != values.shape or ids.shape[0] != count:
            raise ValueError(
                f"term {term.name}: ids {tuple(ids.shape)} and values {tuple(values.shape)} do not fit "
                f"{count} positions; expected two arrays [{count}, entries]"
            )
