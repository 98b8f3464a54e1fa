"""Packing against Python's big integers, encoding against a search over the code book, NF4 against QLoRA's numbers."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from qat_lora.quant.codes import (
    SMALL,
    code_values,
    decode,
    encode,
    full_range,
    normal_table,
    pack,
    packed_width,
    unpack,
)
from qat_lora.quant.spec import QuantSpec

NF4 = [-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0]  # bitsandbytes, rounded
NF4 += [0.0795803, 0.1609302, 0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0]


def spec(bits, code):
    return QuantSpec(bits=bits, code=code, sharing="tensor")


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("count", [1, 3, 7, 13, 33])
def test_packed_rows_are_little_endian_big_integers(bits, count):
    codes = np.random.default_rng(bits * 100 + count).integers(0, 2**bits, (3, count), dtype=np.uint8)
    width = (count * bits + 7) // 8
    expected = []
    for row in codes.tolist():
        number = sum(code << (bits * i) for i, code in enumerate(row))
        expected.append(list(number.to_bytes(width, "little")))
    packed = pack(torch.from_numpy(codes), bits)
    assert packed_width(count, bits) == width
    assert packed.dtype == torch.uint8 and packed.tolist() == expected
    assert torch.equal(unpack(packed, bits, count), torch.from_numpy(codes))


def test_code_books_by_hand():
    assert code_values(spec(2, "half")).tolist() == [-1.5, -0.5, 0.5, 1.5]
    assert code_values(spec(3, "integer")).tolist() == [-4, -3, -2, -1, 0, 1, 2, 3]
    assert code_values(spec(2, "lut")).tolist() == np.float16([-1, -1 / 3, 1 / 3, 1]).tolist()  # as it is stored
    assert (full_range(spec(4, "integer")), full_range(spec(2, "half")), full_range(spec(4, "lut"))) == (7.5, 1.5, 1)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("code", ["half", "integer", "lut"])
def test_encode_finds_the_nearest_of_all_values(bits, code):
    values = code_values(spec(bits, code))
    x = torch.randn(90, 50, generator=torch.Generator().manual_seed(bits), dtype=torch.float64) * values[-1]
    distance = np.abs(x.numpy()[..., None] - values.double().numpy())
    codes = encode(x, values)
    assert codes.dtype == torch.uint8
    assert np.array_equal(codes.numpy(), distance.argmin(-1))
    assert x.numel() > SMALL > len(x) and torch.equal(torch.stack([encode(row, values) for row in x]), codes)
    assert np.array_equal(decode(codes, values).numpy(), values.numpy()[distance.argmin(-1)])


def test_an_uneven_table_is_searched_too():
    values = torch.tensor([-1.0, -0.9, 0.1, 4.0])
    x = torch.randn(700, generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 2
    nearest = [min(range(4), key=lambda i: abs(float(values[i].double()) - v)) for v in x.tolist()]
    assert encode(x, values).tolist() == nearest


def test_ties_go_up_and_what_is_outside_is_clipped():
    integers, halves = code_values(spec(3, "integer")), code_values(spec(2, "half"))
    assert decode(encode(torch.tensor([-3.5, -0.5, 0.5, 2.5]), integers), integers).tolist() == [-3, 0, 1, 3]
    for many in (1, SMALL):
        found = decode(encode(torch.tensor([-1.0, 0.0, 1.0] * many), halves), halves)
        assert found.tolist() == [-0.5, 0.5, 1.5] * many
    assert encode(torch.tensor([-1e9, -float("inf"), 1e9, float("inf")]), halves).tolist() == [0, 0, 3, 3]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("seed", range(6))
def test_the_look_up_finds_what_a_search_finds_at_every_midpoint_and_beside_it(dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    values = (torch.randn(2 ** (seed + 1), generator=generator) * 10 ** (seed - 3)).sort().values
    values[seed // 4 * 3 :: 7] = values[0] if seed == 4 else values[seed // 4 * 3 :: 7]  # several at one value
    values = values.sort().values
    midpoints = ((values[1:] + values[:-1]) / 2).to(dtype)
    beside = [torch.nextafter(midpoints, torch.full_like(midpoints, end)) for end in (-torch.inf, torch.inf)]
    ends = torch.tensor([-torch.inf, torch.inf, 0.0, -3e38, 3e38]).to(dtype)
    noise = torch.randn(3 * SMALL, generator=generator).to(dtype) * values[-1].to(dtype)
    x = torch.cat([midpoints, *beside, ends, noise])
    assert torch.equal(encode(x, values), torch.searchsorted(midpoints, x, right=True).to(torch.uint8))


@pytest.mark.parametrize("bits", [2, 4])
def test_what_is_no_number_gets_a_code_of_the_book(bits):
    values = normal_table(bits)
    assert int(encode(torch.full((2 * SMALL,), torch.nan), values).max()) < len(values)


def test_the_normal_table_is_nf4_at_four_bits():
    assert normal_table(4).tolist() == pytest.approx(NF4, abs=2e-6)


@pytest.mark.parametrize("bits", range(2, 9))
def test_normal_tables_are_sorted_with_a_zero_and_both_ends(bits):
    table = normal_table(bits)
    assert len(table) == 2**bits and (table.diff() > 0).all()
    assert table[2 ** (bits - 1) - 1] == 0 and table[0] >= -1 and table[-1] == 1


ON_XLA = """
import torch, torch_xla
from qat_lora.quant.codes import SMALL, decode, normal_table
for bits in (2, 4, 5):
    table, codes = normal_table(bits), torch.arange(3 * 2**bits).remainder(2**bits).to(torch.uint8).view(3, -1)
    both = []
    for device in (torch.device("cpu"), torch_xla.device()):
        values = table.to(device).clone().detach().requires_grad_()
        found = decode(codes.to(device), values)
        text = torch_xla._XLAC._get_xla_tensors_hlo([found.detach()]) if device.type == "xla" else ""
        found.square().sum().backward()
        both.append((found.detach().cpu(), values.grad.cpu()))
    assert all(torch.equal(one, other) for one, other in zip(*both)), bits
    print(bits, " gather(" in text)
"""


@pytest.mark.xla
def test_short_books_are_selected_from_on_xla():
    pytest.importorskip("torch_xla")
    environment = os.environ | {"PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", ON_XLA], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["2", "False", "4", "False", "5", "True"]
