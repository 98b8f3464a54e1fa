"""What the dry runs of `recover`, `qat` and `quantize` share: their result, and what they assume of a machine or cache.

A mistake in a recipe should not wait for the device, the download or the first hour to be found. A dry run therefore
builds the student on torch's meta device by the calls that the run itself makes and reads the cache's manifest if there
is one; it writes nothing, starts nothing and fetches a config at most. What cannot be known yet is assumed from the
command's own settings and listed as assumed: readers believe a number that is printed without its condition.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.errors import DeviceError
from qat_lora.models.load import CausalLM, load_tokenizer, tokenizer_sha256
from qat_lora.options import EstimateOptions, QatOptions, RecoverOptions, RunConfig
from qat_lora.plan.devices import attention_on, likely
from qat_lora.plan.memory import GIB, Shapes, forecast
from qat_lora.registry import Requirements
from qat_lora.runtime.base import default_loss_chunk_mb
from qat_lora.runtime.launch.select import choose, look, plan_run
from qat_lora.setup.training_data import cache_lessons
from qat_lora.terminal import redact

HEAD_K = 128
"""Top-K entries of a position where there is no cache to ask; what `cache build` keeps."""


class DryRun(NamedTuple):
    """What a command would do."""

    report: dict[str, Any]
    text: str  # the same for people
    requirements: Requirements

    def show(self, run: RunConfig) -> dict[str, Any]:
        """Print the text, unless JSON was asked for; return the report."""
        if not run.json:
            print(redact(self.text), flush=True)
        return self.report


def device_of(run: RunConfig) -> str:
    """Return the device that a run names, which need not be here, or what `auto` finds here."""
    if run.tpu or run.device != "auto":
        return "tpu" if run.tpu else run.device
    try:
        return choose("auto", False, look()).kind
    except DeviceError:  # PJRT_DEVICE names a TPU, and PyTorch/XLA is elsewhere
        return "tpu"


def replicas_of(run: RunConfig, assumed: list[str]) -> int:
    """Return the number of replicas of a run; where its machine is not here, as its settings say."""
    try:
        chips = plan_run(run.device, run.tpu, run.chips).chips
    except DeviceError:
        asked = run.chips.num_chips
        chips = int(asked) if asked and asked != "all" else 1 if asked is None else 0
    if not chips:
        assumed.append("the number of chips is that of a machine that is not here: 1 is taken; give --num-chips N")
    return chips or 1


def cache_of(options: RecoverOptions | QatOptions) -> KDCacheDataset | None:
    """Return the run's cache, None where there is none yet; a URL is assumed to be there.

    Raises:
        CacheError: something is there, and it is no complete cache or lacks what the objective reads.
    """
    path = str(options.kd_cache_dir)
    if not ("://" in path or Path(path).expanduser().exists()):
        return None
    rows: KDCacheDataset = cache_lessons(options).rows
    return rows


def check_cache(
    dataset: KDCacheDataset | None, asked: EstimateOptions, path: str | None, student: CausalLM, source: str
) -> list[str]:
    """Compare a student with its cache; return what is assumed of one that is not there, from a `source` for people.

    Raises:
        CacheError: the student cannot learn from the cache; its tokenizer is compared if it is here.
    """
    if dataset is None:
        sizes = f"rows of {asked.length:,} tokens and {asked.head_k} entries a position are taken from {source}"
        return [f"{path} is not there yet: {sizes}, and the fit of the tokenizer is not checked"]
    here = (student.folder / "tokenizer.json").is_file()
    sha256 = tokenizer_sha256(load_tokenizer(student.folder)) if here else None
    dataset.check_student(sha256, student.vocab_size, student.max_positions)
    return []


def training_estimate(
    options: RecoverOptions | QatOptions, student: str, length: int, head_k: int, device: str, accumulation: int
) -> EstimateOptions:
    """Return the settings of the estimate of a training run's steps on a device."""
    loop = options.loop
    return EstimateOptions(
        model=student,
        length=length,
        head_k=head_k,
        batch_size=loop.batch_size,
        accumulation_steps=accumulation,
        gradient_checkpointing=loop.gradient_checkpointing,
        loss_chunk_mb=options.objective.loss_chunk_mb or default_loss_chunk_mb(device),
        max_steps=loop.max_steps,
        attention=attention_on(device),
        run=options.run,
    )


def training_report(
    shapes: Shapes, asked: EstimateOptions, student: str, replicas: int, rows: int | None, assumed: list[str]
) -> dict[str, Any]:
    """Return what a training run would train, take and see; `rows` of its data are None where that is not known."""
    found = forecast(shapes, asked, likely(device_of(asked.run), replicas))
    step_rows = asked.batch_size * asked.accumulation_steps * replicas
    return {
        "student": student,
        **{key: found[key] for key in ("parameters", "quantised", "trained", "bytes", "total_bytes")},
        "stored_bytes_of_quantised": found["stored_bytes_of_quantised"],
        "replicas": replicas,
        "batch_size": asked.batch_size,
        "accumulation_steps": asked.accumulation_steps,
        "effective_batch": step_rows,
        "length": asked.length,
        "head_k": asked.head_k,
        "steps": asked.max_steps,
        "tokens": asked.max_steps * step_rows * asked.length,
        "epochs": asked.max_steps * step_rows / rows if rows else None,
        "devices": found["devices"],
        "assumed": assumed,
    }


def training_text(report: dict[str, Any], trained: str, utilisation: float, more: Sequence[str] = ()) -> str:
    """Return a training run's report as lines for people, with further lines before what is assumed."""
    replicas, epochs = report["replicas"], report["epochs"]
    lines = [
        "dry run: shapes alone; nothing is written, and no device is used",
        f"student  {report['student']}: {report['parameters']:,} parameters, {report['quantised']:,} of them quantised",
        f"trained  {trained}",
        f"step     {report['batch_size']} rows x {report['accumulation_steps']} micro-batches x {replicas} "
        f"replica{'s' if replicas > 1 else ''}: effective batch {report['effective_batch']}, "
        f"{report['effective_batch'] * report['length']:,} tokens",
        f"run      {report['steps']:,} steps, {report['tokens']:,} tokens"
        + (f", {epochs:.2f} epochs" if epochs else ""),
        f"memory   {report['total_bytes'] / GIB:.3f} GiB a replica: "
        + ", ".join(f"{name} {size / GIB:.3f}" for name, size in report["bytes"].items()),
    ]
    for name, there in report["devices"].items():
        fits = "fits" if there["fits"] else "does not fit"
        lines.append(f"time     {there['hours']:.2f} h on {name} ({fits}), at {utilisation:.0%} of the peak rate")
    return "\n".join([*lines, *more, *(f"assumed  {text}" for text in report["assumed"])])
