"""The walk by the Triton kernel: right in Triton's interpreter, chosen by a written rule, three launches a chunk."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from losses_oracle import make_teacher
from torch.utils._python_dispatch import TorchDispatchMode

from qat_lora.errors import DeviceError
from qat_lora.losses.estimators import DenseTerm, TopKTerm, ghost, hybrid_terms, label_term, renorm, sampled_term
from qat_lora.losses.fused.by_kernel import MOST_ENTRIES, kernel_serves
from qat_lora.losses.fused.gradients import Task, Wanted, group_terms
from qat_lora.losses.fused.op import fused_linear_kd
from qat_lora.types import LMHead, SparseTeacher

HERE = Path(__file__).parent
# Of sums relative to the sum, and of gradients relative to a row's largest, by what a case's name holds. The
# interpreter cuts float32 off to bfloat16, up to 2^-7 of a number; compiled, it rounds (`test_losses_triton_kernel`).
TOLERANCES = {
    "head, bfloat16": (2e-4, 2**-5),  # its products are rounded as well
    "bfloat16": (1e-6, 2**-7),
    "float16": (1e-6, 2**-10),
    "reverse": (1e-6, 2e-4),  # log p/t less its mean: `by_token` is as far off in float32
    "": (1e-6, 1e-5),
}


@functools.cache
def errors():
    """Run all cases of `kernel_cases` in one process; Triton decides to interpret as it is imported.

    With KERNEL_DEVICE=cuda they run on a GPU, as `scripts/gpu_acceptance.sh` asks.
    """
    pytest.importorskip("triton")
    device = os.environ.get("KERNEL_DEVICE", "cpu")
    command = [sys.executable, "-W", "error", str(HERE / "kernel_cases.py"), device]
    environment = os.environ | {"TRITON_INTERPRET": "1" if device == "cpu" else "0", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: values for name, *values in map(json.loads, done.stdout.splitlines())}


def test_every_case_equals_dense_autograd_in_float64():
    cases = {name: values for name, values in errors().items() if len(values) == 2}
    assert len(cases) > 30
    for name, (of_sums, of_gradients) in cases.items():
        sums, gradients = next(limits for part, limits in TOLERANCES.items() if part in name)
        assert of_sums < sums and of_gradients < gradients, name


def test_an_id_outside_the_vocabulary_is_not_a_number_and_touches_no_other_row():
    assert errors()["unknown id"] == [True]


def task(*terms, dtype=torch.float32, count=4, vocab=40):
    head = LMHead(torch.zeros(vocab, 3, dtype=dtype), vocab)
    ones = torch.ones(count, dtype=torch.bool)
    return Task(torch.zeros(count, 3, dtype=dtype), head, group_terms(terms), [1.0] * len(terms), ones, Wanted(True))


def teacher_of(k, count=4, temperature=1.0):
    zeros = torch.zeros(count, k)
    return SparseTeacher(zeros.long(), zeros, zeros[:, 0], temperature)


def test_the_rule_of_what_the_kernel_serves():
    teacher, labels = teacher_of(5), torch.zeros(4, dtype=torch.int64)
    served = [
        [TopKTerm(teacher)],
        [label_term(labels)],
        [TopKTerm(teacher_of(5, temperature=2.0), renorm), label_term(labels)],
        [*hybrid_terms(teacher, labels[:, None]), label_term(labels), label_term(labels, 0.5, "hard_top1")],
        [TopKTerm(teacher), TopKTerm(teacher_of(3), name="another top K")],
        [TopKTerm(teacher_of(MOST_ENTRIES)), sampled_term(labels[:, None].expand(4, MOST_ENTRIES))],
    ]
    for terms in served:
        assert all(kernel_serves(task(*terms, dtype=d)) for d in (torch.float32, torch.bfloat16, torch.float16))
    refused = [
        [DenseTerm(torch.zeros(4, 3), LMHead(torch.zeros(40, 3), 40)), label_term(labels)],
        [TopKTerm(teacher), TopKTerm(teacher, renorm, name="two estimators of one top K")],
        [TopKTerm(teacher, lambda *x: ghost(*x))],
        [TopKTerm(teacher_of(MOST_ENTRIES + 1))],
        [sampled_term(labels[:, None].expand(4, MOST_ENTRIES + 1))],
    ]
    for terms in refused:
        assert not kernel_serves(task(*terms))
    assert not kernel_serves(task(TopKTerm(teacher), dtype=torch.float64))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_what_the_kernel_does_not_serve_goes_by_positions(dtype):
    rng = np.random.default_rng(0)
    _, teacher = make_teacher(rng, 5, 23, 4)
    hidden = torch.tensor(rng.normal(size=(5, 3)), dtype=dtype).requires_grad_()
    head = LMHead(torch.tensor(rng.normal(size=(23, 3)), dtype=dtype), 23)
    terms = [TopKTerm(teacher)] if dtype == torch.float64 else [DenseTerm(hidden.detach() * 2, head)]
    results = [fused_linear_kd(hidden, head, terms, walk=walk).loss_sum for walk in ("kernel", "positions")]
    gradients = [torch.autograd.grad(loss, hidden)[0] for loss in results]
    assert results[0] == results[1] and (gradients[0] == gradients[1]).all()


@pytest.mark.parametrize("missing", [False, True])
def test_asked_for_on_a_cpu_it_is_refused_with_what_to_give(missing, monkeypatch):
    if missing:
        monkeypatch.delattr("qat_lora.losses.fused.triton_kernel", raising=False)
        monkeypatch.setitem(sys.modules, "qat_lora.losses.fused.triton_kernel", None)
    else:
        pytest.importorskip("triton")
    head = LMHead(torch.zeros(9, 3), 9)
    with pytest.raises(DeviceError, match="needs Triton" if missing else "loss_walk: kernel runs on CUDA.* positions"):
        fused_linear_kd(torch.zeros(2, 3), head, [label_term(torch.zeros(2))], walk="kernel")


VIEWS = {"view", "slice", "t", "detach", "empty", "empty_like", "new_empty", "unsqueeze", "expand", "select", "alias"}


class Count(TorchDispatchMode):
    """Counts operators that launch something, views and empty tensors aside."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in VIEWS:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


