"""A model in a GGUF file as transformers has it: settings, names, and weights as llama.cpp computes them.

transformers reads GGUF too, but takes what it does not map for the class's default: the width of Qwen3's heads, scaled
positions, Gemma's caps. Here each architecture is listed with the settings that llama.cpp gives it, and others are
refused. Weights are dequantised by the gguf library in float32, which is llama.cpp's arithmetic. What llama.cpp changes
when it converts is undone: the order of a Llama's rows in q and k (it pairs neighbours in the rotary embedding,
transformers the two halves), and the one that it adds to Gemma's norms.
"""

import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from qat_lora.errors import OF_DATA, ModelError, errors_explained
from qat_lora.extras import require
from qat_lora.files.gguf_header import Q2_0, GGUFHeader

ARCHITECTURES = {name: name for name in ("llama", "granite", "qwen2", "qwen3", "gemma2", "phi3")}
ARCHITECTURES |= {"gemma3": "gemma3_text"}
"""GGUF's architectures, and transformers' `model_type` of each; a Mistral is a Llama."""
GEMMA_27B = {"gemma2": 46, "gemma3": 62}
"""Blocks of the models for which llama.cpp scales attention by the hidden width of a head, not by the head's own."""
_PAIRED = ("llama", "granite")
_FACTORS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")
_GRANITE = {"embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale"}
_GRANITE |= {"attention_multiplier": "attention.scale", "logits_scaling": "logit_scale"}
_UNUSED = 5  # kind of the tokens that fill the rows up; their names are the converter's


def config_of(header: GGUFHeader) -> dict[str, Any]:
    """Return a model's settings as transformers' config classes take them; ModelError: we compute some otherwise."""
    arch, of, tensors = header.architecture, header.of_model, header.tensors
    if arch not in ARCHITECTURES or of("expert_count"):
        kind = f"{arch} with experts" if arch in ARCHITECTURES else arch
        raise ModelError(f"{header.file}: its architecture {kind} is not read; allowed: {', '.join(ARCHITECTURES)}")
    with errors_explained(ModelError, f"{header.file}: its settings of {arch} are incomplete", *OF_DATA):
        heads, width = _one(of("attention.head_count")), _one(of("embedding_length"))
        rows, blocks = tensors["token_embd.weight"], {name.split(".")[1] for name in tensors if "blk." in name}
        head_dim = of("attention.key_length") or width // heads
        config: dict[str, Any] = {"model_type": ARCHITECTURES[arch], "vocab_size": rows.shape[0], "hidden_size": width}
        config |= {"num_attention_heads": heads, "head_dim": head_dim}
        config["intermediate_size"] = _one(of("feed_forward_length"))
        config["num_hidden_layers"] = _one([of("block_count"), len(blocks)])
        config["num_key_value_heads"] = _one(of("attention.head_count_kv", heads))
        config["max_position_embeddings"] = _one(of("context_length"))
        config["rms_norm_eps"] = float(of("attention.layer_norm_rms_epsilon"))
        config["tie_word_embeddings"] = "output.weight" not in tensors
        config["rope_parameters"] = _rope(header, of("rope.dimension_count", head_dim) / head_dim)
    for name, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding")):
        number = header.settings.get(f"tokenizer.ggml.{key}_token_id")
        config[f"{name}_token_id"] = number if isinstance(number, int) and number < rows.shape[0] else None
    if arch in _PAIRED:
        config |= {f"{n}_bias": f"blk.0.{t}.bias" in tensors for n, t in (("attention", "attn_q"), ("mlp", "ffn_up"))}
    if arch == "granite":
        config |= {name: float(of(key)) for name, key in _GRANITE.items() if of(key) is not None}
    return config | _gemma(header, config) if arch.startswith("gemma") else config


