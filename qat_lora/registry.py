"""Every command, registered once: its words, its function, its settings and what it asks of the machine.

The command line, the Python API, the launcher and the doctor all read this table, and it imports none of them: a
function is named here and imported when it runs, after the device was chosen, since transformers decides at import
whether PyTorch/XLA is used.
"""

from __future__ import annotations

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


@dataclass(frozen=True)
class Command:
    """One command.

    `function` is called as `function(options, runtime)`; where a command has no `options`, it is a command of the click
    library that reads its own words. `plan(options)` returns its `plan.dry_run.DryRun`, from shapes alone.
    """

    words: str
    function: str  # "package.module:name", as the paths below
    help: str
    options: str = ""  # class in qat_lora.options
    first_words: Mapping[str, str] = field(default_factory=dict)  # setting -> how --help calls a word without a name
    device: Literal["none", "one chip", "several chips"] = "one chip"
    plan: str = ""

    def load(self) -> Any:
        """Import the function."""
        return _named(self.function)

    def load_plan(self) -> Any:
        """Import the function that plans a run."""
        return _named(self.plan)

    def options_class(self) -> Any:
        """Import the class of the settings."""
        return _named(f"qat_lora.options:{self.options}")


def _named(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


COMMANDS: dict[str, Command] = {
    command.words: command
    for command in (
        Command(
            "demo",
            "qat_lora.commands.demo:demo",
            "Train, damage and recover a small model on this machine.",
            "DemoOptions",
        ),
        Command(
            "cache build",
            "qat_lora.commands.cache:build_cache",
            "Write a teacher's logits to a KD cache.",
            "CacheBuildOptions",
            device="several chips",
        ),
        Command(
            "cache audit",
            "qat_lora.commands.cache:audit_cache",
            "Compare a cache with what its teacher says.",
            "AuditOptions",
            {"kd_cache_dir": "PATH"},
        ),
        Command(
            "cache verify",
            "qat_lora.commands.cache_files:verify",
            "Read every byte of a cache; exit code 1 and the shard's name on any damage.",
        ),
        Command(
            "cache info",
            "qat_lora.commands.cache_files:info",
            "Show what is in a cache: sizes, head, tail mass, a few rows.",
        ),
        Command(
            "cache export",
            "qat_lora.commands.cache_files:export_cache",
            "Write a cache's rows in a form that other tools read.",
        ),
        Command(
            "cache pack",
            "qat_lora.commands.cache_files:pack",
            "Make a cache smaller for moving it, without loss; unpack it before training from it.",
        ),
        Command(
            "cache unpack",
            "qat_lora.commands.cache_files:unpack",
            "Write the cache that was packed, bit for bit.",
        ),
        Command(
            "quantize",
            "qat_lora.commands.quantize:quantize",
            "Quantise a model and prepare its adapter start.",
            "QuantizeOptions",
            plan="qat_lora.plan.quantize:plan_quantize",
        ),
        Command(
            "recover",
            "qat_lora.commands.recover:recover",
            "Train a recovery adapter from a KD cache.",
            "RecoverOptions",
            device="several chips",
            plan="qat_lora.plan.recover:plan_recover",
        ),
        Command(
            "qat",
            "qat_lora.commands.qat:qat",
            "Train a quantised model's own scales, tables, norms or weights.",
            "QatOptions",
            device="several chips",
            plan="qat_lora.plan.qat:plan_qat",
        ),
        Command(
            "eval",
            "qat_lora.commands.evaluate:evaluate",
            "Score models against a teacher on held-out text.",
            "EvalOptions",
        ),
        Command(
            "export",
            "qat_lora.commands.export:export",
            "Write a student in a form other tools load.",
            "ExportOptions",
        ),
        Command("generate", "qat_lora.commands.generate:generate", "Continue a prompt.", "GenerateOptions"),
        Command(
            "chat",
            "qat_lora.commands.chat:chat",
            "Talk with a model on the terminal.",
            "ChatOptions",
            {"student": "STUDENT"},
        ),
        Command(
            "push",
            "qat_lora.commands.push:push",
            "Upload an exported folder to the Hugging Face Hub.",
            "PushOptions",
            {"folder": "FOLDER", "repo": "REPO"},
            device="none",
        ),
        Command(
            "smoke",
            "qat_lora.commands.smoke:smoke",
            "Check device, data, training and checkpoints.",
            "SmokeOptions",
        ),
        Command(
            "estimate",
            "qat_lora.commands.estimate:estimate",
            "Estimate the memory a run will need.",
            "EstimateOptions",
            device="none",
        ),
        Command(
            "doctor",
            "qat_lora.commands.doctor:doctor",
            "Check Python, packages, devices, variables, Hub and room, also for a planned COMMAND.",
        ),
        Command(
            "bench",
            "qat_lora.commands.bench:bench",
            "Show what was claimed, asked and reached in one table, or run the benchmark NAME with its own arguments.",
        ),
    )
}
