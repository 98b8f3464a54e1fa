"""Finds and checks the files of a cache folder: manifest, sidecars, shards.

Shared by the writer that resumes, the reader that opens and `verify` that doubts everything. Names come from
records and are matched against `s-000123` before they become a path; every file must be a regular file of the
recorded size. All messages name the shard, because the cure for damage is to rebuild that shard, not the cache.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from pathlib import Path

from qat_lora.cache import format as fmt
from qat_lora.cache.records import Manifest, ShardEntry, Sidecar, open_regular, parse, read_bounded
from qat_lora.errors import CacheDamaged, CacheError

Progress = Callable[[str, int], None]
"""Called with (shard, bytes read since the last call)."""


def read_manifest(path: str | Path) -> Manifest:
    """Read a cache's manifest.

    Raises:
        CacheError: there is none, so the build has not finished.
        CacheDamaged: it is not what was written.
    """
    file = Path(path) / fmt.MANIFEST
    try:
        data = read_bounded(file, fmt.MANIFEST_LIMIT_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise CacheError(
            f"{path}: holds no {fmt.MANIFEST}, so it is no finished KD cache; run the same `qat-lora cache build` "
            "again to complete it, or give the folder of a finished one"
        ) from None
    manifest = parse(Manifest, data, str(file))
    for split in fmt.SERIES:
        numbers = []
        for entry in manifest.shards(split):
            parsed = fmt.parse_shard_name(entry.shard)
            if parsed is None or parsed[0] != split:
                raise CacheDamaged(f"{file}: {entry.shard!r} is no name of a {split} shard")
            numbers.append(parsed[1])
        if sorted(set(numbers)) != numbers:
            raise CacheDamaged(f"{file}: the {split} shards are not listed in rising order, once each")
    return manifest


def committed(path: Path, split: str) -> list[int]:
    """Return the numbers of the shards that have a sidecar, rising."""
    return sorted(
        parsed[1]
        for file in path.glob(f"{fmt.SERIES[split]}-*.json")
        if (parsed := fmt.parse_shard_name(file.stem)) is not None
    )


def read_sidecars(path: Path, split: str, builder: int = 0, builders: int = 1) -> Iterator[tuple[Sidecar, ShardEntry]]:
    """Yield a builder's committed shards of a split in order, sizes checked.

    Raises:
        CacheDamaged: a gap in the series, a sidecar or shard that is not what was written.
    """
    numbers = [number for number in committed(path, split) if number % builders == builder]
    for index, number in enumerate(numbers):
        expected = index * builders + builder
        name = fmt.shard_name(split, number)
        if number != expected:
            missing = fmt.shard_name(split, expected)
            raise CacheDamaged(
                f"{path}/{missing}.json: is missing, but {name}.json is there; put it back, or delete "
                f"{name} and those after it to build again from {missing}"
            )
        yield read_sidecar(path, name)


def read_sidecar(path: Path, name: str) -> tuple[Sidecar, ShardEntry]:
    """Read one sidecar and check that its shard is there with the right size.

    Raises:
        CacheDamaged: the sidecar or the shard is missing or is not what was written.
    """
    file = path / f"{name}.json"
    try:
        data = read_bounded(file, fmt.SIDECAR_LIMIT_BYTES)
    except FileNotFoundError:
        raise CacheDamaged(f"{file}: is missing") from None
    sidecar = parse(Sidecar, data, str(file))
    expected = fmt.layout(sidecar.fingerprint.arrays, sidecar.rows, sidecar.fingerprint.sha256).total_bytes
    if sidecar.shard != name or sidecar.bytes != expected or not sidecar.rows:
        raise CacheDamaged(
            f"{file}: speaks of {sidecar.shard!r}, {sidecar.rows} rows, {sidecar.bytes} bytes; "
            f"expected {name!r} and {expected} bytes"
        )
    entry = ShardEntry(
        shard=name,
        rows=sidecar.rows,
        bytes=sidecar.bytes,
        sha256=sidecar.sha256,
        sidecar_sha256=hashlib.sha256(data).hexdigest(),
    )
    check_shard_size(path, entry)
    return sidecar, entry


def check_shard_size(path: Path, entry: ShardEntry) -> None:
    """Raise CacheDamaged unless the shard is a regular file of the right size."""
    file = path / f"{entry.shard}.safetensors"
    try:
        with open_regular(file) as opened:
            size = opened.seek(0, 2)
    except FileNotFoundError:
        raise CacheDamaged(f"{file}: is missing") from None
    if size != entry.bytes:
        raise CacheDamaged(
            f"{file}: has {size:,} bytes, {entry.bytes:,} were written; restore it from a copy, or "
            f"delete manifest.json and {entry.shard} and those after it, and build again"
        )


def check_shard_bytes(path: Path, entry: ShardEntry, progress: Progress | None = None) -> None:
    """Raise CacheDamaged unless the shard's sha256 is what was written."""
    check_shard_size(path, entry)
    file = path / f"{entry.shard}.safetensors"
    digest = hashlib.sha256()
    with open_regular(file) as opened:
        while chunk := opened.read(1 << 20):
            digest.update(chunk)
            if progress is not None:
                progress(entry.shard, len(chunk))
    check_digest(path, entry, digest.hexdigest())


def check_digest(path: Path, entry: ShardEntry, sha256: str) -> None:
    """Raise CacheDamaged unless a shard's sha256 is what was written."""
    if sha256 != entry.sha256:
        raise CacheDamaged(
            f"{path}/{entry.shard}.safetensors: its sha256 is {sha256[:16]}…, {entry.sha256[:16]}… was written; "
            f"restore it from a copy, or delete manifest.json and {entry.shard} and those after it, "
            "and build again"
        )
