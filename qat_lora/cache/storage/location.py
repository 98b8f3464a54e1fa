"""Where a cache is: a folder of this machine, or one behind a URL (Google Cloud Storage, S3, any of fsspec's).

There are two kinds because their guarantees differ. A local folder has links, `fsync`, `flock` and files that can be
read at any place. An object store has none of them, but its objects appear whole, and a put can be made to fail where
the name exists. One layer over both (fsspec's own local file system) would give up the best of each.

Every object is put whole, by a request that fails if the name exists (`ifGenerationMatch=0` on GCS, `If-None-Match: *`
on S3); renaming from a temporary name would be a copy and a delete, and overwrites. Builders own different names
(`build.writer`), so they need no lock. A put is not believed: the store's MD5 is compared with ours, or the object is
read back, so the end of a build need not fetch the whole cache again. A reader wants rows in random order, so fsspec's
`simplecache` copies each shard once into the folder for temporary files, until the end of the process.
"""

import base64
import contextlib
import errno
import functools
import hashlib
import inspect
import os
import re
import shutil
import stat
from collections.abc import Iterable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any, BinaryIO

from qat_lora.errors import CacheDamaged, CacheError, MissingExtraError, OutputExistsError, QatLoraError
from qat_lora.extras import URL_EXTRAS, require
from qat_lora.files import folders
from qat_lora.terminal import redact

_URL = re.compile(r"[a-z][a-z0-9+.-]*(://|::)")
_MANGLED = re.compile(r"[a-z][a-z0-9+]{1,15}:")
_CHUNK_BYTES = 1 << 20
_REQUEST_BYTES = 8 << 20  # of one request when an object is read piece by piece


class LocalFolder:
    """A folder of this machine's file systems; `files.folders` has the mechanics of its writes and locks.

    Its methods are those of every location; `str` of it is what the user gave. Names are file names, never paths.
    Reading a name that is not there raises FileNotFoundError; reading a link or no plain file, CacheDamaged.
    """

    far = False  # whether reading is a transfer, so that nothing should be read twice and many things at once

    def __init__(self, path: Path) -> None:
        self.path = path

    def __str__(self) -> str:
        return str(self.path)

    def names(self) -> list[str]:
        """Return the names in the folder, sorted; none if there is no folder."""
        return sorted(os.listdir(self.path)) if self.path.is_dir() else []

    def times(self) -> dict[str, float]:
        """Return when each file of the folder was written, in seconds since 1970."""
        return {file.name: file.stat().st_mtime for file in os.scandir(self.path)} if self.path.is_dir() else {}

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
        return folders.write_new(self.path / name, chunks, kind)

    def delete(self, name: str) -> None:
        """Remove a file; no error if it is gone."""
        (self.path / name).unlink(missing_ok=True)

    def free_bytes(self) -> int:
        """Return the room on the folder's file system, also before the folder is made."""
        path = Path(os.path.abspath(self.path))
        return shutil.disk_usage(next(folder for folder in (path, *path.parents) if folder.exists())).free

    def lock(self, name: str, kind: folders.Lock) -> contextlib.AbstractContextManager[None]:
        """Hold a lock; OutputExistsError if somebody has it, unless `kind` is to wait."""
        return folders.lock(self.path / name, kind)


