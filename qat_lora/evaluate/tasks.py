"""Downstream tasks by the lm-eval harness, on a model that is already loaded.

The harness's own loader would need an export first, and cannot read an adapter on a packed base at all. Its Hugging
Face model class takes a module, so all are scored by the code that scores everybody else's models, from the weights of
the report's other figures. It forms batches of changing shapes, which XLA compiles each: that is for a CPU or a GPU.
"""

import logging
import warnings
from typing import Any

import torch

from qat_lora.config import HELP, common, option, settings
from qat_lora.errors import ConfigError, is_out_of_memory, one_line
from qat_lora.extras import require


@settings
class TasksConfig:
    """Which tasks of the lm-eval harness to run."""

    tasks: tuple[str, ...] = common((), "tasks of the lm-eval harness, for example arc_easy,hellaswag")
    tasks_path: str | None = option(None, "folder with task files of your own (YAML of the harness)")
    task_limit: int | None = option(None, "examples of each task; default: all", unit="examples", min=1)
    task_shots: int | None = option(None, HELP["task_shots"], unit="examples", min=0)


def check_tasks(config: TasksConfig) -> Any:
    """Return the harness's task manager; ConfigError: it knows no such task. MissingExtraError: it is not installed."""
    require("lm_eval", "evals")
    manager = require("lm_eval.tasks", "evals").TaskManager(include_path=config.tasks_path)
    unknown = [name for name in config.tasks if not manager.match_tasks([name])]
    if unknown:
        remedy = "`lm-eval ls tasks` lists them, --tasks-path names a folder with your own"
        raise ConfigError(f"tasks: the harness knows no {', '.join(unknown)}; {remedy}")
    return manager


def run_tasks(
    module: Any, tokenizer: Any, config: TasksConfig, manager: Any, batch_size: int, max_length: int | None, seed: int
) -> dict[str, dict[str, float]]:
    """Return the harness's metrics by task, by the manager of `check_tasks`; ConfigError: a task does not run."""
    harness = require("lm_eval", "evals")
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    with warnings.catch_warnings(action="ignore"), torch.no_grad():  # the harness's and its libraries' own
        model = require("lm_eval.models.huggingface", "evals").HFLM(
            pretrained=module, tokenizer=tokenizer, backend="causal", batch_size=batch_size, max_length=max_length
        )
        try:
            asked: dict[str, Any] = {"limit": config.task_limit, "num_fewshot": config.task_shots, "bootstrap_iters": 0}
            asked |= {"tasks": list(config.tasks), "fewshot_random_seed": seed, "log_samples": False}
            found = harness.simple_evaluate(model=model, task_manager=manager, **asked)
        except Exception as error:  # a task is its author's program on data from elsewhere
            if is_out_of_memory(error):
                raise
            raise ConfigError(f"tasks: {', '.join(config.tasks)} did not run ({one_line(error, 300)})") from None
    numbers = {}  # the harness names them `metric,filter`; a filter other than `none` stays
    for task, metrics in found["results"].items():
        own = {name: value for name, value in metrics.items() if "," in name and isinstance(value, int | float)}
        numbers[task] = {name.removesuffix(",none"): float(value) for name, value in own.items()}
    return numbers
