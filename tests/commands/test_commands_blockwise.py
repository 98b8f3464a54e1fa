"""`recover --blockwise`: one decoder layer in memory, the same form of result, and nothing lost on the way."""

import json
import os
import signal
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from toy_pipeline import cache_and_student, call, eval_options, recover_options
from transformers import AutoModelForCausalLM

from qat_lora.errors import ConfigError, InterruptedRunError, ModelError
from qat_lora.layers.quant_linear import Dense, QuantLinear
from qat_lora.models.copies import copy_tokenizer
from qat_lora.models.load import load_model, make_qwen3
from qat_lora.registry import COMMANDS
from qat_lora.runtime.launch.select import ChipsConfig
from qat_lora.runtime.launch.start import run
from qat_lora.train import blockwise, step


@pytest.fixture(scope="module")
def work(tiny, tmp_path_factory):
    """A cache and a quantised student."""
    return cache_and_student(tiny, tmp_path_factory.mktemp("blockwise"))


def options(tiny, work, out, **changed):
    made = recover_options(work[1], work[0], out, blockwise=True, model=str(tiny.teacher))
    return replace(made, **changed)


def factors(folder):
    return load_file(folder / "adapter_model.safetensors")


def test_every_layer_trains_and_the_student_is_nearer_to_its_teacher(tiny, work, tmp_path, monkeypatch):
    formed = []

    def watched(*arguments):
        result = real(*arguments)
        layers = [m for m in arguments[1][0].modules() if isinstance(m, QuantLinear)]
        formed.append((len(layers), sum(isinstance(layer.source, Dense) for layer in layers)))
        return result

    real = blockwise._reconstruct
    monkeypatch.setattr(blockwise, "_reconstruct", watched)
    trained = call("recover", options(tiny, work, tmp_path / "run"))
    assert formed == [(7, 0)]  # the last of two layers is the run's own; what was formed of the first is gone again
    plain = call("recover", recover_options(work[1], work[0], tmp_path / "plain"))
    start = factors(plain / "start")
    moved = {name for name, factor in factors(trained / "best").items() if not torch.equal(factor, start[name])}
    assert all(any(f".layers.{i}." in name for name in moved) for i in (0, 1))
    begun = {name for name, factor in factors(trained / "start").items() if not torch.equal(factor, start[name])}
    assert begun and all(".layers.0." in name for name in begun)
    (block,) = json.loads((trained / "result.json").read_text())["blocks"]
    assert block["after"] < block["before"]
    students = {"start": plain / "start", "run": trained}
    scores = call("evaluate", eval_options(tiny, students, tmp_path / "eval"))
    assert scores["run"]["kl"] < scores["start"]["kl"]
    assert not (trained / "unfinished").exists()


@pytest.mark.parametrize("at", ["in the layer", "after it"])
def test_a_stopped_run_goes_on_to_the_same_bytes(at, tiny, work, tmp_path, monkeypatch):
    whole, cut = (options(tiny, work, tmp_path / name) for name in ("whole", "cut"))
    call("recover", whole)
    calls = {"_reconstruct": 0, "objective_loss": 0}

    def stopping(module, name, stops):
        real = getattr(module, name)

        def counted(*arguments, **named):
            calls[name] += 1
            if stops and calls[name] == 1:
                os.kill(os.getpid(), signal.SIGTERM)
            return real(*arguments, **named)

        monkeypatch.setattr(module, name, counted)

    stopping(blockwise, "_reconstruct", at == "in the layer")
    stopping(step, "objective_loss", at == "after it")
    with pytest.raises(InterruptedRunError):
        call("recover", cut)
    call("recover", cut)
    assert calls["_reconstruct"] == (2 if at == "in the layer" else 1)  # a finished layer is not trained again
    ours, theirs = (factors(tmp_path / name / "last") for name in ("whole", "cut"))
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def base_tensors(folder, kind=""):
    tensors = load_file(next(folder.glob("model*.safetensors")))
    return {name: tensor for name, tensor in tensors.items() if kind in name.rpartition(".")[2]}


