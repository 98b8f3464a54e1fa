"""Two-sided descent: the cost never rises in any layer, and at the end no single code improves it."""

import itertools

import numpy as np
import pytest
import torch
from test_quant_gptq import BLOCKS, SPECS, correlated, raised, weight_of

from qat_lora.quant import initialize
from qat_lora.quant.gptq import Curvature
from qat_lora.quant.initialize import QuantizedWeight, quantize_weight, refine_rows


def coupled(rows, seed=5):
    """Outputs whose errors count together: a few directions carry most of the Fisher information."""
    draw = np.random.default_rng(seed)
    g = draw.normal(size=(500, 3)) @ draw.normal(size=(3, rows)) + 0.4 * draw.normal(size=(500, rows))
    return g.T @ g / 500


def cost(weight, dense, inputs, outputs):
    """The two-sided cost with the diagonal of inputs raised, float64 numpy, by sums over rows."""
    error = weight.double().numpy() - dense.double().numpy()
    lifted = raised(inputs)
    pairs = itertools.product(range(len(error)), repeat=2)
    return sum(outputs[i, j] * (error[i] @ lifted @ error[j]) for i, j in pairs)


def refined(weight, spec, start, inputs, outputs, rounds=1):
    curvature = Curvature(torch.from_numpy(np.stack(inputs)))
    return refine_rows(weight, spec, start, curvature, torch.from_numpy(np.stack(outputs)).float(), rounds)


@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("kind", SPECS | BLOCKS)
def test_the_cost_never_rises_and_falls_below_that_of_one_sided_descent(kind, layers):
    if kind in BLOCKS and layers > 1:
        pytest.skip("wide: slow, and rows are handled alike")
    spec, columns, rows = (SPECS | BLOCKS)[kind], 256 if kind in BLOCKS else 41, 19
    inputs = [correlated(columns, seed=seed)[1] for seed in range(layers)]
    outputs = [coupled(rows, seed) for seed in range(layers)]
    weight = weight_of(layers * rows, columns)
    start = quantize_weight(weight, spec, "descent", Curvature(torch.from_numpy(np.stack(inputs))))
    costs, now = [], start
    for _ in range(4):
        parts = zip(weight.chunk(layers), now.dense(spec).chunk(layers), inputs, outputs, strict=True)
        costs.append([cost(*part) for part in parts])
        now = refined(weight, spec, now, inputs, outputs)
        assert all(torch.equal(scale, scale.half().float()) for scale in now.scales)
    assert (np.diff(costs, axis=0) <= 1e-5 * np.array(costs[0])).all(), costs
    if kind == "tensor":
        assert torch.equal(now.codes_OI, start.codes_OI) and now.scales == start.scales
    else:
        assert (np.array(costs[-1]) < 0.9 * np.array(costs[0])).all(), costs


@pytest.mark.parametrize("kind", ["channel", "asymmetric", "table"])
def test_at_the_end_no_single_code_improves_the_cost(kind):
    """Every code, changed alone to any other value: as few rows as groups, so each is moved by itself."""
    spec, rows, columns = SPECS[kind], 3, 12
    weight, inputs, outputs = weight_of(rows, columns), correlated(columns)[1], coupled(rows)
    start = quantize_weight(weight, spec, "descent", torch.from_numpy(inputs))
    found = refined(weight, spec, start, [inputs], [outputs], rounds=20)
    least = cost(weight, found.dense(spec), inputs, outputs)
    assert least < cost(weight, start.dense(spec), inputs, outputs)
    for at in np.ndindex(rows, columns):
        for code in range(2**spec.bits):
            codes = found.codes_OI.clone()
            codes[at] = code
            assert cost(weight, found._replace(codes_OI=codes).dense(spec), inputs, outputs) >= least * (1 - 1e-6)


def test_it_comes_near_the_best_of_all_codes():
    """All 4^6 codes of tiny weights with the scales found: descent is a third as far from the best as one-sided."""
    spec, inputs, outputs = SPECS["group"], correlated(4)[1][:3, :3], coupled(2)
    book, lifted = np.array(list(itertools.product(range(4), repeat=6))), raised(inputs)
    gaps = np.zeros(2)
    for seed in range(12):
        weight = weight_of(2, 3, seed)
        start = quantize_weight(weight, spec, "descent", torch.from_numpy(inputs))
        for number, found in enumerate((start, refined(weight, spec, start, [inputs], [outputs], rounds=5))):
            every = found.values.double().numpy()[book].reshape(-1, 2, 3) * found.scales[0].double().numpy()
            error = weight.double().numpy() - every
            best = np.einsum("nij,jk,nlk,il->n", error, lifted, error, outputs, optimize=True).min()
            gaps[number] += cost(weight, found.dense(spec), inputs, outputs) / best - 1
    assert gaps[1] < gaps[0] / 3, gaps


def test_layers_solved_together_are_those_solved_alone():
    spec, rows, columns = SPECS["asymmetric"], 17, 40
    inputs, outputs = zip(*((correlated(columns, seed=s)[1], coupled(rows, s)) for s in range(3)), strict=True)
    weight = weight_of(3 * rows, columns)
    parts = weight.chunk(3)
    starts = [quantize_weight(w, spec, "descent", torch.from_numpy(h)) for w, h in zip(parts, inputs, strict=True)]
    found = refined(weight, spec, QuantizedWeight.joined(starts), inputs, outputs, 2).split(3)
    for number, one in enumerate(found):
        alone = refined(
            parts[number], spec, starts[number], inputs[number : number + 1], outputs[number : number + 1], 2
        )
        assert (one.codes_OI == alone.codes_OI).float().mean() >= 0.99
        given = parts[number], inputs[number], outputs[number]
        costs = [cost(given[0], x.dense(spec), *given[1:]) for x in (one, alone)]
        assert costs[0] == pytest.approx(costs[1], rel=1e-3)


def test_steps_that_overshoot_are_refused(monkeypatch):
    """Rows that all but copy each other, moved all at once as if they were apart: the naive version raises the cost."""
    spec, rows, columns = SPECS["group"], 16, 40
    inputs, outputs = correlated(columns)[1], np.ones((rows, rows)) + 0.01 * np.eye(rows)
    weight = weight_of(rows, columns)
    start = quantize_weight(weight, spec, "descent", torch.from_numpy(inputs))
    before = cost(weight, start.dense(spec), inputs, outputs)
    monkeypatch.setattr(initialize, "GROUPS", 1)
    assert cost(weight, refined(weight, spec, start, [inputs], [outputs]).dense(spec), inputs, outputs) <= before
    naive = refine_naively(weight, spec, start, inputs, outputs)
    monkeypatch.undo()
    assert cost(weight, naive.dense(spec), inputs, outputs) > before


def refine_naively(weight, spec, start, inputs, outputs):
    """One step of all rows towards the targets of two-sided descent, without a check."""
    pull = torch.from_numpy(outputs).float() @ (weight - start.dense(spec))
    target = start.dense(spec) + pull / torch.from_numpy(np.diag(outputs).copy()).float()[:, None]
    return initialize.refine(target, spec, start, Curvature(torch.from_numpy(inputs)), 1)
