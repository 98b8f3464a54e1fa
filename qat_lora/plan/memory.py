"""How much memory, time and money a recovery run will need, from a model's config.json alone.

The model is built on torch's meta device, which has shapes and no memory, and taken through the same calls that
a run makes: quantised layers, adapters, which tensors train. What is *held* (weights, adapter, gradients,
optimizer state) is then counted, not modelled. What comes and goes in a step (activations, working memory) is a
formula over the config that differs by device (`activations`), and the printed table says so. Time is arithmetic over
an assumed share of a device's peak rate (`plan/devices.py`), which only a measurement on that device can replace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from qat_lora.errors import ModelError
from qat_lora.files.checksums import check_folder, read_object
from qat_lora.layers.convert import add_lora, lora_layers, make_quant_skeleton, quant_layers
from qat_lora.models import load as models
from qat_lora.options import EstimateOptions
from qat_lora.plan.activations import Weights, step_bytes, widths
from qat_lora.plan.devices import Attention, Device, attention_on, named
from qat_lora.quant.presets import Preset, preset

GIB = 2**30
NOTE = (
    "An estimate. Weights, adapter, gradients and optimizer state are counted on the model's real shapes. Activations\n"
    "and working memory are formulas for Qwen and Llama style layers, each device's own attention in them;\n"
    "compared with measured steps on a CPU, and with XLA's buffers there in float32. Nothing of it has been measured\n"
    "on a TPU yet. Time assumes a share of the peak rate; prices are list prices as of mid-2025, to be checked."
)


def summary(
    config: Any, module: torch.nn.Module, options: EstimateOptions, devices: Sequence[Device]
) -> dict[str, Any]:
    """Return parameter counts, bytes on one replica, and time and cost on devices, for what `skeleton` built.

    The parts are those of the device that the settings name, or of the first; every device has its own total.
    """
    shown = _attention(options, devices)
    parts = _parts(config, module, options, shown)
    flops = flops_per_token(config, module, options)
    there = {}
    for device in devices:
        own = shown if options.attention != "auto" else attention_on(device.device)
        total = sum((parts if own == shown else _parts(config, module, options, own)).values())
        there[device.name] = {"attention": own, **_on(device, options, flops, total)}
    return {
        **_counts(module, options),
        "attention": shown,
        "bytes": parts,
        "total_bytes": sum(parts.values()),
        "flops_per_token": flops,
        "devices": there,
    }


def memory(options: EstimateOptions) -> dict[str, int]:
    """Return the parts of a run's memory on one replica, in bytes by name; their sum is the peak of a step."""
    return _parts(*skeleton(options), options, _attention(options, named(options.devices)))


def _attention(options: EstimateOptions, devices: Sequence[Device]) -> Attention:
    """Return who computes attention: as asked, or as on the device that `--device` or else `--for` names first."""
    if options.attention != "auto":
        return options.attention
    if options.run.tpu or options.run.device != "auto":
        return attention_on("tpu" if options.run.tpu else options.run.device)
    return attention_on(devices[0].device)


def _parts(config: Any, module: torch.nn.Module, options: EstimateOptions, attention: Attention) -> dict[str, int]:
    sizes = [layer.in_features * layer.out_features for layer in quant_layers(module).values()]
    quantised = Weights(sum(sizes), max(sizes, default=0))
    return {
        **_held_bytes(module, options),
        **step_bytes(config, options, attention, _rows(module), quantised),
        # Ids, mask and head of this micro-batch and of the next one, which is fetched meanwhile.
        "cached head": 2 * options.batch_size * (options.length - 1) * (options.head_k * (8 + 4) + 21),
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
    attention = 4 * options.length * widths(config).queries * config.num_hidden_layers
    forward = 2 * (linear + adapter) + attention
    trained = adapter + (quantised if options.train_scales else 0)
    again = forward if options.gradient_checkpointing else 0
    return forward + 2 * linear + 2 * adapter + 2 * attention + 2 * trained + 4 * head + again


def _on(device: Device, options: EstimateOptions, flops: int, total: int) -> dict[str, Any]:
    """Return what a run takes on a device: each chip computes its own micro-batches of every step."""
    tokens = options.max_steps * options.accumulation_steps * options.batch_size * options.length
    hours = tokens * flops / (device.tflops * 1e12 * options.utilisation) / 3600
    return {
        "total_bytes": total,
        "fits": total < 0.9 * device.memory_gb * 1e9,
        "tokens": tokens * device.chips,
        "hours": hours,
        "usd": hours * device.chips * device.usd_per_hour,
    }


def table(config: Any, module: torch.nn.Module, options: EstimateOptions, attention: Attention) -> list[dict[str, Any]]:
    """Return the peak for halves and doubles of batch and length, with and without gradient checkpointing."""
    rows = []
    for batch_size in sorted({max(1, options.batch_size // 4), options.batch_size, options.batch_size * 4}):
        for length in sorted({max(2, options.length // 2), options.length, options.length * 2}):
            peaks = {}
            for name, again in (("kept", False), ("checkpointed", True)):
                asked = replace(options, batch_size=batch_size, length=length, gradient_checkpointing=again)
                peaks[name] = sum(_parts(config, module, asked, attention).values())
            rows.append({"batch_size": batch_size, "length": length, **peaks})
    return rows


def meta_model(name: str) -> tuple[Any, torch.nn.Module]:
    """Build a model on the meta device as its config.json says, without its quantisation; return config and model.

    Raises:
        DamagedFileError: the config.json is not what was written.
        ModelError: no config.json, or an architecture that transformers does not know.
    """
    if (config_file := Path(name).expanduser() / "config.json").is_file():
        check_folder(config_file.parent, (config_file.name,))
        read_object(config_file)
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


def report_text(report: dict[str, Any], options: EstimateOptions, replicas: int) -> str:
    """Return an estimate as lines for the terminal."""
    lines = [f"{options.model}: {report['parameters']:,} parameters, {report['quantised']:,} of them quantised"]
    if report["quantised"]:
        lines[0] += f" ({report['stored_bytes_of_quantised'] / GIB:.3f} GiB stored)"
    lines.append(f"{report['trained']:,} numbers train (rank {options.lora.recovery_r})")
    lines.append(
        f"batch {options.batch_size} x {options.length} tokens, {options.accumulation_steps} micro-batches, "
        f"{replicas} replica{'s' if replicas > 1 else ''}: effective batch {report['effective_batch']}"
    )
    places = [name for name, there in report["devices"].items() if there["attention"] == report["attention"]]
    lines += ["", f"a step with {report['attention']} attention" + (f", as on {', '.join(places)}" if places else "")]
    lines += [f"{name:<18}{size / GIB:>9.3f} GiB" for name, size in report["bytes"].items() if size]
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
        lines.append(
            f"{name:<9}{there['total_bytes'] / GIB:>8.2f} GiB  {fits:<12}{there['hours']:>9.2f} h{cost:>14}"
            f"{there['tokens']:>16,} tokens"
        )
    return "\n".join([*lines, "", NOTE])
