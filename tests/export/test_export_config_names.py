"""Every form's config.json says the same to transformers 5 and to engines that read its older names."""

import copy
import json
import logging

import pytest
import torch
from toy_export import with_adapter
from toy_multimodal import make
from toy_pipeline import call, export_options, quantize_options
from transformers import AutoConfig, AutoModelForCausalLM

from qat_lora.files.checksums import checkpoint_sha256
from qat_lora.layers.lora import LoraConfig
from qat_lora.models.adapter import save_adapter
from qat_lora.models.copies import copy_tokenizer
from qat_lora.models.load import add_older_names, load_model, save_model

SIZES = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 2, "num_key_value_heads": 1, "bos_token_id": 0, "eos_token_id": 0}
SIZES |= {"max_position_embeddings": 131072, "pad_token_id": None}
# Llama 3.2's published config.json, with a base of nobody's.
LLAMA3 = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "rope_type": "llama3"}
LLAMA3 |= {"original_max_position_embeddings": 8192}
LLAMA = {"model_type": "llama", "rope_theta": 123456.0, "rope_scaling": LLAMA3, "torch_dtype": "bfloat16"}
# Gemma 3's, both bases changed.
LINEAR = {"factor": 8.0, "rope_type": "linear"}
GEMMA = {"model_type": "gemma3_text", "rope_theta": 1234567.0, "rope_local_base_freq": 23456.0}
GEMMA |= {"rope_scaling": LINEAR, "head_dim": 32, "sliding_window": 16, "torch_dtype": "bfloat16"}
GEMMA |= {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 32}
PLAIN = {"model_type": "llama", "rope_theta": 123456.0, "torch_dtype": "bfloat16"}
GIVEN = {"plain": PLAIN, "llama3": LLAMA, "gemma3": GEMMA}
READ = {
    "plain": {"rope_theta": 123456.0, "rope_scaling": None},
    "llama3": {"rope_theta": 123456.0, "rope_scaling": LLAMA3},
    "gemma3": {
        "rope_theta": 1234567.0,
        "rope_local_base_freq": 23456.0,
        "rope_scaling": LINEAR,
    },
}
FORMS = ("merged", "adapter", "compressed-tensors", "gptq", "mlx", "pt")


@pytest.fixture(scope="module", params=sorted(GIVEN))
def made(request, tiny, tmp_path_factory):
    """A model with a published config.json, its quantised student, and an adapter of the student."""
    root = tmp_path_factory.mktemp(request.param)
    config = AutoConfig.for_model(**SIZES | copy.deepcopy(GIVEN[request.param]))  # which it changes
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(root / "teacher")
    copy_tokenizer(tiny.teacher, root / "teacher")
    file = root / "teacher" / "config.json"
    old = {"model_type", "architectures", *SIZES, *GIVEN[request.param]}
    wrote = json.loads(file.read_text())
    published = {name: value for name, value in (wrote | GIVEN[request.param]).items() if name in old}
    file.write_text(json.dumps(published))
    (root / "teacher" / "generation_config.json").write_text('{"eos_token_id": [0, 7]}')
    options = quantize_options(tiny._replace(teacher=root / "teacher"), root / "student", preset="q2_0")
    student = call("quantize", options)
    lora = LoraConfig(recovery_r=2)
    module = with_adapter(student, lora).module
    save_adapter(module, lora, root / "tuned", student, checkpoint_sha256(student))
    return request.param, root


@pytest.fixture
def warned(caplog, monkeypatch):
    """What transformers warns of."""
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level(logging.WARNING, logger="transformers"):
        yield caplog


def check(folder, kind, teacher, warned):
    config = json.loads((folder / "config.json").read_text())
    assert {name: config.get(name, "absent") for name in READ[kind]} == READ[kind]
    assert config["torch_dtype"] == config["dtype"]
    warned.clear()
    found = AutoConfig.from_pretrained(folder)
    assert not warned.records
    wanted = AutoConfig.from_pretrained(teacher).rope_parameters
    assert found.rope_parameters == wanted
    ends = json.loads((folder / "generation_config.json").read_text())["eos_token_id"]
    assert ends == [0, 7]


@pytest.mark.parametrize("form", FORMS)
def test_every_form(made, form, tmp_path, warned):
    kind, root = made
    if form == "compressed-tensors":
        pytest.importorskip("compressed_tensors")
    out = call("export", export_options(root / "tuned", tmp_path / "out", form=form))
    check(out / "base" if form == "adapter" else out, kind, root / "teacher", warned)


