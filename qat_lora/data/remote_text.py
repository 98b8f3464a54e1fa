"""Text behind a URL (gs://, s3://, hf://, any file system of fsspec): copied once, then read as files of this machine.

Reading it in place would fetch it several times: to look at, to name it by its content, to pack it, and by every
process. A copy is named by the URL and by what the store lists (names, sizes, versions), so changed text is another.
"""

import contextlib
import functools
import hashlib
import json
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qat_lora.errors import MissingExtraError, QatLoraError, TextError
from qat_lora.extras import URL_EXTRAS, require
from qat_lora.terminal import redact

_VERSION_KEYS = ("size", "etag", "ETag", "md5Hash", "blob_id", "mtime", "LastModified", "updated")


def copies_folder() -> Path:
    """Return where copies are kept: below XDG_CACHE_HOME, by default ~/.cache."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "qat-lora" / "text"


@functools.lru_cache  # a run asks several times and reads one text
def fetched(url: str) -> Path:
    """Return the file or folder on this machine that holds the text of a URL, copied if it is not there yet.

    TextError: nothing is there, or it cannot be read; MissingExtraError: its driver is not installed.
    """
    if url.startswith(("file://", "local://")):
        return Path(url.split("://", 1)[1])
    shown = redact(url)
    with _reading(url) as (fs, root):
        files = {path: info for path, info in fs.find(root, detail=True).items() if info.get("type") != "directory"}
        if not files:
            raise TextError(f"dataset: {shown}: nothing is there; check the address")
        seen = [(path, *(str(info.get(key)) for key in _VERSION_KEYS)) for path, info in sorted(files.items())]
        home = copies_folder() / hashlib.sha256(json.dumps([shown, seen]).encode()).hexdigest()[:16]
        name = root.rstrip("/").rsplit("/", 1)[-1] or "text"
        if not home.is_dir():
            _copy(fs, files, root, home, name)
        return home / name


def listing(url: str, patterns: Sequence[str]) -> list[tuple[str, int]]:
    """Return the files behind a URL that fit a pattern, by name, with sizes; a file by itself has the name ""."""
    with _reading(url) as (fs, root):
        found = {path[len(root) :].strip("/"): info for path, info in fs.find(root, detail=True).items()}
        fits = re.compile("|".join(map(require("fsspec.utils", "gcs").glob_translate, patterns))).match
        shown = (name for name in sorted(found) if not name.startswith(".") and "/." not in name)
        return [(name, int(found[name]["size"])) for name in shown if not name or fits(name)]


@contextlib.contextmanager
def _reading(url: str) -> Iterator[tuple[Any, str]]:
    """Yield a URL's file system and root, and turn what drivers raise into one line."""
    extra, shown = URL_EXTRAS.get(url.split("://")[0], "gcs"), redact(url)
    fsspec = require("fsspec.core", extra)
    try:
        yield fsspec.url_to_fs(url)
    except ImportError:
        raise MissingExtraError(f"{shown}: its driver is not installed: pip install 'qat-lora[{extra}]'") from None
    except QatLoraError:
        raise
    except Exception as error:  # each driver has errors of its own
        reason = f"{type(error).__name__}: {redact(' '.join(str(error).split()), url)[:200]}"
        raise TextError(f"dataset: {shown}: cannot be read ({reason}); check address and credentials") from None


def _copy(fs: Any, files: Mapping[str, Any], root: str, home: Path, name: str) -> None:
    """Copy files to `home`/`name`, whole or not at all; another process may copy the same."""
    draft = home.with_name(f".{home.name}-{uuid.uuid4().hex[:8]}")
    try:
        for path in files:
            target = draft / name / path[len(root) :].strip("/")
            if ".." in target.parts:
                raise TextError(f"dataset: {path} leads out of its folder")
            target.parent.mkdir(parents=True, exist_ok=True)
            fs.get_file(path, str(target))
        if not home.is_dir():
            draft.rename(home)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
