"""The card says what is known, and neither guesses nor tells where things lay."""

import json

import pytest
import yaml

from qat_lora.errors import ConfigError, DamagedFileError, ModelError
from qat_lora.export.card import DATASET, MODEL, Card, labelled, model_card, read_origin, read_scores
from qat_lora.export.forms import FORMS, display_name
from qat_lora.export.plain import save_adapter_copy, save_pair
from qat_lora.files.outputs import claim
from qat_lora.models.adapter import CONFIG


def origin(model="unknown", preset="none"):
    return {MODEL: model, "teacher": "unknown", "data of the recovery": "unknown", "preset": preset}


def card(**changed):
    facts = {
        "name": "tiny", "form": "merged", "origin": origin(), "base_sha256": "f" * 64, "bits_per_weight": None,
        "result": {"layers_rounded": 3, "nothing": None}, "command": "qat-lora export", "usage": "import it",
    }  # fmt: skip
    return model_card(Card(**{**facts, **changed}))


def test_unknown_is_said():
    text = card()
    assert text.count("unknown") == 3 and "| licence | not given" in text and "None were given" in text
    assert "| layers rounded | 3 |" in text and "nothing" not in text
    front = yaml.safe_load(text.split("---\n")[1])
    assert front["license"] == "other" and "base_model" not in front


def test_sizes_are_shown_with_their_unit():
    found = labelled({"weights_mb": 0.939, "layers_rounded": 0, "kl_of_rounding": None})
    assert found == {"weights": "0.939 MB", "layers rounded": "0"}
    assert "| weights | 0.939 MB |" in card(result={"weights_mb": 0.939})


def test_a_hub_model_is_named():
    front = yaml.safe_load(card(origin=origin("Qwen/Qwen3-0.6B")).split("---\n")[1])
    assert front["base_model"] == "Qwen/Qwen3-0.6B"


SCORES = {
    "teacher": {"ppl": 3.0, "kl": 0.0, "top1": 1.0, "accuracy": 0.5, "ece": 0.01},
    "tiny": {"ppl": 3.5, "kl": 0.25, "top1": 0.75, "accuracy": 0.5, "ece": 0.01},
    "other": {"ppl": 4.5, "kl": 0.5, "top1": 0.5, "accuracy": 0.5, "ece": 0.01},
}


@pytest.mark.parametrize(("form", "relation"), [("adapter", "adapter"), ("gguf", "quantized"), ("merged", "quantized")])
def test_the_hub_reads_what_it_is_made_of_and_its_scores(form, relation):
    """By the Hub's own reader: base model, data, and the scores of this model among several."""
    hub = pytest.importorskip("huggingface_hub")
    text = card(form=form, origin=origin("Qwen/Qwen3-0.6B") | {DATASET: "Salesforce/wikitext"}, scores=SCORES)
    data = hub.ModelCard(text).data
    assert (data.base_model, data["base_model_relation"], data.datasets) == (
        "Qwen/Qwen3-0.6B", relation, ["Salesforce/wikitext"],
    )  # fmt: skip
    found = {(result.metric_type, result.metric_value) for result in data.eval_results}
    assert found == {("ppl", 3.5), ("kl", 0.25), ("top1", 0.75)} and data.model_name == "tiny"
    assert "| tiny" in text and "| other" in text


def test_scores_of_nobody_in_particular_are_a_table_only():
    strangers = {name: of for name, of in SCORES.items() if name != "tiny"}
    assert "kl" in card(name="x", scores=strangers).split("---\n")[1]  # the one student is meant
    strangers["third"] = strangers["other"]
    text = card(name="x", scores=strangers)
    assert "model-index" not in text and "| third" in text


@pytest.mark.parametrize("form", FORMS)
def test_every_form_says_how_it_is_used(form):
    text = card(form=form, notes=["not run in vLLM"])
    assert "\n```python\nimport it\n```\n" in text and "* not run in vLLM" in text and f"| form | {form} |" in text


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("/home/me/model", "model"),
        ("./runs/a", "a"),
        ("a/b/c", "c"),
        ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
        ("x", "x"),
    ],
)
def test_paths_are_cut(path, wanted):
    assert display_name(path) == wanted


def test_origin_without_run_or_cache(tmp_path):
    class Config:
        quantization_config = {"preset": {"name": "w2g64"}, "details": {"model": str(tmp_path)}}

    adapter = tmp_path / "run" / "best"
    adapter.mkdir(parents=True)
    (tmp_path / "run" / "config.yaml").write_text("kd_cache_dir: /gone\n")
    assert read_origin(Config(), adapter) == origin(tmp_path.name, "w2g64")
    assert read_origin(object(), None) == origin()
    for damaged in ("a: b: c\n", "- 1\n", "x\n", "[" * 5000, "a: !!python/object:x.y 1\n"):
        (tmp_path / "run" / "config.yaml").write_text(damaged)
        assert read_origin(Config(), adapter) == origin(tmp_path.name, "w2g64")
    claim(tmp_path / "made", "recover", {}, False)
    (tmp_path / "made" / "best").mkdir()
    (tmp_path / "made" / "config.yaml").write_text("a: b: c\n")
    with pytest.raises(DamagedFileError, match=r"config.yaml: is not valid YAML") as caught:
        read_origin(Config(), tmp_path / "made" / "best")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("content", [None, "", "[1]", '{"teacher": 1}'])
def test_scores_that_are_none(tmp_path, content):
    if content is not None:
        (tmp_path / "scores.json").write_text(content)
    with pytest.raises(ConfigError, match="scores: .*qat-lora eval"):
        read_scores(str(tmp_path))


def test_a_pair_of_strangers_is_refused(adapted, student, tiny, tmp_path):
    _, adapter = adapted
    with pytest.raises(ModelError, match="belongs to another base"):
        save_pair(adapter, tiny.teacher, tmp_path / "pair")
    (tmp_path / "new").mkdir()
    save_adapter_copy(adapter, tmp_path / "new", "..", "a" * 64)
    assert json.loads((tmp_path / "new" / CONFIG).read_text())["base_model_name_or_path"] == ".."
    assert json.loads((tmp_path / "new" / "qat_lora.json").read_text())["base_sha256"] == "a" * 64
