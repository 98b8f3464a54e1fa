"""What a user can set: one frozen dataclass per command, made of the settings that each room declares.

The command line is read off these classes (`cli.py`), so a flag, its default, its unit and its help exist once.
"""

import functools
from dataclasses import fields, replace
from pathlib import Path
from typing import Literal

from qat_lora.cache.build.served import ServedConfig
from qat_lora.cache.build.writer import Partition
from qat_lora.cache.read.dataset import LaterConfig
from qat_lora.config import HELP, common, option, required, settings
from qat_lora.data.sources import TextConfig
from qat_lora.errors import ConfigError
from qat_lora.evaluate.health import HealthConfig
from qat_lora.evaluate.protocols import BLOCK, Protocol
from qat_lora.evaluate.tasks import TasksConfig
from qat_lora.files.checksums import STATE
from qat_lora.layers.calibrate.quantize import QuantizeConfig
from qat_lora.layers.latent import Gradient
from qat_lora.layers.lora import LoraConfig
from qat_lora.losses.objective import ObjectiveConfig
from qat_lora.models.hub import HubConfig, local_folder
from qat_lora.quant.presets import TargetConfig
from qat_lora.runtime.launch.select import ChipsConfig, check_device
from qat_lora.train.blockwise import BlockwiseConfig
from qat_lora.train.loop import LoopConfig
from qat_lora.train.optim import OptimConfig
from qat_lora.types import VerifyRows

# How a teacher's modules are dealt out to devices, in accelerate's words; `none`: to the one device of the run.
DeviceMap = Literal["none", "auto", "balanced", "balanced_low_0", "sequential"]

_tokens = functools.partial(option, unit="tokens", min=1)
_rows = functools.partial(option, unit="rows", min=1)
_rank = functools.partial(option, unit="rank", min=0)
_at_least_1 = functools.partial(option, min=1)

QAT_PARTS = ("scales", "ranges", "lut", "weights", "norms", "embeddings", "head")  # what `qat` can train


@settings
class RunConfig:
    """Where and how to run; every command has of this what it uses, and refuses the rest."""

    out: str | None = common(None, "output folder; the default is printed")
    overwrite: bool = option(False, "start again where an earlier run of ours is in the way")
    device: Literal["auto", "cpu", "cuda", "mps", "tpu", "xla"] = common(
        "auto", HELP["run.device"], alias="device_type"
    )
    tpu: bool = option(False, "same as --device tpu")
    chips: ChipsConfig = option(ChipsConfig, "how many chips")
    dtype: Literal["auto", "float32", "bfloat16"] = option("auto", HELP["run.dtype"])
    seed: int = option(0, "seed of everything random", min=0, below=2**63)
    quiet: bool = option(False, "no progress bars, no status lines")
    json: bool = option(False, "print the result as JSON, and nothing else, to standard output")

    def __post_init__(self) -> None:
        check_device(self.device, self.tpu)


# A sample of the tail for 18 bytes a token: with it, `hybrid` on 2 entries beats `ghost` on 32 (docs/numerics.md).
TAIL_DRAWS = 8


