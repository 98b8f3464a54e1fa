"""Estimators and anchor through the commands: one cache with everything, recover by each, refusals in time."""

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from toy_pipeline import cache_options, call, quantize_options, recover_options

from qat_lora.cache.format.codec import OPTIONAL
from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.errors import CacheError, ConfigError, OutputExistsError
from qat_lora.evaluate.score import measure
from qat_lora.losses.objective import ObjectiveConfig
from qat_lora.models.load import load_model
from qat_lora.models.student import open_student
from qat_lora.runtime.launch.select import select_runtime
from qat_lora.setup import training
from qat_lora.setup.training import check_arrays, evaluation_objective, prepare
from qat_lora.train.loop import LoopConfig
from qat_lora.train.metrics import read_metrics


@pytest.fixture(scope="module")
def made(tiny, tmp_path_factory):
    root = tmp_path_factory.mktemp("objectives")
    extras = dict(top_k=16, tail_draws=4, draws=12, hidden=True, temperatures=(1.0, 2.0))
    cache = call("build_cache", cache_options(tiny, root / "cache", **extras))
    plain = call("build_cache", cache_options(tiny, root / "plain", top_k=16))
    student = call("quantize", quantize_options(tiny, root / "student"))
    return root, cache, plain, student


def options(made, name, cache=None, **objective):
    root, full, _, student = made
    return recover_options(student, cache or full, root / name, objective=ObjectiveConfig(**objective))


@pytest.mark.parametrize(
    "objective,head_k",
    [
        ({"estimator": "full", "temperature": 2.0, "hidden_weight": 0.1}, None),
        ({"estimator": "hybrid", "draws": 3}, None),
        ({"estimator": "sampled"}, 4),
        ({"estimator": "ghost"}, 4),
    ],
    ids=["full", "hybrid", "sampled", "ghost"],
)
def test_each_learns_from_one_cache(made, objective, head_k):
    name = objective["estimator"]
    out = call("recover", replace(options(made, name, **objective), head_k=head_k))
    kls = [line["kl"] for line in read_metrics(out / "evaluations.jsonl")]
    assert kls[-1] < kls[0]
    assert ("kl" if head_k is None else "kl_bound") in read_metrics(out / "metrics.jsonl")[-1]
    terms = {"loss", "loss_kd", "loss_hidden"} if "hidden_weight" in objective else {"loss", "loss_kd"}
    assert {key for key in read_metrics(out / "metrics.jsonl")[-1] if key.startswith("loss")} == terms


@pytest.mark.parametrize("positions", ["all", "entropy"])
def test_draws_alone_train_and_are_measured_in_kl(made, positions, tmp_path, tiny):
    settings = dict(top_k=0, draws=64, row_codec="lzma", positions=positions)
    cache = call("build_cache", cache_options(tiny, tmp_path / "cache", **settings))
    run = call("recover", options(made, tmp_path / "run", cache))  # `auto` is `sampled` there
    exact = call("recover", options(made, tmp_path / "exact", estimator="full"))
    for name in ("evaluations.jsonl", "metrics.jsonl"):
        kls, wanted = ([line["kl"] for line in read_metrics(out / name, "kl")] for out in (run, exact))
        assert kls == pytest.approx(wanted, abs=0.03 if positions == "entropy" else 0.01), name
        assert kls[-1] < kls[0] or name == "metrics.jsonl"


@pytest.mark.parametrize(
    "objective",
    [
        {"estimator": "ghost", "temperature_schedule": (2.0, 1.0)},
        {"estimator": "full", "temperature": 3.0, "temperature_end": 1.0},
    ],
    ids=["steps", "moves"],
)
def test_a_run_goes_on_within_its_temperature_schedule(made, objective):
    name = objective["estimator"]
    whole = options(made, f"{name}-whole", **objective)
    parts = options(made, f"{name}-parts", **objective)
    call("recover", whole)
    for step in (3, 5, None):
        call("recover", replace(parts, loop=replace(parts.loop, until_step=step)))
    files = [made[0] / f"{name}-{run}" / "last" / "adapter_model.safetensors" for run in ("whole", "parts")]
    assert files[0].read_bytes() == files[1].read_bytes()
    fixed = call("recover", options(made, f"{name}-fixed", estimator=name, temperature=1.0))
    assert files[0].read_bytes() != (fixed / "last" / "adapter_model.safetensors").read_bytes()


