"""Write tensors so that a reader sees the old file or the whole new one, whatever happens in between."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors.torch import save_file

if TYPE_CHECKING:
    import torch


def _unshared(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return contiguous CPU tensors of which no two share memory, as safetensors demands."""
    seen: set[int] = set()
    plain = {}
    for name, tensor in state.items():
        tensor = tensor.detach().cpu().contiguous()
        memory = tensor.untyped_storage().data_ptr()
        plain[name] = tensor.clone() if memory in seen else tensor
        seen.add(memory)
    return plain


def save_tensors(state: dict[str, torch.Tensor], path: str | Path) -> None:
    """Write a safetensors file: a temporary file in the same folder, flushed to disk, then renamed.

    The file says `format: pt`, without which transformers refuses to load it. A tensor under two names is
    written twice.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(_unshared(state), temporary, metadata={"format": "pt"})
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if os.name == "posix":  # the new name lives in the folder, which other systems cannot open
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
