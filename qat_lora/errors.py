"""The exceptions that users see.

Every message states the field, the value given, what is allowed, and how to fix it. The command line prints the message
alone, on one line, and exits with `exit_code`, so a traceback always means a bug of ours, never a user's mistake.
"""

import contextlib
import errno
import os
import re
from collections.abc import Callable, Iterator
from typing import Any

from qat_lora.terminal import redact

LONGEST_LINE = 1000


class QatLoraError(Exception):
    """Base of all errors that qat-lora raises on purpose; its message holds no credentials."""

    exit_code = 2

    def __init__(self, message: str = "") -> None:
        super().__init__(redact(message))

    def __str__(self) -> str:
        """Return the message as one line of bounded length: it may quote a file that is neither, nor fit to print."""
        line = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in " ".join(super().__str__().split()))
        return line if len(line) <= LONGEST_LINE else f"{line[:700]} … {line[-250:]}"


class FailedError(QatLoraError):
    """Base of those that blame the data, the device or the work itself, and not what was asked for."""

    exit_code = 1


def one_line(error: BaseException, longest: int | None = None) -> str:
    """Return what a library's error says, cut to `longest` characters, or its kind where it says nothing."""
    return " ".join(str(error).split())[:longest] or type(error).__name__


class ConfigError(QatLoraError, ValueError):
    """A setting, flag or recipe that does not fit."""


class TextError(QatLoraError, ValueError):
    """A text source that is missing, empty or in an unknown layout."""


class ModelError(QatLoraError, ValueError):
    """A model folder, checkpoint or tokenizer that cannot be used as asked."""


class DamagedFileError(ModelError, FailedError):
    """A file of ours whose bytes are not what was written; the message names it."""


class CacheError(QatLoraError, ValueError):
    """A KD cache that does not fit the run (other tokenizer, vocabulary, K, L, teacher ...)."""


class CacheDamaged(CacheError, FailedError):
    """A KD cache whose bytes are not what was written; the message names the shard."""


class DeviceError(QatLoraError, RuntimeError):
    """A device that was asked for and is not there."""


class OutputExistsError(QatLoraError, FileExistsError):
    """An output folder that belongs to another run; nothing in it was touched."""


class OvertakenError(OutputExistsError):
    """A builder that a second start of the same builder has overtaken; opened again, it goes on from there."""


class MissingExtraError(QatLoraError, ImportError):
    """An optional dependency that this feature needs; the message holds the install command."""


class DivergedError(FailedError):
    """A training whose loss is no number any more."""


class RecompiledError(FailedError):
    """A training that compiled more graphs after its first step than the user allows."""


class OutOfMemoryError(FailedError, MemoryError):
    """A run that needed more memory than the device has; the message says what to lower."""


# What CUDA and MPS, XLA, and torch's CPU allocator write into a RuntimeError.
SIGNS_OF_LITTLE_MEMORY = ("out of memory", "resource_exhausted", "can't allocate memory", "cannot allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether a device, or the host, had too little memory."""
    signs = isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in SIGNS_OF_LITTLE_MEMORY)
    return signs or isinstance(error, MemoryError)


@contextlib.contextmanager
def memory_errors_explained(advice: Callable[[], str]) -> Iterator[None]:
    """Raise OutOfMemoryError, which says what to lower, in place of the device's own; `advice` is called only then."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, QatLoraError) or not is_out_of_memory(error):
            raise
        raise OutOfMemoryError(f"out of memory ({one_line(error, 160)}). {advice()}") from error


class ReplicaError(FailedError):
    """A process of a group that ended, so that the others cannot go on."""


class DiskError(QatLoraError, OSError):
    """A file or folder that the system would not read or write; the message says which and what to do."""


_ROOM = "make room (or raise the quota), then run the same command again: it goes on from what is complete"
_ELSEWHERE = "give a path that can be written, or choose another --out"
DISK_ERRORS = {  # what to do about those whose words also stand in the errors of libraries (safetensors, torch)
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), _ROOM),
    errno.EMFILE: "raise the limit on open files (`ulimit -n 4096`), then run the same command again",
    errno.ENFILE: "close other programs, or raise the system's limit on open files, then run the same command again",
    errno.ENAMETOOLONG: "give a shorter name",
    errno.EROFS: _ELSEWHERE,
    errno.EIO: "the disk, or the network behind it, failed; see that it is well, then run the same command again",
    errno.ESTALE: "the network drive went away; mount it again, then run the same command again",
}


def disk_error(error: BaseException) -> DiskError | None:
    """Return what a disk's error means to people, also where a library has wrapped it; None for other errors."""
    if isinstance(error, QatLoraError | BrokenPipeError):
        return None
    text = " ".join(str(error).split())
    number = error.errno if isinstance(error, OSError) else None
    if number is None:
        number = next((number for number in DISK_ERRORS if os.strerror(number) in text), None)
    if number is None and re.fullmatch(r"\d+ requested and \d+ written", text):  # NumPy, of a disk that filled up
        number = errno.ENOSPC
    if number is None:
        return None
    names = (getattr(error, name, None) for name in ("filename", "filename2"))
    what = str(next((name for name in names if name is not None), "output"))
    what = what if len(what) <= 200 else f"{what[:80]}...{what[-40:]}"
    return DiskError(f"{what}: {os.strerror(number)}; {DISK_ERRORS.get(number, _ELSEWHERE)}")


@contextlib.contextmanager
def disk_errors_explained() -> Iterator[None]:
    """Raise DiskError, one line for people, in the place of OSError or of what a library made of it."""
    try:
        yield
    except Exception as error:
        found = disk_error(error)
        if found is None:
            raise
        raise found from error


# What values raise as they are read that are not what was written.
OF_DATA = (OSError, LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError)


@contextlib.contextmanager
def errors_explained(
    kind: type[QatLoraError], what: str, *errors: type[Exception], remedy: str = "", passing: Any = QatLoraError
) -> Iterator[None]:
    """Raise `kind`, "what (the words); remedy", in place of a library's `errors` (default: all); ours are `passing`."""
    try:
        yield
    except Exception as error:
        if isinstance(error, passing) or not isinstance(error, errors or Exception):
            raise
        said = repr(error) if isinstance(error, LookupError) else one_line(error, 300)
        raise kind(f"{what} ({said}){remedy and f'; {remedy}'}") from None


class InterruptedRunError(QatLoraError):
    """A run that was asked to stop and left a checkpoint."""

    exit_code = 143  # 128 + SIGTERM
