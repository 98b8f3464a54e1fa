"""The pipeline cache build, quantize, recover, eval, export at toy size, and the mistakes that people make with it."""

import json
import os
import shutil
import signal
import threading
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from toy_pipeline import (
    cache_options,
    call,
    eval_options,
    export_options,
    part,
    quantize_options,
    recover_options,
)

from qat_lora.data.sources import TextConfig
from qat_lora.errors import (
    CacheError,
    ConfigError,
    InterruptedRunError,
    MissingExtraError,
    ModelError,
    OutputExistsError,
    QatLoraError,
    TextError,
)
from qat_lora.files import outputs
from qat_lora.files.checksums import seal
from qat_lora.layers.convert import quant_layers
from qat_lora.layers.lora import LoraConfig
from qat_lora.losses.objective import ObjectiveConfig
from qat_lora.models.load import load_model
from qat_lora.runtime.host.transfer import THREAD
from qat_lora.train.loop import LoopConfig


@pytest.fixture(scope="module")
def done(tiny, tmp_path_factory):
    """Everything, once: the folders by name and the scores."""
    root = tmp_path_factory.mktemp("pipeline")
    cache = call("build_cache", cache_options(tiny, root / "cache"))
    rough = call("quantize", quantize_options(tiny, root / "rough"))
    student = call("quantize", quantize_options(tiny, root / "student", cache))
    run = call("recover", recover_options(student, cache, root / "run"))
    scaled = call("recover", recover_options(student, cache, root / "scaled", train_scales=True))
    students = {"quantised": rough, "calibrated": run / "start", "recovered": run, "scaled": scaled}
    scores = call("evaluate", eval_options(tiny, students, root / "eval"))
    merged = call("export", export_options(scaled, root / "merged"))
    folders = {"cache": cache, "rough": rough, "student": student, "run": run, "scaled": scaled, "merged": merged}
    return {**folders, "eval": root / "eval", "students": students, "scores": scores}


def state_of(folder):
    return {p: (p.stat().st_mtime_ns, p.stat().st_ino) for p in folder.rglob("*") if p.name != ".lock"}


def test_recovery_brings_the_student_nearer_to_its_teacher_on_text_it_never_saw(done):
    kl = {name: score["kl"] for name, score in done["scores"].items()}
    assert kl["teacher"] == 0
    assert kl["recovered"] < kl["calibrated"] < kl["quantised"]
    assert kl["scaled"] < kl["calibrated"]


def test_a_run_leaves_what_it_promises(done):
    for run in (done["run"], done["scaled"]):
        names = {path.name for path in run.iterdir()}
        assert {"config.yaml", "metrics.jsonl", "evaluations.jsonl", "checkpoints", "start", "best", "last"} <= names
        assert {"curve.png", "result.json"} <= names and not any(name.startswith(".") for name in names)
        steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert steps == list(range(1, 9))
    assert {path.name for path in done["eval"].iterdir()} >= {"scores.json", "scores.md", "scores.png"}


def test_trained_scales_come_with_the_base_they_belong_to(done):
    from qat_lora.files.checksums import checkpoint_sha256

    shas = set()
    for name in ("start", "best", "last"):
        folder = done["scaled"] / name
        sha = json.loads((folder / "qat_lora.json").read_text())["base_sha256"]
        assert sha == checkpoint_sha256(folder / "base")
        config = json.loads((folder / "adapter_config.json").read_text())
        assert config["base_model_name_or_path"] == str(folder / "base")
        shas.add(sha)
        assert not (done["run"] / name / "base").exists()
    assert len(shas) >= 2
    start, last = (load_file(done["scaled"] / name / "base" / "model.safetensors") for name in ("start", "last"))
    changed = {name for name in start if not torch.equal(start[name], last[name])}
    assert changed and all(name.endswith(".scale") for name in changed)


def test_start_is_the_student_with_its_stored_adapter_start(done):
    """The untrained export is what `calibrated` means: factors of the checkpoint, scores of the first evaluation."""
    saved = load_file(done["student"] / "adapter_start.safetensors")
    start = load_file(done["run"] / "start" / "adapter_model.safetensors")
    for name, tensor in saved.items():
        assert torch.equal(start[f"base_model.model.{name}.weight"], tensor), name


