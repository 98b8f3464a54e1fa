"""Draws from a larger tail: what a cache's draws become when fewer than K head entries are served.

The stored draws are from the tail behind K entries. With the first k alone as head, the entries k..K join the tail, and
none of the stored draws ever is one of them; weighted as draws from the larger tail they would be biased. So each
draw is made again, exactly: with an entry's share of the larger tail it becomes that entry, otherwise it stays.
(Drawing all of them anew would need the teacher.) The numbers that decide depend on the cache's seed, k and the row's
tokens alone, as those of the build do: a row's draws are the same in every epoch, run and replica.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from qat_lora.cache.build.uniforms import row_uniforms


class _Row(NamedTuple):
    input_ids: np.ndarray
    doc_starts: np.ndarray


def redraw_uniforms(row: tuple[np.ndarray, np.ndarray], seed: int, dropped: int, draws: int) -> np.ndarray:
    """Return the numbers that decide, float32 [L-1, draws] in [0, 1).

    Args:
        row: the row's `input_ids` and `doc_starts`.
        seed: of the cache.
        dropped: K - k.
        draws: D.
    """
    return row_uniforms(seed, f"tail_draws/{dropped}", [_Row(*row)], 1, len(row[0]), draws)[0, ..., 0]


def redraw(
    draws: np.ndarray,
    dropped_ids: np.ndarray,
    dropped_log_probs: np.ndarray,
    log_tail: np.ndarray,
    uniforms: np.ndarray,
) -> None:
    """Turn draws from the tail behind K entries into draws from the tail behind the first k, in place.

    Args:
        draws: int32 [N, D], as stored, of some positions.
        dropped_ids: entries k..K of the head, [N, K-k].
        dropped_log_probs: their log probabilities.
        log_tail: log probability of the stored tail, [N].
        uniforms: of these positions, from `redraw_uniforms`.
    """
    positions, count = draws.shape
    dropped = dropped_ids.shape[1]
    # Entries before positions: then sums and comparisons run over whole vectors.
    ends_EN = np.empty((dropped + 1, positions))
    ends_EN[:-1] = np.exp(dropped_log_probs).T
    np.exp(log_tail, out=ends_EN[-1], dtype=np.float64)
    np.cumsum(ends_EN, axis=0, out=ends_EN)
    chosen_DN = uniforms.T * ends_EN[-1]
    few = np.min_scalar_type(dropped)
    for number in range(count):
        reached = (ends_EN[:-1] <= chosen_DN[number]).sum(axis=0, dtype=few)
        moved = np.flatnonzero(reached < dropped)
        draws[moved, number] = dropped_ids[moved, reached[moved]]
