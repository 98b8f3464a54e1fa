"""What a command would do, from shapes alone: `--dry-run` of `recover`, `quantize` and (`planning_qat`) `qat`.

A mistake in a recipe should not wait for the device, the download or the first hour to be found. So the student is
built on torch's meta device from its config.json, by the calls that the run itself makes; the cache's manifest is read,
if the cache is there; and nothing is written, fetched (but a config) or started. The device that the recipe names need
not be here. What cannot be known yet is assumed from the command's own settings and named as assumed: a number that
is printed without its condition would be believed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.errors import ConfigError, DeviceError, ModelError
from qat_lora.layers.calibrate.fisher import kept_shape
from qat_lora.layers.convert import LM_HEAD, bits_per_weight, check_reach, make_quant_skeleton, quant_layers
from qat_lora.models.load import FILE_SUFFIXES, CausalLM, load_tokenizer, resolve_model, tokenizer_sha256
from qat_lora.options import EstimateOptions, QatOptions, QuantizeOptions, RecoverOptions, RunConfig
from qat_lora.plan.devices import attention_on, likely
from qat_lora.plan.memory import GIB, meta_model, skeleton, summary
from qat_lora.quant.initialize import NEED_TEXT
from qat_lora.quant.presets import preset
from qat_lora.runtime.launch.select import choose, look, plan_run
from qat_lora.setup.training_data import cache_lessons
from qat_lora.terminal import redact

HEAD_K = 128
"""Entries of a cached head, where the cache is not there to be asked; what `cache build` keeps."""


def estimate_options(options: RecoverOptions, student: str, length: int, head_k: int, device: str) -> EstimateOptions:
    """Return the settings from which the memory of a recovery on a device is estimated."""
    trained = {"train_scales": options.train_scales, "train_norms": options.train_norms, "lora": options.lora}
    return training_estimate(options, student, length, head_k, device, trained)


def training_estimate(
    options: RecoverOptions | QatOptions,
    student: str,
    length: int,
    head_k: int,
    device: str,
    trained: dict[str, Any],
) -> EstimateOptions:
    """Return the settings from which a training run's memory is estimated; `trained`: those of what trains."""
    loop = options.loop
    return EstimateOptions(
        **trained,
        model=student,
        length=length,
        head_k=head_k,
        batch_size=loop.batch_size,
        accumulation_steps=loop.accumulation_steps,
        gradient_checkpointing=loop.gradient_checkpointing,
        loss_chunk_mb=options.objective.loss_chunk_mb,
        max_steps=loop.max_steps,
        attention=attention_on(device),
        run=options.run,
    )


def plan_recovery(options: RecoverOptions) -> dict[str, Any]:
    """Return (and print, unless `--json`) what a recovery would train, take and see.

    Raises:
        ModelError: the student has no config.json here or on the Hub.
        CacheError: the cache is there and does not fit, or is no cache.
        ConfigError: a global batch that does not divide, or patterns that match no layer.
    """
    assumed: list[str] = []
    replicas = replicas_of(options.run, assumed)
    accumulation = options.loop.accumulation(replicas)
    student = _student(options)
    dataset = _cache(options, assumed)
    length = dataset.manifest.fingerprint.length if dataset else options.length
    head_k = dataset.k if dataset else (options.head_k or HEAD_K) if options.uses_cache else 0
    device = device_of(options.run)
    asked = replace(estimate_options(options, student, length, head_k, device), accumulation_steps=accumulation)
    built = skeleton(asked)
    if options.train_scales and not quant_layers(built[1]):
        raise ConfigError("train_scales: the student has no quantised layers; leave it out")
    if dataset:
        check_shapes(dataset, student, built[1])
    elif options.uses_cache:
        assumed.append(no_cache(str(options.kd_cache_dir), length, head_k, "this command's own settings"))
    rows = len(dataset) if dataset else options.num_rows
    step_rows = options.loop.batch_size * accumulation * replicas
    found = summary(*built, asked, likely(device, replicas))
    plan: dict[str, Any] = {
        "student": student,
        **{key: found[key] for key in ("parameters", "quantised", "trained", "bytes", "total_bytes")},
        "stored_bytes": found["stored_bytes_of_quantised"] + 2 * (found["parameters"] - found["quantised"]),
        "replicas": replicas,
        "batch_size": options.loop.batch_size,
        "accumulation_steps": accumulation,
        "effective_batch": step_rows,
        "length": length,
        "head_k": head_k,
        "steps": options.loop.max_steps,
        "tokens": options.loop.max_steps * step_rows * length,
        "epochs": options.loop.max_steps * step_rows / rows if rows else None,
        "devices": found["devices"],
        "assumed": assumed,
    }
    if not options.run.json:
        trained = f"{plan['trained']:,} numbers (rank {options.lora.recovery_r})"
        print(redact("\n".join(plan_lines(plan, trained, asked.utilisation))), flush=True)
    return plan


