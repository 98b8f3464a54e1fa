"""A folder for mlx-lm: packed base with scales and biases, tokenizer, and the adapter in `adapters/`.

MLX holds w = q s + b: codes q from 0, a float16 step s and a float16 bias b of every 32, 64 or 128 inputs. Integer
codes have b = -2^(bits-1) s, a float16 whenever s is: exact. The biases of half-integers and of codes with zero points
or minima are rounded to float16, a change of 2^-11 of themselves or less, which is measured with the rest. Groups of
other sizes, tables and low-rank scales are rounded again.

MLX computes in the type of the activations: float16 here, but for the norm before the LM head, which is float32 and
makes the logits so too; float16 logits are off by up to 7e-3 of the largest on a CPU. The tensors are written from
torch: mlx's own package is only for Apple and a few servers, and its `quantize` would choose steps of its own. A tied
embedding is stored once, and mlx-lm uses it as the LM head.

Source: `mlx.core.quantize` for the packing, a stream of bits in words of 32; mlx-lm's `load_adapters` for `adapters/`.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from qat_lora.errors import ConfigError
from qat_lora.export import integers as containers
from qat_lora.export.forms import ExportJob, ExportPlan
from qat_lora.export.integers import Integers
from qat_lora.files.checksums import seal
from qat_lora.files.finite import check_finite
from qat_lora.layers.convert import block_of, lora_layers
from qat_lora.layers.quant_linear import QuantLinear
from qat_lora.models.adapter import CONFIG
from qat_lora.models.copies import GENERATION, copy_files
from qat_lora.models.load import CausalLM
from qat_lora.quant.codes import first_value, unpack
from qat_lora.quant.spec import QuantSpec

WIDTHS = (2, 3, 4, 5, 6, 8)
TABLES: dict[float | None, int] = {4.5: 4, 6.0: 6, 8.0: 8}
"""Bits of a code of the embedding by `embedding_bits`, of which half a bit goes into step and bias."""
TABLE_GROUPS = (64, 32)
ADAPTERS = "adapters"


def plan(job: ExportJob) -> ExportPlan:
    """Return what writes a student's base for MLX and, in `adapters/`, its adapter; raises as `to_mlx`, `to_tables`."""
    model = job.student.model
    found, tables = to_mlx(model.module), to_tables(job)
    whole = {**found, **tables}

    def write(out: Path) -> None:
        # Vectors outside of all blocks, the norm before the LM head, are float32.
        last = ((name, p) for name, p in model.module.named_parameters() if p.ndim == 1 and block_of(name) is None)
        own = {name: p.detach().cpu().float() for name, p in last}
        containers.save_packed(model.module, whole, tensors, out, job.dtype, entries, own)
        copy_files(model.folder, out, GENERATION)
        if lora_layers(model.module):
            (out / ADAPTERS).mkdir()
            save_adapters(model, out / ADAPTERS)

    notes = ["checked with mlx-lm on a CPU; not run on Apple hardware"]
    if dense := [name for name, integers in found.items() if integers is None]:
        why = f"{containers.REFIT_GROUP} does not divide their inputs"
        notes.append(f"{len(dense)} quantised layers are stored dense: {why}")
    return ExportPlan(write, found, tuple(notes), tables)


def to_mlx(module: Any) -> dict[str, Integers | None]:
    """Return every quantised layer as MLX holds it, None where no group divides its row; ModelError: there is none."""
    return {name: _of_layer(layer) for name, layer in containers.packable(module, "mlx").items()}


def _of_layer(layer: QuantLinear) -> Integers | None:
    spec, size = layer.spec, layer.in_features
    group = containers.cut_group(layer, containers.GROUPS)
    if group and spec.bits in WIDTHS and spec.sharing != "lowrank" and first_value(spec) is not None:
        codes_OI = unpack(layer.codes, spec.bits, size)
        return containers.affine(codes_OI, spec, layer.meaning(), group).measured(layer.weight)
    if size % containers.REFIT_GROUP:
        return None
    least = max(containers.REFIT_BITS, spec.bits)
    return containers.rounded(layer, next(width for width in WIDTHS if width >= least)).with_biases()


def to_tables(job: ExportJob) -> dict[str, Integers]:
    """Return embedding and LM head without codes, by name, in `embedding_bits`; ConfigError: no group divides one."""
    module, found = job.student.model.module, {}
    for name, table in containers.dense_tables(module).items() if job.embedding_bits in TABLES else ():
        weight = table.weight.detach()
        group = next((size for size in TABLE_GROUPS if weight.shape[1] % size == 0), None)
        if group is None:
            fault = f"groups of {TABLE_GROUPS[-1]} do not divide the width {weight.shape[1]}"
            raise ConfigError(f"embedding_bits: {fault}; give 16")
        spec = QuantSpec(bits=TABLES[job.embedding_bits], code="asymmetric", sharing="group", group_size=group)
        is_head = table.weight is module.get_output_embeddings().weight
        quantised = containers.quantized_table(weight, spec, job.importance() if job.importance and is_head else None)
        found[name] = containers.affine(quantised.codes_OI, spec, quantised.meaning(spec), group).measured(weight)
    return found


def tensors(integers: Integers) -> dict[str, Tensor]:
    """Return a layer's tensors by MLX's names."""
    assert integers.biases_OG is not None
    return {
        "weight": containers.words(integers.codes_OI, integers.bits).view(torch.uint32),
        "scales": integers.steps_OG.half(),
        "biases": integers.biases_OG.half(),
    }


def entries(packed: dict[str, Integers]) -> dict[str, Any]:
    """Return what mlx-lm asks of config.json, under both names that it writes: one form first, then each by name."""
    forms = {name: {"group_size": x.group_size, "bits": x.bits, "mode": "affine"} for name, x in packed.items()}
    return dict.fromkeys(("quantization", "quantization_config"), {**next(iter(forms.values()), {}), **forms})


def save_adapters(model: CausalLM, out: Path) -> None:
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
