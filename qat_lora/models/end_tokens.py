"""The tokens that end what a model writes.

A tokenizer names one end token, and a chat model may end its turn by another: Gemma's end token is
`<eos>`, its turns end by `<end_of_turn>`. generation_config.json lists all of them, where there is
one, and a GGUF file has keys for three. Tokens that are known to end turns count where the chat
template writes them.
"""

from collections.abc import Mapping
from typing import Any

from qat_lora.files.checksums import read_object
from qat_lora.files.gguf_header import GGUF, read_header
from qat_lora.models.copies import GENERATION
from qat_lora.models.load import CausalLM

END_OF_MESSAGE = "<|eom_id|>"  # Llama 3.1's, before a tool answers
END_OF_TURN = (
    "<|im_end|>",
    "<end_of_turn>",
    "<turn|>",
    "<|eot_id|>",
    "<|eot|>",
    "<|end|>",
    "<|END_OF_TURN_TOKEN|>",
    "<end_of_utterance>",
    "<|endofturn|>",
    "[|endofturn|]",
    "</s>",
)


def end_ids(model: CausalLM, tokenizer: Any) -> set[int]:
    """Return the ids that end a model's text, by its files, its tokenizer and its chat template.

    ModelError: one of its files cannot be read.
    """
    found = _ids(tokenizer.eos_token_id)
    found |= set(turn_ends(tokenizer.chat_template, tokenizer.get_vocab()).values())
    if model.folder.suffix == GGUF:
        return found | header_end_ids(read_header(model.folder).settings)
    for file in (model.folder / GENERATION, model.folder / "config.json"):
        settings = read_object(file) if file.is_file() else {}
        found |= _ids(settings.get("eos_token_id"))
        found |= _ids((settings.get("text_config") or {}).get("eos_token_id"))
    return found


def header_end_ids(settings: Mapping[str, Any]) -> set[int]:
    """Return the ids that end a text by the settings in a GGUF file's header."""
    found: set[int] = set()
    for name in ("eos", "eot", "eom"):
        found |= _ids(settings.get(f"tokenizer.ggml.{name}_token_id"))
    vocab = {token: index for index, token in enumerate(settings.get("tokenizer.ggml.tokens", ()))}
    return found | set(turn_ends(settings.get("tokenizer.chat_template"), vocab).values())


def turn_ends(template: Any, vocab: Mapping[str, int]) -> dict[str, int]:
    """Return the known ends of turns and messages that a chat template writes, with their ids.

    The template is a text, several by name, or None, which writes nothing.
    """
    text = str(template or "")
    known = (*END_OF_TURN, END_OF_MESSAGE)
    found = {token: vocab[token] for token in known if token in text and token in vocab}
    if "<|return|>" in text:  # gpt-oss ends every message of a turn by <|end|>, the turn by this
        found.pop("<|end|>", None)
    return found


def _ids(setting: Any) -> set[int]:
    """Return the ids of a setting, which is one of them, a list or None."""
    several = setting if isinstance(setting, list) else [setting]
    return {index for index in several if isinstance(index, int)}
