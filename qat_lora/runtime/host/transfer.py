"""What moves between host and device beside the work: batches ahead of it, values behind it.

Batches are prepared by a thread and not by loader processes: reading a row is a copy, a checksum and a few dtype
conversions, all of which release the interpreter lock, so a thread costs no pickling, no second copy of the dataset and
no forked process next to a live accelerator client (which TPUs do not survive).

Reading a loss where it is computed stops the device until the host has looked at it. Here the copy to the host is only
started; a callback gets the value at one of the next calls into the runtime, in the order of the calls and on the
thread that drives the runtime, so it may print, write a file or raise like any other code.
`xm.add_step_closure(run_async=True)` calls it from a thread of its own, loses what it raises, and cannot be waited for.
"""

import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch

from qat_lora.types import Batch

S = TypeVar("S")
T = TypeVar("T")

THREAD = "qat-lora-prefetch"


def device_dtype(name: str, tensor: torch.Tensor) -> torch.dtype:
    """Return the dtype that a tensor of a batch has on the device."""
    if name.endswith("_mask"):
        return torch.bool
    if name.endswith("_ids"):  # torch's gathers take int64 alone; document ids are only compared
        return torch.int32 if name == "document_ids" else torch.int64
    return torch.float32 if tensor.is_floating_point() else tensor.dtype


def host_tensors(batch: Batch) -> Batch:
    """Return the batch with every array as a CPU tensor of its own memory: none may change during its transfer."""
    tensors: Batch = {}
    for name, value in batch.items():
        value = torch.from_numpy(np.array(value, order="C")) if isinstance(value, np.ndarray) else value
        tensors[name] = value.to(device_dtype(name, value)) if isinstance(value, torch.Tensor) else value
    return tensors


_END = object()
_HANGING_S = 10.0


def prefetch(source: Iterable[S], prepare: Callable[[S], T]) -> Generator[T, None, None]:
    """Yield `prepare(item)` for every item; a thread makes the next two while one is in use.

    More than two would only use memory. An exception of the source or of `prepare` is raised here, after the items
    before it. When the consumer stops early the thread is gone before control returns, unless a read hangs (a network
    disk that is gone). A position to resume from has to be counted by the consumer.
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


def host_value(tensor: torch.Tensor) -> float | int | bool | np.ndarray:
    """Return a CPU tensor without dimensions as a number, another as an array of its own; bfloat16 as float32."""
    tensor = tensor.detach().float() if tensor.dtype == torch.bfloat16 else tensor.detach()
    return tensor.item() if tensor.ndim == 0 else tensor.numpy().copy()


class DeferredCalls:
    """A queue of callbacks, each with a test for its values and a way to wait for them."""

    def __init__(self) -> None:
        self._calls: deque[tuple[Callable[..., None], Callable[[], bool], Callable[[], Sequence[Any]]]] = deque()

    def add(self, fn: Callable[..., None], is_ready: Callable[[], bool], values: Callable[[], Sequence[Any]]) -> None:
        """Append a callback; `values()` waits for the host values, `is_ready()` says whether they are there."""
        self._calls.append((fn, is_ready, values))

    def run_ready(self, wait: bool = False) -> None:
        """Run the callbacks whose values are there (`wait`: all), and none that was added after one still waiting."""
        while self._calls and (wait or self._calls[0][1]()):
            fn, _, values = self._calls.popleft()
            fn(*values())
