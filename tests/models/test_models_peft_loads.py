"""What we write is what PEFT reads: a quantised folder and an adapter folder, without our training code."""

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from qat_lora.errors import ModelError
from qat_lora.files.identity import checkpoint_sha256
from qat_lora.layers.calibrate.quantize import quantize_model
from qat_lora.layers.convert import add_lora, lora_layers, quant_layers
from qat_lora.layers.lora import LoraConfig
from qat_lora.models.adapter import save_adapter
from qat_lora.models.load import load_model, save_quantised
from qat_lora.quant.presets import PRESETS, preset

# Between PEFT and transformers: the one reads an attribute that the other has renamed.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
IDS = torch.arange(3, 51).reshape(2, 24)


def write_pair(tiny, folder, name, lora):
    """Write base and adapter; return our own logits with both."""
    model = load_model(str(tiny.teacher))
    quantize_model(model.module, preset(name), "absmax", quiet=True)
    save_quantised(model, folder / "base", preset(name), {})
    torch.manual_seed(1)
    for layer in add_lora(model.module, lora).values():
        layer.lora_A.data = layer.lora_A.data.half().float()  # as stored
        layer.lora_B.data = (torch.randn_like(layer.lora_B) * 0.05).half().float()
    save_adapter(model.module, lora, folder / "adapter", folder / "base", checkpoint_sha256(folder / "base"))
    with torch.no_grad():
        return model.logits(model.hidden(IDS, torch.zeros_like(IDS)).flatten(0, 1)).reshape(*IDS.shape, -1)


@pytest.mark.parametrize("name", PRESETS)
def test_peft_gives_our_logits(name, tiny, wide, tmp_path):
    tiny = wide if PRESETS[name].rules[0][1].step_bits else tiny
    lora = LoraConfig(recovery_r=4, recovery_alpha=6.0, dropout=0.1, mlp_only=name == "w4g128")
    expected = write_pair(tiny, tmp_path, name, lora)
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    with torch.no_grad():
        plain = base(IDS).logits
        model = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        logits = model(IDS).logits
        with model.disable_adapter():
            assert torch.equal(model(IDS).logits, plain)
    assert torch.allclose(logits, expected, atol=1e-5, rtol=1e-5), (logits - expected).abs().max()
    assert (logits - plain).abs().max() > 0.01
    assert len(quant_layers(model)) == 14 and not lora_layers(model)


def test_transformers_loads_the_adapter_by_itself(tiny, tmp_path):
    expected = write_pair(tiny, tmp_path, "w3g128", LoraConfig(recovery_r=4))
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model.load_adapter(str(tmp_path / "adapter"))
    with torch.no_grad():
        assert torch.allclose(model(IDS).logits, expected, atol=1e-5, rtol=1e-5)


def test_peft_trains_on_our_base(tiny, tmp_path):
    write_pair(tiny, tmp_path, "w2g64", LoraConfig(recovery_r=4))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    model = PeftModel.from_pretrained(base, tmp_path / "adapter", is_trainable=True)
    model(IDS, labels=IDS).loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.requires_grad}
    assert grads and all("lora_" in name and g is not None and g.abs().sum() > 0 for name, g in grads.items())


def test_peft_cannot_merge_into_codes_and_says_so(tiny, tmp_path):
    """Merging would need new codes; done PEFT's way it would give back the base without the adapter."""
    write_pair(tiny, tmp_path, "w2g64", LoraConfig(recovery_r=4))
    for safe in (False, True):
        base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
        model = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        with pytest.raises(ModelError, match="cannot be assigned or merged into"):
            model.merge_and_unload(safe_merge=safe)
