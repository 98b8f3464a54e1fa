"""A KD cache as training data: the rows of each step, in the order that `qat_lora.data.shuffle` computes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from qat_lora.cache.format.codec import OPTIONAL
from qat_lora.cache.format.lm_head import read_lm_head
from qat_lora.cache.format.records import Manifest
from qat_lora.cache.read.reader import CacheReader, check_request
from qat_lora.cache.storage.location import Place
from qat_lora.cache.storage.store import Progress
from qat_lora.data import shuffle as order
from qat_lora.errors import CacheError
from qat_lora.types import Batch, LMHead, VerifyRows


class KDCacheDataset:
    """A KD cache as training data.

    Args:
        path: the cache folder, or a URL such as gs://bucket/cache, as text.
        preload: keep the encoded shards in memory; otherwise rows are read from the files.
        k: serve the first k of K entries; the others join the tail. The cached tail draws are from behind all K, so
            `rows` refuses to serve them where k < K, unless `leave_out_all_but` left them out.
        split: `train` or `eval`.
        temperatures: at which `lse` and `log_tail` are served; each must be in the cache.
        verify: check every shard's sha256 when opening.
        verify_rows: which rows are compared with their CRC-32 as they are read: `all`, `sampled` (one of 16) or `off`.
        progress: called with (shard, bytes) while checking.

    Raises:
        CacheError: no finished cache, a split without rows, a k or temperature that is not there.
        CacheDamaged: bytes are not what was written; the shard is named. Reading rows raises it too, and names the row.
    """

    def __init__(
        self,
        path: Place,
        preload: bool = False,
        k: int | None = None,
        split: str = "train",
        temperatures: Sequence[float] = (1.0,),
        *,
        verify: bool = True,
        verify_rows: VerifyRows = "all",
        progress: Progress | None = None,
    ) -> None:
        if split not in ("train", "eval"):
            raise CacheError(f"split: {split!r} is unknown; allowed: train, eval")
        self._reader = CacheReader(path, verify, preload=preload, verify_rows=verify_rows, progress=progress)
        self.path = self._reader.path
        self.split = split
        self.temperatures = tuple(temperatures)
        self._optional: tuple[str, ...] = OPTIONAL
        self.k = check_request(self._reader.fingerprint, k, self.temperatures)
        if not len(self):
            raise CacheError(f"{path}: has no rows in the {split} split; build it with --eval-rows to have one")

    @property
    def manifest(self) -> Manifest:
        """What the cache says about itself."""
        return self._reader.manifest

    def leave_out_all_but(self, optional: Sequence[str]) -> None:
        """Serve, of the arrays that a cache has on request only (`codec.OPTIONAL`), just these from now on."""
        self._optional = tuple(optional)

    def __len__(self) -> int:
        return self._reader.rows(self.split)

    def rows(self, indices: Sequence[int] | np.ndarray) -> Batch:
        """Return rows as numpy arrays (see `types.Batch`), in the order asked; -1 gives a fully masked row."""
        return self._reader.read(self.split, indices, self.k, self.temperatures, self._optional)

    def teacher_lm_head(self) -> LMHead:
        """Return the teacher's output head, tensors on the CPU, for a cache that was built with `--hidden`.

        Raises:
            CacheError: the cache holds no hidden states.
            CacheDamaged: the file is not what was written.
        """
        return read_lm_head(self._reader.path, self._reader.fingerprint)

    def steps_per_epoch(self, global_batch_rows: int) -> int:
        """Return the steps in which every row is seen once."""
        return order.steps_per_epoch(len(self), global_batch_rows)

    def global_batch(self, step: int, global_batch_rows: int, seed: int) -> np.ndarray:
        """Return the row numbers of a step, int64 [global_batch_rows], padded with -1 at an epoch's end."""
        if global_batch_rows < 1 or step < 0:
            raise CacheError(f"global batch: {global_batch_rows} rows at step {step}; allowed: 1 or more, from step 0")
        return order.global_batch(len(self), step, global_batch_rows, seed)

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
        """Yield this replica's micro-batches: `accumulation` for each of `steps` steps (`order.micro_batches`)."""
        rows = len(self)
        for micro in order.micro_batches(rows, start_step, steps, batch_rows, accumulation, seed, replica, replicas):
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
                f"{held.vocab_size:,}; allowed: as many or more: build the cache with --vocab-size {vocab_size}"
            )
        if max_positions is not None and max_positions < held.length:
            raise CacheError(
                f"length: rows have {held.length:,} tokens, the student reads at most {max_positions:,}; build a "
                f"cache with --length {max_positions} or less"
            )
