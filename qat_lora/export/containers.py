"""A quantised layer as other tools' containers hold it: integers and steps, or the bytes of GGML's block types.

Most know one form: an integer times the step of its group. Half-integer codes get it by doubling, (q + 1/2) s =
(2 q + 1) (s / 2): exact, for one more bit. A group that does not divide the row is cut to one that does, its step
repeated: exact too. Tables, zero points and scales without groups are rounded again, and the error is measured.

The embedding and the LM head, most of the file of a 2-bit model of 0.6 B, go on a grid of few bits by the layers' own
quantiser (`quantize_weight`, weighted clip search). What an LM head's error does to a logit is weighted by the hidden
state that meets it, so column i counts by E[x_i²] of the final norm's output: measured on text, or without any the
square of the norm's gain. A table that only embeds has no such weights; a head that is quantised keeps its codes.

The gguf library encodes few of GGML's types, and rounds anew. Here trained codes are laid out as they are, and read
back by its decoder. Of `Q2_0` llama.cpp holds codes {-1, 0, 1, 2}, ours negated, so the step changes its sign. Layouts:
llama.cpp's ggml-common.h and ggml-quants.c; a byte holds codes that are a quarter or half of a stretch apart.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from tqdm.auto import tqdm

from qat_lora.errors import ConfigError, ModelError
from qat_lora.extras import require
from qat_lora.files.finite import check_finite
from qat_lora.layers.convert import LM_HEAD, quant_layers, tied_embedding
from qat_lora.layers.experts import has_split_experts
from qat_lora.layers.quant_linear import QuantLinear, dense_linear
from qat_lora.models.from_gguf import ggml_type
from qat_lora.models.load import DTYPES, CausalLM, add_older_names
from qat_lora.quant.codes import decode, encode, first_value, pack, unpack
from qat_lora.quant.initialize import QuantizedWeight, quantize_weight
from qat_lora.quant.scales import Meaning, clip_scale, importance_cost
from qat_lora.quant.spec import SCALE_BITS, QuantSpec
from qat_lora.types import Batch

GROUPS = (128, 64, 32)  # inputs of a group in MLX and in every reader of GPTQ
REFIT_BITS = 4
BLOCK, SUPER = 32, 256  # weights of GGML's blocks
REFIT_GROUP = BLOCK  # inputs of a group where codes are rounded again: llama.cpp's block, and a group that vLLM takes
KEPT = 1 << 14  # positions whose states are kept to be compared with: 64 MB at a width of 1,024
PIECE = 1 << 17  # weights quantised at once: the clip search runs four times as fast inside a CPU's cache


@dataclass(frozen=True)
class Container:
    """A weight [O, I] as a container holds it, `Integers` or GGML's `Blocks`."""

    error: float = field(default=0.0, kw_only=True)  # Frobenius norm of the change over the weight's; 0 where exact

    @property
    def bits_per_weight(self) -> float:
        """Bits of all that is stored, over the weights."""
        raise NotImplementedError

    def dense(self, rows: slice = slice(None)) -> Tensor:
        """Return what it decodes to, or some rows of that, float32 [O, I]."""
        raise NotImplementedError

    def measured(self, weight_OI: Tensor) -> Self:
        """Return the same with its error as the form of a weight."""
        change = whole = 0.0
        for rows in (slice(i, i + 256) for i in range(0, len(weight_OI), 256)):
            held, wide = self.dense(rows), weight_OI[rows].detach().double()
            change += float((held.to(wide) - wide).square().sum())
            whole += float(wide.square().sum())
        return replace(self, error=math.sqrt(change / max(whole, 1e-60)))


