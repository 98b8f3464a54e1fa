"""The loop: resumed anywhere it is the uninterrupted run, bit for bit; signals, exports, evaluations, log."""

import json
import os
import shutil
import signal
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from train_toys import OPTIM, SETTINGS, Toy, ToyData, evaluation, run

from qat_lora.errors import CacheDamaged, ConfigError, DivergedError, InterruptedRunError, ModelError
from qat_lora.files.checksums import write_sums
from qat_lora.files.folders import LIST
from qat_lora.train.checkpoint import checkpoints
from qat_lora.train.loop import LoopConfig
from qat_lora.train.metrics import MetricsLog, read_metrics


def lines(path):
    """Metrics without the one column that measures time."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [{name: value for name, value in line.items() if not name.endswith("_per_s")} for line in found]


def outcome(out):
    """Everything a run leaves that must not depend on interruptions."""
    newest = checkpoints(out / "checkpoints")[-1]
    tensors = {
        f"{part}/{k}": v
        for part in ("trained", "optimizer")
        for k, v in load_file(newest / f"{part}.safetensors").items()
    }
    exports = {name: torch.load(out / name / "weights.pt", weights_only=True) for name in ("start", "best", "last")}
    tensors |= {f"{name}/{k}": v for name, weights in exports.items() for k, v in weights.items()}
    state = json.loads((newest / "state.json").read_text())
    del state["logs"]  # their bytes have that column
    return tensors, state, lines(out / "metrics.jsonl"), lines(out / "evaluations.jsonl")


def assert_same(out, other):
    (tensors, *rest), (tensors_2, *rest_2) = outcome(out), outcome(other)
    assert rest == rest_2
    assert tensors.keys() == tensors_2.keys()
    assert all(torch.equal(value, tensors_2[name]) for name, value in tensors.items())


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run of ten steps that nothing interrupts, with a checkpoint of every step."""
    out = tmp_path_factory.mktemp("loop") / "whole"
    return out, run(out, keep_checkpoints=100)


