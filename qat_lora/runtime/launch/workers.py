"""Start the processes of a run on this machine, and end all of them when one ends.

Every worker leaves a note in a folder of the run: its result, or what it raised. The process that started them
passes stop signals on, waits, and once a worker has failed gives the others a few seconds (they notice by
themselves when they next exchange anything, if they can) and then kills them, so that nothing hangs. The one error
that it raises is the first cause, not the echo in the other workers. torchrun's agent does less: it needs its own
command line, prints every rank's traceback, and waits for 30 seconds.

Notes are JSON, so no pickled result is ever read.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal

from qat_lora import errors
from qat_lora.errors import InterruptedRunError, QatLoraError, ReplicaError
from qat_lora.runtime.host.collectives import free_port
from qat_lora.runtime.host.signals import passed_on

GRACE_S = 8.0
"""What a worker gets to end by itself after another has failed."""


class Board:
    """The folder where the workers leave their notes."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def finished(self, rank: int, result: Any) -> None:
        """Note what the work returned; only the main worker's is kept."""
        if rank == 0:
            kind = "path" if isinstance(result, Path) else "value"
            self._write("result", {kind: str(result) if isinstance(result, Path) else result})

    def failed(self, rank: int, error: BaseException) -> None:
        """Note what a worker raised."""
        trace = "" if isinstance(error, QatLoraError) else traceback.format_exc()
        note = {"time_s": time.time(), "type": type(error).__name__, "text": str(error), "trace": trace}
        self._write(f"failed-{rank}", note)

    def _write(self, name: str, note: Mapping[str, Any]) -> None:
        draft = self.folder / f".{name}"
        draft.write_text(json.dumps(note, default=str), encoding="utf-8")
        draft.replace(self.folder / f"{name}.json")

    def failures(self) -> dict[int, dict[str, Any]]:
        """Return the notes of the workers that failed, by rank."""
        found = {}
        for file in self.folder.glob("failed-*.json"):
            found[int(file.stem.split("-")[1])] = json.loads(file.read_text(encoding="utf-8"))
        return found

    def verdict(self, exit_codes: Mapping[int, int | None], stopped_by: str = "") -> Any:
        """Return the main worker's result, or raise what ended the run.

        Raises:
            QatLoraError: the first cause, of the type that the worker raised.
        """
        notes = self.failures()
        causes = {rank: note for rank, note in notes.items() if note["type"] != ReplicaError.__name__}
        # A real error goes before a stop that others made of it.
        order = sorted(causes.items(), key=lambda item: (item[1]["type"] == "InterruptedRunError", item[1]["time_s"]))
        if order:
            rank, note = order[0]
            kind = getattr(errors, note["type"], None)
            if isinstance(kind, type) and issubclass(kind, QatLoraError):
                raise kind(note["text"])
            if note["type"] in ("KeyboardInterrupt", "SystemExit"):
                raise InterruptedRunError(f"process {rank} of {len(exit_codes)} was stopped ({note['type']})")
            if note["type"] == "OSError":  # a full disk is no defect of ours
                raise ReplicaError(f"process {rank} of {len(exit_codes)}: {note['text']}")
            raise RuntimeError(f"process {rank} of {len(exit_codes)} failed:\n{note['trace']}")
        for rank, code in exit_codes.items():
            if code is None or code >= 0 or rank in notes:
                continue
            name = signal.Signals(-code).name
            if stopped_by or name in ("SIGTERM", "SIGINT", "SIGHUP"):
                raise InterruptedRunError(f"stopped by {stopped_by or name}; the same command goes on from there")
            raise ReplicaError(
                f"process {rank} of {len(exit_codes)} was killed ({name}); out of memory is the usual cause. What "
                "was complete stays: the same command goes on from the last checkpoint"
            )
        if notes:
            raise ReplicaError(notes[min(notes)]["text"])
        bad = {rank: code for rank, code in exit_codes.items() if code}
        file = self.folder / "result.json"
        if bad or not file.is_file():
            raise ReplicaError(f"processes ended without a result (exit codes by process: {bad or 'all 0'})")
        note = json.loads(file.read_text(encoding="utf-8"))
        return Path(note["path"]) if "path" in note else note["value"]


def attend(board: Board, rank: int, work: Callable[[], Any]) -> None:
    """Run a worker's work; note how it ended, and end the process at once if it failed.

    Not by an exception through the process group's clean-up, which may itself wait for the others for ever.
    """
    threading.Thread(target=_watch_others, args=(board, rank), name="qat-lora-watch", daemon=True).start()
    try:
        board.finished(rank, work())
    except BaseException as error:
        board.failed(rank, error)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(getattr(error, "exit_code", 1))


def _watch_others(board: Board, rank: int) -> None:
    """End this process when its parent is gone, or when it outlives another's failure."""
    parent = multiprocessing.parent_process()
    handles = [parent.sentinel] if parent is not None else []
    since_s: float | None = None
    while True:
        if handles and wait(handles, timeout=0.5):
            os._exit(1)
        if not handles:
            time.sleep(0.5)
        others = any(other != rank for other in _failed_ranks(board))
        if others and since_s is None:
            since_s = time.monotonic()
        if since_s is not None and time.monotonic() - since_s > GRACE_S:
            os._exit(1)


def _failed_ranks(board: Board) -> list[int]:
    return [int(file.stem.split("-")[1]) for file in board.folder.glob("failed-*.json")]


def group_variables(rank: int, count: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun would set for a process of one machine."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }


def run_group(
    work: Callable[[], Any], count: int, threads: int, start_method: Literal["spawn", "fork"] = "spawn"
) -> Any:
    """Run `work` in `count` processes of this machine, with the variables of a process group.

    Args:
        work: called in every process; picklable where they are spawned.
        count: of processes.
        threads: of the CPU, for each.
        start_method: `fork` shares what this process holds in memory, and is unsafe once it has used threads.

    Returns:
        What the main process's work returned: a path, or plain values.

    Raises:
        QatLoraError: what a process raised first, or that one was killed.
    """
    context: Any = multiprocessing.get_context(start_method)
    with tempfile.TemporaryDirectory(prefix="qat-lora-run-") as folder:
        board, port = Board(Path(folder)), free_port()
        processes = [
            context.Process(
                target=_work_in_group,
                args=(board, group_variables(rank, count, port), threads, work),
                name=f"qat-lora-{rank}",
            )
            for rank in range(count)
        ]
        with passed_on(lambda: [p.pid for p in processes if p.is_alive()]) as seen:
            try:
                for process in processes:
                    process.start()
                _wait_for_all(processes)
            finally:
                for process in processes:
                    if process.is_alive():
                        process.kill()
                        process.join()
        codes = {rank: process.exitcode for rank, process in enumerate(processes)}
        return board.verdict(codes, seen[0] if seen else "")


def _work_in_group(board: Board, variables: Mapping[str, str], threads: int, work: Callable[[], Any]) -> None:
    os.setpgid(0, 0)  # Ctrl-C reaches the process that started us, which passes it on once
    os.environ.update(variables)
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    import torch

    torch.set_num_threads(threads)
    attend(board, int(variables["RANK"]), work)


def _wait_for_all(processes: list[Any]) -> None:
    """Wait until all have ended, but not longer than the grace after the first failure."""
    deadline_s: float | None = None
    while alive := [p for p in processes if p.is_alive()]:
        left = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
        wait([p.sentinel for p in alive], timeout=left)
        if deadline_s is None and any(p.exitcode for p in processes):
            deadline_s = time.monotonic() + GRACE_S
        if deadline_s is not None and time.monotonic() >= deadline_s:
            return
