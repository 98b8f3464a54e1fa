"""Weights that train inside their quantiser: stored bit for bit as they compute."""

import copy

import pytest
import torch
from torch import nn

from qat_lora.layers.latent import Latent, LookUp
from qat_lora.layers.quant_linear import QuantLinear
from qat_lora.quant.initialise import quantise_weight
from qat_lora.quant.spec import QuantSpec

SPECS = {
    "group": QuantSpec(bits=3, code="integer", sharing="group", group_size=8),
    "channel": QuantSpec(bits=2, code="half", sharing="channel"),
    "tensor": QuantSpec(bits=2, code="half", sharing="tensor"),
    "asymmetric": QuantSpec(bits=4, code="asymmetric", sharing="group", group_size=8),
    "lowrank": QuantSpec(bits=4, code="lut", sharing="lowrank", group_size=8, rank=3),
}
ROWS, COLUMNS = 6, 21


def make(sharing, method="mse", seed=0):
    torch.manual_seed(seed)
    linear = nn.Linear(COLUMNS, ROWS)
    moment = torch.randn(64, COLUMNS)
    quantised = quantise_weight(linear.weight.data, SPECS[sharing], method, moment.T @ moment / 64)
    return linear, QuantLinear.from_linear(linear, SPECS[sharing], quantised)


def test_the_gradient_of_a_table():
    book = torch.randn(16, dtype=torch.float64, requires_grad=True)
    codes = torch.randint(16, (ROWS, COLUMNS), dtype=torch.uint8)
    assert torch.autograd.gradcheck(lambda table: LookUp.apply(table, codes), (book,))


@pytest.mark.parametrize("sharing", SPECS)
@pytest.mark.parametrize("method", ["absmax", "gptq"])
@pytest.mark.parametrize("rank", [0, 2])
def test_training_starts_from_the_codes_that_were_found(sharing, method, rank):
    linear, layer = make(sharing, method)
    before, codes, x = layer.weight.clone(), layer.codes.clone(), torch.randn(5, COLUMNS)
    expected = layer(x)
    for weight in (linear.weight.detach(), None):
        trained = copy.deepcopy(layer)
        latent = trained.train_weight(weight, rank)
        trained.train_scales()
        assert torch.equal(trained.weight, before) and torch.equal(trained(x), expected)
        assert torch.equal(trained.stored()["codes"], codes)
        if weight is not None:  # as near to the full-precision weight as the codes allow
            error, allowed = (latent.weight - weight).abs(), (before - weight).abs()
            assert (error <= allowed + 1e-6).all() and error.sum() < 0.7 * allowed.sum()


def trained_layer(sharing, rank, table=False):
    """A layer after some steps that moved scales, codes and, where asked, the table."""
    linear, layer = make(sharing)
    latent = layer.train_weight(linear.weight.detach(), rank, alpha=3.0)
    layer.train_scales()
    if table:
        layer.train_table()
    trained = [*latent.trained().values(), *layer.scales, *([layer.values] if table else [])]
    optimizer = torch.optim.Adam(trained, lr=0.05)
    x, target = torch.randn(40, COLUMNS), torch.randn(40, ROWS)
    before = layer.codes.clone()
    for _ in range(20):
        optimizer.zero_grad()
        (layer(x) - target).square().mean().backward()
        optimizer.step()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in trained)
    assert not torch.equal(layer.stored()["codes"], before)
    return linear, layer, x


@pytest.mark.parametrize("sharing", SPECS)
@pytest.mark.parametrize("rank", [0, 2])
def test_what_is_stored_computes_bit_for_bit_what_was_trained(sharing, rank):
    linear, layer, x = trained_layer(sharing, rank, table=sharing == "lowrank")
    expected, stored = layer(x), layer.stored()
    assert {t.dtype for n, t in stored.items() if n != "codes"} == {torch.float16}
    fresh = QuantLinear(COLUMNS, ROWS, layer.spec, bias=True)
    zeros = {"zeros": layer.zeros} if sharing == "asymmetric" else {}
    fresh.load_state_dict({**stored, **zeros, "bias": linear.bias})
    assert torch.equal(fresh(x), expected)
    layer.settle()
    assert layer.latent is None and not any(p.requires_grad for p in layer.parameters())
    assert torch.equal(layer(x), expected) and set(layer.state_dict()) == set(fresh.state_dict())
    layer.hold_dense()
    assert torch.equal(layer(x), expected)


def test_control_an_adapter_merged_after_training_is_another_layer():
    """What the mergeable mode avoids: the change of a layer rounded only once training is over."""
    linear, layer, x = trained_layer("channel", rank=2)
    change = layer.latent.scaling * (layer.latent.lora_B @ layer.latent.lora_A)
    beside = make("channel")[1]
    trained = beside(x) + x @ change.T
    merged = beside.weight + change
    beside.train_weight(merged.detach())
    beside.latent.weight.data.copy_(merged)
    assert (beside(x) - trained).abs().max() > 1e-3


def test_the_low_rank_change_begins_at_none_and_its_base_is_frozen():
    latent = Latent(torch.randn(ROWS, COLUMNS), rank=2, alpha=4.0)
    assert torch.equal(latent(), latent.weight) and not latent.weight.requires_grad
    latent.lora_B.data.normal_()
    expected = latent.weight.double() + 2.0 * latent.lora_B.double() @ latent.lora_A.double()
    assert torch.allclose(latent().double(), expected, atol=1e-5)
    assert set(latent.trained()) == {"lora_A", "lora_B"}


def test_a_trained_table_is_stored_with_its_codes():
    _, layer = make("lowrank")
    x = torch.randn(5, COLUMNS)
    expected = layer(x)
    layer.train_table()
    assert torch.equal(layer(x), expected)
    layer(x).square().sum().backward()
    assert layer.values.grad.abs().sum() > 0 and layer.scale_a.grad is None
    with torch.no_grad():
        layer.values += torch.randn(16) * 0.1
    moved, stored = layer(x), layer.stored()
    assert not torch.equal(moved, expected)
    fresh = QuantLinear(COLUMNS, ROWS, layer.spec, bias=True)
    fresh.load_state_dict({**stored, "bias": layer.bias})
    assert torch.equal(fresh(x), moved)
