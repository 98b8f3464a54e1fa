"""A matrix product of XLA at the highest precision, in a graph whose other products have the device's own.

`torch_xla.backends.set_mat_mul_precision` is read when a graph is lowered, so it would hold for all of it, the
student's products too. Here one product is lowered by itself under that setting, and graphs call it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


def exact_dot(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b of float32 matrices; a TPU multiplies them in six passes of bfloat16."""
    import torch_xla

    computation, order = _lowered(a.shape, b.shape, a.dtype)
    (result,) = torch_xla._XLAC._xla_user_computation("xla::exact_matmul", [(a, b)[i] for i in order], computation)
    return result


@functools.cache
def _lowered(a_shape: torch.Size, b_shape: torch.Size, dtype: torch.dtype) -> tuple[Any, list[int]]:
    """Return the computation of one product, and the order in which it takes its two matrices."""
    import torch_xla
    import torch_xla.core.xla_builder as xb

    matrices = [xb.create_placeholder_tensor(shape, dtype) for shape in (a_shape, b_shape)]
    context = torch_xla._XLAC.lowering.LoweringContext("exact_matmul")
    before = torch_xla._XLAC._xla_get_mat_mul_precision()
    torch_xla._XLAC._xla_set_mat_mul_precision("highest")
    try:
        context.build([matrices[0] @ matrices[1]])
    finally:
        torch_xla._XLAC._xla_set_mat_mul_precision(before)
    order = sorted((0, 1), key=lambda i: context.tensor_parameter_id(matrices[i]))
    return xb.computation_from_module_proto("exact_matmul", context.hlo()), order
