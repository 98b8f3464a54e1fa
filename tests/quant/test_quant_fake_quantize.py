"""Fake-quantisation against formulas worked out one weight at a time in float64, and against finite differences."""

import numpy as np
import pytest
import torch

from qat_lora.layers.latent import fake_quantize, round_through
from qat_lora.quant.codes import code_values, decode, encode, nearest
from qat_lora.quant.scales import expand, scale_shapes
from qat_lora.quant.spec import QuantSpec

BOOKS = [("half", 2), ("half", 4), ("integer", 3), ("integer", 4), ("lut", 2), ("lut", 4)]


def spec_of(code, bits, sharing="group"):
    sizes = {"group": {"group_size": 4}, "lowrank": {"group_size": 4, "rank": 2}}.get(sharing, {})
    return QuantSpec(bits=bits, code=code, sharing=sharing, **sizes)


def draw(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape))


def book_of(spec):
    """An uneven table for `lut`; the fixed grids for the others."""
    if spec.code != "lut":
        return code_values(spec).double()
    return torch.from_numpy(np.sort(np.random.default_rng(9).normal(size=2**spec.bits)))


def by_hand(weight, scale, gradient, book, low, high):
    """LSQ one weight at a time: (ŵ, dL/dw, dL/ds, dL/dv)."""
    out, dw, ds, dv = np.zeros_like(weight), np.zeros_like(weight), np.zeros_like(weight), np.zeros_like(book)
    for i in np.ndindex(weight.shape):
        ratio = weight[i] / scale[i]
        k = int(np.abs(book - ratio).argmin())
        out[i] = book[k] * scale[i]
        is_inside = low <= ratio <= high
        dw[i] = gradient[i] if is_inside else 0.0
        ds[i] = gradient[i] * (book[k] - ratio if is_inside else book[k])
        dv[k] += gradient[i] * scale[i]
    return out, dw, ds, dv


@pytest.mark.parametrize(("code", "bits"), BOOKS)
@pytest.mark.parametrize("sharing", ["tensor", "channel", "group", "lowrank"])
def test_values_and_gradients_are_lsq(code, bits, sharing):
    spec = spec_of(code, bits, sharing)
    weight = draw(5, 11).requires_grad_()
    stored = [
        (draw(*shape, seed=i).abs() * 0.4 + 0.05).requires_grad_()
        for i, shape in enumerate(scale_shapes(spec, 5, 11).values())
    ]
    book = book_of(spec).requires_grad_(code == "lut")
    wide = expand(tuple(stored), spec.group_size, 5, 11)
    gradient = draw(5, 11, seed=7)
    out = fake_quantize(weight, wide, spec, book)
    out.backward(gradient)
    per_weight = wide.detach().expand(5, 11).numpy()
    ends = (book.detach().numpy()[0], book.detach().numpy()[-1])
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1)) if code == "half" else ends
    expected = by_hand(weight.detach().numpy(), per_weight, gradient.numpy(), book.detach().numpy(), low, high)
    assert np.array_equal(out.detach().numpy(), expected[0])
    assert np.allclose(weight.grad.numpy(), expected[1], atol=1e-12)
    assert 0 < np.mean(expected[1] == 0) < 1, "the draw must hold clipped and free weights"
    again = [s.detach().requires_grad_() for s in stored]
    (expand(tuple(again), spec.group_size, 5, 11).expand(5, 11) * torch.from_numpy(expected[2])).sum().backward()
    for ours, theirs in zip(stored, again, strict=True):
        assert torch.allclose(ours.grad, theirs.grad, atol=1e-12)
    if code == "lut":
        assert np.allclose(book.grad.numpy(), expected[3], atol=1e-12)


@pytest.mark.parametrize(("code", "bits"), BOOKS)
def test_where_codes_stand_still_gradients_are_derivatives(code, bits):
    """With respect to the table always, and to the scale of clipped weights, rounding takes no part."""
    spec = spec_of(code, bits, "channel")
    book = book_of(spec).requires_grad_(code == "lut")
    far = (10 * draw(3, 6).sign() * 2**bits).requires_grad_(False)
    scale = (draw(3, 1, seed=1).abs() + 0.5).requires_grad_()
    assert torch.autograd.gradcheck(lambda s: fake_quantize(far, s, spec, book.detach()), scale)
    if code == "lut":
        weight = draw(3, 6)
        assert torch.autograd.gradcheck(lambda v: fake_quantize(weight, scale.detach(), spec, v), book)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("code", "bits"), [*BOOKS, ("integer", 8), ("half", 8)])
