"""A loop that stays a loop on XLA: one `While` in the graph, whatever the number of rounds.

A Python loop over lazy tensors unrolls. 75 chunks of a loss are 75 copies of its body to trace, to compile and to keep
in the chip's memory as program, and the compiler is free to start them all at once, memory or not. `scan` traces the
body once, on placeholders, and calls it from a `While` that slices its inputs and writes its outputs.

`torch_xla.experimental.scan` does the same under autograd: it runs the body through AOTAutograd and keeps what a
backward pass would want, for ten times the host's time. A body that makes its own gradients needs none of that. And
whatever the body reads must be named here (`constants`): a tensor that it merely closed over would take its whole
history, say the dequantisation of an output head, into the body, to be done again in every round.

Source: torch_xla/experimental/scan.py (2.9), `_scan_impl_flat`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Body = Callable[[list[Tensor], list[Tensor], list[Tensor]], tuple[list[Tensor], list[Tensor]]]
"""From carry, this round's inputs and constants to the next carry and this round's outputs."""
_BUILT: dict[Any, Any] = {}
"""Loops by the program of their body: to build one costs the host as much as to trace the body."""


def scan(
    body: Body, carry: Sequence[Tensor], inputs: Sequence[Tensor], constants: Sequence[Tensor]
) -> tuple[list[Tensor], list[Tensor]]:
    """Run a body over the leading dimension of all inputs; nothing is differentiated through it.

    Args:
        body: keeps shapes and dtypes of the carry; may overwrite what it gets; draws no random numbers.
        carry: what a round hands to the next.
        inputs: XLA tensors [rounds, ...]; a round gets one slice of each.
        constants: XLA tensors that every round reads.

    Returns:
        The last carry, and every output stacked [rounds, ...].
    """
    import torch_xla
    import torch_xla.core.xla_builder as xb

    rounds, size = len(inputs[0]), len(carry)
    slots = [[xb.create_placeholder_tensor(x.shape, x.dtype) for x in group] for group in (carry, constants)]
    slots.insert(1, [xb.create_placeholder_tensor(x.shape[1:], x.dtype) for x in inputs])
    # Clones, since an operation in place would give the placeholder itself another value.
    last, outputs = body(*([slot.clone() for slot in group] for group in slots))
    context = torch_xla._XLAC.lowering.LoweringContext("qat_lora_scan")
    context.build([*last, *outputs])
    device = inputs[0].device
    stacked = [torch.zeros(rounds, *x.shape, dtype=x.dtype, device=device) for x in outputs]
    given = [torch.zeros((), dtype=torch.int32, device=device), *carry, *inputs, *constants, *stacked]
    places: dict[int, int] = {}  # from the body's parameters to `given`; what the body does not read has none
    for number, slot in enumerate(slots[0] + slots[1] + slots[2], 1):
        if (parameter := context.tensor_parameter_id(slot)) != -1:
            places[parameter] = number
    for parameter, tensor in context.device_parameter_id_tensor_mapping().items():
        if parameter not in places:  # small constants of the body's own, such as a number in a tensor
            places[parameter] = len(given)
            given.append(tensor.to(device))
    order = tuple(places[parameter] for parameter in range(len(places)))
    hlo = context.hlo()
    key = (hlo, rounds, order, size, len(inputs), tuple((x.shape, x.dtype) for x in given))
    if key not in _BUILT:
        _BUILT[key] = _loop(hlo, rounds, order, (size, len(inputs), len(constants), len(outputs)), given)
    results = torch_xla._XLAC._xla_user_computation("xla::scan", given, _BUILT[key])
    first_output = 1 + size + len(inputs) + len(constants)
    return results[1 : 1 + size], results[first_output : first_output + len(outputs)]


def _loop(
    hlo: bytes, rounds: int, order: Sequence[int], sizes: tuple[int, int, int, int], given: Sequence[Tensor]
) -> Any:
    """Build the `While` around a body; `order` are the places of the body's parameters in the loop's state.

    The state is the round's number, carry, inputs, constants and outputs, in these `sizes`, and what follows `given`.
    """
    import torch_xla.core.xla_builder as xb

    size, taken, kept, made = sizes
    step, first_output = xb.computation_from_module_proto("round", hlo), 1 + size + taken + kept

    def round_(number: xb.Op, *values: xb.Op) -> tuple[xb.Op, ...]:
        state = [number, *values]
        arguments = list(state)
        for place in range(1 + size, 1 + size + taken):
            arguments[place] = _slice(state[place], number)
        result = xb.Op.call(step, [arguments[place] for place in order])
        for place in range(size):
            state[1 + place] = result.get_tuple_element(place)
        for place in range(made):
            value = result.get_tuple_element(size + place)
            state[first_output + place] = _put(state[first_output + place], value, number)
        state[0] = number + xb.Op.scalar(number.builder(), 1, dtype=xb.Type.S32)
        return tuple(state)

    def unfinished(number: xb.Op, *_: xb.Op) -> xb.Op:
        return number < xb.Op.scalar(number.builder(), rounds, dtype=xb.Type.S32)

    builder = xb.create_builder("scan")
    parameters = tuple(xb.mkparam(builder, i, xb.tensor_shape(x)) for i, x in enumerate(given))
    return xb.Op.mkwhile(parameters, unfinished, round_).build("scan")


def _slice(stacked, number):
    """Return one round's part of a stacked value."""
    sizes = list(stacked.shape().sizes)
    part = stacked.dynamic_slice([number] + [number.zeros_like()] * (len(sizes) - 1), [1, *sizes[1:]])
    return part.reshape(sizes[1:])


def _put(stacked, value, number):
    """Return a stacked value with one round's part replaced."""
    rank = len(stacked.shape().sizes)
    return stacked.dynamic_update_slice(value.broadcast([1]), [number] + [number.zeros_like()] * (rank - 1))
