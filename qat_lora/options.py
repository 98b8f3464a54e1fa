"""What a user can set: one frozen dataclass per command, made of the settings that each room declares.

The command line is read off these classes (`cli.py`), so a flag, its default, its unit and its help exist once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from qat_lora.cache.shares import Share
from qat_lora.config import option
from qat_lora.errors import ConfigError
from qat_lora.layers.lora import LoraConfig
from qat_lora.losses.objective import ObjectiveConfig
from qat_lora.quant.initialise import Method
from qat_lora.text.sources import TextConfig
from qat_lora.train.loop import LoopConfig
from qat_lora.train.optim import OptimConfig


@dataclass(frozen=True)
class RunConfig:
    """Where and how to run; the same for every command."""

    out: str | None = option(None, "output folder; the default is printed")
    overwrite: bool = option(False, "start again where an earlier run of ours is in the way")
    device: Literal["auto", "cpu", "cuda", "mps", "tpu", "xla"] = option(
        "auto", "where to compute; auto takes TPU, CUDA, MPS, CPU in this order", alias="device_type"
    )
    tpu: bool = option(False, "same as --device tpu")
    dtype: Literal["float32", "bfloat16"] = option("float32", "type of weights and activations")
    seed: int = option(0, "seed of everything random")
    quiet: bool = option(False, "no progress bars, no status lines")
    json: bool = option(False, "print the result as JSON, and nothing else, to standard output")

    def __post_init__(self) -> None:
        at_least(self, seed=0)
        if self.seed >= 2**63:
            raise ConfigError(f"seed: {self.seed} is too large; allowed: 0 to 2^63 - 1")


@dataclass(frozen=True)
class HubConfig:
    """How models are fetched."""

    revision: str | None = option(None, "branch, tag or commit of the model on the Hub")
    trust_remote_code: bool = option(False, "run Python code that comes with the model")


@dataclass(frozen=True)
class CacheBuildOptions:
    """`qat-lora cache build`."""

    teacher: str | None = option(None, "full-precision teacher: Hugging Face folder or Hub name (required)")
    text: TextConfig = option(TextConfig, "the text")
    length: int = option(1024, "tokens of a row", unit="tokens", alias="max_length")
    top_k: int = option(128, "teacher's likeliest tokens that are kept at every position", unit="tokens", alias="topk")
    temperatures: tuple[float, ...] = option((1.0,), "temperatures that training may use later", unit="list")
    num_rows: int | None = option(None, "stop after this many training rows; default: all text", unit="rows")
    eval_rows: int = option(0, "rows kept apart as evaluation split, whole documents", unit="rows")
    teacher_batch_size: int = option(8, "rows of a teacher forward", unit="rows", alias="batch_size")
    shard_rows: int | None = option(None, "rows of a shard; default: about 128 MB", unit="rows")
    builder: str = option("0/1", "i/n: this is builder i of n that fill --out together, each with every n-th document")
    dry_run: bool = option(False, "time a few batches, print hours, bytes and free disk, and write nothing")
    hub: HubConfig = option(HubConfig, "models")
    run: RunConfig = option(RunConfig, "run")

    def __post_init__(self) -> None:
        required(self, "teacher")
        required(self.text, "dataset")
        at_least(self, length=2, top_k=1, num_rows=1, eval_rows=0, teacher_batch_size=1, shard_rows=1)
        if not self.temperatures or min(self.temperatures) <= 0:
            raise ConfigError("temperatures: allowed: one or more numbers above 0, for example 1,2")
        share = Share.parse(self.builder)
        if self.num_rows is not None and not share.of(self.num_rows):
            raise ConfigError(
                f"num_rows: {self.num_rows} leaves builder {share} nothing; give more rows or fewer builders"
            )


@dataclass(frozen=True)
class AuditOptions:
    """`qat-lora cache audit`."""

    kd_cache_dir: str | None = option(None, "the KD cache, also as first word (required)", alias="cache_dir")
    teacher: str | None = option(None, "the teacher that made it: Hugging Face folder or Hub name (required)")
    rows: int = option(8, "training rows to look at, evenly spread", unit="rows")
    hub: HubConfig = option(HubConfig, "models")
    run: RunConfig = option(RunConfig, "run")

    def __post_init__(self) -> None:
        required(self, "kd_cache_dir")
        required(self, "teacher")
        at_least(self, rows=1)


@dataclass(frozen=True)
class QuantizeOptions:
    """`qat-lora quantize`."""

    model: str | None = option(None, "full-precision model: Hugging Face folder or Hub name (required)")
    preset: str = option("w2g64", "how weights are stored", alias="config")
    keep: tuple[str, ...] = option((), "patterns of layers that stay unquantised", unit="regular expressions")
    init: Method = option("gptq", "start: absmax or mse rounding, or gptq (error-compensated; needs text)")
    text: TextConfig = option(TextConfig, "calibration text")
    kd_cache_dir: str | None = option(None, "calibrate on the rows of this KD cache instead of --dataset")
    calibration_rows: int = option(128, "rows of calibration text", unit="rows")
    calibration_length: int = option(256, "tokens of a calibration row (with --dataset)", unit="tokens")
    start_rank: int = option(64, "rank up to which adapter starts are stored with the checkpoint; 0: none", unit="rank")
    hub: HubConfig = option(HubConfig, "models")
    run: RunConfig = option(RunConfig, "run")

    def __post_init__(self) -> None:
        required(self, "model")
        at_least(self, calibration_rows=1, calibration_length=2, start_rank=0)


@dataclass(frozen=True)
class RecoverOptions:
    """`qat-lora recover`."""

    checkpoint: str | None = option(None, "quantised student: folder made by `qat-lora quantize`")
    model: str | None = option(None, "student where there is no --checkpoint: Hugging Face folder or Hub name")
    kd_cache_dir: str | None = option(None, "KD cache with the teacher's logits (required)", alias="cache_dir")
    head_k: int | None = option(None, "use only the first entries of the cached head; default: all", unit="tokens")
    train_scales: bool = option(False, "train the quantiser's scales too (saved with the adapter)")
    start: Literal["auto", "zero"] = option("auto", "adapter start: from the quantisation error if stored, or zero")
    lora: LoraConfig = option(LoraConfig, "adapter")
    objective: ObjectiveConfig = option(ObjectiveConfig, "objective")
    train: OptimConfig = option(OptimConfig, "optimizer")
    loop: LoopConfig = option(LoopConfig, "loop")
    preload: bool = option(False, "hold the cache in memory instead of mapping the files")
    hub: HubConfig = option(HubConfig, "models")
    run: RunConfig = option(RunConfig, "run")

    def __post_init__(self) -> None:
        required(self, "kd_cache_dir")
        at_least(self, head_k=1)
        if self.checkpoint is None and self.model is None:
            raise ConfigError("checkpoint: missing; give --checkpoint FOLDER (or --model for an unquantised student)")


@dataclass(frozen=True)
class EvalOptions:
    """`qat-lora eval`."""

    teacher: str | None = option(None, "the reference: Hugging Face folder or Hub name (required)")
    students: tuple[str, ...] = option(
        (), "what to score: model, adapter or run folders, each as NAME=FOLDER or FOLDER", alias="models"
    )
    text: TextConfig = option(TextConfig, "held-out text")
    length: int = option(1024, "tokens of a row", unit="tokens")
    eval_rows: int = option(64, "rows to score; 0: all", unit="rows")
    batch_size: int = option(4, "rows of a forward", unit="rows")
    hub: HubConfig = option(HubConfig, "models")
    run: RunConfig = option(RunConfig, "run")

    def __post_init__(self) -> None:
        required(self, "teacher")
        required(self.text, "dataset")
        at_least(self, length=2, eval_rows=0, batch_size=1)


@dataclass(frozen=True)
class ExportOptions:
    """`qat-lora export`."""

    student: str | None = option(None, "model, adapter or run folder (required)", alias="model")
    form: Literal["merged"] = option("merged", "merged: dense weights with codes and adapter folded in")
    hub: HubConfig = option(HubConfig, "models")
    run: RunConfig = option(RunConfig, "run")

    def __post_init__(self) -> None:
        required(self, "student")


@dataclass(frozen=True)
class GenerateOptions:
    """`qat-lora generate`."""

    student: str | None = option(None, "model, adapter or run folder (required)", alias="model")
    prompt: str | None = option(None, "text to continue (required)")
    max_new_tokens: int = option(64, "length of the continuation", unit="tokens")
    gen_temperature: float = option(0.0, "0 takes the likeliest token; above, tokens are drawn")
    hub: HubConfig = option(HubConfig, "models")
    run: RunConfig = option(RunConfig, "run")

    def __post_init__(self) -> None:
        required(self, "student")
        required(self, "prompt")
        at_least(self, max_new_tokens=1, gen_temperature=0)


@dataclass(frozen=True)
class DemoOptions:
    """`qat-lora demo`."""

    run: RunConfig = option(RunConfig, "run")


@dataclass(frozen=True)
class SmokeOptions:
    """`qat-lora smoke`."""

    run_training: bool = option(False, "also train for some epochs and check that the loss falls")
    train_epochs: int = option(2, "passes over the little cache, with --run-training", unit="epochs")
    run: RunConfig = option(RunConfig, "run")

    def __post_init__(self) -> None:
        if self.train_epochs < 2:
            raise ConfigError(f"train_epochs: {self.train_epochs} has no first and last to compare; give 2 or more")


@dataclass(frozen=True)
class EstimateOptions:
    """`qat-lora estimate`."""

    model: str | None = option(None, "model folder or Hub name; only its config.json is read (required)")
    preset: str | None = option(None, "how weights are stored; default: as the model's config says", alias="config")
    keep: tuple[str, ...] = option((), "patterns of layers that stay unquantised", unit="regular expressions")
    train_scales: bool = option(False, "the quantiser's scales train too")
    lora: LoraConfig = option(LoraConfig, "adapter")
    length: int = option(1024, "tokens of a row", unit="tokens", alias="max_length")
    head_k: int = option(128, "entries of the cached head", unit="tokens")
    batch_size: int = option(4, "rows of a micro-batch on one replica", unit="rows")
    accumulation_steps: int = option(1, "micro-batches of an optimizer step", unit="micro-batches")
    loss_chunk_mb: int = option(32, "logits held at once while the loss is computed", unit="MiB")
    attention: Literal["fused", "plain"] = option(
        "fused", "fused: no scores are kept (CUDA, CPU); plain: all of them are (PyTorch/XLA)"
    )
    run: RunConfig = option(RunConfig, "run")

    def __post_init__(self) -> None:
        required(self, "model")
        for name in ("length", "head_k", "batch_size", "accumulation_steps", "loss_chunk_mb"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}: {getattr(self, name)} is below 1")


def required(config: object, name: str) -> None:
    """Refuse a config without a setting that has no default.

    Raises:
        ConfigError: names the flag.
    """
    if getattr(config, name) is None:
        raise ConfigError(f"{name}: missing; give --{name.replace('_', '-')}")


def at_least(config: object, **bounds: int) -> None:
    """Refuse numbers below a bound; a setting that is None passes.

    Raises:
        ConfigError: names the setting and what is allowed.
    """
    for name, bound in bounds.items():
        value = getattr(config, name)
        if value is not None and value < bound:
            raise ConfigError(f"{name}: {value} is too small; allowed: {bound} or more")
