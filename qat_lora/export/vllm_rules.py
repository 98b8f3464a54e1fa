"""What vLLM's loader asks of a `compressed-tensors` folder, and which of it an export does not fulfil.

vLLM needs a GPU host, so these exports have never run in it. What can be done without one is to write down what its
loader and its weight-only kernels refuse (read in its sources: `CompressedTensorsConfig`, the scheme `WNA16`, Marlin's
`can_implement`), and to hold every folder against that list. That is a check of the format, not of the arithmetic, and
the model card says so. Rules that are a matter of speed or of newer versions are left out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open

BITS = (4, 8)
"""Of the scheme for weights alone; for 2 and 3 bits newer versions need a further package (humming)."""
GROUPS = (32, 64, 128)
"""Inputs that share a step; or the whole row."""
FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that vLLM joins to one, with one scheme."""
NOT_RUN = "held against a list of what vLLM's loader asks (format only); not run in vLLM"
_FLOATS = {"F16", "BF16", "F32"}
Header = Mapping[str, tuple[str, tuple[int, ...]]]


def check_vllm(folder: Path) -> list[str]:
    """Return the rules that a folder breaks, one line each, and what the check is worth."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    header: dict[str, tuple[str, tuple[int, ...]]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118
                part = tensors.get_slice(name)
                header[name] = str(part.get_dtype()), tuple(part.get_shape())
    found = sorted(set(broken_rules(config, header)))
    return [NOT_RUN, *(f"vLLM would refuse this folder: {line}" for line in found), *_remarks(config)]


def broken_rules(config: Mapping[str, Any], header: Header) -> Iterator[str]:
    """Yield the rules that a config.json and the tensors' types and shapes break."""
    quantization = config.get("quantization_config") or {}
    if quantization.get("quant_method") != "compressed-tensors" or quantization.get("format") != "pack-quantized":
        yield "quantization_config must name compressed-tensors and pack-quantized"
        return
    for group in quantization["config_groups"].values():
        yield from _broken_scheme(group)
    layers = sorted(name.removesuffix(".weight_packed") for name in header if name.endswith(".weight_packed"))
    schemes = {layer: _scheme(layer, quantization) for layer in layers}
    for layer, scheme in schemes.items():
        if scheme is None:
            yield f"{_kind(layer)} is packed, and no group of the config targets it, or it is ignored"
        else:
            yield from _broken_layer(layer, scheme["weights"], header)
    for name in header:
        layer, _, part = name.rpartition(".")
        if part == "weight" and layer not in schemes and layer.endswith("_proj") and _scheme(layer, quantization):
            yield f"{_kind(layer)} is dense, and the config says that it is packed"
    yield from _broken_fusion(header, schemes)


def _broken_scheme(group: Mapping[str, Any]) -> Iterator[str]:
    weights = group["weights"]
    if group.get("input_activations") or group.get("format") not in (None, "pack-quantized"):
        yield "groups must quantise weights only, as pack-quantized"
    if weights["type"] != "int" or weights.get("dynamic") or weights.get("actorder"):
        yield "codes must be static integers without activation order"
    if weights["num_bits"] not in BITS:
        yield f"{weights['num_bits']}-bit codes; its weight-only scheme takes 4 and 8 bits"
    if weights["strategy"] not in ("group", "channel"):
        yield f"strategy {weights['strategy']}; allowed: group, channel"
    size = weights.get("group_size")
    if weights["strategy"] == "group" and size not in GROUPS:
        yield f"groups of {size} inputs; its kernels take 32, 64, 128 or whole rows"


def _scheme(layer: str, quantization: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the group that a linear layer belongs to: an exact name, `re:` and a pattern, or the type's name."""
    if _matches(layer, quantization.get("ignore", ())):
        return None
    for group in quantization["config_groups"].values():
        if "Linear" in group["targets"] or _matches(layer, group["targets"]):
            return group
    return None


def _matches(layer: str, targets: Any) -> bool:
    return any(re.match(t[3:], layer) if t.startswith("re:") else t == layer for t in targets)


def _broken_layer(layer: str, weights: Mapping[str, Any], header: Header) -> Iterator[str]:
    per_word = 32 // weights["num_bits"]
    if header.get(f"{layer}.weight_shape") != ("I64", (2,)):
        yield f"{_kind(layer)}.weight_shape must be two int64"
    kind, (rows, words) = header[f"{layer}.weight_packed"]
    scale_kind, scale = header.get(f"{layer}.weight_scale", ("none", ()))
    if kind != "I32":
        yield f"{_kind(layer)}.weight_packed is {kind}, not int32"
    if scale_kind not in _FLOATS or len(scale) != 2 or scale[0] != rows:
        yield f"{_kind(layer)}.weight_scale must be floats [outputs, groups]"
        return
    size, inputs = weights.get("group_size"), words * per_word
    groups = 1 if weights["strategy"] == "channel" else inputs // size
    if scale[1] != groups or (groups > 1 and inputs % size):
        yield f"{_kind(layer)} has {scale[1]} steps for {inputs} inputs, the config means {groups}"
    if f"{layer}.weight_zero_point" in header and weights["symmetric"]:
        yield f"{_kind(layer)} has a zero point, the config says symmetric"


def _broken_fusion(header: Header, schemes: Mapping[str, Mapping[str, Any] | None]) -> Iterator[str]:
    for layer in {name.rsplit(".", 1)[0] for name in header}:
        for parts in FUSED:
            if not layer.endswith(f".{parts[0]}"):
                continue
            names = [layer.removesuffix(parts[0]) + part for part in parts]
            own = [(schemes.get(name) or {}).get("weights") for name in names]
            if any(weights != own[0] for weights in own):
                yield f"{', '.join(parts)} are joined to one layer and need one scheme"


def _remarks(config: Mapping[str, Any]) -> list[str]:
    """Return what does not stop the loader and changes what is computed."""
    if config.get("dtype") == "bfloat16":
        return ["vLLM turns steps into the model's type: give it --dtype float16, bfloat16 would round them to 8 bits"]
    return []


def _kind(layer: str) -> str:
    """Return the last part of a layer's name, so that one line stands for all blocks."""
    return layer.rsplit(".", 1)[-1]
