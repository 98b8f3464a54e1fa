"""`qat-lora eval` as a whole: protocols against transformers' own forward, several texts, generation, overlap, card."""

import json
import math
from dataclasses import replace

import pytest
import torch
from toy_pipeline import cache_options, call, eval_options, part, quantize_options

from qat_lora.data.sources import TextConfig
from qat_lora.errors import CacheError, ConfigError, MissingExtraError, TextError
from qat_lora.evaluate.health import HealthConfig
from qat_lora.evaluate.report import SCHEMA
from qat_lora.evaluate.tasks import TasksConfig
from qat_lora.models.load import load_model, load_tokenizer, make_qwen3
from qat_lora.options import AuditOptions, RunConfig

SCHEMA_KEYS = ["schema", "setup", "texts", "models", "calibration", "pairs", "domains"]
SCHEMA_KEYS += ["generation", "overlap", "tasks", "damage", "samples"]
KEYS = {"ppl", "nll", "kl", "top1", "tokens", "bits_per_weight", "accuracy", "ece", "interval"}
KEYS |= {"size_mb", "bits_over_all_weights"}


@pytest.fixture(scope="module")
def done(tiny, tmp_path_factory):
    root = tmp_path_factory.mktemp("eval")
    cache = call("build_cache", cache_options(tiny, root / "cache", eval_rows=0, num_rows=None))
    rough = call("quantize", quantize_options(tiny, root / "rough"))
    held_out = sorted(tiny.held_out.iterdir())[0]
    options = replace(
        eval_options(tiny, {"rough": rough, "same": tiny.teacher}, root / "eval"),
        text=TextConfig(dataset=str(held_out)),
        domain=(f"seen={tiny.text}", f"new={tiny.held_out}"),
        eval_rows=20,
        kd_cache_dir=str(cache),
        health=HealthConfig(generate=2, generate_tokens=8, prompt_tokens=4),
    )
    scores = call("evaluate", options)
    return {"root": root, "cache": cache, "rough": rough, "options": options, "scores": scores}


def test_the_report_holds_what_the_schema_says(done):
    out = done["root"] / "eval"
    report = json.loads((out / "report.json").read_text())
    assert list(report) == SCHEMA_KEYS and report["schema"] == SCHEMA
    assert json.loads((out / "scores.json").read_text()) == report["models"] == done["scores"]
    assert list(report["models"]) == ["teacher", "rough", "same"]
    for name, of in report["models"].items():
        assert set(of) == KEYS - ({"bits_per_weight"} if name == "teacher" else set())
        for figure, (low, high) in of["interval"].items():
            assert low <= of[figure] <= high or name != "rough", (name, figure)
    assert report["models"]["same"]["kl"] == 0 and report["models"]["same"]["interval"]["kl"] == [0, 0]
    assert [(p["first"], p["second"]) for p in report["pairs"]] == [("rough", "same")]
    assert report["pairs"][0]["kl"]["clear"] and report["pairs"][0]["kl"]["difference"] < 0
    assert {path.name for path in out.iterdir()} >= {"scores.md", "scores.png", "report.html"}
    assert {name: len(texts) for name, texts in report["samples"].items()} == dict.fromkeys(report["models"], 2)
    assert call("evaluate", done["options"]) == done["scores"], "the second time it is read"


def test_in_bfloat16_too(done, tiny):
    """The same figures but for the rounding of the forwards; with log-probabilities in bfloat16 KL is far off."""
    options = eval_options(tiny, {"rough": done["rough"]}, done["root"] / "bf16", eval_rows=20)
    whole = call("evaluate", options)["rough"]
    options = replace(options, run=replace(options.run, out=str(done["root"] / "bf16-2"), dtype="bfloat16"))
    half = call("evaluate", options)["rough"]
    assert half["kl"] == pytest.approx(whole["kl"], rel=0.02) and half["nll"] == pytest.approx(whole["nll"], abs=0.01)


def test_texts_are_scored_apart_and_together(done, tiny):
    report = json.loads((done["root"] / "eval" / "report.json").read_text())
    names = [sorted(tiny.held_out.iterdir())[0].name, "seen", "new"]
    assert list(report["domains"]) == list(report["texts"]) == names
    for model, whole in report["models"].items():
        parts = [of[model] for of in report["domains"].values()]
        assert whole["tokens"] == sum(of["tokens"] for of in parts)
        for figure in ("nll", "kl", "top1"):
            mean = math.fsum(of[figure] * of["tokens"] for of in parts) / whole["tokens"]
            assert whole[figure] == pytest.approx(mean, abs=1e-12)


def test_the_overlap_with_the_cache_is_found_and_warned_of(done, tiny):
    report = json.loads((done["root"] / "eval" / "report.json").read_text())
    seen = report["overlap"]["by_text"]
    assert seen["seen"] > 0.9 and seen["new"] < 0.05, seen
    assert report["overlap"]["cache_tokens"] > 0
    assert "Warning" in (done["root"] / "eval" / "scores.md").read_text()
    audit = AuditOptions(
        kd_cache_dir=str(done["cache"]), teacher=str(tiny.teacher), rows=2, run=RunConfig(device="cpu", quiet=True)
    )
    by_path = {
        path: call("audit_cache", audit, text=str(path))["overlap"]["share"] for path in (tiny.text, tiny.held_out)
    }
    assert by_path[tiny.text] > 0.95 and by_path[tiny.held_out] == pytest.approx(seen["new"], abs=0.02)


