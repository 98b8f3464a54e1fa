"""Run a command on its device: here, or in every process of the run.

transformers decides at import whether PyTorch/XLA is used, so the device has to be chosen before a command is
imported. That order is kept in this one place; command line, scripts, notebooks and the Python API all start here.

Several chips of this machine are processes of our own (on XLA: of `torch_xla.launch`). Every worker leaves its result
or its error as JSON in a folder of the run, so no pickled result is ever read. The process that started them passes
stop signals on and waits; once a worker has failed, the others get a few seconds and are then killed. It raises the
first cause, not its echo in the other workers. torchrun's agent needs its own command line, prints every rank's
traceback, and waits for 30 seconds.
"""

import functools
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
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tqdm import tqdm

from qat_lora import errors
from qat_lora.errors import QatLoraError, ReplicaError, disk_errors_explained, memory_errors_explained
from qat_lora.registry import COMMANDS, Command
from qat_lora.runtime.base import Runtime
from qat_lora.runtime.host.collectives import free_port, group_size
from qat_lora.runtime.host.signals import passed_on
from qat_lora.runtime.launch import select
from qat_lora.runtime.launch.select import ChipsConfig, DeviceChoice, LaunchPlan
from qat_lora.runtime.precision import with_dtype
from qat_lora.terminal import any_text, echo

GRACE_S = 8.0  # how long a worker may take to end by itself after another has failed


@any_text()
@disk_errors_explained()
def run(command: Command, options: Any) -> Any:
    """Run a command on every process of the device that `options.run` names; raises the first cause (QatLoraError)."""
    asked = options.run
    if command.device == "none" or _needs_shapes_alone(command, options):
        return work_here(command, options, DeviceChoice("cpu"))
    plan = select.plan_run(asked.device, asked.tpu, asked.chips)
    several = plan.chips != 1 or asked.chips.parallel == "spmd" or group_size() > 1
    if several and command.device != "several chips":
        allowed = ", ".join(words for words, other in COMMANDS.items() if other.device == "several chips")
        remedy = f"leave --num-chips and --parallel out, and start it once (several chips are for {allowed})"
        raise errors.ConfigError(f"num_chips: this command works on one chip; {remedy}")
    return start(plan, functools.partial(work_here, command, options, plan.device))


def _needs_shapes_alone(command: Command, options: Any) -> bool:
    return bool(command.plan and options.dry_run and not getattr(options, "dry_run_measures", False))


