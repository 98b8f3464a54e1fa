"""A matrix product at the highest precision, in a graph whose other products have the device's own.

`torch_xla.backends.set_mat_mul_precision` is read when a graph is lowered and holds for all of it. Here one product is
lowered by itself under that setting, and graphs call it.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def highest_precision() -> Iterator[None]:
    """Lower all products of float32 at the highest precision; at the end as before."""
    import torch_xla

    lazy = torch_xla._XLAC  # what torch_xla.backends calls, without its warning
    before = lazy._xla_get_mat_mul_precision()
    lazy._xla_set_mat_mul_precision("highest")
    try:
        yield
    finally:
        lazy._xla_set_mat_mul_precision(before)


def exact_dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a @ b of float32 matrices; a TPU multiplies them in six passes of bfloat16."""
    import torch_xla

    computation, order = _lowered(a.shape, b.shape)
    return torch_xla._XLAC._xla_user_computation("xla::exact_matmul", [(a, b)[i] for i in order], computation)[0]


@functools.cache
def _lowered(*shapes: torch.Size) -> tuple[Any, list[int]]:
    import torch_xla
    import torch_xla.core.xla_builder as xb

    lazy, matrices = torch_xla._XLAC, [xb.create_placeholder_tensor(shape, torch.float32) for shape in shapes]
    context = lazy.lowering.LoweringContext("exact_matmul")
    with highest_precision():
        context.build([matrices[0] @ matrices[1]])
    order = sorted((0, 1), key=lambda i: context.tensor_parameter_id(matrices[i]))
    return xb.computation_from_module_proto("exact_matmul", context.hlo()), order
