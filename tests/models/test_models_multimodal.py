"""Vision-language checkpoints: the text part goes through every command, the rest comes out as the bytes it was."""

import json

import pytest
import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file
from toy_multimodal import OWN, make
from toy_pipeline import cache_options, call, eval_options, export_options, quantize_options, recover_options

from qat_lora.errors import ConfigError, ModelError
from qat_lora.models.copies import copy_tokenizer
from qat_lora.models.load import load_model, on_meta
from qat_lora.models.multimodal import FAMILIES
from qat_lora.models.student import open_student

IDS = torch.randint(1, 300, (2, 24), generator=torch.Generator().manual_seed(0))
WHOLE = ("llava", "gemma3", "qwen2_5_vl")  # taken through every command: names that transformers renames, and a head


def whole(folder):
    model = transformers.AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    return model.eval().requires_grad_(False)


def text_logits(model):
    hidden = model.hidden(IDS, torch.zeros_like(IDS))
    return model.logits(hidden.flatten(0, 1)).view(*IDS.shape, -1)


def image_logits(kind, model):
    """Return the logits of a row with an image in it, by the whole model."""
    torch.manual_seed(1)
    seen = {"pixel_values": torch.randn(1, 3, 28, 28)}
    ids = torch.cat([IDS[:1, :6], torch.full((1, 4), 310), IDS[:1, 6:]], 1)
    if kind == "qwen2_5_vl":
        seen = {"pixel_values": torch.randn(16, 3 * 2 * 14 * 14), "image_grid_thw": torch.tensor([[1, 4, 4]])}
        ids = torch.cat([ids[:, :6], torch.tensor([[312]]), ids[:, 6:10], torch.tensor([[313]]), ids[:, 10:]], 1)
        seen["mm_token_type_ids"] = (ids == 310).long()
    if kind == "gemma3":
        seen["token_type_ids"] = (ids == 310).long()
    return model(input_ids=ids, attention_mask=torch.ones_like(ids), **seen).logits


def tensors(folder):
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def raw(tensor):
    return tensor.dtype, tuple(tensor.shape), bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())


def checkpoint(kind, tied, tiny, folder):
    make(kind, tied).save_pretrained(folder)
    copy_tokenizer(tiny.teacher, folder)
    (folder / "preprocessor_config.json").write_text('{"image_processor_type":  "CLIPImageProcessor"}\n')
    return folder


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", FAMILIES)
def test_the_text_part_computes_what_the_whole_computes_of_text(kind, tied, tmp_path):
    make(kind, tied).save_pretrained(tmp_path)
    both, model = whole(tmp_path), load_model(str(tmp_path))
    with torch.no_grad():
        assert torch.equal(text_logits(model), both(input_ids=IDS).logits)
    count = both.num_parameters() - model.module.num_parameters()
    assert sum(model.rest.values()) == 2 * count > 0 and on_meta(both.config).rest_weights == count
    assert model.rest.keys() < tensors(tmp_path).keys()


