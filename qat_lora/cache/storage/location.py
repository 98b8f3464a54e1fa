"""Where a cache is: a folder of this machine, or one behind a URL (`gs://`, `s3://`, any of fsspec's).

The rest of the cache only lists, reads, writes once, deletes and locks files by name. There are two kinds of location
because their guarantees differ. A local folder has links, `fsync`, `flock` and files that can be read at any place. An
object store has none of them, but its objects appear whole, and a put can be made to fail where the name exists. One
layer over both (fsspec's own local file system) would give up the best of each.
"""

from __future__ import annotations

import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import BinaryIO

from qat_lora.cache.storage.remote import RemoteFolder
from qat_lora.errors import CacheDamaged, CacheError
from qat_lora.files import atomic

_URL = re.compile(r"[a-z][a-z0-9+.-]*(://|::)")
_MANGLED = re.compile(r"[a-z][a-z0-9+]{1,15}:")
_CHUNK_BYTES = 1 << 20


class LocalFolder:
    """A folder of this machine's file systems; `files.atomic` has the mechanics of its writes and locks.

    Its methods are those of every location; `str` of it is what the user gave. Names are file names, never paths.
    Reading a name that is not there raises FileNotFoundError; reading a link or no plain file, CacheDamaged.
    """

    far = False
    """Whether reading is a transfer, so that nothing should be read twice and many things at once."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def names(self) -> list[str]:
        """Return the names in the folder, sorted; none if there is no folder."""
        return sorted(os.listdir(self.path)) if self.path.is_dir() else []

    def has(self, name: str) -> bool:
        """Return whether there is something of that name, be it a dead link."""
        return os.path.lexists(self.path / name)

    def size(self, name: str) -> int:
        """Return the bytes of a file."""
        with self.open(name) as opened:
            return opened.seek(0, 2)

    def read(self, name: str, limit_bytes: int) -> bytes:
        """Read a small file; CacheDamaged if it is larger than the limit."""
        with self.open(name) as opened:
            data = opened.read(limit_bytes + 1)
        if len(data) > limit_bytes:
            raise CacheDamaged(f"{self}/{name}: is larger than {limit_bytes:,} bytes, so it is no file of a KD cache")
        return data

    def chunks(self, name: str) -> Iterator[bytes]:
        """Yield a file from its beginning to its end."""
        with self.open(name) as opened:
            while chunk := opened.read(_CHUNK_BYTES):
                yield chunk

    def open(self, name: str) -> BinaryIO:
        """Open a file of this machine, or a copy on this machine, for reading at any place."""
        path = f"{self}/{name}"  # there can be 20,000 shards, and joining Paths takes as long as a system call
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise CacheDamaged(f"{path}: cannot be opened as a regular file ({error.strerror})") from None
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise CacheDamaged(f"{path}: is not a regular file, so it is not read; a KD cache holds plain files only")
        return os.fdopen(descriptor, "rb")

    def write_new(self, name: str, chunks: Iterable[bytes | memoryview], kind: str) -> tuple[int, str]:
        """Write a file that must not exist yet, whole or not at all; return its size and sha256."""
        return atomic.write_new(self.path / name, chunks, kind)

    def delete(self, name: str) -> None:
        """Remove a file; no error if it is gone."""
        (self.path / name).unlink(missing_ok=True)

    def free_bytes(self) -> int:
        """Return the room on the folder's file system, also before the folder is made."""
        path = Path(os.path.abspath(self.path))
        return shutil.disk_usage(next(folder for folder in (path, *path.parents) if folder.exists())).free

    def lock(self, name: str, kind: atomic.Lock) -> AbstractContextManager[None]:
        """Hold a lock; OutputExistsError if somebody has it, unless `kind` is to wait."""
        return atomic.lock(self.path / name, kind)


Location = LocalFolder | RemoteFolder
Place = str | Path | Location  # what callers may give: a path, a URL as text, or a location


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
        if _URL.match(text):
            return RemoteFolder(text)
    first = text.split("/", 1)[0]
    if "/" in text and _MANGLED.fullmatch(first) and not Path(first).exists():
        raise CacheError(f"{text}: is no folder; if it is meant as a URL, give {first}//… as text, not as a Path")
    return LocalFolder(Path(text))
