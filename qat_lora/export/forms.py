"""The forms that a student can be exported in: what the module of each is given, and what it returns.

A form is added with a module that has a `plan`, an entry in `FORMS`, its name in the `--form` option, and the Python
that loads it in `usage/`, once more where an adapter is beside it.
The table names modules as text, since two of them need a package of the extra `export`.
"""

import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from torch import Tensor

from qat_lora.export.integers import Container
from qat_lora.extras import require
from qat_lora.models.student import Student


@dataclass(frozen=True)
class ExportJob:
    """The student to export and the settings of the form."""

    name: str  # the student as the user named it
    student: Student
    adapter: Path | None  # folder of its adapter
    tokenizer: Any
    dtype: str  # of all tensors that have no type of their own: a key of `models.load.DTYPES`
    container_bits: int | None = None
    exact_only: bool = False
    embedding_bits: float | None = None  # of the embedding and of an LM head without codes; None for as they are
    importance: Callable[[], Tensor] | None = None  # `integers.head_importance`: mean square of what the LM head reads


@dataclass(frozen=True)
class ExportPlan:
    """What an export will write, once everything that could be refused has been checked."""

    write: Callable[[Path], None]  # fills an empty folder; the command adds tokenizer, model card and checksums
    # Quantised layers as the container holds them, None for one that is written dense.
    containers: Mapping[str, Container | None] = field(default_factory=dict)
    notes: tuple[str, ...] = ()  # for the model card and the terminal
    # Embedding and LM head as the container holds them, where the export quantised them.
    tables: Mapping[str, Container] = field(default_factory=dict)


def usage(form: str, adapter: bool) -> str:
    """Return the Python that loads an export, run in its folder alone, as tests and `benchmarks/consumers.py` do."""
    file = Path(__file__).with_name("usage") / f"{form}+adapter.txt"
    return (file if adapter and file.is_file() else file.with_name(f"{form}.txt")).read_text(encoding="utf-8").strip()


def display_name(path: str) -> str:
    """Return a name for people: the last part of a path, a Hub name as it is."""
    is_path = path.startswith((".", "/", "~", "\\")) or path.count("/") > 1 or os.path.exists(path)
    return PurePath(path).name if is_path else path


class Form(NamedTuple):
    """An entry of the table."""

    module: str  # has `plan(job) -> ExportPlan`, or a function of another name after a colon
    library: str  # `library_name` on the model card
    needs: str = ""  # package of the extra `export`
    dtype: str = ""  # of the dense tensors where the user names none; empty: the full-precision model's

    def plan(self, job: ExportJob) -> ExportPlan:
        """Check everything that may be refused, by a QatLoraError, and return what will be written."""
        if self.needs:
            require(self.needs, "export")
        module, _, function = self.module.partition(":")
        return getattr(importlib.import_module(f"qat_lora.export.{module}"), function or "plan")(job)


FORMS = {
    "merged": Form("plain:plan_merged", "transformers"),
    "adapter": Form("plain:plan_pair", "peft"),
    "compressed-tensors": Form("packed:plan_compressed", "transformers", "compressed_tensors"),
    "gguf": Form("gguf", "gguf", "gguf"),
    "gguf-merged": Form("gguf:plan_merged", "gguf", "gguf", "float16"),
    "gptq": Form("packed:plan_gptq", "transformers", dtype="float16"),
    "mlx": Form("mlx", "mlx", dtype="float16"),
    "pt": Form("plain:plan_state", "pytorch"),
}
SEEING = ("merged", "adapter", "compressed-tensors", "gguf", "gguf-merged")  # forms of models that see
