"""What `recover` and `qat` train: checked against the student, and put into its training state.

A run and its `--dry-run` call the same functions, one on real tensors, the other on torch's meta device, so what a plan
says of a run is what the run does.
"""

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import nn

from qat_lora.cache.format.records import Fingerprint
from qat_lora.errors import ConfigError, ModelError
from qat_lora.files.checksums import checkpoint_sha256
from qat_lora.layers import convert
from qat_lora.layers.quant_linear import QuantLinear
from qat_lora.models.adapter import allocated_ranks, joint_ranks, ranks_text
from qat_lora.models.load import DTYPES, CausalLM
from qat_lora.options import QatOptions
from qat_lora.quant.presets import Preset, preset


def chosen_preset(options: QatOptions) -> Preset:
    """Return how a student that is to be made is stored; the guide's way where no preset is given."""
    return preset(options.preset or "q4_r32", options.keep, options.override, options.quantize_head)


def check_parts(options: QatOptions, full: CausalLM | None, student: CausalLM | None) -> None:
    """Raise ConfigError for what cannot be trained, ModelError for a full model that the student was not made of."""
    first = student or full
    assert first is not None  # `--from-scratch` requires the full model
    module, layers = first.module, convert.quant_layers(first.module)
    specs = {name: layer.spec for name, layer in layers.items()}
    if student is None:
        if layers:
            raise ConfigError(f"model: {options.model} is quantised already; give it as --checkpoint")
        specs = convert.check_reach(module, chosen_preset(options))
    elif not layers:
        raise ConfigError(f"checkpoint: {options.checkpoint} has no quantised layers; give --from-scratch --model")
    if full is not None and student is not None:
        check_twin(student, full)
    parts, codes = set(options.train_parts), {spec.code for spec in specs.values()}
    if "lut" in parts and "lut" not in codes:
        raise ConfigError("train_parts: lut: no layer has a look-up table; choose a preset with one, such as q4_r32")
    if "ranges" in parts and "asymmetric" not in codes:
        raise ConfigError("train_parts: ranges: no layer has zero points; choose a preset with them, such as w4g64a")
    if "minimum" in codes and ("weights" in parts or options.mergeable or options.blockwise.blockwise_steps):
        raise ConfigError(
            "train_parts: codes of q2_k and q4_k do not train, only their scales; leave out weights, --mergeable and "
            "--blockwise-steps, or quantise with q3_k, q2_0 or q4_0"
        )
    if options.run.dtype != "float32" and parts & {"norms", "embeddings", "head"}:
        lose = "norms, embeddings and head lose small updates in bfloat16"
        raise ConfigError(f"train_parts: {lose}; give --dtype float32 --autocast")
    if "embeddings" in parts and convert.tied_embedding(module) is not None:
        raise ConfigError("train_parts: the embedding is the quantised head in this model; leave out embeddings")
    lm_head = module.get_output_embeddings()
    if "head" in parts and isinstance(lm_head, QuantLinear):
        instead = "scales, lut and weights train it; leave out head"
        raise ConfigError(f"train_parts: the head is quantised in this model, so {instead}")
    if "head" in parts and lm_head.weight is module.get_input_embeddings().weight:
        raise ConfigError("train_parts: the head is the embedding in this model; give embeddings, which trains both")


def check_twin(student: CausalLM, full: CausalLM) -> None:
    """Raise ModelError where a model is not the full-precision twin of a quantised student, layer by layer."""
    dense, quantised = dense_layers(full), convert.quant_layers(full.module)
    for name, layer in convert.quant_layers(student.module).items():
        shape = (layer.out_features, layer.in_features)
        if name not in dense or tuple(dense[name].weight.shape) != shape or name in quantised:
            raise ModelError(f"model: {full.folder} has no full-precision {name} of shape {shape}, as --checkpoint")
    theirs, ours = (model.config.num_hidden_layers for model in (full, student))
    if theirs != ours:
        raise ModelError(f"model: {full.folder} has {theirs} decoder layers, --checkpoint {ours}; give its original")


def check_is_student(model: CausalLM, name: str, held: Fingerprint) -> None:
    """Raise ConfigError for a student that is the teacher of its cache, its weights not quantised by us."""
    if convert.quant_layers(model.module):
        return
    if checkpoint_sha256(model.folder) == held.teacher_sha256:
        same = f"{name} is the cache's teacher itself, so there is nothing to recover"
        remedy = f"quantise it (qat-lora quantize --model {name}), then give that folder"
        raise ConfigError(f"checkpoint: {same}; {remedy} as --checkpoint")


