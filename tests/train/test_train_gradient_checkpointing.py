"""Layers computed again in the backward pass: the same gradients from fewer bytes."""

import pytest
import torch

from qat_lora.errors import ModelError
from qat_lora.layers.convert import add_lora, lora_layers
from qat_lora.layers.lora import LoraConfig
from qat_lora.models.load import CausalLM, make_qwen3
from qat_lora.runtime.host.machine import LiveBytes
from qat_lora.runtime.native import NativeRuntime


def student(folder, dropout=0.0):
    torch.manual_seed(0)
    model = make_qwen3(folder, 64, hidden=32, layers=4, heads=4, kv_heads=2, mlp=96)
    add_lora(model.module, LoraConfig(recovery_r=4, dropout=dropout))
    for adapter in lora_layers(model.module).values():
        torch.nn.init.normal_(adapter.lora_B, std=0.1)
    model.module.train()
    return model


def gradients(model):
    """Return the adapter's gradients of a sum over hidden states, and the most bytes that were alive."""
    torch.manual_seed(1)
    ids, documents = torch.randint(0, 64, (3, 48)), torch.zeros(3, 48, dtype=torch.int32)
    with LiveBytes() as live:
        model.hidden(ids, documents).square().sum().backward()
    return {n: p.grad for n, p in model.module.named_parameters() if p.grad is not None}, live.peak


@pytest.mark.parametrize("dropout", [0.0, 0.3])  # dropout draws again what it drew
def test_gradients_are_equal_and_less_is_kept(tmp_path, dropout):
    plain, kept = gradients(student(tmp_path, dropout))
    model = student(tmp_path, dropout)
    model.checkpoint_gradients(NativeRuntime("cpu").checkpoint_function())
    again, less = gradients(model)
    assert plain.keys() == again.keys() and len(plain) == 2 * 7 * 4
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, rtol=1e-6, atol=1e-6)
    assert less < 0.6 * kept, (less, kept)


def test_evaluation_computes_nothing_twice(tmp_path):
    model = student(tmp_path)
    calls = []

    def function(layer, *args, **kwargs):
        calls.append(layer)
        return layer(*args, **kwargs)

    model.checkpoint_gradients(function)
    ids, documents = torch.zeros(1, 8, dtype=torch.long), torch.zeros(1, 8, dtype=torch.int32)
    model.module.eval()
    model.hidden(ids, documents)
    assert not calls
    model.module.train()
    model.hidden(ids, documents)
    assert len(calls) == 4


def test_a_model_that_cannot_is_refused(tmp_path):
    with pytest.raises(ModelError, match="^gradient_checkpointing: Linear has no layers"):
        CausalLM(torch.nn.Linear(2, 2), tmp_path).checkpoint_gradients(lambda f, *args: f(*args))
