"""Training on several replicas equals training on one, and ends well whatever happens to one of them."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from replica_training import ACCUMULATION, GLOBAL, POOL, STEPS
from toy_paths import clean_environment

from qat_lora.data.shuffle import global_batch, steps_per_epoch
from qat_lora.train.checkpoint import checkpoints
from qat_lora.train.metrics import read_metrics

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
needs_xla = pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="needs the xla extra")


def start(program: str, *arguments: object, launcher: tuple = (), **variables: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, *launcher, str(HERE / program), *map(str, arguments)],
        env=clean_environment(PYTHONPATH=f"{ROOT}:{HERE}", **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen, timeout_s: float = 240) -> str:
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    assert process.returncode == 0, output[-4000:]
    return output


def notes(folder: Path) -> list[dict]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("replica-*.json"))]


def weights(note: dict) -> np.ndarray:
    return np.concatenate([np.array(values) for values in note["weights"].values()])


def assert_same_training(run: Path, alone: Path) -> None:
    """Loss and first gradients to 1e-6 of their size, weights after all steps to 1e-5, in every process."""
    mine, reference = read_metrics(run / "metrics.jsonl"), read_metrics(alone / "metrics.jsonl")
    assert [line["step"] for line in mine] == [line["step"] for line in reference] == list(range(1, STEPS + 1))
    for name in ("loss", "loss_kd", "loss_ce", "grad_norm", "tokens"):
        np.testing.assert_allclose([x[name] for x in mine], [x[name] for x in reference], rtol=1e-6, err_msg=name)
    oracle = notes(alone)[0]
    for note in notes(run):
        if not note["from"]:
            largest = np.abs(oracle["gradients"]).max()
            np.testing.assert_allclose(note["gradients"], oracle["gradients"], rtol=0, atol=1e-6 * largest)
        np.testing.assert_allclose(weights(note), weights(oracle), rtol=0, atol=1e-5)
    assert reference[0]["loss"] > reference[-1]["loss"] + 0.1, "nothing was learned, so this compares nothing"


def assert_rows_in_order(run: Path) -> None:
    """Put together, the replicas' micro-batches are the global batches: every row once an epoch, padding aside."""
    parts = np.array([note["seen"] for note in notes(run)])  # [process, step x accumulation, rows]
    steps = parts.reshape(len(parts), STEPS, ACCUMULATION, -1).transpose(1, 2, 0, 3).reshape(STEPS, GLOBAL)
    for step, numbers in enumerate(steps):
        assert numbers.tolist() == global_batch(POOL, step, GLOBAL, 5).tolist()
    epoch = steps[: steps_per_epoch(POOL, GLOBAL)].ravel()
    assert sorted(epoch[epoch >= 0]) == list(range(POOL)) and (epoch < 0).any()


# --- gloo -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gloo(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gloo")
    finish(start("replica_training.py", "cpu", folder, 1, 2, 3, 4))
    return folder


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_gloo_processes_equal_one_process(gloo, count):
    run = gloo / str(count)
    assert len(notes(run)) == count == notes(run)[0]["replicas"]
    assert_same_training(run, gloo / "1")
    assert_rows_in_order(run)


def test_a_run_goes_on_with_another_number_of_replicas(gloo):
    """4, then 2, then 8 processes, each stopped by a signal to one of them, at the same global batch."""
    run = gloo / "elastic"
    assert [note["from"] for note in notes(run)] == [11] * 8  # 5 steps by four, 6 by two
    assert_same_training(run, gloo / "1")


# --- faults -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def faults(tmp_path_factory):
    folder = tmp_path_factory.mktemp("faults")
    finish(start("replica_faults.py", folder, 3))
    return json.loads((folder / "faults.json").read_text())


EXPECTED = {  # error, part of its text, exit code, newest checkpoint, processes that finished
    "kill": ("ReplicaError", "process 1 of 2 was killed (SIGKILL)", 1, 0, 0),
    "kill main": ("ReplicaError", "process 0 of 2 was killed (SIGKILL)", 1, 5, 0),
    "refuse": ("ConfigError", "rank 1 refuses", 2, 0, 0),
    "defect": ("RuntimeError", "ZeroDivisionError: a defect", None, 0, 0),
    "stuck": ("ConfigError", "rank 1 refuses", 2, 0, 0),
    "unreadable": ("CacheDamaged", "s-000001: row 7 does not have its checksum; the checkpoint after step 4", 1, 4, 0),
    "slow": ("NoneType", "None", None, STEPS, 2),
}


@pytest.mark.parametrize("fault", EXPECTED)
def test_one_replica_ends_all(faults, fault):
    kind, text, exit_code, checkpoint, finished = EXPECTED[fault]
    found = faults[fault]
    assert (found["type"], found["exit_code"]) == (kind, exit_code) and text in found["text"], found
    assert (found["checkpoint"], found["finished"]) == (checkpoint, finished), found
    assert found["seconds"] < 30, found


@pytest.mark.parametrize("fault", ["skewed", "parent"])
def test_a_stop_signal_stops_all_after_the_same_step(faults, fault):
    found = faults[fault]
    assert (found["type"], found["exit_code"], found["finished"]) == ("InterruptedRunError", 143, 0), found
    assert f"after step {found['checkpoint']} of {STEPS}; the checkpoint is complete" in found["text"], found
    assert 0 < found["checkpoint"] < STEPS and found["seconds"] < 30, found


def test_without_agreement_skewed_signals_hang(faults):
    assert faults["naive"]["type"] == "TimeoutError" and faults["naive"]["checkpoint"] == 0, faults["naive"]


# --- XLA --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def spmd(tmp_path_factory):
    """1, 2, 4 and 8 virtual devices, and all but the first again with a sharded base."""
    folder = tmp_path_factory.mktemp("spmd")
    finish(start("replica_training.py", "spmd", folder, 1, 2, 4, 8, PJRT_DEVICE="CPU"), 500)
    return folder


@pytest.mark.xla
@needs_xla
@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "sharded"])
@pytest.mark.parametrize("count", [2, 4, 8])
def test_spmd_devices_equal_one_device(spmd, count, sharded):
    run = spmd / (f"{count}-sharded" if sharded else str(count))
    (note,), (alone,) = notes(run), notes(spmd / "1")
    assert (note["processes"], note["replicas"]) == (1, count)
    assert_same_training(run, spmd / "1")
    graphs = [[report["graphs_compiled"] for report in n["reports"]] for n in (note, alone)]
    assert graphs[0] == graphs[1] and graphs[0][1:] == [graphs[0][1]] * (STEPS - 1), graphs
    assert_rows_in_order(run)


@pytest.mark.xla
@needs_xla
def test_torchrun_with_an_xla_device_each_equals_one_device(spmd, tmp_path):
    """gloo carries the gradients, since XLA on the CPU cannot; one SIGTERM stops both, which then go on."""
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run = tmp_path / "2"
    stopped = start("replica_training.py", "xla", tmp_path, "2:7", launcher=launcher, PJRT_DEVICE="CPU")
    output, _ = stopped.communicate(timeout=240)
    assert stopped.returncode != 0 and "after step 7 of" in output, output[-3000:]
    assert [path.name for path in checkpoints(run / "checkpoints")][-1] == "step-000007"
    finish(start("replica_training.py", "xla", tmp_path, 2, launcher=launcher, PJRT_DEVICE="CPU"))
    assert [(note["replicas"], note["from"]) for note in notes(run)] == [(2, 7)] * 2
    assert_same_training(run, spmd / "1")
