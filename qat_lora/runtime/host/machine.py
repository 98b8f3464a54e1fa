"""The machine: memory of this process, and its name, without which no figures compare.

`peak_memory_bytes` asks the device, or on a host the system, whose figure includes whatever an allocator kept.
`LiveBytes` counts tensors at torch's dispatcher, on any device; buffers inside one kernel are not seen.

The C library of Linux takes blocks of up to 32 MB from one heap and keeps what is freed below anything that stays
alive, so the heap grows to several times what is in use. `give_back`, called after every layer or window of text,
returns those pages; `large_tensors_apart`, while a model is quantised, gives large tensors pages of their own.
"""

import ctypes
import functools
import importlib.metadata
import importlib.util
import os
import platform
import re
import resource
import sys
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PACKAGES = ("torch", "torch_xla", "transformers", "numpy")
CPUINFO = Path("/proc/cpuinfo")
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # numbers of glibc's mallopt


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most bytes in use so far on a CUDA or MPS device or a TPU, of this process's memory elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    if device.type == "mps":
        return torch.mps.driver_allocated_memory()
    if device.type == "xla":
        from qat_lora.runtime.xla.runtime import device_peak_bytes

        on_device = device_peak_bytes(device)
        if on_device is not None:
            return on_device
    status = Path("/proc/self/status")  # getrusage counts what the process that started this one held as well
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.is_file() else None
    if found:
        return int(found[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class LiveBytes(TorchDispatchMode):
    """Counts bytes of tensors while it is active, each storage from the operation that first returns it until it is
    freed; use as a context manager. `held` are alive already.
    """

    def __init__(self, *held: torch.Tensor) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._seen: dict[int, Any] = {}
        for tensor in held:
            self._count(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count its results."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen or not size:
            return
        self.now += size
        self.peak = max(self.peak, self.now)
        self._seen[key] = weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._seen.pop(key, None)
        self.now -= size


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
def large_tensors_apart(least_mb: int = 2) -> Iterator[None]:
    """Give tensors from so many MB on (2: a large page) pages of their own, which go back when they are freed.

    With 16 the solvers, which make many of 2 to 16 MB, take a quarter less time, a training step a tenth more memory.
    """
    mallopt = _c_library("mallopt")
    mallopt(MMAP_THRESHOLD, least_mb << 20)
    mallopt(TRIM_THRESHOLD, 2 * least_mb << 20)  # of smaller ones so much stays for the next
    try:
        yield
    finally:  # the values that glibc arrives at by itself once a program has freed large tensors
        mallopt(MMAP_THRESHOLD, 32 << 20)
        mallopt(TRIM_THRESHOLD, 64 << 20)


def made_with(cpuinfo: Path = CPUINFO) -> dict[str, str]:
    """Return `date`, `machine` (cores that this process may use, and their model) and `versions`."""
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", cpuinfo.read_text(encoding="utf-8"), re.M)
    except OSError:
        found = None
    model = found[1] if found else platform.processor() or platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    here = {name: importlib.metadata.version(name) for name in PACKAGES if importlib.util.find_spec(name)}
    versions = {"Python": platform.python_version()} | here
    return {
        "date": date.today().isoformat(),
        "machine": f"{cores} core{'s' * (cores > 1)} of {model}",
        "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
    }