@dataclass(frozen=True)
class Integers(Container):
    """A weight [O, I] as integers times steps, plus biases where there are any."""

    codes_OI: Tensor  # int8, -2^(bits-1) to 2^(bits-1) - 1; with biases uint8, from 0
    steps_OG: Tensor  # float32 numbers that float16 holds
    group_size: int  # inputs that share a step; divides I
    bits: int
    biases_OG: Tensor | None = None  # float32 numbers that float16 holds, added after

    def dense(self, rows: slice = slice(None)) -> Tensor:
        """Return the weight, or some of its rows, float32 [O, I]."""
        size, steps = self.group_size, self.steps_OG[rows]
        weight = self.codes_OI[rows].float() * steps.repeat_interleave(size, dim=1)
        return weight if self.biases_OG is None else weight + self.biases_OG[rows].repeat_interleave(size, dim=1)

    @property
    def bits_per_weight(self) -> float:
        """Bits of codes, steps and biases."""
        return self.bits + (1 if self.biases_OG is None else 2) * SCALE_BITS / self.group_size

    def from_zero(self) -> Tensor:
        """Return the codes as uint8 from 0 on."""
        return (self.codes_OI.to(torch.int16) + 2 ** (self.bits - 1) * (self.biases_OG is None)).to(torch.uint8)


def words(codes_OI: Tensor, bits: int) -> Tensor:
    """Return uint8 codes as words of 32 bits, int32 [O, I bits / 32]: a little-endian stream."""
    return pack(codes_OI.cpu(), bits).view(torch.int32)


def packable(module: nn.Module, without_experts: str = "", lm_head: bool = True) -> dict[str, QuantLinear]:
    """Return the quantised layers by name; ModelError where there is none, or experts in a form `without_experts`."""
    if layers := quant_layers(module):
        if without_experts and has_split_experts(module):
            raise ModelError(f"form: {without_experts} is not written for mixtures of experts; give gguf or merged")
        return {name: layer for name, layer in layers.items() if lm_head or not LM_HEAD.search(name)}
    raise ModelError("model: has no quantised layer to pack; quantise it first with `qat-lora quantize`")


def needed_bits(spec: QuantSpec) -> int | None:
    """Return the bits of the integers that hold a spec's codes exactly, None where none do."""
    if spec.sharing == "lowrank" or spec.step_bits is not None or spec.code not in ("integer", "half"):
        return None
    return spec.bits if spec.code == "integer" else spec.bits + 1


def cut_group(layer: QuantLinear, allowed: tuple[int, ...] = ()) -> int | None:
    """Return the largest group that divides a layer's groups and its row; None where none of `allowed` does."""
    size = layer.in_features
    own = math.gcd(min(layer.spec.group_size or size, size), size)
    return next((group for group in allowed if own % group == 0), None) if allowed else own


def as_integers(layer: QuantLinear, bits: int, group: int | None = None) -> Integers:
    """Return a layer as integers, exact or else rounded; `group` divides `cut_group`'s; ConfigError: too few bits."""
    needed = needed_bits(layer.spec)
    if needed is None:
        return rounded(layer, bits)
    if needed > bits:
        raise ConfigError(f"container_bits: {bits} cannot hold {layer.spec.code} codes exactly; give {needed} or more")
    group = group or cut_group(layer)
    assert group is not None
    indices = unpack(layer.codes, layer.spec.bits, layer.in_features).to(torch.int16)
    levels, doubled = 2**layer.spec.bits, layer.spec.code == "half"
    codes = 2 * indices - (levels - 1) if doubled else indices - levels // 2
    steps = layer.meaning().scale.detach().expand(codes.shape)[:, ::group] / (2 if doubled else 1)
    return Integers(codes.to(torch.int8), steps.half().float(), group, bits).measured(layer.weight)


