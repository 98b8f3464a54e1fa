"""Scores of several models on the same held-out rows, in one pass over the teacher.

Perplexity alone can be fooled: a model fitted to the evaluation text's domain gets a better perplexity while it
moves away from its teacher. So each student is also measured by KL(teacher || student) over the *full*
vocabulary and by how often both have the same likeliest token. Every model sees the same tokens; logits exist
for a few thousand positions at a time only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
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
    teacher: LanguageModel,
    students: Mapping[str, LanguageModel],
    batches: Iterable[Batch],
    quiet: bool = False,
    cut: Callable[[], None] = lambda: None,
) -> dict[str, Score]:
    """Score a teacher and any number of students; the teacher's score comes under the name `teacher`.

    On XLA that is two graphs in all, of the hidden states and of a chunk: chunks have one shape, their positions come
    as data, and nothing is read that was not computed by then (else it would be computed again for every read).

    Args:
        teacher: the reference.
        students: by name; vocabularies must be the teacher's.
        batches: `input_ids`, `document_ids` and `target_mask` as tensors on the models' device.
        quiet: no progress bar.
        cut: dispatches queued work, `Runtime.cut`.

    Raises:
        TextError: no token counts, so there is nothing to take a mean of.
    """
    models = {"teacher": teacher, **students}
    sums = {name: torch.zeros(4, dtype=torch.float64) for name in models}
    most = max(1, CHUNK_BYTES // (4 * teacher.vocab_size))
    with torch.no_grad():  # not inference_mode, whose tensors PyTorch/XLA cannot use
        for batch in tqdm(batches, desc="evaluate", unit="batch", disable=quiet):
            ids, mask = batch["input_ids"], batch["target_mask"].reshape(-1)
            targets = ids[:, 1:].reshape(-1)
            hidden = {
                name: model.hidden(ids, batch["document_ids"])[:, :-1].flatten(0, 1) for name, model in models.items()
            }
            cut()
            count = targets.numel()
            chunk = min(most, count)
            for start in range(0, count, chunk):
                rows = torch.arange(start, start + chunk)
                at, inside = rows.clamp_max(count - 1).to(ids.device), (rows < count).to(ids.device)
                values = _score_chunk(models, hidden, targets, mask, at, inside)
                cut()
                for name, value in values.items():
                    sums[name] += value.cpu().double()
    tokens = int(sums["teacher"][3])
    if not tokens:
        raise TextError("dataset: the held-out text has no token to score; give more text")
    means = {name: (total[:3] / tokens).tolist() for name, total in sums.items()}
    return {name: Score(nll, kl, top1, tokens) for name, (nll, kl, top1) in means.items()}


def _score_chunk(
    models: Mapping[str, LanguageModel],
    hidden_NH: Mapping[str, Tensor],
    targets_N: Tensor,
    mask_N: Tensor,
    at: Tensor,
    inside: Tensor,
) -> dict[str, Tensor]:
    """Return each model's sums of loss, KL and agreement, and the tokens that count, at the positions `at`."""
    targets, mask = targets_N[at], mask_N[at] & inside
    reference = models["teacher"].logits(hidden_NH["teacher"][at])
    best = reference.argmax(-1)
    values = {}
    for name, model in models.items():
        logits = reference if name == "teacher" else model.logits(hidden_NH[name][at])
        same = ((logits.argmax(-1) == best) & mask).sum(dtype=torch.float32)
        loss, count = cross_entropy_sum(logits, targets, mask)
        values[name] = torch.stack([loss, kl_sum(logits, reference, mask)[0], same, count])
    return values


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
