"""From hidden states and output head to loss and gradient, without ever holding [tokens, vocabulary].

At a vocabulary of 150k the logits of a few rows outweigh the model. So the last linear map belongs to the loss: logits
are computed in parts, and as every term's gradient has a closed form (`estimators`), each becomes its share of the
gradient on the spot. Backward only scales. Three walks give the same result: `by_token`, `by_vocab`, and `by_kernel`.

Compared with recomputing chunks under autograd this saves one of three matrix products and all [chunk, vocabulary]
temporaries; compared with a kernel library it also runs on CPU and XLA, knows the tail, and does no work for a frozen
output head. Shapes depend on N, V and the chunk size alone, and nothing is read back from the device.
"""

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from qat_lora.losses.estimators import DenseTerm, KLTerm, Term, TopKTerm, wide_dtype
from qat_lora.losses.fused.by_kernel import kernel_serves, walk_kernel
from qat_lora.losses.fused.by_token import walk_positions
from qat_lora.losses.fused.by_vocab import vocabulary_serves, walk_vocabulary
from qat_lora.losses.fused.gradients import Task, Wanted, group_terms, real_vocabulary, skipped
from qat_lora.types import LMHead, LossWalk

CHUNK_BYTES = 32 * 2**20


class LossSum(NamedTuple):
    """A loss added up over positions; divide by the global token count once, after accumulation."""

    loss_sum: Tensor  # 0-d float32 (float64 for float64 inputs), differentiable: Σ over terms of weight · term
    token_count: Tensor  # 0-d float32: positions that counted, or the sum of their weights
    terms: dict[str, Tensor]  # each term's sum by name, with T² and without weight, detached: for logging


