"""Reads every byte of a cache and says whether it is what was written.

Four layers, from cheap to deep: seals of manifest and sidecars, sizes and headers, the sha256 of every shard, and
the CRC-32 of every row with the ranges of its values. The last cannot fail where the third passed, unless the
writer itself was wrong; that is what it is there to find.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qat_lora.cache import format as fmt
from qat_lora.cache.codec import row_checksums, unpack_ids
from qat_lora.cache.reader import check_entry, map_shard
from qat_lora.cache.records import Fingerprint, ShardEntry
from qat_lora.cache.store import Progress, check_shard_bytes, read_manifest
from qat_lora.errors import CacheDamaged
from qat_lora.types import temperature_key

_ROWS_AT_ONCE = 16


@dataclass(frozen=True)
class VerifyReport:
    """What was checked; there is a report only for an intact cache."""

    path: str
    shards: int
    rows: int
    bytes: int
    seconds: float
    strangers: tuple[str, ...]
    """Files in the folder that do not belong to the cache; harmless."""


def verify_cache(path: str | Path, progress: Progress | None = None) -> VerifyReport:
    """Check every byte of a finished cache.

    Args:
        path: the cache folder.
        progress: called with (shard, bytes read since the last call).

    Raises:
        CacheError: no finished cache.
        CacheDamaged: names the shard and what is wrong.
    """
    begun = time.perf_counter()
    folder = Path(path)
    manifest = read_manifest(folder)
    entries = (*manifest.eval, *manifest.train)
    known = {fmt.MANIFEST}
    for entry in entries:
        check_entry(folder, entry, manifest.fingerprint)
        check_shard_bytes(folder, entry, progress)
        check_rows(folder, entry, manifest.fingerprint)
        known |= {f"{entry.shard}.safetensors", f"{entry.shard}.json"}
    return VerifyReport(
        path=str(path),
        shards=len(entries),
        rows=sum(entry.rows for entry in entries),
        bytes=sum(entry.bytes for entry in entries),
        seconds=time.perf_counter() - begun,
        strangers=tuple(sorted(file.name for file in folder.iterdir() if not _is_ours(file.name, known))),
    )


def _is_ours(name: str, known: set[str]) -> bool:
    return name in known or fmt.is_part_name(name) or name.startswith(fmt.LOCK)


def check_rows(path: Path, entry: ShardEntry, fingerprint: Fingerprint) -> None:
    """Raise CacheDamaged unless every row has its checksum and values in range."""
    arrays = map_shard(path, entry, fingerprint)
    for start in range(0, entry.rows, _ROWS_AT_ONCE):
        part = {name: array[start : start + _ROWS_AT_ONCE] for name, array in arrays.items()}
        sums = row_checksums(part, fingerprint.arrays)
        bad = np.flatnonzero(sums != part["row_crc32"])
        if len(bad):
            raise CacheDamaged(f"{path}/{entry.shard}: row {start + bad[0]} does not have its checksum")
        ids = unpack_ids(part, fingerprint.top_k)
        values = part["val"].astype(np.float32)
        lse = [part[temperature_key("lse", t)] for t in fingerprint.temperatures]
        sound = {
            "head ids inside the vocabulary": ids.min() >= 0 and ids.max() < fingerprint.vocab_size,
            "values falling from 0 in rank order": (values[..., 0] == 0).all()
            and (np.diff(values, axis=-1) <= 0).all(),
            "finite lse of 0 or more": all(np.isfinite(array).all() and (array > -1e-3).all() for array in lse),
        }
        for promise, kept in sound.items():
            if not kept:
                rows = f"rows {start} to {start + len(sums) - 1}"
                raise CacheDamaged(f"{path}/{entry.shard}: {rows} break a rule of the format: {promise}")
