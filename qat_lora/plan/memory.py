"""The memory estimate: what a training run holds and needs, by parts, from a model's config.json alone.

The student is built on torch's meta device, which has no memory, and put into its training state by the calls that a
run makes, so what is *held* (weights, adapter, gradients, optimizer state) is counted, not modelled. What lives within
a step is a formula, as is its time (`step.py`). Each command builds its `Shapes` and asks for the same `forecast`.
"""

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qat_lora.errors import ModelError, errors_explained
from qat_lora.files.checksums import check_folder, read_object
from qat_lora.files.gguf_header import GGUF, read_header
from qat_lora.layers.convert import add_lora, block_of, make_quant_skeleton, quant_layers, weight_count
from qat_lora.layers.experts import split_experts
from qat_lora.layers.quant_linear import Dense
from qat_lora.models import load as models
from qat_lora.models.adapter import allocated_ranks
from qat_lora.models.from_gguf import config_of
from qat_lora.models.load import DTYPES
from qat_lora.models.packed import READERS, method_of
from qat_lora.options import EstimateOptions
from qat_lora.plan.devices import Device, attention_on
from qat_lora.plan.step import Shapes, operations, step_bytes, step_time
from qat_lora.quant.presets import Preset, preset
from qat_lora.runtime.base import default_loss_chunk_mb
from qat_lora.runtime.host.machine import LiveBytes
from qat_lora.setup.trainable import recovery_parts
from qat_lora.train.blockwise import blocks_of

GIB = 2**30
IMPORTS_BYTES = 500_000_000  # of a process that has imported torch and transformers
BLOCK_PASSES = 8  # of `reconstruct`: states of both models, target, start, forward and backward, result; then the last


def forecast(shapes: Shapes, options: EstimateOptions, devices: Sequence[Device]) -> dict[str, Any]:
    """Return counts, bytes on one replica of the device that is named or first, and what each device takes."""
    kind, first = shown_device(options, devices)
    shown = _set_for(options, kind, first)
    parts = _parts(shapes, shown, first)
    found: dict[str, Any] = {"parameters": weight_count(shapes.module), "quantised": sum(shapes.quantised)}
    found |= {"trained": sum(shapes.trained_by_kind.values()), "attention": shown.attention}
    found["stored_bytes_of_quantised"] = sum(x.stored_bits for x in quant_layers(shapes.module).values()) // 8
    found["flops_per_token"] = operations(shapes, shown) // (options.batch_size * options.length)
    devices_by_name = {device.name: _on(device, shapes, options) for device in devices}
    return found | {"bytes": parts, "total_bytes": sum(parts.values()), "devices": devices_by_name}


def shown_device(options: EstimateOptions, devices: Sequence[Device]) -> tuple[str, Device | None]:
    """Return the `--device` that the settings or else `--for` names first, and the first listed of that kind."""
    own = "tpu" if options.run.tpu else options.run.device
    kind = devices[0].device if own == "auto" else own
    return kind, next((device for device in devices if device.device == kind), None)


def _set_for(options: EstimateOptions, kind: str, device: Device | None) -> EstimateOptions:
    """Return settings whose `attention` and `loss_chunk_mb` are what a run on the device would take."""
    memory = 1e9 * device.memory_gb if device else None
    attention = attention_on(kind) if options.attention == "auto" else options.attention
    chunk_mb = options.loss_chunk_mb or default_loss_chunk_mb(kind, memory)
    return replace(options, attention=attention, loss_chunk_mb=chunk_mb)


def _parts(shapes: Shapes, options: EstimateOptions, device: Device | None) -> dict[str, int]:
    adapter, trained, is_loop = shapes.adapter, sum(shapes.trained_by_kind.values()), options.attention == "xla"
    sharded_over = device.chips if device and options.run.chips.shard_base else 1
    step = step_bytes(shapes, options)
    if is_loop and DTYPES[options.run.dtype] == torch.float32:  # all are rounded to bfloat16 before the loop
        linear = sum(m.in_features * m.out_features for m in shapes.module.modules() if isinstance(m, nn.Linear))
        step["formed weights"] += 2 * (linear - (sum(shapes.quantised) if shapes.weight_gradients else 0))
    sizes = {"weights": _weights(shapes, is_loop, sharded_over)}
    sizes |= {"adapter": sum(p.numel() * p.element_size() for p in adapter)} if adapter else {}
    sizes |= {"gradients": 4 * trained, "optimizer state": (12 if shapes.averaged else 8) * trained, **step}
    # Ids, mask and top-K entries of this micro-batch and of the next one, which is fetched meanwhile.
    return sizes | {"cached head": 2 * options.batch_size * (options.length - 1) * (options.head_k * (8 + 4) + 21)}


