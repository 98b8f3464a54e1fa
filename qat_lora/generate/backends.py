"""The two ways to continue a text: one of our models here, or llama.cpp with a GGUF export.

The commands that write text see the same few functions of either. A GGUF file could also be turned back into dense
weights and run here, but that would show what transformers makes of it, not what its users get; llama.cpp's own Python
binding shows that. All of llama.cpp's sampling is off except for the temperature, so both draw from the whole
distribution.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from qat_lora.data.chat import Message
from qat_lora.errors import MissingExtraError, ModelError, TextError
from qat_lora.files.checksums import check_folder
from qat_lora.generate.sample import chat_prompt, has_template, plain_prompt, stream_ids, stream_text, until_end
from qat_lora.models.hub import HubConfig
from qat_lora.models.load import load_tokenizer
from qat_lora.models.student import open_student
from qat_lora.options import RunConfig
from qat_lora.runtime.base import Runtime

BASE, ADAPTER = "base.gguf", "adapter.gguf"
_WHOLE_DISTRIBUTION = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}


@dataclass(frozen=True)
class Backend:
    """An opened model that continues texts."""

    description: str
    positions: int | None
    """Longest row in tokens, None where nothing limits it."""
    templated: bool
    """Whether it has a chat template."""
    encode_text: Callable[[str], list[int]]
    encode_chat: Callable[[list[Message]], list[int]]
    stream: Callable[[list[int], int, float, torch.Generator, int], Iterator[str]]
    """(prompt ids, new tokens, temperature, source of draws, tokens of the row) -> text, piece by piece."""


def open_backend(name: str, hub: HubConfig, run: RunConfig, runtime: Runtime) -> Backend:
    """Open the folder of a GGUF export, which needs llama-cpp-python, or anything else as `open_student` does."""
    folder = Path(name).expanduser()
    return _llama_cpp(folder) if (folder / BASE).is_file() else _ours(name, hub, run, runtime)


def _ours(name: str, hub: HubConfig, run: RunConfig, runtime: Runtime) -> Backend:
    model = open_student(name, hub, run.dtype).model
    tokenizer = load_tokenizer(model.tokenizer_folder, hub.trust_remote_code)
    runtime.place(model.module)

    def stream(ids: list[int], new: int, temperature: float, generator: torch.Generator, row: int) -> Iterator[str]:
        tokens = stream_ids(
            model,
            ids,
            new,
            device=runtime.device,
            temperature=temperature,
            generator=generator,
            row_length=row,
            mark_step=runtime.mark_step,
        )
        return stream_text(tokenizer, until_end(tokens, tokenizer.eos_token_id))

    return Backend(
        runtime.description,
        model.max_positions,
        has_template(tokenizer),
        lambda text: plain_prompt(tokenizer, text),
        lambda messages: chat_prompt(tokenizer, messages),
        stream,
    )


def _llama_cpp(folder: Path) -> Backend:
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
        end_id, begin_id = llama.token_eos(), llama.token_bos()
        ids = (end_id, begin_id if begin_id >= 0 else end_id)
        end, begin = (llama.detokenize([token], special=True).decode() for token in ids)
        write = formats.Jinja2ChatFormatter(template, eos_token=end, bos_token=begin)
        return list(llama.tokenize(write(messages=messages).prompt.encode(), add_bos=False, special=True))

    def decode(ids: list[int], **_: Any) -> str:
        return llama.detokenize(ids).decode("utf-8", errors="replace")  # as yet half a character: U+FFFD

    def stream(ids: list[int], new: int, temperature: float, generator: torch.Generator, _: int) -> Iterator[str]:
        llama.set_seed(int(torch.randint(2**31, (), generator=generator)))
        tokens = itertools.islice(llama.generate(ids, temp=temperature, **_WHOLE_DISTRIBUTION), new)
        return stream_text(SimpleNamespace(decode=decode), until_end(tokens, llama.token_eos()))

    description = f"llama.cpp {llama_cpp.__version__} on the CPU"
    return Backend(description, llama.n_ctx(), template is not None, encode_text, encode_chat, stream)
