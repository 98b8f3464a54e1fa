"""Turn the numpy batches of the cache into host tensors, one batch ahead of the work.

A thread and not loader processes: reading a row is a copy, a checksum and a few dtype conversions, all of
which release the interpreter lock, so a thread overlaps them with compute and costs no pickling, no second
copy of the dataset and no forked process beside a live accelerator client (which TPUs do not survive). The
queue holds one batch: more would only use memory, since the reader is faster than any step.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Generator, Iterable
from typing import Any, TypeVar

import numpy as np
import torch

from qat_lora.types import Batch

S = TypeVar("S")
T = TypeVar("T")

_NUMPY_DTYPES: dict[torch.dtype, Any] = {
    torch.bool: np.bool_,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.float32: np.float32,
}


def tensor_dtype(name: str, floating: bool, boolean: bool) -> torch.dtype | None:
    """Return the dtype an array of a batch has on the device, None for "as it is".

    Ids that index a table (`input_ids`, `head_ids`) are int64 because torch's gathers take nothing else;
    `document_ids` are only compared, so they stay int32.
    """
    if name.endswith("_mask") or boolean:
        return torch.bool
    if name == "document_ids":
        return torch.int32
    if name.endswith("_ids"):
        return torch.int64
    return torch.float32 if floating else None


def host_tensors(batch: Batch) -> Batch:
    """Return the batch with every array as a CPU tensor of its own memory.

    The copy is wanted: tensors that are on their way to a device must not change under the transfer, and arrays that
    are read-only cannot be tensors. Values that are no arrays are passed through.
    """
    tensors: Batch = {}
    for name, value in batch.items():
        if isinstance(value, np.ndarray):
            dtype = tensor_dtype(name, value.dtype.kind == "f", value.dtype.kind == "b")
            numpy_dtype = value.dtype if dtype is None else _NUMPY_DTYPES[dtype]
            tensors[name] = torch.from_numpy(np.array(value, dtype=numpy_dtype, order="C"))
        elif isinstance(value, torch.Tensor):
            dtype = tensor_dtype(name, value.is_floating_point(), value.dtype == torch.bool)
            tensors[name] = value if dtype is None else value.to(dtype)
        else:
            tensors[name] = value
    return tensors


class _End:
    """What the reading thread puts last: the exception it ended on, if any."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


def prefetch(source: Iterable[S], prepare: Callable[[S], T]) -> Generator[T, None, None]:
    """Yield `prepare(item)` for every item, the next one made by a thread while this one is in use.

    An exception of the source or of `prepare` is raised here, after the items before it. When the consumer
    stops early (`close()`, `break`, an exception) the thread ends, and is gone before control returns. The
    source is therefore read up to two items further than it was consumed: a position to resume from has to be
    counted by the consumer.
    """
    ready: queue.Queue[Any] = queue.Queue(maxsize=1)
    stop = threading.Event()

    def read() -> None:
        end = _End()
        try:
            for item in source:
                made = prepare(item)
                if stop.is_set():
                    return
                ready.put(made)
                del item, made  # a batch in use twice would be a batch too many in memory
        except BaseException as error:
            end = _End(error)
        if not stop.is_set():
            ready.put(end)

    thread = threading.Thread(target=read, name="qat-lora-feed", daemon=True)
    thread.start()
    try:
        while True:
            item = ready.get()
            if isinstance(item, _End):
                if item.error is not None:
                    raise item.error
                return
            yield item
            del item
    finally:
        stop.set()
        # `stop` is looked at before every put, so at most one put is still to come, and one free slot lets it
        # through: no timeout, no polling.
        while not ready.empty():
            ready.get_nowait()
        if thread is not threading.current_thread():  # the garbage collector may close us from any thread
            thread.join()