def plan_quantising(options: QuantizeOptions) -> dict[str, Any]:
    """Return (and print, unless `--json`) what a quantised model would weigh.

    Raises:
        ModelError: the model has no config.json here or on the Hub, or is quantised already.
        ConfigError: an unknown preset, or patterns that match no layer.
    """
    config, module = meta_model(str(options.model))
    if getattr(config, "quantization_config", None) is not None:
        raise ModelError(f"model: {options.model} is quantised already; give the full-precision model")
    parameters = sum(p.numel() for p in module.parameters())
    chosen = preset(options.preset, options.keep, options.override, options.quantize_head)
    check_reach(module, chosen)
    make_quant_skeleton(module, chosen)
    layers, bits = quant_layers(module), bits_per_weight(module)
    quantised = sum(layer.in_features * layer.out_features for layer in layers.values())
    codes_bytes = int(bits["base"] * quantised) // 8
    has_text = options.text.dataset is not None or options.kd_cache_dir is not None
    plan: dict[str, Any] = {
        "model": str(options.model),
        "preset": options.preset,
        "parameters": parameters,
        "quantised": quantised,
        "layers": len(layers),
        "bits_per_weight": bits["base"],
        "bits_per_weight_model": bits["model"],
        "stored_bytes": int(bits["model"] * parameters) // 8,
        "weights_bytes": max(stored_bytes(config) * parameters, 4 * (parameters - quantised) + codes_bytes),
        "scratch_bytes": fisher_bytes(module, options.init, options.metric) if has_text else 0,
        "inputs_and_outputs": sum(layer.in_features + layer.out_features for layer in layers.values()),
    }
    if not options.run.json:
        print(
            f"dry run: shapes alone; nothing is written\n"
            f"model    {plan['model']}: {parameters:,} parameters, {plan['quantised']:,} of them in {len(layers)} "
            f"layers that {options.preset} stores\n"
            f"stored   {bits['base']:.2f} bits a weight in these layers, {bits['model']:.2f} in the model, "
            f"{plan['stored_bytes'] / GIB:.3f} GiB on disk without adapter starts\n"
            f"memory   {plan['weights_bytes'] / GIB:.3f} GiB for the weights, each layer as stored until its turn, "
            f"and the calibration beside them\n"
            f"scratch  {plan['scratch_bytes'] / GIB:.3f} GiB on disk while it is quantised",
            flush=True,
        )
    return plan


def stored_bytes(config: Any) -> int:
    """Return bytes of a weight in a model's files, as its config says; without a word of it, 4."""
    dtype = getattr(config, "dtype", None)
    return dtype.itemsize if isinstance(dtype, torch.dtype) else 4


def fisher_bytes(module: torch.nn.Module, init: str, metric: str) -> int:
    """Return what `--metric fisher` keeps on disk of every layer while a student is made."""
    if metric != "fisher" or init not in NEED_TEXT:
        return 0
    inside = (layer for name, layer in quant_layers(module).items() if not LM_HEAD.search(name))
    return sum(4 * math.prod(kept_shape(layer.out_features)) for layer in inside)


def device_of(run: RunConfig) -> str:
    """Return the device that a run names, which need not be here, or what `auto` finds here."""
    if run.tpu or run.device != "auto":
        return "tpu" if run.tpu else run.device
    try:
        return choose("auto", False, look()).kind
    except DeviceError:  # PJRT_DEVICE names a TPU, and PyTorch/XLA is elsewhere
        return "tpu"


