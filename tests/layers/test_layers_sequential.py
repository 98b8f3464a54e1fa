"""Calibration in order: the target against least squares, the streams against plain forwards, the model's output."""

import numpy as np
import pytest
import torch
from torch import nn

from qat_lora.errors import ModelError
from qat_lora.layers.calibrate.fisher import drawn_log_likelihood, sensitivities
from qat_lora.layers.calibrate.fit import FitSettings
from qat_lora.layers.calibrate.quantize import LayerFitter, quantize_layers, second_moments
from qat_lora.layers.calibrate.sequential import LACK, Moments, aimed_weight, quantize_sequential
from qat_lora.layers.convert import add_lora, quant_layers, quantize_targets
from qat_lora.layers.lora import LoraConfig
from qat_lora.quant.presets import preset

CHOSEN = preset("w2g64")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.gate = nn.Linear(24, 40), nn.Linear(24, 40)
        self.down = nn.Linear(40, 24, bias=False)
        self.unused = nn.Embedding(2, 2)

    def forward(self, x, *, shift):
        y = nn.functional.layer_norm(x, (24,)) + shift
        return (x + self.down(self.up(y) * torch.sigmoid(self.gate(y))),)


class Toy(nn.Module):
    def __init__(self, blocks=4):
        super().__init__()
        self.embed = nn.Embedding(50, 24)
        self.blocks = nn.ModuleList([Block() for _ in range(blocks)])
        self.lm_head = nn.Linear(24, 50, bias=False)

    def hidden(self, ids):
        x = self.embed(ids)
        for i, block in enumerate(self.blocks):
            (x,) = block(x, shift=0.1 * i)
        return x

    def forward(self, ids):
        return self.lm_head(self.hidden(ids))


def toy(**kwargs):
    torch.manual_seed(0)
    return Toy(**kwargs).requires_grad_(False)


def batches(seed, count=6):
    draw = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 50, (8, 16), generator=draw) for _ in range(count)]


@pytest.mark.parametrize("tokens", [500, 20])
def test_the_aimed_weight_is_the_least_squares_map_from_the_students_inputs(tokens):
    draw = np.random.default_rng(0)
    x = draw.normal(size=(tokens, 8)) @ draw.normal(size=(8, 8))
    y = x + 0.3 * draw.normal(size=(tokens, 8)) @ draw.normal(size=(8, 8))
    weight = draw.normal(size=(5, 8))
    moment, shift = y.T @ y / tokens, (x - y).T @ y / tokens
    # The same problem with the damping as 8 more tokens, on which the weight is to stay as it is.
    own = np.diag(moment)
    extra = np.diag(np.sqrt(tokens * (0.01 * own.mean() + 4 * 8 / tokens * own)))
    inputs, wanted = np.concatenate([y, extra]), np.concatenate([x @ weight.T, extra @ weight.T])
    expected = np.linalg.lstsq(inputs, wanted, rcond=None)[0].T
    found = aimed_weight(torch.from_numpy(weight), Moments(*map(torch.from_numpy, (moment, shift)), tokens))
    assert np.allclose(found.numpy(), expected, atol=1e-4)


def test_what_adds_to_the_hidden_states_aims_at_what_they_lack_as_well():
    draw = np.random.default_rng(1)
    x = draw.normal(size=(5000, 8)) @ draw.normal(size=(8, 8))
    y = x + 0.3 * draw.normal(size=(5000, 8))
    lack = y @ draw.normal(size=(8, 5)) + draw.normal(size=(5000, 5))
    weight = draw.normal(size=(5, 8))
    own = np.diag(y.T @ y / 5000)
    extra = np.diag(np.sqrt(5000 * (0.01 * own.mean() + 4 * 8 / 5000 * own)))
    wanted = np.concatenate([x @ weight.T + LACK * lack, extra @ weight.T])
    expected = np.linalg.lstsq(np.concatenate([y, extra]), wanted, rcond=None)[0].T
    moments = Moments(*map(torch.from_numpy, (y.T @ y / 5000, (x - y).T @ y / 5000)), 5000)
    lack_OI = torch.from_numpy(lack.T @ y / 5000)
    assert np.allclose(aimed_weight(torch.from_numpy(weight), moments._replace(lack_OI=lack_OI)), expected, atol=1e-4)


def test_with_few_tokens_per_input_the_aim_does_not_leave_the_weight():
    """Two tokens per input and noise in place of a shift: least squares alone makes much of it."""
    draw = torch.Generator().manual_seed(0)
    y = torch.randn(256, 128, generator=draw)
    noise = 0.3 * torch.randn(256, 128, generator=draw)
    weight = torch.randn(16, 128, generator=draw)
    fresh = torch.randn(4096, 128, generator=draw)
    moment, shift = y.T @ y / 256, noise.T @ y / 256

    def error(aim):
        return float(((aim - weight) @ fresh.T).square().mean())

    plain = weight + weight @ shift @ torch.linalg.inv(moment)
    assert error(aimed_weight(weight, Moments(moment, shift, 256))) < 0.2 * error(plain)


