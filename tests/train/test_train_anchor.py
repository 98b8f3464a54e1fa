"""The anchor: it remembers the start, weighs per token, comes round, and a resumed run is the same run."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from train_toys import LOOP, OPTIM, SETTINGS, VOCABULARY, Toy, ToyData, evaluation, tensors
from train_toys import held as in_run

from qat_lora.errors import InterruptedRunError
from qat_lora.files.folders import atomic_dir
from qat_lora.losses.objective import ObjectiveConfig
from qat_lora.runtime.launch.select import select_runtime
from qat_lora.train.callbacks import LoopHooks, RunSettings
from qat_lora.train.loop import train
from qat_lora.train.step import PreparedObjective, anchor_batches, anchor_micro_batch, micro_batch, remember

OBJECTIVE = ObjectiveConfig(anchor_weight=0.5, anchor_samples=5)


def remembered(toy, objective=OBJECTIVE):
    runtime = select_runtime("cpu")
    toy.eval()
    rows = remember(toy, ToyData(), objective, LOOP.batch_size, 5, runtime)
    toy.train()
    return rows


def as_tensors(batch):
    made = {name: torch.from_numpy(value) for name, value in batch.items()}
    return made | {name: made[name].long() for name in ("input_ids", "head_ids")}


def test_it_remembers_what_the_student_says():
    toy = Toy(dropout=0.5)
    state = torch.random.get_rng_state()
    rows = remembered(toy)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert len(rows["input_ids"]) == 5
    batch = as_tensors(rows)
    toy.eval()
    log_p = (toy.hidden(batch["input_ids"], None)[:, :-1].double() @ toy.table.double().T).log_softmax(-1)
    kept = min(64, VOCABULARY)
    want = log_p.topk(kept, -1)
    torch.testing.assert_close(batch["head_ids"], want.indices)
    back = batch["head_logits"].double() - batch["lse"].double()[..., None]
    torch.testing.assert_close(back, want.values, rtol=0, atol=1e-5)
    assert (batch["log_tail"] == -math.inf).all()  # all of this vocabulary is kept


def test_the_start_is_at_distance_zero_and_a_changed_student_is_not():
    toy = Toy()
    batch = as_tensors(remembered(toy))
    runtime = select_runtime("cpu")
    weights = {"anchor": torch.tensor([0.5])}
    sums = {"loss": torch.tensor(2.0), "tokens": torch.tensor(30.0), "loss_anchor": torch.tensor(0.0)}
    start = anchor_micro_batch(toy, batch, OBJECTIVE, weights, sums, runtime)
    assert abs(start["loss_anchor"].item()) < 1e-4 and abs(start["loss"].item() - 2) < 1e-4
    assert max(p.grad.abs().max().item() for p in (toy.a, toy.b)) < 1e-4
    with torch.no_grad():
        toy.b.add_(0.3)
    moved = anchor_micro_batch(toy, batch, OBJECTIVE, weights, sums, runtime)
    tokens = batch["target_mask"].sum()
    own = Toy()
    logits = [x.hidden(batch["input_ids"], None)[:, :-1] @ x.table.T for x in (own, toy)]
    log_t, log_p = (x.double().log_softmax(-1) for x in logits)
    mean = ((log_t.exp() * (log_t - log_p)).sum(-1) * batch["target_mask"]).sum() / tokens
    assert moved["loss_anchor"].item() / 30 == pytest.approx(mean.item(), rel=1e-4)
    assert moved["loss"].item() - 2 == pytest.approx(0.5 * 30 * mean.item(), rel=1e-4)


def test_gradient_is_that_of_both_means_however_the_step_is_made_up():
    runtime = select_runtime("cpu")
    anchor = as_tensors(remembered(Toy()))
    weights = {"kd": torch.tensor([1.0]), "anchor": torch.tensor([0.5])}

    def moved():
        toy = Toy()
        with torch.no_grad():
            toy.b.add_(0.3)
        return toy

    def gradient(parts):
        toy, zero = moved(), torch.zeros(())
        sums = {"loss": zero, "tokens": zero, "loss_kd": zero, "loss_anchor": zero}
        for numbers in parts:
            own = micro_batch(toy, tensors(numbers), OBJECTIVE, weights)
            sums = {name: value + own.get(name, 0) for name, value in sums.items()}
        anchor_micro_batch(toy, anchor, OBJECTIVE, weights, sums, runtime)
        return toy.a.grad / sums["tokens"]

    toy = moved()
    kd = micro_batch(toy, tensors(range(6)), OBJECTIVE, weights)
    kd_gradient, toy.a.grad = toy.a.grad / kd["tokens"], None
    own = micro_batch(toy, anchor, ObjectiveConfig(), {"kd": torch.tensor([1.0])})
    expected = kd_gradient + 0.5 * toy.a.grad / own["tokens"]
    for parts in ([range(6)], [range(2), range(2, 6)]):
        torch.testing.assert_close(gradient(parts), expected, rtol=0, atol=1e-6)


def test_all_rows_come_round_once_and_replicas_share_them():
    rows = {"input_ids": np.arange(5)[:, None], "target_mask": np.ones((5, 1), bool)}
    seen = [
        batch["input_ids"][batch["target_mask"][:, 0], 0]
        for replica in range(2)
        for batch in anchor_batches(rows, 0, 2, 2, replica, 2)
    ]
    assert sorted(np.concatenate(seen).tolist()) == [0, 1, 2, 3, 4]
    late = list(anchor_batches(rows, 7, 1, 2, 0, 1))[0]
    assert np.array_equal(late["input_ids"], list(anchor_batches(rows, 0, 8, 2, 0, 1))[7]["input_ids"])


def run(out, stop_after=None, **objective):
    """Train as the app does: student from its start, anchor of it, then whatever checkpoint there is."""
    runtime = select_runtime("cpu")
    torch.manual_seed(11)
    toy = Toy(dropout=0.3)
    config = replace(OBJECTIVE, **objective)
    anchor = remembered(toy, config) if config.anchor_weight else None
    steps = 0

    def count():
        nonlocal steps
        steps += 1
        if stop_after and steps > stop_after * 3:  # two micro-batches and the anchor's
            raise InterruptedRunError("enough")

    toy.before_forward = count

    def export(name):
        with atomic_dir(out / name) as draft:
            (draft / "x").write_text("")

    hooks = LoopHooks(None, export)
    config_loop = replace(LOOP, log_steps=1)
    prepared, settings = PreparedObjective(config, anchor=anchor), RunSettings(out, 5, SETTINGS, quiet=True)
    arguments = (toy.train_state(), ToyData(), prepared, OPTIM, config_loop, hooks, runtime, settings)
    with in_run(out):
        runtime.launch(lambda: train(*arguments))
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return toy, [{k: v for k, v in line.items() if not k.endswith("_per_s")} for line in lines]


def test_resume_is_the_same_run(tmp_path):
    whole, metrics = run(tmp_path / "whole")
    with pytest.raises(InterruptedRunError):
        run(tmp_path / "parts", stop_after=4)
    parts, again = run(tmp_path / "parts")
    assert again == metrics
    for name, tensor in whole.train_state().trained.items():
        assert torch.equal(tensor, parts.train_state().trained[name]), name
    assert metrics[0]["loss_anchor"] < metrics[-1]["loss_anchor"]
    for line in metrics:
        assert line["loss"] == pytest.approx(line["loss_kd"] + 0.5 * line["loss_anchor"], rel=1e-5)


def test_it_holds_the_student_back(tmp_path):
    free, _ = run(tmp_path / "free", anchor_weight=0.0)
    held, _ = run(tmp_path / "held", anchor_weight=100.0)
    start = Toy()
    moves = [((toy.a - start.a).norm() + (toy.b - start.b).norm()).item() for toy in (held, free)]
    assert moves[0] < moves[1]
    assert evaluation(free) < evaluation(start)