def joint_warnings(folder: Path, given: Mapping[str, int], from_start: bool) -> list[str]:
    """Return warnings, a line each, where codes were chosen beside another adapter than a run gives.

    `given` are the ranks of the run's adapters by layer; `from_start`: they begin at the checkpoint's starts.
    """
    wanted = joint_ranks(folder)
    if not wanted:
        return []
    beside = f"warning: codes were chosen for {ranks_text(wanted.values())}"
    bare = [name for name in wanted if name not in given]
    lower = [given[name] for name, rank in wanted.items() if given.get(name, rank) < rank]
    found = []
    if not from_start:
        zero = "the adapter starts at zero; leave out --start zero"
        found.append(f"{beside}, and {zero}, or quantize --joint-rank 0")
    if bare:
        layers = f"{len(bare)} of {len(wanted)} layers, such as {bare[0]}, have no adapter"
        found.append(f"{beside}, and {layers}; give them one, or quantize --joint-rank 0")
    if lower and allocated_ranks(folder) is not None:
        found.append(f"{beside}; leave out --recovery-r, which gives less")
    elif lower:
        found.append(f"{beside}; quantize --joint-rank {max(lower)} ends at a lower KL")
    return found


def check_scales(model: CausalLM, train_scales: bool) -> None:
    """Raise ConfigError where a student's scales are to train and it has none."""
    if train_scales and not convert.quant_layers(model.module):
        made = "an unquantised student, and codes that other engines' files hold, have none of ours to train"
        raise ConfigError(f"train_scales: the student has no quantised layers ({made}); leave it out")


def recovery_parts(
    model: CausalLM, train_scales: bool, train_norms: bool, dtype: torch.dtype, inside: str = ""
) -> dict[str, dict[str, nn.Parameter]]:
    """Put a student with an adapter into its training state, a frozen base in `dtype`; return what trains, by kind.

    With the name of a decoder layer as `inside`, only what is in it trains, and only its base is formed.
    """
    part, prefix = model.module.get_submodule(inside), f"{inside}." if inside else ""
    model.module.requires_grad_(False)
    factors: dict[str, nn.Parameter] = {}
    for name, adapter in convert.lora_layers(part).items():
        factors |= {f"{prefix}{name}.lora_A": adapter.lora_A, f"{prefix}{name}.lora_B": adapter.lora_B}
    scales = {prefix + name: scale for name, scale in convert.prepare_base(part, train_scales, dtype).items()}
    norms = model.norms() if train_norms else {}
    for trained in (*factors.values(), *norms.values()):
        trained.requires_grad_(True)
    model.module.train()
    return {"adapter": factors, **convert.scales_by_kind(model.module, scales), "norms": norms}


def trained_parts(model: CausalLM, options: QatOptions, full: CausalLM | None) -> dict[str, dict[str, nn.Parameter]]:
    """Put the student into its training state and return what trains, by kind."""
    parts, rank = set(options.train_parts), options.mergeable_r if options.mergeable else 0
    dense = {} if full is None else dense_layers(full)
    groups: dict[str, dict[str, nn.Parameter]] = {kind: {} for kind in ("adapter", "weights", "scales", "lut")}
    module, frozen_dtype = model.module, torch.bfloat16 if options.loop.autocast else DTYPES[options.run.dtype]
    for name, layer in convert.quant_layers(module).items():
        if "weights" in parts or rank:
            weight = dense[name].weight.detach() if dense else None
            latent = layer.train_weight(weight, rank, gradient=options.weight_gradient)
            groups["adapter" if rank else "weights"] |= {f"{name}.{k}": p for k, p in latent.trained().items()}
        if "lut" in parts and layer.spec.code == "lut":
            layer.train_table()
            groups["lut"][f"{name}.values"] = layer.values
        if "ranges" in parts and layer.spec.code == "asymmetric":
            groups["scales"] |= {f"{name}.range.{end}": p for end, p in layer.train_range().named_parameters()}
        elif "scales" in parts:
            layer.train_scales()
            groups["scales"] |= {f"{name}.{part}": scale for part, scale in layer.named_scales().items()}
        if not any(parameter.requires_grad for parameter in layer.parameters()):
            layer.hold_dense(frozen_dtype)
    groups |= convert.scales_by_kind(module, groups["scales"])
    groups["norms"] = model.norms() if "norms" in parts else {}
    ends = {"embeddings": module.get_input_embeddings(), "head": module.get_output_embeddings()}
    chosen = {id(parameter) for part in parts & set(ends) for parameter in ends[part].parameters()}
    groups["weights"] |= {name: p for name, p in module.named_parameters() if id(p) in chosen}
    for parameter in (*groups["norms"].values(), *groups["weights"].values()):
        parameter.requires_grad_(True)
    module.train()
    return {kind: tensors for kind, tensors in groups.items() if tensors}


def dense_layers(full: CausalLM) -> dict[str, nn.Linear]:
    """Return the linear layers of the full-precision model by name, with its output head."""
    return {name: layer for heads in (False, True) for name, layer in convert.linear_layers(full.module, heads)}
