"""Scores of several models on the same held-out rows, in one pass over the teacher.

Perplexity alone can be fooled: a model fitted to the evaluation text's domain gets a better perplexity while it
moves away from its teacher. So each student is also measured by KL(teacher || student) over the *full*
vocabulary and by how often both have the same likeliest token. Every model sees the same tokens; logits exist
for a few thousand positions at a time only.

Five numbers a position leave the device, and the host adds them up in float64 by row (`tally.py`): sums on the device
would be float32 and could not say how far one row of text is from the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from qat_lora.errors import TextError
from qat_lora.evaluate.tally import COLUMNS, Tally, add_up
from qat_lora.types import Batch, LanguageModel

CHUNK_BYTES = 4 << 20
"""Float32 logits of one model held at once. Larger blocks are fresh pages of the system each time on a CPU, and filling
them costs more than the arithmetic."""
CHUNK_ROWS = 128
"""Positions of a chunk all the same: fewer, and a large output head is read from memory for too little work."""
LARGEST = torch.finfo(torch.float32).max


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
    accuracy: float = math.nan
    """Share of positions where the likeliest token is the text's."""
    ece: float = math.nan
    """Expected calibration error of the likeliest token, 15 bins."""

    @property
    def ppl(self) -> float:
        """Perplexity, exp(nll); infinite where that is beyond a float."""
        return math.inf if self.nll > 700 else math.exp(self.nll)

    def as_dict(self) -> dict[str, float]:
        """Return the score as plain numbers."""
        means = {"ppl": self.ppl, "nll": self.nll, "kl": self.kl, "top1": self.top1, "tokens": self.tokens}
        return means | {"accuracy": self.accuracy, "ece": self.ece}


def score_of(tally: Tally) -> Score:
    """Return the means of a tally."""
    found = tally.figures
    found.pop("ppl")
    return Score(**found)


def score(
    teacher: LanguageModel,
    students: Mapping[str, LanguageModel],
    batches: Iterable[Batch],
    quiet: bool = False,
    cut: Callable[[], None] = lambda: None,
) -> dict[str, Score]:
    """Score a teacher and any number of students; the teacher's score comes under the name `teacher`.

    See `measure` for arguments and errors.
    """
    return {name: score_of(tally) for name, tally in measure(teacher, students, batches, quiet, cut).items()}


def measure(
    teacher: LanguageModel,
    students: Mapping[str, LanguageModel],
    batches: Iterable[Batch],
    quiet: bool = False,
    cut: Callable[[], None] = lambda: None,
    what: str = "evaluate",
) -> dict[str, Tally]:
    """Add up losses, KL and calibration of a teacher (under the name `teacher`) and its students, row by row.

    On XLA that is two graphs in all, of the hidden states and of a chunk: chunks have one shape, their positions come
    as data, and nothing is read that was not computed by then (else it would be computed again for every read).

    Args:
        teacher: the reference.
        students: by name; vocabularies must be the teacher's.
        batches: `input_ids`, `document_ids` and `target_mask` as tensors on the models' device.
        quiet: no progress bar.
        cut: dispatches queued work, `Runtime.cut`.
        what: shown at the progress bar.

    Raises:
        TextError: no token counts, so there is nothing to take a mean of.
    """
    models = {"teacher": teacher, **students}
    found: dict[str, list[np.ndarray]] = {name: [] for name in models}
    with torch.no_grad():  # not inference_mode, whose tensors PyTorch/XLA cannot use
        bar = tqdm(batches, desc=what, unit="batch", disable=quiet)
        for batch, parts in _one_behind(_walk(models, batch, cut) for batch in bar):
            rows, positions = batch["target_mask"].shape
            sums = {name: np.zeros((rows, COLUMNS)) for name in models}
            for start, values in parts:
                counted_N, values_MFN = values[0].cpu().numpy(), values[1].cpu().numpy()
                row_N = (start + counted_N.nonzero()[0]) // positions
                for name, values_FN in zip(models, values_MFN, strict=True):
                    sums[name] += add_up(row_N, values_FN[:, counted_N], rows)
            for name, lines in sums.items():
                found[name].append(lines[lines[:, 0] > 0])
    tallies = {name: Tally(np.concatenate([np.zeros((0, COLUMNS)), *lines])) for name, lines in found.items()}
    if not len(tallies["teacher"].rows):
        raise TextError("dataset: the held-out text has no token to score; give more text")
    return tallies


