"""The command for a chat with a model on the terminal.

Rows are rounded up to a multiple of `ROW_STEP` tokens, so that a compiling device makes one graph for many turns. A
chat that outgrows the model's positions loses its oldest turns, and a note says so.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from qat_lora.data.chat import Message
from qat_lora.errors import ConfigError
from qat_lora.generate.backends import Backend, open_backend
from qat_lora.options import ChatOptions
from qat_lora.runtime.base import Runtime
from qat_lora.setup.common import say

ROW_STEP = 128
NO_TEMPLATE = (
    "note: this tokenizer has no chat template, so the model was not made for chats; every line is continued as plain "
    "text, and earlier lines are forgotten"
)


def chat(options: ChatOptions, runtime: Runtime) -> list[Message]:
    """Answer the lines of standard input until it ends or says /exit; return the last conversation.

    Lines that are commands: /new forgets the conversation, /exit ends.
    """
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
    for line in _typed(silent):
        if line == "/exit":
            break
        if line == "/new":
            messages = list(beginning)
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
        answer = ""
        row_length = min(width, backend.positions or width)
        for piece in backend.stream(ids, options.max_new_tokens, options.gen_temperature, generator, row_length):
            answer += piece
            if not silent:
                print(piece, end="", flush=True)
        say(run, "")
        messages.append({"role": "assistant", "content": answer})
    return messages


def _encode(backend: Backend, messages: list[Message]) -> list[int]:
    """Return the ids up to the answer; without a template, of the last line alone."""
    return backend.encode_chat(messages) if backend.templated else backend.encode_text(messages[-1]["content"])


def _typed(silent: bool) -> Iterator[str]:
    while True:
        if not silent:
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.strip()
