"""`qat-lora qat` on XLA: as many graphs as `recover` has, nothing read back, and what a CPU learns."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from toy_paths import clean_environment

from qat_lora.cli import main
from qat_lora.train.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
STEPS = 6
PARTS = {
    "scales": ["--train-parts", "scales,norms", "--lr", "6e-4"],
    "weights": ["--train-parts", "scales,weights", "--lr", "1e-3"],
}
GUIDE = f"--batch-size 2 --accumulation-steps 2 --max-steps {STEPS} --log-steps 3 --eval-steps 100 --save-steps 100"

# Runs the commands in one process and writes, for each, the runtime's counts at the end of every optimizer step.
PROGRAM = """
import json, sys
import torch
torch.set_num_threads(1)
from qat_lora import cli
from qat_lora.runtime.xla.runtime import XlaRuntime

counts, step_end = [], XlaRuntime.step_end

def counted(self):
    step_end(self)
    counts[-1].append(self.compile_report())

XlaRuntime.step_end = counted
for arguments in json.loads(sys.argv[1]):
    counts.append([])
    cli.main(arguments)
open(sys.argv[2], "w").write(json.dumps(counts))
"""

pytestmark = [
    pytest.mark.xla,
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="needs the xla extra"),
]


def command(folder: Path, parts: str, device: str, out: Path) -> list[str]:
    where = ["--checkpoint", str(folder / "student"), "--kd-cache-dir", str(folder / "cache"), "--out", str(out)]
    return ["qat", "--device", device, *where, *PARTS[parts], *GUIDE.split(), "--quiet"]


@pytest.fixture(scope="module")
def runs(tiny, tmp_path_factory):
    """The same runs on the CPU and, in a process of its own, on XLA; returns their folder and XLA's counts."""
    folder = tmp_path_factory.mktemp("xla-qat")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("USE_TORCH_XLA", "0")
        cache = f"--dataset {tiny.text} --length 32 --top-k 16 --num-rows 48 --out {folder / 'cache'}"
        main(["cache", "build", "--teacher", str(tiny.teacher), *cache.split(), "--device", "cpu", "--quiet"])
        student = f"--init mse --out {folder / 'student'} --device cpu --quiet"
        main(["quantize", "--model", str(tiny.teacher), *student.split()])
        for parts in PARTS:
            main(command(folder, parts, "cpu", folder / f"cpu-{parts}"))
    environment = clean_environment(PJRT_DEVICE="CPU", PYTHONPATH=str(ROOT))
    arguments = json.dumps([command(folder, parts, "xla", folder / f"xla-{parts}") for parts in PARTS])
    program = [sys.executable, "-c", PROGRAM, arguments, str(folder / "counts.json")]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder, dict(zip(PARTS, json.loads((folder / "counts.json").read_text()), strict=True))


@pytest.mark.parametrize("parts", PARTS)
def test_nothing_is_compiled_after_step_one_and_nothing_read_back(runs, parts):
    counts = runs[1][parts]
    compiled = [count["graphs_compiled"] for count in counts]
    assert len(compiled) == STEPS and compiled == compiled[:1] * STEPS, compiled
    if parts == "scales":  # the first command of the process, so the counts are its own
        assert compiled[0] <= 3, compiled
    assert len({count["host_reads"] for count in counts}) == 1, counts
    hits = [count["graph_cache_hits"] for count in counts]
    assert [b - a for a, b in zip(hits, hits[1:], strict=False)] == [3] * (STEPS - 1)


@pytest.mark.parametrize("parts", PARTS)
def test_it_learns_what_a_cpu_learns(runs, parts):
    cpu, xla = (read_metrics(runs[0] / f"{device}-{parts}" / "metrics.jsonl") for device in ("cpu", "xla"))
    # A weight on the border of two codes may round either way, so later steps drift apart.
    near = pytest.approx([line["loss"] for line in cpu], rel=1e-3 if parts == "scales" else 0.05)
    assert [line["loss"] for line in xla] == near
    assert cpu[0]["loss"] != pytest.approx(cpu[-1]["loss"], abs=1e-4)
    ends = [load_file(runs[0] / f"{device}-{parts}" / "last" / "model.safetensors") for device in ("cpu", "xla")]
    for name, tensor in ends[0].items():
        if name.endswith("codes"):
            assert (tensor != ends[1][name]).float().mean() < 0.02, name
        else:
            assert torch.allclose(tensor.float(), ends[1][name].float(), atol=2e-3), name
