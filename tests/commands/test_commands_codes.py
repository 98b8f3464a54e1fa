"""`recover --train-codes`: codes move beside the adapter, and what is exported is what was trained."""

import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from toy_pipeline import cache_options, call, eval_options, export_options, part, quantize_options, recover_options

from qat_lora.errors import ConfigError, InterruptedRunError, ModelError
from qat_lora.layers.quant_linear import QuantLinear
from qat_lora.models.load import CausalLM
from qat_lora.options import QatOptions
from qat_lora.quant.presets import preset
from qat_lora.runtime.launch.select import ChipsConfig
from qat_lora.setup.trainable import check_codes
from qat_lora.train.loop import LoopConfig
from qat_lora.train.optim import OptimConfig


def coded(made, out, share=0.5, **changed):
    train = OptimConfig(lr=2e-3, code_lr=0.3, train_codes=share, warmup_steps=1)
    options = recover_options(made["student"], made["cache"], out, train=train)
    return replace(options, **{"model": str(made["teacher"]), **changed})


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory):
    root = tmp_path_factory.mktemp("codes")
    cache = call("build_cache", cache_options(tiny, root / "cache"))
    student = call("quantize", quantize_options(tiny, root / "student", cache))
    made = {"cache": cache, "student": student, "teacher": tiny.teacher}
    return {**made, "run": call("recover", coded(made, root / "run"))}


def tensors(folder):
    return load_file(folder / "model.safetensors")


def test_codes_move_in_the_last_half_of_the_run(made):
    start, last, student = (
        tensors(made[n] / p) for n, p in (("run", "start/base"), ("run", "last/base"), ("student", ""))
    )
    assert student.keys() == start.keys() == last.keys()
    changed = {name for name in start if not torch.equal(start[name], last[name])}
    assert {name.rpartition(".")[2] for name in changed} == {"codes"} and len(changed) > 4
    assert all(torch.equal(start[name], student[name]) for name in start)
    first, half, end = (load_file(made["run"] / f"checkpoints/step-{n:06}/trained.safetensors") for n in (4, 4, 8))
    positions = [name for name in half if name.endswith(".position")]
    assert len(positions) == 14 and all(not torch.equal(half[name], end[name]) for name in positions)
    assert any(not torch.equal(first[name], end[name]) for name in first if name.endswith("lora_B"))


def test_what_is_exported_are_the_trained_positions_rounded(made):
    """Packed by hand: 2-bit codes, lowest bits first, of half-integer values with ties going up."""
    half, end = (load_file(made["run"] / f"checkpoints/step-{n:06}/trained.safetensors") for n in (4, 8))
    for trained, base in ((half, tensors(made["student"])), (end, tensors(made["run"] / "last/base"))):
        for name in (name for name in trained if name.endswith(".position")):
            codes = np.clip(np.floor(trained[name].double().numpy()) + 2, 0, 3).astype(np.uint8)
            codes = codes.reshape(len(codes), -1, 4) << np.array([0, 2, 4, 6], np.uint8)
            stored = base[name.replace(".position", ".codes")].numpy()
            assert np.array_equal(np.bitwise_or.reduce(codes, -1), stored), name


def test_a_position_starts_at_what_the_adapter_leaves_of_the_full_weight(made):
    half = load_file(made["run"] / "checkpoints/step-000004/trained.safetensors")
    start, full = tensors(made["student"]), tensors(Path(made["teacher"]))
    factors = load_file(made["student"] / "adapter_start.safetensors")
    name = "model.layers.1.mlp.up_proj"
    left = (
        full[f"{name}.weight"].double()
        - factors[f"{name}.lora_B"].double()[:, :2] @ factors[f"{name}.lora_A"].double()[:2]
    )
    wanted = left / start[f"{name}.scale"].double().repeat_interleave(64, 1)[:, : left.shape[1]]
    position = half[f"{name}.position"].double()
    cell = position.floor()  # of code values -1.5, -0.5, 0.5, 1.5, a fifth of half a cell from its borders
    low, high = cell + 0.1, cell + 0.9
    low[cell == -2], high[cell == 1] = -torch.inf, torch.inf
    assert ((cell >= -2) & (cell <= 1)).float().mean() > 0.9
    inside = (cell >= -2) & (cell <= 1)
    torch.testing.assert_close(position[inside], wanted.clamp(low, high)[inside], rtol=1e-3, atol=1e-3)


