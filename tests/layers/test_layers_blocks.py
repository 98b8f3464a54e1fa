"""Recorded calls, run block by block, are the model's own forward."""

import pytest
import torch
from torch import nn

from qat_lora.layers.calibrate.sequential import capture_calls, run_block


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(6, 6)

    def forward(self, x, factor, *, shift):
        return (x + factor * self.up(x) + shift,)


def test_blocks_run_one_by_one_as_in_the_whole_model():
    torch.manual_seed(0)
    blocks, seen = nn.ModuleList([Block(), Block()]), []

    def forward(x):
        for i, block in enumerate(blocks):
            (x,) = block(x, 0.5, shift=0.1 * i)
        seen.append(x)

    batches = [torch.randn(2, 6) for _ in range(3)]
    states, calls = capture_calls(blocks, batches, forward)
    assert torch.equal(seen[1], batches[1])  # recording costs no products, but for the first batch
    seen.clear()
    with torch.no_grad():
        for batch in batches:
            forward(batch)
    assert all(torch.equal(a, b) for a, b in zip(states, batches, strict=True))
    assert calls[1] == [((0.5,), {"shift": 0.1})] * 3
    for block, call in zip(blocks, calls, strict=True):
        states = [run_block(block, x, c) for x, c in zip(states, call, strict=True)]
    assert all(torch.equal(a, b) for a, b in zip(states, seen, strict=True))


def test_no_hook_is_left_by_a_forward_that_fails():
    blocks = nn.ModuleList([Block()])
    with pytest.raises(TypeError, match="shift"):
        capture_calls(blocks, [torch.zeros(1, 6)], lambda x: blocks[0](x, 1.0))
    assert not blocks[0]._forward_pre_hooks
