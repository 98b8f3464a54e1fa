"""Floating types: what `--dtype auto` means on a device, and float32 products that keep their bits.

Accelerators multiply bfloat16 many times faster than float32, and round float32 where they may: a TPU multiplies it in
one pass of bfloat16, CUDA in TF32, which keeps 10 bits. That is right for activations and wrong where a stored weight
is formed by a product (low-rank scales, a low-rank change of codes): a run would train another student than the one it
exports. torch's and torch_xla's settings of the precision are of the process, and torch_xla's is read when a whole
graph is lowered; so the few products that have to be exact are an operator of their own, `exact_matmul`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

_ROUNDING = ("cuda", "xla")
"""Devices that may round the inputs of a float32 product."""


def auto_dtype(device: str) -> tuple[str, str]:
    """Return what `--dtype auto` means on a `--device`, and a line for people where they may expect another."""
    if device not in ("tpu", "cuda"):
        return "float32", ""
    if device == "cuda" and torch.cuda.is_available() and not torch.cuda.is_bf16_supported(including_emulation=False):
        return "float32", f"dtype: float32, because {torch.cuda.get_device_name()} has no bfloat16"
    return "bfloat16", ""


def with_dtype(options: Any, device: str) -> tuple[Any, str]:
    """Return a command's options with `auto` replaced by what it means on a `--device`, and the line for people.

    Options may have a property `float32_for`, the name of the setting that needs float32 weights.
    """
    if options.run.dtype != "auto":
        return options, ""
    dtype, note = auto_dtype(device)
    setting = getattr(options, "float32_for", "")
    if dtype != "float32" and setting:
        dtype, note = "float32", f"dtype: float32, because --{setting.replace('_', '-')} needs it"
    return replace(options, run=replace(options.run, dtype=dtype)), note


@contextlib.contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Let CUDA round the inputs of float32 products to TF32, or not; at the end as before.

    By the older of torch's switches: the compiler of torch 2.9 refuses to run under the newer one, and
    `set_float32_matmul_precision` lets the host round as well, where weights are exported.
    """
    matmul = torch.backends.cuda.matmul
    before = matmul.fp32_precision == "tf32"
    matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        matmul.allow_tf32 = before


def exact_matmul(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b of float32 matrices, not rounded before; gradients are ordinary products."""
    return _exact_matmul(a, b) if a.device.type in _ROUNDING else a @ b


def exact_addmm(c: Tensor, a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """Return c + alpha a @ b of float32 matrices, by `exact_matmul`."""
    if a.device.type not in _ROUNDING:
        return torch.addmm(c, a, b, alpha=alpha)
    return torch.add(c, exact_matmul(a, b), alpha=alpha)


@torch.library.custom_op("qat_lora::exact_matmul", mutates_args=())  # which a compiler leaves whole
def _exact_matmul(a: Tensor, b: Tensor) -> Tensor:
    if a.device.type == "xla":
        from qat_lora.runtime.xla.exact import exact_dot

        return exact_dot(a, b)
    with tf32(False):
        return a @ b


@_exact_matmul.register_fake
def _(a: Tensor, b: Tensor) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1])


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
    a, b = ctx.saved_tensors
    return gradient @ b.t(), a.t() @ gradient


_exact_matmul.register_autograd(_gradients, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
