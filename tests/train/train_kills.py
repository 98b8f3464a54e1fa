"""Train a toy in forked processes and kill them for real; run as a script by `test_train_kills.py`.

Forked from a process that has imported torch and started no thread, a life costs milliseconds instead of seconds.
"""

import contextlib
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import torch
from train_toys import Toy, run

from qat_lora.errors import QatLoraError
from qat_lora.runtime.host.signals import stop_signals
from qat_lora.train.checkpoint import checkpoints

STEPS = {"max_steps": 60, "log_steps": 7, "eval_steps": 5, "keep_checkpoints": 2}


def fork(work):
    """Run `work` in a forked process that leaves with the exit code the command line would have."""
    child = os.fork()
    if child:
        return child
    try:
        work()
        os._exit(0)
    except QatLoraError as error:
        os._exit(error.exit_code)
    except BaseException as error:
        print("child:", repr(error), file=sys.stderr, flush=True)
        os._exit(99)


def wait(child):
    """Return the exit code, negative for the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def tell(**counts):
    """Print what is done so far, for a program that counts many."""
    print(json.dumps(counts), flush=True)


def kill(out, count):
    """Start, resume and kill a run, `count` times, begun anew when it gets through; return the exit codes."""
    draw, codes = random.Random(count), []
    for life in range(count):
        before = checkpoints(out / "checkpoints")
        if before and before[-1].name == f"step-{STEPS['max_steps']:06d}":
            shutil.rmtree(out)
            before = []
        child = fork(lambda: run(out, save_steps=1, **STEPS))
        deadline = time.monotonic() + 60
        while checkpoints(out / "checkpoints") == before:
            assert time.monotonic() < deadline, f"life {life} made no checkpoint"
            time.sleep(0.001)
        time.sleep(draw.random() * 0.03)
        os.kill(child, signal.SIGKILL)
        codes.append(wait(child))
        if life % 10 == 9:
            tell(kills=codes.count(-signal.SIGKILL))
    return codes


def stop(out, count):
    """Start, resume and stop a run by SIGTERM at random moments, `count` times; return what that took, in seconds."""
    draw, took = random.Random(count), []
    while len(took) < count:
        newest = checkpoints(out / "checkpoints")
        if newest and newest[-1].name == f"step-{STEPS['max_steps']:06d}":
            shutil.rmtree(out)
        reader, writer = os.pipe()
        child = fork(lambda pipe=writer: run(out, slow(pipe), save_steps=1000, **STEPS))
        os.close(writer)
        os.read(reader, 1)  # its first forward: before that it does not listen yet, and there is nothing to save
        os.close(reader)
        time.sleep(draw.random() * 0.3)
        begun = time.monotonic()
        os.kill(child, signal.SIGTERM)
        code = wait(child)
        # A run that is through no longer listens; its last checkpoint is there then.
        through = checkpoints(out / "checkpoints")[-1:] == [out / "checkpoints" / f"step-{STEPS['max_steps']:06d}"]
        assert code in (143, 0) or (code == -signal.SIGTERM and through), code
        if code == 143:  # else it was through already
            took.append(time.monotonic() - begun)
            tell(stops=len(took), slowest_stop_s=max(took))
    return took


def second_signal(pipe):
    """Take a first SIGTERM, go on as a long step would, and be there for the second."""
    with stop_signals() as stopped:
        os.write(pipe, b"1")
        while not stopped:
            time.sleep(0.001)
        os.write(pipe, b"2")
        time.sleep(60)


def finish(out):
    assert wait(fork(lambda: run(out, save_steps=1, **STEPS))) == 0


def main(root, kills, stops):
    torch.set_num_threads(1)
    run(root / "whole", save_steps=1, **STEPS)  # in this process: what torch imports late is then there for all lives
    codes = kill(root / "killed", kills)
    assert set(codes) <= {0, -signal.SIGKILL} and codes.count(-signal.SIGKILL) > kills // 2, codes
    finish(root / "killed")

    took = stop(root / "stopped", stops)
    assert max(took) < 15, took
    finish(root / "stopped")

    reader, writer = os.pipe()
    child = fork(lambda: second_signal(writer))
    os.read(reader, 1)
    os.kill(child, signal.SIGTERM)
    os.read(reader, 1)
    time.sleep(1.1)  # within a second it would be the same request, passed on by a launcher
    os.kill(child, signal.SIGTERM)
    assert wait(child) == -signal.SIGTERM
    tell(kills=codes.count(-signal.SIGKILL), stops=len(took), slowest_stop_s=max(took))


def slow(pipe):
    """Return a toy whose forwards take a while, and are told of through a pipe."""
    toy = Toy(dropout=0.3)

    def before_forward():
        with contextlib.suppress(BrokenPipeError):  # nobody listens after the first
            os.write(pipe, b"1")
        time.sleep(0.01)

    toy.before_forward = before_forward
    return toy


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
