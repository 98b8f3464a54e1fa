"""A loop over equal layers in the graph: one While forward, one backward, whatever the number of layers.

torch_xla has `scan`, and this is its idea with three differences. It builds its loop anew at every call, some tens of
milliseconds of host time; here a loop is built once for each shape and called after that as one operator. It has no
place for what all iterations share (masks, positions), which would go through the carry and get gradients. And it lets
AOTAutograd decide what is kept for the backward pass, which takes seconds and keeps attention's scores; here the
backward loop runs a layer again from its input, and is given what was expensive the first time: the results of the
products and of attention (selective checkpointing). Norms, rotations and activations are cheaper to compute again than
to read. With `recompute` nothing but the layers' inputs is kept.

Sources: torch_xla/experimental/scan.py (2.9); Korthikanti et al. 2022 (arXiv:2205.05198), section 5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode

from qat_lora.runtime.xla.loop import Loop, traced

Results = tuple[list[Tensor], list[Tensor]]
Body = Callable[[Tensor, Sequence[Tensor], Sequence[Tensor]], Tensor]
"""(carry, one layer's slices of the stacked tensors, what all layers share) -> the next carry, of the same shape."""


PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
"""Operations whose results are kept, with the matrices as the last arguments."""
NARROW = 256
"""Products over fewer numbers, those of adapters, take less time to compute again than their results to be read."""


class LayerScan:
    """carry -> body(carry, stacked[i], shared) for every i, as a loop in the graph; differentiable."""

    def __init__(self, body: Body, recompute: bool = False) -> None:
        """Take a body without side effects and random numbers.

        Args:
            body: one layer.
            recompute: compute products again in the backward pass as well; only the layers' inputs are kept.
        """
        self._body, self._recompute = body, recompute
        self._built: dict[Any, _Loops] = {}

    def __call__(self, carry: Tensor, stacked: Sequence[Tensor], shared: Sequence[Tensor]) -> Tensor:
        """Return the carry after the last layer.

        Args:
            carry: what the first layer gets.
            stacked: every layer's tensors, [layers, ...]; gradients reach those that require them.
            shared: what all layers get alike, without gradients.
        """
        trains = torch.is_grad_enabled() and any(t.requires_grad for t in (carry, *stacked))
        key = trains, *((t.shape, t.dtype, t.requires_grad) for t in (carry, *stacked, *shared))
        if key not in self._built:
            self._built[key] = self._build(trains, carry, stacked, shared)
        loops = self._built[key]
        if not trains:
            return loops.forward([carry], stacked, shared)[0][0]
        result: Tensor = _Scan.apply(loops, len(stacked), carry, *stacked, *shared)
        return result

    def _build(self, trains: bool, carry: Tensor, stacked: Sequence[Tensor], shared: Sequence[Tensor]) -> _Loops:
        """Return the loops of a shape. Built from the end: what the backward one does not use is not kept."""
        if not trains:
            with torch.no_grad():
                return _Loops(Loop(lambda x, *given: ([self._body(x[0], *given)], []), [carry], stacked, shared))
        trained = [i for i, tensor in enumerate(stacked) if tensor.requires_grad]

        def forward(carry: Sequence[Tensor], slices: Sequence[Tensor], shared: Sequence[Tensor]) -> Results:
            with torch.no_grad(), _Keeper(None, self._recompute) as keeper:
                return [self._body(carry[0], slices, shared)], [carry[0].clone(), *keeper.values]

        def backward(d_carry: Sequence[Tensor], slices: Sequence[Tensor], shared: Sequence[Tensor]) -> Results:
            own = [tensor.detach() for tensor in slices[: len(stacked)]]
            x, *values = (tensor.detach() for tensor in slices[len(stacked) :])
            wanted = [x.requires_grad_(), *(own[i].requires_grad_() for i in trained)]
            with torch.enable_grad(), _Keeper(values, self._recompute):
                result = self._body(x, own, shared)
            d_x, *gradients = torch.autograd.grad(result, wanted, d_carry[0])
            return [d_x], gradients

        seen = traced(forward, [carry], stacked, shared)[0][1:]
        values = [torch.empty(len(stacked[0]), *t.shape, dtype=t.dtype, device=carry.device) for t in seen]
        del seen  # placeholders must not be alive at the next sync
        back = Loop(backward, [carry], [*stacked, *values], shared, reverse=True)
        kept = [i for i in range(len(values)) if 1 + len(stacked) + i in back.reads]

        def forward_kept(*given: Any) -> Results:
            last, values = forward(*given)
            return last, [values[i] for i in kept]

        return _Loops(Loop(forward_kept, [carry], stacked, shared), back, trained, kept, len(values))


class _Loops(NamedTuple):
    """The loops of one shape. `forward` returns the last carry and the stacks of what it kept."""

    forward: Loop
    backward: Loop | None = None
    """(gradient of the carry; stacked tensors and what was kept; shared) -> gradients of carry and trained stacks."""
    trained: Sequence[int] = ()  # which stacked tensors have gradients
    kept: Sequence[int] = ()
    """Which of the values of a layer that could be kept are: the backward pass does not use all."""
    values: int = 0  # how many could be


class _Scan(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loops: _Loops, count: int, carry: Tensor, *tensors: Tensor) -> Tensor:
        stacked, shared = tensors[:count], tensors[count:]
        (result,), kept = loops.forward([carry], stacked, shared)
        ctx.loops, ctx.count, ctx.wants_carry = loops, count, carry.requires_grad
        ctx.save_for_backward(*stacked, *shared, *kept)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_result: Tensor) -> tuple[Tensor | None, ...]:
        loops, saved, inputs = ctx.loops, ctx.saved_tensors, len(ctx.needs_input_grad) - 3
        stacked, shared, kept = saved[: ctx.count], saved[ctx.count : inputs], iter(saved[inputs:])
        values = [next(kept) if i in loops.kept else None for i in range(loops.values)]
        (d_carry,), d_trained = loops.backward([d_result], [*stacked, *values], shared)
        gradients: list[Tensor | None] = [None] * inputs
        for place, gradient in zip(loops.trained, d_trained, strict=True):
            gradients[place] = gradient
        return None, None, d_carry if ctx.wants_carry else None, *gradients


