"""Integers and steps: the same weight where that is said, against plain float64 arithmetic on odd shapes."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from qat_lora.errors import ConfigError
from qat_lora.export.containers import as_integers, needed_bits, other_tensors, with_containers
from qat_lora.export.packed import container_notes, fused_notes, to_integers
from qat_lora.layers.quant_linear import QuantLinear
from qat_lora.quant.initialize import quantize_weight
from qat_lora.quant.presets import PRESETS
from qat_lora.quant.spec import QuantSpec


def layer(spec, out_features=5, in_features=24, bias=False):
    torch.manual_seed(0)
    linear = nn.Linear(in_features, out_features, bias=bias)
    return QuantLinear.from_linear(linear, spec, quantize_weight(linear.weight.detach(), spec, "mse"))


def group(bits, code, size):
    return QuantSpec(bits=bits, code=code, sharing="group", group_size=size)


EXACT = [
    (group(2, "half", 8), 3),
    (group(2, "half", 16), 3),  # 24 inputs: a short last group
    (group(3, "integer", 24), 3),
    (group(4, "integer", 128), 4),  # one group, longer than the row
    (group(4, "half", 8), 5),
    (group(8, "integer", 4), 8),
    (QuantSpec(bits=2, code="half", sharing="tensor"), 3),
    (QuantSpec(bits=3, code="half", sharing="channel"), 4),
]


@pytest.mark.parametrize(("spec", "bits"), EXACT)
def test_exact(spec, bits):
    module = layer(spec)
    assert needed_bits(spec) == bits
    found = as_integers(module, bits)
    assert found.error == 0 and 24 % found.group_size == 0
    assert torch.equal(found.dense(), module.weight.detach())
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    assert low <= int(found.codes_OI.min()) and int(found.codes_OI.max()) <= high
    for o in range(5):  # the slow way
        for i in range(24):
            step = float(found.steps_OG[o, i // found.group_size])
            assert float(found.codes_OI[o, i]) * step == float(module.weight[o, i])
    if spec.code == "half":
        assert bool((found.codes_OI % 2 != 0).all())  # odd integers of half the step
    with pytest.raises(ConfigError, match=f"give {bits} or more"):
        as_integers(module, bits - 1)


@pytest.mark.parametrize("preset", ["q4_r32", "q2a2"])
def test_rounded_with_the_true_error(preset):
    spec = PRESETS[preset].spec_for("model.layers.0.mlp.up_proj")
    module = layer(spec, 40, 96)
    assert needed_bits(spec) is None
    errors = []
    for bits in (3, 4, 8):
        found = as_integers(module, bits)
        weight = module.weight.detach().double()
        lost = (found.dense().double() - weight).square().sum().sqrt() / weight.square().sum().sqrt()
        assert found.error == pytest.approx(float(lost), rel=1e-6)
        assert torch.equal(found.steps_OG, found.steps_OG.half().float())
        errors.append(found.error)
    assert errors[0] > errors[1] > errors[2] and errors[2] < 0.01


def test_other_codes_are_rounded_not_misread():
    """An asymmetric code looks like integers and is none: its zero point would be lost."""
    spec = QuantSpec(bits=4, code="asymmetric", sharing="group", group_size=8)
    assert needed_bits(spec) is None
    found = as_integers(layer(spec), 4)
    assert 0 < found.error < 0.2


def test_a_model_with_those_that_are_not_exact():
    model = nn.Module()
    model.up, model.plain = layer(group(2, "half", 8), bias=True), nn.Linear(3, 3)
    x = torch.randn(2, 24)
    before = model.up(x)
    tensors = other_tensors(model, torch.bfloat16)
    assert set(tensors) == {"up.bias", "plain.weight", "plain.bias"}
    assert all(tensor.dtype == torch.bfloat16 for tensor in tensors.values())
    found = to_integers(model, None)
    assert {integers.bits for integers in found.values()} == {4}  # 3 would do, but 3 is not packed alike everywhere
    assert container_notes(model, found) == ["checked with transformers, and with 4 bits in vLLM on a CPU"]
    four, eight = replace(found["up"], bits=4), replace(found["up"], bits=8)
    layers = {"mlp.gate_proj": four, "mlp.up_proj": eight, "mlp.down_proj": eight}
    notes = ["vLLM does not load it, since mlp.gate_proj, mlp.up_proj differ: quantise with --for vllm"]
    assert fused_notes(model, layers) == notes and not fused_notes(model, layers | {"mlp.up_proj": four})
    model.mlp = nn.ModuleDict({"gate_proj": nn.Linear(2, 2), "up_proj": nn.Linear(2, 2)})
    assert fused_notes(model, {"mlp.gate_proj": four}) == notes and not fused_notes(model, {})  # dense beside packed
    assert math.isclose(found["up"].bits_per_weight, 4 + 16 / 8)
    assert type(with_containers(model, found).up) is QuantLinear
    rounded = with_containers(model, {"up": replace(found["up"], error=0.1)})
    assert type(rounded.up) is nn.Linear and torch.equal(rounded.up(x), before)
    assert type(model.up) is QuantLinear and rounded.plain.weight is model.plain.weight
