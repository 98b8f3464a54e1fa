"""Every command, registered once: its words, its function, its settings and what it requires of the machine.

Command line, Python API, launcher and doctor read this table (`commands.yaml`). It imports no command: functions are
imported when they run, after the device was chosen, because transformers decides at import whether PyTorch/XLA is used.
"""

import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml


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


@dataclass(frozen=True)
class Command:
    """One command; functions are named as "package.module:name"."""

    words: str
    function: str  # called with options and runtime, or with what its `flags` are
    help: str
    options: str = ""  # class in qat_lora.options
    device: Device = "one chip"
    plan: str = ""  # returns its `DryRun` from the options, by shapes alone
    first_words: Mapping[str, str] = field(default_factory=dict)  # setting -> how --help calls a word without a name
    flags: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # of one without `options`, for click
    advice: str = "qat_lora.plan.advice:advise"  # says, from the options, what to lower where memory was too little
    warning: str = "qat_lora.plan.advice:memory_warning"  # says, from all of this, whether memory will be too little

    def load(self, name: Literal["function", "plan", "advice", "warning"] = "function") -> Any:
        """Import one of the functions."""
        return pkgutil.resolve_name(getattr(self, name))

    def options_class(self) -> Any:
        """Import the class of the settings."""
        return pkgutil.resolve_name(f"qat_lora.options:{self.options}")


def _commands() -> dict[str, Command]:
    found: dict[str, Command] = {}
    for words, entry in yaml.safe_load(Path(__file__).with_name("commands.yaml").read_text(encoding="utf-8")).items():
        group, _, word = words.rpartition(" ")
        function = entry.pop("function", f"{group}_files:{word}" if group else f"{word}:{word}")
        plan = f"qat_lora.plan.{entry.pop('plan')}" if "plan" in entry else ""
        found[words] = Command(words, f"qat_lora.commands.{function}", plan=plan, **entry)
    return found


COMMANDS = _commands()
