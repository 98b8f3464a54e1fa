"""How much memory, time and money a recovery run will need, from a model's config.json alone.

The model is built on torch's meta device, which has shapes and no memory, and taken through the same calls that
a run makes: quantised layers, adapters, which tensors train. What is *held* (weights, adapter, gradients,
optimizer state) is then counted, not modelled. What comes and goes in a step (activations, working memory) is a
formula over the config, and the printed table says so. Time is arithmetic over an assumed share of a device's peak
rate (`diagnose/devices.py`), which only a measurement on that device can replace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from qat_lora import models
from qat_lora.diagnose.devices import Device, named
from qat_lora.errors import ModelError
from qat_lora.layers.convert import add_lora, lora_layers, make_quant_skeleton, quant_layers
from qat_lora.options import EstimateOptions
from qat_lora.quant.spec import Preset, preset
from qat_lora.runtime.base import Runtime

GIB = 2**30
NOTE = (
    "An estimate. Weights, adapter, gradients and optimizer state are counted on the model's real shapes. Activations\n"
    "and working memory are formulas for Qwen and Llama style layers; tests compare the sum with the measured peak\n"
    "of a step on a CPU. What the allocator and XLA's compiler add is not in it, and nothing of it has been measured\n"
    "on a TPU yet. Time assumes a share of the peak rate; prices are list prices as of mid-2025, to be checked."
)


def estimate(options: EstimateOptions, runtime: Runtime) -> dict[str, Any]:
    """Return (and print, unless `--json`) parameter counts, bytes of a run on one replica, time and cost.

    Raises:
        ModelError: no config.json, or an architecture that transformers does not know.
        ConfigError: an unknown preset or device, or patterns that match no layer.
    """
    devices = named(options.devices)
    config, module = skeleton(options)
    report = {
        **summary(config, module, options, devices),
        "effective_batch": options.batch_size * options.accumulation_steps * runtime.replicas,
    }
    if options.table:
        report["table"] = _memory_table(config, module, options)
    if not options.run.json:
        print(_text(report, options, runtime.replicas))
    return report


def summary(
    config: Any, module: torch.nn.Module, options: EstimateOptions, devices: Sequence[Device]
) -> dict[str, Any]:
    """Return parameter counts, bytes on one replica, and time and cost on devices, for what `skeleton` built."""
    parts = _parts(config, module, options)
    flops = flops_per_token(config, module, options)
    total = sum(parts.values())
    return {
        **_counts(module, options),
        "bytes": parts,
        "total_bytes": total,
        "flops_per_token": flops,
        "devices": {device.name: _on(device, options, flops, total) for device in devices},
    }


def memory(options: EstimateOptions) -> dict[str, int]:
    """Return the parts of a run's memory on one replica, in bytes by name; their sum is the peak of a step."""
    return _parts(*skeleton(options), options)


