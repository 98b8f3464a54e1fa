"""Run a command of the app on a chosen device: the device first, everything heavy after.

transformers decides at import whether PyTorch/XLA is used, so the choice of the device has to come before the
import of `app`. That order is kept in this one place; command line, scripts, notebooks and the Python API all
start here. So is the start on several chips: the same command in every process, where it finds its rank by itself.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from qat_lora.errors import ConfigError, disk_errors_explained
from qat_lora.registry import COMMANDS, Command
from qat_lora.runtime.base import Runtime
from qat_lora.runtime.launch.chips import ChipsConfig, Plan
from qat_lora.runtime.launch.process_group import group_size
from qat_lora.runtime.launch.select import plan_run, select_runtime
from qat_lora.terminal import any_text


@any_text()
def run(command: Command, options: Any) -> Any:
    """Run a command on every process of the chosen device, which are started if need be.

    Args:
        command: from `qat_lora.registry.COMMANDS`.
        options: its options; `options.run` names the device and how many chips.

    Raises:
        QatLoraError: with a message for people; the first cause, if one of several processes failed.
    """
    with disk_errors_explained():
        return _run(command, options)


def _run(command: Command, options: Any) -> Any:
    asked = options.run
    if command.device == "none" or (command.plan and options.dry_run):  # a dry run needs shapes alone
        runtime = select_runtime("cpu")
        return runtime.launch(lambda: command.load()(options, runtime))
    plan = plan_run(asked.device, asked.tpu, asked.chips)
    several = plan.chips != 1 or asked.chips.parallel == "spmd" or group_size() > 1
    if several and command.device != "several chips":
        allowed = ", ".join(words for words, other in COMMANDS.items() if other.device == "several chips")
        raise ConfigError(
            f"num_chips: this command works on one chip; leave --num-chips and --parallel out, and start it once "
            f"(several chips are for {allowed})"
        )
    return start(plan, functools.partial(work_here, command, options))


def start(plan: Plan, work: Callable[[], Any], start_method: Any = "spawn") -> Any:
    """Call `work` here or in every process of a plan; return what it returned in the main one."""
    for name, value in plan.variables.items():
        os.environ[name] = os.environ.get(name) or value  # empty is unset
    if plan.start == "group":
        from qat_lora.runtime.launch.workers import run_group

        return run_group(work, plan.chips, max(1, (os.cpu_count() or 1) // plan.chips), start_method)
    if plan.start == "torch_xla":
        from qat_lora.runtime.xla.spawn import spawn

        return spawn(work, start_method)
    return work()


@any_text()
def work_here(command: Command, options: Any) -> Any:
    """Run a command on the device of this process, quietly unless this is the main one."""
    run = options.run
    runtime = select_runtime(run.device, run.tpu, run.chips)

    def main() -> Any:
        mine = options if runtime.is_main else replace(options, run=replace(run, quiet=True))
        with disk_errors_explained():  # here, where a process of a group notes what ended it
            return command.load()(mine, runtime)

    return runtime.launch(main)


def notebook_launch(
    fn: Callable[[Runtime, Any], Any],
    model: Any = None,
    *,
    num_chips: int | str = "all",
    device: str = "auto",
) -> Any:
    """Call `fn(runtime, model)` on several chips from a notebook; return what it returned on the main one.

    The workers are forked, so they share the model that is already built (and the function, wherever it was defined)
    instead of loading it once each. That needs a notebook that has not touched the accelerator, nor run a backward
    pass, before; then restart it. Without a model to share, plain `train_recovery_lora(num_chips=...)` is safer.

    Args:
        fn: what to run; returns a path or plain values.
        model: shared with all workers as it is; `runtime.place` it in each.
        num_chips: how many, or `all`.
        device: as `--device`.

    Raises:
        QatLoraError: with a message for people; the first cause, if one of several processes failed.
    """
    plan = plan_run(device, False, ChipsConfig(num_chips=str(num_chips)))

    def work() -> Any:
        runtime = select_runtime(device)
        return runtime.launch(lambda: fn(runtime, model))

    return start(plan, work, "fork")
