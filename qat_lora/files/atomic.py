"""New files that appear whole or not at all, and locks: temporary file, fsync, link, fsync of the folder.

Writing under the final name leaves half a file after a kill, and rename without fsync leaves an empty one after a power
cut. Rename also overwrites what another process has just finished; `link` refuses. The lock is `flock`, because the
kernel drops it with the process, while a lock *file* would outlive a kill and block the next run.

`failpoint` lets the tests kill a process at each named step: kills at random times almost never land inside a commit.
"""

import contextlib
import errno
import hashlib
import os
import signal
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

from qat_lora.errors import OutputExistsError
from qat_lora.files.folders import fsync, ours

FAILPOINT_STEPS = ("opened", "started", "written", "synced", "linked", "durable")  # of a commit: `<kind>-<step>`
Lock = Literal["exclusive", "shared", "waiting"]  # `waiting` is exclusive too, and waits where others are refused
_reached: Counter[str] = Counter()
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)


def failpoint(name: str) -> None:
    """Kill this process if QAT_LORA_FAILPOINT is `name`, or `name:3` on the third time; for tests only."""
    if "QAT_LORA_FAILPOINT" not in os.environ:
        return  # uncounted: a forked test sets it in the child
    point, _, times = os.environ["QAT_LORA_FAILPOINT"].partition(":")
    _reached[name] += 1
    if point == name and _reached[name] == int(times or 1):
        os.kill(os.getpid(), signal.SIGKILL)


def write_new(path: Path, chunks: Iterable[bytes | memoryview], kind: str) -> tuple[int, str]:
    """Write a file, which appears whole under a name that must be free, and stays; return its bytes and its sha256.

    FileExistsError: `path` is there already, untouched; OSError: disk full, no permission; nothing is left behind.
    """
    partial, digest, size = path.with_name(f".{path.name}.tmp"), hashlib.sha256(), 0
    ours(partial), ours(path)
    try:
        with open(partial, "xb") as file:
            failpoint(f"{kind}-opened")
            for number, chunk in enumerate(chunks):
                file.write(chunk)
                digest.update(chunk)
                size += len(chunk)
                if number == 0:
                    file.flush()
                    failpoint(f"{kind}-started")
            failpoint(f"{kind}-written")
            file.flush()
            os.fsync(file.fileno())
        failpoint(f"{kind}-synced")
        try:
            os.link(partial, path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # Some network and FAT file systems have no links. Our lock keeps other builders out of this gap.
            if path.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
            os.rename(partial, path)
        failpoint(f"{kind}-linked")
    finally:
        partial.unlink(missing_ok=True)
    fsync(path.parent)
    failpoint(f"{kind}-durable")
    return size, digest.hexdigest()


@contextlib.contextmanager
def lock(path: Path, kind: Lock) -> Iterator[None]:
    """Hold a lock on a file, freed by the kernel if the process dies; OutputExistsError if another process holds it."""
    import fcntl

    if not path.exists():
        ours(path)
    operation = fcntl.LOCK_SH if kind == "shared" else fcntl.LOCK_EX
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with os.fdopen(descriptor, "r+b", buffering=0) as file:
        try:
            fcntl.flock(file, operation if kind == "waiting" else operation | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = file.read(32).decode("ascii", "replace").strip() or "unknown"
            what = f"another builder is writing there (process {holder})"
            remedy = "wait for it, stop it, or choose another --out"
            raise OutputExistsError(f"--out {path.parent}: {what}; {remedy}") from None
        if kind == "exclusive":
            file.truncate(0)
            file.write(f"{os.getpid()}\n".encode())
        yield
