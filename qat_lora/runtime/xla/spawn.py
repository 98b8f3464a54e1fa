"""Start a process a chip through `torch_xla.launch` (a process for two cores on v2 and v3, with a thread each).

torch_xla's own launcher waits for its first process first, so a failure in another one would wait for ever in a
collective. Hence the notes of `workers.py`: a worker that fails leaves one and ends its process, which breaks the
pool; the others end themselves soon after; and what is raised here is the first cause.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any, Literal

from qat_lora.errors import DeviceError, MissingExtraError
from qat_lora.runtime.host.collectives import free_port
from qat_lora.runtime.host.signals import install_for_good, passed_on
from qat_lora.runtime.launch.workers import Board, attend
from qat_lora.runtime.xla.runtime import PORT_VARIABLE, is_xla_device

_inherited: list[Callable[[], Any]] = []
"""What forked workers run: they have it already, while whatever goes through the pool is pickled."""


class _Worker:
    """What every process calls. Unpickled in its main thread, the only place where signal handlers can be set."""

    def __init__(self, board: Board, work: Callable[[], Any] | None) -> None:
        self._board, self._work = board, work

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if multiprocessing.parent_process() is not None:
            os.setpgid(0, 0)  # Ctrl-C reaches the process that started us, which passes it on once
            install_for_good()

    def __call__(self, ordinal: int) -> None:
        import torch_xla.runtime as xr

        attend(self._board, xr.global_ordinal(), self._work or _inherited[0])


def spawn(work: Callable[[], Any], start_method: Literal["spawn", "fork"] = "spawn") -> Any:
    """Run `work` in a process for every chip that the variables of libtpu leave; return the main one's result.

    Raises:
        DeviceError: this process has used an XLA device itself, which its children would crash on.
        QatLoraError: what a process raised first, or that one was killed.
    """
    try:
        import torch_xla
    except ImportError as error:
        raise MissingExtraError(
            f"device xla: torch_xla cannot be imported ({error}); pip install 'qat-lora[tpu]' on a TPU"
        ) from None
    if is_xla_device():
        raise DeviceError(
            "num_chips: this process has used an XLA device already, and the processes that it starts cannot; restart "
            "the notebook's kernel (or the program) and start the chips first, or use --parallel spmd"
        )
    os.environ[PORT_VARIABLE] = str(free_port())
    _inherited[:] = [work] if start_method == "fork" else []
    with tempfile.TemporaryDirectory(prefix="qat-lora-run-") as folder:
        board = Board(Path(folder))
        children = multiprocessing.active_children
        with passed_on(lambda: [child.pid for child in children()]) as seen:
            try:
                torch_xla.launch(_Worker(board, None if _inherited else work), start_method=start_method)
                codes: dict[int, int | None] = {0: 0}
            except BrokenProcessPool:
                codes = {0: -9}
        return board.verdict(codes, seen[0] if seen else "")