def test_the_whole_run(whole):
    out, (result, toy) = whole
    assert result["step"] == 10 and result["resumed_from"] == 0
    metrics = lines(out / "metrics.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, 11))
    assert set(metrics[0]) == {"step", "loss", "loss_kd", "loss_hard_top1", "tokens", "grad_norm", "lr", "lr_scales"}
    assert metrics[0]["lr"] == pytest.approx(0.05 / 3) and metrics[2]["lr"] == pytest.approx(0.05)
    assert metrics[0]["lr_scales"] == pytest.approx(0.02 / 3) and metrics[2]["lr_scales"] == pytest.approx(0.02)
    assert [line["step"] for line in lines(out / "evaluations.jsonl")] == [0, 3, 6, 9, 10]
    last = torch.load(out / "last" / "weights.pt", weights_only=True)
    assert all(torch.equal(last[name], p) for name, p in toy.train_state().trained.items())
    start = torch.load(out / "start" / "weights.pt", weights_only=True)
    assert all(torch.equal(start[name], p) for name, p in Toy().train_state().trained.items())


def test_best_is_the_export_with_the_lowest_evaluation(whole):
    out, (result, _) = whole
    found = {line["step"]: line["kl"] for line in lines(out / "evaluations.jsonl")}
    assert result["best_kl"] == min(found.values()) == found[result["best_step"]]
    toy = Toy()
    toy.load_state_dict(torch.load(out / "best" / "weights.pt", weights_only=True), strict=False)
    assert evaluation(toy) == result["best_kl"]


@pytest.mark.parametrize("step", range(1, 11))
def test_resumed_at_any_step_it_is_the_uninterrupted_run(whole, tmp_path, step):
    out = tmp_path / "resumed"
    shutil.copytree(whole[0], out)
    for path in checkpoints(out / "checkpoints")[step:]:
        shutil.rmtree(path)
    with (out / "metrics.jsonl").open("a") as file:
        file.write('{"step": 11, "loss')  # a kill in the middle of a line
    result, _ = run(out, keep_checkpoints=100)
    assert result["resumed_from"] == step
    assert_same(out, whole[0])


def test_another_start_of_the_random_numbers_is_noticed(whole, tmp_path):
    """The positive control: dropout draws, so a resume that lost the random state would differ."""
    out = tmp_path / "resumed"
    shutil.copytree(whole[0], out)
    for path in checkpoints(out / "checkpoints")[5:]:
        shutil.rmtree(path)
    state = checkpoints(out / "checkpoints")[-1] / "state.json"
    content = json.loads(state.read_text())
    content["random"] = json.loads((whole[0] / "checkpoints/step-000004/state.json").read_text())["random"]
    state.write_text(json.dumps(content))
    write_sums(state.parent, ("state.json", "trained.safetensors", "optimizer.safetensors"))
    run(out, keep_checkpoints=100)
    with pytest.raises(AssertionError):
        assert_same(out, whole[0])


def stopping(steps, number=signal.SIGTERM):
    """A toy that gets a signal in the middle of the given steps (two forwards a step, both counted)."""
    toy, calls = Toy(dropout=0.3), []

    def before_forward():
        calls.append(toy.training)
        if toy.training and sum(calls) in [2 * step for step in steps]:
            os.kill(os.getpid(), number)

    toy.before_forward = before_forward
    return toy


@pytest.fixture
def not_under_nohup():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("not_under_nohup")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("stops", [[1], [5], [9], [3, 4], [1, 5], [2, 3, 3]])
def test_stopped_once_twice_thrice_it_is_the_uninterrupted_run(whole, tmp_path, stops, number):
    out, done = tmp_path / "run", 0
    for steps in stops:
        handler = signal.getsignal(number)
        with pytest.raises(InterruptedRunError, match=f"{number.name} after step {done + steps} of 10") as caught:
            run(out, stopping([steps], number), save_steps=100, log_steps=4)
        assert caught.value.exit_code == 143
        assert signal.getsignal(number) is handler
        done += steps
        if done >= 10:
            break
        assert checkpoints(out / "checkpoints")[-1].name == f"step-{done:06d}"
        assert [line["step"] for line in lines(out / "metrics.jsonl")] == list(range(1, done + 1))
    result, _ = run(out, save_steps=100)
    assert result["resumed_from"] == done
    assert_same(out, whole[0])


def test_under_nohup_a_closed_terminal_stops_nothing(whole, tmp_path, not_under_nohup):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    result, _ = run(tmp_path / "run", stopping([5], signal.SIGHUP), save_steps=100, log_steps=4)
    assert result["step"] == 10 and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    assert_same(tmp_path / "run", whole[0])


def test_stopped_in_an_evaluation_the_log_has_every_step(whole, tmp_path):
    """The signal comes after the step's own look at the log: what is pending then must not be lost."""
    toy = Toy(dropout=0.3)
    forwards = []

    def before_forward():
        if not toy.training:
            forwards.append(1)
            if len(forwards) == 2:  # the evaluation of step 3; log lines are due at 4
                os.kill(os.getpid(), signal.SIGTERM)

    toy.before_forward = before_forward
    with pytest.raises(InterruptedRunError, match="after step 3"):
        run(tmp_path / "run", toy, save_steps=100)
    run(tmp_path / "run", save_steps=100)
    assert_same(tmp_path / "run", whole[0])


def test_stopped_while_saving_the_next_step_still_leaves_a_checkpoint(whole, tmp_path, monkeypatch):
    from qat_lora.train import callbacks

    saved = []

    def save(folder, step, *rest):
        saved.append(step)
        if step == 4:
            os.kill(os.getpid(), signal.SIGTERM)
        return real(folder, step, *rest)

    real = callbacks.save_checkpoint
    monkeypatch.setattr(callbacks, "save_checkpoint", save)
    with pytest.raises(InterruptedRunError, match="after step 5"):
        run(tmp_path / "run", save_steps=4)
    assert saved == [4, 5]
    run(tmp_path / "run", save_steps=4)
    assert_same(tmp_path / "run", whole[0])


def test_a_kill_between_two_log_intervals_loses_no_line(whole, tmp_path):
    """Checkpoints at 3, 6, 9 and log intervals of 4: the lines up to a checkpoint are there before it is."""
    toy = Toy(dropout=0.3)

    class Killed(BaseException):
        pass

    calls = []

    def before_forward():
        calls.append(toy.training)
        if sum(calls) == 15:  # in step 8; the checkpoint of step 6 is the newest
            raise Killed

    toy.before_forward = before_forward
    with pytest.raises(Killed):
        run(tmp_path / "run", toy, save_steps=3)
    assert run(tmp_path / "run", save_steps=3)[0]["resumed_from"] == 6
    assert_same(tmp_path / "run", whole[0])


def test_killed_before_the_first_checkpoint_it_starts_again(whole, tmp_path):
    toy = Toy(dropout=0.3)

    def before_forward():
        if toy.training:
            raise KeyboardInterrupt

    toy.before_forward = before_forward
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "run", toy)
    assert [line["step"] for line in lines(tmp_path / "run" / "evaluations.jsonl")] == [0]
    run(tmp_path / "run")
    assert_same(tmp_path / "run", whole[0])