@settings
class CacheBuildOptions:
    """`qat-lora cache build`."""

    teacher: str | None = common(None, "teacher: Hugging Face folder, Hub name, GGUF file, or a server's model")
    served: ServedConfig = option(ServedConfig, "a teacher behind a server")
    text: TextConfig = option(TextConfig, "the text")
    length: int = _tokens(1024, "tokens of a row", alias="max_length", min=2, common=True)
    top_k: int = _tokens(128, "teacher's likeliest tokens kept at every position", alias="topk", min=0, common=True)
    temperatures: tuple[float, ...] = option((1.0,), "temperatures that training may use later", unit="list")
    value_dtype: Literal["float16", "uint8"] = option("float16", HELP["value_dtype"])
    tail_draws: int | None = _tokens(None, HELP["tail_draws"], min=0)
    draws: int = _tokens(0, "tokens drawn from the whole teacher at every position, for sampled", min=0)
    hidden: bool = option(False, "store hidden states and the output head, for full; instead of logits with --top-k 0")
    row_codec: Literal["none", "lzma"] = option("none", HELP["row_codec"])
    positions: Literal["all", "entropy", "uniform"] = option("all", HELP["positions"])
    position_share: float = option(0.5, "share of the positions that --positions draws", above=0, max=1)
    vocab_size: int | None = _tokens(None, HELP["vocab_size"])
    num_rows: int | None = _rows(None, "stop after this many training rows; default: all text", common=True)
    eval_rows: int = _rows(0, "rows kept apart as evaluation split, whole documents", min=0, common=True)
    teacher_batch_size: int = _rows(8, "rows of a teacher forward", alias="batch_size", common=True)
    shard_rows: int | None = _rows(None, "rows of a shard; default: about 128 MB")
    device_map: DeviceMap = option("none", HELP["device_map"])
    builder: str = option("0/1", "i/n: this is builder i of n that fill --out together, each with its own files")
    dry_run: bool = common(False, HELP["build.dry_run"])
    hub: HubConfig = option(HubConfig, "models")
    run: RunConfig = option(RunConfig, "run", without=("chips.parallel", "chips.shard_base"))

    def __post_init__(self) -> None:
        self.served.check(self)
        required(self.text, "dataset")
        if (compressed := self.row_codec == "lzma") and not 1 <= self.draws <= 256:
            raise ConfigError(f"draws: {self.draws} given; allowed with --row-codec lzma: 1 to 256, for example 16")
        if not (self.top_k or self.hidden or compressed):
            raise ConfigError("top_k: 0 is too small; allowed: 1 or more")
        if self.tail_draws and not self.top_k:
            raise ConfigError("tail_draws: there is no tail without a head; give --top-k 1 or more, or --draws instead")
        if not self.temperatures or min(self.temperatures) <= 0:
            raise ConfigError("temperatures: allowed: one or more numbers above 0, for example 1,2")
        share = Partition.parse(self.builder)
        if self.num_rows is not None and not share.of(self.num_rows):
            left = f"{self.num_rows} leaves builder {share} nothing"
            raise ConfigError(f"num_rows: {left}; give more rows or fewer builders")

    @property
    def dry_run_measures(self) -> bool:
        """True where a dry run has the teacher to time, False for one whose weights are not here."""
        place = Path(str(self.teacher)).expanduser()
        names = "model.safetensors", "model.safetensors.index.json", STATE
        is_other = self.served.teacher_url is not None or place.exists() and not (place / "config.json").is_file()
        return is_other or local_folder(str(self.teacher), *names, revision=self.hub.revision) is not None

    @property
    def draws_from_tail(self) -> int:
        """What `tail_draws` means where it is not given."""
        default = TAIL_DRAWS if self.top_k and self.served.teacher_url is None else 0
        return default if self.tail_draws is None else self.tail_draws


@settings
class AuditOptions:
    """`qat-lora cache audit`."""

    kd_cache_dir: str | None = option(None, "the KD cache, also as first word", required=True, alias="cache_dir")
    teacher: str | None = option(None, "the teacher that made it: Hugging Face folder or Hub name", required=True)
    rows: int = _rows(8, "training rows to look at, evenly spread")
    text: str | None = option(None, "evaluation text, file or folder: how much of it the cache has already shown")
    device_map: DeviceMap = option("none", HELP["device_map"])
    hub: HubConfig = option(HubConfig, "models")
    run: RunConfig = option(RunConfig, "run", without=("chips", "seed"))


