"""A layer's codes and start: optimal in the metric given, and better together than one after the other."""

import numpy as np
import pytest
import torch

from qat_lora.errors import ConfigError
from qat_lora.layers.calibrate.fit import (
    EFFORTS,
    INPUT_FLOOR,
    OUTPUT_FLOOR,
    FitSettings,
    Metric,
    _move_out,
    _Root,
    fit_layers,
    together,
)
from qat_lora.options import QuantizeOptions
from qat_lora.plan.quantize import layer_work
from qat_lora.quant import gptq
from qat_lora.quant.spec import QuantSpec
from qat_lora.runtime import loop

SPEC = QuantSpec(bits=2, code="half", sharing="group", group_size=16)


def moment_of(size, seed, tokens=600):
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(tokens, size)) * np.geomspace(4, 0.3, size) @ np.linalg.qr(draw.normal(size=(size, size)))[0]
    return x.T @ x / tokens


def fit_layer(weight, spec, settings, moment=None, outputs=None):
    return fit_layers([weight], spec, settings, [moment], [outputs])[0]


def correction(error, rank, *metric):
    return Metric.of(error, *metric).correction(error, rank)[0]


def cost(error, inputs, outputs):
    return float(np.trace(outputs @ error @ inputs @ error.T))


@pytest.mark.parametrize("rank", [1, 5])
def test_the_correction_is_the_best_in_both_metrics(rank):
    """The bound is Eckart-Young's: the tail of the singular values between both Cholesky roots."""
    error = np.random.default_rng(0).normal(size=(20, 16))
    inputs, outputs = moment_of(16, 1), moment_of(20, 2)
    given = torch.from_numpy(inputs), torch.from_numpy(outputs)
    factors = correction(torch.from_numpy(error), rank, *given)
    floors = [m + f * np.diag(m).mean() * np.eye(len(m)) for m, f in ((inputs, INPUT_FLOOR), (outputs, OUTPUT_FLOOR))]
    roots = [np.linalg.cholesky(m) for m in floors]
    values = np.linalg.svd(roots[1].T @ error @ roots[0], compute_uv=False)
    left = error - factors.b_OR.double().numpy() @ factors.a_RI.double().numpy()
    assert cost(left, *floors) == pytest.approx(np.square(values[rank:]).sum(), rel=1e-4)
    one_sided = correction(torch.from_numpy(error), rank, given[0])
    other = error - one_sided.b_OR.double().numpy() @ one_sided.a_RI.double().numpy()
    assert cost(left, *floors) < 0.95 * cost(other, *floors)
    uncorrected = Metric.of(torch.from_numpy(error), *given).correction(torch.from_numpy(error), 8, rank)[1]
    assert uncorrected == pytest.approx(np.square(values[rank:]).sum(), rel=1e-9)


def test_a_diagonal_counts_as_the_matrix_that_it_is_the_diagonal_of():
    error, inputs = torch.randn(12, 16, generator=torch.Generator().manual_seed(0)), torch.from_numpy(moment_of(16, 1))
    outputs = torch.rand(12, generator=torch.Generator().manual_seed(1)) + 0.1
    ours, theirs = (correction(error, 3, inputs, given) for given in (outputs, outputs.diag()))
    assert torch.allclose(ours.b_OR @ ours.a_RI, theirs.b_OR @ theirs.a_RI, atol=1e-5)


@pytest.mark.parametrize("method", ["mse", "gptq", "descent"])
@pytest.mark.parametrize("whole", [True, False])
def test_codes_and_adapter_found_together_leave_less(method, whole):
    inputs, outputs = moment_of(64, 1), moment_of(48, 2) if whole else None
    given = torch.from_numpy(inputs), None if outputs is None else torch.from_numpy(outputs)
    left = {0: 0.0, 6: 0.0}
    for seed in range(8):  # one alone may gain nothing
        draw = torch.Generator().manual_seed(seed)
        weight = torch.randn(48, 64, generator=draw) * 0.1
        weight += torch.randn(48, 4, generator=draw) @ torch.randn(4, 64, generator=draw) * 0.05
        for joint in left:
            fit = fit_layer(weight, SPEC, FitSettings(method, 10, joint), *given)
            assert fit.factors.a_RI.shape == (10, 64)
            corrected = fit.quantised.dense(SPEC) + fit.factors.b_OR[:, :6] @ fit.factors.a_RI[:6]
            error = (weight - corrected).double().numpy()
            left[joint] += cost(error, inputs, np.eye(48) if outputs is None else outputs)
    assert left[6] < 0.95 * left[0], left


