"""Convert a whole model: linear layers to quantised ones, adapters onto them, and both back to dense.

A preset reaches every `nn.Linear` whose name its rules match, and the LM head only where it has a spec for it; an LM
head that is tied to the embedding, as in most small models, takes the embedding along (`TiedEmbedding`). A command
scans the model once (`check_reach`) and hands the targets on. A rule or pattern that reaches nothing raises: an
adapter that silently sits nowhere is the worst failure a recovery tool can have.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from qat_lora.errors import ConfigError, ModelError
from qat_lora.layers.experts import is_router
from qat_lora.layers.lora import Factors, LoraConfig, LoraLinear, share_inputs
from qat_lora.layers.quant_linear import QuantLinear, TiedEmbedding, dense_linear, embedding_of, join_dense
from qat_lora.quant.presets import MLP, Preset, checked_pattern
from qat_lora.quant.spec import QuantSpec

LM_HEAD = re.compile(r"(^|\.)(lm_head|embed_out|output)$")
MOST_LEFT = 0.05
"""Share of the blocks' weights that may stay unquantised without `--keep`, and with it without a warning: at 16 bits
they add 0.7 bits to each weight of a 2-bit model, a third. Routers and short convolutions are 1 % or less."""
BLOCK_NAME = re.compile(r"^(?:[^.\d]\w*\.)*?\d+(?=\.)")


def block_of(name: str) -> str | None:
    """Return the name of the decoder block that a layer belongs to, None for one outside of all blocks."""
    match = BLOCK_NAME.match(name)
    return match and match.group()


def linear_layers(model: nn.Module, lm_head: bool = False) -> Iterator[tuple[str, nn.Linear]]:
    """Yield linear layers by name, without those inside adapters, or else the LM head; ModelError: GPT-2's `Conv1D`."""
    for name, module in model.named_modules():
        if type(module).__name__ == "Conv1D":
            why = "which PEFT and the exporters store transposed; quantising this family is not supported"
            raise ModelError(f"model: {name} is a GPT-2 style Conv1D, {why}. Use a Qwen, Llama or Gemma style model")
        if isinstance(module, nn.Linear) and bool(LM_HEAD.search(name)) == lm_head:
            yield name.removesuffix(".base"), module


def quantize_targets(model: nn.Module, preset: Preset) -> dict[str, QuantSpec]:
    """Return a preset's layers with their specs, in the model's order; ConfigError: a rule that reaches no layer."""
    layers = [name for name, module in linear_layers(model) if not isinstance(module, QuantLinear)]
    layers = [name for name in layers if not is_router(model, name)]
    for pattern, spec in preset.rules:
        names = layers if spec is not None else [*layers, *_matrices(model)]  # what is kept need not be linear
        if not any(re.search(pattern, name) for name in names):
            raise ConfigError(f"{preset.name}: {pattern!r} matches no linear layer; there are: {_some(layers)}")
    targets = {name: spec for name in layers if (spec := preset.spec_for(name)) is not None}
    if preset.lm_head is not None:
        names = [name for name, _ in linear_layers(model, lm_head=True)]
        if len(names) != 1:
            raise ConfigError(f"quantize_head: the model has no single output head; found: {_some(names)}")
        targets[names[0]] = preset.lm_head
    for name, spec in targets.items():
        spec.check_width(name, model.get_submodule(name).get_parameter("weight").shape[1])
    return targets


def _matrices(model: nn.Module) -> dict[str, int]:
    """Return the size of every parameter of two or more dimensions in a decoder block."""
    found = {name.removesuffix(".weight"): p for name, p in model.named_parameters() if block_of(name)}
    return {name: parameter.numel() for name, parameter in found.items() if parameter.dim() > 1}


def check_reach(model: nn.Module, preset: Preset) -> dict[str, QuantSpec]:
    """Return `quantize_targets`; refuse a model of which they are only a part, unless `--keep` asked for that.

    ModelError: more than `MOST_LEFT` of the weights of its blocks would stay as they are, as experts do that are
        stacked in a form that `split_experts` does not know.
    ConfigError: what `quantize_targets` refuses.
    """
    targets, matrices = quantize_targets(model, preset), _matrices(model)
    left = {name: size for name, size in matrices.items() if name not in targets and _kept_by(preset, name) is None}
    share = sum(left.values()) / max(1, sum(matrices.values()))
    if share > MOST_LEFT:
        largest = max(left, key=lambda name: left[name])
        inside = largest.removeprefix(f"{block_of(largest)}.")
        raise ModelError(
            f"model: {share:.0%} of the weights of its decoder blocks ({len(left)} tensors such as {largest}) lie in "
            f"no linear layer that {preset.name} reaches and would stay unquantised; experts that are stacked in "
            f"this form are not supported. To leave them so, give --keep '{inside.rpartition('.')[0] or inside}'"
        )
    return targets


