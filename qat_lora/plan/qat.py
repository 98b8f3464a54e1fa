"""`qat --dry-run`: what training a quantised model itself would train, take and see.

The student is put into its training state by the call that the run makes (`setup/trainable.py`), so what trains is
counted, not modelled. So are the weights that a forward forms anew from codes and scales: each layer forms its own on
the meta device while the bytes that autograd keeps of it are counted.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from qat_lora.errors import ConfigError, ModelError
from qat_lora.layers.convert import make_quant_skeleton, quant_layers
from qat_lora.models.load import DTYPES, QUANT_METHOD, CausalLM, cast, resolve_model
from qat_lora.options import CacheBuildOptions, QatOptions
from qat_lora.plan.devices import attention_on
from qat_lora.plan.dry_run import (
    HEAD_K,
    DryRun,
    cache_of,
    check_cache,
    device_of,
    replicas_of,
    training_estimate,
    training_report,
    training_text,
)
from qat_lora.plan.memory import GIB, Shapes, meta_model, stored_quantisation
from qat_lora.plan.quantize import fisher_bytes
from qat_lora.quant.presets import Preset
from qat_lora.registry import Requirements
from qat_lora.runtime.host.memory import LiveBytes
from qat_lora.runtime.launch.select import runs_on_host
from qat_lora.setup.trainable import check_parts, chosen_preset, trained_parts

LENGTH = CacheBuildOptions.length
"""Tokens of a row where there is no cache to ask; what `cache build` makes."""


def plan_qat(options: QatOptions) -> DryRun:
    """Plan the training of a quantised model.

    Raises:
        ModelError: a model has no config.json here or on the Hub, or the checkpoint is no folder here.
        CacheError: the cache is there and does not fit, or is no cache.
        ConfigError: a global batch that does not divide, or parts that the student does not have.
    """
    assumed: list[str] = []
    replicas = replicas_of(options.run, assumed)
    accumulation = options.loop.accumulation(replicas)
    config, student, full = _models(options)
    dataset = cache_of(options)
    length, head_k = (dataset.manifest.fingerprint.length, dataset.k) if dataset else (LENGTH, options.head_k or HEAD_K)
    name = str(options.model if options.from_scratch else options.checkpoint)
    asked = training_estimate(options, name, length, head_k, device_of(options.run), accumulation)
    assumed += check_cache(dataset, asked, options.kd_cache_dir, student, "what `cache build` makes")
    shapes = _shapes(options, config, student)
    shown = f"{name} at {chosen_preset(options).name}" if options.from_scratch else name
    report = training_report(shapes, asked, shown, replicas, len(dataset) if dataset else None, assumed)
    whole, blockwise = 4 * report["parameters"], options.blockwise.blockwise_steps > 0
    stored = report.pop("stored_bytes_of_quantised") + 4 * (report["parameters"] - report["quantised"])
    report |= {
        "trained_by_kind": shapes.trained_by_kind,
        "stored_bytes": stored,
        # The original in float32, and with it the model that is quantised, or what reconstruction needs of both.
        "start_bytes": whole * max(2 * options.from_scratch, (options.from_scratch + 2) * blockwise),
        "scratch_bytes": fisher_bytes(student.module, options.init, options.metric) if options.from_scratch else 0,
        "host_bytes": whole if full and (options.mergeable or "weights" in options.train_parts) else 0,
    }
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in shapes.trained_by_kind.items())
    host = (("while the start is made", report["start_bytes"]), ("while it trains", report["host_bytes"]))
    more = [f"host     {size / GIB:.3f} GiB of float32 weights beside it, {when}" for when, size in host if size]
    return DryRun(report, training_text(report, kinds, asked.utilisation, more), _requirements(options, report))


def _requirements(options: QatOptions, report: dict[str, Any]) -> Requirements:
    start, host, total = report["start_bytes"], report["host_bytes"], report["total_bytes"]
    disk = (options.loop.keep_checkpoints + 1) * 12 * report["trained"] + (3 + (start > 0)) * report["stored_bytes"]
    disk += report["scratch_bytes"]
    if runs_on_host(options.run.device, options.run.tpu):
        memory = max(total + host, start)
        return Requirements("this training", memory, memory, disk)
    original = 4 * report["parameters"] if options.from_scratch else 0  # on the host while its copy is quantised
    return Requirements("this training", max(total, start - original), max(host, start), disk)


def _shapes(options: QatOptions, config: Any, student: CausalLM) -> Shapes:
    """Put the student into its training state, and count what a forward forms of its layers."""
    groups = trained_parts(student, options, None)
    formed = _formed_bytes(student.module, torch.bfloat16 if options.loop.autocast else DTYPES[options.run.dtype])
    if options.loop.gradient_checkpointing and attention_on(device_of(options.run)) == "xla":
        formed //= config.num_hidden_layers  # counted as on other devices: nobody measured what XLA keeps of these
    return Shapes(
        config,
        student.module,
        groups,
        adapter_rank=1,  # there is no adapter; rank 1 adds next to nothing to the activations
        weight_gradients=True,  # whatever trains, gradients reach every quantised weight
        formed_bytes=formed,
        averaged=options.train.ema > 0,
    )


def _models(options: QatOptions) -> tuple[Any, CausalLM, CausalLM | None]:
    """Return text config, student and the full-precision model, if one is named, on the meta device."""
    full = None if options.model is None else CausalLM(meta_model(options.model)[1], Path(options.model))
    folder = Path(str(options.model)) if options.from_scratch else _checkpoint(str(options.checkpoint))
    config, module = meta_model(str(folder))
    stored = stored_quantisation(config)
    if options.from_scratch:
        if stored is not None:
            raise ConfigError(f"model: {options.model} is quantised already; give it as --checkpoint")
        check_parts(options, full, None)
        chosen = chosen_preset(options)
    elif stored is None or stored.get("quant_method") != QUANT_METHOD:
        raise ConfigError(f"checkpoint: {options.checkpoint} has no quantised layers; give --from-scratch --model")
    else:
        chosen = Preset.from_dict(stored["preset"])
    make_quant_skeleton(module, chosen)
    cast(module, DTYPES[options.run.dtype])
    student = CausalLM(module, folder)
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


def _formed_bytes(module: nn.Module, dtype: torch.dtype) -> int:
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
