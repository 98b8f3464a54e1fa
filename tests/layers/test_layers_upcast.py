"""A model that keeps its weights as they are stored computes what the whole model in float32 computes."""

import copy
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from toy_pipeline import call, part, quantize_options
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from qat_lora.data.sources import TextConfig
from qat_lora.layers.calibrate import upcast as module
from qat_lora.layers.calibrate.upcast import UpcastEmbedding, UpcastLinear, upcast, upcast_linear
from qat_lora.models.copies import copy_tokenizer
from qat_lora.models.load import load_model
from qat_lora.options import EvalOptions

IDS = torch.arange(3, 35).reshape(2, 16)


@pytest.fixture(scope="module")
def half(tiny, tmp_path_factory):
    """The tiny teacher rounded to bfloat16, stored so and as the same numbers in float32."""
    import shutil

    from transformers import AutoModelForCausalLM

    root = tmp_path_factory.mktemp("half")
    model = AutoModelForCausalLM.from_pretrained(tiny.teacher, dtype=torch.bfloat16)
    for name in ("bfloat16", "float32"):
        shutil.copytree(tiny.teacher, root / name)
        model.to(getattr(torch, name)).save_pretrained(root / name)
    return root


def test_outputs_and_gradients_are_those_of_the_model_in_float32(half):
    wide, whole = load_model(str(half / "bfloat16"), dtype="stored").module, load_model(str(half / "float32")).module
    upcast(wide)
    assert wide.lm_head.weight.dtype == torch.bfloat16 and wide.lm_head.weight is wide.get_input_embeddings().weight
    assert type(wide.lm_head) is UpcastLinear and type(wide.get_input_embeddings()) is UpcastEmbedding
    seen = []
    for model in (wide, whole, copy.deepcopy(wide)):
        embeddings = model.get_input_embeddings()(IDS).detach().requires_grad_()
        logits = model(inputs_embeds=embeddings).logits
        logits.square().sum().backward()
        seen.append((logits, embeddings.grad))
    for logits, gradient in seen[1:]:
        assert torch.equal(seen[0][0], logits) and torch.equal(seen[0][1], gradient)


def test_the_scale_of_gemmas_embedding_is_not_rounded(tiny, tmp_path):
    settings = {"vocab_size": 320, "hidden_size": 40, "intermediate_size": 48, "num_hidden_layers": 2}
    settings |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    model = Gemma3ForCausalLM(Gemma3TextConfig(**settings, initializer_range=0.3))
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    copy_tokenizer(tiny.teacher, tmp_path)
    wide, whole = load_model(str(tmp_path), dtype="stored").module, load_model(str(tmp_path)).module
    upcast(wide)
    with torch.no_grad():
        assert torch.equal(wide(IDS).logits, whole(IDS).logits)


def test_scores_are_those_of_a_teacher_in_float32(half, tiny, tmp_path):
    """An evaluation keeps a bfloat16 teacher's layers in their files."""
    student = call("quantize", quantize_options(tiny, tmp_path / "q", model=str(half / "float32"), preset="w2g64"))
    found = []
    for name in ("bfloat16", "float32"):
        options = EvalOptions(teacher=str(half / name), students=(str(student),), text=TextConfig(str(tiny.text)))
        out = part(tmp_path / name)
        found.append(call("evaluate", replace(options, length=32, eval_rows=4, run=out)))
    ours, theirs = found
    assert ours["q"] == theirs["q"] and ours["teacher"]["nll"] == theirs["teacher"]["nll"]


class Widest(TorchDispatchMode):
    """Notes how many numbers were upcast at a time."""

    def __init__(self):
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and args[0].dtype == torch.bfloat16:
            self.numbers = max(self.numbers, output.numel())
        return output


@pytest.mark.parametrize(("with_bias", "limit"), [(False, {"PIECE": 5 * 8}), (True, {"ROWS": 5})])
def test_a_large_head_is_upcast_in_pieces(with_bias, limit, monkeypatch):
    """Logits and the states' gradient are those of float64; a weight that trains keeps its own gradient."""
    for name, value in limit.items():
        monkeypatch.setattr(module, name, value)
    torch.manual_seed(0)
    weight, x = torch.randn(23, 8).to(torch.bfloat16), torch.randn(3, 4, 8, requires_grad=True)
    bias = torch.randn(23).to(torch.bfloat16) if with_bias else None
    pull = torch.randn(3, 4, 23)
    with Widest() as widest:
        output = upcast_linear(x, weight, bias)
        (gradient,) = torch.autograd.grad(output, x, pull)
    assert widest.numbers == 5 * 8
    wanted = x.detach().double() @ weight.double().T + (0 if bias is None else bias.double())
    torch.testing.assert_close(output.double(), wanted, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient.double(), pull.double() @ weight.double(), rtol=1e-5, atol=1e-5)
    weight.requires_grad_()
    upcast_linear(x, weight, bias).sum().backward()
    assert weight.grad is not None


def test_no_wide_weight_outlives_its_product():
    """Of all layers' float32 weights, none is kept for the backward pass."""
    layers = [torch.nn.Linear(64, 64, bias=True).to(torch.bfloat16).requires_grad_(False) for _ in range(5)]
    model = torch.nn.Sequential(*layers)
    upcast(model)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        model(torch.randn(3, 64, requires_grad=True))
    assert (64, 64) not in [tuple(shape) for shape in kept]
    assert model[0](torch.randn(2, 64)).dtype == torch.float32


@pytest.mark.parametrize("settings", [{}, {"calibrate_on": "teacher"}])
def test_a_student_is_the_same_from_either_file(half, tiny, tmp_path, settings):
    from safetensors.torch import load_file
    from toy_pipeline import cache_options

    cache = call("build_cache", cache_options(tiny, tmp_path / "cache", teacher=str(half / "float32")))
    made = [
        call("quantize", quantize_options(tiny, tmp_path / name, cache, model=str(half / name), **settings))
        for name in ("bfloat16", "float32")
    ]
    ours, theirs = (load_file(folder / "model.safetensors") for folder in made)
    assert set(ours) == set(theirs) and all(torch.equal(ours[name], theirs[name]) for name in ours)
