"""Stop signals as a list that is read between steps, instead of an exception anywhere.

Closing a terminal or losing an SSH session sends SIGHUP, which means stop like the others, unless it is ignored when
the process starts (`nohup`). A launcher and its processes may both get a signal, and the launcher passes its own on, so
the same request can arrive twice; a second one counts only when it comes a second later.
"""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

STOP_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP") if hasattr(signal, name))
_SAME_REQUEST_S = 1.0
_standing: list[list[str]] = []  # the list of `install_for_good`, if that was called in this process


def _collector(received: list[str]) -> Any:
    first_s = 0.0

    def handle(number: int, _frame: Any) -> None:
        nonlocal first_s
        if not received:
            first_s = time.monotonic()
            received.append(signal.Signals(number).name)
        elif time.monotonic() - first_s > _SAME_REQUEST_S:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    return handle


def _install(handler: Any) -> dict[Any, Any]:
    handled = [n for n in STOP_SIGNALS if n.name != "SIGHUP" or signal.getsignal(n) != signal.SIG_IGN]
    return {number: signal.signal(number, handler) for number in handled}


@contextmanager
def _installed(handler: Any) -> Iterator[None]:
    """Handle stop signals in the block; nothing outside the main thread, where handlers cannot be set."""
    old = _install(handler) if threading.current_thread() is threading.main_thread() else {}
    try:
        yield
    finally:
        for number, before in old.items():
            signal.signal(number, before)


def install_for_good() -> None:
    """Collect stop signals from now on: for workers whose work runs in a thread, where handlers cannot be set."""
    received: list[str] = []
    _standing[:] = [received]
    _install(_collector(received))


@contextmanager
def stop_signals() -> Iterator[list[str]]:
    """Collect the names of stop signals that arrive; a second one, later, ends the process at once."""
    in_thread = threading.current_thread() is not threading.main_thread()
    received: list[str] = _standing[0] if in_thread and _standing else []
    with _installed(_collector(received)):
        yield received


@contextmanager
def passed_on(pids: Callable[[], Iterable[int | None]]) -> Iterator[list[str]]:
    """Pass stop signals of this process on to the processes that `pids()` returns; yield the names of those seen."""
    received: list[str] = []

    def handle(number: int, _frame: Any) -> None:
        received.append(signal.Signals(number).name)
        for pid in pids():
            if pid is not None:
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    with _installed(handle):
        yield received
