"""The training loop: the same on a laptop, a GPU, a TPU chip or many, because it knows only a `Runtime`.

A loop iteration is one optimizer step of `accumulation` micro-batches. Values for the log stay on the device and
are fetched together every `log_steps`; evaluation, saving and the answer to SIGTERM happen between steps. What
an evaluation or an export *is* comes in as a function: the loop only decides when.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol

import torch
from torch import nn

from qat_lora.config import option
from qat_lora.errors import (
    ConfigError,
    DamagedFileError,
    DivergedError,
    InterruptedRunError,
    QatLoraError,
    ReplicaError,
)
from qat_lora.files.folders import restore_dir
from qat_lora.losses.objective import ObjectiveConfig, weight_tensors
from qat_lora.runtime.base import Runtime
from qat_lora.runtime.host.randomness import random_states, set_random_states
from qat_lora.runtime.host.signals import stop_signals
from qat_lora.train import compile_watch as compiling
from qat_lora.train.anchor import anchor_batches, anchor_micro_batch
from qat_lora.train.checkpoint import REMEDY, checkpoints, load_checkpoint, save_checkpoint
from qat_lora.train.metrics import EMPTY, LogMark, MetricsLog, append_line, cut_back, log_mark
from qat_lora.train.optim import KINDS, OptimConfig, averaged, build_optimizer, lr_factor, set_lr
from qat_lora.train.step import Sums, add_sums, micro_batch, optimizer_step, zero_sums
from qat_lora.train.trackers import check_trackers, open_trackers
from qat_lora.types import Batch, LanguageModel, LMHead


@dataclass(frozen=True)
class LoopConfig:
    """How long, in what portions, and what is kept."""

    batch_size: int = option(4, "rows of a micro-batch on one replica", unit="rows")
    accumulation_steps: int = option(1, "micro-batches of an optimizer step", unit="micro-batches")
    global_batch_size: int | None = option(
        None, "rows of an optimizer step over all replicas; sets the accumulation", unit="rows"
    )
    max_steps: int = option(1000, "optimizer steps", unit="steps")
    log_steps: int = option(10, "optimizer steps between fetches of the log values", unit="steps")
    eval_steps: int = option(50, "optimizer steps between evaluations on the cache's evaluation split", unit="steps")
    save_steps: int = option(100, "optimizer steps between checkpoints", unit="steps")
    save_minutes: float = option(
        5.0, "minutes after which a checkpoint is due anyway (looked at every log interval); 0: never", unit="minutes"
    )
    keep_checkpoints: int = option(2, "complete checkpoints that are kept", unit="checkpoints")
    early_stop: int | None = option(
        None, "stop after this many evaluations without a better one; default: never", unit="evaluations"
    )
    gradient_checkpointing: bool = option(
        False, "compute each layer again in the backward pass instead of keeping its activations"
    )
    autocast: bool = option(
        False, "float32 weights, matrix products in bfloat16 (--dtype bfloat16: all floats are bfloat16)"
    )
    max_recompiles: int | None = option(
        None,
        "graphs that may be compiled after step 1 before the run fails; default: any, with a warning",
        unit="graphs",
    )
    log_to: tuple[str, ...] = option((), "send the numbers on to tensorboard, wandb or both", unit="list")

    def __post_init__(self) -> None:
        names = ("batch_size", "accumulation_steps", "max_steps", "log_steps", "eval_steps", "save_steps")
        for name in (*names, "global_batch_size", "early_stop"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}: {value} is below 1")
        for name in ("save_minutes", "max_recompiles"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"{name}: {value} is not allowed; give 0 or more")
        check_trackers(self.log_to)
        if self.keep_checkpoints < 1:
            raise ConfigError(
                f"keep_checkpoints: {self.keep_checkpoints} would leave nothing to resume from; give 1 or more"
            )

    def accumulation(self, replicas: int) -> int:
        """Return micro-batches per step for a number of replicas.

        Raises:
            ConfigError: the global batch does not divide.
        """
        if self.global_batch_size is None:
            return self.accumulation_steps
        rows = self.batch_size * replicas
        if self.global_batch_size % rows:
            raise ConfigError(
                f"global_batch_size: {self.global_batch_size} is not a multiple of "
                f"batch_size x replicas = {self.batch_size} x {replicas} = {rows}"
            )
        return self.global_batch_size // rows


@dataclass
class Trainee:
    """What is trained, by name."""

    model: LanguageModel
    groups: dict[str, dict[str, nn.Parameter]]
    """By kind (`optim.KINDS`), which decides their learning rate and weight decay."""

    def __post_init__(self) -> None:
        assert set(self.groups) <= set(KINDS), f"kinds {set(self.groups) - set(KINDS)} have no learning rate"

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """All tensors that train."""
        return {name: tensor for tensors in self.groups.values() for name, tensor in tensors.items()}


class TrainingRows(Protocol):
    """What is trained on: a KD cache or a text, as rows in an order that `qat_lora.data.shuffle` computes."""

    def batches(
        self, start_step: int, steps: int, batch_rows: int, accumulation: int, seed: int, replica: int, replicas: int
    ) -> Iterator[Batch]:
        """Yield this replica's micro-batches, `accumulation` for each of `steps` steps."""


