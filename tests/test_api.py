"""The public names: there, documented, typed, and the jobs as functions."""

import ast
import inspect
import json
import re
import tomllib
from pathlib import Path

import pytest

import qat_lora
from qat_lora import api
from qat_lora.errors import ConfigError
from qat_lora.options import QuantizeOptions, RunConfig

ROOT = Path(__file__).resolve().parents[1]
PUBLIC = (
    "KDCacheDataset QuantSpec build_kd_cache evaluate_models export_student fused_linear_kd generate_text "
    "is_xla_device kd_soft_ce notebook_launch quantize_model train_recovery_lora xla_mark_step"
)


def test_the_public_names_are_these():
    assert sorted(qat_lora.__all__) == sorted(PUBLIC.split())
    assert set(qat_lora.__all__) == set(qat_lora._HOMES) and set(qat_lora.__all__) <= set(dir(qat_lora))
    for name in qat_lora.__all__:
        thing = getattr(qat_lora, name)
        assert inspect.getdoc(thing) and thing.__module__ == qat_lora._HOMES[name], name
        assert name in qat_lora.__doc__
    with pytest.raises(AttributeError, match="nonsense"):
        qat_lora.nonsense  # noqa: B018


def test_type_checkers_see_the_same_names_from_the_same_places():
    tree = ast.parse((ROOT / "qat_lora" / "__init__.pyi").read_text(encoding="utf-8"))
    seen = {alias.name: node.module for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert seen == qat_lora._HOMES


def test_the_version_is_the_projects():
    written = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" in written["project"]["dynamic"] and re.fullmatch(r"\d+\.\d+\.\d+", qat_lora.__version__)
    assert written["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "qat_lora.__version__"}


def test_the_jobs_as_functions(tiny, tmp_path):
    common = {"device": "cpu", "quiet": True}
    cache = qat_lora.build_kd_cache(
        teacher=tiny.teacher, dataset=tiny.text, length=32, top_k=8, num_rows=16, out=tmp_path / "cache", **common
    )
    assert cache == tmp_path / "cache" and len(qat_lora.KDCacheDataset(cache)) == 16
    options = QuantizeOptions(
        model=str(tiny.teacher), init="mse", start_rank=4, run=RunConfig(out=str(tmp_path / "q"), **common)
    )
    student = qat_lora.quantize_model(options)
    assert json.loads((student / "result.json").read_text())["bits_per_weight"] < 2.5
    (tmp_path / "recipe.yaml").write_text(f"checkpoint: {student}\nmax_steps: 9\nloop:\n  batch_size: 2\n")
    run = qat_lora.train_recovery_lora(
        recipe=tmp_path / "recipe.yaml", cache_dir=cache, recovery_r=4, max_steps=2, out=tmp_path / "run", **common
    )
    assert json.loads((run / "result.json").read_text())["step"] == 2 and (run / "last").is_dir()
    scores = qat_lora.evaluate_models(
        teacher=tiny.teacher, students=[f"a={run}"], dataset=tiny.held_out, length=32, eval_rows=4, resamples=100,
        out=tmp_path / "scores", **common,
    )  # fmt: skip
    assert scores["teacher"]["kl"] == 0 < scores["a"]["kl"]
    text = qat_lora.generate_text(student=run, prompt="the row", max_new_tokens=2, **common)
    assert isinstance(text, str)
    exported = qat_lora.export_student(student=run, form="adapter", out=tmp_path / "exported", **common)
    assert exported == tmp_path / "exported" and (exported / "base" / "config.json").is_file()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: api.quantize_model(QuantizeOptions(model="x", init="mse"), preset="w2g64"), "not both"),
        (lambda: api.quantize_model({"model": "x"}), "expected QuantizeOptions, got dict"),
        (lambda: api.train_recovery_lora(kd_cache="x"), "kd_cache: no such setting; the nearest: kd_cache_dir"),
        (lambda: api.build_kd_cache(dataset="x"), "teacher: missing"),
    ],
)
def test_wrong_calls_are_refused(call, says):
    with pytest.raises(ConfigError, match=says):
        call()