def test_without_any_metric_joint_fitting_is_loftq_and_never_worse_than_its_first_turn():
    weight = torch.randn(32, 48, generator=torch.Generator().manual_seed(3))
    errors = []
    for joint in (0, 4):
        fit = fit_layer(weight, SPEC, FitSettings("absmax", 4, joint))
        errors.append(float((weight - fit.quantised.dense(SPEC) - fit.factors.b_OR @ fit.factors.a_RI).norm()))
    assert errors[1] < errors[0]


def test_large_matrices_are_corrected_without_a_whole_svd_as_well_as_with_one(monkeypatch):
    """Noise is the hard case: its singular values lie close together. Twice the same, whatever the random state."""
    error = torch.randn(220, 180, generator=torch.Generator().manual_seed(0))
    metric = Metric.of(error, torch.from_numpy(moment_of(180, 1)), torch.from_numpy(moment_of(220, 2)))
    values = torch.linalg.svdvals(metric.weigh(error.double()))
    sizes, whole = [], torch.linalg.svd
    monkeypatch.setattr(torch.linalg, "svd", lambda m, **given: sizes.append(min(m.shape)) or whole(m, **given))
    torch.manual_seed(1)
    factors, left = metric.correction(error, 6, 6)
    assert sizes and max(sizes) < 60 and torch.equal(torch.randn(3), torch.manual_seed(1) and torch.randn(3))
    assert torch.equal(metric.correction(error, 6, 6)[0].a_RI, factors.a_RI)
    rest = metric.weigh(error.double() - (factors.b_OR @ factors.a_RI).double()).square().sum()
    assert left == pytest.approx(float(rest), rel=1e-4)
    assert left == pytest.approx(float(values[6:].square().sum()), rel=2e-3)


