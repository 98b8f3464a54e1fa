"""Compute in float32 with weights that stay in bfloat16, on disk until they are read.

A bfloat16 checkpoint loaded in float32 takes twice its size in memory. Loaded as it is, its tensors are views of the
file, which the system may drop again; every layer upcasts its own weight for its product, and again in the backward
pass, so one float32 weight is in memory at a time. Results equal those of the whole model in float32, bit for bit.
"""

from typing import Any

import torch
from torch import Tensor, nn


class _UpcastProduct(torch.autograd.Function):
    """x Wᵀ in x's type; the backward pass keeps W in its stored type."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return nn.functional.linear(x, weight.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        return gradient @ ctx.weight.to(gradient.dtype), None


class UpcastLinear(nn.Linear):
    """A frozen linear layer that computes in its input's type."""

    def forward(self, input: Tensor) -> Tensor:
        """Apply the layer."""
        product = _UpcastProduct.apply(input, self.weight)
        return product if self.bias is None else product + self.bias.to(product.dtype)


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
