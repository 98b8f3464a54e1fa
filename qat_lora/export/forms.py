"""The forms that a student can be exported in: one entry each, and the two functions that their modules provide.

A form is added with a module that has `plan` and `usage`, an entry in `FORMS`, and its name in the `--form` option.
The table names modules as text, so that the modules may import this one.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from qat_lora.export.integers import Integers
from qat_lora.extras import require
from qat_lora.models.student import Student


@dataclass(frozen=True)
class ExportJob:
    """The student to export and the settings of the form."""

    name: str
    """The student as the user named it."""
    student: Student
    adapter: Path | None
    """Folder of its adapter."""
    tokenizer: Any
    dtype: str
    """Of all tensors that have no type of their own, `float32` or `bfloat16`."""
    container_bits: int | None = None
    exact_only: bool = False


@dataclass(frozen=True)
class ExportPlan:
    """What an export will write, once everything that could be refused has been checked."""

    write: Callable[[Path], None]
    """Fills an empty folder; the command adds tokenizer, model card and checksums."""
    containers: Mapping[str, Integers | None] = field(default_factory=dict)
    """Quantised layers as the container holds them; None for a layer that is written dense."""
    notes: tuple[str, ...] = ()
    """For the model card and the terminal."""


class Form(NamedTuple):
    """An entry of the table."""

    module: str
    """Has `plan(job) -> ExportPlan`, and `usage(adapter) -> str`: the Python that loads an export with or without an
    adapter, run in its folder with nothing before it (tests and `benchmarks/consumers.py` run it)."""
    library: str
    """`library_name` on the model card."""
    needs: str = ""
    """Package of the extra `export`."""

    def plan(self, job: ExportJob) -> ExportPlan:
        """Check everything that may be refused, by a QatLoraError, and return what will be written."""
        if self.needs:
            require(self.needs, "export")
        return importlib.import_module(self.module).plan(job)

    def usage(self, adapter: bool) -> str:
        """Return the Python that loads an export."""
        return importlib.import_module(self.module).usage(adapter)


FORMS = {
    "merged": Form("qat_lora.export.merged", "transformers"),
    "adapter": Form("qat_lora.export.pair", "peft"),
    "compressed-tensors": Form("qat_lora.export.compressed", "transformers", "compressed_tensors"),
    "gguf": Form("qat_lora.export.gguf", "gguf", "gguf"),
    "pt": Form("qat_lora.export.state_dict", "pytorch"),
}
