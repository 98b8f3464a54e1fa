"""`qat-lora qat` at toy size: what trains, what is saved, what loads, what is refused, and where a run goes on."""

import importlib
import json
import os
import shutil
import signal
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from toy_pipeline import cache_and_student, call, eval_options, part, quantize_options, recover_options
from transformers import AutoModelForCausalLM

from qat_lora.errors import ConfigError, InterruptedRunError, ModelError, OutputExistsError
from qat_lora.options import QatOptions, RunConfig
from qat_lora.runtime.launch.select import ChipsConfig
from qat_lora.train.blockwise import BlockwiseConfig
from qat_lora.train.loop import LoopConfig
from qat_lora.train.optim import OptimConfig

IDS = torch.arange(3, 35).reshape(1, 32)
BLOCKWISE = BlockwiseConfig(blockwise_steps=40, blockwise_lr=1e-3, blockwise_scale_lr=3e-4)


@pytest.fixture(scope="module")
def work(tiny, tmp_path_factory):
    """A cache and a quantised student."""
    return cache_and_student(tiny, tmp_path_factory.mktemp("qat"))


def options(tiny, cache, out, **changed):
    making = {"preset": "w2g64", "init": "gptq", "calibration_rows": 64}
    made = QatOptions(
        from_scratch=True,
        model=str(tiny.teacher),
        kd_cache_dir=str(cache),
        **(making if changed.get("from_scratch", True) else {}),
        train=OptimConfig(lr=2e-4, scale_lr=2e-3, warmup_steps=1),
        loop=LoopConfig(batch_size=16, max_steps=6, log_steps=3, eval_steps=2, save_steps=4),
        run=part(out),
    )
    return replace(made, **changed)


CASES = {
    "scales": {},
    "weights": {"train_parts": ("scales", "weights")},
    "mergeable": {"train_parts": ("scales",), "mergeable": True, "mergeable_r": 4, "train": OptimConfig(lr=5e-2)},
    "tables": {"preset": "q4a4", "train_parts": ("lut", "scales", "norms")},
    "ranges": {
        "preset": "w4g64a",
        "train_parts": ("ranges", "weights"),
        "weight_gradient": "ste",
        "train": OptimConfig(lr=2e-4, scale_lr=5e-2, warmup_steps=1),
    },
    "ends": {"train_parts": ("embeddings",)},
    "blockwise": {"blockwise": BLOCKWISE, "init": "absmax"},
}
CHANGED = {
    "scales": {"scale"},
    "weights": {"scale", "codes"},
    "mergeable": {"scale", "codes"},
    "tables": {"values", "scale_a", "scale_b", "weight"},
    "ranges": {"scale", "zeros", "codes"},
    "ends": {"weight"},
    "blockwise": {"scale", "codes"},
}


@pytest.fixture(scope="module", params=CASES)
def trained(request, tiny, work, tmp_path_factory):
    """A finished run of each kind, with the logits that the model gave at its last export, while still training."""
    qat = importlib.import_module("qat_lora.commands.qat")  # in the package, `qat` is the function
    out = tmp_path_factory.mktemp(request.param) / "run"
    seen = {}

    def watched(model, folder):
        model.module.eval()
        with torch.no_grad():
            seen[folder.name] = model.hidden(IDS, torch.zeros_like(IDS))
        model.module.train()
        return real(model, folder)

    real = qat._export
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(qat, "_export", watched)
        call("qat", options(tiny, work[0], out, **CASES[request.param]))
    return request.param, out, seen


def hidden_of(folder):
    from qat_lora.models.load import load_model

    model = load_model(str(folder))
    model.tile_attention()  # as in training: other sums of attention differ in the last bit
    with torch.no_grad():
        return model.hidden(IDS, torch.zeros_like(IDS))


def test_what_is_saved_computes_bit_for_bit_what_was_trained(trained):
    _, out, seen = trained
    assert set(seen) == {"start", "best", "last"}
    for name, expected in seen.items():
        assert torch.equal(hidden_of(out / name), expected), name


def test_only_what_was_asked_for_changes(trained):
    name, out, _ = trained
    start, last = (load_file(folder / "model.safetensors") for folder in (out / "quantised", out / "last"))
    assert set(start) == set(last)
    assert {key: tensor.dtype for key, tensor in start.items()} == {key: tensor.dtype for key, tensor in last.items()}
    changed = {key.rpartition(".")[2] for key in start if not torch.equal(start[key], last[key])}
    assert changed == CHANGED[name]
    whole = {key for key in start if not torch.equal(start[key], last[key]) and key.endswith(".weight")}
    assert all("norm" in key for key in whole) if name == "tables" else whole <= {"model.embed_tokens.weight"}


