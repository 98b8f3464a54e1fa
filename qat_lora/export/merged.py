"""A merged dense model: codes, scales and adapter folded into ordinary weights that any tool loads.

The size advantage is gone; the recovered quality stays, for tools that know neither our codes nor adapters. The sum is
not quantised again: an adapter's change smaller than half a code step would be rounded away.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qat_lora.errors import ModelError
from qat_lora.export.forms import ExportJob, ExportPlan
from qat_lora.layers.convert import lora_layers, merge, quant_layers
from qat_lora.models.load import DTYPES, cast, copy_generation_config, save_model

LOAD_TOKENIZER = """\
from transformers import AutoModelForCausalLM, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained(".")
"""


def plan(job: ExportJob) -> ExportPlan:
    """Return what writes a student as dense weights.

    Raises:
        ModelError: nothing to merge.
    """
    model = job.student.model
    check_mergeable(model.module)

    def write(out: Path) -> None:
        save_merged(model.module, out, job.dtype)
        copy_generation_config(model.folder, out)

    return ExportPlan(write)


def usage(adapter: bool) -> str:
    """Return the Python that loads the export."""
    return LOAD_TOKENIZER + 'model = AutoModelForCausalLM.from_pretrained(".")'


def check_mergeable(module: Any) -> None:
    """Raise a ModelError if there is nothing to merge."""
    if not quant_layers(module) and not lora_layers(module):
        raise ModelError("model: has neither quantised layers nor adapters, so there is nothing to merge")


def save_merged(module: Any, out: Path, dtype: str = "float32") -> None:
    """Merge a transformers model in place and write it as an ordinary folder, without tokenizer files.

    Args:
        module: the model, in float32: weights are rounded once, after adapter and base were added.
        out: the folder.
        dtype: type of the weights, `float32` or `bfloat16`.

    Raises:
        ModelError: nothing to merge.
    """
    check_mergeable(module)
    merge(module)
    cast(module, DTYPES[dtype])
    module.hf_quantizer = None
    if hasattr(module.config, "quantization_config"):
        del module.config.quantization_config
    save_model(module, out)