def _parts(config: Any, module: torch.nn.Module, options: EstimateOptions) -> dict[str, int]:
    tokens = options.batch_size * options.length
    layer, other = _activation_bytes_per_token(config, options)
    layers, width = config.num_hidden_layers, models.DTYPES[options.run.dtype].itemsize
    # Logits and their gradient in float32, a copy in the products' type; not more than there are positions. A frozen
    # head on a CPU is walked through by vocabulary and needs less.
    logits = min(options.loss_chunk_mb * 2**20, 4 * tokens * _rows(module))
    head_chunk = 2 * logits + (logits // 2 if width < 4 else 0) + tokens * config.hidden_size * (4 + width)
    backward = tokens * _backward_bytes_per_token(config, options)
    if options.gradient_checkpointing:  # a layer's input is kept, and one layer is computed again at a time
        activations, backward = layers * width * config.hidden_size + other, backward + tokens * layer
    else:
        activations = layers * layer + other
    return {
        **_held_bytes(module, options),
        "activations": tokens * activations,
        "working memory": max(head_chunk, backward),
        "cached head": options.batch_size * (options.length - 1) * options.head_k * (8 + 4) * 2,  # one ahead
    }


def _counts(module: torch.nn.Module, options: EstimateOptions) -> dict[str, int]:
    quantised = quant_layers(module)
    weights = sum(layer.in_features * layer.out_features for layer in quantised.values())
    adapter = sum(a.lora_A.numel() + a.lora_B.numel() for a in lora_layers(module).values())
    scales = sum(s.numel() for layer in quantised.values() for s in layer.scales)
    dense = sum(p.numel() for p in module.parameters()) - adapter
    dense -= sum(p.numel() for layer in quantised.values() for name, p in layer.named_parameters() if name != "bias")
    return {
        "parameters": dense + weights,
        "quantised": weights,
        "trained": adapter + (scales if options.train_scales else 0) + sum(p.numel() for p in _norms(module, options)),
        "stored_bytes_of_quantised": sum(layer.stored_bits for layer in quantised.values()) // 8,
    }


def flops_per_token(config: Any, module: Any, options: EstimateOptions) -> int:
    """Return the floating-point operations of one token of training: 4 N for what is frozen, 6 N for what trains.

    A frozen weight is multiplied once forward and once for the gradient of its input; one that trains (or whose scales
    do) once more for its own. Attention is counted in full, not causal; checkpointing adds the layers' forward again.
    """
    linear = sum(m.in_features * m.out_features for m in module.modules() if isinstance(m, torch.nn.Linear))
    head = _rows(module) * config.hidden_size
    adapter = sum(a.lora_A.numel() + a.lora_B.numel() for a in lora_layers(module).values())
    linear -= head if isinstance(module.get_output_embeddings(), torch.nn.Linear) else 0
    quantised = sum(layer.in_features * layer.out_features for layer in quant_layers(module).values())
    attention = 4 * options.length * _queries(config) * config.num_hidden_layers
    forward = 2 * (linear + adapter) + attention
    trained = adapter + (quantised if options.train_scales else 0)
    again = forward if options.gradient_checkpointing else 0
    return forward + 2 * linear + 2 * adapter + 2 * attention + 2 * trained + 4 * head + again


def _on(device: Device, options: EstimateOptions, flops: int, total: int) -> dict[str, Any]:
    """Return what a run takes on a device: each chip computes its own micro-batches of every step."""
    tokens = options.max_steps * options.accumulation_steps * options.batch_size * options.length
    hours = tokens * flops / (device.tflops * 1e12 * options.utilisation) / 3600
    return {
        "fits": total < 0.9 * device.memory_gb * 1e9,
        "tokens": tokens * device.chips,
        "hours": hours,
        "usd": hours * device.chips * device.usd_per_hour,
    }


def _memory_table(config: Any, module: torch.nn.Module, options: EstimateOptions) -> list[dict[str, Any]]:
    """Return the peak for halves and doubles of batch and length, with and without gradient checkpointing."""
    rows = []
    for batch_size in sorted({max(1, options.batch_size // 4), options.batch_size, options.batch_size * 4}):
        for length in sorted({max(2, options.length // 2), options.length, options.length * 2}):
            peaks = {}
            for name, again in (("kept", False), ("checkpointed", True)):
                asked = replace(options, batch_size=batch_size, length=length, gradient_checkpointing=again)
                peaks[name] = sum(_parts(config, module, asked).values())
            rows.append({"batch_size": batch_size, "length": length, **peaks})
    return rows


def meta_model(name: str) -> tuple[Any, torch.nn.Module]:
    """Build a model on the meta device as its config.json says, without its quantisation; return config and model.

    Raises:
        ModelError: no config.json, or an architecture that transformers does not know.
    """
    try:
        config = models.AutoConfig.from_pretrained(name)
        with torch.device("meta"):
            return config, models.AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"model: {name} has no config.json that transformers can build ({reason})") from None


def skeleton(options: EstimateOptions) -> tuple[Any, torch.nn.Module]:
    """Build the student on the meta device; return its text config and the model.

    Raises:
        ModelError: no config.json, an architecture that transformers does not know, or quantised twice.
        ConfigError: an unknown preset, or patterns that match no layer.
    """
    config, module = meta_model(str(options.model))
    stored = getattr(config, "quantization_config", None)
    if stored is not None and not isinstance(stored, dict):
        stored = stored.to_dict()
    if stored is not None and stored.get("quant_method") != models.QUANT_METHOD:
        raise ModelError(f"model: {options.model} is quantised by {stored.get('quant_method')}; give the original")
    if stored is not None and options.preset is not None:
        raise ModelError(f"model: {options.model} is quantised already; leave --preset out, or give the original")
    chosen = Preset.from_dict(stored["preset"]) if stored else None
    if options.preset is not None:
        chosen = preset(options.preset, options.keep)
    if chosen is not None:
        make_quant_skeleton(module, chosen)
    add_lora(module, options.lora)
    models.cast(module, models.DTYPES[options.run.dtype])
    for layer in lora_layers(module).values():
        layer.float()  # cast reached the adapter, which a run adds after it
    return config.get_text_config(), module


def _held_bytes(module: torch.nn.Module, options: EstimateOptions) -> dict[str, int]:
    """Return bytes of what stays in memory for the whole run, as `layers.prepare_base` leaves it."""
    width = models.DTYPES[options.run.dtype].itemsize
    adapters, quantised = lora_layers(module), quant_layers(module)
    adapter = [p for layer in adapters.values() for p in (layer.lora_A, layer.lora_B)]
    scales = [s for q in quantised.values() for s in q.scales] if options.train_scales else []
    trained = [*adapter, *scales, *_norms(module, options)]
    mine = {id(p) for p in adapter}
    stored = {id(t): t for t in (*module.parameters(), *module.buffers()) if id(t) not in mine}
    # A frozen base is formed once in the activations' type, a training one keeps its code values in the scales'.
    formed = sum(q.in_features * q.out_features for q in quantised.values())
    count = sum(p.numel() for p in trained)
    return {
        "weights": sum(t.numel() * t.element_size() for t in stored.values())
        + formed * (4 if options.train_scales else width),
        "adapter": sum(p.numel() * p.element_size() for p in adapter),
        "gradients": 4 * count,
        "optimizer state": 8 * count,
    }


def _norms(module: torch.nn.Module, options: EstimateOptions) -> list[torch.nn.Parameter]:
    """Return the norms' parameters, where they train."""
    return list(models.CausalLM(module, Path()).norms().values()) if options.train_norms else []


def _rows(module: Any) -> int:
    return int(module.get_output_embeddings().weight.shape[0])


def _queries(config: Any) -> int:
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return config.num_attention_heads * head_dim


def _widths(config: Any) -> tuple[int, int, int, int]:
    """Return hidden size, MLP width, and the sizes of a token's queries and keys in a layer."""
    hidden, heads, queries = config.hidden_size, config.num_attention_heads, _queries(config)
    mlp = getattr(config, "intermediate_size", None) or 4 * hidden
    return hidden, mlp, queries, queries // heads * (getattr(config, "num_key_value_heads", None) or heads)


def _activation_bytes_per_token(config: Any, options: EstimateOptions) -> tuple[int, int]:
    """Return what autograd keeps for the backward pass, for one token of a row: of a layer, and outside the layers.

    With a frozen base a linear layer keeps its input only for its adapter's A, once for layers that share it, and
    the product A x; norms keep their input in float32. After the layers: the last norm, and the mask.
    """
    width = models.DTYPES[options.run.dtype].itemsize
    hidden, mlp, queries, keys = _widths(config)
    inputs = 2 * hidden + mlp + 7 * options.lora.recovery_r
    if options.attention == "fused":
        attention = width * 4 * queries  # queries, keys and values for every head, and the result
    else:  # in float32 whatever the model computes in, with the scores beside them; XLA keeps the masked ones too
        scores = config.num_attention_heads * options.length * (2 if options.attention == "xla" else 1)
        attention = 4 * (3 * queries + scores) + width * queries
    # XLA keeps what autograd would compute again: the sigmoid, and both halves of what base and adapter add up to.
    gated = (6 if options.attention == "xla" else 3) * mlp
    normed = 2 * hidden + (queries + keys if "3" in config.model_type else 0)  # Qwen3 and Gemma 3 norm both
    layer = width * (inputs + gated) + attention + 4 * normed
    # Formed weights of trained scales belong to the micro-batch, not to a token; they are left out.
    return layer, (4 + width) * hidden + width * options.length


def _backward_bytes_per_token(config: Any, options: EstimateOptions) -> int:
    """Return what the backward pass of a layer needs for itself, for one token: gradients of its widest tensors."""
    width = models.DTYPES[options.run.dtype].itemsize
    hidden, mlp, _, _ = _widths(config)
    return width * (3 * mlp + 2 * hidden)


def _text(report: dict[str, Any], options: EstimateOptions, replicas: int) -> str:
    lines = [f"{options.model}: {report['parameters']:,} parameters, {report['quantised']:,} of them quantised"]
    if report["quantised"]:
        lines[0] += f" ({report['stored_bytes_of_quantised'] / GIB:.3f} GiB stored)"
    lines.append(f"{report['trained']:,} numbers train (rank {options.lora.recovery_r})")
    lines.append(
        f"batch {options.batch_size} x {options.length} tokens, {options.accumulation_steps} micro-batches, "
        f"{replicas} replica{'s' if replicas > 1 else ''}: effective batch {report['effective_batch']}"
    )
    lines.append("")
    lines += [f"{name:<18}{size / GIB:>9.3f} GiB" for name, size in report["bytes"].items()]
    lines.append(f"{'together':<18}{report['total_bytes'] / GIB:>9.3f} GiB")
    if options.table:
        lines += ["", "batch x length      GiB   with --gradient-checkpointing"]
        for row in report["table"]:
            size = f"{row['batch_size']} x {row['length']}"
            lines.append(f"{size:<14}{row['kept'] / GIB:>9.2f}{row['checkpointed'] / GIB:>12.2f}")
    lines += [
        "",
        f"{options.max_steps} steps at {options.utilisation:.0%} of the peak rate, {report['flops_per_token']:.3g} "
        "operations a token",
    ]
    for name, there in report["devices"].items():
        cost = f"{there['usd']:,.2f} USD" if there["usd"] else "-"
        fits = "fits" if there["fits"] else "does not fit"
        lines.append(f"{name:<12}{fits:<14}{there['hours']:>9.2f} h{cost:>16}{there['tokens']:>18,} tokens")
    return "\n".join([*lines, "", NOTE])
