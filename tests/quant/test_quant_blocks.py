"""Layers on the grids of llama.cpp's blocks mean what the blocks mean, bit for bit.

The oracle is gguf's own dequantisation, of blocks that this test packs by hand, weight by weight, as `ggml-common.h`
lays them out; the tensors are drawn at random, so that every bit pattern occurs: steps of zero, scales of both signs.
"""

import numpy as np
import pytest
import torch
from torch import nn

from qat_lora.layers.quant_linear import QuantLinear
from qat_lora.quant.presets import PRESETS
from qat_lora.quant.scales import scale_shapes, whole_shapes

quants = pytest.importorskip("gguf.quants")
ROWS, COLUMNS = 3, 512


def numbers(row, bits, count):
    """Whole numbers of a packed row, lowest bit first."""
    stream = int.from_bytes(bytes(row.tolist()), "little")
    return [stream >> (bits * i) & (2**bits - 1) for i in range(count)]


def half(*values):
    return np.array(values, dtype=np.float16).tobytes()


def low_bits(codes):
    """Two bits of every code: four runs of 32 codes share 32 bytes."""
    block = bytearray(64)
    for e, code in enumerate(codes):
        block[32 * (e // 128) + e % 32] |= (code & 3) << 2 * (e % 128 // 32)
    return bytes(block)


def q2_k(codes, steps, d, minima, dmin):
    return bytes(s | m << 4 for s, m in zip(steps, minima, strict=True)) + low_bits(codes) + half(d, dmin)


def q3_k(codes, steps, d):
    high, scales = bytearray(32), bytearray(12)
    for e, code in enumerate(codes):
        high[e % 32] |= (code >> 2) << (e // 32)
    for j, step in enumerate(steps):
        scales[j % 8] |= (step & 15) << 4 * (j // 8)
        scales[8 + j % 4] |= (step >> 4) << 2 * (j // 4)
    return bytes(high) + low_bits(codes) + bytes(scales) + half(d)


def q4_k(codes, steps, d, minima, dmin):
    scales, nibbles = bytearray(12), bytearray(128)
    for j, (s, m) in enumerate(zip(steps, minima, strict=True)):
        if j < 4:
            scales[j] |= s
            scales[j + 4] |= m
        else:
            scales[j + 4] |= s & 15 | (m & 15) << 4
            scales[j - 4] |= s >> 4 << 6
            scales[j] |= m >> 4 << 6
    for e, code in enumerate(codes):
        nibbles[32 * (e // 64) + e % 32] |= code << 4 * (e % 64 // 32)
    return half(d, dmin) + bytes(scales) + bytes(nibbles)


def q6_k(codes, steps, d):
    low, high = bytearray(128), bytearray(64)
    for e, code in enumerate(codes):
        low[64 * (e // 128) + e % 64] |= (code & 15) << 4 * (e % 128 // 64)
        high[32 * (e // 128) + e % 32] |= (code >> 4) << 2 * (e % 128 // 32)
    return bytes(low) + bytes(high) + np.array([s - 128 for s in steps], dtype=np.int8).tobytes() + half(d)


def q4_0(codes, d):
    return half(d) + bytes(codes[i] | codes[i + 16] << 4 for i in range(16))


def q8_0(codes, d):
    return half(d) + np.array([code - 128 for code in codes], dtype=np.int8).tobytes()


PACKERS = {"q2_k": q2_k, "q3_k": q3_k, "q4_k": q4_k, "q6_k": q6_k, "q4_0": q4_0, "q8_0": q8_0}


@pytest.mark.parametrize("name", PACKERS)
def test_the_weight_is_what_the_block_means(name):
    spec, draw = PRESETS[name].rules[0][1], np.random.default_rng(0)
    shape, width = (ROWS, COLUMNS), COLUMNS * spec.bits // 8
    stored = {"codes": torch.from_numpy(draw.integers(0, 256, (ROWS, width), dtype=np.uint8))}
    for part, size in whole_shapes(spec, *shape).items():
        stored[part] = torch.from_numpy(draw.integers(0, 256, size, dtype=np.uint8))
    for part, size in scale_shapes(spec, *shape).items():
        stored[part] = torch.from_numpy(draw.normal(size=size) * 0.01).half()
    layer = QuantLinear.from_stored(nn.Linear(COLUMNS, ROWS, bias=False), spec, stored)
    size, data = 256 if spec.step_bits else 32, b""
    for r in range(ROWS):
        codes = numbers(stored["codes"][r], spec.bits, COLUMNS)
        whole = [numbers(stored[p][r], spec.step_bits, COLUMNS // spec.group_size) for p in spec.whole]
        for b in range(COLUMNS // size):
            parts = [n[b * size // spec.group_size : (b + 1) * size // spec.group_size] for n in whole]
            floats = [stored[p][r, b].item() for p in scale_shapes(spec, *shape)]
            given = [x for pair in zip(parts, floats, strict=True) for x in pair] if parts else floats
            data += PACKERS[name](codes[b * size : (b + 1) * size], *given)
    blocks = np.frombuffer(data, dtype=np.uint8).reshape(ROWS, -1)
    assert 8 * blocks.size == spec.stored_bits(*shape)
    theirs = quants.dequantize(blocks, getattr(quants.GGMLQuantizationType, name.upper()))
    assert np.array_equal(theirs.reshape(shape), layer.weight.detach().numpy())
    again = layer.stored()
    assert again.keys() == stored.keys() and all(torch.equal(again[key], stored[key]) for key in stored)
