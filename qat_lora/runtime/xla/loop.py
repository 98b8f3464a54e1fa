"""Loops that stay loops on XLA: one `While` in the graph, whatever the number of rounds or layers.

A Python loop over lazy tensors unrolls. 75 chunks of a loss are 75 copies of its body to trace, to compile and to keep
in the chip's memory as program, and the compiler is free to start them all at once. Here a body is traced once, on
placeholders, lowered to a computation, and called from a `While` that slices its inputs and writes its outputs.
Whatever a body reads must be named (`constants`): a tensor that it merely closed over would take its whole history into
the body, to be done again in every round. Numbers that a body makes from nothing become parameters of it ("hoisted").

`torch_xla.experimental.scan` does the same under autograd, but builds its loop anew at every call, some tens of
milliseconds of host time; here a loop is built once for each shape. It runs the body through AOTAutograd, which a body
that makes its own gradients (`scan`) does not need. For layers (`LayerScan`) it has no place for what all iterations
share (masks, positions), and AOTAutograd keeps attention's scores; here the backward loop runs a layer again from its
input, and is given what was expensive the first time: the results of the products and of attention (selective
checkpointing). Norms, rotations and activations are cheaper to compute again than to read.

One product is lowered alone too (`exact_dot`), at the highest precision: `set_mat_mul_precision` would hold for all
of a graph. Sources: torch_xla/experimental/scan.py (2.9); Korthikanti et al. 2022 (arXiv:2205.05198), section 5.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode

Tensors = Sequence[Tensor]
Results = tuple[list[Tensor], list[Tensor]]
Body = Callable[[list[Tensor], list[Tensor], list[Tensor]], Results]
"""From carry, this round's inputs and constants to the next carry and this round's outputs."""
_BUILT: dict[Any, Any] = {}
"""Loops by the program of their body: to build one costs the host as much as to trace the body."""
LayerBody = Callable[[Tensor, Tensors, Tensors], Tensor]
"""(carry, one layer's slices of the stacked tensors, what all layers share) -> the next carry, of the same shape."""
PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}  # kept; the matrices are the last arguments
NARROW = 256  # products over fewer numbers, those of adapters, are computed again in less time than they are read


def scan(body: Body, carry: Tensors, inputs: Tensors, constants: Tensors) -> Results:
    """Run a body over the leading dimension of all inputs; nothing is differentiated through it.

    The body keeps shapes and dtypes of the carry, may overwrite what it gets, and draws no random numbers. All are XLA
    tensors. Returns the last carry, and every output stacked [rounds, ...].
    """
    return Loop(body, carry, inputs, constants)(carry, inputs, constants)


def traced(body: Body, carry: Tensors, inputs: Tensors, constants: Tensors) -> tuple[list[Tensor], int, list[Tensor]]:
    """Return what a body makes of placeholders, how much of it is the carry, and the placeholders."""
    import torch_xla.core.xla_builder as xb

    groups = [(carry, 0), (inputs, 1), (constants, 0)]
    slots = [[xb.create_placeholder_tensor(x.shape[skip:], x.dtype) for x in group] for group, skip in groups]
    # Clones, since an operation in place would give the placeholder itself another value.
    last, outputs = body(*([slot.clone() for slot in group] for group in slots))
    return [*last, *outputs], len(last), [slot for group in slots for slot in group]


