"""A lock for object stores: leases that are never deleted, only succeeded.

An object store has no `flock`, whose owner's death frees it. A lock object outlives a kill, and deleting one that
seems stale can delete the lock that somebody else took a moment ago. So locks here are numbered and only ever added:
whoever holds lease n rewrites it every few seconds; a builder that finds lease n silent for a minute, or given back,
creates lease n + 1, and the store lets exactly one of several succeed. A holder that was asleep for so long (a
suspended machine) finds n + 1 before its next write and stops. No clock is compared with another's: silence is
measured by the one who waits.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Iterator
from typing import Protocol

from qat_lora.errors import OutputExistsError

BEAT_S = 10.0
"""Between two signs of life."""
SILENCE_S = 60.0
"""After so long without one, a holder counts as dead."""
_LIMIT_BYTES = 1 << 12
_GIVEN_BACK = b"given back\n"

log = logging.getLogger(__name__)


class Folder(Protocol):
    """What a lease needs of its folder."""

    def names(self) -> list[str]:
        """Return the names in it."""

    def has(self, name: str) -> bool:
        """Return whether there is an object of that name."""

    def read(self, name: str, limit_bytes: int) -> bytes:
        """Read an object."""

    def create(self, name: str, data: bytes) -> None:
        """Make an object; FileExistsError if there is one with other bytes."""

    def replace(self, name: str, data: bytes) -> None:
        """Make or overwrite an object."""


class Lease:
    """The right to write under a lock's name, until somebody else succeeds."""

    def __init__(self, folder: Folder, lock: str, number: int, owner: str) -> None:
        self._folder = folder
        self._lock = lock
        self._number = number
        self._owner = owner
        self._beats = 0

    @property
    def name(self) -> str:
        """Name of the object."""
        return _name(self._lock, self._number)

    def text(self) -> bytes:
        """Return the object's bytes at the present beat: owner, token, number of beats."""
        return f"{self._owner} {self._beats}\n".encode()

    def check(self) -> None:
        """Raise OutputExistsError if another builder has taken over."""
        if self._folder.has(_name(self._lock, self._number + 1)):
            raise OutputExistsError(
                f"--out {self._folder}: another builder has taken over, as this one gave no sign of life for "
                f"{SILENCE_S:g} s; what it had committed is safe, and the other goes on from there"
            )

    def beat_until(self, ended: threading.Event) -> None:
        """Give signs of life; a store that fails to take one gets the next."""
        while not ended.wait(BEAT_S):
            self._beats += 1
            with contextlib.suppress(Exception):
                self._folder.replace(self.name, self.text())


@contextlib.contextmanager
def hold(folder: Folder, lock: str) -> Iterator[Lease]:
    """Hold a lease until leaving.

    Raises:
        OutputExistsError: another builder holds it and gives signs of life.
    """
    lease = _acquire(folder, lock, f"{socket.gethostname()} process {os.getpid()} {secrets.token_hex(8)}")
    ended = threading.Event()
    thread = threading.Thread(target=lease.beat_until, args=(ended,), name="cache-lease", daemon=True)
    thread.start()
    try:
        yield lease
    finally:
        ended.set()
        thread.join()
        with contextlib.suppress(Exception):  # then the next builder waits for its silence
            folder.replace(lease.name, _GIVEN_BACK)


def _acquire(folder: Folder, lock: str, owner: str) -> Lease:
    watched, since = b"", time.monotonic()
    number = max(_numbers(folder, lock), default=0)
    while True:
        while folder.has(_name(lock, number + 1)):
            number += 1
        found = _read(folder, _name(lock, number)) if number else _GIVEN_BACK
        if found == _GIVEN_BACK or (found == watched and time.monotonic() - since > SILENCE_S):
            lease = Lease(folder, lock, number + 1, owner)
            try:
                folder.create(lease.name, lease.text())
            except FileExistsError:  # somebody was quicker: now that one is to be watched
                continue
            return lease
        holder = " ".join(found.decode("ascii", "replace").split()[:3]) or "unknown"
        if not watched:
            log.warning(
                "%s: %s was writing there and has not said goodbye; waiting up to %g s for a sign of life",
                folder,
                holder,
                SILENCE_S,
            )
            watched, since = found, time.monotonic()
        elif found != watched:
            raise OutputExistsError(
                f"--out {folder}: another builder is writing there ({holder}); wait for it, stop it, or choose "
                "another --out"
            )
        time.sleep(BEAT_S / 4)


def _name(lock: str, number: int) -> str:
    return f"{lock}-{number:06d}"


def _numbers(folder: Folder, lock: str) -> list[int]:
    form = re.compile(re.escape(lock) + r"-([0-9]{6})")
    return [int(match[1]) for name in folder.names() if (match := form.fullmatch(name))]


def _read(folder: Folder, name: str) -> bytes:
    return folder.read(name, _LIMIT_BYTES)
