"""Tells the user what the runtime compiles while training: how long the first step takes, and recompiles later.

A graph compiler is silent for minutes in step 1, and a recompile in step 700 looks like a slow machine. So step 1 is
reported phase by phase, and a graph that is compiled later is a warning that names what changed, or an error with
`--max-recompiles`. Only training steps are watched: graphs of an evaluation do not count. A runtime that compiles
nothing (its `compile_report` is empty) is asked once.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from qat_lora.errors import RecompiledError
from qat_lora.runtime.base import Runtime
from qat_lora.types import Batch

TRACED, COMPILED = "forward and backward traced", "compiled"
OPTIMIZER_TRACED, OPTIMIZER_COMPILED = "optimizer traced", "compiled "


class CompileWatch:
    """Counts the graphs that each step compiles; more than `most` after the first are an error, None allows any."""

    def __init__(self, runtime: Runtime, most: int | None, say: Callable[[str], None]) -> None:
        self._runtime, self._most, self._say = runtime, most, say
        self._active = bool(runtime.compile_report())
        self._is_first, self._late = True, 0
        self._graphs, self._since = 0, 0.0
        self._phases: dict[str, float] = {}
        self._known: dict[str, str] = {}
        self._changed: dict[str, str] = {}

    def begin(self) -> None:
        """Start counting and timing a step."""
        if self._active:
            self._graphs, self._since = int(self._runtime.compile_report()["graphs_compiled"]), time.perf_counter()
            self._changed.clear()

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

    def mark(self, phase: str) -> None:
        """Note the time that a phase of the first step took, each phase once."""
        if self._active and self._is_first:
            now = time.perf_counter()
            self._phases.setdefault(phase, now - self._since)
            self._since = now

    def end(self, step: int) -> None:
        """Report the first step, and every later one that compiled a graph.

        Raises:
            RecompiledError: more graphs than allowed were compiled after the first step.
        """
        if not self._active:
            return
        report = self._runtime.compile_report()
        new = int(report["graphs_compiled"]) - self._graphs
        if self._is_first:
            phases = ", ".join(f"{name.strip()} {seconds:.1f} s" for name, seconds in self._phases.items())
            self._say(f"[step {step}] {phases} · {report['graphs_compiled']:.0f} graphs so far")
            self._is_first = False
            return
        if not new:
            return
        self._late += new
        what = "; ".join(self._changed.values()) or (
            "no shape of the batch changed; a number that changes from step to step may be compiled in, "
            "PT_XLA_DEBUG_LEVEL=1 names the line"
        )
        message = f"step {step} compiled {new} graph{'s' if new > 1 else ''} more: {what}"
        if self._most is not None and self._late > self._most:
            raise RecompiledError(f"max_recompiles: {self._most}, but {message}")
        logging.getLogger(__name__).warning(message)
