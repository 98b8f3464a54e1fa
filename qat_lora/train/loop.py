"""The training loop, the same on a laptop, a GPU, a TPU chip or many, because it knows nothing but a `Runtime`.

An iteration is one optimizer step of `accumulation` micro-batches. Its values stay on the device and are fetched
together every `log_steps`. Everything else that a run does (evaluate, save, answer a signal) is a callback between
steps (`callbacks`).
"""

import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from qat_lora.errors import ConfigError, QatLoraError
from qat_lora.files.folders import restore_dir
from qat_lora.losses.objective import weight_tensors
from qat_lora.runtime.base import Runtime
from qat_lora.runtime.host.signals import stop_signals
from qat_lora.train.anchor import anchor_batches, anchor_micro_batch
from qat_lora.train.callbacks import Checkpoint, Evaluate, LoopConfig, LoopHooks, Progress, Run, RunSettings
from qat_lora.train.checkpoint import STATE, checkpoints, load_checkpoint, random_states, set_random_states
from qat_lora.train.compile_watch import COMPILED, OPTIMIZER_COMPILED, OPTIMIZER_TRACED, TRACED, CompileWatch
from qat_lora.train.lr_probe import choose_lr
from qat_lora.train.metrics import EMPTY, EVALUATIONS, LOGS, METRICS, TRACKERS, MetricsLog, cut_back
from qat_lora.train.optim import (
    OptimConfig,
    TrainState,
    build_optimizer,
    gradients_apart,
    lr_factor,
    optimized,
    set_lr,
    set_peaks,
)
from qat_lora.train.step import PreparedObjective, Sums, TrainingRows, add_sums, micro_batch, optimizer_step, zero_sums


def train(
    state: TrainState,
    rows: TrainingRows,
    prepared: PreparedObjective,
    optim: OptimConfig,
    loop: LoopConfig,
    hooks: LoopHooks,
    runtime: Runtime,
    settings: RunSettings,
) -> dict[str, Any]:
    """Train placed tensors until `max_steps`, from the newest complete checkpoint of the run if there is one.

    Returned are `step`, `best_step`, `best_kl` (or the metric evaluated), `stopped_early`, `resumed_from`, and
    `lr_probe` where the learning rate was found by trials.

    ConfigError: an early stop without evaluations, or a checkpoint of other settings.
    InterruptedRunError: SIGTERM, SIGINT or SIGHUP; a checkpoint was written first.
    CacheDamaged: a row is damaged (or another error of the source of rows); a checkpoint was written first.
    DivergedError: a loss, an evaluation or a weight is NaN or infinite; no checkpoint holds it.
    RecompiledError: more graphs were compiled after the first step than `max_recompiles`.
    """
    if loop.early_stop and hooks.evaluate is None:
        raise ConfigError("early_stop: there is no evaluation split to stop by; make one with --eval-rows")
    optimizer = build_optimizer(optim, state.groups, runtime)
    zeros = zero_sums(prepared.objective, runtime.device, prepared.logs_kl)
    runtime.mark_step()  # optimizer state, gradients and zeros exist now, outside the first micro-batch's graph
    found = None
    if optim.lr == "auto":
        with stop_signals() as stopped, closing(CompileWatch(runtime, None, _say(settings, runtime))) as watch:
            unseen = MetricsLog(settings.out / METRICS, loop.max_steps, 0, True, runtime.device)
            begun = Run(state, optimizer, runtime, hooks, settings, loop, Progress(), 0, unseen, stopped)
            found = choose_lr(
                begun, optim, lambda run, tried, *span: closing(_Steps(run, rows, prepared, tried, watch, zeros, span))
            )
        optim = replace(optim, lr=found["lr"])
        set_peaks(optimizer, optim)
    progress = _resume(state, optimizer, hooks.metric, runtime, settings)
    out, start, hidden = settings.out, progress.step, settings.quiet or not runtime.is_main
    wanted = loop.log_to if runtime.is_main else ()
    trackers = [TRACKERS[name](out, start, settings.fingerprint) for name in wanted]
    log = MetricsLog(
        out / METRICS, loop.max_steps, start, hidden, runtime.device, trackers, loop.step_rows(runtime.replicas)
    )
    watch = CompileWatch(runtime, loop.max_recompiles, log.say)
    with stop_signals() as stopped, closing(log), closing(watch):
        run = Run(state, optimizer, runtime, hooks, settings, loop, progress, start, log, stopped)
        if found is not None:
            log.say(f"learning rate {found['lr']:.4g}: {found['why']}")
        with closing(_Steps(run, rows, prepared, optim, watch, zeros, (start, loop.max_steps - start))) as steps:
            evaluate = Evaluate()
            evaluate.before_training(run)
            callbacks: tuple[Evaluate | Checkpoint, ...] = (evaluate, Checkpoint())  # whose clock begins now
            while not run.is_over:
                steps.take()
                due = [callback.is_due(run) for callback in callbacks]
                if run.step % loop.log_steps == 0 or any(due):
                    log.flush(runtime)
                runtime.step_end()
                watch.mark(OPTIMIZER_COMPILED)
                watch.end(run.step)
                if run.step == start + 1:
                    log.pause()
                for callback, is_due in zip(callbacks, due, strict=True):
                    callback.after_step(run, is_due)
    run.export("last")
    if hooks.evaluate is None:
        run.export("best")
    best = {"best_step": progress.best_step, f"best_{hooks.metric}": progress.best}
    chosen = {} if found is None else {"lr_probe": {name: found[name] for name in ("lr", "steps", "why")}}
    return {"step": run.step, **best, "stopped_early": run.step < loop.max_steps, "resumed_from": start, **chosen}


