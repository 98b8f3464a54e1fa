"""The packed base in vLLM's and transformers' format: `compressed-tensors`, pack-quantized.

Written here tensor by tensor rather than through the library's `compress`, which quantises a dense weight and would
round our codes a second time. Its packing function and its config schema are used, so what is written is what it
reads back. Reading it for ourselves is ours as well: transformers multiplies codes and steps in float16, which rounds
what the file holds exactly.

Widths are chosen among 2, 4 and 8 bits unless the user names one: those do not cross a 32-bit word, and every
version of the library packs them alike. The layout of 3 bits changed (ten codes to a word up to 0.15, no gaps in
0.20), so a 3-bit folder loads only with a version that packs as the one that wrote it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from qat_lora.errors import ModelError
from qat_lora.export.integers import Integers, as_integers, needed_bits, other_tensors
from qat_lora.extras import require
from qat_lora.files.checksums import read_object
from qat_lora.files.finite import check_finite
from qat_lora.layers.convert import HEAD, linear_layers, quant_layers, tied_embedding
from qat_lora.models.load import DTYPES, PACKED

PORTABLE = (2, 4, 8)  # bits that every version of compressed-tensors packs alike
REFIT_BITS = 4


def to_integers(module: Any, container_bits: int | None) -> dict[str, Integers]:
    """Return every quantised layer in the form of its container.

    Args:
        module: the model.
        container_bits: bits of all containers; None: the least portable width that is exact, 4 where none is.

    Raises:
        ModelError: the model has no quantised layer.
        ConfigError: `container_bits` is too small for exact codes.
    """
    layers = quant_layers(module)
    if not layers:
        raise ModelError("model: has no quantised layer to pack; quantise it first with `qat-lora quantize`")
    found = {}
    for name, layer in layers.items():
        if HEAD.search(name):
            continue  # the container knows linear layers, and its readers leave the head alone
        needed = needed_bits(layer.spec) or REFIT_BITS
        bits = container_bits or next(width for width in PORTABLE if width >= needed)
        found[name] = as_integers(layer, bits)
    return found


def save_compressed(module: Any, found: dict[str, Integers], out: Path, dtype: str) -> None:
    """Write a model's packed base, without tokenizer files and without its adapter.

    Args:
        module: the model.
        found: its quantised layers, from `to_integers`.
        out: an existing folder.
        dtype: type of all other tensors, `float32` or `bfloat16`.

    Raises:
        MissingExtraError: compressed-tensors is not installed.
        ModelError: a weight or step is NaN or infinite.
    """
    packing = require("compressed_tensors.compressors.pack_quantized.helpers", "export")
    tensors = other_tensors(module, DTYPES[dtype])
    tied = tied_embedding(module)
    for name, layer in quant_layers(module).items():
        if name not in found:  # the head; its embedding, if it is tied, is the same tensor
            tensors[f"{tied or name}.weight"] = layer.effective().detach().cpu().to(DTYPES[dtype]).contiguous()
    for name, integers in found.items():
        shape = integers.codes_OI.shape
        tensors[f"{name}.weight_packed"] = packing.pack_to_int32(integers.codes_OI.cpu(), integers.bits).contiguous()
        tensors[f"{name}.weight_scale"] = integers.steps_OG.cpu().half().contiguous()
        tensors[f"{name}.weight_shape"] = torch.tensor(shape, dtype=torch.int64)
    config = module.config.to_dict()
    config.pop("_name_or_path", None)  # of this machine
    config["quantization_config"] = _quantization_config(module, found)
    config["dtype"] = dtype
    config["tie_word_embeddings"] = config["tie_word_embeddings"] or tied is not None
    config["architectures"] = [type(module).__name__]
    check_finite(tensors, f"tensors for {out}")
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _quantization_config(module: Any, found: dict[str, Integers]) -> dict[str, Any]:
    """Return the library's own dump of the schema, one group of layers for every form."""
    schema = require("compressed_tensors.quantization", "export")
    forms: dict[tuple[int, int | None], list[str]] = {}
    for name, integers in found.items():
        whole_row = integers.steps_OG.shape[1] == 1
        forms.setdefault((integers.bits, None if whole_row else integers.group_size), []).append(name)
    groups = {}
    for i, ((bits, group), names) in enumerate(forms.items()):
        weights = schema.QuantizationArgs(
            num_bits=bits, symmetric=True, group_size=group, strategy="group" if group else "channel"
        )
        targets = ["Linear"] if len(forms) == 1 else sorted(names)
        scheme = schema.QuantizationScheme(targets=targets, weights=weights, format="pack-quantized")
        groups[f"group_{i}"] = scheme
    plain = [name for name, _ in linear_layers(module) if name not in found]
    config = schema.QuantizationConfig(
        config_groups=groups,
        format="pack-quantized",
        quantization_status="compressed",
        ignore=["lm_head", *sorted(plain)],
    )
    return json.loads(config.model_dump_json())


def read_packed(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights that a folder of compressed-tensors holds packed, by layer name, float32 [O, I].

    Raises:
        MissingExtraError: compressed-tensors is not installed.
    """
    groups = read_object(folder / "config.json")["quantization_config"]["config_groups"]
    bits = {target: group["weights"]["num_bits"] for group in groups.values() for target in group["targets"]}
    packing = require("compressed_tensors.compressors.pack_quantized.helpers", "export")
    for file in sorted(folder.glob("model*.safetensors")):
        tensors = load_file(file)
        for name in sorted(key.removesuffix(".weight_packed") for key in tensors if key.endswith(".weight_packed")):
            shape = torch.Size(tensors[f"{name}.weight_shape"].tolist())
            width = bits.get(name, bits.get("Linear"))
            codes_OI = packing.unpack_from_int32(tensors[f"{name}.weight_packed"], width, shape)
            steps_OG = tensors[f"{name}.weight_scale"].float()
            yield name, codes_OI.float() * steps_OG.repeat_interleave(shape[1] // steps_OG.shape[1], dim=1)


def is_packed(folder: Path) -> bool:
    """Return whether a model folder is in the form of compressed-tensors."""
    config = read_object(folder / "config.json")
    return (config.get("quantization_config") or {}).get("quant_method") == PACKED


def notes(module: Any, found: dict[str, Integers]) -> list[str]:
    """Return what a user must know about what the folder holds and where it loads."""
    lines = ["checked with transformers and the compressed-tensors schema; not run in vLLM"]
    if quant_layers(module).keys() - found.keys():
        lines.append("the quantised output head is written dense: this container packs linear layers inside the model")
    if odd := sorted({integers.bits for integers in found.values()} - set(PORTABLE)):
        version = require("compressed_tensors", "export").__version__
        lines.append(
            f"{'/'.join(map(str, odd))}-bit codes are packed as compressed-tensors {version} does; other versions may "
            "read them wrongly"
        )
    return lines
