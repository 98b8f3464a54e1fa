"""Scores of several models on the same held-out rows, in one pass over the teacher.

Perplexity alone is misleading: a model fitted to the domain of the evaluation text gets a better perplexity while it
moves away from its teacher. So each student is also scored by KL(teacher || student) over the *full* vocabulary and by
how often its top-1 token is the teacher's. All models see the same tokens, and logits exist for a few thousand
positions at a time. Logits are float32 whatever the models compute in: the output head multiplies hidden states that
were upcast, since logits of 24 rounded to bfloat16 are a KL of 4e-4 away (SmolLM2-135M), further than 8-bit weights. On
a CPU all passes over a few positions run while these are in its cache (`piece_bytes`), since memory traffic would
otherwise cost more than the arithmetic.

Six numbers a position leave the device, and the host sums them in float64 by row (`tally.py`): sums on the device
would be float32 and could not tell how far one row of text is from the next.
"""

import itertools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from qat_lora.errors import TextError
from qat_lora.evaluate.tally import COLUMNS, Tally, add_up
from qat_lora.types import Batch, LanguageModel

CHUNK_BYTES = 4 << 20  # float32 logits of one model held at once
CHUNK_ROWS = 128  # least positions of a chunk: with fewer, a large output head is read from memory for too little work
LARGEST = torch.finfo(torch.float32).max
_BUFFERS = 4


def measure(
    teacher: LanguageModel,
    students: Mapping[str, LanguageModel],
    batches: Iterable[Batch],
    quiet: bool = False,
    mark_step: Callable[[], None] = lambda: None,
    label: str = "evaluate",
    piece_bytes: int | None = None,
    observe: Callable[[np.ndarray, np.ndarray, np.ndarray], None] | None = None,
) -> dict[str, Tally]:
    """Sum losses, KL and calibration of a teacher (under the name `teacher`) and its students, row by row.

    All have one vocabulary; batches are tensors on their device; `mark_step` and `piece_bytes` are the runtime's. On
    XLA it takes two graphs, of the hidden states and of a chunk: chunks have one shape, their positions are data, and
    only computed values are read (a read of queued work would compute it again). TextError: no token counts.
    `observe` gets rows, positions and numbers of the tokens that count [M, 6, N]: those of `add_up`, the top-1 token.
    """
    models = {"teacher": teacher, **students}
    found: dict[str, list[np.ndarray]] = {name: [np.zeros((0, COLUMNS))] for name in models}
    done = 0
    with torch.no_grad():  # not inference_mode, whose tensors PyTorch/XLA cannot use
        bar = tqdm(batches, desc=label, unit="batch", disable=quiet)
        queued = (_queue(models, batch, mark_step, piece_bytes) for batch in bar)
        # One behind: the device works on the next batch while the host reads this one.
        for (batch, chunks), _ in itertools.pairwise(itertools.chain(queued, [({}, [])])):
            rows, positions = batch["target_mask"].shape
            sums = {name: np.zeros((rows, COLUMNS)) for name in models}
            for start, (counted, values) in chunks:
                counted_N, values_MFN = counted.cpu().numpy(), values.cpu().numpy()
                row_N, position_N = np.divmod(start + counted_N.nonzero()[0], positions)
                values_MFN = values_MFN[..., counted_N]
                for name, values_FN in zip(models, values_MFN, strict=True):
                    sums[name] += add_up(row_N, values_FN[:5], rows)
                if observe is not None:
                    observe(done + row_N, position_N, values_MFN)
            done += rows
            for name, lines in sums.items():
                found[name].append(lines[lines[:, 0] > 0])
    tallies = {name: Tally(np.concatenate(lines)) for name, lines in found.items()}
    if not len(tallies["teacher"].rows):
        raise TextError("dataset: the held-out text has no token to score; give more text")
    return tallies


