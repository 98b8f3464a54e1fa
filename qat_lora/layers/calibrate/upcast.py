"""Compute in float32 with weights that stay in bfloat16, on disk until they are read.

A bfloat16 checkpoint loaded in float32 takes twice its size in memory. Loaded as it is, its tensors are views of the
file, which the system may drop; every layer upcasts its weight for its product, and again in the backward pass, some
rows at a time. Results are those of the whole model in float32, but for the order of sums.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qat_lora.runtime.loop import rows_at_once

PIECE = 2**24  # weights upcast at a time: 64 MB in float32, more than a layer's as a rule
ROWS = 1024  # of a weight at a time on a host: their float32 stays in its caches, where few inputs meet a wide head


class _UpcastProduct(torch.autograd.Function):
    """x Wᵀ in x's type; the backward pass keeps W in its stored type."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        output = x.new_empty(*x.shape[:-1], len(weight))
        for part, found in zip(*_pieces(weight, output), strict=True):
            found.copy_(nn.functional.linear(x, part.to(x.dtype)))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        gradient_NO = gradients[0].flatten(0, -2)
        total_NI = gradient_NO.new_zeros(len(gradient_NO), ctx.weight.shape[1])
        for part, found in zip(*_pieces(ctx.weight, gradient_NO), strict=True):
            total_NI.addmm_(found, part.to(found.dtype))
        return total_NI.view(*gradients[0].shape[:-1], ctx.weight.shape[1]), None


def upcast_linear(x: Tensor, weight_OI: Tensor, bias_O: Tensor | None) -> Tensor:
    """Return x Wᵀ + b in x's type; a frozen weight of a narrower type is never whole in x's."""
    bias = None if bias_O is None else bias_O.to(x.dtype)
    if weight_OI.requires_grad or weight_OI.element_size() >= x.element_size():
        return nn.functional.linear(x, weight_OI.to(x.dtype), bias)
    product: Tensor = _UpcastProduct.apply(x, weight_OI)
    return product if bias is None else product + bias


def _pieces(weight_OI: Tensor, output: Tensor) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Return a weight in pieces of rows, and the outputs of each."""
    rows = min(rows_at_once(weight_OI, ROWS * weight_OI.shape[1]), max(1, PIECE // weight_OI.shape[1]))
    return weight_OI.split(rows), output.split(rows, -1)


class UpcastLinear(nn.Linear):
    """A frozen linear layer that computes in its input's type."""

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer."""
        return upcast_linear(input, self.weight, self.bias)


class UpcastEmbedding(nn.Embedding):
    """A frozen embedding that gives float32 rows."""

    computes_in = torch.float32

    def forward(self, input: Tensor) -> Tensor:
        """Look rows up."""
        return super().forward(input).float()


def upcast(model: nn.Module) -> None:
    """Let a model compute in float32; the matrices of its linear layers and embeddings keep their stored type."""
    kinds: dict[type[nn.Module], type[nn.Module]] = {nn.Linear: UpcastLinear, nn.Embedding: UpcastEmbedding}
    for module in model.modules():
        if type(module) in kinds:
            if any(p.is_floating_point() and p.dtype != torch.float32 for p in module.parameters(recurse=False)):
                module.__class__ = kinds[type(module)]
        else:
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.float()
            if (scale := getattr(module, "scalar_embed_scale", None)) is not None:  # Gemma's, which was rounded
                module.embed_scale = torch.tensor(scale)


def computing_dtype(model: Any) -> torch.dtype:
    """Return the type of a model's activations: that of its weights unless its embedding gives another."""
    dtype: torch.dtype = getattr(model.get_input_embeddings(), "computes_in", model.dtype)
    return dtype
