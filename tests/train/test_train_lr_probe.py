"""The learning rate by trials: its search, that it leaves no trace, and that it survives kills."""

import json
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from test_train_loop import assert_same
from toy_paths import clean_environment
from train_kills import fork, wait
from train_toys import OPTIM, Toy, ToyData, run

from qat_lora.data.shuffle import global_batch
from qat_lora.errors import CacheDamaged, ConfigError, DivergedError, InterruptedRunError
from qat_lora.train import lr_probe
from qat_lora.train.lr_probe import FILE, probe_steps, trial_steps
from qat_lora.train.optim import FIRST_LR, OptimConfig, TrainState

AUTO = replace(OPTIM, lr="auto", scale_lr=None, ema=0.9)


def found(out):
    return json.loads((out / FILE).read_text())


def counting(toy):
    """Return a list that grows with each forward of a toy."""
    forwards = []
    toy.before_forward = lambda: forwards.append(1)
    return forwards


@pytest.fixture(scope="module")
def automatic(tmp_path_factory):
    out = tmp_path_factory.mktemp("auto")
    return out, *run(out, optim=AUTO)


def test_a_longer_run_goes_farther_from_its_trials_rate():
    """As far as was measured, at 100 and at 366 steps: a run of 100,000 no farther than one of 366."""
    losses = {0: 0.9, 1: 0.95, -1: 0.95}  # a parabola whose vertex is FIRST_LR
    rates = [lr_probe._found(1.0, losses, steps)["lr"] / FIRST_LR for steps in (20, 100, 200, 366, 2_000, 100_000)]
    assert rates == pytest.approx([10**0.25, (100 / 3) ** 0.25, rates[2], *[(100 / 3) ** 0.5] * 3], rel=0.02)
    assert rates[1] < rates[2] < rates[3]


def test_after_the_trials_the_run_is_bit_for_bit_the_one_at_that_rate(automatic, tmp_path):
    out, result, toy = automatic
    lr = result["lr_probe"]["lr"]
    assert lr == found(out)["lr"] and lr != FIRST_LR
    result_2, toy_2 = run(tmp_path / "given", optim=replace(AUTO, lr=lr))
    assert "lr_probe" not in result_2
    for file in ("metrics.jsonl", "evaluations.jsonl"):
        lines = [[json.loads(text) for text in (d / file).read_text().splitlines()] for d in (out, tmp_path / "given")]
        plain = [[{k: v for k, v in line.items() if not k.endswith("_per_s")} for line in each] for each in lines]
        assert plain[0] == plain[1] and plain[0], file
    for name, tensor in toy.train_state().trained.items():
        assert torch.equal(tensor, toy_2.train_state().trained[name]), name
    last = [sorted((d / "checkpoints").iterdir())[-1] for d in (out, tmp_path / "given")]
    for file in ("trained.safetensors", "optimizer.safetensors"):
        assert (last[0] / file).read_bytes() == (last[1] / file).read_bytes(), file