class Loop:
    """A body in a While, for tensors of the shapes that it was built with: as `scan`, traced once."""

    def __init__(self, body: Body, carry: Tensors, inputs: Tensors, constants: Tensors, reverse: bool = False) -> None:
        """Trace the body; with `reverse` it gets the last slices first, and its outputs lie as its inputs do."""
        import torch_xla
        import torch_xla.core.xla_builder as xb

        results, self._carried, slots = traced(body, carry, inputs, constants)
        context = torch_xla._XLAC.lowering.LoweringContext("round")
        context.build(results)
        numbers = [context.tensor_parameter_id(slot) for slot in slots]  # -1 for what the body does not read
        hoisted = {n: t for n, t in context.device_parameter_id_tensor_mapping().items() if n not in numbers}
        device, parameters = inputs[0].device, [*numbers, *hoisted]
        self._hoisted = [tensor.to(device) for tensor in hoisted.values()]
        # The parameters of the lowered body, as places among all of a call's tensors.
        order = [parameters.index(number) for number in range(1 + max(parameters))]
        self.reads = set(order)
        self._others = sorted(place for place in self.reads if place >= self._carried)
        given, hlo = self._given(carry, inputs, constants), context.hlo()
        stacks = [((len(inputs[0]), *result.shape), result.dtype) for result in results[self._carried :]]
        key = hlo, reverse, self._carried, len(inputs), tuple(order), tuple((t.shape, t.dtype) for t in given)
        if key not in _BUILT:
            sliced = set(range(self._carried, self._carried + len(inputs)))
            places = [*range(self._carried), *self._others]
            called = xb.computation_from_module_proto("round", hlo)
            _BUILT[key] = _while(called, dict(zip(places, given, strict=True)), order, sliced, stacks, reverse)
        self._computation = _BUILT[key]

    def __call__(self, carry: Tensors, inputs: Sequence[Tensor | None], constants: Tensors) -> Results:
        """Return the last carry, and every output stacked; what the body does not read may be None."""
        import torch_xla

        given = self._given(carry, inputs, constants)
        results = torch_xla._XLAC._xla_user_computation("xla::loop", given, self._computation)
        return results[: self._carried], results[self._carried :]

    def _given(self, carry: Tensors, inputs: Sequence[Tensor | None], constants: Tensors) -> list[Any]:
        tensors = [*carry, *inputs, *constants, *self._hoisted]
        return [*carry, *(tensors[place] for place in self._others)]


def _while(
    called: Any,
    given: dict[int, Tensor],  # what the loop is called with, by place; those before the sliced ones are the carry
    order: Sequence[int],  # the places of the body's parameters
    sliced: set[int],  # the places of inputs
    stacks: Sequence[tuple[tuple[int, ...], torch.dtype]],  # shape and type of the outputs
    reverse: bool,
) -> Any:
    """Return the computation: its state is the round's number, carry, stacks of outputs, and what stays."""
    import torch_xla.core.xla_builder as xb

    builder, carried = xb.create_builder("loop"), min(sliced)
    rounds = next(len(given[place]) for place in sorted(sliced) if place in given) if not stacks else stacks[0][0][0]
    parameters = [xb.mkparam(builder, k, xb.tensor_shape(tensor)) for k, tensor in enumerate(given.values())]
    zeros = [xb.Op.zero(builder, dtype=xb.Op.from_torch_type(d)).broadcast(list(shape)) for shape, d in stacks]

    def number(op: xb.Op, value: int) -> xb.Op:
        return xb.Op.scalar(op.builder(), value, dtype=xb.Type.S32)

    def at(i: xb.Op, rank: int) -> list[xb.Op]:
        return [i, *([i.zeros_like()] * (rank - 1))]

    def one_of(stack: xb.Op, i: xb.Op) -> xb.Op:
        sizes = list(stack.shape().sizes)
        return stack.dynamic_slice(at(i, len(sizes)), [1, *sizes[1:]]).reshape(sizes[1:])

    def unfinished(i: xb.Op, *_: xb.Op) -> xb.Op:
        return i < number(i, rounds)

    def round_(i: xb.Op, *state: xb.Op) -> tuple[xb.Op, ...]:
        here = number(i, rounds - 1) - i if reverse else i
        stays = state[carried + len(stacks) :]
        values = dict(zip(given, [*state[:carried], *stays], strict=True))
        result = xb.Op.call(called, [one_of(values[p], here) if p in sliced else values[p] for p in order])
        made = [
            stack.dynamic_update_slice(result.get_tuple_element(carried + k).broadcast([1]), at(here, len(shape)))
            for k, (stack, (shape, _)) in enumerate(zip(state[carried:], stacks, strict=False))
        ]
        return i + number(i, 1), *(result.get_tuple_element(k) for k in range(carried)), *made, *stays

    start = [xb.Op.scalar(builder, 0, dtype=xb.Type.S32), *parameters[:carried], *zeros, *parameters[carried:]]
    final = xb.Op.mkwhile(start, unfinished, round_)
    return xb.Op.tuple([final.get_tuple_element(1 + k) for k in range(carried + len(stacks))]).build("loop")


