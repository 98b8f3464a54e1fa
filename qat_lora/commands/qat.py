"""`qat`: train a quantised model itself: its scales, tables and norms, or its weights through their quantiser.

What is made before the loop stays in folders under the run's own, each a model that loads by itself: `quantised` (with
`--from-scratch`) and `blockwise` (with `--blockwise-steps`). An interrupted run goes on after them.
"""

from dataclasses import fields
from pathlib import Path
from typing import Any

import torch

from qat_lora.commands.quantize import quantize
from qat_lora.errors import ConfigError
from qat_lora.evaluate.report import save_json
from qat_lora.files import outputs
from qat_lora.files.checksums import checkpoint_sha256
from qat_lora.files.folders import atomic_dir
from qat_lora.layers.calibrate.fisher import zeros_in
from qat_lora.layers.calibrate.quantize import QuantizeConfig
from qat_lora.layers.convert import bits_per_weight, quant_layers, stored_tensors
from qat_lora.layers.stacked import apart
from qat_lora.models.adapter import joint_ranks, ranks_text
from qat_lora.models.copies import save_with_tensors
from qat_lora.models.load import CausalLM, load_model
from qat_lora.options import QatOptions, QuantizeOptions, RunConfig
from qat_lora.runtime.base import Runtime
from qat_lora.runtime.host.signals import stop_signals
from qat_lora.setup.common import cached_calibration_rows, check_fits, fetch, keep_dtype, run_name, say, with_teacher
from qat_lora.setup.trainable import check_parts, chosen_preset, trained_parts
from qat_lora.setup.training import TrainingRun, by_replicas, cache_training_data, complete_run, in_steps, train_student
from qat_lora.setup.unfinished import Unfinished, remove_pieces
from qat_lora.train.blockwise import BlockTraining, reconstruct, weights_and_scales
from qat_lora.train.optim import Groups, OptimConfig

# Settings that say how `--from-scratch` makes its student, apart from the model and the preset.
MAKING = tuple(field.name for field in fields(QuantizeConfig) if field.name not in ("model", "preset"))


def qat(options: QatOptions, runtime: Runtime) -> Path:
    """Train a quantised model from a KD cache; return the run's folder, in which `best` is the model."""
    # A program of a mesh of chips runs only once every host has started it: what one computes alone waits for ever.
    if runtime.processes > 1 and runtime.replicas != runtime.processes:
        why = f"spmd over {runtime.processes} hosts cannot run qat, whose first process computes alone at the start"
        remedy = "leave --parallel out (a process a chip), or use one host"
        raise ConfigError(f"parallel: {why} and at every export; {remedy}")
    run, options = options.run, with_teacher(options)
    start = chosen_preset(options).name if options.from_scratch else run_name(str(options.checkpoint))
    out = Path(run.out or f"runs/v2_{start.split('_')[0]}{by_replicas(options.loop, runtime)}")
    options = keep_dtype(options, runtime, outputs.settings_of(out, "qat").get("dtype"))
    data = cache_training_data(options)
    for name, setting in ((options.model, "model"), (options.checkpoint, "checkpoint")):
        if name is not None:
            fetch(runtime, name, options.hub, setting)
    full = None if options.model is None else load_model(options.model, options.hub, "float32")
    student = None if options.from_scratch else load_model(str(options.checkpoint), options.hub, "float32")
    check_fits(data.rows, next(filter(None, (student, full))))
    check_parts(options, full, student)
    if student is not None and (joint := joint_ranks(student.folder)):
        beside = f"beside an adapter of {ranks_text(joint.values())}, which qat drops"
        remedy = "quantize --joint-rank 0 chooses codes that stand alone"
        say(run, f"warning: codes of {options.checkpoint} were chosen {beside}; {remedy}")
    plan = TrainingRun("qat", in_steps(options, data, runtime), data, runtime, out)
    always = ("head_k", "train_parts", "weight_gradient", "mergeable", "mergeable_r", "blockwise", "train")
    blocks = ("calibration_rows",) if options.blockwise.blockwise_steps else ()
    settings = {
        "model_sha256": full and checkpoint_sha256(full.folder),
        "checkpoint_sha256": student and checkpoint_sha256(student.folder),
        "preset": chosen_preset(options).name if options.from_scratch else None,
        **({"mergeable_in": "units of the first scale"} if options.mergeable else {}),  # it once was added to weights
        **plan.decisive((*MAKING, *always) if options.from_scratch else (*blocks, *always)),
    }
    inputs = [options.checkpoint, options.model, options.kd_cache_dir, *(m.folder for m in (full, student) if m)]
    models = [student, full]
    del student, full  # `work` drops them before it trains: float32 copies would take twice its memory

    def work() -> dict[str, Any]:
        full, student = models.pop(), models.pop()
        folder = _start(plan, options, student, full)
        student = None
        return _train(plan, folder, full if options.mergeable or "weights" in options.train_parts else None, settings)

    return complete_run(plan, settings, inputs, work, "model")


