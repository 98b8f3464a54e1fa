"""The command that continues a prompt, or each line of a file, and shows the text as it grows."""

from __future__ import annotations

from pathlib import Path

import torch

from qat_lora.errors import TextError
from qat_lora.generate.backends import open_backend
from qat_lora.options import GenerateOptions
from qat_lora.runtime.base import Runtime


def generate(options: GenerateOptions, runtime: Runtime) -> str | list[dict[str, str]]:
    """Continue a prompt; return its text, or for a file of prompts, one a line, a list of prompts and texts."""
    run = options.run
    prompts = [str(options.prompt)] if options.prompts is None else _lines(Path(options.prompts))
    backend = open_backend(str(options.student), options.hub, run, runtime)
    if options.chat:
        encoded = [backend.encode_chat([{"role": "user", "content": prompt}]) for prompt in prompts]
    else:
        encoded = [backend.encode_text(prompt) for prompt in prompts]
    row_length = max(map(len, encoded)) + options.max_new_tokens
    silent = run.quiet or run.json

    def show(piece: str) -> str:
        if not silent:
            print(piece, end="", flush=True)
        return piece

    texts = []
    for prompt, ids in zip(prompts, encoded, strict=True):
        show(f"{prompt}\n" if options.chat else prompt)
        generator = torch.Generator().manual_seed(run.seed)
        pieces = backend.stream(ids, options.max_new_tokens, options.gen_temperature, generator, row_length)
        texts.append("".join(map(show, pieces)))
        show("\n")
    if options.prompts is None:
        return texts[0]
    return [{"prompt": prompt, "text": text} for prompt, text in zip(prompts, texts, strict=True)]


def _lines(file: Path) -> list[str]:
    try:
        found = [line for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(f"prompts: {file} cannot be read as text ({error})") from None
    if not found:
        raise TextError(f"prompts: {file} holds no line with text; give one prompt a line")
    return found
