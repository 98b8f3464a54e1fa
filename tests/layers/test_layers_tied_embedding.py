"""A tied matrix quantised once: head and embedding share codes, on disk, in memory, in training, and merged."""

import importlib
import json

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from torch import nn
from toy_pipeline import call, part, quantize_options
from transformers import AutoModelForCausalLM

from qat_lora.errors import ConfigError
from qat_lora.layers.convert import bits_per_weight, merge, put_quantized, quant_layers, tied_embedding
from qat_lora.layers.quant_linear import QuantLinear, TiedEmbedding, embedding_of
from qat_lora.models.load import cast, load_model
from qat_lora.quant.initialize import quantize_weight
from qat_lora.quant.presets import PRESETS

IDS = torch.arange(3, 35).reshape(2, 16)
SPEC = PRESETS["w4g128"].rules[0][1]


@pytest.fixture(scope="module")
def student(tiny, tmp_path_factory):
    """Quantised in order, head and embedding included; with what it computed before it was saved."""
    quantising = importlib.import_module("qat_lora.commands.quantize")
    seen = {}

    def watched(model, *rest):
        with torch.no_grad():
            seen["logits"] = model.module.eval()(IDS).logits
        return real(model, *rest)

    real = quantising.save_quantised
    out = tmp_path_factory.mktemp("tied") / "student"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quantising, "save_quantised", watched)
        call("quantize", quantize_options(tiny, out, quantize_head="w4g128"))
    return out, seen["logits"]


def test_codes_are_stored_once_and_load_bit_for_bit(student):
    folder, logits = student
    names = set(load_file(folder / "model.safetensors"))
    assert {"lm_head.codes", "lm_head.scale"} <= names and not any("embed" in name for name in names)
    for model in (AutoModelForCausalLM.from_pretrained(folder), load_model(str(folder)).module):
        assert type(model.get_input_embeddings()) is TiedEmbedding
        with torch.no_grad():
            assert torch.equal(model.eval()(IDS).logits, logits)
            rows = model.get_input_embeddings()(IDS)
        assert torch.equal(rows, model.lm_head.weight[IDS])


def test_the_matrix_counts_once(student):
    folder, _ = student
    model = load_model(str(folder)).module
    counted = bits_per_weight(model)
    head = quant_layers(model)["lm_head"]
    assert head.stored_bits == 320 * 64 * 4 + 320 * 16
    others = sum(p.numel() for n, p in model.named_parameters() if "norm" in n)
    layers = quant_layers(model).values()
    weights = sum(layer.in_features * layer.out_features for layer in layers)
    stored = sum(layer.stored_bits for layer in layers)
    assert counted["base"] == pytest.approx(stored / weights)
    assert counted["model"] == pytest.approx((stored + 32 * others) / (weights + others))
    assert json.loads((folder / "result.json").read_text())["bits_per_weight_model"] == round(counted["model"], 4)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_bfloat16_and_peft(student):
    folder, logits = student
    model = load_model(str(folder), dtype="bfloat16").module
    assert model.get_input_embeddings()(IDS).dtype == torch.bfloat16 and model.lm_head.scale.dtype == torch.float32
    cast(model, torch.float32)
    with torch.no_grad():
        assert model(IDS).logits.dtype == torch.float32
    plain = AutoModelForCausalLM.from_pretrained(folder)
    wrapped = get_peft_model(plain, LoraConfig(r=2, target_modules="all-linear"))
    with torch.no_grad():
        assert torch.equal(wrapped.eval()(IDS).logits, logits)


def test_one_gradient_from_both_uses():
    torch.manual_seed(0)
    model = nn.Module()
    model.embed, model.lm_head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
    model.lm_head.weight = model.embed.weight
    quantised = quantize_weight(model.lm_head.weight.data, SPEC, "mse")
    put_quantized(model, "lm_head", QuantLinear.from_linear(model.lm_head, SPEC, quantised))
    assert tied_embedding(model) == "embed" and sorted(model.state_dict()) == ["lm_head.codes", "lm_head.scale"]
    dense = model.lm_head.weight.detach().clone().requires_grad_()
    ids = torch.tensor([1, 4, 4, 7])
    latent = model.lm_head.train_weight(gradient="ste")
    model.lm_head(model.embed(ids)).square().sum().backward()
    nn.functional.linear(nn.functional.embedding(ids, dense), dense).square().sum().backward()
    assert torch.allclose(latent.weight.grad, dense.grad, atol=1e-5)


def test_merged_it_is_an_ordinary_model_again(student):
    folder, logits = student
    model = merge(load_model(str(folder)).module)
    assert type(model.get_input_embeddings()) is nn.Embedding and tied_embedding(model) is None
    with torch.no_grad():
        assert torch.allclose(model(IDS).logits, logits, atol=1e-5)


def test_an_embedding_that_scales_its_rows_is_refused():
    class Scaled(nn.Embedding):
        pass

    model = nn.Module()
    model.embed, model.lm_head = Scaled(12, 8), nn.Linear(8, 12, bias=False)
    assert embedding_of(model, model.lm_head) is None
    model.lm_head.weight = model.embed.weight
    with pytest.raises(ConfigError, match="quantize_head: the head is tied to embed, a Scaled"):
        embedding_of(model, model.lm_head)


def test_training_it_moves_both(student, tiny, tmp_path):
    from dataclasses import replace

    from toy_pipeline import cache_options

    from qat_lora.options import QatOptions
    from qat_lora.train.loop import LoopConfig
    from qat_lora.train.optim import OptimConfig

    cache = call("build_cache", cache_options(tiny, tmp_path / "cache"))
    options = QatOptions(
        checkpoint=str(student[0]),
        kd_cache_dir=str(cache),
        train_parts=("weights", "scales"),
        train=OptimConfig(lr=2e-3, scale_lr=1e-3, warmup_steps=1),
        loop=LoopConfig(batch_size=16, max_steps=3, log_steps=3),
        run=part(tmp_path / "run"),
    )
    with pytest.raises(ConfigError, match="the embedding is the quantised head in this model"):
        call("qat", replace(options, train_parts=("embeddings",), run=part(tmp_path / "refused")))
    run = call("qat", options)
    before, after = (load_file(run / name / "model.safetensors") for name in ("start", "last"))
    assert not torch.equal(before["lm_head.codes"], after["lm_head.codes"])
    assert type(load_model(str(run / "last")).module.get_input_embeddings()) is TiedEmbedding
