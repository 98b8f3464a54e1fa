"""MLX's layout, read back number by number: codes, steps and biases in float64 are the weights that were trained."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from toy_export import bare_layer, bits_of, qwen3_sizes, with_adapter
from toy_pipeline import call, export_options

from qat_lora.errors import ConfigError
from qat_lora.export.containers import Integers, dense_tables
from qat_lora.export.packed import mlx_tensors, to_mlx, to_tables
from qat_lora.files.checksums import checkpoint_sha256
from qat_lora.layers.convert import lora_layers, quant_layers
from qat_lora.layers.lora import LoraConfig
from qat_lora.models.adapter import save_adapter
from qat_lora.models.load import load_model
from qat_lora.options import ExportOptions
from qat_lora.quant.presets import PRESETS


def decoded(parts, bits, group, columns):
    """Return q s + b in float64, one code after the other."""
    steps, biases = parts["scales"].double(), parts["biases"].double()
    rows = [bits_of(row.view(torch.int32), bits, columns) for row in parts["weight"]]
    return torch.tensor(
        [
            [q * float(steps[o, i // group]) + float(biases[o, i // group]) for i, q in enumerate(row)]
            for o, row in enumerate(rows)
        ]
    ).double()


def held(preset, **shape):
    layer = bare_layer(PRESETS[preset].spec_for("x"), **shape)
    module = torch.nn.Module()
    module.layer = layer
    return layer.weight.detach().double(), to_mlx(module)["layer"]


@pytest.mark.parametrize(("preset", "bits"), [("q2_0", 2), ("q2g128", 2), ("q3g64", 3), ("w3g128", 3), ("w4g128", 4)])
def test_exact(preset, bits):
    weight, found = held(preset)
    parts = mlx_tensors(found)
    assert found.error == 0 and found.bits == bits
    assert parts["weight"].dtype == torch.uint32 and parts["weight"].shape == (32, 128 * bits // 32)
    assert parts["scales"].dtype == parts["biases"].dtype == torch.float16
    assert torch.equal(decoded(parts, bits, found.group_size, 128), weight)


@pytest.mark.parametrize(
    ("preset", "bits", "most"), [("w2g64", 2, 1e-3), ("w4g64a", 4, 1e-3), ("q4_k", 4, 1e-3), ("nf4g64", 4, 0.15)]
)
def test_what_is_rounded_says_by_how_much(preset, bits, most):
    weight, found = held(preset, in_features=256)
    again = decoded(mlx_tensors(found), bits, found.group_size, 256)
    lost = float((again - weight).norm() / weight.norm())
    assert 0 < found.error < most and found.error == pytest.approx(lost, rel=0.02)


def test_no_group_divides_the_row():
    assert held("w2g64", in_features=48)[1] is None


@pytest.fixture(scope="module")
def exported(student, tmp_path_factory):
    """A student with an adapter on the MLP alone, as MLX's folder."""
    root = tmp_path_factory.mktemp("mlx")
    config = LoraConfig(recovery_r=3, recovery_alpha=5.0, mlp_only=True)
    model = with_adapter(student, config)
    save_adapter(model.module, config, root / "adapter", student, checkpoint_sha256(student))
    return model, call("export", export_options(root / "adapter", root / "out", form="mlx"))


def test_the_folder(exported):
    model, out = exported
    stored, config = load_file(out / "model.safetensors"), json.loads((out / "config.json").read_text())
    assert config["quantization"] == config["quantization_config"] and "mode" in config["quantization"]
    assert config["dtype"] == "float16" and stored["model.norm.weight"].dtype == torch.float32
    for name, layer in quant_layers(model.module).items():
        form = config["quantization"][name]
        parts = {part: stored[f"{name}.{part}"] for part in ("weight", "scales", "biases")}
        again = decoded(parts, form["bits"], form["group_size"], layer.in_features)
        torch.testing.assert_close(again, layer.weight.detach().double(), rtol=2**-9, atol=1e-7)
    assert stored["model.embed_tokens.weight"].shape == (320, 64 * 4 // 32) and "lm_head.weight" not in stored
    result = json.loads((out / "result.json").read_text())
    assert result["embedding"].startswith("4.5 bits a weight")


def test_the_adapter(exported):
    model, out = exported
    factors = load_file(out / "adapters" / "adapters.safetensors")
    settings = json.loads((out / "adapters" / "adapter_config.json").read_text())
    assert settings["num_layers"] == 2
    assert settings["lora_parameters"]["keys"] == ["mlp.down_proj", "mlp.gate_proj", "mlp.up_proj"]
    for name, layer in lora_layers(model.module).items():
        a, b = factors.pop(f"{name}.lora_a"), factors.pop(f"{name}.lora_b")
        assert a.dtype == torch.float16 and a.shape == (layer.lora_A.shape[1], 3)
        delta = settings["lora_parameters"]["scale"] * (a.double() @ b.double()).T
        torch.testing.assert_close(delta, layer.delta().double(), rtol=1e-6, atol=1e-6)
    assert not factors


def job(model, bits, importance=None):
    return SimpleNamespace(student=SimpleNamespace(model=model), embedding_bits=bits, importance=importance, quiet=True)


def test_the_embedding_in_its_bits(tiny):
    model = load_model(str(tiny.teacher))
    (name,) = dense_tables(model.module)
    weight = model.module.get_input_embeddings().weight
    errors = []
    for bits, code in ((4.5, 4), (6.0, 6), (8.0, 8)):
        found = to_tables(job(model, bits, lambda: torch.ones(64)))[name]
        assert found.bits == code and found.bits_per_weight == code + 0.5
        errors.append(float((found.dense() - weight).norm() / weight.norm()))
        assert found.error == pytest.approx(errors[-1], rel=1e-4)
    assert errors[0] > 3 * errors[1] > 9 * errors[2]
    assert to_tables(job(model, 16.0)) == {}
    with pytest.raises(ConfigError, match="embedding_bits: 5 is not supported"):
        ExportOptions(student="x", form="mlx", embedding_bits=5)


def test_qwen3_06b_in_247_mb():
    def integers(rows, columns, bits=2):
        numbers = torch.zeros(rows, columns // 64)
        return Integers(torch.zeros(rows, columns, dtype=torch.uint8), numbers, 64, bits, biases_OG=numbers)

    layers, adapter, table, norms = qwen3_sizes(mlx_tensors, integers)
    row = sum(tensor.nbytes for tensor in mlx_tensors(integers(32, 1024, 4)).values()) / (32 * 1024)
    assert layers + adapter + table * row + norms <= 247e6
