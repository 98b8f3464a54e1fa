"""Mixtures of experts through the commands: quantised, recovered, scored, exported."""

import json
from dataclasses import replace

import pytest
import torch
from toy_mixture import MIXTURES, save_mixture
from toy_pipeline import cache_options, call, eval_options, export_options, part, quantize_options, recover_options
from transformers import AutoModelForCausalLM

from qat_lora.errors import ConfigError, ModelError
from qat_lora.layers.convert import lora_layers, quant_layers
from qat_lora.layers.experts import siblings_of
from qat_lora.layers.lora import LoraConfig
from qat_lora.models.load import load_model
from qat_lora.models.student import open_student
from qat_lora.quant.presets import TargetConfig

IDS = torch.randint(0, 320, (2, 24), generator=torch.Generator().manual_seed(1))


def loud(out):
    return replace(part(out), quiet=False)


@torch.no_grad()
def logits(module):
    return module(input_ids=IDS).logits


@pytest.fixture(scope="module")
def mixture(tiny, tmp_path_factory):
    """A teacher that is a mixture, and its cache."""
    root = tmp_path_factory.mktemp("mixture")
    teacher = save_mixture("Qwen3Moe", root / "teacher", tiny, num_hidden_layers=1)
    mine = tiny._replace(teacher=teacher)
    return mine, call("build_cache", cache_options(mine, root / "cache"))


@pytest.fixture(scope="module")
def made(mixture, tmp_path_factory):
    mine, cache = mixture
    options = quantize_options(mine, tmp_path_factory.mktemp("m") / "student", cache, preset="q4_0")
    return call("quantize", options)


@pytest.fixture(scope="module")
def recovered(mixture, made, tmp_path_factory):
    return call("recover", recover_options(made, mixture[1], tmp_path_factory.mktemp("m") / "run"))


def test_experts_are_quantised_one_by_one_and_recovered(mixture, tmp_path, capsys):
    mine, cache = mixture
    made = call("quantize", quantize_options(mine, None, cache, run=loud(tmp_path / "student")))
    shown = capsys.readouterr().out
    assert "99.6% of the linear and expert weights of the blocks are quantised" in shown and "warning" not in shown
    result = json.loads((made / "result.json").read_text())
    assert result["quantised_share"] > 0.99 and result["unreached"] == []
    layers = quant_layers(load_model(str(made)).module)
    assert len(layers) == 4 + 3 * 6 and "model.layers.0.mlp.experts.5.down_proj" in layers
    run = call("recover", recover_options(made, cache, tmp_path / "run"))
    assert lora_layers(open_student(str(run)).model.module).keys() == layers.keys()
    call("evaluate", eval_options(mine, {"before": made, "after": run}, tmp_path / "eval"))
    scores = json.loads((tmp_path / "eval" / "scores.json").read_text())
    assert scores["after"]["kl"] < 0.95 * scores["before"]["kl"]


@pytest.mark.parametrize("inputs", ["student", "teacher"])
def test_experts_that_no_token_reaches_are_named(inputs, tiny, mixture, tmp_path, capsys):
    folder = save_mixture("Qwen3Moe", tmp_path / "teacher", tiny, num_hidden_layers=1, num_experts_per_tok=1)
    with torch.no_grad():  # the last expert's router row never wins
        model = AutoModelForCausalLM.from_pretrained(folder)
        model.model.layers[0].mlp.gate.weight[:5] *= 1e3
        model.model.layers[0].mlp.gate.weight[5] = 0.0
        model.save_pretrained(folder)
    options = quantize_options(tiny._replace(teacher=folder), None, mixture[1], calibrate_on=inputs)
    made = call("quantize", options, run=loud(tmp_path / "student"))
    expected = [f"model.layers.0.mlp.experts.5.{name}_proj" for name in ("down", "gate", "up")]
    assert json.loads((made / "result.json").read_text())["unreached"] == expected
    assert "warning: fewer than 16 calibration tokens reach 1 experts (model.layers.0.mlp.experts.5)" in (
        capsys.readouterr().out
    )
    full, student = (load_model(str(of)).module.get_submodule("model.layers.0.mlp.experts.5") for of in (folder, made))
    for name in ("gate_proj", "up_proj", "down_proj"):
        wanted, found = (m.get_submodule(name).weight for m in (full, student))
        assert (wanted - found).norm() < 0.6 * wanted.norm()


