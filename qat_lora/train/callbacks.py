"""A training run, and the side jobs between its steps, one callback each.

The loop (`loop`) computes steps; evaluating, saving and answering a signal are callbacks, as in OLMo-core. All of them
see the same `Run`. They are called in the order of a list, which is what makes a checkpoint complete: the log is
flushed before an evaluation, the evaluation is counted before the checkpoint that contains its result, and a stop comes
after the checkpoint. Only the compile watch is no callback, since it looks into a step. What an evaluation or an export
*is* comes in as a function (`LoopHooks`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from qat_lora.errors import DamagedFileError, DivergedError, InterruptedRunError, QatLoraError, ReplicaError
from qat_lora.runtime.base import Runtime
from qat_lora.train.checkpoint import save_checkpoint
from qat_lora.train.metrics import EVALUATIONS, LOGS, REMEDY, MetricsLog, append_line, log_mark
from qat_lora.train.optim import TrainState, averaged


@dataclass(frozen=True)
class LoopHooks:
    """What a run does that the loop knows nothing about."""

    evaluate: Callable[[], float] | None
    """Mean loss on the evaluation split (KL for a cache), lower is better; None where there is none."""
    export: Callable[[str], None]
    """Write the student as it is now under the run's folder, as `start`, `best` or `last`, atomically."""
    metric: str = "kl"
    """The name in files of what `evaluate` measures."""


class RunSettings(NamedTuple):
    """The folder of a run, the seed of its row order, and the settings that a resumed run must share."""

    out: Path
    seed: int
    fingerprint: Mapping[str, Any]
    quiet: bool = False
    """No progress bar."""


@dataclass
class Progress:
    """How far a run is: the counters in a checkpoint's `state.json`."""

    step: int = 0
    """Optimizer steps done."""
    best_step: int | None = None
    best: float | None = None
    """The lowest evaluation so far."""
    evaluations_since_best: int = 0
    evaluated: bool = True
    """False if the evaluation due after `step` failed and is the first thing to do on resume."""

    def to_json(self, metric: str) -> dict[str, Any]:
        """Return the counters under their names on disk."""
        return {(f"best_{metric}" if name == "best" else name): value for name, value in vars(self).items()}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any], metric: str, file: Path) -> Progress:
        """Return the counters of a checkpoint.

        Raises:
            DamagedFileError: one is missing; `evaluated` may be, earlier versions did not write it.
        """
        fresh = cls().to_json(metric)
        if missing := fresh.keys() - {"evaluated"} - saved.keys():
            raise DamagedFileError(f"{file}: lacks {min(missing)}; remove that folder to go on")
        return cls(*(saved.get(name, value) for name, value in fresh.items()))


@dataclass
class Run:
    """A run under way, as its callbacks see it."""

    state: TrainState
    optimizer: torch.optim.Optimizer
    runtime: Runtime
    hooks: LoopHooks
    settings: RunSettings
    progress: Progress
    start: int
    """The step from which the run was resumed."""
    log: MetricsLog
    stopped: Sequence[str]
    """Stop signals that this process received; grows at any time."""
    max_steps: int
    keep_checkpoints: int
    early_stop: int | None
    """Evaluations without a better one after which the run ends."""
    stopping: bool = False
    """True in all processes if one of them was asked to stop."""

    @property
    def step(self) -> int:
        """The number of the last optimizer step, 1-based; 0 before the first."""
        return self.progress.step

    @property
    def is_over(self) -> bool:
        """True if no step is left, or evaluations stopped improving."""
        patience = self.early_stop
        return self.step >= self.max_steps or (
            patience is not None and self.progress.evaluations_since_best >= patience
        )

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
        folder, trained = out / "checkpoints", self.state.trained
        save_checkpoint(folder, self.step, trained, self.optimizer, content, self.keep_checkpoints, self.runtime)
        self.runtime.barrier("checkpoint")

    def give_up(self, error: QatLoraError | OSError | None) -> NoReturn:
        """End the run because rows cannot be read, after a checkpoint of the last good step.

        Args:
            error: raised in this process; None if another process failed.
        """
        if self.step > self.start:
            self.save()
        kept = f"the checkpoint after step {self.step} is complete" if self.step else "no step was complete yet"
        text = f"; {kept}: once that is mended, the same command goes on from there"
        if error is None:
            raise ReplicaError(f"another process could not read its rows{text}")
        raise (type(error)(f"{error}{text}") if isinstance(error, QatLoraError) else error) from error