def test_training_starts_from_the_quantised_student_and_helps(trained):
    name, out, seen = trained
    begin = out / ("blockwise" if name == "blockwise" else "quantised")
    assert torch.equal(hidden_of(begin), hidden_of(out / "start"))
    kl = [json.loads(line)["kl_bound"] for line in (out / "evaluations.jsonl").read_text().splitlines()]
    result = json.loads((out / "result.json").read_text())
    assert result["best_kl_bound"] == min(kl) and result["step"] == 6 and result["bits_per_weight"] > 2
    if name in ("scales", "blockwise", "ends"):
        assert kl[-1] < kl[0]


def test_a_second_call_finds_it_complete_and_another_is_refused(trained, tiny, work):
    name, out, _ = trained
    before = {p: p.stat().st_mtime_ns for p in out.rglob("*")}
    assert call("qat", options(tiny, work[0], out, **CASES[name])) == out
    other = {**CASES[name], "train_parts": ("scales", "embeddings"), "weight_gradient": "lsq"}
    with pytest.raises(OutputExistsError, match="train_parts"):
        call("qat", options(tiny, work[0], out, **other))
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*")} == before


def test_blocks_are_reconstructed(trained):
    name, out, _ = trained
    if name != "blockwise":
        assert not (out / "blockwise").exists()
        return
    layers = json.loads((out / "blockwise" / "result.json").read_text())["layers"]
    assert len(layers) == 2 and all(layer["after"] <= layer["before"] for layer in layers)
    assert sum(layer["after"] for layer in layers) < 0.95 * sum(layer["before"] for layer in layers)


def test_a_stopped_reconstruction_goes_on_after_the_last_block_to_the_same_bytes(tiny, work, tmp_path, monkeypatch):
    from qat_lora.train import blockwise

    steps = BlockwiseConfig(blockwise_steps=6, blockwise_lr=1e-3)
    student = {"from_scratch": False, "checkpoint": str(work[1]), "blockwise": steps}
    runs = [options(tiny, work[0], tmp_path / name, **student) for name in ("whole", "cut")]
    runs = [replace(run, loop=replace(run.loop, max_steps=1)) for run in runs]
    call("qat", runs[0])
    real, blocks = blockwise._reconstruct, []

    def reconstruct(*args):
        blocks.append(1)
        if len(blocks) == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*args)

    monkeypatch.setattr(blockwise, "_reconstruct", reconstruct)
    with pytest.raises(InterruptedRunError, match="1 of 2 layers reconstructed are finished and kept"):
        call("qat", runs[1])
    call("qat", runs[1])
    assert len(blocks) == 3  # a run that keeps nothing: 4
    for file in ("blockwise/model.safetensors", "blockwise/result.json", "start/model.safetensors"):
        assert (tmp_path / "whole" / file).read_bytes() == (tmp_path / "cut" / file).read_bytes(), file
    assert not (tmp_path / "cut" / "unfinished").exists()


def test_the_result_loads_in_transformers_and_goes_on_in_recover(tiny, work, tmp_path):
    """Also under the name that the user's guide gives it."""
    cache, _ = work
    run = call("qat", options(tiny, cache, tmp_path / "v2_q4"))
    model = AutoModelForCausalLM.from_pretrained(run / "best")
    assert type(model.model.layers[0].mlp.up_proj).__name__ == "QuantLinear"
    recovered = call("recover", recover_options(run / "best.pt", cache, tmp_path / "recovered", train_scales=True))
    scores = call("evaluate", eval_options(tiny, {"qat": run, "recovered": recovered}, tmp_path / "eval"))
    assert scores["recovered"]["kl"] < scores["qat"]["kl"]
    assert scores["qat"]["bits_per_weight"] == pytest.approx(2.2667, abs=1e-3)
    again = options(tiny, cache, tmp_path / "again", from_scratch=False, checkpoint=str(run / "best"), model=None)
    assert torch.equal(hidden_of(call("qat", again) / "start"), hidden_of(run / "best"))


@pytest.mark.parametrize("case", ["scales", "weights", "mergeable", "blockwise"])
def test_an_interrupted_run_goes_on_to_the_same_bytes(case, tiny, work, tmp_path, monkeypatch):
    from qat_lora.train import loop

    whole = call("qat", options(tiny, work[0], tmp_path / "whole", **CASES[case]))
    steps = []

    def interrupting(*arguments, **named):
        steps.append(1)
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments, **named)

    real = loop.step.micro_batch
    monkeypatch.setattr(loop.step, "micro_batch", interrupting)
    cut = options(tiny, work[0], tmp_path / "cut", **CASES[case])
    with pytest.raises(InterruptedRunError, match="after step 3 of 6"):
        call("qat", cut)
    made = (tmp_path / "cut" / "quantised" / "model.safetensors").stat().st_mtime_ns
    call("qat", cut)
    assert (tmp_path / "cut" / "quantised" / "model.safetensors").stat().st_mtime_ns == made
    for name in ("start", "best", "last"):
        files = [folder / name / "model.safetensors" for folder in (whole, tmp_path / "cut")]
        assert files[0].read_bytes() == files[1].read_bytes(), name
    assert json.loads((tmp_path / "cut" / "result.json").read_text())["resumed_from"] == 3


