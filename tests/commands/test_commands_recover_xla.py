"""The user's guide command on XLA: how often it compiles, what it reads back, and that it learns what a CPU learns."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
from toy_paths import clean_environment

from qat_lora.cli import main
from qat_lora.train.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]
STEPS, LOG, EVALUATE, ACCUMULATION = 12, 4, 6, 2
GUIDE = f"--recovery-r 4 --batch-size 2 --accumulation-steps {ACCUMULATION} --max-steps {STEPS} --log-steps {LOG} "
GUIDE += f"--eval-steps {EVALUATE} --save-steps 6 --start zero --lr 3e-3 --warmup-steps 2"

# Runs the command in process and writes what the runtime counted: a report at the end of every optimizer step, and
# what evaluations, exports and checkpoints spent in between.
PROGRAM = """
import importlib, json, sys
from collections import Counter
import torch
torch.set_num_threads(1)
from qat_lora import cli
from qat_lora.runtime.xla.runtime import XlaRuntime

runtime, steps, spent, calls = None, [], {}, Counter()

def counted(label, function):
    def run(*args, **kwargs):
        before = Counter(runtime.compile_report())
        result = function(*args, **kwargs)
        after = Counter(runtime.compile_report())
        after.subtract(before)
        spent.setdefault(label, Counter()).update(after)
        calls[label] += 1
        return result
    return run

launch, step_end = XlaRuntime.launch, XlaRuntime.step_end

def counted_launch(self, main):
    def run():
        global runtime
        runtime = self
        callbacks = importlib.import_module("qat_lora.train.callbacks")
        setup = importlib.import_module("qat_lora.setup.training")
        make = setup.evaluation
        setup.evaluation = lambda *args: counted("evaluate", make(*args))
        callbacks.Run.export = counted("export", callbacks.Run.export)
        callbacks.save_checkpoint = counted("save", callbacks.save_checkpoint)
        return main()
    return launch(self, run)

def counted_step_end(self):
    step_end(self)
    report = Counter(self.compile_report())
    for part in spent.values():
        report.subtract(part)
    steps.append(report)

XlaRuntime.launch, XlaRuntime.step_end = counted_launch, counted_step_end
out, *arguments = sys.argv[1:]
cli.main(arguments)
counters = importlib.import_module("torch_xla.debug.metrics").counter_names()
fallback = [name for name in counters if name.startswith("aten::")]
with open(out, "w") as file:
    json.dump({"steps": steps, "spent": spent, "calls": calls, "fallback": fallback}, file)
"""


def recover(folder: Path, *flags: str) -> list[str]:
    student, cache = str(folder / "student"), str(folder / "cache")
    return ["recover", *flags, "--checkpoint", student, "--kd-cache-dir", cache, *GUIDE.split(), "--quiet"]


VARIANTS = {
    "plain": [],
    "costly": ["--gradient-checkpointing", "--ema", "0.9", "--train-norms", "--train-scales"],
    "autocast": ["--autocast"],
}
NEAR = {"autocast": 3e-2}
"""How far losses may be from the CPU's, which are float32's."""


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory):
    """A folder with a cache and a student."""
    folder = tmp_path_factory.mktemp("xla-recover")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("USE_TORCH_XLA", "0")
        cache = (
            f"--dataset {tiny.text} --length 32 --top-k 16 --eval-rows 5 --out {folder / 'cache'} --device cpu --quiet"
        )
        main(["cache", "build", "--teacher", str(tiny.teacher), *cache.split()])
        student = f"--kd-cache-dir {folder / 'cache'} --out {folder / 'student'} --device cpu --quiet"
        main(["quantize", "--model", str(tiny.teacher), *student.split()])
        main([*recover(folder, "--device", "cpu"), "--out", str(folder / "cpu-plain")])
        main([*recover(folder, "--device", "cpu", *VARIANTS["costly"]), "--out", str(folder / "cpu-costly")])
    return folder


@pytest.fixture(scope="module", params=VARIANTS)
def runs(request, made):
    """The same run on the CPU and, in a process of its own, on XLA; returns their folders and XLA's counts."""
    name = request.param
    environment = clean_environment(PJRT_DEVICE="CPU", PYTHONPATH=str(ROOT))
    counts, out = made / f"counts-{name}.json", made / f"xla-{name}"
    arguments = [str(counts), *recover(made, "--tpu", *VARIANTS[name]), "--out", str(out)]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr[-4000:]
    cpu = made / ("cpu-plain" if name in NEAR else f"cpu-{name}")
    return cpu, out, json.loads(counts.read_text())


pytestmark = [
    pytest.mark.xla,
    pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="needs the xla extra"),
]


def test_training_compiles_three_graphs_and_all_in_step_one(runs):
    compiled = [step["graphs_compiled"] for step in runs[2]["steps"]]
    assert len(compiled) == STEPS
    # The state before step 1 (zeros), a micro-batch, an optimizer step.
    assert compiled[0] <= 3, compiled
    assert compiled == compiled[:1] * STEPS, compiled


def test_a_steady_step_runs_one_graph_a_micro_batch_and_one_for_the_optimizer(runs):
    hits = [step["graph_cache_hits"] for step in runs[2]["steps"]]
    assert [b - a for a, b in zip(hits, hits[1:], strict=False)] == [ACCUMULATION + 1] * (STEPS - 1)


def test_evaluation_adds_one_graph_and_saving_none(runs):
    spent, calls = runs[2]["spent"], runs[2]["calls"]
    assert calls["evaluate"] == 1 + STEPS // EVALUATE and calls["save"] == 2
    assert spent["evaluate"]["graphs_compiled"] <= 1, spent
    assert spent["save"]["graphs_compiled"] == 0, spent
    # `save_adapter` halves on the device: one small graph a shape. Halved on the host it would be none.
    assert spent["export"]["graphs_compiled"] == 0, spent


def test_training_reads_nothing_back_and_sends_nothing_to_the_host(runs):
    reads = [step["host_reads"] for step in runs[2]["steps"]]
    assert reads == [0] * STEPS, reads
    # Two numbers at the end of each evaluation, which is also the only operator that is not XLA's.
    assert runs[2]["spent"]["evaluate"]["host_reads"] == 2 * runs[2]["calls"]["evaluate"]
    assert runs[2]["fallback"] in ([], ["aten::_local_scalar_dense"])


def test_the_type_that_was_chosen_is_the_run_s(runs):
    assert all("  dtype: float32\n" in (run / "config.yaml").read_text() for run in runs[:2])


def test_losses_equal_those_of_the_cpu(runs):
    cpu, xla = (read_metrics(run / "metrics.jsonl") for run in runs[:2])
    near = NEAR.get(runs[1].name.removeprefix("xla-"), 1e-4)
    assert [line["step"] for line in cpu] == [line["step"] for line in xla] == list(range(1, STEPS + 1))
    for name in ("loss", "loss_kd", "grad_norm", "tokens", "lr"):
        assert [line[name] for line in xla] == pytest.approx([line[name] for line in cpu], abs=near), name
    assert cpu[0]["loss"] != pytest.approx(cpu[-1]["loss"], abs=1e-4), "nothing was learned, so this compares nothing"
    assert near == 1e-4 or xla[0]["loss"] != pytest.approx(cpu[0]["loss"], abs=1e-6), "nothing was rounded"
    cpu_kl, xla_kl = ([line["kl"] for line in read_metrics(run / "evaluations.jsonl")] for run in runs[:2])
    assert len(cpu_kl) == 3 and xla_kl == pytest.approx(cpu_kl, abs=near)
