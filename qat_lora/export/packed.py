"""The packed base as vLLM and transformers read it (compressed-tensors or GPTQ, adapter in PEFT's form), and mlx-lm.

`compressed-tensors`: the library's own `compress` would round our codes a second time, so tensors are written one by
one, with its packing function and config schema. Integer codes keep their width. Others take 2, 4 or 8 bits unless the
user names one: all its versions pack those alike, but not 3 (ten codes to a word up to 0.15, no gaps in 0.20).

GPTQ, which GPTQModel reads too: a weight is (q - z) s, with whole q and z. Our integer codes are that with
z = 2^(bits-1), of which GPTQ's first format stores one less; its second stores z as it is, and fewer readers know it.
Only exact layers are written: GPTQModel would quantise the original better than we could round codes a second time.
Codes and zero points are one stream of bits, in which 3-bit codes cross words of 32 bits; the tensors are [I, O].
Source: AutoGPTQ's `pack`, which GPTQModel's `pack_original` keeps. (`models/packed.py` has our readers.)

MLX, with the adapter in `adapters/`, holds w = q s + b: codes q from 0, a float16 step s and bias b of every 32, 64 or
128 inputs. Integer codes have b = -2^(bits-1) s, a float16 whenever s is: exact. Other biases are rounded to float16,
by 2^-11 of themselves or less, which is measured with the rest. Other groups, tables, low-rank scales: rounded again.

MLX computes in float16 here, but for the last norm and logits: float32. Its `quantize` would choose steps of its own,
so tensors are written from torch. Source: `mlx.core.quantize` (bits in words of 32), mlx-lm's `load_adapters`.
"""

import json
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from qat_lora.errors import ConfigError, ModelError
from qat_lora.export import containers
from qat_lora.export.containers import Integers, as_integers, needed_bits, packable, save_packed
from qat_lora.export.forms import ExportJob, ExportPlan
from qat_lora.export.plain import with_adapter
from qat_lora.extras import require
from qat_lora.files.checksums import seal
from qat_lora.files.finite import check_finite
from qat_lora.layers.convert import block_of, linear_layers, lora_layers, quant_layers
from qat_lora.layers.experts import has_split_experts, siblings_of
from qat_lora.layers.lora import of_one_input
from qat_lora.layers.quant_linear import QuantLinear
from qat_lora.models.adapter import CONFIG
from qat_lora.models.copies import GENERATION, copy_files
from qat_lora.models.load import CausalLM
from qat_lora.models.multimodal import sees
from qat_lora.quant.codes import first_value, unpack
from qat_lora.quant.spec import QuantSpec

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
    for name, layer in packable(module, lm_head=False).items():  # its readers leave the output head dense
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
    layers = {"config_groups": groups, "ignore": ignore}
    config = schema.QuantizationConfig(format=form, quantization_status="compressed", **layers)
    # transformers reads packed experts in one way alone, which it does not choose by itself; vLLM ignores the word.
    return json.loads(config.model_dump_json()) | ({"dequantize": True} if has_split_experts(module) else {})


def container_notes(module: Any, found: dict[str, Integers]) -> list[str]:
    """Return what a user must know about the folder: what it holds and where it loads."""
    lines = ["checked with transformers, and with 4 bits in vLLM on a CPU", *fused_notes(module, found)]
    if quant_layers(module).keys() - found.keys():
        lines.append("the quantised output head is written dense: this container packs linear layers inside the model")
    if odd := sorted({integers.bits for integers in found.values()} - set(PORTABLE)):
        version = require("compressed_tensors", "export").__version__
        remedy = "other versions may read them wrongly, and --container-bits 4 packs them as all versions do"
        lines.append(f"{'/'.join(map(str, odd))}-bit codes are packed as compressed-tensors {version} does; {remedy}")
    return lines


def fused_notes(module: Any, found: dict[str, Integers]) -> list[str]:
    """Return what to know where layers, packed or dense, differ that vLLM makes one of."""
    forms = dict.fromkeys(name for name, _ in linear_layers(module))
    forms |= {name: (integers.bits, integers.group_size) for name, integers in found.items()}
    differ = [names for names in of_one_input(forms) if len({forms[name] for name in names}) > 1]
    return [f"vLLM does not load it, since {', '.join(differ[0])} differ: quantise with --for vllm"] if differ else []


def plan_gptq(job: ExportJob) -> ExportPlan:
    """Return what writes a student's base in GPTQ's layout and, beside it, its adapter; raises as `to_gptq`."""
    module = job.student.model.module
    found = to_gptq(module)
    config = gptq_config(module, found)
    entries = {"quantization_config": config}
    write = with_adapter(job, lambda out: save_packed(module, found, gptq_tensors, out, job.dtype, lambda _: entries))
    notes = ["checked on a CPU with GPTQModel, and with 4 bits in vLLM", *fused_notes(module, found)]
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
    for name, layer in packable(module, "gptq", lm_head=False).items():
        needed, group = needed_bits(layer.spec), containers.cut_group(layer, containers.GROUPS)
        if needed is None or group is None or layer.out_features % WORD:
            what = f"{layer.spec.code} codes, {layer.in_features} inputs, {layer.out_features} outputs"
            held = f"integer and half codes, groups of 128, 64 and 32 inputs, outputs in multiples of {WORD}"
            raise ModelError(f"form: gptq does not hold {name} exactly ({what}); it holds {held}; use gguf or mlx")
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


