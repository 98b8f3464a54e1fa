"""Tiny mixtures of experts with the tiny teacher's tokenizer."""

import torch
import transformers

from qat_lora.models.copies import copy_tokenizer

SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
SIZES |= {"max_position_embeddings": 256, "bos_token_id": 0, "eos_token_id": 0, "vocab_size": 320, "pad_token_id": None}
MIXTURES = {
    "Qwen3Moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "head_dim": 32}
    | {"intermediate_size": 96, "norm_topk_prob": True},
    "Mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "head_dim": 32},
    "Olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, "num_key_value_heads": 2},
    "Qwen2Moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "intermediate_size": 96}
    | {"shared_expert_intermediate_size": 64},
}
"""transformers' names of families, and what their toys have of their own; Qwen2Moe has a shared expert."""


def make_mixture(kind, **changed):
    """Return a random mixture whose experts differ enough to matter."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**{**SIZES, **MIXTURES[kind], **changed})
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2:
                parameter.normal_(0.0, 0.3 if "embed" in name else 0.12)
    return model


def save_mixture(kind, folder, tiny, **changed):
    """Save one with the tiny teacher's tokenizer; return its folder."""
    make_mixture(kind, **changed).save_pretrained(folder)
    copy_tokenizer(tiny.teacher, folder)
    return folder
