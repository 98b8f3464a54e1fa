"""The TPU's attention kernel: its values against float64, and where it is used."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qat_lora.runtime.xla.splash import SplashAttention
from qat_lora.types import Scores

pytestmark = pytest.mark.xla


def test_the_kernel_is_attention_within_documents_and_windows():
    pytest.importorskip("jax")
    program = Path(__file__).with_name("splash_program.py")
    done = subprocess.run([sys.executable, program], env=os.environ, capture_output=True, text=True, timeout=300)
    assert not done.returncode, done.stderr
    for case in json.loads(done.stdout.splitlines()[-1]):
        assert case["output"] < 1e-5 and case["gradients"] < 1e-4
        assert case["control"] > 0.1  # without documents it is something else


def test_the_kernel_takes_whole_tiles_of_bfloat16_and_whole_rows():
    kernel = SplashAttention(lambda computation, given: [], 2)
    query, key = torch.empty(4, 8, 256, 64, dtype=torch.bfloat16), torch.empty(4, 2, 256, 64, dtype=torch.bfloat16)
    plain = Scores(0.125)
    assert kernel(query, key, plain)
    assert not kernel(query, key, plain._replace(softcap=50.0))
    assert not kernel(query.float(), key.float(), plain)  # float32 scores need products that the kernel does not make
    assert not kernel(query[:, :, :200], key[:, :, :200], plain)
    assert not kernel(query[:3], key[:3], plain)
    assert not kernel(query[..., :40], key[..., :40], plain)