def test_experts_that_are_kept_are_a_warning_and_stay_bit_for_bit(mixture, tmp_path, capsys):
    mine, _ = mixture
    asked = quantize_options(mine, None, keep=(r"experts\.\d+\.up",), run=loud(tmp_path / "student"))
    made = call("quantize", asked)
    shown = capsys.readouterr().out
    assert "warning: only 7" in shown and r"in 6 such as model.layers.0.mlp.experts.0.up_proj (--keep 'experts" in shown
    full, student = (load_model(str(of)).module for of in (mine.teacher, made))
    for number in range(6):
        name = f"model.layers.0.mlp.experts.{number}.up_proj.weight"
        assert torch.equal(full.get_parameter(name), student.get_parameter(name))


@pytest.mark.parametrize("kind", sorted(MIXTURES))
def test_a_merged_export_is_a_mixture_of_transformers_own(kind, tiny, tmp_path):
    folder = save_mixture(kind, tmp_path / "teacher", tiny, num_hidden_layers=1)
    made = call("quantize", quantize_options(tiny._replace(teacher=folder), tmp_path / "student"))
    layers = quant_layers(load_model(str(made)).module)
    assert sum(siblings_of(name) is not None for name in layers) == 3 * len(
        {n.rpartition(".")[0] for n in layers if siblings_of(n)}
    )
    assert not any(name.endswith((".gate", "shared_expert_gate")) for name in layers)
    out = call("export", export_options(made, tmp_path / "merged", form="merged"))
    plain = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert plain.model.layers[0].mlp.experts.gate_up_proj.dim() == 3
    assert (logits(plain) - logits(load_model(str(made)).module)).abs().max() < 1e-4
    assert sorted(file.name for file in out.glob("model*")) == ["model.safetensors"]


def test_an_adapter_of_experts_merges(recovered, tmp_path):
    out = call("export", export_options(recovered, tmp_path / "merged", form="merged"))
    plain = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert (logits(plain) - logits(open_student(str(recovered)).model.module)).abs().max() < 1e-4


def test_gguf_stacks_the_codes_of_experts_byte_for_byte(recovered, made, tmp_path):
    gguf = pytest.importorskip("gguf")
    out = call("export", export_options(recovered, tmp_path / "out", form="gguf"))
    adapted = open_student(str(recovered)).model.module
    held = {tensor.name: tensor for tensor in gguf.GGUFReader(out / "base.gguf").tensors}
    factors = {tensor.name: tensor for tensor in gguf.GGUFReader(out / "adapter.gguf").tensors}
    for part_, label in (("gate", "gate"), ("up", "up"), ("down", "down")):
        codes = held[f"blk.0.ffn_{label}_exps.weight"]
        assert codes.tensor_type.name == "Q4_0" and list(codes.shape) == [64, 64, 6]
        values = torch.from_numpy(gguf.dequantize(codes.data, codes.tensor_type).copy())
        a, b = (factors[f"blk.0.ffn_{label}_exps.weight.lora_{end}"] for end in "ab")
        assert list(a.shape) == [64, 2, 6] and list(b.shape) == [2, 64, 6]
        for number in range(6):
            layer = adapted.get_submodule(f"model.layers.0.mlp.experts.{number}.{part_}_proj")
            assert torch.equal(values[number], layer.base.weight.detach().float())
            for found, wanted in ((a, layer.lora_A), (b, layer.lora_B)):  # Q8_0 where a row is whole blocks
                read = torch.from_numpy(gguf.dequantize(found.data, found.tensor_type).copy())[number]
                assert (read - wanted).abs().max() <= wanted.abs().max() / 200
    router = held["blk.0.ffn_gate_inp.weight"]
    assert router.tensor_type.name == "F32" and torch.equal(
        torch.from_numpy(router.data.copy()), adapted.get_parameter("model.layers.0.mlp.gate.weight").detach()
    )
    reader = gguf.GGUFReader(out / "base.gguf")
    settings = {"expert_count": 6, "expert_used_count": 2, "expert_feed_forward_length": 64}
    for name, value in settings.items():
        assert reader.get_field(f"qwen3moe.{name}").contents() == value


@pytest.mark.parametrize(("kind", "arch"), [("Mixtral", "llama"), ("Olmoe", "olmoe")])
def test_gguf_of_other_families_and_dense(kind, arch, tiny, tmp_path):
    gguf = pytest.importorskip("gguf")
    folder = save_mixture(kind, tmp_path / "teacher", tiny, num_hidden_layers=1)
    made = call("quantize", quantize_options(tiny._replace(teacher=folder), tmp_path / "student", preset="q4_0"))
    for form, type_ in (("gguf", "Q4_0"), ("gguf-merged", "F16")):
        out = call("export", export_options(made, tmp_path / form, form=form))
        reader = gguf.GGUFReader(out / "base.gguf")
        held = {tensor.name: tensor.tensor_type.name for tensor in reader.tensors}
        assert held["blk.0.ffn_down_exps.weight"] == type_ and held["blk.0.ffn_gate_inp.weight"] == "F32"
        assert reader.get_field(f"{arch}.expert_count").contents() == 4


