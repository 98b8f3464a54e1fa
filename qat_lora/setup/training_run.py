"""One training run, from a claimed folder to a complete one: `recover` and `qat` differ in what trains and is exported.

The folder is claimed by the settings that decide the result, so the same command goes on with an interrupted run and
another one is refused. Only the main process writes; the others take part in training.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from torch import nn

from qat_lora.config import save_yaml, to_dict
from qat_lora.evaluate.report import save_json
from qat_lora.files import outputs
from qat_lora.layers.stacked import apart, parameters_at, stack_layers, trained_paths
from qat_lora.models.load import DTYPES, CausalLM
from qat_lora.options import QatOptions, RecoverOptions, RunConfig
from qat_lora.runtime.base import Runtime
from qat_lora.runtime.launch.select import status_line
from qat_lora.runtime.sharded import sharded_bytes
from qat_lora.setup.common import fit_attention, picture, say
from qat_lora.setup.training_data import TrainingData, evaluation, prepare
from qat_lora.train.callbacks import LoopConfig, LoopHooks, RunSettings
from qat_lora.train.loop import train
from qat_lora.train.metrics import plot_curve
from qat_lora.train.optim import TrainState

MANY_PASSES = 20  # over the same rows, from which on a run says so
Groups = dict[str, dict[str, nn.Parameter]]  # what trains, by kind and name


T = TypeVar("T", RecoverOptions, QatOptions)


def in_steps(options: T, data: TrainingData, runtime: Runtime) -> T:
    """Return the options with the steps that their epochs mean; say where steps are many passes over few rows."""
    loop = options.loop.for_rows(len(data.rows), runtime.replicas)
    step_rows = loop.batch_size * loop.accumulation(runtime.replicas) * runtime.replicas
    passes = loop.max_steps / data.rows.steps_per_epoch(step_rows)
    if passes > MANY_PASSES and loop.epochs is None:
        say(options.run, f"{loop.max_steps:,} steps are {passes:,.0f} passes over all rows; --epochs sets their number")
    if len(data.rows) < step_rows:
        masked = f"a step has {step_rows:,} rows, and only {len(data.rows):,} are there: the rest are masked"
        say(options.run, f"{masked}; give a smaller --batch-size or --accumulation-steps")
    return replace(options, loop=loop)


def by_replicas(loop: LoopConfig, runtime: Runtime) -> str:
    """Return the end of a default name for a run whose steps grow with the number of replicas: it is another run."""
    return f"_x{runtime.replicas}" if runtime.replicas > 1 and loop.global_batch_size is None else ""


@dataclass(frozen=True)
class TrainingRun:
    """What all steps of a run share."""

    command: str
    options: RecoverOptions | QatOptions
    data: TrainingData
    runtime: Runtime
    out: Path

    @property
    def batch_rows(self) -> int:
        """Rows of an optimizer step over all replicas."""
        loop, replicas = self.options.loop, self.runtime.replicas
        return loop.batch_size * loop.accumulation(replicas) * replicas

    def decisive(self, keys: Sequence[str]) -> dict[str, Any]:
        """Return the settings that decide the result of any training run, and the options `keys` of this one's."""
        loop, run, objective = self.options.loop, self.options.run, to_dict(self.data.objective)
        plain = to_dict(self.options)
        for name in ("loss_chunk_mb", "loss_walk"):  # who was told to lower the chunk goes on where the run was
            del objective[name]
        return {
            **self.data.identity,
            "objective": objective,
            # Micro-batches of other sizes make the same step of other rows, but not of these: each step has one.
            "anchor_batch_rows": loop.batch_size * self.runtime.replicas if objective["anchor_weight"] > 0 else None,
            "dtype": run.dtype,
            "autocast": loop.autocast,
            "seed": run.seed,
            "max_steps": loop.max_steps,
            "early_stop": loop.early_stop,
            "global_batch_rows": self.batch_rows,
            **{key: plain[key] for key in keys},
        }


