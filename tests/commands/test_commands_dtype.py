"""`--dtype auto`: a run keeps the type that it began with, on whichever processor it goes on."""

import json
import os
import signal
from dataclasses import replace

import pytest
import torch
from toy_pipeline import cache_options, call, eval_options, part, recover_options

from qat_lora.cache.build import builder
from qat_lora.cache.storage.store import read_manifest
from qat_lora.errors import InterruptedRunError, OutputExistsError
from qat_lora.runtime import precision
from qat_lora.train.loop import LoopConfig


@pytest.fixture
def processor(monkeypatch):
    """Units for bfloat16, or none."""

    def of(dtype):
        monkeypatch.setattr(precision, "fast_dtype", lambda device: dtype)

    return of


def auto(out, **changed):
    return replace(part(out), dtype="auto", quiet=False, **changed)


def test_a_build_goes_on_in_its_type(tiny, tmp_path, processor, monkeypatch, capsys):
    options = cache_options(tiny, tmp_path / "cache", run=auto(tmp_path / "cache"), shard_rows=16)
    batches, real = [], builder.run_batch

    def interrupting(*given):
        batches.append(1)
        if len(batches) == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*given)

    processor(torch.bfloat16)
    with monkeypatch.context() as patch, pytest.raises(InterruptedRunError):
        patch.setattr(builder, "run_batch", interrupting)
        call("build_cache", options)
    processor(torch.float32)
    cache = call("build_cache", options)
    assert read_manifest(cache).fingerprint.builder.endswith(", cpu, bfloat16")
    assert "dtype: bfloat16, as this run began; it would be float32 on this device" in capsys.readouterr().out
    assert call("build_cache", options) == cache
    processor(torch.bfloat16)
    whole = call("build_cache", replace(options, run=auto(tmp_path / "whole")))
    for file in sorted(whole.glob("*.safetensors")):
        assert (cache / file.name).read_bytes() == file.read_bytes()


def test_a_training_run_and_an_evaluation_keep_theirs(tiny, student, tmp_path, processor, capsys):
    cache = call("build_cache", cache_options(tiny, tmp_path / "cache"))
    loop = LoopConfig(batch_size=16, max_steps=4, save_steps=1)
    options = recover_options(student, cache, tmp_path / "run", run=auto(tmp_path / "run"), loop=loop)
    processor(torch.bfloat16)
    call("recover", replace(options, loop=replace(loop, until_step=2)))
    processor(torch.float32)
    call("recover", options)
    assert json.loads((tmp_path / "run" / "result.json").read_text())["resumed_from"] == 2
    assert "dtype: bfloat16\n" in (tmp_path / "run" / "config.yaml").read_text()
    assert "dtype: bfloat16, as this run began" in capsys.readouterr().out
    with pytest.raises(OutputExistsError, match='dtype was "bfloat16", now "float32"'):
        call("recover", replace(options, run=part(tmp_path / "run")))  # what is asked for is no choice of ours
    scored = eval_options(tiny, {"recovered": tmp_path / "run"}, tmp_path / "eval", run=auto(tmp_path / "eval"))
    found = call("evaluate", scored)
    processor(torch.bfloat16)
    assert call("evaluate", scored) == found
    assert json.loads((tmp_path / "eval" / "report.json").read_text())["setup"]["dtype"] == "float32"
    capsys.readouterr()
    again = auto(tmp_path / "eval", overwrite=True)
    call("evaluate", replace(scored, run=again))  # begins anew
    assert "as this run began" not in capsys.readouterr().out
    assert json.loads((tmp_path / "eval" / "report.json").read_text())["setup"]["dtype"] == "bfloat16"
