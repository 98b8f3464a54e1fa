"""A KD cache that others join while a run goes on: rows of a text, and later rows that the student wrote.

From its step on, rows of a later cache replace a share of each step's. So the order is a pure function of the step here
too: a run resumes at any of them, and up to the first later cache it is the run without.
"""

from collections.abc import Sequence

import numpy as np

from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.config import option, settings
from qat_lora.data.shuffle import Indices, global_batch
from qat_lora.errors import CacheError, ConfigError
from qat_lora.types import Batch


@settings
class LaterConfig:
    """Which caches join the first one, and when."""

    later_caches: tuple[str, ...] = option((), "caches as PATH@STEP, read after that step", unit="list")
    later_share: float = option(0.25, "share of a step's rows that are the newest later cache's", above=0, max=1)

    def __post_init__(self) -> None:
        if (steps := [-1, *(step for _, step in self.parsed)]) != sorted(set(steps)):
            raise ConfigError(f"later_caches: {','.join(self.later_caches)}; allowed: PATH@STEP, steps rising")

    @property
    def parsed(self) -> list[tuple[str, int]]:
        """The caches with the steps after which they join."""
        parts = [text.rpartition("@") for text in self.later_caches]
        return [(path, int(step) if path and step.isdecimal() else -1) for path, _, step in parts]


class MixedCaches(KDCacheDataset):
    """A KD cache, opened like one, with rows of others in its `batches`; these are numbered behind its own."""

    _later: tuple[tuple[int, int, KDCacheDataset, float], ...] = ()  # steps before it, rows before its, it, its share

    def join(self, later: LaterConfig, until: int) -> None:
        """Open the caches that join before a step; CacheError: one has not the arrays, or the teacher, of this."""
        first = len(self)
        for path, step in (joined for joined in later.parsed if joined[1] < until):  # the others need not be there
            how = {"temperatures": self.temperatures, "verify_rows": self._verify_rows}
            found = KDCacheDataset(path, self._preload, self.k or None, **how)  # type: ignore[arg-type]
            for name in ("teacher_sha256", "tokenizer_sha256", "contents"):
                if getattr(found.fingerprint, name) != getattr(self.fingerprint, name):
                    raise CacheError(f"later_caches: {path} has another {name} than {self.path}; build it alike")
            self._later, first = (*self._later, (step, first, found, later.later_share)), first + len(found)

    def rows(self, indices: Indices, k: int | None = None, optional: Sequence[str] | None = None) -> Batch:
        """Return rows of all caches as `KDCacheDataset.rows` does."""
        k, optional = self.k if k is None else k, self._optional if optional is None else optional
        own, parts = np.array(indices, np.int64), []
        for _, first, dataset, _ in self._later:
            at = np.flatnonzero((own >= first) & (own < first + len(dataset)))
            parts.append((at, dataset.rows(own[at] - first, k, optional)))
            own[at] = -1
        batch = super().rows(own, k, optional)
        for at, part in parts:
            for name, values in part.items():
                batch[name][at] = values
        return batch

    def order(self, step: int, global_batch_rows: int, seed: int) -> np.ndarray:
        """Return the row numbers of a step, the last ones those of the newest cache that has joined."""
        order = super().order(step, global_batch_rows, seed)
        for begin, first, dataset, share in [joined for joined in self._later if joined[0] <= step][-1:]:
            rows = global_batch(len(dataset), step - begin, max(1, round(share * global_batch_rows)), seed)
            order[-len(rows) :] = np.where(rows < 0, -1, rows + first)
        return order
