"""A training run, its settings, and the side jobs between its steps: evaluating, saving, stopping.

The loop (`loop`) does these after its steps; all see the same `Run`. Their order makes a checkpoint complete: the log
is flushed before an evaluation, which is counted before the checkpoint that holds its result; a stop comes last. All
processes must agree whether one is due. What an evaluation or an export *is* comes in as a function (`LoopHooks`).
"""

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Self

import torch

from qat_lora.config import HELP, common, option, settings
from qat_lora.data.shuffle import steps_per_epoch
from qat_lora.errors import ConfigError, DivergedError, InterruptedRunError, QatLoraError, ReplicaError
from qat_lora.runtime.base import Runtime
from qat_lora.train.checkpoint import save_checkpoint
from qat_lora.train.metrics import EVALUATIONS, LOGS, REMEDY, TRACKERS, MetricsLog, append_lines, log_mark
from qat_lora.train.optim import TrainState, averaged

_count = functools.partial(option, min=1)


@settings
class LoopConfig:
    """How long a run is, in what portions it computes, and what it keeps."""

    batch_size: int = _count(4, "rows of a micro-batch on one replica", unit="rows", common=True)
    accumulation_steps: int = _count(1, "micro-batches of an optimizer step", unit="micro-batches", common=True)
    global_batch_size: int | None = _count(None, "rows of a step over all replicas; sets the accumulation", unit="rows")
    max_steps: int = _count(1000, "optimizer steps", unit="steps", common=True)
    until_step: int | None = _count(None, "stop after this step, to go on later; default: --max-steps", unit="steps")
    epochs: float | None = common(None, HELP["epochs"], unit="epochs", above=0)
    log_steps: int = _count(10, "optimizer steps between fetches of the log values", unit="steps")
    eval_steps: int = _count(50, "optimizer steps between evaluations on the cache's evaluation split", unit="steps")
    save_steps: int = _count(100, "optimizer steps between checkpoints", unit="steps")
    save_minutes: float = option(5.0, HELP["save_minutes"], unit="minutes", min=0)
    keep_checkpoints: int = _count(2, "complete checkpoints that are kept", unit="checkpoints")
    early_stop: int | None = _count(None, HELP["early_stop"], unit="evaluations")
    gradient_checkpointing: bool = option(False, "compute each layer again in the backward pass, for less memory")
    autocast: bool = option(False, "float32 weights, products in bfloat16 (with --dtype bfloat16 all floats are)")
    max_recompiles: int | None = option(None, HELP["max_recompiles"], unit="graphs", min=0)
    log_to: tuple[str, ...] = option((), "send the numbers on to tensorboard, wandb or both", unit="list")

    def __post_init__(self) -> None:
        for name in self.log_to:
            if name not in TRACKERS:
                raise ConfigError(f"log_to: {name!r} is unknown; allowed: {', '.join(TRACKERS)}")

    def accumulation(self, replicas: int) -> int:
        """Return micro-batches per step for a number of replicas; ConfigError: the global batch does not divide."""
        if self.global_batch_size is None:
            return self.accumulation_steps
        rows = self.batch_size * replicas
        if self.global_batch_size % rows:
            product = f"batch_size x replicas = {self.batch_size} x {replicas} = {rows}"
            raise ConfigError(f"global_batch_size: {self.global_batch_size} is not a multiple of {product}")
        return self.global_batch_size // rows

    def step_rows(self, replicas: int) -> int:
        """Return the rows of an optimizer step over all replicas."""
        return self.batch_size * self.accumulation(replicas) * replicas

    def for_rows(self, rows: int | None, replicas: int) -> Self:
        """Return the loop with the steps that `epochs` means of known rows; ConfigError: `max_steps` is another."""
        if self.epochs is None or rows is None:
            return self
        steps = math.ceil(self.epochs * steps_per_epoch(rows, self.step_rows(replicas)))
        if self.max_steps not in (LoopConfig.max_steps, steps):
            other = f"{self.epochs:g} epochs of {rows:,} rows are {steps:,} steps"
            raise ConfigError(f"max_steps: {self.max_steps:,}, but {other}; give --max-steps or --epochs")
        return replace(self, max_steps=steps)


class LoopHooks(NamedTuple):
    """What a run does that the loop knows nothing about."""

    evaluate: Callable[[], float] | None  # mean loss on the evaluation split, lower is better; None where there is none
    export: Callable[[str], None]  # write the student as it is under the run's folder, as `start`, `best` or `last`
    metric: str = "kl"  # the name in files of what `evaluate` measures


class RunSettings(NamedTuple):
    """The folder of a run, the seed of its row order, and the settings that a resumed run must share."""

    out: Path
    seed: int
    fingerprint: Mapping[str, Any]
    quiet: bool = False  # no progress bar