@pytest.mark.parametrize(
    "objective",
    [
        {"estimator": "hybrid", "ce_weight": 0.5},
        {"estimator": "sampled", "anchor_weight": 0.5, "anchor_samples": 4},
        {"estimator": "full"},
        {"kd_weight": 0.0, "ce_weight": 1.0},
    ],
    ids=["hybrid", "sampled", "full", "ce"],
)
def test_the_logs_kl_is_the_evaluations_on_the_same_rows(made, objective, tmp_path, monkeypatch):
    real = training.cache_training_data
    monkeypatch.setattr(training, "cache_training_data", lambda o: replace(data := real(o), evaluation=data.rows))
    rows = len(KDCacheDataset(made[1]))
    loop = LoopConfig(batch_size=rows, max_steps=2, eval_steps=1)
    run = call("recover", replace(options(made, tmp_path / "run", **objective), loop=loop))
    logged = [line["kl"] for line in read_metrics(run / "metrics.jsonl", "kl")]
    evaluated = [line["kl"] for line in read_metrics(run / "evaluations.jsonl")]
    assert logged == pytest.approx(evaluated[:2], rel=1e-5)
    assert logged[1] != pytest.approx(logged[0], rel=1e-3)


@pytest.mark.parametrize("estimator,k", [("hybrid", None), ("ghost", None), ("ghost", 2)])
def test_the_logs_kl_is_that_of_eval_and_the_bound_is_not(made, tiny, tmp_path, estimator, k):
    """The log at its first step, and the evaluation before it; 97 % of the toy is tail, hence many draws."""
    found, settings = {}, dict(top_k=4, eval_rows=12)
    for name, draws in (("draws", 400), ("none", 0)):
        if draws or estimator == "ghost":
            cache = call("build_cache", cache_options(tiny, tmp_path / name, tail_draws=draws, **settings))
            rows = {split: KDCacheDataset(cache, split=split) for split in ("train", "eval")}
            loop = LoopConfig(batch_size=len(rows["train"]), max_steps=1, eval_steps=1)
            begun = options(made, tmp_path / f"run-{name}", cache, estimator=estimator)
            run = call("recover", replace(begun, loop=loop, head_k=k))
            lines = [read_metrics(run / file)[0] for file in ("metrics.jsonl", "evaluations.jsonl")]
            found[name] = dict(zip(("train", "eval"), lines, strict=True))
            best = {key for key in json.loads((run / "result.json").read_text()) if key.startswith("best_")}
            assert best == {"best_step", "best_kl" if draws else "best_kl_bound"}
    teacher, student = load_model(str(tiny.teacher)), open_student(str(run / "start")).model
    for split, dataset in rows.items():
        batch = {name: torch.from_numpy(values) for name, values in dataset.rows(range(len(dataset))).items()}
        exact = measure(teacher, {"student": student}, [batch], quiet=True)["student"].figures["kl"]
        if k is None or split == "eval":
            assert found["draws"][split]["kl"] == pytest.approx(exact, rel=0.05)
            assert "kl_bound" not in found["draws"][split]
        else:  # the draws do not go with fewer entries, but with all in evaluations
            assert found["draws"][split]["kl_bound"] < 0.8 * exact
        if estimator == "ghost":  # positive control: the tail as one bucket
            assert found["none"][split]["kl_bound"] < 0.8 * exact and "kl" not in found["none"][split]


def test_an_anchored_run_interrupted_is_the_same_run(made, monkeypatch):
    """The student before step 1 is remembered again from its start, not from the checkpoint."""
    anchored = dict(anchor_weight=0.5, anchor_samples=10)
    whole = call("recover", options(made, "whole", **anchored))
    from qat_lora.train import callbacks

    save, saved = callbacks.save_checkpoint, []

    def killed(*arguments):
        saved.append(save(*arguments))
        raise KeyboardInterrupt

    monkeypatch.setattr(callbacks, "save_checkpoint", killed)
    with pytest.raises(KeyboardInterrupt):
        call("recover", options(made, "parts", **anchored))
    monkeypatch.setattr(callbacks, "save_checkpoint", save)
    parts = call("recover", options(made, "parts", **anchored))
    assert json.loads((parts / "result.json").read_text())["resumed_from"] == 4
    for name, tensor in load_file(whole / "last" / "adapter_model.safetensors").items():
        assert torch.equal(tensor, load_file(parts / "last" / "adapter_model.safetensors")[name]), name
    lines = [read_metrics(folder / "metrics.jsonl") for folder in (whole, parts)]
    assert [x["loss_anchor"] for x in lines[0]] == [x["loss_anchor"] for x in lines[1]]
    assert abs(lines[0][0]["loss_anchor"]) < 1e-6 < lines[0][-1]["loss_anchor"]
    for line in lines[0]:
        assert line["loss"] == pytest.approx(line["loss_kd"] + 0.5 * line["loss_anchor"], rel=1e-4)
    smaller = options(made, "whole", **anchored)
    smaller = replace(smaller, loop=replace(smaller.loop, batch_size=8, accumulation_steps=2))
    with pytest.raises(OutputExistsError, match="anchor_batch_rows was 16, now 8"):
        call("recover", smaller)


