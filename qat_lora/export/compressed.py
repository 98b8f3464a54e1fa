"""The packed base in the format of vLLM and transformers: `compressed-tensors`, pack-quantized.

The library's own `compress` quantises a dense weight, which would round our codes a second time. So tensors are written
here one by one, with its packing function and its config schema: it reads back what is written. (`models/load.py` has
our reader.)

Widths are chosen among 2, 4 and 8 bits unless the user names one: those do not cross a 32-bit word, and every
version of the library packs them alike. The layout of 3 bits changed (ten codes to a word up to 0.15, no gaps in
0.20), so a 3-bit folder loads only with a version that packs as the one that wrote it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from qat_lora.errors import ModelError
from qat_lora.export.forms import ExportJob, ExportPlan
from qat_lora.export.integers import Integers, as_integers, needed_bits, other_tensors
from qat_lora.export.merged import LOAD_TOKENIZER
from qat_lora.export.pair import save_adapter_copy
from qat_lora.extras import require
from qat_lora.files.checksums import checkpoint_sha256
from qat_lora.files.finite import check_finite
from qat_lora.layers.convert import LM_HEAD, linear_layers, quant_layers, tied_embedding
from qat_lora.models.load import DTYPES, GENERATION, copy_files

PORTABLE = (2, 4, 8)  # widths that every version of compressed-tensors packs alike
REFIT_BITS = 4


def plan(job: ExportJob) -> ExportPlan:
    """Return what writes a student's packed base and, beside it, its adapter.

    Raises:
        ModelError: the model has no quantised layer.
        ConfigError: `container_bits` is too small for exact codes.
    """
    model, adapter = job.student.model, job.adapter
    found = to_integers(model.module, job.container_bits)

    def write(out: Path) -> None:
        save_compressed(model.module, found, out, job.dtype)
        copy_files(model.folder, out, GENERATION)
        if adapter is not None:
            (out / "adapter").mkdir()
            save_adapter_copy(adapter, out / "adapter", "..", checkpoint_sha256(out))

    return ExportPlan(write, found, tuple(container_notes(model.module, found)))


def usage(adapter: bool) -> str:
    """Return the Python that loads the export."""
    if not adapter:
        return LOAD_TOKENIZER + 'model = AutoModelForCausalLM.from_pretrained(".")'
    return f"""\
from peft import PeftModel
{LOAD_TOKENIZER}base = AutoModelForCausalLM.from_pretrained(".")
base(tokenizer("any", return_tensors="pt").input_ids)  # the first forward unpacks the weights, which PEFT asks for
model = PeftModel.from_pretrained(base, "adapter")"""


def to_integers(module: Any, container_bits: int | None) -> dict[str, Integers]:
    """Return every quantised layer as integers, of the least portable width that is exact (4 where none is).

    Raises:
        ModelError: the model has no quantised layer.
        ConfigError: the user's `container_bits` are too few for exact codes.
    """
    layers = quant_layers(module)
    if not layers:
        raise ModelError("model: has no quantised layer to pack; quantise it first with `qat-lora quantize`")
    found = {}
    for name, layer in layers.items():
        if LM_HEAD.search(name):
            continue  # its readers leave the output head dense
        needed = needed_bits(layer.spec) or REFIT_BITS
        bits = container_bits or next(width for width in PORTABLE if width >= needed)
        found[name] = as_integers(layer, bits)
    return found


def save_compressed(module: Any, found: dict[str, Integers], out: Path, dtype: str) -> None:
    """Write config and tensors of a model without its adapter: layers in `found` packed, all others in `dtype`.

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
    """Return the library's own dump of its schema, one group of layers for each pair of bits and group size."""
    schema = require("compressed_tensors.quantization", "export")
    forms: dict[tuple[int, int | None], list[str]] = {}
    for name, integers in found.items():
        whole_row = integers.steps_OG.shape[1] == 1
        forms.setdefault((integers.bits, None if whole_row else integers.group_size), []).append(name)
    groups, form = {}, "pack-quantized"
    for i, ((bits, group), names) in enumerate(forms.items()):
        strategy = "group" if group else "channel"
        weights = schema.QuantizationArgs(num_bits=bits, symmetric=True, group_size=group, strategy=strategy)
        targets = ["Linear"] if len(forms) == 1 else sorted(names)
        groups[f"group_{i}"] = schema.QuantizationScheme(targets=targets, weights=weights, format=form)
    ignore = ["lm_head", *sorted(name for name, _ in linear_layers(module) if name not in found)]
    config = schema.QuantizationConfig(
        config_groups=groups, format=form, quantization_status="compressed", ignore=ignore
    )
    return json.loads(config.model_dump_json())


def container_notes(module: Any, found: dict[str, Integers]) -> list[str]:
    """Return what a user must know about the folder: what it holds and where it loads."""
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
