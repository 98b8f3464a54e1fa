"""The packed base as vLLM and transformers read it, compressed-tensors or GPTQ, with the adapter in PEFT's form.

`compressed-tensors`: the library's own `compress` quantises a dense weight, which would round our codes a second time.
So tensors are written one by one, with its packing function and its config schema. Integer codes keep their width.
Others take one of 2, 4 and 8 bits unless the user names one: those do not cross a 32-bit word, and every version of the
library packs them alike. The layout of 3 bits changed (ten codes to a word up to 0.15, no gaps in 0.20).

GPTQ, which GPTQModel reads too: a weight is (q - z) s, with whole q and z. Our integer codes are that with
z = 2^(bits-1), of which GPTQ's first format stores one less; its second stores z as it is, and fewer readers know it.
Only exact layers are written: GPTQModel would quantise the original better than we could round codes a second time.
Codes and zero points are one stream of bits, in which 3-bit codes cross words of 32 bits; the tensors are [I, O].
Source: AutoGPTQ's `pack`, which GPTQModel's `pack_original` keeps. (`models/packed.py` has our readers.)
"""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qat_lora.errors import ModelError
from qat_lora.export import integers as containers
from qat_lora.export.forms import ExportJob, ExportPlan
from qat_lora.export.integers import Integers, as_integers, needed_bits, packable, save_packed
from qat_lora.export.plain import with_adapter
from qat_lora.extras import require
from qat_lora.layers.convert import LM_HEAD, linear_layers, lora_layers, quant_layers
from qat_lora.layers.experts import has_split_experts, siblings_of
from qat_lora.models.multimodal import sees

GPTQ_WIDTHS = (2, 3, 4, 8)
WORD = 32
PORTABLE = (2, 4, 8)  # widths that every version of compressed-tensors packs alike


def plan_compressed(job: ExportJob) -> ExportPlan:
    """Return what writes a packed base and its adapter; raises as `to_integers`; ModelError: unreadable experts."""
    module = job.student.model.module
    if any(siblings_of(name) and file_name(module)(name) != name for name in lora_layers(module)):
        raise ModelError("form: PEFT and vLLM do not know adapters of these experts by our names; give merged or gguf")
    found = to_integers(module, job.container_bits)
    write = with_adapter(job, lambda out: save_compressed(module, found, out, job.dtype))
    return ExportPlan(write, found, tuple(container_notes(module, found)))


def to_integers(module: Any, container_bits: int | None) -> dict[str, Integers]:
    """Return layers as integers of their own or the least portable width; ModelError: none; ConfigError: few bits."""
    found = {}
    for name, layer in packable(module).items():
        if LM_HEAD.search(name):
            continue  # its readers leave the output head dense
        needed = needed_bits(layer.spec)
        least = needed or max(containers.REFIT_BITS, layer.spec.bits)
        portable = next(width for width in PORTABLE if width >= least)
        found[name] = as_integers(layer, container_bits or (needed if needed == layer.spec.bits else portable))
    return found


def save_compressed(module: Any, found: dict[str, Integers], out: Path, dtype: str) -> None:
    """Write a model without its adapter: layers in `found` packed, others in `dtype`; ModelError: NaN or infinity."""
    packing = require("compressed_tensors.compressors.pack_quantized.helpers", "export")

    def parts(integers: Integers) -> dict[str, Tensor]:
        return {
            "weight_packed": packing.pack_to_int32(integers.codes_OI.cpu(), integers.bits),
            "weight_scale": integers.steps_OG.half(),
            "weight_shape": torch.tensor(integers.codes_OI.shape, dtype=torch.int64),
        }

    config = _compressed_config(module, found)
    save_packed(module, found, parts, out, dtype, lambda _: {"quantization_config": config}, rename=file_name(module))


EXPERT_NAMES: dict[str, dict[str, str]] = {"qwen2_moe": {}, "qwen3_moe": {}, "olmoe": {}}
EXPERT_NAMES["mixtral"] = {".mlp.": ".block_sparse_moe.", ".gate_proj": ".w1", ".down_proj": ".w2", ".up_proj": ".w3"}
"""What a family's files call the parts of a mixture, where they differ from the modules."""


def file_name(module: Any) -> Callable[[str], str]:
    """Return what gives tensors and layers their names in the family's files; ModelError for an unknown mixture."""
    kind = module.config.get_text_config().model_type
    if has_split_experts(module) and kind not in EXPERT_NAMES:
        known = ", ".join(EXPERT_NAMES)
        raise ModelError(f"form: compressed-tensors is not written for the experts of {kind}; allowed: {known}")

    def renamed(name: str) -> str:
        for ours, theirs in EXPERT_NAMES.get(kind, {}).items():
            name = name.replace(ours, theirs)
        return name

    return renamed


