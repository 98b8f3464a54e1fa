"""Who continues a text: one of our models here, or llama.cpp with a GGUF export.

To the commands that write text both are ids in and text out, so both come as the same five functions. A GGUF file could
also be turned back into dense weights and run here, but that would show what transformers makes of it, not what its
users get; llama.cpp's own Python binding does. Its sampling is switched off except for the temperature, so that both
draw from the whole distribution.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qat_lora.data.chat import Message
from qat_lora.errors import MissingExtraError, ModelError, TextError
from qat_lora.files.checksums import check_folder
from qat_lora.generate.sample import chat_prompt, has_template, plain_prompt, stream_ids, stream_text
from qat_lora.models.hub import HubConfig
from qat_lora.models.load import load_tokenizer
from qat_lora.models.student import open_student
from qat_lora.options import RunConfig
from qat_lora.runtime.base import Runtime

BASE, ADAPTER = "base.gguf", "adapter.gguf"


@dataclass(frozen=True)
class Speaker:
    """What continues a text."""

    description: str
    positions: int | None
    """Longest row in tokens, None where nothing limits it."""
    templated: bool
    """True if it knows how a chat is written."""
    encode_text: Callable[[str], list[int]]
    encode_chat: Callable[[list[Message]], list[int]]
    stream: Callable[[list[int], int, float, torch.Generator, int], Iterator[str]]
    """(prompt ids, new tokens, temperature, source of draws, tokens of the row) -> text, piece by piece."""


def open_speaker(name: str, hub: HubConfig, run: RunConfig, runtime: Runtime) -> Speaker:
    """Open what a user names: anything that `open_student` opens, or the folder of a GGUF export.

    Raises:
        MissingExtraError: a GGUF export, and no llama-cpp-python.
        ModelError: there is no such model, or its files are damaged.
    """
    folder = Path(name).expanduser()
    return _llama_cpp(folder) if (folder / BASE).is_file() else _ours(name, hub, run, runtime)


def _ours(name: str, hub: HubConfig, run: RunConfig, runtime: Runtime) -> Speaker:
    model = open_student(name, hub, run.dtype).model
    tokenizer = load_tokenizer(model.folder, hub.trust_remote_code)
    runtime.place(model.module)

    def stream(ids: list[int], new: int, temperature: float, generator: torch.Generator, row: int) -> Iterator[str]:
        found = stream_ids(
            model,
            ids,
            new,
            device=runtime.device,
            eos_id=tokenizer.eos_token_id,
            temperature=temperature,
            generator=generator,
            row_length=row,
            cut=runtime.mark_step,
        )
        return stream_text(tokenizer, found)

    return Speaker(
        runtime.description,
        model.max_positions,
        has_template(tokenizer),
        lambda text: plain_prompt(tokenizer, text),
        lambda messages: chat_prompt(tokenizer, messages),
        stream,
    )


def _llama_cpp(folder: Path) -> Speaker:
    check_folder(folder, ours=True)
    try:
        llama_cpp = importlib.import_module("llama_cpp")
        formats = importlib.import_module("llama_cpp.llama_chat_format")
    except ImportError:
        raise MissingExtraError(
            f"model: {folder} is a GGUF export, and llama.cpp's binding is not installed: pip install llama-cpp-python"
        ) from None
    lora = folder / ADAPTER
    try:
        llama = llama_cpp.Llama(
            str(folder / BASE), lora_path=str(lora) if lora.is_file() else None, n_ctx=0, verbose=False
        )
    except (ValueError, RuntimeError) as error:
        raise ModelError(f"model: llama.cpp does not load {folder / BASE}: {error}") from None
    template = llama.metadata.get("tokenizer.chat_template")

    def encode_text(text: str) -> list[int]:
        ids: list[int] = llama.tokenize(text.encode(), add_bos=False)
        begin = llama.metadata.get("tokenizer.ggml.bos_token_id")  # as `plain_prompt`; the file says not to add it
        return ids if begin is None else [int(begin), *ids]

    def encode_chat(messages: list[Message]) -> list[int]:
        if template is None:
            raise TextError("chat: this GGUF file holds no chat template; leave --chat out")
        end, begin = (llama.detokenize([token], special=True).decode() for token in (llama.token_eos(), _begin(llama)))
        write = formats.Jinja2ChatFormatter(template, eos_token=end, bos_token=begin)
        return list(llama.tokenize(write(messages=messages).prompt.encode(), add_bos=False, special=True))

    def stream(ids: list[int], new: int, temperature: float, generator: torch.Generator, _: int) -> Iterator[str]:
        llama.set_seed(int(torch.randint(2**31, (), generator=generator)))
        return stream_text(_Decoder(llama), _drawn(llama, ids, new, temperature))

    description = f"llama.cpp {llama_cpp.__version__} on the CPU"
    return Speaker(description, llama.n_ctx(), template is not None, encode_text, encode_chat, stream)


def _begin(llama: Any) -> int:
    token = llama.token_bos()
    return int(token if token >= 0 else llama.token_eos())


def _drawn(llama: Any, ids: list[int], new: int, temperature: float) -> Iterator[int]:
    """Yield new tokens until there are enough, or the end token."""
    everything = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}
    tokens: Iterable[int] = llama.generate(ids, temp=temperature, **everything)
    for _, token in zip(range(new), tokens, strict=False):
        if token == llama.token_eos():
            return
        yield token


class _Decoder:
    """llama.cpp's tokenizer with the one method that `stream_text` uses."""

    def __init__(self, llama: Any) -> None:
        self._llama = llama

    def decode(self, ids: list[int], **_: Any) -> str:
        """Return the text of ids; bytes that are no whole character yet are U+FFFD."""
        text: bytes = self._llama.detokenize(ids)
        return text.decode("utf-8", errors="replace")
