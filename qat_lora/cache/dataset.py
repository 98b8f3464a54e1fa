"""Rows of a cache in training order: a pure function of seed, epoch and step.

There is no iterator state to save or to lose: the global batch of step 41,000 is computed, not replayed, so a
run resumes at any step at once, with another number of replicas if need be. Loaders that shuffle through a buffer
or split files among workers can do neither, and repeat or drop rows when counts do not divide; here the last
global batch of an epoch is filled with masked rows, so every row counts exactly once and no shape ever changes.

The order is a keyed bijection of 0..N-1 (a Feistel network with cycle walking), evaluated only at the rows of the
batch: a stored permutation of ten million rows would cost 80 MB and a second per process and epoch, and NumPy
does not promise that its shuffles stay the same between releases.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from qat_lora.cache.reader import CacheReader, check_request
from qat_lora.cache.records import Manifest
from qat_lora.cache.store import Progress
from qat_lora.errors import CacheError
from qat_lora.types import Batch

_ROUNDS = 8
_U64 = (1 << 64) - 1


def _mix(value: int) -> int:
    """One step of splitmix64 on a Python number."""
    value = (value + 0x9E3779B97F4A7C15) & _U64
    value = ((value ^ value >> 30) * 0xBF58476D1CE4E5B9) & _U64
    value = ((value ^ value >> 27) * 0x94D049BB133111EB) & _U64
    return value ^ value >> 31


def _mix_array(values: np.ndarray) -> np.ndarray:
    values = values + np.uint64(0x9E3779B97F4A7C15)
    values = (values ^ values >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ values >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return values ^ values >> np.uint64(31)


def permuted(positions: np.ndarray, rows: int, seed: int, epoch: int) -> np.ndarray:
    """Return which row stands at each position of an epoch: a bijection of 0..rows-1, keyed by (seed, epoch)."""
    half = np.uint64(max(1, -(-(rows - 1).bit_length() // 2)))
    low = np.uint64((1 << int(half)) - 1)
    key = _mix(_mix(seed & _U64) ^ epoch)
    keys = []
    for _ in range(_ROUNDS):
        key = _mix(key)
        keys.append(np.uint64(key))
    result = np.asarray(positions, np.uint64).copy()
    outside = np.ones(len(result), bool)
    while outside.any():  # the network permutes 0..4^half-1; walk until back among the rows
        left, right = result[outside] >> half, result[outside] & low
        for round_key in keys:
            left, right = right, left ^ (_mix_array(right ^ round_key) & low)
        result[outside] = left << half | right
        outside = result >= rows
    return result.astype(np.int64)


class KDCacheDataset:
    """A KD cache as training data.

    Args:
        path: the cache folder.
        preload: keep the encoded shards in memory; otherwise the files are mapped.
        k: serve the first k of K head entries; the rest joins the tail.
        split: `train` or `eval`.
        temperatures: at which `lse` and `log_tail` are served; each must be in the cache.
        verify: check every shard's sha256 when opening.
        progress: called with (shard, bytes) while checking.

    Raises:
        CacheError: no finished cache, a split without rows, a k or temperature that is not there.
        CacheDamaged: bytes are not what was written; the shard is named.
    """

    def __init__(
        self,
        path: str | Path,
        preload: bool = False,
        k: int | None = None,
        split: str = "train",
        temperatures: Sequence[float] = (1.0,),
        *,
        verify: bool = True,
        progress: Progress | None = None,
    ) -> None:
        if split not in ("train", "eval"):
            raise CacheError(f"split: {split!r} is unknown; allowed: train, eval")
        self._reader = CacheReader(path, verify, preload=preload, progress=progress)
        self.path = Path(path)
        self.split = split
        self.temperatures = tuple(temperatures)
        self.k = check_request(self._reader.fingerprint, k, self.temperatures)
        if not len(self):
            raise CacheError(f"{path}: has no rows in the {split} split; build it with --eval-rows to have one")

    @property
    def manifest(self) -> Manifest:
        """What the cache says about itself."""
        return self._reader.manifest

    def __len__(self) -> int:
        return self._reader.rows(self.split)

    def rows(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """Return rows as numpy arrays (see `types.Batch`), in the order asked; -1 gives a fully masked row."""
        return self._reader.read(self.split, indices, self.k, self.temperatures)

    def steps_per_epoch(self, global_batch_rows: int) -> int:
        """Return the steps in which every row is seen once."""
        return -(-len(self) // global_batch_rows)

    def global_batch(self, step: int, global_batch_rows: int, seed: int) -> np.ndarray:
        """Return the row numbers of a step, int64 [global_batch_rows], padded with -1 at an epoch's end."""
        if global_batch_rows < 1 or step < 0:
            raise CacheError(f"global batch: {global_batch_rows} rows at step {step}; allowed: 1 or more, from step 0")
        epoch, within = divmod(step, self.steps_per_epoch(global_batch_rows))
        start = within * global_batch_rows
        positions = np.arange(start, min(start + global_batch_rows, len(self)))
        batch = np.full(global_batch_rows, -1, np.int64)
        batch[: len(positions)] = permuted(positions, len(self), seed, epoch)
        return batch

    def batches(
        self,
        start_step: int,
        steps: int,
        batch_rows: int,
        accumulation: int = 1,
        seed: int = 0,
        replica: int = 0,
        replicas: int = 1,
    ) -> Iterator[Batch]:
        """Yield this replica's micro-batches: `accumulation` for each of `steps` steps, from `start_step` on.

        The global batch has batch_rows · accumulation · replicas rows, in an order that does not depend on how
        that product is made up; micro-batch a of replica r takes its rows
        [(a · replicas + r) · batch_rows, +batch_rows).
        """
        if not 0 <= replica < replicas:
            raise CacheError(f"replica: {replica} of {replicas}; allowed: 0 to {replicas - 1}")
        for step in range(start_step, start_step + steps):
            order = self.global_batch(step, batch_rows * accumulation * replicas, seed)
            for micro in order.reshape(accumulation, replicas, batch_rows)[:, replica]:
                yield self.rows(micro)

    def check_student(self, tokenizer_sha256: str | None, vocab_size: int, max_positions: int | None = None) -> None:
        """Check that a student can learn from this cache.

        Args:
            tokenizer_sha256: of the student's tokenizer; None if it is not known (then not compared).
            vocab_size: rows of the student's output head that are not padding.
            max_positions: longest row that the student can read; None for no limit.

        Raises:
            CacheError: names the field that does not fit.
        """
        held = self.manifest.fingerprint
        if tokenizer_sha256 is not None and tokenizer_sha256 != held.tokenizer_sha256:
            raise CacheError(
                f"tokenizer: the student's is {tokenizer_sha256[:16]}…, the cache {self.path} was made with "
                f"{held.tokenizer_sha256[:16]}…; token ids would mean other words: build a cache with a teacher "
                "that shares the student's tokenizer"
            )
        if vocab_size < held.vocab_size:
            raise CacheError(
                f"vocab_size: the student has {vocab_size:,} entries, the cache {self.path} speaks of "
                f"{held.vocab_size:,}; allowed: as many or more: build the cache for the student's vocabulary"
            )
        if max_positions is not None and max_positions < held.length:
            raise CacheError(
                f"length: rows have {held.length:,} tokens, the student reads at most {max_positions:,}; build a "
                f"cache with --length {max_positions} or less"
            )