def _kept_by(preset: Preset, name: str) -> str | None:
    """Return the first pattern that keeps a layer as it is."""
    return next((pattern for pattern, spec in preset.rules if spec is None and re.search(pattern, name)), None)


def reach_of(model: nn.Module, preset: Preset, targets: Mapping[str, QuantSpec]) -> tuple[float, str]:
    """Return the share of blocks' weights that `targets` are, and a line; a warning where over `MOST_LEFT` is not."""
    matrices, reasons = _matrices(model), dict[str, list[str]]()
    for name in matrices.keys() - targets.keys():
        kept = _kept_by(preset, name)
        plain = "it is a router" if is_router(model, name) else f"{preset.name} reaches no such layer"
        reasons.setdefault(plain if kept is None else f"--keep {kept!r}", []).append(name)
    every = max(1, sum(matrices.values()))
    sizes = {why: sum(matrices[name] for name in names) / every for why, names in reasons.items()}
    share = 1 - sum(sizes.values())
    line = f"{share:.1%} of the linear and expert weights of the blocks are quantised"
    if share >= 1 - MOST_LEFT:
        return share, line
    by_size = sorted(reasons, key=lambda why: -sizes[why])
    left = "; ".join(f"{sizes[w]:.1%} in {len(reasons[w])} such as {min(reasons[w])} ({w})" for w in by_size)
    return share, f"warning: only {line}; left as they are: {left}"


def _some(names: list[str]) -> str:
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") or "none"


def make_quant_skeleton(model: nn.Module, preset: Preset) -> None:
    """Replace the linear layers that a preset quantises by empty quantised ones, to be filled from a checkpoint."""
    for name, spec in quantize_targets(model, preset).items():
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        layer = QuantLinear.from_stored(linear, spec, {})
        model.set_submodule(name, layer)
        if preset.tied and LM_HEAD.search(name):
            (table,) = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
            TiedEmbedding.put(model, table, layer)


def put_quantized(model: nn.Module, name: str, layer: QuantLinear) -> None:
    """Replace a linear layer, and the embedding tied to it; ConfigError: that one cannot look its rows up in codes."""
    linear = model.get_submodule(name)
    assert isinstance(linear, nn.Linear)
    table = embedding_of(model, linear) if LM_HEAD.search(name) else None
    model.set_submodule(name, layer)
    if table is not None:
        TiedEmbedding.put(model, table, layer)


def tied_embedding(model: nn.Module) -> str | None:
    """Return the name of the embedding that looks its rows up in the quantised LM head, None where there is none."""
    return next((name for name, module in model.named_modules() if isinstance(module, TiedEmbedding)), None)


def quant_layers(model: nn.Module) -> dict[str, QuantLinear]:
    """Return the quantised layers by the name they have without adapters."""
    return {name.removesuffix(".base"): m for name, m in model.named_modules() if isinstance(m, QuantLinear)}


def lora_layers(model: nn.Module) -> dict[str, LoraLinear]:
    """Return the adapter layers by name."""
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def add_lora(
    model: nn.Module, config: LoraConfig, start: dict[str, Factors] | None = None, ranks: dict[str, int] | None = None
) -> dict[str, LoraLinear]:
    """Put an adapter on every target layer, quantised or not, freeze everything else, and return the adapters.

    Without a `start` a layer has no correction. `ranks`: the only layers with adapters; all scale by alpha / rank.

    ConfigError: the target pattern matches nothing, or is no regular expression; a rank beyond a layer's size.
    ModelError: the model has adapters already, or lacks a layer that a start is for.
    """
    if lora_layers(model):
        raise ModelError("model: has recovery adapters already; load the base without them")
    pattern = checked_pattern("lora_targets", config.lora_targets or (MLP if config.mlp_only else "."))
    layers = {name: layer for name, layer in linear_layers(model) if not is_router(model, name)}
    given = dict.fromkeys(layers, config.rank) if ranks is None else ranks
    targets = {name: given[name] for name in layers if re.search(pattern, name) and name in given}
    if not targets:
        no_rank = "its target size left no layer an adapter, so give --recovery-r for one beyond it"
        why = no_rank if ranks == {} else f"{pattern!r} matches no linear layer"
        raise ConfigError(f"lora_targets: {why}; there are: {_some(list(layers))}")
    unknown = sorted(set(start or {}) - set(layers))
    if unknown:
        raise ModelError(f"start: holds corrections for layers that the model lacks: {_some(unknown)}")
    for name, rank in targets.items():
        most = min(layers[name].in_features, layers[name].out_features)
        if rank > most:
            sizes = f"{layers[name].in_features} inputs, {layers[name].out_features} outputs"
            remedy = f"give {most} or less, or choose other --lora-targets"
            raise ConfigError(f"recovery_r: {rank} is more than {name} can have ({sizes}); {remedy}")
    model.requires_grad_(False)
    for name, rank in targets.items():
        layer = LoraLinear(layers[name], rank, config.alpha * (rank / config.rank), config.dropout)
        if start and name in start:
            layer.start_from(start[name])
        model.set_submodule(name, layer)
    adapters = lora_layers(model)
    share_inputs(adapters)
    return adapters


