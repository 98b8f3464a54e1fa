"""`--lr auto`: the learning rate of a run, from a few trials of a few steps each on its own training rows.

The best rate differs by an order of magnitude between students: one that is close to its teacher is hurt by steps that
another one needs. A sweep of whole runs finds it at several times the price of the run. A rate finder that raises the
rate from step to step until the loss explodes (Smith 2017) finds where training diverges, which for Adam from a good
start is far above what is best. So each trial is the run in miniature: from the same start on the same rows, with
warm-up and decay compressed to a 32nd of the run's steps. Then the loss is measured on rows that no trial trains on,
by one more step at a rate of 0: the same computation, hence no new graph on XLA, and no evaluation split is needed.
These rows are a full step's, at most half of all; trials get masked rows in their place (`data.shuffle.holding_out`).

All trials see the same numbers but for the rate, so their losses are a smooth curve over it. Rates are tried by factors
of 2 until the best has worse neighbours; the minimum of the parabola through the three is the best rate of a run that
short. Short runs want a lower rate than long ones: the ratio is a power of that of their lengths (`HORIZON_POWERS`).
Trials leave weights, optimizer and random numbers as they were; each is kept in `lr_probe.json` as it ends.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from tqdm.auto import tqdm

from qat_lora.errors import ConfigError, DivergedError, InterruptedRunError, ModelError, QatLoraError, ReplicaError
from qat_lora.files.checksums import read_object
from qat_lora.files.finite import json_text
from qat_lora.files.folders import failpoint, write_text
from qat_lora.train.callbacks import Progress, Run
from qat_lora.train.checkpoint import optimizer_views, random_states, set_random_states
from qat_lora.train.metrics import MetricsLog
from qat_lora.train.optim import FIRST_LR, OptimConfig, set_peaks
from qat_lora.train.step import Sums

FILE = "lr_probe.json"
# By a run's steps, the power of its length over a trial's. Single cases of benchmarks/lr_matrix.py, at 100 steps, fit
# 0.17 to 0.7, at 366 0.4 to 0.9; too low a rate costs less than too high a one, which lets the evaluation rise.
HORIZON_POWERS, MOST_RATIO = {100: 0.25, 366: 0.5}, 100 / 3  # no rate goes farther from a trial's than was measured
SHARE, SHORTEST, LONGEST = 1 / 32, 2, 64  # steps of a trial: a share of the run's, and limits
LEAST_TRIALS, MOST_TRIALS = 3, 9
HIGHEST = 5  # power of 2, a rate of 0.0128: two steps learn a few rows by heart at rates that a run does not survive

OpenSteps = Callable[[Run, OptimConfig, tuple[int, int], int], AbstractContextManager[Iterator[Sums]]]
"""From a run, its settings, a span of steps (first, count), and the one whose rows are in no other, to what takes a
step each time (`loop`)."""


def trial_steps(max_steps: int) -> int:
    """Return the training steps of a trial for a run of `max_steps`."""
    return max(SHORTEST, min(LONGEST, round(max_steps * SHARE)))


def probe_steps(max_steps: int, trials: int = LEAST_TRIALS) -> int:
    """Return the steps of a number of trials: of training, one that measures each, and one that measures the start."""
    return trials * (trial_steps(max_steps) + 1) + 1


def choose_lr(run: Run, optim: OptimConfig, open_steps: OpenSteps) -> dict[str, Any]:
    """Return what `lr_probe.json` says of a run that has not begun, its `lr` included; its state stays as it is.

    InterruptedRunError: a stop signal; the trials that are through are kept.
    CacheDamaged: a row cannot be read (or another error of the source of rows).
    DivergedError: the loss is NaN or infinite before the first step, or after every trial.
    ConfigError: the processes do not share the run's folder.
    """
    whole, file, runtime = run.loop.max_steps, run.settings.out / FILE, run.runtime
    start, losses = _read(file, whole)
    known = start is not None
    if runtime.agree(known) != known:
        raise ConfigError(f"--out {file.parent}: not every process sees {FILE}; give a folder that all hosts share")
    runtime.barrier("lr probe")
    hidden, done = run.settings.quiet or not runtime.is_main, probe_steps(whole, len(losses)) if known else 0

    def keep(start: float) -> None:
        if runtime.is_main:
            write_text(file, json_text(_found(start, losses, whole), file, indent=1))
        failpoint("lr-trial")

    with tqdm(total=probe_steps(whole), initial=done, desc="find lr", unit="step", disable=hidden) as bar:
        if start is None:
            start = _trial(run, optim, 0, open_steps, bar)
            if not math.isfinite(start):
                raise DivergedError(f"loss: {start} before the first step; look at the student and the cache")
            keep(start)
        while (power := _next(start, losses)) is not None:
            lr = FIRST_LR * 2.0**power
            loss = _trial(run, replace(optim, lr=lr), trial_steps(whole), open_steps, bar)
            losses[power] = loss if math.isfinite(loss) else math.inf  # NaN has no order, and the file holds neither
            bar.set_postfix_str(f"lr {lr:.3g}: loss {losses[power]:.4f}, at the start {start:.4f}")
            keep(start)
    if not math.isfinite(min(losses.values())):
        rates = [FIRST_LR * 2.0**power for power in losses]
        tried = f"{len(losses)} trials of {trial_steps(whole)} steps, from {max(rates):.3g} down to {min(rates):.3g}"
        remedy = "give --dtype float32, or lower --scale-lr or --norm-lr if you gave one, and start with --overwrite"
        raise DivergedError(f"lr auto: the loss is NaN or infinite after each of {tried}; {remedy}")
    return _found(start, losses, whole)


def _next(start: float, losses: Mapping[int, float]) -> int | None:
    """Return the power of 2 to try next, as a multiple of `FIRST_LR`; None once the best has neighbours, or enough."""
    if not losses:
        return 0
    best = _best(losses)
    ahead = 1 if losses[best] < start else -1  # what gains nothing is too high
    missing = [power for power in (best + ahead, best - ahead) if power not in losses and power <= HIGHEST]
    return missing[0] if missing and len(losses) < MOST_TRIALS else None


def _best(losses: Mapping[int, float]) -> int:
    return min(losses, key=lambda power: (losses[power], power))


def vertex(losses: Mapping[int, float]) -> float:
    """Return the power at the minimum of the parabola through the best and its neighbours; the best one at an end."""
    best = _best(losses)
    low, mid, high = (losses.get(best + i, math.inf) for i in (-1, 0, 1))
    bend = low - 2 * mid + high
    return best + (0.5 * (low - high) / bend if 0 < bend < math.inf else 0.0)


def _found(start: float, losses: Mapping[int, float], max_steps: int) -> dict[str, Any]:
    """Return what is known so far, as JSON values: a loss that is not finite is None."""
    length = trial_steps(max_steps)
    trials = [{"power": power, "loss": loss if math.isfinite(loss) else None} for power, loss in losses.items()]
    found = {"trial_steps": length, "steps": probe_steps(max_steps, len(losses)), "start_loss": start, "trials": trials}
    least = min(losses.values(), default=math.inf)
    if _next(start, losses) is not None or not math.isfinite(least):
        return found
    power = np.interp(math.log(max_steps), np.log([*HORIZON_POWERS]), [*HORIZON_POWERS.values()])
    best, factor = FIRST_LR * 2 ** vertex(losses), float(min(max_steps / length, MOST_RATIO) ** power)
    outcome = f"the least loss, {least:.4f} ({start:.4f} at the start)"
    why = f"of {len(losses)} trials of {length} steps, {best:.3g} has {outcome}; times {factor:.3g} for the longer run"
    if not least < start:
        why = f"no trial of {length} steps gained anything, so the lowest rate is taken; {why}"
    return {**found, "best_of_trials": best, "lr": float(f"{best * factor:.4g}"), "why": why}


def _read(file: Path, max_steps: int) -> tuple[float | None, dict[int, float]]:
    """Return the start's loss and those of trials that an interrupted run has finished; nothing of another form."""
    try:
        saved = read_object(file)
        losses = {int(t["power"]): math.inf if t["loss"] is None else float(t["loss"]) for t in saved["trials"]}
        return (float(saved["start_loss"]), losses) if saved["trial_steps"] == trial_steps(max_steps) else (None, {})
    except (ModelError, KeyError, TypeError, ValueError):
        return None, {}