def complete_run(
    plan: TrainingRun, settings: dict[str, Any], inputs: Sequence[Any], work: Callable[[], dict[str, Any]], what: str
) -> Path:
    """Claim the run's folder by its `settings`, sparing `inputs`, do its work, complete and return it."""
    run, out, runtime = plan.options.run, plan.out, plan.runtime
    with outputs.lock_dir(out) if runtime.is_main else contextlib.nullcontext():
        claim = partial(outputs.claim, out, plan.command, settings, run.overwrite, inputs)
        if runtime.agree(runtime.is_main and claim()):  # what it raises in the main process ends all
            say(run, f"{out} is complete already")
            return out
        if runtime.is_main:
            save_yaml(plan.options, out / "config.yaml")
        result = work()
        runtime.barrier("before_final_save")
        if runtime.is_main:
            save_json(result, out / "result.json")
            picture(run, lambda: plot_curve(out / "metrics.jsonl", out / "evaluations.jsonl", out / "curve.png"))
            outputs.complete(out)
    best, stopped = result["best_step"], " (stopped early)" if result["stopped_early"] else ""
    kept = f"last {what} (no evaluation to choose by)" if best is None else f"best {what} (step {best})"
    say(run, f"{result['step']} steps{stopped}, {kept} in {out / 'best'}")
    return out


def train_student(
    plan: TrainingRun,
    model: CausalLM,
    groups: Callable[[], Groups],
    announce: Callable[[Groups], str],
    export: Callable[[Groups, Path], None],
    fingerprint: dict[str, Any],
) -> dict[str, Any]:
    """Place the student, prepare what its objective needs, and run the loop; return its result.

    `groups` puts the student into its training state and returns what trains, `announce` says it for people,
    `export` writes the student as it is to a folder; `fingerprint` are the settings that a resumed run must share.
    """
    run, loop, runtime, data = plan.options.run, plan.options.loop, plan.runtime, plan.data
    say(run, status_line(runtime, DTYPES[run.dtype], plan.batch_rows))
    fit_attention(model, runtime)
    paths = place_student(model, groups, runtime, run)
    state = TrainState(model, parameters_at(model.module, paths))
    if loop.gradient_checkpointing:
        model.checkpoint_gradients(runtime.checkpoint_function())
    runtime.shard_frozen(model.module)
    runtime.barrier("before_warmup")
    say(run, announce(state.groups))
    prepared = prepare(data.objective, data.rows, model, loop, run.seed, runtime)
    measured = replace(data, objective=prepared.objective)

    def export_as(name: str) -> None:
        with apart(model.module):
            export(parameters_at(model.module, paths), plan.out / name)

    evaluate = evaluation(measured, model, loop, runtime, prepared.teacher_lm_head)
    hooks = LoopHooks(evaluate, export_as, data.metric)
    settings = RunSettings(plan.out, run.seed, fingerprint, run.quiet)
    return train(state, data.rows, prepared, plan.options.train, loop, hooks, runtime, settings)


def place_student(
    model: CausalLM, groups: Callable[[], Groups], runtime: Runtime, run: RunConfig
) -> dict[str, dict[str, str]]:
    """Place a student in its training state, its layers stacked where the runtime loops over them; return what trains.

    Weights are formed and stacked on the host: a device would hold both forms for a while, and a TPU multiplies the
    factors of low-rank scales in bfloat16, which is another weight than the one that is exported. So with shards.
    """
    scan = runtime.layer_scan()
    if scan is None and not runtime.shard_base:
        runtime.place(model.module)
        return trained_paths(model.module, groups())
    paths = trained_paths(model.module, groups())
    stacked, layers = stack_layers(model.module, scan) if scan is not None else (0, 0)
    if odd := layers - stacked:
        say(run, f"{odd} of {layers} layers differ from their neighbours or have dropout: traced one by one")
    runtime.place(model.module)
    if runtime.shard_base:
        here, whole = sharded_bytes(model.module)
        say(run, f"frozen weights of the layers: {here:,} of {whole:,} bytes in each process")
    return paths
