"""Adapter and base as one folder: what PEFT opens, and beside it, in `base/`, the one base that it fits.

An adapter is worth nothing without the exact codes that it corrects, and the peers ship it alone, with a path of the
trainer's disk as its base's name. Here files are copied byte for byte, so the fingerprint that the adapter carries
stays that of the base, and is checked again on the copy.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from qat_lora.errors import ModelError
from qat_lora.export.card import shown
from qat_lora.files.checksums import NOTE, check_folder, read_object, seal
from qat_lora.files.identity import checkpoint_sha256
from qat_lora.models.adapter import CONFIG, WEIGHTS, read_adapter
from qat_lora.models.load import copy_tokenizer

BASE = "base"


def save_pair(adapter: Path, base: Path, out: Path) -> None:
    """Copy an adapter and its base into one folder.

    Raises:
        ModelError: the adapter belongs to another base.
    """
    info = read_adapter(adapter)
    check_folder(base)
    (out / BASE).mkdir(parents=True)
    for file in sorted([*base.glob("model*.safetensors"), *base.glob("model*.index.json")]):
        shutil.copyfile(file, out / BASE / file.name)
    config = read_object(base / "config.json")
    _forget_folders(config)
    _write(config, out / BASE / "config.json")
    copy_tokenizer(base, out / BASE)
    copy_generation(base, out / BASE)
    seal(out / BASE)
    if info.base_sha256 not in (None, checkpoint_sha256(out / BASE, info.base_sha256)):
        raise ModelError(f"adapter: {adapter} belongs to another base than {base}, which changed meanwhile")
    shutil.copyfile(adapter / WEIGHTS, out / WEIGHTS)
    copy_tokenizer(base, out)
    save_settings(adapter, out, BASE, checkpoint_sha256(out / BASE))


def save_settings(adapter: Path, out: Path, base: str, base_sha256: str) -> None:
    """Write an adapter's settings, for a base under another name and with its fingerprint, and all checksums."""
    _write({**read_object(adapter / CONFIG), "base_model_name_or_path": base}, out / CONFIG)
    note = read_object(adapter / NOTE) if (adapter / NOTE).is_file() else {}
    _write({**note, "base_sha256": base_sha256}, out / NOTE)
    seal(out)


def copy_generation(source: Path, out: Path) -> None:
    """Copy how a model generates, where its folder says so."""
    file = source / "generation_config.json"
    if file.is_file():
        shutil.copyfile(file, out / file.name)


def _forget_folders(config: dict[str, Any]) -> None:
    """Cut the path of the full-precision model, for people only, to its last part."""
    details = (config.get("quantization_config") or {}).get("details") or {}
    if "model" in details:
        details["model"] = shown(str(details["model"]))
    if config.get("_name_or_path"):
        config["_name_or_path"] = shown(str(config["_name_or_path"]))


def _write(values: dict[str, Any], file: Path) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
