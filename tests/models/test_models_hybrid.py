"""Models whose layers carry a state: packed rows are transformers' own forward of each document, and they are trained.

Every family that `layers/recurrent.py` names is here, at random weights and in float32.
"""

from dataclasses import replace

import pytest
import torch
import transformers
from toy_pipeline import cache_options, call, part, quantize_options, recover_options
from transformers import AutoModelForCausalLM

from qat_lora.errors import ModelError
from qat_lora.layers import recurrent
from qat_lora.layers.lora import LoraConfig
from qat_lora.models.copies import copy_tokenizer
from qat_lora.models.kv_cache import begin, step
from qat_lora.models.load import LIBRARY, TILED, CausalLM
from qat_lora.runtime.native import NativeRuntime
from qat_lora.train.metrics import read_metrics

SMALL = {
    "vocab_size": 320,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": None,
}
DELTA = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
}
MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 16, "mamba_chunk_size": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SHORT = {"layer_types": ["conv", "full_attention"], "conv_L_cache": 3}
FAMILIES = {
    "qwen3_next": ("Qwen3Next", DELTA | EXPERTS | {"shared_expert_intermediate_size": 16}),
    "qwen3_5_text": ("Qwen3_5Text", DELTA),
    "qwen3_5_moe_text": ("Qwen3_5MoeText", DELTA | EXPERTS | {"shared_expert_intermediate_size": 16}),
    "olmo_hybrid": ("OlmoHybrid", DELTA),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        MAMBA
        | {"layer_types": ["linear_attention", "full_attention"], "num_local_experts": 4, "num_experts_per_tok": 2}
        | {"shared_intermediate_size": 32, "logits_scaling": 2.0},
    ),
    "bamba": ("Bamba", MAMBA | {"attn_layer_indices": [1]}),
    "falcon_h1": ("FalconH1", MAMBA | {"mamba_d_ssm": 64}),
    "lfm2": ("Lfm2", SHORT | {"block_auto_adjust_ff_dim": False}),
    "lfm2_moe": ("Lfm2Moe", SHORT | EXPERTS | {"num_dense_layers": 1}),
}
LENGTH = 100
LENGTHS = ((9, 1, 70, 20), (100,), (5, 95))  # documents of each row; chunks are of 64 tokens, or of 8


def make(family, **change):
    """A random model, larger than life so that every part matters."""
    torch.manual_seed(0)
    name, settings = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**SMALL | settings | change)
    module = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa").eval().requires_grad_(False)
    for name, parameter in module.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return CausalLM(module, None)


def packed():
    ids = torch.randint(0, 320, (len(LENGTHS), LENGTH), generator=torch.Generator().manual_seed(3))
    documents = torch.stack([torch.repeat_interleave(torch.arange(len(n)), torch.tensor(n)) for n in LENGTHS])
    return ids, documents


def one_by_one(model, ids):
    """Transformers' own logits, every document alone in a forward of its own."""
    rows = [row.split(list(lengths)) for row, lengths in zip(ids, LENGTHS, strict=True)]
    return torch.stack([torch.cat([model.module(part[None]).logits[0] for part in parts]) for parts in rows])


def logits(model, ids, documents):
    return model.logits(model.hidden(ids, documents).flatten(0, 1)).reshape(*ids.shape, -1)


def test_every_supported_family_is_here():
    assert set(FAMILIES) == set(recurrent.SUPPORTED)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_rows_are_transformers_document_by_document(family):
    model = make(family)
    ids, documents = packed()
    expected = one_by_one(model, ids)
    assert model.config.model_type == family and model.config._attn_implementation == LIBRARY
    torch.testing.assert_close(logits(model, ids, documents), expected, rtol=1e-4, atol=3e-4)
    model.tile_attention()
    assert model.config._attn_implementation == TILED
    torch.testing.assert_close(logits(model, ids, documents), expected, rtol=1e-4, atol=3e-4)
    # The comparison has teeth: as one document, the same tokens give other logits.
    as_one = logits(model, ids, torch.zeros_like(documents))
    assert (as_one[0] - expected[0]).abs().max() > 0.1
    torch.testing.assert_close(as_one[1], expected[1], rtol=1e-4, atol=3e-4)


@pytest.mark.parametrize("family", ["qwen3_5_text", "bamba", "lfm2"])
def test_gradients_are_those_of_the_documents_alone(family):
    model = make(family)
    model.module.requires_grad_(True)
    ids, documents = packed()
    pull = torch.randn(*ids.shape, 320, generator=torch.Generator().manual_seed(1))
    (one_by_one(model, ids) * pull).sum().backward()
    wanted = {name: p.grad.clone() for name, p in model.module.named_parameters()}
    model.tile_attention()
    for checkpointing in (False, True):
        model.module.zero_grad()
        if checkpointing:
            model.module.train()
            model.checkpoint_gradients(NativeRuntime("cpu").checkpoint_function())
        (logits(model, ids, documents) * pull).sum().backward()
        for name, parameter in model.module.named_parameters():
            assert (parameter.grad - wanted[name]).norm() <= 1e-3 * wanted[name].norm() + 1e-4, name


@pytest.mark.parametrize("family", ["qwen3_next", "granitemoehybrid", "lfm2", "falcon_h1"])
def test_generation_continues_the_state_of_the_prompt_alone(family):
    model, known = make(family), 30
    ids = packed()[0][1:2, :40]
    wanted = model.hidden(ids, torch.zeros_like(ids))
    padded = ids.clone()
    padded[:, known:] = 7
    hidden, cache = begin(model, padded, known)
    found = [hidden]
    for position in range(known, 40):
        found.append(step(model, ids[:, position : position + 1], torch.tensor([position]), cache))
    torch.testing.assert_close(torch.cat(found, 1), wanted, rtol=1e-3, atol=1e-3)


def test_what_is_not_tested_is_refused():
    model = make("lfm2")
    with pytest.raises(ModelError, match="carry a state.*--device cpu or cuda"):
        model.block_attention(NativeRuntime("cpu").kept, None)
    model.compile_layers()  # nothing is compiled: no block mask is asked for
    assert model.mask_form() == "first"
    model.config.model_type = "jamba"
    with pytest.raises(ModelError, match=r"model: jamba has layers.*allowed: bamba, falcon_h1"):
        model.hidden(*packed())


def test_a_hybrid_is_recovered(tiny, tmp_path):
    """Calibrated on packed rows, cached, trained: the KL falls, and what is measured is what was trained."""
    wide = {
        "hidden_size": 64,
        "intermediate_size": 64,
        "head_dim": 16,
        "linear_num_value_heads": 8,
        "initializer_range": 0.12,
    }
    model = make("qwen3_5_text", **wide)
    model.module.save_pretrained(tmp_path / "teacher")
    copy_tokenizer(tiny.teacher, tmp_path / "teacher")
    hybrid = tiny._replace(teacher=tmp_path / "teacher")
    cache = call("build_cache", cache_options(hybrid, tmp_path / "cache"))
    student = call("quantize", quantize_options(hybrid, tmp_path / "student", cache))
    options = recover_options(student, cache, tmp_path / "run", run=part(tmp_path / "run"))
    options = replace(options, loop=replace(options.loop, max_steps=24, eval_steps=6, save_steps=24))
    options = replace(options, train=replace(options.train, lr=1e-2), lora=LoraConfig(recovery_r=8))
    call("recover", options)
    found = [line["kl_bound"] for line in read_metrics(tmp_path / "run" / "evaluations.jsonl")]
    assert len(found) > 2 and found[-1] < 0.85 * found[0], found
