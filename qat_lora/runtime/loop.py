"""Loops of dependent rounds over tensors, for solvers that go column by column: one body for every device.

Where operations run as they are called the loop is Python's, and a body works in place on what is left of a tensor. On
XLA that would unroll into a graph as long as the matrix is wide (16,000 nodes for one small layer), so it is a While
(`xla/loop.py`), whose body is traced once. A body therefore gets the number of its round as an int or as a tensor, and
reads parts of tensors by the functions below: of a fixed shape in a While, of what is left elsewhere. A While takes all
rounds alike, so there `whole_parts` lengthens what a round takes a part of. A matrix is factorised on the host there: a
TPU has no float64, and its compiler had not finished an emulated Cholesky of 4096 columns after five minutes.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qat_lora.runtime.xla.loop import scan
from qat_lora.runtime.xla.runtime import is_xla_device, xla_mark_step

PIECE = 2**17  # numbers of a tensor that a host works on at a time: temporaries that stay in its caches
Number = int | Tensor
Tensors = list[Tensor]
Body = Callable[[Number, Tensors, Tensors, Tensors], tuple[Tensors, Tensors]]
"""From a round's number, carry, its slices of the inputs and constants to the next carry and this round's outputs."""


def loop(
    body: Body, rounds: int, carry: Tensors, inputs: Sequence[Tensor] = (), constants: Sequence[Tensor] = ()
) -> tuple[Tensors, Tensors]:
    """Return the last carry, and every output of all rounds, joined along the first dimension.

    The body may overwrite the carry (which may be empty if there are constants), keeps its shapes and types, and reads
    no other large tensor than it is given. Of the inputs [rounds, ...] a round gets a slice each.
    """
    device = [*carry, *constants][0].device
    if is_xla_device(device):
        inputs = [x.to(device) for x in (torch.arange(rounds, dtype=torch.int32), *inputs)]
        last, stacks = scan(lambda now, each, given: body(each[0], now, each[1:], given), carry, inputs, constants)
        return last, [stack.flatten(0, 1) for stack in stacks]
    now, outputs = list(carry), []
    for number, each in enumerate(zip(*(x.unbind() for x in inputs), strict=True) if inputs else [()] * rounds):
        now, made = body(number, now, list(each), list(constants))
        outputs.append(made)
    return now, [torch.cat(made) for made in zip(*outputs, strict=True)]


def part(x: Tensor, number: Number, size: int, dim: int) -> Tensor:
    """Return part `number` of `size` entries along a dimension; the last one may be shorter."""
    if isinstance(number, int):
        return x.narrow(dim, number * size, min(size, x.size(dim) - number * size))
    return x.unflatten(dim, (-1, size)).index_select(dim, number.reshape(1)).squeeze(dim)


def rest(x: Tensor, number: Number, size: int, dim: int) -> Tensor:
    """Return what follows part `number`, or in a While all of it: there earlier parts must not matter any more."""
    if isinstance(number, int):
        start = min((number + 1) * size, x.size(dim))
        return x.narrow(dim, start, x.size(dim) - start)
    return x


def whole_parts(x: Tensor, size: int, *dims: int, fill: float = 0.0) -> Tensor:
    """Return a tensor lengthened along some dimensions to whole parts where a While takes them."""
    if not is_xla_device(x):
        return x
    pads = [-x.shape[dim] % size if dim in dims else 0 for dim in range(x.dim())]
    return torch.nn.functional.pad(x, [n for pad in reversed(pads) for n in (0, pad)], value=fill)


def rows_at_once(x: Tensor, numbers: int = PIECE) -> int:
    """Return how many rows of a tensor long elementwise work shall take in one piece: all of them but on a host."""
    return len(x) if x.device.type != "cpu" else max(1, numbers // x[0].numel())


def fits_a_piece(x: Tensor) -> bool:
    """Return True for a tensor of a host that stays in its caches, where calls cost more than what they compute."""
    return x.device.type == "cpu" and x.numel() <= PIECE


def factorised(solve: Callable[..., Tensor], *given: Tensor) -> Tensor:
    """Return what a function of dense linear algebra makes of tensors, computed on the host for XLA's."""
    if not is_xla_device(given[0]):
        return solve(*given)
    xla_mark_step()  # one graph for all that is read
    return solve(*(x.cpu() for x in given)).to(given[0].device)