def test_scales_of_every_layer_train_and_bring_it_nearer_and_a_stopped_run_ends_at_the_same(
    tiny, work, tmp_path, monkeypatch
):
    plain = call("recover", options(tiny, work, tmp_path / "plain"))
    scaled = call("recover", options(tiny, work, tmp_path / "scaled", train_scales=True))
    was, now = base_tensors(work[1]), base_tensors(scaled / "best" / "base")
    moved = {name for name in was if not torch.equal(was[name], now[name])}
    scales = base_tensors(work[1], "scale")
    assert moved <= set(scales) and {name.split(".")[2] for name in moved} == {"0", "1"} and len(moved) >= 7
    errors = {}
    for name, folder in (("plain", plain), ("scaled", scaled)):
        (block,) = json.loads((folder / "result.json").read_text())["blocks"]
        errors[name] = block["after"]
    assert errors["scaled"] < errors["plain"]
    scores = call("evaluate", eval_options(tiny, {"plain": plain, "scaled": scaled}, tmp_path / "eval"))
    assert scores["scaled"]["kl"] < scores["plain"]["kl"]
    real, calls = step.objective_loss, []

    def stopping(*arguments, **named):
        if not calls:
            os.kill(os.getpid(), signal.SIGTERM)
        calls.append(1)
        return real(*arguments, **named)

    monkeypatch.setattr(step, "objective_loss", stopping)  # after the first layer, within the last
    cut = options(tiny, work, tmp_path / "cut", train_scales=True)
    with pytest.raises(InterruptedRunError):
        call("recover", cut)
    call("recover", cut)
    for part in ("last", "last/base"):
        for file in (scaled / part).glob("*.safetensors"):
            assert file.read_bytes() == (tmp_path / "cut" / part / file.name).read_bytes()


def test_what_it_needs_is_said(tiny, work, tmp_path):
    for changed, words in (
        ({"model": None}, "full-precision model"),
        ({"train_norms": True}, "train_norms: --blockwise trains no norms"),
        ({"learn": "ce", "kd_cache_dir": None}, "dataset|blockwise"),
    ):
        with pytest.raises(ConfigError, match=words):
            options(tiny, work, tmp_path / "no", **changed)
    assert not (tmp_path / "no").exists()


def test_a_model_that_is_not_the_students_original_is_refused(tiny, work, tmp_path):
    """Another shape, more layers, and the student itself: no claim of the folder, no traceback."""
    narrow = make_qwen3(tmp_path / "narrow", 320, hidden=32, layers=2, heads=1, kv_heads=1, mlp=64)
    config = load_model(str(tiny.teacher)).config
    config.num_hidden_layers, config.layer_types = 3, ["full_attention"] * 3
    deep = AutoModelForCausalLM.from_config(config)
    for name, module in (("narrow", narrow.module), ("deep", deep)):
        module.save_pretrained(tmp_path / name)
        copy_tokenizer(tiny.teacher, tmp_path / name)
    cases = {
        tmp_path / "narrow": "has no full-precision",
        tmp_path / "deep": "3 decoder layers",
        work[1]: "has no full-",
    }
    for model, words in cases.items():
        with pytest.raises(ModelError, match=words):
            call("recover", options(tiny, work, tmp_path / "no", model=str(model)))
    assert not (tmp_path / "no").exists()


@pytest.mark.parametrize(
    "changed", [{"run": {"dtype": "bfloat16"}}, {"loop": {"autocast": True}}], ids=["bf16", "autocast"]
)
def test_it_trains_in_bfloat16(changed, tiny, work, tmp_path):
    made = options(tiny, work, tmp_path / "run")
    made = replace(made, **{name: replace(getattr(made, name), **values) for name, values in changed.items()})
    (block,) = json.loads((call("recover", made) / "result.json").read_text())["blocks"]
    assert block["after"] < block["before"]


def test_several_processes_are_refused(tiny, work, tmp_path):
    made = options(tiny, work, tmp_path / "two")
    two = replace(made, run=replace(made.run, chips=ChipsConfig(num_chips="2")))
    with pytest.raises(ConfigError, match="blockwise: one process"):
        run(COMMANDS["recover"], two)
