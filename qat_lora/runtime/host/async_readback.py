"""Callbacks with values that are on their way from the device, run in the order of the calls.

Reading a loss where it is computed stops the device until the host has looked at it. Here the copy to the host
is only started; the callback runs at one of the next calls into the runtime, once the copy is there. It always
runs on the thread that drives the runtime, so a callback may print, write a file or raise like any other code:
that is why not `xm.add_step_closure(run_async=True)`, which calls it from a thread of its own, loses what it
raises, and cannot be waited for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

HostValue = float | int | bool | np.ndarray
"""A tensor on the host: a plain number for a tensor without dimensions, a numpy array otherwise."""


def host_value(tensor: torch.Tensor) -> HostValue:
    """Return a CPU tensor as a number or an array of its own; bfloat16, which numpy lacks, as float32."""
    tensor = tensor.detach().float() if tensor.dtype == torch.bfloat16 else tensor.detach()
    return tensor.item() if tensor.ndim == 0 else tensor.numpy().copy()


class DeferredCalls:
    """A queue of callbacks, each with a test for its values and a way to wait for them."""

    def __init__(self) -> None:
        self._calls: deque[tuple[Callable[..., None], Callable[[], bool], Callable[[], Sequence[Any]]]] = deque()

    def add(self, fn: Callable[..., None], is_ready: Callable[[], bool], values: Callable[[], Sequence[Any]]) -> None:
        """Append a callback; `values()` waits for the host values, `is_ready()` says whether they are there."""
        self._calls.append((fn, is_ready, values))

    def run_ready(self) -> None:
        """Run the callbacks whose values are there, and none that was added after one still waiting."""
        while self._calls and self._calls[0][1]():
            self._run_first()

    def run_all(self) -> None:
        """Run every callback, waiting for its values."""
        while self._calls:
            self._run_first()

    def _run_first(self) -> None:
        fn, _, values = self._calls.popleft()
        fn(*values())
