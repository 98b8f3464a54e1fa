"""What may leave for the Hub: which files of a folder, and everything that speaks against sending them.

Checked before anything is sent, since what was once public stays so: weights that run code when they are read,
a card that says nothing, an adapter beside the wrong base, paths of the sender's machine.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import NamedTuple

import yaml

from qat_lora.errors import ModelError
from qat_lora.export.adapter import CONFIG, read_adapter
from qat_lora.files import LIST, MARK
from qat_lora.models import checkpoint_sha256

PICKLES = {".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy", ".npz"}
OURS = {MARK, LIST, "config.yaml", "metrics.jsonl"}
"""Files of a run that say where it ran; they stay here."""
CARD = "README.md"
_PATH = re.compile(r'"(/[^"/]+/[^"]*|[A-Z]:\\\\[^"]*)"')  # in JSON


class Shipped(NamedTuple):
    """One file that would be sent."""

    name: str
    size_bytes: int


def files_to_ship(folder: Path) -> list[Shipped]:
    """Return the files of a folder that would be sent, by name.

    Raises:
        ModelError: the folder is missing, holds pickled weights or a link, lacks a card or weights, or an adapter
            that does not belong to the base beside it.
    """
    if not folder.is_dir():
        raise ModelError(f"folder: there is no folder {folder}; make one with `qat-lora export`")
    found = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            raise ModelError(f"folder: {name} is a link, which may lead out of {folder}; put the file itself there")
        if path.is_dir() or path.name in OURS or any(part.startswith(".") for part in name.split("/")):
            continue
        if path.suffix.lower() in PICKLES:
            raise ModelError(
                f"folder: {name} may be pickled and run code when it is read; only safetensors and gguf go"
            )
        found.append(Shipped(name, path.stat().st_size))
    if not any(file.name.endswith((".safetensors", ".gguf")) for file in found):
        raise ModelError(f"folder: {folder} holds no weights (.safetensors or .gguf); make it with `qat-lora export`")
    _check_card(folder / CARD)
    _check_adapter(folder)
    _check_paths(folder, found)
    return found


def _check_card(card: Path) -> None:
    try:
        parts = card.read_text(encoding="utf-8").split("---\n")
        front = yaml.safe_load(parts[1]) if len(parts) > 2 and not parts[0] else None
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ModelError(f"card: {card} cannot be read ({error}); `qat-lora export` writes one") from None
    if not isinstance(front, dict) or "license" not in front:
        raise ModelError(
            f"card: {card} names no licence in its front matter; `qat-lora export --license NAME` writes it"
        )


def _check_adapter(folder: Path) -> None:
    for adapter, base in ((folder, folder / "base"), (folder / "adapter", folder)):
        if not (adapter / CONFIG).is_file():
            continue
        info = read_adapter(adapter)
        if not (base / "config.json").is_file():
            raise ModelError(
                f"adapter: {adapter} would go without its base {info.base}; `qat-lora export --form adapter` puts both "
                "into one folder"
            )
        if info.base_sha256 != checkpoint_sha256(base):
            raise ModelError(f"adapter: {adapter} does not belong to the base {base} beside it; export the pair again")


def _check_paths(folder: Path, files: list[Shipped]) -> None:
    for file in files:
        if file.name.endswith((".json", ".md", ".yaml")) and "tokenizer" not in file.name:
            text = (folder / file.name).read_text(encoding="utf-8")
            if match := _PATH.search(text):
                raise ModelError(f"folder: {file.name} names a path of this machine ({match[1]}); take it out first")


def summary(folder: Path, files: list[Shipped]) -> dict[str, object]:
    """Return what is sent as plain values."""
    result = folder / "result.json"
    made = json.loads(result.read_text(encoding="utf-8")) if result.is_file() else {}
    return {
        "form": made.get("form"),
        "size_bytes": sum(file.size_bytes for file in files),
        "files": {file.name: file.size_bytes for file in files},
    }
