"""A training step on tensors without memory: kernels counted, and nothing that would stop a GPU's queue.

`benchmarks/cuda_roofline.py` counts at real shape; here the same program counts a toy, whose kernels a layer are equal.
"""

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from qat_lora.layers.quant_linear import QuantLinear
from qat_lora.losses.objective import ObjectiveConfig, weight_tensors
from qat_lora.quant.presets import preset
from qat_lora.runtime.native import NativeRuntime
from qat_lora.train.metrics import MetricsLog
from qat_lora.train.optim import OptimConfig, TrainState, build_optimizer, gradients_apart, optimized
from qat_lora.train.step import add_sums, micro_batch, optimizer_step, zero_sums

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def roofline():
    """The benchmark, and what it counts with, as one name space."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        modules = [importlib.import_module(name) for name in ("roofline.counts", "roofline.fusion", "cuda_roofline")]
        yield SimpleNamespace(**{name: value for module in modules for name, value in vars(module).items()})
        for module in modules:
            del sys.modules[module.__name__]


class Pinned:
    """What pinning returns; notes how it is sent."""

    def __init__(self, values, sent):
        self.values, self.sent = values, sent

    def to(self, *where, **how):
        self.sent.append((self.values, where, how))


@pytest.fixture
def student(roofline):
    return roofline.make_student("toy", 2, 64, vocabulary=512)


@pytest.mark.parametrize(("size", "replicas", "most"), [("toy", 1, 30), ("toy", 2, 40), ("8b", 2, 40)])
def test_an_optimizer_step_is_a_few_kernels_however_many_adapters_there_are(roofline, size, replicas, most):
    student = roofline.make_student(size, 2, 64, vocabulary=512)
    kernels = roofline.optimizer_eager(student, replicas, watch=True).parts["optimizer"].kernels
    tensors = sum(map(len, student.trained.values()))
    assert kernels <= most < tensors * 3, kernels


def test_a_micro_batch_stops_no_queue(roofline, student):
    parts = roofline.micro_batch_eager(student, chunk_mb=1, watch=True).parts
    assert parts["base products"].names["mm"] == 8 and parts["attention forward"].kernels == 2
    assert parts["base products"].operations == 2 * 128 * 2 * sum(
        o * i for o, i in [(64, 64), (32, 64), (32, 64), (64, 64), (192, 64), (192, 64), (64, 192)]
    )


def train_on_fake_gpu(roofline, folder, after=lambda sums, batch: None):
    """Run an optimizer step of two micro-batches on fake CUDA tensors, and log it; call `after` each micro-batch."""
    with roofline.FakeCuda():
        count = roofline.Count(watch=True, device=roofline.GPU)
        student, runtime = roofline.make_student("toy", 2, 64, 512, roofline.GPU), roofline.MetaRuntime(count)
        state = TrainState(student.model, student.trained)
        optimizer = build_optimizer(OptimConfig(ema=0.9), state.groups, runtime)
        objective, log = ObjectiveConfig(loss_chunk_mb=1, ce_weight=0.3), MetricsLog(folder, 1, 0, True, runtime.device)
        sums = zero_sums(objective, runtime.device)
        with count:
            weights = weight_tensors(objective.weights_at(0.0), runtime.numbers)
            for _ in range(2):
                with gradients_apart(optimizer):
                    sums = add_sums(sums, micro_batch(state.model, student.batch, objective, weights))
                after(sums, student.batch)
            log.add(1, 1e-3, optimizer_step(optimizer, optimized(optimizer), sums, 1.0, runtime))
            log.flush(runtime)
    return sum(work.kernels for work in count.parts.values())


def test_a_whole_step_on_fake_cuda_tensors_stops_no_queue(roofline, tmp_path):
    assert train_on_fake_gpu(roofline, tmp_path / "metrics.jsonl") > 1000


@pytest.mark.parametrize(
    "naive",
    [
        lambda sums, batch: sums["loss"].item(),
        lambda sums, batch: bool(sums["loss"].isfinite()),
        lambda sums, batch: batch["target_mask"].nonzero(),
        lambda sums, batch: batch["lse"][batch["target_mask"]],
        lambda sums, batch: sums["tokens"].cpu(),
        lambda sums, batch: torch.ones(3).to(batch["lse"].device),
        lambda sums, batch: batch["lse"] + torch.arange(63.0),  # of two devices: no stop, an error on a GPU
    ],
)
def test_a_naive_step_on_fake_cuda_tensors_is_refused(roofline, tmp_path, naive):
    with pytest.raises((roofline.Sync, RuntimeError), match="device"):
        train_on_fake_gpu(roofline, tmp_path / "metrics.jsonl", naive)


@pytest.mark.parametrize("name", ["w2g64", "w4g64a", "q4_r32", "apple2"])
def test_a_quantiser_that_trains_sends_nothing_in_a_forward(roofline, name):
    with torch.device("meta"):
        layer = QuantLinear(64, 64, preset(name).rules[0][1])
    layer.train_weight()
    layer.train_scales()
    with roofline.no_autocast(), roofline.Count(watch=True):
        layer(torch.empty(2, 64, device="meta")).sum().backward()


def test_numbers_of_a_step_travel_from_pinned_memory(monkeypatch):
    """The native runtime on a GPU, with the transfer itself replaced."""
    sent = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: Pinned(tensor.tolist(), sent))
    runtime = NativeRuntime("cpu")
    runtime.device = torch.device("cuda")
    runtime.numbers([1.0, 2.5])
    assert sent == [([1.0, 2.5], (torch.device("cuda"),), {"non_blocking": True})]


@pytest.mark.parametrize(
    "stop",
    [
        lambda x: x.sum().item(),
        lambda x: x.nonzero(),
        lambda x: torch.ones(2).to(x.device),
        lambda x: torch.ones(3).to(x.device, non_blocking=True),
        lambda x: x.copy_(torch.ones(3)),
        lambda x: x.cpu(),
        lambda x: x[x > 0],
    ],
)
def test_what_stops_a_queue_is_refused(roofline, stop):
    with pytest.raises(roofline.Sync), roofline.Count(watch=True):
        stop(torch.empty(3, device="meta"))


def test_kernels_of_a_compiled_layer_and_of_what_is_around_it(roofline):
    """By the fusion rule, on the graphs that a compiler gets: four products with frozen weights, eight of adapters."""
    student = roofline.make_student("toy", 2, 128, vocabulary=512)
    program = roofline.layer_program(student.model, student.batch)
    forward, backward = roofline.fused(program.forward), roofline.fused(program.backward)
    assert forward.names["mm"] + forward.names["addmm"] == 12 and forward.names["attention"] == 1
    assert forward.kernels <= 28 and backward.kernels <= 38, (forward.names, backward.names)
    assert roofline.around_layers(student).kernels < 100


def test_the_page_shows_the_committed_counts():
    models = json.loads((ROOT / "benchmarks/results/cuda_roofline.json").read_text(encoding="utf-8"))["models"]
    page = (ROOT / "docs/gpu.md").read_text(encoding="utf-8")
    for size, found in models.items():
        launches, rate = found["compiled"]["all"]["kernels"], float(f"{found['compiled']['tokens_per_s']:.3g}")
        steps = ", ".join(str(step["kernels"]) for step in found["optimizer"].values())
        assert f"| Qwen3-{size.upper()} | {launches:,} | {rate:,.0f} | {steps} |" in page


def test_the_fusion_rule_by_hand(roofline):
    """Two chains around a product; what is recomputed for the second belongs to it."""
    graph = torch.fx.Graph()

    def node(function, *args, shape=(4, 4)):
        made = graph.placeholder("x") if function is None else graph.call_function(function, args)
        made.meta["val"] = torch.empty(shape, device="meta")
        return made

    aten = torch.ops.aten
    x = node(None)
    doubled = node(aten.mul.Tensor, x, 2)
    again = node(aten.exp.default, x)
    product = node(aten.mm.default, doubled, x)
    result = node(aten.add.Tensor, node(aten.t.default, product), again)
    graph.output((result,))
    work = roofline.fused(graph)
    assert (work.kernels, work.names["fused"], work.operations) == (3, 2, 128)
    assert work.bytes == 64 * (2 + 3 + 3)  # mul: x, doubled; mm: doubled, x, product; exp and add: x, product, result
