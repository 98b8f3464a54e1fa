"""Run a model's decoder blocks one by one: what enters the first, and what each of them is called with.

Two procedures go up a model block by block, calibration (`sequential`) and block-wise training (`train.blockwise`).
A block needs more than hidden states: masks, positions, rotary embeddings. These are recorded while the model runs, so
nothing here knows how a model makes them. They do not depend on what the blocks compute, so from the second batch on
the blocks hand on what they get: recording costs no products and reads no block's weights.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of one block's forward after the hidden states, which come first."""


def capture_calls(
    blocks: Sequence[nn.Module], batches: Iterable[Any], forward: Callable[[Any], Any]
) -> tuple[list[Tensor], list[list[Call]]]:
    """Return the hidden states that enter the first block, by batch, and the calls by block and batch.

    `forward` runs the model on one batch; all blocks pass on their input then, but those of the first batch.
    """
    states: list[Tensor] = []
    calls: list[list[Call]] = [[] for _ in blocks]
    in_tuples: list[bool] = []

    def watch(number: int) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if number == 0:
                states.append(args[0].detach())
            calls[number].append((args[1:], kwargs))

        return hook

    with contextlib.ExitStack() as undo:
        for number, block in enumerate(blocks):
            undo.enter_context(block.register_forward_pre_hook(watch(number), with_kwargs=True))
        for batch in batches:
            if not in_tuples:
                with blocks[0].register_forward_hook(lambda _m, _i, out: in_tuples.append(isinstance(out, tuple))):
                    forward(batch)
                for block in blocks:
                    undo.enter_context(_handing_on(block, in_tuples[0]))
            else:
                forward(batch)
    return states, calls


@contextlib.contextmanager
def _handing_on(block: nn.Module, in_tuple: bool) -> Iterator[None]:
    """Let a block return its hidden states as they come."""
    own = vars(block).get("forward")
    block.forward = lambda states, *_args, **_kwargs: (states,) if in_tuple else states
    try:
        yield
    finally:
        del block.forward
        if own is not None:
            block.forward = own


def run_block(block: nn.Module, states: Tensor, call: Call) -> Tensor:
    """Return a block's output for one batch."""
    args, kwargs = call
    output = block(states, *args, **kwargs)
    return output if isinstance(output, Tensor) else output[0]
