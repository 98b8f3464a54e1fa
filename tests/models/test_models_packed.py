"""Folders of other tools, read as dense weights: each format written by a slow packer that shares no code with ours."""

import json

import pytest
import torch
from safetensors.torch import save_file

from qat_lora.errors import ModelError
from qat_lora.models.load import load_model
from qat_lora.models.packed import dense_state

DRAW = torch.Generator().manual_seed(0)


def draw(low, high, *shape):
    return torch.randint(low, high, shape, generator=DRAW)


def words(codes, bits, order=None):
    """Pack rows of codes into 32-bit words, lowest bits first, one bit at a time."""
    out = []
    for row in codes.tolist():
        if order:
            row = [row[8 * (i // 8) + order[i % 8]] for i in range(len(row))]
        stream = [code >> bit & 1 for code in row for bit in range(bits)]
        packed = [sum(bit << i for i, bit in enumerate(stream[at : at + 32])) for at in range(0, len(stream), 32)]
        out.append([word - (word >> 31 << 32) for word in packed])
    return torch.tensor(out, dtype=torch.int32)


@pytest.mark.parametrize("version", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq(tmp_path, bits, version):
    codes_OI, zeros_OG, group_I = draw(0, 2**bits, 32, 64), draw(1, 2**bits, 32, 2), draw(0, 2, 64)
    steps_OG = torch.rand(32, 2, generator=DRAW).half()
    layer = {
        "a.qweight": words(codes_OI, bits).T.contiguous(),
        "a.qzeros": words((zeros_OG - int(version == "gptq")).T, bits),
        "a.scales": steps_OG.T.contiguous(),
        "a.g_idx": group_I.int(),
        "a.bias": torch.ones(32).half(),
    }
    save_file(layer, tmp_path / "model.safetensors")
    quantization = {"quant_method": "gptq", "bits": bits, "group_size": 32, "checkpoint_format": version}
    found = dense_state(tmp_path, {"quantization_config": quantization})
    wanted = [
        [float(steps_OG[o, g]) * float(codes_OI[o, i] - zeros_OG[o, g]) for i, g in enumerate(group_I)]
        for o in range(32)
    ]
    assert found.keys() == {"a.weight", "a.bias"} and found["a.bias"].dtype == torch.float32
    assert torch.equal(found["a.weight"], torch.tensor(wanted))


def test_awq(tmp_path):
    codes_IO, zeros_GO = draw(0, 16, 64, 16), draw(0, 16, 2, 16)
    steps_GO = torch.rand(2, 16, generator=DRAW).half()
    order = (0, 2, 4, 6, 1, 3, 5, 7)  # of the outputs in a word, as AutoAWQ packs them
    layer = {"a.qweight": words(codes_IO, 4, order), "a.qzeros": words(zeros_GO, 4, order), "a.scales": steps_GO}
    save_file(layer, tmp_path / "model.safetensors")
    quantization = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}
    found = dense_state(tmp_path, {"quantization_config": quantization})
    wanted = [
        [float(steps_GO[i // 32, o]) * float(codes_IO[i, o] - zeros_GO[i // 32, o]) for i in range(64)]
        for o in range(16)
    ]
    assert torch.equal(found["a.weight"], torch.tensor(wanted))
    with pytest.raises(ModelError, match="AWQ of version gemv"):
        dense_state(tmp_path, {"quantization_config": {**quantization, "version": "gemv"}})


def mlx_layer(name, codes_OI, bits, size):
    groups = codes_OI.shape[1] // size
    scales, biases = (torch.randn(codes_OI.shape[0], groups, generator=DRAW).bfloat16() for _ in range(2))
    packed = words(codes_OI, bits).view(torch.uint32)
    wanted = codes_OI * scales.float().repeat_interleave(size, 1) + biases.float().repeat_interleave(size, 1)
    return {f"{name}.weight": packed, f"{name}.scales": scales, f"{name}.biases": biases}, wanted


def test_an_mlx_folder_is_a_model(tiny, tmp_path):
    made = load_model(str(tiny.teacher)).module
    state, wanted = {n: p.half() for n, p in made.state_dict().items() if n != "lm_head.weight"}, {}
    config = json.loads((tiny.teacher / "config.json").read_text())
    quantization = {"group_size": 32, "bits": 4, "mode": "affine"}
    for name, layer in made.named_modules():
        if getattr(layer, "weight", None) is not None and layer.weight.ndim == 2 and name != "lm_head":
            bits = 3 if name.endswith("down_proj") else 4
            layer_state, wanted[name] = mlx_layer(name, draw(0, 2**bits, *layer.weight.shape), bits, 32)
            state |= layer_state
            quantization |= {name: {"group_size": 32, "bits": 3}} if bits == 3 else {}
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "mlx"})
    (tmp_path / "config.json").write_text(
        json.dumps({**config, "quantization": quantization, "quantization_config": quantization})
    )
    found = load_model(str(tmp_path), dequantize=True).module
    assert not hasattr(found.config, "quantization") and not hasattr(found.config, "quantization_config")
    assert all(torch.allclose(found.get_parameter(f"{name}.weight"), wanted[name], atol=1e-6) for name in wanted)
    with pytest.raises(ModelError, match="quantised by mlx"):
        load_model(str(tmp_path))
    with pytest.raises(ModelError, match="mode mxfp4"):
        dense_state(tmp_path, {"quantization": {**quantization, "mode": "mxfp4"}})


@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors(tmp_path, symmetric):
    packing = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    wanted, tensors = {}, {}
    for name, bits in (("model.a", 4), ("model.b", 8)):
        low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
        codes_OI, zeros_OG = draw(low, high, 6, 64).to(torch.int8), draw(low, high, 6, 2).to(torch.int8)
        steps_OG = torch.rand(6, 2, generator=DRAW).half()
        tensors[f"{name}.weight_packed"] = packing.pack_to_int32(codes_OI, bits)
        tensors[f"{name}.weight_scale"] = steps_OG
        tensors[f"{name}.weight_shape"] = torch.tensor([6, 64])
        if not symmetric:
            tensors[f"{name}.weight_zero_point"] = packing.pack_to_int32(zeros_OG, bits, packed_dim=0).contiguous()
        zeros = 0 if symmetric else zeros_OG.float()[:, :, None]
        wanted[f"{name}.weight"] = (
            (codes_OI.reshape(6, 2, 32).float() - zeros) * steps_OG.float()[:, :, None]
        ).reshape(6, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    groups = {
        name: {"targets": [name], "weights": {"num_bits": bits}} for name, bits in (("model.a", 4), ("model.b", 8))
    }
    quantization = {"quant_method": "compressed-tensors", "config_groups": groups}
    found = dense_state(tmp_path, {"quantization_config": quantization})
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_other_folders_are_left_to_transformers(tmp_path):
    assert dense_state(tmp_path, {}) is None and dense_state(tmp_path, {"quantization_config": {"bits": 4}}) is None
