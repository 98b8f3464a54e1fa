"""Finds, checks and opens the files of a cache: manifest, sidecars, shards.

The writer, the reader and `verify_cache` share these checks, for a folder and for a URL. Names come from records and
must match `s-000123` before they become a path; every file must be a regular one of the recorded size. Messages name
the shard, because damage is mended by rebuilding that shard, not the cache.

`verify_cache` goes from cheap to deep: seals, sizes and headers, the sha256 of every shard, the CRC-32 and the ranges
of values of every row. The last cannot fail where the third passed, unless the writer itself was wrong.

A row is read with `pread` into memory of its own, and its CRC-32 is computed from those very bytes. Mapping the file
would save a copy of half a megabyte, but a mapped file that shrinks ends the process with SIGBUS, which no program can
turn into a message, and bytes that change between check and use would go unnoticed.
"""

import contextlib
import hashlib
import os
import re
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import BinaryIO, NamedTuple, TypeVar

import numpy as np

from qat_lora.cache.format import layout as fmt
from qat_lora.cache.format.codec import crc32, promises, row_checksums
from qat_lora.cache.format.compressed import decompress, decompress_row
from qat_lora.cache.format.lm_head import check_lm_head
from qat_lora.cache.format.records import Fingerprint, Manifest, ShardEntry, Sidecar, parse, read_header
from qat_lora.cache.storage.location import Location, Place, locate
from qat_lora.errors import CacheDamaged, CacheError

_CHUNK_BYTES = 1 << 20
_MOST_OPEN = 256
_BUILDERS = re.compile(rf"b-[0-9]{{6}}\.json|{re.escape(fmt.LOCK)}.*", re.DOTALL)  # what they leave beside the cache
_CURE = "restore the shard from a copy"

T = TypeVar("T")
R = TypeVar("R")
Progress = Callable[[str, int], object]  # called with (shard, its bytes) for each shard that has been read


def read_manifest(path: Place) -> Manifest:
    """Read a cache's manifest; CacheError if the build has not finished, CacheDamaged if it is not what was written."""
    place = locate(path)
    try:
        data = place.read(fmt.MANIFEST, fmt.MANIFEST_LIMIT_BYTES)
    except (FileNotFoundError, NotADirectoryError):
        remedy = "run the same `qat-lora cache build` again to complete it, or give the folder of a finished one"
        raise CacheError(f"{path}: holds no {fmt.MANIFEST}, so it is no finished KD cache; {remedy}") from None
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


def noted_fingerprint(place: Location) -> Fingerprint | None:
    """Return what a cache notes of itself, finished or not; None where there is none to be read."""
    with contextlib.suppress(CacheError):
        if place.has(fmt.MANIFEST):
            return read_manifest(place).fingerprint
        for split in ("eval", "train"):
            for number in committed(place, split)[:1]:
                return read_sidecar(place, fmt.shard_name(split, number))[0].fingerprint
    return None


def read_sidecars(
    place: Location, split: str, builder: int, builders: int, listed: Sequence[int]
) -> Iterator[tuple[Sidecar, ShardEntry]]:
    """Yield a builder's shards, of those that are `committed`; CacheDamaged for a gap, and as of `read_sidecar`."""
    numbers = [number for number in listed if number % builders == builder]
    names = [fmt.shard_name(split, number) for number in numbers]
    for index, number in enumerate(numbers):
        expected = index * builders + builder
        if number != expected:
            missing = fmt.shard_name(split, expected)
            remedy = f"put it back, or delete {names[index]} and those after it to build again from {missing}"
            raise CacheDamaged(f"{place}/{missing}.json: is missing, but {names[index]}.json is there; {remedy}")
    yield from at_once(place, lambda name: read_sidecar(place, name), names)


def at_once(place: Location, action: Callable[[T], R], items: Sequence[T], threads: int | None = None) -> Iterator[R]:
    """Yield an action's results in order, computed by at most 8 threads; the first error in order is raised."""
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
    expected = sidecar.fingerprint.layout(sidecar.rows, sidecar.bytes).total_bytes
    if sidecar.shard != name or sidecar.bytes != expected or not sidecar.rows:
        found = f"{sidecar.shard!r}, {sidecar.rows} rows, {sidecar.bytes} bytes"
        raise CacheDamaged(f"{file}: speaks of {found}; expected {name!r} and {expected} bytes")
    entry = shard_entry(sidecar, data)
    check_shard_size(place, entry)
    return sidecar, entry