def test_the_steps_are_those_that_the_plan_counts_and_none_on_resume(automatic, tmp_path):
    out, result, _ = automatic
    trials = found(out)["trials"]
    toy = Toy(dropout=0.3)
    forwards = counting(toy)
    run(tmp_path, toy, optim=AUTO, evaluate=False, max_steps=1, log_steps=1)
    steps = probe_steps(1, len(found(tmp_path)["trials"]))
    assert len(forwards) == 2 * (steps + 1)  # two micro-batches a step
    toy = Toy(dropout=0.3)
    forwards = counting(toy)
    run(tmp_path, toy, optim=AUTO, evaluate=False, max_steps=1, log_steps=1)
    assert not forwards
    assert result["lr_probe"]["steps"] == probe_steps(10, len(trials)) and trial_steps(10) == found(out)["trial_steps"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks processes to kill them")
@pytest.mark.parametrize("after", [1, 3, 5])
def test_killed_between_trials_it_goes_on_after_them(automatic, tmp_path, after, monkeypatch):
    out, result, _ = automatic

    def killed():
        os.environ["QAT_LORA_FAILPOINT"] = f"lr-trial:{after}"
        run(tmp_path / "killed", optim=AUTO)

    assert wait(fork(killed)) == -signal.SIGKILL
    assert len(found(tmp_path / "killed")["trials"]) == after - 1
    assert not (tmp_path / "killed" / "metrics.jsonl").exists() and "lr" not in found(tmp_path / "killed")
    taken, trial = [], lr_probe._trial
    monkeypatch.setattr(lr_probe, "_trial", lambda *given: taken.append(1) or trial(*given))
    assert run(tmp_path / "killed", optim=AUTO)[0] == result
    assert len(taken) == len(found(out)["trials"]) + 1 - after
    assert_same(tmp_path / "killed", out)
    assert found(tmp_path / "killed") == found(out)


@pytest.mark.parametrize("text", [None, "{", '{"trial_steps": 2, "start_loss": 3.0, "trials": [{}]}'])
def test_a_file_that_is_lost_or_damaged_is_made_again(automatic, tmp_path, text):
    out, _, toy = automatic
    with pytest.raises(InterruptedRunError):
        run(tmp_path, optim=AUTO, data=Signals(after=probe_steps(10, len(found(out)["trials"])) + 5))
    (tmp_path / FILE).unlink() if text is None else (tmp_path / FILE).write_text(text)
    result, toy_2 = run(tmp_path, optim=AUTO)
    assert result["resumed_from"] > 0 and found(tmp_path) == found(out)
    assert torch.equal(toy.a, toy_2.a)


class Signals(ToyData):
    """Rows, and a SIGTERM after some steps of them."""

    def __init__(self, after):
        self.left = after

    def batches(self, *given, **more):
        for i, batch in enumerate(super().batches(*given, **more)):
            self.left -= i % 2 == 0
            if self.left == 0:
                signal.raise_signal(signal.SIGTERM)
            yield batch


def test_stopped_in_a_trial_it_says_so_and_keeps_the_others(automatic, tmp_path):
    out, result, _ = automatic
    told = f"stopped by SIGTERM while seeking the learning rate; .* kept in {FILE}, and the same command goes on"
    toy = Toy(dropout=0.3)
    before = {name: tensor.detach().clone() for name, tensor in toy.train_state().trained.items()}
    with pytest.raises(InterruptedRunError, match=told):
        run(tmp_path, toy, optim=AUTO, data=Signals(after=1 + 3 + 2))
    assert len(found(tmp_path)["trials"]) == 1 and not (tmp_path / "checkpoints").exists()
    assert all(torch.equal(tensor, before[name]) for name, tensor in toy.train_state().trained.items())
    assert run(tmp_path, optim=AUTO)[0] == result


class Damaged(ToyData):
    def batches(self, start_step, *given, **more):
        if start_step == 5:  # of a trial
            raise CacheDamaged("row 7: its checksum differs")
        return super().batches(start_step, *given, **more)


def test_rows_that_cannot_be_read_end_a_trial_without_a_checkpoint(tmp_path):
    with pytest.raises(CacheDamaged, match="row 7: its checksum differs"):
        run(tmp_path, optim=AUTO, data=Damaged())
    assert not (tmp_path / "checkpoints").exists()


def test_a_start_that_is_not_finite_is_refused(tmp_path):
    toy = Toy()
    toy.table.data[0] = math.nan
    with pytest.raises(DivergedError, match="loss: nan before the first step; look at the student and the cache"):
        run(tmp_path, toy, optim=AUTO)


class Fragile(Toy):
    """A student that is lost as soon as one of its numbers is a distance away from where it began."""

    def __init__(self, distance):
        super().__init__(dropout=0.3)
        self.distance, self.begin = distance, self.a.detach().clone()

    def hidden(self, *given):
        lost = (self.a.detach() - self.begin).abs().max() > self.distance
        return super().hidden(*given) * torch.where(lost, math.nan, 1.0)


def test_a_first_trial_that_diverges_is_no_rate_and_resuming_finds_the_same(tmp_path):
    limit = FIRST_LR / 2  # two steps go farther at the first rate
    for trials in (0, 1, 2):
        interrupted = Signals(after=1 + 3 * trials + 2)
        with pytest.raises(InterruptedRunError):
            run(tmp_path / f"{trials}", Fragile(limit), optim=AUTO, data=interrupted, max_steps=1)
        assert len(found(tmp_path / f"{trials}")["trials"]) == trials
    run(tmp_path / "whole", Fragile(limit), optim=AUTO, max_steps=1)
    whole = found(tmp_path / "whole")
    assert whole["trials"][0] == {"power": 0, "loss": None} and whole["best_of_trials"] < FIRST_LR
    for trials in (0, 1, 2):
        run(tmp_path / f"{trials}", Fragile(limit), optim=AUTO, max_steps=1)
        assert found(tmp_path / f"{trials}") == whole


def test_where_every_trial_diverges_it_is_an_error_also_on_resume(tmp_path):
    told = (
        "^lr auto: the loss is NaN or infinite after each of 9 trials of 2 steps, from 0.0004 down to .*; give --dtype"
    )
    for _ in range(2):
        with pytest.raises(DivergedError, match=told):
            run(tmp_path, Fragile(0.0), optim=AUTO)
        assert "lr" not in found(tmp_path) and not (tmp_path / "metrics.jsonl").exists()


class ScalesAlone(Toy):
    """A student of which scales alone train."""

    def train_state(self):
        return TrainState(self, {"adapter": {}, "scales": {"scale": self.scale}})


def test_where_nothing_follows_lr_there_are_no_trials(tmp_path):
    toy = ScalesAlone()
    forwards = counting(toy)
    result, _ = run(tmp_path, toy, optim=replace(AUTO, scale_lr=1e-3), evaluate=False, max_steps=3)
    assert len(forwards) == 2 * 3 and "lr_probe" not in result and not (tmp_path / FILE).exists()


@pytest.mark.parametrize(("toy", "names"), [(Toy, {"lr", "lr_scales"}), (ScalesAlone, {"lr_scales"})])
def test_the_rates_that_are_announced_are_those_of_the_log(toy, names, tmp_path, capfd):
    run(tmp_path, toy(), optim=AUTO, quiet=False)
    lr = found(tmp_path)["lr"]
    assert f"learning rate {lr:.4g}, lr_scales {lr / 2:.4g}: of " in capfd.readouterr().err
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    peaks = {name: max(line[name] for line in lines) for name in lines[0] if name.startswith("lr")}
    assert peaks == pytest.approx({name: lr if name == "lr" else lr / 2 for name in names})


def test_a_rate_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="lr: 0 is not allowed; give a number above 0"):
        OptimConfig(lr=0)


