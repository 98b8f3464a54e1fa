"""The training loop, the same on a laptop, a GPU, a TPU chip or many, because it knows nothing but a `Runtime`.

An iteration is one optimizer step of `accumulation` micro-batches. Its values stay on the device and are fetched
together every `log_steps`. What else a run does (evaluate, save, obey a signal) is between steps, by `callbacks`.
"""

import sys
import time
from collections.abc import Generator
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from qat_lora.errors import ConfigError, QatLoraError
from qat_lora.files.folders import restore_dir
from qat_lora.losses.objective import ObjectiveConfig, weight_tensors
from qat_lora.runtime.base import Runtime
from qat_lora.runtime.host.signals import stop_signals
from qat_lora.train import callbacks, step
from qat_lora.train import optim as optimizers
from qat_lora.train.callbacks import LoopConfig, LoopHooks, Progress, Run, RunSettings
from qat_lora.train.checkpoint import checkpoints, damaged, load_checkpoint, random_states, set_random_states
from qat_lora.train.compile_watch import COMPILED, OPTIMIZER_COMPILED, OPTIMIZER_TRACED, TRACED, CompileWatch
from qat_lora.train.lr_probe import choose_lr
from qat_lora.train.metrics import EMPTY, LOGS, METRICS, TRACKERS, MetricsLog, cut_back
from qat_lora.train.optim import OptimConfig, TrainState
from qat_lora.train.step import PreparedObjective, Sums, TrainingRows


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

    Returned are `step`, `best_step`, `best_kl` (or `best_` of another metric evaluated), `stopped_early`,
    `resumed_from`, and `lr_probe` where the learning rate was found by trials, which are made if anything that trains
    follows `lr`.

    ConfigError: an early stop without evaluations, or a checkpoint of other settings.
    InterruptedRunError: SIGTERM, SIGINT or SIGHUP; a checkpoint was written first.
    CacheDamaged: a row is damaged (or another error of the source of rows); a checkpoint was written first.
    DivergedError: a loss, an evaluation or a weight is NaN or infinite; no checkpoint holds it.
    RecompiledError: more graphs were compiled after the first step than `max_recompiles`.
    """
    if loop.early_stop and hooks.evaluate is None:
        raise ConfigError("early_stop: there is no evaluation split to stop by; make one with --eval-rows")
    optimizer = optimizers.build_optimizer(optim, state.groups, runtime)
    zeros = step.zero_sums(prepared.objective, runtime.device, prepared.kl_name)
    runtime.mark_step()  # optimizer state, gradients and zeros exist now, outside the first micro-batch's graph
    found, hidden = None, settings.quiet or not runtime.is_main
    if optim.lr == "auto" and any(optimizers.follows_lr(optim, group["kind"]) for group in optimizer.param_groups):
        say = (lambda line: None) if hidden else partial(tqdm.write, file=sys.stderr)
        with stop_signals() as stopped, closing(CompileWatch(runtime, None, say)) as watch:
            unseen = MetricsLog(settings.out / METRICS, loop.max_steps, 0, True, runtime.device)
            begun = Run(state, optimizer, runtime, hooks, settings, loop, Progress(), 0, unseen, stopped)
            found = choose_lr(
                begun,
                optim,
                lambda run, tried, *which: closing(_steps(run, rows, prepared, tried, watch, zeros, *which)),
            )
        optim = replace(optim, lr=found["lr"])
        optimizers.set_peaks(optimizer, optim)
    progress = _resume(state, optimizer, hooks.metric, runtime, settings)
    out, start = settings.out, progress.step
    wanted = loop.log_to if runtime.is_main else ()
    trackers = [TRACKERS[name](out, start, settings.fingerprint) for name in wanted]
    rows_of_step = loop.step_rows(runtime.replicas)
    log = MetricsLog(out / METRICS, loop.max_steps, start, hidden, runtime.device, trackers, rows_of_step)
    watch = CompileWatch(runtime, loop.max_recompiles, log.say)
    with stop_signals() as stopped, closing(log), closing(watch):
        run = Run(state, optimizer, runtime, hooks, settings, loop, progress, start, log, stopped)
        if found is not None:
            others = [f", {name} {rate:.4g}" for name, rate in optimizers.rates(optimizer).items() if name != "lr"]
            log.say(f"learning rate {found['lr']:.4g}{''.join(others)}: {found['why']}")
        with closing(_steps(run, rows, prepared, optim, watch, zeros, (start, loop.max_steps - start))) as steps:
            if start == 0:
                run.export("start")
            if start == 0 or not progress.evaluated:  # on resume, an evaluation that failed
                callbacks.evaluate(run)
            run.saved_at = time.monotonic()
            while not run.is_over:
                next(steps)
                evaluates, saves = run.ends_interval(loop.eval_steps), callbacks.is_save_due(run)
                if run.step % loop.log_steps == 0 or evaluates or saves:
                    log.flush(runtime)
                runtime.step_end()
                watch.mark(OPTIMIZER_COMPILED)
                watch.end(run.step)
                if run.step == start + 1:
                    log.pause()
                if evaluates:
                    runtime.barrier("metrics")  # all lines are written now, so their rate does not include the pause
                    callbacks.evaluate(run)
                    run.stopping = runtime.agree(bool(run.stopped))  # looked at again, since evaluations are long
                if saves or run.stopping or run.is_over:
                    run.save()
                callbacks.end_if_asked(run)
    run.export("last")
    if hooks.evaluate is None:
        run.export("best")
    best = {"best_step": progress.best_step, f"best_{hooks.metric}": progress.best}
    chosen = {} if found is None else {"lr_probe": {name: found[name] for name in ("lr", "steps", "why")}}
    return {"step": run.step, **best, "stopped_early": run.step < loop.max_steps, "resumed_from": start, **chosen}


def _resume(
    state: TrainState, optimizer: torch.optim.Optimizer, metric: str, runtime: Runtime, settings: RunSettings
) -> Progress:
    """Load the newest checkpoint, if there is one, and cut the run's files back to it; return the run's position."""
    out = settings.out
    found = checkpoints(out / "checkpoints")
    progress, logs = Progress(), dict.fromkeys(LOGS, EMPTY)
    if found:
        saved = load_checkpoint(found[-1], state.trained, optimizer, settings.fingerprint)
        if metric == "kl_bound" and "best_kl" in saved:  # of an earlier version, which called the bound a KL
            saved = {**saved, "best_kl_bound": saved["best_kl"]}
        try:
            progress = Progress(*(saved[name] for name in Progress().to_json(metric)))
            logs = {name: saved["logs"][name] for name in LOGS}
        except (KeyError, TypeError) as error:
            raise damaged(found[-1], error) from None
    if runtime.agree(bool(found)) != bool(found):
        raise ConfigError(f"--out {out}: not every process sees its checkpoints; give a folder that all hosts share")
    if runtime.rank:  # the first process draws the random numbers of a run on one device, the others their own
        torch.manual_seed(settings.seed + 1_000_003 * runtime.rank + progress.step)
    if runtime.is_main:
        for name in LOGS:
            cut_back(out / name, logs[name])
        for name in ("start", "best", "last"):
            restore_dir(out / name)
    return progress


def _steps(
    run: Run,
    rows: TrainingRows,
    prepared: PreparedObjective,
    optim: OptimConfig,
    watch: CompileWatch,
    zeros: Sums,
    span: tuple[int, int],
    held_out: int | None = None,
) -> Generator[Sums, None, None]:
    """Dispatch a `span` of steps (first, count), note and yield their values; end the run where rows cannot be read.

    The rows of step `held_out` are in no other step.
    """
    model, (objective, teacher_lm_head, _, anchor), runtime, loop = run.state.model, prepared, run.runtime, run.loop
    accumulation, dtype = loop.accumulation(runtime.replicas), torch.bfloat16 if loop.autocast else torch.float32
    per_process = loop.batch_size * (runtime.replicas // runtime.processes)
    here = {"replica": runtime.rank, "replicas": runtime.processes}
    batches = runtime.feed(rows.batches(*span, per_process, accumulation, run.settings.seed, **here, held_out=held_out))
    anchors = None if anchor is None else runtime.feed(step.anchor_batches(anchor, *span, per_process, **here))

    def gradients(objective: ObjectiveConfig, weights: dict[str, Tensor]) -> tuple[Sums, QatLoraError | OSError | None]:
        """Run forward and backward on a step's micro-batches; return their sums, or the error of unreadable rows."""
        sums, failed = zeros, None
        for _ in range(accumulation):
            try:
                batch = next(batches)
            except (QatLoraError, OSError) as error:
                failed = error
            # Where weights are gathered from all processes, none can compute what another does not.
            if runtime.agree(bool(failed)) if runtime.shard_base else failed:
                return sums, failed
            watch.batch(batch)
            with runtime.autocast(dtype), optimizers.gradients_apart(run.optimizer):
                sums = step.add_sums(sums, step.micro_batch(model, batch, objective, weights, teacher_lm_head))
            watch.mark(TRACED)
            runtime.mark_step()
            watch.mark(COMPILED)
        if anchors is not None:
            with runtime.autocast(dtype), optimizers.gradients_apart(run.optimizer):
                sums = step.anchor_micro_batch(model, next(anchors), objective, weights, sums, runtime)
            runtime.mark_step()
        return sums, None

    with closing(batches), closing(anchors) if anchors is not None else nullcontext():
        while True:
            done, random = run.step, random_states()
            watch.begin(done + 1)
            weights = objective.numbers_at(done / max(1, loop.max_steps - 1))
            now = objective.at(done / loop.max_steps)
            sums, failed = gradients(now, weight_tensors(weights, runtime.numbers))
            # Looked at once: a signal that comes later is for the next step. All processes stop after the same.
            run.stopping = runtime.agree(bool(run.stopped or failed))
            if run.stopping and runtime.agree(bool(failed)):
                set_random_states(random)  # this step has not begun
                run.give_up(failed)
            optimizers.set_lr(run.optimizer, optimizers.lr_factor(optim, done, loop.max_steps))
            parameters = optimizers.optimized(run.optimizer)
            means = step.optimizer_step(run.optimizer, parameters, sums, optim.clip_grad_norm, runtime)
            watch.mark(OPTIMIZER_TRACED)
            run.progress.step += 1
            run.log.add(run.step, optimizers.rates(run.optimizer), means)
            yield means