def _compressed_config(module: Any, found: dict[str, Integers]) -> dict[str, Any]:
    """Return the library's own dump of its schema, one group of layers for each pair of bits and group size."""
    schema, renamed = require("compressed_tensors.quantization", "export"), file_name(module)
    forms: dict[tuple[int, int | None], list[str]] = {}
    for name, integers in found.items():
        whole_row = integers.steps_OG.shape[1] == 1
        forms.setdefault((integers.bits, None if whole_row else integers.group_size), []).append(renamed(name))
    groups, form = {}, "pack-quantized"
    for i, ((bits, group), names) in enumerate(forms.items()):
        strategy = "group" if group else "channel"
        weights = schema.QuantizationArgs(num_bits=bits, symmetric=True, group_size=group, strategy=strategy)
        targets = ["Linear"] if len(forms) == 1 and not sees(module.config) else sorted(names)
        groups[f"group_{i}"] = schema.QuantizationScheme(targets=targets, weights=weights, format=form)
    ignore = ["lm_head", *sorted(renamed(name) for name, _ in linear_layers(module) if name not in found)]
    config = schema.QuantizationConfig(
        config_groups=groups, format=form, quantization_status="compressed", ignore=ignore
    )
    # transformers reads packed experts in one way alone, which it does not choose by itself; vLLM ignores the word.
    return json.loads(config.model_dump_json()) | ({"dequantize": True} if has_split_experts(module) else {})


def container_notes(module: Any, found: dict[str, Integers]) -> list[str]:
    """Return what a user must know about the folder: what it holds and where it loads."""
    lines = ["checked with transformers and the compressed-tensors schema; not run in vLLM"]
    if quant_layers(module).keys() - found.keys():
        lines.append("the quantised output head is written dense: this container packs linear layers inside the model")
    if odd := sorted({integers.bits for integers in found.values()} - set(PORTABLE)):
        version = require("compressed_tensors", "export").__version__
        lines.append(
            f"{'/'.join(map(str, odd))}-bit codes are packed as compressed-tensors {version} does; other versions may "
            "read them wrongly, and --container-bits 4 packs them as all versions do"
        )
    return lines


def plan_gptq(job: ExportJob) -> ExportPlan:
    """Return what writes a student's base in GPTQ's layout and, beside it, its adapter; raises as `to_gptq`."""
    module = job.student.model.module
    found = to_gptq(module)
    config = gptq_config(module, found)
    entries = {"quantization_config": config}
    write = with_adapter(job, lambda out: save_packed(module, found, gptq_tensors, out, job.dtype, lambda _: entries))
    notes = ["checked with GPTQModel on a CPU; not run in vLLM"]
    if "dynamic" in config:
        notes.append("layers differ; `dynamic` in config.json names them, for GPTQModel: transformers does not read it")
    else:
        notes.append("transformers' AutoModelForCausalLM reads it too, with gptqmodel and optimum installed")
    if quant_layers(module).keys() - found.keys():
        notes.append("the quantised output head is written dense: GPTQ packs linear layers inside the model")
    return ExportPlan(write, found, tuple(notes))


def to_gptq(module: Any) -> dict[str, Integers]:
    """Return every quantised layer but the LM head as GPTQ holds it; ModelError: there is none, or an inexact one."""
    found = {}
    for name, layer in packable(module, "gptq").items():
        if LM_HEAD.search(name):
            continue
        needed, group = needed_bits(layer.spec), containers.cut_group(layer, containers.GROUPS)
        if needed is None or group is None or layer.out_features % WORD:
            raise ModelError(
                f"form: gptq does not hold {name} exactly ({layer.spec.code} codes, {layer.in_features} inputs, "
                f"{layer.out_features} outputs); it holds integer and half codes, groups of 128, 64 "
                f"and 32 inputs, outputs in multiples of {WORD}; use gguf or mlx"
            )
        found[name] = as_integers(layer, next(width for width in GPTQ_WIDTHS if width >= needed), group)
    return found


def gptq_tensors(integers: Integers) -> dict[str, Tensor]:
    """Return a layer's tensors by GPTQ's names."""
    steps_GO = integers.steps_OG.half().T
    zeros_GO = torch.full(steps_GO.shape, 2 ** (integers.bits - 1) - 1, dtype=torch.uint8)
    return {
        "qweight": containers.words(integers.from_zero(), integers.bits).T,
        "qzeros": containers.words(zeros_GO, integers.bits),
        "scales": steps_GO,
        "g_idx": torch.arange(integers.codes_OI.shape[1], dtype=torch.int32) // integers.group_size,
    }


def gptq_config(module: Any, found: dict[str, Integers]) -> dict[str, Any]:
    """Return what readers ask of config.json; layers of another form than most are named in `dynamic`."""
    forms = {name: (integers.bits, integers.group_size) for name, integers in found.items()}
    (((bits, group), _),) = Counter(forms.values()).most_common(1)
    dynamic: dict[str, Any] = {f"-:^{re.escape(name)}$": {} for name, _ in linear_layers(module) if name not in found}
    for name, form in forms.items():
        if form != (bits, group):
            dynamic[f"+:^{re.escape(name)}$"] = {"bits": form[0], "group_size": form[1]}
    return {
        "quant_method": "gptq", "checkpoint_format": "gptq", "bits": bits, "group_size": group, "desc_act": False,
        "sym": True, "lm_head": False, "pack_dtype": "int32", **({"dynamic": dynamic} if dynamic else {}),
    }  # fmt: skip
