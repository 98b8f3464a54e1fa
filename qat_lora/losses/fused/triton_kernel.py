"""One launch for a chunk of logits on a GPU: the loss of every row, and its gradient in place of the logits.

`by_token` spends some hundred launches on a chunk, and a dozen passes over its logits in float32. Here a program takes
a row: it reads the entries' logits (top K and points) and marks the top K with -inf, streams the row for log Σ exp of
the tail, forms estimator and entry gradients of [K] in registers, and streams the row again, writing
exp(z - max) · share where z stood: two reads and a write in the dtype of the products, the second read from the
second-level cache (132 rows of 304 kB, 40 of an H100's 50 MB). A row has one owner: nothing is atomic, and the result
is the same in every run. Library kernels for this (Liger Kernel's, Hsu et al., 2024, from which the gradient in place
comes) want the teacher's whole rows; none knows a tail that is a single number, or draws from it.

Arguments travel as tuples, and `Form` as a constant: a form and a shape are one compilation, and loops have constant
bounds (Triton 3.5's interpreter knows no others). The top K are marked in the logits rather than subtracted from the
sum, which would lose a small tail (`by_token`). `debug_barrier` orders a program's own reads and writes.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

WARPS = 32
"""All the threads that a block may have: one row at a time for each multiprocessor keeps the rows at work in cache."""
BLOCK_V = 8_192  # logits that a program takes at once: 8 a thread, one load of 16 bytes in bfloat16
UNROLL = 4  # blocks in flight. More of either spills registers: a thread may have 64


class Given(NamedTuple):
    """What is known of each row, in the order of `by_kernel._Softmax`."""

    ids: Any  # of the teacher's top K, int64 [C, K]; K = 0 where a softmax has no teacher
    log_probs: Any  # float32 [C, K]
    log_tail: Any  # float32 [C]
    point_ids: Any  # of labels and draws, int64 [C, D]; D = 0 where there are none
    point_gradients: Any  # -scale · w at each, float32 [C, D]
    scale: Any  # of the top K's loss, float32 [C]
    mask: Any  # 1 where a row counts, uint8 [C]


class Results(NamedTuple):
    """Float32: loss on the top K [C], log Σ_V exp(z/T) [C], and z/T at the points [C, D]."""

    loss: Any
    log_z: Any
    points: Any


class Factors(NamedTuple):
    """Numbers on the way to z/T: outer · tanh(inner · raw) under a soft cap, else inner · raw; and back to raw."""

    inner: float
    outer: float
    back: float


class Form(NamedTuple):
    """What is compiled in."""

    estimator: str
    capped: bool
    gradient: bool  # false: only losses; the logits are spoiled all the same
    vocab: int
    entries: int  # K
    points: int  # D
    unroll: int
    block_v: int
    block_k: int
    block_d: int


def form_of(estimator: str, capped: bool, gradient: bool, sizes: tuple[int, int, int]) -> Form:
    """Return a form for V, K and D, with its blocks: powers of two."""
    blocks = min(BLOCK_V, triton.next_power_of_2(sizes[0])), *(triton.next_power_of_2(max(1, n)) for n in sizes[1:])
    return Form(estimator, capped, gradient, *sizes, UNROLL, *blocks)


def launch(
    raw_CV: Tensor,
    bias_V: Tensor | None,
    given: Sequence[Tensor],
    results: Sequence[Tensor],
    factors: Sequence[float],
    estimator: str,
    gradient: bool,
) -> None:
    """Start the kernel on the current device, a program for each row; arguments as in `by_kernel._run`, contiguous."""
    rows = Given(*given)
    logit_scale, softcap, temperature = factors
    inner, outer = (logit_scale / softcap, softcap / temperature) if softcap else (logit_scale / temperature, 1.0)
    form = form_of(estimator, bool(softcap), gradient, (raw_CV.shape[1], rows.ids.shape[1], rows.point_ids.shape[1]))
    scales = Factors(inner, outer, logit_scale / temperature)
    if count := len(rows.scale):
        kd_rows[(count,)](raw_CV, bias_V, rows, Results(*results), scales, form, num_warps=WARPS)


@triton.jit
def kd_rows(logits, bias, rows, results, factors, FORM: tl.constexpr):
    """Loss and gradient of one row of products [C, V], in their place; a float32 bias [V] or None."""
    row = tl.program_id(0).to(tl.int64)  # rows · V goes beyond 2^31
    kept = tl.load(rows.mask + row) != 0
    line = logits + row * FORM.vocab
    at_K, at_D = tl.arange(0, FORM.block_k), tl.arange(0, FORM.block_d)
    first_D = rows.point_ids + row * FORM.points
    on_K, on_D = (at_K < FORM.entries) & kept, (at_D < FORM.points) & kept
    ids_K = tl.load(rows.ids + row * FORM.entries + at_K, mask=on_K, other=0)
    ids_D = tl.load(first_D + at_D, mask=on_D, other=0)
    known_K, z_K, slope_K = _entries(line, ids_K, on_K, bias, factors, FORM)
    known_D, z_D, slope_D = _entries(line, ids_D, on_D, bias, factors, FORM)
    z_K = tl.where(on_K, z_K, -float("inf"))
    tl.debug_barrier()
    tl.store(line + ids_K, -float("inf"), mask=known_K)
    tl.debug_barrier()
    in_topk_D = tl.load(line + ids_D, mask=known_D, other=0.0).to(tl.float32) == -float("inf")

    # The tail, each lane relative to its largest entry so far; from the lowest finite number, so that none sums to 0.
    lane = tl.arange(0, FORM.block_v)
    top_B = tl.full((FORM.block_v,), -3.4e38, tl.float32)
    total_B = tl.zeros_like(top_B)
    for start in tl.range(0, FORM.vocab, FORM.block_v, loop_unroll_factor=FORM.unroll):
        at = start + lane
        raw = tl.load(line + at, mask=at < FORM.vocab, other=-float("inf"))
        z, _ = _soften(raw, at, at < FORM.vocab, bias, factors, FORM)
        step = tl.exp(-tl.abs(z - top_B))
        total_B = tl.where(z > top_B, total_B * step + 1.0, total_B + step)
        top_B = tl.maximum(top_B, z)
    top = tl.max(top_B, 0)
    total = tl.sum(total_B * tl.exp(top_B - top), 0)
    log_tail = top + tl.log(total)
    log_z = _log_add(_log_sum_exp(z_K), log_tail)

    log_t_K = tl.load(rows.log_probs + row * FORM.entries + at_K, mask=on_K, other=-float("inf"))
    log_m = tl.load(rows.log_tail + row, mask=kept, other=-float("inf"))
    log_p_K, log_rest = z_K - log_z, log_tail - log_z
    loss, d_topk_K, d_tail = _estimate(log_p_K, log_rest, log_t_K, log_m, FORM)
    tl.store(results.loss + row, tl.where(kept, loss, 0.0))
    tl.store(results.log_z + row, log_z)
    tl.store(results.points + row * FORM.points + at_D, z_D, mask=at_D < FORM.points)
    if FORM.gradient:
        scale = tl.load(rows.scale + row)
        mass = -tl.sum(tl.load(rows.point_gradients + row * FORM.points + at_D, mask=on_D, other=0.0), 0)
        share = (scale * d_tail + mass * tl.exp(log_rest)) / tl.maximum(total, 1.0)  # the sum is at least 1, or 0
        share = tl.where(kept, share, 0.0) * factors.back
        tl.debug_barrier()  # a row of fewer logits than threads is read by several of them
        for start in tl.range(0, FORM.vocab, FORM.block_v, loop_unroll_factor=FORM.unroll):
            at = start + lane
            raw = tl.load(line + at, mask=at < FORM.vocab, other=-float("inf"))
            z, slope = _soften(raw, at, at < FORM.vocab, bias, factors, FORM)
            tl.store(line + at, (tl.exp(z - top) * share * slope).to(raw.dtype), mask=at < FORM.vocab)

        # Points may repeat and may be top-K ids: whoever writes an id writes the sum of all that belongs there.
        grad_K, grad_D = scale * d_topk_K + mass * tl.exp(log_p_K), tl.zeros_like(z_D)
        for point in range(FORM.points):
            here = tl.load(first_D + point, mask=kept, other=-1)
            gradient = tl.load(rows.point_gradients + row * FORM.points + point, mask=kept, other=0.0)
            grad_K += tl.where(ids_K == here, gradient, 0.0)
            grad_D += tl.where(ids_D == here, gradient, 0.0)
        grad_D = tl.exp(z_D - top) * share + grad_D * factors.back
        kind = logits.dtype.element_ty
        tl.debug_barrier()
        tl.store(line + ids_K, (grad_K * factors.back * slope_K).to(kind), mask=known_K)
        tl.store(line + ids_D, (grad_D * slope_D).to(kind), mask=known_D & (in_topk_D == 0))


@triton.jit
def _entries(line, ids, on, bias, factors, FORM: tl.constexpr):
    """Return which ids are in the vocabulary, z/T there and the cap's slope. NaN for others: never another's memory."""
    known = on & (ids >= 0) & (ids < FORM.vocab)
    raw = tl.load(line + ids, mask=known, other=float("nan"))
    z, slope = _soften(raw, ids, known, bias, factors, FORM)
    return known, z, slope


@triton.jit
def _soften(raw, at, inside, bias, factors, FORM: tl.constexpr):
    """Return z/T, -inf wherever the product is (a mark), and the slope of the soft cap, 1 without one."""
    z = raw.to(tl.float32)
    if bias is not None:
        z += tl.load(bias + at, mask=inside, other=0.0)
    z *= factors.inner
    slope = 1.0
    if FORM.capped:
        half = tl.sigmoid(2 * z)  # tanh x = 2 sigmoid(2x) - 1
        z = tl.where(raw == -float("inf"), -float("inf"), factors.outer * (2 * half - 1))
        slope = 4 * half * (1 - half)
    return z, slope


@triton.jit
def _estimate(log_p_K, log_rest, log_t_K, log_m, FORM: tl.constexpr):
    """Return the loss and its gradients on the top K and on the tail: `losses/estimators.py`, entry for entry."""
    p_K, rest, t_K, m = tl.exp(log_p_K), tl.exp(log_rest), tl.exp(log_t_K), tl.exp(log_m)
    if FORM.estimator == "renorm":
        log_q_K, log_s_K = log_p_K - _log_sum_exp(log_p_K), log_t_K - _log_sum_exp(log_t_K)
        s_K = tl.exp(log_s_K)
        loss = tl.sum(_weighted(s_K, log_s_K - log_q_K), 0)
        topk_K, tail = tl.exp(log_q_K) - s_K, tl.zeros((), tl.float32)
    elif FORM.estimator == "reverse":
        ratio_K, ratio = log_p_K - log_t_K, log_rest - log_m
        loss = tl.sum(_weighted(p_K, ratio_K), 0) + _weighted(rest, ratio)
        topk_K, tail = _weighted(p_K, ratio_K - loss), _weighted(rest, ratio - loss)
    else:
        tl.static_assert(FORM.estimator == "ghost" or FORM.estimator == "topk_part")
        if FORM.estimator == "topk_part":  # `ghost` of a teacher without a tail
            m, log_m = 0.0, -float("inf")
        loss = tl.sum(_weighted(t_K, log_t_K - log_p_K), 0) + _weighted(m, log_m - log_rest)
        mass = tl.sum(t_K, 0) + m
        topk_K, tail = mass * p_K - t_K, mass * rest - m
    return loss, topk_K, tail


@triton.jit
def _weighted(weight, value):
    return tl.where(weight == 0, 0.0, weight * value)


@triton.jit
def _log_sum_exp(x):
    top = tl.maximum(tl.max(x, 0), -3.4e38)
    return top + tl.log(tl.sum(tl.exp(x - top), 0))


@triton.jit
def _log_add(first, second):
    top = tl.maximum(first, second)
    return top + tl.log(tl.exp(first - top) + tl.exp(second - top))
