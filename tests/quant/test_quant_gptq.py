"""Descent and refitted scales: monotone, at a minimum that no single code improves, and the least-squares solution."""

import dataclasses

import numpy as np
import pytest
import torch

from qat_lora.quant.gptq import Curvature, Grid, cholesky, descend, gptq, slope_of
from qat_lora.quant.initialize import _refitted, quantize_weight, refine
from qat_lora.quant.presets import PRESETS
from qat_lora.quant.spec import QuantSpec
from qat_lora.runtime import loop

BLOCKS = {name: PRESETS[name].rules[0][1] for name in ("q2_k", "q3_k")}
STEPS = {"q2_k": (range(1, 16), range(16)), "q3_k": ([*range(-32, 0), *range(1, 32)],)}
SPECS = {
    "signed": QuantSpec(bits=2, code="integer", sharing="group", group_size=16, signed=True),
    "asymmetric": QuantSpec(bits=3, code="asymmetric", sharing="group", group_size=16),
    "table": QuantSpec(bits=2, code="lut", sharing="group", group_size=16, table="normal"),
    "group": QuantSpec(bits=2, code="half", sharing="group", group_size=16),
    "channel": QuantSpec(bits=3, code="integer", sharing="channel"),
    "tensor": QuantSpec(bits=2, code="half", sharing="tensor"),
    "lowrank": QuantSpec(bits=2, code="lut", sharing="lowrank", group_size=32, rank=3),
}


