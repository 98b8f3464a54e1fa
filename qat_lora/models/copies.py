"""Copies of a checkpoint's files, byte for byte, or with some of its tensors replaced."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import load_file, save_file
from torch import Tensor

from qat_lora.errors import ModelError
from qat_lora.files.checksums import TOKENIZER, check_folder, seal
from qat_lora.files.finite import check_finite

GENERATION = "generation_config.json"  # a model's default generation settings


def copy_tokenizer(source: Path, out: Path) -> None:
    """Copy tokenizer and chat template files: saving them again can change their bytes."""
    copy_files(source, out, *TOKENIZER)


def copy_files(source: Path, out: Path, *patterns: str) -> None:
    """Copy the files of a folder whose names match, as many as there are."""
    for file in (file for pattern in patterns for file in source.glob(pattern)):
        shutil.copyfile(file, out / file.name)


def save_with_tensors(folder: Path, out: Path, tensors: Mapping[str, Tensor]) -> Path:
    """Copy a checkpoint with some tensors replaced, in their types there; ModelError: one that does not fit it."""
    left = set(tensors)
    check_folder(folder)
    out.mkdir(parents=True, exist_ok=True)
    for file in sorted(folder.glob("model*.safetensors")):
        stored = load_file(file)
        for name in sorted(left & set(stored)):
            new = tensors[name].detach().cpu().to(stored[name].dtype).contiguous()
            if new.shape != stored[name].shape:
                had, wants = tuple(new.shape), tuple(stored[name].shape)
                raise ModelError(f"tensors: {name} has shape {had}, the checkpoint {folder} has {wants}")
            stored[name] = new
            left.remove(name)
        check_finite(stored, f"tensors for {out}")
        save_file(stored, out / file.name, metadata={"format": "pt"})
    if left:
        raise ModelError(f"checkpoint {folder}: lacks the tensors {', '.join(sorted(left)[:4])}")
    copy_files(folder, out, "config.json", "model.safetensors.index.json", GENERATION, *TOKENIZER)
    seal(out)
    return out