class RemoteFolder:
    """A folder behind a URL: CacheError for one of an unknown kind, MissingExtraError where its driver is missing."""

    far = True

    def __init__(self, url: str) -> None:
        self.url = url = url.rstrip("/")
        extra = URL_EXTRAS.get(url.replace("::", "://").split("://")[0])
        fsspec = require("fsspec.core", extra or "gcs")
        try:
            # No listing is remembered, but those of the Hub, which counts requests, by this object alone. "::" chains
            # file systems; their options are each driver's own.
            hub = url.startswith("hf://")
            options = {} if "::" in url else {"use_listings_cache": hub, "skip_instance_cache": hub}
            self._fs, root = fsspec.url_to_fs(url, **options)
        except ImportError as error:
            cure = f": pip install 'qat-lora[{extra}]'" if extra else f" ({_reason(error, url)})"
            raise MissingExtraError(f"{url}: its driver is not installed{cure}") from None
        except ValueError as error:
            reason = _reason(error, url)
            raise CacheError(f"{url}: {reason}; allowed: a folder, gs://…, s3://…, hf://… or more of fsspec") from None
        except Exception as error:
            reason = _reason(error, url)
            raise CacheError(f"{url}: cannot be reached ({reason}); check the address and the credentials") from error
        self._root = root.rstrip("/")

    def __str__(self) -> str:
        return redact(self.url)

    def names(self) -> list[str]:
        """See `LocalFolder`."""
        with self._reading(""), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = (path.rstrip("/").rsplit("/", 1)[-1] for path in self._fs.ls(self._root, detail=False))
            return sorted(name for name in found if name)
        return []

    def times(self) -> dict[str, float]:
        """See `LocalFolder`; 0 where the store does not say."""
        with self._reading(""), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            return {info["name"].rsplit("/", 1)[-1]: _time(info) for info in self._fs.ls(self._root, detail=True)}
        return {}

    def has(self, name: str) -> bool:
        """See `LocalFolder`."""
        with contextlib.suppress(FileNotFoundError):
            self._info(name)
            return True
        return False

    def size(self, name: str) -> int:
        """See `LocalFolder`."""
        info = self._info(name)
        if info.get("type") != "file" or info.get("size") is None:
            raise CacheDamaged(f"{self}/{name}: is not a plain object, so it is not read")
        return int(info["size"])

    def read(self, name: str, limit_bytes: int) -> bytes:
        """See `LocalFolder`."""
        if self.size(name) > limit_bytes:
            raise CacheDamaged(f"{self}/{name}: is larger than {limit_bytes:,} bytes, so it is no file of a KD cache")
        with self._reading(name):
            return self._fs.cat_file(self._path(name))

    def chunks(self, name: str) -> Iterator[bytes]:
        """See `LocalFolder`."""
        size = self.size(name)
        for start in range(0, size, _REQUEST_BYTES):
            with self._reading(name):
                chunk = self._fs.cat_file(self._path(name), start=start, end=min(size, start + _REQUEST_BYTES))
            yield chunk

    def open(self, name: str) -> BinaryIO:
        """See `LocalFolder`; a copy on this machine's disk is opened."""
        with self._reading(name):
            return self._copies.open(self._path(name), "rb")

    @functools.cached_property
    def _copies(self) -> Any:
        """The file system that copies what is opened; its folder is removed with it."""
        return require("fsspec", "gcs").filesystem("simplecache", fs=self._fs, skip_instance_cache=True)

    def write_new(self, name: str, chunks: Iterable[bytes | memoryview], kind: str) -> tuple[int, str]:
        """See `LocalFolder`; the whole file is in memory for the length of the put.

        An object with these very bytes counts as put: an answer was lost, or a build killed before the shard's sidecar.
        """
        self.require_create()
        data = b"".join(chunks)
        folders.failpoint(f"{kind}-opened")
        with self._writing(name):
            try:
                self._fs.pipe_file(self._path(name), data, mode="create")
            except FileExistsError:
                if not self._holds(name, data):
                    what = f"there is another {name} already, of another builder or of a build that was killed"
                    remedy = "see that one builder is at work, delete the object if it has no sidecar, then run again"
                    raise OutputExistsError(f"--out {self}: {what}; it was not touched: {remedy}") from None
            info, md5 = self._info(name), hashlib.md5(data, usedforsecurity=False)
            told = info.get("md5Hash"), str(info.get("ETag", "")).strip('"')
            known = base64.b64encode(md5.digest()).decode() == told[0] or md5.hexdigest() == told[1]
            stored = known or self._holds(name, data)
        if not stored:
            raise OSError(errno.EIO, f"{name} is stored with other bytes than were sent")
        folders.failpoint(f"{kind}-durable")
        return len(data), hashlib.sha256(data).hexdigest()

    def delete(self, name: str) -> None:
        """See `LocalFolder`."""
        with self._writing(name), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def lock(self, name: str, kind: folders.Lock) -> contextlib.AbstractContextManager[None]:
        """Hold no lock: names that are never replaced need none. The time of a builder's says when it was started."""
        self.require_create()
        if kind == "exclusive" and name[-1].isdigit():
            with self._writing(name):
                self._fs.pipe_file(self._path(name), b"")
        return contextlib.nullcontext()

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _info(self, name: str) -> dict[str, Any]:
        with self._reading(name):
            return self._fs.info(self._path(name))

    def _holds(self, name: str, data: bytes) -> bool:
        return self.size(name) == len(data) and b"".join(self.chunks(name)) == data

    def require_create(self) -> None:
        """Refuse to write through a driver that knows no create-only put: it would overwrite without a word."""
        if self.url.startswith("hf://"):  # its driver takes the mode and overwrites
            remedy = "build on a disk or in a bucket (gs://, s3://), then send it with `qat-lora cache push`"
            raise CacheError(f"--out {self}: is on the Hub, which caches are read from but not built in; {remedy}")
        put = getattr(type(self._fs), "_pipe_file" if self._fs.async_impl else "pipe_file")
        if "mode" not in inspect.signature(put).parameters:
            driver = type(self._fs).__module__.split(".")[0]
            what = f"{driver} as installed cannot put an object only where there is none"
            remedy = f"install a newer {driver}, or build on a disk and copy the folder"
            raise CacheError(f"--out {self}: {what}, so builders could overwrite each other; {remedy}")

    @contextlib.contextmanager
    def _reading(self, name: str) -> Iterator[None]:
        """Turn what drivers raise into one line."""
        try:
            yield
        except (QatLoraError, FileNotFoundError, NotADirectoryError):
            raise
        except IsADirectoryError:
            raise CacheDamaged(f"{self}/{name}: is not a plain object, so it is not read") from None
        except Exception as error:
            reason = _reason(error, self.url)
            remedy = "check the address, the credentials and the network"
            raise CacheError(f"{self}/{name}: cannot be read ({reason}); {remedy}") from error

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        """Turn what drivers raise into an OSError with a text."""
        try:
            yield
        except (QatLoraError, FileExistsError):
            raise
        except Exception as error:
            raise OSError(errno.EIO, f"{name}: {_reason(error, self.url)}") from error


def _time(info: dict[str, Any]) -> float:
    said = next((info[key] for key in ("LastModified", "mtime", "updated", "created") if info.get(key)), 0)
    return said if isinstance(said, int | float) else datetime.fromisoformat(str(said)).timestamp()


def _reason(error: BaseException, url: str) -> str:
    text = redact(" ".join(str(error).split()), url)[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


Location = LocalFolder | RemoteFolder
Place = str | Path | Location  # what callers may give: a path, a URL as text, or a location


def locate(place: Place) -> Location:
    """Return the location that a path or URL means; CacheError, or MissingExtraError where its driver is missing."""
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
