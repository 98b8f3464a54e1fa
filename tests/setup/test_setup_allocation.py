"""`quantize --target-size`: the bytes of what is really exported, ranks by layer through all commands, refusals."""

import json
import re
from dataclasses import replace

import pytest
from safetensors import safe_open
from toy_pipeline import call, export_options, quantize_options

from qat_lora.data.sources import TextConfig
from qat_lora.errors import ConfigError
from qat_lora.export.engines import FORMATS, TargetConfig
from qat_lora.files.checksums import checkpoint_sha256
from qat_lora.files.gguf_header import read_header
from qat_lora.layers.convert import add_lora
from qat_lora.layers.lora import LoraConfig
from qat_lora.models.adapter import STARTS, allocated_ranks, load_starts, save_adapter
from qat_lora.models.load import load_model

FORMS = {"llama.cpp": "gguf", "mlx": "mlx", "vllm": "compressed-tensors"}
STEP = 512  # bytes of a rank on the widest layer of the toy


def asked(tiny, out, **changed):
    options = quantize_options(tiny, out, init="descent", start_rank=40, calibration_rows=8, calibration_length=32)
    return replace(options, text=TextConfig(dataset=str(tiny.text)), **changed)


def tensor_bytes(folder):
    """Return the bytes of all tensors of base and adapter in a folder, as its files hold them."""
    total = 0
    for file in folder.rglob("*.gguf"):
        tensors = read_header(file).tensors.values()
        total += sum(-(-_count(t.shape) // t.block) * t.block_bytes for t in tensors)
    for file in folder.rglob("*.safetensors"):
        if file.name != STARTS:
            with safe_open(file, "pt") as tensors:
                total += sum(tensors.get_tensor(name).nbytes for name in tensors.keys())  # noqa: SIM118
    return total


def _count(shape):
    return shape[0] * (shape[1] if len(shape) > 1 else 1)


def with_its_adapter(folder, out):
    """Put the adapter starts of a student on it, at its ranks; return the adapter's folder."""
    model = load_model(str(folder))
    layers = add_lora(model.module, LoraConfig(), load_starts(folder), allocated_ranks(folder))
    save_adapter(model.module, LoraConfig(), out, folder, checkpoint_sha256(folder))
    return layers


@pytest.mark.parametrize("engine", FORMATS)
def test_the_bytes_are_those_of_the_files(tiny, tmp_path, engine):
    options = asked(tiny, tmp_path / "student", target=TargetConfig(engine=engine, target_size="1kB"))
    with pytest.raises(ConfigError, match=r"target_size: 1kB \(0.001 MB\) cannot be met") as refused:
        call("quantize", options)
    assert not (tmp_path / "student").exists()
    least, most = map(float, re.findall(r"(\d+\.\d+)MB", str(refused.value)))
    target = 1000 * round(1000 * (0.6 * least + 0.4 * most))
    student = call("quantize", replace(options, target=TargetConfig(engine=engine, target_size=f"{target / 1000:g}kB")))
    result = json.loads((student / "result.json").read_text())
    assert target - STEP < result["bytes"] <= target and result["predicted_kl"] > 0
    layers = with_its_adapter(student, tmp_path / "adapter")
    assert {name: len(layer.lora_A) for name, layer in layers.items()} == result["adapter_ranks"]
    if engine == "any":
        assert tensor_bytes(student) + tensor_bytes(tmp_path / "adapter") == result["bytes"]
        return
    out = call("export", export_options(tmp_path / "adapter", tmp_path / "out", form=FORMS[engine]))
    assert tensor_bytes(out) == result["bytes"]
    told = json.loads((out / "result.json").read_text())
    assert told["layers_rounded"] == 0