def _gemma(header: GGUFHeader, config: dict[str, Any]) -> dict[str, Any]:
    """Return what only Gemma has, as llama.cpp fills in what no file says."""
    of, second = header.of_model, header.architecture == "gemma2"
    largest = config["num_hidden_layers"] == GEMMA_27B[header.architecture]
    per_head = config["hidden_size"] // config["num_attention_heads"]
    found = {
        "query_pre_attn_scalar": per_head if largest else config["head_dim"],
        "sliding_window": of("attention.sliding_window", 4096),
        "final_logit_softcapping": of("final_logit_softcapping", 30.0 if second else None),
    }
    if second:
        return found | {"attn_logit_softcapping": of("attn_logit_softcapping", 50.0)}
    if not of("attention.sliding_window"):
        found["layer_types"] = ["full_attention"] * config["num_hidden_layers"]
    local = {"rope_type": "default", "rope_theta": float(of("rope.freq_base_swa", 10000.0))}
    return found | {"rope_parameters": {"sliding_attention": local, "full_attention": config["rope_parameters"]}}


def _one(value: Any) -> int:
    """Return a number that a file may state for each layer, where all are the same."""
    values = set(value) if isinstance(value, list) else {value}
    if len(values) != 1 or not isinstance(first := values.pop(), int):
        raise ValueError(f"{value} where one number is meant")
    return first


def _rope(header: GGUFHeader, rotated: float) -> dict[str, Any]:
    """Return the settings of positions; factors that llama.cpp keeps in tensors are `longrope`'s, whoever made them."""
    of, beside = header.of_model, [name for name in _FACTORS if name in header.tensors]
    rope = {"rope_type": "default", "rope_theta": float(of("rope.freq_base", 10000.0))}
    rope |= {"partial_rotary_factor": rotated} if rotated != 1.0 else {}
    kind, factor = of("rope.scaling.type", "none"), of("rope.scaling.factor")
    original = {"original_max_position_embeddings": of("rope.scaling.original_context_length") or of("context_length")}
    if beside:
        factors = [dequantize(header, name).flatten().tolist() for name in beside]
        rope |= {"rope_type": "longrope", "long_factor": factors[0], "short_factor": factors[-1], **original}
        return rope | {"attention_factor": float(of("rope.scaling.attn_factor", 1.0))}
    if kind == "linear":
        return rope | {"rope_type": kind, "factor": float(factor)}
    if kind == "yarn" and of("rope.scaling.attn_factor", of("rope.scaling.yarn_attn_factor", 1.0)) == 1.0:
        return rope | {"rope_type": kind, "factor": float(factor), **original}
    if kind != "none":
        raise ModelError(f"{header.file}: positions scaled by {kind} as it says are not read; allowed: linear, yarn")
    return rope


def dequantize(header: GGUFHeader, name: str) -> Tensor:
    """Return a tensor in float32, as llama.cpp dequantises it; ModelError: a type that the library does not decode."""
    gguf, tensor = require("gguf", "export"), header.tensors[name]
    data = np.fromfile(header.file, np.uint8, tensor.size, offset=tensor.offset)
    if tensor.kind in ("F32", "F16", "F64"):
        values = data.view(f"f{tensor.block_bytes}")
    else:
        try:
            values = gguf.dequantize(data.reshape(1, -1), ggml_type(tensor.kind))
        except NotImplementedError:
            found = f"{header.file}: the tensor {name} is of the type {tensor.kind}"
            raise ModelError(f"{found}, which gguf does not decode") from None
    return torch.from_numpy(np.ascontiguousarray(values.reshape(tensor.shape), np.float32))


def ggml_type(name: str) -> Any:
    """Return the gguf library's constant of a type; `Q2_0` becomes known to its writer, reader and decoder first."""
    gguf, number = require("gguf", "export"), Q2_0.number
    kinds = gguf.GGMLQuantizationType
    if number not in kinds._value2member_map_:
        kind = int.__new__(kinds, number)
        kind._name_, kind._value_ = Q2_0.kind, number
        kinds._value2member_map_[number] = kinds._member_map_[Q2_0.kind] = kind
        gguf.GGML_QUANT_SIZES[kind] = Q2_0.block, Q2_0.block_bytes
    if kinds(number) not in gguf.quants._type_traits:
        decoder = {"dequantize_blocks": staticmethod(_decode_q2_0)}
        type(Q2_0.kind, (gguf.quants.__Quant,), decoder, qtype=kinds(number))
    return kinds._member_map_[name]


