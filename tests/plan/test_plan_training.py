"""`--dry-run`: what it says is what the run does, it needs no device, and it writes nothing."""

import contextlib
import json
import shutil
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from toy_pipeline import cache_options, call, quantize_options, recover_options

from qat_lora import cli
from qat_lora.data.sources import TextConfig
from qat_lora.errors import CacheError, ConfigError, DeviceError, ModelError
from qat_lora.layers.convert import linear_layers
from qat_lora.models.load import load_model
from qat_lora.options import EstimateOptions, RunConfig
from qat_lora.plan.quantize import plan_quantize
from qat_lora.plan.training import check_cache, device_of, plan_recover, replicas_of
from qat_lora.runtime.launch.select import ChipsConfig, choose, look
from qat_lora.train.loop import LoopConfig


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory):
    root = tmp_path_factory.mktemp("plan")
    call("build_cache", cache_options(tiny, root / "cache"))
    call("quantize", quantize_options(tiny, root / "student"))
    return root


def test_the_plan_is_what_the_run_does(made, tmp_path, capfd):
    loop = LoopConfig(batch_size=4, accumulation_steps=2, max_steps=3)
    options = recover_options(
        made / "student", made / "cache", tmp_path / "run", train_scales=True, train_norms=True, loop=loop
    )
    plan = plan_recover(options).report
    loud = replace(options, run=replace(options.run, quiet=False))
    capfd.readouterr()
    call("recover", loud)
    printed = capfd.readouterr().out
    assert f"{plan['trained']:,} numbers train" in printed
    assert f"effective batch {plan['effective_batch']}" in printed and plan["effective_batch"] == 8
    assert json.loads((tmp_path / "run/result.json").read_text())["step"] == plan["steps"] == 3
    assert (plan["length"], plan["head_k"], plan["assumed"]) == (32, 64, [])
    assert plan["tokens"] == 3 * 8 * 32 and plan["epochs"] == pytest.approx(3 * 8 / 96)


def test_a_quantised_models_plan_is_what_quantising_prints(made, tiny, tmp_path):
    plan = plan_quantize(quantize_options(tiny, tmp_path / "out")).report
    result = json.loads((made / "student/result.json").read_text())
    assert plan["layers"] == result["layers"]
    assert plan["bits_per_weight"] == pytest.approx(result["bits_per_weight"], abs=1e-4)
    assert plan["bits_per_weight_model"] == pytest.approx(result["bits_per_weight_model"], abs=1e-4)
    with pytest.raises(ModelError, match="quantised already"):
        plan_quantize(replace(quantize_options(tiny, tmp_path / "out"), model=str(made / "student")))


def test_passes_over_calibration_text_are_those_that_are_counted(made, tiny, tmp_path):
    """Sums of moments go past the counter; these rows are half a tile, whose scores are computed on both sides."""
    changed = {"init": "gptq", "start_rank": 0, "metric": "fisher", "kd_cache_dir": str(made / "cache")}
    options = replace(quantize_options(tiny, tmp_path / "out"), **changed)
    plan = plan_quantize(options).report["solvers"]
    with FlopCounterMode(display=False) as counter:
        call("quantize", options)
    layers = linear_layers(load_model(str(tiny.teacher)).module)
    shares_input = ("k_proj", "v_proj", "up_proj")  # with q_proj and gate_proj
    read = [layer.in_features for name, layer in layers if not name.endswith(shares_input)]
    moments = options.rows_of(32) * 32 * sum(4 * n * n for n in read)
    # Forwards (a backward pass is two and a half), products, layers, tokens, width, tokens.
    scores = 9.5 * 2 * 2 * 32 * 64 * 32 * options.rows_of(32)
    planned = plan["calibration_operations"] + plan["operations"] + scores
    assert counter.get_total_flops() + moments == pytest.approx(planned, rel=0.01)
    assert all(seconds > 0 for seconds in plan["seconds"].values()) and list(plan["seconds"]) == ["this CPU"]


def test_no_device_no_cache_and_no_file_are_needed(made, tmp_path, monkeypatch, capfd):
    """What is not here is assumed, and said to be."""
    monkeypatch.chdir(tmp_path)
    for name in ("PJRT_DEVICE", "TPU_WORKER_ID", "TPU_ACCELERATOR_TYPE"):
        monkeypatch.delenv(name, raising=False)
    cli.main(
        ["recover", "--checkpoint", str(made / "student"), "--kd-cache-dir", "caches/none", "--tpu", "--dry-run"]
        + ["--length", "128", "--head-k", "16", "--num-chips", "all", "--max-steps", "10"]
    )
    out = capfd.readouterr().out
    assert "nothing is written" in out and "effective batch 4, 512 tokens" in out
    assert "10 steps, 5,120 tokens; before it, some 10 steps to find" in out
    assert "on v6e-1 (fits)" in out
    assert "assumed  the number of chips is that of a machine that is not here: 1 is taken; give --num-chips N" in out
    assert "assumed  caches/none is not there yet: rows of 128 tokens and 16 entries a position" in out
    assert list(tmp_path.iterdir()) == []


def test_a_tpu_that_is_elsewhere_is_planned_for(made, tmp_path, monkeypatch):
    """PJRT_DEVICE=TPU may be exported where PyTorch/XLA is not installed."""
    monkeypatch.setenv("PJRT_DEVICE", "TPU")
    monkeypatch.setattr("qat_lora.runtime.launch.select.importlib.util.find_spec", lambda name: None)
    with pytest.raises(DeviceError):
        choose("auto", False, look())
    options = recover_options(made / "student", made / "cache", tmp_path / "run")
    plan = plan_recover(replace(options, run=replace(options.run, device="auto"))).report
    assert any(name.startswith("v6e") for name in plan["devices"])


