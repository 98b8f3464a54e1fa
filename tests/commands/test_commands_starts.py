"""Codes that were chosen beside an adapter: every command opens them with its start, or says that it does without."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from toy_pipeline import (
    cache_options,
    call,
    eval_options,
    export_options,
    part,
    quantize_options,
    recover_options,
)

from qat_lora.commands.export import push
from qat_lora.commands.generate import generate
from qat_lora.data.sources import TextConfig
from qat_lora.errors import ConfigError, ModelError
from qat_lora.files.gguf_header import read_header
from qat_lora.layers.convert import lora_layers, quant_layers
from qat_lora.layers.lora import LoraConfig
from qat_lora.models.adapter import STARTS, joint_ranks
from qat_lora.models.load import load_model
from qat_lora.models.student import open_student
from qat_lora.options import GenerateOptions, PushOptions, QatOptions
from qat_lora.plan.forward import plan_export
from qat_lora.plan.training import plan_recover
from qat_lora.quant.presets import TargetConfig
from qat_lora.runtime.launch.select import select_runtime
from qat_lora.train.loop import LoopConfig

ONCE = LoopConfig(batch_size=4, max_steps=1)
BESIDE = "with its adapter start of rank 3"


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory):
    """A cache, students with and without a joint adapter, and a run of the first whose `start` is not trained."""
    root = tmp_path_factory.mktemp("starts")
    cache = call("build_cache", cache_options(tiny, root / "cache"))
    joint = quantize_options(tiny, root / "joint", cache, joint_rank=3, start_rank=8, preset="q2_0")
    student = call("quantize", joint)
    alone = call("quantize", replace(joint, joint_rank=0, run=part(root / "alone")))
    run = recover_options(student, cache, root / "run", lora=LoraConfig(recovery_r=3), loop=ONCE)
    start = call("recover", run) / "start"
    return {"cache": cache, "joint": student, "alone": alone, "start": start}


def heard(capsys, name, options):
    """Call a command that is not quiet; return the lines that it prints."""
    capsys.readouterr()
    call(name, replace(options, run=replace(options.run, quiet=False)))
    return capsys.readouterr().out.splitlines()


def test_a_folder_is_opened_with_the_start_that_its_codes_were_chosen_beside(made):
    stored = load_file(made["joint"] / STARTS)
    opened = open_student(str(made["joint"]))
    layers = lora_layers(opened.model.module)
    assert layers.keys() == quant_layers(opened.model.module).keys()
    for name, layer in layers.items():
        assert torch.equal(layer.lora_A, stored[f"{name}.lora_A"][:3].float())
        assert torch.equal(layer.lora_B, stored[f"{name}.lora_B"][:, :3].float()) and layer.scaling == 1.0
        assert not layer.lora_A.requires_grad
    assert opened.start_text == BESIDE
    run = open_student(str(made["start"]))
    assert opened.bits_per_weight == run.bits_per_weight and run.start is None
    assert opened.sizes["size_mb"] == pytest.approx(run.sizes["size_mb"], abs=0.01)  # but for a file's header
    bare = load_model(str(made["joint"]))
    assert not lora_layers(bare.module)  # what `recover` loads, which puts the start on it itself
    alone = open_student(str(made["alone"]))
    assert (made["alone"] / STARTS).is_file() and joint_ranks(made["alone"]) == {}
    assert not lora_layers(alone.model.module) and alone.start is None and alone.start_text == ""
    assert opened.bits_per_weight > alone.bits_per_weight


def test_scores_are_those_of_the_untrained_run(made, tiny, tmp_path, capsys):
    students = {"joint": made["joint"], "start": made["start"], "alone": made["alone"]}
    said = heard(capsys, "evaluate", eval_options(tiny, students, tmp_path / "eval"))
    assert [line for line in said if "adapter start" in line] == [f"joint is scored {BESIDE}"]
    scores = json.loads((tmp_path / "eval" / "scores.json").read_text())
    for figure in ("kl", "ppl", "top1", "bits_per_weight"):
        assert scores["joint"][figure] == scores["start"][figure] != scores["alone"][figure]
    bare = tmp_path / "bare"
    bare.mkdir()
    for file in made["joint"].iterdir():
        if file.is_file() and file.name not in (STARTS, "SHA256SUMS", "qat_lora.json"):
            (bare / file.name).write_bytes(file.read_bytes())
    without = call("evaluate", eval_options(tiny, {"bare": bare}, tmp_path / "without"))
    assert scores["joint"]["kl"] < without["bare"]["kl"]


@pytest.mark.parametrize(
    "form", ["merged", "adapter", "compressed-tensors", "gguf", "gguf-merged", "gptq", "mlx", "pt"]
)
def test_exports_are_those_of_the_untrained_run(made, tiny, tmp_path, form, capsys):
    pytest.importorskip("gguf")
    pytest.importorskip("compressed_tensors")
    text = TextConfig(dataset=str(tiny.held_out))
    outs = {name: tmp_path / name for name in ("joint", "start")}
    for name, out in outs.items():
        given = export_options(made[name], out, form=form, text=text, length=32, eval_rows=8)
        said = heard(capsys, "export", given)
        told = [line for line in said if line.endswith(f"is exported {BESIDE}")]
        assert len(told) == (name == "joint")
    names = [sorted(str(file.relative_to(out)) for file in out.rglob("*")) for out in outs.values()]
    assert names[0] == names[1]
    cards = []
    for name in names[0]:
        ours, theirs = (out / name for out in outs.values())
        if ours.suffix == ".gguf":
            for tensor, held in read_header(ours).tensors.items():
                assert held == read_header(theirs).tensors[tensor]
            assert ours.read_bytes()[-1000:] == theirs.read_bytes()[-1000:]
        elif ours.suffix in (".safetensors", ".pt"):
            assert ours.read_bytes() == theirs.read_bytes(), name
        elif ours.name in ("adapter_config.json", "qat_lora.json"):
            assert json.loads(ours.read_text()) == json.loads(theirs.read_text()), name
        elif ours.name == "README.md":
            cards = [file.read_text() for file in (ours, theirs)]
    usages = [card.partition("```python")[2].partition("```")[0] for card in cards]
    assert usages[0] == usages[1] and "none, its adapter is not trained" in cards[0]
    logits = [of_some_tokens(open_student(str(out)).model) for out in outs.values()]
    assert torch.equal(*logits)
    options = export_options(made["joint"], tmp_path / "planned", form=form)
    written = 1e6 * json.loads((outs["joint"] / "result.json").read_text())["weights_mb"]
    assert 0.9 * plan_export(options).report["disk_bytes"] < written


def of_some_tokens(model):
    with torch.no_grad():
        return model.logits(model.hidden(torch.arange(16)[None], torch.zeros(1, 16, dtype=torch.int32))[0])


def test_an_export_of_codes_that_stand_alone_has_no_adapter(made, tmp_path):
    with pytest.raises(ModelError, match="has no adapter; give the folder of a `qat-lora recover` run"):
        call("export", export_options(made["alone"], tmp_path / "pair", form="adapter"))
    pytest.importorskip("gguf")
    out = call("export", export_options(made["alone"], tmp_path / "out", form="gguf"))
    assert sorted(file.name for file in out.glob("*.gguf")) == ["base.gguf"]


def test_what_is_exported_goes_to_the_hub_as_a_pair(made, tmp_path):
    settings = {"form": "adapter", "license": "mit"}
    out = call("export", export_options(made["joint"], tmp_path / "pair", **settings))
    options = PushOptions(folder=str(out), repo="me/toy", dry_run=True, run=part(None))
    sent = push(options, select_runtime("cpu"))["files"]
    assert {"adapter_model.safetensors", "base/model.safetensors", "adapter_config.json"} <= sent.keys()


def test_texts_are_those_of_the_untrained_run(made, capsys):
    texts = []
    for name in ("joint", "start"):
        options = GenerateOptions(student=str(made[name]), prompt="the model", max_new_tokens=8, run=part(None))
        texts.append(generate(options, select_runtime("cpu")))
    assert texts[0] == texts[1] and not capsys.readouterr().err
    loud = replace(part(None), quiet=False)
    options = GenerateOptions(student=str(made["joint"]), prompt="the", max_new_tokens=2, run=loud)
    generate(options, select_runtime("cpu"))
    printed = capsys.readouterr()
    assert printed.err == f"{made['joint']} is opened {BESIDE}\n" and "adapter" not in printed.out


def test_quantize_says_what_its_codes_were_chosen_beside(made, tiny, tmp_path, capsys):
    asked = quantize_options(tiny, tmp_path / "q", made["cache"], joint_rank=2)
    said = heard(capsys, "quantize", asked)
    assert any(
        line.startswith("codes were chosen for an adapter of rank 2, with whose start this folder opens")
        for line in said
    )
    said = heard(capsys, "quantize", replace(asked, joint_rank=0, run=part(tmp_path / "alone")))
    assert not any("codes were chosen" in line for line in said)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"lora": LoraConfig(recovery_r=3, mlp_only=True)}, ["8 of 14 layers, such as model.layers.0.self_attn"]),
        ({"lora": LoraConfig(recovery_r=3, lora_targets="q_proj")}, ["12 of 14 layers"]),
        ({"lora": LoraConfig(recovery_r=3), "start": "zero"}, ["the adapter starts at zero; leave out --start zero"]),
        ({"lora": LoraConfig(recovery_r=2)}, ["rank 3; quantize --joint-rank 2 ends at a lower KL"]),
        ({"lora": LoraConfig(recovery_r=2, mlp_only=True)}, ["have no adapter", "ends at a lower KL"]),
        ({"lora": LoraConfig(recovery_r=4)}, []),
    ],
)
def test_recover_warns_of_layers_that_lack_their_adapter(made, tmp_path, capsys, changed, words):
    options = recover_options(made["joint"], made["cache"], tmp_path / "run", loop=ONCE, **changed)
    warnings = [line for line in heard(capsys, "recover", options) if line.startswith("warning: codes")]
    assert len(warnings) == len(words)
    for word, warning in zip(words, warnings, strict=True):
        assert word in warning and warning.startswith("warning: codes were chosen for rank 3")
    if not words:
        other = replace(options, checkpoint=str(made["alone"]), start="zero", run=part(tmp_path / "other"))
        assert not any("warning: codes" in line for line in heard(capsys, "recover", other))


def test_qat_says_that_it_drops_the_adapter(made, tmp_path, capsys):
    for name, warnings in (("joint", 1), ("alone", 0)):
        run = part(tmp_path / name)
        options = QatOptions(checkpoint=str(made[name]), kd_cache_dir=str(made["cache"]), loop=ONCE, run=run)
        said = [line for line in heard(capsys, "qat", options) if line.startswith("warning: codes")]
        assert len(said) == warnings
        for line in said:
            assert "beside an adapter of rank 3, which qat drops; quantize --joint-rank 0" in line
    trained = open_student(str(tmp_path / "joint" / "best"))
    assert trained.start is None and not lora_layers(trained.model.module)


def test_ranks_by_layer_are_those_of_the_target(made, tiny, tmp_path, capsys):
    target = TargetConfig("52kB", engine="llama.cpp")
    asked = quantize_options(tiny, tmp_path / "q", made["cache"], start_rank=40, calibration_rows=8, target=target)
    student = call("quantize", asked)
    chosen = json.loads((student / "result.json").read_text())["adapter_ranks"]
    opened = open_student(str(student))
    ranks = {name: len(layer.lora_A) for name, layer in lora_layers(opened.model.module).items()}
    assert ranks == {name: rank for name, rank in chosen.items() if rank} and len({*ranks.values()}) > 1
    assert opened.start_text == f"with its adapter start of rank {max(ranks.values())} or less"
    options = recover_options(student, made["cache"], tmp_path / "run", loop=ONCE, lora=LoraConfig())
    start = call("recover", options) / "start"
    assert torch.equal(of_some_tokens(opened.model), of_some_tokens(open_student(str(start)).model))
    pairs = [tmp_path / "pair", tmp_path / "pair-of-run"]
    for folder, out in zip((student, start), pairs, strict=True):
        call("export", export_options(folder, out, form="adapter"))
    for name in ("adapter_config.json", "adapter_model.safetensors", "qat_lora.json"):
        assert len({(out / name).read_bytes() for out in pairs}) == 1, name
    low = replace(options, lora=LoraConfig(recovery_r=1), run=part(tmp_path / "low"))
    said = [line for line in heard(capsys, "recover", low) if line.startswith("warning: codes")]
    assert said == [
        f"warning: codes were chosen for rank {max(ranks.values())} or less; leave out --recovery-r, which gives less"
    ]


def test_starts_that_are_damaged_are_refused(made, tmp_path):
    folder = tmp_path / "q"
    folder.mkdir()
    for file in made["joint"].iterdir():
        if file.is_file() and file.name not in ("SHA256SUMS", "qat_lora.json"):
            (folder / file.name).write_bytes(file.read_bytes())
    (folder / STARTS).write_bytes((folder / STARTS).read_bytes()[:300])
    with pytest.raises(ModelError, match=f"start: .*{STARTS} cannot be read .*quantise the model again"):
        open_student(str(folder))


# A student that is the teacher: a forgotten --checkpoint.


@pytest.mark.parametrize("given", ["model", "checkpoint"])
def test_the_teacher_itself_is_no_student(made, tiny, tmp_path, given):
    names = {"model": None, "checkpoint": None, given: str(tiny.teacher)}
    options = replace(recover_options("", made["cache"], tmp_path / "run"), **names)
    words = "is the cache's teacher itself, so there is nothing to recover; quantise it .* as --checkpoint"
    for scales in (False, True):
        with pytest.raises(ConfigError, match=words) as caught:
            call("recover", options, train_scales=scales)
        assert "\n" not in str(caught.value) and f"quantize --model {tiny.teacher})" in str(caught.value)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match=words):
        plan_recover(options)


def test_texts_and_other_models_train_as_before(made, tiny, tmp_path):
    text = {"learn": "ce", "kd_cache_dir": None, "text": TextConfig(dataset=str(tiny.text)), "length": 32}
    plain = recover_options(None, None, "", checkpoint=None, model=str(tiny.teacher), loop=ONCE)
    assert Path(call("recover", replace(plain, **text, run=part(tmp_path / "ce"))), "best").is_dir()
    quantised = recover_options(made["joint"], made["cache"], tmp_path / "run", loop=ONCE)
    assert plan_recover(quantised).report["trained"] > 0
