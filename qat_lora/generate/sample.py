"""Continue a prompt with shapes that never change, and hand the text out as it grows.

Growing inputs, and caches that grow with them, give a compiling device a new graph per token. Here the row has
its final length from the start, and what is not yet written is padding behind the last token. One forward goes over the
whole row, and from then on a token costs the forward of one token (`decoding.py`). That needs nothing of transformers'
generation machinery, and several prompts that share one row length share the two graphs too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from qat_lora.data.chat import Message
from qat_lora.data.file_rows import well_formed
from qat_lora.errors import ConfigError, TextError
from qat_lora.models.kv_cache import begin, step
from qat_lora.models.load import CausalLM

PENDING = "\ufffd"  # what a tokenizer writes for bytes that are not yet a whole character


@torch.no_grad()  # not inference_mode, whose tensors PyTorch/XLA cannot use
def stream_ids(
    model: CausalLM,
    prompt_ids: list[int],
    max_new_tokens: int,
    *,
    device: torch.device,
    eos_id: int | None = None,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
    row_length: int | None = None,
    cut: Callable[[], None] = lambda: None,
) -> Iterator[int]:
    """Yield the ids that follow a prompt, until `max_new_tokens` or the end token.

    Args:
        model: the model, on `device`.
        prompt_ids: at least one token.
        max_new_tokens: length of the continuation.
        device: where the model is.
        eos_id: ends the text; not returned.
        temperature: 0 takes the likeliest token, above 0 draws.
        generator: of the draws, on the CPU.
        row_length: tokens of the row; the default is what prompt and continuation take.
        cut: dispatches queued work, `Runtime.cut`.

    Raises:
        ConfigError: an empty prompt, one that leaves no room within the model's positions, or a length or
            temperature that means nothing.
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
        scores = model.logits(hidden_B1H[:, 0])
        cut()  # before it is read: a read alone would leave the cache to be computed again
        token = _choose(scores.cpu()[0].float(), temperature, generator)
        if token == eos_id:
            return
        yield token
        if position + 1 < total:
            hidden_B1H = step(model, torch.tensor([[token]]).to(device), torch.tensor([position]).to(device), cache)


def _choose(logits_V: Tensor, temperature: float, generator: torch.Generator | None) -> int:
    """Return the likeliest token at temperature 0, a drawn one above."""
    if temperature == 0:
        return int(logits_V.argmax())
    return int(torch.multinomial(torch.softmax(logits_V / temperature, -1), 1, generator=generator))


def continue_ids(model: CausalLM, prompt_ids: list[int], max_new_tokens: int, **settings: Any) -> list[int]:
    """Return the ids that follow a prompt; see `stream_ids`."""
    return list(stream_ids(model, prompt_ids, max_new_tokens, **settings))


def stream_text(tokenizer: Any, ids: Iterable[int]) -> Iterator[str]:
    """Yield the text of ids in pieces as they come; half characters wait for their other half.

    All ids are decoded every time, since the text of one token depends on its neighbours.
    """
    written: list[int] = []
    shown = ""
    for token in ids:
        written.append(token)
        text = tokenizer.decode(written, clean_up_tokenization_spaces=False)
        if not text.endswith(PENDING) and text.startswith(shown) and text != shown:
            yield text[len(shown) :]
            shown = text
    text = tokenizer.decode(written, clean_up_tokenization_spaces=False)
    if text.startswith(shown) and text != shown:
        yield text[len(shown) :]


def plain_prompt(tokenizer: Any, prompt: str) -> list[int]:
    """Return the ids of a text to continue, after the begin token where the tokenizer has one."""
    ids = list(tokenizer(well_formed(prompt), add_special_tokens=False)["input_ids"])
    return ids if tokenizer.bos_token_id is None else [tokenizer.bos_token_id, *ids]


def has_template(tokenizer: Any) -> bool:
    """Return whether the tokenizer knows how a chat is written."""
    return bool(getattr(tokenizer, "chat_template", None))


def chat_prompt(tokenizer: Any, messages: list[Message]) -> list[int]:
    """Return the ids of a chat up to where the assistant answers.

    Raises:
        TextError: the tokenizer has no chat template, or it refuses the messages.
    """
    if not has_template(tokenizer):
        raise TextError(
            "chat: the tokenizer has no chat template; leave --chat out, and the text is continued as it is"
        )
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program of the model's author and may raise anything
        raise TextError(f"chat: the chat template refuses these messages: {error}") from None
    return list(tokenizer(well_formed(text), add_special_tokens=False)["input_ids"])


def continue_text(model: CausalLM, tokenizer: Any, prompt: str, max_new_tokens: int, **settings: Any) -> str:
    """Return the text that follows a prompt; see `stream_ids`."""
    ids = plain_prompt(tokenizer, prompt)
    new = continue_ids(model, ids, max_new_tokens, eos_id=tokenizer.eos_token_id, **settings)
    return tokenizer.decode(new, clean_up_tokenization_spaces=False)
