"""Reads every byte of a cache and says whether it is what was written.

Four layers, from cheap to deep: seals of manifest and sidecars, sizes and headers, the sha256 of every shard, and
the CRC-32 of every row with the ranges of its values. The last cannot fail where the third passed, unless the
writer itself was wrong; that is what it is there to find. Shards go in parallel, each read by one thread.
"""

from __future__ import annotations

import re
import time
from collections import deque
from typing import NamedTuple

from qat_lora.cache.format import layout as fmt
from qat_lora.cache.format.codec import promises
from qat_lora.cache.format.lm_head import check_lm_head
from qat_lora.cache.format.records import Fingerprint, ShardEntry
from qat_lora.cache.storage.location import Location, Place, locate
from qat_lora.cache.storage.store import Progress, Shard, at_once, check_entry, read_manifest
from qat_lora.errors import CacheDamaged

_ROWS_AT_ONCE = 4
_BUILDERS = re.compile(rf"b-[0-9]{{6}}\.json|{re.escape(fmt.LOCK)}.*", re.DOTALL)  # what they leave beside the cache


class VerifyReport(NamedTuple):
    """What was checked; there is a report only for an intact cache."""

    path: str
    shards: int
    rows: int
    bytes: int
    seconds: float
    strangers: tuple[str, ...]  # files in the folder that do not belong to the cache; harmless


def verify_cache(path: Place, progress: Progress | None = None, *, threads: int | None = None) -> VerifyReport:
    """Check every byte of a finished cache, `threads` shards at a time (default as in `store.at_once`).

    Raises:
        CacheError: no finished cache.
        CacheDamaged: names the shard and what is wrong; of several damaged ones the first in row order.
    """
    begun, folder = time.perf_counter(), locate(path)
    manifest = read_manifest(folder)
    entries, held = manifest.all_shards, manifest.fingerprint
    deque(at_once(folder, lambda entry: check_entry(folder, entry, held), entries), maxlen=0)
    check_lm_head(folder, held)
    known = {f"{entry.shard}.{ending}" for entry in entries for ending in ("safetensors", "json")}
    known |= {fmt.MANIFEST} | ({fmt.LM_HEAD} if held.lm_head_sha256 else set())
    for entry in at_once(folder, lambda entry: _check_shard(folder, entry, held), entries, threads):
        if progress is not None:
            progress(entry.shard, entry.bytes)
    strangers = tuple(name for name in folder.names() if not (name in known or _BUILDERS.fullmatch(name)))
    rows, size = sum(entry.rows for entry in entries), sum(entry.bytes for entry in entries)
    return VerifyReport(str(folder), len(entries), rows, size, time.perf_counter() - begun, strangers)


def _check_shard(path: Location, entry: ShardEntry, fingerprint: Fingerprint) -> ShardEntry:
    """Return the shard if its sha256, row checksums and values are what they must be."""
    shard = Shard(path, entry, fingerprint, preload=path.far)  # what lies behind a URL now, not a copy of it
    shard.check_sha256()
    for start, part in shard.parts(_ROWS_AT_ONCE):
        for promise, kept in promises(part, fingerprint).items():
            if not kept:
                rows = f"rows {start} to {start + len(part['input_ids']) - 1}"
                raise CacheDamaged(f"{path}/{entry.shard}: {rows} break a rule of the format: {promise}")
    return entry
