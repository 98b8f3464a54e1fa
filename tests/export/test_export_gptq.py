"""GPTQ's layout, read back as AutoGPTQ's own unpacking describes it: three bits cross words of 32."""

import json

import pytest
import torch
from safetensors.torch import load_file
from toy_export import bare_layer, qwen3_sizes
from toy_pipeline import call, export_options

from qat_lora.errors import ModelError
from qat_lora.export.containers import Integers
from qat_lora.export.packed import gptq_tensors, to_gptq
from qat_lora.layers.convert import quant_layers
from qat_lora.models.load import load_model
from qat_lora.quant.presets import PRESETS


def unpacked(words, bits, count):
    """Return the codes of a column of words: 32 / bits to a word, or 32 codes of 3 bits in three of them."""
    found, words = [], [int(word) & 0xFFFFFFFF for word in words]
    if bits != 3:
        return [(word >> shift) & (2**bits - 1) for word in words for shift in range(0, 32, bits)][:count]
    for first, second, third in zip(*[iter(words)] * 3, strict=True):
        found += [(first >> shift) & 7 for shift in range(0, 30, 3)] + [first >> 30 | (second & 1) << 2]
        found += [(second >> shift) & 7 for shift in range(1, 31, 3)] + [second >> 31 | (third & 3) << 1]
        found += [(third >> shift) & 7 for shift in range(2, 32, 3)]
    return found[:count]


def decoded(parts, bits, inputs):
    """Return (q - z) s in float64, [O, I]; z is stored less one."""
    outputs = parts["qweight"].shape[1]
    zeros = [[z + 1 for z in unpacked(row, bits, outputs)] for row in parts["qzeros"]]
    weight = torch.empty(outputs, inputs, dtype=torch.float64)
    for o in range(outputs):
        for i, q in enumerate(unpacked(parts["qweight"][:, o], bits, inputs)):
            group = int(parts["g_idx"][i])
            weight[o, i] = (q - zeros[group][o]) * float(parts["scales"][group, o])
    return weight


@pytest.mark.parametrize(
    ("preset", "bits"),
    [("q2_0", 2), ("q2g128", 2), ("q3g64", 3), ("q4_0", 4), ("w2g64", 3), ("w4g128", 4), ("q8_0", 8)],
)
def test_exact(preset, bits):
    layer = bare_layer(PRESETS[preset].spec_for("x"), out_features=64)
    module = torch.nn.Module()
    module.layer = layer
    found = to_gptq(module)["layer"]
    parts = gptq_tensors(found)
    assert found.error == 0 and found.bits == bits
    assert parts["qweight"].shape == (128 * bits // 32, 64) and parts["scales"].shape == (128 // found.group_size, 64)
    assert torch.equal(decoded(parts, bits, 128), layer.weight.detach().double())


@pytest.mark.parametrize(("preset", "shape"), [("w4g64a", {}), ("nf4g64", {}), ("w2g64", {"in_features": 48})])
def test_refused_in_one_line(preset, shape):
    module = torch.nn.Module()
    module.layer = bare_layer(PRESETS[preset].spec_for("x"), **shape)
    with pytest.raises(ModelError, match="form: gptq does not hold layer exactly") as caught:
        to_gptq(module)
    assert "\n" not in str(caught.value)


def test_the_folder(student, tmp_path):
    """96 inputs cut groups of 64 to 32, which `dynamic` says."""
    out = call("export", export_options(student, tmp_path / "out", form="gptq"))
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert (config["bits"], config["group_size"], config["sym"], config["desc_act"]) == (3, 64, True, False)
    down = {"bits": 3, "group_size": 32}
    assert config["dynamic"] == {rf"+:^model\.layers\.{block}\.mlp\.down_proj$": down for block in (0, 1)}
    stored, layers = load_file(out / "model.safetensors"), quant_layers(load_model(str(student)).module)
    assert stored["model.embed_tokens.weight"].dtype == torch.float16
    for name, layer in list(layers.items())[-2:]:
        parts = {part: stored[f"{name}.{part}"] for part in ("qweight", "qzeros", "scales", "g_idx")}
        assert torch.equal(decoded(parts, 3, layer.in_features), layer.weight.detach().double())
    with pytest.raises(ModelError, match="quantised by gptq"):
        load_model(str(out))


def test_qwen3_06b_in_460_mb():
    def integers(rows, columns):
        return Integers(torch.zeros(rows, columns, dtype=torch.int8), torch.zeros(rows, columns // 64), 64, 2)

    layers, adapter, table, norms = qwen3_sizes(gptq_tensors, integers)
    assert layers + adapter + 2 * table + norms <= 460e6
