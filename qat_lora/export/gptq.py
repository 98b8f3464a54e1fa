"""The packed base in the GPTQ layout, which GPTQModel, transformers and vLLM read, and the adapter in PEFT's beside it.

A weight is (q - z) s, with whole q and z. Our integer codes are that with z = 2^(bits-1), of which GPTQ's first format
stores one less; a step below zero changes nothing. Its second format stores z as it is, and fewer readers know it. Only
exact layers are written: GPTQModel would quantise the original better than we could round codes a second time.

Codes and zero points are one stream of bits, in which 3-bit codes cross words of 32 bits; the tensors are [I, O].

Source: AutoGPTQ's `pack`, which GPTQModel's `pack_original` keeps.
"""

import re
from collections import Counter
from typing import Any

import torch
from torch import Tensor

from qat_lora.errors import ModelError
from qat_lora.export.forms import ExportJob, ExportPlan
from qat_lora.export.integers import GROUPS, Integers, as_integers, cut_group, needed_bits, packable, save_packed, words
from qat_lora.export.pair import with_adapter
from qat_lora.layers.convert import LM_HEAD, linear_layers, quant_layers

WIDTHS = (2, 3, 4, 8)
WORD = 32


def plan(job: ExportJob) -> ExportPlan:
    """Return what writes a student's base in GPTQ's layout and, beside it, its adapter; raises as `to_gptq`."""
    module = job.student.model.module
    found = to_gptq(module)
    config = quantization_config(module, found)
    entries = {"quantization_config": config}
    write = with_adapter(job, lambda out: save_packed(module, found, tensors, out, job.dtype, lambda _: entries))
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
        needed, group = needed_bits(layer.spec), cut_group(layer, GROUPS)
        if needed is None or group is None or layer.out_features % WORD:
            raise ModelError(
                f"form: gptq does not hold {name} exactly ({layer.spec.code} codes, {layer.in_features} inputs, "
                f"{layer.out_features} outputs); it holds integer and half codes, groups of 128, 64 "
                f"and 32 inputs, outputs in multiples of {WORD}; use gguf or mlx"
            )
        found[name] = as_integers(layer, next(width for width in WIDTHS if width >= needed), group)
    return found


def tensors(integers: Integers) -> dict[str, Tensor]:
    """Return a layer's tensors by GPTQ's names."""
    steps_GO = integers.steps_OG.half().T
    zeros_GO = torch.full(steps_GO.shape, 2 ** (integers.bits - 1) - 1, dtype=torch.uint8)
    return {
        "qweight": words(integers.from_zero(), integers.bits).T,
        "qzeros": words(zeros_GO, integers.bits),
        "scales": steps_GO,
        "g_idx": torch.arange(integers.codes_OI.shape[1], dtype=torch.int32) // integers.group_size,
    }


def quantization_config(module: Any, found: dict[str, Integers]) -> dict[str, Any]:
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