@settings
class QuantizeOptions(QuantizeConfig):
    """`qat-lora quantize`."""

    model: str | None = common(None, "full-precision model: Hugging Face folder or Hub name", required=True)
    preset: str = common("q2_0", "how weights are stored", alias="config")
    joint_rank: int | None = _rank(None, HELP["joint_rank"])
    start_method: str | None = option(None, "no longer does anything: adapter starts are qera's, in the metric")
    target: TargetConfig = option(TargetConfig, "target size")
    text: TextConfig = option(TextConfig, "calibration text", without=("weight_field",))
    kd_cache_dir: str | None = common(None, "calibrate on the rows of this KD cache instead of --dataset")
    calibration_length: int = _tokens(256, "tokens of a calibration row (with --dataset)", min=2)
    start_rank: int = _rank(64, "rank up to which adapter starts are stored with the checkpoint; 0: none")
    dry_run: bool = common(False, "print layers, bits and bytes from shapes alone, and write nothing")
    hub: HubConfig = option(HubConfig, "models")
    run: RunConfig = option(RunConfig, "run", without=("chips",))

    def __post_init__(self) -> None:
        if self.start_method not in (None, "qera"):
            raise ConfigError(f"start_method: {self.start_method} was removed; adapter starts are qera's, leave it out")
        if (self.joint_rank or 0) > self.start_rank:
            raise ConfigError(f"joint_rank: {self.joint_rank} is more than --start-rank {self.start_rank} stores")
        if self.text.dataset is not None and self.kd_cache_dir is not None:
            raise ConfigError("dataset: calibration reads --kd-cache-dir; give one of the two")

    @property
    def rank_of_codes(self) -> int:
        """The rank that codes are chosen together with: recovery's usual one where the start is searched anyway."""
        usual = min(16, self.start_rank) if self.init == "descent" else 0
        return usual if self.joint_rank is None else self.joint_rank


@settings
class RecoverOptions:
    """`qat-lora recover`."""

    checkpoint: str | None = common(None, HELP["recover.checkpoint"])
    model: str | None = option(None, "student where there is no --checkpoint")
    tokenizer: str | None = option(None, "folder of a GGUF student's tokenizer; default: beside it, or the teacher's")
    learn: Literal["kd", "kd+ce", "ce", "sft"] = common("kd", HELP["learn"], alias="objective")
    kd_cache_dir: str | None = common(None, HELP["recover.kd_cache_dir"], alias="cache_dir")
    head_k: int | None = _tokens(None, HELP["head_k"])
    text: TextConfig = option(TextConfig, "the text, for ce and sft")
    length: int = _tokens(1024, "tokens of a row, for ce and sft (a cache has its own)", alias="max_length", min=2)
    num_rows: int | None = _rows(None, "train on this many rows at most, for ce and sft; default: all")
    eval_rows: int = _rows(0, "rows kept apart for evaluation, whole documents, for ce and sft", min=0)
    train_scales: bool = option(False, "train the quantiser's scales too (saved with the adapter)")
    train_norms: bool = option(False, "train the norms too (saved with the adapter; needs float32 weights)")
    blockwise: bool = option(False, HELP["blockwise"])
    start: Literal["auto", "zero"] = option("auto", "adapter start: from the quantisation error if stored, or zero")
    lora: LoraConfig = option(LoraConfig, "adapter")
    objective: ObjectiveConfig = option(ObjectiveConfig, "objective")
    train: OptimConfig = option(OptimConfig, "optimizer")
    loop: LoopConfig = option(LoopConfig, "loop")
    later: LaterConfig = option(LaterConfig, "caches that join later")
    preload: bool = option(False, "hold the cache in memory instead of reading rows from its files")
    verify_rows: VerifyRows = option("all", HELP["verify_rows"])
    dry_run: bool = common(False, HELP["dry_run"])
    hub: HubConfig = option(HubConfig, "models")
    run: RunConfig = option(RunConfig, "run")

    @property
    def uses_cache(self) -> bool:
        """True if a teacher is learned from."""
        return self.learn in ("kd", "kd+ce")

    @property
    def float32_for(self) -> str:
        """The setting that needs float32 weights, empty if none does."""
        return "train_norms" if self.train_norms else "autocast" if self.loop.autocast else ""

    def __post_init__(self) -> None:
        if self.uses_cache and self.kd_cache_dir is None and self.text.dataset is not None:
            raise ConfigError("learn: missing; to learn from --dataset give --objective sft (chats) or ce (any text)")
        if self.uses_cache:
            required(self, "kd_cache_dir")
        else:
            required(self.text, "dataset")
        for given, name in ((self.text.dataset, "dataset"), (self.kd_cache_dir, "kd_cache_dir")):
            if given is not None and (name == "dataset") == self.uses_cache:
                raise ConfigError(f"{name}: nothing reads it with --objective {self.learn}; leave it out")
        if self.checkpoint is None and self.model is None:
            raise ConfigError("checkpoint: missing; give --checkpoint FOLDER (or --model for an unquantised student)")
        if self.float32_for and self.run.dtype == "bfloat16":
            raise ConfigError(f"{self.float32_for}: needs float32 weights; leave out --dtype {self.run.dtype}")
        if self.blockwise and not (self.uses_cache and self.checkpoint and self.model):
            raise ConfigError("blockwise: needs --kd-cache-dir, --checkpoint and its full-precision model as --model")
        if self.blockwise and self.train_norms:
            raise ConfigError("train_norms: --blockwise trains no norms; leave one of the two out")