class LayerScan:
    """carry -> body(carry, stacked[i], shared) for every i, as a loop in the graph; differentiable."""

    def __init__(self, body: LayerBody, recompute: bool = False) -> None:
        """Take a body without side effects and random numbers; with `recompute` only its inputs are kept."""
        self._body, self._recompute = body, recompute
        self._built: dict[Any, _Loops] = {}

    def __call__(self, carry: Tensor, stacked: Tensors, shared: Tensors) -> Tensor:
        """Return the carry after the last layer; gradients reach `carry` and `stacked` [layers, ...], if required."""
        trains = torch.is_grad_enabled() and any(t.requires_grad for t in (carry, *stacked))
        key = trains, *((t.shape, t.dtype, t.requires_grad) for t in (carry, *stacked, *shared))
        if key not in self._built:
            self._built[key] = self._build(trains, carry, stacked, shared)
        loops = self._built[key]
        if not trains:
            return loops.forward([carry], stacked, shared)[0][0]
        result: Tensor = _Scan.apply(loops, len(stacked), carry, *stacked, *shared)
        return result

    def _build(self, trains: bool, carry: Tensor, stacked: Tensors, shared: Tensors) -> _Loops:
        """Return the loops of a shape. Built from the end: what the backward one does not use is not kept."""
        if not trains:
            with torch.no_grad():
                return _Loops(Loop(lambda x, *given: ([self._body(x[0], *given)], []), [carry], stacked, shared))
        trained = [i for i, tensor in enumerate(stacked) if tensor.requires_grad]

        def forward(carry: Tensors, slices: Tensors, shared: Tensors) -> Results:
            with torch.no_grad(), _Keeper(None, self._recompute) as keeper:
                return [self._body(carry[0], slices, shared)], [carry[0].clone(), *keeper.values]

        def backward(d_carry: Tensors, slices: Tensors, shared: Tensors) -> Results:
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
    backward: Loop | None = None  # (gradient of the carry; stacked, and what was kept; shared) -> gradients
    trained: Sequence[int] = ()  # which stacked tensors have gradients
    kept: Sequence[int] = ()  # which of the values of a layer that could be kept are: those that backward uses
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
    """Notes results of products as a body runs forward, and gives them back, unwrapped, while it runs again."""

    active: _Keeper | None = None

    def __init__(self, given: Tensors | None, nothing: bool) -> None:
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
    """Return `count` results, which need no gradient, of what a scanned layer's backward pass shall not repeat."""
    return compute() if _Keeper.active is None else _Keeper.active.keep(compute, count)


@contextlib.contextmanager
def highest_precision() -> Iterator[None]:
    """Lower all products of float32 at the highest precision; at the end as before."""
    import torch_xla

    lazy = torch_xla._XLAC  # what torch_xla.backends calls, without its warning
    before = lazy._xla_get_mat_mul_precision()
    lazy._xla_set_mat_mul_precision("highest")
    try:
        yield
    finally:
        lazy._xla_set_mat_mul_precision(before)


def exact_dot(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a @ b of float32 matrices; a TPU multiplies them in six passes of bfloat16."""
    import torch_xla

    computation, order = _lowered(a.shape, b.shape)
    return torch_xla._XLAC._xla_user_computation("xla::exact_matmul", [(a, b)[i] for i in order], computation)[0]


@functools.cache
def _lowered(*shapes: torch.Size) -> tuple[Any, list[int]]:
    import torch_xla
    import torch_xla.core.xla_builder as xb

    lazy, matrices = torch_xla._XLAC, [xb.create_placeholder_tensor(shape, torch.float32) for shape in shapes]
    context = lazy.lowering.LoweringContext("exact_matmul")
    with highest_precision():
        context.build([matrices[0] @ matrices[1]])
    order = sorted((0, 1), key=lambda i: context.tensor_parameter_id(matrices[i]))
    return xb.computation_from_module_proto("exact_matmul", context.hlo()), order
