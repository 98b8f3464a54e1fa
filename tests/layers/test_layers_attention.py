"""Attention in tiles against torch's own in float64, and that transformers really calls it."""

from functools import partial

import pytest
import torch

from qat_lora.layers import attention
from qat_lora.layers.attention import blocked_attention, tiled_attention
from qat_lora.models.load import TILED, make_qwen3
from qat_lora.runtime.native import NativeRuntime
from qat_lora.types import Scores

blocked = partial(blocked_attention, keep=NativeRuntime("cpu").kept)


def exact(query, key, value, mask, scale, softcap):
    """Every score at once, in float64, by the definition."""
    query, key, value = (x.detach().double().requires_grad_() for x in (query, key, value))
    repeat = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(repeat, 1).transpose(2, 3) * scale
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    return (scores + mask).softmax(-1) @ value.repeat_interleave(repeat, 1), (query, key, value)


@pytest.mark.parametrize(("dtype", "close"), [(torch.float32, 2e-6), (torch.bfloat16, 1.5e-2)])
@pytest.mark.parametrize(("length", "heads", "groups"), [(7, 2, 2), (64, 3, 1), (150, 4, 2)])
@pytest.mark.parametrize("attend", [tiled_attention, blocked])
@pytest.mark.parametrize(
    ("window", "softcap"), [(None, None), (2, None), (37, None), (100, None), (None, 1.5), (37, 0.7)]
)
def test_output_and_gradients_are_those_of_the_definition(
    attend, dtype, close, length, heads, groups, window, softcap, monkeypatch
):
    monkeypatch.setattr(attention, "BLOCK", 48)
    torch.manual_seed(length)
    rows, width, value_width, scale = 3, 8, 6, 0.4
    query = torch.randn(rows, length, heads, width).to(dtype).transpose(1, 2).requires_grad_()  # as projections come
    key, value = (torch.randn(rows, groups, length, of).to(dtype).requires_grad_() for of in (width, value_width))
    documents = torch.sort(torch.randint(0, 3, (rows, length))).values
    behind = torch.arange(length)[:, None] - torch.arange(length)
    seen = (documents[:, :, None] == documents[:, None]) & (behind >= 0) & (behind < (window or length))
    mask = torch.where(seen, 0.0, -torch.inf)[:, None].double()
    first = torch.arange(1, length + 1) - seen.sum(-1)
    output = attend(query, key, value, first, Scores(scale, window, softcap))
    wanted, sources = exact(query, key, value, mask, scale, softcap)
    pull = torch.randn(rows, heads, length, value_width).to(dtype)
    output.backward(pull)
    wanted.backward(pull.double())
    pairs = [
        (output.detach(), wanted.detach()),
        *((x.grad, y.grad) for x, y in zip((query, key, value), sources, strict=True)),
    ]
    for mine, theirs in pairs:
        assert mine.dtype == dtype
        assert float((mine.double() - theirs).norm() / theirs.norm()) < close


def packed(borders, dtype, seed=0):
    """Queries, keys and values of rows whose documents begin at `borders`, and their first positions."""
    torch.manual_seed(seed)
    length = 256
    query = torch.randn(len(borders), length, 6, 8).to(dtype).transpose(1, 2).requires_grad_()
    key, value = (torch.randn(len(borders), length, 2, 8).to(dtype).transpose(1, 2).requires_grad_() for _ in "kv")
    first = torch.zeros(len(borders), length, dtype=torch.int32)
    for row, begins in enumerate(borders):
        for begin in begins:
            first[row, begin:] = begin
    return query, key, value, first


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 50])
def test_a_row_has_the_same_bits_whatever_batch_it_is_in(dtype, window):
    """So a resumed build stores the same bytes, also where the other rows have other documents."""
    borders = [(), (10, 70, 131), (64,), (200, 210)]
    query, key, value, first = packed(borders, dtype)
    if window:
        first = torch.maximum(first, torch.arange(256, dtype=torch.int32) - window + 1)
    pull = torch.randn(query.shape).to(dtype)
    output = tiled_attention(query, key, value, first, Scores(0.3, window))
    whole = output, *torch.autograd.grad(output, (query, key, value), pull)
    for row in range(len(borders)):
        one = slice(row, row + 1)
        alone = [x[one].detach().requires_grad_() for x in (query, key, value)]
        result = tiled_attention(*alone, first[one], Scores(0.3, window))
        for mine, other in zip((result, *torch.autograd.grad(result, alone, pull[one])), whole, strict=True):
            assert torch.equal(mine, other[one])


def test_what_lies_before_a_document_is_not_computed(monkeypatch):
    sizes, product = [], torch.bmm

    def counted(left, right):
        sizes.append(right.shape[2])
        return product(left, right)

    query, key, value, first = packed([(), (64, 128, 192)], torch.float32)
    monkeypatch.setattr(torch, "bmm", counted)
    with torch.no_grad():
        tiled_attention(query, key, value, first, Scores(0.3))
    assert sizes[::2] == [64, 128, 192, 256, 64, 64, 64, 64]  # keys of each tile's scores


@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_model_computes_the_same_with_it(monkeypatch, checkpointing):
    calls = []
    original = attention._Attention.apply
    monkeypatch.setattr(attention._Attention, "apply", lambda *args: calls.append(1) or original(*args))
    torch.manual_seed(0)
    model = make_qwen3(None, 64, hidden=32, layers=2, heads=4, kv_heads=2, mlp=48)
    model.module.train()
    ids, documents = torch.randint(0, 64, (2, 90)), torch.arange(90).div(40, rounding_mode="floor").int().expand(2, 90)

    def gradients():
        model.module.zero_grad()
        hidden = model.hidden(ids, documents)
        hidden.square().sum().backward()
        return hidden.detach(), [p.grad.clone() for p in model.module.parameters() if p.grad is not None]

    model.module.set_attn_implementation("sdpa")  # transformers' own, with a mask in memory
    before, before_grads = gradients()
    assert not calls
    model.tile_attention()
    model.tile_attention()  # again is nothing new
    if checkpointing:
        model.checkpoint_gradients(NativeRuntime("cpu").checkpoint_function())
    after, after_grads = gradients()
    assert len(calls) == (4 if checkpointing else 2) and model.config._attn_implementation == TILED
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(after_grads, before_grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-4)


def test_what_it_does_not_know_goes_to_sdpa():
    model = make_qwen3(None, 64, hidden=32, layers=1, heads=4, kv_heads=2, mlp=48)
    ids = torch.randint(0, 64, (1, 9))
    before = model.module(input_ids=ids).logits
    model.tile_attention()
    torch.testing.assert_close(model.module(input_ids=ids).logits, before)
    generated = model.module.generate(input_ids=ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert generated.shape == (1, 12)
    with torch.autocast("cpu", torch.bfloat16):
        assert model.hidden(ids, torch.zeros(1, 9, dtype=torch.int32)).isfinite().all()