def test_a_quantised_student(made, warned):
    kind, root = made
    check(root / "student", kind, root / "teacher", warned)
    sha256 = checkpoint_sha256(root / "student")
    add_older_names(root / "student")  # once more
    assert checkpoint_sha256(root / "student") == sha256


FAMILIES = {
    "cohere2": ({}, {"rope_theta": 123456.0}),
    "glm4": ({"partial_rotary_factor": 0.25, "pad_token_id": None}, {"partial_rotary_factor": 0.25}),
    "gpt_neox": ({"partial_rotary_factor": 0.5}, {"rotary_emb_base": 123456.0, "rotary_pct": 0.5}),
    "nemotron": ({"partial_rotary_factor": 0.75}, {"partial_rotary_factor": 0.75}),
    "olmo3": ({"pad_token_id": 0}, {"rope_theta": 123456.0}),
    "phi": ({"partial_rotary_factor": 0.25}, {"partial_rotary_factor": 0.25}),
    "qwen2": (
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
        {
            "rope_scaling": {
                "rope_type": "yarn",
                "factor": 4.0,
                "original_max_position_embeddings": 32768,
            }
        },
    ),
    "qwen3_moe": ({"num_experts": 6}, {"num_experts": 6, "rope_theta": 123456.0}),
    "stablelm": ({"partial_rotary_factor": 0.5}, {"partial_rotary_factor": 0.5}),
}
ROTARY = ("partial_rotary_factor", "rope_type", "factor", "original_max_position_embeddings")


@pytest.mark.parametrize("kind", sorted(FAMILIES))
def test_families(kind, tmp_path):
    given, wanted = FAMILIES[kind]
    rope = {"rope_theta": 123456.0, "rope_type": "default"}
    rope |= {name: value for name, value in given.items() if name in ROTARY}
    settings = {name: value for name, value in given.items() if name not in ROTARY}
    if kind == "olmo3":
        rope = {layers: dict(rope) for layers in ("full_attention", "sliding_attention")}
    config = AutoConfig.for_model(kind, **SIZES | {"rope_parameters": rope} | settings)
    config.save_pretrained(tmp_path)
    add_older_names(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert {name: written.get(name) for name in wanted} == wanted
    found = AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert found == config.rope_parameters


def test_phi_3_has_the_three_fields_that_its_older_class_takes(tmp_path):
    factors = {"short_factor": [1.0] * 16, "long_factor": [2.0] * 16}
    rope = {"rope_type": "longrope", "rope_theta": 123456.0, **factors}
    settings = {"original_max_position_embeddings": 4096, "pad_token_id": 0}
    config = AutoConfig.for_model("phi3", **SIZES | settings, rope_parameters=rope)
    config.save_pretrained(tmp_path)
    add_older_names(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["rope_scaling"] == {"type": "longrope", **factors}
    found = AutoConfig.from_pretrained(tmp_path).rope_parameters
    assert found == config.rope_parameters | {"type": "longrope"}


@pytest.mark.parametrize("kind", ["mellum", "gemma4_text", "laguna"])
def test_a_family_without_the_older_names_keeps_its_positions(kind, tmp_path):
    config = AutoConfig.for_model(kind)
    config.save_pretrained(tmp_path)
    add_older_names(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert "rope_scaling" not in written and "rope_theta" not in written
    assert AutoConfig.from_pretrained(tmp_path).rope_parameters == config.rope_parameters


@pytest.mark.parametrize("kind", ["gemma3", "qwen2_5_vl", "mistral3"])
def test_a_model_that_sees_has_them_in_its_text_config(kind, tiny, tmp_path):
    module = make(kind)
    rope = module.config.text_config.rope_parameters
    for settings in [rope["full_attention"]] if kind == "gemma3" else [rope]:
        settings["rope_theta"] = 123456.0
    module.save_pretrained(tmp_path / "teacher")
    copy_tokenizer(tiny.teacher, tmp_path / "teacher")
    options = quantize_options(tiny._replace(teacher=tmp_path / "teacher"), tmp_path / "student", preset="q2_0")
    student = call("quantize", options)
    merged = call("export", export_options(student, tmp_path / "merged", form="merged", dtype="float16"))
    for folder in (student, merged):
        config = json.loads((folder / "config.json").read_text())
        assert config["text_config"]["rope_theta"] == 123456.0
        assert config["torch_dtype"] == config["dtype"]
        assert AutoConfig.from_pretrained(folder).text_config.rope_parameters == rope
    assert config["dtype"] == "float16"


def test_what_is_saved_without_codes(made, tmp_path):
    kind, root = made
    save_model(load_model(str(root / "teacher")).module, tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert {name: written.get(name, "absent") for name in READ[kind]} == READ[kind]
