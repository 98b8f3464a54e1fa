"""The commands that show a text as it grows: the continuation of prompts, and a chat on the terminal.

A chat's rows are rounded up to a multiple of `ROW_STEP` tokens, so that a compiling device makes one graph for many
turns. A chat that outgrows the model's positions loses its oldest turns, and a note says so.
"""

import sys
from collections.abc import Iterable
from pathlib import Path

import torch

from qat_lora.data.layouts import Message
from qat_lora.errors import ConfigError, TextError
from qat_lora.generate.sample import Backend, open_backend
from qat_lora.options import ChatOptions, GenerateOptions
from qat_lora.runtime.base import Runtime
from qat_lora.setup.common import say

ROW_STEP = 128
NO_TEMPLATE = (
    "note: this tokenizer has no chat template, so the model was not made for chats; every line is continued as plain "
    "text, and earlier lines are forgotten"
)


def generate(options: GenerateOptions, runtime: Runtime) -> str | list[dict[str, str]]:
    """Continue a prompt; return its text, or for a file of prompts, one a line, a list of prompts and texts."""
    run = options.run
    prompts = [str(options.prompt)] if options.prompts is None else _lines(Path(options.prompts))
    backend = open_backend(str(options.student), options.hub, run, runtime)
    chats: list[list[Message]] = [[{"role": "user", "content": prompt}] for prompt in prompts]
    encoded = [*map(backend.encode_chat, chats)] if options.chat else [*map(backend.encode_text, prompts)]
    row_length = max(map(len, encoded)) + options.max_new_tokens
    silent, texts = run.quiet or run.json, []
    for prompt, ids in zip(prompts, encoded, strict=True):
        _shown([f"{prompt}\n" if options.chat else prompt], silent)
        generator = torch.Generator().manual_seed(run.seed)
        pieces = backend.stream(ids, options.max_new_tokens, options.gen_temperature, generator, row_length)
        texts.append(_shown(pieces, silent))
        _shown(["\n"], silent)
    if options.prompts is None:
        return texts[0]
    return [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts, strict=True)]


def _shown(pieces: Iterable[str], silent: bool) -> str:
    """Return pieces of text together, printed as they come unless `silent`."""
    text = ""
    for piece in pieces:
        text += piece
        if not silent:
            print(piece, end="", flush=True)
    return text


def _lines(file: Path) -> list[str]:
    try:
        found = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(f"prompts: {file} cannot be read as text ({error})") from None
    if not found:
        raise TextError(f"prompts: {file} holds no line with text; give one prompt a line")
    return found


def chat(options: ChatOptions, runtime: Runtime) -> list[Message]:
    """Answer the lines of standard input until its end or /exit (/new forgets all); return the last conversation."""
    run = options.run
    backend = open_backend(str(options.student), options.hub, run, runtime)
    templated = backend.templated
    if options.system and not templated:
        raise ConfigError("system: this tokenizer has no chat template, so there is no place for it; leave it out")
    room = (backend.positions or sys.maxsize) - options.max_new_tokens
    if room < 1:
        raise ConfigError(f"max_new_tokens: {options.max_new_tokens} leave no room in {backend.positions} positions")
    beginning: list[Message] = [{"role": "system", "content": options.system}] if options.system else []
    messages = list(beginning)
    generator = torch.Generator().manual_seed(run.seed)
    say(run, f"{backend.description} · {options.student} · /new begins again, /exit ends")
    if not templated:
        say(run, NO_TEMPLATE)
    silent = run.quiet or run.json
    while _shown(["> "], silent) and (typed := sys.stdin.readline()):
        line = typed.strip()
        if line == "/exit":
            break
        if line == "/new":
            messages = list(beginning)
        if line in ("", "/new"):
            continue
        said = [*(messages if templated else []), {"role": "user", "content": line}]
        ids = _encode(backend, said)
        while len(ids) > room and len(said) > len(beginning) + 1:
            del said[len(beginning) : len(beginning) + 2]
            ids = _encode(backend, said)
        if len(ids) > room:
            say(run, f"note: that is {len(ids)} tokens, and there is room for {room}; say it shorter")
            continue
        if templated and len(said) <= len(messages):
            say(run, "note: the chat is longer than the model's positions; its oldest turns are forgotten")
        messages = said
        width = -(-(len(ids) + options.max_new_tokens) // ROW_STEP) * ROW_STEP
        row_length = min(width, backend.positions or width)
        pieces = backend.stream(ids, options.max_new_tokens, options.gen_temperature, generator, row_length)
        messages.append({"role": "assistant", "content": _shown(pieces, silent)})
        say(run, "")
    return messages


def _encode(backend: Backend, messages: list[Message]) -> list[int]:
    """Return the ids up to the answer; without a template, of the last line alone."""
    return backend.encode_chat(messages) if backend.templated else backend.encode_text(messages[-1]["content"])
