"""The training loop: the same on a laptop, a GPU, a TPU chip or many, because it knows only a `Runtime`.

A loop iteration is one optimizer step of `accumulation` micro-batches. Values for the log stay on the device and
are fetched together every `log_steps`; evaluation, saving and the answer to SIGTERM happen between steps. What
an evaluation or an export *is* comes in as a function: the loop only decides when.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from qat_lora.cache.dataset import KDCacheDataset
from qat_lora.config import option
from qat_lora.errors import ConfigError, DivergedError, InterruptedRunError
from qat_lora.losses.objective import ObjectiveConfig, weight_tensors
from qat_lora.runtime.base import Runtime
from qat_lora.train.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from qat_lora.train.folders import settle
from qat_lora.train.metrics import MetricsLog, append_line, cut_back
from qat_lora.train.optim import OptimConfig, build_optimizer, lr_factor, set_lr
from qat_lora.train.step import Sums, add_sums, micro_batch, optimizer_step, zero_sums
from qat_lora.types import LanguageModel


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
    keep_checkpoints: int = option(2, "complete checkpoints that are kept", unit="checkpoints")

    def __post_init__(self) -> None:
        for name in ("batch_size", "accumulation_steps", "max_steps", "log_steps", "eval_steps", "save_steps"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} is below 1")
        if self.global_batch_size is not None and self.global_batch_size < 1:
            raise ConfigError(f"global_batch_size: {self.global_batch_size} is below 1")
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
    adapter: dict[str, nn.Parameter]
    scales: dict[str, nn.Parameter]

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """All tensors that train."""
        return self.adapter | self.scales


@dataclass(frozen=True)
class LoopHooks:
    """What the loop calls but does not know."""

    evaluate: Callable[[], float] | None
    """Mean KL on the evaluation split, lower is better; None where the cache has none."""
    export: Callable[[str], None]
    """Write the student as it is now under the run's folder, as `start`, `best` or `last`, by `whole_folder`."""


EXPORTS = ("start", "best", "last")


def train(
    trainee: Trainee,
    dataset: KDCacheDataset,
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
) -> dict[str, Any]:
    """Train until `max_steps`, from the newest complete checkpoint under `out` if there is one.

    Args:
        trainee: model and trained tensors, placed on the runtime's device.
        dataset: the KD cache's training split.
        objective: loss terms and weights.
        optim: learning rates and schedule.
        loop: lengths and portions.
        hooks: evaluation and export.
        runtime: where this runs.
        out: the run's folder.
        seed: of the row order.
        fingerprint: settings that a resumed run must share.
        quiet: no progress bar.

    Returns:
        `step`, `best_step`, `best_kl`, `resumed_from`.

    Raises:
        InterruptedRunError: SIGTERM or SIGINT; a checkpoint was written first.
        DivergedError: the loss is NaN or infinite; no checkpoint of that is written.
    """
    accumulation = loop.accumulation(runtime.replicas)
    parameters = list(trainee.trained.values())
    optimizer = build_optimizer(optim, trainee.adapter.values(), trainee.scales.values())
    state: dict[str, Any] = {"step": 0, "best_step": None, "best_kl": None}
    folder, metrics, evaluations = out / "checkpoints", out / "metrics.jsonl", out / "evaluations.jsonl"
    found = checkpoints(folder)
    if found:
        saved = load_checkpoint(found[-1], trainee.trained, optimizer, fingerprint)
        state = {name: saved[name] for name in state}
    start = int(state["step"])
    if runtime.is_main:
        for file in (metrics, evaluations):
            cut_back(file, start if found else -1)
        for name in EXPORTS:
            settle(out / name)
    zeros = zero_sums(objective, runtime.device)
    runtime.cut()  # optimizer state, gradients and zeros are there now, not part of the first micro-batch's graph
    batches = runtime.feed(
        dataset.batches(
            start_step=start,
            steps=loop.max_steps - start,
            batch_rows=loop.batch_size,
            accumulation=accumulation,
            seed=seed,
            replica=runtime.rank,
            replicas=runtime.replicas,
        )
    )

    def save(step: int) -> None:
        runtime.barrier("metrics")  # the lines up to here are on disk first: a resumed run could not write them again
        if runtime.is_main:
            content = {**state, "step": step, "fingerprint": dict(fingerprint)}
            save_checkpoint(folder, step, trainee.trained, optimizer, content, loop.keep_checkpoints)
        runtime.barrier("checkpoint")

    def evaluate(step: int) -> None:
        if hooks.evaluate is None:
            return
        kl = hooks.evaluate()
        if runtime.is_main:
            append_line(evaluations, {"step": step, "kl": kl})
        if state["best_kl"] is None or kl < state["best_kl"]:
            state.update(best_kl=kl, best_step=step)
            export("best")

    def export(name: str) -> None:
        if runtime.is_main:
            hooks.export(name)

    with (
        stop_signals() as stopped,
        MetricsLog(metrics, loop.max_steps, start, quiet or not runtime.is_main, "recover") as log,
    ):
        if start == 0:
            export("start")
            evaluate(0)
            log.pause()
        pending: list[tuple[int, float, Sums]] = []
        for step in range(start + 1, loop.max_steps + 1):
            progress = (step - 1) / max(1, loop.max_steps - 1)
            weights = weight_tensors(objective.weights_at(progress), runtime.device)
            sums = zeros
            for _ in range(accumulation):
                batch = next(batches)
                sums = add_sums(sums, micro_batch(trainee.model, batch, objective, weights))
                runtime.cut()
            lr = set_lr(optimizer, lr_factor(optim, step - 1, loop.max_steps))
            means = optimizer_step(optimizer, parameters, sums, optim.clip_grad_norm, runtime)
            pending.append((step, lr, means))
            last = step == loop.max_steps
            saving = step % loop.save_steps == 0 or last
            if step % loop.log_steps == 0 or saving:
                _flush(pending, log, runtime)
            runtime.step_end()
            if step % loop.eval_steps == 0 or last:
                evaluate(step)
                log.pause()
            stop = bool(stopped)  # looked at once: a signal that comes while saving is for the next step
            if saving or stop:
                _flush(pending, log, runtime)
                save(step)
                log.pause()
            if stop and not last:
                raise InterruptedRunError(
                    f"stopped by {stopped[0]} after step {step} of {loop.max_steps}; "
                    f"the checkpoint is complete, the same command goes on from it"
                )
    export("last")
    if hooks.evaluate is None:
        export("best")
    return {**state, "step": loop.max_steps, "resumed_from": start}


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
        log.write(steps, lrs, names, rows)
        for step, row in zip(steps, rows, strict=True):
            if not math.isfinite(row[names.index("loss")]):
                raise DivergedError(
                    f"loss: {row[names.index('loss')]} at step {step}; checkpoints and exports from before it are "
                    "sound. Lower --lr (or --scale-lr), or raise --warmup-steps, and start again with --overwrite"
                )

    if runtime.is_main:  # each value by itself: stacking them on the device would be one more graph
        runtime.defer(write, *(means[name] for _, _, means in pending for name in names))
    pending.clear()


@contextmanager
def stop_signals() -> Iterator[list[str]]:
    """Collect the names of stop signals that arrive; the second one ends the process at once."""
    received: list[str] = []

    def handle(number: int, _frame: Any) -> None:
        if received:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        received.append(signal.Signals(number).name)

    try:
        old = {number: signal.signal(number, handle) for number in (signal.SIGTERM, signal.SIGINT)}
    except ValueError:  # not the main thread: signals are somebody else's business
        yield received
        return
    try:
        yield received
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
