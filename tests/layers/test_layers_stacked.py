"""Layers stacked and looped over are the layers one by one: numbers, names and files; and the graph stays short."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from toy_paths import clean_environment

from qat_lora.layers.stacked import by_layer, layer_names

ROOT, HERE = Path(__file__).resolve().parents[2], Path(__file__).resolve().parent
needs_xla = pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="needs the xla extra")
WAYS = ("kept", "recomputed", "all trained")
MATRIX = 32 * 48  # the toy's largest; a stack of weights has twice as many numbers


@pytest.fixture(scope="module")
def report():
    return reported()


def reported(*arguments, **environment):
    environment = clean_environment(PJRT_DEVICE="CPU", PYTHONPATH=str(ROOT), **environment)
    program = [sys.executable, str(HERE / "stacked_program.py"), *arguments]
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


@needs_xla
@pytest.mark.xla
@pytest.mark.parametrize("way", WAYS)
def test_loss_and_gradients_are_those_of_the_layers_one_by_one(report, way):
    loss, stacked, without_gradients = report[way]["losses"]
    assert stacked == pytest.approx(loss, abs=1e-4) and without_gradients == pytest.approx(loss, abs=1e-4)
    assert report[way]["names"] and report[way]["worst"] < 1e-4, report[way]


@needs_xla
@pytest.mark.xla
@pytest.mark.parametrize("way", WAYS)
def test_the_graph_is_flat_in_depth_and_joins_no_weights(report, way):
    shallow, deep = report[way]["instructions"]
    assert shallow == deep
    assert report[way]["joined"] < 2 * MATRIX
    apart, whole = report[way]["tensors"]
    assert whole <= apart / 2 + 1  # the last norm is of no layer


@needs_xla
@pytest.mark.xla
def test_who_reads_layers_by_name_finds_them_as_trained(report):
    # 2 layers of 7 linear ones, all quantised and adapted.
    assert report["apart"] == [0.0, 14, 14, True, True]


@needs_xla
@pytest.mark.xla
def test_layers_that_draw_random_numbers_stay_apart(report):
    assert report["dropout"] == [0, 2]


@needs_xla
@pytest.mark.xla
def test_frozen_matrices_spread_over_devices_give_the_same_gradients():
    found = reported("sharded", CPU_NUM_DEVICES="2")
    assert found["spread"] == 7  # stacks of matrices; norms train here, embedding and LM head stay whole
    assert found["losses"][1] == pytest.approx(found["losses"][0], abs=1e-4) and found["worst"] < 1e-4, found


def test_a_name_with_a_range_stands_for_its_layers():
    assert layer_names("model.norm.weight") == ["model.norm.weight"]
    assert layer_names("m.[2:4].q.lora_A") == ["m.2.q.lora_A", "m.3.q.lora_A"]
    stack, step, norm = torch.arange(6.0).reshape(2, 3), torch.tensor(7.0), torch.ones(3)
    cut = by_layer({"m.[2:4].q": stack, "m.[2:4].q/step": step, "norm": norm})
    assert [*cut] == ["m.2.q", "m.3.q", "m.2.q/step", "m.3.q/step", "norm"]
    assert torch.equal(cut["m.3.q"], stack[1]) and cut["m.3.q/step"] == 7 and cut["norm"] is norm
