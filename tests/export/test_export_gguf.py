"""GGUF files hold our weights bit for bit, and llama.cpp computes with them what we compute."""

import json
import math

import numpy as np
import pytest
import torch
from toy_pipeline import call, export_options
from transformers import LlamaConfig, LlamaForCausalLM

from qat_lora.export.forms import usage
from qat_lora.export.gguf_model import gguf_name, row_order
from qat_lora.files.checksums import checkpoint_sha256
from qat_lora.layers.calibrate.quantize import quantize_model
from qat_lora.layers.convert import add_lora, lora_layers, quant_layers
from qat_lora.layers.lora import LoraConfig
from qat_lora.models.adapter import save_adapter
from qat_lora.models.copies import copy_tokenizer
from qat_lora.models.hub import HubConfig
from qat_lora.models.load import load_model, load_tokenizer, save_quantised
from qat_lora.models.student import open_student
from qat_lora.quant.presets import preset

gguf = pytest.importorskip("gguf")
TEXT = "the model of a layer and the weight in the cache. a token to the loss, quant scale code row head tail.\n" * 3


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def teacher(request, tiny, tmp_path_factory):
    """The tiny teacher, and a Llama of its size."""
    if request.param == "qwen3":
        return tiny.teacher
    folder = tmp_path_factory.mktemp("llama") / "teacher"
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=320, hidden_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=96, max_position_embeddings=256, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)
    model.save_pretrained(folder)
    copy_tokenizer(tiny.teacher, folder)
    return folder


def adapted(teacher, name, root):
    """A quantised student with a random adapter; return the adapter's folder."""
    model = load_model(str(teacher))
    quantize_model(model.module, preset(name), "mse", quiet=True)
    save_quantised(model, root / "base", preset(name), {})
    torch.manual_seed(1)
    config = LoraConfig(recovery_r=3, recovery_alpha=5.0)
    for layer in add_lora(model.module, config).values():
        layer.lora_B.data = torch.randn_like(layer.lora_B) * 0.1
    save_adapter(model.module, config, root / "adapter", root / "base", checkpoint_sha256(root / "base"))
    return root / "adapter"


def read(file):
    reader = gguf.GGUFReader(file)
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    return reader, tensors, {name: gguf.dequantize(t.data, t.tensor_type) for name, t in tensors.items()}


def unpermuted(model, name, array):
    order = row_order(model, name)
    if order is None:
        return array
    back = np.empty_like(array)
    back[order.numpy()] = array
    return back


HELD = [("w2g64", "Q4_0"), ("w3g128", "Q4_0"), ("q2_0", "Q2_0"), ("q2g128", "Q2_0"), ("q4_0", "Q4_0")]


@pytest.mark.parametrize(("name", "kind"), HELD)
def test_tensors_are_ours_after_dequantisation(teacher, name, kind, tmp_path):
    adapter = adapted(teacher, name, tmp_path)
    out = call("export", export_options(adapter, tmp_path / "out", form="gguf", embedding_bits=16))
    model = open_student(str(adapter), HubConfig()).model
    _, tensors, dense = read(out / "base.gguf")
    layers = quant_layers(model.module)
    for layer, module in layers.items():
        found = f"{gguf_name(model, layer)}.weight"
        assert tensors[found].tensor_type.name == (kind if module.in_features % 64 == 0 else "Q4_0")
        assert np.array_equal(unpermuted(model, layer, dense[found]), module.weight.numpy())
    assert np.array_equal(dense["token_embd.weight"], model.module.get_input_embeddings().weight.half().float().numpy())
    assert ("output.weight" in dense) == (model.config.model_type == "llama")
    reader, stored, factors = read(out / "adapter.gguf")
    assert reader.get_field("adapter.lora.alpha").contents() == 5.0
    for layer, module in lora_layers(model.module).items():
        a, b = (factors[f"{gguf_name(model, layer)}.weight.lora_{x}"] for x in "ab")
        blocks = gguf.quantize(module.lora_A.detach().half().float().numpy(), gguf.GGMLQuantizationType.Q8_0)
        assert np.array_equal(a, gguf.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0))
        # Half a step, and the rounding of the step to float16.
        assert np.abs(a - module.lora_A.detach().numpy()).max() < np.abs(a).max() / 220
        assert stored[f"{gguf_name(model, layer)}.weight.lora_b"].tensor_type.name == "F16"  # rows of 3
        assert np.array_equal(unpermuted(model, layer, b), module.lora_B.detach().half().numpy())
    assert len(factors) == 2 * len(lora_layers(model.module)) == 28


