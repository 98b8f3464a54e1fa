"""A merged model loads in plain transformers and gives our logits."""

import json
import subprocess
import sys

import pytest
import torch
from toy_pipeline import call, export_options

from qat_lora.errors import ModelError
from qat_lora.export import plain
from qat_lora.export.forms import ExportJob
from qat_lora.models.hub import HubConfig
from qat_lora.models.load import load_model
from qat_lora.models.student import open_student

PLAIN = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
torch.set_num_threads(1)
model, report = AutoModelForCausalLM.from_pretrained(sys.argv[1], output_loading_info=True)
assert not any(report.values()), report
assert len(AutoTokenizer.from_pretrained(sys.argv[1])) > 256
with torch.inference_mode():
    torch.save(model(torch.arange(20)[None]).logits[0], sys.argv[2])
assert not any(name.startswith("qat_lora") for name in sys.modules)
"""


def test_logits_are_ours_in_plain_transformers(adapted, tmp_path):
    _, folder = adapted
    ours = open_student(str(folder), HubConfig()).model
    with torch.inference_mode():
        wanted = ours.logits(ours.hidden(torch.arange(20)[None], torch.zeros(1, 20, dtype=torch.int32))[0])
    out = call("export", export_options(folder, tmp_path / "merged"))
    # -I: nothing of this package is on the path, so nothing of it can help
    command = [sys.executable, "-I", "-c", PLAIN, out, tmp_path / "logits.pt"]
    done = subprocess.run(command, capture_output=True, text=True, env={"USE_TORCH_XLA": "0"})
    assert done.returncode == 0, done.stderr
    difference = (torch.load(tmp_path / "logits.pt", weights_only=True) - wanted).abs().max()
    assert difference < 1e-5 * max(1.0, float(wanted.abs().max()))
    assert wanted.abs().max() > 0.1
    config = json.loads((out / "config.json").read_text())
    assert "quantization_config" not in config
    assert "lora" not in (out / "model.safetensors").read_bytes()[:8000].decode("latin-1")


def test_a_quantised_student_without_adapter_merges_too(student, tmp_path):
    out = call("export", export_options(student, tmp_path / "merged"))
    dense, ours = load_model(str(out)), load_model(str(student))
    for name, parameter in dense.module.named_parameters():
        if name.endswith("proj.weight"):
            assert torch.equal(parameter, ours.module.get_submodule(name.removesuffix(".weight")).weight), name


def test_a_plain_model_is_refused(tiny):
    student = open_student(str(tiny.teacher), HubConfig())
    with pytest.raises(ModelError, match="nothing to merge"):
        plain.plan_merged(ExportJob("teacher", student, None, None, "float32"))