def test_generation_is_compared_with_the_teacher(done):
    report = json.loads((done["root"] / "eval" / "report.json").read_text())
    generation = report["generation"]
    assert list(generation) == ["teacher", "rough", "same"] and generation["same"] == generation["teacher"]


def nll_of(module, windows):
    """Sum of losses and tokens by transformers' own forward and float64 from its logits on: (ids, first counted)."""
    losses = []
    for ids, first in windows:
        with torch.no_grad():
            log_probs = torch.log_softmax(module(torch.tensor([ids])).logits[0].double(), -1)
        losses += [-float(log_probs[i - 1, ids[i]]) for i in range(first, len(ids))]
    return math.fsum(losses) / len(losses), len(losses)


def test_sliding_is_the_perplexity_of_the_guide(done, tiny):
    options = replace(done["options"], domain=(), health=HealthConfig(), kd_cache_dir=None)
    options = replace(
        options, students=(), protocol="sliding", stride=5, eval_rows=0, run=part(done["root"] / "sliding")
    )
    found = call("evaluate", options)["teacher"]
    tokenizer, module = load_tokenizer(tiny.teacher), load_model(str(tiny.teacher)).module
    text = sorted(tiny.held_out.iterdir())[0].read_text()
    ids = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    windows, end = [], 0
    for begin in range(0, len(ids), 5):  # as https://huggingface.co/docs/transformers/perplexity has it
        before, end = end, min(begin + 32, len(ids))
        windows.append((ids[begin:end], max(1, before - begin)))
        if end == len(ids):
            break
    nll, tokens = nll_of(module, windows)
    assert found["tokens"] == tokens == len(ids) - 1
    assert found["nll"] == pytest.approx(nll, abs=1e-6)
    packed = call("evaluate", replace(options, protocol="packed", stride=None, run=part(done["root"] / "packed")))
    assert packed["teacher"]["nll"] != pytest.approx(nll, abs=1e-3), "then the protocols could not be told apart"


def test_blocks_of_2048_are_those_of_the_papers(tiny, tmp_path):
    tokenizer = load_tokenizer(tiny.teacher)
    teacher = tmp_path / "long"
    torch.manual_seed(0)
    model = make_qwen3(teacher, 320, hidden=16, layers=1, heads=1, kv_heads=1, mlp=16, max_position_embeddings=2048)
    model.module.save_pretrained(teacher)
    tokenizer.save_pretrained(teacher)
    options = replace(eval_options(tiny, {}, tmp_path / "e"), teacher=str(teacher), protocol="blocks2048")
    options = replace(options, text=TextConfig(dataset=str(tiny.text)), batch_size=1)
    found = call("evaluate", options)["teacher"]
    texts = [file.read_text() for file in sorted(tiny.text.iterdir())]
    ids = tokenizer("\n\n".join(texts), verbose=False)["input_ids"]
    blocks = [(ids[i : i + 2048], 1) for i in range(0, len(ids) - 2047, 2048)]
    nll, tokens = nll_of(load_model(str(teacher)).module, blocks)
    assert blocks and found["tokens"] == tokens == 2047 * len(blocks)
    assert found["nll"] == pytest.approx(nll, abs=1e-6)


def refused(error, says, options, **changed):
    with pytest.raises(error) as caught:
        call("evaluate", replace(options, **changed))
    assert all(word in str(caught.value) for word in says), caught.value


def test_what_cannot_be_is_refused_before_anything_is_written(done, tiny, tmp_path):
    out = tmp_path / "out"
    options = eval_options(tiny, {}, out)
    refused(ConfigError, ["length", "2048", "256"], options, protocol="blocks2048")
    refused(ConfigError, ["stride", "1 to 31"], options, protocol="sliding", stride=32)
    refused(ConfigError, ["stride", "packed"], options, stride=3)
    refused(ConfigError, ["domain", "'a'"], options, domain=(f"a={tiny.text}", f"a={tiny.held_out}"))
    refused(TextError, ["none.txt"], options, domain=(f"a={tmp_path / 'none.txt'}",))
    refused(
        TextError,
        ["prompt_tokens", "33"],
        options,
        health=HealthConfig(generate=1, generate_tokens=4, prompt_tokens=33),
    )
    refused(ConfigError, ["generate_tokens", "288", "256"], options, health=HealthConfig(generate=1))
    refused(CacheError, ["no-cache"], options, kd_cache_dir=str(tmp_path / "no-cache"))
    assert not out.exists()


def test_tasks_without_the_harness_name_the_extra(tiny, tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    options = eval_options(tiny, {}, tmp_path / "out", harness=TasksConfig(tasks=("arc_easy",)))
    refused(MissingExtraError, ["lm_eval", "qat-lora[evals]"], options)
    assert not (tmp_path / "out").exists()