def _trial(run: Run, optim: OptimConfig, length: int, open_steps: OpenSteps, bar: Any) -> float:
    """Return the loss on rows kept apart after a run of `length` steps, which is then undone."""
    whole, runtime = run.loop.max_steps, run.runtime
    log = MetricsLog(run.log.path, length, 0, True, runtime.device)
    begun = Progress(step=int(length == 0))  # annealed weights of the loss are those of a run's end, for the start too
    changed = {"loop": replace(run.loop, max_steps=max(1, length)), "progress": begun, "log": log}
    trial = _Trial(**{**vars(run), **changed})
    warmup = min(optim.warmup_steps, max(1, round(optim.warmup_steps * length / whole)))
    measured_at = whole // 2 + trial_steps(whole)  # in the order of steps: the same rows for trials of any length
    rows = (measured_at - length, length + 1), measured_at
    with _undone(run) as random, open_steps(trial, replace(optim, warmup_steps=warmup), *rows) as steps:
        for step in range(length + 1):
            if step == length:
                set_random_states(random)  # the same dropout for all
            set_peaks(run.optimizer, optim, float(step < length))
            means = next(steps)
            if trial.stopping:
                by = run.stopped[0] if run.stopped else "a signal to another process"
                kept = f"trials that were through are kept in {FILE}, and the same command goes on from there"
                raise InterruptedRunError(f"stopped by {by} while seeking the learning rate; {kept}")
            runtime.step_end()
            bar.update()
        return float(means["loss"])


class _Trial(Run):
    """A run that keeps nothing."""

    def give_up(self, error: QatLoraError | OSError | None) -> NoReturn:
        """End the run because rows cannot be read: there is no checkpoint to write."""
        raise error or ReplicaError("another process could not read its rows")


@contextmanager
def _undone(run: Run) -> Iterator[Mapping[str, str]]:
    """Yield the generators' states; then tensors, optimizer and generators get back what they had, without a graph."""
    trained = run.state.trained
    tensors = {**{name: p.data for name, p in trained.items()}, **optimizer_views(trained, run.optimizer)}
    kept, random = {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}, random_states()
    try:
        yield random
    finally:
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(kept[name])
        set_random_states(random)