@dataclass(frozen=True)
class LoopHooks:
    """What the loop calls but does not know."""

    evaluate: Callable[[], float] | None
    """Mean loss on the evaluation split (KL for a cache), lower is better; None where there is none."""
    export: Callable[[str], None]
    """Write the student as it is now under the run's folder, as `start`, `best` or `last`, by `atomic_dir`."""
    metric: str = "kl"
    """What `evaluate` measures, as it is called in files."""


EXPORTS = ("start", "best", "last")


def train(
    trainee: Trainee,
    dataset: TrainingRows,
    objective: ObjectiveConfig,
    optim: OptimConfig,
    loop: LoopConfig,
    hooks: LoopHooks,
    runtime: Runtime,
    *,
    out: Path,
    seed: int,
    fingerprint: Mapping[str, Any],
    quiet: bool = False,
    teacher_lm_head: LMHead | None = None,
    anchor: Batch | None = None,
) -> dict[str, Any]:
    """Train until `max_steps`, from the newest complete checkpoint under `out` if there is one.

    Args:
        trainee: model and trained tensors, placed on the runtime's device.
        dataset: the training rows.
        objective: loss terms and weights.
        optim: learning rates and schedule.
        loop: lengths and portions.
        hooks: evaluation and export.
        runtime: where this runs.
        out: the run's folder.
        seed: of the row order.
        fingerprint: settings that a resumed run must share.
        quiet: no progress bar.
        teacher_lm_head: the teacher's output head, on the device, for estimator `full`.
        anchor: what the student says before step 1 (`anchor.remember`), for the term `anchor`.

    Returns:
        `step`, `best_step`, `best_kl` (or what is measured), `stopped_early`, `resumed_from`.

    Raises:
        ConfigError: an early stop without evaluations, or a checkpoint of other settings.
        InterruptedRunError: SIGTERM, SIGINT or SIGHUP; a checkpoint was written first.
        CacheDamaged: a row is not what was written (or what else a source of rows raises); as with a signal.
        DivergedError: a loss, an evaluation or a weight is NaN or infinite; no checkpoint of that is written.
        RecompiledError: more graphs were compiled after the first step than `max_recompiles`.
    """
    if loop.early_stop and hooks.evaluate is None:
        raise ConfigError("early_stop: there is no evaluation split to stop by; make one with --eval-rows")
    optimizer = build_optimizer(optim, trainee.groups)
    best = f"best_{hooks.metric}"
    state: dict[str, Any] = {"step": 0, "best_step": None, best: None, "evaluations_since_best": 0, "evaluated": True}
    folder, metrics, evaluations = out / "checkpoints", out / "metrics.jsonl", out / "evaluations.jsonl"
    found, logs = checkpoints(folder), dict.fromkeys(("metrics.jsonl", "evaluations.jsonl"), EMPTY)
    if found:
        saved = load_checkpoint(found[-1], trainee.trained, optimizer, fingerprint)
        needed = state.keys() - {"evaluated"}  # which earlier versions did not note
        if missing := needed - saved.keys():
            raise DamagedFileError(f"{found[-1] / 'state.json'}: lacks {min(missing)}; remove that folder to go on")
        logs = saved.get("logs", {})  # of an earlier version: without
        state = {name: saved.get(name, value) for name, value in state.items()}
    start = int(state["step"])
    if runtime.agree(bool(found)) != bool(found):
        raise ConfigError(f"--out {out}: not every process sees its checkpoints; give a folder that all hosts share")
    if runtime.rank:  # the first process draws what a run alone draws, the others their own
        torch.manual_seed(seed + 1_000_003 * runtime.rank + start)
    if runtime.is_main:
        _tidy(out, start, state["evaluated"], logs)
    zeros = zero_sums(objective, runtime.device)
    runtime.cut()  # optimizer state, gradients and zeros are there now, not part of the first micro-batch's graph
    batches, anchors = _feeds(dataset, anchor, loop, runtime, start, seed)

    def save(step: int) -> None:
        runtime.barrier("metrics")  # the lines up to here are on disk first: a resumed run could not write them again
        if runtime.is_main:
            logs = {file.name: log_mark(file) for file in (metrics, evaluations)}
            content = {**state, "step": step, "fingerprint": dict(fingerprint), "logs": logs}
            save_checkpoint(folder, step, trainee.trained, optimizer, content, loop.keep_checkpoints)
        runtime.barrier("checkpoint")

    def give_up(error: QatLoraError | OSError | None, step: int) -> NoReturn:
        if step > start:
            _flush(pending, log, runtime)
            save(step)
        raise _lost(error, step) from error

    def evaluate(step: int) -> None:
        if hooks.evaluate is None:
            return
        try:
            with averaged(optimizer):
                value = hooks.evaluate()
        except (QatLoraError, OSError) as error:
            if runtime.processes > 1:  # the others wait in the middle of theirs
                raise
            state["evaluated"] = False  # the first thing to do after this checkpoint
            give_up(error, step)
        state["evaluated"] = True
        if not math.isfinite(value):
            raise DivergedError(f"evaluation {hooks.metric}: {value} after step {step}; {REMEDY}")
        if runtime.is_main:
            append_line(evaluations, {"step": step, hooks.metric: value})
            log.track(step, {f"evaluation/{hooks.metric}": value})
        state["evaluations_since_best"] += 1
        if state[best] is None or value < state[best]:
            state.update({best: value, "best_step": step, "evaluations_since_best": 0})
            export("best")

    def export(name: str) -> None:
        if runtime.is_main:
            with averaged(optimizer):
                hooks.export(name)

    def is_exhausted() -> bool:
        return loop.early_stop is not None and state["evaluations_since_best"] >= loop.early_stop

    trackers = open_trackers(loop.log_to, out, start, fingerprint) if runtime.is_main else []
    with (
        stop_signals() as stopped,
        MetricsLog(metrics, loop.max_steps, start, quiet or not runtime.is_main, runtime.device, trackers) as log,
    ):
        watch = compiling.CompileWatch(runtime, loop.max_recompiles, log.say)
        pending: list[tuple[int, float, Sums]] = []
        if start == 0:
            export("start")
        if start == 0 or not state["evaluated"]:
            evaluate(start)
            log.pause()
        saved_at, step = time.monotonic(), start
        while step < loop.max_steps and not is_exhausted():
            step += 1
            watch.begin()
            weights = weight_tensors(objective.weights_at((step - 1) / max(1, loop.max_steps - 1)), runtime.device)
            sums, random, failed = zeros, random_states(), None
            for _ in range(loop.accumulation(runtime.replicas)):
                batch = _next(batches)
                if isinstance(batch, Exception):
                    failed = batch
                    break
                watch.batch(batch)
                with runtime.autocast(torch.bfloat16 if loop.autocast else torch.float32):
                    sums = add_sums(sums, micro_batch(trainee.model, batch, objective, weights, teacher_lm_head))
                watch.mark(compiling.TRACED)
                runtime.cut()
                watch.mark(compiling.COMPILED)
            if anchors is not None and not failed:
                with runtime.autocast(torch.bfloat16 if loop.autocast else torch.float32):
                    sums = anchor_micro_batch(trainee.model, next(anchors), objective, weights, sums, runtime)
                runtime.cut()
            # Looked at once: a signal that comes later is for the next step. All processes stop after the same.
            stop = runtime.agree(bool(stopped or failed))
            if stop and runtime.agree(bool(failed)):
                set_random_states(random)  # this step has not begun
                give_up(failed, step - 1)
            lr = set_lr(optimizer, lr_factor(optim, step - 1, loop.max_steps))
            means = optimizer_step(optimizer, list(trainee.trained.values()), sums, optim.clip_grad_norm, runtime)
            watch.mark(compiling.OPTIMIZER_TRACED)
            pending.append((step, lr, means))
            last = step == loop.max_steps
            saving = step % loop.save_steps == 0 or last
            if step % loop.log_steps == 0:
                saving = saving or _is_time_to_save(loop, saved_at, runtime)
            evaluating = step % loop.eval_steps == 0 or last
            if step % loop.log_steps == 0 or saving or evaluating:
                _flush(pending, log, runtime)
            runtime.step_end()
            watch.mark(compiling.OPTIMIZER_COMPILED)
            watch.end(step)
            if evaluating:
                runtime.barrier("metrics")  # the log has all steps up to here, so that their rate is not the pause's
                evaluate(step)
                log.pause()
                last = last or is_exhausted()
                stop = runtime.agree(bool(stopped))  # again: evaluations are long
            if saving or stop or last:
                _flush(pending, log, runtime)
                save(step)
                saved_at = time.monotonic()
                log.pause()
            if stop and not last:
                by = stopped[0] if stopped else "a signal to another process"
                raise InterruptedRunError(
                    f"stopped by {by} after step {step} of {loop.max_steps}; "
                    f"the checkpoint is complete, the same command goes on from it"
                )
    export("last")
    if hooks.evaluate is None:
        export("best")
    return {
        "step": step,
        "best_step": state["best_step"],
        best: state[best],
        "stopped_early": step < loop.max_steps,
        "resumed_from": start,
    }