@pytest.mark.parametrize(
    "objective,message",
    [
        ({"estimator": "full"}, "estimator full needs it.*--hidden"),
        ({"estimator": "full", "hidden_weight": 1.0}, "estimator full needs it.*--hidden"),
        ({"estimator": "hybrid"}, "--tail-draws 8"),
        ({"estimator": "sampled"}, "--draws 32"),
        ({"hidden_weight": 1.0}, "hidden_weight needs it.*--hidden"),
    ],
)
def test_a_cache_without_the_array_is_refused_before_a_model_is_loaded(made, objective, message, monkeypatch):
    monkeypatch.setattr("qat_lora.commands.recover.load_model", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(CacheError, match=message):
        call("recover", options(made, "refused", cache=made[2], **objective))
    assert not (made[0] / "refused").exists()


@pytest.mark.parametrize("estimator,draws,flag", [("hybrid", 5, "--tail-draws 5"), ("sampled", 13, "--draws 13")])
def test_more_draws_than_there_are_are_refused_before_a_model_is_loaded(made, estimator, draws, flag, monkeypatch):
    monkeypatch.setattr("qat_lora.commands.recover.load_model", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(CacheError, match=f"draws: {draws} are asked for, the KD cache holds {draws - 1}; .*{flag}"):
        call("recover", options(made, "too-many-draws", estimator=estimator, draws=draws))


@pytest.mark.parametrize(
    "objective,served",
    [
        ({}, {"tail_draw_ids"}),
        ({"temperature": 1.0, "estimator": "ghost"}, set()),
        ({"estimator": "sampled", "hidden_weight": 1.0}, {"draw_ids", "teacher_hidden"}),
        ({"estimator": "full"}, {"teacher_hidden"}),
        ({"kd_weight": 0.0, "ce_weight": 1.0}, set()),
        ({"kd_weight": 0.0, "hidden_weight": 1.0}, {"teacher_hidden"}),
    ],
)
def test_a_batch_carries_only_what_the_objective_and_the_logs_kl_read(made, objective, served):
    dataset = KDCacheDataset(made[1])
    check_arrays(dataset, ObjectiveConfig(**objective))
    no_kl_beside = objective.get("estimator") == "full" or objective == {"kd_weight": 0.0, "hidden_weight": 1.0}
    drawn = set() if no_kl_beside else {"tail_draw_ids", "tail_entropy"}
    assert set(dataset.rows([0, -1])) & {*OPTIONAL, "tail_entropy"} == served | drawn
    fewer = KDCacheDataset(made[1], k=4)
    if "tail_draw_ids" in served:
        with pytest.raises(CacheError, match="k: the cache's draws are from the tail behind 16 .*with 4 of them"):
            check_arrays(fewer, ObjectiveConfig(**objective))
    else:
        check_arrays(fewer, ObjectiveConfig(**objective))
        assert set(fewer.rows([0, -1])) & {*OPTIONAL, "tail_entropy"} == served


@pytest.mark.parametrize(
    "objective,user,advice",
    [
        ({"estimator": "ghost"}, "estimator ghost", "give --estimator full"),
        ({"estimator": "full", "hard_top1_weight": 1.0}, "hard_top1_weight", "set it to 0"),
    ],
)
def test_a_cache_of_hidden_states_alone_is_refused_before_a_model_is_loaded(
    made, tiny, objective, user, advice, tmp_path, monkeypatch
):
    cache = call("build_cache", cache_options(tiny, tmp_path / "cache", top_k=0, hidden=True, num_rows=4, eval_rows=0))
    monkeypatch.setattr("qat_lora.commands.recover.load_model", lambda *_: pytest.fail("a model was loaded"))
    with pytest.raises(CacheError, match=f"{user} needs .*--top-k 0; {advice}"):
        call("recover", options(made, "headless", cache=cache, **objective))


def test_more_anchor_rows_than_rows_are_refused(made):
    with pytest.raises(ConfigError, match="anchor_samples: 1000 rows are more than the"):
        call("recover", options(made, "too-many", anchor_weight=1.0, anchor_samples=1000))


def test_what_is_prepared_and_what_evaluates(made):
    runtime = select_runtime("cpu")
    dataset = KDCacheDataset(made[1])
    auto = prepare(ObjectiveConfig(estimator="full"), dataset, None, None, 0, runtime)
    assert auto.objective.loss_walk == "vocabulary" == runtime.loss_walk
    assert auto.anchor is None and auto.teacher_lm_head.vocab_size == dataset.manifest.fingerprint.vocab_size
    asked = prepare(ObjectiveConfig(loss_walk="positions"), dataset, None, None, 0, runtime)
    assert asked.objective.loss_walk == "positions" and asked.teacher_lm_head is None
    with pytest.raises(ConfigError, match="loss_walk: kernel needs Triton .* this is CPU .* give auto, positions or"):
        prepare(ObjectiveConfig(loss_walk="kernel"), dataset, None, None, 0, runtime)
    assert asked.objective.estimator == "hybrid"  # what `auto` means for a cache with draws from the tail
    report = evaluation_objective(ObjectiveConfig(temperature=2.0, ce_weight=1.0), auto.teacher_lm_head)
    assert (report.estimator, report.temperature, report.ce_weight) == ("full", 1.0, 0.0)
    assert evaluation_objective(ObjectiveConfig(estimator="renorm"), None).estimator == "ghost"
