"""A byte-level BPE tokenizer as GGUF's vocabulary.

llama.cpp does not read a tokenizer's splitting rule, it knows rules by name, and the wrong name gives other tokens
without a word. So the rule is recognised from the tokenizer's own description, and one that is not known is refused.
"""

from __future__ import annotations

import json
from typing import Any, NamedTuple

from qat_lora.errors import ModelError

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # gguf.TokenType
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {_WORDS + r"\p{N}" + _REST: "qwen2", _WORDS + r"\p{N}{1,3}" + _REST: "llama-bpe"}
"""llama.cpp's name of a splitting rule."""


class Vocabulary(NamedTuple):
    """What GGUF stores of a tokenizer."""

    splitting: str
    tokens: list[str]
    kinds: list[int]
    merges: list[str]


def vocabulary(tokenizer: Any, rows: int) -> Vocabulary:
    """Return a tokenizer's tables for a model with `rows` embeddings.

    Raises:
        ModelError: no byte-level BPE, an unknown splitting rule, or more tokens than rows.
    """
    backend = json.loads(tokenizer.backend_tokenizer.to_str())
    if backend["model"].get("type") != "BPE":
        raise ModelError(f"tokenizer: is of type {backend['model'].get('type')}; GGUF export knows byte-level BPE only")
    splitting = _splitting(backend.get("pre_tokenizer") or {})
    vocab = tokenizer.get_vocab()
    if len(vocab) > rows or max(vocab.values()) >= rows:
        raise ModelError(f"tokenizer: has {len(vocab)} tokens, the model {rows} rows; it belongs to another model")
    by_id = {index: token for token, index in vocab.items()}
    added = {entry["id"]: CONTROL if entry["special"] else USER_DEFINED for entry in backend["added_tokens"]}
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(rows)]
    kinds = [added.get(i, NORMAL) if i in by_id else UNUSED for i in range(rows)]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in backend["model"]["merges"]]
    return Vocabulary(splitting, tokens, kinds, merges)


def _splitting(rule: dict[str, Any]) -> str:
    parts = rule.get("pretokenizers", [rule])
    kinds = [part.get("type") for part in parts]
    if kinds == ["ByteLevel"] and parts[0].get("use_regex") and not parts[0].get("add_prefix_space"):
        return "gpt-2"
    if kinds == ["Split", "ByteLevel"] and not parts[1].get("use_regex"):
        pattern = parts[0]["pattern"].get("Regex")
        if pattern in SPLITS:
            return SPLITS[pattern]
    raise ModelError(
        f"tokenizer: splits text by a rule that GGUF export does not know ({' + '.join(map(str, kinds)) or 'none'}); "
        f"known: {', '.join(('gpt-2', *SPLITS.values()))}"
    )
