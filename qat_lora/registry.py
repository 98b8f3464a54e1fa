"""Every command, registered once: its words, its function, its settings and what it requires of the machine.

The command line, the Python API, the launcher and the doctor read this table. It imports no command: functions are
named here and imported when they run, after the device was chosen, because transformers decides at import whether
PyTorch/XLA is used.
"""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple


class Requirements(NamedTuple):
    """What a planned run takes of the machine, in bytes."""

    what: str  # the run, for people
    memory: int  # of the device; with a CPU, of the host
    host: int
    disk: int
    device: str = "auto"  # where it is to run


class DryRun(NamedTuple):
    """What a command would do."""

    report: dict[str, Any]
    text: str  # the same for people
    requirements: Requirements


Device = Literal["none", "one chip", "several chips"]
SEVERAL: Device = "several chips"


@dataclass(frozen=True)
class Command:
    """One command; functions are named as "package.module:name"."""

    words: str
    function: str  # called with options and runtime; without `options`, a command of click that reads its own words
    help: str
    options: str = ""  # class in qat_lora.options
    device: Device = "one chip"
    plan: str = ""  # returns its `DryRun` from the options, by shapes alone
    first_words: Mapping[str, str] = field(default_factory=dict)  # setting -> how --help calls a word without a name
    advice: str = "qat_lora.plan.advice:advise"  # says, from the options, what to lower where memory was too little

    def load(self, name: Literal["function", "plan", "advice"] = "function") -> Any:
        """Import one of the functions."""
        return _named(getattr(self, name))

    def options_class(self) -> Any:
        """Import the class of the settings."""
        return _named(f"qat_lora.options:{self.options}")


def _named(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


def _command(
    words: str, help: str, options: str = "", device: Device = "one chip", plan: str = "", at: str = "", **first: str
) -> Command:
    group, _, word = words.rpartition(" ")
    function = at or (f"{group}_files:{word}" if group else f"{word}:{word}")
    plan = plan and f"qat_lora.plan.{plan}"
    return Command(words, f"qat_lora.commands.{function}", help, options, device, plan, first)


# Words, line of help, class in `options`, device; the function in `plan`, and in `commands` where it is not
# `WORD:WORD`, of a group `GROUP_files:WORD`; words without a name.
_COMMANDS = (
    _command("demo", "Train, damage and recover a small model on this machine.", "DemoOptions"),
    _command(
        "cache build", "Write a teacher's logits to a KD cache.", "CacheBuildOptions", SEVERAL, at="cache:build_cache"
    ),
    _command(
        "cache audit", "Compare a cache with its teacher.", "AuditOptions", at="cache:audit_cache", kd_cache_dir="PATH"
    ),
    _command("cache verify", "Read every byte of a cache; exit code 1 and the shard's name on any damage."),
    _command("cache info", "Show what is in a cache: sizes, head, tail mass, a few rows."),
    _command("cache export", "Write a cache's rows in a form that other tools read.", at="cache_files:export_cache"),
    _command("cache pack", "Make a cache smaller for moving it, without loss; unpack it before training from it."),
    _command("cache unpack", "Write the cache that was packed, bit for bit."),
    _command("cache push", "Send a finished cache to the Hub as a dataset repository, private by default."),
    _command("cache pull", "Fetch a cache from the Hub and verify every byte."),
    _command("fleet", "Print the manifest by which a scheduler runs n builders of one cache."),
    _command(
        "quantize", "Quantise a model and prepare its adapter start.", "QuantizeOptions", plan="quantize:plan_quantize"
    ),
    _command(
        "recover", "Train a recovery adapter from a KD cache.", "RecoverOptions", SEVERAL, plan="training:plan_recover"
    ),
    _command(
        "qat", "Train a quantised model's scales, tables, norms or weights.", "QatOptions", SEVERAL, "training:plan_qat"
    ),
    _command("eval", "Score models against a teacher on held-out text.", "EvalOptions", at="evaluate:evaluate"),
    _command("export", "Write a student in a form other tools load.", "ExportOptions"),
    _command("generate", "Continue a prompt.", "GenerateOptions"),
    _command("chat", "Talk with a model on the terminal.", "ChatOptions", at="generate:chat", student="STUDENT"),
    _command("push", "Upload an export to the Hub.", "PushOptions", "none", folder="FOLDER", repo="REPO"),
    _command("smoke", "Check device, data, training and checkpoints.", "SmokeOptions"),
    _command("estimate", "Estimate the memory a run will need.", "EstimateOptions", "none"),
    _command("doctor", "Check Python, packages, devices, variables, Hub and room, also for a planned COMMAND."),
    _command("examples", "Write the recipes, notebooks and scripts that the pages name into this folder."),
    _command(
        "bench",
        "Show what was claimed, asked and reached in one table, or run the benchmark NAME with its own arguments.",
    ),
)
# Shown by the `--help` of their commands.
EXAMPLES = """
qat-lora cache build --teacher Qwen/Qwen3-0.6B --dataset notes/ --length 512 --eval-rows 32
qat-lora cache build --teacher Qwen/Qwen3-0.6B --dataset chats.jsonl --top-k 64 --dry-run
qat-lora quantize --model Qwen/Qwen3-0.6B --preset q2_0 --kd-cache-dir caches/notes_L512_K128
qat-lora quantize --model Qwen/Qwen3-0.6B --target-size 232MB --for llama.cpp --dataset notes/
qat-lora recover --checkpoint runs/Qwen3-0.6B_q2_0 --kd-cache-dir caches/notes_L512_K128
qat-lora recover --checkpoint runs/Qwen3-0.6B_q2_0 --objective sft --dataset chats.jsonl --epochs 3
qat-lora qat --from-scratch --preset q4_r32 --kd-cache-dir caches/notes_L512_K128 --num-chips all
qat-lora qat --checkpoint runs/v2_q4 --train-parts scales,norms --kd-cache-dir caches/notes_L512_K128
qat-lora eval --teacher Qwen/Qwen3-0.6B --students runs/recovery_Qwen3-0.6B_q2_0 --dataset news.txt
qat-lora eval --teacher Qwen/Qwen3-0.6B --students runs/Qwen3-0.6B_q2_0 --dataset notes/ --tasks arc_easy
qat-lora export --student runs/recovery_Qwen3-0.6B_q2_0 --form gguf
qat-lora export --student runs/recovery_Qwen3-0.6B_q2_0 --form mlx --scores runs/eval
qat-lora estimate --model Qwen/Qwen3-0.6B --preset q2_0 --length 1024 --for v6e-1,h100
"""
COMMANDS = {command.words: command for command in _COMMANDS}
