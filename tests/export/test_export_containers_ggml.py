"""The bytes of GGML's block types decode, by the gguf library or a slow loop, to the codes that went in."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from qat_lora.export.containers import K_QUANTS, Blocks, Integers, float_blocks, k_quant, plain_blocks
from qat_lora.models.from_gguf import ggml_type
from qat_lora.quant.codes import pack
from qat_lora.quant.spec import QuantSpec

gguf = pytest.importorskip("gguf")
ROWS, WIDTH = 3, 512


def drawn(code, bits, group, step_bits):
    """A layer with random stored tensors of a K-quant, and its weight by the definition."""
    torch.manual_seed(bits)
    groups = WIDTH // group
    draw = {"codes": (bits, WIDTH), "steps": (step_bits, groups), "minima": (step_bits, groups)}
    plain = {name: torch.randint(2**wide, (ROWS, count), dtype=torch.uint8) for name, (wide, count) in draw.items()}
    halves = {name: torch.randn(ROWS, WIDTH // 256).half() for name in ("scale", "minimum")}
    stored = {name: pack(tensor, draw[name][0]) for name, tensor in plain.items()} | halves
    scale, minimum = (halves[name].float().repeat_interleave(256, 1) for name in ("scale", "minimum"))
    steps, minima = (plain[name].float().repeat_interleave(group, 1) for name in ("steps", "minima"))
    if code == "minimum":
        weight = plain["codes"] * (scale * steps) - minimum * minima
    else:
        weight = (plain["codes"].float() - 2 ** (bits - 1)) * (scale * (steps - 2 ** (step_bits - 1)))
    spec = QuantSpec(code=code, bits=bits, sharing="group", group_size=group, step_bits=step_bits)
    return SimpleNamespace(spec=spec, in_features=WIDTH, out_features=ROWS, stored=lambda: stored), weight


@pytest.mark.parametrize(("key", "kind"), K_QUANTS.items(), ids=K_QUANTS.values())
def test_k_quants(key, kind):
    layer, weight = drawn(*key)
    blocks = Blocks(kind, k_quant(kind, layer))
    assert torch.equal(blocks.dense(), weight)
    assert blocks.bits_per_weight == {"Q2_K": 2.625, "Q3_K": 3.4375, "Q4_K": 4.5, "Q6_K": 6.5625}[kind]
    assert blocks.measured(weight).error == 0 < blocks.measured(weight * 1.5).error < 1


@pytest.mark.parametrize(
    ("kind", "bits", "size"), [("Q2_0", 2, 128), ("Q4_0", 3, 32), ("Q4_0", 4, 64), ("Q8_0", 8, 32)]
)
def test_plain_types(kind, bits, size):
    torch.manual_seed(0)
    codes = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), (ROWS, WIDTH)).to(torch.int8)
    integers = Integers(codes, torch.randn(ROWS, WIDTH // size).half().float(), size, bits)
    blocks = plain_blocks(integers, bits == 2)
    assert blocks.kind == kind and torch.equal(blocks.dense(), integers.dense())
    if kind == "Q2_0":  # which the library does not know: the slow way, from llama.cpp's definition
        for o, i in ((0, 0), (1, 77), (2, 511)):
            block = blocks.data[o, i // 64 * 18 :][:18]
            code = (int(block[2 + i % 64 // 4]) >> (2 * (i % 4)) & 3) - 1
            assert float(block[:2].view(np.float16)[0]) * int(code) == float(integers.dense()[o, i])


def test_the_new_type_is_written_and_read(tmp_path):
    data = np.arange(36, dtype=np.uint8).reshape(2, 18)
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "llama")
    writer.add_tensor("x", data, raw_dtype=ggml_type("Q2_0"))
    for step in ("header_to_file", "kv_data_to_file", "tensors_to_file"):
        getattr(writer, f"write_{step}")()
    writer.close()
    (tensor,) = gguf.GGUFReader(tmp_path / "x.gguf").tensors
    assert tensor.tensor_type == 42 and list(tensor.shape) == [64, 2] and np.array_equal(tensor.data, data)
    assert gguf.GGMLQuantizationType(42).name == "Q2_0" and ggml_type("Q2_0") is gguf.GGMLQuantizationType(42)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_dense_types(dtype):
    weight = torch.randn(2, 8).to(getattr(torch, dtype)).float()
    blocks = float_blocks(weight, dtype)
    assert torch.equal(blocks.dense(), weight) and blocks.bits_per_weight == 8 * getattr(torch, dtype).itemsize
