"""Converting whole models: what is reached, what is refused, and that merging changes nothing."""

import pytest
import torch
from torch import nn

from qat_lora.errors import ConfigError, ModelError
from qat_lora.layers.calibrate.quantize import quantize_model
from qat_lora.layers.convert import (
    add_lora,
    bits_per_weight,
    check_reach,
    lora_layers,
    make_quant_skeleton,
    merge,
    prepare_base,
    quant_layers,
    quantize_targets,
    reach_of,
    rule_bits,
)
from qat_lora.layers.experts import split_experts
from qat_lora.layers.lora import Factors, LoraConfig
from qat_lora.quant.presets import PRESETS, Preset, preset


class Block(nn.Module):
    def __init__(self, h, o, mlp):
        super().__init__()
        self.self_attn = nn.ModuleDict({"q_proj": nn.Linear(h, o), "o_proj": nn.Linear(o, h, bias=False)})
        self.mlp = nn.ModuleDict({"up_proj": nn.Linear(h, mlp), "down_proj": nn.Linear(mlp, h)})

    def forward(self, x):
        x = x + self.self_attn["o_proj"](torch.tanh(self.self_attn["q_proj"](x)))
        return x + self.mlp["down_proj"](torch.relu(self.mlp["up_proj"](x)))


class Toy(nn.Module):
    def __init__(self, h=16, o=24, mlp=40):
        super().__init__()
        blocks = nn.ModuleList([Block(h, o, mlp), Block(h, o, mlp)])
        self.model = nn.ModuleDict({"embed": nn.Embedding(11, h), "layers": blocks})
        self.lm_head = nn.Linear(h, 11, bias=False)

    def forward(self, ids):
        x = self.model["embed"](ids)
        for block in self.model["layers"]:
            x = block(x)
        return self.lm_head(x)


NAMES = [f"model.layers.{i}.{part}" for i in (0, 1) for part in ("self_attn.q_proj", "self_attn.o_proj")]
NAMES = sorted(NAMES + [f"model.layers.{i}.mlp.{part}" for i in (0, 1) for part in ("up_proj", "down_proj")])
IDS = torch.arange(22).reshape(2, 11) % 11


def toy(*sizes):
    torch.manual_seed(0)
    return Toy(*sizes)


def adapted(name="w2g64", config=None):
    model = toy(*(256, 256, 256) if preset(name).rules[0][1].step_bits else ())
    quantize_model(model, preset(name), "mse", quiet=True)
    for i, layer in enumerate(add_lora(model, config or LoraConfig(recovery_r=3, recovery_alpha=2.0)).values()):
        nn.init.normal_(layer.lora_B, std=0.1 * (i + 1))
    return model


def test_every_linear_layer_but_the_head_is_reached():
    assert sorted(quantize_targets(toy(), preset("w4g128"))) == NAMES
    model = toy()
    quantize_model(model, preset("w4g128"), "mse", quiet=True)
    assert sorted(quant_layers(model)) == NAMES and type(model.lm_head) is nn.Linear
    assert sorted(lora_layers(adapted())) == NAMES and sorted(quant_layers(adapted())) == NAMES


def test_rules_decide_layer_by_layer():
    specs = quantize_targets(toy(), preset("q2a4", keep=(r"layers\.0\.mlp\.up_proj",)))
    assert sorted(specs) == sorted(set(NAMES) - {"model.layers.0.mlp.up_proj"})
    assert {name: spec.bits for name, spec in specs.items()} == {name: 2 if "mlp" in name else 4 for name in specs}


@pytest.mark.parametrize("keep", [r"layers\.7\.", "lm_head"])
def test_a_rule_that_reaches_nothing_raises_with_what_there_is(keep):
    with pytest.raises(ConfigError, match="matches no linear layer; there are: model.layers.0"):
        quantize_targets(toy(), preset("w4g128", keep=(keep,)))


def test_an_adapter_pattern_that_reaches_nothing_raises_and_leaves_the_model_alone():
    for pattern, reason in (("experts", "matches no linear layer"), ("(", "no.* a regular expression")):
        model = toy()
        with pytest.raises(ConfigError, match=f"lora_targets: .*{reason}"):
            add_lora(model, LoraConfig(lora_targets=pattern))
        assert not lora_layers(model) and all(p.requires_grad for p in model.parameters())


def test_adapters_go_where_the_pattern_says():
    model = toy()
    layers = add_lora(model, LoraConfig(mlp_only=True))
    assert sorted(layers) == [name for name in NAMES if "mlp" in name]
    trainable = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trainable == {f"{name}.lora_{x}" for name in layers for x in "AB"}
    assert sorted(add_lora(toy(), LoraConfig(lora_targets=r"1\.self_attn"))) == [n for n in NAMES if "1.self_attn" in n]
    with pytest.raises(ModelError, match="adapters already"):
        add_lora(model, LoraConfig())