class Callback:
    """A side job of the loop; every method may be left out."""

    def before_training(self, run: Run) -> None:
        """Called before the first step, also of a resumed run."""

    def is_due(self, run: Run) -> bool:
        """Tell whether `after_step` needs all lines of the log written; all processes must give the same answer."""
        return False

    def after_step(self, run: Run, due: bool) -> None:
        """Called after an optimizer step was dispatched, with the answer of `is_due`."""


@dataclass
class Evaluate(Callback):
    """Evaluates at the start, every so many steps and at the end, and exports each new best."""

    every: int

    def before_training(self, run: Run) -> None:
        """Export and evaluate the untrained student; on resume, repeat an evaluation that failed."""
        if run.start == 0:
            run.export("start")
        if run.start == 0 or not run.progress.evaluated:
            _evaluate(run)
            run.log.pause()

    def is_due(self, run: Run) -> bool:
        """Tell whether an interval or the run has ended."""
        return run.step % self.every == 0 or run.step == run.max_steps

    def after_step(self, run: Run, due: bool) -> None:
        """Evaluate, then look at the stop signals again, since evaluations are long."""
        if due:
            run.runtime.barrier("metrics")  # all lines are written now, so their rate does not include the pause
            _evaluate(run)
            run.log.pause()
            run.stopping = run.runtime.agree(bool(run.stopped))


def _evaluate(run: Run) -> None:
    """Evaluate once, and export the student if it is the best so far.

    Raises:
        DivergedError: the result is NaN or infinite.
    """
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
        append_line(run.settings.out / EVALUATIONS, {"step": run.step, hooks.metric: value})
        run.log.track(run.step, {f"evaluation/{hooks.metric}": value})
    progress.evaluations_since_best += 1
    if progress.best is None or value < progress.best:
        progress.best, progress.best_step, progress.evaluations_since_best = value, run.step, 0
        run.export("best")


@dataclass
class Checkpoint(Callback):
    """Saves every so many steps or minutes, at the end, and before a stop."""

    every: int
    minutes: float
    """Age of the newest checkpoint at which the next is due anyway; 0: never."""
    log_every: int
    """Steps between looks at the clock, on which all processes have to agree."""
    saved_at: float = 0.0

    def before_training(self, run: Run) -> None:
        """Start the clock."""
        self.saved_at = time.monotonic()

    def is_due(self, run: Run) -> bool:
        """Tell whether an interval or the run has ended, or the newest checkpoint is too old on any process's clock."""
        if run.step % self.every == 0 or run.step == run.max_steps:
            return True
        if run.step % self.log_every or not self.minutes:
            return False
        return run.runtime.agree(time.monotonic() - self.saved_at > 60 * self.minutes)

    def after_step(self, run: Run, due: bool) -> None:
        """Save."""
        if due or run.stopping or run.is_over:
            run.save()
            self.saved_at = time.monotonic()
            run.log.pause()


class Stop(Callback):
    """Ends a run that was asked to stop; `Checkpoint`, before it in the list, has saved it."""

    def after_step(self, run: Run, due: bool) -> None:
        """Raise InterruptedRunError, unless the run is over anyway."""
        if run.stopping and not run.is_over:
            by = run.stopped[0] if run.stopped else "a signal to another process"
            raise InterruptedRunError(
                f"stopped by {by} after step {run.step} of {run.max_steps}; "
                f"the checkpoint is complete, the same command goes on from it"
            )
