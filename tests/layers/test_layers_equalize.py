"""Scales between layers: the function stays, whatever the block; columns become more alike."""

import pytest
import torch
import transformers
from torch import nn

from qat_lora.layers.calibrate.equalize import MOST
from qat_lora.layers.calibrate.fit import FitSettings
from qat_lora.layers.calibrate.quantize import NOT_KEPT, LayerFitter, Work
from qat_lora.layers.calibrate.sequential import quantize_sequential
from qat_lora.layers.convert import quant_layers, quantize_targets
from qat_lora.quant.presets import preset

SIZES = {
    "vocab_size": 64,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
}


def model_of(family, **settings):
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config".replace("Gemma3C", "Gemma3TextC"))(**SIZES, **settings)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval().requires_grad_(False)
    for name, value in model.named_parameters():  # columns of many sizes, gains that are not one
        spread = torch.exp(0.7 * torch.randn(value.shape[-1]))
        if "layers." in name and name.endswith("weight"):
            value.data = value.data * spread if value.dim() == 2 else spread - float("Gemma" in family)
    return model


class Memory(Work):
    """Keeps pieces in memory."""

    def __init__(self):
        self.pieces = {}

    def take(self, name):
        return self.pieces.get(name)

    def keep(self, name, tensors, facts):
        self.pieces[name] = {key: tensor.clone() for key, tensor in tensors.items()}, facts


def quantised(model, work=NOT_KEPT):
    draw = torch.Generator().manual_seed(1)
    text = [torch.randint(0, 64, (4, 64), generator=draw) for _ in range(4)]
    fitter = LayerFitter(model, quantize_targets(model, preset("q8_0")), FitSettings("mse"), work=work)
    quantize_sequential(fitter, text, lambda ids: model.model(ids, use_cache=False).last_hidden_state)
    return model


@torch.no_grad()
def kl(reference, model):
    ids = torch.randint(0, 64, (4, 64), generator=torch.Generator().manual_seed(2))
    p, q = (m(ids).logits.double().log_softmax(-1) for m in (reference, model))
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize("family", ["Llama", "Qwen2", "Qwen3", "Gemma2", "Gemma3", "Phi3", "Granite", "Olmo2", "OPT"])
def test_a_model_whose_norms_changed_computes_the_same(family):
    if family == "OPT":
        SIZES_OPT = {"ffn_dim": 160, "word_embed_proj_dim": 96}
        reference, model = (model_of(family, **SIZES_OPT) for _ in range(2))
    else:
        extra = {"pad_token_id": 0} if family == "Phi3" else {}
        reference, model = (model_of(family, **extra) for _ in range(2))
    quantised(model)
    norms = {n: p for n, p in model.named_parameters() if "layernorm" in n and "layers." in n}
    own = dict(reference.named_parameters())
    changed = sum(not torch.equal(p, own[n]) for n, p in norms.items())
    assert bool(changed) == (family not in {"Olmo2", "OPT"}), changed
    assert kl(reference, model) < 1e-3


def test_columns_become_more_alike():
    model = quantised(model_of("Llama"))
    gains = [m.model.layers[1].input_layernorm.weight for m in (model, model_of("Llama"))]
    assert 2 < (gains[0] / gains[1]).max() <= 1.01 * MOST
    for name in ("q_proj", "o_proj"):
        before = model_of("Llama").model.layers[1].self_attn.get_submodule(name).weight
        after = quant_layers(model)[f"model.layers.1.self_attn.{name}"].weight
        spread = [w.detach().float().square().mean(0).log().std() for w in (before, after)]
        assert spread[1] < 0.85 * spread[0], name


@pytest.mark.parametrize("lost", ["nothing", "a block", "gains"])
def test_a_run_that_goes_on_has_the_norms_of_the_first(lost):
    work = Memory()
    whole = quantised(model_of("Llama"), work).state_dict()
    if lost == "a block":  # as after a damaged piece: its layers and norms are made again
        del work.pieces["block-model.layers.0"]
    if lost == "gains":  # the control: a run without them would be told apart
        tensors, _ = work.pieces["block-model.layers.0"]
        del tensors["model.layers.0.input_layernorm.weight"]
    again = quantised(model_of("Llama"), work).state_dict()
    same = all(torch.equal(tensor, again[name]) for name, tensor in whole.items())
    assert same == (lost != "gains")


class Routed(nn.Module):
    """A block whose norm is read by a function, too: scaling it would change what the function sees."""

    def __init__(self):
        super().__init__()
        self.norm = nn.RMSNorm(32)
        self.up_proj = nn.Linear(32, 64, bias=False)
        self.down_proj = nn.Linear(64, 32, bias=False)

    def forward(self, x):
        y = self.norm(x)
        return x + self.down_proj(torch.relu(self.up_proj(y))) * y.softmax(-1).amax(-1, keepdim=True)


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 32)
        self.blocks = nn.ModuleList([Routed() for _ in range(2)])
        self.lm_head = nn.Linear(32, 64, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return x


def test_a_norm_with_a_second_reader_stays():
    torch.manual_seed(0)
    model = Toy().requires_grad_(False)
    for block in model.blocks:
        block.up_proj.weight.mul_(torch.exp(torch.randn(32)))
        block.norm.weight.mul_(torch.exp(0.5 * torch.randn(32)))
    before = [block.norm.weight.clone() for block in model.blocks]
    fitter = LayerFitter(model, quantize_targets(model, preset("q8_0")), FitSettings("mse"))
    draw = torch.Generator().manual_seed(1)
    quantize_sequential(fitter, [torch.randint(0, 64, (4, 64), generator=draw)], model)
    assert all(torch.equal(block.norm.weight, own) for block, own in zip(model.blocks, before, strict=True))
