"""What a model or adapter that somebody has really is, read off its headers and none of its weights.

A file's name and its `file_type` are labels that whoever wrote it chose; engines go by the types of its tensors. So
these are counted, embedding included, and a label that says otherwise is a problem. An adapter on a base that it was
not trained for loads in every engine without a word; names, shapes and the fingerprint that we noted tell.
"""

import contextlib
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from qat_lora.errors import ModelError
from qat_lora.extras import require
from qat_lora.files.checksums import NOTE, checkpoint_sha256, read_object, weight_files
from qat_lora.files.gguf_header import GGUF, Q2_0, GGUFHeader, read_header
from qat_lora.models.adapter import PREFIX, WEIGHTS
from qat_lora.models.load import QUANT_METHOD, resolve_model
from qat_lora.models.packed import method_of
from qat_lora.models.student import adapter_folder, base_folder
from qat_lora.plan.memory import meta_model

_FAMILY = re.compile(r"(?<![A-Z0-9])(IQ\d|TQ\d_\d|Q\d_[K01]|BF16|F16|F32|MXFP4|NVFP4)(?!\d)")
"""Of a type in a label; what follows (_S, _M, _XXS) says how many tensors have more bits."""
SERVED = {None: "transformers, vLLM, mlx-lm; llama.cpp once converted", "mlx": "mlx-lm"}
SERVED |= {QUANT_METHOD: "transformers with `import qat_lora`; others once `qat-lora export` wrote their form"}
SERVED |= dict.fromkeys(("awq", "gptq"), "vLLM, transformers with GPTQModel")
SERVED |= {"compressed-tensors": "vLLM, transformers with compressed-tensors"}
"""Engines by the method of a folder."""
Held = tuple[str, str, tuple[int, ...], float]
"""A tensor: its name, its type, its shape, and the bits of one of its numbers."""


def inspect(path: str, adapter: str | None = None) -> dict[str, Any]:
    """Return what a GGUF file or a model's or adapter's folder holds, what is wrong with it, and what serves it.

    With an `adapter`, or a `path` that names its base, also whether the two fit. ModelError: nothing readable there.
    """
    report: dict[str, Any] = {"file": path, "holds": "model", "tokenizer": None, "problems": []}
    folder, weights = adapter_folder(path), 0
    if path.endswith(GGUF):
        header = read_header(resolve_model(path))
        report |= _gguf(header)
        found = [(n, t.kind, t.shape, 8 * t.block_bytes / t.block) for n, t in header.tensors.items()]
    elif folder is not None:
        beside = "; llama.cpp and Ollama by its adapter.gguf" if (folder / "adapter.gguf").is_file() else ""
        report |= {"holds": "adapter", "architecture": None, "served_by": f"PEFT, vLLM{beside}"}
        found = _safetensors(folder / WEIGHTS)
    else:
        folder = resolve_model(path)
        method, (config, module) = method_of(read_object(folder / "config.json")), meta_model(str(folder))
        report |= {"architecture": config.model_type, "served_by": SERVED.get(method, f"what reads {method}")}
        files = sorted(folder.glob("model*.safetensors")) or weight_files(folder)
        found = [held for file in files for held in _safetensors(file)]
        weights = sum(parameter.numel() for parameter in module.parameters())  # codes are several to a number
        if (folder / "tokenizer.json").is_file():
            tables = read_object(folder / "tokenizer.json").get("model", {})
            report["tokenizer"] = f"{tables.get('type')}, {len(tables.get('vocab', ()))} tokens"
    groups: dict[tuple[str, str, float], list[float]] = {}
    for name, kind, shape, bits in found:
        groups.setdefault((re.sub(r"\.\d+\.", ".*.", name), kind, bits), []).append(math.prod(shape) * bits / 8)
    keys = ("name", "type", "bits", "tensors", "bytes")
    report["groups"] = [dict(zip(keys, (*of, len(n), int(sum(n))), strict=True)) for of, n in sorted(groups.items())]
    report["bytes"] = sum(group["bytes"] for group in report["groups"])
    report["weights"] = weights or sum(math.prod(shape) for _, _, shape, _ in found)
    report["bits_per_weight"] = round(8 * report["bytes"] / max(1, report["weights"]), 3)
    if adapter is not None or report["holds"] == "adapter":
        report["problems"] += _apart(path if adapter else None, adapter or path, report)
    return report


