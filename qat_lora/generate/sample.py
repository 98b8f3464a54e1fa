"""Continue a prompt with shapes that never change, and yield the text as it grows.

Growing inputs, and caches that grow with them, give a compiling device a new graph for each token. Here the row has its
final length from the start, and the unwritten part is padding behind the last token. One forward goes over the whole
row; from then on a token costs the forward of one token (`models/kv_cache.py`). That needs nothing of transformers'
generation code, and all prompts of one row length share two graphs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

from qat_lora.data.chat import Message, render_chat
from qat_lora.data.file_rows import well_formed
from qat_lora.errors import ConfigError, TextError
from qat_lora.models.kv_cache import begin, step
from qat_lora.models.load import CausalLM


@torch.no_grad()  # not inference_mode, whose tensors PyTorch/XLA cannot use
def stream_ids(
    model: CausalLM,
    prompt_ids: list[int],
    max_new_tokens: int,
    *,
    device: torch.device,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    row_length: int | None = None,
    mark_step: Callable[[], None] = lambda: None,
) -> Iterator[int]:
    """Yield the `max_new_tokens` ids that follow a prompt, each computed when it is asked for.

    Args:
        temperature: 0 takes the top-1 token, above 0 draws.
        generator: of the draws, on the CPU.
        row_length: tokens of the row; default: those of prompt and continuation.
        mark_step: dispatches queued work, as `Runtime.mark_step`.

    Raises:
        ConfigError: an empty prompt, one that leaves no room within the model's positions, or a length or
            temperature out of range.
    """
    total = len(prompt_ids) + max_new_tokens
    if not prompt_ids:
        raise ConfigError("prompt: is empty; give at least one word")
    if max_new_tokens < 1:
        raise ConfigError(f"max_new_tokens: {max_new_tokens} is below 1")
    if not 0 <= temperature < math.inf:
        raise ConfigError(f"gen_temperature: {temperature} is not allowed; give 0 (likeliest token) or a number above")
    if model.max_positions is not None and total > model.max_positions:
        raise ConfigError(f"max_new_tokens: prompt and continuation take {total} of {model.max_positions} positions")
    ids = torch.zeros(1, max(total, row_length or 0), dtype=torch.int64)
    ids[0, : len(prompt_ids)] = torch.tensor(prompt_ids)
    last = torch.tensor([len(prompt_ids) - 1]).to(device)  # as data: a slice would write the number into the graph
    hidden_B1H, cache = begin(model, ids.to(device))
    hidden_B1H = hidden_B1H.index_select(1, last)
    for position in range(len(prompt_ids), total):
        logits = model.logits(hidden_B1H[:, 0])
        mark_step()  # before the read: a read alone would leave the cache to be computed again
        logits_V = logits.cpu()[0].float()
        if temperature == 0:
            token = int(logits_V.argmax())
        else:
            token = int(torch.multinomial(torch.softmax(logits_V / temperature, -1), 1, generator=generator))
        yield token
        if position + 1 < total:
            hidden_B1H = step(model, torch.tensor([[token]]).to(device), torch.tensor([position]).to(device), cache)


def until_end(ids: Iterable[int], eos_id: int | None) -> Iterator[int]:
    """Yield ids up to the end token, which is left out."""
    return itertools.takewhile(lambda token: token != eos_id, ids)


def stream_text(tokenizer: Any, ids: Iterable[int]) -> Iterator[str]:
    """Yield the text of ids in pieces as they come; half characters (U+FFFD) wait for their other half.

    All ids are decoded each time, since the text of one token depends on its neighbours.
    """
    written: list[int] = []
    shown = text = ""
    for token in ids:
        written.append(token)
        text = tokenizer.decode(written, clean_up_tokenization_spaces=False)
        if not text.endswith("\ufffd") and text.startswith(shown) and text != shown:
            yield text[len(shown) :]
            shown = text
    if text.startswith(shown) and text != shown:
        yield text[len(shown) :]


def plain_prompt(tokenizer: Any, prompt: str) -> list[int]:
    """Return the ids of a text to continue, after the begin token where the tokenizer has one."""
    ids = list(tokenizer(well_formed(prompt), add_special_tokens=False)["input_ids"])
    return ids if tokenizer.bos_token_id is None else [tokenizer.bos_token_id, *ids]


def has_template(tokenizer: Any) -> bool:
    """Return whether the tokenizer has a chat template."""
    return bool(getattr(tokenizer, "chat_template", None))


def chat_prompt(tokenizer: Any, messages: list[Message]) -> list[int]:
    """Return the ids of a chat up to the assistant's answer; TextError without a chat template, or if it refuses."""
    if not has_template(tokenizer):
        raise TextError(
            "chat: the tokenizer has no chat template; leave --chat out, and the text is continued as it is"
        )
    text = render_chat(tokenizer, "chat", messages, prompt=True)
    return list(tokenizer(well_formed(text), add_special_tokens=False)["input_ids"])


def continue_text(model: CausalLM, tokenizer: Any, prompt: str, max_new_tokens: int, **settings: Any) -> str:
    """Return the text that follows a prompt; see `stream_ids`."""
    ids = stream_ids(model, plain_prompt(tokenizer, prompt), max_new_tokens, **settings)
    return tokenizer.decode(list(until_end(ids, tokenizer.eos_token_id)), clean_up_tokenization_spaces=False)
