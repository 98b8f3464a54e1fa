"""The adapter layer against float64 algebra."""

import numpy as np
import pytest
import torch
from torch import nn

from qat_lora.errors import ConfigError
from qat_lora.layers.lora import Factors, LoraConfig, LoraLinear
from qat_lora.layers.quant_linear import QuantLinear
from qat_lora.quant.initialize import quantize_weight
from qat_lora.quant.spec import QuantSpec

ROWS, COLUMNS = 5, 9


def make(rank=3, alpha=6.0, dropout=0.0, quantised=False, seed=0):
    torch.manual_seed(seed)
    base: nn.Linear = nn.Linear(COLUMNS, ROWS)
    if quantised:
        spec = QuantSpec(bits=4, code="integer", sharing="channel")
        base = QuantLinear.from_linear(base, spec, quantize_weight(base.weight.data, spec, "mse"))
    base.requires_grad_(False)
    layer = LoraLinear(base, rank, alpha, dropout)
    nn.init.normal_(layer.lora_B)
    return layer


def numbers(tensor):
    return tensor.detach().double().numpy()


@pytest.mark.parametrize("quantised", [False, True])
def test_forward_is_base_plus_scaled_product(quantised):
    layer = make(quantised=quantised)
    x = torch.randn(2, 4, COLUMNS)
    weight = numbers(layer.base.weight) + 6.0 / 3 * numbers(layer.lora_B) @ numbers(layer.lora_A)
    assert np.allclose(numbers(layer(x)), numbers(x) @ weight.T + numbers(layer.base.bias), atol=1e-5)
    assert np.allclose(numbers(layer.delta()), 2 * numbers(layer.lora_B) @ numbers(layer.lora_A), atol=1e-6)


def test_a_new_adapter_changes_nothing():
    base = nn.Linear(COLUMNS, ROWS)
    layer, x = LoraLinear(base, 4, 4.0), torch.randn(3, COLUMNS)
    assert torch.equal(layer(x), base(x)) and layer.lora_A.abs().sum() > 0


@pytest.mark.parametrize("quantised", [False, True])
def test_gradients_of_factors_and_input_are_those_of_the_merged_weight(quantised):
    layer = make(quantised=quantised)
    x = torch.randn(6, COLUMNS, requires_grad=True)
    c = torch.randn(6, ROWS)
    (layer(x) * c).sum().backward()
    d_weight = numbers(c).T @ numbers(x)
    a, b = numbers(layer.lora_A), numbers(layer.lora_B)
    assert np.allclose(numbers(layer.lora_B.grad), 2 * d_weight @ a.T, atol=1e-4)
    assert np.allclose(numbers(layer.lora_A.grad), 2 * b.T @ d_weight, atol=1e-4)
    assert np.allclose(numbers(x.grad), numbers(c) @ (numbers(layer.base.weight) + 2 * b @ a), atol=1e-4)
    assert all(p.grad is None for p in layer.base.parameters())


@pytest.mark.parametrize("given", [2, 4, 7])
@pytest.mark.parametrize("alpha", [4.0, 1.0])
def test_a_start_of_any_rank_is_taken_as_far_as_it_fits(given, alpha):
    layer = LoraLinear(nn.Linear(COLUMNS, ROWS), 4, alpha)
    random_a = layer.lora_A.detach().clone()
    start = Factors(torch.randn(given, COLUMNS), torch.randn(ROWS, given))
    layer.start_from(start)
    rank = min(4, given)
    assert torch.allclose(layer.delta(), start.b_OR[:, :rank] @ start.a_RI[:rank], atol=1e-5)
    assert torch.equal(layer.lora_A[rank:], random_a[rank:]) and (layer.lora_B[:, rank:] == 0).all()


def test_bfloat16_inputs_leave_the_factors_and_their_gradients_in_float32():
    layer = make()
    layer.base.to(torch.bfloat16)
    x = torch.randn(6, COLUMNS).bfloat16()
    y = layer(x)
    y.float().sum().backward()
    assert y.dtype == torch.bfloat16
    for factor in (layer.lora_A, layer.lora_B):
        assert factor.dtype == torch.float32 and factor.grad.dtype == torch.float32
    expected = numbers(x) @ (numbers(layer.base.weight) + numbers(layer.delta())).T + numbers(layer.base.bias)
    assert np.allclose(numbers(y), expected, rtol=0.03, atol=0.1)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.allclose(make()(x.float()).float(), y.float(), rtol=0.03, atol=0.1)


def test_dropout_only_in_training_and_only_before_the_adapter():
    layer, x = make(dropout=0.5), torch.ones(2000, COLUMNS)
    plain = make()(x)
    layer.eval()
    assert torch.equal(layer(x), plain)
    layer.train()
    dropped = layer(x)
    assert not torch.equal(dropped, plain)
    assert torch.allclose(dropped.mean(0), plain.mean(0), atol=0.5)  # inverted dropout keeps the mean
    with torch.no_grad():
        layer.lora_B.zero_()
    assert torch.equal(layer(x), layer.base(x))


@pytest.mark.parametrize(("field", "change"), [("recovery_r", {"recovery_r": 0}), ("dropout", {"dropout": 1.0})])
def test_settings_that_mean_nothing_are_refused(field, change):
    with pytest.raises(ConfigError, match=f"^{field}: "):
        LoraConfig(**change)


def test_alpha_is_the_rank_unless_given():
    assert LoraConfig(recovery_r=8).alpha == 8 and LoraConfig(recovery_r=8, recovery_alpha=4.0).alpha == 4


def test_an_adapter_on_a_model_that_is_being_scored_drops_nothing():
    base = nn.Linear(COLUMNS, ROWS)
    assert LoraLinear(base, 2, 2.0, 0.5).dropout.training
    assert not LoraLinear(base.eval(), 2, 2.0, 0.5).dropout.training
