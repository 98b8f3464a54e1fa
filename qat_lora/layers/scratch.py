"""Less memory for what comes layer by layer: tensors on disk, and freed memory that really is free.

The Fisher information of all outputs takes several times the room of a bfloat16 model, and the backward pass that
finds it adds to every layer's share with every batch. So it lies in the page cache, which the system writes out and
drops when memory is short. A file is unlinked as soon as it is mapped, so nothing is left behind however a run ends,
but for the one file that a killed run was just making; the next run in the folder removes that.

Freed tensors are the other half. The C library of Linux takes those of up to 32 MB from one heap and keeps what is
freed below anything that lives on, a few codes among the scratch of a layer, say. It then grew to several times of
what was in use; asked after every layer, it gives those pages back, and while a model is quantised everything larger
than a megabyte has pages of its own, which a layer's products hardly notice.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qat_lora.errors import ConfigError
from qat_lora.files import ours

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


TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # numbers of glibc's mallopt


@functools.cache
def _c_library(name: str) -> Callable[..., Any]:
    """Return a function of the C library; one that does nothing where it is another library."""
    try:
        function: Callable[..., Any] = getattr(ctypes.CDLL(None), name)
    except (OSError, AttributeError, TypeError):
        return lambda *_: None
    return function


def give_back() -> None:
    """Return freed memory to the system, where the C library is one that keeps it."""
    _c_library("malloc_trim")(0)


@contextmanager
def large_tensors_apart() -> Iterator[None]:
    """Give every tensor above 1 MB pages of its own, which go back when it is freed."""
    mallopt = _c_library("mallopt")
    mallopt(MMAP_THRESHOLD, 1 << 20)
    try:
        yield
    finally:  # what glibc comes to by itself once a program has freed large tensors
        mallopt(MMAP_THRESHOLD, 32 << 20)
        mallopt(TRIM_THRESHOLD, 64 << 20)
