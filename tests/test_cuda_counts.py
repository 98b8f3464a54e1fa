"""A training step on tensors without memory: kernels counted, and nothing that would stop a GPU's queue.

`benchmarks/cuda_roofline.py` counts at real shape; here the same program counts a toy, whose kernels a layer are equal.
"""

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from qat_lora.layers.quant_linear import QuantLinear
from qat_lora.quant.presets import preset
from qat_lora.runtime.native import NativeRuntime

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


@pytest.mark.parametrize(("replicas", "most"), [(1, 30), (2, 40)])
def test_an_optimizer_step_is_a_few_kernels_however_many_adapters_there_are(roofline, student, replicas, most):
    kernels = roofline.optimizer_eager(student, replicas, watch=True).parts["optimizer"].kernels
    tensors = sum(map(len, student.trained.values()))
    assert kernels <= most < tensors * 3, kernels


def test_a_micro_batch_stops_no_queue(roofline, student):
    parts = roofline.micro_batch_eager(student, chunk_mb=1, watch=True).parts
    assert parts["base products"].names["mm"] == 8 and parts["attention forward"].kernels == 2
    assert parts["base products"].operations == 2 * 128 * 2 * sum(
        o * i for o, i in [(64, 64), (32, 64), (32, 64), (64, 64), (192, 64), (192, 64), (64, 192)]
    )


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
