"""The Triton kernel on its way to a GPU: compiled for three, within their limits, and launched once a chunk.

Compiling needs no GPU, and a driver that only takes notes stands for the launch.
"""

import re
import subprocess
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime import driver  # noqa: E402

from qat_lora.losses.estimators import hybrid_terms  # noqa: E402
from qat_lora.losses.fused import by_kernel, triton_kernel  # noqa: E402
from qat_lora.losses.fused.op import fused_linear_kd  # noqa: E402
from qat_lora.losses.fused.triton_kernel import WARPS, Factors, Given, Results, form_of  # noqa: E402
from qat_lora.types import LMHead, SparseTeacher  # noqa: E402

REAL = (151_936, 128, 8)
SHARED_BYTES = {80: 163 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""That a block of threads may have, by compute capability."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def compiled(capability, dtype, form, bias=False):
    signature = {
        "logits": f"*{dtype}",
        "bias": "*fp32" if bias else "constexpr",
        "rows": Given("*i64", "*fp32", "*fp32", "*i64", "*fp32", "*fp32", "*u8"),
        "results": Results("*fp32", "*fp32", "*fp32"),
        "factors": Factors("fp32", "fp32", "fp32"),
        "FORM": "constexpr",
    }
    constants = {(5,): form} if bias else {(5,): form, (1,): None}
    aligned = {(0,): [["tt.divisibility", 16]]}  # as Triton finds an allocated tensor to be
    source = ASTSource(triton_kernel.kd_rows, signature, constants, aligned)
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": WARPS})


@pytest.mark.parametrize(
    "capability,dtype,estimator,capped",
    [
        (80, "bf16", "topk_part", False),
        (90, "bf16", "topk_part", False),
        (100, "bf16", "ghost", False),
        (90, "fp32", "reverse", True),
        (90, "fp16", "renorm", False),
    ],
)
def test_compiles_for_a_gpu_within_its_registers_and_memory(capability, dtype, estimator, capped, tmp_path):
    kernel = compiled(capability, dtype, form_of(estimator, capped, True, REAL), bias=capped)
    assert kernel.metadata.shared <= 1024 < SHARED_BYTES[capability]
    file = tmp_path / "kernel.cubin"
    file.write_bytes(kernel.asm["cubin"])
    command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(file)]
    usage = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    assert re.search(r"STACK:0 .*LOCAL:0", usage), usage  # no register is spilled
    assert int(re.search(r"REG:(\d+)", usage)[1]) * WARPS * 32 <= 65_536

    ptx = kernel.asm["ptx"]
    assert f"sm_{capability}" in ptx
    assert "ld.global.v4.b32" in ptx and "st.global.v4.b32" in ptx  # 16 bytes a thread at once
    if dtype != "fp32":  # to nearest, which the interpreter does not
        assert f"cvt.rn.{dtype.replace('fp16', 'f16')}" in ptx
    # A row's place is a 64-bit number: V times the row goes beyond 2^31 in a chunk of 4 GB.
    places = re.findall(r"arith\.muli %row\w*, .*? : (i\d+)", kernel.asm["ttir"])
    assert places and set(places) == {"i64"}


class Notes:
    """A driver of an H100 that launches nothing."""

    def __init__(self):
        self.launches = []
        self.launcher_cls = lambda source, metadata: lambda *arguments: self.launches.append(arguments)
        self.utils = SimpleNamespace(
            get_device_properties=lambda device: {"max_shared_mem": SHARED_BYTES[90]},
            load_binary=lambda *arguments: (1, 2, 64, 0, 1024),
        )

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)


def test_launched_once_a_chunk_and_compiled_once(monkeypatch):
    notes, compilations = Notes(), []
    monkeypatch.setattr(driver, "_active", notes)
    monkeypatch.setattr(triton.knobs.runtime, "jit_post_compile_hook", lambda **of: compilations.append(of["repr"]))
    monkeypatch.setattr(by_kernel, "_interpreted", by_kernel._on_gpu)
    by_kernel._library.cache_clear()
    generator = torch.Generator().manual_seed(0)
    count, vocab, k = 100, 1008, 6
    ids_NK = torch.randint(0, vocab, (count, k), generator=generator)
    teacher = SparseTeacher(ids_NK, torch.zeros(count, k), torch.zeros(count))
    hidden = torch.randn(count, 8, generator=generator).bfloat16().requires_grad_()
    head = LMHead(torch.randn(vocab, 8, generator=generator).bfloat16(), vocab)
    terms = hybrid_terms(teacher, torch.randint(0, vocab, (count, 3), generator=generator))
    try:
        for chunk, wanted in ((100, 1), (50, 2), (13, 7)):  # 13: rounded up to 16, as slices have to be aligned
            notes.launches.clear()
            fused_linear_kd(hidden, head, terms, chunk_tokens=chunk, walk="kernel")
            assert len(notes.launches) == wanted
            assert sum(grid_x for grid_x, *_ in notes.launches) == count
    finally:
        by_kernel._library.cache_clear()
    assert len(compilations) == 1
