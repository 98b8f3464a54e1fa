"""A GGUF file read back as the model that it was made of, by a conversion that shares no code with ours."""

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from qat_lora.errors import ModelError
from qat_lora.files.gguf_header import Q2_0, GGUFHeader
from qat_lora.models.from_gguf import check_tokens, config_of, dequantize
from qat_lora.models.load import load_model, load_tokenizer, make_tokenizer

SMALL = {
    "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 64, "pad_token_id": None,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
CASES = {
    "llama": {"attention_bias": True, "rope_parameters": LLAMA3},
    "qwen2": {"tie_word_embeddings": True, "head_dim": 8},
    "qwen3": {},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 16},
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 8, "query_pre_attn_scalar": 16},
    "phi3": {"head_dim": 8, "bos_token_id": None, "eos_token_id": None},
}


def save(module, arch, file):
    """Write a model as llama.cpp's converter does, number by number."""
    config = module.config
    writer = gguf.GGUFWriter(file, arch)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_key_length(config.head_dim)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    if arch.startswith("gemma"):
        writer.add_sliding_window(config.sliding_window)
    if rope.get("rope_type") == "llama3":
        with torch.no_grad():
            scaled = module.model.rotary_emb.inv_freq
        plain = 1 / rope["rope_theta"] ** (torch.arange(0, config.head_dim, 2) / config.head_dim)
        writer.add_tensor("rope_freqs.weight", (plain / scaled).numpy().astype(np.float32))
    key = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(key, config.num_hidden_layers)
    for name, tensor in module.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values, heads = tensor.numpy(), {"q_proj": 4, "k_proj": 2}.get(name.split(".")[-2])
        if arch == "llama" and heads:
            width = len(values) // heads
            order = [
                h * width + half * width // 2 + i for h in range(heads) for i in range(width // 2) for half in (0, 1)
            ]
            values = values[order]
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            values = values + 1
        layer, _, part = name.rpartition(".")
        writer.add_tensor(f"{names.get_name(layer)}.{part}", values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("arch", CASES)
def test_logits_are_those_of_the_model(tmp_path, arch):
    torch.manual_seed(0)
    config = AutoConfig.for_model(**{"model_type": arch, **SMALL, **CASES[arch]})
    module = AutoModelForCausalLM.from_config(config).eval()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    save(module, arch, tmp_path / "x.gguf")
    found = load_model(str(tmp_path / "x.gguf"), dequantize=True)
    ids = torch.randint(0, 96, (1, 20))
    with torch.no_grad():
        wanted = module(ids).logits
        assert torch.allclose(found.module(ids).logits, wanted, atol=1e-5 * float(wanted.abs().max()))


def test_q2_0(tmp_path):
    draw = np.random.default_rng(0)
    blocks = draw.integers(0, 256, (6, 18), np.uint8)
    steps = draw.standard_normal(6).astype(np.float16)
    blocks[:, :2] = steps[:, None].view(np.uint8)
    file = tmp_path / "x"
    file.write_bytes(bytes(32) + blocks.tobytes())
    header = GGUFHeader(file, {}, {"a": Q2_0._replace(shape=(2, 192), offset=32)})
    wanted = [
        float(steps[b]) * ((int(blocks[b, 2 + i // 4]) >> 2 * (i % 4) & 3) - 1) for b in range(6) for i in range(64)
    ]
    assert dequantize(header, "a").flatten().tolist() == wanted


def test_what_would_be_computed_otherwise_is_refused(tmp_path):
    file = tmp_path / "x.gguf"
    for settings, said in (
        ({"general.architecture": "mamba"}, "architecture mamba is not read; allowed: llama"),
        ({"general.architecture": "llama", "llama.expert_count": 8}, "llama with experts"),
        ({"general.architecture": "qwen3"}, "settings of qwen3 are incomplete"),
    ):
        with pytest.raises(ModelError, match=said):
            config_of(GGUFHeader(file, settings, {}))


def test_the_first_token_that_differs_is_named(tmp_path):
    make_tokenizer(["the cache of a model"] * 5, 264, tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])]

    def compare(tokens, kinds=None):
        settings = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": kinds or [1] * len(tokens)}
        check_tokens(GGUFHeader(tmp_path, settings, {}), tokenizer, tmp_path)

    compare(tokens)
    compare([*tokens, "[PAD]"], [*[1] * len(tokens), 5])
    for others, said in (
        ([*tokens[:7], "x", *tokens[8:]], "token 7 is 'x' in"),
        (tokens[:-1], f"token {len(tokens) - 1} is None in"),
        ([*tokens, "y"], f"token {len(tokens)} is 'y' in .* and None in"),
    ):
        with pytest.raises(ModelError, match=said):
            compare(others)
