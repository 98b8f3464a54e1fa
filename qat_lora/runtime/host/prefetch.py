"""Turn the numpy batches of the cache into host tensors, ahead of the work.

A thread and not loader processes: reading a row is a copy, a checksum and a few dtype conversions, all of
which release the interpreter lock, so a thread overlaps them with compute and costs no pickling, no second
copy of the dataset and no forked process next to a live accelerator client (which TPUs do not survive). Two
items are made ahead: more would only use memory, since the reader is faster than any step.
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

THREAD = "qat-lora-prefetch"


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

    The copy is wanted: tensors on their way to a device must not change during the transfer, and read-only arrays
    cannot be tensors. Values that are not arrays are passed through.
    """
    tensors: Batch = {}
    for name, value in batch.items():
        if isinstance(value, np.ndarray):
            dtype = tensor_dtype(name, value.dtype.kind == "f", value.dtype.kind == "b")
            numpy_dtype = value.dtype if dtype is None else str(dtype).removeprefix("torch.")
            tensors[name] = torch.from_numpy(np.array(value, dtype=numpy_dtype, order="C"))
        elif isinstance(value, torch.Tensor):
            dtype = tensor_dtype(name, value.is_floating_point(), value.dtype == torch.bool)
            tensors[name] = value if dtype is None else value.to(dtype)
        else:
            tensors[name] = value
    return tensors


_END = object()
_HANGING_S = 10.0


def prefetch(source: Iterable[S], prepare: Callable[[S], T]) -> Generator[T, None, None]:
    """Yield `prepare(item)` for every item; a thread makes the next two while one is in use.

    An exception of the source or of `prepare` is raised here, after the items before it. When the consumer
    stops early (`close()`, `break`, an exception) the thread ends, and is gone before control returns, unless a read
    hangs (a network disk that is gone): no process waits for that to end. The source is therefore read up to two items
    further than it was consumed: a position to resume from has to be counted by the consumer.
    """
    items = iter(source)
    made: queue.SimpleQueue[tuple[Any, BaseException | None]] = queue.SimpleQueue()
    room, stopped = threading.Semaphore(2), threading.Event()

    def make() -> T | object:  # a function, so that no name keeps an item while the next one is waited for
        for item in items:
            return prepare(item)
        return _END

    def read() -> None:
        try:
            while room.acquire() and not stopped.is_set():
                made.put((make(), None))
        except BaseException as error:
            made.put((_END, error))

    reader = threading.Thread(target=read, name=THREAD, daemon=True)
    reader.start()
    try:
        while True:
            item, error = made.get()
            if error is not None:
                raise error
            if item is _END:
                return
            room.release()
            yield item
            del item  # a batch in use twice would be a batch too many in memory
    finally:
        stopped.set()
        room.release()
        if reader is not threading.current_thread():  # the garbage collector may close us from any thread
            reader.join(_HANGING_S)
