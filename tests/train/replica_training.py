"""A toy training as the processes of a group, or the devices of one process, run it; also the program that does so.

`python replica_training.py KIND FOLDER COUNT...` trains the same steps with each COUNT of replicas (the last COUNT may
be COUNT:STEP, after which the last replica gets a SIGTERM) and writes
FOLDER/COUNT/replica-RANK.json: losses, the first step's gradients, the weights, the rows seen, the graphs compiled.
KIND is `cpu` (gloo processes, forked), `xla` (this process is one of a group already), or `spmd` (COUNT virtual
devices, in a forked process since their number cannot change; with a sharded base too, in FOLDER/COUNT-sharded).
"""

import contextlib
import functools
import json
import multiprocessing
import os
import signal
import sys
from pathlib import Path

import torch
from train_toys import OPTIM, Toy, rows

from qat_lora.data.shuffle import micro_batches
from qat_lora.errors import CacheDamaged, InterruptedRunError
from qat_lora.losses.objective import ObjectiveConfig
from qat_lora.runtime.launch.select import ChipsConfig, select_runtime
from qat_lora.runtime.launch.start import run_group
from qat_lora.train.callbacks import LoopHooks, RunSettings
from qat_lora.train.loop import LoopConfig, train
from qat_lora.train.step import PreparedObjective

GLOBAL, ACCUMULATION, STEPS, POOL = 48, 2, 20, 200  # an epoch is not a whole number of steps: its last has empty rows


class Rows:
    """Toy rows in the order of a cache, ragged masks and all; notes which ones were asked for."""

    unreadable = None  # a micro-batch

    def __init__(self):
        self.seen = []

    def batches(self, start_step, steps, batch_rows, accumulation, seed, replica, replicas, held_out=None):
        micro = micro_batches(POOL, start_step, steps, batch_rows, accumulation, seed, replica, replicas)
        for number, numbers in enumerate(micro):
            if number == self.unreadable:
                raise CacheDamaged("c/s-000001: row 7 does not have its checksum")
            self.seen.append(numbers.tolist())
            yield rows(numbers)


def replica(folder: Path, count: int, disturb, runtime) -> None:
    """Train, as one replica of `count`, from the newest checkpoint there; `disturb(step, runtime)` ends each step."""
    torch.manual_seed(0)
    toy = runtime.place(Toy())
    runtime.shard_frozen(toy)
    data, gradients = Rows(), []
    average = runtime.reduce_gradients

    def noted(parameters):
        parameters = list(parameters)
        average(parameters)
        if not gradients:
            runtime.mark_step()
            gradients.extend(torch.cat([p.grad.cpu().flatten() for p in parameters]).mul(runtime.replicas).tolist())

    runtime.reduce_gradients = noted
    folder.mkdir(parents=True, exist_ok=True)
    reports = []
    step_end = runtime.step_end

    def reported():
        step_end()
        reports.append(runtime.compile_report())
        disturb(len(reports), runtime)

    runtime.step_end = reported
    result = train(
        toy.train_state(),
        data,
        PreparedObjective(ObjectiveConfig(ce_weight=0.3)),
        OPTIM,
        LoopConfig(
            batch_size=GLOBAL // (ACCUMULATION * count),
            global_batch_size=GLOBAL,
            max_steps=STEPS,
            log_steps=4,
            save_steps=5,
        ),
        LoopHooks(None, lambda name: None),
        runtime,
        RunSettings(folder, 5, {"rows": POOL}, quiet=True),
    )
    note = {
        "processes": runtime.processes,
        "replicas": runtime.replicas,
        "from": result["resumed_from"],
        "gradients": gradients,
        "weights": {name: p.detach().cpu().flatten().tolist() for name, p in toy.train_state().trained.items()},
        "seen": data.seen,
        "reports": reports,
    }
    (folder / f"replica-{runtime.rank}.json").write_text(json.dumps(note))


def stop_last(after: int, step: int, runtime) -> None:
    if step == after - 1 and runtime.rank == runtime.processes - 1:  # that step has ended; the next is the last
        os.kill(os.getpid(), signal.SIGTERM)


def work(kind: str, folder: Path, count: int, disturb=lambda step, runtime: None) -> None:
    torch.set_num_threads(1)
    spmd = ChipsConfig(parallel="spmd", shard_base=kind == "spmd-sharded") if kind.startswith("spmd") else None
    runtime = select_runtime("cpu" if kind == "cpu" else "xla", chips=spmd)
    runtime.launch(lambda: replica(folder, count, disturb, runtime))


def work_on_virtual_devices(kind: str, folder: Path, count: int) -> None:
    os.environ["CPU_NUM_DEVICES"] = str(count)  # read when the first device is touched
    work(kind, folder, count)


def in_a_fork(function, *arguments) -> None:
    """Run in a process that has imported everything already: torch_xla alone takes longer than the training."""
    process = multiprocessing.get_context("fork").Process(target=function, args=arguments)
    process.start()
    process.join()
    assert process.exitcode == 0, (arguments, process.exitcode)


def main(kind: str, folder: Path, counts: list[int], stop_after: int = 0) -> None:
    for count in counts:
        into = folder / str(count)
        if kind == "cpu":
            run_group(functools.partial(work, kind, into, count), count, 1, "fork")
        elif kind == "spmd":
            in_a_fork(work_on_virtual_devices, "spmd", into, count)
            if count > 1:
                in_a_fork(work_on_virtual_devices, "spmd-sharded", folder / f"{count}-sharded", count)
        else:
            work(kind, into, count, functools.partial(stop_last, stop_after))
    if kind == "cpu" and len(counts) > 1:  # 4 replicas, then 2, then 8 of them, on one run's checkpoints
        for count, stop_after in ((4, 5), (2, 6), (8, 0)):
            with contextlib.suppress(InterruptedRunError):
                disturb = functools.partial(stop_last, stop_after)
                run_group(functools.partial(work, kind, folder / "elastic", count, disturb), count, 1, "fork")


if __name__ == "__main__":
    import torch._dynamo

    if sys.argv[1] == "spmd":
        import torch_xla.core.xla_model
        import torch_xla.distributed.spmd  # noqa: F401

    last, _, stop = sys.argv[-1].partition(":")
    main(sys.argv[1], Path(sys.argv[2]), [int(count) for count in (*sys.argv[3:-1], last)], int(stop or 0))
