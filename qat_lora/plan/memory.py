"""The memory estimate: what a training run holds and needs, by parts, from a model's config.json alone.

The student is built on torch's meta device, which has shapes and no memory, and put into its training state by the
calls that a run makes. What is *held* (weights, adapter, gradients, optimizer state) is therefore counted, not
modelled. What comes and goes within a step is a formula (`activations`). Time is arithmetic over an assumed share of a
device's peak rate (`devices`), which only a measurement on that device can replace.

`estimate` and the dry runs of `recover` and `qat` differ in what trains: each builds its `Shapes` and asks for the same
`forecast`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qat_lora.errors import ModelError
from qat_lora.files.checksums import check_folder, read_object
from qat_lora.layers.convert import add_lora, lora_layers, make_quant_skeleton, quant_layers
from qat_lora.models import load as models
from qat_lora.options import EstimateOptions
from qat_lora.plan.activations import step_bytes, widths
from qat_lora.plan.devices import Attention, Device, attention_on, named
from qat_lora.quant.presets import Preset, preset
from qat_lora.runtime.base import default_loss_chunk_mb
from qat_lora.setup.trainable import recovery_parts

GIB = 2**30


@dataclass(frozen=True)
class Shapes:
    """A student on the meta device, in its training state."""

    config: Any  # of its text model
    module: Any
    trained: Mapping[str, Mapping[str, nn.Parameter]]  # by kind and name
    adapter_rank: int
    weight_gradients: bool  # whether the backward pass forms a gradient of every quantised weight
    formed_bytes: int  # weights that a forward forms anew from codes and scales and keeps for its backward pass
    averaged: bool = False  # whether the optimizer keeps an average of what trains

    @property
    def trained_by_kind(self) -> dict[str, int]:
        """How many numbers train."""
        return {kind: sum(p.numel() for p in tensors.values()) for kind, tensors in self.trained.items()}

    @property
    def quantised(self) -> list[int]:
        """Numbers of each quantised weight."""
        return [layer.in_features * layer.out_features for layer in quant_layers(self.module).values()]

    @property
    def vocab_size(self) -> int:
        """Rows of the output head."""
        return int(self.module.get_output_embeddings().weight.shape[0])

    @property
    def adapter(self) -> list[nn.Parameter]:
        """The factors of the adapters."""
        return [p for layer in lora_layers(self.module).values() for p in (layer.lora_A, layer.lora_B)]


def forecast(shapes: Shapes, options: EstimateOptions, devices: Sequence[Device]) -> dict[str, Any]:
    """Return parameter counts, bytes on one replica, and time and cost on devices.

    The parts are those of the device that the settings name, or of the first; every device has its own total.
    """
    shown = _attention(options, devices)
    parts = _parts(shapes, _with_chunk(options, *shown_device(options, devices)), shown)
    flops = flops_per_token(shapes, options)
    there = {}
    for device in devices:
        own = shown if options.attention != "auto" else attention_on(device.device)
        total = sum(_parts(shapes, _with_chunk(options, device.device, 1e9 * device.memory_gb), own).values())
        there[device.name] = {"attention": own, **_on(device, options, flops, total)}
    return {
        **_counts(shapes),
        "attention": shown,
        "bytes": parts,
        "total_bytes": sum(parts.values()),
        "flops_per_token": flops,
        "devices": there,
    }


def _attention(options: EstimateOptions, devices: Sequence[Device]) -> Attention:
    """Return the attention kernel: as set, or that of the device which `--device` or else `--for` names first."""
    if options.attention != "auto":
        return options.attention
    return attention_on(shown_device(options, devices)[0])


def shown_device(options: EstimateOptions, devices: Sequence[Device]) -> tuple[str, float | None]:
    """Return the device which `--device` or else `--for` names first, and the bytes of its memory if known."""
    own = "tpu" if options.run.tpu else options.run.device
    kind = devices[0].device if own == "auto" else own
    return kind, next((1e9 * device.memory_gb for device in devices if device.device == kind), None)


def _with_chunk(options: EstimateOptions, device: str, memory_bytes: float | None) -> EstimateOptions:
    """Return settings whose `loss_chunk_mb` is what a run on the device would take."""
    return replace(options, loss_chunk_mb=options.loss_chunk_mb or default_loss_chunk_mb(device, memory_bytes))


def _parts(shapes: Shapes, options: EstimateOptions, attention: Attention) -> dict[str, int]:
    largest = max(shapes.quantised, default=0) if shapes.weight_gradients else 0
    module, adapter = shapes.module, shapes.adapter
    factors = {id(p) for p in adapter}
    stored = {id(t): t for t in (*module.parameters(), *module.buffers()) if id(t) not in factors}
    trained = sum(shapes.trained_by_kind.values())
    return {
        "weights": sum(t.numel() * t.element_size() for t in stored.values()),
        **({"adapter": sum(p.numel() * p.element_size() for p in adapter)} if adapter else {}),
        "gradients": 4 * trained,
        "optimizer state": (12 if shapes.averaged else 8) * trained,
        **step_bytes(
            shapes.config, options, attention, shapes.vocab_size, shapes.adapter_rank, shapes.formed_bytes, largest
        ),
        # Ids, mask and top-K entries of this micro-batch and of the next one, which is fetched meanwhile.
        "cached head": 2 * options.batch_size * (options.length - 1) * (options.head_k * (8 + 4) + 21),
    }


def _counts(shapes: Shapes) -> dict[str, int]:
    layers, weights = quant_layers(shapes.module).values(), sum(shapes.quantised)
    inside = sum(p.numel() for layer in layers for name, p in layer.named_parameters() if name != "bias")
    adapter = sum(p.numel() for p in shapes.adapter)
    return {
        "parameters": sum(p.numel() for p in shapes.module.parameters()) - adapter - inside + weights,
        "quantised": weights,
        "trained": sum(shapes.trained_by_kind.values()),
        "stored_bytes_of_quantised": sum(layer.stored_bits for layer in layers) // 8,
    }


def flops_per_token(shapes: Shapes, options: EstimateOptions) -> int:
    """Return the floating-point operations of one token of training: 4 N for what is frozen, 6 N for what trains.

    A frozen weight is multiplied once forward and once for the gradient of its input; one that trains (or whose scales
    do) once more for its own. Attention is counted in full, not causal; checkpointing adds the layers' forward again.
    """
    config, module = shapes.config, shapes.module
    linear = sum(m.in_features * m.out_features for m in module.modules() if isinstance(m, nn.Linear))
    lm_head = shapes.vocab_size * config.hidden_size
    linear -= lm_head if isinstance(module.get_output_embeddings(), nn.Linear) else 0
    adapter = sum(p.numel() for p in shapes.adapter)
    attention = 4 * options.length * widths(config).queries * config.num_hidden_layers
    forward = 2 * (linear + adapter) + attention
    trained = adapter + (sum(shapes.quantised) if shapes.weight_gradients else 0)
    again = forward if options.gradient_checkpointing else 0
    return forward + 2 * linear + 2 * adapter + 2 * attention + 2 * trained + 4 * lm_head + again


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


def peak_table(shapes: Shapes, options: EstimateOptions, attention: Attention) -> list[dict[str, Any]]:
    """Return the peak at fractions and multiples of batch and length, with and without gradient checkpointing."""
    rows = []
    options = _with_chunk(options, *shown_device(options, named(options.devices)))
    batches = sorted({max(1, options.batch_size // 4), options.batch_size, options.batch_size * 4})
    lengths = sorted({max(2, options.length // 2), options.length, options.length * 2})
    for batch_size, length in itertools.product(batches, lengths):
        peaks = {}
        for name, again in (("kept", False), ("checkpointed", True)):
            asked = replace(options, batch_size=batch_size, length=length, gradient_checkpointing=again)
            peaks[name] = sum(_parts(shapes, asked, attention).values())
        rows.append({"batch_size": batch_size, "length": length, **peaks})
    return rows


def meta_model(name: str) -> tuple[Any, nn.Module]:
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


def stored_quantisation(config: Any) -> dict[str, Any] | None:
    """Return what a config says of the model's quantisation; None where it has none."""
    stored = getattr(config, "quantization_config", None)
    return stored if stored is None or isinstance(stored, dict) else stored.to_dict()


