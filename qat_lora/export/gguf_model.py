"""A model and its tokenizer in GGUF: which are known, their settings, the names of tensors, and what changes in them.

Names come from the gguf library's own map. Settings are what llama.cpp's converter writes and its loader reads; where
the loader takes something for granted (a scale of attention, an activation, a pattern of windows), a model that has it
otherwise is refused, since it would load and compute something else. Two conventions differ from transformers: in the
rotary embedding of Llama and Granite heads llama.cpp pairs adjacent rows, transformers the two halves, so rows of
queries and keys are reordered; Gemma's norms multiply by 1 + w, and GGUF has the sum.

llama.cpp shall make the same tokens of a text. Of byte-level BPE it knows splitting rules by name, and a wrong name
gives other tokens without a warning. Of SentencePiece it wants a score for each token and joins the two neighbours
whose joint token scores highest, where a tokenizer.json lists joins in order of rank; scores are found back from ranks,
which is possible where that list names every way to split a token, as SentencePiece's do. All else is refused.
"""

import json
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
from qat_lora.models.end_tokens import END_OF_MESSAGE, turn_ends
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
    rope, heads, kv = _rope(config), config.num_attention_heads, config.num_key_value_heads
    activation = getattr(config, "hidden_activation", None) or getattr(config, "hidden_act", None)
    partial, soft_cap = rope.get("partial_rotary_factor", 1.0), getattr(config, "attn_logit_softcapping", None)
    scale, wide = getattr(config, "query_pre_attn_scalar", None), heads * head_width(config)
    per_head = config.hidden_size // heads if GEMMA_27B.get(found.name) == config.num_hidden_layers else 0
    local = found.gemma and [layer == "sliding_attention" for layer in config.layer_types]
    usual = [(i + 1) % (2 if found.name == "gemma2" else 6) > 0 for i in range(len(local or ()))]
    is_other = local and any(local) and local != usual
    step, normed = getattr(config, "decoder_sparse_step", 1), getattr(config, "norm_topk_prob", found.normed)
    checks = (
        ("biases of", next((n for n in biased if not re.search(found.biases, n.replace(".base", ""))), None)),
        ("positions scaled by", rope["rope_type"] if rope["rope_type"] not in found.ropes else None),
        ("unrounded YaRN ranges, truncate", rope.get("truncate") if rope.get("truncate") is False else None),
        ("partial_rotary_factor", partial if partial != 1 and found.name != "phi3" else None),
        ("another order of local and global layers than", "llama.cpp's" if is_other else None),
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
        ("num_key_value_heads", kv if found.name == "olmoe" and kv != heads else None),
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
    text_alone = "the text part alone: llama.cpp has the rest in an mmproj file, made of the original"
    lines = [text_alone] if model.rest else []
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
    settings = {name: getattr(config, ours, None) for name, ours in plain.items()}
    settings |= {"key_length": width, "value_length": width, "vocab_size": rows, "expert_count": experts}
    settings |= {"expert_used_count": config.num_experts_per_tok} if experts else {}
    settings |= {"rope_freq_base": float(rope.get("rope_theta", 10000.0))}
    settings |= {"rope_dimension_count": int(rope.get("partial_rotary_factor", 1.0) * width)}
    settings |= {f"rope_scaling_yarn_{name}": rope.get(name) for name in ("beta_fast", "beta_slow")}
    types = {"linear": scaling.LINEAR, "yarn": scaling.YARN, "longrope": scaling.LONGROPE}
    settings |= {"rope_scaling_type": types[kind]} if kind in types else {}
    settings |= {"rope_scaling_factor": rope["factor"]} if kind in ("linear", "yarn") else {}
    if kind in ("yarn", "longrope"):
        settings |= {"rope_scaling_orig_ctx_len": original, "rope_scaling_attn_factors": stretch}
    if found.gemma:
        settings |= {"sliding_window": config.sliding_window, "sliding_window_pattern": windows or None}
    if found.name == "gemma3":
        settings["rope_freq_base_swa"] = _rope(config, "sliding_attention")["rope_theta"]
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


NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # gguf.TokenType
_RULES = yaml.safe_load(Path(__file__).with_name("gguf_splits.yaml").read_text(encoding="utf-8"))
SPLITS = {(rule["pattern"], rule["whole_words"]): name for name, rule in _RULES.items()}
"""llama.cpp's name of a splitting rule, by pattern and by whether a word that is a token is taken whole."""
NAMES = ("gpt-2", "starcoder", *SPLITS.values())


class Vocabulary(NamedTuple):
    """A tokenizer's tables in GGUF."""

    splitting: str
    tokens: list[str]
    kinds: list[int]
    merges: list[str]  # of byte-level BPE
    scores: list[float] | None = None  # of SentencePiece
    space_prefix: bool = False  # whether text gets a space in front
    strips: bool = False  # whether special tokens take spaces after them away, as Phi 3's do


def vocabulary(tokenizer: Any, rows: int) -> Vocabulary:
    """Return a tokenizer's tables for a model of `rows` embeddings; ModelError: llama.cpp has none of its kind."""
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    model = backend["model"]
    if model.get("type") != "BPE":
        raise ModelError(f"tokenizer: is of type {model.get('type')}; GGUF export knows BPE only")
    vocab = tokenizer.get_vocab()
    if len(vocab) > rows or max(vocab.values()) >= rows:
        raise ModelError(f"tokenizer: has {len(vocab)} tokens, the model {rows} rows; it belongs to another model")
    by_id = {index: token for token, index in vocab.items()}
    added = {entry["id"]: CONTROL if entry["special"] else USER_DEFINED for entry in backend["added_tokens"]}
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(rows)]
    kinds = [added.get(i, NORMAL) if i in by_id else UNUSED for i in range(rows)]
    strips = any(entry["rstrip"] for entry in backend["added_tokens"] if entry["special"])
    merges = [(merge.split(" ") if isinstance(merge, str) else merge) for merge in model["merges"]]
    if not model.get("byte_fallback"):
        splitting = _splitting(backend.get("pre_tokenizer") or {}, bool(model.get("ignore_merges")))
        return Vocabulary(splitting, tokens, kinds, [" ".join(merge) for merge in merges], strips=strips)
    prefix = _space_prefix(backend)
    found = _scores(merges, vocab, {by_id[i] for i in added if i in by_id})
    scores = [found.get(token, -1000.0 if kind != NORMAL else 0.0) for token, kind in zip(tokens, kinds, strict=True)]
    for i, token in enumerate(tokens):
        if re.fullmatch("<0x[0-9A-F]{2}>", token):
            kinds[i] = BYTE
        elif kinds[i] == USER_DEFINED:
            tokens[i] = token.replace("▁", " ")  # llama.cpp looks for these in the text as it is given
    if model.get("unk_token") in vocab:
        kinds[vocab[model["unk_token"]]] = UNKNOWN
    return Vocabulary("default", tokens, kinds, [], scores, prefix, strips)


