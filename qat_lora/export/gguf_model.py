"""A model's architecture in GGUF: which are known, their settings, the names of tensors, and what changes in them.

Names come from the gguf library's own map. Settings are what llama.cpp's converter writes and its loader reads; where
the loader takes something for granted (a scale of attention, an activation, a pattern of windows), a model that has it
otherwise is refused, since it would load and compute something else. Two conventions differ from transformers: in the
rotary embedding of Llama and Granite heads llama.cpp pairs adjacent rows, transformers the two halves, so rows of
queries and keys are reordered; Gemma's norms multiply by 1 + w, and GGUF has the sum.
"""

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor

from qat_lora.errors import ModelError
from qat_lora.extras import require
from qat_lora.layers.experts import EXPERT
from qat_lora.models.from_gguf import GEMMA_27B, tensor_names
from qat_lora.models.load import CausalLM


class Architecture(NamedTuple):
    """An architecture that llama.cpp computes as transformers does."""

    name: str  # in GGUF
    biases: str = "-"  # pattern of layers that may have one
    ropes: Sequence[str] = ("default", "linear", "yarn")
    permuted: bool = False  # whether rows of query and key heads change their order
    normed: bool | None = None  # whether the weights of a token's experts sum to one; None: there are no experts

    @property
    def gemma(self) -> bool:
        """Whether it is one of Gemma's."""
        return self.name.startswith("gemma")


_TABLE = yaml.safe_load(Path(__file__).with_name("gguf_architectures.yaml").read_text(encoding="utf-8"))
ARCHITECTURES = {kind: Architecture(**of) for kind, of in _TABLE.items()}  # by transformers' `model_type`


def architecture(model: CausalLM) -> Architecture:
    """Return what GGUF calls a model; ModelError: an architecture or a setting that llama.cpp computes otherwise."""
    config = model.config
    if config.model_type not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ModelError(f"model: GGUF export of {config.model_type} is not supported; allowed: {known}")
    found = ARCHITECTURES[config.model_type]
    biased = [name[:-5] for name, _ in model.module.named_parameters() if name.endswith(".bias")]
    rope, heads = _rope(config), config.num_attention_heads
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    partial, soft_cap = rope.get("partial_rotary_factor", 1.0), getattr(config, "attn_logit_softcapping", None)
    scale, wide = getattr(config, "query_pre_attn_scalar", None), heads * head_width(config)
    per_head = config.hidden_size // heads if GEMMA_27B.get(found.name) == config.num_hidden_layers else 0
    step, normed = getattr(config, "decoder_sparse_step", 1), getattr(config, "norm_topk_prob", found.normed)
    checks = (
        ("biases of", next((n for n in biased if not re.search(found.biases, n.replace(".base", ""))), None)),
        ("positions scaled by", rope["rope_type"] if rope["rope_type"] not in found.ropes else None),
        ("unrounded YaRN ranges, truncate", rope.get("truncate") if rope.get("truncate") is False else None),
        ("partial_rotary_factor", partial if partial != 1 and found.name != "phi3" else None),
        ("activation", activation if activation != ("gelu_pytorch_tanh" if found.gemma else "silu") else None),
        ("query_pre_attn_scalar", scale if scale not in (None, per_head or head_width(config)) else None),
        ("attn_logit_softcapping", "none" if found.name == "gemma2" and not soft_cap else None),
        ("final_logit_softcapping", "none" if found.name == "gemma2" and not config.final_logit_softcapping else None),
        ("attn_logit_softcapping", soft_cap if found.name != "gemma2" else None),
        ("use_bidirectional_attention", getattr(config, "use_bidirectional_attention", None) or None),
        ("layers without experts, decoder_sparse_step", step if step != 1 else None),
        ("layers without experts, mlp_only_layers", getattr(config, "mlp_only_layers", None) or None),
        ("norm_topk_prob", normed if found.normed is not None and normed != found.normed else None),
        ("clip_qkv", getattr(config, "clip_qkv", None)),
        ("head_dim", head_width(config) if found.name in ("qwen2", "phi3") and wide != config.hidden_size else None),
    )
    for what, given in checks:
        if given is not None:
            raise ModelError(f"model: {what} {given} is not supported by GGUF export of {config.model_type}")
    return found


def notes(model: CausalLM) -> list[str]:
    """Return where llama.cpp computes otherwise."""
    config, window = model.config, getattr(model.config, "sliding_window", None)
    used = getattr(config, "use_sliding_window", True) and window and window < config.max_position_embeddings
    lines = (
        ["the text part alone: llama.cpp has the rest in an mmproj file, made of the original"] if model.rest else []
    )
    if used and not architecture(model).gemma:
        lines += [f"attention reaches back {window} tokens here, in llama.cpp over the whole text: longer texts differ"]
    if _rope(config)["rope_type"] == "longrope":
        short = _rope(config)["original_max_position_embeddings"]
        lines += [f"llama.cpp scales positions as for long texts where its context (-c) is longer than {short} tokens"]
    return lines


