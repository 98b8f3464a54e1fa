"""The graphs of a recovery, traced without weights: all of them, each weight a parameter, as a run has them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.compiled import NAMES, QWEN3_06B, Asked
from benchmarks.compiled.graphs import _Rows
from benchmarks.compiled.trace import TracingRuntime, TracingSpmdRuntime

TRACE = r"""
import json, re, sys
from benchmarks.compiled import Asked, graphs
from benchmarks.compiled.hlo import instruction_count
from benchmarks.compiled.trace import TracingRuntime

found = {}
def write(name, graph):
    entry = graph.text.split("ENTRY ")[1]
    found[name] = {
        "instructions": instruction_count(graph.text),
        "sizes": [eval(dims.replace(",", "*") or "1") for dims in re.findall(r"\[([\d,]*)\]\S* parameter\(", entry)],
        "kernels": len(re.findall('custom_call_target="tpu_custom_call"', graph.text)),
        "sharded": len(re.findall(r'custom_call_target="Sharding"', entry)),
    }
REAL
graphs.trace_graphs(Asked(**json.loads(sys.argv[1])), write)
print(json.dumps(found))
"""
# The same with weights that are there: placed on XLA's CPU, every other step as it is.
REAL = """
from qat_lora.runtime.xla.runtime import XlaRuntime
def place(self, module):
    module.to_empty(device="cpu")
    module.tie_weights()
    return XlaRuntime.place(self, module)
TracingRuntime.place = place
"""
TOY = QWEN3_06B | {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 2, "num_key_value_heads": 1}
TOY |= {"head_dim": 32, "vocab_size": 512, "bos_token_id": 0, "eos_token_id": 0}
pytestmark = pytest.mark.xla


def traced(folder, layers, real=False, chips=1, model=TOY, **asked):
    (folder / "config.json").write_text(json.dumps(model | {"num_hidden_layers": layers}), encoding="utf-8")
    asked = {"model": str(folder), "batch_size": 2, "length": 32, "head_k": 4, "rank": 2, "chips": chips} | asked
    program = TRACE.replace("REAL", REAL if real else "")
    done = subprocess.run(
        [sys.executable, "-c", program, json.dumps(asked)],
        env=os.environ | {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": str(chips)},
        capture_output=True,
        text=True,
        timeout=500,
        cwd=Path(__file__).parents[1],
    )
    assert not done.returncode, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_rows_have_a_caches_shapes_and_tracing_is_what_a_chip_would_do():
    (batch,) = _Rows(Asked(length=8, head_k=3)).batches(0, 1, 5)
    shapes = {name: array.shape for name, array in batch.items()}
    assert shapes["input_ids"] == (5, 8) and shapes["head_logits"] == (5, 7, 3) and shapes["log_tail"] == (5, 7)
    # A tracing runtime changes how things are placed and synced, and nothing that decides what is traced.
    own = {name for kind in TracingSpmdRuntime.__mro__[:2] for name in vars(kind)} | set(vars(TracingRuntime))
    assert not own & {"attention", "loss_walk", "piece_bytes", "checkpoint_function", "autocast", "reduce_gradients"}


def test_every_graph_is_traced_and_weights_are_its_parameters(tmp_path):
    two = traced(tmp_path, 2)
    assert tuple(two) == NAMES
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 96  # q, k and v, o, the MLP
    for name, rank in (("micro-batch", 2), ("evaluation", 2), ("cache build", 0), ("prompt", 0)):
        adapter = rank * 2 * (128 + 96 + 96 + 128 + 160 + 160 + 160)
        assert sum(two[name]["sizes"]) >= 512 * 64 + 2 * layer + adapter, name
    assert len(two["optimizer step"]["sizes"]) >= 4 * 2 * 7  # adapters (a stack a kind), gradients, two moments
    assert two["decoding step"]["instructions"] < two["cache build"]["instructions"] * 2


def test_a_06b_student_is_little_to_trace(tmp_path):
    """The graph of 28 layers is that of two, but for the length of the loops (`test_layers_stacked`)."""
    asked = {"batch_size": 4, "length": 1024, "head_k": 128, "rank": 8}
    found = traced(tmp_path, 2, model=QWEN3_06B, graphs=["micro-batch", "optimizer step"], **asked)
    assert found["micro-batch"]["instructions"] <= 6_000  # 61,038 layer by layer and chunk by chunk
    assert found["optimizer step"]["instructions"] <= 700  # 17,303 tensor by tensor
    assert found["micro-batch"]["kernels"] == 2  # attention, forward and backward


@pytest.mark.slow
def test_a_graph_without_weights_is_that_of_a_run_with_them(tmp_path):
    training = {"graphs": ["micro-batch", "optimizer step", "evaluation"]}
    without, given = traced(tmp_path, 1, **training), traced(tmp_path, 1, real=True, **training)
    assert {n: g["instructions"] for n, g in without.items()} == {n: g["instructions"] for n, g in given.items()}


def test_sharded_weights_say_so_in_the_graph(tmp_path):
    found = traced(tmp_path, 1, chips=4, shard_base=True, batch_size=1, graphs=["micro-batch"])["micro-batch"]
    assert found["sharded"] == 7  # the linear layers; embedding and LM head stay whole


def test_a_preset_with_trained_scales_and_checkpointing_is_what_is_traced_and_estimated(tmp_path):
    """Code values and scales are the graph's parameters instead of weights."""
    asked = {"preset": "w2g64", "train_scales": True, "gradient_checkpointing": True}
    found = traced(tmp_path, 2, **asked, graphs=["micro-batch"])["micro-batch"]
    scales_of_gate, values_of_gate = 2 * 96, 2 * 96 * 64  # two layers' stacks; a group is 64 wide
    assert scales_of_gate in found["sizes"] and values_of_gate in found["sizes"]
    estimate = Asked(**asked).estimate
    assert {name: getattr(estimate, name) for name in asked} == asked


@pytest.mark.slow
def test_control_weights_that_are_not_sharded_say_nothing(tmp_path):
    plain = traced(tmp_path, 1, chips=4, batch_size=1, graphs=["micro-batch"])["micro-batch"]
    assert plain["sharded"] == 0
