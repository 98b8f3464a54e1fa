"""GGUF exports write through llama.cpp what our own models write; without it, the error says what to install."""

import sys
from dataclasses import replace

import pytest
import torch
from toy_pipeline import cache_options, call, export_options, part, quantize_options, recover_options

from qat_lora.commands.generate import generate
from qat_lora.errors import MissingExtraError, ModelError
from qat_lora.generate.sample import open_backend
from qat_lora.models.hub import HubConfig
from qat_lora.options import GenerateOptions
from qat_lora.runtime.launch.select import select_runtime

PROMPT = "def add(a, b):\n"


@pytest.fixture(scope="module")
def gguf(tiny, tmp_path_factory):
    """A recovered student and its GGUF export."""
    root = tmp_path_factory.mktemp("gguf")
    cache = call("build_cache", cache_options(tiny, root / "cache"))
    student = call("quantize", quantize_options(tiny, root / "student", cache, preset="q4_r32"))
    run = call("recover", recover_options(student, cache, root / "run"))
    return run, call("export", export_options(run, root / "gguf", form="gguf", exact_only=True, embedding_bits=16))


def opened(name):
    return open_backend(str(name), HubConfig(), part(None), select_runtime("cpu"))


def test_without_the_binding_the_error_says_what_to_install(gguf, monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'qat-lora\[llama\]'"):
        opened(gguf[1])


@pytest.mark.filterwarnings("ignore")  # of a package built elsewhere
def test_llama_cpp_writes_what_our_own_model_writes(gguf):
    pytest.importorskip("llama_cpp")
    run, folder = gguf
    options = GenerateOptions(student=str(run), prompt=PROMPT, max_new_tokens=12, run=part(None))
    runtime = select_runtime("cpu")
    ours, theirs = (generate(replace(options, student=str(name)), runtime) for name in (run, folder))
    assert len(ours) > 4 and theirs == ours
    backends = opened(run), opened(folder)
    assert backends[0].encode_text(PROMPT) == backends[1].encode_text(PROMPT)
    assert backends[0].positions == backends[1].positions and not backends[1].templated
    drawn = ["".join(backends[1].stream([3, 4], 8, 1.0, torch.Generator().manual_seed(seed), 10)) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.filterwarnings("ignore")
def test_a_damaged_file_is_named(gguf, tmp_path):
    pytest.importorskip("llama_cpp")
    (tmp_path / "base.gguf").write_bytes((gguf[1] / "base.gguf").read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"llama.cpp does not load .*base.gguf"):
        opened(tmp_path)
