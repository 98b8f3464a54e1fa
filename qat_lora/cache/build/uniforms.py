"""The random numbers behind drawn tokens: a pure function of a seed, a name and a row's tokens.

Not of the row's number, since several builders count their own rows; not of a generator's state, since a resumed
build would have to replay it. NumPy only, because the reader needs them too (`redraw`) and must not need torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Protocol

import numpy as np


class Tokens(Protocol):
    """What tells one row from another."""

    @property
    def input_ids(self) -> np.ndarray:
        """int32 [L]."""

    @property
    def doc_starts(self) -> np.ndarray:
        """Boolean [L]."""


def row_uniforms(seed: int, name: str, rows: Sequence[Tokens], batch_rows: int, length: int, draws: int) -> np.ndarray:
    """Return the random numbers of some rows: float32 [batch_rows, L-1, draws, 2] in [0, 1); rows not given get 0.

    Args:
        seed: of the cache.
        name: of the array that is drawn, so that two arrays have independent draws.
        rows: at most `batch_rows`; equal rows get equal numbers.
        batch_rows: rows of a forward.
        length: L.
        draws: D.
    """
    numbers = np.zeros((batch_rows, length - 1, draws, 2), np.float32)
    for place, row in enumerate(rows):
        tokens = row.input_ids.astype("<i4").tobytes() + row.doc_starts.astype("u1").tobytes()
        key = np.frombuffer(hashlib.sha256(f"{seed}/{name}/".encode() + tokens).digest()[:16], "<u8")
        raw = np.random.Philox(key=key).random_raw(numbers[place].size)  # NumPy keeps raw streams as they are
        numbers[place] = ((raw >> np.uint64(40)) * 2.0**-24).reshape(numbers[place].shape)
    return numbers