def _weights(shapes: Shapes, is_loop: bool, chips: int) -> int:
    """Return the bytes of what is no adapter: of frozen matrices a chip's share and the largest layer."""
    module, layers = shapes.module, quant_layers(shapes.module)
    without = {id(p) for p in shapes.adapter}
    if is_loop:
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


def _on(device: Device, shapes: Shapes, options: EstimateOptions) -> dict[str, Any]:
    """Return what a run takes on a device: each chip computes its own micro-batches of every step."""
    options = _set_for(options, device.device, device)
    total, (seconds, limits) = sum(_parts(shapes, options, device).values()), step_time(shapes, options, device)
    micro_batches = options.max_steps * options.accumulation_steps
    tokens, hours = options.batch_size * options.length * device.chips, micro_batches * seconds / 3600
    found: dict[str, Any] = {"attention": options.attention, "seconds_by_bound": limits, "hours": hours}
    found |= {"tokens": micro_batches * tokens, "tokens_per_s": tokens / seconds}
    found |= {"usd": hours * device.chips * device.usd_per_hour, "bound": max(limits, key=limits.__getitem__)}
    found["memory_bytes"] = int(device.memory_gb * 1e9)
    return found | needing(total, found["memory_bytes"])


def needing(total_bytes: int, memory_bytes: int) -> dict[str, Any]:
    """Return what a plan says of a device's memory: what is needed of it, and whether that fits."""
    return {"total_bytes": total_bytes, "fits": total_bytes < 0.9 * memory_bytes}


def meta_model(name: str) -> tuple[Any, Any]:
    """Return config and dense model, on the meta device, of a config.json or GGUF file; ModelError: it makes none."""
    file = Path(name).expanduser()
    read = config_of(read_header(file)) if file.suffix == GGUF and file.is_file() else None
    if (config_file := file / "config.json").is_file():
        check_folder(config_file.parent, (config_file.name,))
        read_object(config_file)
    with errors_explained(ModelError, f"model: {name} has no config.json that transformers can build"):
        auto = models.transformers.AutoConfig
        config = auto.from_pretrained(name, trust_remote_code=False) if read is None else auto.for_model(**read)
        split_experts(module := models.on_meta(config))
        return config, module


def meta_student(name: str, chosen: Preset | None, dtype: torch.dtype) -> tuple[Any, nn.Module]:
    """Return config and module of a student on the meta device, of codes as chosen or stored; ModelError: as both."""
    config, module = meta_model(name)
    stored = getattr(config, "quantization_config", None)
    stored = stored if stored is None or isinstance(stored, dict) else stored.to_dict()
    if stored is not None and method_of({"quantization_config": stored}) in READERS and chosen is None:
        stored = None  # read as dense weights
    if stored is not None and stored.get("quant_method") != models.QUANT_METHOD:
        raise ModelError(f"model: {name} is quantised by {stored.get('quant_method')}; give the original")
    if stored is not None and chosen is not None:
        raise ModelError(f"model: {name} is quantised already; give the original, or no --preset and --from-scratch")
    chosen = chosen if stored is None else Preset.from_dict(stored["preset"])
    if chosen is not None:
        make_quant_skeleton(module, chosen)
    models.cast(module, dtype)
    return config, module


def formed_bytes(module: nn.Module, dtype: torch.dtype) -> int:
    """Return the bytes of the training layers' weights that a forward forms and keeps for its backward pass."""
    formed = 0
    for layer in quant_layers(module).values():
        if any(parameter.requires_grad for parameter in layer.parameters()):
            with LiveBytes(*layer.parameters(), *layer.buffers()) as live:
                before = live.now
                weight = layer.effective().to(dtype)
                formed += live.now - before
                del weight
    return formed


def skeleton(options: EstimateOptions, blockwise: bool = False) -> Shapes:
    """Build a student with adapter on the meta device; `blockwise`: as the last decoder layer trains there."""
    chosen = None if options.preset is None else preset(options.preset, options.keep)
    dtype, rank, scales = DTYPES[options.run.dtype], options.lora.rank, options.train_scales
    config, module = meta_student(str(options.model), chosen, dtype)
    ranks = None if options.lora.recovery_r else allocated_ranks(Path(str(options.model)).expanduser())
    add_lora(module, options.lora, ranks=ranks)  # after the cast, as a run does: its factors stay float32
    inside = f"{blocks_of(module)}.{config.get_text_config().num_hidden_layers - 1}" if blockwise else ""
    groups = recovery_parts(models.CausalLM(module, Path()), scales, options.train_norms, dtype, inside)
    shapes = Shapes(config.get_text_config(), module, groups, rank, scales, 0)
    formed, passes = scales * dtype.itemsize * sum(shapes.quantised), BLOCK_PASSES if blockwise else 2
    return replace(shapes, formed_bytes=formed, passes=passes)
