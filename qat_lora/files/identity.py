"""The identity of a base, teacher or adapter: one sha256 over its weights and the settings that change its output.

Weights alone do not define a model: with another `rms_norm_eps` the same bytes compute something else. So settings
count too, except those that change nothing, such as the version that wrote them or notes for people. Earlier versions
noted the hash of the weights alone. It is still accepted: a note that contains exactly that hash must be an old one.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from qat_lora.errors import ModelError
from qat_lora.files.checksums import read_object, sha256_of
from qat_lora.files.gguf_header import GGUF

CHANGES_NOTHING = ("transformers_version", "_name_or_path", "architectures", "base_model_name_or_path")


def checkpoint_sha256(folder: Path, noted: str | None = None) -> str:
    """Return the identity of a folder with weights, and `config.json` or `adapter_config.json`; a GGUF file's sha256.

    Where `noted`, what an earlier run wrote about it, names the weights alone, so does the result.

    Raises:
        ModelError: it holds no weights, or its settings are no JSON object.
    """
    if folder.suffix == GGUF and folder.is_file():
        return sha256_of(folder)
    weights = weights_sha256(folder)
    if noted and weights in noted:
        return weights
    files = (folder / "config.json", folder / "adapter_config.json")
    settings = [_canonical(read_object(file)) for file in files if file.is_file()]
    return hashlib.sha256(json.dumps([weights, *settings], sort_keys=True).encode()).hexdigest()


def weights_sha256(folder: Path) -> str:
    """Return the sha256 over a folder's weight files, names and bytes.

    Where there are files of model weights, others (adapter starts, a second format) are left out: what is beside the
    weights must not make a base another one.
    """
    digest = hashlib.sha256()
    for file in sorted(folder.glob("model*.safetensors")) or weight_files(folder):
        digest.update(file.name.encode())
        digest.update(bytes.fromhex(sha256_of(file)))
    return digest.hexdigest()


def weight_files(folder: Path) -> list[Path]:
    """Return a folder's weight files; ModelError if there are none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"model: {folder} holds no .safetensors weights (pickled weights are not read)")
    return files


def _canonical(settings: dict[str, Any]) -> dict[str, Any]:
    """Return what decides in a model's settings; the type of its weights under the newer of its two names."""
    kept = {name: value for name, value in settings.items() if name not in CHANGES_NOTHING}
    if "torch_dtype" in kept:
        kept.setdefault("dtype", kept.pop("torch_dtype"))
    if isinstance(quantization := kept.get("quantization_config"), dict):
        kept["quantization_config"] = {name: value for name, value in quantization.items() if name != "details"}
    return kept
