"""Tiny models of every architecture that GGUF export knows, and a SentencePiece-type tokenizer."""

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedTokenizerFast,
)

HIDDEN, ROWS = 64, 400
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 16.0}
LONG = {"rope_type": "longrope", "original_max_position_embeddings": 256}
LONG |= {"short_factor": [1 + i / 64 for i in range(16)], "long_factor": [1 + i / 4 for i in range(16)]}
ARCHITECTURES = {
    "qwen2": {"rope_parameters": {**YARN, "rope_theta": 1e4}, "tie_word_embeddings": True},
    "qwen3": {"head_dim": 16, "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}},
    "llama": {
        "attention_bias": True,
        "mlp_bias": True,
        "rope_parameters": {**LLAMA3, "original_max_position_embeddings": 64, "rope_theta": 1e4},
    },
    "mistral": {"sliding_window": None, "head_dim": 16},
    "gemma2": {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 24, "attn_logit_softcapping": 5.0},
    "gemma3_text": {
        "head_dim": 16,
        "query_pre_attn_scalar": 16,
        "sliding_window": 24,
        "final_logit_softcapping": 8.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
    },
    "phi3": {
        "rope_parameters": {**LONG, "rope_theta": 1e4},
        "original_max_position_embeddings": 256,
        "pad_token_id": 0,
    },
    "granite": {
        "attention_bias": True,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
        "logits_scaling": 2.0,
        "tie_word_embeddings": True,
    },
}


def make_model(kind, folder):
    """Save a random model of an architecture; all of its numbers are float16's."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        kind, vocab_size=ROWS, hidden_size=HIDDEN, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=96, max_position_embeddings=512, bos_token_id=1, eos_token_id=2, **ARCHITECTURES[kind],
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)
            else:
                parameter.add_(torch.randn_like(parameter) * 0.2)
            parameter.copy_(parameter.half())
    model.save_pretrained(folder)
    return folder


def make_sentencepiece(text, folder, prefix=True):
    """Save a tokenizer as transformers makes it of a SentencePiece model: all splits of a token are merges."""
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    draft = Tokenizer(models.BPE(unk_token="<unk>"))
    draft.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.BpeTrainer(vocab_size=ROWS - 10, special_tokens=special, show_progress=False)
    draft.train_from_iterator([text], trainer)
    vocab = draft.get_vocab()
    merges = [
        (token[:i], token[i:])
        for token, _ in sorted(vocab.items(), key=lambda entry: entry[1])
        for i in range(1, len(token))
        if token not in special and token[:i] in vocab and token[i:] in vocab
    ]
    real = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [normalizers.Prepend("▁")] * prefix + [normalizers.Replace(" ", "▁")]
    real.normalizer = normalizers.Sequence(steps) if prefix else steps[0]
    real.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made = PreTrainedTokenizerFast(tokenizer_object=real, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    made.save_pretrained(folder)
    return made
