"""Text behind a URL (gs://, s3://, hf://, any file system of fsspec): copied once, then read as files of this machine.

Reading it in place would fetch it several times: to look at, to name it by its content, to pack it, and by every
process. A copy is named by the URL and by what the store lists (names, sizes, versions), so changed text is another.
"""

import functools
import hashlib
import json
import os
import shutil
import uuid
from pathlib import Path

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

    Raises:
        TextError: the address is of no known kind, cannot be reached, or has nothing behind it.
        MissingExtraError: its driver is not installed.
    """
    if url.startswith(("file://", "local://")):
        return Path(url.split("://", 1)[1])
    extra = URL_EXTRAS.get(url.split("://")[0])
    fsspec = require("fsspec.core", extra or "gcs")
    try:
        fs, root = fsspec.url_to_fs(url)
        listed = {path: info for path, info in fs.find(root, detail=True).items() if info.get("type") != "directory"}
        if not listed:
            raise TextError(f"dataset: {redact(url)}: nothing is there; check the address")
        seen = [(path, *(str(info.get(key)) for key in _VERSION_KEYS)) for path, info in sorted(listed.items())]
        digest = hashlib.sha256(json.dumps([redact(url), seen]).encode()).hexdigest()[:16]
        name = root.rstrip("/").rsplit("/", 1)[-1] or "text"
        home = copies_folder() / digest
        if not home.is_dir():
            draft = home.with_name(f".{digest}-{uuid.uuid4().hex[:8]}")  # another process may copy the same
            try:
                for path in listed:
                    inside = path[len(root) :].strip("/")
                    target = draft / name / inside if inside else draft / name
                    if not target.resolve().is_relative_to(draft.resolve()):
                        raise TextError(f"dataset: {redact(url)}: {inside} leads out of its folder")
                    target.parent.mkdir(parents=True, exist_ok=True)
                    fs.get_file(path, str(target))
                if not home.is_dir():
                    draft.rename(home)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
        return home / name
    except ImportError as error:
        cure = f"pip install 'qat-lora[{extra}]'" if extra else redact(str(error), url)
        raise MissingExtraError(f"{redact(url)}: its driver is not installed: {cure}") from None
    except QatLoraError:
        raise
    except Exception as error:  # each driver has errors of its own
        reason = f"{type(error).__name__}: {redact(' '.join(str(error).split()), url)[:200]}"
        raise TextError(f"dataset: {redact(url)}: cannot be read ({reason}); check address and credentials") from None