def test_an_interrupted_run_goes_on_to_the_same_codes(made, tmp_path, monkeypatch):
    from qat_lora.train import loop

    steps = []

    def interrupting(*arguments):
        steps.append(1)
        if len(steps) == 6:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments)

    real = loop.micro_batch
    monkeypatch.setattr(loop, "micro_batch", interrupting)
    with pytest.raises(InterruptedRunError, match="after step 6 of 8"):
        call("recover", coded(made, tmp_path / "run"))
    call("recover", coded(made, tmp_path / "run"))
    for name in ("start", "best", "last"):
        files = [*(made["run"] / name).rglob("*.safetensors")]
        assert len(files) == 2
        for file in files:
            assert file.read_bytes() == (tmp_path / "run" / file.relative_to(made["run"])).read_bytes()


@pytest.mark.parametrize("name", ["q2_0", "w4g64a", "q4_r32"])
@pytest.mark.parametrize("scales", [False, True])
def test_codes_of_other_kinds_train_too_and_without_the_full_model(made, tiny, tmp_path, name, scales):
    init = {} if name == "q4_r32" else {"init": "mse"}
    options = replace(quantize_options(tiny, tmp_path / "student"), preset=name, start_rank=0, joint_rank=None, **init)
    student = call("quantize", options)
    loop = LoopConfig(batch_size=8, max_steps=2)
    options = coded({**made, "student": student}, tmp_path / "run", 1.0, model=None, train_scales=scales, loop=loop)
    run = call("recover", replace(options, train=replace(options.train, code_lr=0.5)))
    start, last = (tensors(run / part / "base") for part in ("start", "last"))
    kinds = {n.rpartition(".")[2] for n in start if not torch.equal(start[n], last[n])}
    assert "codes" in kinds and bool(kinds - {"codes"}) == scales


@pytest.mark.parametrize("form", ["merged", "adapter", "gguf", "mlx", "compressed-tensors", "gptq", "pt"])
def test_every_form_holds_the_trained_codes(made, tmp_path, form):
    call("export", export_options(made["run"], tmp_path / form, form=form))
    file = next((tmp_path / form).rglob("base.gguf"), None)
    assert (file is not None) == (form == "gguf")
    if file is not None:
        options = coded({**made, "student": file}, tmp_path / "out", tokenizer=str(made["student"]))
        with pytest.raises(ConfigError, match="train_codes: .* other engines"):
            call("recover", options)


def test_the_merged_model_is_as_far_from_the_teacher_as_the_run(made, tiny, tmp_path):
    merged = call("export", export_options(made["run"] / "last", tmp_path / "merged"))
    students = {"run": made["run"] / "last", "merged": merged, "start": made["run"] / "start"}
    scores = call("evaluate", eval_options(tiny, students, tmp_path / "eval"))
    assert scores["merged"]["kl"] == pytest.approx(scores["run"]["kl"], rel=2e-3)
    assert scores["run"]["kl"] != scores["start"]["kl"]


def test_what_has_no_codes_of_ours_or_cannot_write_them_is_refused(made, tiny, tmp_path):
    out = tmp_path / "out"
    with pytest.raises(ConfigError, match="train_codes: the student has no quantised layers"):
        call("recover", coded({**made, "student": tiny.teacher}, out))
    with pytest.raises(ModelError, match="full-precision"):
        call("recover", coded(made, out, model=str(made["student"])))
    for share in (-0.1, 1.5):
        with pytest.raises(ConfigError, match="train_codes: .* from 0 to 1"):
            OptimConfig(train_codes=share)
    with pytest.raises(ConfigError, match="shard_base: .* whole layers"):
        coded(made, out, run=replace(part(out), chips=ChipsConfig(shard_base=True)))
    with pytest.raises(ConfigError, match="train_codes: belongs to recover"):
        QatOptions(checkpoint="x", kd_cache_dir="y", train=OptimConfig(train_codes=1.0))
    assert not out.exists()


def test_codes_with_minima_are_refused():
    spec = preset("q4_k").spec_for("model.layers.0.mlp.up_proj")
    model = CausalLM(nn.ModuleDict({"up_proj": QuantLinear(256, 2, spec)}), Path())
    check_codes(model, True, False)
    with pytest.raises(ConfigError, match="q2_k and q4_k do not train"):
        check_codes(model, True, True)
