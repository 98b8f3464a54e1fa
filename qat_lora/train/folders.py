"""Folders that are there whole or not at all: checkpoints and exported students.

A file is replaced by one rename; a folder is not, since a rename refuses to land on a folder that holds something.
So a new folder is filled under another name and flushed to disk, the one before it is set aside, the new one takes
its name, and only then is the old one removed. A kill leaves the old folder, the new one, or, between the two
renames, the old one under its other name, which `settle` puts back. Writing into the folder itself, file by file,
would leave new factors beside an old base: a mixture that loads without a word.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def whole_folder(final: Path) -> Iterator[Path]:
    """Yield an empty folder to fill; when the block ends well it takes the place of `final`, else it is removed."""
    settle(final)
    draft, old = _draft(final), _set_aside(final)
    if draft.exists():
        shutil.rmtree(draft)
    draft.mkdir(parents=True)
    try:
        yield draft
        for path in (*draft.rglob("*"), draft):
            fsync(path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    if final.exists():
        final.rename(old)
    draft.rename(final)
    fsync(final.parent)
    shutil.rmtree(old, ignore_errors=True)


def settle(final: Path) -> None:
    """Finish what a kill interrupted: put back a folder that was set aside and not yet replaced."""
    old = _set_aside(final)
    if old.exists() and final.exists():
        shutil.rmtree(old)
    elif old.exists():
        old.rename(final)


def discard(folder: Path) -> None:
    """Remove a folder so that a kill cannot leave a part of it under its name."""
    old = _draft(folder)
    if old.exists():
        shutil.rmtree(old)
    folder.rename(old)
    shutil.rmtree(old)


def fsync(path: Path) -> None:
    """Flush a file's or folder's content to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _draft(final: Path) -> Path:
    return final.with_name(f".{final.name}.new")


def _set_aside(final: Path) -> Path:
    return final.with_name(f".{final.name}.old")
