"""QuantLinear against a dense layer whose weight is rebuilt in numpy from the stored bytes."""

import copy

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from qat_lora.errors import ModelError
from qat_lora.layers.quant_linear import Dense, Packed, QuantLinear, dense_linear
from qat_lora.quant.initialize import quantize_weight
from qat_lora.quant.spec import QuantSpec

SPECS = {
    "group": QuantSpec(bits=3, code="integer", sharing="group", group_size=8),
    "channel": QuantSpec(bits=2, code="half", sharing="channel"),
    "tensor": QuantSpec(bits=2, code="half", sharing="tensor"),
    "lowrank": QuantSpec(bits=4, code="lut", sharing="lowrank", group_size=8, rank=3),
}
BOOKS = {"integer": np.arange(-4.0, 4.0), "half": np.array([-1.5, -0.5, 0.5, 1.5])}
SOURCES = {"packed": Packed, "hold_dense": Dense, "train_scales": Packed}
STATES = tuple(SOURCES)
ROWS, COLUMNS = 6, 21


def make(sharing, bias=True, seed=0):
    torch.manual_seed(seed)
    linear = nn.Linear(COLUMNS, ROWS, bias=bias)
    return QuantLinear.from_linear(linear, SPECS[sharing], quantize_weight(linear.weight.data, SPECS[sharing], "mse"))


def put(layer, state):
    if state != "packed":
        getattr(layer, state)()
    return layer


def stored_codes(layer):
    """Code values from the bytes, through Python's big integers."""
    bits = layer.spec.bits
    numbers = [int.from_bytes(bytes(row), "little") for row in layer.codes.tolist()]
    indices = [[n >> (bits * i) & (2**bits - 1) for i in range(COLUMNS)] for n in numbers]
    book = layer.values.detach().numpy() if layer.spec.code == "lut" else BOOKS[layer.spec.code].astype(np.float32)
    return book[np.array(indices)]


def wide(layer, scales):
    if len(scales) == 2:
        return scales[0] @ scales[1]
    (scale,) = scales
    if layer.spec.group_size and scale.shape[1] > 1:
        return np.repeat(scale, layer.spec.group_size, axis=1)[:, :COLUMNS]
    return np.broadcast_to(scale, (ROWS, COLUMNS))


def dense_reference(layer):
    if layer.spec.sharing == "lowrank":  # the product as torch rounds it; the rest is exact in any order
        scale = (layer.scale_a @ layer.scale_b).detach().numpy()
    else:
        scale = wide(layer, [layer.scale.detach().numpy()])
    return torch.from_numpy(stored_codes(layer) * scale)


@pytest.mark.parametrize("sharing", SPECS)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("bias", [True, False])
def test_forward_is_the_dense_layer_bit_for_bit(sharing, state, bias):
    layer = put(make(sharing, bias), state)
    x = torch.randn(2, 5, COLUMNS)
    expected = nn.functional.linear(x, dense_reference(layer), layer.bias)
    assert torch.equal(layer(x), expected)
    assert torch.equal(layer.weight, dense_reference(layer))
    # The weight is rounded once, to the input's type, and the product is the ordinary one.
    low = nn.functional.linear(x.bfloat16(), dense_reference(layer).bfloat16(), layer.bias.bfloat16() if bias else None)
    assert layer(x.bfloat16()).dtype == torch.bfloat16
    assert torch.equal(layer(x.bfloat16()), low)
    dense = dense_reference(layer)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), nn.functional.linear(x, dense, layer.bias))


@pytest.mark.parametrize("sharing", SPECS)
@pytest.mark.parametrize("state", STATES)
def test_the_gradient_reaches_the_input_as_through_a_dense_layer(sharing, state):
    layer = put(make(sharing), state)
    x = torch.randn(2, 5, COLUMNS)
    ours, theirs = (x.clone().requires_grad_() for _ in range(2))
    weigh = torch.randn(2, 5, ROWS)
    (layer(ours) * weigh).sum().backward()
    (nn.functional.linear(theirs, dense_reference(layer), layer.bias.detach()) * weigh).sum().backward()
    assert torch.equal(ours.grad, theirs.grad)
    if state != "train_scales":
        assert all(p.grad is None for p in layer.parameters())


