"""The anchor on XLA: one more graph in step 1 and none after, nothing read back between, the numbers of the CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from toy_paths import clean_environment

pytest.importorskip("torch_xla")

PROGRAM = """
import json, sys
from dataclasses import replace
from pathlib import Path
import torch
from train_toys import LOOP, OPTIM, SETTINGS, Toy, ToyData
from qat_lora.losses.objective import ObjectiveConfig
from qat_lora.runtime.launch.select import select_runtime
from qat_lora.files.folders import atomic_dir
from qat_lora.train.step import remember
from qat_lora.train.callbacks import LoopHooks, RunSettings
from qat_lora.train.loop import train
from qat_lora.train.step import PreparedObjective

device, weight, out = sys.argv[1], float(sys.argv[2]), Path(sys.argv[3])
runtime, counts = select_runtime(device), []
step_end = runtime.step_end

def counted():
    step_end()
    counts.append(dict(runtime.compile_report()))

runtime.step_end = counted

def export(name):
    with atomic_dir(out / name) as draft:
        (draft / "x").write_text("")

def main():
    toy, anchor = Toy(), None
    runtime.place(toy)
    objective = ObjectiveConfig(anchor_weight=weight, anchor_samples=5)
    if weight:
        toy.eval()
        anchor = remember(toy, ToyData(), objective, LOOP.batch_size, 5, runtime)
        toy.train()
    before = dict(runtime.compile_report())
    loop = replace(LOOP, save_steps=100)
    prepared = PreparedObjective(objective, anchor=anchor)
    settings = RunSettings(out, 5, SETTINGS, quiet=True)
    train(toy.train_state(), ToyData(), prepared, OPTIM, loop, LoopHooks(None, export), runtime, settings)
    return before

out.mkdir()
print(json.dumps([runtime.launch(main), *counts]))
"""


def run(device, weight, out):
    chosen = {"PJRT_DEVICE": "CPU"} if device == "xla" else {"USE_TORCH_XLA": "0"}
    environment = clean_environment(PYTHONPATH=str(Path(__file__).parent), **chosen)
    command = [sys.executable, "-c", PROGRAM, device, str(weight), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return json.loads(done.stdout.splitlines()[-1]), lines


@pytest.mark.xla
def test_one_more_graph_and_the_same_numbers(tmp_path):
    counts, lines = run("xla", 0.5, tmp_path / "xla")
    plain, _ = run("xla", 0.0, tmp_path / "plain")
    compiled, without = ([c["graphs_compiled"] for c in x] for x in (counts, plain))
    assert compiled[0] <= without[0] + 1, "remembering takes one graph"
    assert compiled[1] - compiled[0] == without[1] - without[0] + 1, "the anchor's micro-batch takes one more"
    assert compiled[1:] == [compiled[1]] * len(compiled[1:]), "compiled again after step 1"
    _, expected = run("cpu", 0.5, tmp_path / "cpu")
    for name in ("loss", "loss_kd", "loss_anchor", "grad_norm", "tokens"):
        assert [x[name] for x in lines] == pytest.approx([x[name] for x in expected], abs=1e-4), name
    assert lines[-1]["loss_anchor"] > 1e-3
