"""What stands around a plain text: the begin and end tokens of its tokenizer.

Attention restarts in every row, so a row that goes on with a document needs the begin token that
the model expects as much as a row that begins it: Gemma predicts next to nothing without. Which
ids these are is learnt from the tokenizer, which adds them to a text by itself. A bos that it only
names is left out: it was in no training text, or it begins a turn of a chat.

An eos is more often named than added, though most base models were trained with one behind each
document. It stays behind a text where its name is one of `TEXT_ENDS` and the chat template does
not use it. Else it ends a turn: behind a text it would say that somebody answers next. Document
ids keep neighbours in a row apart without it.

| tokenizer | adds | eos | a text becomes |
|---|---|---|---|
| GPT-2, SmolLM2, Qwen3 Base | nothing | `<|endoftext|>` | text `<|endoftext|>` |
| SmolLM2 Instruct, Qwen3 | nothing | `<|im_end|>` | text |
| Llama 3 | `<|begin_of_text|>` | `<|end_of_text|>` | `<|begin_of_text|>` text `<|end_of_text|>` |
| Llama 3 Instruct | `<|begin_of_text|>` | `<|eot_id|>` | `<|begin_of_text|>` text |
| Gemma 3, Gemma 3 Instruct | `<bos>` | `<eos>` | `<bos>` text `<eos>` |
"""

from typing import Any

import numpy as np

from qat_lora.errors import TextError

TEXT_ENDS = ("<|endoftext|>", "</s>", "<eos>", "<|end_of_text|>")  # names of tokens that end a text


def added_ids(tokenizer: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids that a tokenizer adds by itself before a text, and behind it, int32 each.

    TextError: its ids of a letter with them do not contain its ids of that letter without.
    """
    bare = tokenizer("a", add_special_tokens=False, verbose=False)["input_ids"]
    framed = tokenizer("a", add_special_tokens=True, verbose=False)["input_ids"]
    added = len(framed) - len(bare)
    at = next((i for i in range(added + 1) if framed[i : i + len(bare)] == bare), None)
    if at is None or (added and not bare):
        found = f"turns the letter a into the ids {framed} with its special tokens, {bare} without"
        what = "so what it puts around a text cannot be told"
        raise TextError(f"tokenizer: {found}, {what}; give a model with another tokenizer")
    return np.array(framed[:at], np.int32), np.array(framed[at + len(bare) :], np.int32)


def text_frame(tokenizer: Any) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids that stand before a document of plain text, and behind it, int32 each.

    They are `added_ids`, and an eos of `TEXT_ENDS` where the tokenizer adds no end by itself and
    its chat template does not use that eos. TextError: as `added_ids`.
    """
    before, after = added_ids(tokenizer)
    template = str(getattr(tokenizer, "chat_template", None))
    end = tokenizer.eos_token
    ends_turns = "eos_token" in template or str(end) in template
    if not len(after) and end in TEXT_ENDS and not ends_turns:
        after = np.array([tokenizer.eos_token_id], np.int32)
    return before, after


def describe_packing(tokenizer: Any) -> str:
    """Return in words how documents become rows, for fingerprints; TextError: as `added_ids`."""
    before, after = (" ".join(map(str, ids)) or "nothing" for ids in text_frame(tokenizer))
    framed = f"rows and texts begin with {before}, texts end with {after}"
    return f"{framed}; attention and positions restart at each"