def rounded(layer: QuantLinear, bits: int) -> Integers:
    """Return a layer's weight rounded to integers with the step of least squared error."""
    weight, group = layer.weight.detach().float(), math.gcd(REFIT_GROUP, layer.in_features)
    spec = QuantSpec(bits=bits, code="integer", sharing="group", group_size=group)
    values = torch.arange(2**bits, dtype=torch.float32, device=weight.device) - 2 ** (bits - 1)
    steps = clip_scale(weight, spec, importance_cost(weight, spec)).half().float().clamp_min(2.0**-24)
    codes = decode(encode(weight / steps.repeat_interleave(group, dim=1), values), values)
    return Integers(codes.to(torch.int8), steps, group, bits).measured(weight)


def affine(codes_OI: Tensor, spec: QuantSpec, meaning: Meaning, group: int) -> Integers:
    """Return uint8 indices of codes that count up by ones with the step and bias of every `group`, in float16."""
    scale, zero, minimum = (None if x is None else x.expand(codes_OI.shape)[:, ::group] for x in meaning)
    first = first_value(spec)
    assert scale is not None and first is not None
    bias = (first if zero is None else first - zero) * scale
    bias = bias if minimum is None else bias - minimum
    return Integers(codes_OI, scale.half().float(), group, spec.bits, biases_OG=bias.half().float())


def with_containers(module: nn.Module, found: Mapping[str, Container | None]) -> nn.Module:
    """Return a model with the weights of the containers that are not exact; all other tensors are the given model's."""
    rounded = {name: held for name, held in found.items() if held is not None and held.error}
    shared = {id(x): x for x in (*module.parameters(), *module.buffers())}  # what `deepcopy` takes for copied
    for name, table in module.named_parameters():
        if held := rounded.pop(name.removesuffix(".weight"), None):
            shared[id(table)] = new = copy.deepcopy(table)
            for rows in (slice(i, i + 4096) for i in range(0, len(new), 4096)):
                new.data[rows] = held.dense(rows)
    layers = quant_layers(module := copy.deepcopy(module, shared))
    for name, held in rounded.items():
        dense = dense_linear(layers[name])
        dense.weight.data = held.dense().to(dense.weight.dtype)
        module.set_submodule(name if module.get_submodule(name) is layers[name] else f"{name}.base", dense)
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


def save_packed(
    module: Any,
    found: Mapping[str, Integers | None],
    parts: Callable[[Integers], dict[str, Tensor]],
    out: Path,
    dtype: str,
    entries: Callable[[dict[str, Integers]], dict[str, Any]],
    own: Mapping[str, Tensor] | None = None,
    rename: Callable[[str], str] = str,
) -> None:
    """Write a model without its adapter: `parts` of what `found` holds, tensors of its `own`, all others in `dtype`.

    `entries` gives those of config.json that are not the model's own, from what is packed by its name in the file: a
    matrix that is embedding and LM head has the embedding's. `rename` gives tensors their names in the file.
    ModelError: a number is NaN or infinite in its type.
    """
    tensors, packed = other_tensors(module, DTYPES[dtype]) | dict(own or {}), {}
    tied, layers = tied_embedding(module), quant_layers(module)
    for name in dict.fromkeys((*layers, *found)):
        label, integers = tied if tied and LM_HEAD.search(name) else name, found.get(name)
        if integers is None:
            tensors[f"{label}.weight"] = layers[name].effective().detach().cpu().to(DTYPES[dtype]).contiguous()
            continue
        packed[label] = integers
        tensors.pop(f"{label}.weight", None)
        tensors |= {f"{label}.{part}": tensor.cpu().contiguous() for part, tensor in parts(integers).items()}
    config = module.config.to_dict()
    config.pop("_name_or_path", None)  # of this machine
    config |= {"dtype": dtype, "architectures": [type(module).__name__], **entries(packed)}
    config["tie_word_embeddings"] = config["tie_word_embeddings"] or tied is not None
    tensors = {rename(name): tensor for name, tensor in tensors.items()}
    check_finite(tensors, f"tensors for {out}")
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    add_older_names(out)


