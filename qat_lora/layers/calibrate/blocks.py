"""Run a model's decoder blocks one by one: what enters the first, and what each of them is called with.

Two procedures go up a model block by block, calibration (`sequential`) and block-wise training (`train.blockwise`).
A block needs more than hidden states: masks, positions, rotary embeddings. These are recorded while the whole model
runs, so nothing here knows how a model makes them.
"""

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn

Call = tuple[tuple[Any, ...], dict[str, Any]]
"""Arguments of one block's forward after the hidden states, which come first."""


def capture_calls(
    blocks: Sequence[nn.Module], batches: Iterable[Any], forward: Callable[[Any], Any]
) -> tuple[list[Tensor], list[list[Call]]]:
    """Return the hidden states that enter the first block, by batch, and the calls by block and batch."""
    states: list[Tensor] = []
    calls: list[list[Call]] = [[] for _ in blocks]

    def watch(number: int) -> Callable[..., None]:
        def hook(_module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if number == 0:
                states.append(args[0].detach())
            calls[number].append((args[1:], kwargs))

        return hook

    with contextlib.ExitStack() as hooks:
        for number, block in enumerate(blocks):
            hooks.enter_context(block.register_forward_pre_hook(watch(number), with_kwargs=True))
        for batch in batches:
            forward(batch)
    return states, calls


def run_block(block: nn.Module, states: Tensor, call: Call) -> Tensor:
    """Return a block's output for one batch."""
    args, kwargs = call
    output = block(states, *args, **kwargs)
    return output if isinstance(output, Tensor) else output[0]
