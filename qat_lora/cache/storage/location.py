"""Where a cache lies: a folder of this machine, or one behind a URL (`gs://`, `s3://`, any of fsspec's).

The rest of the cache asks for nothing but files by name, so that is all a location does: list, read, write once,
delete, hold a lock. Two kinds exist because their guarantees differ in kind, not in degree. A local folder has links,
`fsync`, `flock` and files that can be read anywhere, and uses all four. An object store has none, but its objects
appear whole and its puts can be made to fail where the name exists. One layer that pretends that both are the same
(fsspec's own local file system) would have to give up what each does best.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO, Protocol

from qat_lora.cache.format.records import open_regular, read_bounded
from qat_lora.cache.storage.object_store import ObjectFolder, is_object_url
from qat_lora.errors import CacheDamaged, CacheError
from qat_lora.files import atomic as commit

_MANGLED = re.compile(r"[a-z][a-z0-9+]{1,15}:")
_CHUNK_BYTES = 1 << 20


class Location(Protocol):
    """A folder of a cache; `str` of it is what the user gave. Names are file names, never paths.

    Reading a name that is not there raises FileNotFoundError; what is there and is no plain file, CacheDamaged.
    """

    far: bool
    """Whether reading is a transfer, so that nothing should be read twice and many things at once."""

    def names(self) -> list[str]:
        """Return the names in the folder, sorted; none if there is no folder."""

    def has(self, name: str) -> bool:
        """Return whether there is something of that name, be it a dead link."""

    def size(self, name: str) -> int:
        """Return the bytes of a file."""

    def read(self, name: str, limit_bytes: int) -> bytes:
        """Read a small file; CacheDamaged if it is larger than the limit."""

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield a file from its beginning to its end."""

    def load(self, name: str, size: int, sha256: str) -> bytes:
        """Return the bytes of a shard; CacheDamaged unless it has this size.

        The sha256 is compared only where bytes are transferred: a local file is checked when the reader wants it.
        """

    def open(self, name: str, size: int, sha256: str) -> BinaryIO:
        """Open a shard, or a copy of it on this machine, for reading at any place; otherwise as `load`."""

    def make(self) -> None:
        """Make the folder where that means something."""

    def write_new(self, name: str, chunks: Iterable[bytes | memoryview], kind: str) -> tuple[int, str]:
        """Write a file that must not exist yet, whole or not at all; return its size and sha256."""

    def delete(self, name: str) -> None:
        """Remove a file; no error if it is gone."""

    def settle(self) -> None:
        """Make names that were written or removed durable."""

    def free_bytes(self) -> int | None:
        """Return the room that is left, None where there is no telling."""

    def exclusive(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Hold a lock that nobody else has; OutputExistsError if somebody does."""

    def sharing(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Hold a lock that others may share; OutputExistsError if somebody has it exclusively."""

    def in_turn(self, name: str) -> contextlib.AbstractContextManager[None]:
        """Hold a lock after waiting for whoever has it."""


Place = str | Path | Location
"""What callers may give: a path, a URL as text, or a location."""


def locate(place: Place) -> Location:
    """Return the location that a path or URL means.

    Raises:
        CacheError: a URL of an unknown kind, or one that `pathlib` has already spoilt.
        MissingExtraError: the URL's driver is not installed.
    """
    if not isinstance(place, str | Path):
        return place
    text = str(place)
    if isinstance(place, str):
        if text.startswith(("file://", "local://")):
            return LocalFolder(Path(text.split("://", 1)[1]))
        if is_object_url(text):
            return ObjectFolder(text)
    head = text.split("/", 1)[0]
    if "/" in text and _MANGLED.fullmatch(head) and not Path(head).exists():
        raise CacheError(f"{text}: is no folder; if it is meant as a URL, give {head}//… as text, not as a Path")
    return LocalFolder(Path(text))


class LocalFolder:
    """A folder of this machine's file systems; `commit` has the mechanics of its writes and locks."""

    far = False

    def __init__(self, path: Path) -> None:
        self.path = path
        self._text = str(path)

    def __str__(self) -> str:
        return self._text

    def _file(self, name: str) -> str:
        return (
            f"{self._text}/{name}"  # a cache can have 20,000 shards, and joining Paths takes as long as a system call
        )

    def names(self) -> list[str]:
        """See `Location`."""
        return sorted(os.listdir(self.path)) if self.path.is_dir() else []

    def has(self, name: str) -> bool:
        """See `Location`."""
        return os.path.lexists(self.path / name)

    def size(self, name: str) -> int:
        """See `Location`."""
        with open_regular(self._file(name)) as opened:
            return opened.seek(0, 2)

    def read(self, name: str, limit_bytes: int) -> bytes:
        """See `Location`."""
        return read_bounded(self._file(name), limit_bytes)

    def chunks(self, name: str) -> Iterator[bytes]:
        """See `Location`."""
        with open_regular(self._file(name)) as opened:
            while chunk := opened.read(_CHUNK_BYTES):
                yield chunk

    def load(self, name: str, size: int, sha256: str) -> bytes:
        """See `Location`."""
        with self.open(name, size, sha256) as opened:
            data = opened.read()
        self._check_size(name, len(data), size)
        return data

    def open(self, name: str, size: int, sha256: str) -> BinaryIO:
        """See `Location`."""
        opened = open_regular(self._file(name))
        try:
            self._check_size(name, os.fstat(opened.fileno()).st_size, size)
        except CacheDamaged:
            opened.close()
            raise
        return opened

    def _check_size(self, name: str, found: int, size: int) -> None:
        if found != size:
            raise CacheDamaged(f"{self.path / name}: has {found:,} bytes, {size:,} were written")

    def make(self) -> None:
        """See `Location`."""
        self.path.mkdir(parents=True, exist_ok=True)

    def write_new(self, name: str, chunks: Iterable[bytes | memoryview], kind: str) -> tuple[int, str]:
        """See `Location`."""
        return commit.write_new(self.path / name, chunks, kind)

    def delete(self, name: str) -> None:
        """See `Location`."""
        (self.path / name).unlink(missing_ok=True)

    def settle(self) -> None:
        """See `Location`."""
        commit.fsync(self.path)

    def free_bytes(self) -> int | None:
        """See `Location`; of the file system on which the folder is or would be."""
        path = Path(os.path.abspath(self.path))
        return shutil.disk_usage(next(folder for folder in (path, *path.parents) if folder.exists())).free

    def exclusive(self, name: str) -> contextlib.AbstractContextManager[None]:
        """See `Location`."""
        return commit.exclusive(self.path / name)

    def sharing(self, name: str) -> contextlib.AbstractContextManager[None]:
        """See `Location`."""
        return commit.sharing(self.path / name)

    def in_turn(self, name: str) -> contextlib.AbstractContextManager[None]:
        """See `Location`."""
        return commit.in_turn(self.path / name)
