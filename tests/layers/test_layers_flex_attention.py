"""Block masks against the masks that they stand for, and the layers that are compiled around them.

Compiled here is only as far as AOTAutograd: that there is one program, without a break, is decided before any kernel.
"""

from pathlib import Path

import pytest
import torch
from torch._dynamo.backends.debugging import aot_eager
from torch.nn.attention.flex_attention import create_mask

from qat_lora.layers.attention import MASK_TILE, attention_inputs, document_block_mask, flex_or
from qat_lora.layers.convert import add_lora, make_quant_skeleton, quant_layers
from qat_lora.layers.lora import LoraConfig
from qat_lora.models.load import make_qwen3
from qat_lora.quant.presets import preset
from qat_lora.setup.trainable import recovery_parts

LENGTH, LAYERS = 2 * MASK_TILE, 3
pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def documents(seed, rows=2, length=LENGTH):
    """Rows of a few documents each, cut at random."""
    cuts = torch.rand(rows, length, generator=torch.Generator().manual_seed(seed)) < 4 / length
    return cuts.cumsum(1).int()


def first(ids, window=None):
    seen = allowed(ids, window)
    return (torch.arange(1, ids.shape[1] + 1) - seen.sum(-1)).int()


def allowed(ids, window=None):
    distance = torch.arange(ids.shape[1])[:, None] - torch.arange(ids.shape[1])
    return (ids[:, :, None] == ids[:, None]) & (distance >= 0) & (distance < (window or len(distance)))


@pytest.mark.parametrize("window", [None, 1, 37, MASK_TILE])
@pytest.mark.parametrize("seed", range(3))
def test_a_block_mask_is_the_mask_that_it_stands_for(window, seed):
    ids = documents(seed, length=4 * MASK_TILE)
    dense = allowed(ids, window)
    mask = document_block_mask(first(ids, window))
    assert torch.equal(create_mask(mask.mask_mod, 2, 1, 4 * MASK_TILE, 4 * MASK_TILE, device="cpu")[:, 0], dense)
    tiles = dense.view(2, 4, MASK_TILE, 4, MASK_TILE)
    assert torch.equal(mask.to_dense()[:, 0].bool(), tiles.any(4).any(2))
    assert torch.equal(mask.full_kv_num_blocks[:, 0], tiles.all(4).all(2).sum(-1).int())


@pytest.mark.parametrize(("key_heads", "softcap"), [(1, None), (2, 0.8), (4, None)])
def test_attention_equals_the_one_with_the_mask_in_memory(key_heads, softcap):
    torch.manual_seed(0)
    ids = documents(5)
    query = torch.randn(2, 4, LENGTH, 8, requires_grad=True)
    key, value = (torch.randn(2, key_heads, LENGTH, 8, requires_grad=True) for _ in range(2))
    attend = flex_or(lambda *_, **__: pytest.fail("the block mask was not used"))
    ours, _ = attend(
        None, query, key, value, document_block_mask(first(ids)), scaling=0.3, dropout=0.0, softcap=softcap
    )
    wide = [x.double().repeat_interleave(4 // x.shape[1], 1) for x in (query, key, value)]
    scores = wide[0] @ wide[1].mT * 0.3
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    oracle = (scores.masked_fill(~allowed(ids)[:, None], -torch.inf).softmax(-1) @ wide[2]).transpose(1, 2)
    torch.testing.assert_close(ours.double(), oracle, rtol=1e-5, atol=1e-5)
    pull = torch.randn(oracle.shape, dtype=torch.float64)
    ours_grads = torch.autograd.grad(ours, (query, key, value), pull.float())
    for mine, theirs in zip(ours_grads, torch.autograd.grad(oracle, (query, key, value), pull), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)


def test_other_masks_and_other_lengths_go_the_other_way():
    config = make_qwen3(Path("."), 64, hidden=16, layers=1, heads=2, kv_heads=1, mlp=32).config
    mask, _ = attention_inputs(config, documents(1, length=100), torch.float32, "blocks")
    assert isinstance(mask, torch.Tensor) and mask.shape == (2, 1, 1, 100)
    assert flex_or(lambda *_, **__: "otherwise")(None, None, None, None, mask) == "otherwise"


def student(length=LENGTH):
    torch.manual_seed(1)
    sizes = {"hidden": 64, "layers": LAYERS, "heads": 4, "kv_heads": 2, "head_dim": 16, "mlp": 128}
    model = make_qwen3(Path("."), 64, **sizes, max_position_embeddings=length)
    make_quant_skeleton(model.module, preset("w2g64"))
    for layer in quant_layers(model.module).values():
        layer.codes.random_()
        layer.scale.data.fill_(0.05)
    for adapter in add_lora(model.module, LoraConfig(recovery_r=4)).values():
        torch.nn.init.normal_(adapter.lora_B, std=0.1)
    recovery_parts(model, False, False, torch.float32)
    return model


def step(model, seed, length=LENGTH):
    ids = torch.randint(0, 64, (2, length), generator=torch.Generator().manual_seed(seed))
    hidden = model.hidden(ids, documents(seed, length=length))
    (hidden * torch.randn(hidden.shape, generator=torch.Generator().manual_seed(seed))).sum().backward()
    gradients = [p.grad.clone() for p in model.module.parameters() if p.requires_grad]
    model.module.zero_grad()
    return hidden.detach(), gradients


def test_all_layers_and_all_batches_are_one_program_without_a_break():
    """`fullgraph` refuses a break; the backend counts what it is given, before it makes the backward graph too."""
    torch._dynamo.reset()
    plain, compiled, programs = student(), student(), []

    def backend(graph, inputs):
        programs.append(graph)
        return aot_eager(graph, inputs)

    compiled.compile_layers(fullgraph=True, backend=backend)
    for seed in (1, 2, 3):
        (ours, gradients), (wanted, wanted_gradients) = step(compiled, seed), step(plain, seed)
        torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)
        for one, other in zip(gradients, wanted_gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))
    assert len(programs) == 1
    assert sum("flex_attention" in str(node.target) for node in programs[0].graph.nodes) == 1
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # dynamo, after a break
def test_a_length_without_tiles_is_computed_in_blocks():
    torch._dynamo.reset()
    plain, compiled = student(100), student(100)
    compiled.compile_layers(backend=aot_eager)
    (ours, gradients), (wanted, wanted_gradients) = step(compiled, 1, 100), step(plain, 1, 100)
    torch.testing.assert_close(ours, wanted, rtol=1e-4, atol=1e-4)
    for one, other in zip(gradients, wanted_gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-3 * float(other.abs().max()))
    torch._dynamo.reset()