def shard_entry(sidecar: Sidecar, data: bytes) -> ShardEntry:
    """Return how the manifest lists a shard whose sidecar's bytes are `data`."""
    copied = {name: getattr(sidecar, name) for name in ("shard", "rows", "bytes", "sha256")}
    return ShardEntry(**copied, sidecar_sha256=hashlib.sha256(data).hexdigest())


def check_entry(place: Location, entry: ShardEntry, fingerprint: Fingerprint) -> None:
    """Raise CacheDamaged unless a shard's sidecar is the one that the manifest sealed, and the shard has its size."""
    with contextlib.suppress(FileNotFoundError):  # its sha256 tells; another sidecar is read to say what is wrong
        data = place.read(f"{entry.shard}.json", fmt.SIDECAR_LIMIT_BYTES)
        if hashlib.sha256(data).hexdigest() == entry.sidecar_sha256:
            return check_shard_size(place, entry)
    sidecar, found = read_sidecar(place, entry.shard)
    if found != entry or sidecar.fingerprint != fingerprint:
        cause = "shards of two caches are mixed, or one was built again"
        what = f"is not the sidecar that the manifest lists; {cause}: restore the folder from a copy"
        raise CacheDamaged(f"{place}/{entry.shard}.json: {what}")


def check_shard_size(place: Location, entry: ShardEntry) -> None:
    """Raise CacheDamaged unless the shard is a regular file of the right size."""
    file = f"{place}/{entry.shard}.safetensors"
    try:
        size = place.size(f"{entry.shard}.safetensors")
    except FileNotFoundError:
        raise CacheDamaged(f"{file}: is missing") from None
    if size != entry.bytes:
        raise CacheDamaged(f"{file}: has {size:,} bytes, {entry.bytes:,} were written; {_cure(entry)}")


def check_digest(place: Location, entry: ShardEntry, sha256: str) -> None:
    """Raise CacheDamaged unless a shard's sha256 is what was written."""
    if sha256 != entry.sha256:
        written = f"its sha256 is {sha256[:16]}…, {entry.sha256[:16]}… was written"
        raise CacheDamaged(f"{place}/{entry.shard}.safetensors: {written}; {_cure(entry)}")


def _cure(entry: ShardEntry) -> str:
    return f"restore it from a copy, or delete manifest.json and {entry.shard} and those after it, and build again"


