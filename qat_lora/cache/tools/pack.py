"""`cache pack` and `cache unpack`: a cache as a smaller folder for moving it, and back to the same bytes.

A packed folder cannot be trained from; it is what is copied between machines. Each shard becomes one file that begins
with the sha256 of the shard it is made from, holds the shard's sidecar and its arrays (`transport`), and is listed
with a sha256 of its own in `packed.json`, written last, which also carries the manifest. Unpacking checks the packed
file before it reads it and the shard before it writes it, so what comes out is the cache that went in, bit for bit, or
an error that names the shard. Both directions commit file by file and go on after a kill.

Archives of the whole folder (tar and zstd, say) are larger by a quarter, and a flipped bit costs all of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from qat_lora.cache.format import layout as fmt
from qat_lora.cache.format.lm_head import check_head
from qat_lora.cache.format.records import Manifest, ShardEntry, parse, render
from qat_lora.cache.read.reader import check_entry
from qat_lora.cache.read.shard import open_shard
from qat_lora.cache.storage.location import Location, Place, locate
from qat_lora.cache.storage.store import Progress, check_shard_bytes, read_manifest
from qat_lora.cache.tools.transport import pack_arrays, unpack_arrays
from qat_lora.errors import CacheDamaged, CacheError, OutputExistsError
from qat_lora.extras import require

PACKED = "packed.json"
_MAGIC = b"QLKDPK1\n"
_SHA_BYTES = 32
_LENGTH_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class PackedShard:
    """One packed file."""

    shard: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Packed:
    """The list of all packed files, written last."""

    format: str = fmt.FORMAT
    version: int = fmt.VERSION
    manifest: str
    """The cache's manifest, as it is on disk."""
    shards: tuple[PackedShard, ...]
    """In the order of the manifest: evaluation split, then training."""


class PackReport(NamedTuple):
    """What came of packing or unpacking."""

    out: str
    shards: int
    cache_bytes: int
    """Of the shards as a reader maps them."""
    packed_bytes: int
    """Of the same in the packed folder, sidecars included."""
    packed_bytes_per_token: float


def pack_cache(path: Place, out: Place, progress: Progress | None = None) -> PackReport:
    """Write a finished cache to a packed folder; a folder in which this was interrupted is completed.

    Args:
        path: the cache.
        out: the packed folder, or its URL.
        progress: called with (shard, bytes of the cache) as they are read.

    Raises:
        MissingExtraError: zstandard is not installed.
        CacheError: no finished cache.
        CacheDamaged: a file of the cache is not what was written.
        OutputExistsError: `out` holds something else.
    """
    require("zstandard", "transport")
    source, target = locate(path), locate(out)
    manifest = read_manifest(source)
    text = source.read(fmt.MANIFEST, fmt.MANIFEST_LIMIT_BYTES).decode("ascii")
    entries = (*manifest.eval, *manifest.train)
    _refuse_foreign(target, ".packed", PACKED)
    target.make()
    with target.exclusive(fmt.LOCK):
        _sweep(target)
        if target.has(PACKED) and _read_packed(target).manifest != text:
            raise OutputExistsError(f"--out {target}: holds another packed cache; nothing was touched: choose another")
        _copy_head(source, target, manifest)
        shards = [_pack_shard(source, target, entry, manifest, progress) for entry in entries]
        packed = Packed(manifest=text, shards=tuple(shards))
        if not target.has(PACKED):
            target.write_new(PACKED, [render(packed)], "manifest")
    return _report(target, manifest, packed)


def unpack_cache(path: Place, out: Place, progress: Progress | None = None) -> PackReport:
    """Write the cache that a packed folder holds; a folder in which this was interrupted is completed.

    Args:
        path: the packed folder, or its URL.
        out: the cache folder.
        progress: called with (shard, bytes of the cache) as they are written.

    Raises:
        MissingExtraError: zstandard is not installed.
        CacheError: no packed cache.
        CacheDamaged: a packed file is not what was written; the shard is named.
        OutputExistsError: `out` holds something else.
    """
    require("zstandard", "transport")
    source, target = locate(path), locate(out)
    packed = _read_packed(source)
    text = packed.manifest.encode("ascii")
    manifest = parse(Manifest, text, f"{source}/{PACKED}: manifest")
    entries = (*manifest.eval, *manifest.train)
    if [entry.shard for entry in entries] != [shard.shard for shard in packed.shards]:
        raise CacheDamaged(f"{source}/{PACKED}: lists other shards than the manifest in it")
    for entry in entries:
        if fmt.parse_shard_name(entry.shard) is None:
            raise CacheDamaged(f"{source}/{PACKED}: {entry.shard!r} is no name of a shard")
    _refuse_foreign(target, ".safetensors", fmt.MANIFEST)
    target.make()
    with target.exclusive(fmt.LOCK):
        _sweep(target)
        if target.has(fmt.MANIFEST) and target.read(fmt.MANIFEST, fmt.MANIFEST_LIMIT_BYTES) != text:
            raise OutputExistsError(f"--out {target}: holds another cache; nothing was touched: choose another")
        _copy_head(source, target, manifest)
        for entry, shard in zip(entries, packed.shards, strict=True):
            _unpack_shard(source, target, entry, shard, manifest)
            if progress is not None:
                progress(entry.shard, entry.bytes)
        if not target.has(fmt.MANIFEST):
            target.write_new(fmt.MANIFEST, [text], "manifest")
    return _report(target, manifest, packed)


