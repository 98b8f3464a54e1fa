"""GPTQ against the textbook (inverse Hessian formed anew for every column), and what the starts refuse."""

import numpy as np
import pytest
import torch

from qat_lora.errors import ConfigError
from qat_lora.quant.initialize import METHODS, NEED_TEXT, quantize_weight
from qat_lora.quant.presets import PRESETS
from qat_lora.quant.spec import QuantSpec

BOOKS = {
    ("half", 2): np.array([-1.5, -0.5, 0.5, 1.5]),
    ("integer", 3): np.arange(-4.0, 4.0),
    ("lut", 2): np.array([-1, -1 / 3, 1 / 3, 1]).astype(np.float16).astype(np.float64),
}
SPECS = {
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


def wide_scales(result, spec, rows, columns):
    parts = [s.double().numpy() for s in result.scales]
    if spec.step_bits:
        return np.repeat(parts[0] * result.whole[0].numpy(), spec.group_size, axis=1)
    if spec.sharing == "group":
        return np.repeat(parts[0], spec.group_size, axis=1)[:, :columns]
    if len(parts) == 2:
        # As stored and multiplied in float32: a code on an edge must not turn on the order of a sum.
        return (result.scales[0] @ result.scales[1]).double().numpy()
    return np.broadcast_to(parts[0], (rows, columns))


def clip_search(members, importance, book, full):
    """Scale of every row: the best of 17 clips or of four around it, a half and a quarter step away, as float16."""
    widest = np.abs(members).max(1) / full

    def best_of(clips_CN):
        scales_CN = np.maximum(widest * clips_CN, 1e-6)[..., None]
        values = book[np.abs((members / scales_CN)[..., None] - book).argmin(-1)] * scales_CN
        errors_CN = ((values - members) ** 2 * importance).sum(-1)
        return clips_CN[errors_CN.argmin(0), np.arange(len(members))]

    coarse_CN = np.linspace(1.0, 0.2, 17)[:, None] + np.zeros(len(members))
    fine_C1 = np.array([0, -0.025, -0.0125, 0.0125, 0.025])[:, None]
    chosen = np.maximum(widest * best_of(np.minimum(best_of(coarse_CN) + fine_C1, 1.0)), 1e-6)
    return chosen.astype(np.float16).astype(np.float64)


def textbook_gptq(weight, moment, spec, book, scales):
    """Optimal brain surgeon, column by column: every step inverts the Hessian of what is left."""
    w, columns = weight.astype(np.float64), weight.shape[1]
    hessian = moment + 0.01 * np.diag(moment).mean() * np.eye(columns) + 0.2 * np.diag(np.diag(moment))
    codes = np.zeros(w.shape, dtype=np.int64)
    for j in range(columns):
        if spec.sharing == "group":
            if j % spec.group_size == 0:
                stop = min(j + spec.group_size, columns)
                scale = clip_search(w[:, j:stop], np.diag(moment)[j:stop], book, (2**spec.bits - 1) / 2)
        else:
            scale = scales[:, j]
        codes[:, j] = np.abs(w[:, j, None] / scale[:, None] - book).argmin(1)
        inverse = np.linalg.inv(hessian[j:, j:])
        error = (w[:, j] - book[codes[:, j]] * scale) / inverse[0, 0]
        w[:, j:] -= error[:, None] * inverse[0]
    return codes


@pytest.mark.parametrize(("sharing", "columns"), [("group", 40), ("channel", 150), ("tensor", 40), ("lowrank", 40)])
def test_gptq_is_the_textbook_algorithm(sharing, columns):
    spec, weight = SPECS[sharing], weight_of(6, columns)
    _, moment = correlated(columns)
    result = quantize_weight(weight, spec, "gptq", torch.from_numpy(moment))
    scales = wide_scales(result, spec, 6, columns)
    expected = textbook_gptq(weight.numpy(), moment, spec, BOOKS[spec.code, spec.bits], scales)
    assert np.array_equal(result.codes_OI.numpy(), expected)
    if sharing == "group":
        first = clip_search(weight.double().numpy()[:, :16], np.diag(moment)[:16], BOOKS["half", 2], 1.5)
        assert np.allclose(result.scales[0][:, 0].numpy(), first, rtol=2e-3)


def output_error(dense, weight, x):
    return float(np.square(x @ (dense.double().numpy() - weight.double().numpy()).T).mean())


@pytest.mark.parametrize("sharing", SPECS)
def test_each_start_disturbs_fresh_outputs_less_than_the_one_before(sharing):
    columns, spec = 96, SPECS[sharing]
    weight = weight_of(48, columns)
    draw, _ = correlated(columns, tokens=1200)
    seen, fresh = draw[:800], draw[800:]
    moment = torch.from_numpy(seen.T @ seen / len(seen)).float()
    error = {m: output_error(quantize_weight(weight, spec, m, moment).dense(spec), weight, fresh) for m in METHODS}
    assert error["gptq"] < 0.6 * error["mse"], error
    assert error["descent"] < 0.95 * error["gptq"], error
    if sharing != "lowrank":  # whose scales are fitted the same way for all starts
        assert error["mse"] < error["absmax"], error
    if sharing in ("group", "channel"):
        assert error["awq"] < error["mse"], error


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("method", METHODS)
def test_scales_are_float16_numbers_and_codes_fit_every_preset(name, method):
    spec = PRESETS[name].spec_for("model.layers.0.mlp.up_proj")
    columns = 256 if spec.step_bits else 150
    weight = weight_of(10, columns) * 0.02
    _, moment = correlated(columns)
    result = quantize_weight(weight, spec, method, torch.from_numpy(moment).float())
    for stored in (*result.scales, result.values):
        assert stored.dtype == torch.float32 and torch.equal(stored, stored.half().float())
    assert result.codes_OI.dtype == torch.uint8 and int(result.codes_OI.max()) < 2**spec.bits
    dense = result.dense(spec)
    assert dense.shape == weight.shape and torch.isfinite(dense).all()
    chosen = result.values.numpy()[result.codes_OI.numpy()]
    if spec.code == "asymmetric":
        chosen = chosen - np.repeat(result.whole[0].numpy(), spec.group_size, axis=1)[:, :columns]
        assert set(np.unique(result.whole[0].numpy())) <= set(range(2**spec.bits))
    expected = chosen * wide_scales(result, spec, 10, columns)
    if spec.code == "minimum":
        expected = expected - np.repeat(result.scales[1].double().numpy() * result.whole[1].numpy(), spec.group_size, 1)
    assert np.allclose(dense.numpy(), expected, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("method", ["absmax", "mse"])
def test_without_compensation_codes_are_the_nearest_for_the_stored_scales(method):
    spec, weight = SPECS["group"], weight_of(5, 37)
    result = quantize_weight(weight, spec, method)
    ratio = weight.double().numpy() / wide_scales(result, spec, 5, 37)
    assert np.array_equal(result.codes_OI.numpy(), np.abs(ratio[..., None] - BOOKS["half", 2]).argmin(-1))


def test_inputs_that_were_never_seen_do_no_harm():
    _, moment = correlated(32)
    moment[5, :] = moment[:, 5] = 0.0
    for given in (moment, np.zeros_like(moment)):
        result = quantize_weight(weight_of(4, 32), SPECS["group"], "gptq", torch.from_numpy(given))
        assert torch.isfinite(result.dense(SPECS["group"])).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_float_type_is_taken_and_left_unchanged(dtype):
    weight = weight_of(4, 32).to(dtype)
    before = weight.clone()
    quantize_weight(weight, SPECS["group"], "gptq", torch.eye(32))
    assert torch.equal(weight, before)


def test_refusals():
    weight, spec = weight_of(4, 32), SPECS["group"]
    for method in NEED_TEXT:
        with pytest.raises(ConfigError, match=f"{method} needs calibration text"):
            quantize_weight(weight, spec, method)
    with pytest.raises(ConfigError, match="absmax, mse, awq, gptq, descent"):
        quantize_weight(weight, spec, "hqq")
    for bad in (float("nan"), float("inf")):
        broken = weight.clone()
        broken[1, 2] = bad
        with pytest.raises(ConfigError, match="NaN or infinite"):
            quantize_weight(broken, spec, "mse")
    with pytest.raises(ConfigError, match="float16"):
        quantize_weight(weight * 1e6, spec, "mse")