def replicas_of(run: RunConfig, assumed: list[str]) -> int:
    """Return on how many replicas the run would be; where its machine is not here, what its settings say."""
    try:
        chips = plan_run(run.device, run.tpu, run.chips).chips
    except DeviceError:
        asked = run.chips.num_chips
        chips = int(asked) if asked and asked != "all" else 1 if asked is None else 0
    if not chips:
        assumed.append("the number of chips is that of a machine that is not here: 1 is taken; give --num-chips N")
    return chips or 1


def _student(options: RecoverOptions) -> str:
    """Return the student's folder, or the name under which the Hub has the config of a `--model`.

    Raises:
        ModelError: the checkpoint is no folder here; checkpoints on the Hub are for real runs.
    """
    name = str(options.checkpoint or options.model)
    path = Path(name).expanduser()
    if path.exists() or path.suffix in FILE_SUFFIXES:
        return str(resolve_model(name))
    if options.checkpoint is not None:
        raise ModelError(
            f"checkpoint: there is no folder {path}, and a dry run reads its config.json; make it with `qat-lora "
            "quantize`, or ask `qat-lora estimate --model MODEL --preset PRESET`, which needs no checkpoint"
        )
    return name


def _cache(options: RecoverOptions, assumed: list[str]) -> KDCacheDataset | None:
    """Return the run's cache, None where there is none yet.

    Raises:
        CacheError: something is there, and it is no complete cache or lacks what the objective reads.
    """
    if not options.uses_cache:
        if options.num_rows is None:
            assumed.append("the text is not read, so the number of its rows is not known")
        return None
    if not is_there(str(options.kd_cache_dir)):
        return None
    rows: KDCacheDataset = cache_lessons(options).rows
    return rows


def is_there(path: str) -> bool:
    """Tell whether a cache is where a run would look for it; of a URL that is assumed."""
    return "://" in path or Path(path).expanduser().exists()


def check_shapes(dataset: KDCacheDataset, student: str, module: Any) -> None:
    """Raise CacheError where the student cannot learn from the cache; its tokenizer is compared if it is here."""
    model = CausalLM(module, Path(student))
    here = (Path(student) / "tokenizer.json").is_file()
    sha256 = tokenizer_sha256(load_tokenizer(Path(student))) if here else None
    dataset.check_student(sha256, model.vocab_size, model.max_positions)


def no_cache(path: str, length: int, head_k: int, source: str) -> str:
    """Return what a plan assumes of a cache that is not there."""
    return (
        f"{path} is not there yet: rows of {length:,} tokens and {head_k} entries a position are taken from {source}, "
        "and the fit of the tokenizer is not checked"
    )


def plan_lines(plan: dict[str, Any], trained: str, utilisation: float, more: Sequence[str] = ()) -> list[str]:
    """Return what is printed of a training run's plan, with further lines before what is assumed."""
    replicas, epochs = plan["replicas"], plan["epochs"]
    lines = [
        "dry run: shapes alone; nothing is written, and no device is used",
        f"student  {plan['student']}: {plan['parameters']:,} parameters, {plan['quantised']:,} of them quantised",
        f"trained  {trained}",
        f"step     {plan['batch_size']} rows x {plan['accumulation_steps']} micro-batches x {replicas} "
        f"replica{'s' if replicas > 1 else ''}: effective batch {plan['effective_batch']}, "
        f"{plan['effective_batch'] * plan['length']:,} tokens",
        f"run      {plan['steps']:,} steps, {plan['tokens']:,} tokens" + (f", {epochs:.2f} epochs" if epochs else ""),
        f"memory   {plan['total_bytes'] / GIB:.3f} GiB a replica: "
        + ", ".join(f"{name} {size / GIB:.3f}" for name, size in plan["bytes"].items()),
    ]
    for name, there in plan["devices"].items():
        fits = "fits" if there["fits"] else "does not fit"
        lines.append(f"time     {there['hours']:.2f} h on {name} ({fits}), at {utilisation:.0%} of the peak rate")
    return [*lines, *more, *(f"assumed  {text}" for text in plan["assumed"])]
