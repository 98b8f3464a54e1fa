"""Sums over a text, row by row, and the figures that follow from them, with their uncertainty.

Every figure is a function of sums over tokens (of the loss, of the KL, of calibration bins), so a row of text is one
line of sums, and resampling rows is one matrix product: a thousand bootstrap draws cost less than a forward. Rows are
drawn, not tokens, since tokens of a row depend on each other and intervals over tokens would be several times too
narrow. All models are drawn with the same rows: two students share the difficulty of the text, so the interval of their
*difference* is far narrower than their own intervals suggest.

Calibration is the expected calibration error of Guo et al. 2017 (arXiv:1706.04599): the probability of the top-1 token
against how often it is right, in 15 bins of equal width.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

BINS = 15
COLUMNS = 4 + 3 * BINS  # tokens, loss, KL, same top-1; then by bin: tokens, confidence, tokens predicted right
_COUNT, _CONFIDENCE, _RIGHT = (slice(4 + i * BINS, 4 + (i + 1) * BINS) for i in range(3))
SHARE = 0.95  # of the resampled values that an interval holds
_DRAWN_AT_ONCE = 1 << 22  # numbers of resampling weights held


class Tally(NamedTuple):
    """Sums over the tokens that count, float64 [rows, COLUMNS]; rows without such a token are left out."""

    rows: np.ndarray

    @property
    def figures(self) -> dict[str, Any]:
        """The figures over all rows (see `figures`), and how many tokens count."""
        sums = self.rows.sum(0)
        return {name: value.item() for name, value in figures(sums).items()} | {"tokens": int(sums[0])}

    @property
    def calibration(self) -> dict[str, list[float | None]]:
        """By bin: tokens, mean confidence and share predicted right, None where a bin is empty."""
        sums = self.rows.sum(0)
        counts = sums[_COUNT]

        def means(part: slice) -> list[float | None]:
            return [float(s / n) if n else None for s, n in zip(sums[part], counts, strict=True)]

        return {"tokens": counts.tolist(), "confidence": means(_CONFIDENCE), "accuracy": means(_RIGHT)}


def join(tallies: list[Tally]) -> Tally:
    """Return the rows of several texts as one tally."""
    return Tally(np.concatenate([tally.rows for tally in tallies]))


def add_up(row_N: np.ndarray, values_FN: np.ndarray, rows: int) -> np.ndarray:
    """Return sums by row of N positions: loss, KL, same top-1, confidence, whether the top-1 is right."""
    loss, kl, same, confidence, right = values_FN.astype(np.float64)
    sums = np.zeros((rows, COLUMNS))
    for column, weights in enumerate((None, loss, kl, same)):
        sums[:, column] = np.bincount(row_N, weights, rows)
    bins = np.clip(np.nan_to_num(confidence) * BINS, 0, BINS - 1).astype(np.int64)
    for part, weights in ((_COUNT, None), (_CONFIDENCE, confidence), (_RIGHT, right)):
        sums[:, part] = np.bincount(row_N * BINS + bins, weights, rows * BINS).reshape(rows, BINS)
    return sums


def figures(sums: np.ndarray) -> dict[str, np.ndarray]:
    """Return the figures that follow from sums [..., COLUMNS]: nll, ppl, kl (nats), top1, accuracy, ece (shares)."""
    tokens = sums[..., 0]
    nll = sums[..., 1] / tokens
    with np.errstate(over="ignore"):
        ppl = np.exp(nll)
    ece = np.abs(sums[..., _CONFIDENCE] - sums[..., _RIGHT]).sum(-1) / tokens
    found = {"nll": nll, "ppl": ppl, "kl": sums[..., 2] / tokens, "top1": sums[..., 3] / tokens}
    return found | {"accuracy": sums[..., _RIGHT].sum(-1) / tokens, "ece": ece}


def bootstrap(texts: Sequence[Mapping[str, Tally]], resamples: int, seed: int) -> dict[str, dict[str, np.ndarray]]:
    """Return figures of resampled rows, arrays [resamples], by model and name; each text keeps its number of rows."""
    draw = np.random.default_rng(seed)
    sums = {name: np.zeros((resamples, COLUMNS)) for name in texts[0]}
    for tallies in texts:
        rows = len(next(iter(tallies.values())).rows)
        at_once = max(1, _DRAWN_AT_ONCE // rows)
        for start in range(0, resamples, at_once):
            count = min(at_once, resamples - start)
            weights = draw.multinomial(rows, np.full(rows, 1 / rows), count).astype(np.float64)
            for name, tally in tallies.items():
                sums[name][start : start + count] += weights @ tally.rows
    return {name: figures(of) for name, of in sums.items()}


def interval(values: np.ndarray) -> list[float]:
    """Return the limits of the middle 95 % of values."""
    low, high = np.quantile(values, [(1 - SHARE) / 2, (1 + SHARE) / 2])
    return [float(low), float(high)]


def pairs(
    tallies: Mapping[str, Tally], drawn: Mapping[str, Mapping[str, np.ndarray]], students: list[str]
) -> list[dict[str, Any]]:
    """Return, for every two students, the second's figures less the first's; `clear`: paired limits leave out 0."""
    found = []
    for first, second in itertools.combinations(students, 2):
        line: dict[str, Any] = {"first": first, "second": second}
        for name in ("kl", "nll", "top1"):
            limits = interval(drawn[second][name] - drawn[first][name])
            difference = tallies[second].figures[name] - tallies[first].figures[name]
            line[name] = {"difference": difference, "interval": limits, "clear": limits[0] > 0 or limits[1] < 0}
        found.append(line)
    return found
