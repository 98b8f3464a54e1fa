"""Base, adapter and vocabulary as GGUF files for llama.cpp.

A layer goes into the smallest of GGML's types that holds its codes exactly: presets named after a type into that one,
half-integer codes of 2 bits and integers of 3 and 4 into Q4_0 (a group of 64 is two blocks with the same step), wider
ones into Q8_0. What no type holds exactly (look-up tables, low-rank scales, zero points) is rounded to Q4_0 and the
error stated, or written dense if the user asks for that. llama.cpp's own tools would choose new steps and undo part of
the recovery. (llama.cpp rounds *activations* to 8 bits on a CPU; the weights in the file are ours bit for bit.)

`gguf-merged` is base and adapter as one file: their sum in one dense type, for engines that take no adapter, and for
Ollama, whose `Modelfile` stands beside it. The sum is not quantised again, which would undo the recovery.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from qat_lora.errors import ConfigError, ModelError
from qat_lora.export import containers, gguf_model
from qat_lora.export.containers import BLOCK, SUPER, Blocks, float_blocks, other_tensors, to_blocks
from qat_lora.export.forms import ExportJob, ExportPlan, display_name
from qat_lora.export.gguf_model import architecture, gguf_name, vocabulary, write_vocabulary
from qat_lora.extras import require
from qat_lora.files.gguf_header import ADAPTER, BASE
from qat_lora.layers.convert import LM_HEAD, lora_layers, merge, quant_layers, tied_embedding
from qat_lora.layers.experts import siblings_of
from qat_lora.layers.quant_linear import QuantLinear
from qat_lora.models.from_gguf import ggml_type
from qat_lora.models.load import CausalLM, stored_dtype
from qat_lora.quant.presets import preset

TABLES = {4.5: ("q4_k", "q4_0"), 6.0: ("q6_k", "q8_0"), 8.0: ("q8_0", "q8_0")}
"""Grid of the embedding by `embedding_bits`, for widths that 256 divides and for others."""
FILE_TYPES = {
    "F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "Q2_K": 10, "Q3_K": 12, "Q4_K": 14, "Q6_K": 18, "BF16": 32, "Q2_0": 41
}  # fmt: skip
"""llama.cpp's number for a file of which most weights are of a type."""


def plan(job: ExportJob) -> ExportPlan:
    """Return what writes a student as `base.gguf`, its adapter beside it; raises as `check_model`, `table_blocks`."""
    model = job.student.model
    check_model(job)
    found = {name: to_blocks(layer, job.exact_only) for name, layer in quant_layers(model.module).items()}
    tables, name = table_blocks(job), display_name(job.name)

    def write(out: Path) -> None:
        save_base(model, {**found, **tables}, job.tokenizer, out / BASE, job.dtype, name)
        if lora_layers(model.module):
            save_lora(model, out / ADAPTER, name, bits=8)

    notes = [
        "llama.cpp rounds activations to 8 bits in its products with quantised weights on a CPU; the weights are these",
        *gguf_model.notes(model),
        *(["the adapter's factors are Q8_0 where blocks divide their rows"] if lora_layers(model.module) else []),
    ]
    if dense := [layer for layer, blocks in found.items() if blocks is None]:
        notes.append(f"{len(dense)} quantised layers are stored dense, since no block holds them")
    return ExportPlan(write, found, tuple(notes), tables)


def plan_merged(job: ExportJob) -> ExportPlan:
    """Return what writes a student as one dense GGUF file of `job.dtype`, merged in place; raises as `check_model`."""
    check_model(job)
    model = job.student.model

    def write(out: Path) -> None:
        merge(model.module)
        save_base(model, {}, job.tokenizer, out / BASE, job.dtype, display_name(job.name))
        (out / "Modelfile").write_text(f"FROM ./{BASE}\n", encoding="utf-8")

    return ExportPlan(write, notes=tuple(gguf_model.notes(model)))


def check_model(job: ExportJob) -> None:
    """Raise a ModelError for an architecture, a layer or a tokenizer that cannot be written, before anything is."""
    model = job.student.model
    architecture(model)
    for name in (*other_tensors(model.module, torch.float32), *quant_layers(model.module)):
        gguf_name(model, name.removesuffix(".weight").removesuffix(".bias"))
    vocabulary(job.tokenizer, _rows(model))


def table_blocks(job: ExportJob) -> dict[str, Blocks]:
    """Return embedding and LM head without codes on the grid of `embedding_bits`; ConfigError: no block divides one."""
    model, found = job.student.model, {}
    lm_head = model.module.get_output_embeddings()
    for name, table in containers.dense_tables(model.module).items():
        weight = table.weight.detach()
        rows, width = weight.shape
        if job.embedding_bits not in TABLES:
            dtype = "bfloat16" if stored_dtype(model.folder) == "bfloat16" else "float16"  # loaded, it is another
            found[name] = float_blocks(weight, dtype).measured(weight)
            continue
        if width % BLOCK:
            raise ConfigError(f"embedding_bits: blocks of {BLOCK} do not divide the width {width}; give 16")
        spec = preset(TABLES[job.embedding_bits][width % SUPER > 0]).spec_for(name)
        assert spec is not None
        importance = job.importance() if job.importance and table.weight is lm_head.weight else None
        linear = nn.Linear(width, rows, bias=False, device="meta")
        linear.weight = nn.Parameter(weight, requires_grad=False)
        rounded = containers.quantized_table(weight, spec, importance, job.quiet)
        held = to_blocks(QuantLinear.from_linear(linear, spec, rounded), origin_OI=weight)
        assert held is not None
        found[name] = held
    return found