MLX_WIDTHS = (2, 3, 4, 5, 6, 8)
MLX_TABLES: dict[float | None, int] = {4.5: 4, 6.0: 6, 8.0: 8}
"""Bits of a code of the embedding by `embedding_bits`, of which half a bit goes into step and bias."""
MLX_TABLE_GROUPS = (64, 32)
MLX_ADAPTERS = "adapters"


def plan_mlx(job: ExportJob) -> ExportPlan:
    """Return what writes a student's base for MLX and, in `adapters/`, its adapter; raises as `to_mlx`, `to_tables`."""
    model = job.student.model
    found, tables = to_mlx(model.module), to_tables(job)
    whole = {**found, **tables}

    def write(out: Path) -> None:
        # Vectors outside of all blocks, the norm before the LM head, are float32.
        last = ((name, p) for name, p in model.module.named_parameters() if p.ndim == 1 and block_of(name) is None)
        own = {name: p.detach().cpu().float() for name, p in last}
        save_packed(model.module, whole, mlx_tensors, out, job.dtype, mlx_config, own)
        copy_files(model.folder, out, GENERATION)
        if lora_layers(model.module):
            (out / MLX_ADAPTERS).mkdir()
            save_mlx_adapters(model, out / MLX_ADAPTERS)

    notes = ["checked with mlx-lm on a CPU; not run on Apple hardware"]
    if dense := [name for name, integers in found.items() if integers is None]:
        why = f"{containers.REFIT_GROUP} does not divide their inputs"
        notes.append(f"{len(dense)} quantised layers are stored dense: {why}")
    return ExportPlan(write, found, tuple(notes), tables)


def to_mlx(module: Any) -> dict[str, Integers | None]:
    """Return every quantised layer as MLX holds it, None where no group divides its row; ModelError: there is none."""
    return {name: _mlx_layer(layer) for name, layer in packable(module, "mlx").items()}


def _mlx_layer(layer: QuantLinear) -> Integers | None:
    spec, size = layer.spec, layer.in_features
    group = containers.cut_group(layer, containers.GROUPS)
    if group and spec.bits in MLX_WIDTHS and spec.sharing != "lowrank" and first_value(spec) is not None:
        codes_OI = unpack(layer.codes, spec.bits, size)
        return containers.affine(codes_OI, spec, layer.meaning(), group).measured(layer.weight)
    if size % containers.REFIT_GROUP:
        return None
    least = max(containers.REFIT_BITS, spec.bits)
    found = containers.rounded(layer, next(width for width in MLX_WIDTHS if width >= least))  # codes from 0: exact
    return replace(found, codes_OI=found.from_zero(), biases_OG=-(2 ** (found.bits - 1)) * found.steps_OG)


def to_tables(job: ExportJob) -> dict[str, Integers]:
    """Return embedding and LM head without codes, by name, in `embedding_bits`; ConfigError: no group divides one."""
    module, found = job.student.model.module, {}
    for name, table in containers.dense_tables(module).items() if job.embedding_bits in MLX_TABLES else ():
        weight = table.weight.detach()
        group = next((size for size in MLX_TABLE_GROUPS if weight.shape[1] % size == 0), None)
        if group is None:
            fault = f"groups of {MLX_TABLE_GROUPS[-1]} do not divide the width {weight.shape[1]}"
            raise ConfigError(f"embedding_bits: {fault}; give 16")
        spec = QuantSpec(bits=MLX_TABLES[job.embedding_bits], code="asymmetric", sharing="group", group_size=group)
        is_head = table.weight is module.get_output_embeddings().weight
        importance = job.importance() if job.importance and is_head else None
        quantised = containers.quantized_table(weight, spec, importance, job.quiet)
        found[name] = containers.affine(quantised.codes_OI, spec, quantised.meaning(spec), group).measured(weight)
    return found


def mlx_tensors(integers: Integers) -> dict[str, Tensor]:
    """Return a layer's tensors by MLX's names."""
    assert integers.biases_OG is not None
    return {
        "weight": containers.words(integers.codes_OI, integers.bits).view(torch.uint32),
        "scales": integers.steps_OG.half(),
        "biases": integers.biases_OG.half(),
    }


def mlx_config(packed: dict[str, Integers]) -> dict[str, Any]:
    """Return what mlx-lm asks of config.json, under both names that it writes: one form first, then each by name."""
    forms = {name: {"group_size": x.group_size, "bits": x.bits, "mode": "affine"} for name, x in packed.items()}
    return dict.fromkeys(("quantization", "quantization_config"), {**next(iter(forms.values()), {}), **forms})


def save_mlx_adapters(model: CausalLM, out: Path) -> None:
    """Write an adapter as mlx-lm trains them: float16 [I, r] and [r, O]; blocks without one get zeros from it."""
    layers = lora_layers(model.module)
    rank, scale = max((layer.lora_A.shape[0], layer.scaling) for layer in layers.values())  # all have one scale
    factors = {}
    for name, layer in layers.items():
        factors[f"{name}.lora_a"] = layer.lora_A.detach().cpu().half().T.contiguous()
        factors[f"{name}.lora_b"] = layer.lora_B.detach().cpu().half().T.contiguous()
    keys = {name.removeprefix(f"{block_of(name)}.") for name in layers}
    parameters = {"rank": rank, "scale": scale, "dropout": 0.0, "keys": sorted(keys)}
    settings = {"fine_tune_type": "lora", "num_layers": model.config.num_hidden_layers, "lora_parameters": parameters}
    check_finite(factors, f"adapter for {out}")
    save_file(factors, out / "adapters.safetensors", metadata={"format": "mlx"})
    (out / CONFIG).write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    seal(out)
