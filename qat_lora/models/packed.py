"""Dense weights of folders that other tools quantised: GPTQ, AWQ, MLX and compressed-tensors.

transformers hands such folders to the tools that made them (GPTQModel, which wants a GPU or a compiler; none for MLX),
and what it unpacks by itself it multiplies in float16. A base that stays frozen only has to be read once. Each format
is codes in words of 32 bits, lowest bits first, and w = (q - z) s; which axis is packed and how z is stored differ.
"""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from qat_lora.errors import OF_DATA, ModelError, errors_explained
from qat_lora.extras import require
from qat_lora.files.checksums import weight_files
from qat_lora.quant.codes import unpack

COMPRESSED, MLX = "compressed-tensors", "mlx"
Tensors = dict[str, Tensor]


def method_of(config: dict[str, Any]) -> str | None:
    """Return what a folder's settings say that its weights are quantised by, None for dense weights."""
    quantization = config.get("quantization_config") or config.get("quantization")
    if not isinstance(quantization, dict):
        return None
    return str(quantization.get("quant_method", MLX if {"bits", "group_size"} <= quantization.keys() else None))


def dense_state(folder: Path, config: dict[str, Any]) -> Tensors | None:
    """Return a folder's weights by name, float32, None for a format beyond `READERS`; ModelError: a variant of one."""
    method = method_of(config)
    if method not in READERS:
        return None
    quantization = config.get("quantization_config") or config["quantization"]
    state: Tensors = {}
    for file in weight_files(folder):
        state |= load_file(file)
    read, *parts = READERS[method]
    mark = f".{parts[0]}"
    with errors_explained(ModelError, f"model: {folder} is not as {method} writes it", *OF_DATA):
        layers = sorted(name.removesuffix(mark) for name in state if name.endswith(mark))
        dense = {f"{layer}.weight": read(state, layer, quantization) for layer in layers}
    packed = {f"{layer}.{part}" for layer in layers for part in parts}
    return {name: tensor.float() for name, tensor in state.items() if name not in packed} | dense


def _codes(words: Tensor, bits: int) -> Tensor:
    """Return the codes uint8 [R, N] in words [R, N bits / 32]."""
    return unpack(words.contiguous().view(torch.uint8), bits, words.shape[1] * 32 // bits)


def _gptq(state: Tensors, layer: str, settings: dict[str, Any]) -> Tensor:
    """Version 1 stores z - 1, version 2 z."""
    part = f"{layer}.".__add__
    group_I, rows = state.get(part("g_idx")), 32 * state[part("qweight")].shape[0]
    bits = settings["bits"] if group_I is None else rows // len(group_I)
    if group_I is None:
        group_I = torch.arange(rows // bits) // (rows // bits // state[part("scales")].shape[0])
    zeros_GO = _codes(state[part("qzeros")], bits).float() + (settings.get("checkpoint_format") != "gptq_v2")
    codes_IO = _codes(state[part("qweight")].T, bits).T.float()
    return ((codes_IO - zeros_GO[group_I.long()]) * state[part("scales")].float()[group_I.long()]).T.contiguous()


_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # where in its word each of eight outputs lies


def _awq(state: Tensors, layer: str, settings: dict[str, Any]) -> Tensor:
    version, bits = str(settings.get("version", "gemm")).lower(), settings.get("bits", settings.get("w_bit", 4))
    if version != "gemm" or bits != 4:
        raise ModelError(f"model: AWQ of version {version} at {bits} bits is not read; allowed: gemm at 4 bits")
    packed = (_codes(state[f"{layer}.{part}"], 4).unflatten(1, (-1, 8)) for part in ("qweight", "qzeros"))
    codes_IO, zeros_GO = (words[..., _AWQ_ORDER].flatten(1).float() for words in packed)
    size = codes_IO.shape[0] // zeros_GO.shape[0]
    zeros_IO, scales_IO = (of.repeat_interleave(size, dim=0) for of in (zeros_GO, state[f"{layer}.scales"].float()))
    return ((codes_IO - zeros_IO) * scales_IO).T.contiguous()


def _mlx(state: Tensors, layer: str, settings: dict[str, Any]) -> Tensor:
    own = settings.get(layer)
    if (mode := {**settings, **(own or {})}.get("mode", "affine")) != "affine":
        raise ModelError(f"model: MLX's mode {mode} is not read; allowed: affine")
    scales_OG, biases_OG = (state[f"{layer}.{part}"].float() for part in ("scales", "biases"))
    size, words = (own or settings)["group_size"], state[f"{layer}.weight"]
    codes_OI = _codes(words, 32 * words.shape[1] // (scales_OG.shape[1] * size)).float()
    return codes_OI * scales_OG.repeat_interleave(size, dim=1) + biases_OG.repeat_interleave(size, dim=1)


def _compressed(state: Tensors, layer: str, settings: dict[str, Any]) -> Tensor:
    """`export/packed.py` writes the format."""
    unpacked = require("compressed_tensors.compressors.pack_quantized.helpers", "export").unpack_from_int32
    groups = settings["config_groups"].values()
    bits = {target: group["weights"]["num_bits"] for group in groups for target in group["targets"]}
    width, shape = bits.get(layer, bits.get("Linear")), torch.Size(state[f"{layer}.weight_shape"].tolist())
    codes_OI, steps_OG = unpacked(state[f"{layer}.weight_packed"], width, shape).float(), state[f"{layer}.weight_scale"]
    group_I = state.get(f"{layer}.weight_g_idx")
    if group_I is None:
        group_I = torch.arange(shape[1]) // (shape[1] // steps_OG.shape[1])
    if (zeros := state.get(f"{layer}.weight_zero_point")) is not None:
        codes_OI -= unpacked(zeros, width, steps_OG.shape, packed_dim=0).float()[:, group_I.long()]
    return codes_OI * steps_OG.float()[:, group_I.long()]


READERS: dict[str | None, tuple[Any, ...]] = {
    "gptq": (_gptq, "qweight", "qzeros", "scales", "g_idx"),
    "awq": (_awq, "qweight", "qzeros", "scales"),
    MLX: (_mlx, "scales", "weight", "biases"),
    COMPRESSED: (_compressed, "weight_packed", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx"),
}
"""By method: what reads a packed layer, and the parts of one, of which the first marks it."""
