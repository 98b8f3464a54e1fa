"""Solvers on XLA: what the host finds, by a graph as long for wide matrices as for narrow ones; also a TPU's compiler.

Run by itself, this file is the program that uses XLA.
"""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from qat_lora.commands.repository import load_program
from qat_lora.quant import gptq, initialize
from qat_lora.quant.initialize import refine_rows
from qat_lora.quant.spec import QuantSpec
from qat_lora.runtime import loop

pytest.importorskip("torch_xla")
report = load_program("compiled.report", "this test")  # this file is a program too
COMPILER = Path(os.environ.get(report.COMPILER_VARIABLE, ""))
SPEC = QuantSpec(bits=3, code="asymmetric", sharing="group", group_size=32)
BLOCKS = QuantSpec(bits=2, code="minimum", sharing="group", group_size=64, step_bits=4)


def problem(rows, columns, layers=2):
    """Layers of one shape, rows one under the other, with a second moment each."""
    draw = np.random.default_rng(0)
    x = draw.normal(size=(layers, 4 * columns, columns)) @ draw.normal(size=(layers, columns, columns))
    weight = draw.normal(size=(layers * rows, columns)).astype(np.float32)
    return torch.from_numpy(weight), torch.from_numpy(x.swapaxes(1, 2) @ x / (4 * columns)).float()


def solvers_graph(rows, columns):
    """All that is solved for on the device, pending: the GPTQ start, the matrices of a refit, and a descent."""
    import torch_xla

    gc.collect()  # a pending graph of before would be compiled
    weight, moment = (x.to(torch_xla.device()) for x in problem(rows, columns))
    curvature = gptq.Curvature(moment)
    _ = curvature.inverse_root_LII
    moments = curvature.damped_LII.float()
    torch_xla.sync()
    start = initialize._compensated(weight, SPEC, curvature)
    grid = start.grid(SPEC, torch.float32)
    slope = gptq.slope_of(weight, grid.dense(start.codes_OI), moments)
    usual, gptq.factorised = gptq.factorised, lambda _solve, *given: given[0]
    gram = gptq.refit_scales(slope, moments, grid, start.codes_OI, start.scales[0], SPEC)
    gptq.factorised = usual
    codes, _ = gptq.descend(slope, moments, grid, start.codes_OI)
    return [gram, codes]


def refits_graph(rows, columns):
    """A K-quant's start and the refits of both levels of its scales, pending."""
    import torch_xla

    gc.collect()
    weight, moment = (x.to(torch_xla.device()) for x in problem(rows, columns))
    curvature = gptq.Curvature(moment)
    _ = curvature.inverse_root_LII
    moments = curvature.damped_LII.float()
    torch_xla.sync()
    now = initialize._compensated(weight, BLOCKS, curvature)
    for level in ("scales", "whole"):
        slope = gptq.slope_of(weight, now.grid(BLOCKS, torch.float32).dense(now.codes_OI), moments)
        now = initialize._refitted(now, BLOCKS, level, slope, moments)
    return [*now.scales, *now.whole]


def unrolled(rows, columns):
    """The same with Python's loops, the naive version, for the rest of the process."""
    loop.is_xla_device = lambda _device: False
    return solvers_graph(rows, columns)


def main():
    import torch_xla

    from qat_lora.runtime.xla.runtime import XlaRuntime

    def instructions(tensors):
        return report.hlo.instruction_count(torch_xla._XLAC._get_xla_tensors_hlo(tensors))

    found = {"graphs": {c: instructions(solvers_graph(8, c)) for c in (128, 256)}}
    found["refits"] = {c: instructions(refits_graph(8, c)) for c in (512, 1024)}
    equal, errors = [], []
    for spec, columns in ((SPEC, 150), (BLOCKS, 256)):
        weight, moment = problem(24, columns)
        given = [x.to(torch_xla.device()) for x in (weight, moment)]
        there = initialize.quantize_weight(given[0], spec, "descent", given[1]).to(torch.device("cpu"))
        for i, (mine, far) in enumerate(zip(weight.chunk(2), there.split(2), strict=True)):
            here = initialize.quantize_weight(mine, spec, "descent", moment[i])
            equal.append((here.codes_OI == far.codes_OI).float().mean().item())
            left = [(mine - x.dense(spec)).double() for x in (here, far)]
            a, b = (float(((e @ moment[i].double()) * e).sum()) for e in left)
            errors.append(abs(a - b) / a)
    weight, moment = problem(20, 70)
    outputs = torch.from_numpy(np.stack([np.cov(np.random.default_rng(i).normal(size=(20, 24))) for i in (1, 2)]))
    start = initialize.quantize_weight(weight, SPEC, "descent", gptq.Curvature(moment))
    far, here = (
        refine_rows(weight.to(x), SPEC, start.to(x), gptq.Curvature(moment.to(x)), outputs.float().to(x), 1)
        for x in (torch_xla.device(), torch.device("cpu"))
    )
    equal.append((here.codes_OI == far.to(torch.device("cpu")).codes_OI).float().mean().item())
    found["moved"] = (here.codes_OI != start.codes_OI).float().mean().item()
    precision = torch_xla._XLAC._xla_get_mat_mul_precision
    with XlaRuntime("CPU").exact_products():
        found["precisions"] = [precision()]
    found["precisions"].append(precision())
    found["unrolled"] = {c: instructions(unrolled(4, c)) for c in (8, 16)}  # last: it stays so
    print(json.dumps(found | {"equal": min(equal), "error": max(errors)}))


def write(out):
    import torch_xla

    from qat_lora.runtime.xla.runtime import XlaRuntime

    with XlaRuntime("CPU").exact_products():
        for name, graph in (("solvers", solvers_graph), ("refits", refits_graph)):
            (out / f"{name}.pb").write_bytes(torch_xla._XLAC._get_xla_tensors_hlo_proto(graph(256, 512)))
            (out / f"{name}.json").write_text("{}")


def started(*words):
    environment = os.environ | {"PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, __file__, *words], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.xla
def test_solvers_find_what_the_host_finds_in_a_graph_that_does_not_grow_with_the_columns():
    found = json.loads(started().splitlines()[-1])
    assert found["equal"] >= 0.999 and found["error"] < 1e-5, found
    assert found["moved"] > 0.02, found  # two-sided descent had something to do
    assert found["precisions"] == ["highest", "default"]  # a run after it multiplies as usual
    for graph in ("graphs", "refits"):
        narrow, wide = found[graph].values()
        assert narrow == wide, found
    narrow, wide = found["unrolled"].values()
    assert wide > 1.1 * narrow, found  # so the count sees an unrolled loop


@pytest.mark.slow
@pytest.mark.xla
@pytest.mark.skipif(
    not COMPILER.is_file(), reason=f"no TPU compiler: make tpu-compiler, {report.COMPILER_VARIABLE} names its Python"
)
def test_a_v6e_compiles_the_solvers(tmp_path):
    started(str(tmp_path))
    for name in ("solvers", "refits"):
        found = report._compiled(name, "v6e:1x1", 1, COMPILER, tmp_path)
        assert "error" not in found, found
        program = (tmp_path / f"{name}.tpu.txt").read_text()
        assert " while(" in program and found["counted"]["unknown_trips"] == []


if __name__ == "__main__":
    write(Path(sys.argv[1])) if len(sys.argv) > 1 else main()
