"""The memory estimate: what a training run holds and needs, by parts, from a model's config.json alone.

The student is built on torch's meta device, which has shapes and no memory, and put into its training state by the
calls that a run makes. What is *held* (weights, adapter, gradients, optimizer state) is therefore counted, not
modelled. What comes and goes within a step is a formula (`activations`), and so is its time (`roofline`).

`estimate` and the dry runs of `recover` and `qat` differ in what trains: each builds its `Shapes` and asks for the same
`forecast`.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qat_lora.errors import ModelError
from qat_lora.files.checksums import check_folder, read_object
from qat_lora.files.gguf_header import GGUF, read_header
from qat_lora.layers.convert import add_lora, block_of, make_quant_skeleton, quant_layers
from qat_lora.layers.quant_linear import Dense
from qat_lora.models import load as models
from qat_lora.models.from_gguf import config_of
from qat_lora.models.load import DTYPES
from qat_lora.models.packed import READERS, method_of
from qat_lora.options import EstimateOptions
from qat_lora.plan.activations import step_bytes
from qat_lora.plan.devices import Attention, Device, attention_on, named
from qat_lora.plan.roofline import StepTime, operations, step_time
from qat_lora.plan.shapes import Shapes
from qat_lora.quant.presets import Preset, preset
from qat_lora.runtime.base import default_loss_chunk_mb
from qat_lora.setup.trainable import recovery_parts

GIB = 2**30


def forecast(shapes: Shapes, options: EstimateOptions, devices: Sequence[Device]) -> dict[str, Any]:
    """Return parameter counts, bytes on one replica, and time and cost on devices.

    The parts are those of the device that the settings name, or of the first; every device has its own total.
    """
    kind, first = shown_device(options, devices)
    shown = _attention(options, kind)
    parts = _parts(shapes, _with_chunk(options, kind, first), shown, first.chips if first else 1)
    there = {}
    for device in devices:
        own, asked = _attention(options, device.device), _with_chunk(options, device.device, device)
        total = sum(_parts(shapes, asked, own, device.chips).values())
        there[device.name] = {"attention": own, **_on(device, options, step_time(shapes, asked, own, device), total)}
    return {
        **_counts(shapes),
        "attention": shown,
        "bytes": parts,
        "total_bytes": sum(parts.values()),
        "flops_per_token": operations(shapes, options, shown) // (options.batch_size * options.length),
        "devices": there,
    }


def _attention(options: EstimateOptions, device: str) -> Attention:
    """Return the attention kernel: as set, or that of a `--device`."""
    return attention_on(device) if options.attention == "auto" else options.attention


def shown_device(options: EstimateOptions, devices: Sequence[Device]) -> tuple[str, Device | None]:
    """Return the `--device` that the settings or else `--for` names first, and the first listed of that kind."""
    own = "tpu" if options.run.tpu else options.run.device
    kind = devices[0].device if own == "auto" else own
    return kind, next((device for device in devices if device.device == kind), None)


def _with_chunk(options: EstimateOptions, kind: str, device: Device | None) -> EstimateOptions:
    """Return settings whose `loss_chunk_mb` is what a run on the device would take."""
    memory = 1e9 * device.memory_gb if device else None
    return replace(options, loss_chunk_mb=options.loss_chunk_mb or default_loss_chunk_mb(kind, memory))


def _parts(shapes: Shapes, options: EstimateOptions, attention: Attention, chips: int) -> dict[str, int]:
    largest = max(shapes.quantised, default=0) if shapes.weight_gradients else 0
    adapter, trained = shapes.adapter, sum(shapes.trained_by_kind.values())
    sharded_over = chips if options.run.chips.shard_base else 1
    step = step_bytes(
        shapes.config, options, attention, shapes.vocab_size, shapes.adapter_rank, shapes.formed_bytes, largest
    )
    if attention == "xla" and DTYPES[options.run.dtype] == torch.float32:  # all are rounded to bfloat16 before the loop
        linear = sum(m.in_features * m.out_features for m in shapes.module.modules() if isinstance(m, nn.Linear))
        step["formed weights"] += 2 * (linear - (sum(shapes.quantised) if shapes.weight_gradients else 0))
    return {
        "weights": _weights(shapes, attention, sharded_over),
        **({"adapter": sum(p.numel() * p.element_size() for p in adapter)} if adapter else {}),
        "gradients": 4 * trained,
        "optimizer state": (12 if shapes.averaged else 8) * trained,
        **step,
        # Ids, mask and top-K entries of this micro-batch and of the next one, which is fetched meanwhile.
        "cached head": 2 * options.batch_size * (options.length - 1) * (options.head_k * (8 + 4) + 21),
    }


def _weights(shapes: Shapes, attention: Attention, chips: int) -> int:
    """Return the bytes of what is no adapter: of frozen matrices a chip's share and the largest layer.

    Where layers are stacked (XLA), the codes of a weight that is formed once stay on the host (`layers/stacked.py`).
    """
    module, layers = shapes.module, quant_layers(shapes.module)
    without = {id(p) for p in shapes.adapter}
    if attention == "xla":
        formed = [layer for name, layer in layers.items() if block_of(name) and isinstance(layer.source, Dense)]
        own = [{**layer._parameters, **layer._buffers, "bias": None} for layer in formed]
        without |= {id(tensor) for tensors in own for tensor in tensors.values()}
    everything = itertools.chain(module.named_parameters(), module.named_buffers())
    stored = {id(tensor): (name, tensor) for name, tensor in everything if id(tensor) not in without}
    whole, sharded, gathered = 0, 0, Counter[str]()
    for name, tensor in stored.values():
        size, block = tensor.numel() * tensor.element_size(), block_of(name)
        if chips > 1 and tensor.ndim > 1 and not tensor.requires_grad and block:
            sharded += size
            gathered[block] += size
        else:
            whole += size
    return whole + sharded // chips + max(gathered.values(), default=0)


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


def _on(device: Device, options: EstimateOptions, step: StepTime, total: int) -> dict[str, Any]:
    """Return what a run takes on a device: each chip computes its own micro-batches of every step."""
    micro_batches = options.max_steps * options.accumulation_steps
    tokens = options.batch_size * options.length * device.chips
    hours = micro_batches * step.seconds / 3600
    return {
        "total_bytes": total,
        "fits": total < 0.9 * device.memory_gb * 1e9,
        "tokens": micro_batches * tokens,
        "hours": hours,
        "usd": hours * device.chips * device.usd_per_hour,
        "tokens_per_s": tokens / step.seconds,
        "seconds_by_bound": step.limits,
        "bound": step.bound,
    }


def peak_table(shapes: Shapes, options: EstimateOptions, attention: Attention) -> list[dict[str, Any]]:
    """Return the peak at fractions and multiples of batch and length, with and without gradient checkpointing."""
    rows = []
    kind, device = shown_device(options, named(options.devices))
    options, chips = _with_chunk(options, kind, device), device.chips if device else 1
    batches = sorted({max(1, options.batch_size // 4), options.batch_size, options.batch_size * 4})
    lengths = sorted({max(2, options.length // 2), options.length, options.length * 2})
    for batch_size, length in itertools.product(batches, lengths):
        peaks = {}
        for name, again in (("kept", False), ("checkpointed", True)):
            asked = replace(options, batch_size=batch_size, length=length, gradient_checkpointing=again)
            peaks[name] = sum(_parts(shapes, asked, attention, chips).values())
        rows.append({"batch_size": batch_size, "length": length, **peaks})
    return rows


def meta_model(name: str) -> tuple[Any, nn.Module]:
    """Build an unquantised model on the meta device as its config.json or GGUF file says; return config and model.

    Raises:
        DamagedFileError: the config.json is not what was written.
        ModelError: no config.json, or an architecture that transformers does not know.
    """
    file = Path(name).expanduser()
    read = config_of(read_header(file)) if file.suffix == GGUF and file.is_file() else None
    if (config_file := file / "config.json").is_file():
        check_folder(config_file.parent, (config_file.name,))
        read_object(config_file)
    try:
        config = models.AutoConfig.from_pretrained(name) if read is None else models.AutoConfig.for_model(**read)
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
    if stored is not None and method_of({"quantization_config": stored}) in READERS and options.preset is None:
        stored = None  # read as dense weights
    if stored is not None and stored.get("quant_method") != models.QUANT_METHOD:
        raise ModelError(f"model: {options.model} is quantised by {stored.get('quant_method')}; give the original")
    if stored is not None and options.preset is not None:
        raise ModelError(f"model: {options.model} is quantised already; leave --preset out, or give the original")
    chosen = Preset.from_dict(stored["preset"]) if stored else None
    if options.preset is not None:
        chosen = preset(options.preset, options.keep)
    if chosen is not None:
        make_quant_skeleton(module, chosen)
    models.cast(module, DTYPES[options.run.dtype])
    if adapter:  # after the cast, as a run does: its factors stay float32
        add_lora(module, options.lora)
    return config, module


def skeleton(options: EstimateOptions) -> Shapes:
    """Build a student with an adapter on the meta device, in its training state.

    Raises:
        ModelError, ConfigError: as `meta_student`.
    """
    config, module = meta_student(options)
    dtype = DTYPES[options.run.dtype]
    groups = recovery_parts(models.CausalLM(module, Path()), options.train_scales, options.train_norms, dtype)
    sizes = [layer.in_features * layer.out_features for layer in quant_layers(module).values()]
    formed = dtype.itemsize * sum(sizes) if options.train_scales else 0
    return Shapes(config.get_text_config(), module, groups, options.lora.recovery_r, options.train_scales, formed)