def _one_behind(items: Iterable[Any]) -> Iterator[Any]:
    """Yield each item when the next one has been made: the device works while the host reads."""
    waiting: list[Any] = []
    for item in items:
        waiting.append(item)
        if len(waiting) > 1:
            yield waiting.pop(0)
    yield from waiting


def _walk(
    models: Mapping[str, LanguageModel], batch: Batch, cut: Callable[[], None]
) -> tuple[Batch, list[tuple[int, tuple[Tensor, Tensor]]]]:
    """Queue the work of a batch; return it with, by first position, what `_score_chunk` returns."""
    ids, mask = batch["input_ids"], batch["target_mask"].reshape(-1)
    targets = ids[:, 1:].reshape(-1)
    hidden = {name: model.hidden(ids, batch["document_ids"])[:, :-1].flatten(0, 1) for name, model in models.items()}
    cut()
    count = targets.numel()
    chunk = min(count, chunk_positions(models["teacher"].vocab_size))
    parts = []
    for start in range(0, count, chunk):
        rows = torch.arange(start, start + chunk)
        at, inside = rows.clamp_max(count - 1).to(ids.device), (rows < count).to(ids.device)
        parts.append((start, _score_chunk(models, hidden, targets, mask, at, inside)))
        cut()
    return batch, parts


def chunk_positions(vocab_size: int) -> int:
    """Return for how many positions logits are held at once."""
    return max(CHUNK_ROWS, CHUNK_BYTES // (4 * vocab_size))


def _score_chunk(
    models: Mapping[str, LanguageModel],
    hidden_NH: Mapping[str, Tensor],
    targets_N: Tensor,
    mask_N: Tensor,
    at: Tensor,
    inside: Tensor,
) -> tuple[Tensor, Tensor]:
    """Return which of the positions `at` count, [N], and the numbers that `add_up` takes for each model, [M, 5, N]."""
    mask = mask_N[at] & inside
    targets = targets_N[at].long().masked_fill(~mask, 0)
    reference = torch.log_softmax(models["teacher"].logits(hidden_NH["teacher"][at]), dim=-1)
    probabilities = reference.exp()
    loss, highest, best = _own(reference, targets)
    values = [
        torch.stack([loss, torch.zeros_like(loss), torch.ones_like(loss), highest.exp(), (best == targets).float()])
    ]
    for name, model in models.items():
        if name != "teacher":
            log_probs = torch.log_softmax(model.logits(hidden_NH[name][at]), dim=-1)
            loss, highest, own = _own(log_probs, targets)
            kl = _kl_in_place(log_probs, reference, probabilities)
            values.append(torch.stack([loss, kl, (own == best).float(), highest.exp(), (own == targets).float()]))
    return mask, torch.stack(values)


def _own(log_probs_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss of N targets, and the log-probability and the id of the likeliest token; max beats argmax."""
    return -log_probs_NV.gather(-1, targets_N[:, None])[:, 0], *log_probs_NV.max(-1)


def _kl_in_place(log_probs_NV: Tensor, reference_NV: Tensor, probabilities_NV: Tensor) -> Tensor:
    """Return the KL of N positions in the memory of the student's log-probabilities, which are lost.

    The difference is bounded so that what the teacher gives nothing to counts nothing, even if the student gives it
    nothing either: 0 times infinity is no number. Products and a sum, since a TPU would round a product of matrices to
    bfloat16.
    """
    apart = log_probs_NV.sub_(reference_NV).clamp_(-LARGEST, LARGEST)
    return -apart.mul_(probabilities_NV).sum(-1)


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