@pytest.mark.parametrize("name", ["cache", "rough", "student", "run", "scaled", "merged", "eval"])
def test_a_second_call_reuses_what_is_complete(done, tiny, name):
    before = state_of(done[name])
    cache, out = done["cache"], done[name]
    again = {
        "cache": lambda: call("build_cache", cache_options(tiny, out)),
        "rough": lambda: call("quantize", quantize_options(tiny, out)),
        "student": lambda: call("quantize", quantize_options(tiny, out, cache)),
        "run": lambda: call("recover", recover_options(done["student"], cache, out)),
        "scaled": lambda: call("recover", recover_options(done["student"], cache, out, train_scales=True)),
        "merged": lambda: call("export", export_options(done["scaled"], out)),
        "eval": lambda: call("evaluate", eval_options(tiny, done["students"], out)),
    }[name]()
    assert state_of(out) == before
    assert again == (done["scores"] if name == "eval" else out)


CHANGES = {
    "cache": lambda d, t, out: call("build_cache", cache_options(t, out, top_k=32)),
    "rough": lambda d, t, out: call("quantize", quantize_options(t, out, init="mse")),
    "student": lambda d, t, out: call("quantize", quantize_options(t, out, d["cache"], start_rank=1)),
    "run": lambda d, t, out: call("recover", recover_options(d["student"], d["cache"], out, head_k=8)),
    "scaled": lambda d, t, out: call("recover", recover_options(d["rough"], d["cache"], out, train_scales=True)),
    "merged": lambda d, t, out: call("export", export_options(d["run"], out)),
    "eval": lambda d, t, out: call("evaluate", eval_options(t, d["students"], out, length=16)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_the_folder_of_another_run_is_refused_and_untouched(done, tiny, name):
    before = state_of(done[name])
    with pytest.raises(OutputExistsError) as caught:
        CHANGES[name](done, tiny, done[name])
    assert caught.value.exit_code == 2 and str(done[name]) in str(caught.value)
    assert state_of(done[name]) == before


@pytest.mark.parametrize("name", sorted(CHANGES.keys() - {"cache"}))  # a cache goes beside what is there
def test_a_folder_that_is_not_ours_is_refused_and_untouched(done, tiny, tmp_path, name):
    (tmp_path / "thesis.txt").write_text("mine")
    before = state_of(tmp_path)
    with pytest.raises(OutputExistsError):
        CHANGES[name](done, tiny, tmp_path)
    assert state_of(tmp_path) == before


@pytest.mark.parametrize("name", sorted(CHANGES.keys() - {"cache"}))  # a cache has its lease
def test_a_folder_in_which_another_process_works_is_refused(done, tiny, tmp_path, name):
    with (
        outputs.lock_dir(tmp_path),
        pytest.raises(OutputExistsError, match="another process is working there; wait for it"),
    ):
        CHANGES[name](done, tiny, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_the_start_method_that_is_left_is_noted_and_the_others_are_refused(tiny, tmp_path, capsys):
    run, plain = part(tmp_path / "student"), {"init": "mse", "start_rank": 2, "joint_rank": None}
    call("quantize", quantize_options(tiny, tmp_path / "student", **plain))
    capsys.readouterr()
    call("quantize", quantize_options(tiny, run.out, start_method="qera", run=replace(run, quiet=False), **plain))
    said = capsys.readouterr().out
    assert "start_method: no longer does anything" in said and "is complete already" in said
    for method in ("svd", "best"):
        with pytest.raises(ConfigError, match=f"^start_method: {method} was removed; [^\n]*$"):
            quantize_options(tiny, run.out, start_method=method)


def test_an_adapter_of_a_lower_rank_than_the_codes_were_chosen_for_is_noted(done, tiny, tmp_path, capsys):
    student = call("quantize", quantize_options(tiny, tmp_path / "student", done["cache"], joint_rank=2))
    warning = "warning: codes were chosen for rank 2; quantize --joint-rank 1 ends at a lower KL"
    for rank, warnings in ((1, [warning]), (2, [])):
        run, lora = replace(part(tmp_path / f"r{rank}"), quiet=False), LoraConfig(recovery_r=rank)
        once = LoopConfig(batch_size=4, max_steps=1)
        capsys.readouterr()
        call("recover", recover_options(student, done["cache"], run.out, run=run, lora=lora, loop=once))
        assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning: codes")] == warnings


def test_overwrite_starts_a_run_again(done, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(done["run"], out)
    shorter = LoopConfig(batch_size=16, max_steps=2)
    run = part(out, overwrite=True)
    call("recover", recover_options(done["student"], done["cache"], out, loop=shorter, run=run))
    assert len((out / "metrics.jsonl").read_text().splitlines()) == 2
    assert [path.name for path in (out / "checkpoints").iterdir()] == ["step-000002"]


@pytest.mark.parametrize("train_scales", [False, True])
def test_an_interrupted_recovery_goes_on_to_the_same_result(done, tmp_path, monkeypatch, train_scales):
    from qat_lora.train import loop

    steps = []

    def interrupting(*arguments):
        steps.append(1)
        if len(steps) == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(*arguments)

    real = loop.step.micro_batch
    monkeypatch.setattr(loop.step, "micro_batch", interrupting)
    options = recover_options(done["student"], done["cache"], tmp_path / "run", train_scales=train_scales)
    with pytest.raises(InterruptedRunError, match="after step 3 of 8") as caught:
        call("recover", options)
    assert caught.value.exit_code == 143
    assert THREAD not in {thread.name for thread in threading.enumerate()}
    call("recover", options)
    whole = done["scaled" if train_scales else "run"]
    for name in ("start", "best", "last"):
        for file in (whole / name).rglob("*.safetensors"):
            assert file.read_bytes() == (tmp_path / "run" / name / file.relative_to(whole / name)).read_bytes()
    best = [json.loads((run / "result.json").read_text()) for run in (whole, tmp_path / "run")]
    assert best[0]["best_kl_bound"] == best[1]["best_kl_bound"] and best[1]["resumed_from"] == 3


def test_a_plain_model_can_be_recovered_too(done, tiny, tmp_path):
    another = shutil.copytree(tiny.teacher, tmp_path / "another")
    weights = load_file(another / "model.safetensors")
    for name, tensor in weights.items():
        weights[name] = tensor * 1.0001 if name.endswith("up_proj.weight") else tensor
    save_file(weights, another / "model.safetensors", metadata={"format": "pt"})
    options = recover_options(None, done["cache"], tmp_path / "run", checkpoint=None, model=str(another))
    run = call("recover", options)
    scores = call("evaluate", eval_options(tiny, {"same": run}, tmp_path / "eval"))
    assert scores["same"]["kl"] < 1e-3 and scores["same"]["bits_per_weight"] is None


# What people get wrong: the error, and what its one line has to name.


def refused(kind, words, function, *arguments, **changed):
    with pytest.raises(kind) as caught:
        call(function, *arguments, **changed)
    message = str(caught.value)
    assert isinstance(caught.value, QatLoraError) and caught.value.exit_code == 2
    assert "\n" not in message and all(word in message for word in words), message
    return message


@pytest.fixture
def other(tiny, tmp_path):
    """A model like the teacher with another tokenizer."""
    from qat_lora.models.load import make_tokenizer

    folder = tmp_path / "other"
    shutil.copytree(tiny.teacher, folder)
    make_tokenizer(["completely other words here"] * 20, 300, folder)
    return folder


def test_l_and_k_that_do_not_fit(done, tiny, tmp_path):
    cache = cache_options(tiny, tmp_path / "out")
    refused(ConfigError, ["length", "1000", "256"], "build_cache", cache, length=1000)
    refused(QatLoraError, ["length", "1"], "build_cache", cache, length=1)
    for k in (0, -1, 321):
        refused(QatLoraError, ["top_k", str(k)], "build_cache", cache, top_k=k)
    run = recover_options(done["student"], done["cache"], tmp_path / "out")
    refused(ConfigError, ["head_k: 0", "1 or more"], "recover", run, head_k=0)
    refused(CacheError, ["k", "65", "64"], "recover", run, head_k=65)
    refused(ConfigError, ["length", "1000", "256"], "evaluate", eval_options(tiny, {}, tmp_path / "out", length=1000))
    text = TextConfig(dataset=str(tiny.text))
    options = quantize_options(tiny, tmp_path / "out", init="gptq", text=text, calibration_length=1000)
    refused(ConfigError, ["length", "1000", "256"], "quantize", options)
    assert not (tmp_path / "out").exists()


def test_rows_longer_than_the_student_reads(done, tmp_path):
    short = tmp_path / "short"
    shutil.copytree(done["student"], short)
    config = json.loads((short / "config.json").read_text())
    (short / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 16}))
    seal(short)
    refused(CacheError, ["length", "32", "16"], "recover", recover_options(short, done["cache"], tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_a_tokenizer_that_does_not_match(done, tiny, other, tmp_path):
    run = recover_options(other, done["cache"], tmp_path / "out")
    refused(CacheError, ["tokenizer", str(done["cache"])], "recover", run)
    options = quantize_options(tiny, tmp_path / "out", done["cache"], model=str(other))
    refused(CacheError, ["tokenizer"], "quantize", options)
    refused(ConfigError, ["tokenizer", "twin"], "evaluate", eval_options(tiny, {"twin": other}, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_an_unknown_preset_gets_the_list(tiny, tmp_path):
    options = quantize_options(tiny, tmp_path / "out", preset="w2g65")
    refused(ConfigError, ["w2g65", "w2g64", "w3g128", "w4g128"], "quantize", options)
    refused(ConfigError, ["init", "gptq", "--dataset"], "quantize", options, preset="w2g64", init="gptq")
    refused(ConfigError, ["nowhere", "matches no"], "quantize", options, preset="w2g64", keep=("nowhere",))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("blank", ["", " \n\n"])
def test_an_empty_text(done, tiny, tmp_path, blank):
    (tmp_path / "text.txt").write_text(blank)
    text = TextConfig(dataset=str(tmp_path / "text.txt"))
    out = tmp_path / "out"
    refused(TextError, ["text.txt"], "build_cache", cache_options(tiny, out, text=text))
    refused(TextError, ["text.txt"], "evaluate", eval_options(tiny, {}, out, text=text))
    refused(TextError, ["text.txt"], "quantize", quantize_options(tiny, out, init="gptq", text=text))
    assert not out.exists()


def test_a_missing_text(tiny, tmp_path):
    text = TextConfig(dataset=str(tmp_path / "none.txt"))
    refused(TextError, ["none.txt"], "build_cache", cache_options(tiny, tmp_path / "out", text=text))
    refused(TextError, ["none.txt"], "evaluate", eval_options(tiny, {}, tmp_path / "out", text=text))


@pytest.mark.parametrize("what", ["missing", "empty", "no weights", "no tokenizer", "cut"])
def test_a_model_folder_that_is_none(done, tiny, tmp_path, what):
    folder, out = tmp_path / "model", tmp_path / "out"
    if what == "empty":
        folder.mkdir()
    elif what != "missing":
        shutil.copytree(tiny.teacher, folder)
    if what == "no weights":
        (folder / "model.safetensors").unlink()
    if what == "no tokenizer":
        for file in folder.glob("token*"):
            file.unlink()
    if what == "cut":
        content = (folder / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(content[: len(content) // 2])
    refused(ModelError, [str(folder)], "build_cache", cache_options(tiny, out, teacher=str(folder)))
    if what != "no tokenizer":  # quantising needs none of its own
        refused(ModelError, [str(folder)], "quantize", quantize_options(tiny, out, model=str(folder)))
    refused(ModelError, [str(folder)], "recover", recover_options(folder, done["cache"], out))
    refused(ModelError, [str(folder)], "evaluate", eval_options(tiny, {"s": folder}, out))
    refused(ModelError, [str(folder)], "evaluate", eval_options(tiny, {}, out, teacher=str(folder)))
    if what != "no tokenizer":
        refused(ModelError, [str(folder)], "export", export_options(folder, out))
    assert not out.exists()


def test_a_cache_that_is_none(done, tmp_path):
    for folder in (tmp_path / "none", done["student"]):
        refused(CacheError, [str(folder)], "recover", recover_options(done["student"], folder, tmp_path / "out"))


def test_what_contradicts_itself(done, tiny, tmp_path):
    out = tmp_path / "out"
    text = {"learn": "ce", "kd_cache_dir": None, "text": TextConfig(dataset=str(tiny.text)), "length": 32}
    plain = recover_options(tiny.teacher, done["cache"], out, train_scales=True, **text)
    refused(ConfigError, ["train_scales"], "recover", plain)
    refused(ConfigError, ["quantised already"], "quantize", quantize_options(tiny, out, model=str(done["student"])))
    hot = recover_options(done["student"], done["cache"], out, objective=ObjectiveConfig(temperature=3.0))
    refused(CacheError, ["temperature", "3"], "recover", hot)
    refused(ModelError, ["nothing to merge"], "export", export_options(tiny.teacher, out))
    twice = replace(eval_options(tiny, {}, out), students=(f"a={done['rough']}", f"a={done['student']}"))
    refused(ConfigError, ["students", "'a'"], "evaluate", twice)
    nowhere = replace(recover_options(done["student"], done["cache"], out).lora, lora_targets="nothing")
    refused(
        ConfigError,
        ["lora_targets", "nothing"],
        "recover",
        recover_options(done["student"], done["cache"], out, lora=nowhere),
    )
    assert not out.exists()


def test_without_matplotlib_runs_complete_and_say_what_is_missing(done, tiny, tmp_path, monkeypatch, capsys):
    def missing(module, extra):
        raise MissingExtraError(f"{module} is not installed: pip install 'qat-lora[{extra}]'")

    monkeypatch.setattr("qat_lora.extras.require", missing)

    def loud(name):
        return replace(part(tmp_path / name), quiet=False)

    short = LoopConfig(batch_size=16, max_steps=1)
    options = recover_options(done["student"], done["cache"], None, loop=short, run=loud("run"))
    call("recover", options)
    call("evaluate", eval_options(tiny, {"r": tmp_path / "run"}, None, run=loud("eval")))
    assert capsys.readouterr().out.count("no picture: matplotlib is not installed: pip install 'qat-lora[plot]'") == 2
    assert not (tmp_path / "run" / "curve.png").exists() and (tmp_path / "eval" / "scores.json").exists()
    before = state_of(tmp_path)
    call("recover", options)  # complete
    assert state_of(tmp_path) == before


def test_experts_of_an_unknown_form_are_refused_before_anything_is_written_and_kept_on_request(
    tiny, tmp_path, monkeypatch
):
    monkeypatch.setattr("qat_lora.layers.experts._is_fused", lambda module: False)
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 32}
    experts = {"num_key_value_heads": 1, "moe_intermediate_size": 32, "intermediate_size": 96, "num_experts": 4}
    model = tmp_path / "mixture"
    Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts)).save_pretrained(model)
    for file in tiny.teacher.glob("tokenizer*"):
        shutil.copyfile(file, model / file.name)
    asked = quantize_options(tiny, tmp_path / "student", model=str(model))
    for dry_run in (True, False):
        with pytest.raises(ModelError, match="67% of the weights of its decoder blocks .* would stay unquantised"):
            call("quantize", asked, dry_run=dry_run)
    assert not (tmp_path / "student").exists()
    student = call("quantize", asked, keep=(r"mlp\.experts",))
    stored = load_file(student / "model.safetensors")
    assert "model.layers.0.self_attn.q_proj.codes" in stored
    assert len(quant_layers(load_model(str(student)).module)) == 4
