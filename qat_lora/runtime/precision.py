"""Floating types: what `--dtype auto` means on a device, and float32 products that keep their bits.

Accelerators round float32 where they multiply it: a TPU in one pass of bfloat16, CUDA in TF32, of 10 bits. That is
right for activations and wrong where a stored weight is formed by a product (low-rank scales, a low-rank change of
codes): a run would train another student than it exports. torch's and torch_xla's settings of the precision hold for a
process, and torch_xla's for a whole graph; so the few products that have to be exact are an operator of their own.
"""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

_CPUINFO = Path("/proc/cpuinfo")
_ROUNDING = ("cuda", "xla")  # devices that may round the inputs of a float32 product


def with_dtype(options: Any, device: str) -> tuple[Any, str]:
    """Return options with what `--dtype auto` means on a device, and a note; `float32_for` names what needs float32."""
    if options.run.dtype != "auto":
        return options, ""
    why, setting = "", getattr(options, "float32_for", "")
    is_fast = device in ("tpu", "cuda")
    if device == "cpu":
        is_fast = fast_dtype(torch.device("cpu")) == torch.bfloat16
    if not is_fast:
        dtype = "float32"
    elif setting:
        dtype, why = "float32", f"--{setting.replace('_', '-')} needs it"
    elif device == "cuda" and torch.cuda.is_available() and not torch.cuda.is_bf16_supported(False):
        dtype, why = "float32", f"{torch.cuda.get_device_name()} has no bfloat16"
    else:
        dtype = "bfloat16"
    return replace(options, run=replace(options.run, dtype=dtype)), why and f"dtype: {dtype}, because {why}"


def fast_dtype(device: torch.device, cpuinfo: Path = _CPUINFO) -> torch.dtype:
    """Return bfloat16 where hardware multiplies it faster (accelerators, CPUs by flags in /proc), else float32.

    Also float32 where `ONEDNN_MAX_CPU_ISA` keeps torch's library of products from the instructions. Not torch's own
    question, `mkldnn._is_mkldnn_bf16_supported`: it says yes for AVX-512 alone, which multiplies bfloat16 as float32.
    """
    if device.type != "cpu":
        return torch.bfloat16
    allowed = os.environ.get("ONEDNN_MAX_CPU_ISA", "").upper()
    if allowed and not any(word in allowed for word in ("BF16", "FP16", "AMX", "ALL", "DEFAULT", "AVX10")):
        return torch.float32
    try:
        flags = cpuinfo.read_text(encoding="utf-8")
    except OSError:
        return torch.float32
    return torch.bfloat16 if "avx512_bf16" in flags or "amx_bf16" in flags else torch.float32


@contextlib.contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Let CUDA round the inputs of float32 products to TF32, or not; at the end as before."""
    # Torch's compiler refuses the newer switch (2.9), and `set_float32_matmul_precision` would let the host round too.
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.fp32_precision == "tf32", allowed
    try:
        yield
    finally:
        matmul.allow_tf32 = before


def exact_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b of float32 matrices, not rounded before; gradients are ordinary products."""
    return _exact_matmul(a, b) if a.device.type in _ROUNDING else a @ b


def exact_addmm(c: Tensor, a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """Return c + alpha a @ b, by `exact_matmul`."""
    is_fused = a.device.type not in _ROUNDING
    return torch.addmm(c, a, b, alpha=alpha) if is_fused else torch.add(c, exact_matmul(a, b), alpha=alpha)


@torch.library.custom_op("qat_lora::exact_matmul", mutates_args=())  # which a compiler leaves whole
def _exact_matmul(a: Tensor, b: Tensor) -> Tensor:
    if a.device.type == "xla":
        from qat_lora.runtime.xla.loop import exact_dot

        return exact_dot(a, b)
    with tf32(False):
        return a @ b


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    a, b = ctx.saved_tensors
    return gradient @ b.t(), a.t() @ gradient


_exact_matmul.register_fake(lambda a, b: a.new_empty(a.shape[0], b.shape[1]))
_exact_matmul.register_autograd(_gradients, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
