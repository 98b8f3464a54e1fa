"""A loop that stays a loop on XLA: one `While` in the graph, whatever the number of rounds.

A Python loop over lazy tensors unrolls. 75 chunks of a loss are 75 copies of its body to trace, to compile and to keep
in the chip's memory as program, and the compiler is free to start them all at once, memory or not. Here a body is
traced once, on placeholders, lowered to a computation, and called from a `While` that slices its inputs and writes its
outputs.

`torch_xla.experimental.scan` does the same under autograd: it runs the body through AOTAutograd and keeps what a
backward pass would want, for ten times the host's time, and it builds its loop anew at every call. A body that makes
its own gradients needs none of that, and layers have a loop of their own (`scan.py`). Whatever a body reads must be
named (`constants`): a tensor that it merely closed over would take its whole history, say the dequantisation of an
output head, into the body, to be done again in every round. Numbers that a body makes from nothing become parameters
of it ("hoisted") and arguments of the loop.

Source: torch_xla/experimental/scan.py (2.9), `_scan_impl_flat`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Tensors = Sequence[Tensor]
Body = Callable[[list[Tensor], list[Tensor], list[Tensor]], tuple[list[Tensor], list[Tensor]]]
"""From carry, this round's inputs and constants to the next carry and this round's outputs."""
_BUILT: dict[Any, Any] = {}
"""Loops by the program of their body: to build one costs the host as much as to trace the body."""


def scan(body: Body, carry: Tensors, inputs: Tensors, constants: Tensors) -> tuple[list[Tensor], list[Tensor]]:
    """Run a body over the leading dimension of all inputs; nothing is differentiated through it.

    Args:
        body: keeps shapes and dtypes of the carry; may overwrite what it gets; draws no random numbers.
        carry: what a round hands to the next.
        inputs: XLA tensors [rounds, ...]; a round gets one slice of each.
        constants: XLA tensors that every round reads.

    Returns:
        The last carry, and every output stacked [rounds, ...].
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

    def __call__(
        self, carry: Tensors, inputs: Sequence[Tensor | None], constants: Tensors
    ) -> tuple[list[Tensor], list[Tensor]]:
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
    given: dict[int, Tensor],
    order: Sequence[int],
    sliced: set[int],
    stacks: Sequence[tuple[tuple[int, ...], torch.dtype]],
    reverse: bool,
) -> Any:
    """Return the computation: its state is the round's number, carry, stacks of outputs, and what stays.

    Args:
        called: the body.
        given: the tensors that the loop is called with, by place; those before the sliced ones are the carry.
        order: the places of the body's parameters.
        sliced: the places of inputs, of which a round gets a slice.
        stacks: shape and type of the outputs.
        reverse: from the last slices to the first.
    """
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