@dataclass
class Progress:
    """How far a run is: the counters in a checkpoint's `state.json`."""

    step: int = 0  # optimizer steps done
    best_step: int | None = None
    best: float | None = None  # the lowest evaluation so far
    evaluations_since_best: int = 0
    evaluated: bool = True  # False if the evaluation due after `step` failed and is the first thing to do on resume

    def to_json(self, metric: str) -> dict[str, Any]:
        """Return the counters under their names on disk."""
        return {(f"best_{metric}" if name == "best" else name): value for name, value in vars(self).items()}


@dataclass
class Run:
    """A run under way, as its callbacks see it."""

    state: TrainState
    optimizer: torch.optim.Optimizer
    runtime: Runtime
    hooks: LoopHooks
    settings: RunSettings
    loop: LoopConfig
    progress: Progress
    start: int  # the step from which the run was resumed
    log: MetricsLog
    stopped: Sequence[str]  # stop signals that this process received; grows at any time
    stopping: bool = False  # True in all processes if one of them was asked to stop
    saved_at: float = 0.0  # when a checkpoint was last written, or the first step began, as `time.monotonic` says

    @property
    def step(self) -> int:
        """The number of the last optimizer step, 1-based; 0 before the first."""
        return self.progress.step

    @property
    def is_over(self) -> bool:
        """True if no step is left, or evaluations stopped improving."""
        patience, since = self.loop.early_stop, self.progress.evaluations_since_best
        end = min(self.loop.max_steps, self.loop.until_step or self.loop.max_steps)
        return self.step >= end or (patience is not None and since >= patience)

    def ends_interval(self, steps: int) -> bool:
        """Tell whether an interval of so many steps, or the run, ends with this step."""
        return self.step % steps == 0 or self.step == self.loop.max_steps

    def export(self, name: str) -> None:
        """Write the student, with averaged tensors where there are any, from the main process."""
        if self.runtime.is_main:
            with averaged(self.optimizer):
                self.hooks.export(name)

    def save(self) -> None:
        """Write a checkpoint of the current step, and every log line up to it first."""
        self.log.flush(self.runtime)
        self.runtime.barrier("metrics")  # lines that are not on disk yet could not be written again by a resumed run
        out, content = self.settings.out, dict[str, Any]()
        if self.runtime.is_main:
            content = self.progress.to_json(self.hooks.metric) | {"fingerprint": dict(self.settings.fingerprint)}
            content["logs"] = {name: log_mark(out / name) for name in LOGS}
        trained, keep = self.state.trained, self.loop.keep_checkpoints
        save_checkpoint(out / "checkpoints", self.step, trained, self.optimizer, content, keep, self.runtime)
        self.runtime.barrier("checkpoint")
        self.saved_at = time.monotonic()
        self.log.pause()

    def give_up(self, error: QatLoraError | OSError | None) -> NoReturn:
        """End the run because this process cannot read rows (None: another), after a checkpoint of the last step."""
        if self.step > self.start:
            self.save()
        kept = f"the checkpoint after step {self.step} is complete" if self.step else "no step was complete yet"
        text = f"; {kept}: once that is mended, the same command goes on from there"
        if error is None:
            raise ReplicaError(f"another process could not read its rows{text}")
        raise (type(error)(f"{error}{text}") if isinstance(error, QatLoraError) else error) from error


def evaluate(run: Run) -> None:
    """Evaluate once, and export the student if it is the best so far; DivergedError for NaN or an infinity."""
    hooks, progress = run.hooks, run.progress
    if hooks.evaluate is None:
        return
    try:
        with averaged(run.optimizer):
            value = hooks.evaluate()
    except (QatLoraError, OSError) as error:
        if run.runtime.processes > 1:  # the others are in the middle of their evaluation and cannot save
            raise
        progress.evaluated = False
        run.give_up(error)
    progress.evaluated = True
    if not math.isfinite(value):
        raise DivergedError(f"evaluation {hooks.metric}: {value} after step {run.step}; {REMEDY}")
    if run.runtime.is_main:
        append_lines(run.settings.out / EVALUATIONS, [{"step": run.step, hooks.metric: value}])
        run.log.track(run.step, {f"evaluation/{hooks.metric}": value})
    progress.evaluations_since_best += 1
    if progress.best is None or value < progress.best:
        progress.best, progress.best_step, progress.evaluations_since_best = value, run.step, 0
        run.export("best")
    run.log.pause()


def is_save_due(run: Run) -> bool:
    """Tell whether an interval or the run has ended, or the newest checkpoint is too old on any process's clock."""
    loop = run.loop
    if run.ends_interval(loop.save_steps):
        return True
    if run.step % loop.log_steps or not loop.save_minutes:  # looking means that all processes have to agree
        return False
    return run.runtime.agree(time.monotonic() - run.saved_at > 60 * loop.save_minutes)


def end_if_asked(run: Run) -> None:
    """Raise InterruptedRunError if the run was asked to stop and is not over anyway; it has saved."""
    if run.stopping and not run.is_over:
        by = run.stopped[0] if run.stopped else "a signal to another process"
        done = f"stopped by {by} after step {run.step} of {run.loop.max_steps}"
        raise InterruptedRunError(f"{done}; the checkpoint is complete, the same command goes on from it")
