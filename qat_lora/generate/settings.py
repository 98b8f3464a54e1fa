"""What a user can set of `cache generate`: which texts a model writes, and the cache that is made of them."""

from dataclasses import fields, replace
from typing import Literal

from qat_lora.config import common, option, settings
from qat_lora.data.sources import TextConfig
from qat_lora.errors import ConfigError
from qat_lora.options import CacheBuildOptions, RunConfig


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
