"""`qat --dry-run`: what trains is what the run trains, memory is that of a real step, and nothing is written."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from toy_pipeline import cache_options, call, part, quantize_options

from qat_lora import cli
from qat_lora.errors import CacheError, ConfigError, ModelError
from qat_lora.files.checksums import seal
from qat_lora.layers.convert import linear_layers, make_quant_skeleton
from qat_lora.losses.objective import ObjectiveConfig, weight_tensors
from qat_lora.models.load import DTYPES, cast, load_model, make_qwen3, save_model
from qat_lora.options import QatOptions
from qat_lora.plan import training
from qat_lora.plan.training import plan_qat
from qat_lora.runtime.host.machine import LiveBytes
from qat_lora.runtime.native import NativeRuntime
from qat_lora.setup.trainable import chosen_preset, trained_parts
from qat_lora.train.loop import LoopConfig
from qat_lora.train.lr_probe import probe_steps
from qat_lora.train.optim import OptimConfig, build_optimizer
from qat_lora.train.step import add_sums, micro_batch, optimizer_step, zero_sums


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory):
    root = tmp_path_factory.mktemp("plan-qat")
    call("build_cache", cache_options(tiny, root / "cache"))
    call("quantize", quantize_options(tiny, root / "student"))
    return root


def options(tiny, cache, out, **changed):
    made = QatOptions(
        from_scratch=True,
        model=str(tiny.teacher),
        preset="w2g64",
        init="absmax",
        kd_cache_dir=str(cache),
        loop=LoopConfig(batch_size=4, accumulation_steps=2, max_steps=2),
        run=part(out, json=True),
    )
    return replace(made, **changed)


@pytest.mark.parametrize(
    "changed",
    [{}, {"preset": "q4a4", "train_parts": ("lut", "norms", "weights")}, {"mergeable": True, "mergeable_r": 4}],
    ids=["scales", "tables, norms and weights", "mergeable"],
)
def test_what_trains_is_what_the_run_trains(made, tiny, tmp_path, capfd, changed):
    asked = options(tiny, made / "cache", tmp_path / "run", **changed)
    plan = plan_qat(asked).report
    assert list(tmp_path.iterdir()) == []
    capfd.readouterr()
    call("qat", asked, run=replace(asked.run, quiet=False, json=False))
    printed = capfd.readouterr().out
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in plan["trained_by_kind"].items())
    assert f"{kinds} train" in printed and plan["trained"] == sum(plan["trained_by_kind"].values())
    assert f"effective batch {plan['effective_batch']}" in printed and plan["effective_batch"] == 8
    assert json.loads((tmp_path / "run/result.json").read_text())["step"] == plan["steps"] == 2
    assert (plan["length"], plan["head_k"], plan["assumed"]) == (32, 64, [])


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("changed", "dtype"),
    [
        ({"preset": "w2g64"}, "float32"),
        ({"preset": "w4g64a", "train_parts": ("ranges", "weights")}, "bfloat16"),
        ({"preset": "q4_r32", "train_parts": ("lut", "scales", "norms")}, "float32"),
    ],
)
def test_the_sum_is_near_the_peak_of_a_step(tmp_path, monkeypatch, changed, dtype, checkpointing):
    """Everything that is alive at once in a real step, counted at torch's dispatcher; the plan is rather too high."""
    length, rows, head_k, vocabulary = 256, 4, 16, 4096
    sizes = {"hidden": 256, "layers": 3, "heads": 4, "kv_heads": 2, "mlp": 768, "max_position_embeddings": 512}
    save_model(make_qwen3(tmp_path, vocabulary, **sizes).module, tmp_path)
    monkeypatch.setattr(training, "LENGTH", length)
    asked = QatOptions(
        from_scratch=True,
        model=str(tmp_path),
        kd_cache_dir=str(tmp_path / "none"),
        head_k=head_k,
        objective=ObjectiveConfig(loss_chunk_mb=1),
        loop=LoopConfig(batch_size=rows, gradient_checkpointing=checkpointing),
        run=part(tmp_path / "run", json=True, dtype=dtype),
        **changed,
    )
    plan, runtime = plan_qat(asked).report, NativeRuntime("cpu")
    monkeypatch.setattr(runtime, "shares_memory", False)  # or there were zeros between these small tensors
    model = load_model(str(tmp_path), dtype="float32")
    make_quant_skeleton(model.module, chosen_preset(asked))
    cast(model.module, DTYPES[dtype])
    model.tile_attention()
    groups = trained_parts(model, asked, None)
    if checkpointing:
        model.checkpoint_gradients(runtime.checkpoint_function())
    optimizer = build_optimizer(OptimConfig(), groups, runtime)
    trained = [parameter for group in groups.values() for parameter in group.values()]
    shape = (rows, length - 1)
    batch = {
        "input_ids": torch.randint(0, vocabulary, (rows, length)),
        "document_ids": torch.zeros(rows, length, dtype=torch.int32),
        "target_mask": torch.ones(shape, dtype=torch.bool),
        "head_ids": torch.arange(head_k).expand(*shape, head_k).contiguous(),
        "head_logits": -torch.arange(head_k).float().expand(*shape, head_k).contiguous(),
        "lse": torch.full(shape, 1.0),
        "log_tail": torch.full(shape, -1.0),
    }
    held = [*model.module.parameters(), *model.module.buffers(), *(p.grad for p in trained)]
    held += [value for state in optimizer.state.values() for value in state.values()]
    objective = replace(asked.objective, loss_walk=runtime.loss_walk)
    weights = weight_tensors(objective.weights_at(0.0), runtime.numbers)
    with LiveBytes(*held) as live:
        begin = live.now
        sums = add_sums(zero_sums(objective, runtime.device), micro_batch(model, batch, objective, weights))
        optimizer_step(optimizer, trained, sums, 1.0, runtime)
    counted = sum(plan["bytes"][name] for name in ("weights", "gradients", "optimizer state"))
    assert counted == pytest.approx(begin, rel=0.002)
    assert 0.95 < plan["total_bytes"] / live.peak < 1.2