@pytest.mark.parametrize("start_rank", [0, 4])
def test_features_that_are_huge_everywhere_do_not_break_the_metric(start_rank):
    """As BOS tokens have them: sums in float32 then have eigenvalues far below zero, where Cholesky factors end."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1024, 1536, generator=generator)
    x[::128, :2] = 1e4
    moment = sum(rows.T @ rows for rows in x.split(128)) / len(x)
    lift = INPUT_FLOOR * moment.double().diagonal().mean()
    assert torch.linalg.eigvalsh(moment.double())[0] < -lift, "this case is not hard, so it shows nothing"
    fit = fit_layer(torch.randn(8, 1536, generator=generator), SPEC, FitSettings("mse", start_rank), moment)
    assert fit.quantised.dense(SPEC).isfinite().all()
    if start_rank:
        assert fit.factors.a_RI.isfinite().all() and fit.factors.b_OR.isfinite().all()


def test_the_root_of_an_indefinite_moment_is_that_of_its_nearest_definite_one():
    generator = torch.Generator().manual_seed(0)
    basis = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64)).Q
    values = torch.tensor([5.0, 2.0, 1.0, 0.5, 0.0, -0.3], dtype=torch.float64)
    moment = (basis * values) @ basis.T
    factor = _Root.of(moment, 1e-4).factor
    lift = 1e-4 * moment.diagonal().mean()
    nearest = (basis * (values.clamp_min(0) + lift)) @ basis.T
    torch.testing.assert_close(factor @ factor.T, nearest, rtol=1e-10, atol=1e-12)
    assert torch.equal(factor, factor.tril())


def test_the_settings_refuse_a_joint_rank_without_its_start():
    with pytest.raises(ConfigError, match="joint_rank: 4 is more than --start-rank 2"):
        QuantizeOptions(model="m", start_rank=2, joint_rank=4)


def test_layers_fitted_together_are_those_fitted_alone():
    """The device is given, so they are solved as on an accelerator; nothing but the order of sums may differ."""
    moments = [torch.from_numpy(moment_of(48, seed)).float() for seed in (1, 2, 3)]
    weights = torch.randn(3, 20, 48, generator=torch.Generator().manual_seed(0))
    alone = FitSettings("descent", 6, 4)
    settings = alone._replace(device=torch.device("cpu"))
    assert together(SPEC, settings) and not together(SPEC, alone)
    found = fit_layers(list(weights), SPEC, settings, [*moments], [None] * 3)
    for fit, weight, moment in zip(found, weights, moments, strict=True):
        one = fit_layer(weight, SPEC, alone, moment)
        assert (fit.quantised.codes_OI == one.quantised.codes_OI).float().mean() >= 0.999
        assert torch.allclose(fit.quantised.dense(SPEC), one.quantised.dense(SPEC), atol=1e-3)
        left = [weight - f.quantised.dense(SPEC) - f.factors.b_OR @ f.factors.a_RI for f in (fit, one)]
        costs = [float(((e @ moment) * e).sum()) for e in left]
        assert costs[0] == pytest.approx(costs[1], rel=1e-4)


def test_a_metric_beyond_columns_is_what_an_adapter_with_them_leaves():
    """For any error: the least cost over all A, by least squares between Cholesky roots."""
    draw = np.random.default_rng(4)
    error, columns, inputs, outputs = (
        draw.normal(size=(12, 9)),
        draw.normal(size=(12, 3)),
        moment_of(9, 1),
        moment_of(12, 2),
    )
    root = np.linalg.cholesky(outputs)
    a = np.linalg.lstsq(root.T @ columns, root.T @ error, rcond=None)[0]
    whole, spanned = torch.from_numpy(outputs).float()[None], root @ np.linalg.qr(root.T @ columns)[0]
    old, new = torch.zeros(1, 12, 3), torch.from_numpy(spanned)[None]
    _move_out(whole, old, new)
    beyond = whole[0].double().numpy()
    least = cost(error - columns @ a, inputs, outputs)
    assert cost(error, inputs, beyond) == pytest.approx(least, rel=1e-3)
    assert least < 0.5 * cost(error, inputs, outputs)
    _move_out(whole, new, old)
    np.testing.assert_allclose(whole[0].numpy(), outputs, rtol=1e-5, atol=1e-5)  # as it was


def test_beyond_both_spans_an_error_costs_what_its_best_adapter_leaves_and_small_changes_nearly_so():
    """Against singular values between NumPy's Cholesky roots; B's columns alone are further off."""
    draw = np.random.default_rng(7)
    inputs, outputs, error, change = moment_of(14, 1), moment_of(10, 2), *draw.normal(size=(2, 10, 14))
    roots = np.linalg.cholesky(outputs), np.linalg.cholesky(inputs)
    metric = Metric(*(_Root(torch.from_numpy(root)) for root in roots))
    *spans, left = metric.spans(torch.from_numpy(error), 3)

    def least(x):
        return np.square(np.linalg.svd(roots[0].T @ x @ roots[1], compute_uv=False)[3:]).sum()

    wholes, small = [torch.from_numpy(whole)[None].clone() for whole in (outputs, inputs)], error + 0.01 * change
    for whole, span in zip(wholes, spans, strict=True):
        _move_out(whole, torch.zeros(1, *span.shape), span[None])
    by_b_alone = cost(small, inputs, wholes[0][0].numpy())
    before, after = (cost(x, wholes[1][0].numpy(), wholes[0][0].numpy()) for x in (error, small))
    assert left == pytest.approx(least(error), rel=1e-9) and before == pytest.approx(left, rel=1e-9)
    assert abs(after - least(small)) < 0.5 * abs(by_b_alone - least(small))


@pytest.mark.parametrize("joint_rank", [0, 6])
def test_outputs_that_are_known_whole_are_descended_in(joint_rank):
    inputs, outputs = moment_of(64, 1), moment_of(48, 2)
    given = torch.from_numpy(inputs), torch.from_numpy(outputs)
    left = np.zeros((3, 4))
    for seed in range(4):
        weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(seed))
        for way, (rounds, known) in enumerate(((0, given[1]), (2, given[1]), (2, given[1].diagonal()))):
            effort = EFFORTS["best"]._replace(two_sided_rounds=rounds)
            settings = FitSettings("descent", joint_rank, joint_rank, effort=effort)
            found = fit_layer(weight, SPEC, settings, given[0], known)
            factors = found.factors and correction(weight - found.quantised.dense(SPEC), joint_rank, *given)
            corrected = found.quantised.dense(SPEC) + (factors.b_OR @ factors.a_RI if factors else 0)
            left[way, seed] = cost((weight - corrected).double().numpy(), inputs, outputs)
    one_sided, two_sided, diagonal = left.mean(1)
    assert two_sided < 0.9 * one_sided and (left[1] < left[0]).all()
    assert joint_rank or diagonal == one_sided


@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("joint_rank", [0, 4])
@pytest.mark.parametrize("effort", EFFORTS.values(), ids=EFFORTS)
def test_the_dry_runs_columns_are_those_that_are_solved(effort, joint_rank, coupled, monkeypatch):
    seen, snap = [], gptq.Grid.snap
    monkeypatch.setattr(loop, "PIECE", 0)  # of which a host takes columns by NumPy
    monkeypatch.setattr(gptq.Grid, "snap", lambda *given: (seen.append(1), snap(*given))[1])
    weight = torch.randn(40, 48, generator=torch.Generator().manual_seed(0))
    outputs = torch.from_numpy(moment_of(40, 2)) if coupled else None
    settings = FitSettings("descent", 4, joint_rank, effort=effort)
    fit_layer(weight, SPEC, settings, torch.from_numpy(moment_of(48, 1)), outputs)
    turns = 1 + effort.turns if joint_rank else 1
    planned = layer_work(40, 48, SPEC, turns, True, 2, coupled, effort, bool(joint_rank))
    assert len(seen) == planned.columns
