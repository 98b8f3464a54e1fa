"""A model that keeps its weights as they are stored computes what the whole model in float32 computes."""

import copy

import pytest
import torch
from toy_pipeline import call, quantize_options

from qat_lora.layers.calibrate.upcast import UpcastEmbedding, UpcastLinear, upcast
from qat_lora.models.load import load_model

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
