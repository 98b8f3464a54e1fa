"""The adapter as a PEFT folder: exact round trip, and everything that must not be loaded in silence."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from qat_lora.errors import ModelError, QatLoraError
from qat_lora.files.checksums import checkpoint_sha256, seal
from qat_lora.layers.convert import add_lora, lora_layers
from qat_lora.layers.lora import Factors, LoraConfig
from qat_lora.models.adapter import load_adapter, load_starts, read_adapter, save_adapter, save_starts
from qat_lora.models.load import load_model

FILE = "adapter_model.safetensors"


def logits(model):
    ids = torch.arange(24).reshape(2, 12) % 300
    with torch.inference_mode():
        return model.logits(model.hidden(ids, torch.zeros(2, 12, dtype=torch.int32)))


def test_round_trip_is_exact(adapted, student):
    model, folder = adapted
    again = load_model(str(student))
    plain = logits(again)
    config = load_adapter(again.module, folder, checkpoint_sha256(student))
    assert config.recovery_r == 3 and config.alpha == 5.0
    ours, theirs = lora_layers(model.module), lora_layers(again.module)
    assert list(ours) == list(theirs) and len(ours) == 14
    for name, layer in ours.items():
        assert torch.equal(layer.lora_A, theirs[name].lora_A) and torch.equal(layer.lora_B, theirs[name].lora_B)
        assert layer.scaling == theirs[name].scaling
    assert torch.equal(logits(model), logits(again)) and not torch.allclose(plain, logits(again), atol=1e-3)


@pytest.mark.parametrize("config", [LoraConfig(mlp_only=True), LoraConfig(lora_targets=r"layers\.1\..*(q|v)_proj")])
def test_only_the_layers_that_had_adapters_get_them(student, tmp_path, config):
    model = load_model(str(student))
    chosen = set(add_lora(model.module, config))
    save_adapter(model.module, config, tmp_path, student, checkpoint_sha256(student))
    again = load_model(str(student))
    load_adapter(again.module, tmp_path, checkpoint_sha256(student))
    assert set(lora_layers(again.module)) == chosen and 0 < len(chosen) < 14


def test_a_list_of_endings_means_what_it_means_to_peft(adapted, student):
    _, folder = adapted
    rewrite(folder, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"])
    again = load_model(str(student))
    load_adapter(again.module, folder, checkpoint_sha256(student))
    assert len(lora_layers(again.module)) == 14


def test_a_dot_in_a_name_is_no_wildcard(tmp_path):
    model = nn.Module()
    model.a = nn.Module()
    model.a.b, model.axb = nn.Linear(4, 4), nn.Linear(4, 4)
    add_lora(model, LoraConfig(recovery_r=2, lora_targets=r"^a\.b$"))
    save_adapter(model, LoraConfig(recovery_r=2), tmp_path, tmp_path, "0")
    twin = nn.Module()
    twin.a = nn.Module()
    twin.a.b, twin.axb = nn.Linear(4, 4), nn.Linear(4, 4)
    load_adapter(twin, tmp_path, "0")
    assert list(lora_layers(twin)) == ["a.b"]


def rewrite(folder, **changed):
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changed}))
    seal(folder)


def refused(folder, student, *words, base_sha256=None):
    with pytest.raises(QatLoraError) as caught:
        load_adapter(load_model(str(student)).module, folder, base_sha256 or checkpoint_sha256(student))
    assert "\n" not in str(caught.value) and all(word in str(caught.value) for word in words), str(caught.value)


def test_another_base_is_refused_with_both_fingerprints(adapted, student):
    _, folder = adapted
    refused(folder, student, checkpoint_sha256(student)[:12], "f" * 12, str(student), base_sha256="f" * 64)


def test_an_adapter_that_knows_no_base_is_taken(adapted, student):
    _, folder = adapted
    (folder / "qat_lora.json").unlink()  # one that PEFT made
    (folder / "SHA256SUMS").unlink()
    load_adapter(load_model(str(student)).module, folder, "f" * 64)


KEY = "base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda t: t.pop(KEY), [KEY]),
        (lambda t: t.update({KEY.replace("up_proj", "upper_proj"): t.pop(KEY)}), ["does not fit", "upper_proj"]),
        (lambda t: t.update({"extra": torch.ones(1)}), ["does not fit", "extra"]),
        (lambda t: t.update({KEY: torch.ones(4, 64)}), ["up_proj.lora_A", "(4, 64)", "(3, 64)"]),
        (lambda t: t.update({KEY: torch.ones(1, 64)}), ["up_proj.lora_A", "(1, 64)", "(3, 64)"]),
    ],
    ids=["missing", "renamed", "extra", "misshapen", "would broadcast"],
)
def test_tensors_that_do_not_fit_are_refused_by_name(adapted, student, damage, words):
    _, folder = adapted
    tensors = load_file(folder / FILE)
    damage(tensors)
    save_file(tensors, folder / FILE)
    seal(folder)
    refused(folder, student, *words)


DAMAGES = [(file, damage) for file in (FILE, "adapter_config.json", "qat_lora.json") for damage in ("cut", "empty")]
DAMAGES += [(FILE, "missing"), ("adapter_config.json", "missing")]  # without qat_lora.json it is PEFT's own, and fine


@pytest.mark.parametrize(("file", "damage"), DAMAGES)
def test_a_damaged_folder_is_an_error_for_people(adapted, student, file, damage):
    _, folder = adapted
    content = (folder / file).read_bytes()
    (folder / file).unlink()
    if damage != "missing":
        (folder / file).write_bytes(content[: len(content) // 2] if damage == "cut" else b"")
    refused(folder, student, "adapter", str(folder))


@pytest.mark.parametrize(
    "changed",
    [
        {"peft_type": "IA3"},
        {"use_dora": True},
        {"use_rslora": True},
        {"bias": "all"},
        {"modules_to_save": ["lm_head"]},
        {"alpha_pattern": {"q_proj": 4}},
        {"target_modules": "all-linear"},
        {"r": "many"},
        {"r": None},
        {"r": 2.5},
        {"r": 2**40},
        {"lora_alpha": float("nan")},
        {"base_model_name_or_path": None},
        {"base_model_name_or_path": ["x"]},
    ],
)
def test_settings_that_we_would_compute_wrongly_are_refused(adapted, student, changed):
    _, folder = adapted
    rewrite(folder, **changed)
    refused(folder, student, "adapter" if changed.get("r", 0) != "many" else "")


def test_a_model_without_adapters_has_none_to_save(student, tmp_path):
    with pytest.raises(ModelError, match="no recovery adapters"):
        save_adapter(load_model(str(student)).module, LoraConfig(), tmp_path / "a", student, "0")
    assert not (tmp_path / "a").exists()


def test_what_a_folder_says_about_itself(adapted, student):
    _, folder = adapted
    info = read_adapter(folder)
    assert info.base == str(student) and info.base_sha256 == checkpoint_sha256(student)
    assert {file.name for file in folder.iterdir()} == {
        FILE,
        "adapter_config.json",
        "qat_lora.json",
        "SHA256SUMS",
    }
    assert all(tensor.dtype == torch.float16 for tensor in load_file(folder / FILE).values())


def test_starts_round_trip(tmp_path):
    assert load_starts(tmp_path) == {}
    starts = {f"layers.{i}.up": Factors(torch.randn(2, 4).half(), torch.randn(3, 2).half()) for i in range(2)}
    save_starts(starts, tmp_path)
    found = load_starts(tmp_path)
    assert list(found) == list(starts)
    for name, factors in starts.items():
        assert torch.equal(found[name].a_RI, factors.a_RI.float())
        assert torch.equal(found[name].b_OR, factors.b_OR.float())


@pytest.mark.parametrize("damage", ["cut", "half a pair"])
def test_damaged_starts_are_an_error_for_people(tmp_path, damage):
    save_starts({"up": Factors(torch.ones(2, 4), torch.ones(3, 2))}, tmp_path)
    file = tmp_path / "adapter_start.safetensors"
    if damage == "cut":
        file.write_bytes(file.read_bytes()[:40])
    else:
        save_file({"up.lora_A": torch.ones(2, 4)}, file)
    with pytest.raises(ModelError, match=r"adapter_start\.safetensors"):
        load_starts(tmp_path)
