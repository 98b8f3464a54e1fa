"""Asymmetric ranges: zero is kept exactly, one-sided groups fare well, and the clip is close to the best of all."""

import numpy as np
import torch

from qat_lora.quant.asymmetric import range_scale
from qat_lora.quant.initialize import quantise_weight
from qat_lora.quant.scales import importance_cost
from qat_lora.quant.spec import QuantSpec

SPEC = QuantSpec(bits=3, code="asymmetric", sharing="group", group_size=16)


def weight_of(rows, columns, seed=1):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32))


def test_asymmetric_codes_hold_zero_exactly_and_one_sided_groups_well():
    spec = SPEC
    weight = weight_of(6, 32).abs() + 0.5
    weight[:, ::5] = 0.0
    lopsided = quantise_weight(weight, spec, "mse")
    assert (lopsided.dense(spec)[:, ::5] == 0).all()
    even = QuantSpec(bits=3, code="integer", sharing="group", group_size=16)
    error = [float((quantise_weight(weight, s, "mse").dense(s) - weight).square().mean()) for s in (spec, even)]
    assert error[0] < 0.4 * error[1]
    full = quantise_weight(weight, spec, "absmax")
    ratio = weight.numpy() / np.repeat(full.scales[0].numpy(), 16, 1) + np.repeat(full.zeros.numpy(), 16, 1)
    assert np.array_equal(full.codes_OI.numpy(), np.clip(np.floor(ratio + 0.5), 0, 7))


def test_the_clip_is_the_best_of_all_on_a_short_last_group_too():
    weight, importance = weight_of(3, 40), torch.rand(40, generator=torch.Generator().manual_seed(0)) + 0.1
    scale, zero = range_scale(weight, SPEC, importance_cost(weight, SPEC, importance))
    assert scale.shape == zero.shape == (3, 3) and torch.equal(scale, scale.half().float())
    for o in range(3):
        for g, start in enumerate((0, 16, 32)):
            w, cost = (a[start : start + 16].double().numpy() for a in (weight[o], importance))

            def error(s, z, w=w, cost=cost):
                return (cost * ((np.clip(np.round(w / s) + z, 0, 7) - z) * s - w) ** 2).sum()

            low, high = min(w.min(), 0), max(w.max(), 0)
            found = [error(c * (high - low) / 7, round(-low / ((high - low) / 7))) for c in np.linspace(0.2, 1, 400)]
            assert error(scale[o, g].item(), zero[o, g].item()) <= min(found) * 1.05
