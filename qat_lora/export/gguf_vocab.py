"""A tokenizer as GGUF holds it, so that llama.cpp makes the same tokens of a text.

Of byte-level BPE llama.cpp knows splitting rules by name, and a wrong name gives other tokens without a warning. Of
SentencePiece it wants a score for each token and joins the two neighbours whose joint token scores highest, where a
tokenizer.json lists joins in order of rank; scores are found back from ranks, which is possible where that list names
every way to split a token, as those made from a SentencePiece model do. What is not recognised is refused.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from qat_lora.errors import ModelError

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
    raise ModelError(
        f"tokenizer: splits text by a rule that GGUF export does not know ({' + '.join(map(str, kinds)) or 'none'}); "
        f"known: {', '.join(NAMES)}"
    )


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
    raise ModelError(
        "tokenizer: changes text before it is split in a way that GGUF export does not know "
        f"({' + '.join([*kinds, str(rule.get('type'))])}); known: SentencePiece's, as of Llama 2, Mistral, Phi 3, Gemma"
    )


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
                raise ModelError(
                    f"tokenizer: lacks the merge of {left!r} and {right!r}, though {token!r} is a token: it was not "
                    "made from a SentencePiece model, and GGUF has no form for it"
                )
    return found
