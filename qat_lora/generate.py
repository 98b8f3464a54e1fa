"""Continue a prompt with shapes that never change.

Growing inputs, and caches that grow with them, give a compiling device a new graph per token. Here the row has
its final length from the start, what is not yet written is padding behind the last token, and every step runs the
same forward; causal attention keeps padding out. For short continuations of small models that is fast enough
everywhere, and it needs nothing of transformers' generation machinery.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from qat_lora.errors import ConfigError
from qat_lora.models import CausalLM, load_tokenizer
from qat_lora.options import GenerateOptions
from qat_lora.runtime.base import Runtime
from qat_lora.students import open_student


@torch.no_grad()  # not inference_mode, whose tensors PyTorch/XLA cannot use
def continue_ids(
    model: CausalLM,
    prompt_ids: list[int],
    max_new_tokens: int,
    *,
    device: torch.device,
    eos_id: int | None = None,
    temperature: float = 0.0,
    generator: torch.Generator | None = None,
) -> list[int]:
    """Return the ids that follow a prompt, until `max_new_tokens` or the end token.

    Args:
        model: the model, on `device`.
        prompt_ids: at least one token.
        max_new_tokens: length of the continuation.
        device: where the model is.
        eos_id: ends the text; not returned.
        temperature: 0 takes the likeliest token, above 0 draws.
        generator: of the draws, on the CPU.

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
    ids = torch.zeros(1, total, dtype=torch.int64)
    ids[0, : len(prompt_ids)] = torch.tensor(prompt_ids)
    documents = torch.zeros(1, total, dtype=torch.int32, device=device)
    written: list[int] = []
    for position in range(len(prompt_ids) - 1, total - 1):
        hidden = model.hidden(ids.to(device), documents)
        row = torch.tensor([position]).to(device)  # as data: a slice would write the number into the graph
        logits = model.logits(hidden[0].index_select(0, row)).cpu()[0]
        if temperature > 0:
            token = int(torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=generator))
        else:
            token = int(logits.argmax())
        if token == eos_id:
            break
        written.append(token)
        ids[0, position + 1] = token
    return written


def continue_text(model: CausalLM, tokenizer: Any, prompt: str, max_new_tokens: int, **settings: Any) -> str:
    """Return the text that follows a prompt; see `continue_ids`."""
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    if tokenizer.bos_token_id is not None:
        ids = [tokenizer.bos_token_id, *ids]
    new = continue_ids(model, ids, max_new_tokens, eos_id=tokenizer.eos_token_id, **settings)
    return tokenizer.decode(new, clean_up_tokenization_spaces=False)


def generate(options: GenerateOptions, runtime: Runtime) -> str:
    """Continue the prompt with a model, adapter or run folder; print and return the text."""
    run = options.run
    model = open_student(str(options.student), options.hub, run.dtype).model
    runtime.place(model.module)
    text = continue_text(
        model,
        load_tokenizer(model.folder, options.hub.trust_remote_code),
        str(options.prompt),
        options.max_new_tokens,
        device=runtime.device,
        temperature=options.gen_temperature,
        generator=torch.Generator().manual_seed(run.seed),
    )
    if not (run.quiet or run.json):
        print(f"{options.prompt}{text}", flush=True)
    return text
