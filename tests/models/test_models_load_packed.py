"""Our reader of packed weights against the library's own packing function."""

import json

import pytest
import torch
from safetensors.torch import save_file

from qat_lora.models.packed import dense_state


def test_codes_times_steps_in_float32(tmp_path):
    packing = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    draw = torch.Generator().manual_seed(0)
    wanted, tensors = {}, {}
    for name, bits in (("model.a", 4), ("model.b", 8)):
        low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
        codes_OI = torch.randint(low, high, (6, 64), generator=draw, dtype=torch.int8)
        steps_OG = torch.rand(6, 2, generator=draw).half()
        tensors[f"{name}.weight_packed"] = packing.pack_to_int32(codes_OI, bits)
        tensors[f"{name}.weight_scale"] = steps_OG
        tensors[f"{name}.weight_shape"] = torch.tensor([6, 64])
        wanted[name] = (codes_OI.reshape(6, 2, 32).float() * steps_OG.float()[:, :, None]).reshape(6, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    groups = {
        name: {"targets": [name], "weights": {"num_bits": bits}} for name, bits in (("model.a", 4), ("model.b", 8))
    }
    quantization = {"quant_method": "compressed-tensors", "config_groups": groups}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
    found = dict(read_packed(tmp_path))
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_plain_folder_is_not_packed(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert not list(read_packed(tmp_path))
