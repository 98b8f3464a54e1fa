"""Copies of a checkpoint with some of its tensors replaced."""

import pytest
import torch
from safetensors.torch import load_file

from qat_lora.errors import ModelError
from qat_lora.files.checksums import checkpoint_sha256
from qat_lora.layers.convert import prepare_base, quant_layers
from qat_lora.models.copies import save_with_tensors
from qat_lora.models.load import load_model, load_tokenizer, tokenizer_sha256


@torch.no_grad()
def logits_of(module):
    return module(input_ids=torch.arange(24)[None]).logits


def test_save_with_tensors_changes_those_only(student, tmp_path):
    model = load_model(str(student))
    scales = prepare_base(model.module, train_scales=True)
    with torch.no_grad():
        for scale in scales.values():
            scale.mul_(1.25)
    out = save_with_tensors(student, tmp_path / "out", scales)
    before, after = load_file(student / "model.safetensors"), load_file(out / "model.safetensors")
    assert set(before) == set(after)
    for name, tensor in before.items():
        assert after[name].dtype == tensor.dtype
        expected = scales[name].detach().half() if name in scales else tensor
        assert torch.equal(after[name], expected), name
        assert torch.equal(after[name], tensor) == (name not in scales)
    assert checkpoint_sha256(out) != checkpoint_sha256(student)
    for layer in quant_layers(model.module).values():  # the trained scales as stored: float16
        for scale in layer.scales:
            scale.data = scale.data.half().float()
    assert torch.equal(logits_of(load_model(str(out)).module), logits_of(model.module))
    same_tokens = [tokenizer_sha256(load_tokenizer(folder)) for folder in (student, out)]
    assert same_tokens[0] == same_tokens[1]


def test_tensors_that_the_checkpoint_lacks_are_refused(student, tmp_path):
    with pytest.raises(ModelError, match="lacks the tensors model.layers.9.x.scale"):
        save_with_tensors(student, tmp_path / "out", {"model.layers.9.x.scale": torch.ones(1, 1)})
    name = "model.layers.0.mlp.up_proj.scale"
    with pytest.raises(ModelError, match=rf"{name} has shape \(1, 1\)"):
        save_with_tensors(student, tmp_path / "out", {name: torch.ones(1, 1)})
