"""A model in a GGUF file as transformers has it: settings, names, and weights as llama.cpp computes them.

transformers reads GGUF too, but takes what it does not map for the class's default: the width of Qwen3's heads, scaled
positions, Gemma's caps. Here each architecture is listed with the settings that llama.cpp gives it, and others are
refused. Weights are dequantised by the gguf library in float32, which is llama.cpp's arithmetic. What llama.cpp changes
when it converts is undone: the order of a Llama's rows in q and k (it pairs neighbours in the rotary embedding,
transformers the two halves), and the one that it adds to Gemma's norms.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qat_lora.errors import ModelError
from qat_lora.extras import require
from qat_lora.files.gguf_header import Q2_0, GGUFHeader

ARCHITECTURES = {
    "llama": "llama",  # Mistral too
    "granite": "granite",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
    "phi3": "phi3",
}
"""GGUF's architectures, and transformers' `model_type` of each."""
_UNUSED = 5
"""Kind of the tokens that fill the rows up; their names are the converter's."""
_PAIRED = ("llama", "granite")
_BESIDE = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
"""Tensors that belong to the settings."""
_GRANITE = {
    "embedding_multiplier": "embedding_scale",
    "residual_multiplier": "residual_scale",
    "attention_multiplier": "attention.scale",
    "logits_scaling": "logit_scale",
}


