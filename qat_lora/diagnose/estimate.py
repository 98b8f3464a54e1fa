"""How much memory a recovery run will need, from a model's config.json alone.

The model is built on torch's meta device, which has shapes and no memory, and taken through the same calls that
a run makes: quantised layers, adapters, which tensors train. What is *held* (weights, adapter, gradients,
optimizer state) is then counted, not modelled. What comes and goes in a step (activations, head chunk) is a
formula over the config, and the printed table says so.
"""

from __future__ import annotations

from typing import Any

import torch

from qat_lora import models
from qat_lora.errors import ModelError
from qat_lora.layers.convert import add_lora, lora_layers, make_quant_skeleton, quant_layers
from qat_lora.options import EstimateOptions
from qat_lora.quant.spec import Preset, preset
from qat_lora.runtime.base import Runtime

GIB = 2**30
BOARDS_GB = {"v5e chip": 16, "v6e chip": 32, "H100": 80}
NOTE = (
    "An estimate. Weights, adapter, gradients and optimizer state are counted on the model's real shapes, and tests\n"
    "compare them with a built model. Activations and head chunk are formulas for Qwen and Llama style layers without\n"
    "gradient checkpointing, compared with what autograd keeps on a CPU for a toy model only. What the allocator and\n"
    "XLA's compiler add is not in it, and nothing of it has been measured on a TPU yet."
)


def estimate(options: EstimateOptions, runtime: Runtime) -> dict[str, Any]:
    """Return (and print, unless `--json`) parameter counts and bytes of a run on one replica.

    Raises:
        ModelError: no config.json, or an architecture that transformers does not know.
        ConfigError: an unknown preset, or patterns that match no layer.
    """
    config, module = _skeleton(options)
    held = _held_bytes(module, options)
    step = {
        "activations": options.batch_size * options.length * _activation_bytes_per_token(config, options),
        # Logits, their gradient and one temporary exist at once, and not more than there are positions.
        "head chunk": 3 * min(options.loss_chunk_mb * 2**20, 4 * options.batch_size * options.length * _rows(module)),
        "cached head": options.batch_size * (options.length - 1) * options.head_k * (8 + 4) * 2,  # one ahead
    }
    quantised = quant_layers(module)
    weights = sum(layer.in_features * layer.out_features for layer in quantised.values())
    adapter = sum(a.lora_A.numel() + a.lora_B.numel() for a in lora_layers(module).values())
    scales = sum(s.numel() for layer in quantised.values() for s in layer.scales)
    dense = sum(p.numel() for p in module.parameters()) - adapter
    dense -= sum(p.numel() for layer in quantised.values() for name, p in layer.named_parameters() if name != "bias")
    report = {
        "parameters": dense + weights,
        "quantised": weights,
        "trained": adapter + (scales if options.train_scales else 0),
        "stored_bytes_of_quantised": sum(layer.stored_bits for layer in quantised.values()) // 8,
        "bytes": {**held, **step},
        "total_bytes": sum(held.values()) + sum(step.values()),
        "effective_batch": options.batch_size * options.accumulation_steps * runtime.replicas,
    }
    if not options.run.json:
        print(_table(report, options, runtime.replicas))
    return report


def _skeleton(options: EstimateOptions) -> tuple[Any, torch.nn.Module]:
    """Build the student on the meta device; return its text config and the model."""
    try:
        config = models.AutoConfig.from_pretrained(str(options.model))
        with torch.device("meta"):
            module = models.AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelError(f"model: {options.model} has no config.json that transformers can build ({reason})") from None
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
    trained = [*adapter, *([s for q in quantised.values() for s in q.scales] if options.train_scales else [])]
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


def _rows(module: Any) -> int:
    return int(module.get_output_embeddings().weight.shape[0])


def _activation_bytes_per_token(config: Any, options: EstimateOptions) -> int:
    """Return what autograd keeps for the backward pass, for one token of a row, over all layers.

    With a frozen base a linear layer keeps its input only for its adapter's A, once for layers that share it, and
    the product A x; norms keep their input in float32. After the layers: the last norm, and the mask.
    """
    width = models.DTYPES[options.run.dtype].itemsize
    hidden, heads = config.hidden_size, config.num_attention_heads
    mlp = getattr(config, "intermediate_size", None) or 4 * hidden
    head_dim = getattr(config, "head_dim", None) or hidden // heads
    queries, keys = heads * head_dim, (getattr(config, "num_key_value_heads", None) or heads) * head_dim
    inputs = 2 * hidden + mlp + 7 * options.lora.recovery_r
    if options.attention == "fused":
        attention = width * 4 * queries  # queries, keys and values for every head, and the result
    else:  # in float32 whatever the model computes in, with the scores beside them
        attention = 4 * (3 * queries + heads * options.length) + width * queries
    gated = 3 * mlp
    normed = 2 * hidden + (queries + keys if "3" in config.model_type else 0)  # Qwen3 and Gemma 3 norm both
    layer = width * (inputs + gated) + attention + 4 * normed
    # Formed weights of trained scales belong to the micro-batch, not to a token; they are left out.
    return config.num_hidden_layers * layer + (4 + width) * hidden + width * options.length


def _table(report: dict[str, Any], options: EstimateOptions, replicas: int) -> str:
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
    fits = [name for name, size in BOARDS_GB.items() if report["total_bytes"] < 0.9 * size * 1e9]
    lines.append(f"fits with a tenth to spare: {', '.join(fits) or 'none of ' + ', '.join(BOARDS_GB)}")
    return "\n".join([*lines, "", NOTE])
