"""Small choices of the runtime room: the fast type of a device, the state of random generators."""

import json

import pytest
import torch

from qat_lora.runtime.host.precision import fast_dtype
from qat_lora.runtime.host.randomness import random_states, set_random_states


@pytest.mark.parametrize(
    ("device", "flags", "expected"),
    [
        ("cpu", "fpu avx2 avx512_bf16", torch.bfloat16),
        ("cpu", "fpu avx512f amx_bf16", torch.bfloat16),
        ("cpu", "fpu avx2 avx512f", torch.float32),
        ("cpu", None, torch.float32),
        ("cuda", None, torch.bfloat16),
        ("xla", None, torch.bfloat16),
    ],
)
def test_fast_dtype(device, flags, expected, tmp_path):
    cpuinfo = tmp_path / "cpuinfo"
    if flags is not None:
        cpuinfo.write_text(f"flags : {flags}\n")
    assert fast_dtype(torch.device(device), cpuinfo) == expected


def test_random_states_restore_what_is_drawn():
    torch.manual_seed(3)
    torch.randn(7)
    text = json.dumps(random_states())
    expected = torch.randn(5)
    torch.manual_seed(4)
    set_random_states(json.loads(text))
    assert torch.equal(torch.randn(5), expected)


def test_a_state_of_an_absent_device_is_left_out():
    set_random_states({**random_states(), "cuda": "AAAA"})
