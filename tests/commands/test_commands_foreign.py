"""A recovery adapter for a GGUF file that exists: trained, scored, continued, exported, and what is refused."""

import json
import shutil
from dataclasses import replace

import gguf
import pytest
import torch
from safetensors.torch import load_file
from toy_pipeline import cache_options, call, eval_options, export_options, part, quantize_options, recover_options

from qat_lora.cli import main
from qat_lora.errors import ConfigError, ModelError, OutputExistsError
from qat_lora.export.gguf import save_base
from qat_lora.files.checksums import checkpoint_sha256
from qat_lora.layers.convert import quant_layers
from qat_lora.models.load import load_model, load_tokenizer, make_qwen3, make_tokenizer
from qat_lora.models.student import open_student
from qat_lora.options import GenerateOptions
from qat_lora.plan.inspect_file import inspect


@pytest.fixture(scope="module")
def done(tiny, tmp_path_factory):
    """A cache, a GGUF file that somebody has, and a run on it."""
    root = tmp_path_factory.mktemp("foreign")
    cache = call("build_cache", cache_options(tiny, root / "cache"))
    rough = call("quantize", quantize_options(tiny, root / "rough"))
    file = root / "theirs" / "model-Q4_0.gguf"
    file.parent.mkdir()
    exported = call("export", export_options(rough, root / "gguf", form="gguf"))
    shutil.copyfile(exported / "base.gguf", file)
    return {"root": root, "cache": cache, "rough": rough, "file": file, "options": options(root, cache, file)}


def options(root, cache, file, out="run", **changed):
    return recover_options(file, cache, root / out, **changed)


@pytest.fixture(scope="module")
def run(done):
    return call("recover", done["options"])


def test_its_weights_are_the_frozen_base(done):
    theirs = load_model(str(done["file"]), dequantize=True).module.state_dict()
    for name, layer in quant_layers(load_model(str(done["rough"])).module).items():
        assert torch.equal(theirs[f"{name}.weight"], layer.weight), name


def test_the_adapter_brings_it_nearer_and_llama_cpp_gets_the_same_factors(tiny, done, run):
    students = {"base": done["file"], "recovered": run}
    scores = call("evaluate", eval_options(tiny, students, done["root"] / "eval"))
    assert scores["recovered"]["kl"] < scores["base"]["kl"]
    best = run / "best"
    assert json.loads((best / "adapter_config.json").read_text())["base_model_name_or_path"] == str(done["file"])
    assert json.loads((best / "qat_lora.json").read_text())["base_sha256"] == checkpoint_sha256(done["file"])
    assert not list(run.rglob("*base*"))
    factors = load_file(best / "adapter_model.safetensors")
    tensors = {t.name: torch.tensor(t.data) for t in gguf.GGUFReader(best / "adapter.gguf").tensors}
    assert len(tensors) == len(factors)
    a = factors["base_model.model.model.layers.1.mlp.down_proj.lora_A.weight"]
    assert torch.equal(tensors["blk.1.ffn_down.weight.lora_a"].half(), a)


def test_a_base_that_is_scored_without_the_adapter_beside_it_says_so(tiny, done, run, tmp_path, capsys):
    for file in (done["file"], run / "best" / "adapter.gguf"):
        shutil.copyfile(file, tmp_path / file.name)
    options = eval_options(tiny, {"served": tmp_path / done["file"].name}, tmp_path / "eval")
    call("evaluate", options, run=replace(options.run, quiet=False))
    assert "served is scored without the adapter.gguf beside it; for both, name" in capsys.readouterr().out


def test_the_run_is_used_as_any_other(done, run):
    text = call("generate", GenerateOptions(student=str(run), prompt="the", max_new_tokens=3, run=part(None)))
    assert isinstance(text, str)
    merged = call("export", export_options(run, done["root"] / "merged"))
    dense, student = load_model(str(merged)), open_student(str(run)).model
    ids, documents = torch.arange(8)[None], torch.zeros(1, 8, dtype=torch.int32)
    assert torch.allclose(dense.hidden(ids, documents), student.hidden(ids, documents), atol=1e-5)
    with pytest.raises(ConfigError, match=r"llama-server -m \S+gguf --lora \S+adapter.gguf"):
        call("export", export_options(run, done["root"] / "no", form="gguf"))
    assert call("recover", done["options"]) == run  # complete already