def _rows(model: CausalLM) -> int:
    return int(model.module.get_input_embeddings().weight.shape[0])


def save_base(
    model: CausalLM, found: Mapping[str, Blocks | None], tokenizer: Any, file: Path, dtype: str, name: str
) -> None:
    """Write a model without adapter as GGUF: `found` as blocks, vectors float32, the rest in `dtype`; or ModelError."""
    gguf = require("gguf", "export")
    writer = gguf.GGUFWriter(file, architecture(model).name)
    gguf_model.write_settings(writer, model, _rows(model))
    write_vocabulary(writer, vocabulary(tokenizer, _rows(model)), tokenizer, name)
    weights: Counter[str] = Counter()
    for label, blocks in _joined(model, _tensors(model, found, dtype)):
        writer.add_tensor(label, blocks.data, raw_dtype=ggml_type(blocks.kind))
        weights[blocks.kind] += int(8 * blocks.data.size / blocks.bits_per_weight)
    writer.add_file_type(FILE_TYPES[weights.most_common(1)[0][0]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    _finish(writer)


def _tensors(model: CausalLM, found: Mapping[str, Blocks | None], dtype: str) -> Iterator[tuple[str, str, Blocks]]:
    """Yield what the file holds, each with its layer and its name there; the bytes of a row of blocks move as one."""
    layers, tied = quant_layers(model.module), tied_embedding(model.module)
    weights = {key.removesuffix(".weight"): t for key, t in other_tensors(model.module, torch.float32).items()}
    for name in (*weights, *layers):
        owner, bias = name.removesuffix(".bias"), name.endswith(".bias")
        # A tied matrix is one in the file: llama.cpp uses the embedding's for the head.
        label = gguf_name(model, tied if tied and LM_HEAD.search(name) else owner) + (".bias" if bias else ".weight")
        blocks = found.get(name)
        if blocks is None:
            weight = weights[name] if name in weights else layers[name].weight.detach().float().cpu()
            weight = gguf_model.as_gguf(model, name, weight)
            kind = "float32" if weight.ndim == 1 or owner.endswith(".mlp.gate") else dtype
            blocks = float_blocks(weight, kind, label)
        elif (order := gguf_model.row_order(model, name)) is not None:
            blocks = replace(blocks, data=blocks.data[order.numpy()])
        yield owner, label, blocks
    for label, tensor in gguf_model.own_tensors(model):
        yield "", label, float_blocks(tensor, "float32", label)


def _joined(model: CausalLM, tensors: Iterable[tuple[str, str, Blocks]]) -> Iterator[tuple[str, Blocks]]:
    """Yield blocks by name, a mixture's as one; ModelError: of several types, or of some of its experts alone."""
    stacks: dict[str, list[Blocks]] = {}
    for layer, label, blocks in tensors:
        if (stack := siblings_of(layer)) is None:
            yield label, blocks
            continue
        stacks.setdefault(label, []).append(blocks)
        if len(stacks[label]) == len(model.module.get_submodule(stack[0])):
            experts = stacks.pop(label)
            if len(kinds := {blocks.kind for blocks in experts}) > 1:
                of = ", ".join(sorted(kinds))
                raise ModelError(f"form: gguf holds the experts of {label} in one type, not in {of}; store them alike")
            yield label, replace(blocks, data=np.stack([blocks.data for blocks in experts]))
    if stacks:
        raise ModelError(f"form: a GGUF adapter is for all experts of a layer or none, not for some of {min(stacks)}")


def save_lora(model: CausalLM, file: Path, name: str, bits: int = 16) -> None:
    """Write an adapter for llama.cpp's `--lora` in float16, with 8 `bits` Q8_0 where blocks fit; or ModelError."""
    gguf = require("gguf", "export")
    layers = lora_layers(model.module)
    writer = gguf.GGUFWriter(file, architecture(model).name)
    writer.add_type("adapter")
    writer.add_name(name)
    writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
    # One alpha for the file, over the rank of each layer; 0 stands for no scaling, which B then has.
    alphas = {layer.scaling * layer.lora_A.shape[0] for layer in layers.values()}
    alpha = alphas.pop() if len(alphas) == 1 else 0.0
    writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, float(alpha))

    def factors() -> Iterator[tuple[str, str, Blocks]]:
        for name, layer in layers.items():
            order, label = gguf_model.row_order(model, name), gguf_name(model, name)
            a, b = layer.lora_A.detach().cpu(), layer.lora_B.detach().cpu() * (1.0 if alpha else layer.scaling)
            for end, factor in (("a", a), ("b", b if order is None else b[order])):
                blocks = float_blocks(factor, "float16", f"{name}.lora_{end.upper()}")
                if bits == 8 and factor.shape[1] % BLOCK == 0:
                    blocks = Blocks("Q8_0", gguf.quantize(factor.float().numpy(), ggml_type("Q8_0")))
                yield name, f"{label}.weight.lora_{end}", blocks

    for label, blocks in _joined(model, factors()):
        writer.add_tensor(label, blocks.data, raw_dtype=ggml_type(blocks.kind))
    _finish(writer)


def _finish(writer: Any) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
