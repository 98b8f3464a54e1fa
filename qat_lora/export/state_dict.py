"""The student as one file that `torch.load` reads: `best.pt`, which the guide's users carry between their scripts.

It holds the module's state dict and nothing else: codes, scales, adapter and dense weights under their names, plain
tensors, so that `weights_only=True` reads it and no code runs. Such a file has no config and no fingerprint, and it is
pickled: our own commands load the other forms, and `push` refuses this one. `Runtime.save` writes safetensors, which
is why `torch.save` is called here; the folder that it writes into is moved into place as a whole.
"""

from pathlib import Path

import torch

from qat_lora.export.forms import ExportJob, ExportPlan
from qat_lora.files.finite import check_finite
from qat_lora.models.load import DTYPES, cast

FILE = "best.pt"


def plan(job: ExportJob) -> ExportPlan:
    """Return what writes a student's state dict; tensors that share memory are stored once."""
    module = job.student.model.module

    def write(out: Path) -> None:
        cast(module, DTYPES[job.dtype])
        state = {name: tensor.detach().cpu() for name, tensor in module.state_dict().items()}
        check_finite(state, f"model for {out}")
        torch.save(state, out / FILE)

    return ExportPlan(write)
