"""The adapter layer against float64 algebra."""

import numpy as np
import pytest
import torch
from torch import nn

from qat_lora.errors import ConfigError
from qat_lora.layers.lora import Factors, LoraConfig, LoraLinear, share_inputs
from qat_lora.layers.quant_linear import QuantLinear, join_dense
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


class Attention(nn.Module):
    """Three layers that read one tensor, as a model calls them."""

    def __init__(self, dropout=0.0, alpha=6.0):
        super().__init__()
        torch.manual_seed(3)
        for name, rows in (("q_proj", 8), ("k_proj", 4), ("v_proj", 6)):
            layer = LoraLinear(nn.Linear(COLUMNS, rows).requires_grad_(False), 3, alpha, dropout)
            nn.init.normal_(layer.lora_B)
            self.add_module(name, layer)

    def forward(self, x):
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)


@pytest.mark.parametrize("alpha", [3.0, 6.0])
def test_layers_that_share_an_input_compute_and_learn_the_same(alpha):
    apart, shared = Attention(alpha=alpha), Attention(alpha=alpha)
    share_inputs(dict(shared.named_children()))
    assert shared.state_dict().keys() == apart.state_dict().keys()
    for _ in range(2):  # nothing is left of the call before
        results = []
        for model in (apart, shared):
            x = torch.randn(2, 4, COLUMNS, generator=torch.Generator().manual_seed(7), requires_grad=True)
            y = model(x)
            (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
            results.append([y, x.grad, *(p.grad for p in model.parameters() if p.requires_grad)])
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_a_layer_called_alone_or_with_another_tensor_computes_for_itself():
    apart, shared = Attention(), Attention()
    share_inputs(dict(shared.named_children()))
    x, z = torch.randn(2, COLUMNS), torch.randn(2, COLUMNS)
    for name, given in (("k_proj", x), ("q_proj", x), ("k_proj", z), ("v_proj", x), ("v_proj", x)):
        one, other = (model.get_submodule(name)(given) for model in (apart, shared))
        torch.testing.assert_close(one, other)
    with torch.no_grad():
        for model in (apart, shared):
            model.q_proj.lora_A.mul_(2)
    torch.testing.assert_close(shared.q_proj(x), apart.q_proj(x))


def test_dropout_gives_every_layer_an_input_of_its_own():
    model = Attention(dropout=0.5)
    share_inputs(dict(model.named_children()))
    assert all(layer.shared is None for layer in model.children())


def test_bases_that_lie_together_are_one_product_and_the_weights_that_they_were(monkeypatch):
    def quantised():
        model = Attention()
        for adapter in model.children():
            spec = QuantSpec(bits=4, code="integer", sharing="channel")
            base = nn.Linear(COLUMNS, adapter.base.out_features, bias=False)
            base.weight = adapter.base.weight
            adapter.base = QuantLinear.from_linear(base, spec, quantize_weight(base.weight.data, spec, "mse"))
            adapter.base.hold_dense()
        return model

    apart, shared, x = quantised(), quantised(), torch.randn(2, 4, COLUMNS)
    share_inputs(dict(shared.named_children()))
    join_dense([adapter.base for adapter in shared.children()])
    assert shared.state_dict().keys() == apart.state_dict().keys()
    for one, other in zip(shared.children(), apart.children(), strict=True):
        assert torch.equal(one.base.effective(), other.base.effective())
    for compiling in (False, True):  # there the B's are one product as well
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda compiling=compiling: compiling)
        results = []
        for model in (apart, shared):
            y = model(x)
            (y * torch.linspace(-1, 1, y.numel()).view(y.shape)).sum().backward()
            results.append([y, *(p.grad.clone() for p in model.parameters() if p.requires_grad)])
            model.zero_grad()
        for one, other in zip(*results, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    shared.double()
    torch.testing.assert_close(shared(x.double()), apart.double()(x.double()))
    shared.q_proj.base.materialize()  # out of the three: each computes for itself
    torch.testing.assert_close(shared(x.double()), apart(x.double()), rtol=1e-3, atol=1e-3)