def test_the_forward_is_what_will_be_saved_to_the_last_bit(code, bits, dtype):
    spec = spec_of(code, bits, "channel")
    weight, scale = draw(40, 64).to(dtype), (draw(40, 1, seed=2).abs() / 2**bits + 1e-3).to(dtype)
    weight[0, :8] = scale[0] * torch.tensor([0.0, -0.0, 0.5, -0.5, 1.5, 0.49999997, -1e-12, 1e9], dtype=dtype)
    values = book_of(spec).to(dtype)
    codes = encode(weight / scale, values)
    assert torch.equal(nearest(weight / scale, values, spec)[1], codes)
    assert torch.equal(fake_quantize(weight, scale, spec, values), decode(codes, values) * scale)


def test_two_bits_let_outer_weights_train_that_a_plain_range_would_freeze():
    spec = spec_of("half", 2, "tensor")
    weight = torch.tensor([[-2.1, -1.9, -1.6, 1.6, 1.9, 2.1]], dtype=torch.float64, requires_grad=True)
    fake_quantize(weight, torch.ones(1, 1, dtype=torch.float64), spec, code_values(spec)).sum().backward()
    assert weight.grad.tolist() == [[0, 1, 1, 1, 1, 0]]


def test_straight_through_lets_weights_train_that_the_range_would_freeze():
    spec, scale = spec_of("integer", 3, "tensor"), torch.full((1, 1), 0.5, dtype=torch.float64, requires_grad=True)
    weight = torch.tensor([[-9.0, -1.1, 0.3, 1.4, 9.0]], dtype=torch.float64)
    slopes = {}
    for gradient in ("lsq", "ste"):
        trained = weight.clone().requires_grad_()
        scale.grad = None
        out = fake_quantize(trained, scale, spec, code_values(spec), gradient=gradient)
        out.sum().backward()
        slopes[gradient] = trained.grad.tolist()[0], float(scale.grad)
        assert torch.equal(out, encode_by_hand(weight, 0.5))
    position, codes = weight / 0.5, encode_by_hand(weight, 0.5) / 0.5
    assert slopes["lsq"][0] == [0, 1, 1, 1, 0] and slopes["ste"][0] == [1] * 5
    assert slopes["ste"][1] == pytest.approx(float((codes - position).sum()))
    assert slopes["lsq"][1] == pytest.approx(float((codes - position)[0, 1:4].sum()) - 4 + 3)


def encode_by_hand(weight, scale):
    return (weight / scale).round().clamp(-4, 3) * scale


def test_rounding_passes_gradients_on():
    x = torch.tensor([0.2, 1.5, -2.7], requires_grad=True)
    y = round_through(x)
    y.backward(torch.tensor([1.0, 2.0, 3.0]))
    assert y.tolist() == [0, 2, -3] and x.grad.tolist() == [1, 2, 3]


def test_fixed_zero_points_shift_the_range():
    spec, weight = QuantSpec(bits=3, code="asymmetric", sharing="channel"), draw(4, 12).requires_grad_()
    scale, zero = torch.full((4, 1), 0.3, dtype=torch.float64, requires_grad=True), torch.tensor([[0.0], [2], [5], [7]])
    out = fake_quantize(weight, scale, spec, code_values(spec), zero.double())
    gradient = draw(4, 12, seed=3)
    out.backward(gradient)
    slopes = []
    for o, z in enumerate((0, 2, 5, 7)):
        book = np.arange(8.0) - z
        hand = by_hand(weight.detach().numpy()[o], np.full(12, 0.3), gradient.numpy()[o], book, book[0], book[-1])
        assert np.allclose(out.detach().numpy()[o], hand[0]) and np.allclose(weight.grad.numpy()[o], hand[1])
        slopes.append(hand[2].sum())
    assert np.allclose(scale.grad.numpy()[:, 0], slopes)
