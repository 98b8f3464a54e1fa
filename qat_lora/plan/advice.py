"""What to do next: the command that usually follows one that ended, or what to lower where memory was too little.

`recover` is answered from its plan, which knows the largest parts. The other commands hold little besides weights and
one batch, so each has a list of settings to lower, with the value to try next. Plans import transformers, so late.
"""

import functools
import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from qat_lora.cache.storage.store import read_manifest
from qat_lora.errors import QatLoraError
from qat_lora.layers.calibrate.quantize import QuantizeConfig
from qat_lora.options import CacheBuildOptions, EvalOptions, QatOptions, QuantizeOptions, RecoverOptions
from qat_lora.quant.initialize import NEED_TEXT
from qat_lora.registry import Command, Requirements
from qat_lora.runtime.base import default_loss_chunk_mb

# Held-out text that others report too.
WIKITEXT = "--dataset Salesforce/wikitext --dataset-config wikitext-2-raw-v1 --split test --format wikitext"


def next_command(words: str, options: Any, result: Any) -> str | None:
    """Return the command line for after `words` ended with a `result`; None where nothing follows."""
    if getattr(options, "dry_run", False) or not isinstance(result, Path | dict):
        return None
    found = _next(words, options, str(result))
    return shlex.join(["qat-lora", *map(str, found)]) if found else None


def _next(words: str, options: Any, out: str) -> Sequence[Any]:
    match words:
        case "cache build":
            return "quantize", "--model", options.teacher or "MODEL", "--kd-cache-dir", out
        case "quantize" if options.kd_cache_dir:
            return "recover", "--checkpoint", out, "--kd-cache-dir", options.kd_cache_dir
        case "quantize":
            return "cache", "build", "--teacher", options.model, "--dataset", options.text.dataset or "TEXT"
        case "recover" | "qat" if not isinstance(options, RecoverOptions) or options.uses_cache:
            teacher = read_manifest(options.kd_cache_dir).fingerprint.teacher
            return "eval", "--teacher", teacher, "--students", out, *shlex.split(WIKITEXT)
        case "recover":
            return "export", "--student", out
        case "eval" if options.students:
            student = options.students[-1].rpartition("=")[2]
            told = Path(student, "result.json")
            if told.is_file() and '"form"' in told.read_text(encoding="utf-8"):  # an export is not exported again
                return _next("export", options, student)
            return "export", "--student", student, "--scores", options.run.out or "runs/eval"
        case "export":
            return "push", out, "OWNER/NAME", "--dry-run"
    return ()


def memory_warning(command: Command, options: Any, free: int | None) -> str:
    """Return a warning where a planned run needs more than the `free` bytes of its host, else an empty text.

    A system ends such a process without a word. Models whose files take less than 1 % of what is free are not planned.
    """
    named = (getattr(options, name, None) for name in ("checkpoint", "model", "teacher", "student"))
    folder = Path(next(filter(None, named), "missing")).expanduser()
    try:
        if free is None or 100 * sum(file.stat().st_size for file in folder.glob("*.safetensors")) < free:
            return ""
        needs: Requirements = command.load("plan")(options).requirements
    except Exception:  # the command says it itself
        return ""
    if needs.host <= free:
        return ""
    told = f"{needs.what} is estimated to need {needs.host / 2**30:.1f} GiB, and {free / 2**30:.1f} GiB are free"
    return f"warning: {told}; the system may end it. {command.load('advice')(options)}"


@functools.singledispatch
def advise(_: object) -> str:
    """Return what to lower, by the class of a command's options; here, where there is nothing to lower."""
    return "End other programs, or give a device with more memory"


@advise.register
def build_advice(options: CacheBuildOptions) -> str:
    """Return what to lower in `cache build`, which holds the teacher and its logits of a batch."""
    rows = options.teacher_batch_size
    return _try(
        f"--teacher-batch-size {rows // 2}" if rows > 1 else "",
        "" if options.run.dtype == "bfloat16" else "--dtype bfloat16",
        "--device-map auto (GPUs and host memory share the teacher)" if options.device_map == "none" else "",
    )


