"""Tells the user what the runtime compiles while training: how long the first step takes, and recompiles later.

A graph compiler is silent for minutes in step 1, and a recompile in step 700 looks like a slow machine. So each phase
of step 1 is announced before it starts, with a sign of life every 15 seconds, and reported after it; and a graph that
is compiled later is a warning that names what changed, or an error with `--max-recompiles`. Graphs of an evaluation do
not count, and a runtime that compiles nothing (its `compile_report` is empty) is asked once.
"""

import logging
import threading
import time
from collections.abc import Callable

from qat_lora.errors import RecompiledError
from qat_lora.runtime.base import Runtime
from qat_lora.types import Batch

TRACED, COMPILED = "forward and backward traced", "compiled"
OPTIMIZER_TRACED, OPTIMIZER_COMPILED = "optimizer traced", "compiled "
NEXT = {"": "tracing forward and backward", TRACED: "compiling forward and backward"}  # the first step, by last phase
NEXT |= {COMPILED: "tracing the optimizer", OPTIMIZER_TRACED: "compiling the optimizer"}
HEARTBEAT_S = 15.0


class CompileWatch:
    """Counts the graphs that each step compiles; more than `most` after the first are an error, None allows any."""

    def __init__(self, runtime: Runtime, most: int | None, say: Callable[[str], None]) -> None:
        self._runtime, self._most, self._say = runtime, most, say
        self._active = bool(runtime.compile_report())
        self._is_first, self._late, self._step = True, 0, 0
        self._graphs, self._since = 0, 0.0
        self._phases: dict[str, float] = {}
        self._known: dict[str, str] = {}
        self._changed: dict[str, str] = {}
        self._over = threading.Event()

    def close(self) -> None:
        """End the signs of life, whatever phase was the last."""
        self._over.set()

    def begin(self, step: int) -> None:
        """Start counting and timing a step."""
        if not self._active:
            return
        self._graphs, self._step = int(self._runtime.compile_report()["graphs_compiled"]), step
        self._since = time.perf_counter()
        self._changed.clear()
        if self._is_first:
            self._announce(NEXT[""])

    def batch(self, batch: Batch) -> None:
        """Note which shapes differ from those of the first micro-batch."""
        if not self._active:
            return
        shapes = {name: str(list(value.shape)) for name, value in batch.items() if hasattr(value, "shape")}
        self._known = self._known or shapes
        for name in sorted(shapes.keys() | self._known.keys()):
            before, now = (found.get(name, "not there") for found in (self._known, shapes))
            if before != now:
                self._changed[name] = f"{name} was {before}, now {now}"
        self._since = time.perf_counter()  # the host waited for rows

    def mark(self, phase: str) -> None:
        """Note the end of a phase: in the first step the time that it took, each phase once, and what comes next."""
        before, self._since = self._since, time.perf_counter()
        if self._active and self._is_first and phase not in self._phases:
            self._phases[phase] = self._since - before
            self._over.set()
            if phase in NEXT:
                self._announce(NEXT[phase])

    def end(self, step: int) -> None:
        """Report the first step, and later ones that compile; RecompiledError: too many."""
        if not self._active:
            return
        report = self._runtime.compile_report()
        new = int(report["graphs_compiled"]) - self._graphs
        if self._is_first:
            phases = ", ".join(f"{name.strip()} {seconds:.1f} s" for name, seconds in self._phases.items())
            self._say(f"[step {step}] {phases} · {report['graphs_compiled']:.0f} graphs so far")
            self._is_first = False
        elif new:
            same = "no shape of the batch changed; a number that changes from step to step may be compiled in"
            what = "; ".join(self._changed.values()) or f"{same}, PT_XLA_DEBUG_LEVEL=1 names the line"
            self._late += new
            message = f"step {step} compiled {new} graph{'s' if new > 1 else ''} more: {what}"
            if self._most is not None and self._late > self._most:
                raise RecompiledError(f"max_recompiles: {self._most}, but {message}")
            logging.getLogger(__name__).warning(message)

    def _announce(self, what: str) -> None:
        """Say what begins, and every 15 seconds that it goes on, until `_over` is set."""
        self._over, line, began = threading.Event(), f"[step {self._step}] {what}", time.perf_counter()
        self._say(f"{line} ...")

        def repeat(over: threading.Event) -> None:
            while not over.wait(HEARTBEAT_S):
                self._say(f"{line}: {time.perf_counter() - began:.0f} s so far")

        threading.Thread(target=repeat, args=(self._over,), name="qat-lora-heartbeat", daemon=True).start()