@settings
class QatOptions(QuantizeConfig):
    """`qat-lora qat`."""

    model: str | None = common(None, HELP["qat.model"])
    preset: str | None = common(None, "how weights are stored (with --from-scratch); default: q4_r32", alias="config")
    from_scratch: bool = common(False, "quantise the full-precision --model first; without it, go on from --checkpoint")
    checkpoint: str | None = common(None, "quantised student to go on from: folder made by `quantize` or `qat`")
    kd_cache_dir: str | None = common(None, "KD cache with the teacher's logits", required=True, alias="cache_dir")
    head_k: int | None = _tokens(None, HELP["head_k"])
    train_parts: tuple[str, ...] = common(("scales",), HELP["train_parts"], unit="list")
    weight_gradient: Gradient = option("lsq", HELP["weight_gradient"])
    mergeable: bool = option(False, "train a low-rank change inside the rounding too, which is no adapter in the end")
    mergeable_r: int = option(16, "rank of that change", unit="rank", min=1)
    blockwise: BlockwiseConfig = option(BlockwiseConfig, "block by block")
    objective: ObjectiveConfig = option(ObjectiveConfig, "objective")
    train: OptimConfig = option(OptimConfig, "optimizer")
    loop: LoopConfig = option(LoopConfig, "loop")
    preload: bool = option(False, "hold the cache in memory instead of reading rows from its files")
    verify_rows: VerifyRows = option("all", HELP["verify_rows"])
    dry_run: bool = common(False, HELP["dry_run"])
    hub: HubConfig = option(HubConfig, "models")
    run: RunConfig = option(RunConfig, "run")

    @property
    def float32_for(self) -> str:
        """The setting that needs float32 weights, empty if none does."""
        small_updates = {"norms", "embeddings", "head"} & set(self.train_parts)
        return "train_parts" if small_updates else "autocast" if self.loop.autocast else ""

    def __post_init__(self) -> None:
        if self.from_scratch:
            if self.checkpoint is not None:
                raise ConfigError("checkpoint: --from-scratch makes its own start; give one of the two")
        elif self.checkpoint is None:
            raise ConfigError("checkpoint: missing; give --checkpoint FOLDER, or --from-scratch and --model")
        else:  # settings that say how a student is made are refused where one is given
            read = {"model"} | ({"calibration_rows"} if self.blockwise.blockwise_steps else set())
            for name in (field.name for field in fields(QuantizeConfig) if field.name not in read):
                if getattr(self, name) != getattr(QatOptions, name):
                    raise ConfigError(f"{name}: belongs to --from-scratch; a checkpoint's layers are as they were made")
        if not self.from_scratch and self.blockwise.blockwise_steps and self.model is None:
            raise ConfigError("blockwise_steps: needs the full-precision model; give --model")
        unknown = sorted(set(self.train_parts) - set(QAT_PARTS))
        if unknown or not (self.train_parts or self.mergeable):
            raise ConfigError(f"train_parts: {', '.join(unknown) or 'nothing'}; allowed: {', '.join(QAT_PARTS)}")
        if self.mergeable and "weights" in self.train_parts:
            raise ConfigError("mergeable: the weights train already; leave out --mergeable or weights in --train-parts")
        if self.weight_gradient != "lsq" and not (self.mergeable or "weights" in self.train_parts):
            raise ConfigError(f"weight_gradient: {self.weight_gradient} steers --train-parts weights and --mergeable")
        if self.run.chips.shard_base and self.run.chips.parallel != "spmd":
            raise ConfigError("shard_base: qat exports whole layers; give --parallel spmd (on XLA), or use recover")