def search(loss, start=1.0):
    """Return the powers tried where a rate 2^power has this loss, in their order, and the vertex."""
    losses = {}
    while (power := lr_probe._next(start, losses)) is not None:
        losses[power] = loss(power)
    return list(losses), lr_probe.vertex(losses)


@pytest.mark.parametrize("best", [-5.2, -1.4, -0.3, 0.0, 0.2, 0.7, 3.1, 3.9])
def test_the_search_ends_at_the_minimum_of_a_parabola(best):
    powers, vertex = search(lambda power: 0.2 + 0.01 * (power - best) ** 2)
    assert vertex == pytest.approx(best, abs=1e-6)
    assert {round(best) - 1, round(best), round(best) + 1} <= set(powers) and len(powers) <= 3 + abs(best) + 1


def test_rates_that_diverge_gain_nothing_or_never_end():
    powers, vertex = search(lambda power: math.inf if power > -2 else 0.5 + 0.1 * abs(power + 3))
    assert powers[:4] == [0, -1, -2, -3] and vertex == pytest.approx(-3)
    powers, vertex = search(lambda power: 1 + 2.0**power)
    assert powers == [0, *range(-1, -lr_probe.MOST_TRIALS, -1)] and vertex == powers[-1]
    powers, vertex = search(lambda power: 0.5 - 0.01 * power)
    assert powers == [0, 1, 2, 3, 4, 5] and vertex == lr_probe.HIGHEST  # whatever a few steps gain at higher rates
    assert search(lambda power: math.inf)[1] == -lr_probe.MOST_TRIALS + 1