@pytest.mark.parametrize("sharing", SPECS)
def test_scale_gradients_are_float64_finite_differences(sharing):
    layer = put(make(sharing), "train_scales")
    x, weigh = torch.randn(7, COLUMNS), torch.randn(7, ROWS)
    (layer(x) * weigh).sum().backward()
    q, x64, w64 = stored_codes(layer).astype(np.float64), x.double().numpy(), weigh.double().numpy()
    scales = [s.detach().double().numpy() for s in layer.scales]

    def loss():
        return (w64 * (x64 @ (q * wide(layer, scales)).T)).sum()

    for stored, parameter in zip(scales, layer.scales, strict=True):
        expected = np.zeros_like(stored)
        for at in np.ndindex(*stored.shape):
            kept, step = stored[at], 1e-3  # the loss is linear in one scale, so the step costs no accuracy
            stored[at] = kept + step
            above = loss()
            stored[at] = kept - step
            expected[at] = (above - loss()) / (2 * step)
            stored[at] = kept
        assert parameter.grad is not None
        assert np.allclose(parameter.grad.numpy(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("sharing", SPECS)
def test_bfloat16_inputs_leave_scale_gradients_in_float32(sharing):
    layer = put(make(sharing), "train_scales")
    layer(torch.randn(7, COLUMNS).bfloat16()).float().square().sum().backward()
    assert all(s.dtype == torch.float32 and s.grad.dtype == torch.float32 for s in layer.scales)
    assert all(s.grad.abs().sum() > 0 for s in layer.scales)


class CountProducts(TorchDispatchMode):
    """Counts matrix products, apart those that an axis of the input takes part in."""

    NAMES = ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul", "mv", "einsum")

    def __init__(self, tokens):
        super().__init__()
        self.tokens, self.of_input, self.of_scales = tokens, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in self.NAMES:
            shapes = [a.shape for a in args if isinstance(a, torch.Tensor)]
            if any(self.tokens in shape for shape in shapes):
                self.of_input += 1
            else:
                self.of_scales += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("sharing", SPECS)
@pytest.mark.parametrize("state", STATES)
def test_one_product_a_forward_whatever_the_rank(sharing, state):
    layer = put(make(sharing), state)
    x = torch.randn(1, 53, COLUMNS, requires_grad=True)
    with CountProducts(53) as forward:
        y = layer(x)
    forms_weight = sharing == "lowrank" and state != "hold_dense"
    assert (forward.of_input, forward.of_scales) == (1, int(forms_weight))
    with CountProducts(53) as backward:
        y.sum().backward()
    assert backward.of_input == (2 if state == "train_scales" else 1)


def test_the_weight_cannot_be_assigned_in_any_way():
    layer = make("group")
    for value in (torch.zeros(ROWS, COLUMNS), nn.Parameter(torch.zeros(ROWS, COLUMNS)), None):
        with pytest.raises(ModelError, match="cannot be assigned"):
            layer.weight = value
    with pytest.raises(ModelError, match="cannot be assigned"):
        layer.register_parameter("weight", nn.Parameter(torch.zeros(ROWS, COLUMNS)))
    with pytest.raises(ModelError, match="cannot be assigned or merged into"):
        layer.weight.data += 1.0  # PEFT's merge; on a computed tensor it would be lost
    with pytest.raises(ModelError, match="cannot be assigned or merged into"):
        layer.weight.data = torch.zeros(ROWS, COLUMNS)
    assert type(layer.weight.detach()) is type(layer.weight + 1) is torch.Tensor
    assert isinstance(layer, nn.Linear) and "weight" not in dict(layer.named_parameters())


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("sharing", ["group", "lowrank"])
def test_what_is_kept_moves_along(sharing, state):
    layer = put(make(sharing), state).double()
    x = torch.randn(3, COLUMNS, dtype=torch.float64)
    assert layer.weight.dtype == torch.float64 and layer.codes.dtype == torch.uint8
    assert torch.allclose(layer(x), nn.functional.linear(x, dense_reference(layer).double(), layer.bias), rtol=1e-6)
    moved = layer.to("meta")
    kept = moved.source.kept
    assert type(moved.source) is SOURCES[state] and (kept is None) == (state == "packed")
    assert kept is None or kept.is_meta


def test_states_follow_one_another_without_stale_weights():
    layer, x = make("group"), torch.randn(3, COLUMNS)
    before = layer(x).detach()
    layer.hold_dense(torch.bfloat16)
    assert layer.weight.dtype == torch.bfloat16
    layer.train_scales()
    with torch.no_grad():
        layer.scale.mul_(2)
    doubled = nn.functional.linear(x, dense_reference(layer), layer.bias)
    assert torch.equal(layer(x), doubled) and not torch.allclose(doubled, before)
    layer.hold_dense()
    assert torch.equal(layer(x), doubled) and not layer.scale.requires_grad
    layer.materialize()
    assert type(layer.source) is Packed
    assert torch.equal(layer(x), doubled)
    twin = copy.deepcopy(put(layer, "hold_dense"))
    assert torch.equal(twin(x), doubled)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("sharing", SPECS)
def test_state_dict_round_trip(sharing, state):
    first, second = put(make(sharing), state), put(make(sharing, seed=1), state)
    x = torch.randn(3, COLUMNS)
    assert not torch.equal(first(x), second(x))
    scales = {"scale_a", "scale_b"} if sharing == "lowrank" else {"scale"}
    table = {"values"} if sharing == "lowrank" else set()
    assert set(first.state_dict()) == {"codes", "bias"} | scales | table
    second.load_state_dict(first.state_dict())
    assert torch.equal(first(x), second(x))


def test_scales_and_tables_are_float32_whatever_the_default_type():
    torch.set_default_dtype(torch.bfloat16)
    try:
        layer = QuantLinear(COLUMNS, ROWS, SPECS["lowrank"], bias=True)
    finally:
        torch.set_default_dtype(torch.float32)
    kinds = {name: tensor.dtype for name, tensor in layer.state_dict().items()}
    assert {kinds.pop("scale_a"), kinds.pop("scale_b"), kinds.pop("values")} == {torch.float32}
    assert kinds == {"codes": torch.uint8, "bias": torch.bfloat16}


def test_the_layer_of_a_bfloat16_linear_keeps_its_bias():
    linear = nn.Linear(COLUMNS, ROWS, dtype=torch.bfloat16)
    layer = QuantLinear.from_linear(linear, SPECS["group"], quantize_weight(linear.weight.data, SPECS["group"], "mse"))
    assert layer.bias.dtype == torch.bfloat16 and torch.equal(layer.bias, linear.bias)
    assert layer.scale.dtype == torch.float32


@pytest.mark.parametrize("sharing", SPECS)
def test_stored_bits_are_those_of_the_stored_tensors(sharing):
    layer = make(sharing)
    state = layer.state_dict()
    scales = sum(t.numel() for name, t in state.items() if name not in ("codes", "bias"))
    assert layer.stored_bits == ROWS * COLUMNS * layer.spec.bits + 16 * scales


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("sharing", SPECS)
def test_the_way_back_is_the_same_layer(sharing, state):
    layer = put(make(sharing), state)
    dense = dense_linear(layer)
    assert type(dense) is nn.Linear and torch.equal(dense.weight, dense_reference(layer))
    assert torch.equal(dense.bias, layer.bias)
    again = QuantLinear.from_stored(dense, layer.spec, layer.stored())
    assert torch.equal(again.weight, layer.weight) and torch.equal(again.bias, layer.bias)


def test_a_dense_bfloat16_weight_takes_a_float32_bias():
    layer = make("group")
    layer.hold_dense(torch.bfloat16)
    assert layer(torch.randn(3, COLUMNS).bfloat16()).dtype == torch.bfloat16