@pytest.mark.parametrize(("name", "worst"), [("q4_r32", 0.15), ("q2a4", 0.15)])
def test_what_no_block_holds_is_rounded_with_its_error_or_dense(tiny, name, worst, tmp_path):
    adapter = adapted(tiny.teacher, name, tmp_path)
    rounded = call("export", export_options(adapter, tmp_path / "rounded", form="gguf"))
    exact = call("export", export_options(adapter, tmp_path / "exact", form="gguf", exact_only=True))
    model = open_student(str(adapter), HubConfig()).model
    layers = quant_layers(model.module)
    result = json.loads((rounded / "result.json").read_text())
    assert result["layers_rounded"] == 14
    (_, _, dense), (_, kinds, whole) = read(rounded / "base.gguf"), read(exact / "base.gguf")
    errors = []
    for layer, module in layers.items():
        weight, key = module.weight.detach().numpy().astype(np.float64), f"{gguf_name(model, layer)}.weight"
        errors.append(np.linalg.norm(dense[key] - weight) / np.linalg.norm(weight))
        assert kinds[key].tensor_type.name == "F32" and np.array_equal(whole[key], module.weight.detach().numpy())
    assert result["weight_error_worst"] == pytest.approx(max(errors), abs=1e-4) and max(errors) < worst
    assert "stored dense" in (exact / "README.md").read_text()


def nll(logits, ids):
    logits = torch.as_tensor(logits, dtype=torch.float64)
    return float(torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(ids[1:])))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of a package built elsewhere
@pytest.mark.parametrize(("name", "close"), [("w2g64", 0.01), ("q4_r32", 1e-4)], ids=["Q4_0", "dense"])
def test_llama_cpp_has_our_perplexity(teacher, name, close, tmp_path):
    """Dense layers agree as far as float32 does; with Q4_0, llama.cpp rounds activations to 8 bits."""
    llama_cpp = pytest.importorskip("llama_cpp")
    adapter = adapted(teacher, name, tmp_path)
    out = call("export", export_options(adapter, tmp_path / "out", form="gguf", exact_only=True, embedding_bits=16))
    model = open_student(str(adapter), HubConfig()).model
    ids = load_tokenizer(model.folder)(TEXT)["input_ids"]
    with torch.no_grad():
        hidden = model.hidden(torch.tensor([ids]), torch.zeros(1, len(ids), dtype=torch.int32))
        ours = nll(model.logits(hidden[0]), ids)
    theirs = []
    for lora in (str(out / "adapter.gguf"), None):
        llama = llama_cpp.Llama(
            str(out / "base.gguf"), lora_path=lora, n_ctx=256, n_threads=1, logits_all=True, verbose=False
        )
        assert llama.tokenize(TEXT.encode(), add_bos=False) == ids
        llama.eval(ids)
        theirs.append(nll(llama.scores[: len(ids)].copy(), ids))
        llama.close()
    assert math.expm1(abs(theirs[0] - ours)) < close
    assert math.expm1(abs(theirs[1] - ours)) > 0.01  # the control: without the adapter it is another model


def test_the_merged_form_is_one_dense_file(tiny, tmp_path):
    adapter = adapted(tiny.teacher, "q2_0", tmp_path)
    out = call("export", export_options(adapter, tmp_path / "out", form="gguf-merged"))
    assert (out / "Modelfile").read_text() == "FROM ./base.gguf\n" and not (out / "adapter.gguf").exists()
    model = open_student(str(adapter), HubConfig()).model
    reader, tensors, dense = read(out / "base.gguf")
    assert (
        reader.get_field("general.file_type").contents() == 1
        and usage("gguf-merged", True) in (out / "README.md").read_text()
    )
    for layer, module in lora_layers(model.module).items():
        found = f"{gguf_name(model, layer)}.weight"
        merged = module.base.weight.detach() + module.delta().detach()
        assert tensors[found].tensor_type.name == "F16" and np.array_equal(dense[found], merged.half().float().numpy())
