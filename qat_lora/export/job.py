"""What every form of an export is given, and what it returns before anything is written."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import Any

from qat_lora.export.integers import Integers
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


def display_name(path: str) -> str:
    """Return a name for people: the last part of a path, a Hub name as it is."""
    is_path = path.startswith((".", "/", "~", "\\")) or path.count("/") > 1 or os.path.exists(path)
    return PurePath(path).name if is_path else path
