"""A head stored as codes that the embedding looks its rows up in: every form of export computes what we compute."""

import pytest
import torch
from safetensors.torch import load_file
from toy_pipeline import call, export_options, quantize_options
from transformers import AutoModelForCausalLM

from qat_lora.models.hub import HubConfig
from qat_lora.models.student import open_student

IDS = torch.arange(3, 35).reshape(1, 32)


@pytest.fixture(scope="module")
def student(tiny, tmp_path_factory):
    root = tmp_path_factory.mktemp("tied")
    return call("quantize", quantize_options(tiny, root / "student", quantize_head="w4g128"))


def ours(name):
    model = open_student(str(name), HubConfig()).model
    with torch.no_grad():
        return model.logits(model.hidden(IDS, torch.zeros_like(IDS))[0])


def test_merged(student, tmp_path):
    out = call("export", export_options(student, tmp_path / "out", form="merged"))
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(out)(input_ids=IDS).logits[0]
    torch.testing.assert_close(theirs, ours(student), rtol=0, atol=1e-4)


def test_compressed_tensors(student, tmp_path):
    pytest.importorskip("compressed_tensors")
    out = call("export", export_options(student, tmp_path / "out", form="compressed-tensors"))
    torch.testing.assert_close(ours(out), ours(student), rtol=0, atol=1e-3)
    with torch.no_grad():
        theirs = AutoModelForCausalLM.from_pretrained(out)(input_ids=IDS).logits[0]
    torch.testing.assert_close(theirs, ours(student), rtol=0, atol=2e-2)  # it multiplies codes and steps in float16


def test_gguf(student, tmp_path):
    gguf = pytest.importorskip("gguf")
    out = call("export", export_options(student, tmp_path / "out", form="gguf", exact_only=True))
    read = {tensor.name: tensor for tensor in gguf.GGUFReader(out / "base.gguf").tensors}
    model = open_student(str(student), HubConfig()).model
    head = model.lm_head().weight_VH.detach()
    held = gguf.quants.dequantize(read["token_embd.weight"].data, read["token_embd.weight"].tensor_type)
    assert torch.equal(torch.from_numpy(held.copy()), head)
    if "output.weight" in read:
        held = gguf.quants.dequantize(read["output.weight"].data, read["output.weight"].tensor_type)
        assert torch.equal(torch.from_numpy(held.copy()), head)
    assert "lm_head.codes" in load_file(student / "model.safetensors")
