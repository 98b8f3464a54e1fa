"""Mixtures of experts through the commands: quantised, recovered, scored, exported."""

import json

import pytest
import torch
from toy_mixture import save_mixture
from toy_pipeline import cache_options, call, eval_options, export_options, part, quantize_options, recover_options

from qat_lora.layers.convert import lora_layers, quant_layers
from qat_lora.models.load import load_model
from qat_lora.models.student import open_student


@pytest.fixture(scope="module")
def mixture(tiny, tmp_path_factory):
    """A teacher that is a mixture, and its cache."""
    root = tmp_path_factory.mktemp("mixture")
    teacher = save_mixture("Qwen3Moe", root / "teacher", tiny)
    mine = tiny._replace(teacher=teacher)
    return mine, call("build_cache", cache_options(mine, root / "cache"))


@pytest.fixture(scope="module")
def made(mixture, tmp_path_factory):
    mine, cache = mixture
    return call("quantize", quantize_options(mine, tmp_path_factory.mktemp("m") / "s", cache, init="descent"))


def test_experts_are_quantised_one_by_one_and_recovered(mixture, made, tmp_path, capsys):
    mine, cache = mixture
    result = json.loads((made / "result.json").read_text())
    assert result["quantised_share"] > 0.95 and result["unreached"] == []
    layers = quant_layers(load_model(str(made)).module)
    assert len(layers) == 2 * (4 + 3 * 6) and "model.layers.1.mlp.experts.5.down_proj" in layers
    run = call("recover", recover_options(made, cache, tmp_path / "run"))
    adapted = open_student(str(run)).model
    assert len(lora_layers(adapted.module)) == len(layers)
    call("evaluate", eval_options(mine, {"before": made, "after": run}, tmp_path / "eval"))
    scores = json.loads((tmp_path / "eval" / "scores.json").read_text())
    print(scores)