def test_what_a_machine_elsewhere_has_is_assumed_and_said():
    assumed: list[str] = []
    assert replicas_of(RunConfig(device="cpu"), assumed) == 1 and not assumed
    assert device_of(RunConfig(tpu=True)) == "tpu" and device_of(RunConfig(device="cuda")) == "cuda"
    run = RunConfig(device="cuda", chips=ChipsConfig(num_chips="all"))
    if replicas_of(run, assumed) == 1:  # there is no GPU here, or one
        assert all("give --num-chips N" in text for text in assumed)
    asked = EstimateOptions(model="m", length=1024, head_k=64)
    assert "rows of 1,024 tokens and 64 entries" in check_cache(None, asked, "c", None, "nothing")[0]


def test_what_the_run_would_refuse_is_refused(made, tiny, tmp_path):
    options = recover_options(made / "student", made / "cache", tmp_path / "run")
    by_text = {"checkpoint": None, "model": str(tiny.teacher), "train_scales": True, "learn": "ce"}
    by_text |= {"kd_cache_dir": None, "text": TextConfig(dataset=str(tiny.text))}
    for changed, error, message in (
        ({"checkpoint": str(tmp_path / "none")}, ModelError, "checkpoint: there is no folder .*qat-lora estimate"),
        ({"kd_cache_dir": str(tmp_path)}, CacheError, "manifest"),
        ({"loop": LoopConfig(batch_size=4, global_batch_size=6)}, ConfigError, "global_batch_size: 6"),
        ({"checkpoint": None, "model": str(tiny.teacher)}, ConfigError, "is the cache's teacher itself"),
        (by_text, ConfigError, "no quantised layers"),
    ):
        with pytest.raises(error, match=message):
            plan_recover(replace(options, **changed))
    assert list(tmp_path.iterdir()) == []


def test_a_stranger_to_the_cache_is_refused(made, tmp_path):
    from qat_lora.models.load import make_qwen3, make_tokenizer

    make_tokenizer(["other words for other tokens"] * 50, 300, tmp_path / "stranger")
    model = make_qwen3(
        tmp_path / "stranger", 320, hidden=32, layers=1, heads=1, kv_heads=1, mlp=32, max_position_embeddings=64
    )
    model.module.config.save_pretrained(tmp_path / "stranger")
    options = recover_options(made / "student", made / "cache", tmp_path / "run")
    with pytest.raises(CacheError, match="tokenizer: the student's is"):
        plan_recover(replace(options, checkpoint=None, model=str(tmp_path / "stranger")))


def test_doctor_knows_what_a_planned_run_needs(made, tiny, tmp_path, capfd, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    options = recover_options(made / "student", made / "cache", tmp_path / "run", train_scales=True)
    plan, _, wanted = plan_recover(options)
    assert wanted.memory == wanted.host == plan["total_bytes"] and wanted.disk > 6 * 2 * plan["trained"]
    quantising = quantize_options(tiny, tmp_path / "out")
    rounding = plan_quantize(quantising)  # a GPU or TPU holds the weights, a host reads them from the files
    assert rounding.requirements.memory == rounding.report["own_bytes"] == rounding.requirements.host
    on_gpu = plan_quantize(replace(quantising, run=replace(quantising.run, device="cuda"))).requirements
    assert on_gpu.memory == on_gpu.host + 4 * plan["parameters"]
    with_text = plan_quantize(replace(quantising, kd_cache_dir=str(made / "cache"))).report
    widest = 96 * 96  # what `down_proj` gets
    states = 2 * 4 * quantising.calibration_rows * 32 * 64  # of the cache's rows
    assert with_text["own_bytes"] - rounding.report["own_bytes"] == states + 8 * widest  # four in float32, less two
    half = tmp_path / "half"
    load_model(str(tiny.teacher)).module.to(torch.bfloat16).save_pretrained(half)
    shutil.copy(tiny.teacher / "tokenizer.json", half)
    in_halves = plan_quantize(replace(quantising, model=str(half))).report
    assert in_halves["weights_bytes"] >= 2 * plan["parameters"] and in_halves["weights_bytes"] < 4 * plan["parameters"]
    by_text = replace(quantising, init="descent", metric="fisher", kd_cache_dir=str(made / "cache"))
    outputs = [layer.out_features for _, layer in linear_layers(load_model(str(tiny.teacher)).module)]
    without = plan_quantize(replace(by_text, metric="outputs")).requirements.disk
    assert plan_quantize(by_text).requirements.disk - without == sum(4 * o * o for o in outputs)
    wide, config = tmp_path / "wide", json.loads((half / "config.json").read_text(encoding="utf-8"))
    wide.mkdir()
    (wide / "config.json").write_text(json.dumps(config | {"vocab_size": 200_000}), encoding="utf-8")
    tokens = 8 * 32  # of a batch: its logits in pieces of 128 MB, four times, and the input of every block
    given = 16 * 2**25 + 4 * 64 * (200_000 + tokens * (config["num_hidden_layers"] + 2))
    assert plan_quantize(replace(by_text, model=str(wide))).report["own_bytes"] == 500_000_000 + given
    line = ["recover", "--checkpoint", str(made / "student"), "--kd-cache-dir", str(made / "cache"), "--device", "cpu"]
    with contextlib.suppress(SystemExit):  # this machine may lack something else
        cli.main(["doctor", *line])
    assert "this recovery wants" in capfd.readouterr().out
    with pytest.raises(SystemExit) as caught:
        cli.main(["doctor", "chat"])
    assert (
        caught.value.code == 2
        and "give cache build or quantize or recover or qat or eval or export, or nothing" in capfd.readouterr().err
    )
