"""The order of things at the start, and the start on several chips."""

import functools
import importlib.util
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from toy_paths import clean_environment

from qat_lora.errors import ConfigError, DeviceError, MissingExtraError
from qat_lora.options import RunConfig
from qat_lora.registry import COMMANDS, Command, DryRun, Requirements
from qat_lora.runtime.launch import select
from qat_lora.runtime.launch import start as launch
from qat_lora.runtime.launch.select import ChipsConfig, DeviceChoice
from qat_lora.runtime.xla.runtime import spawn

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("WORLD_SIZE", "RANK", "PJRT_DEVICE"):
        monkeypatch.delenv(name, raising=False)


def test_the_device_is_chosen_before_the_command_is_imported(monkeypatch):
    happened = []

    class Runtime:
        is_main = True

        def launch(self, main):
            happened.append("launch")
            return main()

    def make(device, chips):
        happened.append(("make", device.kind))
        return Runtime()

    class Imported(Command):
        def load(self):
            happened.append(("import", self.function))
            return lambda options, runtime: (options, runtime)

    monkeypatch.setattr(launch.select, "make_runtime", make)
    options = SimpleNamespace(run=RunConfig(device="cpu", dtype="float32"))
    given, runtime = launch.run(Imported("command", "some.module", "A command."), options)
    assert given is options and isinstance(runtime, Runtime)
    assert happened == [("make", "cpu"), "launch", ("import", "some.module")]


def test_a_missing_device_stops_before_any_import(monkeypatch):
    def none(device, tpu, chips):
        raise DeviceError("none here")

    monkeypatch.setattr(launch.select, "plan_run", none)
    with pytest.raises(DeviceError):
        launch.run(COMMANDS["recover"], SimpleNamespace(run=RunConfig(), dry_run=False))


@pytest.mark.parametrize("command", ["push", "estimate", "qat"])
def test_what_computes_nothing_asks_for_no_device(monkeypatch, capsys, command):
    def none(device, tpu, chips):
        raise DeviceError("none here")

    planned = DryRun({"steps": 3}, "three steps", Requirements("this run", 1, 1, 1))
    functions = {"function": lambda options, runtime: runtime.description, "plan": lambda options: planned}
    monkeypatch.setattr(launch.select, "plan_run", none)
    monkeypatch.setattr(Command, "load", lambda self, name="function": functions[name])
    for quiet in (False, True):
        options = SimpleNamespace(run=RunConfig(device="tpu", json=quiet), dry_run=True)
        result = launch.run(COMMANDS[command], options)
        if command == "qat":  # people get the text and programs the report
            assert result == {"steps": 3} and capsys.readouterr().out == ("" if quiet else "three steps\n")
        else:
            assert result.startswith("CPU")


@pytest.mark.parametrize("chips", [ChipsConfig("2"), ChipsConfig(parallel="spmd")])
def test_a_command_for_one_chip_refuses_several(monkeypatch, chips):
    device = "cpu" if chips.num_chips else "xla"
    with pytest.raises(ConfigError, match="num_chips: this command works on one chip"):
        launch.run(COMMANDS["quantize"], SimpleNamespace(run=RunConfig(device=device, chips=chips), dry_run=False))


NOTEBOOK = """
import sys, torch
from qat_lora import notebook_launch

model = torch.nn.Linear(3, 2)
built = model.weight.data_ptr()

def train(runtime, model):
    runtime.place(model)
    assert model.weight.data_ptr() == built  # forked: the very memory, not a copy that was sent
    mean = runtime.all_reduce_mean(torch.tensor([1.0 + runtime.rank]))
    runtime.barrier("end")
    return {"replicas": runtime.replicas, "mean": mean.item()}

import json
print(json.dumps(notebook_launch(train, model, num_chips=2, device="cpu")))
"""


def test_a_notebook_shares_its_model_with_forked_workers():
    done = subprocess.run(
        [sys.executable, "-c", NOTEBOOK], env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"replicas": 2, "mean": 1.5}


def blocking_work(where):
    """Fail in one process of a group that cannot be left: its clean-up waits for ever."""
    import torch.distributed as dist

    from qat_lora.runtime.native import NativeRuntime

    dist.destroy_process_group = lambda: time.sleep(3600)
    runtime = NativeRuntime("cpu")

    def main():
        runtime.barrier("met")
        if runtime.rank == 1:
            Path(where).write_text(str(time.time()))
            raise ConfigError("lr: the first cause")
        runtime.barrier("never")

    return runtime.launch(main)


