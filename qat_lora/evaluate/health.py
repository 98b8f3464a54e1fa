"""Long greedy generation, and whether it still behaves: what teacher-forced scores cannot see.

KL and perplexity look one token ahead along a given text. A student can be near its teacher there and still, left to
itself, fall into a loop; distillation restores the one before the other. So all models continue the same prompts
greedily and are compared with the *teacher's* continuations: small models repeat themselves without damage, too.

All prompts have one length and are one batch, and the position is data: two graphs on XLA (`models/kv_cache.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence, Set
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from qat_lora.config import common, option, settings
from qat_lora.errors import TextError
from qat_lora.models.kv_cache import begin, step
from qat_lora.runtime.base import Runtime

if TYPE_CHECKING:
    from qat_lora.models.load import CausalLM

GRAM = 4  # tokens; of the repetition rate


@settings
class HealthConfig:
    """Settings of the comparison by generation."""

    generate: int = common(0, "prompts of the text that every model continues greedily; 0: none", unit="prompts", min=0)
    generate_tokens: int = option(256, "length of a continuation", unit="tokens", min=GRAM)
    prompt_tokens: int = option(32, "length of a prompt", unit="tokens", min=1)


def take_prompts(rows: Iterable[Any], config: HealthConfig) -> np.ndarray:
    """Return rows' first tokens, where all are of one document, int64 [prompts, tokens]; TextError for no such row."""
    prompts: list[np.ndarray] = []
    for row in rows:
        ends = row.doc_starts[1:].nonzero()[0] + 1
        if (ends[0] if len(ends) else len(row.input_ids)) >= config.prompt_tokens:
            prompts.append(row.input_ids[: config.prompt_tokens].astype(np.int64))
        if len(prompts) == config.generate:
            break
    if not prompts:
        none = f"no row of the text begins with {config.prompt_tokens} tokens of one document"
        raise TextError(f"prompt_tokens: {none}; give fewer")
    return np.stack(prompts)


@torch.no_grad()  # not inference_mode, whose tensors PyTorch/XLA cannot use
def continue_greedily(
    model: CausalLM, prompts_BP: np.ndarray, new_tokens: int, runtime: Runtime, quiet: bool = True
) -> np.ndarray:
    """Return the greedy continuation of each prompt, int64 [B, new_tokens]; an end token does not stop it."""
    rows, known = prompts_BP.shape
    ids_BL = torch.zeros(rows, known + new_tokens, dtype=torch.int64)
    ids_BL[:, :known] = torch.from_numpy(prompts_BP)
    ids_BL = ids_BL.to(runtime.device)
    hidden_BLH, cache = begin(model, ids_BL, known)
    position = torch.tensor([known]).to(runtime.device)
    ids_BL = _with_next(model, ids_BL, hidden_BLH.index_select(1, position - 1), position)
    runtime.mark_step()
    for after in tqdm(range(known + 1, known + new_tokens), desc="generate", unit="token", disable=quiet):
        position = torch.tensor([after]).to(runtime.device)
        hidden_B1H = step(model, ids_BL.index_select(1, position - 1), position - 1, cache)
        ids_BL = _with_next(model, ids_BL, hidden_B1H, position)
        runtime.mark_step()
    return ids_BL.cpu().numpy()[:, known:]  # a slice on the device would be one more graph


def _with_next(model: CausalLM, ids_BL: Tensor, hidden_B1H: Tensor, position: Tensor) -> Tensor:
    """Return the rows with one more token; the position is data, so that no graph has a number in it."""
    return ids_BL.index_copy(1, position, model.logits(hidden_B1H[:, 0]).argmax(-1, keepdim=True))


def health(continuations: Sequence[Sequence[int]], ends: Set[int]) -> dict[str, float]:
    """Return figures of continuations, each up to the first of the tokens that end a text.

    `repetition` is the share of a continuation's 4-grams that occurred in it before, averaged (fewer than four tokens
    repeat nothing); `distinct_1` and `distinct_2` are different tokens and pairs over all tokens and pairs (Li et al.
    2016, arXiv:1510.03055); `termination` is the share that reached one; `tokens` the mean length.
    """
    ended = sum(not ends.isdisjoint(ids) for ids in continuations)
    texts = [list(itertools.takewhile(lambda token: token not in ends, ids)) for ids in continuations]
    grams = {n: [[tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)] for ids in texts] for n in (1, 2, GRAM)}
    repeated = [1 - len(set(of)) / len(of) if of else 0.0 for of in grams[GRAM]]

    def distinct(n: int) -> float:
        every = [gram for of in grams[n] for gram in of]
        return len(set(every)) / len(every) if every else 0.0

    found = {"repetition": float(np.mean(repeated)), "distinct_1": distinct(1), "distinct_2": distinct(2)}
    return found | {"termination": ended / len(texts), "tokens": float(np.mean([len(ids) for ids in texts]))}
