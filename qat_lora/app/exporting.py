"""The command that writes a student for other tools."""

from __future__ import annotations

from pathlib import Path

from qat_lora import outputs
from qat_lora.app.shared import say
from qat_lora.export.merged import check_mergeable, save_merged
from qat_lora.models import copy_tokenizer
from qat_lora.options import ExportOptions
from qat_lora.runtime.base import Runtime
from qat_lora.students import open_student


def export(options: ExportOptions, runtime: Runtime) -> Path:
    """Write a student in a form that other tools load; return the folder."""
    run = options.run
    student = open_student(str(options.student), options.hub)
    check_mergeable(student.model.module)
    out = Path(run.out or f"runs/export_{Path(str(options.student)).name}_{options.form}")
    settings = {"form": options.form, "student": str(options.student), "weights": student.sha256}
    if not outputs.claim(out, "export", settings, run.overwrite):
        save_merged(student.model.module, out)
        copy_tokenizer(student.model.folder, out)
        outputs.complete(out)
    say(run, f"written to {out}")
    return out
