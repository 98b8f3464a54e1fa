"""Scores of several models on the same held-out rows, in one pass over the teacher.

Perplexity alone can be fooled: a model fitted to the evaluation text's domain gets a better perplexity while it
moves away from its teacher. So each student is also measured by KL(teacher || student) over the *full*
vocabulary and by how often both have the same likeliest token. Every model sees the same tokens; logits exist
for a few thousand positions at a time only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from qat_lora.errors import TextError
from qat_lora.losses.dense import cross_entropy_sum, kl_sum
from qat_lora.types import Batch, LanguageModel

CHUNK_BYTES = 64 << 20  # float32 logits of one model held at once


@dataclass(frozen=True)
class Score:
    """Means over the tokens that count."""

    nll: float
    """Mean negative log likelihood of the text, nats per token."""
    kl: float
    """Mean KL(teacher || student), nats per token; 0 for the teacher itself."""
    top1: float
    """Share of positions where student and teacher have the same likeliest token."""
    tokens: int

    @property
    def ppl(self) -> float:
        """Perplexity, exp(nll); infinite where that is beyond a float."""
        return math.inf if self.nll > 700 else math.exp(self.nll)

    def as_dict(self) -> dict[str, float]:
        """Return the score as plain numbers."""
        return {"ppl": self.ppl, "nll": self.nll, "kl": self.kl, "top1": self.top1, "tokens": self.tokens}


def score(
    teacher: LanguageModel, students: Mapping[str, LanguageModel], batches: Iterable[Batch], quiet: bool = False
) -> dict[str, Score]:
    """Score a teacher and any number of students; the teacher's score comes under the name `teacher`.

    Args:
        teacher: the reference.
        students: by name; vocabularies must be the teacher's.
        batches: `input_ids`, `document_ids` and `target_mask` as tensors on the models' device.
        quiet: no progress bar.

    Raises:
        TextError: no token counts, so there is nothing to take a mean of.
    """
    models = {"teacher": teacher, **students}
    sums: dict[str, list[Tensor]] = {name: [torch.zeros((), dtype=torch.float64)] * 3 for name in models}
    count = torch.zeros((), dtype=torch.float64)
    chunk = max(1, CHUNK_BYTES // (4 * teacher.vocab_size))
    with torch.inference_mode():
        for batch in tqdm(batches, desc="evaluate", unit="batch", disable=quiet):
            ids, mask = batch["input_ids"], batch["target_mask"].reshape(-1)
            targets = ids[:, 1:].reshape(-1)
            hidden = {
                name: model.hidden(ids, batch["document_ids"])[:, :-1].flatten(0, 1) for name, model in models.items()
            }
            count = count + mask.sum().double().cpu()
            for start in range(0, targets.numel(), chunk):
                part = slice(start, start + chunk)
                reference = teacher.logits(hidden["teacher"][part])
                best = reference.argmax(-1)
                for name, model in models.items():
                    logits = reference if name == "teacher" else model.logits(hidden[name][part])
                    values = (
                        cross_entropy_sum(logits, targets[part], mask[part])[0],
                        kl_sum(logits, reference, mask[part])[0],
                        ((logits.argmax(-1) == best) & mask[part]).sum(),
                    )
                    sums[name] = [total + value.double().cpu() for total, value in zip(sums[name], values, strict=True)]
    tokens = int(count)
    if not tokens:
        raise TextError("dataset: the held-out text has no token to score; give more text")
    means = {name: [float(total) / tokens for total in totals] for name, totals in sums.items()}
    return {name: Score(nll, kl, top1, tokens) for name, (nll, kl, top1) in means.items()}


def recovery(
    quantised: Mapping[str, Any], recovered: Mapping[str, Any], teacher: Mapping[str, Any]
) -> dict[str, float]:
    """Return the shares of the log-perplexity gap and of the KL that recovery closed.

    Args:
        quantised: `nll` and `kl` of the damaged student.
        recovered: the same of the recovered one.
        teacher: `nll` of the teacher.
    """
    gap = quantised["nll"] - teacher["nll"]
    return {
        "gap_recovered_log": (quantised["nll"] - recovered["nll"]) / gap if gap else float("nan"),
        "kl_recovered": 1 - recovered["kl"] / quantised["kl"] if quantised["kl"] else float("nan"),
    }