def test_a_start_for_a_layer_that_is_not_there_is_refused():
    start = {"model.layers.9.mlp.up_proj": Factors(torch.zeros(1, 16), torch.zeros(40, 1))}
    with pytest.raises(ModelError, match="layers that the model lacks: model.layers.9.mlp.up_proj"):
        add_lora(toy(), LoraConfig(), start)


def mixture(**changed):
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"vocab_size": 32, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "head_dim": 32}
    experts = {"num_key_value_heads": 1, "moe_intermediate_size": 32, "intermediate_size": 96, "num_experts": 8}
    with torch.device("meta"):
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**{**sizes, **experts, **changed}))


def test_a_model_that_would_be_quantised_in_part_is_refused_unless_asked_for():
    model = mixture()  # its experts stacked, as in a form that is not known
    assert len(quantize_targets(model, preset("w2g64"))) == 8  # attention alone, and not a word of the experts
    with pytest.raises(
        ModelError, match=r"model: 80% of .* \(6 tensors such as model.layers.0.mlp.experts.gate_up_proj.*'mlp.experts'"
    ):
        check_reach(model, preset("w2g64"))
    kept = preset("w2g64", keep=("experts",))
    share, line = reach_of(model, kept, check_reach(model, kept))
    assert share < 0.25 and line.startswith("warning: only 19.8%")
    assert "in 4 such as model.layers.0.mlp.experts.down_proj (--keep 'experts'); 0." in line and "a router" in line
    split_experts(model)
    share, line = reach_of(model, preset("w2g64"), targets := check_reach(model, preset("w2g64")))
    assert share > 0.99 and len(targets) == 8 + 2 * 8 * 3 and "warning" not in line
    check_reach(mixture(), kept)
    check_reach(mixture(mlp_only_layers=[0, 1]), preset("w2g64"))  # a router's weights alone would pass
    with pytest.raises(ConfigError, match="'nothing' matches no linear layer"):
        check_reach(model, preset("w2g64", keep=("nothing",)))
    unknown = mixture(mlp_only_layers=[0, 1])
    for layer in unknown.model.layers:  # linear, but under a name that no rule of this preset knows
        layer.mixer = nn.Linear(64, 64, device="meta")
    check_reach(unknown, preset("w2g64"))
    with pytest.raises(ModelError, match="2 tensors such as model.layers.0.mixer.*--keep 'mixer'"):
        check_reach(unknown, preset("q2a4"))


def test_rows_that_blocks_of_256_do_not_divide_are_refused_with_what_fits():
    for name in ("q2_k", "q3_k", "q4_k", "q6_k"):
        with pytest.raises(ConfigError, match="layers.0.mlp.down_proj has 40 inputs.*--override 'down_proj=q4_0'"):
            quantize_targets(toy(256, 256, 40), preset(name))
    fits = preset("q2_k", override=("down_proj=q4_0",), lm_head="q6_k")
    assert quantize_targets(toy(256, 256, 40), fits)["lm_head"].bits == 6


def test_conv1d_models_are_refused():
    from transformers import GPT2Config, GPT2LMHeadModel

    model = GPT2LMHeadModel(GPT2Config(vocab_size=32, n_embd=8, n_layer=1, n_head=1, n_positions=16))
    with pytest.raises(ModelError, match="Conv1D.*Use a Qwen, Llama or Gemma style model"):
        quantize_targets(model, preset("w4g128"))
    with pytest.raises(ModelError, match="Conv1D"):
        add_lora(model, LoraConfig())


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("train_scales", [None, False, True])
def test_merging_changes_nothing(name, train_scales):
    model = adapted(name).eval()
    if train_scales is not None:
        prepare_base(model, train_scales)
    with torch.no_grad():
        expected = model(IDS)
        merged = merge(model)(IDS)
    assert not quant_layers(model) and not lora_layers(model)
    assert {type(m) for n, m in model.named_modules() if n in NAMES} == {nn.Linear}
    assert torch.allclose(merged, expected, atol=1e-5)
    assert set(model.state_dict()) == set(toy().state_dict())


def test_merging_adapters_on_an_unquantised_bfloat16_base_rounds_once():
    model = toy().to(torch.bfloat16)
    weight = model.model["layers"][0].mlp["up_proj"].weight.detach().clone()
    layer = add_lora(model, LoraConfig(recovery_r=2))["model.layers.0.mlp.up_proj"]
    nn.init.normal_(layer.lora_B)
    delta = layer.delta().detach().double()
    merge(model)
    merged = model.model["layers"][0].mlp["up_proj"].weight
    assert torch.equal(merged, (weight.double() + delta).float().bfloat16())


def test_merging_draws_no_random_numbers():
    model = adapted()
    before = torch.get_rng_state()
    merge(model)
    assert torch.equal(torch.get_rng_state(), before)


