"""Adapter and base as one folder: PEFT opens the folder, and `base/` in it is the one base that the adapter fits.

An adapter is worth nothing without the exact codes that it corrects, and other tools export it alone, with a path on
the trainer's disk as the name of its base. Here the weights are copied byte for byte, so the base keeps the fingerprint
that the adapter carries, and the copy is checked against it.
"""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from qat_lora.errors import ModelError
from qat_lora.evaluate.report import save_json
from qat_lora.export.forms import ExportJob, ExportPlan, display_name
from qat_lora.files.checksums import NOTE, TOKENIZER, check_folder, checkpoint_sha256, read_object, seal
from qat_lora.layers.convert import lora_layers
from qat_lora.layers.experts import siblings_of
from qat_lora.models.adapter import CONFIG, WEIGHTS, read_adapter
from qat_lora.models.copies import GENERATION, copy_files, copy_tokenizer

BASE = "base"
DROPPED = (
    "PEFT 0.21 takes the experts for fused ones and leaves their factors out, with a warning; qat-lora loads them, so "
    "does PEFT on a compressed-tensors export, and merged and GGUF exports hold them"
)


def plan(job: ExportJob) -> ExportPlan:
    """Return what copies a student's adapter and base; ModelError: the student has no adapter."""
    adapter, base = job.adapter, job.student.model.folder
    if adapter is None:
        raise ModelError(f"student: {job.name} has no adapter; give the folder of a `qat-lora recover` run")
    module = job.student.model.module
    drops = module.config.model_type != "mixtral" and any(map(siblings_of, lora_layers(module)))
    return ExportPlan(lambda out: save_pair(adapter, base, out), notes=(DROPPED,) if drops else ())


def save_pair(adapter: Path, base: Path, out: Path) -> None:
    """Copy an adapter and its base into one folder; ModelError: the adapter belongs to another base."""
    info = read_adapter(adapter)
    check_folder(base)
    (out / BASE).mkdir(parents=True)
    copy_files(base, out / BASE, "model*.safetensors", "model*.index.json", GENERATION, *TOKENIZER)
    save_json(_without_paths(read_object(base / "config.json")), out / BASE / "config.json")
    seal(out / BASE)
    if info.base_sha256 not in (None, checkpoint_sha256(out / BASE)):
        raise ModelError(f"adapter: {adapter} belongs to another base than {base}, which changed meanwhile")
    save_adapter_copy(adapter, out, BASE, checkpoint_sha256(out / BASE))
    copy_tokenizer(base, out)
    seal(out)


def with_adapter(job: ExportJob, save: Callable[[Path], None]) -> Callable[[Path], None]:
    """Return what writes a packed base by `save`, and beside it the adapter in PEFT's layout."""

    def write(out: Path) -> None:
        save(out)
        copy_files(job.student.model.folder, out, GENERATION)
        if job.adapter is not None:
            (out / "adapter").mkdir()
            save_adapter_copy(job.adapter, out / "adapter", "..", checkpoint_sha256(out))

    return write


def save_adapter_copy(adapter: Path, out: Path, base: str, base_sha256: str) -> None:
    """Copy an adapter's weights; write its settings for a base of another name and fingerprint, and the checksums."""
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