def _say(settings: RunSettings, runtime: Runtime) -> Callable[[str], None]:
    hidden = settings.quiet or not runtime.is_main
    return (lambda line: None) if hidden else partial(tqdm.write, file=sys.stderr)


def _resume(
    state: TrainState, optimizer: torch.optim.Optimizer, metric: str, runtime: Runtime, settings: RunSettings
) -> Progress:
    """Load the newest checkpoint, if there is one, and cut the run's files back to it; return the run's position."""
    out = settings.out
    found = checkpoints(out / "checkpoints")
    progress, logs = Progress(), dict.fromkeys(LOGS, EMPTY)
    if found:
        saved = load_checkpoint(found[-1], state.trained, optimizer, settings.fingerprint)
        progress = Progress.from_json(saved, metric, found[-1] / STATE)
        logs = saved.get("logs", {})  # earlier versions have none
    if runtime.agree(bool(found)) != bool(found):
        raise ConfigError(f"--out {out}: not every process sees its checkpoints; give a folder that all hosts share")
    step = progress.step
    if runtime.rank:  # the first process draws the random numbers of a run on one device, the others their own
        torch.manual_seed(settings.seed + 1_000_003 * runtime.rank + step)
    if runtime.is_main:
        cut_back(out / METRICS, step, logs.get(METRICS))
        cut_back(out / EVALUATIONS, step if progress.evaluated else step - 1, logs.get(EVALUATIONS))
        for name in ("start", "best", "last"):
            restore_dir(out / name)
    return progress


class _Steps:
    def __init__(
        self,
        run: Run,
        rows: TrainingRows,
        prepared: PreparedObjective,
        optim: OptimConfig,
        watch: CompileWatch,
        zeros: Sums,
        span: tuple[int, int],
    ) -> None:
        """Feed the rows of a `span` of steps, the first (0-based) and how many."""
        self._run, self._prepared, self._optim, self._watch, self._zeros = run, prepared, optim, watch, zeros
        runtime, loop = run.runtime, run.loop
        self._accumulation = loop.accumulation(runtime.replicas)
        self._dtype = torch.bfloat16 if loop.autocast else torch.float32
        per_process = loop.batch_size * (runtime.replicas // runtime.processes)
        here = {"replica": runtime.rank, "replicas": runtime.processes}
        batches = rows.batches(*span, per_process, self._accumulation, run.settings.seed, **here)
        self._batches, self._anchors = runtime.feed(batches), None
        if prepared.anchor is not None:
            self._anchors = runtime.feed(anchor_batches(prepared.anchor, *span, per_process, **here))

    def close(self) -> None:
        """End the threads that read ahead: whoever holds an error's traceback would keep them alive."""
        for feed in (self._batches, self._anchors):
            if feed is not None:
                feed.close()

    def take(self) -> None:
        """Dispatch one optimizer step, and note its values in the log; end the run if its rows cannot be read."""
        run, optim, runtime = self._run, self._optim, self._run.runtime
        done, random = run.step, random_states()
        self._watch.begin(done + 1)
        weights = self._prepared.objective.weights_at(done / max(1, run.loop.max_steps - 1))
        sums, failed = self._gradients(weight_tensors(weights, runtime.numbers))
        # Looked at once: a signal that comes later is for the next step. All processes stop after the same.
        run.stopping = runtime.agree(bool(run.stopped or failed))
        if run.stopping and runtime.agree(bool(failed)):
            set_random_states(random)  # this step has not begun
            run.give_up(failed)
        lr = set_lr(run.optimizer, lr_factor(optim, done, run.loop.max_steps))
        means = optimizer_step(run.optimizer, optimized(run.optimizer), sums, optim.clip_grad_norm, runtime)
        self._watch.mark(OPTIMIZER_TRACED)
        run.progress.step += 1
        run.log.add(run.step, lr, means)

    def _gradients(self, weights: Mapping[str, Tensor]) -> tuple[Sums, QatLoraError | OSError | None]:
        """Run forward and backward on a step's micro-batches; return their sums, or the error of unreadable rows."""
        model, (objective, teacher_lm_head, *_), runtime = self._run.state.model, self._prepared, self._run.runtime
        sums, failed = self._zeros, None
        for _ in range(self._accumulation):
            try:
                batch = next(self._batches)
            except (QatLoraError, OSError) as error:
                failed = error
            # Where weights are gathered from all processes, none can compute what another does not.
            if runtime.agree(bool(failed)) if runtime.shard_base else failed:
                return sums, failed
            self._watch.batch(batch)
            with runtime.autocast(self._dtype), gradients_apart(self._run.optimizer):
                sums = add_sums(sums, micro_batch(model, batch, objective, weights, teacher_lm_head))
            self._watch.mark(TRACED)
            runtime.mark_step()
            self._watch.mark(COMPILED)
        if self._anchors is not None:
            with runtime.autocast(self._dtype), gradients_apart(self._run.optimizer):
                sums = anchor_micro_batch(model, next(self._anchors), objective, weights, sums, runtime)
            runtime.mark_step()
        return sums, None
