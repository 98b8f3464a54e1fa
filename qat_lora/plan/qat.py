"""What `qat` would do, from shapes alone: `qat --dry-run`.

The student is put into its training state on torch's meta device by the call that the run makes (`qat_parts`), so what
trains is counted, not modelled. So are the weights that a forward forms anew from codes and scales: each layer forms
its own here, without memory, while the bytes that autograd keeps of it are watched. What comes and goes with tokens is
the estimate of a recovery, whose layers are the same.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.errors import ConfigError, ModelError
from qat_lora.layers.convert import make_quant_skeleton, quant_layers
from qat_lora.layers.lora import LoraConfig
from qat_lora.models.load import DTYPES, QUANT_METHOD, CausalLM, cast, resolve_model
from qat_lora.options import CacheBuildOptions, QatOptions
from qat_lora.plan.devices import likely
from qat_lora.plan.memory import GIB, meta_model, summary
from qat_lora.plan.recover import (
    HEAD_K,
    check_shapes,
    device_of,
    fisher_bytes,
    is_there,
    no_cache,
    plan_lines,
    replicas_of,
    training_estimate,
)
from qat_lora.quant.presets import Preset
from qat_lora.runtime.host.memory import LiveBytes
from qat_lora.setup.objective import check_arrays
from qat_lora.setup.trainable import check_parts, chosen_preset, trained_parts
from qat_lora.terminal import redact

LENGTH = CacheBuildOptions.length
"""Tokens of a cached row, where the cache is not there to be asked; what `cache build` makes."""


def plan_qat(options: QatOptions) -> dict[str, Any]:
    """Return (and print, unless `--json`) what training a quantised model would train, take and see.

    Raises:
        ModelError: a model has no config.json here or on the Hub, or the checkpoint is no folder here.
        CacheError: the cache is there and does not fit, or is no cache.
        ConfigError: a global batch that does not divide, or parts that the student does not have.
    """
    assumed: list[str] = []
    replicas = replicas_of(options.run, assumed)
    loop = replace(options.loop, accumulation_steps=options.loop.accumulation(replicas), global_batch_size=None)
    config, student, full = _models(options)
    dataset = _cache(options)
    length, head_k = (dataset.manifest.fingerprint.length, dataset.k) if dataset else (LENGTH, options.head_k or HEAD_K)
    name = str(options.model if options.from_scratch else options.checkpoint)
    if dataset:
        check_shapes(dataset, str(student.folder), student.module)
    else:
        assumed.append(no_cache(str(options.kd_cache_dir), length, head_k, "what `cache build` makes"))
    device = device_of(options.run)
    # Whatever trains, gradients reach every quantised weight. There is no adapter; rank 1 is nothing beside the rest.
    trains = {"train_scales": True, "lora": LoraConfig(recovery_r=1)}
    asked = training_estimate(replace(options, loop=loop), name, length, head_k, device, trains)
    devices = likely(device, replicas)
    found = summary(config, student.module, asked, devices)
    groups = trained_parts(student, options, None)
    trained = {kind: sum(p.numel() for p in tensors.values()) for kind, tensors in groups.items()}
    parts = _held_bytes(student.module, sum(trained.values()), options.train.ema > 0)
    formed = _formed_bytes(student.module, torch.bfloat16 if loop.autocast else DTYPES[options.run.dtype])
    parts["formed weights"] = formed // config.num_hidden_layers if loop.gradient_checkpointing else formed
    parts |= {part: size for part, size in found["bytes"].items() if part not in (*parts, "adapter")}
    blockwise = options.blockwise.blockwise_steps > 0
    total, rows = sum(parts.values()), len(dataset) if dataset else None
    step_rows, whole = loop.batch_size * loop.accumulation_steps * replicas, 4 * found["parameters"]
    fits = {d.name: {**found["devices"][d.name], "fits": total < 0.9 * d.memory_gb * 1e9} for d in devices}
    plan: dict[str, Any] = {
        "student": f"{name} at {chosen_preset(options).name}" if options.from_scratch else name,
        "parameters": found["parameters"],
        "quantised": found["quantised"],
        "trained": sum(trained.values()),
        "trained_by_kind": trained,
        "bytes": parts,
        "total_bytes": total,
        "stored_bytes": found["stored_bytes_of_quantised"] + 4 * (found["parameters"] - found["quantised"]),
        # The original in float32, and beside it the model that is quantised, or what reconstruction needs of both.
        "start_bytes": whole * max(2 * options.from_scratch, (options.from_scratch + 2) * blockwise),
        "scratch_bytes": fisher_bytes(student.module, options.init, options.metric) if options.from_scratch else 0,
        "host_bytes": whole if full and (options.mergeable or "weights" in options.train_parts) else 0,
        "replicas": replicas,
        "batch_size": loop.batch_size,
        "accumulation_steps": loop.accumulation_steps,
        "effective_batch": step_rows,
        "length": length,
        "head_k": head_k,
        "steps": loop.max_steps,
        "tokens": loop.max_steps * step_rows * length,
        "epochs": loop.max_steps * step_rows / rows if rows else None,
        "devices": fits,
        "assumed": assumed,
    }
    if not options.run.json:
        kinds = ", ".join(f"{count:,} {kind}" for kind, count in trained.items())
        host = (("while the start is made", plan["start_bytes"]), ("while it trains", plan["host_bytes"]))
        more = [f"host     {size / GIB:.3f} GiB of float32 weights beside it, {when}" for when, size in host if size]
        print(redact("\n".join(plan_lines(plan, kinds, asked.utilisation, more))), flush=True)
    return plan


def _models(options: QatOptions) -> tuple[Any, CausalLM, CausalLM | None]:
    """Return the student's text config, the student and the full-precision model, if one is named, without memory.

    Raises:
        ModelError, ConfigError: what the run would refuse of them.
    """
    full = None if options.model is None else CausalLM(meta_model(options.model)[1], Path(options.model))
    if options.from_scratch:
        config, module = meta_model(str(options.model))
        if getattr(config, "quantization_config", None) is not None:
            raise ConfigError(f"model: {options.model} is quantised already; give it as --checkpoint")
        check_parts(options, full, None)
        chosen = chosen_preset(options)
    else:
        folder = _checkpoint(str(options.checkpoint))
        config, module = meta_model(str(folder))
        stored = getattr(config, "quantization_config", None) or {}
        stored = stored if isinstance(stored, dict) else stored.to_dict()
        if stored.get("quant_method") != QUANT_METHOD:
            raise ConfigError(f"checkpoint: {options.checkpoint} has no quantised layers; give --from-scratch --model")
        chosen = Preset.from_dict(stored["preset"])
    make_quant_skeleton(module, chosen)
    cast(module, DTYPES[options.run.dtype])
    student = CausalLM(module, Path(str(options.model)) if options.from_scratch else folder)
    if not options.from_scratch:
        check_parts(options, full, student)
    return config.get_text_config(), student, full


def _checkpoint(name: str) -> Path:
    path = Path(name).expanduser()
    if not (path.exists() or path.suffix):
        raise ModelError(
            f"checkpoint: there is no folder {path}, and a dry run reads its config.json; make it with `qat-lora "
            "quantize`, or give --from-scratch --model MODEL"
        )
    return resolve_model(name)


def _cache(options: QatOptions) -> KDCacheDataset | None:
    """Return the run's cache, None where there is none yet.

    Raises:
        CacheError: something is there, and it is no complete cache or lacks what the objective reads.
    """
    path = str(options.kd_cache_dir)
    if not is_there(path):
        return None
    dataset = KDCacheDataset(path, k=options.head_k, temperatures=options.objective.cached_temperatures)
    check_arrays(dataset, options.objective)
    return dataset


def _held_bytes(module: nn.Module, trained: int, averaged: bool) -> dict[str, int]:
    """Return bytes of what stays in memory for the whole run: all in its training state, and what AdamW adds."""
    stored = {id(tensor): tensor for tensor in (*module.parameters(), *module.buffers())}
    return {
        "weights": sum(tensor.numel() * tensor.element_size() for tensor in stored.values()),
        "gradients": 4 * trained,
        "optimizer state": (12 if averaged else 8) * trained,
    }


def _formed_bytes(module: nn.Module, dtype: torch.dtype) -> int:
    """Return what a forward forms of the training layers' weights and keeps for its backward pass."""
    formed = 0
    for layer in quant_layers(module).values():
        if any(parameter.requires_grad for parameter in layer.parameters()):
            with LiveBytes(*layer.parameters(), *layer.buffers()) as live:
                before = live.now
                weight = layer.effective().to(dtype)
                formed += live.now - before
                del weight
    return formed
