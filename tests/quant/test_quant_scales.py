"""Scales: shapes at odd sizes, optimality against brute force, low-rank fits against plain SVD."""

import numpy as np
import pytest
import torch

from qat_lora.quant import scales as S
from qat_lora.quant.initialize import quantize_weight
from qat_lora.quant.spec import QuantSpec

SHARINGS = {
    "tensor": QuantSpec(bits=3, code="integer", sharing="tensor"),
    "channel": QuantSpec(bits=3, code="integer", sharing="channel"),
    "group": QuantSpec(bits=3, code="integer", sharing="group", group_size=4),
    "wide group": QuantSpec(bits=3, code="integer", sharing="group", group_size=64),
    "lowrank": QuantSpec(bits=3, code="integer", sharing="lowrank", group_size=4, rank=2),
}
ASYMMETRIC = QuantSpec(bits=3, code="asymmetric", sharing="group", group_size=16)


def mse_scale(weight, spec, importance=None):
    return S.clip_scale(weight, spec, S.importance_cost(weight, spec, importance))


def random(*shape, seed=0, scale=1.0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * scale


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("shape", [(5, 11), (1, 1), (3, 4), (2, 9)])
def test_every_weight_gets_the_scale_of_its_group(sharing, shape):
    spec, (rows, columns) = SHARINGS[sharing], shape
    shapes = S.scale_shapes(spec, rows, columns)
    assert sum(int(np.prod(s)) for s in shapes.values()) == spec.scale_count(rows, columns)
    parts = tuple(random(*s, seed=i) for i, s in enumerate(shapes.values()))
    wide = S.expand(parts, spec.group_size, rows, columns).expand(rows, columns)
    for o in range(rows):
        for i in range(columns):
            if sharing == "lowrank":
                expected = sum(parts[0][o, r].item() * parts[1][r, i].item() for r in range(2))
            elif sharing == "tensor":
                expected = parts[0][0, 0].item()
            else:
                expected = parts[0][o, i // (spec.group_size or columns)].item()
            assert wide[o, i].item() == pytest.approx(expected, rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("sharing", ["tensor", "channel", "group"])
def test_absmax_maps_the_largest_to_the_end_of_the_book(sharing):
    spec, weight = SHARINGS[sharing], random(5, 11)
    scale = S.absmax_scale(weight, spec)
    w = weight.numpy()
    if sharing == "tensor":
        expected = [[np.abs(w).max()]]
    elif sharing == "channel":
        expected = np.abs(w).max(1, keepdims=True)
    else:
        expected = np.stack([np.abs(w[:, s : s + 4]).max(1) for s in (0, 4, 8)], axis=1)
    assert np.allclose(scale.numpy(), np.asarray(expected) / 3.5, rtol=1e-6)


def brute_force(members, book, importance, widest):
    """The least error over a dense grid of clips, float64."""
    errors = []
    for scale in np.linspace(0.2, 1.0, 1000) * widest:
        q = book[np.abs(members[:, None] / scale - book).argmin(1)] * scale
        errors.append((importance * (q - members) ** 2).sum())
    return min(errors)


@pytest.mark.parametrize("code", ["half", "integer", "lut"])
@pytest.mark.parametrize("weighted", [False, True])
def test_mse_scale_is_close_to_the_best_of_all_clips(code, weighted):
    spec = QuantSpec(bits=3, code=code, sharing="group", group_size=64)
    weight = random(4, 150, seed=3)
    importance = random(150, seed=4).square() if weighted else None
    scale = mse_scale(weight, spec, importance)
    book = {"half": np.arange(8) - 3.5, "integer": np.arange(8) - 4.0, "lut": np.linspace(-1, 1, 8)}[code]
    full = 1.0 if code == "lut" else 3.5
    ours = best = plain = 0.0
    for o in range(4):
        for g, start in enumerate((0, 64, 128)):
            members = weight[o, start : start + 64].double().numpy()
            weights = importance[start : start + 64].double().numpy() if weighted else np.ones_like(members)

            def error(s, members=members, weights=weights):
                q = book[np.abs(members[:, None] / s - book).argmin(1)] * s
                return (weights * (q - members) ** 2).sum()

            ours += error(scale[o, g].item())
            plain += error(np.abs(members).max() / full)
            best += brute_force(members, book, weights, np.abs(members).max() / full)
    assert best * 0.999 <= ours <= best * 1.01
    assert ours < plain


def test_rows_of_zeros_keep_a_scale_that_divides():
    spec = SHARINGS["channel"]
    for scale in (S.absmax_scale(torch.zeros(2, 3), spec), mse_scale(torch.zeros(2, 3), spec)):
        assert (scale > 0).all() and (scale.half() > 0).all()
    assert S.away_from_zero(torch.tensor([0.0, -0.0, 1e-12, -1e-12, -2.0])).abs().min() >= S.TINY
    assert S.away_from_zero(torch.tensor([-3.0, 2.0])).tolist() == [-3, 2]


def snapped_error(weight, scale, book):
    """Squared error after every weight takes its nearest code under `scale`, float64 numpy."""
    scale = np.where(np.abs(scale) < 1e-6, 1e-6, scale)
    q = book[np.abs((weight / scale)[..., None] - book).argmin(-1)]
    return ((q * scale - weight) ** 2).sum()


@pytest.mark.parametrize(("bits", "rank"), [(4, 2), (4, 8), (2, 8)])
def test_low_rank_scales_beat_the_svd_they_start_from(bits, rank):
    spec = QuantSpec(bits=bits, code="lut", sharing="lowrank", group_size=16, rank=rank)
    weight = random(48, 80, seed=1) * (0.5 + random(48, 1, seed=2).abs())
    a, b = S.low_rank_scales(weight, spec)
    assert a.shape == (48, rank) and b.shape == (rank, 80)
    book, w = np.linspace(-1, 1, 2**bits), weight.double().numpy()
    group = QuantSpec(bits=bits, code="lut", sharing="group", group_size=16)
    wide = np.repeat(mse_scale(weight, group).double().numpy(), 16, axis=1)
    u, s, vh = np.linalg.svd(wide, full_matrices=False)
    start = (u[:, :rank] * s[:rank]) @ vh[:rank]
    ours, plain = snapped_error(w, (a @ b).double().numpy(), book), snapped_error(w, start, book)
    assert ours < 0.9 * plain, (ours, plain)
    assert torch.allclose(a.norm(dim=0), b.norm(dim=1), rtol=1e-3)  # balanced, so float16 holds both


def test_low_rank_scales_of_a_narrow_matrix_are_padded():
    spec = QuantSpec(bits=4, code="lut", sharing="lowrank", group_size=128, rank=8)
    a, b = S.low_rank_scales(random(3, 5), spec)
    assert a.shape == (3, 8) and b.shape == (8, 5)
    assert torch.isfinite(a).all() and torch.isfinite(b).all() and (a[:, 3:] == 0).all()


def test_asymmetric_codes_hold_zero_exactly_and_one_sided_groups_well():
    spec = ASYMMETRIC
    weight = random(6, 32).abs() + 0.5
    weight[:, ::5] = 0.0
    lopsided = quantize_weight(weight, spec, "mse")
    assert (lopsided.dense(spec)[:, ::5] == 0).all()
    even = QuantSpec(bits=3, code="integer", sharing="group", group_size=16)
    error = [float((quantize_weight(weight, s, "mse").dense(s) - weight).square().mean()) for s in (spec, even)]
    assert error[0] < 0.4 * error[1]
    full = quantize_weight(weight, spec, "absmax")
    ratio = weight.numpy() / np.repeat(full.scales[0].numpy(), 16, 1) + np.repeat(full.whole[0].numpy(), 16, 1)
    assert np.array_equal(full.codes_OI.numpy(), np.clip(np.floor(ratio + 0.5), 0, 7))


def test_the_clip_is_the_best_of_all_on_a_short_last_group_too():
    weight, importance = random(3, 40), torch.rand(40, generator=torch.Generator().manual_seed(0)) + 0.1
    scale, zero = S.range_scale(weight, ASYMMETRIC, S.importance_cost(weight, ASYMMETRIC, importance))
    assert scale.shape == zero.shape == (3, 3) and torch.equal(scale, scale.half().float())
    for o in range(3):
        for g, start in enumerate((0, 16, 32)):
            w, cost = (a[start : start + 16].double().numpy() for a in (weight[o], importance))

            def error(s, z, w=w, cost=cost):
                return (cost * ((np.clip(np.round(w / s) + z, 0, 7) - z) * s - w) ** 2).sum()

            low, high = min(w.min(), 0), max(w.max(), 0)
            found = [error(c * (high - low) / 7, round(-low / ((high - low) / 7))) for c in np.linspace(0.2, 1, 400)]
            assert error(scale[o, g].item(), zero[o, g].item()) <= min(found) * 1.05
