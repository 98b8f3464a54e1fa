"""The watch over what is compiled, on a runtime that says what it is told to say."""

import logging
import threading

import numpy as np
import pytest

from qat_lora.errors import ConfigError, RecompiledError
from qat_lora.train import compile_watch
from qat_lora.train.compile_watch import COMPILED, TRACED, CompileWatch
from qat_lora.train.loop import LoopConfig


class Compiler:
    """Has compiled as many graphs as it is told."""

    graphs = 0

    def compile_report(self):
        return {"graphs_compiled": self.graphs, "compile_s": 0.0}


class Interpreter:
    """Compiles nothing; asked once."""

    asked = 0

    def compile_report(self):
        self.asked += 1
        return {}


def batch(rows=2):
    return {"input_ids": np.zeros((rows, 8)), "target_mask": np.zeros((rows, 7)), "epoch": 3}


def step(watch, number, compiler, new, rows=2):
    watch.begin(number)
    watch.batch(batch(rows))
    watch.mark(TRACED)
    compiler.graphs += new
    watch.mark(COMPILED)
    watch.end(number)


def test_the_first_step_is_reported_by_phases_and_steady_ones_are_silent(caplog):
    said, compiler = [], Compiler()
    watch = CompileWatch(compiler, 0, said.append)
    step(watch, 41, compiler, 2)
    compiler.graphs += 1  # an evaluation between the steps is its own affair
    for number in range(42, 50):
        step(watch, number, compiler, 0)
    assert said[:3] == [
        "[step 41] tracing forward and backward ...",
        "[step 41] compiling forward and backward ...",
        "[step 41] tracing the optimizer ...",
    ]
    assert len(said) == 4 and said[3].startswith("[step 41] forward and backward traced 0.0 s, compiled 0.0 s")
    assert "2 graphs" in said[3] and not caplog.records
    watch.close()


def test_a_long_phase_shows_signs_of_life_until_it_ends(monkeypatch):
    monkeypatch.setattr(compile_watch, "HEARTBEAT_S", 0.01)
    said, heard = [], threading.Event()

    def say(line):
        said.append(line)
        if "so far" in line:
            heard.set()

    watch = CompileWatch(Compiler(), None, say)
    watch.begin(1)
    assert heard.wait(10) and "[step 1] tracing forward and backward: 0 s so far" in said
    watch.mark(TRACED)
    watch.close()
    for thread in threading.enumerate():
        if thread.name == "qat-lora-heartbeat":
            thread.join(10)
    assert not [thread for thread in threading.enumerate() if thread.name == "qat-lora-heartbeat"]


def test_a_recompile_names_the_shape_that_changed(caplog):
    compiler = Compiler()
    watch = CompileWatch(compiler, None, lambda line: None)
    step(watch, 1, compiler, 2)
    with caplog.at_level(logging.WARNING):
        step(watch, 2, compiler, 1, rows=3)
        step(watch, 3, compiler, 2)
    assert "step 2 compiled 1 graph more: " in caplog.messages[0]
    assert "input_ids was [2, 8], now [3, 8]" in caplog.messages[0] and "target_mask was [2, 7]" in caplog.messages[0]
    assert "step 3 compiled 2 graphs more: no shape of the batch changed" in caplog.messages[1]


def test_more_recompiles_than_allowed_are_an_error():
    compiler = Compiler()
    watch = CompileWatch(compiler, 1, lambda line: None)
    step(watch, 1, compiler, 3)
    step(watch, 2, compiler, 1)
    with pytest.raises(RecompiledError, match=r"^max_recompiles: 1, but step 3 .*input_ids was \[2, 8\]") as caught:
        step(watch, 3, compiler, 1, rows=1)
    assert caught.value.exit_code == 1
    with pytest.raises(ConfigError, match="^max_recompiles: -1"):
        LoopConfig(max_recompiles=-1)


def test_where_nothing_compiles_nothing_is_asked_or_said():
    runtime = Interpreter()
    watch = CompileWatch(runtime, 0, pytest.fail)
    for number in range(1, 4):
        watch.begin(number)
        watch.batch(batch(number))
        watch.mark(TRACED)
        watch.end(number)
    assert runtime.asked == 1