@advise.register
def quantize_advice(options: QuantizeOptions) -> str:
    """Return what to lower in `quantize`, which holds the weights and what calibration keeps."""
    has_text = options.text.dataset is not None or options.kd_cache_dir is not None
    fits_text = has_text and options.init in NEED_TEXT
    length = options.calibration_length
    rows = options.rows_of(length)
    return _try(
        f"--calibration-rows {rows // 2}" if has_text and rows > 1 else "",
        f"--calibration-length {length // 2}" if options.text.dataset is not None and length > 3 else "",
        *(_fit_answers(options) if fits_text else ("a machine with more memory (--dry-run says how much)",)),
    )


def _fit_answers(options: QuantizeConfig) -> tuple[str, ...]:
    less = "--metric outputs, which needs no backward pass" if options.metric == "fisher" else ""
    return less, "--calibrate-on teacher, which keeps no rows between layers", "--init mse, which reads no text"


@advise.register
def eval_advice(options: EvalOptions) -> str:
    """Return what to lower in `eval`, which holds all its models and their logits of a batch."""
    return _try(
        f"--batch-size {options.batch_size // 2}" if options.batch_size > 1 else "",
        "" if options.run.dtype == "bfloat16" else "--dtype bfloat16",
        "fewer --students at a time" if len(options.students) > 1 else "",
        "" if options.protocol == "blocks2048" else f"--length {max(2, options.length // 2)}",
    )


@advise.register
def qat_advice(options: QatOptions) -> str:
    """Return what to lower in `qat`; its parts are what `--dry-run` shows."""
    again, batch, chunk = _loop_answers(options)
    less = "--mergeable instead of training whole weights" if "weights" in options.train_parts else ""
    rows = "a smaller --calibration-rows" if options.from_scratch else ""
    fits = _fit_answers(options) if options.from_scratch and options.init in NEED_TEXT else ()
    answers = _try(again, batch, f"--loss-chunk-mb {chunk // 2}" if chunk > 1 else "", less, rows, *fits)
    return f"{answers}; --dry-run shows the parts"


def _loop_answers(options: QatOptions | RecoverOptions) -> tuple[str, str, int]:
    """Return the flags for less of a step at once, empty where there is no less, and the MiB of the loss's chunk."""
    from qat_lora.plan.training import device_of

    loop, rows = options.loop, options.loop.batch_size
    chunk = options.objective.loss_chunk_mb or default_loss_chunk_mb(device_of(options.run))
    steps = "" if loop.global_batch_size else f" --accumulation-steps {loop.accumulation_steps * 2}"
    batch = f"--batch-size {rows // 2}{steps}" if rows > 1 else ""
    return "" if loop.gradient_checkpointing else "--gradient-checkpointing", batch, chunk


def _try(*answers: str) -> str:
    return f"Try {', or '.join(filter(None, answers))}"


@advise.register
def recover_advice(options: RecoverOptions) -> str:
    """Return the largest parts of a recovery, and which flag makes each smaller, with the value to try."""
    from qat_lora.plan.memory import GIB
    from qat_lora.plan.training import plan_recover

    try:
        parts = plan_recover(replace(options, preload=False)).report["bytes"]
    except QatLoraError:  # a model that cannot be estimated still gets the general answer
        return "Lower --batch-size and raise --accumulation-steps, or give --gradient-checkpointing"
    again, batch, chunk = _loop_answers(options)
    batch = batch or "a cache with shorter rows"
    answers = dict.fromkeys(("adapter", "gradients", "optimizer state"), "--recovery-r with a smaller number")
    answers |= {"activations": f"{again}, or {batch}" if again else batch, "formed weights": again}
    answers |= {"working memory": f"{batch}, or --loss-chunk-mb {max(1, chunk // 2)}"}
    answers |= {"weights": "" if options.run.dtype == "bfloat16" else "--dtype bfloat16"}
    answers |= {"cached head": "--head-k with a smaller number"}
    tries = {name: f" (try {answer})" for name, answer in answers.items() if answer}
    largest = sorted(parts.items(), key=lambda part: -part[1])[:3]
    lines = [f"{name} {size / GIB:.2f} GiB{tries.get(name, '')}" for name, size in largest]
    return f"This run is estimated to need {sum(parts.values()) / GIB:.2f} GiB, most of it: {'; '.join(lines)}"
