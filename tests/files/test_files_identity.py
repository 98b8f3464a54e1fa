"""A base is its weights and its settings."""

import json
import shutil

import pytest

from qat_lora.files.checksums import checkpoint_sha256, sha256_of


@pytest.fixture
def folder(tiny, tmp_path):
    return shutil.copytree(tiny.teacher, tmp_path / "copy")


def rewrite(folder, **changed):
    file = folder / "config.json"
    config = {**json.loads(file.read_text()), **changed}
    file.write_text(
        json.dumps({name: value for name, value in config.items() if name not in changed or value is not None})
    )


@pytest.mark.parametrize(
    "changed",
    [
        {"transformers_version": "9.9"},
        {"_name_or_path": "/elsewhere"},
        {"architectures": ["Other"]},
        {"dtype": None, "torch_dtype": "float32"},
    ],
)
def test_what_changes_nothing(tiny, folder, changed):
    rewrite(folder, **changed)
    assert checkpoint_sha256(folder) == checkpoint_sha256(tiny.teacher)


@pytest.mark.parametrize(
    "changed", [{"rms_norm_eps": 1e-3}, {"dtype": "bfloat16"}, {"max_position_embeddings": 8}, {"new": {"a": 1}}]
)
def test_what_changes_the_model(tiny, folder, changed):
    rewrite(folder, **changed)
    assert checkpoint_sha256(folder) != checkpoint_sha256(tiny.teacher)
    # The positive control: the weights do not tell.
    assert sha256_of(folder / "model.safetensors") == sha256_of(tiny.teacher / "model.safetensors")


def test_notes_for_people_are_no_part_of_a_quantisation(folder):
    found = set()
    for details, bits in (({"model": "/a"}, 2), ({"model": "b"}, 2), ({}, 3)):
        rewrite(folder, quantization_config={"quant_method": "x", "bits": bits, "details": details})
        found.add(checkpoint_sha256(folder))
    assert len(found) == 2


def test_the_settings_of_an_adapter_count(tmp_path):
    (tmp_path / "adapter_model.safetensors").write_bytes(b"factors")
    found = []
    for settings in ({"lora_alpha": 2}, {"lora_alpha": 3}, {"lora_alpha": 3, "base_model_name_or_path": "elsewhere"}):
        (tmp_path / "adapter_config.json").write_text(json.dumps(settings))
        found.append(checkpoint_sha256(tmp_path))
    assert found[0] != found[1] == found[2]
