"""A cache folder behind a URL, through fsspec: Google Cloud Storage, S3 and whatever else it has a driver for.

Every file is put whole, by a request that fails if the name exists (`ifGenerationMatch=0` on GCS, `If-None-Match: *` on
S3). Builders own different names (`build.partition`), so they need no lock: nothing committed is ever replaced.
Uploading under a temporary name and renaming, as on a disk, would be worse: there a rename is a copy and a delete, and
it overwrites. A put is not believed: the store's MD5 is compared with ours, or the object is read back where the store
has none. So the end of a build need not fetch the whole cache again.

Rows are read in random order, so a reader wants whole shards on its disk: fsspec's `simplecache` copies each shard
once for the process, into the folder for temporary files, and removes the copies at its end.
"""

from __future__ import annotations

import base64
import contextlib
import errno
import functools
import hashlib
import inspect
from collections.abc import Iterable, Iterator
from typing import Any, BinaryIO

from qat_lora.errors import CacheDamaged, CacheError, MissingExtraError, OutputExistsError, QatLoraError
from qat_lora.extras import require
from qat_lora.files.atomic import Lock, failpoint
from qat_lora.terminal import redact

CHUNK_BYTES = 8 << 20  # of one request when a file is read piece by piece
_EXTRAS = {"gs": "gcs", "gcs": "gcs", "s3": "s3", "s3a": "s3"}