PHI_3 = {"<unk>", "<s>", "</s>", "<|endoftext|>"}  # a name with `phi-3` needs them: its tokens then take spaces away


def write_vocabulary(writer: Any, vocab: Vocabulary, tokenizer: Any, name: str) -> None:
    """Write a model's name, a tokenizer's tables, special tokens and chat template into a GGUF file in the making."""
    name = re.sub("(?i)phi-?3", "phi", name)
    writer.add_name(f"{name} (phi-3)" if vocab.strips and set(vocab.tokens) >= PHI_3 else name)
    writer.add_tokenizer_model("gpt2" if vocab.scores is None else "llama")
    writer.add_tokenizer_pre(vocab.splitting)
    writer.add_token_list(vocab.tokens)
    writer.add_token_types(vocab.kinds)
    if vocab.scores is None:
        writer.add_token_merges(vocab.merges)
    else:
        writer.add_token_scores(vocab.scores)
        writer.add_add_space_prefix(vocab.space_prefix)
    for token in ("bos_token_id", "eos_token_id", "unk_token_id", "pad_token_id"):
        if (index := getattr(tokenizer, token)) is not None:
            getattr(writer, f"add_{token}")(index)
    ends = turn_ends(tokenizer.chat_template, tokenizer.get_vocab())
    if (message := ends.pop(END_OF_MESSAGE, None)) is not None:
        writer.add_eom_token_id(message)
    if ends:  # else llama.cpp takes any token that looks like one
        eos = tokenizer.eos_token_id
        writer.add_eot_token_id(eos if eos in ends.values() else next(iter(ends.values())))
    whole = tokenizer("a")["input_ids"]
    extra = len(whole) - len(tokenizer("a", add_special_tokens=False)["input_ids"])
    writer.add_add_bos_token(bool(extra and whole[0] == tokenizer.bos_token_id))
    writer.add_add_eos_token(bool(extra and whole[-1] == tokenizer.eos_token_id))
    if getattr(tokenizer, "chat_template", None):
        writer.add_chat_template(tokenizer.chat_template)


