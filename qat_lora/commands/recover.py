"""The command that trains a recovery adapter."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qat_lora.config import save_yaml, to_dict
from qat_lora.errors import ConfigError
from qat_lora.evaluate.report import save_json
from qat_lora.files import outputs
from qat_lora.files.folders import atomic_dir
from qat_lora.files.identity import checkpoint_sha256
from qat_lora.layers.convert import add_lora, lora_layers, prepare_base, quant_layers
from qat_lora.models.adapter import load_starts, save_adapter, starts_sha256
from qat_lora.models.load import DTYPES, CausalLM, save_with_tensors
from qat_lora.options import RecoverOptions
from qat_lora.plan.advice import memory_advice, training_advice
from qat_lora.plan.recover import estimate_options, plan_recovery
from qat_lora.runtime.base import Runtime
from qat_lora.runtime.launch.select import status_line
from qat_lora.setup.common import fit_attention, kept, load, picture, run_name, say, text_inputs
from qat_lora.setup.multiprocess import decide, fetch
from qat_lora.setup.objective import anchor_batch_rows, identity, prepare
from qat_lora.setup.training_data import Lessons, cache_lessons, evaluation, text_lessons
from qat_lora.train.loop import LoopHooks, Trainee, train
from qat_lora.train.metrics import plot_curve


def recover(options: RecoverOptions, runtime: Runtime) -> Any:
    """Train a recovery adapter from a KD cache or a text; return the run's folder, or with `dry_run` a dict."""
    if options.dry_run:
        return plan_recovery(options)
    run, loop = options.run, options.loop
    student = str(options.checkpoint or options.model)
    out = Path(run.out or f"runs/recovery_{run_name(student)}")
    lessons = cache_lessons(options) if options.uses_cache else None
    fetch(runtime, student, options.hub)
    model = load(student, options.hub, run.dtype)
    lessons = lessons or text_lessons(options, model)
    model = lessons.fit(model)
    if options.train_scales and not quant_layers(model.module):
        raise ConfigError("train_scales: the student has no quantised layers; leave it out")
    effective = loop.batch_size * loop.accumulation(runtime.replicas) * runtime.replicas
    noted = None if run.overwrite else outputs.noted(out)
    settings = _settings(options, lessons, model, runtime.replicas, noted)
    starts = load_starts(model.folder) if options.start == "auto" else {}
    torch.manual_seed(run.seed)
    add_lora(model.module, options.lora, starts)
    inputs = [options.checkpoint, options.model, options.kd_cache_dir, *text_inputs(options.text), model.folder]
    with outputs.lock_dir(out) if runtime.is_main else contextlib.nullcontext():
        if decide(runtime, lambda: outputs.claim(out, "recover", settings, run.overwrite, inputs)):
            say(run, f"{out} is complete already")
            return out
        if runtime.is_main:
            save_yaml(options, out / "config.yaml")
        say(run, status_line(runtime, DTYPES[run.dtype], effective))
        begin = "from the quantisation error" if starts else "at zero"
        asked = estimate_options(options, str(model.folder), lessons.length, lessons.head_k, runtime.device.type)
        with memory_advice(lambda: training_advice(asked, loop.global_batch_size)):
            result = _train(options, lessons, model, settings, runtime, out, f"adapters start {begin} · {out}")
        runtime.barrier("before_final_save")
        if runtime.is_main:
            save_json(result, out / "result.json")
            picture(run, lambda: plot_curve(out / "metrics.jsonl", out / "evaluations.jsonl", out / "curve.png"))
            outputs.complete(out)
    stopped = " (stopped early)" if result["stopped_early"] else ""
    say(run, f"{result['step']} steps{stopped}, {kept(result, 'adapter')} in {out / 'best'}")
    return out


def _settings(
    options: RecoverOptions, lessons: Lessons, model: CausalLM, replicas: int, noted: str | None
) -> dict[str, object]:
    """Return what decides the result of a run: another value is another run."""
    plain, loop = to_dict(options), options.loop
    keys = ("head_k", "train_scales", "train_norms", "start", "lora", "train")
    return {
        "base_sha256": checkpoint_sha256(model.folder, noted),
        "starts_sha256": starts_sha256(model.folder),
        **lessons.identity,
        "objective": identity(lessons.objective),
        "anchor_batch_rows": anchor_batch_rows(lessons.objective, loop, replicas),
        "dtype": options.run.dtype,
        "autocast": loop.autocast,
        "seed": options.run.seed,
        "max_steps": loop.max_steps,
        "early_stop": loop.early_stop,
        "global_batch_rows": loop.batch_size * loop.accumulation(replicas) * replicas,
        **{key: plain[key] for key in keys},
    }


def _train(
    options: RecoverOptions,
    lessons: Lessons,
    model: CausalLM,
    settings: dict[str, object],
    runtime: Runtime,
    out: Path,
    begin: str,
) -> dict[str, object]:
    """Place the student, prepare what its objective needs, and run the loop."""
    run, loop = options.run, options.loop
    runtime.place(model.module)
    fit_attention(model, runtime, loop.gradient_checkpointing)
    trainee = _trainee(model, options)
    if loop.gradient_checkpointing:
        model.checkpoint_gradients(runtime.checkpoint_function())
    runtime.shard_frozen(model.module)
    runtime.barrier("before_warmup")
    trained = sum(parameter.numel() for parameter in trainee.trained.values())
    say(run, f"{trained:,} numbers train, {begin}")
    prepared = prepare(lessons.objective, lessons.rows, model, loop, run.seed, runtime)
    return train(
        trainee,
        lessons.rows,
        prepared.objective,
        options.train,
        loop,
        LoopHooks(
            evaluation(replace(lessons, objective=prepared.objective), model, loop, runtime, prepared.teacher_lm_head),
            lambda name: _export_student(trainee, options, out / name),
            lessons.metric,
        ),
        runtime,
        out=out,
        seed=run.seed,
        fingerprint=settings,
        quiet=run.quiet,
        teacher_lm_head=prepared.teacher_lm_head,
        anchor=prepared.anchor,
    )


def _trainee(model: CausalLM, options: RecoverOptions) -> Trainee:
    """Put the student into its training state and collect what trains."""
    # A frozen base is multiplied in bfloat16 under autocast, so it is formed in it, once.
    dtype = torch.bfloat16 if options.loop.autocast else model.module.dtype
    scales = prepare_base(model.module, options.train_scales, dtype)
    factors: dict[str, nn.Parameter] = {}
    for name, adapter in lora_layers(model.module).items():
        factors |= {f"{name}.lora_A": adapter.lora_A, f"{name}.lora_B": adapter.lora_B}
    norms = model.norms() if options.train_norms else {}
    for norm in norms.values():
        norm.requires_grad_(True)
    model.module.train()
    return Trainee(model, {"adapter": factors, "scales": scales, "norms": norms})


def _export_student(trainee: Trainee, options: RecoverOptions, folder: Path) -> None:
    """Write the student as an adapter folder; with trained scales or norms, their base in it. All appear together."""
    assert isinstance(trainee.model, CausalLM)
    base = trainee.model.folder
    changed = trainee.groups["scales"] | trainee.groups["norms"]
    with atomic_dir(folder) as draft:
        sha256 = checkpoint_sha256(base)
        if changed:
            sha256 = checkpoint_sha256(save_with_tensors(base, draft / "base", changed))
            base = folder / "base"
        save_adapter(trainee.model.module, options.lora, draft, base, sha256)