def test_gguf_refuses_shared_heads_that_llama_cpp_does_not_load(tiny, tmp_path):
    pytest.importorskip("gguf")
    folder = save_mixture("Olmoe", tmp_path / "teacher", tiny, num_hidden_layers=1, num_key_value_heads=1)
    made = call("quantize", quantize_options(tiny._replace(teacher=folder), tmp_path / "student", preset="q4_0"))
    with pytest.raises(ModelError, match="num_key_value_heads 1 is not supported by GGUF export of olmoe"):
        call("export", export_options(made, tmp_path / "out", form="gguf"))


def test_gguf_refuses_experts_of_several_types_and_adapters_of_some(mixture, made, tmp_path):
    pytest.importorskip("gguf")
    mine, cache = mixture
    asked = quantize_options(mine, tmp_path / "mixed", preset="q4_0", override=(r"experts\.0\.up=q8_0",))
    with pytest.raises(ModelError, match=r"the experts of blk.0.ffn_up_exps.weight in one type, not in Q4_0, Q8_0"):
        call("export", export_options(call("quantize", asked), tmp_path / "out", form="gguf"))
    asked = recover_options(made, cache, tmp_path / "run", lora=LoraConfig(recovery_r=2, lora_targets=r"experts\.0\."))
    with pytest.raises(ModelError, match="for all experts of a layer or none, not for some of blk.0.ffn_down_exps"):
        call("export", export_options(call("recover", asked), tmp_path / "part", form="gguf"))


def test_a_target_size_is_refused(mixture, tmp_path):
    asked = quantize_options(mixture[0], tmp_path / "out", mixture[1], target=TargetConfig(target_bits=8.0))
    with pytest.raises(ConfigError, match="target_size: not for mixtures"):
        call("quantize", replace(asked, init="descent"))


@pytest.mark.parametrize("form", ["gptq", "mlx"])
def test_other_forms_are_refused(form, made, tmp_path):
    with pytest.raises(ModelError, match=f"form: {form} is not written for mixtures of experts"):
        call("export", export_options(made, tmp_path / "out", form=form))


@pytest.mark.parametrize("kind", ["Qwen3Moe", "Mixtral", "Olmoe"])
def test_compressed_tensors_hold_experts_under_the_names_of_the_family(kind, tiny, tmp_path):
    pytest.importorskip("compressed_tensors")
    folder = save_mixture(kind, tmp_path / "teacher", tiny, num_hidden_layers=1)
    asked = quantize_options(tiny._replace(teacher=folder), tmp_path / "student", preset="q4_0")
    made = call("quantize", asked)
    out = call("export", export_options(made, tmp_path / "packed", form="compressed-tensors"))
    expected = logits(load_model(str(made)).module)
    read = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    assert (logits(read) - expected).abs().max() < 1e-2  # the library multiplies codes and steps in float16
    assert (logits(open_student(str(out)).model.module) - expected).abs().max() < 2e-3


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")
@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning")
def test_peft_takes_an_adapter_of_experts_on_the_packed_export_and_drops_it_on_ours(recovered, made, tmp_path, capsys):
    pytest.importorskip("compressed_tensors")
    from peft import PeftModel

    expected, bare = logits(open_student(str(recovered)).model.module), logits(load_model(str(made)).module)
    out = call("export", export_options(recovered, tmp_path / "packed", form="compressed-tensors"))
    base = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    apart = (logits(PeftModel.from_pretrained(base, out / "adapter")) - expected).abs().amax(-1)
    assert (apart < 1e-2).double().mean() > 0.9  # a router on the verge sends a token elsewhere
    assert (bare - expected).abs().max() > 0.05
    out = call("export", export_options(recovered, None, form="adapter", run=loud(tmp_path / "pair")))
    assert "PEFT 0.21 takes the experts for fused ones" in capsys.readouterr().out
    base = AutoModelForCausalLM.from_pretrained(out / "base", dtype=torch.float32)
    with pytest.warns(RuntimeWarning, match="no parameter was matched"):
        PeftModel.from_pretrained(base, out)
