"""One shard, open for reading: a row is read on demand, and is what was written or an error.

A row is read with `pread` into memory of its own, and its CRC-32 is computed from those very bytes before they are
decoded. Mapping the file would save a copy of half a megabyte, but a mapped file that shrinks ends the process with
SIGBUS, which no program can turn into a message, and bytes that change between check and use would go unnoticed. A
short read, a wrong checksum and a file that was removed give one error that names shard and row.
"""

from __future__ import annotations

import functools
import hashlib
import os
import weakref
from collections.abc import Iterator
from typing import BinaryIO

import numpy as np

from qat_lora.cache.format import layout as fmt
from qat_lora.cache.format.codec import row_checksums
from qat_lora.cache.format.records import Fingerprint, ShardEntry, read_header
from qat_lora.cache.storage.location import Location
from qat_lora.cache.storage.store import check_digest
from qat_lora.errors import CacheDamaged

_CHUNK_BYTES = 1 << 20
_MOST_OPEN = 256
_CURE = "restore the shard from a copy"


def most_open() -> int:
    """Return how many shards a reader may keep open: a quarter of the process's limit, since two may read at a time.

    An open shard holds a descriptor, and a process may have few (256 on macOS).
    """
    import resource

    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST_OPEN if soft == resource.RLIM_INFINITY else min(_MOST_OPEN, max(1, soft // 4))


class Shard:
    """The rows of a shard, size and header checked; closed when nothing refers to it any more.

    With `preload`, its bytes are held in memory.

    Raises:
        CacheDamaged: the file is missing, or its size or header are not what the fingerprint demands.
    """

    def __init__(self, place: Location, entry: ShardEntry, fingerprint: Fingerprint, *, preload: bool = False) -> None:
        self._place, self._entry, self._table = place, entry, fingerprint.arrays
        self._plan = plan = _plan(fingerprint, entry.rows)
        name = f"{entry.shard}.safetensors"
        file = f"{place}/{name}"
        try:
            self._data: bytes | BinaryIO = b"".join(place.chunks(name)) if preload else place.open(name)
        except FileNotFoundError:
            raise CacheDamaged(f"{file}: is missing; {_CURE}") from None
        if isinstance(self._data, bytes):
            found = len(self._data)
        else:
            weakref.finalize(self, self._data.close)
            found = os.fstat(self._data.fileno()).st_size
        if found != entry.bytes:
            raise CacheDamaged(f"{file}: has {found:,} bytes, {entry.bytes:,} were written")
        if entry.bytes != plan.total_bytes:
            raise CacheDamaged(f"{file}: has {entry.bytes:,} bytes; its {entry.rows} rows take {plan.total_bytes:,}")
        if self._beginning(len(plan.header)) != plan.header:
            header = read_header(self._beginning(min(entry.bytes, 8 + fmt.HEADER_LIMIT_BYTES)), file)
            if header != read_header(plan.header, file):
                raise CacheDamaged(f"{file}: its header describes other arrays than the cache's fingerprint demands")

    def rows(
        self, first: int, count: int = 1, *, check: bool = True, into: dict[str, np.ndarray] | None = None
    ) -> dict[str, np.ndarray]:
        """Return the arrays [count, ...] of some rows, as they are stored.

        Args:
            first: number of the first row in the shard.
            count: how many rows.
            check: compare each row with its CRC-32.
            into: what an earlier call with the same count returned, written over and returned again: fresh memory for
                every row takes as long as reading it.

        Raises:
            CacheDamaged: a row is not what was written, or the file has changed since it was opened.
        """
        where = f"row {first}" if count == 1 else f"rows {first} to {first + count - 1}"
        # A file that was removed can still be read while it is open, but a run could not be repeated from it.
        if not (isinstance(self._data, bytes) or self._place.far or os.fstat(self._data.fileno()).st_nlink):
            raise self._damaged(where, "cannot be read: the file was removed or replaced since it was opened")
        arrays = into or {spec.name: np.empty((count, *spec.row_shape), spec.dtype) for spec in self._table}
        for spec in self._table:
            array = arrays[spec.name]
            self._fill(array, self._plan.starts[spec.name] + first * spec.row_bytes, where)
        if check:
            bad = np.flatnonzero(row_checksums(arrays, self._table) != arrays["row_crc32"])
            if len(bad):
                raise self._damaged(f"row {first + bad[0]}", "does not have its checksum")
        return arrays

    def parts(self, most: int) -> Iterator[tuple[int, dict[str, np.ndarray]]]:
        """Yield all rows as `rows` does, at most `most` at a time, each time with the number of the first."""
        for first in range(0, self._entry.rows, most):
            yield first, self.rows(first, min(most, self._entry.rows - first))

    def check_sha256(self) -> None:
        """Raise CacheDamaged unless the whole shard has the sha256 that was written."""
        digest = hashlib.sha256()
        room = np.empty(_CHUNK_BYTES, np.uint8)
        for start in range(0, self._entry.bytes, _CHUNK_BYTES):
            chunk = room[: self._entry.bytes - start]
            self._fill(chunk, start, f"byte {start:,}")
            digest.update(chunk.data)
        check_digest(self._place, self._entry, digest.hexdigest())

    def _beginning(self, size: int) -> bytes:
        header = np.empty(size, np.uint8)
        self._fill(header, 0, "its header")
        return header.tobytes()

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


@functools.lru_cache(maxsize=64)
def _plan(fingerprint: Fingerprint, rows: int) -> fmt.Layout:
    """Return the layout of a shard: the same in all shards of as many rows, and a cache can have 20,000."""
    return fmt.layout(fingerprint.arrays, rows, fingerprint.sha256)