def fused_linear_kd(
    hidden_NH: Tensor,
    lm_head: LMHead,
    terms: Sequence[Term],
    mask_N: Tensor | None = None,
    *,
    chunk_tokens: int | None = None,
    chunk_bytes: int = CHUNK_BYTES,
    walk: LossWalk = "positions",
    rows: int = 1,
) -> LossSum:
    """Add up terms over all positions of a micro-batch, differentiable in hidden states and a trained output head.

    Works in the dtype of the output head's weight (under autocast: in its dtype) with float32 softmax and sums. The
    weight and bias get a gradient only if they ask for one; it is accumulated in float32.

    The ids of terms are below `vocab_size`, and distinct within a top K. Where `mask_N` is False, hidden states and
    targets may hold anything; a float mask weighs positions instead, in sums and count. `chunk_tokens` positions are
    projected at once, by default as many as fit `chunk_bytes` of float32 logits, two to three times which exist at the
    peak (other walks hold as many once, in the dtype of the products). `walk` is `Runtime.loss_walk`; what it does not
    serve goes by positions. The positions are of `rows` rows of text, equally long; on XLA a chunk takes part of each.

    ValueError: no terms, or shapes that do not fit each other.
    DeviceError: the kernel is asked for where it cannot run.
    """
    count, vocab = hidden_NH.shape[0], lm_head.vocab_size
    _check(hidden_NH, lm_head, terms, mask_N)
    if mask_N is None:
        mask_N = torch.ones(count, dtype=torch.bool, device=hidden_NH.device)
    if chunk_tokens is None:
        copies = 2 if any(isinstance(term, DenseTerm) for term in terms) else 1  # the teacher's logits are a chunk too
        chunk_tokens = max(1, chunk_bytes // (4 * vocab * copies))
    chunks = max(1, -(-count // chunk_tokens))
    chunk_tokens = max(1, -(-count // chunks))  # even chunks: one shape, or two, and none of them tiny
    device = hidden_NH.device.type
    autocast = torch.is_autocast_enabled(device)
    dtype = torch.get_autocast_dtype(device) if autocast else lm_head.weight_VH.dtype
    call = _Call(lm_head, tuple(terms), mask_N, dtype, chunk_tokens, walk, rows)
    with torch.autocast(device, enabled=False) if autocast else contextlib.nullcontext():
        loss_sum, sums_T = _FusedLinearKD.apply(hidden_NH, lm_head.weight_VH, lm_head.bias_V, call)
    by_name: dict[str, Tensor] = {}
    for index, term in enumerate(terms):
        by_name[term.name] = by_name[term.name] + sums_T[index] if term.name in by_name else sums_T[index]
    return LossSum(loss_sum, mask_N.sum(dtype=torch.float32), by_name)


class _Call(NamedTuple):
    lm_head: LMHead
    terms: tuple[Term, ...]
    mask_N: Tensor
    dtype: torch.dtype  # of the products
    chunk_tokens: int
    walk: LossWalk
    rows: int


class _FusedLinearKD(torch.autograd.Function):
    """Loss and gradients in the forward pass; the backward pass multiplies them by the incoming scalar."""

    @staticmethod
    def forward(
        ctx: Any, hidden_NH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, call: _Call
    ) -> tuple[Tensor, Tensor]:
        terms, dtype, vocab = call.terms, call.dtype, call.lm_head.vocab_size
        # Even a NaN must not leak from padding.
        hidden, wanted = hidden_NH.to(dtype).masked_fill(skipped(call.mask_N)[:, None], 0), ctx.needs_input_grad[:3]
        lm_head = real_vocabulary(call.lm_head, dtype, wide_dtype(dtype))
        scales = [term.weight * term.temperature**2 for term in terms]
        task = Task(hidden, lm_head, group_terms(terms), scales, call.mask_N, Wanted(*wanted))
        if call.walk == "vocabulary" and vocabulary_serves(task):  # with as many logits at a time
            walked = walk_vocabulary(task, max(1, call.chunk_tokens * vocab // max(1, hidden_NH.shape[0])))
        elif call.walk == "kernel" and kernel_serves(task):
            walked = walk_kernel(task, call.chunk_tokens)
        else:
            walked = walk_positions(task, call.chunk_tokens, call.rows)
        sums_T = torch.stack([walked.sums[index] * term.temperature**2 for index, term in enumerate(terms)])
        parts = [sums_T[index] * term.weight for index, term in enumerate(terms) if not isinstance(term, KLTerm)]
        loss_sum = torch.stack(parts).sum()
        pairs = (walked.hidden_NH, hidden_NH), (walked.weight_VH, weight_VH), (walked.bias_V, bias_V)
        ctx.save_for_backward(*(None if grad is None or like is None else _padded(grad, like) for grad, like in pairs))
        ctx.mark_non_differentiable(sums_T)
        return loss_sum, sums_T

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_loss: Tensor, _d_sums: Tensor) -> tuple[Tensor | None, ...]:
        return (*(None if grad is None else grad * d_loss.to(grad.dtype) for grad in ctx.saved_tensors), None)


def _padded(gradient: Tensor, like: Tensor) -> Tensor:
    """Return a gradient in the dtype of its tensor, with zeros for the vocabulary's padding."""
    gradient = gradient.to(like.dtype)
    missing = like.shape[0] - gradient.shape[0]
    return torch.cat([gradient, gradient.new_zeros(missing, *gradient.shape[1:])]) if missing else gradient


def _check(hidden_NH: Tensor, lm_head: LMHead, terms: Sequence[Term], mask_N: Tensor | None) -> None:
    """Refuse shapes that broadcasting would otherwise quietly accept."""
    rows, count, vocab = lm_head.weight_VH.shape[0], hidden_NH.shape[0], lm_head.vocab_size
    if not _multiply(hidden_NH, lm_head):
        shapes = f"hidden states {tuple(hidden_NH.shape)} and output head {tuple(lm_head.weight_VH.shape)}"
        raise ValueError(f"{shapes}: expected [positions, width] and [vocabulary, width]; flatten hidden states first")
    if not 0 < vocab <= rows:
        raise ValueError(f"vocab_size {vocab}: the output head has {rows} rows")
    if not terms:
        raise ValueError("terms: none given; pass at least one TopKTerm or PointTerm")
    if mask_N is not None and mask_N.shape != (count,):
        raise ValueError(f"mask {tuple(mask_N.shape)}: expected one entry for each of {count} positions")
    for term in terms:
        if isinstance(term, DenseTerm):
            if not _multiply(term.hidden_NH, term.lm_head) or term.hidden_NH.shape[0] != count:
                theirs = f"hidden states {tuple(term.hidden_NH.shape)} or head {tuple(term.lm_head.weight_VH.shape)}"
                expected = f"fit {count} positions; expected [positions, width] and [vocabulary, width]"
                raise ValueError(f"term {term.name}: the teacher's {theirs} do not {expected}")
            if term.lm_head.vocab_size != vocab:
                what = f"the teacher's vocabulary has {term.lm_head.vocab_size} entries, the student's {vocab}"
                raise ValueError(f"term {term.name}: {what}; cut both to the entries that they share")
            continue
        if isinstance(term, TopKTerm):
            ids, values, tail_N, _ = term.teacher
            fits = tail_N.shape == (count,)
        else:
            ids, values, fits = term.ids_ND, term.weights_ND, True
        if isinstance(term, KLTerm) and term.draw_ids_ND is not None:
            fits = fits and term.draw_ids_ND.dim() == 2 and term.draw_ids_ND.shape[0] == count
        if not fits or ids.dim() != 2 or ids.shape != values.shape or ids.shape[0] != count:
            what = f"ids {tuple(ids.shape)} and values {tuple(values.shape)} do not fit {count} positions"
            raise ValueError(f"term {term.name}: {what}; expected two arrays [{count}, entries]")


def _multiply(hidden_NH: Tensor, lm_head: LMHead) -> bool:
    shapes = hidden_NH.shape, lm_head.weight_VH.shape
    return len(shapes[0]) == len(shapes[1]) == 2 and shapes[0][1] == shapes[1][1]
