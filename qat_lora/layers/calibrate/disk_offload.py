"""Less memory for what comes layer by layer: tensors on disk.

The Fisher information of all outputs takes several times the room of a bfloat16 model, and the backward pass that
finds it adds to every layer's share with every batch. So it lies in the page cache, which the system writes out and
drops when memory is short. A file is unlinked as soon as it is mapped, so nothing is left behind however a run ends,
but for the one file that a killed run was just making; the next run in the folder removes that.
"""

from __future__ import annotations

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
Zeros = Callable[..., Tensor]
"""From a shape to a float32 tensor of zeros on the host."""


def zeros_in(folder: Path) -> Zeros:
    """Return a function that makes tensors of zeros which lie on the folder's disk, as `torch.zeros` does in memory.

    The function raises ConfigError where the disk has no room for one.
    """

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
    """Give a file its blocks now: writing to a mapping without them would kill the process when the disk is full."""
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
            "every layer; free some, choose another --out, or give --metric outputs"
        ) from None