def most_open() -> int:
    """Return how many shards a reader may keep open: a quarter of the process's descriptors, since two may read."""
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_OPEN if soft == resource.RLIM_INFINITY else min(_MOST_OPEN, max(1, soft // 4))


class Shard:
    """The rows of a shard, in memory with `preload`; closed when unused; CacheDamaged: none of its size and header."""

    def __init__(self, place: Location, entry: ShardEntry, fingerprint: Fingerprint, *, preload: bool = False) -> None:
        self._place, self._entry, self._table = place, entry, fingerprint.arrays
        self._held, self._plan = fingerprint.contents, (plan := fingerprint.layout(entry.rows, entry.bytes))
        name, file = f"{entry.shard}.safetensors", f"{place}/{entry.shard}.safetensors"
        try:
            self._data: bytes | BinaryIO = b"".join(place.chunks(name)) if preload else place.open(name)
        except FileNotFoundError:
            raise CacheDamaged(f"{file}: is missing; {_CURE}") from None
        if not isinstance(self._data, bytes):
            weakref.finalize(self, self._data.close)
        found = len(self._data) if isinstance(self._data, bytes) else self._data.seek(0, 2)
        if not found == entry.bytes == plan.total_bytes:
            written = f"{entry.bytes:,} were written, and its {entry.rows} rows take {plan.total_bytes:,}"
            raise CacheDamaged(f"{file}: has {found:,} bytes, {written}")
        if self._bytes(0, len(plan.header)) != plan.header:
            header = read_header(self._bytes(0, min(entry.bytes, 8 + fmt.HEADER_LIMIT_BYTES)), file)
            if header != read_header(plan.header, file):
                raise CacheDamaged(f"{file}: its header describes other arrays than the cache's fingerprint demands")
        if self._held.lzma:
            self._sums, _ = index = np.empty((2, entry.rows + 1), "<u4")  # the two arrays are one behind the other
            self._fill(index, plan.starts["row_crc32"], "its index")
            self._ends = np.append(0, index[1].astype(np.int64))
            if (np.diff(self._ends) < 0).any() or self._ends[-1] != plan.total_bytes - plan.starts["rows"]:
                raise self._damaged("its list of rows' ends", "is not what was written")
            tokens = self._blob(0, "its table of tokens", True)
            self._tokens = np.frombuffer(decompress(tokens, 4 * self._held.vocab_size), "<i4")

    def rows(self, first: int, count: int = 1, *, check: bool = True) -> dict[str, np.ndarray]:
        """Return rows from `first` on as stored, [count, ...]; CacheDamaged: by CRC-32 (`check`), or it has changed."""
        where = f"row {first}" if count == 1 else f"rows {first} to {first + count - 1}"
        # A file that was removed can still be read while it is open, but a run could not be repeated from it.
        if not (isinstance(self._data, bytes) or self._place.far or os.fstat(self._data.fileno()).st_nlink):
            raise self._damaged(where, "cannot be read: the file was removed or replaced since it was opened")
        arrays = {spec.name: np.empty((count, *spec.row_shape), spec.dtype) for spec in self._table}
        if self._held.lzma:
            for number in range(first, first + count):
                blob = self._blob(number + 1, f"row {number}", check)
                try:
                    out = {name: array[number - first] for name, array in arrays.items()}
                    decompress_row(blob, self._held, self._table, self._tokens, out)
                except (ValueError, IndexError) as error:
                    raise self._damaged(f"row {number}", f"cannot be read ({error})") from None
            return arrays
        for spec in self._table:
            self._fill(arrays[spec.name], self._plan.starts[spec.name] + first * spec.row_bytes, where)
        if check:
            bad = np.flatnonzero(row_checksums(arrays, self._table) != arrays["row_crc32"])
            if len(bad):
                raise self._damaged(f"row {first + bad[0]}", "does not have its checksum")
        return arrays

    def _blob(self, number: int, where: str, check: bool) -> bytes:
        start, end = self._ends[number : number + 2]
        data = self._bytes(self._plan.starts["rows"] + int(start), end - start, where)
        if check and crc32(data) != self._sums[number]:
            raise self._damaged(where, "does not have its checksum")
        return data

    def parts(self, most: int) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """Yield all rows as `rows` does, at most `most` at a time, each time with the number of the first."""
        for first in range(0, self._entry.rows, most):
            yield first, self.rows(first, min(most, self._entry.rows - first))

    def check_sha256(self) -> None:
        """Raise CacheDamaged unless the whole shard has the sha256 that was written."""
        check_digest(self._place, self._entry, self.sha256())

    def sha256(self) -> str:
        """Return the sha256 of the whole shard."""
        digest = hashlib.sha256()
        room = np.empty(_CHUNK_BYTES, np.uint8)
        for start in range(0, self._entry.bytes, _CHUNK_BYTES):
            chunk = room[: self._entry.bytes - start]
            self._fill(chunk, start, f"byte {start:,}")
            digest.update(chunk.data)
        return digest.hexdigest()

    def _bytes(self, start: int, size: int, where: str = "its header") -> bytes:
        data = np.empty(size, np.uint8)
        self._fill(data, start, where)
        return data.tobytes()

    def _fill(self, array: np.ndarray, start: int, where: str) -> None:
        """Read an array's bytes from a place in the file."""
        if isinstance(self._data, bytes):
            array[...] = np.frombuffer(self._data, array.dtype, array.size, start).reshape(array.shape)
            return
        try:
            read = os.preadv(self._data.fileno(), [array.data], start)
        except OSError as error:
            raise self._damaged(where, f"cannot be read ({error.strerror})") from None
        if read < array.nbytes:
            raise self._damaged(where, "is cut off: the file is shorter than when it was opened")

    def _damaged(self, where: str, what: str) -> CacheDamaged:
        return CacheDamaged(f"{self._place}/{self._entry.shard}: {where} {what}; {_CURE}")


class VerifyReport(NamedTuple):
    """What was checked; there is a report only for an intact cache."""

    path: str
    shards: int
    rows: int
    bytes: int
    seconds: float
    strangers: tuple[str, ...]  # files in the folder that do not belong to the cache; harmless


def verify_cache(path: Place, progress: Progress | None = None, *, threads: int | None = None) -> VerifyReport:
    """Check every byte of a cache, `threads` shards at once; CacheError: unfinished; CacheDamaged names the first."""
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
    for start, part in shard.parts(4):
        for promise, kept in promises(part, fingerprint).items():
            if not kept:
                rows = f"rows {start} to {start + len(part['input_ids']) - 1}"
                raise CacheDamaged(f"{path}/{entry.shard}: {rows} break a rule of the format: {promise}")
    return entry
