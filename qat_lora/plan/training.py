"""`recover --dry-run` and `qat --dry-run`: what a training would train, take and see.

A mistake in a recipe should not wait for the device, the download or the first hour to be found. So a dry run builds
the student on torch's meta device and puts it into its training state by the calls of the run itself
(`setup/trainable.py`): what trains is counted, not modelled, and so are the bytes that autograd keeps where `qat` forms
weights anew in each forward. It reads the cache's manifest if there is one, writes nothing, starts nothing and fetches
a config at most. What cannot be known yet is assumed, and listed as assumed.
"""

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.data.shuffle import steps_per_epoch
from qat_lora.errors import ConfigError, DeviceError, ModelError
from qat_lora.layers.calibrate.fisher import fisher_bytes
from qat_lora.models import load as models
from qat_lora.models.load import DTYPES, CausalLM, resolve_model
from qat_lora.options import CacheBuildOptions, EstimateOptions, QatOptions, RecoverOptions, RunConfig
from qat_lora.plan.devices import attention_on, likely
from qat_lora.plan.memory import GIB, IMPORTS_BYTES, forecast, formed_bytes, meta_model, meta_student, needing, skeleton
from qat_lora.plan.step import Shapes
from qat_lora.registry import DryRun, Requirements
from qat_lora.runtime.base import default_loss_chunk_mb
from qat_lora.runtime.launch.select import choose, look, plan_run, runs_on_host
from qat_lora.runtime.precision import with_dtype
from qat_lora.setup.common import with_teacher
from qat_lora.setup.trainable import (
    check_is_student,
    check_parts,
    check_scales,
    check_twin,
    chosen_preset,
    trained_parts,
)
from qat_lora.setup.training import cache_training_data
from qat_lora.train.lr_probe import probe_steps
from qat_lora.train.optim import follows_lr

HEAD_K, LENGTH = 128, CacheBuildOptions.length  # of a position and of a row, where there is no cache to ask
Training = RecoverOptions | QatOptions


