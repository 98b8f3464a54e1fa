"""Operations of a traced step counted as kernels, and the time that a roofline gives them.

An operation that PyTorch calls is a kernel (a `_foreach_` operation: as many as its tensors and their chunks of 65,536
numbers need), and reads its arguments and writes its results once. A kernel takes the longest of its bytes at
`BANDWIDTH`, its operations at `RATE` and `LEAST_S`: assumptions for an H200, no measurements.

A step is traced on tensors without memory: on `meta`, or on fake CUDA tensors, which tell Python that they are on a GPU
and so refuse what mixes devices, too (`FakeCuda`).
"""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

GPU = torch.device("cuda", 0)
RANK = 8  # of the adapters
BANDWIDTH, RATE, LEAST_S = 4.0e12, 6.0e14, 2.5e-6  # bytes/s, operations/s, s
MASKED_ATTENTION = (1.0, 170e12, 115e12)  # share of L x L that is computed, rate forward, rate backward
FLEX_ATTENTION = (0.5, 500e12, 400e12)  # causal; that documents end earlier is not counted on
FOREACH_TENSORS = {1: 110, 2: 64, 3: 48, 4: 36, 5: 30}  # of a launch, by lists: MultiTensorApply.cuh
FOREACH_CHUNK, FOREACH_BLOCKS = 65_536, 320
VIEWS = """view _unsafe_view transpose t
expand slice select unsqueeze squeeze detach alias permute split split_with_sizes
as_strided unbind reshape unflatten lift_fresh _reshape_alias diagonal empty new_empty empty_like empty_strided getitem
sym_size set_"""
FREE = frozenset(VIEWS.split())
PRODUCTS = {"mm": (0, 1), "addmm": (1, 2), "bmm": (0, 1), "baddbmm": (1, 2)}


class Sync(RuntimeError):
    """An operation that stops the queue of a GPU."""


class Kernel(NamedTuple):
    """Work of one operation."""

    name: str
    launches: int
    bytes: int
    operations: int

    @property
    def seconds(self) -> float:
        """Roofline of the operation on the device."""
        return max(self.bytes / BANDWIDTH, self.operations / RATE, self.launches * LEAST_S)


@dataclass
class Work:
    """A sum of kernels."""

    kernels: int = 0
    bytes: int = 0
    operations: int = 0
    seconds: float = 0.0
    names: collections.Counter[str] = field(default_factory=collections.Counter)

    def add(self, kernel: Kernel, seconds: float | None = None) -> None:
        """Count a kernel; its time by the roofline unless it is given."""
        self.kernels += kernel.launches
        self.bytes += kernel.bytes
        self.operations += kernel.operations
        self.seconds += kernel.seconds if seconds is None else seconds
        self.names[kernel.name] += kernel.launches

    def plus(self, other: Work, times: int = 1) -> Work:
        """Return this work and another one, so many times."""
        names = self.names + collections.Counter({name: times * count for name, count in other.names.items()})
        numbers = zip(self.numbers(), other.numbers(), strict=True)
        return Work(*(mine + times * theirs for mine, theirs in numbers), names)

    def numbers(self) -> tuple[int, int, int, float]:
        """Return what adds up."""
        return self.kernels, self.bytes, self.operations, self.seconds

    def report(self) -> dict[str, Any]:
        """Return the figures for a result."""
        kernels, size, operations, seconds = self.numbers()
        return {
            "kernels": kernels,
            "gb": round(size / 1e9, 2),
            "tera_operations": round(operations / 1e12, 3),
            "roofline_ms": round(1e3 * seconds, 2),
        }


def total(parts: Iterable[Work]) -> Work:
    """Return the sum of several."""
    return functools.reduce(Work.plus, parts, Work())


def touched(tensor: Tensor) -> int:
    """Return the bytes behind a tensor; what is broadcast counts once."""
    size = tensor.element_size()
    for extent, stride in zip(tensor.shape, tensor.stride(), strict=True):
        size *= extent if stride else 1
    return size


def operations_of(name: str, shapes: list[torch.Size]) -> int:
    """Return the operations of a product, by the shapes of its tensors; 0 for others."""
    if name not in PRODUCTS:
        return 0
    left, right = (shapes[i] for i in PRODUCTS[name])
    return 2 * left.numel() * right[-1]