def test_a_bfloat16_model_is_fitted_like_a_float32_one_also_where_one_channel_is_huge():
    reference = toy()
    reference.embed.weight.data[:, 3] *= 1e5
    text = batches(1, 8)
    distance = {}
    for dtype in (torch.float32, torch.bfloat16):
        model = toy().to(dtype)
        model.embed.weight.data[:, 3] *= 1e5
        starts = quantize_sequential(fitter(model, preset("w4g128"), "descent", 4, 4), text, model.hidden)
        assert all(factor.isfinite().all() for pair in starts.values() for factor in pair)
        model.float()
        add_lora(model, LoraConfig(recovery_r=4), starts)
        distance[dtype] = kl(reference, model, torch.cat(batches(2)))
    assert distance[torch.bfloat16] < 1.5 * distance[torch.float32] + 1e-3, distance


def fitter(model, chosen, *settings, costs=None):
    return LayerFitter(model, quantize_targets(model, chosen), FitSettings(*settings), costs)


def costs_of(model, text):
    draws = torch.Generator().manual_seed(3)
    names = list(quantize_targets(model, CHOSEN))
    return sensitivities(model, names, text, lambda b: drawn_log_likelihood(model(b).flatten(0, 1), draws), True)


@torch.no_grad()
def kl(reference, model, ids):
    p, q = (m(ids).double().log_softmax(-1) for m in (reference, model))
    return float((p.exp() * (p - q)).sum(-1).mean())


def test_in_order_is_nearer_to_the_teacher_on_fresh_text_than_layer_by_layer():
    reference, text, fresh = toy(), batches(1, 12), torch.cat(batches(2))
    costs = costs_of(reference, text)
    distance, ranks = {}, ("descent", 8, 4)
    for name, known in (("alone", None), ("alone fisher", costs), ("order", None), ("order fisher", costs)):
        model = toy()
        if "order" in name:
            starts = quantize_sequential(fitter(model, CHOSEN, *ranks, costs=known), text, model.hidden)
        else:
            moments = second_moments(model, quantize_targets(model, CHOSEN), text, model.hidden)
            starts = quantize_layers(fitter(model, CHOSEN, *ranks, costs=known), moments)
        assert sorted(starts) == sorted(quant_layers(model)) == sorted(quantize_targets(reference, CHOSEN))
        add_lora(model, LoraConfig(recovery_r=4), starts)
        distance[name] = kl(reference, model, fresh)
    assert distance["order"] < 0.9 * distance["alone"], distance
    assert distance["order fisher"] < distance["order"], distance


def test_what_is_fitted_is_what_a_plain_forward_shows(monkeypatch):
    """The moments that `fit_layers` gets are those of inputs in a model quantised that far, corrections in place."""
    from qat_lora.layers.calibrate import quantize

    seen = {}

    def spy(weights, spec, settings, moments, *rest):
        moment = moments[0]
        fits = original(weights, spec, settings, moments, *rest)
        seen[len(seen)] = moment, fits[0]
        return fits

    original = quantize.fit_layers
    monkeypatch.setattr(quantize, "fit_layers", spy)
    model, text = toy(blocks=2), batches(1)
    quantize_sequential(fitter(model, CHOSEN, "mse", 3, 3), text, model.hidden)
    names = ["blocks.0.up", "blocks.0.gate", "blocks.0.down", "blocks.1.up", "blocks.1.gate", "blocks.1.down"]
    assert len(seen) == len(names)
    again = toy(blocks=2)
    for i, name in enumerate(names):
        moment, fit = seen[i]
        assert torch.allclose(second_moments(again, [name], text, again.hidden)[name], moment, rtol=1e-3, atol=1e-4)
        if not name.endswith("up"):  # both halves of a stage see the same input
            for j in (i - 1, i) if name.endswith("gate") else (i,):
                both = seen[j][1]
                dense = both.quantised.dense(CHOSEN.rules[0][1]) + both.factors.b_OR @ both.factors.a_RI
                again.get_submodule(names[j]).weight.data = dense


def test_an_untied_head_is_quantised_on_request():
    model = toy(blocks=1)
    starts = quantize_sequential(fitter(model, preset("w2g64", lm_head="nf4g64"), "gptq", 4), batches(1), model.hidden)
    assert quant_layers(model)["lm_head"].spec.table == "normal" and "lm_head" not in starts


def test_the_heads_moment_comes_from_hidden_states_without_running_it():
    model, text = toy(blocks=1), batches(2)
    model.lm_head.forward = None
    states = torch.cat([model.hidden(batch).reshape(-1, 24) for batch in text])
    moments = second_moments(model, ["blocks.0.up", "lm_head"], text, model.hidden)
    assert torch.allclose(moments["lm_head"], states.T @ states / len(states), rtol=1e-4, atol=1e-5)


def test_models_that_are_no_stack_of_blocks_are_refused():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.ModuleList([Block()]), nn.ModuleList([Block()])

    with pytest.raises(ModelError, match="several stacks of blocks .*--calibrate-on teacher"):
        quantize_sequential(fitter(Two(), CHOSEN, "mse"), batches(1), lambda b: b)

    class Positional(Block):
        def forward(self, x, shift):
            return super().forward(x, shift=shift)

    class Odd(Toy):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([Positional()])

        def hidden(self, ids):
            return self.blocks[0](self.embed(ids), 0.1)[0]

    model = Odd()
    with pytest.raises(ModelError, match="named arguments.*--calibrate-on teacher"):
        quantize_sequential(fitter(model, CHOSEN, "mse"), batches(1), model.hidden)
