"""The forms that a student can be exported in: one entry each, and the two functions that their modules provide.

A form is added with a module that has `plan` and `usage`, an entry in `FORMS`, and its name in the `--form` option.
The table names modules as text, since two of them need a package of the extra `export`.
"""

from __future__ import annotations

import importlib
from typing import NamedTuple

from qat_lora.export.job import ExportJob, ExportPlan
from qat_lora.extras import require


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
