"""The command that trains a quantised model itself: scales, tables, norms, weights through their quantiser.

The same loop as for a recovery adapter, with other tensors to train, and a quantised model as result instead of an
adapter. What comes before the loop is kept as folders under the run's own, each a model that loads by itself:
`quantised` (with `--from-scratch`) and `blockwise` (with `--blockwise-steps`). An interrupted run finds them there
and goes on after them.
"""

from __future__ import annotations

import contextlib
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.commands.quantize import quantize
from qat_lora.config import save_yaml, to_dict
from qat_lora.evaluate.report import save_json
from qat_lora.files import outputs
from qat_lora.files.folders import atomic_dir
from qat_lora.files.identity import checkpoint_sha256
from qat_lora.layers.calibrate.config import CodesConfig
from qat_lora.layers.convert import bits_per_weight, quant_layers
from qat_lora.models.load import DTYPES, CausalLM, save_with_tensors
from qat_lora.options import QatOptions, QuantizeOptions, RunConfig
from qat_lora.plan.advice import advised, qat_advice
from qat_lora.plan.qat import plan_qat
from qat_lora.runtime.base import Runtime
from qat_lora.runtime.host.signals import stop_signals
from qat_lora.runtime.launch.select import status_line
from qat_lora.setup.common import cached_calibration_rows, check_fits, fit_attention, kept, load, picture, run_name, say
from qat_lora.setup.multiprocess import decide, fetch, refuse_spmd_over_hosts
from qat_lora.setup.objective import anchor_batch_rows, check_arrays, evaluation_objective, identity, prepare
from qat_lora.setup.trainable import check_parts, given, preset_name, trained_parts
from qat_lora.setup.training_data import cache_evaluation_rows, rows_evaluation
from qat_lora.setup.unfinished import Unfinished, remove_pieces
from qat_lora.train.blockwise import reconstruct
from qat_lora.train.checkpoint import STATE, checkpoints
from qat_lora.train.loop import LoopHooks, Trainee, train
from qat_lora.train.metrics import plot_curve

MAKING = tuple(field.name for field in fields(CodesConfig) if field.name not in ("model", "preset"))
"""Settings that say how `--from-scratch` makes its student, beside the model and the preset."""


@advised(qat_advice)
def qat(options: QatOptions, runtime: Runtime) -> Any:
    """Train a quantised model from a KD cache; return the run's folder, or with `dry_run` a dict.

    The model is `best` in the folder.
    """
    if options.dry_run:
        return plan_qat(options)
    refuse_spmd_over_hosts(runtime)
    run, loop = options.run, options.loop
    start = preset_name(options) if options.from_scratch else run_name(str(options.checkpoint))
    out = Path(run.out or f"runs/v2_{start.split('_')[0]}")
    dataset = KDCacheDataset(
        str(options.kd_cache_dir),
        options.preload,
        options.head_k,
        temperatures=options.objective.cached_temperatures,
        verify_rows=options.verify_rows,
    )
    check_arrays(dataset, options.objective)
    for name in filter(None, (options.model, options.checkpoint)):
        fetch(runtime, name, options.hub)
    full = None if options.model is None else load(options.model, options.hub, "float32")
    student = None if options.from_scratch else load(str(options.checkpoint), options.hub, "float32")
    check_fits(dataset, student or given(full))
    check_parts(options, full, student)
    effective = loop.batch_size * loop.accumulation(runtime.replicas) * runtime.replicas
    plain = to_dict(options)
    decisive: tuple[str, ...] = MAKING if options.from_scratch else ()
    if options.blockwise.blockwise_steps and not options.from_scratch:
        decisive += ("calibration_rows",)
    decisive += ("head_k", "train_parts", "weight_gradient", "mergeable", "mergeable_r", "blockwise", "train")
    noted = None if run.overwrite else outputs.noted(out)
    settings = {
        "model_sha256": full and checkpoint_sha256(full.folder, noted),
        "checkpoint_sha256": student and checkpoint_sha256(student.folder, noted),
        "cache": dataset.manifest.fingerprint.sha256,
        "dtype": run.dtype,
        "seed": run.seed,
        "autocast": loop.autocast,
        "max_steps": loop.max_steps,
        "early_stop": loop.early_stop,
        "global_batch_rows": effective,
        "objective": identity(options.objective),
        "anchor_batch_rows": anchor_batch_rows(options.objective, loop, runtime.replicas),
        "preset": preset_name(options) if options.from_scratch else None,
        **({"mergeable_in": "units of the first scale"} if options.mergeable else {}),  # it once was added to weights
        **{key: plain[key] for key in decisive},
    }
    inputs = [options.checkpoint, options.model, options.kd_cache_dir, *(m.folder for m in (full, student) if m)]
    with outputs.lock_dir(out) if runtime.is_main else contextlib.nullcontext():
        if decide(runtime, lambda: outputs.claim(out, "qat", settings, run.overwrite, inputs)):
            say(run, f"{out} is complete already")
            return out
        if runtime.is_main:
            save_yaml(options, out / "config.yaml")
        folder = _start(options, out, dataset, student, full, runtime)
        say(run, status_line(runtime, DTYPES[run.dtype], effective))
        student = None  # `_train` loads what it trains; float32 copies that nobody needs would take twice its memory
        full = full if options.mergeable or "weights" in options.train_parts else None
        result = _train(options, dataset, folder, full, settings, runtime, out)
        runtime.barrier("before_final_save")
        if runtime.is_main:
            save_json(result, out / "result.json")
            picture(run, lambda: plot_curve(out / "metrics.jsonl", out / "evaluations.jsonl", out / "curve.png"))
            outputs.complete(out)
    say(run, f"{result['step']} steps, {kept(result, 'model')} in {out / 'best'}")
    return out


