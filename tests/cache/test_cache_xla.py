"""A teacher's logits, taken apart on an XLA device (its CPU backend): what is kept is what the host keeps.

One process of its own: the device cannot be chosen again in a process that has one.
"""

import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("torch_xla")

CHILD = """
import json
import torch
import torch_xla
import torch_xla.debug.metrics as met
from qat_lora.cache.build.builder import fetched
from qat_lora.cache.build.topk import sparse_arrays

rows, vocab = 8, 1511
generator = torch.Generator().manual_seed(0)
logits = 3 * torch.randn(rows, vocab, generator=generator)
uniforms = {name: torch.rand(rows, 16, 2, generator=generator) for name in ("tail_draw_ids", "draw_ids")}
other = {name: 1 - 2**-24 - numbers for name, numbers in uniforms.items()}
host, control = (sparse_arrays(logits.clone(), 8, (1.0,), numbers) for numbers in (uniforms, other))
device = torch_xla.device()
there = {name: numbers.to(device) for name, numbers in uniforms.items()}
arrays = sparse_arrays(logits.to(device), 8, (1.0,), there)
far = {name: torch.from_numpy(array) for name, array in fetched(arrays).items()}
report = {
    "device": arrays["lse"].device.type,
    "graphs": met.metric_data("CompileTime")[0],
    "types": [{name: str(array.dtype) for name, array in side.items()} for side in (host, far)],
    "ids": torch.equal(host["head_ids"], far["head_ids"]),
    "same": {name: (host[name] == far[name]).float().mean().item() for name in uniforms},
    "control": {name: (host[name] == control[name]).float().mean().item() for name in uniforms},
    "tail_draws_in_the_head": bool((far["tail_draw_ids"][:, :, None] == far["head_ids"][:, None]).any()),
    "largest_difference": max((host[n] - far[n]).abs().max().item() for n in host if not n.endswith("ids")),
}
print(json.dumps(report))
"""


def test_head_sums_and_draws_are_those_of_the_host_and_come_in_one_graph():
    environment = os.environ | {"PJRT_DEVICE": "CPU", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", CHILD], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["device"] == "xla" and report["graphs"] == 1, report
    assert report["types"][0] == report["types"][1]
    assert report["ids"] and report["largest_difference"] < 1e-5, report
    # The last bit of a sum may differ, and with it a draw whose number lies on the border of two tokens.
    assert min(report["same"].values()) > 0.99, report
    assert max(report["control"].values()) < 0.7, report  # positive control: the comparison can fail
    assert not report["tail_draws_in_the_head"], report
