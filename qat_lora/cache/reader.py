"""Opens a finished cache and turns row numbers into batches.

Everything is checked before the first row is served: manifest and sidecar seals, names, sizes, and by default the
sha256 of every shard (1 to 2 GB/s), since a flipped bit in a memory-mapped safetensors file reads as a slightly
different teacher and no training run would notice. After that, shards are mapped and only the asked rows are
touched; a row is decoded when it is asked for, so a cache larger than memory costs no more than a small one.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from qat_lora.cache import format as fmt
from qat_lora.cache.codec import decode_row, empty_batch, mask_row
from qat_lora.cache.records import Fingerprint, ShardEntry, open_regular, strict_json
from qat_lora.cache.store import Progress, check_shard_bytes, read_manifest, read_sidecar
from qat_lora.errors import CacheDamaged, CacheError
from qat_lora.types import Batch

_MAPPED_SHARDS = 256
"""Each mapping holds a file open, and processes may often open only 1,024."""


def check_header(data: bytes | memoryview, plan: fmt.Layout, where: str) -> None:
    """Compare a shard's safetensors header with the one that its fingerprint demands.

    Raises:
        CacheDamaged: the header is too long, no strict JSON, or describes other arrays.
    """
    size = int.from_bytes(bytes(data[:8]), "little")
    if len(data) < 8 or size > min(fmt.HEADER_LIMIT_BYTES, len(data) - 8):
        raise CacheDamaged(f"{where}: its header claims {size:,} bytes; allowed: 1 MB within the file")
    try:
        found = strict_json(bytes(data[8 : 8 + size]).decode("ascii"))
    except (ValueError, RecursionError) as error:
        raise CacheDamaged(f"{where}: its header cannot be read ({error})") from None
    if found != strict_json(plan.header[8:].decode("ascii")) or 8 + size != len(plan.header):
        raise CacheDamaged(f"{where}: its header describes other arrays than the cache's fingerprint demands")


def map_file(path: Path, entry: ShardEntry, *, preload: bool = False) -> bytes | mmap.mmap:
    """Return the bytes of a shard, mapped or read into memory.

    Raises:
        CacheDamaged: the file is missing or its size is not what was written.
    """
    file = path / f"{entry.shard}.safetensors"
    try:
        with open_regular(file) as opened:
            size = opened.seek(0, 2)
            if size != entry.bytes:
                raise CacheDamaged(f"{file}: has {size:,} bytes, {entry.bytes:,} were written")
            opened.seek(0)
            return opened.read() if preload else mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise CacheDamaged(f"{file}: is missing") from None


def shard_arrays(
    data: bytes | mmap.mmap, path: Path, entry: ShardEntry, fingerprint: Fingerprint
) -> dict[str, np.ndarray]:
    """Return the arrays of a shard as views of its bytes.

    Raises:
        CacheDamaged: size or header are not what the fingerprint demands.
    """
    file = path / f"{entry.shard}.safetensors"
    plan = fmt.layout(fingerprint.arrays, entry.rows, fingerprint.sha256)
    if len(data) != plan.total_bytes:
        raise CacheDamaged(f"{file}: has {len(data):,} bytes; its {entry.rows} rows take {plan.total_bytes:,}")
    check_header(memoryview(data), plan, str(file))
    return {
        placed.spec.name: np.frombuffer(
            data, placed.spec.dtype, int(np.prod(placed.shape, dtype=np.int64)), placed.start
        ).reshape(placed.shape)
        for placed in plan.arrays
    }


class CacheReader:
    """A finished cache, opened for reading.

    Args:
        path: the cache folder.
        verify: check the sha256 of every shard now. Without it, only names, sizes, seals and headers are checked.
        preload: keep the encoded shards in memory instead of mapping the files.
        progress: called with (shard, bytes) while checking.

    Raises:
        CacheError: no manifest, or another format version.
        CacheDamaged: a file is missing or is not what was written; the shard is named.
    """

    def __init__(
        self, path: str | Path, verify: bool = True, *, preload: bool = False, progress: Progress | None = None
    ) -> None:
        self.path = Path(path)
        self.manifest = read_manifest(path)
        self.fingerprint = self.manifest.fingerprint
        self._preload = preload
        self._shards: OrderedDict[tuple[str, int], Mapping[str, np.ndarray]] = OrderedDict()
        self._ends: dict[str, np.ndarray] = {}
        for split in fmt.SERIES:
            entries = self.manifest.shards(split)
            for number, entry in enumerate(entries):
                check_entry(self.path, entry, self.fingerprint)
                if verify:
                    check_shard_bytes(self.path, entry, progress)
                self._arrays(split, number)
            self._ends[split] = np.cumsum([entry.rows for entry in entries], dtype=np.int64)

    def _arrays(self, split: str, number: int) -> Mapping[str, np.ndarray]:
        """Return a shard's arrays; mapped shards beyond a number are closed, least recently used first."""
        key = (split, number)
        if key not in self._shards:
            entry = self.manifest.shards(split)[number]
            data = map_file(self.path, entry, preload=self._preload)
            self._shards[key] = shard_arrays(data, self.path, entry, self.fingerprint)
            if len(self._shards) > _MAPPED_SHARDS and not self._preload:
                self._shards.popitem(last=False)
        self._shards.move_to_end(key)
        return self._shards[key]

    def rows(self, split: str) -> int:
        """Return the number of rows of a split."""
        return self.manifest.rows(split)

    def read(
        self, split: str, indices: Sequence[int] | np.ndarray, k: int | None, temperatures: Sequence[float]
    ) -> Batch:
        """Decode rows, in the order asked; index -1 gives a fully masked row.

        Raises:
            CacheError: a row that is not there, k outside 1..K, a temperature that is not stored.
        """
        fingerprint = self.fingerprint
        k = check_request(fingerprint, k, temperatures)
        wanted = np.asarray(indices, np.int64)
        if wanted.ndim != 1 or ((wanted < -1) | (wanted >= self.rows(split))).any():
            raise CacheError(f"rows: {wanted.tolist()!r}; allowed: 0 to {self.rows(split) - 1}, or -1 for padding")
        batch = empty_batch(len(wanted), fingerprint, k, temperatures)
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


def check_entry(path: Path, entry: ShardEntry, fingerprint: Fingerprint) -> None:
    """Raise CacheDamaged unless a shard's sidecar is the one that the manifest sealed."""
    sidecar, found = read_sidecar(path, entry.shard)
    if found != entry or sidecar.fingerprint != fingerprint:
        raise CacheDamaged(
            f"{path}/{entry.shard}.json: is not the sidecar that the manifest lists; shards of two "
            "caches are mixed, or one was built again: restore the folder from a copy"
        )


def check_request(fingerprint: Fingerprint, k: int | None, temperatures: Sequence[float]) -> int:
    """Return the k to serve.

    Raises:
        CacheError: k outside 1..K, or a temperature that is not stored.
    """
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