def _report(target: Location, manifest: Manifest, packed: Packed) -> PackReport:
    entries = (*manifest.eval, *manifest.train)
    size = sum(shard.bytes for shard in packed.shards)
    tokens = sum(entry.rows for entry in entries) * manifest.fingerprint.length
    return PackReport(str(target), len(entries), sum(entry.bytes for entry in entries), size, size / tokens)


def _pack_shard(
    source: Location, target: Location, entry: ShardEntry, manifest: Manifest, progress: Progress | None
) -> PackedShard:
    fingerprint = manifest.fingerprint
    check_entry(source, entry, fingerprint)
    name = f"{entry.shard}.packed"
    if target.has(name):
        done = b"".join(target.chunks(name))
        if not done.startswith(_MAGIC + bytes.fromhex(entry.sha256)):
            raise OutputExistsError(f"--out {target}: {name} is of another cache; choose another folder")
        return PackedShard(shard=entry.shard, bytes=len(done), sha256=hashlib.sha256(done).hexdigest())
    shard = open_shard(source, entry, fingerprint, preload=True)
    shard.check_sha256(progress)
    sidecar = source.read(f"{entry.shard}.json", fmt.SIDECAR_LIMIT_BYTES)

    def chunks() -> Iterator[bytes]:
        yield _MAGIC + bytes.fromhex(entry.sha256) + len(sidecar).to_bytes(_LENGTH_BYTES, "little") + sidecar
        yield from pack_arrays(shard.rows(0, entry.rows), fingerprint.contents)

    size, digest = target.write_new(name, chunks(), "shard")
    return PackedShard(shard=entry.shard, bytes=size, sha256=digest)


def _unpack_shard(
    source: Location, target: Location, entry: ShardEntry, packed: PackedShard, manifest: Manifest
) -> None:
    name, where = f"{entry.shard}.packed", f"{source}/{entry.shard}.packed"
    shard, sidecar_name = f"{entry.shard}.safetensors", f"{entry.shard}.json"
    if target.has(shard) and target.has(sidecar_name):
        check_entry(target, entry, manifest.fingerprint)
        check_shard_bytes(target, entry)
        return
    data = _read_checked(source, name, packed, where)
    start = len(_MAGIC) + _SHA_BYTES
    begin = start + _LENGTH_BYTES
    end = begin + int.from_bytes(data[start:begin], "little")
    sidecar = data[begin:end]
    arrays = unpack_arrays(memoryview(data)[end:], manifest.fingerprint.contents, entry.rows, where)
    plan = fmt.layout(manifest.fingerprint.arrays, entry.rows, manifest.fingerprint.sha256)
    parts = [plan.header, *(arrays[placed.spec.name].tobytes() for placed in plan.arrays)]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    if digest.hexdigest() != entry.sha256 or hashlib.sha256(sidecar).hexdigest() != entry.sidecar_sha256:
        raise CacheDamaged(f"{where}: does not unpack to the shard that the manifest lists; pack the cache again")
    if target.has(shard):
        check_shard_bytes(target, entry)
    else:
        target.write_new(shard, parts, "shard")
    target.write_new(sidecar_name, [sidecar], "sidecar")


def _read_checked(source: Location, name: str, packed: PackedShard, where: str) -> bytes:
    cure = "copy it again from where it was packed"
    try:
        size = source.size(name)
        if size != packed.bytes:
            raise CacheDamaged(f"{where}: has {size:,} bytes, {packed.bytes:,} were written; {cure}")
        data = b"".join(source.chunks(name))
    except FileNotFoundError:
        raise CacheDamaged(f"{where}: is missing; {cure}") from None
    if hashlib.sha256(data).hexdigest() != packed.sha256 or not data.startswith(_MAGIC):
        raise CacheDamaged(f"{where}: its sha256 is not the one that was written; {cure}")
    return data


def _read_packed(place: Location) -> Packed:
    try:
        data = place.read(PACKED, 2 * fmt.MANIFEST_LIMIT_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        raise CacheError(
            f"{place}: holds no {PACKED}, so it is no packed cache; run the same `qat-lora cache pack` again to "
            "complete it, or give the folder of a complete one"
        ) from None
    return parse(Packed, data, f"{place}/{PACKED}")


def _copy_head(source: Location, target: Location, manifest: Manifest) -> None:
    """Copy the teacher's output head as it is: its weights hold nothing to compress."""
    if manifest.fingerprint.head_sha256 is None:
        return
    if not target.has(fmt.HEAD):
        check_head(source, manifest.fingerprint)
        target.write_new(fmt.HEAD, source.chunks(fmt.HEAD), "head")
    check_head(target, manifest.fingerprint)


def _refuse_foreign(target: Location, ending: str, record: str) -> None:
    """Refuse a folder that holds files and no sign of what is to be written there."""
    names = target.names()
    ours = (record, f".{record}", fmt.LOCK, fmt.HEAD)
    shards = any(fmt.parse_shard_name(name.lstrip(".").split(".")[0]) and ending in name for name in names)
    if names and not shards and not any(name.startswith(ours) for name in names):
        raise OutputExistsError(f"--out {target}: holds other files; nothing was touched: choose another folder")


def _sweep(target: Location) -> None:
    """Remove temporary files that a kill left."""
    for name in target.names():
        stem = name.removeprefix(".").removesuffix(".tmp")
        known = stem in (PACKED, fmt.MANIFEST, fmt.HEAD) or fmt.parse_shard_name(stem.split(".")[0])
        if name == f".{stem}.tmp" and known:
            target.delete(name)