def meta_student(options: EstimateOptions, adapter: bool = True) -> tuple[Any, nn.Module]:
    """Build a student, with its adapter unless that is left out, on the meta device; return its config and module.

    Raises:
        ModelError: no config.json, an architecture that transformers does not know, or quantised twice.
        ConfigError: an unknown preset, or patterns that match no layer.
    """
    config, module = meta_model(str(options.model))
    stored = stored_quantisation(config)
    if stored is not None and stored.get("quant_method") != models.QUANT_METHOD:
        raise ModelError(f"model: {options.model} is quantised by {stored.get('quant_method')}; give the original")
    if stored is not None and options.preset is not None:
        raise ModelError(f"model: {options.model} is quantised already; leave --preset out, or give the original")
    chosen = Preset.from_dict(stored["preset"]) if stored else None
    if options.preset is not None:
        chosen = preset(options.preset, options.keep)
    if chosen is not None:
        make_quant_skeleton(module, chosen)
    models.cast(module, models.DTYPES[options.run.dtype])
    if adapter:  # after the cast, as a run does: its factors stay float32
        add_lora(module, options.lora)
    return config, module


def skeleton(options: EstimateOptions) -> Shapes:
    """Build a student with an adapter on the meta device, in its training state.

    Raises:
        ModelError, ConfigError: as `meta_student`.
    """
    config, module = meta_student(options)
    dtype = models.DTYPES[options.run.dtype]
    groups = recovery_parts(models.CausalLM(module, Path()), options.train_scales, options.train_norms, dtype)
    sizes = [layer.in_features * layer.out_features for layer in quant_layers(module).values()]
    formed = dtype.itemsize * sum(sizes) if options.train_scales else 0
    return Shapes(config.get_text_config(), module, groups, options.lora.recovery_r, options.train_scales, formed)
