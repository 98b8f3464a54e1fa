"""A merged dense model: codes, scales and adapter folded into ordinary weights that any tool loads.

The size advantage is gone; the recovered quality stays, for tools that know neither our codes nor adapters. The sum is
not quantised again: an adapter's change smaller than half a code step would be rounded away.
"""

from pathlib import Path

from qat_lora.errors import ModelError
from qat_lora.export.forms import ExportJob, ExportPlan
from qat_lora.layers.convert import lora_layers, merge, quant_layers
from qat_lora.layers.experts import has_split_experts, join_experts
from qat_lora.models.copies import GENERATION, copy_files
from qat_lora.models.load import DTYPES, cast, save_model


def plan(job: ExportJob) -> ExportPlan:
    """Return what writes a student as dense weights, merged in place; ModelError: nothing to merge.

    The model is in float32 and becomes `dtype` at the end: the sum of base and adapter is rounded once.
    """
    model = job.student.model
    if not quant_layers(model.module) and not lora_layers(model.module):
        raise ModelError("model: has neither quantised layers nor adapters, so there is nothing to merge")

    def write(out: Path) -> None:
        merge(model.module)
        if has_split_experts(model.module):
            join_experts(model.module)
            model.module._weight_conversions = None  # transformers' own: it cuts them to the names of its files
        cast(model.module, DTYPES[job.dtype])
        model.module.hf_quantizer = None
        if hasattr(model.module.config, "quantization_config"):
            del model.module.config.quantization_config
        save_model(model.module, out)
        copy_files(model.folder, out, GENERATION)

    return ExportPlan(write)