def test_no_device_no_cache_and_no_file_are_needed(made, tiny, tmp_path, monkeypatch, capfd):
    """What is not here is assumed, and said to be."""
    monkeypatch.chdir(tmp_path)
    for name in ("PJRT_DEVICE", "TPU_WORKER_ID", "TPU_ACCELERATOR_TYPE"):
        monkeypatch.delenv(name, raising=False)
    line = ["qat", "--from-scratch", "--model", str(tiny.teacher), "--kd-cache-dir", "caches/none", "--tpu"]
    cli.main([*line, "--dry-run", "--train-parts", "scales,weights", "--max-steps", "10", "--blockwise-steps", "5"])
    out = capfd.readouterr().out
    assert "nothing is written" in out and "teacher at q4_r32: " in out and "effective batch 4, 4,096 tokens" in out
    assert (
        "10 steps, 40,960 tokens; before it, some 10 steps to find" in out
        and "on v6e-1 (fits)" in out
        and " weights, " in out
    )
    assert "while the start is made" in out and "while it trains" in out
    assert "assumed  caches/none is not there yet: rows of 1,024 tokens and 128 entries" in out
    assert list(tmp_path.iterdir()) == []
    cli.main(["qat", "--checkpoint", str(made / "student"), "--kd-cache-dir", "caches/none", "--dry-run", "--json"])
    plan = json.loads(capfd.readouterr().out)
    assert plan["start_bytes"] == plan["host_bytes"] == 0 and plan["trained_by_kind"].keys() == {"scales"}


def test_what_the_run_would_refuse_is_refused(made, tiny, tmp_path):
    go_on = {"from_scratch": False, "model": None, "preset": None, "init": "descent"}
    for changed, error, message in (
        ({"train_parts": ("lut",)}, ConfigError, "train_parts: lut"),
        ({"model": str(made / "student")}, ModelError, "quantised already; give the original, or no .* --from-scratch"),
        ({**go_on, "checkpoint": str(tmp_path / "none")}, ModelError, "checkpoint: there is no folder"),
        ({**go_on, "checkpoint": str(tiny.teacher)}, ConfigError, "has no quantised layers"),
        ({"kd_cache_dir": str(tmp_path)}, CacheError, "manifest"),
        ({"loop": LoopConfig(batch_size=4, global_batch_size=6)}, ConfigError, "global_batch_size: 6"),
    ):
        with pytest.raises(error, match=message):
            plan_qat(options(tiny, made / "cache", tmp_path / "run", **changed))
    assert list(tmp_path.iterdir()) == []


def test_a_stranger_to_the_cache_is_refused_however_the_checkpoint_is_named(made, tiny, tmp_path):
    """`runs/v2_q4/best.pt` names the folder `best`, whose tokenizer counts."""
    folder = shutil.copytree(made / "student", tmp_path / "best")
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["normalizer"] = {"type": "Lowercase"}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    seal(folder)
    for name in (folder, folder.with_suffix(".pt")):
        going_on = {"from_scratch": False, "model": None, "preset": None, "init": "descent", "checkpoint": str(name)}
        with pytest.raises(CacheError, match="tokenizer"):
            plan_qat(options(tiny, made / "cache", tmp_path / "run", **going_on))


def test_steps_that_find_the_rate_are_planned_where_something_follows_it(made, tiny, tmp_path):
    asked = options(tiny, made / "cache", tmp_path / "run", train_parts=("scales",))
    assert plan_qat(asked).report["lr_probe_steps"] == probe_steps(2)
    assert plan_qat(replace(asked, train=OptimConfig(scale_lr=1e-4))).report["lr_probe_steps"] == 0
    both = replace(asked, train_parts=("scales", "norms"), train=OptimConfig(scale_lr=1e-4))
    assert plan_qat(both).report["lr_probe_steps"] == probe_steps(2)


def test_doctor_knows_what_it_needs(made, tiny, tmp_path):
    asked = options(tiny, made / "cache", tmp_path / "run", train_parts=("weights",))
    plan, _, wanted = plan_qat(asked)
    whole = 4 * plan["parameters"]
    assert plan["start_bytes"] == 2 * whole and plan["host_bytes"] == whole
    assert wanted.memory == wanted.host == max(plan["total_bytes"] + whole, 2 * whole)
    assert wanted.disk > 12 * plan["trained"]
    on_cuda = replace(asked, run=replace(asked.run, device="cuda"))
    there, _, elsewhere = plan_qat(on_cuda)
    assert elsewhere.memory == max(there["total_bytes"], whole) and elsewhere.host == 2 * whole
    text = replace(asked, init="descent", metric="fisher")
    outputs = [layer.out_features for _, layer in linear_layers(load_model(str(tiny.teacher)).module)]
    (report, _, with_fisher), without = plan_qat(text), plan_qat(replace(text, metric="outputs")).requirements
    assert report["scratch_bytes"] == sum(4 * o * o for o in outputs)
    assert with_fisher.disk - without.disk == report["scratch_bytes"]