@pytest.mark.parametrize("gone", ["best", "last"])
def test_killed_after_the_last_checkpoint_the_exports_come_anyway(tmp_path, gone):
    """Without an evaluation split `best` is the last state, and is exported after the last checkpoint."""
    out = tmp_path / "run"
    run(out, evaluate=False)
    shutil.rmtree(out / gone)
    result, toy = run(out, evaluate=False)
    assert result["resumed_from"] == 10 and result["best_kl"] is None
    for name in ("best", "last"):
        weights = torch.load(out / name / "weights.pt", weights_only=True)
        assert all(torch.equal(weights[k], p) for k, p in toy.train_state().trained.items())


def test_an_export_set_aside_by_a_kill_is_back_after_the_resume(whole, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(whole[0], out)
    (out / "best").rename(out / ".best.old")  # killed between the two renames of a replacement
    run(out, keep_checkpoints=100)
    assert_same(out, whole[0])


def test_a_worse_evaluation_after_a_resume_leaves_best_alone(tmp_path):
    out = tmp_path / "run"
    with pytest.raises(InterruptedRunError):
        run(out, stopping([7]))
    state_file = checkpoints(out / "checkpoints")[-1] / "state.json"
    state = json.loads(state_file.read_text())
    state_file.write_text(json.dumps({**state, "best_kl": 1e-9}))
    write_sums(state_file.parent, ("state.json", "trained.safetensors", "optimizer.safetensors"))
    before = (out / "best" / "weights.pt").stat()
    result, _ = run(out)
    assert result["best_kl"] == 1e-9 and result["best_step"] == state["best_step"]
    assert (out / "best" / "weights.pt").stat() == before


def test_a_run_whose_bound_was_called_kl_goes_on_with_its_best(tmp_path):
    out = tmp_path / "run"
    with pytest.raises(InterruptedRunError):
        run(out, stopping([7]))
    state = json.loads((checkpoints(out / "checkpoints")[-1] / "state.json").read_text())
    result, _ = run(out, metric="kl_bound")
    assert result["resumed_from"] == state["step"] and "best_kl" not in result
    found = [line.get("kl", line.get("kl_bound")) for line in lines(out / "evaluations.jsonl")]
    assert result["best_kl_bound"] == min(found) <= state["best_kl"]
    assert {name for line in lines(out / "evaluations.jsonl") for name in line} == {"step", "kl", "kl_bound"}


def test_checkpoints_are_kept_by_number(tmp_path):
    run(tmp_path / "run", save_steps=3, keep_checkpoints=2)
    assert [path.name for path in checkpoints(tmp_path / "run" / "checkpoints")] == ["step-000009", "step-000010"]


def test_other_settings_are_refused_and_nothing_changes(whole, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(whole[0], out)
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    with pytest.raises(ConfigError, match="^cache: the run to resume has 'abc', this one 'xyz'"):
        run(out, settings={**SETTINGS, "cache": "xyz"})
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_only_the_main_process_writes(tmp_path, monkeypatch):
    from qat_lora.runtime.native import NativeRuntime

    monkeypatch.setattr(NativeRuntime, "is_main", property(lambda self: False))
    run(tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == [LIST]  # by the toy's `held`


def test_global_batch_sets_the_accumulation():
    assert LoopConfig(batch_size=4, global_batch_size=32).accumulation(1) == 8
    assert LoopConfig(batch_size=4, global_batch_size=32).accumulation(4) == 2
    assert LoopConfig(batch_size=4, accumulation_steps=3).accumulation(4) == 3
    with pytest.raises(ConfigError, match=r"global_batch_size: 30 is not a multiple of .* 4 x 2 = 8"):
        LoopConfig(batch_size=4, global_batch_size=30).accumulation(2)


@pytest.mark.parametrize(
    "field",
    ["batch_size", "accumulation_steps", "global_batch_size", "max_steps", "log_steps", "eval_steps", "save_steps"]
    + ["keep_checkpoints", "early_stop"],
)
@pytest.mark.parametrize("value", [0, -4])
def test_counts_below_one_are_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=f"^{field}: {value} "):
        LoopConfig(**{field: value})


def test_read_metrics_of_a_torn_file(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert read_metrics(tmp_path / "m.jsonl") == [{"step": 1}, {"step": 2}]
    assert read_metrics(tmp_path / "none.jsonl") == []


class PoisonedToy(Toy):
    """From the seventh batch on its hidden states are NaN."""

    calls = 0

    def hidden(self, input_ids_BL, document_ids_BL):
        self.calls += 1
        return super().hidden(input_ids_BL, document_ids_BL) * (float("nan") if self.calls > 12 else 1.0)


def test_a_loss_that_is_no_number_stops_the_run_before_it_reaches_a_checkpoint(tmp_path):
    out = tmp_path / "poisoned"
    with pytest.raises(DivergedError, match=r"loss: nan at step \d+; checkpoints .* sound. Lower --lr"):
        run(out, PoisonedToy(dropout=0.3), evaluate=False, log_steps=1, save_steps=1)
    newest = load_file(checkpoints(out / "checkpoints")[-1] / "trained.safetensors")
    assert all(torch.isfinite(value).all() for value in newest.values())


AVERAGED = replace(OPTIM, ema=0.8)


@pytest.fixture(scope="module")
def averaged_whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("ema") / "whole"
    return out, run(out, keep_checkpoints=100, optim=AVERAGED)


def test_what_is_evaluated_and_exported_is_the_average(averaged_whole, whole):
    """Recomputed from the raw tensors of every checkpoint, in float64."""
    out, (_, toy) = averaged_whole
    raw = [load_file(path / "trained.safetensors") for path in checkpoints(out / "checkpoints")]
    plain = load_file(checkpoints(whole[0] / "checkpoints")[-1] / "trained.safetensors")
    assert all(torch.equal(raw[-1][name], value) for name, value in plain.items()), "the average changes no step"
    exported = torch.load(out / "last" / "weights.pt", weights_only=True)
    found = {line["step"]: line["kl"] for line in lines(out / "evaluations.jsonl")}
    for name, value in exported.items():
        mean = sum(0.2 * 0.8 ** (10 - step) * raw[step - 1][name].double() for step in range(1, 11)) / (1 - 0.8**10)
        torch.testing.assert_close(value.double(), mean, rtol=1e-5, atol=1e-6)
        assert not torch.equal(value, raw[-1][name])
        assert torch.equal(toy.get_parameter(name), raw[-1][name])  # after the run the raw tensors are back
    last = Toy()
    last.load_state_dict(exported, strict=False)
    assert evaluation(last) == found[10]


@pytest.mark.parametrize("step", [1, 4, 9])
def test_resumed_the_average_is_the_uninterrupted_one(averaged_whole, tmp_path, step):
    out = tmp_path / "resumed"
    shutil.copytree(averaged_whole[0], out)
    for path in checkpoints(out / "checkpoints")[step:]:
        shutil.rmtree(path)
    run(out, keep_checkpoints=100, optim=AVERAGED)
    assert_same(out, averaged_whole[0])


def falling_until(best_step):
    """An evaluation that is best at a step: the loop cannot know what the values come from."""
    values = iter([10.0 - n if n <= best_step else 10.0 + n for n in range(100)])
    return lambda: next(values)


@pytest.mark.parametrize("patience", [1, 2])
def test_early_stop_ends_the_run_with_a_checkpoint_and_its_exports(tmp_path, patience):
    out = tmp_path / "run"
    changed = {"evaluate": falling_until(2), "early_stop": patience, "eval_steps": 1, "save_steps": 100}
    result, toy = run(out, **changed)
    stop = 2 + patience
    assert result == {"step": stop, "best_step": 2, "best_kl": 8.0, "stopped_early": True, "resumed_from": 0}
    assert [path.name for path in checkpoints(out / "checkpoints")] == [f"step-{stop:06d}"]
    assert [line["step"] for line in lines(out / "metrics.jsonl")] == list(range(1, stop + 1))
    last = torch.load(out / "last" / "weights.pt", weights_only=True)
    assert all(torch.equal(last[name], p) for name, p in toy.train_state().trained.items())
    again, _ = run(out, **{**changed, "evaluate": lambda: 0.0})  # killed before it was marked complete
    assert again == {**result, "resumed_from": stop}


def test_early_stop_needs_evaluations(tmp_path):
    with pytest.raises(ConfigError, match="^early_stop: .*--eval-rows"):
        run(tmp_path / "run", evaluate=False, early_stop=2)


def test_a_checkpoint_is_due_after_some_minutes(tmp_path, monkeypatch):
    """Looked at every log interval, of two steps here, on a clock that a step takes a minute on."""
    from qat_lora.train import callbacks, loop

    now, real = [0.0], loop.step.optimizer_step

    def step(*args):
        now[0] += 60
        return real(*args)

    monkeypatch.setattr(loop.step, "optimizer_step", step)
    monkeypatch.setattr(callbacks.time, "monotonic", lambda: now[0])
    changed = {"save_steps": 100, "keep_checkpoints": 100, "log_steps": 2}
    run(tmp_path / "run", save_minutes=2.5, **changed)
    assert [path.name[-2:] for path in checkpoints(tmp_path / "run" / "checkpoints")] == ["04", "08", "10"]
    run(tmp_path / "never", save_minutes=0, **changed)
    assert [path.name[-2:] for path in checkpoints(tmp_path / "never" / "checkpoints")] == ["10"]


def test_the_rate_begins_after_the_first_step(tmp_path, monkeypatch):
    toy, calls, pauses = Toy(), [], []
    toy.before_forward = lambda: calls.append(toy.training)
    monkeypatch.setattr(MetricsLog, "pause", lambda log: pauses.append(sum(calls)))
    run(tmp_path / "run", toy, evaluate=False, save_steps=100, save_minutes=0)
    assert pauses == [2, 20]  # two micro-batches a step; the last is the checkpoint's


def test_autocast_reaches_every_micro_batch(tmp_path):
    toy, seen = Toy(dropout=0.3), []
    toy.before_forward = lambda: seen.append((toy.training, torch.is_autocast_enabled("cpu")))
    run(tmp_path / "run", toy, autocast=True)
    assert [on for training, on in seen if training] == [True] * 20
    assert all(value.dtype == torch.float32 for value in toy.train_state().trained.values())


def test_an_evaluation_that_is_no_number_is_never_the_best(tmp_path):
    values = iter([2.0, 1.0, float("nan")])
    with pytest.raises(DivergedError, match="evaluation kl: nan after step 6"):
        run(tmp_path / "run", evaluate=lambda: next(values), log_steps=1)
    assert [line["kl"] for line in lines(tmp_path / "run" / "evaluations.jsonl")] == [2.0, 1.0]


def test_a_norm_that_is_no_number_is_never_logged(tmp_path, monkeypatch):
    from qat_lora.train import loop

    def steps(optimizer, parameters, sums, clip, runtime):
        means = optimizer_step(optimizer, parameters, sums, clip, runtime)
        return means | {"grad_norm": means["grad_norm"] / 0.0}

    optimizer_step = loop.step.optimizer_step
    monkeypatch.setattr(loop.step, "optimizer_step", steps)
    with pytest.raises(DivergedError, match="grad_norm: inf at step 1"):
        run(tmp_path / "run")
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == "" and not checkpoints(tmp_path / "run" / "checkpoints")


def test_a_checkpoint_without_what_the_run_needs_is_one_line(whole, tmp_path):
    out = shutil.copytree(whole[0], tmp_path / "run")
    state = checkpoints(out / "checkpoints")[-1] / "state.json"
    state.write_text(state.read_text().replace("best_step", "bets_step"))
    write_sums(state.parent, ("state.json", "trained.safetensors", "optimizer.safetensors"))
    with pytest.raises(ModelError, match="best_step.*remove that folder"):
        run(out, keep_checkpoints=100)


class Damaged(ToyData):
    """Rows of which one micro-batch cannot be read: of two a step, number `micro` counted from the run's first step."""

    def __init__(self, micro, error=CacheDamaged):
        self.micro, self.error = micro, error

    def batches(self, start_step, *arguments, **named):
        for number, batch in enumerate(super().batches(start_step, *arguments, **named)):
            if 2 * start_step + number == self.micro:
                raise self.error("c/s-000001: row 7 does not have its checksum")
            yield batch


@pytest.mark.parametrize("micro", [0, 1, 2, 9, 10, 19])
def test_rows_that_cannot_be_read_end_a_run_after_a_checkpoint_of_the_last_good_step(whole, tmp_path, micro):
    out, done = tmp_path / "run", micro // 2
    with pytest.raises(CacheDamaged, match=r"^c/s-000001: row 7 does not have .*goes on from there$") as caught:
        run(out, Toy(dropout=0.3), data=Damaged(micro), save_steps=100)
    assert ("\n" in str(caught.value), f"step {done} is complete" in str(caught.value)) == (False, done > 0)
    assert [int(path.name[5:]) for path in checkpoints(out / "checkpoints")] == ([done] if done else [])
    assert [line["step"] for line in lines(out / "metrics.jsonl")] == list(range(1, done + 1)) if done else True
    with pytest.raises(OSError, match="row 7"):  # not mended yet, and another kind of error
        run(out, data=Damaged(micro, OSError), save_steps=100)
    result, _ = run(out, save_steps=100)
    assert result["resumed_from"] == done
    assert_same(out, whole[0])


def test_the_random_numbers_of_a_step_that_failed_are_drawn_again(whole, tmp_path, monkeypatch):
    """Positive control: a checkpoint with the random state in the middle of a step is another run."""
    monkeypatch.setattr("qat_lora.train.loop.set_random_states", lambda states: None)
    with pytest.raises(CacheDamaged):
        run(tmp_path / "run", Toy(dropout=0.3), data=Damaged(9), save_steps=100)
    run(tmp_path / "run", save_steps=100)
    with pytest.raises(AssertionError):
        assert_same(tmp_path / "run", whole[0])


@pytest.mark.parametrize("damaged", [0, 3, 6, 10])
def test_an_evaluation_that_cannot_be_read_is_made_first_when_the_run_goes_on(whole, tmp_path, damaged):
    out = tmp_path / "run"

    def evaluate():
        found = lines(out / "evaluations.jsonl") if (out / "evaluations.jsonl").exists() else []
        if len(found) == [0, 3, 6, 9, 10].index(damaged):
            raise CacheDamaged("c/e-000000: row 0 does not have its checksum")
        return evaluation(toy)

    for _ in range(2):  # not mended yet
        toy = Toy(dropout=0.3)
        with pytest.raises(CacheDamaged, match="e-000000: row 0"):
            run(out, toy, evaluate=evaluate, save_steps=100)
    assert [int(path.name[5:]) for path in checkpoints(out / "checkpoints")] == ([damaged] if damaged else [])
    assert run(out, save_steps=100)[0]["resumed_from"] == damaged
    if damaged == 10:  # nothing was left to save
        (out / "checkpoints/step-000010/state.json").write_bytes(
            (whole[0] / "checkpoints/step-000010/state.json").read_bytes()
        )
    assert_same(out, whole[0])
