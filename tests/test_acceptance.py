"""The acceptance scripts of TPUs and GPUs: their shell is sound, and their tables tell equal runs from others."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from toy_paths import clean_environment

ROOT = Path(__file__).resolve().parents[1]
STEP = {"step": "compiled", "graphs": 2, "queue": "never stopped", "tokens_per_s": 9, "peak_mib": 100}
STEP |= {"estimated_mib": 104, "loss": 4.25}


@pytest.fixture(scope="module")
def acceptance():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("acceptance")


def run(folder, name, loss=4.0, weight=0.5, held="", code=0):
    """Make what a run leaves, and its line."""
    out = folder / name
    (out / "checkpoints" / "step-20").mkdir(parents=True)
    (out / "last").mkdir()
    (out / "metrics.jsonl").write_text("".join(json.dumps({"loss": loss - i / 100}) + "\n" for i in range(20)))
    save_file({"a": np.full(4, weight, np.float32)}, out / "last" / "adapter_model.safetensors")
    (folder / f"{name}.txt").write_text(held or "error: num_chips: 8 is not possible here (cuda); possible: 1\n")
    with open(folder / "exits.txt", "a") as file:
        file.write(f"{name} {code} 7\n")


def table(acceptance, folder, capsys, **step):
    (folder / "checks.txt").write_text("doctor 0 3\n")
    (folder / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in (STEP, STEP | step)))
    return acceptance.table(folder), capsys.readouterr().out


def test_equal_runs_pass(acceptance, tmp_path, capsys):
    run(tmp_path, "cpu-1")
    run(tmp_path, "gpu-2-sharded", 4.0005, 0.5001, "frozen weights of the layers: 1,010 of 2,020 bytes in each process")
    run(tmp_path, "gpu-8", code=2)
    code, printed = table(acceptance, tmp_path, capsys)
    assert code == 0 and "| gpu-2-sharded | equal, 50% of the frozen bytes a process | 20 | 1 | 5.0e-04 |" in printed
    assert "| gpu-8 | not possible here |" in printed and "| doctor | passed | 3 |" in printed
    assert "| fine | compiled | 2 | never stopped | 9 | 100 | 104 | 4.25 |" in printed


@pytest.mark.parametrize(
    ("says", "other"),
    [
        ("| gpu-2 | DIFFERS |", {"loss": 4.002}),
        ("| gpu-2 | DIFFERS |", {"weight": 0.51}),
        ("| gpu-2 | DIFFERS: equal, 100% of the frozen bytes", {"held": "layers: 2,020 of 2,020 bytes"}),
        ("| gpu-2 | FAILED, exit 1: out of memory |", {"code": 1, "held": "out of memory"}),
    ],
)
def test_a_run_that_differs_or_failed_is_named(acceptance, tmp_path, capsys, says, other):
    run(tmp_path, "cpu-1")
    run(tmp_path, "gpu-2", **other)
    code, printed = table(acceptance, tmp_path, capsys)
    assert code == 1 and says in printed, printed


@pytest.mark.parametrize(
    ("says", "step"),
    [
        ("called a synchronizing CUDA operation", {"queue": "called a synchronizing CUDA operation"}),
        ("estimate +30%", {"estimated_mib": 130}),
        ("loss", {"loss": 4.5}),
    ],
)
def test_a_step_that_stops_or_misses_its_estimate_is_named(acceptance, tmp_path, capsys, says, step):
    run(tmp_path, "cpu-1")
    code, printed = table(acceptance, tmp_path, capsys, **step)
    assert code == 1 and f"| DIFFERS: {says} |" in printed


@pytest.mark.parametrize("script", ["acceptance_runs", "gpu_acceptance", "tpu_acceptance"])
def test_the_scripts_are_sound_and_name_the_program(script):
    file = ROOT / "scripts" / f"{script}.sh"
    subprocess.run(["bash", "-n", str(file)], check=True)
    text = file.read_text(encoding="utf-8")
    assert script == "acceptance_runs" or ('source "$(dirname "$0")/acceptance_runs.sh"' in text and "table" in text)


def test_a_step_on_the_cpu_takes_the_memory_that_is_estimated(tmp_path):
    program = [sys.executable, str(ROOT / "benchmarks/acceptance.py"), "step", str(tmp_path), "--device", "cpu"]
    environment = clean_environment(USE_TORCH_XLA="0", PYTHONPATH=str(ROOT))
    subprocess.run(program, env=environment, check=True, capture_output=True, timeout=300)
    found = json.loads((tmp_path / "steps.jsonl").read_text())
    assert found["peak_mib"] == pytest.approx(found["estimated_mib"], rel=0.15)


@pytest.mark.slow
def test_the_rehearsal_on_cpus_passes(tmp_path):
    command = [str(ROOT / "scripts/gpu_acceptance.sh"), str(tmp_path)]
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "DEVICE": "cpu", "GPUS": "2"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-4000:]
    assert "| gpu-2-sharded | equal, 50% of the frozen bytes a process |" in done.stdout