def _tidy(out: Path, step: int, evaluated: bool, logs: Mapping[str, LogMark]) -> None:
    """Cut a run's files back to a step, its evaluation left out where that is still to come."""
    cut_back(out / "metrics.jsonl", step, logs.get("metrics.jsonl"))
    cut_back(out / "evaluations.jsonl", step if evaluated else step - 1, logs.get("evaluations.jsonl"))
    for name in EXPORTS:
        restore_dir(out / name)


def _feeds(
    dataset: TrainingRows, anchor: Batch | None, loop: LoopConfig, runtime: Runtime, start: int, seed: int
) -> tuple[Iterator[Batch], Iterator[Batch] | None]:
    """Return the micro-batches of this process from a step on, on the device, and those of the term `anchor`."""
    rows, steps = loop.batch_size * (runtime.replicas // runtime.processes), loop.max_steps - start
    batches = dataset.batches(
        start_step=start,
        steps=steps,
        batch_rows=rows,
        accumulation=loop.accumulation(runtime.replicas),
        seed=seed,
        replica=runtime.rank,
        replicas=runtime.processes,
    )
    if anchor is None:
        return runtime.feed(batches), None
    remembered = anchor_batches(anchor, start, steps, rows, runtime.rank, runtime.processes)
    return runtime.feed(batches), runtime.feed(remembered)


def _next(batches: Iterator[Batch]) -> Batch | QatLoraError | OSError:
    """Return the next batch, or the error for which there is none: a row that is not what was written."""
    try:
        return next(batches)
    except (QatLoraError, OSError) as error:
        return error


def _lost(error: QatLoraError | OSError | None, step: int) -> Exception:
    """Return what ends a run whose rows cannot be read: the error, here or in another process, and what is kept."""
    kept = f"the checkpoint after step {step} is complete" if step else "no step was complete yet"
    text = f"; {kept}: once that is mended, the same command goes on from there"
    if error is None:
        return ReplicaError(f"another process could not read its rows{text}")
    return type(error)(f"{error}{text}") if isinstance(error, QatLoraError) else error


def _is_time_to_save(loop: LoopConfig, saved_at: float, runtime: Runtime) -> bool:
    """Tell whether the last checkpoint is too old; all replicas get the same answer, a yes if one of them says so."""
    if not loop.save_minutes:
        return False
    return runtime.agree(time.monotonic() - saved_at > 60 * loop.save_minutes)


def _flush(pending: list[tuple[int, float, Sums]], log: MetricsLog, runtime: Runtime) -> None:
    """Send the values of the pending steps to the log, through the runtime's deferred callback, and forget them."""
    if not pending:
        return
    steps = [step for step, _, _ in pending]
    lrs = [lr for _, lr, _ in pending]
    names = list(pending[0][2])

    def write(*values: Any) -> None:
        flat = [float(value) for value in values]
        rows = [flat[i : i + len(names)] for i in range(0, len(flat), len(names))]
        sound = next((i for i, row in enumerate(rows) if not all(map(math.isfinite, row))), len(rows))
        log.write(steps[:sound], lrs[:sound], names, rows[:sound])
        if sound < len(rows):
            odd = dict(zip(names, rows[sound], strict=True))
            name = next(name for name in ("loss", *names) if not math.isfinite(odd[name]))
            raise DivergedError(f"{name}: {odd[name]} at step {steps[sound]}; {REMEDY}")

    if runtime.is_main:  # each value by itself: stacking them on the device would be one more graph
        runtime.defer(write, *(means[name] for _, _, means in pending for name in names))
    pending.clear()