def test_the_first_cause_is_said_within_seconds_though_the_group_cannot_be_left(tmp_path):
    """The run itself is what is timed: an end that waits for the clean-up takes an hour."""
    plan = launch.LaunchPlan(DeviceChoice("cpu"), 2, "group")
    with pytest.raises(ConfigError, match="lr: the first cause"):
        launch.start(plan, functools.partial(blocking_work, str(tmp_path / "failed_at")))
    assert time.time() - float((tmp_path / "failed_at").read_text()) < 10


SPAWN = """
import sys
from pathlib import Path
from qat_lora.runtime.launch.select import DeviceChoice, LaunchPlan
from qat_lora.runtime.launch.start import start
from test_runtime_start import xla_work

if __name__ == "__main__":
    result = start(LaunchPlan(DeviceChoice("xla", "CPU"), 1, "torch_xla"), xla_work)
    assert result == {"rank": 0, "device": "XLA on CPU · 1 device", "thread": "a worker's", "met": 1}, result
"""


def xla_work():
    """What the one process of `torch_xla.launch` does: everything that many would, as far as one device can."""
    import threading

    import torch

    from qat_lora.runtime.launch.select import select_runtime

    runtime = select_runtime("xla")

    def main():
        import torch_xla.core.xla_model as xm

        parameter = runtime.place(torch.nn.Linear(2, 2)).weight
        parameter.grad = torch.ones_like(parameter)
        runtime.reduce_gradients([parameter])
        for tag in ("model_download", "before_warmup", "before_final_save"):
            runtime.barrier(tag)
        met = len(xm.rendezvous("model_download"))
        main_thread = threading.current_thread() is threading.main_thread()
        where = "the main" if main_thread else "a worker's"
        return {"rank": runtime.rank, "device": runtime.description, "thread": where, "met": met}

    return runtime.launch(main)


@pytest.mark.xla
@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="needs the xla extra")
def test_torch_xla_launches_one_process(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(SPAWN)
    paths = f"{ROOT}:{ROOT / 'tests'}:{Path(__file__).parent}"
    done = subprocess.run(
        [sys.executable, str(program)],
        env=clean_environment(PJRT_DEVICE="CPU", PYTHONPATH=paths),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]


TOUCHED = """
import torch, torch_xla
from qat_lora.errors import DeviceError
from qat_lora.runtime.xla.runtime import spawn

torch.ones(2, device=torch_xla.device()).cpu()
for method in ("spawn", "fork"):
    try:
        spawn(print, method)
    except DeviceError as error:
        print(error)
"""


@pytest.mark.xla
@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="needs the xla extra")
def test_a_notebook_that_has_touched_the_device_is_told_to_restart():
    environment = {**os.environ, "PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", TOUCHED], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("restart the notebook's kernel") == 2


def test_a_process_a_chip_needs_torch_xla(monkeypatch):
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    with pytest.raises(MissingExtraError, match="pip install 'qat-lora"):
        spawn(print, "spawn")


def test_the_machine_is_looked_at_once_whatever_the_number_of_processes(monkeypatch):
    look, looks = select.look, []
    monkeypatch.setattr(select, "look", lambda: looks.append(1) or look())
    monkeypatch.setattr(launch, "start", lambda plan, work, *_: [work() for _ in range(plan.chips)])
    monkeypatch.setattr(Command, "load", lambda self, _="": lambda options, runtime: runtime.device.type)
    settings = RunConfig(device="cpu", dtype="float32", chips=ChipsConfig("2"), quiet=True)
    options = SimpleNamespace(run=settings, dry_run=False)
    assert launch.run(COMMANDS["recover"], options) == ["cpu", "cpu"]
    assert len(looks) == 1
    assert launch.notebook_launch(lambda runtime, _: runtime.device.type, num_chips=2, device="cpu") == ["cpu", "cpu"]
    assert len(looks) == 2


def test_work_is_picklable():
    import multiprocessing.reduction

    work = functools.partial(launch.work_here, COMMANDS["recover"], RunConfig(), DeviceChoice("cuda"))
    assert multiprocessing.reduction.ForkingPickler.dumps(work)
