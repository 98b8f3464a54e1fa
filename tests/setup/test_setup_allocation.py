"""`quantize --target-size` from end to end: files of the size that was asked for, in formats of one engine."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from toy_pipeline import cache_options, call, quantize_options, recover_options

from qat_lora.errors import ConfigError
from qat_lora.models.load import load_model
from qat_lora.plan.quantize import plan_quantize
from qat_lora.quant.allocate import KEPT, TargetConfig, spec_of
from qat_lora.quant.presets import Preset
from qat_lora.setup.allocation import budget


@pytest.fixture(scope="module")
def cache(tiny, tmp_path_factory):
    return call("build_cache", cache_options(tiny, tmp_path_factory.mktemp("allocation") / "cache"))


def options(tiny, cache, out, **target):
    return quantize_options(tiny, out, cache, joint_rank=2, target=TargetConfig(**target))


@pytest.mark.parametrize("engine", [None, "llama.cpp", "mlx"])
def test_the_file_has_the_size_that_was_asked_for(tiny, cache, tmp_path, engine):
    asked = options(tiny, cache, tmp_path / "student", target_bits=7.0, engine=engine)
    model = load_model(tiny.teacher)
    room = budget(model.module, asked)
    folder = call("quantize", asked)
    chosen = Preset.from_dict(json.loads((folder / "config.json").read_text())["quantization_config"]["preset"])
    sizes = room.sizes()
    specs = {name: chosen.lm_head if name == room.lm_head else chosen.spec_for(name) for name in sizes}
    by_spec = {name: {spec_of(kind): size for kind, size in kinds.items()} for name, kinds in sizes.items()}
    total = room.fixed_bytes + sum(by_spec[name][spec] for name, spec in specs.items())
    smallest_step = min(
        abs(a - b) for kinds in sizes.values() for a in kinds.values() for b in kinds.values() if a != b
    )
    assert room.target_bytes - max(smallest_step, 0.05 * room.target_bytes) <= total <= room.target_bytes
    assert len(set(specs.values())) > 1 or len(next(iter(sizes.values()))) == 1
    if engine is None:  # of a float32 model; what is kept counts at 16 bits
        stored = load_file(folder / "model.safetensors")
        kept = sum(t.numel() for t in stored.values() if t.dtype == torch.float32)
        adapter = room.fixed_bytes - 2 * kept if specs[room.lm_head] is not None else None
        codes = sum(t.nbytes for t in stored.values() if t.dtype != torch.float32)
        if adapter is not None:
            assert codes + 2 * kept + adapter == total


def test_a_target_out_of_reach_is_refused_with_the_range_and_nothing_is_written(tiny, cache, tmp_path):
    for bits in (0.5, 40.0):
        with pytest.raises(ConfigError, match=r"target_bits: .* MB are out of reach; allowed: .* to .* bits a weight"):
            call("quantize", options(tiny, cache, tmp_path / "student", target_bits=bits))
    assert not (tmp_path / "student").exists()


def test_the_dry_run_says_the_range(tiny, cache, tmp_path):
    asked = options(tiny, cache, tmp_path / "student", target_bits=7.0)
    plan, room = plan_quantize(asked), budget(load_model(tiny.teacher).module, asked)
    least, most = room.range_bytes()
    assert plan.report["target"] == {"bytes": room.target_bytes, "smallest_bytes": least, "largest_bytes": most}
    assert f"{least / 1e6:,.3f} to {most / 1e6:,.3f} MB" in plan.text and not (tmp_path / "student").exists()


def test_what_a_target_needs_and_excludes(tiny, cache, tmp_path):
    with pytest.raises(ConfigError, match="override: a target chooses"):
        replace(options(tiny, cache, tmp_path / "a", target_bits=7.0), override=("q_proj=q8_0",))
    with pytest.raises(ConfigError, match="target_size: what layers cost is measured on text"):
        call("quantize", quantize_options(tiny, tmp_path / "b", target=TargetConfig(target_bits=7.0)))


def test_an_interrupted_run_keeps_its_formats_and_recovery_takes_the_student(tiny, cache, tmp_path, monkeypatch):
    asked = options(tiny, cache, tmp_path / "student", target_bits=7.0)
    with monkeypatch.context() as patch:
        patch.setattr("qat_lora.commands.quantize._fit", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            call("quantize", asked)
    monkeypatch.setattr("qat_lora.setup.allocation.allocate", None)  # what was chosen is not chosen again
    folder = call("quantize", asked)
    run = call("recover", recover_options(folder, cache, tmp_path / "run"))
    assert json.loads((run / "result.json").read_text())["step"] == 8


def test_a_kept_head_counts_at_two_bytes(tiny, cache, tmp_path):
    room = budget(load_model(tiny.teacher).module, options(tiny, cache, tmp_path / "x", target_bits=9.0, engine="vllm"))
    outputs, inputs = room.shapes[room.lm_head]
    assert room.sizes()[room.lm_head] == {KEPT: 2 * outputs * inputs}