def _queue(
    models: Mapping[str, LanguageModel], batch: Batch, mark_step: Callable[[], None], piece_bytes: int | None
) -> tuple[Batch, list[tuple[int, tuple[Tensor, Tensor]]]]:
    """Queue the work of a batch; return it with the results of `_score_chunk` by first position."""
    ids, mask_N = batch["input_ids"], batch["target_mask"].reshape(-1)
    targets_N = ids[:, 1:].reshape(-1)
    hidden = {name: model.hidden(ids, batch["document_ids"])[:, :-1].flatten(0, 1) for name, model in models.items()}
    mark_step()
    count = targets_N.numel()
    size = min(count, chunk_positions(models["teacher"].vocab_size))
    chunks = []
    for start in range(0, count, size):
        positions = torch.arange(start, start + size)
        at, inside = positions.clamp_max(count - 1).to(ids.device), (positions < count).to(ids.device)
        counted = mask_N[at] & inside
        logits = [model.logits(hidden[name][at].float()) for name, model in models.items()]  # the teacher's come first
        values = _score_chunk(logits, targets_N[at].long().masked_fill(~counted, 0), piece_bytes)
        chunks.append((start, (counted, values)))
        mark_step()
    return batch, chunks


def chunk_positions(vocab_size: int) -> int:
    """Return for how many positions logits are held at once."""
    return max(CHUNK_ROWS, CHUNK_BYTES // (4 * vocab_size))


def _score_chunk(logits_NV: list[Tensor], targets_N: Tensor, piece_bytes: int | None) -> Tensor:
    """Return the numbers that `measure` passes on for each model, [M, 6, N]."""
    count, vocab = logits_NV[0].shape
    size = count if piece_bytes is None else min(count, max(1, piece_bytes // (_BUFFERS * 4 * vocab)))
    # One set of buffers for all pieces: fresh memory costs a page fault for every 4 kB.
    buffers = logits_NV[0].new_empty(_BUFFERS, size, vocab, dtype=torch.float32)
    parts = [slice(start, start + size) for start in range(0, count, size)]
    pieces = [([of[p] for of in logits_NV], targets_N[p], buffers[:, : count - p.start]) for p in parts]
    return torch.cat([_score_piece(*piece) for piece in pieces], -1)


def _score_piece(logits_NV: list[Tensor], targets_N: Tensor, buffers: Tensor) -> Tensor:
    """Return the numbers of N positions for each model, [M, 6, N].

    With z the logits less their largest and Z the sum of exp z, KL(t || s) = sum(exp z_t (z_t - z_s)) / Z_t - log Z_t +
    log Z_s: each exponential is computed once. The difference is bounded, so that a token of no probability under the
    teacher counts nothing even if the student gives it none either: 0 times infinity is no number. Products and a sum,
    since a TPU would round a product of matrices to bfloat16.
    """
    reference, weights, other, scratch = buffers
    teacher_loss, teacher_sum, teacher_top1 = _predict(reference.copy_(logits_NV[0]), targets_N, weights)
    found = [(teacher_loss, torch.zeros_like(teacher_loss), torch.ones_like(teacher_loss), teacher_sum, teacher_top1)]
    for logits in logits_NV[1:]:
        loss, total, top1 = _predict(other.copy_(logits), targets_N, scratch)
        apart = other.sub_(reference).clamp_(-LARGEST, LARGEST).mul_(weights).sum(-1)
        kl = total.log() - teacher_sum.log() - apart / teacher_sum
        found.append((loss, kl, (top1 == teacher_top1).float(), total, top1))
    lines = ((loss, kl, same, 1 / total, top1 == targets_N, top1) for loss, kl, same, total, top1 in found)
    return torch.stack([torch.stack([x.float() for x in line]) for line in lines])


def _predict(logits_NV: Tensor, targets_N: Tensor, weights_NV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return loss, Z and top-1 token of N positions; logits become z in place, and `weights_NV` their exponentials."""
    largest, top1 = logits_NV.max(-1, keepdim=True)  # faster than argmax
    total = weights_NV.copy_(logits_NV.sub_(largest)).exp_().sum(-1)
    return total.log() - logits_NV.gather(-1, targets_N[:, None])[:, 0], total, top1[:, 0]


def recovery(rounded: Mapping[str, Any], recovered: Mapping[str, Any], teacher: Mapping[str, Any]) -> dict[str, float]:
    """Return the shares of the log-perplexity gap (by `nll`) and of the `kl` that recovery closed."""
    gap = rounded["nll"] - teacher["nll"]
    return {
        "gap_recovered_log": (rounded["nll"] - recovered["nll"]) / gap if gap else float("nan"),
        "kl_recovered": 1 - recovered["kl"] / rounded["kl"] if rounded["kl"] else float("nan"),
    }