def test_a_changed_file_is_another_base(done, run, tmp_path):
    kept = done["file"].read_bytes()
    try:
        done["file"].write_bytes(kept[:-8] + bytes(8))
        with pytest.raises(OutputExistsError, match="base_sha256"):
            call("recover", done["options"])
        with pytest.raises(ModelError, match="another base"):
            open_student(str(run))
    finally:
        done["file"].write_bytes(kept)


def test_its_tokenizer_is_the_caches_or_it_is_refused(tiny, done, tmp_path):
    file = tmp_path / "x.gguf"
    shutil.copyfile(done["file"], file)
    make_tokenizer(["another text altogether"] * 9, 300, tmp_path)
    start = options(tmp_path, done["cache"], file)
    with pytest.raises(ModelError, match=r"token \d+ is '.*' in .*x.gguf and '.*' in"):
        call("recover", start)
    with pytest.raises(ModelError, match="--tokenizer FOLDER"):
        call("recover", start, tokenizer=str(tmp_path / "gone"))
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="tokenizer: .* has its own"):
        call("recover", options(tmp_path, done["cache"], done["rough"]), tokenizer=str(tiny.teacher))
    with pytest.raises(ConfigError, match="train_norms"):
        call("recover", start, train_norms=True, tokenizer=str(tiny.teacher))
    with pytest.raises(ModelError, match="is quantised"):
        call("quantize", quantize_options(tiny, tmp_path / "q"), model=str(file))


def doctor(capsys, *words):
    with pytest.raises(SystemExit) as stop:
        main(["doctor", *map(str, words), "--json"])
    return stop.value.code, json.loads(capsys.readouterr().out)


def test_doctor_says_what_a_file_is_and_whether_an_adapter_fits_it(tiny, done, run, tmp_path, capsys):
    best = run / "best"
    code, report = doctor(capsys, done["file"])
    assert code == 0 and report["served_by"] == "llama.cpp, Ollama" and report["tokenizer"].endswith("320 tokens")
    bits = {group["name"]: group["bits"] for group in report["groups"]}
    assert bits["blk.*.ffn_up.weight"] == 4.5 and bits["token_embd.weight"] == 4.5
    assert report["weights"] == sum(p.numel() for p in load_model(str(tiny.teacher)).module.parameters())
    for words in ((done["file"], best / "adapter.gguf"), (done["file"], best), (best,)):
        assert doctor(capsys, *words)[0] == 0
    other, labelled = tmp_path / "x.gguf", tmp_path / "model-Q2_K.gguf"
    whole = load_model(str(tiny.teacher))
    save_base(whole, {}, load_tokenizer(tiny.teacher), other, "float32", "x")
    shutil.copyfile(done["file"], labelled)
    code, report = doctor(capsys, labelled)
    assert code == 1 and report["problems"] == [
        "the name model-Q2_K.gguf says Q2_K, but most weights of its layers are Q4_0"
    ]
    code, report = doctor(capsys, other, best / "adapter.gguf")
    assert code == 1 and "trained on another base" in report["problems"][0]
    wider = make_qwen3(tmp_path / "w", 320, hidden=64, layers=1, heads=2, kv_heads=1, mlp=128)
    make_tokenizer(["a b"], 300, tmp_path / "w")
    save_base(wider, {}, load_tokenizer(tmp_path / "w"), other, "float32", "x")
    said = inspect(str(other), str(best / "adapter.gguf"))["problems"]
    assert "changes blk.0.ffn_down.weight (64, 96), and" in said[1] and "has it as (64, 128)" in said[1]


def test_doctor_reads_folders(tiny, done, capsys):
    code, report = doctor(capsys, done["rough"])
    assert code == 0 and "import qat_lora" in report["served_by"] and report["tokenizer"] == "BPE, 320 tokens"
    assert {group["type"] for group in report["groups"]} == {"U8", "F16", "F32"}
    with pytest.raises(ModelError, match="neither a PEFT folder nor"):
        inspect(str(tiny.teacher), str(tiny.held_out))
    with pytest.raises(SystemExit):
        main(["doctor", str(done["file"])])
    assert "bits a weight, embedding included" in capsys.readouterr().out