def _train(
    options: QatOptions,
    dataset: KDCacheDataset,
    folder: Path,
    full: CausalLM | None,
    settings: dict[str, Any],
    runtime: Runtime,
    out: Path,
) -> dict[str, Any]:
    """Load the student that training begins with, put it into its training state, and run the loop."""
    run, loop = options.run, options.loop
    model = load(str(folder), options.hub, run.dtype)
    model = model.with_vocabulary(dataset.manifest.fingerprint.vocab_size)
    runtime.place(model.module)
    fit_attention(model, runtime, loop.gradient_checkpointing)
    torch.manual_seed(run.seed)
    trainee = Trainee(model, trained_parts(model, options, full))
    if loop.gradient_checkpointing:
        model.checkpoint_gradients(runtime.checkpoint_function())
    runtime.shard_frozen(model.module)
    runtime.barrier("before_warmup")
    counts = {kind: sum(p.numel() for p in tensors.values()) for kind, tensors in trainee.groups.items()}
    say(run, f"{', '.join(f'{count:,} {kind}' for kind, count in counts.items())} train · {out}")
    prepared = prepare(options.objective, dataset, model, loop, run.seed, runtime)
    rows = cache_evaluation_rows(str(options.kd_cache_dir), options.head_k, options.verify_rows)
    head = prepared.teacher_lm_head
    noted = "".join((path / STATE).read_text(encoding="utf-8") for path in checkpoints(out / "checkpoints")[-1:])
    distance = evaluation_objective(prepared.objective, head)
    result = train(
        trainee,
        dataset,
        prepared.objective,
        options.train,
        loop,
        LoopHooks(
            None if rows is None else rows_evaluation(rows, distance, model, loop, runtime, head),
            lambda name: _export(trainee, out / name),
        ),
        runtime,
        out=out,
        seed=run.seed,
        fingerprint={**settings, "base_sha256": checkpoint_sha256(folder, noted)},
        quiet=run.quiet,
        teacher_lm_head=prepared.teacher_lm_head,
        anchor=prepared.anchor,
    )
    return {**result, "bits_per_weight": round(bits_per_weight(model.module)["base"], 4)}


def _start(
    options: QatOptions,
    out: Path,
    dataset: KDCacheDataset,
    student: CausalLM | None,
    full: CausalLM | None,
    runtime: Runtime,
) -> Path:
    """Return the folder of the student that training begins with, made where it is not there yet."""
    folder = out / "quantised" if student is None else student.folder
    if runtime.is_main and student is None:
        run = RunConfig(out=str(folder), seed=options.run.seed, quiet=options.run.quiet, json=options.run.json)
        quantize(
            QuantizeOptions(
                **{name: getattr(options, name) for name in MAKING},
                model=options.model,
                preset=preset_name(options),
                kd_cache_dir=options.kd_cache_dir,
                start_rank=0,
                hub=options.hub,
                run=run,
            ),
            runtime,
        )
    if options.blockwise.blockwise_steps:
        if runtime.is_main and not (out / "blockwise").is_dir():
            _reconstruct(options, load(str(folder), options.hub, "float32"), given(full), dataset, runtime, out)
        folder = out / "blockwise"
    runtime.barrier("qat start")
    return folder


def _reconstruct(
    options: QatOptions, student: CausalLM, full: CausalLM, dataset: KDCacheDataset, runtime: Runtime, out: Path
) -> None:
    """Reconstruct the student block by block and write it to the run's folder `blockwise`."""
    runtime.place(student.module)
    runtime.place(full.module)
    with stop_signals() as stopped:
        work = Unfinished(out, "layers reconstructed", full.config.num_hidden_layers, stopped)
        if work.parts:
            say(options.run, f"block by block: goes on after {work.parts} layers, which an interrupted run finished")
        shares = reconstruct(
            student.module,
            full.module,
            lambda batch: full.hidden(batch["input_ids"], batch["document_ids"]),
            runtime.feed(cached_calibration_rows(dataset, options.calibration_rows, options.run.seed)),
            options.blockwise,
            runtime,
            options.run.quiet,
            work,
        )
    full.module.to("cpu")
    tensors = _stored(student.module)
    with atomic_dir(out / "blockwise") as draft:
        save_with_tensors(student.folder, draft, tensors)
        save_json({"layers": shares}, draft / "result.json")
    remove_pieces(out)
    before, after = (sum(share[key] for share in shares) / len(shares) for key in ("before", "after"))
    say(options.run, f"block by block: error of a layer's output {before:.4f} -> {after:.4f} of its square, on average")


def _stored(module: nn.Module) -> dict[str, Tensor]:
    """Return the quantised layers' tensors as they will be on disk, by their names there."""
    return {
        f"{name}.{part}": tensor
        for name, layer in quant_layers(module).items()
        for part, tensor in layer.stored().items()
    }


def _export(trainee: Trainee, folder: Path) -> None:
    """Write the student as an ordinary quantised checkpoint that computes, bit for bit, what it computes now."""
    model = trainee.model
    assert isinstance(model, CausalLM)
    whole = {name: parameter for name, parameter in model.module.named_parameters() if parameter.requires_grad}
    inner = tuple(f"{name}." for name in quant_layers(model.module))
    tensors = {name: parameter for name, parameter in whole.items() if not name.startswith(inner)}
    with atomic_dir(folder) as draft:
        save_with_tensors(model.folder, draft, {**_stored(model.module), **tensors})
