"""Experts as linear layers: the numbers of transformers' fused modules, and back."""

import pytest
import torch
from toy_mixture import MIXTURES, make_mixture

from qat_lora.layers import experts as module
from qat_lora.layers.convert import add_lora, linear_layers
from qat_lora.layers.experts import Experts, is_router, join_experts, split_experts, tokens_of
from qat_lora.layers.lora import LoraConfig

IDS = torch.randint(0, 320, (2, 20), generator=torch.Generator().manual_seed(0))


def run(model):
    """Return logits, and the gradient of their squares towards the embedded tokens."""
    embedded = model.get_input_embeddings()(IDS).detach().requires_grad_()
    logits = model(inputs_embeds=embedded).logits
    return logits.detach(), torch.autograd.grad(logits.square().sum(), embedded)[0]


@pytest.mark.parametrize("kind", sorted(MIXTURES))
def test_split_experts_compute_what_the_fused_ones_do_and_join_to_the_same(kind, monkeypatch):
    model = make_mixture(kind)
    logits, gradient = run(model)
    before = model.state_dict()
    split_experts(model)
    layers = dict(linear_layers(model))
    assert sum(isinstance(m, Experts) for m in model.modules()) == 2
    assert torch.equal(layers["model.layers.1.mlp.experts.2.up_proj"].weight, before_up(before, 2))
    for fixed in (False, True):
        monkeypatch.setattr(module, "is_xla_device", lambda tensor, fixed=fixed: fixed)
        found, slope = run(model)
        assert (found - logits).abs().max() < 2e-6 * logits.abs().max()
        assert (slope - gradient).abs().max() < 2e-5 * gradient.abs().max()
    monkeypatch.undo()
    found, _ = run(model)
    with torch.no_grad():  # where experts without tokens do not run
        assert torch.equal(model(IDS).logits, found)
    join_experts(model)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def before_up(state, number):
    return state["model.layers.1.mlp.experts.gate_up_proj"][number].chunk(2)[1]


def test_every_expert_gets_a_gradient_and_knows_its_tokens():
    model = make_mixture("Qwen3Moe", num_experts_per_tok=1)
    with torch.no_grad():
        model.model.layers[0].mlp.gate.weight[:5] *= 1e3
        model.model.layers[0].mlp.gate.weight[5] = 0.0
    split_experts(model)
    adapters = add_lora(model, LoraConfig(recovery_r=2))
    assert "model.layers.0.mlp.experts.5.up_proj" in adapters
    model(IDS).logits.sum().backward()
    assert all(a.lora_B.grad is not None for a in adapters.values())
    of = [tokens_of(model, f"model.layers.0.mlp.experts.{e}.down_proj") for e in range(6)]
    assert len(of[5]) == 0 and sorted(torch.cat(of).tolist()) == list(range(40))
    assert tokens_of(model, "model.layers.0.self_attn.q_proj") is None


def test_routers_are_named_by_their_place():
    model = make_mixture("Qwen2Moe")
    split_experts(model)
    assert is_router(model, "model.layers.0.mlp.shared_expert_gate") and is_router(model, "model.layers.0.mlp.gate")
    assert not is_router(model, "model.layers.0.mlp.experts.0.gate_proj") and not is_router(model, "lm_head")
    assert not any("expert_gate" in name for name in add_lora(model, LoraConfig(recovery_r=2)))


def test_experts_of_another_form_stay_as_they_are():
    import transformers

    sizes = {"vocab_size": 32, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16}
    with torch.device("meta"):
        config = transformers.GptOssConfig(**sizes, num_local_experts=2, intermediate_size=32, pad_token_id=None)
        model = transformers.GptOssForCausalLM(config)
    before = [name for name, _ in model.named_parameters()]
    split_experts(model)
    assert [name for name, _ in model.named_parameters()] == before