def config_of(header: GGUFHeader) -> dict[str, Any]:
    """Return the settings of a model as transformers' config classes take them, `model_type` included.

    Raises:
        ModelError: an architecture, or a setting of it, that we would compute otherwise than llama.cpp.
    """
    arch, of = header.architecture, header.of_model
    if arch not in ARCHITECTURES or of("expert_count"):
        kind = f"{arch} with experts" if arch in ARCHITECTURES else arch
        raise ModelError(f"{header.file}: its architecture {kind} is not read; allowed: {', '.join(ARCHITECTURES)}")
    try:
        heads, width = _one(of("attention.head_count")), int(of("embedding_length"))
        head_dim = int(of("attention.key_length") or width // heads)
        blocks = {name.split(".")[1] for name in header.tensors if name.startswith("blk.")}
        config: dict[str, Any] = {
            "model_type": ARCHITECTURES[arch],
            "vocab_size": header.tensors["token_embd.weight"].shape[0],
            "hidden_size": width,
            "intermediate_size": _one(of("feed_forward_length")),
            "num_hidden_layers": _one([of("block_count"), len(blocks)]),
            "num_attention_heads": heads,
            "num_key_value_heads": _one(of("attention.head_count_kv", heads)),
            "head_dim": head_dim,
            "max_position_embeddings": int(of("context_length")),
            "rms_norm_eps": float(of("attention.layer_norm_rms_epsilon")),
            "tie_word_embeddings": "output.weight" not in header.tensors,
            "rope_parameters": _rope(header, int(of("rope.dimension_count", head_dim)) / head_dim),
        }
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"{header.file}: its settings of {arch} are incomplete ({error!r})") from None
    for name in ("bos", "eos", "pad"):
        number = header.settings.get(f"tokenizer.ggml.{'padding' if name == 'pad' else name}_token_id")
        config[f"{name}_token_id"] = number if isinstance(number, int) and number < config["vocab_size"] else None
    if arch in _PAIRED:
        config |= {f"{part}_bias": f"blk.0.{of}.bias" in header.tensors for part, of in _BIASES.items()}
    if arch == "granite":
        config |= {name: float(of(key)) for name, key in _GRANITE.items() if of(key) is not None}
    if arch.startswith("gemma"):
        # As llama.cpp: by the largest model's layers, since no file says by what queries are scaled.
        largest = config["num_hidden_layers"] == {"gemma2": 46, "gemma3": 62}[arch]
        config |= {"query_pre_attn_scalar": width // heads if largest else head_dim}
        config |= {"sliding_window": of("attention.sliding_window", 4096)}
        config |= {"final_logit_softcapping": of("final_logit_softcapping", 30.0 if arch == "gemma2" else None)}
        if arch == "gemma3" and not of("attention.sliding_window"):
            config["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
        if arch == "gemma2":
            config |= {"attn_logit_softcapping": of("attn_logit_softcapping", 50.0)}
        else:
            local = {"rope_type": "default", "rope_theta": float(of("rope.freq_base_swa", 10000.0))}
            config["rope_parameters"] = {"sliding_attention": local, "full_attention": config["rope_parameters"]}
    return config


_BIASES = {"attention": "attn_q", "mlp": "ffn_up"}


def _one(value: Any) -> int:
    """Return a number that a file may state for each layer, where all are the same."""
    values = set(value) if isinstance(value, list) else {value}
    if len(values) != 1:
        raise ValueError(f"{sorted(values)} where one number is meant")
    return int(values.pop())


def _rope(header: GGUFHeader, rotated: float) -> dict[str, Any]:
    """Return the settings of positions; factors that llama.cpp keeps in tensors are `longrope`'s, whoever made them."""
    of, beside = header.of_model, [name for name in _BESIDE if name in header.tensors]
    base = {"rope_type": "default", "rope_theta": float(of("rope.freq_base", 10000.0))}
    if rotated != 1.0:
        base["partial_rotary_factor"] = rotated
    kind, positions = of("rope.scaling.type", "none"), int(of("rope.scaling.original_context_length", 0))
    if beside:
        factors = [dequantize(header, name).flatten().tolist() for name in beside]
        positions, scale = positions or int(of("context_length")), float(of("rope.scaling.attn_factor", 1.0))
        return base | {
            "rope_type": "longrope",
            "long_factor": factors[0],
            "short_factor": factors[-1],
            "original_max_position_embeddings": positions,
            "attention_factor": scale,
        }
    if kind == "linear":
        return base | {"rope_type": kind, "factor": float(of("rope.scaling.factor"))}
    if kind == "yarn" and of("rope.scaling.attn_factor", of("rope.scaling.yarn_attn_factor", 1.0)) == 1.0:
        scaled = {"factor": float(of("rope.scaling.factor")), "original_max_position_embeddings": positions}
        return base | {"rope_type": kind, **scaled}
    if kind not in ("none", None):
        raise ModelError(f"{header.file}: positions scaled by {kind} as it says are not read; allowed: linear, yarn")
    return base


def dequantize(header: GGUFHeader, name: str) -> Tensor:
    """Return a tensor in float32, as llama.cpp dequantises it.

    Raises:
        ModelError: a type that the gguf library knows and does not decode.
        MissingExtraError: gguf is not installed.
    """
    gguf, tensor = require("gguf", "export"), header.tensors[name]
    data = np.fromfile(header.file, np.uint8, tensor.size, offset=tensor.offset)
    if tensor.number == Q2_0.number:
        blocks = data.reshape(-1, tensor.block_bytes)
        codes = (blocks[:, 2:, None] >> np.array([0, 2, 4, 6], np.uint8) & 3).reshape(len(blocks), -1)
        values = (codes.astype(np.float32) - 1) * blocks[:, :2].copy().view(np.float16).astype(np.float32)
    else:
        kind = gguf.GGMLQuantizationType(tensor.number)
        typed = {"F32": np.float32, "F16": np.float16, "F64": np.float64}.get(tensor.kind)
        try:
            values = gguf.dequantize(data.view(typed) if typed else data.reshape(1, -1), kind)
        except NotImplementedError:
            found = f"{header.file}: the tensor {name} is of the type {tensor.kind}"
            raise ModelError(f"{found}, which gguf does not decode") from None
    return torch.from_numpy(np.ascontiguousarray(values.reshape(tensor.shape), np.float32))


def dense_state(header: GGUFHeader, names: Iterable[str], config: dict[str, Any]) -> dict[str, Tensor]:
    """Return the weights that a model of transformers calls by `names`, float32, by these names.

    Raises:
        ModelError: the file lacks one of them, or holds one that the model does not have.
    """
    gguf = require("gguf", "export")
    (arch,) = (key for key, word in gguf.MODEL_ARCH_NAMES.items() if word == header.architecture)
    table = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    wanted = {}
    for name in names:
        layer, _, part = name.rpartition(".")
        if not (config["tie_word_embeddings"] and layer == "lm_head"):
            wanted[name] = f"{table.get_name(layer)}.{part}"
    lacking = [name for name in wanted.values() if name not in header.tensors]
    beyond = sorted(header.tensors.keys() - set(wanted.values()) - set(_BESIDE))
    if lacking or beyond:
        what = f"lacks {', '.join(lacking[:4])}" if lacking else f"holds {', '.join(beyond[:4])}"
        raise ModelError(f"{header.file}: {what}, unlike the {header.architecture} that its settings describe")
    return {name: _as_trained(dequantize(header, of), of, config) for name, of in wanted.items()}


def _as_trained(tensor: Tensor, name: str, config: dict[str, Any]) -> Tensor:
    """Undo what llama.cpp's conversion did to a tensor."""
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(name.split(".")[-2])
    if config["model_type"] in _PAIRED and heads:
        pairs = tensor.unflatten(0, (config[heads], -1, 2))
        return pairs.transpose(1, 2).reshape(tensor.shape).contiguous()
    if config["model_type"].startswith("gemma") and name.endswith("norm.weight"):
        return tensor - 1
    return tensor


def check_tokens(header: GGUFHeader, tokenizer: Any, folder: Path) -> None:
    """Raise a ModelError that names the first token or merge in which a file and a tokenizer differ."""
    tokens = header.settings.get("tokenizer.ggml.tokens")
    if not isinstance(tokens, list):
        raise ModelError(f"{header.file}: holds no tokens, so that its tokenizer cannot be compared")
    ours = {index: token for token, index in tokenizer.get_vocab().items()}
    kinds = header.settings.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    pairs = [(f"token {i}", token, ours.get(i)) for i, token in enumerate(tokens) if i in ours or kinds[i] != _UNUSED]
    pairs += [(f"token {i}", None, ours[i]) for i in sorted(ours) if i >= len(tokens)]
    merges = header.settings.get("tokenizer.ggml.merges")
    if isinstance(merges, list):
        model = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
        known = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges") or []]
        counts = [("the number of merges", len(merges), len(known))]
        pairs += [(f"merge {i}", *of) for i, of in enumerate(zip(merges, known, strict=False))] + counts
    for what, theirs, held in pairs:
        if theirs != held:
            raise ModelError(
                f"tokenizer: {what} is {theirs!r} in {header.file} and {held!r} in {folder}; they belong to different "
                "models, so token ids would mean other words"
            )
