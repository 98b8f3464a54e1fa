"""Finds and checks the files of a cache: manifest, sidecars, shards.

The writer (resuming), the reader (opening) and `tools.verify` share these checks, for a folder and for a URL
(`location`). Names come from records and must match `s-000123` before they become a path; every file must be a regular
file of the recorded size. Messages name the shard, because damage is mended by rebuilding that shard, not the cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from qat_lora.cache.format import layout as fmt
from qat_lora.cache.format.records import Fingerprint, Manifest, ShardEntry, Sidecar, parse
from qat_lora.cache.storage.location import Location, Place, locate
from qat_lora.errors import CacheDamaged, CacheError

T = TypeVar("T")
R = TypeVar("R")
Progress = Callable[[str, int], None]  # called with (shard, its bytes) for each shard that has been read


def read_manifest(path: Place) -> Manifest:
    """Read a cache's manifest.

    Raises:
        CacheError: there is none, so the build has not finished.
        CacheDamaged: it is not what was written.
    """
    place = locate(path)
    try:
        data = place.read(fmt.MANIFEST, fmt.MANIFEST_LIMIT_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise CacheError(
            f"{path}: holds no {fmt.MANIFEST}, so it is no finished KD cache; run the same `qat-lora cache build` "
            "again to complete it, or give the folder of a finished one"
        ) from None
    return parse_manifest(data, f"{place}/{fmt.MANIFEST}")


def parse_manifest(data: bytes, file: str) -> Manifest:
    """Return the manifest that a file's bytes are; CacheDamaged unless its shards are named as shards, in order."""
    manifest = parse(Manifest, data, file)
    for split in fmt.SERIES:
        names = [entry.shard for entry in manifest.shards(split)]
        for name in names:
            if fmt.shard_number(split, name) is None:
                raise CacheDamaged(f"{file}: {name!r} is no name of a {split} shard")
        if sorted(set(names)) != names:
            raise CacheDamaged(f"{file}: the {split} shards are not listed in rising order, once each")
    return manifest


def committed(place: Location, split: str) -> list[int]:
    """Return the numbers of the shards that have a sidecar, rising."""
    found = (fmt.shard_number(split, name[:-5]) for name in place.names() if name.endswith(".json"))
    return sorted(number for number in found if number is not None)


def noted_teacher(place: Location) -> str | None:
    """Return the teacher's identity that a cache notes, finished or not; None where there is none to be read."""
    with contextlib.suppress(CacheError):
        if place.has(fmt.MANIFEST):
            return read_manifest(place).fingerprint.teacher_sha256
        for split in ("eval", "train"):
            for number in committed(place, split)[:1]:
                return read_sidecar(place, fmt.shard_name(split, number))[0].fingerprint.teacher_sha256
    return None


def read_sidecars(
    place: Location, split: str, builder: int = 0, builders: int = 1
) -> Iterator[tuple[Sidecar, ShardEntry]]:
    """Yield a builder's committed shards of a split in order; CacheDamaged for a gap, and as of `read_sidecar`."""
    numbers = [number for number in committed(place, split) if number % builders == builder]
    names = [fmt.shard_name(split, number) for number in numbers]
    for index, number in enumerate(numbers):
        expected = index * builders + builder
        if number != expected:
            missing = fmt.shard_name(split, expected)
            raise CacheDamaged(
                f"{place}/{missing}.json: is missing, but {names[index]}.json is there; put it back, or delete "
                f"{names[index]} and those after it to build again from {missing}"
            )
    yield from at_once(place, lambda name: read_sidecar(place, name), names)


def at_once(place: Location, action: Callable[[T], R], items: Sequence[T], threads: int | None = None) -> Iterator[R]:
    """Yield an action's results in order, computed by several threads; the first error in order is raised.

    Reading files and hashing leave the interpreter lock. By default there is a thread for each processor, at most 8;
    for a place that is far 8, since they wait.
    """
    threads = threads or (8 if place.far else min(8, os.cpu_count() or 1))
    if min(threads, len(items)) < 2:
        yield from map(action, items)
        return
    with ThreadPoolExecutor(threads, "cache") as pool:
        yield from pool.map(action, items)


def read_sidecar(place: Location, name: str) -> tuple[Sidecar, ShardEntry]:
    """Read a sidecar and check its shard's size; CacheDamaged if either is missing or is not what was written."""
    file = f"{place}/{name}.json"
    try:
        data = place.read(f"{name}.json", fmt.SIDECAR_LIMIT_BYTES)
    except FileNotFoundError:
        raise CacheDamaged(f"{file}: is missing") from None
    sidecar = parse(Sidecar, data, file)
    expected = fmt.layout(sidecar.fingerprint.arrays, sidecar.rows, sidecar.fingerprint.sha256).total_bytes
    if sidecar.shard != name or sidecar.bytes != expected or not sidecar.rows:
        raise CacheDamaged(
            f"{file}: speaks of {sidecar.shard!r}, {sidecar.rows} rows, {sidecar.bytes} bytes; "
            f"expected {name!r} and {expected} bytes"
        )
    entry = shard_entry(sidecar, data)
    check_shard_size(place, entry)
    return sidecar, entry


def shard_entry(sidecar: Sidecar, data: bytes) -> ShardEntry:
    """Return how the manifest lists a shard whose sidecar's bytes are `data`."""
    digest = hashlib.sha256(data).hexdigest()
    return ShardEntry(
        shard=sidecar.shard, rows=sidecar.rows, bytes=sidecar.bytes, sha256=sidecar.sha256, sidecar_sha256=digest
    )


def check_entry(place: Location, entry: ShardEntry, fingerprint: Fingerprint) -> None:
    """Raise CacheDamaged unless a shard's sidecar is the one that the manifest sealed, and the shard has its size.

    A sidecar with the listed sha256 is that one, unread; another is read to say what is wrong with it.
    """
    with contextlib.suppress(FileNotFoundError):
        data = place.read(f"{entry.shard}.json", fmt.SIDECAR_LIMIT_BYTES)
        if hashlib.sha256(data).hexdigest() == entry.sidecar_sha256:
            return check_shard_size(place, entry)
    sidecar, found = read_sidecar(place, entry.shard)
    if found != entry or sidecar.fingerprint != fingerprint:
        raise CacheDamaged(
            f"{place}/{entry.shard}.json: is not the sidecar that the manifest lists; shards of two "
            "caches are mixed, or one was built again: restore the folder from a copy"
        )


def check_shard_size(place: Location, entry: ShardEntry) -> None:
    """Raise CacheDamaged unless the shard is a regular file of the right size."""
    file = f"{place}/{entry.shard}.safetensors"
    try:
        size = place.size(f"{entry.shard}.safetensors")
    except FileNotFoundError:
        raise CacheDamaged(f"{file}: is missing") from None
    if size != entry.bytes:
        raise CacheDamaged(
            f"{file}: has {size:,} bytes, {entry.bytes:,} were written; restore it from a copy, or "
            f"delete manifest.json and {entry.shard} and those after it, and build again"
        )


def check_digest(place: Location, entry: ShardEntry, sha256: str) -> None:
    """Raise CacheDamaged unless a shard's sha256 is what was written."""
    if sha256 != entry.sha256:
        raise CacheDamaged(
            f"{place}/{entry.shard}.safetensors: its sha256 is {sha256[:16]}…, {entry.sha256[:16]}… was written; "
            f"restore it from a copy, or delete manifest.json and {entry.shard} and those after it, and build again"
        )
