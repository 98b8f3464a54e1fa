"""What to lower when a run does not fit: out-of-memory errors of every device, answered from the estimate."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from qat_lora.diagnose.estimate import GIB, memory
from qat_lora.errors import OutOfMemoryError, QatLoraError
from qat_lora.options import EstimateOptions

SIGNS = ("out of memory", "resource_exhausted", "can't allocate memory", "cannot allocate memory")
"""What CUDA and MPS, XLA, and torch's CPU allocator write into a plain RuntimeError."""


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether a device, or the host, had too little memory."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in SIGNS)


@contextmanager
def memory_advice(options: EstimateOptions | None = None) -> Iterator[None]:
    """Turn an out-of-memory error into one that says which parts are largest and which flag makes each smaller.

    Without settings to estimate from it gives the general answer.

    Raises:
        OutOfMemoryError: in the place of the device's own error.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, QatLoraError) or not is_out_of_memory(error):
            raise
        reason = " ".join(str(error).split())[:160] or type(error).__name__
        raise OutOfMemoryError(f"out of memory ({reason}). {_advice(options)}") from error


def _advice(options: EstimateOptions | None) -> str:
    general = "Lower --batch-size and raise --accumulation-steps, or give --gradient-checkpointing"
    if options is None:
        return general
    try:
        parts = memory(options)
    except QatLoraError:  # a model that cannot be estimated still gets the general answer
        return general
    total = sum(parts.values())
    largest = sorted(parts.items(), key=lambda part: -part[1])[:3]
    lines = [f"{name} {size / GIB:.2f} GiB{_lower(name, options)}" for name, size in largest]
    return f"This run is estimated to need {total / GIB:.2f} GiB, most of it: {'; '.join(lines)}"


def _lower(part: str, options: EstimateOptions) -> str:
    """Return which flag makes a part smaller, with the value to try."""
    rows, steps = options.batch_size, options.accumulation_steps
    batch = f"--batch-size {rows // 2} --accumulation-steps {steps * 2}" if rows > 1 else "a cache with shorter rows"
    halved = max(1, options.loss_chunk_mb // 2)
    answers: dict[str, Any] = {
        "activations": batch if options.gradient_checkpointing else f"--gradient-checkpointing, or {batch}",
        "working memory": batch,
        "head chunk": f"--loss-chunk-mb {halved}",
        "cached head": "--head-k with a smaller number",
        "adapter": "--recovery-r with a smaller number",
        "gradients": "--recovery-r with a smaller number",
        "optimizer state": "--recovery-r with a smaller number",
        "weights": "" if options.run.dtype == "bfloat16" else "--dtype bfloat16",
    }
    return f" (try {answers[part]})" if answers.get(part) else ""