def _gguf(header: GGUFHeader) -> dict[str, Any]:
    """Return what a GGUF file says of itself, and where its tensors say otherwise."""
    settings, kinds, problems = header.settings, Counter[str](), []
    if settings.get("general.type") == "adapter":
        served = "llama.cpp (--lora), Ollama (ADAPTER)"
        return {"architecture": header.architecture, "holds": "adapter", "served_by": served}
    for name, tensor in header.tensors.items():
        if len(tensor.shape) > 1 and name.startswith("blk."):
            kinds[tensor.kind] += math.prod(tensor.shape)
    labels, number = {f"the name {header.file.name}": header.file.stem.upper()}, settings.get("general.file_type")
    with contextlib.suppress(ValueError):
        named = "Q2_0" if number == 41 else require("gguf", "export").LlamaFileType(number).name
        labels[f"general.file_type {number}"] = re.sub("^(MOSTLY|ALL)_", "", named)
    most = max(kinds, key=lambda kind: kinds[kind], default="of no type")
    for what, label in labels.items():
        said, family = _FAMILY.search(label), _FAMILY.search(most)
        if said and (family is None or said[1] != family[1]):
            problems.append(f"{what} says {said[1]}, but most weights of its layers are {most}")
    kind, rule, tokens = (settings.get(f"tokenizer.ggml.{key}") for key in ("model", "pre", "tokens"))
    if kind is None:
        problems.append("it holds no tokenizer, which llama.cpp needs")
    return {
        "architecture": header.architecture,
        "tokenizer": kind and f"{kind} ({rule}), {len(tokens or ())} tokens",
        "served_by": "llama.cpp from its #24448 on" if Q2_0.kind in kinds else "llama.cpp, Ollama",
        "problems": problems,
    }


def _safetensors(file: Path) -> list[Held]:
    try:
        with safe_open(file, "pt") as tensors:
            parts = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118 - it is no mapping
            of = [(name, part.get_dtype(), tuple(part.get_shape())) for name, part in parts.items()]
            return [(*held, float((re.findall(r"\d+", held[1]) or [8])[0])) for held in of]
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file}: cannot be read ({error})") from None


def _apart(base: str | None, adapter: str, report: dict[str, Any]) -> list[str]:
    """Return why an adapter does not belong to a base (None: the one that it names), which the report then names."""
    place, is_file = Path(adapter).expanduser(), adapter.endswith(GGUF)
    folder = adapter_folder(str(place.parent if is_file else place))
    if base is None and folder is None:
        return []  # a GGUF file alone names no base
    report["base"] = base = base or str(base_folder(folder or place))
    note, problems = (folder or place) / NOTE, []
    noted = read_object(note).get("base_sha256") if note.is_file() else None
    if noted is not None and noted != checkpoint_sha256(resolve_model(base)):
        problems.append(f"{adapter} was trained on another base than {base} (noted: {noted[:12]})")
    if is_file and base.endswith(GGUF):
        shapes, parts = ({n: t.shape for n, t in read_header(Path(file)).tensors.items()} for file in (base, adapter))
    elif folder is None:
        raise ModelError(f"adapter: {adapter} is neither a PEFT folder nor a GGUF file for a base that is one")
    else:
        shapes = {name: tuple(held.shape) for name, held in meta_model(base)[1].named_parameters()}
        parts = {name.removeprefix(PREFIX): shape for name, _, shape, _ in _safetensors(folder / WEIGHTS)}
    for name in sorted(name for name in parts if "lora_a" in name.lower()):
        other = name.replace("lora_A", "lora_B").replace("lora_a", "lora_b")
        layer, shape = re.sub(r"\.lora_[aA]", "", name), (parts.get(other, (0,))[0], parts[name][-1])
        if shapes.get(layer) != shape:
            there = f"has it as {shapes[layer]}" if layer in shapes else "lacks it"
            return [*problems, f"{adapter} changes {layer} {shape}, and {base} {there}"]
    return problems


def inspection_text(report: dict[str, Any]) -> str:
    """Return a report for people: a table of tensors by group and type, then facts, then problems."""
    width = max((len(group["name"]) for group in report["groups"]), default=0)
    row = f"{{name:<{width}}}  {{type:<8}} {{bits:>7}} bits x {{tensors:<4}} {{mb:>12,.3f}} MB".format
    lines = [row(**group, mb=group["bytes"] / 1e6) for group in report["groups"]]
    size = f"{report['weights']:,} weights, {report['bytes'] / 1e6:,.3f} MB, {report['bits_per_weight']} bits a weight"
    lines.append(f"{report['holds']} of {report['architecture'] or 'its base'}: {size}, embedding included")
    lines += [f"{key}: {report[key]}" for key in ("tokenizer", "base") if report.get(key)]
    lines.append(f"served by: {report['served_by']}")
    return "\n".join([*lines, *(f"problem: {problem}" for problem in report["problems"])])
