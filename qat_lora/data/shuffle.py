"""The order in which rows are trained on: a pure function of seed, epoch and step.

There is no iterator state to save or to lose: the global batch of step 41,000 is computed, not replayed, so a run
resumes at any step at once, with another number of replicas if need be. Loaders that shuffle through a buffer or split
files among workers can do neither, and repeat or drop rows when counts do not divide; here an epoch's last global batch
is filled with row -1 (fully masked), so every row counts exactly once and no shape ever changes.

The order is a keyed bijection of 0..N-1 (a Feistel network with cycle walking), evaluated only at the rows of the
batch: a stored permutation of ten million rows would cost 80 MB and a second per process and epoch, and NumPy does not
promise that its shuffles stay the same between releases.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from qat_lora.errors import ConfigError
from qat_lora.types import Batch

_ROUNDS = 8
FULL_WITHIN = 4  # steps of which one is full, unless none is: two epochs' ends may fall on two steps of mixed caches
Indices = Sequence[int] | np.ndarray  # numbers of rows; -1 for a fully masked one
Order = Callable[[int, int, int], np.ndarray]  # step, rows of it, seed -> the numbers of its rows


def _mix(values: np.ndarray) -> np.ndarray:
    """Return one step of splitmix64; an array, since NumPy warns where a single number wraps round."""
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


def permuted(positions: np.ndarray, rows: int, seed: int, epoch: int) -> np.ndarray:
    """Return which row stands at each position of an epoch: a bijection of 0..rows-1, keyed by (seed, epoch)."""
    half = np.uint64(max(1, -(-(rows - 1).bit_length() // 2)))
    low = np.uint64((1 << int(half)) - 1)
    key = _mix(_mix(np.array([seed % 2**64], np.uint64)) ^ np.uint64(epoch))
    keys = [key := _mix(key) for _ in range(_ROUNDS)]
    result = np.asarray(positions, np.uint64).copy()
    outside = np.ones(len(result), bool)
    while outside.any():  # the network permutes 0..4^half-1; walk until back among the rows
        left, right = result[outside] >> half, result[outside] & low
        for round_key in keys:
            left, right = right, left ^ (_mix(right ^ round_key) & low)
        result[outside] = left << half | right
        outside = result >= rows
    return result.astype(np.int64)


def steps_per_epoch(rows: int, global_batch_rows: int) -> int:
    """Return the steps in which every row is seen once."""
    return -(-rows // global_batch_rows)


def global_batch(rows: int, step: int, global_batch_rows: int, seed: int) -> np.ndarray:
    """Return the row numbers of a step, int64 [global_batch_rows], padded with -1 at an epoch's end."""
    epoch, within = divmod(step, steps_per_epoch(rows, global_batch_rows))
    start = within * global_batch_rows
    positions = np.arange(start, min(start + global_batch_rows, rows))
    batch = np.full(global_batch_rows, -1, np.int64)
    batch[: len(positions)] = permuted(positions, rows, seed, epoch)
    return batch


def micro_batches(
    of: int | Order, start: int, steps: int, batch_rows: int, accumulation: int, seed: int, replica: int, replicas: int
) -> Iterator[np.ndarray]:
    """Yield the numbers of rows, so many or in an `Order`, of a replica's micro-batches from step `start` on.

    The global batch has batch_rows · accumulation · replicas rows, in an order that does not depend on how that
    product is made up; micro-batch a of replica r takes its rows [(a · replicas + r) · batch_rows, +batch_rows).
    ConfigError: a replica that does not exist.
    """
    if not 0 <= replica < replicas:
        raise ConfigError(f"replica: {replica} of {replicas}; allowed: 0 to {replicas - 1}")
    for step in range(start, start + steps):
        size = batch_rows * accumulation * replicas
        order = global_batch(of, step, size, seed) if isinstance(of, int) else of(step, size, seed)
        yield from order.reshape(accumulation, replicas, batch_rows)[:, replica]


def holding_out(order: Order, rows: int, at: int) -> Order:
    """Return an order whose step `at` measures: row -1 takes the place of its rows in all other steps.

    These are the rows of the fullest step from `at` on, since an epoch's last one may have few. They are at most half
    of all `rows`, or those of a small source would leave nothing to train on; a single row is in all steps.
    """

    def real_rows(numbers: np.ndarray) -> int:
        return int(np.count_nonzero(numbers >= 0))

    def without(step: int, global_batch_rows: int, seed: int) -> np.ndarray:
        later = range(at, at + FULL_WITHIN)
        measured = max((order(number, global_batch_rows, seed) for number in later), key=real_rows)
        measured[np.flatnonzero(measured >= 0)[max(1, rows // 2) :]] = -1
        if step == at:
            return measured
        numbers = order(step, global_batch_rows, seed)
        return np.where(np.isin(numbers, measured), -1, numbers) if rows > 1 else numbers

    return without


class ShuffledRows(ABC):
    """Rows by number, and their batches in this order."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def rows(self, indices: Indices) -> Batch:
        """Return rows as numpy arrays (see `types.Batch`), in the order asked; -1 gives a fully masked row."""

    def steps_per_epoch(self, global_batch_rows: int) -> int:
        """Return the steps in which every row is seen once."""
        return steps_per_epoch(len(self), global_batch_rows)

    def batches(
        self,
        start_step: int,
        steps: int,
        batch_rows: int,
        accumulation: int = 1,
        seed: int = 0,
        replica: int = 0,
        replicas: int = 1,
        held_out: int | None = None,
    ) -> Iterator[Batch]:
        """Yield this replica's micro-batches: `accumulation` for each of `steps` steps (`micro_batches`).

        `held_out` is a step whose rows the other steps do not get (`holding_out`).
        """
        order = self.order if held_out is None else holding_out(self.order, len(self), held_out)
        micro = micro_batches(order, start_step, steps, batch_rows, accumulation, seed, replica, replicas)
        return map(self.rows, micro)

    def order(self, step: int, global_batch_rows: int, seed: int) -> np.ndarray:
        """Return the row numbers of a step (`global_batch`)."""
        return global_batch(len(self), step, global_batch_rows, seed)
