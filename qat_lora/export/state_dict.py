"""The student as one file that `torch.load` reads: `best.pt`, which the guide's users carry between their scripts.

It holds the module's state dict and nothing else: codes, scales, adapter and dense weights under their names, plain
tensors, so that `weights_only=True` reads it and no code runs. It is pickled, so `push` refuses it; our commands read
it with `config.json` and the checksums beside it, tensors alone. `Runtime.save` writes safetensors, which
is why `torch.save` is called here; the folder that it writes into is moved into place as a whole.
"""

from pathlib import Path

import torch

from qat_lora.export.forms import ExportJob, ExportPlan
from qat_lora.files.checksums import STATE
from qat_lora.files.finite import check_finite
from qat_lora.layers.convert import lora_layers
from qat_lora.models.engine_adapter import SCALE
from qat_lora.models.load import DTYPES, cast


def plan(job: ExportJob) -> ExportPlan:
    """Return what writes a student's state dict; tensors that share memory are stored once."""
    module = job.student.model.module

    def write(out: Path) -> None:
        cast(module, DTYPES[job.dtype])
        state = {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}
        check_finite(state, f"model for {out}")
        torch.save(state, out / STATE)
        for layer in lora_layers(module).values():  # all have one
            setattr(module.config, SCALE, layer.scaling)
        module.config.save_pretrained(out)

    return ExportPlan(write)
