"""The most bytes of tensors that were alive at once, on any device: what a step needs, whatever the allocator keeps.

Counted at torch's dispatcher: every operation's results are seen, and each memory counts from when it is first seen
until it is freed. The process's own peak (`resource`) has everything that was freed and kept in it, and torch's CUDA
statistics exist on CUDA only. Buffers inside one kernel are not seen.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts bytes of tensors while it is active; use as a context manager.

    Args:
        *held: tensors that are alive already, counted from the beginning.
    """

    def __init__(self, *held: torch.Tensor) -> None:
        super().__init__()
        self.now = 0
        self.peak = 0
        self._seen: dict[int, Any] = {}
        for tensor in held:
            self._count(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count what it returns."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._count(leaf)
        return result

    def _count(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._seen or not storage.nbytes():
            return
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        self._seen[key] = weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._seen.pop(key, None)
        self.now -= size