def refused(kind, words, tiny, cache, out, **changed):
    with pytest.raises(kind) as caught:
        call("qat", options(tiny, cache, out, **changed))
    message = str(caught.value)
    assert caught.value.exit_code == 2 and "\n" not in message and all(word in message for word in words), message
    assert not out.exists()


def test_what_cannot_be_trained_is_refused_before_anything_is_written(tiny, wide, work, tmp_path):
    cache, student = work
    out = tmp_path / "out"
    go_on = {"from_scratch": False, "checkpoint": str(student), "model": None}
    refused(ConfigError, ["lut", "q4_r32"], tiny, cache, out, train_parts=("lut",))
    refused(ConfigError, ["ranges", "w4g64a"], tiny, cache, out, train_parts=("ranges",))
    refused(ConfigError, ["head", "embeddings"], tiny, cache, out, train_parts=("head",))
    refused(ConfigError, ["quantised already"], tiny, cache, out, model=str(student))
    refused(ConfigError, ["no quantised layers"], tiny, cache, out, **{**go_on, "checkpoint": str(tiny.teacher)})
    refused(ModelError, ["full-precision", "q_proj"], tiny, cache, out, **{**go_on, "model": str(student)})
    for changed in ({"train_parts": ("weights",)}, {"mergeable": True}, {"blockwise": BLOCKWISE}):
        refused(ConfigError, ["codes of q2_k", "quantise with q3_k"], wide, cache, out, preset="q2_k", **changed)
    low = replace(part(out), dtype="bfloat16")
    refused(ConfigError, ["bfloat16", "norms"], tiny, cache, out, train_parts=("norms",), run=low)


@pytest.mark.parametrize(
    ("words", "changed"),
    [
        (["checkpoint", "one of the two"], {"checkpoint": "somewhere"}),
        (["checkpoint", "--from-scratch"], {"from_scratch": False}),
        *(
            ([name, "--from-scratch"], {"from_scratch": False, "checkpoint": "x", name: value})
            for name, value in {
                "preset": "w2g64",
                "keep": ("q_proj",),
                "override": ("q_proj=w4g128",),
                "quantize_head": "w4g128",
                "init": "gptq",
                "calibrate_on": "teacher",
                "metric": "outputs",
                "calibration_rows": 64,
            }.items()
        ),
        (["weight_gradient", "weights"], {"weight_gradient": "ste"}),
        (["train_parts", "biases", "scales"], {"train_parts": ("scales", "biases")}),
        (["train_parts", "nothing"], {"train_parts": ()}),
        (["mergeable"], {"train_parts": ("weights",), "mergeable": True}),
        (["shard_base", "recover"], {"run": RunConfig(chips=ChipsConfig("2", shard_base=True))}),
        (
            ["blockwise_steps", "--model"],
            {"from_scratch": False, "checkpoint": "x", "model": None, "blockwise": BLOCKWISE},
        ),
    ],
)
def test_settings_that_contradict_one_another(tiny, words, changed):
    with pytest.raises(ConfigError) as caught:
        options(tiny, "cache", "out", **changed)
    assert all(word in str(caught.value) for word in words), caught.value


def test_a_quantised_head_trains_like_any_layer(tiny, work, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(tiny.teacher)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    model.config.tie_word_embeddings = False
    shutil.copytree(tiny.teacher, tmp_path / "untied")
    model.save_pretrained(tmp_path / "untied")
    own = tiny._replace(teacher=tmp_path / "untied")
    wanted = quantize_options(own, tmp_path / "student", work[0], quantize_head="w4g128", calibrate_on="teacher")
    go_on = {"from_scratch": False, "checkpoint": str(call("quantize", wanted))}
    refused(ConfigError, ["head is quantised"], own, work[0], tmp_path / "out", train_parts=("head",), **go_on)
    fast = OptimConfig(lr=1e-2, warmup_steps=1)
    run = call("qat", options(own, work[0], tmp_path / "run", train_parts=("weights",), train=fast, **go_on))
    before, after = (load_file(run / name / "model.safetensors")["lm_head.codes"] for name in ("start", "last"))
    assert not torch.equal(before, after)


def test_bfloat16_trains_scales_in_float32(tiny, work, tmp_path):
    run = call("qat", options(tiny, work[0], tmp_path / "run", run=replace(part(tmp_path / "run"), dtype="bfloat16")))
    kl = [json.loads(line)["kl_bound"] for line in (run / "evaluations.jsonl").read_text().splitlines()]
    assert kl[-1] < kl[0]
    shutil.rmtree(run)