class RemoteFolder:
    """A folder behind a URL; implements `location.Location`.

    Raises:
        CacheError: a URL of an unknown kind.
        MissingExtraError: fsspec or the driver is not installed.
    """

    far = True

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._fs, self._root = _open_file_system(self.url)

    def __str__(self) -> str:
        return redact(self.url)

    def names(self) -> list[str]:
        """See `Location`."""
        with self._reading(""), contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = (path.rstrip("/").rsplit("/", 1)[-1] for path in self._fs.ls(self._root, detail=False))
            return sorted(name for name in found if name)
        return []

    def has(self, name: str) -> bool:
        """See `Location`."""
        with contextlib.suppress(FileNotFoundError):
            self._info(name)
            return True
        return False

    def size(self, name: str) -> int:
        """See `Location`."""
        info = self._info(name)
        if info.get("type") != "file" or info.get("size") is None:
            raise CacheDamaged(f"{self}/{name}: is not a plain object, so it is not read")
        return int(info["size"])

    def read(self, name: str, limit_bytes: int) -> bytes:
        """See `Location`."""
        if self.size(name) > limit_bytes:
            raise CacheDamaged(f"{self}/{name}: is larger than {limit_bytes:,} bytes, so it is no file of a KD cache")
        with self._reading(name):
            return self._fs.cat_file(self._path(name))

    def chunks(self, name: str) -> Iterator[bytes]:
        """See `Location`."""
        size = self.size(name)
        for start in range(0, size, CHUNK_BYTES):
            with self._reading(name):
                chunk = self._fs.cat_file(self._path(name), start=start, end=min(size, start + CHUNK_BYTES))
            yield chunk

    def open(self, name: str) -> BinaryIO:
        """See `Location`; a copy on this machine's disk is opened."""
        with self._reading(name):
            return self._copies.open(self._path(name), "rb")

    @functools.cached_property
    def _copies(self) -> Any:
        """The file system that copies what is opened; its folder is removed with it."""
        return require("fsspec", "gcs").filesystem("simplecache", fs=self._fs, skip_instance_cache=True)

    def write_new(self, name: str, chunks: Iterable[bytes | memoryview], kind: str) -> tuple[int, str]:
        """See `Location`; the whole file is in memory for the length of the put.

        An object that is there with these very bytes counts as put: the answer to an earlier attempt was lost, or a
        build was killed before it put the sidecar of the shard.
        """
        self._require_create()
        data = b"".join(chunks)
        failpoint(f"{kind}-opened")
        with self._writing(name):
            try:
                self._fs.pipe_file(self._path(name), data, mode="create")
            except FileExistsError:
                if not self._holds(name, data):
                    raise OutputExistsError(
                        f"--out {self}: there is another {name} already, of another builder or of a build that was "
                        "killed; it was not touched: see that only one builder is at work, delete that object if it "
                        "has no sidecar, then run the same command again"
                    ) from None
            stored = self._is_stored(name, data)
        if not stored:
            raise OSError(errno.EIO, f"{name} is stored with other bytes than were sent")
        failpoint(f"{kind}-durable")
        return len(data), hashlib.sha256(data).hexdigest()

    def delete(self, name: str) -> None:
        """See `Location`."""
        with self._writing(name), contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(self._path(name))

    def lock(self, name: str, kind: Lock) -> contextlib.AbstractContextManager[None]:
        """Hold no lock: names that are never replaced need none."""
        self._require_create()
        return contextlib.nullcontext()

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}"

    def _info(self, name: str) -> dict[str, Any]:
        with self._reading(name):
            return self._fs.info(self._path(name))

    def _is_stored(self, name: str, data: bytes) -> bool:
        """Return whether the store holds what was put, by its MD5 if it has one."""
        info, md5 = self._info(name), hashlib.md5(data, usedforsecurity=False)
        if info.get("md5Hash") == base64.b64encode(md5.digest()).decode():
            return True
        return str(info.get("ETag", "")).strip('"') == md5.hexdigest() or self._holds(name, data)

    def _holds(self, name: str, data: bytes) -> bool:
        return self.size(name) == len(data) and b"".join(self.chunks(name)) == data

    def _require_create(self) -> None:
        """Refuse to write through a driver that knows no create-only put: it would overwrite without a word."""
        put = getattr(type(self._fs), "_pipe_file" if self._fs.async_impl else "pipe_file")
        if "mode" not in inspect.signature(put).parameters:
            driver = type(self._fs).__module__.split(".")[0]
            raise CacheError(
                f"--out {self}: {driver} as installed cannot put an object only where there is none, so builders could "
                f"overwrite each other; install a newer {driver}, or build on a disk and copy the folder"
            )

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
            raise CacheError(
                f"{self}/{name}: cannot be read ({reason}); check the address, the credentials and the network"
            ) from error

    @contextlib.contextmanager
    def _writing(self, name: str) -> Iterator[None]:
        """Turn what drivers raise into an OSError with a text."""
        try:
            yield
        except (QatLoraError, FileExistsError):
            raise
        except Exception as error:
            raise OSError(errno.EIO, f"{name}: {_reason(error, self.url)}") from error


def _reason(error: BaseException, url: str) -> str:
    text = redact(" ".join(str(error).split()), url)[:200]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _open_file_system(url: str) -> tuple[Any, str]:
    """Return fsspec's file system of a URL, which remembers no listing, and the path in it."""
    protocol = url.replace("::", "://").split("://")[0]
    fsspec = require("fsspec.core", _EXTRAS.get(protocol, "gcs"))
    try:
        # "::" chains file systems; their options are each driver's own.
        options = {} if "::" in url else {"use_listings_cache": False, "skip_instance_cache": False}
        file_system, root = fsspec.url_to_fs(url, **options)
    except ImportError as error:
        extra = _EXTRAS.get(protocol)
        cure = f": pip install 'qat-lora[{extra}]'" if extra else f" ({_reason(error, url)})"
        raise MissingExtraError(f"{url}: its driver is not installed{cure}") from None
    except ValueError as error:
        raise CacheError(
            f"{url}: {_reason(error, url)}; allowed: a folder, gs://…, s3://… or another URL of fsspec"
        ) from None
    except Exception as error:
        raise CacheError(
            f"{url}: cannot be reached ({_reason(error, url)}); check the address and the credentials"
        ) from error
    return file_system, root.rstrip("/")
