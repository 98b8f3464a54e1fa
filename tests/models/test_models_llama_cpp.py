"""A GGUF file as teacher: through llama.cpp's binding where it is there, else through a stand-in with its interface."""

import importlib
import importlib.util
import sys
import types

import numpy as np
import pytest
import torch
from toy_pipeline import cache_options, call, part

from qat_lora.cache.build.served import ServedConfig
from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.cache.storage.store import read_manifest
from qat_lora.errors import ConfigError, MissingExtraError, ModelError
from qat_lora.export import gguf
from qat_lora.models.load import load_model, load_tokenizer
from qat_lora.models.teachers import LlamaCppModel
from qat_lora.options import AuditOptions


@pytest.fixture(scope="module")
def file(tiny, tmp_path_factory):
    file = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    gguf.save_base(load_model(str(tiny.teacher)), {}, load_tokenizer(tiny.teacher), file, "float32", "tiny")
    return file


@pytest.fixture
def binding(tiny, monkeypatch):
    """The binding's interface as far as it is used: positions are scored by our own model."""
    if importlib.util.find_spec("llama_cpp"):
        return

    class Llama:
        def __init__(self, file, *, n_ctx, logits_all, verbose, **_):
            assert logits_all and not verbose
            self.model, self.n_tokens = load_model(str(tiny.teacher)), 0
            self.scores = np.full((n_ctx, 320), np.nan, np.single)

        def n_vocab(self):
            return 320

        def reset(self):
            self.n_tokens = 0

        def eval(self, tokens):
            assert self.n_tokens == 0
            self.n_tokens = len(tokens)
            row = torch.tensor([tokens])
            with torch.no_grad():
                hidden = self.model.hidden(row, torch.zeros_like(row))[0]
                self.scores[: len(tokens)] = self.model.logits(hidden).numpy()

    module = types.ModuleType("llama_cpp")
    module.__dict__.update(Llama=Llama, GGML_TYPE_F32=0, __version__="0.0 (stand-in)")
    monkeypatch.setitem(sys.modules, "llama_cpp", module)


def options(tiny, out, teacher, **changed):
    served = ServedConfig(tokenizer=str(tiny.teacher) if str(teacher).endswith("gguf") else None)
    settings = dict(top_k=8, num_rows=4, eval_rows=1, tail_draws=2, temperatures=(1.0, 2.0), served=served)
    return cache_options(tiny, out, teacher=str(teacher), **settings | changed)


def test_a_cache_by_llama_cpp_is_the_one_built_in_process(tiny, file, binding, tmp_path):
    paths = [str(call("build_cache", options(tiny, tmp_path / str(i), t))) for i, t in enumerate((tiny.teacher, file))]
    here, there = (KDCacheDataset(path, temperatures=(1.0, 2.0)).rows(range(4)) for path in paths)
    assert (here["head_ids"] == there["head_ids"]).mean() > 0.999
    assert (here["tail_draw_ids"] == there["tail_draw_ids"]).mean() > 0.99  # the same random numbers
    for name in ("head_logits", "lse", "log_tail", "lse@2", "log_tail@2"):
        np.testing.assert_allclose(here[name], there[name], atol=2e-3)
    assert read_manifest(paths[1]).fingerprint.builder.startswith("llama.cpp by llama-cpp-python")
    audit = AuditOptions(kd_cache_dir=paths[1], teacher=str(file), rows=2, run=part(tmp_path / "audit"))
    assert call("audit_cache", audit)["same_ids"] > 0.99


def test_what_llama_cpp_does_not_give_is_refused(tiny, file, binding, tmp_path, monkeypatch):
    with pytest.raises(ModelError, match="gives no hidden states; leave out --hidden"):
        call("build_cache", options(tiny, tmp_path / "a", file, hidden=True))
    with pytest.raises(ConfigError, match="tokenizer: missing"):
        call("build_cache", options(tiny, tmp_path / "b", file, served=ServedConfig()))
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"FUGG" + file.read_bytes()[4:])
    with pytest.raises(ModelError, match="broken.gguf"):
        call("build_cache", options(tiny, tmp_path / "c", broken))
    with pytest.raises(ConfigError, match="300 tokens are more than the model's 256"):
        call("build_cache", options(tiny, tmp_path / "d", file, length=300))

    def fails(*_, **__):
        raise ValueError("unknown model architecture")

    monkeypatch.setattr(sys.modules.get("llama_cpp") or importlib.import_module("llama_cpp"), "Llama", fails)
    with pytest.raises(ModelError, match="llama.cpp does not load .*unknown model architecture"):
        call("build_cache", options(tiny, tmp_path / "e", file))
    assert [entry.name for entry in tmp_path.iterdir()] == ["broken.gguf"]


def test_without_the_binding_the_extra_is_named(file, monkeypatch):
    monkeypatch.setitem(sys.modules, "llama_cpp", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'qat-lora\[llama\]'"):
        LlamaCppModel(file, 32)
