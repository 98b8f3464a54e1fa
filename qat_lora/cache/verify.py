"""Reads every byte of a cache and says whether it is what was written.

Four layers, from cheap to deep: seals of manifest and sidecars, sizes and headers, the sha256 of every shard, and
the CRC-32 of every row with the ranges of its values. The last cannot fail where the third passed, unless the
writer itself was wrong; that is what it is there to find.

A shard is mapped once and read by one thread; hashing and comparing leave the interpreter lock, so shards go in
parallel. Values are compared as the bits they are: below zero, fp16 numbers order as the unsigned numbers of the
same bits do, and converting them to float32 first would cost more than their sha256.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qat_lora.cache import format as fmt
from qat_lora.cache.codec import row_checksums, unpack_ids
from qat_lora.cache.reader import check_entry, map_file, shard_arrays
from qat_lora.cache.records import Fingerprint, ShardEntry
from qat_lora.cache.store import Progress, check_digest, read_manifest
from qat_lora.errors import CacheDamaged
from qat_lora.types import temperature_key

_ROWS_AT_ONCE = 4
_CHUNK_BYTES = 1 << 20
_LOWEST_FP16 = np.uint16(0xFBFF)
"""The bits of -65,504; beyond are minus infinity and NaN."""
_SIGN = np.uint16(0x8000)
_ROUNDING = 1e-3
"""What float32 sums may be beside the truth: how far `lse` may be below 0 and `log_tail` above it."""


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


def verify_cache(path: str | Path, progress: Progress | None = None, *, threads: int | None = None) -> VerifyReport:
    """Check every byte of a finished cache.

    Args:
        path: the cache folder.
        progress: called with (shard, bytes read since the last call), by one thread at a time.
        threads: shards checked at a time; default: one for each processor, at most 8.

    Raises:
        CacheError: no finished cache.
        CacheDamaged: names the shard and what is wrong; of several damaged ones the first in row order.
    """
    begun = time.perf_counter()
    folder = Path(path)
    manifest = read_manifest(folder)
    entries = (*manifest.eval, *manifest.train)
    known = {fmt.MANIFEST}
    for entry in entries:
        check_entry(folder, entry, manifest.fingerprint)
        known |= {f"{entry.shard}.safetensors", f"{entry.shard}.json"}
    turn = threading.Lock()

    def tell(shard: str, read: int) -> None:
        if progress is not None:
            with turn:
                progress(shard, read)

    with ThreadPoolExecutor(threads or min(8, os.cpu_count() or 1), "verify") as pool:
        checks = [pool.submit(check_shard, folder, entry, manifest.fingerprint, tell) for entry in entries]
        try:
            for check in checks:
                check.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
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


def check_shard(path: Path, entry: ShardEntry, fingerprint: Fingerprint, progress: Progress) -> None:
    """Raise CacheDamaged unless a shard's sha256, row checksums and values are what they must be."""
    data = map_file(path, entry)
    digest = hashlib.sha256()
    view = memoryview(data)
    for start in range(0, len(view), _CHUNK_BYTES):
        chunk = view[start : start + _CHUNK_BYTES]
        digest.update(chunk)
        progress(entry.shard, len(chunk))
    check_digest(path, entry, digest.hexdigest())
    arrays = shard_arrays(data, path, entry, fingerprint)
    for start in range(0, entry.rows, _ROWS_AT_ONCE):
        part = {name: array[start : start + _ROWS_AT_ONCE] for name, array in arrays.items()}
        sums = row_checksums(part, fingerprint.arrays)
        bad = np.flatnonzero(sums != part["row_crc32"])
        if len(bad):
            raise CacheDamaged(f"{path}/{entry.shard}: row {start + bad[0]} does not have its checksum")
        for promise, kept in _promises(part, fingerprint).items():
            if not kept:
                rows = f"rows {start} to {start + len(sums) - 1}"
                raise CacheDamaged(f"{path}/{entry.shard}: {rows} break a rule of the format: {promise}")


def _promises(part: Mapping[str, np.ndarray], fingerprint: Fingerprint) -> dict[str, bool]:
    """Return the rules for values, and whether some rows keep them."""
    bits = part["val"].view("<u2")
    depth = bits | _SIGN  # both zeros become the same number, and depth rises as the value falls
    ids = unpack_ids(part, fingerprint.top_k)
    lse, tails = ([part[temperature_key(name, t)] for t in fingerprint.temperatures] for name in ("lse", "log_tail"))
    return {
        "head ids inside the vocabulary": bool(ids.min() >= 0 and ids.max() < fingerprint.vocab_size),
        "values falling from 0 in rank order": bool(
            (depth[..., 0] == _SIGN).all()
            and (depth[..., 1:] >= depth[..., :-1]).all()
            and (depth[..., -1] <= _LOWEST_FP16).all()
            and ((bits == 0) | (bits >= _SIGN)).all()
        ),
        "finite lse of 0 or more": all(np.isfinite(array).all() and (array > -_ROUNDING).all() for array in lse),
        "log_tail of 0 or less": all((array < _ROUNDING).all() for array in tails),
        "loss_mask of 0 and 1": bool((part["loss_mask"] <= 1).all()),
    }