def start(plan: LaunchPlan, work: Callable[[], Any], start_method: Literal["spawn", "fork"] = "spawn") -> Any:
    """Call `work` here or in every process of a plan; return what it returned in the main one, or raise as `run`."""
    for name, value in plan.variables.items():
        os.environ[name] = os.environ.get(name) or value  # empty is unset
    if plan.start == "here":
        return work()
    if plan.start == "group":
        return run_group(work, plan.chips, max(1, (os.cpu_count() or 1) // plan.chips), start_method)
    from qat_lora.runtime.xla.runtime import spawn

    with tempfile.TemporaryDirectory(prefix="qat-lora-run-") as folder:
        board = Board(Path(folder))
        return board.verdict(*spawn(functools.partial(attend, board, work=work), start_method))


@any_text()
def work_here(command: Command, options: Any, device: DeviceChoice) -> Any:
    """Run a command, or show its plan, on the device of this process, quietly unless this is the main one."""
    runtime = select.make_runtime(device, options.run.chips)
    runtime.auto_dtype = options.run.dtype == "auto"
    is_plan = _needs_shapes_alone(command, options)

    def main() -> Any:
        # Asked here, where a process has its own device; what only plans a run knows the device of the run.
        mine, note = with_dtype(options, device.name) if command.device != "none" and not is_plan else (options, "")
        mine = mine if runtime.is_main else replace(mine, run=replace(mine.run, quiet=True))
        if note and not (mine.run.quiet or mine.run.json):
            echo(note)
        # Explained here, where a process of a group notes its error.
        with disk_errors_explained(), memory_errors_explained(lambda: command.load("advice")(mine)):
            if not is_plan:
                own = device.kind in ("cpu", "mps") and command.plan and not mine.run.quiet  # the memory is the host's
                if own and (warning := command.load("warning")(command, mine, select.free_memory_bytes())):
                    echo(warning, err=True)
                return command.load()(mine, runtime)
            planned = command.load("plan")(mine)
        if not mine.run.json:
            echo(planned.text)
        return planned.report

    return runtime.launch(main)


def notebook_launch(
    fn: Callable[[Runtime, Any], Any], model: Any = None, *, num_chips: int | str = "all", device: str = "auto"
) -> Any:
    """Call `fn(runtime, model)` on several chips from a notebook; return what it returned on the main one.

    The workers are forked, so they share the model that is already built (and the function, wherever it was defined)
    instead of loading it once each; `fn` moves it by `runtime.place`, and returns a path or plain values. A notebook
    that has touched the accelerator, or run a backward pass, has to be restarted. Without a model to share, plain
    `train_recovery_lora(num_chips=...)` is safer. Raises the first cause (QatLoraError).
    """
    plan = select.plan_run(device, False, ChipsConfig(num_chips=str(num_chips)))

    def work() -> Any:
        runtime = select.make_runtime(plan.device)
        return runtime.launch(lambda: fn(runtime, model))

    return start(plan, work, "fork")


class Board(NamedTuple):
    """The folder where the workers leave their notes."""

    folder: Path

    def finished(self, rank: int, result: Any) -> None:
        """Note what the work returned; only the main worker's is kept."""
        if rank == 0:
            self._write("result", {"path": str(result)} if isinstance(result, Path) else {"value": result})

    def failed(self, rank: int, error: BaseException) -> None:
        """Note a worker's error."""
        trace = "" if isinstance(error, QatLoraError) else traceback.format_exc()
        note = {"time_s": time.time(), "type": type(error).__name__, "text": str(error), "trace": trace}
        self._write(f"failed-{rank}", note)

    def _write(self, name: str, note: Mapping[str, Any]) -> None:
        draft = self.folder / f".{name}"
        draft.write_text(json.dumps(note, default=str), encoding="utf-8")
        draft.replace(self.folder / f"{name}.json")

    def failures(self) -> dict[int, Path]:
        """Return the notes of the workers that failed, by rank."""
        return {int(file.stem.split("-")[1]): file for file in self.folder.glob("failed-*.json")}

    def verdict(self, exit_codes: Mapping[int, int | None], stopped_by: str = "") -> Any:
        """Return the main worker's result, or raise what ended the run: the first cause, of the worker's own type."""
        notes = {rank: json.loads(file.read_text(encoding="utf-8")) for rank, file in self.failures().items()}
        self._raise_cause(notes, len(exit_codes))
        for rank, code in exit_codes.items():
            if code is None or code >= 0 or rank in notes:
                continue
            name = signal.Signals(-code).name
            if stopped_by or name in ("SIGTERM", "SIGINT", "SIGHUP"):
                remedy = "the same command goes on from there"
                raise errors.InterruptedRunError(f"stopped by {stopped_by or name}; {remedy}")
            what = f"process {rank} of {len(exit_codes)} was killed ({name}); out of memory is the usual cause"
            raise ReplicaError(f"{what}. What was complete stays: the same command goes on from the last checkpoint")
        if notes:
            raise ReplicaError(notes[min(notes)]["text"])
        bad = {rank: code for rank, code in exit_codes.items() if code}
        file = self.folder / "result.json"
        if bad or not file.is_file():
            raise ReplicaError(f"processes ended without a result (exit codes by process: {bad or 'all 0'})")
        note = json.loads(file.read_text(encoding="utf-8"))
        return Path(note["path"]) if "path" in note else note["value"]

    def _raise_cause(self, notes: Mapping[int, dict[str, Any]], count: int) -> None:
        """Raise the first error that is not only another process's end; a real one goes before a stop."""
        if not (causes := [item for item in notes.items() if item[1]["type"] != ReplicaError.__name__]):
            return
        rank, note = min(causes, key=lambda item: (item[1]["type"] == "InterruptedRunError", item[1]["time_s"]))
        kind = getattr(errors, note["type"], None)
        if isinstance(kind, type) and issubclass(kind, QatLoraError):
            raise kind(note["text"])
        if note["type"] in ("KeyboardInterrupt", "SystemExit"):
            raise errors.InterruptedRunError(f"process {rank} of {count} was stopped ({note['type']})")
        if note["type"] == "OSError":  # a full disk is no defect of ours
            raise ReplicaError(f"process {rank} of {count}: {note['text']}")
        raise RuntimeError(f"process {rank} of {count} failed:\n{note['trace']}")


def attend(board: Board, rank: int, work: Callable[[], Any]) -> None:
    """Run a worker's work and note how it ended; a failure ends the process at once: clean-up may wait for ever."""
    tqdm.set_lock(threading.RLock())  # its own is a semaphore of the system, which a process that ends at once leaves
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
    parent, since_s = multiprocessing.parent_process(), 0.0
    while not wait([parent.sentinel] if parent else [], timeout=0.5):
        if board.failures().keys() - {rank}:
            since_s = since_s or time.monotonic()
            if time.monotonic() - since_s > GRACE_S:
                break
    os._exit(1)


def run_group(work: Callable[[], Any], count: int, threads: int, start_method: Literal["spawn", "fork"]) -> Any:
    """Run `work` in `count` processes of this machine, with the variables of a process group.

    Each computes with `threads` threads of the CPU. `spawn` pickles the work; `fork` shares this process's memory, and
    is unsafe once it has used threads. Returns what the main one's work gave: a path or plain values; raises as `run`.
    """
    context: Any = multiprocessing.get_context(start_method)
    group = {"WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    with tempfile.TemporaryDirectory(prefix="qat-lora-run-") as folder:
        board = Board(Path(folder))
        given = ((board, rank, group, threads, work) for rank in range(count))
        processes = [context.Process(target=_work_in_group, args=args) for args in given]
        with passed_on(lambda: [p.pid for p in processes if p.is_alive()]) as seen:
            try:
                for process in processes:
                    process.start()
                _wait_for_all(processes)
            finally:
                for process in filter(lambda p: p.is_alive(), processes):
                    process.kill()
                    process.join()
        codes = {rank: process.exitcode for rank, process in enumerate(processes)}
        return board.verdict(codes, seen[0] if seen else "")


def _work_in_group(board: Board, rank: int, group: Mapping[str, Any], threads: int, work: Callable[[], Any]) -> None:
    os.setpgid(0, 0)  # Ctrl-C reaches the process that started us, which passes it on once
    os.environ.update({name: str(value) for name, value in {**group, "RANK": rank, "LOCAL_RANK": rank}.items()})
    os.environ.setdefault("OMP_NUM_THREADS", str(threads))
    import torch

    torch.set_num_threads(threads)
    attend(board, rank, work)


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
