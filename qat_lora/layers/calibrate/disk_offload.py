"""Tensors on disk, for what is used layer by layer.

The Fisher information of all outputs takes several times the room of a bfloat16 model, and the backward pass that
computes it adds to every layer's matrix with every batch; block-wise training keeps the hidden states of all its rows.
Mapped files let the system write pages out when memory is short. A file is unlinked as soon as it is mapped, so a run
leaves nothing behind however it ends, except the one file that a killed run was just making; the next run in the folder
removes it.
"""

import errno
import math
import os
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from qat_lora.errors import ConfigError
from qat_lora.files.folders import ours

NAME = ".scratch"
Zeros = Callable[..., Tensor]  # from a shape to a float32 tensor of zeros on the host


def zeros_in(folder: Path) -> Zeros:
    """Return the equivalent of `torch.zeros` for tensors on the folder's disk; it raises ConfigError on a full disk."""

    def zeros(*shape: int) -> Tensor:
        count = math.prod(shape)
        path = ours(folder / NAME)
        path.unlink(missing_ok=True)  # of a run that was killed right here
        try:
            with path.open("xb") as file:
                _reserve(file.fileno(), 4 * count, folder)
            return torch.from_file(str(path), shared=True, size=count, dtype=torch.float32).view(shape)
        finally:
            path.unlink(missing_ok=True)

    return zeros


def _reserve(descriptor: int, size: int, folder: Path) -> None:
    """Allocate a file's blocks now: on a full disk, writing to a mapping without them would kill the process."""
    try:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(descriptor, 0, size)
        else:
            os.truncate(descriptor, size)
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise ConfigError(
            f"out: the disk of {folder} has no room for {size / 1e6:,.0f} MB more of what --metric fisher keeps of "
            "every layer, or --blockwise of every row; free some, choose another --out, give --metric outputs or leave "
            "--blockwise out"
        ) from None
