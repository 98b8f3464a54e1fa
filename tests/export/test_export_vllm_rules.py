"""Exported folders against the list of what vLLM's loader asks, and the list against folders that break it.

This is a check of the format and nothing more: nothing here runs vLLM.
"""

import copy
import json

import pytest
from toy_pipeline import call, export_options

from qat_lora.export.vllm_rules import NOT_RUN, broken_rules, check_vllm
from qat_lora.layers.calibrate.quantize import quantize_model
from qat_lora.models.load import copy_tokenizer, load_model, make_qwen3, save_quantised
from qat_lora.quant.presets import preset

PRESETS = ("w2g64", "w3g128", "w4g128", "apple2", "q4_r32", "q4a4", "q2a4", "q2a2")
WEIGHTS = {
    "num_bits": 4, "type": "int", "symmetric": True, "group_size": 64, "strategy": "group",
    "dynamic": False, "actorder": None,
}  # fmt: skip


def folder_of(tiny, name, tmp_path, hidden=64, mlp=128):
    """A student of the shape of tiny, or of another, whose rows groups of 64 divide."""
    model = make_qwen3(tiny.teacher, 320, hidden=hidden, layers=1, heads=2, kv_heads=1, mlp=mlp)
    quantize_model(model.module, preset(name), "mse", quiet=True)
    save_quantised(model, tmp_path / "student", preset(name), {"model": "tiny"})
    copy_tokenizer(tiny.teacher, tmp_path / "student")
    return tmp_path / "student"


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_fulfils_the_rules_or_says_what_it_breaks(name, tiny, tmp_path):
    student = folder_of(tiny, name, tmp_path)
    out = call("export", export_options(student, tmp_path / "out", form="compressed-tensors"))
    assert check_vllm(out) == [NOT_RUN]
    assert NOT_RUN in (out / "README.md").read_text()


def test_widths_and_groups_that_it_does_not_take_are_said_at_export(tiny, tmp_path):
    student = folder_of(tiny, "w2g64", tmp_path, mlp=96)  # 96 inputs: groups of 32
    fine = call("export", export_options(student, tmp_path / "fine", form="compressed-tensors"))
    assert check_vllm(fine) == [NOT_RUN]
    out = call("export", export_options(student, tmp_path / "out", form="compressed-tensors", container_bits=3))
    card = (out / "README.md").read_text()
    assert "vLLM would refuse this folder: 3-bit codes; its weight-only scheme takes 4 and 8 bits" in card
    odd = folder_of(tiny, "w4g128", tmp_path / "odd", mlp=144)  # 144 inputs: groups of 16
    out = call("export", export_options(odd, tmp_path / "odd-out", form="compressed-tensors"))
    assert "groups of 16 inputs; its kernels take 32, 64, 128 or whole rows" in (out / "README.md").read_text()


def good():
    """A config and tensors of one block that fulfil every rule."""
    group = {"targets": ["Linear"], "weights": dict(WEIGHTS), "input_activations": None, "format": "pack-quantized"}
    quantization = {"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"]}
    header = {"lm_head.weight": ("F32", (320, 128))}
    for part in ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"):
        layer = f"model.layers.0.{part}"
        header[f"{layer}.weight_packed"] = ("I32", (64, 16))
        header[f"{layer}.weight_scale"] = ("F16", (64, 2))
        header[f"{layer}.weight_shape"] = ("I64", (2,))
    return {"quantization_config": {**quantization, "config_groups": {"group_0": group}}}, header


def scheme(**changed):
    return lambda config, header: config["config_groups"]["group_0"]["weights"].update(changed)


def tensor(name, value):
    return lambda config, header: header.update({f"model.layers.0.{name}": value})


def split_group(config, header):
    """q_proj in a group of its own, k_proj and v_proj in another of other bits."""
    first = config["config_groups"]["group_0"]
    second = copy.deepcopy(first)
    first["targets"] = [f"model.layers.0.{p}" for p in ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")]
    second["targets"] = ["re:.*(k|v)_proj"]
    second["weights"]["num_bits"] = 8
    for part in ("k_proj", "v_proj"):
        header[f"model.layers.0.{part}.weight_packed"] = ("I32", (64, 32))
    config["config_groups"]["group_1"] = second


def dense_key(config, header):
    for part in ("packed", "scale", "shape"):
        del header[f"model.layers.0.k_proj.weight_{part}"]
    header["model.layers.0.k_proj.weight"] = ("F32", (64, 128))
    config["ignore"].append("model.layers.0.k_proj")


@pytest.mark.parametrize(
    ("break_it", "words"),
    [
        (lambda config, header: config.update(format="int-quantized"), "pack-quantized"),
        (lambda config, header: config["ignore"].append("re:.*o_proj"), "o_proj is packed, and no group"),
        (scheme(num_bits=2), "2-bit codes"),
        (scheme(type="float"), "static integers"),
        (scheme(actorder="group"), "activation order"),
        (scheme(strategy="tensor"), "strategy tensor"),
        (scheme(group_size=16), "groups of 16"),
        (tensor("q_proj.weight_packed", ("U8", (64, 16))), "q_proj.weight_packed is U8"),
        (tensor("q_proj.weight_scale", ("F16", (64, 3))), "3 steps for 128 inputs, the config means 2"),
        (tensor("q_proj.weight_scale", ("I32", (64, 2))), "must be floats"),
        (tensor("q_proj.weight_shape", ("I32", (2,))), "two int64"),
        (tensor("q_proj.weight_zero_point", ("I32", (64, 2))), "zero point"),
        (split_group, "q_proj, k_proj, v_proj are joined"),
        (dense_key, "q_proj, k_proj, v_proj are joined"),
    ],
)
def test_each_rule_catches_what_breaks_it(break_it, words):
    config, header = good()
    assert list(broken_rules(config, header)) == []
    break_it(config["quantization_config"], header)
    assert any(words in line for line in broken_rules(config, header)), list(broken_rules(config, header))


def test_steps_that_the_models_type_would_round_are_mentioned(tiny, tmp_path):
    student = folder_of(tiny, "w4g128", tmp_path)
    options = export_options(student, tmp_path / "out", form="compressed-tensors")
    out = call("export", options, run=type(options.run)(**{**vars(options.run), "dtype": "bfloat16"}))
    assert any("--dtype float16" in line for line in check_vllm(out))
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    assert load_model(str(student)).vocab_size == 320