@pytest.mark.parametrize(("max_steps", "length"), [(1, 2), (64, 2), (100, 3), (1000, 31), (10**6, 64)])
def test_the_trials_cost_little_beside_the_run(max_steps, length):
    assert trial_steps(max_steps) == length
    assert max_steps < 100 or probe_steps(max_steps) <= 0.15 * max_steps


PROGRAM = """
import json, sys
from dataclasses import replace
from pathlib import Path
from qat_lora.runtime.launch.select import select_runtime
import train_toys
from train_toys import OPTIM, Toy, evaluation, run

device, lr, out = sys.argv[1], sys.argv[2], Path(sys.argv[3])
runtime, counts = select_runtime(device), []
train_toys.select_runtime = lambda device: runtime
step_end = runtime.step_end

def counted():
    step_end()
    counts.append(dict(runtime.compile_report()))

runtime.step_end = counted
toy = Toy()
launch = runtime.launch
runtime.launch = lambda main: launch(lambda: (runtime.place(toy), main())[1])
optim = replace(OPTIM, lr="auto" if lr == "auto" else float(lr), scale_lr=None)
run(out, toy, evaluate=False, optim=optim, save_steps=100)
print(json.dumps([c.get("graphs_compiled") for c in counts]))
"""


def on(device, lr, out):
    chosen = {"PJRT_DEVICE": "CPU"} if device == "xla" else {"USE_TORCH_XLA": "0"}
    environment = clean_environment(PYTHONPATH=str(Path(__file__).parent), **chosen)
    command = [sys.executable, "-c", PROGRAM, device, str(lr), str(out)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return json.loads(done.stdout.splitlines()[-1]), lines


@pytest.mark.xla
def test_trials_add_no_graph_and_leave_no_trace_on_xla(tmp_path):
    pytest.importorskip("torch_xla")
    compiled, lines = on("xla", "auto", tmp_path / "auto")
    lr = found(tmp_path / "auto")["lr"]
    plain, same = on("xla", lr, tmp_path / "plain")
    assert compiled[-1] == plain[-1] == compiled[0], "graphs that only the trials compile, or that come late"
    for name in ("loss", "grad_norm", "lr"):
        assert [line[name] for line in lines] == [line[name] for line in same], name
    _, expected = on("cpu", "auto", tmp_path / "cpu")
    assert found(tmp_path / "cpu")["lr"] == pytest.approx(lr, rel=1e-2)


class FewRows(ToyData):
    """A few rows in a shuffled order; notes those of every step."""

    def __init__(self, count):
        self.count, self.seen = count, []

    def __len__(self):
        return self.count

    def order(self, step, global_batch_rows, seed):
        return global_batch(self.count, step, global_batch_rows, seed)

    def rows(self, numbers):
        self.seen.append([number for number in numbers.tolist() if number >= 0])
        return super().rows(numbers)


@pytest.mark.parametrize(("count", "measured"), [(2, 1), (6, 3), (9, 4), (40, 4)])
def test_no_trial_trains_on_the_rows_that_measure(tmp_path, count, measured):
    """Neither where an epoch ends in between, nor where a step takes half of all rows."""
    data = FewRows(count)
    run(tmp_path, optim=AUTO, data=data, evaluate=False)
    trials = found(tmp_path)["trials"]
    steps = [data.seen[i] + data.seen[i + 1] for i in range(0, len(data.seen), 2)]  # two micro-batches each
    start, *probed = steps[: probe_steps(10, len(trials))]
    assert len(start) == measured
    length = trial_steps(10)
    for i in range(0, len(probed), length + 1):
        *trained, last = probed[i : i + length + 1]
        assert last == start and any(trained)
        assert not set(start) & {number for step in trained for number in step}
