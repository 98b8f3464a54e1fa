"""A quantised layer as the integers and steps that other tools' containers hold.

Containers know one form: an integer times the step of its group. Integer codes have it. Half-integer codes get it by
doubling, (q + 1/2) s = (2 q + 1) (s / 2): exact, since halving a float16 is, at the price of one more bit; the zero
points that containers offer are integers and cannot be 1/2. A group that does not divide the row is cut to one that
does, with its step repeated: exact as well, at the price of more steps.

Look-up tables, zero points and scales without groups have no such form. They are rounded again, and the error is
measured, never assumed to be small.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from qat_lora.errors import ConfigError
from qat_lora.layers.convert import quant_layers
from qat_lora.layers.quant_linear import QuantLinear
from qat_lora.quant.codes import decode, encode, unpack
from qat_lora.quant.scales import mse_scale
from qat_lora.quant.spec import SCALE_BITS, QuantSpec

REFIT_GROUP = 32  # inputs of a group where codes are rounded again: llama.cpp's block, and a group that vLLM takes


class Container(Protocol):
    """A weight [O, I] as a container holds it, `Integers` or GGML's `Blocks`: error, bits, and what it decodes to."""

    @property
    def error(self) -> float: ...  # noqa: D102
    @property
    def bits_per_weight(self) -> float: ...  # noqa: D102
    def dense(self) -> Tensor: ...  # noqa: D102


@dataclass(frozen=True)
class Integers:
    """A weight [O, I] as integers times steps."""

    codes_OI: Tensor
    """int8, -2^(bits-1) to 2^(bits-1) - 1."""
    steps_OG: Tensor
    """float32 numbers that float16 holds."""
    group_size: int
    """Inputs that share a step; divides I."""
    bits: int
    error: float
    """Frobenius norm of the weight's change over the weight's own; 0 where the form is exact."""

    def dense(self) -> Tensor:
        """Return the weight, float32 [O, I]."""
        return self.codes_OI.float() * self.steps_OG.repeat_interleave(self.group_size, dim=1)

    @property
    def bits_per_weight(self) -> float:
        """Bits of codes and steps."""
        return self.bits + SCALE_BITS / self.group_size


def needed_bits(spec: QuantSpec) -> int | None:
    """Return the bits of the integers that hold a spec's codes exactly, None where none do."""
    if spec.sharing == "lowrank" or spec.step_bits is not None or spec.code not in ("integer", "half"):
        return None
    return spec.bits if spec.code == "integer" else spec.bits + 1


def as_integers(layer: QuantLinear, bits: int) -> Integers:
    """Return a layer as integers of `bits` bits: exact where its codes allow it, else rounded again.

    Raises:
        ConfigError: codes that have an exact form, but not in so few bits.
    """
    needed = needed_bits(layer.spec)
    if needed is None:
        return _rounded(layer, bits)
    if needed > bits:
        raise ConfigError(f"container_bits: {bits} cannot hold {layer.spec.code} codes exactly; give {needed} or more")
    size = layer.in_features
    own = min(layer.spec.group_size or size, size)
    group = math.gcd(own, size)
    indices = unpack(layer.codes, layer.spec.bits, size).to(torch.int16)
    levels = 2**layer.spec.bits
    doubled = layer.spec.code == "half"
    codes = 2 * indices - (levels - 1) if doubled else indices - levels // 2
    (scale,) = layer.scales
    steps = scale.detach().float() / (2 if doubled else 1)
    if steps.shape[1] > 1:
        steps = steps.repeat_interleave(own // group, dim=1)[:, : size // group]
    steps = steps.expand(layer.out_features, size // group)
    return _measured(layer, codes, steps, group, bits)


def _rounded(layer: QuantLinear, bits: int) -> Integers:
    """Round a layer's weight to integers with the step of least squared error."""
    weight = layer.weight.detach().float()
    size = layer.in_features
    group = math.gcd(REFIT_GROUP, size)
    spec = QuantSpec(bits=bits, code="integer", sharing="group", group_size=group)
    values = torch.arange(2**bits, dtype=torch.float32, device=weight.device) - 2 ** (bits - 1)
    steps = mse_scale(weight, spec).half().float().clamp_min(2.0**-24)
    codes = decode(encode(weight / steps.repeat_interleave(group, dim=1), values), values)
    return _measured(layer, codes, steps, group, bits)


def _measured(layer: QuantLinear, codes: Tensor, steps: Tensor, group: int, bits: int) -> Integers:
    found = Integers(codes.to(torch.int8).contiguous(), steps.half().float().contiguous(), group, bits, 0.0)
    weight = layer.weight.detach().float()
    error = (found.dense() - weight).double().norm() / weight.double().norm().clamp_min(1e-30)
    return replace(found, error=float(error))


def with_integers(module: nn.Module, found: Mapping[str, Container | None]) -> nn.Module:
    """Give a model, in place, the weights of a container; None leaves a layer as it is.

    Quantised layers become dense ones; embedding and LM head keep theirs, so that one matrix for both stays one.
    """
    layers = quant_layers(module)
    for name, integers in found.items():
        if integers is None:
            continue
        if name not in layers:
            module.get_parameter(f"{name}.weight").data.copy_(integers.dense())
            continue
        layer = layers[name]
        dense = nn.Linear(layer.in_features, layer.out_features, bias=layer.bias is not None, device="meta")
        dense.weight = nn.Parameter(integers.dense().to(layer.weight.dtype), requires_grad=False)
        if layer.bias is not None:
            dense.bias = nn.Parameter(layer.bias.detach().clone(), requires_grad=False)
        path = name if module.get_submodule(name) is layer else f"{name}.base"
        module.set_submodule(path, dense)
    return module


def other_tensors(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return a model's tensors by name, without adapters, quantised layers and second names of shared ones."""
    inside = {id(p) for layer in quant_layers(module).values() for p in (*layer.parameters(), *layer.buffers())}
    tensors = {}
    for name, tensor in module.named_parameters():  # names a shared tensor once
        if ".lora_" in name or id(tensor) in inside:
            continue
        kept = tensor.detach().cpu()
        tensors[name.replace(".base.", ".")] = (kept.to(dtype) if kept.is_floating_point() else kept).contiguous()
    for name, layer in quant_layers(module).items():
        if layer.bias is not None:
            tensors[f"{name}.bias"] = layer.bias.detach().cpu().to(dtype)
    return tensors
