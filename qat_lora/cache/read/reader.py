"""Opens a finished cache and turns row numbers into batches.

Everything is checked before the first row is served: manifest and sidecar seals, names, sizes, and by default the
sha256 of every shard (1 to 2 GB/s), since a flipped bit reads as a slightly different teacher and no training run
would notice. After that, a row is read, compared with its CRC-32 and decoded on demand: a cache may be larger than
memory, and one that changes during a run of days is an error that names shard and row (`shard`).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence

import numpy as np

from qat_lora.cache.format import layout as fmt
from qat_lora.cache.format.codec import OPTIONAL, decode_row, empty_batch, mask_row, strange_ids
from qat_lora.cache.format.lm_head import check_lm_head
from qat_lora.cache.format.records import Fingerprint, ShardEntry
from qat_lora.cache.read.shard import Shard, most_open, open_shard
from qat_lora.cache.storage.location import Place, locate
from qat_lora.cache.storage.store import Progress, at_once, check_entry, in_turns, read_manifest
from qat_lora.errors import CacheDamaged, CacheError
from qat_lora.types import Batch, VerifyRows

_SAMPLED = 16
"""One row of so many is compared with its CRC-32 where rows are `sampled`."""


class CacheReader:
    """A finished cache, opened for reading.

    Args:
        path: the cache folder or URL.
        verify: check the sha256 of every shard now. Without it, only names, sizes, seals and headers are checked;
            from behind a URL, shards then come (and are checked) when they are first needed.
        preload: keep the encoded shards in memory instead of reading rows from the files.
        verify_rows: which rows are compared with their CRC-32 as they are read.
        progress: called with (shard, bytes) while checking.

    Raises:
        CacheError: no manifest, or another format version.
        CacheDamaged: a file is missing or is not what was written; the shard is named.
    """

    def __init__(
        self,
        path: Place,
        verify: bool = True,
        *,
        preload: bool = False,
        verify_rows: VerifyRows = "all",
        progress: Progress | None = None,
    ) -> None:
        self.path = locate(path)
        self.manifest = read_manifest(self.path)
        self.fingerprint = self.manifest.fingerprint
        check_lm_head(self.path, self.fingerprint, whole=verify)
        self._preload = preload
        self._check_every = {"all": 1, "sampled": _SAMPLED, "off": 0}[verify_rows]
        self._served = 0
        self._spare: list[dict[str, np.ndarray]] = []
        self._shards: OrderedDict[tuple[str, int], Shard] = OrderedDict()
        self._ends: dict[str, np.ndarray] = {}
        tell = in_turns(progress)

        def check(entry: ShardEntry) -> Shard | None:
            check_entry(self.path, entry, self.fingerprint)
            if self.path.far and not (verify or preload):
                return None
            shard = open_shard(self.path, entry, self.fingerprint, preload=preload)
            if verify:
                shard.check_sha256(tell)
            return shard if preload else None

        threads = None if verify or self.path.far else 1  # several have nothing to wait for
        for split in fmt.SERIES:
            entries = self.manifest.shards(split)
            for number, shard in enumerate(at_once(self.path, check, entries, threads)):
                if shard is not None:
                    self._shards[split, number] = shard
            self._ends[split] = np.cumsum([entry.rows for entry in entries], dtype=np.int64)

    def _shard(self, split: str, number: int) -> Shard:
        """Return a shard, opened if it is not; of the open ones the least recently used is closed at some number."""
        key = (split, number)
        if key not in self._shards:
            while len(self._shards) >= most_open():
                self._shards.popitem(last=False)
            self._shards[key] = open_shard(self.path, self.manifest.shards(split)[number], self.fingerprint)
        self._shards.move_to_end(key)
        return self._shards[key]

    def rows(self, split: str) -> int:
        """Return the number of rows of a split."""
        ends = self._ends[split]
        return int(ends[-1]) if len(ends) else 0

    def read(
        self,
        split: str,
        indices: Sequence[int] | np.ndarray,
        k: int | None,
        temperatures: Sequence[float],
        optional: Container[str] = OPTIONAL,
    ) -> Batch:
        """Decode rows, in the order asked; index -1 gives a fully masked row, an optional array not named is left out.

        Raises:
            CacheError: a row that is not there, k outside 1..K, a temperature that is not stored, tail draws and k < K.
            CacheDamaged: a row is not what was written, or speaks of tokens outside the vocabulary.
        """
        fingerprint = self.fingerprint
        k = check_request(fingerprint, k, temperatures)
        if k < fingerprint.top_k and "tail_draw_ids" in optional and (draws := fingerprint.contents.tail_draws):
            raise CacheError(
                f"k: the cache's draws are from the tail behind {fingerprint.top_k} entries, so they cannot be used "
                f"with {k} of them; leave --head-k out, give --estimator ghost, or build a cache with --top-k {k} "
                f"--tail-draws {draws}"
            )
        wanted = np.asarray(indices, np.int64)
        if wanted.ndim != 1 or ((wanted < -1) | (wanted >= self.rows(split))).any():
            raise CacheError(f"rows: {wanted.tolist()!r}; allowed: 0 to {self.rows(split) - 1}, or -1 for padding")
        batch = empty_batch(len(wanted), fingerprint, k, temperatures, optional)
        ends = self._ends[split]
        arrays = self._spare.pop() if self._spare else None
        for place, (row, shard) in enumerate(zip(wanted, np.searchsorted(ends, wanted, side="right"), strict=True)):
            out = {name: array[place] for name, array in batch.items()}
            if row < 0:
                mask_row(fingerprint, k, temperatures, out)
                continue
            inside = int(row - ends[shard]) + self.manifest.shards(split)[shard].rows
            self._served += 1
            check = self._check_every > 0 and self._served % self._check_every == 0
            try:
                opened = self._shard(split, int(shard))
            except CacheDamaged as error:
                raise CacheDamaged(f"{error}; its row {inside} was wanted") from None
            arrays = opened.rows(inside, check=check, into=arrays)
            decode_row({name: array[0] for name, array in arrays.items()}, fingerprint, k, temperatures, out)
            if wrong := strange_ids(out, fingerprint.vocab_size):
                name = self.manifest.shards(split)[shard].shard
                raise CacheDamaged(f"{self.path}/{name}: row {inside} has {wrong}; restore the shard from a copy")
        if arrays is not None:
            self._spare.append(arrays)
        return batch


def check_request(fingerprint: Fingerprint, k: int | None, temperatures: Sequence[float]) -> int:
    """Return the k to serve; 0 where there is no head, and then any temperature will do.

    Raises:
        CacheError: k outside 1..K, or a temperature that is not stored.
    """
    if not fingerprint.top_k:
        if k:
            raise CacheError(f"k: {k} entries were asked for; this cache holds hidden states and no head: give no k")
        return 0
    k = fingerprint.top_k if k is None else k
    if not 1 <= k <= fingerprint.top_k:
        raise CacheError(f"k: {k} entries were asked for; allowed: 1 to {fingerprint.top_k}, what the cache holds")
    for temperature in temperatures:
        if temperature not in fingerprint.temperatures:
            held = ", ".join(f"{t:g}" for t in fingerprint.temperatures)
            raise CacheError(
                f"temperature: {temperature:g} is not in the cache, which holds {held}; the tail at another "
                f"temperature cannot be computed from it: train at one of these, or build with --temperatures "
                f"{held.replace(', ', ',')},{temperature:g}"
            )
    return k
