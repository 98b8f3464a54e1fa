"""Some positions at a time, as `by_token`, with one Triton kernel between two products: the walk for CUDA.

A chunk is a product into a buffer that all chunks share, one launch for each softmax (`triton_kernel`), and a product
back: three launches where `by_token` has some hundred. The logits stay in the dtype of the products; softmax and sums
are float32 in registers. What the kernel does not know, above all the exact KL with its two heads, goes by positions;
the numbers are the same. As an operator of PyTorch it finds its device by dispatch: on CUDA it is launched, in Triton's
interpreter it runs on a CPU, and on meta and fake tensors it is a call that can be counted.
"""

import functools
import math
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qat_lora.errors import DeviceError
from qat_lora.losses.estimators import IN_KERNEL, Estimator, topk_part, weighted
from qat_lora.losses.fused.gradients import Group, Task, Walked, finish_logits, head_zeros, keep, skipped

MOST_ENTRIES = 4_096  # of the top K, and of the points of a softmax: a program holds them all at once
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def kernel_serves(task: Task) -> bool:
    """Return whether the kernel knows all terms: no exact KL, one known estimator a softmax, no float64 products."""
    for group in task.groups:
        entries = 0 if group.ids_NK is None else group.ids_NK.shape[1]
        points = sum(term.ids_ND.shape[1] for _, term in group.points)
        known = [term.estimator in IN_KERNEL for _, term in group.topk]
        if group.dense or known not in ([], [True]) or max(entries, points) > MOST_ENTRIES:
            return False
    return task.hidden_NH.dtype in _DTYPES