def plan_recover(options: RecoverOptions) -> DryRun:
    """Plan a recovery; ModelError: no config.json; CacheError: a cache that does not fit; ConfigError: a setting."""
    assumed: list[str] = []
    options = with_dtype(options, device_of(options.run))[0]
    replicas = replicas_of(options.run, assumed)
    accumulation = options.loop.accumulation(replicas)
    student = config_name(str(options.model)) if options.checkpoint is None else str(_folder(options.checkpoint))
    dataset = _cache(options)
    rows = len(dataset) if dataset else options.num_rows
    options = replace(options, loop=options.loop.for_rows(rows, replicas))
    if not options.uses_cache and options.num_rows is None:
        assumed.append("the text is not read, so the number of its rows is not known")
    own = {name: getattr(options, name) for name in ("train_scales", "train_norms", "lora")}
    asked = replace(_estimate(options, student, dataset, options.length, accumulation), **own)
    shapes = skeleton(asked, options.blockwise)
    model = CausalLM(shapes.module, Path(student))
    if dataset is not None:
        with contextlib.suppress(ModelError):  # its weights are not here
            check_is_student(model, str(options.checkpoint or options.model), dataset.fingerprint)
    check_scales(model, options.train_scales)
    if options.blockwise:
        if asked.attention == "xla" or replicas > 1:
            raise ConfigError("blockwise: one process on a CPU or GPU trains block by block; leave it out")
        check_twin(model, CausalLM(meta_model(str(options.model))[1], Path(str(options.model))))
    if options.uses_cache:
        assumed += check_cache(dataset, asked, options.kd_cache_dir, model, "this command's own settings")
    report = _report(options, shapes, asked, student, replicas, rows)
    stored = report.pop("stored_bytes_of_quantised") + 2 * (report["parameters"] - report["quantised"])
    report |= {"stored_bytes": stored, "assumed": assumed}
    states = 0
    if options.blockwise:
        layers, kept = shapes.config.num_hidden_layers, report["bytes"]["activations"]
        report["bytes"] |= {"activations": kept // layers, "full-precision layer": 4 * sum(shapes.quantised) // layers}
        report["bytes"]["imports"] = IMPORTS_BYTES * runs_on_host(options.run.device, options.run.tpu)
        report["total_bytes"] = total = sum(report["bytes"].values())
        for there in report["devices"].values():
            there |= needing(total, there["memory_bytes"])
        states = 16 * report["tokens"] * shapes.config.hidden_size
    trained, total = report["trained"], report["total_bytes"]
    kind = f"{trained:,} numbers (rank {options.lora.rank})" + (" of the last layer" if options.blockwise else "")
    # A checkpoint: what trains, two moments, perhaps an average. An export: halves, and the base of trained scales.
    disk = (options.loop.keep_checkpoints + 1) * 16 * trained + 3 * (2 * trained + options.train_scales * stored)
    disk += states
    beside = f", {states / GIB:.3f} of it hidden states while layers train one after the other" if states else ""
    text = _text(report, kind, asked.utilisation, [f"disk     {disk / GIB:.3f} GiB{beside}"])
    host = total if runs_on_host(options.run.device, options.run.tpu) else report["bytes"]["weights"]
    return DryRun(report, text, Requirements("this recovery", total, host, disk))


def plan_qat(options: QatOptions) -> DryRun:
    """Plan the training of a quantised model; ModelError: no config.json; others as `plan_recover`."""
    assumed: list[str] = []
    options = with_dtype(options, device_of(options.run))[0]
    replicas = replicas_of(options.run, assumed)
    accumulation = options.loop.accumulation(replicas)
    options = with_teacher(options)
    config, student, full = _models(options)
    dataset = _cache(options)
    rows = len(dataset) if dataset else None
    options = replace(options, loop=options.loop.for_rows(rows, replicas))
    name = str(options.model if options.from_scratch else options.checkpoint)
    asked = _estimate(options, name, dataset, LENGTH, accumulation)
    assumed += check_cache(dataset, asked, options.kd_cache_dir, student, "what `cache build` makes")
    groups = trained_parts(student, options, None)  # the student in its training state
    formed = formed_bytes(student.module, torch.bfloat16 if options.loop.autocast else DTYPES[options.run.dtype])
    # There is no adapter, and rank 1 adds next to nothing; whatever trains, gradients reach every quantised weight.
    shapes = Shapes(config, student.module, groups, 1, True, formed, averaged=options.train.ema > 0)
    shown = f"{name} at {chosen_preset(options).name}" if options.from_scratch else name
    report = _report(options, shapes, asked, shown, replicas, rows)
    whole, blockwise = 4 * report["parameters"], options.blockwise.blockwise_steps > 0
    stored = report.pop("stored_bytes_of_quantised") + 4 * (report["parameters"] - report["quantised"])
    # The original in float32, and with it the model that is quantised, or what reconstruction needs of both.
    start = whole * max(2 * options.from_scratch, (options.from_scratch + 2) * blockwise)
    scratch = fisher_bytes(student.module, options.init, options.metric) if options.from_scratch else 0
    host = whole if full and (options.mergeable or "weights" in options.train_parts) else 0
    report |= {"assumed": assumed, "trained_by_kind": shapes.trained_by_kind, "stored_bytes": stored}
    report |= {"start_bytes": start, "scratch_bytes": scratch, "host_bytes": host}
    kinds, total = ", ".join(f"{n:,} {kind}" for kind, n in shapes.trained_by_kind.items()), report["total_bytes"]
    beside = (("while the start is made", start), ("while it trains", host))
    more = [f"host     {size / GIB:.3f} GiB of float32 weights beside it, {when}" for when, size in beside if size]
    text = _text(report, kinds, asked.utilisation, more)
    disk = (options.loop.keep_checkpoints + 1) * 12 * report["trained"] + (3 + (start > 0)) * stored + scratch
    memory, of_host = max(total + host, start), max(host, start)
    if runs_on_host(options.run.device, options.run.tpu):
        of_host = memory
    else:  # the original is on the host while its copy is quantised
        memory = max(total, start - whole * options.from_scratch)
    return DryRun(report, text, Requirements("this training", memory, of_host, disk))


def device_of(run: RunConfig) -> str:
    """Return the device that a run names, which need not be here, or what `auto` finds here."""
    if run.tpu or run.device not in ("auto", "xla"):
        return "tpu" if run.tpu else run.device
    try:
        return choose(run.device, False, look()).name
    except DeviceError:  # PJRT_DEVICE names a TPU, and PyTorch/XLA is elsewhere
        return "tpu" if run.device == "auto" else "xla"


def replicas_of(run: RunConfig, assumed: list[str]) -> int:
    """Return the number of replicas of a run; where its machine is not here, as its settings say."""
    try:
        chips = plan_run(run.device, run.tpu, run.chips).chips
    except DeviceError:
        asked = run.chips.num_chips
        chips = int(asked) if asked and asked != "all" else 1 if asked is None else 0
    if not chips:
        assumed.append("the number of chips is that of a machine that is not here: 1 is taken; give --num-chips N")
    return chips or 1


def _cache(options: Training) -> KDCacheDataset | None:
    """Return the run's cache, None where there is none, or none yet; a URL is assumed to be there."""
    path = options.kd_cache_dir
    is_there = path is not None and ("://" in path or Path(path).expanduser().exists())
    return cache_training_data(options).rows if is_there else None


def check_cache(
    dataset: KDCacheDataset | None, asked: EstimateOptions, path: str | None, student: CausalLM, source: str
) -> list[str]:
    """Return what is assumed, from a `source`, of a cache that is not there; CacheError if one does not fit."""
    if dataset is None:
        sizes = f"rows of {asked.length:,} tokens and {asked.head_k} entries a position are taken from {source}"
        return [f"{path} is not there yet: {sizes}, and the fit of the tokenizer is not checked"]
    here = (student.folder / "tokenizer.json").is_file()
    sha256 = models.tokenizer_sha256(models.load_tokenizer(student.folder)) if here else None
    dataset.check_student(sha256, student.vocab_size, student.max_positions)
    return []


def _estimate(
    options: Training, student: str, dataset: KDCacheDataset | None, length: int, accumulation: int
) -> EstimateOptions:
    """Return the settings of the estimate of a run's steps; `length` is that of rows where there is no cache."""
    device, head_k = device_of(options.run), (options.head_k or HEAD_K) if options.kd_cache_dir else 0
    length, head_k = (dataset.fingerprint.length, dataset.k) if dataset else (length, head_k)
    given = {name: getattr(options.loop, name) for name in ("batch_size", "gradient_checkpointing", "max_steps")}
    given |= {"model": student, "length": length, "head_k": head_k, "accumulation_steps": accumulation}
    chunk_mb = options.objective.loss_chunk_mb or default_loss_chunk_mb(device)
    return EstimateOptions(**given, loss_chunk_mb=chunk_mb, attention=attention_on(device), run=options.run)


def _report(
    options: Training, shapes: Shapes, asked: EstimateOptions, student: str, replicas: int, rows: int | None
) -> dict[str, Any]:
    """Return what a training run would train, take and see; `rows` of its data are None where that is not known."""
    trained = [kind for kind, numbers in shapes.trained_by_kind.items() if numbers]
    tries = options.train.lr == "auto" and any(follows_lr(options.train, kind) for kind in trained)
    probe = probe_steps(asked.max_steps) if tries else 0  # as many usually find it, before the run
    timed = replace(asked, max_steps=asked.max_steps + probe)
    found = forecast(shapes, timed, likely(device_of(asked.run), replicas))
    step_rows = asked.batch_size * asked.accumulation_steps * replicas
    counted = ("parameters", "quantised", "trained", "bytes", "total_bytes", "stored_bytes_of_quantised", "devices")
    report = {"student": student} | {name: found[name] for name in counted} | {"replicas": replicas}
    report |= {name: getattr(asked, name) for name in ("batch_size", "accumulation_steps", "length", "head_k")}
    report |= {"effective_batch": step_rows, "steps": asked.max_steps, "lr_probe_steps": probe}
    epochs = asked.max_steps / steps_per_epoch(rows, step_rows) if rows else None
    return report | {"tokens": asked.max_steps * step_rows * asked.length, "epochs": epochs}


def _text(report: dict[str, Any], trained: str, utilisation: float, more: Sequence[str] = ()) -> str:
    form = Path(__file__).with_suffix(".txt").read_text(encoding="utf-8").rstrip()
    epochs, probe = report["epochs"], report["lr_probe_steps"]
    told = report | {"trained": trained, "s": "s" if report["replicas"] > 1 else ""}
    told["step_tokens"] = report["effective_batch"] * report["length"]
    told["epochs_text"] = f", {epochs:.2f} epochs" if epochs else ""
    told["probe_text"] = f"; before it, some {probe} steps to find the learning rate" if probe else ""
    told |= {"parts": parts_text(report["bytes"]), "gib": report["total_bytes"] / GIB}
    return "\n".join([form.format(**told), *last_lines(report, utilisation, more)])


def parts_text(sizes: Mapping[str, int]) -> str:
    """Return bytes by name as GiB in one line."""
    return ", ".join(f"{name} {size / GIB:.3f}" for name, size in sizes.items() if size)


def last_lines(report: Mapping[str, Any], utilisation: float, more: Sequence[str] = ()) -> list[str]:
    """Return a plan's lines of the time on each device, `more`, and what is assumed."""
    line, kinds = ", {tokens_per_s:,.0f} tokens/s, bound by {bound}, at {utilisation:.0%} of the peak rate", []
    for name, there in report["devices"].items():
        time = f"{there['hours']:.2f} h" if there["hours"] > 0.1 else f"{60 * there['hours']:.2g} min"
        fit, rate = "fits" if there["fits"] else "does not fit", line.format(**there, utilisation=utilisation)
        kinds.append(f"time     {time} on {name} ({fit})" + rate * (there["tokens_per_s"] > 0))
    return [*kinds, *more, *(f"assumed  {text}" for text in report["assumed"])]


def _folder(checkpoint: str) -> Path:
    if not is_here(checkpoint):
        raise ModelError(
            f"checkpoint: there is no folder {Path(checkpoint).expanduser()}, and a dry run reads its config.json; "
            "make it with `qat-lora quantize`, or ask `qat-lora estimate --model MODEL --preset PRESET`"
        )
    return resolve_model(checkpoint)


def is_here(name: str) -> bool:
    """Return whether a name is that of a file or folder here, or stands for one, as `resolve_model` reads it."""
    path = Path(name).expanduser()
    return path.exists() or path.suffix in models.FILE_SUFFIXES  # of a file that stands for its folder


def config_name(name: str) -> str:
    """Return a model's folder here, or the name under which the Hub has its config; ModelError: neither."""
    return str(resolve_model(name)) if is_here(name) or not models.is_hub_name(name) else name


def _models(options: QatOptions) -> tuple[Any, CausalLM, CausalLM | None]:
    """Return text config, student and the full-precision model, if one is named, on the meta device."""
    full = None if options.model is None else CausalLM(meta_model(options.model)[1], Path(options.model))
    folder = Path(str(options.model)) if options.from_scratch else _folder(str(options.checkpoint))
    chosen = chosen_preset(options) if options.from_scratch else None
    config, module = meta_student(str(folder), chosen, DTYPES[options.run.dtype])
    student = CausalLM(module, folder)
    check_parts(options, full, None if options.from_scratch else student)
    return config.get_text_config(), student, full
