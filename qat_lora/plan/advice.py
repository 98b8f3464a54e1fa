"""What to lower when a run does not fit: every device's out-of-memory error, answered with the command's own flags.

`recover` is answered from the estimate, which knows the largest parts. The other commands hold little besides weights
and one batch, so each has a list of settings to lower, with the value to try next.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from qat_lora.errors import OutOfMemoryError, QatLoraError, is_out_of_memory
from qat_lora.options import CacheBuildOptions, EstimateOptions, EvalOptions, QatOptions, QuantizeOptions
from qat_lora.plan.dry_run import device_of
from qat_lora.plan.memory import GIB, memory
from qat_lora.quant.initialize import NEED_TEXT
from qat_lora.runtime.base import Runtime, default_loss_chunk_mb

Options = TypeVar("Options")
R = TypeVar("R")
Command = Callable[[Options, Runtime], R]


@contextmanager
def memory_advice(advice: Callable[[], str]) -> Iterator[None]:
    """Raise OutOfMemoryError, which says what to lower, in place of the device's own; `advice` is called only then."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, QatLoraError) or not is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise OutOfMemoryError(f"out of memory ({reason}). {advice()}") from error


def advised(advice: Callable[[Options], str]) -> Callable[[Command[Options, R]], Command[Options, R]]:
    """Decorate a command with `memory_advice` made of its options."""

    def decorate(command: Command[Options, R]) -> Command[Options, R]:
        @functools.wraps(command)
        def guarded(options: Options, runtime: Runtime) -> R:
            with memory_advice(lambda: advice(options)):
                return command(options, runtime)

        return guarded

    return decorate


def build_advice(options: CacheBuildOptions) -> str:
    """Return what to lower in `cache build`, which holds the teacher and its logits of a batch."""
    rows = options.teacher_batch_size
    return _try(
        f"--teacher-batch-size {rows // 2}" if rows > 1 else "",
        "" if options.run.dtype == "bfloat16" else "--dtype bfloat16",
        "--device-map auto (GPUs and host memory share the teacher)" if options.device_map == "none" else "",
    )


def quantize_advice(options: QuantizeOptions) -> str:
    """Return what to lower in `quantize`, which holds the weights and what calibration keeps."""
    has_text = options.text.dataset is not None or options.kd_cache_dir is not None
    fits_text = has_text and options.init in NEED_TEXT
    rows, length = options.calibration_rows, options.calibration_length
    return _try(
        f"--calibration-rows {rows // 2}" if has_text and rows > 1 else "",
        f"--calibration-length {length // 2}" if options.text.dataset is not None and length > 3 else "",
        "--metric outputs, which needs no backward pass" if fits_text and options.metric == "fisher" else "",
        "--calibrate-on teacher, which keeps no rows between layers" if fits_text else "",
        "--init mse, which reads no text" if fits_text else "a machine with more memory (--dry-run says how much)",
    )


def eval_advice(options: EvalOptions) -> str:
    """Return what to lower in `eval`, which holds all its models and their logits of a batch."""
    return _try(
        f"--batch-size {options.batch_size // 2}" if options.batch_size > 1 else "",
        "" if options.run.dtype == "bfloat16" else "--dtype bfloat16",
        "fewer --students at a time" if len(options.students) > 1 else "",
        "" if options.protocol == "blocks2048" else f"--length {max(2, options.length // 2)}",
    )


def qat_advice(options: QatOptions) -> str:
    """Return what to lower in `qat`; its parts are what `--dry-run` shows."""
    loop, rows = options.loop, options.loop.batch_size
    chunk = options.objective.loss_chunk_mb or default_loss_chunk_mb(device_of(options.run))
    steps = "" if loop.global_batch_size else f" --accumulation-steps {loop.accumulation_steps * 2}"
    answers = _try(
        "" if loop.gradient_checkpointing else "--gradient-checkpointing",
        f"--batch-size {rows // 2}{steps}" if rows > 1 else "",
        f"--loss-chunk-mb {chunk // 2}" if chunk > 1 else "",
        "--mergeable instead of training whole weights" if "weights" in options.train_parts else "",
        f"--calibration-rows {options.calibration_rows // 2}" if options.from_scratch else "",
    )
    return f"{answers}; --dry-run shows the parts"


def _try(*answers: str) -> str:
    return f"Try {', or '.join(filter(None, answers))}"


def recovery_advice(options: EstimateOptions, global_batch_size: int | None = None) -> str:
    """Return the largest parts of a recovery, and which flag makes each smaller, with the value to try.

    With a global batch size, the number of micro-batches follows by itself.
    """
    try:
        parts = memory(options)
    except QatLoraError:  # a model that cannot be estimated still gets the general answer
        return "Lower --batch-size and raise --accumulation-steps, or give --gradient-checkpointing"
    rows, checkpoints = options.batch_size, options.gradient_checkpointing
    steps = "" if global_batch_size else f" --accumulation-steps {options.accumulation_steps * 2}"
    chunk = options.loss_chunk_mb or default_loss_chunk_mb(device_of(options.run))
    batch = f"--batch-size {rows // 2}{steps}" if rows > 1 else "a cache with shorter rows"
    answers = {
        "activations": batch if checkpoints else f"--gradient-checkpointing, or {batch}",
        "formed weights": "" if checkpoints else "--gradient-checkpointing",
        "working memory": f"{batch}, or --loss-chunk-mb {max(1, chunk // 2)}",
        "cached head": "--head-k with a smaller number",
        "weights": "" if options.run.dtype == "bfloat16" else "--dtype bfloat16",
        **dict.fromkeys(("adapter", "gradients", "optimizer state"), "--recovery-r with a smaller number"),
    }
    lines = []
    for name, size in sorted(parts.items(), key=lambda part: -part[1])[:3]:
        lines.append(f"{name} {size / GIB:.2f} GiB" + (f" (try {answers[name]})" if answers.get(name) else ""))
    total = sum(parts.values()) / GIB
    return f"This run is estimated to need {total:.2f} GiB, most of it: {'; '.join(lines)}"