def _decode_q2_0(blocks: np.ndarray) -> np.ndarray:
    codes = (blocks[:, 2:, None] >> np.array([0, 2, 4, 6], np.uint8)) & 3
    steps = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    return steps * (codes.reshape(len(blocks), -1).astype(np.float32) - 1)


@functools.cache
def tensor_names(architecture: str, layers: int) -> Any:
    """Return the gguf library's map of names, from transformers' to those in files of an architecture."""
    gguf = require("gguf", "export")
    (arch,) = (key for key, word in gguf.MODEL_ARCH_NAMES.items() if word == architecture)
    return gguf.get_tensor_name_map(arch, layers)


def dense_state(header: GGUFHeader, names: Iterable[str], config: dict[str, Any]) -> dict[str, Tensor]:
    """Return the weights that a model of transformers calls by `names`, float32; ModelError: the file's are others."""
    table, tied = tensor_names(header.architecture, config["num_hidden_layers"]), config["tie_word_embeddings"]
    parts = [name.rpartition(".") for name in names if not (tied and name == "lm_head.weight")]
    wanted = {f"{layer}.{part}": f"{table.get_name(layer)}.{part}" for layer, _, part in parts}
    lacking = [name for name in wanted.values() if name not in header.tensors]
    beyond = sorted(header.tensors.keys() - set(wanted.values()) - set(_FACTORS))
    if lacking or beyond:
        what = f"lacks {', '.join(lacking[:4])}" if lacking else f"holds {', '.join(beyond[:4])}"
        raise ModelError(f"{header.file}: {what}, unlike the {header.architecture} that its settings describe")
    return {name: as_trained(dequantize(header, of), of, config) for name, of in wanted.items()}


def as_trained(tensor: Tensor, name: str, config: dict[str, Any]) -> Tensor:
    """Undo what llama.cpp's conversion did to a tensor of this name; `config` as from `config_of`."""
    heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(name.split(".")[-2])
    if config["model_type"] in _PAIRED and heads:
        return tensor.unflatten(0, (config[heads], -1, 2)).transpose(1, 2).reshape(tensor.shape).contiguous()
    return tensor - 1 if config["model_type"].startswith("gemma") and name.endswith("norm.weight") else tensor


def check_tokens(header: GGUFHeader, tokenizer: Any, folder: Path) -> None:
    """Raise a ModelError that names the first token or merge in which a file and a tokenizer differ."""
    stated = (header.settings.get(f"tokenizer.ggml.{key}") for key in ("tokens", "token_type", "merges"))
    tokens, kinds, merges = (value if isinstance(value, list) else [] for value in stated)
    ours = {index: token for token, index in tokenizer.get_vocab().items()}
    kinds += [0] * len(tokens)
    found: list[tuple[str, Any, Any]] = [
        (f"token {i}", tokens[i] if i < len(tokens) else None, ours.get(i))
        for i in range(max(len(tokens), *ours) + 1)
        if i in ours or i < len(tokens) and kinds[i] != _UNUSED
    ]
    if merges:
        known = json.loads(tokenizer.backend_tokenizer.to_str())["model"].get("merges") or []
        known = [merge if isinstance(merge, str) else " ".join(merge) for merge in known]
        found += [(f"merge {i}", *of) for i, of in enumerate(zip(merges, known, strict=False))]
        found.append(("the number of merges", len(merges), len(known)))
    for what, one, other in found:
        if one != other:
            why = "they belong to different models, so token ids would mean other words"
            raise ModelError(f"tokenizer: {what} is {one!r} in {header.file} and {other!r} in {folder}; {why}")
