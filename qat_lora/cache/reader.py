"""Opens a finished cache and turns row numbers into batches.

Everything is checked before the first row is served: manifest and sidecar seals, names, sizes, and by default the
sha256 of every shard (1 to 2 GB/s), since a flipped bit in a memory-mapped safetensors file reads as a slightly
different teacher and no training run would notice. After that, shards are mapped and only the asked rows are
touched; a row is decoded when it is asked for, so a cache larger than memory costs no more than a small one.
"""

from __future__ import annotations

import functools
import hashlib
import math
import mmap
from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence

import numpy as np

from qat_lora.cache import format as fmt
from qat_lora.cache.codec import OPTIONAL, decode_row, empty_batch, mask_row
from qat_lora.cache.head import check_head
from qat_lora.cache.location import Location, Place, locate
from qat_lora.cache.records import Fingerprint, ShardEntry, strict_json
from qat_lora.cache.store import (
    Progress,
    at_once,
    check_loaded,
    check_shard_size,
    in_turns,
    read_manifest,
    read_sidecar,
)
from qat_lora.errors import CacheDamaged, CacheError
from qat_lora.types import Batch

_MAPPED_SHARDS = 256
"""Each mapping holds a file open, and processes may often open only 1,024."""


def check_header(data: bytes | memoryview, plan: fmt.Layout, where: str) -> None:
    """Compare a shard's safetensors header with the one that its fingerprint demands.

    Raises:
        CacheDamaged: the header is too long, no strict JSON, or describes other arrays.
    """
    if bytes(data[: len(plan.header)]) == plan.header:
        return
    size = int.from_bytes(bytes(data[:8]), "little")
    if len(data) < 8 or size > min(fmt.HEADER_LIMIT_BYTES, len(data) - 8):
        raise CacheDamaged(f"{where}: its header claims {size:,} bytes; allowed: 1 MB within the file")
    try:
        found = strict_json(bytes(data[8 : 8 + size]).decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise CacheDamaged(f"{where}: its header cannot be read ({error})") from None
    if found != strict_json(plan.header[8:].decode("ascii")) or 8 + size != len(plan.header):
        raise CacheDamaged(f"{where}: its header describes other arrays than the cache's fingerprint demands")


def map_file(place: Location, entry: ShardEntry, *, preload: bool = False) -> bytes | mmap.mmap:
    """Return the bytes of a shard, mapped or read into memory.

    Raises:
        CacheDamaged: the file is missing or its size is not what was written.
    """
    name = f"{entry.shard}.safetensors"
    try:
        return place.load(name, entry.bytes, entry.sha256, preload=preload)
    except FileNotFoundError:
        raise CacheDamaged(f"{place}/{name}: is missing") from None


def shard_arrays(
    data: bytes | mmap.mmap, place: Location, entry: ShardEntry, fingerprint: Fingerprint
) -> dict[str, np.ndarray]:
    """Return the arrays of a shard as views of its bytes.

    Raises:
        CacheDamaged: size or header are not what the fingerprint demands.
    """
    file = f"{place}/{entry.shard}.safetensors"
    plan = _plan(fingerprint, entry.rows)
    if len(data) != plan.total_bytes:
        raise CacheDamaged(f"{file}: has {len(data):,} bytes; its {entry.rows} rows take {plan.total_bytes:,}")
    check_header(memoryview(data), plan, file)
    return {
        placed.spec.name: np.frombuffer(data, placed.spec.dtype, math.prod(placed.shape), placed.start).reshape(
            placed.shape
        )
        for placed in plan.arrays
    }


@functools.lru_cache(maxsize=64)
def _plan(fingerprint: Fingerprint, rows: int) -> fmt.Layout:
    """Return where the arrays of a shard lie: the same in all shards of as many rows, and a cache can have 20,000."""
    return fmt.layout(fingerprint.arrays, rows, fingerprint.sha256)


class CacheReader:
    """A finished cache, opened for reading.

    Args:
        path: the cache folder or URL.
        verify: check the sha256 of every shard now. Without it, only names, sizes, seals and headers are checked;
            from behind a URL, shards then come (and are checked) when they are first needed.
        preload: keep the encoded shards in memory instead of mapping the files.
        progress: called with (shard, bytes) while checking.

    Raises:
        CacheError: no manifest, or another format version.
        CacheDamaged: a file is missing or is not what was written; the shard is named.
    """

    def __init__(
        self, path: Place, verify: bool = True, *, preload: bool = False, progress: Progress | None = None
    ) -> None:
        self.path = locate(path)
        self.manifest = read_manifest(self.path)
        self.fingerprint = self.manifest.fingerprint
        check_head(self.path, self.fingerprint, whole=verify)
        self._preload = preload
        self._shards: OrderedDict[tuple[str, int], Mapping[str, np.ndarray]] = OrderedDict()
        self._ends: dict[str, np.ndarray] = {}
        tell = in_turns(progress)

        def check(entry: ShardEntry) -> Mapping[str, np.ndarray] | None:
            check_entry(self.path, entry, self.fingerprint)
            if self.path.far and not (verify or preload):
                return None
            data = map_file(self.path, entry, preload=preload)
            if verify:
                check_loaded(self.path, entry, data, tell)
            return shard_arrays(data, self.path, entry, self.fingerprint)

        threads = None if verify or self.path.far else 1  # several have nothing to wait for
        for split in fmt.SERIES:
            entries = self.manifest.shards(split)
            for number, arrays in enumerate(at_once(self.path, check, entries, threads)):
                if arrays is not None:
                    self._keep((split, number), arrays)
            self._ends[split] = np.cumsum([entry.rows for entry in entries], dtype=np.int64)

    def _keep(self, key: tuple[str, int], arrays: Mapping[str, np.ndarray]) -> None:
        """Hold a shard open; mapped shards beyond a number are closed, least recently used first."""
        self._shards[key] = arrays
        if len(self._shards) > _MAPPED_SHARDS and not self._preload:
            self._shards.popitem(last=False)

    def _arrays(self, split: str, number: int) -> Mapping[str, np.ndarray]:
        """Return a shard's arrays, opened again if they were closed."""
        key = (split, number)
        if key not in self._shards:
            entry = self.manifest.shards(split)[number]
            data = map_file(self.path, entry, preload=self._preload)
            self._keep(key, shard_arrays(data, self.path, entry, self.fingerprint))
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
            CacheError: a row that is not there, k outside 1..K, a temperature that is not stored.
        """
        fingerprint = self.fingerprint
        k = check_request(fingerprint, k, temperatures)
        wanted = np.asarray(indices, np.int64)
        if wanted.ndim != 1 or ((wanted < -1) | (wanted >= self.rows(split))).any():
            raise CacheError(f"rows: {wanted.tolist()!r}; allowed: 0 to {self.rows(split) - 1}, or -1 for padding")
        batch = empty_batch(len(wanted), fingerprint, k, temperatures, optional)
        ends = self._ends[split]
        for place, (row, shard) in enumerate(zip(wanted, np.searchsorted(ends, wanted, side="right"), strict=True)):
            out = {name: array[place] for name, array in batch.items()}
            if row < 0:
                mask_row(fingerprint, k, temperatures, out)
                continue
            arrays = self._arrays(split, int(shard))
            inside = row - ends[shard]  # counted from the shard's end
            decode_row({name: array[inside] for name, array in arrays.items()}, fingerprint, k, temperatures, out)
        return batch


def check_entries(place: Location, entries: Sequence[ShardEntry], fingerprint: Fingerprint) -> None:
    """Raise CacheDamaged unless every shard's sidecar is the one that the manifest sealed."""
    for _ in at_once(place, lambda entry: check_entry(place, entry, fingerprint), entries):
        pass


def check_entry(place: Location, entry: ShardEntry, fingerprint: Fingerprint) -> None:
    """Raise CacheDamaged unless a shard's sidecar is the one that the manifest sealed, and the shard has its size.

    A sidecar with the listed sha256 is that one, unread; another is read to say what is wrong with it.
    """
    try:
        data = place.read(f"{entry.shard}.json", fmt.SIDECAR_LIMIT_BYTES)
    except FileNotFoundError:
        data = b""
    if hashlib.sha256(data).hexdigest() == entry.sidecar_sha256:
        check_shard_size(place, entry)
        return
    sidecar, found = read_sidecar(place, entry.shard)
    if found != entry or sidecar.fingerprint != fingerprint:
        raise CacheDamaged(
            f"{place}/{entry.shard}.json: is not the sidecar that the manifest lists; shards of two "
            "caches are mixed, or one was built again: restore the folder from a copy"
        )


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
