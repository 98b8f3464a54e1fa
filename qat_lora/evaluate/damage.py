"""How a student's damage is spread over tokens and documents: a mean can hide few ruined positions among good ones.

The figures are defined as those of `llama-perplexity --kl-divergence`: quantiles of KL interpolated between sorted
values, the share of changed top-1 tokens, and Δp, the student's probability of the text's token less the teacher's.
(llama.cpp scores the second half of windows that ignore documents, against log-probabilities rounded to 16 bits:
`benchmarks/llama_kld.py` compares.) A quantile needs all values, so the host keeps four float32 a token and student.
"""

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from qat_lora.data.packing import PackedRow

WORST = 10  # tokens and documents that are named
CONTEXT = 32  # tokens shown before one
PERCENTILES = {f"{percent:g}": percent for percent in (0.1, 1, 5, 10, 90, 95, 99, 99.9)}
PERCENTILES |= {"smallest": 0, "median": 50, "largest": 100}
Line = tuple[float, ...]  # KL, row, position, the teacher's top-1 token and its probability, the student's


class Damage:
    """The rows of one text, and what `observe` gets from `score.measure` on their tokens."""

    def __init__(self, rows: Iterable[PackedRow], names: Sequence[str]) -> None:
        """Take rows as they are made, while the list of their documents' names grows; [] where rows ignore them."""
        self.rows, self.names, first, numbers = list[PackedRow](), names, 0, []
        for row in rows:
            inside_L = np.cumsum(row.doc_starts) - 1
            # A packed row has the number of the next one's first document; a window is of the newest document.
            numbers.append(first + inside_L if row.cursor else np.full_like(inside_L, len(names) - 1))
            self.rows.append(row)
            first = row.cursor.get("document", 0)
        self._document_RL = np.array(numbers, np.int32)  # of every token, its document's number; -1: none
        self._parts: list[np.ndarray] = []
        self.worst: list[list[Line]] = []  # of each student

    def observe(self, row_N: np.ndarray, position_N: np.ndarray, values_MFN: np.ndarray) -> None:
        """Take the numbers of N tokens, the teacher's first; token `position` + 1 is the one predicted."""
        loss, kl, same, p, _, top1 = values_MFN.swapaxes(0, 1)
        change = np.exp(-loss[1:]) - np.exp(-loss[:1])
        document = np.broadcast_to(self._document_RL[row_N, position_N + 1].astype(np.float32), change.shape)
        self._parts.append(np.stack([kl[1:], change, 1 - same[1:], document], 1))
        self.worst = self.worst or [[] for _ in change]
        for i, found in enumerate(self.worst, 1):
            lines = (kl[i], row_N, position_N, top1[0], p[0], top1[i], p[i])
            at_N = np.argsort(kl[i])[-WORST:]
            found[:] = heapq.nlargest(WORST, [*found, *zip(*(line[at_N].tolist() for line in lines), strict=True)])

    def values(self, student: int) -> np.ndarray:
        """Return a student's KL, Δp, changed top-1 (0 or 1) and document of every token, float64 [4, N]."""
        return np.concatenate([part[student] for part in self._parts], 1).astype(np.float64)

    def by_document(self, student: int) -> list[dict[str, Any]]:
        """Return name, tokens, mean KL and share of changed top-1 of every document; [] where rows ignore documents."""
        kl, _, changed, document = self.values(student)
        if not self.names:
            return []
        lines = zip(*(np.bincount(document.astype(int), x).tolist() for x in (None, kl, changed)), strict=True)
        found = zip(self.names, lines, strict=False)  # documents behind the last row have no line
        return [{"document": name, "tokens": n, "kl": x / n, "changed_top1": c / n} for name, (n, x, c) in found if n]

    def in_context(self, line: Line, decode: Callable[[Sequence[int]], str]) -> dict[str, Any]:
        """Return one of `worst` with the text before it, what follows there, and what the models would say."""
        kl, number, position, teacher, teacher_p, student, student_p = line
        row, at = self.rows[int(number)], int(position) + 1
        before = row.input_ids[max(row.doc_starts[:at].nonzero()[0][-1], at - CONTEXT) : at].tolist()
        shown, tokens = decode(before), {"token": row.input_ids[at], "teacher": teacher, "student": student}
        # Decoded alone, a token of some tokenizers loses its space.
        said = {name: decode([*before, int(token)])[len(shown) :] for name, token in tokens.items()}
        name = self.names[self._document_RL[int(number), at]] if self.names else None
        return {"document": name, "before": shown, **said, "teacher_p": teacher_p, "student_p": student_p, "kl": kl}


def damage_report(
    students: Sequence[str], texts: Mapping[str, Damage], decode: Callable[[Sequence[int]], str]
) -> dict[str, dict[str, Any]]:
    """Return how each student's damage is spread over all texts; its keys are in `report.SCHEMA`."""
    found = {}
    for i, name in enumerate(students):
        kl, change, changed, _ = np.concatenate([of.values(i) for of in texts.values()], 1)
        documents = [{"text": text} | line for text, of in texts.items() for line in of.by_document(i)]
        documents.sort(key=lambda line: -line["kl"])
        means = [line["kl"] for line in documents]
        worst = heapq.nlargest(WORST, [(line, text) for text, of in texts.items() for line in of.worst[i]])
        apart = {"count": len(documents), "kl": quantiles(means) if means else None, "worst": documents[:WORST]}
        of_change = {"mean": float(change.mean()), "rms": float(np.sqrt((change**2).mean())), **quantiles(change)}
        found[name] = {"kl": quantiles(kl), "changed_top1": float(changed.mean()), "delta_p": of_change}
        found[name]["documents"] = apart
        found[name]["worst_tokens"] = [{"text": t} | texts[t].in_context(line, decode) for line, t in worst]
    return found


def quantiles(values: np.ndarray | list[float]) -> dict[str, float]:
    """Return the `PERCENTILES` of values by their names."""
    return dict(zip(PERCENTILES, np.percentile(values, list(PERCENTILES.values())).tolist(), strict=True))
