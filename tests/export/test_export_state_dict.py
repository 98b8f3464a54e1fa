"""`best.pt`: tensors that `torch.load` reads without running code, and that are the student bit for bit."""

from typing import get_args, get_type_hints

import pytest
import torch
from toy_pipeline import call, export_options

from qat_lora.commands.export import FORMS
from qat_lora.errors import ModelError
from qat_lora.export import plain
from qat_lora.export.forms import usage
from qat_lora.export.hub import files_to_upload
from qat_lora.files.checksums import STATE
from qat_lora.models.hub import HubConfig
from qat_lora.models.student import open_student
from qat_lora.options import ExportOptions

IDS = torch.arange(3, 35).reshape(1, 32)


def logits(model):
    with torch.no_grad():
        return model.logits(model.hidden(IDS, torch.zeros_like(IDS))[0])


def test_the_student_comes_back_from_its_tensors(adapted, tmp_path, monkeypatch):
    _, folder = adapted
    out = call("export", export_options(folder, tmp_path / "out", form="pt"))
    model = open_student(str(folder), HubConfig()).model
    wanted, tensors = logits(model), model.module.state_dict()
    monkeypatch.chdir(out)
    found = {}
    assert FORMS["pt"].module == f"{plain.__name__.rpartition('.')[2]}:{plain.plan_state.__name__}"
    exec(usage("pt", False), found)  # as the card says it, with weights_only=True
    assert found["state"].keys() == tensors.keys()
    assert all(torch.equal(found["state"][name], tensor) for name, tensor in tensors.items())
    assert any(name.endswith(".codes") for name in tensors) and any("lora_A" in name for name in tensors)
    with torch.no_grad():
        for parameter in model.module.parameters():
            if parameter.is_floating_point():
                parameter.zero_()
    assert not torch.equal(logits(model), wanted)
    model.module.load_state_dict(found["state"], strict=True)
    assert torch.equal(logits(model), wanted)


def test_half_the_size_and_refused_without_its_config(adapted, tmp_path):
    _, folder = adapted
    whole = call("export", export_options(folder, tmp_path / "whole", form="pt"))
    options = export_options(folder, tmp_path / "half", form="pt")
    half = call("export", options, dtype="bfloat16")
    assert (half / STATE).stat().st_size < 0.8 * (whole / STATE).stat().st_size
    (half / "config.json").unlink()
    with pytest.raises(ModelError, match="is a pickled file"):
        open_student(str(half / STATE), HubConfig())
    with pytest.raises(ModelError, match="best.pt may be pickled"):
        files_to_upload(whole)


def test_the_option_names_the_forms_of_the_table():
    assert get_args(get_type_hints(ExportOptions)["form"]) == tuple(FORMS)
