"""The whole command on XLA: the CPU's figures, and no graph that depends on text, batch or position."""

import importlib.util
import json
import os
import subprocess
import sys

import pytest

from qat_lora.models.copies import copy_tokenizer
from qat_lora.models.load import load_model, save_model

PROGRAM = """
import json, sys
import torch
torch.set_num_threads(1)
from collections import Counter
from qat_lora import cli
from qat_lora.commands import evaluate as evaluation
from qat_lora.runtime.xla.runtime import XlaRuntime

counts, runtime = {}, None
launch = XlaRuntime.launch

def remember(self, main):
    def run():
        global runtime
        runtime = self
        return main()
    return launch(self, run)

def counted(name):
    function = getattr(evaluation, name)
    def run(*args, **kwargs):
        before = Counter(runtime.compile_report())
        result = function(*args, **kwargs)
        after = Counter(runtime.compile_report())
        after.subtract(before)
        counts.setdefault(name, []).append(dict(after))
        return result
    return run

XlaRuntime.launch = remember
for name in ("measure", "continue_greedily"):
    setattr(evaluation, name, counted(name))
cli.main(sys.argv[2:])
with open(sys.argv[1], "w") as file:
    json.dump(counts, file)
"""


@pytest.mark.xla
@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="needs the xla extra")
def test_one_graph_a_kind_of_work_and_the_figures_of_the_cpu(tiny, tmp_path):
    near = load_model(str(tiny.teacher))
    near.module.model.layers[0].mlp.up_proj.weight.data.mul_(0.8)
    save_model(near.module, tmp_path / "near")
    copy_tokenizer(tiny.teacher, tmp_path / "near")
    common = ["eval", "--teacher", str(tiny.teacher), "--students", f"near={tmp_path / 'near'}", "--quiet"]
    common += ["--dataset", str(tiny.held_out), "--domain", f"seen={tiny.text}", "--length", "32", "--eval-rows", "10"]
    common += ["--batch-size", "4", "--generate", "3", "--generate-tokens", "6", "--prompt-tokens", "8"]
    counts = tmp_path / "counts.json"
    plain = "import sys; from qat_lora.cli import main; main(sys.argv[1:])"
    for device, environment, program in (
        ("cpu", {"USE_TORCH_XLA": "0"}, [plain]),
        ("xla", {"PJRT_DEVICE": "CPU", "USE_TORCH_XLA": "1"}, [PROGRAM, str(counts)]),
    ):
        done = subprocess.run(
            [sys.executable, "-c", *program, *common, "--device", device, "--out", str(tmp_path / device)],
            env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
            capture_output=True,
            text=True,
            timeout=400,
        )
        assert done.returncode == 0, done.stderr[-3000:]
    cpu, xla = (json.loads((tmp_path / device / "report.json").read_text()) for device in ("cpu", "xla"))
    for text, models in cpu["domains"].items():
        for name, wanted in models.items():
            found = xla["domains"][text][name]
            del found["interval"], wanted["interval"]
            assert found == pytest.approx(wanted, abs=1e-5, rel=1e-5)
    assert cpu["domains"]["seen"]["near"]["kl"] > 1e-4
    assert xla["generation"] == cpu["generation"]
    graphs = {name: [run["graphs_compiled"] for run in runs] for name, runs in json.loads(counts.read_text()).items()}
    # The hidden states of a batch and the numbers of a chunk, once; a row and a token, once; then a second text and
    # second models for nothing.
    assert graphs == {"measure": [2, 0], "continue_greedily": [2, 0]}, graphs