def gguf_name(model: CausalLM, layer: str) -> str:
    """Return GGUF's name of a layer, by the library's own table; ModelError: the architecture has no such layer."""
    found = EXPERT.match(layer)
    layer = f"{found[1]}.{found[3]}" if found else layer  # the experts of a layer are one tensor
    layer = re.sub(r"\b(language|text)_model\.", "", layer)
    names = tensor_names(ARCHITECTURES[model.config.model_type].name, model.config.num_hidden_layers)
    if name := names.get_name(layer):
        return str(name)
    raise ModelError(f"model: GGUF has no name for the layer {layer}")


def row_order(model: CausalLM, layer: str) -> Tensor | None:
    """Return the order of a layer's rows in GGUF, None where it is ours."""
    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    count = heads.get(layer.removesuffix(".bias").rsplit(".", 1)[-1])
    if not ARCHITECTURES[config.model_type].permuted or count is None:
        return None
    return torch.arange(count * head_width(config)).reshape(count, 2, -1).transpose(1, 2).reshape(-1)


def head_width(config: Any) -> int:
    """Return the width of an attention head."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def write_settings(writer: Any, model: CausalLM, rows: int) -> None:
    """Write a model's settings into a GGUF file that is being made."""
    gguf, config, found = require("gguf", "export"), model.config, architecture(model)
    rope, width = _rope(config), head_width(config)
    kind, scaling = rope["rope_type"], gguf.RopeScalingType
    original = rope.get("original_max_position_embeddings") or config.max_position_embeddings
    stretch = getattr(model.backbone.rotary_emb, "attention_scaling", 1.0)
    if kind == "yarn":  # llama.cpp has this factor already
        stretch /= 0.1 * math.log(max(1.0, rope["factor"])) + 1
    windows = found.gemma and [layer == "sliding_attention" for layer in config.layer_types]
    experts = getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None)
    plain = yaml.safe_load(Path(__file__).with_name("gguf_settings.yaml").read_text(encoding="utf-8"))
    settings = {name: getattr(config, ours, None) for name, ours in plain.items()} | {
        "expert_count": experts,
        "expert_used_count": config.num_experts_per_tok if experts else None,
        "rope_freq_base": float(rope.get("rope_theta", 10000.0)),
        "rope_dimension_count": int(rope.get("partial_rotary_factor", 1.0) * width),
        "key_length": width,
        "value_length": width,
        "vocab_size": rows,
        "rope_scaling_type": {"linear": scaling.LINEAR, "yarn": scaling.YARN, "longrope": scaling.LONGROPE}.get(kind),
        "rope_scaling_factor": rope["factor"] if kind in ("linear", "yarn") else None,
        "rope_scaling_orig_ctx_len": original if kind in ("yarn", "longrope") else None,
        "rope_scaling_attn_factors": stretch if kind in ("yarn", "longrope") else None,
        "rope_scaling_yarn_beta_fast": rope.get("beta_fast"),
        "rope_scaling_yarn_beta_slow": rope.get("beta_slow"),
        "rope_freq_base_swa": _rope(config, "sliding_attention")["rope_theta"] if found.name == "gemma3" else None,
        "sliding_window": config.sliding_window if found.gemma else None,
        "sliding_window_pattern": windows or None,
    }
    for name, value in settings.items():
        if value is not None:
            getattr(writer, f"add_{name}")(value)


def own_tensors(model: CausalLM) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors that GGUF has beside a model's weights: what rotary frequencies are divided by, float32."""
    rope, config = _rope(model.config), model.config
    if rope["rope_type"] == "llama3":
        actual = model.backbone.rotary_emb.inv_freq.detach().float().cpu()
        exponents = torch.arange(len(actual), dtype=torch.float32) / len(actual)
        yield "rope_freqs.weight", rope["rope_theta"] ** -exponents / actual
    if rope["rope_type"] == "longrope":
        assert config.model_type == "phi3"
        yield "rope_factors_long.weight", torch.tensor(rope["long_factor"], dtype=torch.float32)
        yield "rope_factors_short.weight", torch.tensor(rope["short_factor"], dtype=torch.float32)


def as_gguf(model: CausalLM, name: str, tensor: Tensor) -> Tensor:
    """Return a tensor of the model as GGUF has it, rows of blocks' bytes included."""
    order = row_order(model, name)
    tensor = tensor if order is None else tensor[order]
    return tensor + 1 if ARCHITECTURES[model.config.model_type].gemma and name.endswith("norm") else tensor


def _rope(config: Any, layers: str = "full_attention") -> dict[str, Any]:
    """Return the settings of rotary positions, of some layers where they differ."""
    rope = dict(getattr(config, "rope_parameters", None) or {})
    rope = dict(rope.get(layers) or rope)
    return {"rope_type": "default", "rope_theta": getattr(config, "rope_theta", 10000.0), **rope}
