"""The roofline against counts of traced kernels and compiled programs, and its bounds, each in the case that has it."""

import json
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from toy_mixture import make_mixture

from benchmarks.compiled import QWEN3_06B
from qat_lora.layers.experts import split_experts
from qat_lora.options import EstimateOptions, RunConfig
from qat_lora.plan.devices import named
from qat_lora.plan.memory import forecast, skeleton
from qat_lora.plan.step import Shapes, operations, step_parts, token_share

GB, TERA = 1e9, 1e12


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    """Qwen3-0.6B's shape with an adapter of rank 16, and the settings of a run on it."""
    folder = tmp_path_factory.mktemp("qwen")
    (folder / "config.json").write_text(json.dumps(QWEN3_06B), encoding="utf-8")
    options = EstimateOptions(model=str(folder), loss_chunk_mb=512, run=RunConfig(dtype="bfloat16"))
    return skeleton(options), options


def there(qwen, place, **changed) -> dict:
    shapes, options = qwen
    dtype = changed.pop("dtype", "bfloat16")
    options = replace(options, run=replace(options.run, dtype=dtype), **{"loss_chunk_mb": None, **changed})
    return forecast(shapes, options, named((place,)))["devices"][place]


def test_operations_and_bytes_are_those_that_were_counted(qwen):
    """62 GB and 13 T operations by the TPU's compiler, 211 GB and 47 T of CUDA kernels (benchmarks/)."""
    shapes, options = qwen
    assert isinstance(shapes, Shapes)
    for attention, rows, chunk, moved, computed in (("xla", 4, 512, 62, 13.1), ("fused", 16, 2048, 211, 46.6)):
        asked = replace(options, batch_size=rows, loss_chunk_mb=chunk, attention=attention)
        parts = step_parts(shapes, asked).values()
        assert sum(part.bytes for part in parts) / GB == pytest.approx(moved, rel=0.15)
        assert operations(shapes, asked) / TERA == pytest.approx(computed, rel=0.1)


def test_tokens_a_second_are_near_the_counted_kernels(qwen):
    found = there(qwen, "h200", batch_size=16)
    assert 105_000 < found["tokens_per_s"] < 150_000 and found["bound"] == "compute"
    assert found["tokens_per_s"] == pytest.approx(138_624, rel=1 / 3)  # results/cuda_roofline.json


@pytest.mark.parametrize(
    ("place", "rows", "length", "bound"),
    [
        ("h200", 16, 1024, "compute"),
        ("l4", 4, 1024, "memory"),
        ("v6e-1", 4, 1024, "memory"),
        ("v6e-1", 1, 128, "host tracing"),
        ("h100", 1, 64, "kernel launches"),
        ("laptop", 1, 64, "compute"),
    ],
)
def test_the_bound_is_named(qwen, place, rows, length, bound):
    found = there(qwen, place, batch_size=rows, length=length)
    limits = found["seconds_by_bound"]
    assert found["bound"] == bound == max(limits, key=limits.get)
    seconds = rows * length / found["tokens_per_s"]
    assert max(limits.values()) <= seconds * 1.0001 and seconds <= sum(limits.values())
    assert ("host tracing" in limits) == place.startswith("v")
    assert ("kernel launches" in limits) == (place in ("h200", "h100", "l4"))


@pytest.mark.parametrize("place", ["v6e-1", "v5e-1", "h200", "l4", "t4"])
def test_wider_numbers_and_more_work_are_never_faster(qwen, place):
    usual = there(qwen, place)["tokens_per_s"]
    slower = (
        {"dtype": "float32"},
        {"gradient_checkpointing": True},
        {"utilisation": 0.3},
        {"attention": "blocked"},
        {"length": 4096, "batch_size": 1},
    )
    for changed in slower:
        assert there(qwen, place, **changed)["tokens_per_s"] <= usual, changed
    wide = there(qwen, place, dtype="float32")["seconds_by_bound"]
    narrow = there(qwen, place)["seconds_by_bound"]
    halves = place in ("h200", "l4")  # TF32; the others multiply float32 as fast as bfloat16
    assert wide["memory"] > 1.9 * narrow["memory"]
    assert wide["compute"] == pytest.approx(narrow["compute"] * (2 if halves else 1))


def test_chips_add_up_and_do_not_hurry_each_other(qwen):
    one, four = there(qwen, "v6e-1"), there(qwen, "v6e-4")
    assert four["tokens_per_s"] == pytest.approx(4 * one["tokens_per_s"]) and four["hours"] == one["hours"]


def test_the_products_of_a_mixture_are_those_of_the_experts_that_tokens_choose():
    model = make_mixture("Qwen3Moe")
    split_experts(model)
    experts, chosen = len(model.model.layers[0].mlp.experts), model.config.num_experts_per_tok
    assert token_share(model, model.config, "model.layers.1.mlp.experts.3.up_proj.base") == chosen / experts < 1
    run = RunConfig(dtype="float32")
    options = EstimateOptions(model="toy", batch_size=4, length=32, attention="tiled", head_k=0, run=run)
    products = step_parts(Shapes(model.config, model, {}, 0, False, 0, passes=1), options)["products"].operations
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.arange(128).remainder(model.config.vocab_size).view(4, 32))
    of_head = 2 * 128 * model.config.vocab_size * model.config.hidden_size
    scores = sum(
        n for name, n in counter.get_flop_counts()["Global"].items() if "bmm" in str(name) or "scaled" in str(name)
    )
    found = counter.get_total_flops() - of_head - scores
    assert found == pytest.approx(products, rel=0.02)  # routers are none of them
    every = step_parts(Shapes(model.config, model, {}, 0, False, 0, passes=1), replace(options, attention="xla"))
    assert every["products"].operations > 1.5 * products  # in XLA's one program each expert computes all
