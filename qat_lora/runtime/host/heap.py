"""Freed memory that really is free.

The C library of Linux takes blocks of up to 32 MB from one heap and keeps what is freed below anything that lives on: a
few codes among the scratch of a layer, or the tokens of a row among the encodings of a long text. The heap then grows
to several times of what is in use. Asked after every layer or window of text, the library gives those pages back; and
while a model is quantised everything larger than a megabyte has pages of its own, which a layer's products hardly
notice.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

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