def walk_kernel(task: Task, chunk_tokens: int) -> Walked:
    """Return sums and gradients; `chunk_tokens` positions, rounded up to 16, are projected at once.

    A trained output head's gradient is a product in the dtype of the others a chunk, added up in float32. DeviceError
    without Triton, or with neither a GPU nor its interpreter.
    """
    wanted, weight_VH, mask_N, wide = task.wanted, task.lm_head.weight_VH, task.mask_N, task.wide
    count, vocab = len(task.hidden_NH), len(weight_VH)
    d_hidden = torch.empty_like(task.hidden_NH) if wanted.hidden else None
    d_weight, d_bias = head_zeros(task)
    kl = [pair for group in task.groups for pair in group.kl]
    if kl and all(group.temperature != 1.0 for group in task.groups):
        task = task._replace(groups=[Group(1.0, None, [], [], [], []), *task.groups])  # of no entries: for log Σ exp
    softmaxes = [_softmax(task, group) for group in task.groups]
    kl_ids = [term.ids_NE.masked_fill(skipped(mask_N)[:, None], 0) for _, term in kl]
    kl_raw: list[list[Tensor]] = [[] for _ in kl]
    chunk_tokens = -(-chunk_tokens // 16) * 16  # Triton compiles again where a slice is aligned to less than 16 bytes
    store_CV = task.hidden_NH.new_empty(min(chunk_tokens, count), vocab)
    for start in range(0, count, chunk_tokens):
        rows = slice(start, start + chunk_tokens)
        hidden_CH = task.hidden_NH[rows]
        raw_CV = torch.mm(hidden_CH, weight_VH.t(), out=store_CV[: len(hidden_CH)])
        for ids_NE, raw in zip(kl_ids, kl_raw, strict=True):
            raw.append(raw_CV.gather(1, ids_NE[rows]))
        others = [_run(task, softmax, raw_CV.clone(), rows) for softmax in softmaxes[:-1]]
        grad_CV = _run(task, softmaxes[-1], raw_CV, rows)
        for other_CV in others if any(wanted) else ():
            grad_CV.add_(other_CV)
        if d_hidden is not None:
            torch.mm(grad_CV, weight_VH, out=d_hidden[rows])
        if d_weight is not None:
            d_weight.add_(grad_CV.t() @ hidden_CH)
        if d_bias is not None:
            d_bias.add_(grad_CV.sum(0, dtype=wide))
    sums: dict[int, Tensor] = {}
    for group, (loss_N, log_z_N, z_ND) in zip(task.groups, (softmax.results for softmax in softmaxes), strict=True):
        sums |= {index: keep(loss_N, mask_N).sum() for index, _ in group.topk}
        widths = [term.ids_ND.shape[1] for _, term in group.points]
        for (index, term), z_NE in zip(group.points, z_ND.split(widths, 1) if widths else (), strict=True):
            distance_N = weighted(term.weights_ND.float(), log_z_N[:, None] - z_NE).sum(1)
            sums[index] = keep(distance_N, mask_N).sum()
    for (index, kl_term), ids_NE, raw in zip(kl, kl_ids, kl_raw, strict=True):
        log_z_N = next(softmax.results[1] for softmax in softmaxes if softmax.temperature == 1.0)
        bias_NE = None if task.lm_head.bias_V is None else task.lm_head.bias_V[ids_NE]
        z_NE, _ = finish_logits(torch.cat(raw), bias_NE, task.lm_head, wide)
        sums[index] = keep(kl_term.loss(z_NE - log_z_N[:, None], None), mask_N).sum()
    return Walked(sums, d_hidden, d_weight, d_bias)


class _Softmax(NamedTuple):
    """One softmax at all N positions: what the kernel reads and, besides the gradient, writes; contiguous."""

    estimator: str
    temperature: float
    given: list[Tensor]
    """Top-K ids [N, K], log t [N, K] and log m [N]; points' ids and gradients [N, D]; the scale of the top K's loss
    and the mask [N]. K or D may be 0."""
    results: list[Tensor]  # float32: the top K's loss and log Σ exp(z/T) [N], z/T at the points [N, D]


def _softmax(task: Task, group: Group) -> _Softmax:
    mask_N, count = task.mask_N, len(task.mask_N)
    empty = mask_N.new_empty(count, 0, dtype=torch.float32)
    ids_NK, log_t_NK, log_m_N = empty.long(), empty, empty.new_full((count,), -math.inf)
    estimator: Estimator = topk_part  # of an empty top K: nothing
    scale_N = torch.zeros_like(log_m_N)
    for index, term in group.topk:
        estimator, scale_N = term.estimator, scale_N + task.scales[index]
        ids_NK, log_t_NK, log_m_N, _ = term.teacher
    points = [term for _, term in group.points]
    gradients = [term.weights_ND.float() * -task.scales[index] for index, term in group.points]
    ids_ND = torch.cat([empty.long(), *(term.ids_ND.long() for term in points)], 1)
    given = [ids_NK.long(), log_t_NK.float(), log_m_N.float(), ids_ND, torch.cat([empty, *gradients], 1).float()]
    if mask_N.is_floating_point():  # the kernel knows rows that count and rows that do not
        scale_N, given[4], mask_N = scale_N * mask_N, given[4] * mask_N[:, None], mask_N != 0
    given += [scale_N.float(), mask_N.view(torch.uint8)]
    results = [torch.empty_like(scale_N), torch.empty_like(scale_N), empty.new_empty(ids_ND.shape)]
    return _Softmax(estimator.__name__, float(group.temperature), [x.contiguous() for x in given], results)


def _run(task: Task, softmax: _Softmax, raw_CV: Tensor, rows: slice) -> Tensor:
    """Return the gradient with respect to raw products, which takes their place."""
    lm_head = task.lm_head
    factors = [lm_head.logit_scale, lm_head.softcap or 0.0, softmax.temperature]
    given, results = ([x[rows] for x in tensors] for tensors in (softmax.given, softmax.results))
    _library()
    torch.ops.qat_lora.kd_rows(raw_CV, lm_head.bias_V, given, results, factors, softmax.estimator, any(task.wanted))
    return raw_CV


@functools.cache
def _library() -> torch.library.Library:
    """Define the operator at its first use; it lives as long as what this returns."""
    library = torch.library.Library("qat_lora", "FRAGMENT")
    library.define(
        "kd_rows(Tensor(a!) raw, Tensor? bias, Tensor[] given, Tensor(b!)[] results, float[] factors, "
        "str estimator, bool gradient) -> ()"
    )
    library.impl("kd_rows", _on_gpu, "CUDA")
    library.impl("kd_rows", _interpreted, "CPU")
    torch.library.register_fake("qat_lora::kd_rows", lambda *_: None, lib=library)
    return library


def _on_gpu(raw_CV: Tensor, *arguments: Any) -> None:
    with torch.cuda.device_of(raw_CV):  # Triton launches where the caller is, not where the tensors are
        _triton_kernel().launch(raw_CV, *arguments)


def _interpreted(raw_CV: Tensor, *arguments: Any) -> None:
    module = _triton_kernel()
    if isinstance(module.kd_rows, module.triton.JITFunction):
        remedy = "give positions or vocabulary, or set TRITON_INTERPRET=1 before the start to try it"
        raise DeviceError(f"loss_walk: kernel runs on CUDA, and the tensors are on a CPU; {remedy}")
    module.launch(raw_CV, *arguments)


def _triton_kernel() -> ModuleType:
    try:
        from qat_lora.losses.fused import triton_kernel
    except ImportError:
        what = "kernel needs Triton, which comes with PyTorch for CUDA on Linux"
        raise DeviceError(f"loss_walk: {what}; give positions or vocabulary") from None
    return triton_kernel