@settings
class EvalOptions:
    """`qat-lora eval`."""

    teacher: str | None = common(None, "the reference: Hugging Face folder or Hub name", required=True)
    students: tuple[str, ...] = common((), HELP["students"], alias="models")
    text: TextConfig = option(TextConfig, "held-out text", without=("weight_field",))
    domain: tuple[str, ...] = option((), "more texts, scored apart and together: NAME=PATH, files or folders")
    protocol: Protocol = common("packed", HELP["protocol"])
    length: int = _tokens(1024, "tokens of a row (blocks2048 has its own)", min=2, common=True)
    stride: int | None = option(None, HELP["stride"], unit="tokens")
    eval_rows: int = _rows(64, "rows to score of each text; 0: all", min=0, common=True)
    batch_size: int = _rows(4, "rows of a forward")
    resamples: int = option(1000, "bootstrap draws for the 95 % intervals", unit="draws", min=100)
    kd_cache_dir: str | None = option(None, HELP["eval.kd_cache_dir"], alias="cache_dir")
    dry_run: bool = common(False, HELP["forward.dry_run"])
    health: HealthConfig = option(HealthConfig, "generation")
    harness: TasksConfig = option(TasksConfig, "tasks")
    hub: HubConfig = option(HubConfig, "models")
    run: RunConfig = option(RunConfig, "run", without=("chips",))

    @property
    def row_length(self) -> int:
        """Tokens of a row."""
        return BLOCK if self.protocol == "blocks2048" else self.length

    def __post_init__(self) -> None:
        if not self.domain:
            required(self.text, "dataset")
        if self.stride is not None and self.protocol != "sliding":
            raise ConfigError(f"stride: means nothing with --protocol {self.protocol}; it belongs to sliding")