def merge(model: nn.Module) -> nn.Module:
    """Fold adapters and codes into ordinary dense linear layers, in place; exact up to float rounding."""
    for name, adapter in list(lora_layers(model).items()):
        model.set_submodule(name, dense_linear(adapter.base, adapter.delta().detach()))
    table = tied_embedding(model)
    for name, layer in list(quant_layers(model).items()):
        dense = dense_linear(layer)
        model.set_submodule(name, dense)
        if table is not None and LM_HEAD.search(name):
            model.set_submodule(table, nn.Embedding.from_pretrained(dense.weight.detach().clone()))
    return model


def prepare_base(model: nn.Module, train_scales: bool, dtype: torch.dtype | None = None) -> dict[str, nn.Parameter]:
    """Let the scales of every quantised layer train, and return them; or else form each weight once, in `dtype`."""
    trained: dict[str, nn.Parameter] = {}
    for name, layer in quant_layers(model).items():
        if train_scales:
            layer.train_scales()
            trained |= {f"{name}.{part}": scale for part, scale in layer.named_scales().items()}
        else:
            layer.hold_dense(dtype)
    for shared in dict.fromkeys(adapter.shared for adapter in lora_layers(model).values() if adapter.shared):
        join_dense([member.base for member in shared.members])
    return trained


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the quantised layers' tensors as they will be on disk, by their names there."""
    layers = quant_layers(model).items()
    return {f"{name}.{part}": tensor for name, layer in layers for part, tensor in layer.stored().items()}


def scales_by_kind(model: nn.Module, scales: Mapping[str, nn.Parameter]) -> dict[str, dict[str, nn.Parameter]]:
    """Return scales that train, by layer name and part, with those of K-quants as a kind of their own."""
    stepped = {name for name, layer in quant_layers(model).items() if layer.spec.step_bits}
    blocks = {name: scale for name, scale in scales.items() if name.rpartition(".")[0] in stepped}
    return {"scales": {n: s for n, s in scales.items() if n not in blocks}, "block_scales": blocks}


def bits_per_weight(model: nn.Module) -> dict[str, float]:
    """Return stored bits per weight: `base`, `with_adapter` (float16 factors) and `model`.

    The first two count quantised layers only, `model` all but adapters in the types that they have, tied tensors once.
    """
    layers = quant_layers(model)
    if not layers:
        raise ModelError("model: has no quantised layer, so bits per weight mean nothing")
    weights = sum(layer.in_features * layer.out_features for layer in layers.values())
    base = sum(layer.stored_bits for layer in layers.values())
    adapter = sum(16 * p.numel() for a in lora_layers(model).values() for p in (a.lora_A, a.lora_B))
    return {
        "base": base / weights,
        "with_adapter": (base + adapter) / weights,
        "model": (base + sum(8 * p.nbytes for p in _dense_parameters(model))) / weight_count(model),
    }


def weight_count(model: nn.Module) -> int:
    """Return how many weights a model has, embeddings included and adapters not, tied ones once."""
    quantised = sum(layer.in_features * layer.out_features for layer in quant_layers(model).values())
    return quantised + sum(p.numel() for p in _dense_parameters(model))


def _dense_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that belong neither to an adapter nor to codes."""
    inside = {id(p) for adapter in lora_layers(model).values() for p in (adapter.lora_A, adapter.lora_B)}
    inside |= {id(p) for layer in quant_layers(model).values() for n, p in layer.named_parameters() if n != "bias"}
    return [p for p in model.parameters() if id(p) not in inside]


def rule_bits(model: nn.Module, preset: Preset) -> list[dict[str, Any]]:
    """Return, for every rule of a preset and for the LM head, its layers and their stored bits per weight."""
    by_rule: list[tuple[str, list[nn.Linear]]] = [(pattern, []) for pattern, _ in preset.rules]
    for name, layer in linear_layers(model):
        if (rule := preset.rule_for(name)) is not None:
            by_rule[rule][1].append(layer)
    if preset.lm_head is not None:
        by_rule.append(("output head", [layer for _, layer in linear_layers(model, lm_head=True)]))
    rows = []
    for pattern, found in by_rule:
        quantised = [layer for layer in found if isinstance(layer, QuantLinear)]
        weights = sum(layer.in_features * layer.out_features for layer in quantised)
        mean = round(sum(layer.stored_bits for layer in quantised) / weights, 4) if weights else None
        rows.append({"pattern": pattern, "layers": len(found), "bits_per_weight": mean})
    return rows
