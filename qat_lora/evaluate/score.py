"""Scores of several models on the same held-out rows, in one pass over the teacher.

Perplexity alone can be fooled: a model fitted to the evaluation text's domain gets a better perplexity while it
moves away from its teacher. So each student is also measured by KL(teacher || student) over the *full*
vocabulary and by how often both have the same likeliest token. Every model sees the same tokens; logits exist
for a few thousand positions at a time only. They come in the model's own type and are taken apart in float32: in
bfloat16 the rounding of log-probabilities alone is larger than the KL of a good 4-bit student. On a CPU all passes over
a few positions follow one another in its cache (`piece_bytes`), or filling memory costs more than the arithmetic.

Five numbers a position leave the device, and the host adds them up in float64 by row (`tally.py`): sums on the device
would be float32 and could not say how far one row of text is from the next.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from qat_lora.errors import TextError
from qat_lora.evaluate.tally import COLUMNS, Tally, add_up
from qat_lora.types import Batch, LanguageModel

CHUNK_BYTES = 4 << 20
"""Float32 logits of one model held at once."""
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
    piece_bytes: int | None = None,
) -> dict[str, Score]:
    """Score a teacher and any number of students; the teacher's score comes under the name `teacher`.

    See `measure` for arguments and errors.
    """
    tallies = measure(teacher, students, batches, quiet, cut, piece_bytes=piece_bytes)
    return {name: score_of(tally) for name, tally in tallies.items()}


def measure(
    teacher: LanguageModel,
    students: Mapping[str, LanguageModel],
    batches: Iterable[Batch],
    quiet: bool = False,
    cut: Callable[[], None] = lambda: None,
    what: str = "evaluate",
    piece_bytes: int | None = None,
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
        piece_bytes: of intermediate results, `Runtime.piece_bytes`; None for a chunk at a time.

    Raises:
        TextError: no token counts, so there is nothing to take a mean of.
    """
    models = {"teacher": teacher, **students}
    found: dict[str, list[np.ndarray]] = {name: [] for name in models}
    with torch.no_grad():  # not inference_mode, whose tensors PyTorch/XLA cannot use
        bar = tqdm(batches, desc=what, unit="batch", disable=quiet)
        for batch, parts in _one_behind(_walk(models, batch, cut, piece_bytes) for batch in bar):
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
    models: Mapping[str, LanguageModel], batch: Batch, cut: Callable[[], None], piece_bytes: int | None
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
        parts.append((start, _score_chunk(models, hidden, targets, mask, at, inside, piece_bytes)))
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
    piece_bytes: int | None,
) -> tuple[Tensor, Tensor]:
    """Return which of the positions `at` count, [N], and the numbers that `add_up` takes for each model, [M, 5, N]."""
    mask = mask_N[at] & inside
    targets = targets_N[at].long().masked_fill(~mask, 0)
    logits = [model.logits(hidden_NH[name][at]) for name, model in models.items()]  # the teacher's come first
    count, vocab = logits[0].shape
    rows = count if piece_bytes is None else min(count, max(1, piece_bytes // (_BUFFERS * 4 * vocab)))
    # One set of buffers for all pieces: fresh memory costs a page fault for every 4 kB.
    buffers = logits[0].new_empty(_BUFFERS, rows, vocab, dtype=torch.float32)
    pieces = []
    for start in range(0, count, rows):
        part = slice(start, start + rows)
        pieces.append(_score_piece([of[part] for of in logits], targets[part], buffers[:, : count - start]))
    return mask, torch.cat(pieces, -1)


_BUFFERS = 4


def _score_piece(logits_NV: list[Tensor], targets_N: Tensor, buffers: Tensor) -> Tensor:
    """Return the numbers of N positions for each model, [M, 5, N].

    With z the logits less their largest and Z the sum of exp z, KL(t || s) = sum(exp z_t (z_t - z_s)) / Z_t - log Z_t +
    log Z_s: every exponential is taken once. The difference is bounded so that what the teacher gives nothing to counts
    nothing, even if the student gives it nothing either: 0 times infinity is no number. Products and a sum, since a TPU
    would round a product of matrices to bfloat16.
    """
    reference, weights, other, scratch = buffers
    teacher = _own(reference.copy_(logits_NV[0]), targets_N, weights)
    found = [teacher.numbers(torch.zeros_like(teacher.loss), torch.ones_like(teacher.loss), targets_N)]
    for logits in logits_NV[1:]:
        student = _own(other.copy_(logits), targets_N, scratch)
        apart = other.sub_(reference).clamp_(-LARGEST, LARGEST).mul_(weights).sum(-1)
        kl = student.sum.log() - teacher.sum.log() - apart / teacher.sum
        found.append(student.numbers(kl, (student.best == teacher.best).float(), targets_N))
    return torch.stack(found)


class _Own(NamedTuple):
    """What a model says of N positions by itself."""

    loss: Tensor
    sum: Tensor
    """Of exp(logit - largest logit): the likeliest token's probability is 1 / sum."""
    best: Tensor

    def numbers(self, kl: Tensor, same: Tensor, targets_N: Tensor) -> Tensor:
        """Return the numbers that `add_up` takes, [5, N]."""
        return torch.stack([self.loss, kl, same, 1 / self.sum, (self.best == targets_N).float()])


def _own(logits_NV: Tensor, targets_N: Tensor, weights_NV: Tensor) -> _Own:
    """Subtract from each row of logits its largest, in place, and set `weights_NV` to their exponentials."""
    largest, best = logits_NV.max(-1, keepdim=True)  # beats argmax
    total = weights_NV.copy_(logits_NV.sub_(largest)).exp_().sum(-1)
    return _Own(total.log() - logits_NV.gather(-1, targets_N[:, None])[:, 0], total, best[:, 0])


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
