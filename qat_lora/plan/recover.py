"""`recover --dry-run`: what a recovery would train, take and see."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from qat_lora.errors import ConfigError, ModelError
from qat_lora.models.load import FILE_SUFFIXES, CausalLM, resolve_model
from qat_lora.options import EstimateOptions, RecoverOptions
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
from qat_lora.plan.memory import skeleton
from qat_lora.registry import Requirements
from qat_lora.runtime.launch.select import runs_on_host


def recovery_estimate(
    options: RecoverOptions, student: str, length: int, head_k: int, device: str, accumulation: int | None = None
) -> EstimateOptions:
    """Return the settings from which the memory of a recovery on a device is estimated."""
    accumulation = options.loop.accumulation_steps if accumulation is None else accumulation
    asked = training_estimate(options, student, length, head_k, device, accumulation)
    return replace(asked, train_scales=options.train_scales, train_norms=options.train_norms, lora=options.lora)


def plan_recover(options: RecoverOptions) -> DryRun:
    """Plan a recovery.

    Raises:
        ModelError: the student has no config.json here or on the Hub.
        CacheError: the cache is there and does not fit, or is no cache.
        ConfigError: a global batch that does not divide, or patterns that match no layer.
    """
    assumed: list[str] = []
    replicas = replicas_of(options.run, assumed)
    accumulation = options.loop.accumulation(replicas)
    student = _student(options)
    dataset = cache_of(options) if options.uses_cache else None
    if not options.uses_cache and options.num_rows is None:
        assumed.append("the text is not read, so the number of its rows is not known")
    length = dataset.manifest.fingerprint.length if dataset else options.length
    head_k = dataset.k if dataset else (options.head_k or HEAD_K) if options.uses_cache else 0
    asked = recovery_estimate(options, student, length, head_k, device_of(options.run), accumulation)
    shapes = skeleton(asked)
    if options.train_scales and not shapes.quantised:
        raise ConfigError("train_scales: the student has no quantised layers; leave it out")
    if options.uses_cache:
        model = CausalLM(shapes.module, Path(student))
        assumed += check_cache(dataset, asked, options.kd_cache_dir, model, "this command's own settings")
    report = training_report(shapes, asked, student, replicas, len(dataset) if dataset else options.num_rows, assumed)
    stored = report.pop("stored_bytes_of_quantised") + 2 * (report["parameters"] - report["quantised"])
    report["stored_bytes"] = stored
    trained, total = report["trained"], report["total_bytes"]
    text = training_text(report, f"{trained:,} numbers (rank {options.lora.recovery_r})", asked.utilisation)
    # A checkpoint: what trains, two moments, perhaps an average. An export: halves, and the base of trained scales.
    disk = (options.loop.keep_checkpoints + 1) * 16 * trained + 3 * (2 * trained + options.train_scales * stored)
    host = total if runs_on_host(options.run.device, options.run.tpu) else report["bytes"]["weights"]
    return DryRun(report, text, Requirements("this recovery", total, host, disk))


def _student(options: RecoverOptions) -> str:
    """Return the student's folder, or the name under which the Hub has the config of a `--model`."""
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
