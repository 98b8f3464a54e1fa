"""The forms that pack nothing: dense merged weights, adapter and base as they are, one file for `torch.load`.

`merged` folds codes, scales and adapter into ordinary weights that any tool loads. The size advantage is gone; the
recovered quality stays. The sum is not quantised again: a change smaller than half a code step would be rounded away.

`adapter` is one folder that PEFT opens, and `base/` in it is the one base that the adapter fits: an adapter is worth
nothing without the exact codes that it corrects, and other tools export it alone, with a path on the trainer's disk as
the name of its base. The weights are copied byte for byte, so the base keeps the fingerprint that the adapter carries.

`pt` is `best.pt`, which the guide's users carry between their scripts: the module's state dict and nothing else, plain
tensors, so that `weights_only=True` reads it and no code runs. It is pickled, so `push` refuses it; our commands read
it with `config.json` and the checksums beside it. `torch.save` is called here, since `Runtime.save` writes safetensors.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from qat_lora.errors import ModelError
from qat_lora.evaluate.report import save_json
from qat_lora.export.forms import ExportJob, ExportPlan, display_name
from qat_lora.files.checksums import NOTE, STATE, TOKENIZER, check_folder, checkpoint_sha256, read_object, seal
from qat_lora.files.finite import check_finite
from qat_lora.layers.convert import lora_layers, merge, quant_layers
from qat_lora.layers.experts import has_split_experts, join_experts, siblings_of
from qat_lora.models.adapter import CONFIG, SCALE, WEIGHTS, read_adapter, save_adapter
from qat_lora.models.copies import GENERATION, copy_files, copy_tokenizer
from qat_lora.models.load import DTYPES, add_older_names, cast, save_model
from qat_lora.models.multimodal import add_rest

BASE = "base"
DROPPED = (
    "PEFT 0.21 takes the experts for fused ones and leaves their factors out, with a warning; qat-lora loads them, so "
    "does PEFT on a compressed-tensors export, and merged and GGUF exports hold them"
)


def plan_merged(job: ExportJob) -> ExportPlan:
    """Return what writes a student as dense weights, its float32 sum rounded once; ModelError: nothing to merge."""
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
        add_rest(model, out)
        copy_files(model.folder, out, GENERATION)

    return ExportPlan(write)


def plan_pair(job: ExportJob) -> ExportPlan:
    """Return what copies a student's adapter and base; ModelError: the student has no adapter."""
    if job.adapter is None and job.student.start is None:
        raise ModelError(f"student: {job.name} has no adapter; give the folder of a `qat-lora recover` run")
    module = job.student.model.module
    drops = module.config.model_type != "mixtral" and any(map(siblings_of, lora_layers(module)))

    def write(out: Path) -> None:
        save_pair(_folder_of_adapter(job, out), job.student.model.folder, out)

    return ExportPlan(write, notes=(DROPPED,) if drops else ())


def _folder_of_adapter(job: ExportJob, out: Path) -> Path:
    """Return the folder of a student's adapter: its own, or `out`, into which its start is written."""
    if job.adapter is not None:
        return job.adapter
    assert job.student.start is not None  # as the callers see to
    model, base = job.student.model.module, job.student.model.folder
    save_adapter(model, job.student.start, out, base, checkpoint_sha256(base))
    return out


def save_pair(adapter: Path, base: Path, out: Path) -> None:
    """Copy an adapter and its base into one folder; ModelError: the adapter belongs to another base."""
    info = read_adapter(adapter)
    check_folder(base)
    (out / BASE).mkdir(parents=True)
    copy_files(base, out / BASE, "model*.safetensors", "model*.index.json", GENERATION, *TOKENIZER)
    save_json(_without_paths(read_object(base / "config.json")), out / BASE / "config.json")
    if info.base_sha256 not in (None, checkpoint_sha256(out / BASE)):
        raise ModelError(f"adapter: {adapter} belongs to another base than {base}, which changed meanwhile")
    add_older_names(out / BASE)
    seal(out / BASE)
    save_adapter_copy(adapter, out, BASE, checkpoint_sha256(out / BASE))
    copy_tokenizer(base, out)
    seal(out)


def with_adapter(job: ExportJob, save: Callable[[Path], None]) -> Callable[[Path], None]:
    """Return what writes a packed base by `save`, and beside it the adapter in PEFT's layout."""

    def write(out: Path) -> None:
        save(out)
        add_rest(job.student.model, out)
        copy_files(job.student.model.folder, out, GENERATION)
        if job.adapter is not None or job.student.start is not None:
            (out / "adapter").mkdir()
            adapter = _folder_of_adapter(job, out / "adapter")
            save_adapter_copy(adapter, out / "adapter", "..", checkpoint_sha256(out))

    return write


def save_adapter_copy(adapter: Path, out: Path, base: str, base_sha256: str) -> None:
    """Copy an adapter's weights; write its settings for a base of another name and fingerprint, and the checksums.

    The adapter may lie in `out` already.
    """
    if adapter != out:
        shutil.copyfile(adapter / WEIGHTS, out / WEIGHTS)
    save_json({**read_object(adapter / CONFIG), "base_model_name_or_path": base}, out / CONFIG)
    note = read_object(adapter / NOTE) if (adapter / NOTE).is_file() else {}
    save_json({**note, "base_sha256": base_sha256}, out / NOTE)
    seal(out)


def _without_paths(config: dict[str, Any]) -> dict[str, Any]:
    """Cut the path of the full-precision model, which is there for people only, to its last part."""
    details = (config.get("quantization_config") or {}).get("details") or {}
    if "model" in details:
        details["model"] = display_name(str(details["model"]))
    if config.get("_name_or_path"):
        config["_name_or_path"] = display_name(str(config["_name_or_path"]))
    return config


def plan_state(job: ExportJob) -> ExportPlan:
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
        add_older_names(out)
        copy_files(job.student.model.folder, out, GENERATION)

    return ExportPlan(write)