def correlated(columns, tokens=400, seed=0):
    draw = np.random.default_rng(seed)
    mix = draw.normal(size=(columns // 4, columns)) + 0.3 * draw.normal(size=(1, columns))
    x = draw.normal(size=(tokens, columns // 4)) @ mix + 0.1 * draw.normal(size=(tokens, columns))
    return x, x.T @ x / tokens


def weight_of(rows, columns, seed=1):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=(rows, columns)).astype(np.float32))


def weighted_error(weight, dense, moment):
    """Output error with the diagonal raised, float64 numpy."""
    error = weight.double().numpy() - dense.double().numpy()
    return np.trace(error @ raised(moment) @ error.T)


def raised(moment):
    return moment + 0.01 * np.diag(moment).mean() * np.eye(len(moment)) + 0.2 * np.diag(np.diag(moment))


@pytest.mark.parametrize("sharing", SPECS | BLOCKS)
def test_refining_never_raises_the_output_error(sharing):
    spec, columns = (SPECS | BLOCKS)[sharing], 512 if sharing in BLOCKS else 40
    weight, (_, moment) = weight_of(12, columns), correlated(columns)
    for method in ("absmax", "mse", "gptq"):
        now = quantize_weight(weight, spec, method, torch.from_numpy(moment))
        errors = [weighted_error(weight, now.dense(spec), moment)]
        for _ in range(4):
            now = refine(weight, spec, now, Curvature(torch.from_numpy(moment)), rounds=1)
            assert all(torch.equal(scale, scale.half().float()) for scale in now.scales)
            for whole, allowed in zip(now.whole, STEPS.get(sharing, ()), strict=False):
                assert set(whole.flatten().tolist()) <= set(allowed)
            errors.append(weighted_error(weight, now.dense(spec), moment))
        assert all(b <= a * (1 + 1e-6) for a, b in zip(errors, errors[1:], strict=False)), (method, errors)
        assert errors[-1] < 0.95 * errors[0], (method, errors)


def test_a_descended_start_has_no_better_single_code():
    """Every code, changed alone to any other value, makes the output worse: checked one by one."""
    spec, weight = SPECS["channel"], weight_of(3, 12)
    _, moment = correlated(12)
    start = quantize_weight(weight, spec, "gptq", torch.from_numpy(moment))
    found = refine(weight, spec, start, Curvature(torch.from_numpy(moment)), rounds=10)
    least = weighted_error(weight, found.dense(spec), moment)
    for at in np.ndindex(3, 12):
        for code in range(8):
            codes = found.codes_OI.clone()
            codes[at] = code
            assert weighted_error(weight, found._replace(codes_OI=codes).dense(spec), moment) >= least * (1 - 1e-9)


@pytest.mark.parametrize("name", BLOCKS)
def test_refitted_steps_minima_and_scales_have_no_better_single_number(name):
    """Each of them, changed alone, makes the output worse: checked one by one."""
    spec, weight, moment = BLOCKS[name], weight_of(2, 256), correlated(256)[1]
    damped = Curvature(torch.from_numpy(moment)).damped_LII.float()
    now, seen = quantize_weight(weight, spec, "mse"), []
    while len(seen) < 2 or not all(map(torch.equal, seen[-1], seen[-2])):
        for level in ("scales", "whole"):
            now = _refitted(now, spec, level, slope_of(weight, now.dense(spec), damped), damped)
        seen.append((*now.scales, *now.whole))
        assert len(seen) < 100
    assert len(seen) > 2
    least = weighted_error(weight, now.dense(spec), moment)
    for kind in ("scales", "whole"):
        for number, values in enumerate(getattr(now, kind)):
            for at in np.ndindex(*values.shape):
                half = values[at].half().numpy()
                near = [np.nextafter(half, np.float16(end)) for end in (-np.inf, np.inf)]
                for other in near if kind == "scales" else STEPS[name][number]:
                    changed = list(getattr(now, kind))
                    changed[number] = values.clone()
                    changed[number][at] = float(other)
                    dense = now._replace(**{kind: tuple(changed)}).dense(spec)
                    assert weighted_error(weight, dense, moment) >= least * (1 - 1e-6)


def test_a_scale_of_either_sign_turns_the_longer_end_to_where_the_weights_are():
    """Against brute force over 4,000 scales of both signs; a weight and its mirror image are equally hard."""
    spec = SPECS["signed"]
    weight = weight_of(40, 16).abs() * torch.sign(weight_of(40, 1, seed=2)) + 0.3 * weight_of(40, 16, seed=3)
    book, w = np.array([-2.0, -1.0, 0.0, 1.0]), weight.double().numpy()
    scales = np.linspace(-4, 4, 4000)[:, None, None]
    codes = book[np.abs((w / scales)[..., None] - book).argmin(-1)]
    best = np.square(codes * scales - w).sum(-1).min(0)
    found = np.square((quantize_weight(weight, spec, "mse").dense(spec) - weight).double().numpy()).sum(-1)
    assert (found >= best * 0.999).all() and found.sum() < 1.02 * best.sum()
    mirrored = np.square((quantize_weight(-weight, spec, "mse").dense(spec) + weight).double().numpy()).sum(-1)
    assert np.allclose(mirrored, found, rtol=1e-6)
    positive = dataclasses.replace(spec, signed=False)
    one_sign = np.square((quantize_weight(weight, positive, "mse").dense(spec) - weight).double().numpy()).sum(-1)
    assert (found <= one_sign * (1 + 1e-6)).all() and found.sum() < 0.8 * one_sign.sum()
    moment = correlated(16)[1]
    errors = [
        weighted_error(weight, quantize_weight(weight, form, "descent", torch.from_numpy(moment)).dense(form), moment)
        for form in (spec, positive)
    ]
    assert errors[0] < 0.8 * errors[1], errors


def test_refitted_scales_are_the_least_squares_solution():
    spec, weight = SPECS["group"], weight_of(4, 40)
    _, moment = correlated(40)
    start = quantize_weight(weight, spec, "absmax")
    once = refine(weight, spec, start, Curvature(torch.from_numpy(moment)), rounds=1)
    damped = raised(moment)
    root = np.linalg.cholesky(damped)
    q = start.values.numpy()[start.codes_OI.numpy()].astype(np.float64)
    solved = 0
    for o in range(4):
        columns = np.stack([np.where(np.arange(40) // 16 == g, q[o], 0) @ root for g in range(3)], axis=1)
        expected = np.linalg.lstsq(columns, weight[o].double().numpy() @ root, rcond=None)[0]
        if (expected > 0).all():  # scales stay positive
            assert np.allclose(once.scales[0][o].numpy(), expected, rtol=1e-3)
            solved += 1
    assert solved >= 2


def test_the_inverse_root_is_the_cholesky_factor_of_the_inverse():
    curvature = Curvature(torch.from_numpy(correlated(40)[1]))
    expected = np.linalg.cholesky(np.linalg.inv(curvature.damped_LII[0].numpy())).T
    assert np.allclose(curvature.inverse_root_LII[0].numpy(), expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(("size", "count"), [(600, 300), (520, 4)])
def test_factors_in_float32_are_as_near_as_the_rounding_of_the_matrix(size, count):
    """Damped moments of fewer tokens than columns, one feature 1000 times as large; LAPACK in float64 is right."""
    x = np.random.default_rng(0).normal(size=(count, size))
    x[:, 7] *= 1000
    curvature = Curvature(torch.from_numpy(x.T @ x / count).float())
    damped = curvature.damped_LII[0].double().numpy()
    factor = cholesky(curvature.damped_LII[0].clone())
    assert factor.dtype == torch.float32 and torch.equal(factor, factor.tril())
    sizes = np.sqrt(np.outer(np.diag(damped), np.diag(damped)))
    assert (np.abs(factor.double().numpy() @ factor.double().numpy().T - damped) / sizes).max() < 3e-7
    expected, root = np.linalg.inv(damped), curvature.inverse_root_LII[0].double().numpy()
    assert np.abs(root.T @ root - expected).max() < 1e-3 * np.abs(expected).max()
    assert np.allclose(np.tril(root, -1), 0)


@pytest.mark.parametrize("method", ["gptq", "descent"])
@pytest.mark.parametrize("name", ["group", "channel"])
def test_rows_solved_for_in_parts_are_those_solved_for_at_once(method, name, monkeypatch):
    spec, weight, moment = SPECS[name], weight_of(10, 40), torch.from_numpy(correlated(40)[1]).float()
    whole = quantize_weight(weight, spec, method, moment)
    monkeypatch.setattr("qat_lora.quant.initialize.PART", 130)
    parts = quantize_weight(weight, spec, method, moment)
    assert (parts.codes_OI == whole.codes_OI).float().mean() >= 0.99
    assert torch.allclose(parts.scales[0], whole.scales[0], rtol=1e-2)


BOOKS = {
    "half": ([0.0, 1.0, 2.0, 3.0], 1.5, True),
    "asymmetric": ([0.0, 1.0, 2.0, 3.0], torch.full((50, 7), 1.0).double(), True),
    "table": ([-1.0, -0.3, 0.2, 1.0], 0.0, False),
}


@pytest.mark.parametrize("book", BOOKS)
def test_snapping_finds_the_nearest_value_and_its_code(book):
    values, zero, counts = BOOKS[book]
    target = torch.randn(50, 7, generator=torch.Generator().manual_seed(0)).double() * 2
    grid = Grid(torch.tensor(values).double(), torch.full((50, 7), 0.7).double(), zero, counts)
    offered = (np.array(values) - np.asarray(zero).flat[0]) * 0.7
    nearest = np.abs(target.numpy()[..., None] - offered).argmin(-1)
    snapped = grid.snap(target / grid.scale + grid.zero)
    assert np.array_equal(grid.codes(snapped).numpy(), nearest)
    assert torch.equal(grid.of_codes(grid.codes(snapped)), snapped)
    assert np.allclose(grid.dense(grid.codes(snapped)).numpy(), offered[nearest])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_descent_never_raises_a_rows_error_and_ends_where_it_stays(dtype):
    """Row by row, in the metric that it is given; rows are problems of their own, so their order means nothing."""
    weight, curvature = weight_of(9, 150).double(), Curvature(torch.from_numpy(correlated(150)[1]))
    metric, slack = curvature.damped_LII, 1e-9 if dtype == torch.float64 else 1e-5
    grid = Grid(torch.arange(4).double(), torch.full((9, 150), 0.8).double(), 1.5, counts=True)
    given = Grid(grid.values.to(dtype), grid.scale.to(dtype), 1.5, counts=True)

    def error_of(codes):
        left = weight - grid.dense(codes)
        return ((left @ metric[0]) * left).sum(1)

    def descended(weight, codes):
        slope = slope_of(weight.to(dtype), given.dense(codes), metric.to(dtype))
        codes, after = descend(slope, metric.to(dtype), given, codes)
        assert torch.allclose(after, slope_of(weight.to(dtype), given.dense(codes), metric.to(dtype)), atol=1e-2)
        return codes

    codes, _ = gptq(weight, curvature.inverse_root_LII, 150, lambda *_: (grid.by_column(0, 150), []))
    errors = [error_of(codes)]
    for _ in range(30):
        codes = descended(weight, codes)
        errors.append(error_of(codes))
        assert (errors[-1] <= errors[-2] * (1 + slack)).all()
    assert torch.equal(descended(weight, codes), codes)
    assert (errors[-1] < errors[0]).all()
    order = torch.randperm(9, generator=torch.Generator().manual_seed(0))
    start, _ = gptq(weight[order], curvature.inverse_root_LII, 150, lambda *_: (grid.by_column(0, 150), []))
    for _ in range(30):
        start = descended(weight[order], start)
    assert torch.equal(start, codes[order])


@pytest.mark.parametrize("book", [[0.0, 1.0, 2.0, 3.0], [-1.0, -0.2, 0.1, 1.0, 2.5]])
@pytest.mark.parametrize("zero", [False, True])
@pytest.mark.parametrize("rows, columns", [(1, 7), (24, 150)])
def test_columns_taken_by_numpy_are_those_of_the_loop(rows, columns, zero, book, monkeypatch):
    """In float64, where no rounding makes another code nearest."""
    draw = torch.Generator().manual_seed(rows)
    damped = torch.from_numpy(correlated(columns)[1])[None].double() + 0.1 * torch.eye(columns, dtype=torch.float64)
    scale = torch.rand(rows, columns, generator=draw, dtype=torch.float64) + 0.5
    zeros = torch.rand(rows, columns, generator=draw, dtype=torch.float64).mul(3) if zero else 1.5
    grid = Grid(torch.tensor(book).double(), scale, zeros, counts=len(book) == 4)
    codes = torch.ones(rows, columns, dtype=torch.uint8)
    weight = 2 * torch.randn(rows, columns, generator=draw, dtype=torch.float64)
    slope, found = slope_of(weight, grid.dense(codes), damped), []
    for numbers, in_one_thread in ((loop.PIECE, 2**15), (loop.PIECE, 10 * rows), (loop.PIECE, 1), (0, 1)):
        monkeypatch.setattr(loop, "PIECE", numbers)
        monkeypatch.setattr("qat_lora.quant.gptq.IN_ONE_THREAD", in_one_thread)
        found.append(descend(slope, damped, grid, codes))
    assert not torch.equal(found[0][0], codes)
    for other in found[1:]:
        assert torch.equal(found[0][0], other[0])
        assert torch.allclose(found[0][1], other[1], rtol=1e-9, atol=1e-9)
    assert torch.allclose(found[0][1], slope_of(weight, grid.dense(found[0][0]), damped), rtol=1e-9, atol=1e-9)