def _splitting(rule: dict[str, Any], whole_words: bool) -> str:
    parts = rule.get("pretokenizers", [rule])
    kinds = [part.get("type") for part in parts]
    last = parts[-1]
    plain = kinds[-1] == "ByteLevel" and not last.get("add_prefix_space")
    if plain and last.get("use_regex"):
        if kinds == ["ByteLevel"]:
            return "gpt-2"
        if kinds == ["Digits", "ByteLevel"] and parts[0].get("individual_digits"):
            return "starcoder"
    elif plain and kinds == ["Split", "ByteLevel"]:
        key = (parts[0]["pattern"].get("Regex"), whole_words)
        if key in SPLITS:
            return SPLITS[key]
    rule_in_words = " + ".join(map(str, kinds)) or "none"
    what = f"splits text by a rule that GGUF export does not know ({rule_in_words})"
    raise ModelError(f"tokenizer: {what}; known: {', '.join(NAMES)}")


def _space_prefix(backend: dict[str, Any]) -> bool:
    """Return whether a SentencePiece-type tokenizer puts a space in front of a text."""
    whole, rule = backend.get("normalizer") or {}, backend.get("pre_tokenizer") or {}
    steps = [step for step in whole.get("normalizers", [whole]) if step]
    kinds = [step["type"] for step in steps]
    to_space = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    if rule.get("type") == "Metaspace" and not rule.get("split", True) and not steps and rule["replacement"] == "▁":
        return str(rule.get("prepend_scheme")) != "never"
    no_rule = not rule or (rule.get("type") == "Split" and rule["pattern"] == {"String": " "})  # none are left
    if no_rule and kinds in (["Replace"], ["Prepend", "Replace"]) and steps[-1] == to_space:
        return len(kinds) > 1 and steps[0]["prepend"] == "▁"
    way, known = " + ".join([*kinds, str(rule.get("type"))]), "SentencePiece's, as of Llama 2, Mistral, Phi 3, Gemma"
    what = f"changes text before it is split in a way that GGUF export does not know ({way})"
    raise ModelError(f"tokenizer: {what}; known: {known}")


def _scores(merges: list[list[str]], vocab: dict[str, int], added: set[str]) -> dict[str, float]:
    """Return a score, falling with the rank, of each token that a merge makes; ModelError: no score ranks them so."""
    found: dict[str, float] = {}
    pairs, last = {(left, right) for left, right in merges}, ""
    for left, right in merges:
        token = left + right
        if token != last and token in found and token not in added:
            raise ModelError(f"tokenizer: ranks merges into {token!r} apart, as no SentencePiece model does")
        last = token
        found.setdefault(token, -float(len(found)))
    for token in vocab.keys() - added:
        splits = ((token[:i], token[i:]) for i in range(1, len(token)))
        for left, right in splits:
            both = left in vocab and right in vocab and not {left, right} & added
            if both and (left, right) not in pairs and not re.fullmatch("<0x[0-9A-F]{2}>", token):
                why = f"{token!r} is a token: it was not made from a SentencePiece model, and GGUF has no form for it"
                raise ModelError(f"tokenizer: lacks the merge of {left!r} and {right!r}, though {why}")
    return found
