"""Checksums of what the tool writes, in the form that every system can check: `sha256sum -c SHA256SUMS`.

Safetensors have no checksum: a flipped bit in a weight is a slightly different model, and no loader notices. So every
folder that can be loaded by itself (checkpoint, adapter, student, export) gets a file `SHA256SUMS` as its last, and a
key in one of its JSON files that promises it. Sums missing where they are promised are damage; sums that were never
promised belong to a folder of an earlier version, which loads with one notice. A checksum inside each file would need
a reader of our own for every format; this one survives copies and needs no tool of ours.
"""

from __future__ import annotations

import functools
import hashlib
import re
import sys
from collections.abc import Iterable
from pathlib import Path

from qat_lora.errors import DamagedFileError

SUMS = "SHA256SUMS"
PROMISE = {"checksums": SUMS}
"""Goes into a JSON file of a folder that has sums: `config.json`, `qat_lora.json` or `state.json`."""
_LINE = re.compile(r"([0-9a-f]{64})  ([^/\0\n]+)")
_SUMS_LIMIT_BYTES = 1 << 20


def sha256_of(file: Path) -> str:
    """Return a file's sha256 in hex; read once as long as its size and times stay."""
    status = file.stat()
    return _sha256(str(file.absolute()), status.st_ino, status.st_size, status.st_mtime_ns)


@functools.lru_cache(maxsize=4096)
def _sha256(path: str, _inode: int, _size: int, _mtime_ns: int) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_sums(folder: Path, names: Iterable[str]) -> None:
    """Write the checksums of some files of a folder; to be called when all of them are there.

    Args:
        folder: holds the files.
        names: those whose bytes decide what is loaded. Cards and pictures, which people may edit, stay out.
    """
    lines = [f"{sha256_of(folder / name)}  {name}\n" for name in sorted(set(names))]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def check_sums(folder: Path, promised: bool) -> dict[str, str] | None:
    """Compare a folder's files with its checksums; return them by name, None where it has none.

    Args:
        folder: the folder.
        promised: whether one of its files says that it has checksums.

    Raises:
        DamagedFileError: names the file that is missing or is not what was written, or the checksums themselves.
    """
    sums = folder / SUMS
    if not sums.exists():
        if promised:
            raise DamagedFileError(
                f"{sums}: is missing, and {folder} was written with it; restore it from a copy, or, if you trust the "
                f"files, make it again: cd {folder} && sha256sum FILES > {SUMS}"
            )
        return None
    with sums.open("rb") as stream:
        data = stream.read(_SUMS_LIMIT_BYTES)
    found: dict[str, str] = {}
    for line in data.decode("utf-8", errors="replace").splitlines():
        match = _LINE.fullmatch(line)
        if match is None or match[2] in found:
            raise DamagedFileError(f"{sums}: is damaged: a line is not `sha256  name`; restore it from a copy")
        found[match[2]] = match[1]
    if not found:
        raise DamagedFileError(f"{sums}: is empty; restore it from a copy")
    for name, sha256 in found.items():
        try:
            actual = sha256_of(folder / name)
        except OSError as error:
            raise DamagedFileError(f"{folder / name}: cannot be read ({error.strerror}), and {SUMS} lists it") from None
        if actual != sha256:
            raise DamagedFileError(
                f"{folder / name}: is not what was written (its sha256 is {actual[:12]}…, {SUMS} says {sha256[:12]}…); "
                f"restore it from a copy. If you changed it on purpose, write the new sum into {sums}"
            )
    return found


@functools.cache
def notice_no_sums(folder: Path) -> None:
    """Say once that a folder of an earlier version is loaded without checksums."""
    print(
        f"note: {folder} was written by an earlier version, without checksums; it is loaded unchecked", file=sys.stderr
    )