class _Keeper(TorchDispatchMode):
    """Notes the results of products while a body runs forward, and gives them back while it runs again.

    The modes of torch see operations below functionalisation, so what is given is unwrapped there.
    """

    active: _Keeper | None = None

    def __init__(self, given: Sequence[Tensor] | None, nothing: bool) -> None:
        super().__init__()
        self.values: list[Tensor] = []
        self._given = None if given is None else iter(given)
        self._nothing, self._inside = nothing, False

    def __enter__(self) -> _Keeper:
        _Keeper.active = self
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        _Keeper.active = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_kept = func in PRODUCTS and args[-2].shape[-1] >= NARROW
        if self._nothing or self._inside or not is_kept:
            return func(*args, **(kwargs or {}))
        if self._given is not None:
            return torch._from_functional_tensor(next(self._given))
        self.values.append(func(*args, **(kwargs or {})))
        return self.values[-1]

    def keep(self, compute: Callable[[], tuple[Tensor, ...]], count: int) -> tuple[Tensor, ...]:
        if self._given is not None and not self._nothing:
            return tuple(next(self._given) for _ in range(count))
        self._inside = True
        results = compute()
        self._inside = False
        self.values += [] if self._nothing else results
        return results


def kept(compute: Callable[[], tuple[Tensor, ...]], count: int) -> tuple[Tensor, ...]:
    """Return `count` results of a computation, which a scanned layer's backward pass shall not repeat.

    It must need no gradient itself: the forward function of a `torch.autograd.Function`.
    """
    return compute() if _Keeper.active is None else _Keeper.active.keep(compute, count)
