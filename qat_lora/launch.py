"""Run a command of the app on a chosen device: the device first, everything heavy after.

transformers decides at import whether PyTorch/XLA is used, so the choice of the device has to come before the
import of `app`. That order is kept in this one place; command line, scripts, notebooks and the Python API all
start here. So is the start on several chips: the same command in every process, where it finds its rank by itself.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from qat_lora.errors import ConfigError, disk_errors_explained
from qat_lora.runtime.base import Runtime
from qat_lora.runtime.chips import ChipsConfig, Plan
from qat_lora.runtime.group import group_size
from qat_lora.runtime.select import plan_run, select_runtime
from qat_lora.terminal import any_text

ON_SEVERAL_CHIPS = {"build_cache": "cache build", "recover": "recover", "qat": "qat"}
"""Commands that divide their work among replicas: function -> words that users type."""
PLANNED = ("quantize", "recover", "qat")
"""Commands whose `--dry-run` needs shapes alone, and so not the device that they name."""
COMPUTE_NOTHING = ("push", "estimate")
"""Commands that need no device at all, so that they can run beside a run that holds it."""


@any_text()
def run(command: str, options: Any, module: str = "qat_lora.app") -> Any:
    """Run `module.command(options, runtime)` on every process of the chosen device, which are started if need be.

    Args:
        command: name of the function, for example `recover`.
        options: its options; `options.run` names the device and how many chips.
        module: where the function lives.

    Raises:
        QatLoraError: with a message for people; the first cause, if one of several processes failed.
    """
    with disk_errors_explained():
        return _run(command, options, module)


def _run(command: str, options: Any, module: str) -> Any:
    asked = options.run
    if command in COMPUTE_NOTHING or (command in PLANNED and options.dry_run):
        runtime = select_runtime("cpu")
        return runtime.launch(lambda: getattr(importlib.import_module(module), command)(options, runtime))
    plan = plan_run(asked.device, asked.tpu, asked.chips)
    several = plan.chips != 1 or asked.chips.parallel == "spmd" or group_size() > 1
    if several and command not in ON_SEVERAL_CHIPS:
        raise ConfigError(
            f"num_chips: this command works on one chip; leave --num-chips and --parallel out, and start it once "
            f"(several chips are for {', '.join(ON_SEVERAL_CHIPS.values())})"
        )
    return start(plan, functools.partial(work_here, command, options, module))


def start(plan: Plan, work: Callable[[], Any], start_method: Any = "spawn") -> Any:
    """Call `work` here or in every process of a plan; return what it returned in the main one."""
    for name, value in plan.variables.items():
        os.environ[name] = os.environ.get(name) or value  # empty is unset
    if plan.start == "group":
        from qat_lora.runtime.workers import run_group

        return run_group(work, plan.chips, max(1, (os.cpu_count() or 1) // plan.chips), start_method)
    if plan.start == "torch_xla":
        from qat_lora.runtime.xla_spawn import spawn

        return spawn(work, start_method)
    return work()


@any_text()
def work_here(command: str, options: Any, module: str) -> Any:
    """Run a command on the device of this process, quietly unless this is the main one."""
    run = options.run
    runtime = select_runtime(run.device, run.tpu, run.chips)

    def main() -> Any:
        mine = options if runtime.is_main else replace(options, run=replace(run, quiet=True))
        with disk_errors_explained():  # here, where a process of a group notes what ended it
            return getattr(importlib.import_module(module), command)(mine, runtime)

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
