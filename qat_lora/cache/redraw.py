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

from qat_lora.cache.uniforms import row_uniforms


class _Row(NamedTuple):
    input_ids: np.ndarray
    doc_starts: np.ndarray


def redraw(
    draws: np.ndarray,
    dropped_ids: np.ndarray,
    dropped_log_probs: np.ndarray,
    log_tail: np.ndarray,
    row: tuple[np.ndarray, np.ndarray],
    seed: int,
) -> None:
    """Turn draws from the tail behind K entries into draws from the tail behind the first k, in place.

    Args:
        draws: int32 [L-1, D], as stored.
        dropped_ids: entries k..K of the head, [L-1, K-k].
        dropped_log_probs: their log probabilities.
        log_tail: log probability of the stored tail, [L-1].
        row: the row's `input_ids` and `doc_starts`.
        seed: of the cache.
    """
    positions, count = draws.shape
    dropped = dropped_ids.shape[1]
    masses = np.concatenate([np.exp(dropped_log_probs), np.exp(log_tail.astype(np.float64))[:, None]], axis=1)
    ends = np.cumsum(masses, axis=1)
    name = f"tail_draws/{dropped}"
    uniforms = row_uniforms(seed, name, [_Row(*row)], 1, positions + 1, count)[0, ..., 0].astype(np.float64)
    for number in range(count):
        reached = (ends <= uniforms[:, number, None] * ends[:, -1:]).sum(axis=1)
        hit = np.minimum(reached, dropped - 1)
        entry = np.take_along_axis(dropped_ids, hit[:, None], axis=1)[:, 0]
        draws[:, number] = np.where(reached < dropped, entry, draws[:, number])
