"""GGML's block types: the bytes in which llama.cpp keeps a weight, from codes, steps and multiples as plain arrays.

The gguf library encodes few of these types, and rounds a dense weight anew. Here the codes that trained are laid out as
they are, and read back by the library's own decoder: "exact" is said of the bytes in the file and not of an intention.
Of `Q2_0` llama.cpp holds codes {-1, 0, 1, 2}, ours negated, so the step changes its sign. Layouts: llama.cpp's
ggml-common.h and ggml-quants.c; a byte holds codes that are a quarter or half of a stretch apart, for vector units.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from qat_lora.export.integers import Container, Integers, as_integers, needed_bits
from qat_lora.extras import require
from qat_lora.files.finite import check_finite
from qat_lora.layers.quant_linear import QuantLinear
from qat_lora.models.from_gguf import ggml_type
from qat_lora.quant.codes import pack, unpack

BLOCK, SUPER = 32, 256
K_QUANTS: dict[tuple[object, ...], str] = {
    ("minimum", 2, 16, 4): "Q2_K",
    ("integer", 3, 16, 6): "Q3_K",
    ("minimum", 4, 32, 6): "Q4_K",
    ("integer", 6, 16, 8): "Q6_K",
}
"""Code, bits, group and bits of a multiple, of the types whose steps are multiples of a float16 of `SUPER` weights."""


@dataclass(frozen=True)
class Blocks(Container):
    """A weight [O, I] in the bytes of a GGML type."""

    kind: str
    data: np.ndarray  # uint8 [O, bytes of a row]

    def dense(self) -> Tensor:
        """Return the weight as the gguf library decodes it, float32 [O, I]."""
        return torch.from_numpy(require("gguf", "export").dequantize(self.data, ggml_type(self.kind)))

    @property
    def bits_per_weight(self) -> float:
        """Bits of a block over its weights."""
        weights, size = require("gguf", "export").GGML_QUANT_SIZES[ggml_type(self.kind)]
        return float(8 * size / weights)


def to_blocks(layer: QuantLinear, exact_only: bool = False) -> Blocks | None:
    """Return a layer in the smallest type that is exact, else rounded to Q4_0; None where no type may hold it."""
    spec, needed = layer.spec, needed_bits(layer.spec)
    if kind := K_QUANTS.get((spec.code, spec.bits, spec.group_size, spec.step_bits)):
        found = Blocks(kind, k_quant(kind, layer))
    elif layer.in_features % BLOCK or (needed is None and exact_only):
        return None
    else:
        integers = as_integers(layer, 8 if needed and needed > 4 else 4)
        if integers.group_size % BLOCK:
            return None
        found = plain_blocks(integers, spec.code == "integer" and spec.bits == 2)
    return found.measured(layer.weight)


def float_blocks(weight: Tensor, dtype: str, label: str = "embedding") -> Blocks:
    """Return a tensor in a dense type; ModelError, under its `label`: a number that is not finite in that type."""
    kind = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype]
    tensor = weight.detach().cpu().to(getattr(torch, dtype)).contiguous()
    check_finite({label: tensor}, f"GGUF as {dtype}")
    return Blocks(kind, tensor.view(torch.uint8).numpy())


def plain_blocks(integers: Integers, two_bits: bool = False) -> Blocks:
    """Return integers as Q8_0, Q4_0 or (`two_bits`, where groups allow it) Q2_0: a float16 step, then the codes."""
    codes, size = integers.codes_OI.cpu(), integers.group_size
    kind, block, steps = "Q8_0" if integers.bits > 4 else "Q4_0", BLOCK, integers.steps_OG.cpu()
    if two_bits and size % 64 == 0:
        kind, block, steps = "Q2_0", 64, -steps
        packed = pack((1 - codes).reshape(-1, 64).to(torch.uint8), 2).numpy()
    elif kind == "Q8_0":
        packed = codes.reshape(-1, BLOCK).numpy().view(np.uint8)
    else:
        packed = _interleaved((codes + 8).reshape(-1, BLOCK).numpy().view(np.uint8), 1, 4)
    halves = _halves(steps.repeat_interleave(size // block, dim=1))
    return Blocks(kind, np.hstack([halves, packed]).reshape(len(codes), -1))


def k_quant(kind: str, layer: QuantLinear) -> np.ndarray:
    """Return the bytes [O, ..] of a layer whose steps are multiples of a float16 step of 256 weights."""
    spec, stored = layer.spec, layer.stored()
    groups, step_bits = spec.groups(layer.in_features), spec.whole_bits

    def by_super(name: str, bits: int, count: int) -> np.ndarray:
        per_row = layer.in_features // SUPER
        return unpack(stored[name].cpu(), bits, count).reshape(-1, count // per_row).numpy()

    codes = by_super("codes", spec.bits, layer.in_features)
    steps, scale = by_super("steps", step_bits, groups), _halves(stored["scale"])
    if kind == "Q3_K":
        low, high = _interleaved(steps & 15, 1, 4), _interleaved(steps >> 4, 1, 2)
        parts = [_interleaved(codes >> 2, 1, 1), _interleaved(codes & 3, 2, 2), low, high, scale]
    elif kind == "Q6_K":
        parts = [_interleaved(codes & 15, 2, 4), _interleaved(codes >> 4, 2, 2), steps ^ 128, scale]
    else:
        minima, minimum = by_super("minima", step_bits, groups), _halves(stored["minimum"])
        if kind == "Q2_K":
            parts = [steps | minima << 4, _interleaved(codes, 2, 2), scale, minimum]
        else:
            first = [x[:, :4] | (x[:, 4:] >> 4 << 6) for x in (steps, minima)]
            rest = (steps[:, 4:] & 15) | (minima[:, 4:] & 15) << 4
            parts = [scale, minimum, *first, rest, _interleaved(codes, 4, 4)]
    return np.hstack(parts).reshape(layer.out_features, -1)


def _halves(x: Tensor) -> np.ndarray:
    """Return the bytes of numbers as float16, [numbers, 2]."""
    return x.detach().cpu().half().reshape(-1, 1).numpy().view(np.uint8)


def _interleaved(values: np.ndarray, stretches: int, bits: int) -> np.ndarray:
    """Pack uint8 values [N, n] of some bits: each stretch of a row in 8 / bits parts, the k-th at bit k * bits."""
    parts = values.reshape(len(values), stretches, 8 // bits, -1)
    shifts = bits * np.arange(8 // bits, dtype=np.uint8)
    return np.bitwise_or.reduce(parts << shifts[:, None], axis=2).reshape(len(values), -1)