def dense_tables(module: nn.Module) -> dict[str, nn.Embedding | nn.Linear]:
    """Return the embedding and, where it has a weight of its own, the LM head, by name; without what holds codes."""
    found: dict[int, tuple[str, nn.Embedding | nn.Linear]] = {}
    for name, part in module.named_modules():
        is_head = isinstance(part, nn.Linear) and not isinstance(part, QuantLinear) and LM_HEAD.search(name)
        if isinstance(part, nn.Embedding) or (isinstance(part, nn.Linear) and is_head):
            found.setdefault(id(part.weight), (name, part))
    return dict(found.values())


@torch.no_grad()
def head_importance(model: CausalLM, batches: Iterable[Batch] | None, kept: list[Tensor]) -> Tensor:
    """Return the mean square [H] of what the LM head reads, the first added to `kept`; without text the gain's."""
    if batches is None:
        norm = model.backbone.norm
        return norm(torch.ones_like(norm.weight)).float().square().cpu()
    total, count = torch.zeros(model.config.hidden_size), 0
    for batch in batches:
        states_BLH = model.hidden(batch["input_ids"], batch["document_ids"])
        kept += [states_BLH] * (count < KEPT)
        hidden = states_BLH[:, :-1][batch["target_mask"]]
        total += hidden.float().square().sum(0).cpu()
        count += len(hidden)
    return total / max(1, count)


def quantized_table(weight_VH: Tensor, spec: QuantSpec, importance_H: Tensor | None, quiet: bool) -> QuantizedWeight:
    """Return a table on the grid of `spec`, with scales by group; ConfigError: a weight not finite or too large."""
    moment = None if importance_H is None else torch.diag(importance_H.to(weight_VH.device))
    pieces = weight_VH.detach().split(max(1, PIECE // weight_VH.shape[1]))
    parts = tqdm(pieces, desc="round the embedding or head", unit="piece", disable=quiet)
    return QuantizedWeight.joined([quantize_weight(part, spec, "mse", moment) for part in parts])


K_QUANTS: dict[tuple[object, ...], str] = {("minimum", 2, 16, 4): "Q2_K", ("integer", 3, 16, 6): "Q3_K"}
K_QUANTS |= {("minimum", 4, 32, 6): "Q4_K", ("integer", 6, 16, 8): "Q6_K"}
"""Code, bits, group and bits of a multiple, of the types whose steps are multiples of a float16 of `SUPER` weights."""


@dataclass(frozen=True)
class Blocks(Container):
    """A weight [O, I] in the bytes of a GGML type."""

    kind: str
    data: np.ndarray  # uint8 [O, bytes of a row]

    def dense(self, rows: slice = slice(None)) -> Tensor:
        """Return the weight as the gguf library decodes it, or some of its rows, float32 [O, I]."""
        return torch.from_numpy(require("gguf", "export").dequantize(self.data[rows], ggml_type(self.kind)))

    @property
    def bits_per_weight(self) -> float:
        """Bits of a block over its weights."""
        weights, size = require("gguf", "export").GGML_QUANT_SIZES[ggml_type(self.kind)]
        return float(8 * size / weights)


def to_blocks(layer: QuantLinear, exact_only: bool = False, origin_OI: Tensor | None = None) -> Blocks | None:
    """Return a layer in the smallest exact type, else rounded to Q4_0; None: no type may. Errors are of `origin_OI`."""
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
    return found.measured(layer.weight if origin_OI is None else origin_OI)


def float_blocks(weight: Tensor, dtype: str, label: str = "embedding") -> Blocks:
    """Return a tensor in a dense type; ModelError, under its `label`: a number that is not finite in that type."""
    tensor = weight.detach().cpu().to(getattr(torch, dtype)).contiguous()
    check_finite({label: tensor}, f"GGUF as {dtype}")
    return Blocks({"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[dtype], tensor.view(torch.uint8).numpy())


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
        return unpack(stored[name].cpu(), bits, count).reshape(-1, count * SUPER // layer.in_features).numpy()

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
