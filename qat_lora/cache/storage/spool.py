"""Local copies of shards that lie behind a URL, so that their rows can be read like any other.

Rows are asked for in random order, so every shard of a cache is wanted all the time: reading one row by ranges is a
dozen requests, and keeping a few whole shards means to fetch them again for every batch. A shard is therefore fetched
once for all processes of the machine, into `qat-lora-spool-<user>` in the folder for temporary files (`TMPDIR`),
under its sha256, which is checked on the way. The last process to end removes the folder; one that was killed leaves
it, and the next run finds its shards there.

Where the disk is too small for all, the copies that were fetched first make room. That works, but fetches them again
and again; `preload`, a larger `TMPDIR` or a copy of the cache on a disk is better then.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import stat
import tempfile
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from qat_lora.errors import CacheDamaged, CacheError
from qat_lora.files.atomic import in_turn

RESERVE_BYTES = 1 << 30
"""Left free on the disk."""
_ATTEMPTS = 3
"""Another process may remove a copy between finding and opening it."""

Chunks = Callable[[], Iterator[bytes]]


class Spool:
    """The spool folder, held until the object is gone."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.gettempdir()) / f"qat-lora-spool-{os.getuid()}"
        self._finalizer = weakref.finalize(self, _leave, self.folder, _join(self.folder), os.getpid())

    def open(self, where: str, size: int, sha256: str, chunks: Chunks) -> BinaryIO:
        """Open a shard; fetched first if there is no copy.

        Raises:
            CacheDamaged: what was fetched is not what was written; `where` is named.
            CacheError: the disk has no room for a single shard.
        """
        file = self.folder / f"{sha256}.safetensors"
        for attempt in range(_ATTEMPTS):
            try:
                with in_turn(self.folder / f"{sha256}.lock"):
                    if not (file.exists() and file.stat().st_size == size):
                        _fetch(file, where, size, sha256, chunks)
                    return open(file, "rb")
            except FileNotFoundError:
                if attempt == _ATTEMPTS - 1:
                    raise
                self.folder.mkdir(mode=0o700, exist_ok=True)
        raise AssertionError("not reached")


def checked(where: str, size: int, sha256: str, chunks: Iterator[bytes]) -> Iterator[bytes]:
    """Pass on the chunks of a transfer; raise CacheDamaged at its end if they are not what was written."""
    digest, found = hashlib.sha256(), 0
    for chunk in chunks:
        digest.update(chunk)
        found += len(chunk)
        yield chunk
    if found != size:
        raise CacheDamaged(f"{where}: has {found:,} bytes, {size:,} were written")
    if digest.hexdigest() != sha256:
        raise CacheDamaged(f"{where}: its sha256 is {digest.hexdigest()[:16]}…, {sha256[:16]}… was written")


def _fetch(file: Path, where: str, size: int, sha256: str, chunks: Chunks) -> None:
    _make_room(file.parent, size)
    partial = file.with_suffix(".tmp")
    try:
        with open(partial, "wb") as opened:
            for chunk in checked(where, size, sha256, chunks()):
                opened.write(chunk)
        partial.replace(file)
    finally:
        partial.unlink(missing_ok=True)


def _make_room(folder: Path, size: int) -> None:
    while (free := shutil.disk_usage(folder).free) < size + RESERVE_BYTES:
        copies = sorted(folder.glob("*.safetensors"), key=_fetched_at)
        if not copies:
            raise CacheError(
                f"{folder}: has {free:,} bytes free, a shard takes {size:,} and {RESERVE_BYTES:,} are to stay free; "
                "let TMPDIR name a folder with more room, or copy the cache to a disk and give that folder"
            )
        copies[0].unlink(missing_ok=True)  # who has it open keeps it


def _fetched_at(file: Path) -> float:
    with contextlib.suppress(FileNotFoundError):
        return file.stat().st_mtime
    return 0.0


def _join(folder: Path) -> int:
    """Make the folder, for this user alone, and return a descriptor that says that it is in use."""
    import fcntl

    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise CacheError(f"{folder}: is not this user's own folder; remove it, or let TMPDIR name another folder")
    descriptor = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def _leave(folder: Path, descriptor: int, owner: int) -> None:
    """Remove the folder if no other process uses it."""
    import fcntl

    if os.getpid() == owner:  # a forked child has the same lock, and its end is not the owner's
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    os.close(descriptor)