def foreach_launches(lists: list[list[Tensor]]) -> int:
    """Return the kernels of one `_foreach_` operation over so many lists."""
    count, chunks = len(lists[0]), sum(-(-t.numel() // FOREACH_CHUNK) for t in lists[0])
    return max(-(-count // FOREACH_TENSORS[min(5, len(lists))]), -(-chunks // FOREACH_BLOCKS))


def bare(name: str) -> str:
    """Return an operation's name without namespace, overload and the underscore of the in-place form."""
    name = name.split("::")[-1].split(".")[0]
    return name if name.startswith("_") else name.rstrip("_")


class FakeCuda(FakeTensorMode):
    """Tensors without memory that are on a GPU to Python; to C++, which would ask a driver for streams, on `meta`."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operation; what C++ makes on the device of another tensor is on the GPU, too."""
        if function is torch.ops.prim.device.default:
            return torch.device("meta")
        if function is torch.ops.aten._local_scalar_dense.default and args[0].device.type == "cpu":
            return 1.0  # a number on the host, where reading is free
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "meta":
            kwargs["device"] = GPU
        return super().__torch_dispatch__(function, types, args, kwargs)


class Count(TorchDispatchMode):
    """Counts kernels by part, and with `watch` refuses what stops a GPU's queue."""

    def __init__(self, watch: bool = False, device: torch.device | str = "meta") -> None:
        """Count what is done on a device: `meta`, or that of fake tensors."""
        super().__init__()
        self.device = torch.device(device)
        self.parts: dict[str, Work] = collections.defaultdict(Work)
        self.part = "other forward"
        self.watch = watch
        self.pinned: list[Tensor] = []

    @contextlib.contextmanager
    def of(self, part: str) -> Iterator[None]:
        """Count for this part meanwhile."""
        before, self.part = self.part, part
        try:
            yield
        finally:
            self.part = before

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operation and count it."""
        kwargs, name = kwargs or {}, bare(function._schema.name)
        inputs = [x for x in torch.utils._pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        if self.watch:
            self._refuse(name, inputs, args, kwargs)
        out = function(*args, **kwargs)
        outputs = [x for x in torch.utils._pytree.tree_leaves(out) if isinstance(x, Tensor)]
        if name in FREE or not any(t.device == self.device for t in inputs + outputs):
            return out
        size, launches = sum(map(touched, inputs + outputs)), 1
        if name == "gather":
            size = 2 * touched(args[2]) + 3 * touched(out)
        elif name in ("scatter", "scatter_add"):
            in_place = function._schema.name.endswith("_")
            size = 3 * touched(args[2]) + (0 if in_place else 2 * touched(args[0]))
        elif name == "embedding":
            size = 2 * touched(out)
        elif name.startswith("_foreach"):
            lists = [x for x in (*args, out) if isinstance(x, list | tuple) and x and isinstance(x[0], Tensor)]
            launches = foreach_launches(lists)
        elif name == "cat":
            launches = -(-len(args[0]) // 128)  # tensors that a launch of CatArrayBatchedCopy takes
        shapes = [x.shape for x in inputs]
        joined = self.part == "adapters" and name in PRODUCTS and min(*shapes[0], *shapes[1]) > 3 * RANK
        kernel = Kernel(name, launches, size, operations_of(name, shapes))
        self.parts["base products" if joined else self.part].add(kernel)
        return out

    def _refuse(self, name: str, inputs: list[Tensor], args: Any, kwargs: Any) -> None:
        """Raise Sync for a read, an operation whose shape is data, or a copy from memory that is not pinned."""
        devices, here = {t.device.type for t in inputs}, self.device.type
        by_mask = name in ("index", "index_put") and any(t.dtype == torch.bool for t in inputs[1:])
        names = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2")
        if here in devices and (by_mask or name in names):
            raise Sync(f"{name} on the device")
        to = kwargs.get("device")
        if name == "_to_copy" and to is not None and devices == {here} and torch.device(to).type == "cpu":
            raise Sync("a tensor on the device is read back")
        sent = name == "_to_copy" and to is not None and torch.device(to).type == here and devices == {"cpu"}
        if sent and not (kwargs.get("non_blocking") and any(inputs[0] is tensor for tensor in self.pinned)):
            raise Sync("a copy to the device from memory that is not pinned, or that is waited for")
        if name == "copy" and {t.device.type for t in inputs[:2]} == {here, "cpu"}:
            waits = not (kwargs.get("non_blocking") or len(args) > 2 and args[2])
            if waits or not any(t is tensor for t in inputs[:2] for tensor in self.pinned):
                raise Sync("a copy between host and device without pinned memory, or that is waited for")


class _Attention(torch.autograd.Function):
    """Attention as one kernel forward and one backward."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, note: Callable[[str, list[Tensor]], None]) -> Any:
        ctx.save_for_backward(query, key, value)
        ctx.note = note
        out = torch.empty_like(query)
        note("forward", [query, key, value, out])
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        saved = ctx.saved_tensors
        grads = [torch.empty_like(x) for x in saved]
        ctx.note("backward", [*saved, grad, *grads])
        return *grads, None


def attention_seconds(query: Any, kind: tuple[float, float, float], backward: bool) -> tuple[int, float]:
    """Return operations and seconds of an attention over queries [B, H, L, D]."""
    rows, heads, length, width = query.shape
    share, rate_forward, rate_backward = kind
    operations = round((10 if backward else 4) * rows * heads * length**2 * width * share)
    return operations, max(LEAST_S, operations / (rate_backward if backward else rate_forward))


def count_attention(count: Count) -> Callable[..., Any]:
    """Return an attention function for transformers that counts what `sdpa` with a mask in memory does."""

    def note(which: str, tensors: list[Tensor]) -> None:
        operations, seconds = attention_seconds(tensors[0], MASKED_ATTENTION, which == "backward")
        kernel = Kernel("attention", 1, sum(map(touched, tensors)), operations)
        count.parts[f"attention {which}"].add(kernel, seconds)

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **_: Any) -> Any:
        key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
        return _Attention.apply(query, key, value, note).transpose(1, 2).contiguous(), None

    return attend


def no_autocast() -> Any:
    """Meta tensors have no autocast, and asking for it raises."""
    return mock.patch("torch.is_autocast_enabled", lambda *_: False)
