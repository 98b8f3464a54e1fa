"""Continue a prompt with shapes that never change, and hand the text out as it grows.

Growing inputs, and caches that grow with them, give a compiling device a new graph per token. Here the row has
its final length from the start, what is not yet written is padding behind the last token, and every step runs the
same forward; causal attention keeps padding out. For short continuations of small models that is fast enough
everywhere, and it needs nothing of transformers' generation machinery. Several prompts share one row length, so they
share the graph too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from qat_lora.errors import ConfigError, TextError
from qat_lora.models import CausalLM, load_tokenizer
from qat_lora.options import GenerateOptions
from qat_lora.runtime.base import Runtime
from qat_lora.students import open_student
from qat_lora.text.chat import Message

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
    width = max(total, row_length or 0)
    ids = torch.zeros(1, width, dtype=torch.int64)
    ids[0, : len(prompt_ids)] = torch.tensor(prompt_ids)
    documents = torch.zeros(1, width, dtype=torch.int32, device=device)
    for position in range(len(prompt_ids) - 1, total - 1):
        hidden = model.hidden(ids.to(device), documents)
        row = torch.tensor([position]).to(device)  # as data: a slice would write the number into the graph
        logits = model.logits(hidden[0].index_select(0, row)).float().cpu()[0]
        if temperature > 0:
            token = int(torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator))
        else:
            token = int(logits.argmax())
        if token == eos_id:
            return
        yield token
        ids[0, position + 1] = token


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
    ids = list(tokenizer(prompt, add_special_tokens=False)["input_ids"])
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
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def continue_text(model: CausalLM, tokenizer: Any, prompt: str, max_new_tokens: int, **settings: Any) -> str:
    """Return the text that follows a prompt; see `stream_ids`."""
    ids = plain_prompt(tokenizer, prompt)
    new = continue_ids(model, ids, max_new_tokens, eos_id=tokenizer.eos_token_id, **settings)
    return tokenizer.decode(new, clean_up_tokenization_spaces=False)


def generate(options: GenerateOptions, runtime: Runtime) -> str | list[dict[str, str]]:
    """Continue one prompt, or every line of a file, with a model, adapter or run folder.

    Returns:
        The text; for a file of prompts a list of prompts and texts.
    """
    run = options.run
    prompts = [str(options.prompt)] if options.prompts is None else _lines(Path(options.prompts))
    model = open_student(str(options.student), options.hub, run.dtype).model
    tokenizer = load_tokenizer(model.folder, options.hub.trust_remote_code)
    encode = (lambda text: chat_prompt(tokenizer, [_user(text)])) if options.chat else None
    encoded = [encode(prompt) if encode else plain_prompt(tokenizer, prompt) for prompt in prompts]
    runtime.place(model.module)
    show = _printer(run.quiet or run.json)
    texts = []
    for prompt, ids in zip(prompts, encoded, strict=True):
        show(f"{prompt}\n" if options.chat else prompt)
        new = stream_ids(
            model,
            ids,
            options.max_new_tokens,
            device=runtime.device,
            eos_id=tokenizer.eos_token_id,
            temperature=options.gen_temperature,
            generator=torch.Generator().manual_seed(run.seed),
            row_length=max(map(len, encoded)) + options.max_new_tokens,
        )
        pieces = []
        for piece in stream_text(tokenizer, new):
            show(piece)
            pieces.append(piece)
        show("\n")
        texts.append("".join(pieces))
    if options.prompts is None:
        return texts[0]
    return [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts, strict=True)]


def _user(text: str) -> Message:
    return {"role": "user", "content": text}


def _lines(file: Path) -> list[str]:
    try:
        found = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(f"prompts: {file} cannot be read as text ({error})") from None
    if not found:
        raise TextError(f"prompts: {file} holds no line with text; give one prompt a line")
    return found


def _printer(silent: bool) -> Callable[[str], None]:
    return (lambda piece: None) if silent else (lambda piece: print(piece, end="", flush=True))