def _train(plan: TrainingRun, folder: Path, full: CausalLM | None, settings: dict[str, Any]) -> dict[str, Any]:
    """Train the student of a folder, whose weights may start at the full-precision model's."""
    options, out = plan.options, plan.out
    assert isinstance(options, QatOptions)
    model = plan.data.with_vocabulary(load_model(str(folder), options.hub, options.run.dtype))

    def groups() -> Groups:
        torch.manual_seed(options.run.seed)
        return trained_parts(model, options, full)

    def announce(groups: Groups) -> str:
        counts = {kind: sum(p.numel() for p in tensors.values()) for kind, tensors in groups.items()}
        return f"{', '.join(f'{count:,} {kind}' for kind, count in counts.items())} train · {out}"

    fingerprint = {**settings, "base_sha256": checkpoint_sha256(folder)}
    result = train_student(plan, model, groups, announce, lambda _, folder: _export(model, folder), fingerprint)
    with apart(model.module):
        return {**result, "bits_per_weight": round(bits_per_weight(model.module)["base"], 4)}


def _start(plan: TrainingRun, options: QatOptions, student: CausalLM | None, full: CausalLM | None) -> Path:
    """Return the folder of the student that training begins with, made where it is not there yet."""
    out, runtime = plan.out, plan.runtime
    folder = out / "quantised" if student is None else student.folder
    if runtime.is_main and student is None:
        own = {name: getattr(options, name) for name in (*MAKING, "model", "kd_cache_dir", "hub")}
        given = options.run
        run = RunConfig(out=str(folder), dtype=given.dtype, seed=given.seed, quiet=given.quiet, json=given.json)
        quantize(QuantizeOptions(**own, preset=chosen_preset(options).name, start_rank=0, run=run), runtime)
    if options.blockwise.blockwise_steps:
        if runtime.is_main and not (out / "blockwise").is_dir():
            assert full is not None  # as the options require
            _reconstruct(plan, options, load_model(str(folder), options.hub, "float32"), full)
        folder = out / "blockwise"
    runtime.barrier("qat start")
    return folder


def _reconstruct(plan: TrainingRun, options: QatOptions, student: CausalLM, full: CausalLM) -> None:
    out, runtime, blockwise, quiet = plan.out, plan.runtime, options.blockwise, options.run.quiet
    runtime.place(student.module)
    rates = OptimConfig(lr=blockwise.blockwise_lr, scale_lr=blockwise.blockwise_scale_lr)
    with stop_signals() as stopped:
        work = Unfinished(out, "layers reconstructed", full.config.num_hidden_layers, stopped)
        if work.parts:
            say(options.run, f"block by block: goes on after {work.parts} layers, which an interrupted run finished")
        how = weights_and_scales, rates, blockwise.blockwise_steps, zeros_in(out), runtime, work, quiet
        rows = options.rows_of(plan.data.rows.manifest.fingerprint.length)
        batches = [*cached_calibration_rows(plan.data.rows, rows, options.run.seed)]
        shares = reconstruct(student, full, batches, BlockTraining(*how))
    tensors = stored_tensors(student.module)
    with atomic_dir(out / "blockwise") as draft:
        save_with_tensors(student.folder, draft, tensors)
        save_json({"layers": shares}, draft / "result.json")
    remove_pieces(out)
    before, after = (sum(share[key] for share in shares) / len(shares) for key in ("before", "after"))
    say(options.run, f"block by block: error of a layer's output {before:.4f} -> {after:.4f} of its square, on average")


def _export(model: CausalLM, folder: Path) -> None:
    """Write the student as an ordinary quantised checkpoint that computes, bit for bit, what it computes now."""
    inner = tuple(f"{name}." for name in quant_layers(model.module))
    tensors = {n: p for n, p in model.module.named_parameters() if p.requires_grad and not n.startswith(inner)}
    with atomic_dir(folder) as draft:
        save_with_tensors(model.folder, draft, {**stored_tensors(model.module), **tensors})
