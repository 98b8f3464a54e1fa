"""Weights that train inside their quantiser: stored bit for bit as they compute."""

import copy

import numpy as np
import pytest
import torch
from torch import nn

from qat_lora.errors import ModelError
from qat_lora.layers.latent import LatentChange, LookUp, Range, fake_quantize
from qat_lora.layers.quant_linear import Packed, QuantLinear
from qat_lora.quant.codes import code_values
from qat_lora.quant.initialize import quantize_weight
from qat_lora.quant.spec import QuantSpec

SPECS = {
    "group": QuantSpec(bits=3, code="integer", sharing="group", group_size=8),
    "channel": QuantSpec(bits=2, code="half", sharing="channel"),
    "tensor": QuantSpec(bits=2, code="half", sharing="tensor"),
    "asymmetric": QuantSpec(bits=4, code="asymmetric", sharing="group", group_size=8),
    "lowrank": QuantSpec(bits=4, code="lut", sharing="lowrank", group_size=8, rank=3),
    "signed": QuantSpec(bits=3, code="integer", sharing="group", group_size=8, signed=True),
    "steps": QuantSpec(bits=3, code="integer", sharing="group", group_size=16, signed=True, step_bits=6),
}
ROWS, COLUMNS = 6, 21
KINDS = {"weight": {}, "change": {"rank": 2}}


def columns_of(sharing):
    return 256 if SPECS[sharing].step_bits else COLUMNS


def make(sharing, method="mse", seed=0):
    torch.manual_seed(seed)
    linear = nn.Linear(columns_of(sharing), ROWS)
    moment = torch.randn(64, linear.in_features)
    quantised = quantize_weight(linear.weight.data, SPECS[sharing], method, moment.T @ moment / 64)
    return linear, QuantLinear.from_linear(linear, SPECS[sharing], quantised)


def test_the_gradient_of_a_table():
    book = torch.randn(16, dtype=torch.float64, requires_grad=True)
    codes = torch.randint(16, (ROWS, COLUMNS), dtype=torch.uint8)
    assert torch.autograd.gradcheck(lambda table: LookUp.apply(table, codes), (book,))


@pytest.mark.parametrize("sharing", SPECS)
@pytest.mark.parametrize("method", ["absmax", "gptq"])
@pytest.mark.parametrize("kind", KINDS)
def test_training_starts_from_the_codes_that_were_found(sharing, method, kind):
    linear, layer = make(sharing, method)
    before, codes, x = layer.weight.clone(), layer.codes.clone(), torch.randn(5, columns_of(sharing))
    expected = layer(x)
    for weight in (linear.weight.detach(), None):
        trained = copy.deepcopy(layer)
        latent = trained.train_weight(weight, **KINDS[kind])
        trained.train_scales()
        assert torch.equal(trained.weight, before) and torch.equal(trained(x), expected)
        assert torch.equal(trained.stored()["codes"], codes)
        if weight is not None:  # as near to the full-precision weight as the codes allow
            error, allowed = (latent(trained.meaning().scale) - weight).abs(), (before - weight).abs()
            assert (error <= allowed + 1e-6).all() and error.sum() < 0.7 * allowed.sum()


def trained_layer(sharing, kind="change", table=False):
    """A layer after some steps that moved scales, codes and, where asked, the table."""
    linear, layer = make(sharing)
    latent = layer.train_weight(linear.weight.detach(), alpha=3.0, **KINDS[kind])
    layer.train_scales()
    if table:
        layer.train_table()
    trained = [*latent.trained().values(), *layer.scales, *([layer.values] if table else [])]
    optimizer = torch.optim.Adam(trained, lr=0.005 if layer.spec.step_bits else 0.05)
    x, target = torch.randn(40, layer.in_features), torch.randn(40, ROWS)
    before = layer.codes.clone()
    for _ in range(20):
        optimizer.zero_grad()
        (layer(x) - target).square().mean().backward()
        optimizer.step()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in trained)
    assert not torch.equal(layer.stored()["codes"], before)
    return linear, layer, x


