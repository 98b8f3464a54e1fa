"""What a run is made of is checked when it is read: settings, tokenizer, numbers, logs."""

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file
from toy_pipeline import cache_options, call, eval_options, export_options, quantize_options, recover_options

from qat_lora.errors import CacheError, ModelError, OutputExistsError, QatLoraError
from qat_lora.files import outputs
from qat_lora.files.checksums import seal
from qat_lora.models.hub import HubConfig
from qat_lora.models.student import open_student
from qat_lora.options import AuditOptions, RunConfig
from qat_lora.train.loop import LoopConfig

LOOP = LoopConfig(batch_size=8, max_steps=4, log_steps=1, eval_steps=2, save_steps=2)


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory):
    root = tmp_path_factory.mktemp("sound")
    cache = call("build_cache", cache_options(tiny, root / "cache", num_rows=32, eval_rows=4))
    student = call("quantize", quantize_options(tiny, root / "student", cache, calibration_rows=16))
    options = recover_options(student, cache, root / "run", train_scales=True, loop=LOOP)
    return {"cache": cache, "student": student, "run": call("recover", options), "options": options}


def one_line(error, *words):
    assert "\n" not in str(error.value) and all(word in str(error.value) for word in words), str(error.value)


def interrupted(made, tmp_path):
    """Return a copy of the run as a kill after its first checkpoint leaves it, and the options that go on."""
    out = shutil.copytree(made["run"], tmp_path / "run")
    shutil.rmtree(out / "checkpoints" / "step-000004")
    outputs.reopen(out)
    options = recover_options(made["student"], made["cache"], out, train_scales=True, loop=LOOP)
    return out, options


def other_eps(folder):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"rms_norm_eps": 1e-3}))
    seal(folder)
    return folder


def test_every_export_says_which_tokenizer_it_was_trained_with(made):
    notes = [json.loads((made["run"] / name / "qat_lora.json").read_text()) for name in ("start", "best", "last")]
    assert len({note["tokenizer_sha256"] for note in notes}) == 1


def test_a_run_goes_on_as_if_never_stopped(made, tmp_path):
    out, options = interrupted(made, tmp_path)
    (out / "last" / "base" / "tokenizer.json").unlink()  # made anew all the same
    call("recover", options)
    for name in ("start", "best", "last"):
        for file in ("qat_lora.json", "adapter_model.safetensors", "base/model.safetensors"):
            assert (out / name / file).read_bytes() == (made["run"] / name / file).read_bytes()


def test_another_norm_is_another_base(made, tmp_path):
    out, options = interrupted(made, tmp_path)
    student = other_eps(shutil.copytree(made["student"], tmp_path / "student"))
    with pytest.raises(OutputExistsError, match="base_sha256 was"):
        call("recover", recover_options(student, made["cache"], out, train_scales=True, loop=LOOP))
    other_eps(out / "best" / "base")
    with pytest.raises(ModelError, match="another base"):
        open_student(str(out), HubConfig())


def test_a_flipped_digit_in_a_log_is_not_carried_on(made, tmp_path):
    out, options = interrupted(made, tmp_path)
    file = out / "metrics.jsonl"
    file.write_text(file.read_text().replace('"tokens": ', '"tokens": 1', 1))
    with pytest.raises(ModelError) as caught:
        call("recover", options)
    one_line(caught, "metrics.jsonl", "remove it")
    file.unlink()
    call("recover", options)  # as the message says
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [3, 4]


@pytest.mark.parametrize("value", [float("nan"), float("inf"), "nan"])
def test_an_alpha_that_is_no_number(made, tmp_path, value):
    best = shutil.copytree(made["run"] / "best", tmp_path / "best")
    file = best / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"lora_alpha": value}))
    seal(best)
    with pytest.raises(QatLoraError) as caught:
        call("export", export_options(best, tmp_path / "out", form="merged"))
    one_line(caught)
    assert not (tmp_path / "out").exists()


def test_a_null_base_is_one_line(made, tmp_path):
    best = shutil.copytree(made["run"] / "best", tmp_path / "best")
    shutil.rmtree(best / "base")
    file = best / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"base_model_name_or_path": None}))
    seal(best)
    with pytest.raises(ModelError, match="names its base as None"):
        open_student(str(best), HubConfig())


@pytest.mark.parametrize("file", ["model.safetensors", "adapter_start.safetensors"])
def test_a_tensor_with_nan_is_named(made, tmp_path, file):
    student = shutil.copytree(made["student"], tmp_path / "student")
    tensors = load_file(student / file)
    name = next(name for name, tensor in tensors.items() if tensor.is_floating_point())
    tensors[name].view(-1)[0] = float("nan")
    save_file(tensors, student / file, metadata={"format": "pt"})
    seal(student)
    with pytest.raises(ModelError) as caught:
        call("recover", recover_options(student, made["cache"], tmp_path / "out", loop=LOOP))
    one_line(caught, name, "NaN")
    assert not (tmp_path / "out").exists()


def test_a_teacher_that_computes_nan_leaves_no_scores(tiny, made, tmp_path):
    teacher = shutil.copytree(tiny.teacher, tmp_path / "teacher")
    tensors = load_file(teacher / "model.safetensors")
    tensors["model.norm.weight"] *= 1e38  # finite, as all weights are
    save_file(tensors, teacher / "model.safetensors", metadata={"format": "pt"})
    options = eval_options(tiny, {"student": made["student"]}, tmp_path / "eval", teacher=str(teacher))
    with pytest.raises(QatLoraError) as caught:
        call("evaluate", options)
    one_line(caught, "is ")
    assert not list(tmp_path.glob("eval/*scores.json"))


def test_a_cache_knows_its_teachers_settings(tiny, made, tmp_path):
    teacher = other_eps(Path(shutil.copytree(tiny.teacher, tmp_path / "teacher")))
    audit = AuditOptions(kd_cache_dir=str(made["cache"]), teacher=str(teacher), run=RunConfig(quiet=True))
    with pytest.raises(CacheError, match="an audit needs the same teacher"):
        call("audit_cache", audit)