def test_prepare_base_says_what_trains():
    model = adapted("q4a4")
    trained = prepare_base(model, train_scales=True)
    assert set(trained) == {f"{name}.{part}" for name in NAMES for part in ("scale_a", "scale_b")}
    assert all(p.requires_grad for p in trained.values())
    assert prepare_base(model, train_scales=False, dtype=torch.bfloat16) == {}
    assert not any(p.requires_grad for p in trained.values())
    assert {layer.weight.dtype for layer in quant_layers(model).values()} == {torch.bfloat16}


def test_bits_per_weight_by_hand():
    weights = 2 * (16 * 24 + 24 * 16 + 16 * 40 + 40 * 16)
    groups = 2 * (24 + 16 + 40 + 16)  # every row is narrower than a group of 64, so it has one scale
    factors = 2 * 3 * ((16 + 24) + (24 + 16) + (16 + 40) + (40 + 16))
    bits = bits_per_weight(adapted("w2g64"))
    assert bits["base"] == pytest.approx(2 + 16 * groups / weights, rel=1e-12)
    assert bits["with_adapter"] == pytest.approx(2 + 16 * (groups + factors) / weights, rel=1e-12)
    with pytest.raises(ModelError, match="no quantised layer"):
        bits_per_weight(toy())


def test_a_skeleton_takes_the_state_of_the_model_it_stands_for():
    chosen: Preset = preset("q2a4", keep=(r"layers\.1\.mlp\.up_proj",))
    model, skeleton = toy(), toy()
    quantize_model(model, chosen, "absmax", quiet=True)
    make_quant_skeleton(skeleton, chosen)
    skeleton.load_state_dict(model.state_dict())
    assert torch.equal(skeleton(IDS), model(IDS))


def test_a_student_stored_with_kmeans_tables_loads_as_it_was():
    spec = {"bits": 2, "code": "lut", "sharing": "channel", "table": "kmeans"}
    skeleton = toy()
    make_quant_skeleton(skeleton, Preset.from_dict({"name": "x", "rules": [["up_proj", spec]]}))
    table = torch.tensor([-0.9, -0.2, 0.1, 1.0]).half().float()
    layer = quant_layers(skeleton)["model.layers.0.mlp.up_proj"]
    layer.load_state_dict(layer.state_dict() | {"values": table, "codes": torch.full_like(layer.codes, 0b11100100)})
    assert torch.equal(layer.weight[0, :4], table)


def test_a_rank_beyond_a_layer_is_refused_and_nothing_is_changed():
    model = nn.Sequential()
    model.add_module("wide", nn.Linear(64, 48))
    model.add_module("narrow", nn.Linear(48, 8))
    with pytest.raises(ConfigError, match=r"^recovery_r: 9 is more than narrow can have \(48 inputs, 8 outputs\)"):
        add_lora(model, LoraConfig(recovery_r=9))
    assert not lora_layers(model) and all(p.requires_grad for p in model.parameters())
    assert len(add_lora(model, LoraConfig(recovery_r=8))) == 2


def test_bits_are_counted_by_rule_and_for_the_whole_model():
    model = toy()
    chosen = preset("w2g64", keep=(r"layers\.0\.self_attn",), override=(r"mlp\.down_proj=w4g64a",), lm_head="nf4g64")
    quantize_model(model, chosen, "mse", quiet=True)
    rules = rule_bits(model, chosen)
    assert [(r["pattern"], r["layers"]) for r in rules] == [
        (r"layers\.0\.self_attn", 2),
        (r"mlp\.down_proj", 2),
        (".", 4),
        ("output head", 1),
    ]
    down = 4 * 640 + 16 * 20  # 40 inputs: one scale and one zero point a channel
    up, wide, narrow = 2 * 640 + 40 * 16, 2 * 384 + 24 * 16, 2 * 384 + 16 * 16
    head = 4 * 176 + 11 * 16 + 256
    assert rules[0]["bits_per_weight"] is None
    assert rules[1]["bits_per_weight"] == pytest.approx(down / 640)
    assert rules[2]["bits_per_weight"] == pytest.approx((2 * up + wide + narrow) / (2 * 640 + 2 * 384), abs=1e-4)
    assert rules[3]["bits_per_weight"] == pytest.approx(head / 176, abs=1e-4)
    base = 2 * down + 2 * up + wide + narrow + head
    weights = 4 * 640 + 2 * 384 + 176
    others = 2 * 384 + 11 * 16 + 2 * (24 + 40 + 16)  # kept layers, the embedding, biases
    counted = bits_per_weight(model)
    assert counted["base"] == pytest.approx(base / weights)
    assert counted["model"] == pytest.approx((base + 32 * others) / (weights + others))


def test_the_head_is_quantised_only_where_it_is_asked_for_and_there():
    model = toy()
    assert "lm_head" in quantize_targets(model, preset("w2g64", lm_head="w4g128"))
    assert "lm_head" not in quantize_targets(model, preset("w2g64"))
    del model.lm_head
    with pytest.raises(ConfigError, match="quantize_head: the model has no single output head; found: none"):
        quantize_targets(model, preset("w2g64", lm_head="w4g128"))