@pytest.mark.parametrize("kind", WHOLE)
def test_from_cache_to_export_the_rest_stays_as_it_was(kind, tiny, tmp_path, capsys):
    teacher = checkpoint(kind, kind != "llava", tiny, tmp_path / "teacher")
    toy = tiny._replace(teacher=teacher)
    cache = call("build_cache", cache_options(toy, tmp_path / "cache", num_rows=160))  # each is read once
    student = call("quantize", quantize_options(toy, tmp_path / "student", cache))
    run = call("recover", recover_options(student, cache, tmp_path / "run"))
    scores = call("evaluate", eval_options(toy, {"rounded": student, "recovered": run}, tmp_path / "scores"))
    assert 0 < scores["recovered"]["kl"] < scores["rounded"]["kl"]
    merged = call("export", export_options(run, tmp_path / "merged", form="merged", dtype="float32"))

    rest, stored = load_model(str(teacher)).rest, tensors(teacher)
    for folder in (student, merged):
        written = tensors(folder)
        assert all(raw(written[name]) == raw(stored[name]) for name in rest)
        assert (folder / "preprocessor_config.json").read_bytes() == (teacher / "preprocessor_config.json").read_bytes()
        was, now = (json.loads((f / "config.json").read_text()) for f in (teacher, folder))
        assert now["vision_config"] == was["vision_config"] and now["architectures"] == was["architectures"]

    both, opened = whole(merged), open_student(str(run)).model
    torch.testing.assert_close(both(input_ids=IDS).logits, text_logits(opened), rtol=1e-4, atol=1e-4)
    original = whole(teacher)  # the checkpoint with its text part replaced, by hand
    ours, replaced = both.state_dict(), original.state_dict()
    inside = [name for name in replaced if "language_model" in name or name.startswith("lm_head")]
    assert any(not torch.equal(ours[name], replaced[name]) for name in inside)
    before = image_logits(kind, original)
    original.load_state_dict({name: ours[name] if name in inside else t for name, t in replaced.items()})
    torch.testing.assert_close(image_logits(kind, both), image_logits(kind, original), rtol=0, atol=1e-5)
    assert not torch.allclose(image_logits(kind, both), before, atol=1e-2)

    with pytest.raises(ConfigError, match="mlx is not written for models that see; allowed: merged, adapter"):
        call("export", export_options(run, tmp_path / "mlx", form="mlx"))
    assert not (tmp_path / "mlx").exists()


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks for it
@pytest.mark.parametrize("kind", WHOLE)
def test_packed_forms_hold_the_rest_and_load_by_the_class_of_the_whole(kind, tiny, tmp_path):
    toy = tiny._replace(teacher=checkpoint(kind, True, tiny, tmp_path / "teacher"))
    cache = call("build_cache", cache_options(toy, tmp_path / "cache", num_rows=48))
    # A grid that compressed-tensors and GGUF hold as it is.
    student = call("quantize", quantize_options(toy, tmp_path / "student", cache, preset="q4_0"))
    run = call("recover", recover_options(student, cache, tmp_path / "run"))
    rest, stored = load_model(str(toy.teacher)).rest, tensors(toy.teacher)
    wanted = text_logits(open_student(str(run)).model)
    for form in ("adapter", "compressed-tensors", "gguf", "gguf-merged"):
        dense = {"embedding_bits": 16.0} if form == "gguf" else {}
        if "gguf" in form and kind == "qwen2_5_vl":  # llama.cpp's positions of images are not written
            with pytest.raises(ModelError, match="GGUF export of qwen2_5_vl_text is not supported"):
                call("export", export_options(run, tmp_path / form, form=form))
            continue
        out = call("export", export_options(run, tmp_path / form, form=form, **dense))
        card = (out / "README.md").read_text()
        if "gguf" in form:
            assert "the text part alone" in card
            found = text_logits(open_student(str(out)).model)
        else:
            base, adapter = (out / "base", out) if form == "adapter" else (out, out / "adapter")
            assert "AutoModelForImageTextToText" in card
            assert all(raw(tensors(base)[name]) == raw(stored[name]) for name in rest)
            unpacked = whole(base)
            unpacked(input_ids=IDS)  # the first forward unpacks the weights, which PEFT asks for
            found = PeftModel.from_pretrained(unpacked, adapter).eval()(input_ids=IDS).logits
        assert float((found - wanted).norm() / wanted.norm()) < 0.02, form


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # PEFT asks for it
def test_a_quantised_head_that_was_tied_stays_one_with_the_embedding(tiny, tmp_path):
    """Its student keeps the type of its other tensors, and a packed form says whether it holds a head of its own."""
    toy = tiny._replace(teacher=checkpoint("qwen2_5_vl", True, tiny, tmp_path / "teacher"))
    cache = call("build_cache", cache_options(toy, tmp_path / "cache", num_rows=48))
    settings = {"preset": "q4_0", "quantize_head": "q4_0"}
    student = call("quantize", quantize_options(toy, tmp_path / "student", cache, **settings))
    was, now = (json.loads((folder / "config.json").read_text()) for folder in (toy.teacher, student))
    assert now["dtype"] == was["dtype"] == "bfloat16"
    run = call("recover", recover_options(student, cache, tmp_path / "run"))
    wanted = text_logits(open_student(str(run)).model)
    out = call("export", export_options(run, tmp_path / "packed", form="compressed-tensors"))
    unpacked = whole(out)
    unpacked(input_ids=IDS)
    found = PeftModel.from_pretrained(unpacked, out / "adapter").eval()(input_ids=IDS).logits
    assert float((found - wanted).norm() / wanted.norm()) < 0.05


def test_a_naive_copy_of_the_loaded_model_would_change_the_rest(tmp_path, tiny):
    teacher = checkpoint("llava", True, tiny, tmp_path / "teacher")
    whole(teacher).save_pretrained(tmp_path / "again")
    stored, written = tensors(teacher), tensors(tmp_path / "again")
    assert any(raw(written[name]) != raw(stored[name]) for name in load_model(str(teacher)).rest if name in written)


def test_every_family_has_a_toy_and_others_are_refused(tmp_path):
    assert set(OWN) == set(FAMILIES)
    model = make("llava")
    model.config.model_type = "strange_vl"
    with pytest.raises(ModelError, match="strange_vl, which sees or hears, is not supported; allowed: gemma3"):
        on_meta(model.config)
