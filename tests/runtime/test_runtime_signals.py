"""Stop signals: collected, passed on by a launcher without counting twice, and deadly when repeated later."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from qat_lora.errors import InterruptedRunError, ReplicaError
from qat_lora.runtime.host import signals
from qat_lora.runtime.host.collectives import among_peers, free_port
from qat_lora.runtime.host.signals import install_for_good, passed_on, stop_signals
from qat_lora.runtime.launch.start import Board


def test_the_same_request_twice_is_one_and_a_later_one_ends(monkeypatch):
    with stop_signals() as received:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGTERM)
        assert received == ["SIGTERM"]
    program = """
import os, signal
from qat_lora.runtime.host import signals
signals._SAME_REQUEST_S = 0.0
with signals.stop_signals() as received:
    os.kill(os.getpid(), signal.SIGTERM)
    print(received, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    print("alive", flush=True)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout == "['SIGTERM']\n" and done.returncode == -signal.SIGTERM


@pytest.mark.parametrize("collect", [stop_signals, lambda: passed_on(list)])
def test_a_closed_terminal_stops_like_the_others_but_not_under_nohup(collect):
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        with collect() as received:
            os.kill(os.getpid(), signal.SIGHUP)
            assert received == ["SIGHUP"]
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with collect() as received:
            os.kill(os.getpid(), signal.SIGHUP)
            assert received == [] and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_thread_sees_what_its_process_was_sent():
    """As under torch_xla's launcher, which runs the work in a thread, where no handler can be set."""
    old = {number: signal.getsignal(number) for number in signals.STOP_SIGNALS}
    seen = []

    def work():
        with stop_signals() as received:
            os.kill(os.getpid(), signal.SIGTERM)
            done.wait(5)
            seen.extend(received)

    done = threading.Event()
    try:
        install_for_good()
        thread = threading.Thread(target=work)
        thread.start()
        while not signals._standing[0]:
            pass
        done.set()
        thread.join()
    finally:
        signals._standing.clear()
        for number, handler in old.items():
            signal.signal(number, handler)
    assert seen == ["SIGTERM"]


def test_signals_are_passed_on():
    child = subprocess.Popen(["sleep", "60"])
    gone = subprocess.Popen(["true"])
    gone.wait()
    with passed_on(lambda: [child.pid, gone.pid]) as seen:
        os.kill(os.getpid(), signal.SIGTERM)
        assert child.wait(10) == -signal.SIGTERM
    assert seen == ["SIGTERM"]


# --- notes of workers, and what they add up to --------------------------------------------------------------------


def note(board, rank, error):
    try:
        raise error
    except type(error) as raised:
        board.failed(rank, raised)


def test_the_first_cause_is_raised_not_its_echo(tmp_path):
    board = Board(tmp_path)
    note(board, 0, ReplicaError("lost"))
    note(board, 1, InterruptedRunError("stopped"))
    with pytest.raises(InterruptedRunError, match="stopped"):
        board.verdict({0: 1, 1: 143, 2: -15})
    note(board, 2, ZeroDivisionError("a defect"))
    with pytest.raises(RuntimeError, match=r"process 2 of 3 failed:\n(.|\n)*a defect"):
        board.verdict({0: 1, 1: 143, 2: 1})


@pytest.mark.parametrize(
    ("codes", "stopped_by", "kind", "text"),
    [
        ({0: 0, 1: -9}, "", ReplicaError, "process 1 of 2 was killed .SIGKILL."),
        ({0: 0, 1: -15}, "", InterruptedRunError, "stopped by SIGTERM"),
        ({0: 0, 1: -1}, "", InterruptedRunError, "stopped by SIGHUP"),
        ({0: -9, 1: -9}, "SIGINT", InterruptedRunError, "stopped by SIGINT"),
        ({0: 0, 1: 3}, "", ReplicaError, r"exit codes by process: \{1: 3\}"),
        ({0: 0, 1: 0}, "", ReplicaError, "without a result .exit codes by process: all 0"),
    ],
)
def test_deaths_without_a_note(tmp_path, codes, stopped_by, kind, text):
    with pytest.raises(kind, match=text):
        Board(tmp_path).verdict(codes, stopped_by)


def test_results_come_back(tmp_path):
    board = Board(tmp_path)
    board.finished(1, "not the main one's")
    board.finished(0, tmp_path / "run")
    assert board.verdict({0: 0, 1: 0}) == tmp_path / "run"
    board.finished(0, {"rows": 3})
    assert board.verdict({0: 0, 1: 0}) == {"rows": 3}


def test_a_lost_peer_is_an_error_for_people():
    with pytest.raises(ReplicaError, match=r"another process of this run ended .*\(Connection closed\)"), among_peers():
        raise RuntimeError("Connection closed\nframe #0: c10::Error")
    assert 0 < free_port() < 65536