def counted(walk, chunk_tokens, vocab=151_936, k=128, count=16 * 1023):
    """Return the operators of a micro-batch of the real size, on tensors without content."""
    with torch.device("meta"):
        hidden = torch.empty(count, 1024, dtype=torch.bfloat16).requires_grad_()
        head = LMHead(torch.empty(vocab, 1024, dtype=torch.bfloat16), vocab)
        floats = torch.empty(count, k)
        teacher = SparseTeacher(torch.empty(count, k, dtype=torch.int64), floats, torch.empty(count))
        draws, labels = torch.empty(count, 8, dtype=torch.int64), torch.empty(count, dtype=torch.int64)
        terms, mask = [*hybrid_terms(teacher, draws), label_term(labels)], torch.empty(count, dtype=torch.bool)
    # Asking for autocast knows no meta device.
    with Count() as operators, mock.patch.object(torch, "is_autocast_enabled", return_value=False):
        fused_linear_kd(hidden, head, terms, mask, chunk_tokens=chunk_tokens, walk=walk)
    return operators.names


def test_a_chunk_is_three_launches_whatever_the_chunks():
    few, many = counted("kernel", 4096), counted("kernel", 1024)
    assert (few.count("kd_rows"), many.count("kd_rows")) == (4, 16)
    assert len(many) - len(few) == 3 * (16 - 4)
    assert len(few) < 60  # of which 12 for the chunks
    by_token = len(counted("positions", 1024)) - len(counted("positions", 4096))
    assert by_token > 50 * (16 - 4)  # what a chunk costs without the kernel


if __name__ == "__main__":
    for walk in ("positions", "kernel"):
        names = [counted(walk, size) for size in (4096, 1024)]
        print(walk, "operators a chunk", (len(names[1]) - len(names[0])) / 12, "of a call with 4 chunks", len(names[0]))