@settings
class ExportOptions:
    """`qat-lora export`."""

    student: str | None = common(None, "model, adapter or run folder", required=True, alias="model")
    form: Literal["merged", "adapter", "compressed-tensors", "gguf", "gguf-merged", "gptq", "mlx", "pt"] = common(
        "merged", HELP["form"]
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = option("auto", HELP["export.dtype"])
    embedding_bits: float | None = option(None, HELP["embedding_bits"], unit="bits")
    container_bits: int | None = option(None, HELP["container_bits"], unit="bits", min=2, max=8)
    exact_only: bool = option(False, "with gguf: layers that no block holds exactly are written dense, not rounded")
    text: TextConfig = option(TextConfig, "text to measure what rounding costs", without=("weight_field",))
    length: int = _tokens(256, "tokens of a row of that text", min=2)
    eval_rows: int = _rows(16, "rows of that text")
    scores: str | None = common(None, "folder of a `qat-lora eval` run whose scores the model card shows")
    license: str | None = common(None, "licence that the model card names, for example apache-2.0")
    dry_run: bool = common(False, HELP["forward.dry_run"])
    hub: HubConfig = option(HubConfig, "models")
    run: RunConfig = option(RunConfig, "run", without=("chips", "dtype", "seed"))

    def __post_init__(self) -> None:
        only = {"container_bits": ("compressed-tensors",), "exact_only": ("gguf",), "embedding_bits": ("gguf", "mlx")}
        for name, forms in only.items():
            if getattr(self, name) and self.form not in forms:
                belongs = " or ".join(forms)
                raise ConfigError(f"{name}: means nothing with --form {self.form}; it belongs to --form {belongs}")
        if self.embedding_bits not in (None, 4.5, 6, 8, 16):
            raise ConfigError(f"embedding_bits: {self.embedding_bits:g} is not supported; allowed: 4.5, 6, 8, 16")
        if self.form == "adapter" and self.dtype != "auto":
            raise ConfigError(f"dtype: {self.dtype} means nothing with --form adapter, which copies the files")


@settings
class GenerateOptions:
    """`qat-lora generate`."""

    student: str | None = option(None, "model, adapter or run folder", required=True, alias="model")
    prompt: str | None = option(None, "text to continue")
    prompts: str | None = option(None, "file with one prompt a line, instead of --prompt")
    chat: bool = option(False, "the prompt is a question: write it as the tokenizer's chat template says")
    max_new_tokens: int = _tokens(64, "length of the continuation")
    gen_temperature: float = option(0.0, "0 takes the likeliest token; above, tokens are drawn", min=0)
    hub: HubConfig = option(HubConfig, "models")
    run: RunConfig = option(RunConfig, "run", without=("chips", "out", "overwrite"))

    def __post_init__(self) -> None:
        if (self.prompt is None) == (self.prompts is None):
            raise ConfigError("prompt: give --prompt TEXT or --prompts FILE, one of the two")


@settings
class ChatOptions:
    """`qat-lora chat`."""

    student: str | None = option(None, "model, adapter or run folder, also as first word", required=True, alias="model")
    system: str = option("", "system message that the chat begins with")
    max_new_tokens: int = _tokens(256, "longest answer")
    gen_temperature: float = option(0.7, "0 takes the likeliest token; above, tokens are drawn", min=0)
    hub: HubConfig = option(HubConfig, "models")
    run: RunConfig = option(RunConfig, "run", without=("chips", "out", "overwrite"))


@settings
class PushOptions:
    """`qat-lora push`."""

    folder: str | None = option(None, "folder made by `qat-lora export`, also as first word", required=True)
    repo: str | None = option(None, "OWNER/NAME on the Hub, also as second word", required=True)
    dry_run: bool = option(False, "list and check the files, and upload nothing")
    private: bool = option(False, "make a new repository private")
    run: RunConfig = option(RunConfig, "run", without=("out", "overwrite", "device", "tpu", "chips", "dtype", "seed"))


@settings
class DemoOptions:
    """`qat-lora demo`."""

    run: RunConfig = option(RunConfig, "run", without=("chips",))


@settings
class SmokeOptions:
    """`qat-lora smoke`."""

    run_training: bool = option(False, "also train for some epochs and check that the loss falls")
    train_epochs: int = option(2, "passes over the little cache, with --run-training", unit="epochs", min=2)
    run: RunConfig = option(RunConfig, "run", without=("chips",))


@settings
class EstimateOptions:
    """`qat-lora estimate`."""

    model: str | None = common(None, "model folder or Hub name; only its config.json is read", required=True)
    preset: str | None = common(None, "how weights are stored; default: as the model's config says", alias="config")
    keep: tuple[str, ...] = option((), "patterns of layers that stay unquantised", unit="regular expressions")
    train_scales: bool = option(False, "the quantiser's scales train too")
    train_norms: bool = option(False, "the norms train too")
    lora: LoraConfig = option(LoraConfig, "adapter")
    length: int = _at_least_1(1024, "tokens of a row", unit="tokens", alias="max_length", common=True)
    head_k: int = _tokens(128, "entries of the cached head", min=0)
    batch_size: int = _at_least_1(4, "rows of a micro-batch on one replica", unit="rows", common=True)
    accumulation_steps: int = _at_least_1(1, "micro-batches of an optimizer step", unit="micro-batches")
    gradient_checkpointing: bool = option(False, "layers are computed again in the backward pass")
    loss_chunk_mb: int | None = _at_least_1(None, HELP["loss_chunk_mb"], unit="MiB")
    max_steps: int = _at_least_1(1000, "optimizer steps, for time and cost", unit="steps")
    devices: tuple[str, ...] = common((), HELP["devices"], alias="for")
    utilisation: float = option(0.6, HELP["utilisation"], unit="share", above=0, max=1)
    attention: Literal["auto", "tiled", "fused", "blocked", "xla"] = option("auto", HELP["attention"])
    run: RunConfig = option(RunConfig, "run", without=("out", "overwrite", "chips", "seed", "quiet"))

    @property
    def float32_for(self) -> str:
        """The setting that needs float32 weights, empty if none does."""
        return "train_norms" if self.train_norms else ""


@settings
class WriteConfig:
    """What a model writes, and which of its texts are kept."""

    writer: str | None = common(None, "model that writes: folder, run or Hub name; default: the teacher")
    texts: int | None = common(None, "texts to write; default: one a prompt", unit="texts", min=1)
    chat: bool = common(False, "the prompts are questions: write them as the tokenizer's chat template says")
    thinking: Literal["auto", "on", "off"] = option("auto", "the chat template's own switch for thinking")
    tools: str | None = option(None, "JSON file with a list of tools, for chat templates that know them")
    prompt_tokens: int | None = option(None, "first tokens of a text to continue; default: all", unit="tokens", min=1)
    max_new_tokens: int = common(256, "longest answer, or continuation", unit="tokens", min=1)
    gen_temperature: float = common(1.0, "0 takes the likeliest token; above, tokens are drawn", min=0)
    write_batch_size: int = option(32, "texts that are written at once", unit="texts", min=1)
    min_new_tokens: int = option(1, "leave out shorter answers", unit="tokens", min=1)
    only_ended: bool = option(False, "leave out answers that do not end")
    max_repetition: float | None = option(None, "leave out what zlib makes smaller by more; default: none", above=1)
    not_in: tuple[str, ...] = common((), "evaluation texts: leave out what shares 13 tokens with one", unit="list")


@settings
class CacheGenerateOptions(CacheBuildOptions):
    """`qat-lora cache generate`; its `--dataset` holds the prompts."""

    write: WriteConfig = option(WriteConfig, "texts that a model writes; --dataset holds prompts for it")
    text: TextConfig = option(TextConfig, "the prompts", without=("weight_field",))
    run: RunConfig = option(RunConfig, "run", without=("chips",))

    def __post_init__(self) -> None:
        if self.dry_run or self.builder != "0/1":
            raise ConfigError("dry_run, builder: do not go with text that is yet to be written; leave them out")
        if self.write.writer is None and (self.teacher is None or self.served.teacher_url):
            raise ConfigError("writer: missing; give --writer FOLDER, or a --teacher that is no server's")
        if self.text.dataset is None and self.write.texts is None:
            raise ConfigError("texts: missing; give --texts, or prompts as --dataset")
        if self.write.max_new_tokens >= self.length:
            raise ConfigError(f"max_new_tokens: give fewer than --length {self.length}, which holds the prompt too")
        self.of_texts("texts", None)  # refuses what the cache cannot hold before anything is written

    def of_texts(self, folder: str, out: str | None) -> CacheBuildOptions:
        """Return the settings of the cache of texts that were written to a folder."""
        given = {field.name: getattr(self, field.name) for field in fields(CacheBuildOptions)}
        text, run = TextConfig(dataset=folder, glob=("*.jsonl",)), replace(self.run, out=out)
        return CacheBuildOptions(**given | {"text": text, "run": run})


@settings
class RoundsOptions:
    """`qat-lora rounds`."""

    checkpoint: str | None = common(None, "quantised student, made by `qat-lora quantize`", required=True)
    kd_cache_dir: str | None = common(None, "KD cache that the run begins with", required=True, alias="cache_dir")
    dataset: str | None = common(None, "prompts for the student", required=True)
    rounds: int = common(3, "times that the student writes, evenly over the steps", unit="rounds", min=1)
    round_texts: int | None = common(None, "texts of a round; default: one a prompt", unit="texts", min=1)
    max_steps: int = common(1000, "optimizer steps of the whole run", unit="steps", min=2)
    later_share: float = common(0.25, "share of a step's rows that are of the newest round", above=0, max=1)
    recover: str = option("", "more settings of `recover`, as NAME=VALUE with spaces between")
    generate: str = option("", "more settings of `cache generate`, in the same way")
    run: RunConfig = option(RunConfig, "run", without=("chips", "tpu", "overwrite"))
