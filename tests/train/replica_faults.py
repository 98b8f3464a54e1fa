"""What can go wrong in a group of two processes, as a program: `python replica_faults.py FOLDER` tries every fault.

Writes FOLDER/faults.json: for each fault the error's type and text, the seconds it took, and the step of the newest
checkpoint. The last entry is a control, the skewed signals without the agreement.
"""

import functools
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

from replica_training import Rows, work

from qat_lora.errors import ConfigError
from qat_lora.runtime import native
from qat_lora.runtime.launch import start
from qat_lora.train.checkpoint import checkpoints


def kill(step, runtime):
    if step == 3 and runtime.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def kill_main(step, runtime):
    if step == 7 and runtime.rank == 0:
        os.kill(os.getpid(), signal.SIGKILL)


def refuse(step, runtime):
    if step == 3 and runtime.rank == 1:
        raise ConfigError("rank 1 refuses")


def defect(step, runtime):
    if step == 3 and runtime.rank == 1:
        raise ZeroDivisionError("a defect")


def refuse_while_the_other_is_stuck(step, runtime):
    if runtime.rank == 0:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        time.sleep(1000)
    refuse(step + 2, runtime)


def unreadable(step, runtime):
    if step == 1 and runtime.rank == 1:
        Rows.unreadable = 9  # the second of step 5


def slow(seconds, step, runtime):
    if step == 3 and runtime.rank == 1:
        time.sleep(seconds)


def skewed_sigterm(step, runtime):
    time.sleep(0.05)
    if step == 1:  # rank 1 gets it 2 s after rank 0, wherever it is by then
        later = threading.Timer(0.1 + 2 * runtime.rank, lambda: os.kill(os.getpid(), signal.SIGTERM))
        later.daemon = True
        later.start()
    if step > 15:
        time.sleep(0.5)


def sigterm_to_the_parent(step, runtime):
    time.sleep(0.05)
    if step == 2 and runtime.rank == 0:
        os.kill(os.getppid(), signal.SIGTERM)


def without_agreement(step, runtime):
    if step == 1:
        native.collectives.agree = lambda flag, group=None: flag
    skewed_sigterm(step, runtime)


def give_up(number, frame):
    raise TimeoutError("hangs")


def main(folder: Path, slow_s: float) -> None:
    import torch._dynamo  # noqa: F401 - the optimizer would import it, in every fork

    start.GRACE_S = 3.0
    faults = {
        "kill": kill,
        "kill main": kill_main,
        "refuse": refuse,
        "defect": defect,
        "unreadable": unreadable,
        "stuck": refuse_while_the_other_is_stuck,
        "slow": functools.partial(slow, slow_s),
        "skewed": skewed_sigterm,
        "parent": sigterm_to_the_parent,
        "naive": without_agreement,
    }
    signal.signal(signal.SIGALRM, give_up)
    report = {}
    for name, fault in faults.items():
        into, began = folder / name.replace(" ", "-"), time.monotonic()
        signal.alarm(0 if name != "naive" else 8)  # it hangs, which is the point
        try:
            start.run_group(functools.partial(work, "cpu", into, 2, fault), 2, 1, "fork")
            error: BaseException | None = None
        except Exception as raised:
            error = raised
        signal.alarm(0)
        found = checkpoints(into / "checkpoints")
        report[name] = {
            "type": type(error).__name__,
            "text": str(error),
            "exit_code": getattr(error, "exit_code", None),
            "seconds": round(time.monotonic() - began, 2),
            "checkpoint": int(found[-1].name.split("-")[1]) if found else 0,
            "finished": len(list(into.glob("replica-*.json"))),
        }
    (folder / "faults.json").write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main(Path(sys.argv[1]), float(sys.argv[2]))
