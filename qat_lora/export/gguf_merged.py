"""Base and adapter as one GGUF file: their sum in one dense type, for engines that take no adapter, and for Ollama.

The sum is not quantised again here, which would undo the recovery; who does that with llama.cpp's tools has then its
rounding. An Ollama `Modelfile` stands beside it: making a model of base and adapter works in some of its versions only.
"""

from pathlib import Path

from qat_lora.export import gguf_model
from qat_lora.export.forms import ExportJob, ExportPlan, display_name
from qat_lora.export.gguf import check_model, save_base
from qat_lora.files.gguf_header import BASE
from qat_lora.layers.convert import merge

USAGE = f"""\
from llama_cpp import Llama  # in a shell: llama-cli -m {BASE}; Ollama: ollama create NAME -f Modelfile

model = Llama("{BASE}")"""


def plan(job: ExportJob) -> ExportPlan:
    """Return what writes a student as one dense GGUF file of `job.dtype`, merged in place; raises as `check_model`."""
    check_model(job)
    model = job.student.model

    def write(out: Path) -> None:
        merge(model.module)
        save_base(model, {}, job.tokenizer, out / BASE, job.dtype, display_name(job.name))
        (out / "Modelfile").write_text(f"FROM ./{BASE}\n", encoding="utf-8")

    return ExportPlan(write, USAGE, notes=tuple(gguf_model.notes(model)))
