"""Dry runs of `eval`, `export` and `cache build` by shapes, against the commands and their files."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from torch.utils.flop_counter import FlopCounterMode
from toy_pipeline import cache_and_student, cache_options, call, eval_options, export_options, recover_options

from qat_lora import cli
from qat_lora.errors import ConfigError, ModelError
from qat_lora.layers.convert import weight_count
from qat_lora.models.load import load_model
from qat_lora.plan.advice import memory_warning
from qat_lora.plan.forward import ROWS, plan_cache, plan_eval, plan_export
from qat_lora.plan.memory import IMPORTS_BYTES, needing
from qat_lora.plan.training import plan_recover
from qat_lora.registry import COMMANDS
from qat_lora.runtime.launch.select import ChipsConfig


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory):
    root = tmp_path_factory.mktemp("forward")
    cache, student = cache_and_student(tiny, root)
    call("recover", recover_options(student, cache, root / "run"))
    return root


@pytest.fixture
def bare(tiny, tmp_path):
    """A teacher's config and tokenizer, without its weights."""
    folder = tmp_path / "bare"
    shutil.copytree(tiny.teacher, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def test_operations_of_an_evaluation_are_those_that_are_counted(made, tiny, tmp_path):
    """Scores are not products of weights: these rows are half a tile, whose scores are computed on both sides."""
    options = eval_options(tiny, {"student": made / "run"}, tmp_path / "scores", eval_rows=16)
    plan = plan_eval(options).report
    with FlopCounterMode(display=False) as counter:
        call("evaluate", options)
    assert counter.get_total_flops() == pytest.approx(plan["operations"], rel=0.06)
    assert (plan["passes"], plan["rows"], plan["tokens"]) == (2, 16, 16 * 32)
    assert plan["assumed"] == ["students have the teacher's shape"] and list(plan["devices"]) == ["this CPU"]


def test_an_evaluation_holds_the_teachers_table_and_whole_students(made, tiny, tmp_path):
    model = load_model(str(tiny.teacher))
    weights, table = weight_count(model.module), model.module.get_input_embeddings().weight.numel()
    options = eval_options(tiny, {"a": made / "run", "b": made / "student"}, tmp_path / "scores")
    plan, _, needs = plan_eval(options)
    assert plan["bytes"]["weights"] == 4 * (table + 2 * weights)
    assert plan["bytes"]["imports"] == IMPORTS_BYTES and needs.memory == needs.host == plan["total_bytes"]
    assert plan["rows"] >= ROWS and f"all rows of a text are {ROWS:,}" in plan["assumed"]
    on_gpu, _, needs = plan_eval(replace(options, run=replace(options.run, device="cuda")))
    assert on_gpu["bytes"]["weights"] == 3 * 4 * weights and needs.host == IMPORTS_BYTES + 12 * weights
    assert list(on_gpu["devices"]) == ["a100", "h100", "h200"]


@pytest.mark.parametrize(
    "form", ["merged", "adapter", "compressed-tensors", "gguf", "mlx", "gptq", "gguf-merged", "pt"]
)
def test_an_exports_bytes_are_those_of_its_files(made, tmp_path, form):
    """Names and headers come on top, tens of kB beside a toy's weights."""
    options = export_options(made / "run", tmp_path / "out", form=form)
    plan = plan_export(options).report
    written = 1e6 * json.loads((call("export", options) / "result.json").read_text())["weights_mb"]
    assert 0.9 * plan["disk_bytes"] < written < 1.15 * plan["disk_bytes"] + 40_000
    half = plan_export(replace(options, dtype="bfloat16")).report if form != "adapter" else plan
    assert half["disk_bytes"] <= plan["disk_bytes"]
    assert plan["passes"] == (2 if form in ("gguf", "mlx") else 0)
    assert plan_export(replace(options, eval_rows=1024)).report["passes"] == (3 if form in ("gguf", "mlx") else 0)
    assert all(there["hours"] > 0 for there in plan["devices"].values())
    assert any("nothing is measured" in text for text in plan["assumed"]) != bool(plan["passes"])
    assert plan_export(replace(options, student=str(made / "student"))).report["passes"] == 0  # without a run's cache


def test_a_cache_whose_teacher_has_no_weights_here_is_planned_for_any_device(bare, tiny, tmp_path, capfd, monkeypatch):
    monkeypatch.chdir(tmp_path)
    line = ["cache", "build", "--teacher", str(bare), "--dataset", str(tiny.text), "--dry-run", "--length", "32"]
    line += ["--num-rows", "96", "--eval-rows", "12", "--top-k", "64", "--tail-draws", "0"]
    cli.main([*line, "--tpu"])
    out = capfd.readouterr().out
    assert "nothing is written" in out and "on v6e-1 (fits)" in out and "bfloat16" in out
    cli.main([*line, "--device", "cpu", "--json"])
    plan = json.loads(capfd.readouterr().out)
    assert plan["rows"] == 112 and list(plan["devices"]) == ["this CPU"]  # whole batches
    measured = call("build_cache", cache_options(tiny, tmp_path / "cache", dry_run=True))
    assert "tokens_per_second" in measured and plan["disk_bytes"] == pytest.approx(measured["bytes"], rel=0.02)
    assert [path.name for path in tmp_path.iterdir()] == ["bare"]


def test_what_cannot_be_planned_is_refused_and_what_is_assumed_is_said(bare, tiny, tmp_path, capfd):
    options = cache_options(tiny, tmp_path / "cache", teacher=str(bare), num_rows=None)
    assert f"--num-rows is not given: {ROWS:,} rows are taken" in plan_cache(options).text
    for plan, given in (
        (plan_cache, replace(options, teacher=str(tmp_path / "none"))),
        (plan_eval, replace(eval_options(tiny, {}, tmp_path / "e"), teacher=str(tmp_path / "none"))),
        (plan_export, export_options(tmp_path / "none", tmp_path / "o")),
    ):
        with pytest.raises(ModelError, match="there is no folder|config.json"):
            plan(given)
    cli.main(["doctor", "cache", "build", "--teacher", str(bare), "--dataset", "t", "--device", "cpu"])
    assert "this build" in capfd.readouterr().out


def test_a_blockwise_plan_fits_by_its_own_memory(made, tiny, tmp_path):
    options = recover_options(made / "student", made / "cache", tmp_path / "run")
    whole = plan_recover(options).report
    plan = plan_recover(replace(options, blockwise=True, model=str(tiny.teacher))).report
    assert plan["total_bytes"] == sum(plan["bytes"].values()) != whole["total_bytes"]
    assert [there["total_bytes"] for there in plan["devices"].values()] == [plan["total_bytes"]]
    assert plan["bytes"]["imports"] == IMPORTS_BYTES
    assert needing(89, 100)["fits"] and not needing(90, 100)["fits"]
    assert plan["devices"]["this CPU"]["hours"] > 1.5 * whole["devices"]["this CPU"]["hours"]
    on_tpu = replace(options, blockwise=True, model=str(tiny.teacher), run=replace(options.run, device="tpu"))
    with pytest.raises(ConfigError, match="blockwise: one process on a CPU or GPU"):
        plan_recover(on_tpu)
    narrow = json.loads((tiny.teacher / "config.json").read_text()) | {"intermediate_size": 32}
    (tmp_path / "narrow").mkdir()
    (tmp_path / "narrow/config.json").write_text(json.dumps(narrow))
    with pytest.raises(ModelError, match="has no full-precision"):
        plan_recover(replace(options, blockwise=True, model=str(tmp_path / "narrow")))


def test_what_is_here_is_measured_and_names_are_read_as_elsewhere(bare, made, tiny, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    state = call("export", export_options(made / "student", tmp_path / "state", form="pt"))
    qat = tmp_path / "qat"
    shutil.copytree(tiny.teacher, qat / "best")
    for name in (tiny.teacher, state, qat, tiny.teacher / "model.safetensors", "../no/such", "~/no"):
        options = cache_options(tiny, tmp_path / "c", teacher=str(name))
        assert options.dry_run_measures == (Path(name).exists())
    assert not cache_options(tiny, tmp_path / "c", teacher="./bare").dry_run_measures
    assert not cache_options(tiny, tmp_path / "c", teacher="bare/").dry_run_measures
    scored = eval_options(tiny, {}, tmp_path / "e")
    assert plan_eval(replace(scored, teacher=str(qat))).report["passes"] == 1
    for name in ("./no", "no", "no/such/folder"):
        with pytest.raises(ModelError, match=f"model: there is no folder {Path(name)}; give"):
            plan_eval(replace(scored, teacher=name))
    later = plan_eval(replace(scored, students=("runs/later", str(made / "student")))).report["assumed"]
    assert [said for said in later if "not here" in said] == ["runs/later is not here yet"]
    gguf = call("export", export_options(made / "run", tmp_path / "gguf", form="gguf"))
    assert plan_export(export_options(gguf, tmp_path / "o", form="pt")).report["disk_bytes"] > 0


def test_a_caches_plan_knows_its_rows_builders_and_chips(bare, tiny, tmp_path):
    options = cache_options(tiny, tmp_path / "c", teacher=str(bare))
    whole = plan_cache(options).report
    parts = [plan_cache(replace(options, builder=f"{i}/3")).report for i in range(3)]
    assert sum(part["disk_bytes"] for part in parts) == pytest.approx(whole["disk_bytes"])
    for changed in ({"hidden": True}, {"hidden": True, "top_k": 0}, {"positions": "entropy"}, {"draws": 4}):
        measured = call("build_cache", cache_options(tiny, tmp_path / "c", dry_run=True, **changed))["bytes"]
        assert plan_cache(replace(options, **changed)).report["disk_bytes"] == pytest.approx(measured, rel=0.3)
    run = replace(options.run, device="cuda", chips=ChipsConfig(num_chips="4"))
    of_four = plan_cache(replace(options, run=run)).report["devices"]
    alone = plan_cache(replace(options, run=replace(run, chips=ChipsConfig()))).report["devices"]
    assert list(of_four)[1] == "h100-4" and of_four["h100-4"]["hours"] < alone["h100"]["hours"]
    served = replace(options.served, teacher_url="http://127.0.0.1:1/v1", tokenizer=str(bare))
    with pytest.raises(ConfigError, match="teacher_url"):
        plan_cache(replace(options, served=served))


def test_a_run_is_not_stopped_by_its_own_warning(tiny, tmp_path):
    """A config that cannot be planned is refused in words by a dry run, and left to the command by the warning."""
    broken = tmp_path / "broken"
    shutil.copytree(tiny.teacher, broken)
    config = json.loads((broken / "config.json").read_text())
    for changed in (
        {"num_attention_heads": 0},
        {"hidden_act": "none"},
        {"auto_map": {"AutoConfig": "x.Y"}, "model_type": "y"},
    ):
        (broken / "config.json").write_text(json.dumps(config | changed))
        (broken / "SHA256SUMS").unlink(missing_ok=True)
        options = replace(eval_options(tiny, {}, tmp_path / "e"), teacher=str(broken))
        assert memory_warning(COMMANDS["eval"], options, 1000) == ""
        with pytest.raises(ModelError, match="config.json"):
            plan_eval(options)
    warning = memory_warning(COMMANDS["eval"], eval_options(tiny, {"a": tiny.teacher}, tmp_path / "e"), 1000)
    assert "this evaluation is estimated to need" in warning and "Try --batch-size 4" in warning


def test_settings_of_a_run_are_without_the_dry_run(made, tiny, tmp_path):
    """So folders of earlier versions, which had none, are known again."""
    call("evaluate", eval_options(tiny, {"a": made / "run"}, tmp_path / "scores", eval_rows=4))
    call("export", export_options(made / "run", tmp_path / "merged", form="merged"))
    for out in ("scores", "merged"):
        assert "dry_run" not in (tmp_path / out / "qat_lora_run.json").read_text()