@pytest.mark.parametrize("sharing", SPECS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_stored_computes_bit_for_bit_what_was_trained(sharing, kind):
    linear, layer, x = trained_layer(sharing, kind, table=sharing == "lowrank")
    expected, stored = layer(x), layer.stored()
    assert {t.dtype for n, t in stored.items() if n not in ("codes", "zeros", "steps")} == {torch.float16}
    fresh = QuantLinear(layer.in_features, ROWS, layer.spec, bias=True)
    fresh.load_state_dict({**stored, "bias": linear.bias})
    assert torch.equal(fresh(x), expected)
    layer.materialize()
    assert type(layer.source) is Packed and not any(p.requires_grad for p in layer.parameters())
    assert torch.equal(layer(x), expected) and set(layer.state_dict()) == set(fresh.state_dict())
    layer.hold_dense()
    assert torch.equal(layer(x), expected)


def test_control_an_adapter_merged_after_training_is_another_layer():
    """What the mergeable mode avoids: the change of a layer rounded only once training is over."""
    linear, layer, x = trained_layer("channel")
    latent = layer.source.latent
    change = latent.scaling * (latent.lora_B @ latent.lora_A)
    beside = make("channel")[1]
    trained = beside(x) + x @ change.T
    merged = beside.weight + change
    beside.train_weight(merged.detach()).weight.data.copy_(merged)
    assert (beside(x) - trained).abs().max() > 1e-3


def test_the_low_rank_change_begins_at_none_has_the_weights_unit_and_its_base_is_frozen():
    scale = torch.rand(ROWS, 1) + 0.5
    latent = LatentChange(torch.randn(ROWS, COLUMNS), scale.mean(), rank=2, alpha=4.0)
    assert torch.equal(latent(scale), latent.weight * scale) and not latent.weight.requires_grad
    latent.lora_B.data.normal_()
    change = 2.0 * latent.lora_B.double() @ latent.lora_A.double() / scale.double().mean()
    assert torch.allclose(latent(scale).double(), (latent.weight.double() + change) * scale.double(), atol=1e-5)
    assert set(latent.trained()) == {"lora_A", "lora_B"}


def test_a_scale_that_trains_stretches_a_layer_and_leaves_the_codes_of_a_change_alone():
    linear, layer = make("channel")
    latent = layer.train_weight(linear.weight.detach(), rank=2)
    layer.train_scales()
    before = layer.stored()["codes"]
    x, gradient = torch.randn(6, COLUMNS), torch.randn(6, ROWS)
    (layer(x) * gradient).sum().backward()
    (scale,) = layer.scales
    # d W/d s is the code value alone: that of frozen codes. LSQ's has the position in the cell taken away.
    values = layer.effective().detach() / scale.detach()
    expected = ((gradient.T.double() @ x.double()) * values.double()).sum(1, keepdim=True)
    torch.testing.assert_close(scale.grad.double().reshape(expected.shape), expected, rtol=1e-4, atol=1e-5)
    assert [*latent.trained().values()][-1].grad.abs().sum() > 0
    with torch.no_grad():
        scale.mul_(1.5)
    assert torch.equal(layer.stored()["codes"], before)
    whole = make("channel")[1]
    whole.train_weight(linear.weight.detach())
    with torch.no_grad():
        whole.scales[0].mul_(1.5)
    assert not torch.equal(whole.stored()["codes"], before)  # a weight that trains is rounded anew


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


def frozen_range(weight, low, high, most, rounded, shift, side):
    """The range quantiser with its rounding errors, and who is clipped, held fixed: it has true derivatives."""
    scale = (high - low) / most
    zero = -low / scale + shift
    code = np.where(side < 0, 0, np.where(side > 0, most, weight / scale + rounded + zero))
    return scale * (code - zero)


@pytest.mark.parametrize("bits", [2, 4])
def test_range_learning_is_the_derivative_with_rounding_errors_held_fixed(bits, monkeypatch):
    monkeypatch.setattr("qat_lora.layers.latent.as_stored", lambda tensor: tensor)  # in float64, without float16
    draw, most = np.random.default_rng(0), 2**bits - 1
    weight, gradient = draw.normal(size=(4, 9)), draw.normal(size=(4, 9))
    ends = np.array([[-1.3], [-0.4], [-0.9], [-2.0]]), np.array([[0.8], [1.1], [0.5], [1.7]])
    learned = Range(torch.ones(4, 1).double(), torch.zeros(4, 1).double(), bits)
    learned.low.data, learned.high.data = (torch.from_numpy(end.copy()) for end in ends)
    latent = torch.from_numpy(weight).requires_grad_()
    spec = QuantSpec(bits=bits, code="asymmetric", sharing="channel")
    scale, zero = learned()
    out = fake_quantize(latent, scale, spec, code_values(spec).double(), zero)
    out.backward(torch.from_numpy(gradient))
    step = (ends[1] - ends[0]) / most
    zeros = np.round(-ends[0] / step)
    side = np.where(weight / step < -zeros, -1, np.where(weight / step > most - zeros, 1, 0))
    assert 0 < np.mean(side == 0) < 1
    fixed = (most, np.floor(weight / step + 0.5) - weight / step, zeros + ends[0] / step, side)
    assert np.allclose(out.detach().numpy(), frozen_range(weight, *ends, *fixed), atol=1e-12)
    for at, trained in enumerate((latent, learned.low, learned.high)):
        for i in np.ndindex(trained.shape):
            moved = []
            for sign in (1, -1):
                arrays = [x.copy() for x in (weight, *ends)]
                arrays[at][i] += sign * 1e-6
                moved.append((gradient * frozen_range(*arrays, *fixed)).sum())
            assert trained.grad.numpy()[i] == pytest.approx((moved[0] - moved[1]) / 2e-6, abs=1e-6)


@pytest.mark.parametrize("with_weights", [True, False])
def test_a_trained_range_is_stored_bit_for_bit_as_it_computes(with_weights):
    linear, layer = make("asymmetric")
    x, expected = torch.randn(5, COLUMNS), layer.weight.clone()
    before = layer.stored()
    if with_weights:
        layer.train_weight(linear.weight.detach())
    learned = layer.train_range()
    assert torch.equal(layer.weight, expected)  # step 0 is the calibrated student
    optimizer = torch.optim.Adam(learned.parameters(), lr=0.03)
    for _ in range(20):
        optimizer.zero_grad()
        (layer(x) - 3 * linear(x)).square().sum().backward()
        optimizer.step()
    stored, trained = layer.stored(), layer(x).detach()
    assert not torch.equal(stored["scale"], before["scale"]) and not torch.equal(
        stored["zeros"], make("asymmetric")[1].zeros
    )
    fresh = QuantLinear(COLUMNS, ROWS, layer.spec, bias=True)
    fresh.load_state_dict({**stored, "bias": layer.bias})
    assert torch.equal(fresh(x), trained)
    layer.materialize()
    assert (
        layer.range is None and torch.equal(layer(x), trained) and not any(p.requires_grad for p in layer.parameters())
    )
    with pytest.raises(ModelError, match="ranges: a layer with integer codes has no zero points to train"):
        make("group")[1].train_range()
