"""Every export opens by its folder, adapter included, and computes what the student computes; damage is refused."""

import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from toy_pipeline import call, export_options

from qat_lora.errors import ModelError, QatLoraError
from qat_lora.export.forms import FORMS
from qat_lora.files.checksums import seal
from qat_lora.layers.convert import lora_layers
from qat_lora.models.adapter import engine_adapter
from qat_lora.models.student import open_student

IDS = torch.arange(3, 35).reshape(1, 32)


def logits(folder):
    student = open_student(str(folder))
    with torch.no_grad():
        return student, student.model.logits(student.model.hidden(IDS, torch.zeros_like(IDS))[0])


@pytest.fixture
def exported(adapted, tmp_path):
    made = {}

    def export(form):
        if form not in made:
            dense = {"embedding_bits": 16.0} if form in ("gguf", "mlx") else {}
            made[form] = call("export", export_options(adapted[1], tmp_path / f"as-{form}", form=form, **dense))
        return made[form]

    return export


@pytest.mark.parametrize("form", FORMS)
def test_an_export_is_scored_as_the_student_that_it_holds(form, adapted, exported):
    _, wanted = logits(adapted[1])
    _, base = logits(adapted[0].folder)
    student, found = logits(exported(form))
    # The toy's codes are rounded again by some forms, and factors to float16 or 8 bits: far less than the adapter adds.
    rounded = float((found - wanted).norm() / (base - wanted).norm())
    assert rounded < (1e-5 if form == "pt" else 0.05), rounded
    files = [f for f in exported(form).rglob("*") if f.suffix in (".safetensors", ".gguf", ".pt")]
    assert student.sizes["size_mb"] == round(sum(f.stat().st_size for f in files) / 1e6, 3)


@pytest.mark.parametrize("form", ["gguf", "mlx", "pt"])
def test_without_reading_the_adapter_the_figures_would_be_the_bases(form, adapted, exported):
    """The naive opener loads the base alone, and nothing tells it that something is missing."""
    folder = exported(form)
    assert lora_layers(logits(folder)[0].model.module).keys() == lora_layers(adapted[0].module).keys()
    assert engine_adapter(folder).name == {"mlx": "adapters.safetensors", "pt": "best.pt"}.get(form, "adapter.gguf")
    if form == "pt":
        return
    shutil.rmtree(folder / "adapters") if form == "mlx" else (folder / "adapter.gguf").unlink()
    student, found = logits(folder)
    assert not lora_layers(student.model.module)
    assert not torch.allclose(found, logits(adapted[1])[1], atol=1e-2)


def test_a_factor_of_a_layer_that_is_not_there_is_refused(exported):
    file = exported("mlx") / "adapters" / "adapters.safetensors"
    state = load_file(file)
    save_file({name.replace("layers.0", "layers.7"): tensor for name, tensor in state.items()}, file)
    seal(file.parent)
    with pytest.raises(ModelError, match="start: holds corrections for layers that the model lacks"):
        open_student(str(exported("mlx")))


def test_a_lacking_factor_is_refused(exported):
    file = exported("mlx") / "adapters" / "adapters.safetensors"
    state = load_file(file)
    state.pop(next(name for name in state if name.endswith(".lora_b")))
    save_file(state, file)
    seal(file.parent)
    with pytest.raises(ModelError, match="does not fit the base beside it"):
        open_student(str(exported("mlx")))


class Evil:
    def __reduce__(self):
        return (print, ("ran",))


@pytest.mark.parametrize("content", [pickle.dumps(Evil()), b"", None], ids=["code", "empty", "no tensors"])
def test_a_pickle_that_is_no_state_dict_never_runs(content, exported, capsys):
    file = exported("pt") / "best.pt"
    torch.save({"step": 3}, file) if content is None else file.write_bytes(content)
    with pytest.raises(QatLoraError, match="is not what was written"):
        open_student(str(file))
    (file.parent / "SHA256SUMS").unlink()
    (file.parent / "qat_lora.json").write_text(json.dumps({}))
    with pytest.raises(ModelError, match="is no state dict that can be read"):
        open_student(str(file.parent))
    assert "ran" not in capsys.readouterr().out


def test_a_strangers_file_of_an_exports_name_changes_nothing(student, tmp_path):
    shutil.copytree(student, tmp_path / "student")
    _, wanted = logits(tmp_path / "student")
    (tmp_path / "student" / "best.pt").write_bytes(pickle.dumps(Evil()))
    opened, found = logits(tmp_path / "student")
    assert torch.equal(found, wanted) and not lora_layers(opened.model.module)
