"""Checkpoints: everything comes back, other runs are refused, and no crash leaves a run without one."""

import json
import os
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from train_toys import SETTINGS, held

from qat_lora.errors import ConfigError, DivergedError, ModelError
from qat_lora.files.checksums import write_sums
from qat_lora.files.folders import LIST, atomic_dir, discard, restore_dir
from qat_lora.runtime import base
from qat_lora.runtime.launch.select import select_runtime
from qat_lora.train.checkpoint import OPTIMIZER, STATE, TRAINED, checkpoints, load_checkpoint, save_checkpoint
from qat_lora.train.optim import OptimConfig, build_optimizer

LISTED = ("state.json", "trained.safetensors", "optimizer.safetensors")


def trained(value=0.0):
    """Two tensors and an optimizer that has made a step; all of it a function of `value`."""
    parameters = {"a": nn.Parameter(torch.full((2, 3), value)), "b.scale": nn.Parameter(torch.full((4,), -value))}
    optimizer = build_optimizer(
        OptimConfig(),
        {"adapter": {"a": parameters["a"]}, "scales": {"b.scale": parameters["b.scale"]}},
        select_runtime("cpu"),
    )
    for parameter in parameters.values():
        parameter.grad.fill_(value)
    optimizer.step()
    return parameters, optimizer


def save(folder, step, keep=2, state=None):
    parameters, optimizer = trained(float(step))
    content = {"best_kl": 0.5, "fingerprint": SETTINGS, **(state or {})}
    return save_checkpoint(folder, step, parameters, optimizer, content, keep, select_runtime("cpu"))


def save_in_run(folder, step, keep):
    with held(folder.parent):
        return save(folder, step, keep)


def load(path, settings=SETTINGS):
    parameters, optimizer = trained()
    state = load_checkpoint(path, parameters, optimizer, settings)
    return parameters, optimizer, state


def holds(path, step):
    """Tell whether the checkpoint loads and is exactly what `save` wrote at a step."""
    parameters, optimizer, state = load(path)
    wanted, twin = trained(float(step))
    same = [torch.equal(parameters[name], wanted[name]) for name in wanted]
    for name in wanted:
        mine, theirs = optimizer.state[parameters[name]], twin.state[wanted[name]]
        same += [torch.equal(mine[part], theirs[part]) for part in theirs]
    return all(same) and state["step"] == step


def test_everything_comes_back_into_the_same_tensors(tmp_path):
    torch.manual_seed(123)
    path = save(tmp_path, 7)
    drawn = torch.rand(5)
    torch.manual_seed(0)
    assert holds(path, 7)
    assert torch.equal(torch.rand(5), drawn)  # the random state too
    parameters, optimizer = trained()
    before = [parameters["a"].data_ptr(), optimizer.state[parameters["a"]]["exp_avg"].data_ptr()]
    assert load_checkpoint(path, parameters, optimizer, SETTINGS)["best_kl"] == 0.5
    assert before == [parameters["a"].data_ptr(), optimizer.state[parameters["a"]]["exp_avg"].data_ptr()]


def test_stacked_layers_are_written_apart_and_go_on_either_way(tmp_path):
    """A run whose layers are stacked writes what one with its layers apart would, and each goes on from the other's."""

    def state(tensors):
        parameters = {name: nn.Parameter(value.clone()) for name, value in tensors.items()}
        optimizer = build_optimizer(OptimConfig(), {"adapter": parameters}, select_runtime("cpu"))
        for parameter in parameters.values():
            parameter.grad.copy_(parameter.detach() + 1)
        optimizer.step()
        return parameters, optimizer

    values = torch.arange(12.0).reshape(2, 3, 2) / 10
    stacked, apart = {"m.[3:5].q.lora_A": values}, {"m.3.q.lora_A": values[0], "m.4.q.lora_A": values[1]}
    runtime, files = select_runtime("cpu"), []
    for name, tensors in (("stacked", stacked), ("apart", apart)):
        path = save_checkpoint(tmp_path / name, 1, *state(tensors), {"fingerprint": SETTINGS}, 2, runtime)
        files.append({file: load_file(path / file) for file in LISTED[1:]})
        for wanted in (stacked, apart):
            parameters, optimizer = state({name: torch.zeros_like(value) for name, value in wanted.items()})
            load_checkpoint(path, parameters, optimizer, SETTINGS)
            twin, own = state(wanted)
            for key, parameter in parameters.items():
                assert torch.equal(parameter, twin[key])
                for part, value in own.state[twin[key]].items():
                    assert torch.equal(optimizer.state[parameter][part], value), part
    for file in LISTED[1:]:
        assert files[0][file].keys() == files[1][file].keys()
        assert all(torch.equal(value, files[1][file][key]) for key, value in files[0][file].items())


def test_no_pickle_is_written(tmp_path):
    names = {file.name for file in save(tmp_path, 1).iterdir()}
    assert names == {"trained.safetensors", "optimizer.safetensors", "state.json", "SHA256SUMS", "COMPLETE"}


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"seed": 6}, "seed"),
        ({"nested": {"r": 3}}, "nested"),
        ({"list": (1, 3)}, "list"),
        ({"new": 1}, "new"),
        ({"cache": None}, "cache"),
    ],
)
def test_a_changed_setting_is_refused_by_name_and_nothing_is_loaded(tmp_path, changed, field):
    path = save(tmp_path, 3)
    parameters, optimizer = trained()
    with pytest.raises(ConfigError, match=f"^{field}: the run to resume has .*--overwrite"):
        load_checkpoint(path, parameters, optimizer, {**SETTINGS, **changed})
    assert not parameters["a"].any()


def test_a_setting_that_is_gone_is_refused_too(tmp_path):
    path = save(tmp_path, 3)
    with pytest.raises(ConfigError, match="^seed: "):
        load(path, {name: value for name, value in SETTINGS.items() if name != "seed"})


@pytest.mark.parametrize("file", ["trained.safetensors", "optimizer.safetensors"])
def test_other_tensors_and_shapes_are_refused(tmp_path, file):
    path = save(tmp_path, 3)
    tensors = load_file(path / file)
    name = sorted(tensors)[0]
    save_file({**tensors, "other": torch.ones(1)}, path / file)
    write_sums(path, LISTED)
    with pytest.raises(ModelError, match="other tensors.*other"):
        load(path)
    save_file({**tensors, name: torch.ones(9)}, path / file)
    write_sums(path, LISTED)
    with pytest.raises(ModelError, match=rf"{name} has shape \(9,\)"):
        load(path)


@pytest.mark.parametrize("file", ["trained.safetensors", "optimizer.safetensors", "state.json"])
@pytest.mark.parametrize("damage", ["cut", "missing"])
def test_damage_is_named_with_the_way_out(tmp_path, file, damage):
    path = save(tmp_path, 3)
    content = (path / file).read_bytes()
    (path / file).unlink()
    if damage == "cut":
        (path / file).write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelError, match="step-000003: cannot be read .*the one before it"):
        load(path)


@pytest.mark.parametrize("text", ["[]", "[" * 100_000, "{}", '{"fingerprint": 3, "random": {}, "step": 1}'])
def test_an_odd_state_is_one_line(tmp_path, text):
    path = save(tmp_path, 3)
    (path / "state.json").write_text(text)
    with pytest.raises(ModelError, match="step-000003: cannot be read .*the one before it") as caught:
        load(path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("file", ["trained.safetensors", "optimizer.safetensors"])
def test_a_flipped_bit_and_missing_sums_are_refused(tmp_path, file):
    path = save(tmp_path, 3)
    data = bytearray((path / file).read_bytes())
    data[-1] ^= 1
    (path / file).write_bytes(data)
    with pytest.raises(ModelError, match=f"{file}: is not what was written.*the one before it"):
        load(path)
    (path / "SHA256SUMS").unlink()
    with pytest.raises(ModelError, match="SHA256SUMS: is missing"):
        load(path)
    write_sums(path, (STATE, TRAINED, OPTIMIZER))
    load(path)  # the positive control: sums of the damaged file


def test_nan_is_not_saved(tmp_path):
    parameters, optimizer = trained(1.0)
    for tensor, name in ((parameters["a"].data, "a"), (optimizer.state[parameters["a"]]["exp_avg"], "a/exp_avg")):
        before = tensor.clone()
        tensor.view(-1)[1] = float("nan")
        with pytest.raises(DivergedError, match=f"step 9: {name} is NaN or infinite in 1 of 6 places.*--overwrite"):
            save_checkpoint(tmp_path, 9, parameters, optimizer, {"fingerprint": SETTINGS}, 2, select_runtime("cpu"))
        tensor.copy_(before)
    assert not list(tmp_path.iterdir())


def test_keep_counts_complete_checkpoints_only(tmp_path):
    for step in (1, 2):
        save(tmp_path, step)
    (tmp_path / "step-000003").mkdir()  # what a copy that broke off may look like
    (tmp_path / "step-000099").mkdir()
    (tmp_path / "step-last").mkdir()
    save(tmp_path, 4)
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000002", "step-000004"]
    assert save(tmp_path, 1_000_000).name == "step-1000000"
    assert [path.name for path in checkpoints(tmp_path)] == ["step-000004", "step-1000000"]


class Killed(BaseException):
    """The process is gone: not an error that anything could handle."""


class Crash:
    """Kills at the n-th file-system call below a folder, and every one after it, as a dead process does none.

    Python reports each such call to audit hooks before making it, so no way of writing files escapes. A hook
    cannot be removed, hence the one switch for all tests.
    """

    armed = None

    def __init__(self, folder, calls):
        self.folder, self.left = str(folder), calls

    def __enter__(self):
        Crash.armed = self
        return self

    def __exit__(self, *_):
        Crash.armed = None

    def call(self, path):
        # Relative paths are those of calls that work on an open folder, as shutil.rmtree's.
        if not os.path.isabs(path) or str(path).startswith(self.folder):
            self.left -= 1
            if self.left < 0:
                raise Killed


CALLS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.scandir", "os.listdir", "os.truncate"}


def _hook(event, arguments):
    if event in CALLS and Crash.armed is not None and isinstance(arguments[0], str | os.PathLike):
        Crash.armed.call(arguments[0])


sys.addaudithook(_hook)


def torn_save_file(tensors, file, metadata=None):
    """Write a file of tensors; killed in here it leaves half of it. (safetensors writes unseen by the hook.)"""
    crash, Crash.armed = Crash.armed, None
    try:
        save_file(tensors, file, metadata)
        if crash is not None and crash.left <= 0:
            os.truncate(file, os.path.getsize(file) // 2)
    finally:
        Crash.armed = crash
    if crash is not None:
        crash.call(file)


def crashes(folder, action):
    """Kill `action` at its 1st, 2nd, ... call, each time from the same start, and yield; stop when it survives."""
    origin = folder.with_name("origin")
    shutil.copytree(folder, origin)
    for calls in range(400):
        shutil.rmtree(folder)
        shutil.copytree(origin, folder)
        try:
            with Crash(folder, calls):
                action()
        except Killed:
            yield calls
        else:
            return
    raise AssertionError("never survived")


@pytest.mark.parametrize("keep", [1, 2])
def test_a_crash_at_any_point_leaves_a_whole_checkpoint_and_no_litter(tmp_path, monkeypatch, keep):
    monkeypatch.setattr(base, "save_file", torn_save_file)
    folder = tmp_path / "checkpoints"
    for step in (1, 2):
        save(folder, step, keep)
    seen = []
    for _ in crashes(folder, lambda: save_in_run(folder, 3, keep)):
        complete = checkpoints(folder)
        newest = int(complete[-1].name[5:])
        assert newest in (2, 3)
        assert all(holds(path, int(path.name[5:])) for path in complete)
        seen.append(newest)
        save_in_run(folder, 3, keep)  # what the resumed run does
        assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
        assert [int(path.name[5:]) for path in checkpoints(folder)] == [1, 2, 3][-keep:]
        assert holds(checkpoints(folder)[-1], 3)
    assert len(seen) > 20 and set(seen) == {2, 3}  # killed before and after the moment from which it counts


def naive_save(folder, step, keep):
    """What is usually written: straight under the final name, then the old ones removed where they are."""
    path = folder / f"step-{step:06d}"
    path.mkdir(exist_ok=True)
    parameters, _ = trained(float(step))
    (path / "COMPLETE").write_text("")
    torn_save_file(dict(parameters), path / "trained.safetensors")
    shutil.copyfile(checkpoints(folder)[0] / "optimizer.safetensors", path / "optimizer.safetensors")
    state = json.loads((checkpoints(folder)[0] / "state.json").read_text())
    (path / "state.json").write_text(json.dumps({**state, "step": step}))
    for old in checkpoints(folder)[:-keep]:
        shutil.rmtree(old)


def test_a_naive_writer_fails_the_same_crashes(tmp_path):
    """The positive control: the crashes above do find a writer that is not whole."""
    folder = tmp_path / "checkpoints"
    save(folder, 2, 1)
    broken = 0
    for _ in crashes(folder, lambda: naive_save(folder, 3, 1)):
        try:
            load(checkpoints(folder)[-1])
        except ModelError:
            broken += 1
    assert broken >= 3


def fill(folder, text):
    (folder / "base").mkdir()
    (folder / "base" / "scales").write_text(text)
    (folder / "adapter").write_text(text)


def content(folder):
    return {(folder / name).read_text() for name in ("adapter", "base/scales")}


def replace_export(final, text):
    with held(final.parent), atomic_dir(final) as draft:
        fill(draft, text)


def test_an_export_is_replaced_whole_whatever_is_killed_when(tmp_path):
    """An adapter and the base whose scales it was trained with: new factors on old scales would load in silence."""
    run = tmp_path / "run"
    replace_export(run / "best", "old")
    seen = set()
    for _ in crashes(run, lambda: replace_export(run / "best", "new")):
        with held(run):
            restore_dir(run / "best")  # what the resumed run does first
        seen |= content(run / "best")
        assert len(content(run / "best")) == 1
        replace_export(run / "best", "newer")
        assert content(run / "best") == {"newer"}
        assert sorted(path.name for path in run.iterdir()) == ["best", LIST]
    assert seen == {"old", "new"}


def test_writing_into_the_folder_itself_fails_the_same_crashes(tmp_path):
    """The positive control: file by file, factors and base are mixed at some point."""
    best = tmp_path / "run" / "best"
    replace_export(best, "old")

    def in_place():
        (best / "base" / "scales").write_text("new")
        (best / "adapter").write_text("new")

    assert any(len(content(best)) == 2 for _ in crashes(best.parent, in_place))


def test_discarding_leaves_a_folder_whole_or_gone(tmp_path):
    folder = tmp_path / "checkpoints"
    for step in (1, 2):
        save(folder, step)
    for _ in crashes(folder, lambda: discard(folder / "step-000001")):
        assert all(holds(path, int(path.name[5:])) for path in checkpoints(folder))
    assert [path.name for path in folder.iterdir()] == ["step-000002"]


def test_a_failed_export_leaves_the_earlier_one_and_no_litter(tmp_path):
    replace_export(tmp_path / "best", "old")
    with pytest.raises(RuntimeError, match="disk"), held(tmp_path), atomic_dir(tmp_path / "best") as draft:
        (draft / "adapter").write_text("half")
        raise RuntimeError("disk full")
    assert content(tmp_path / "best") == {"old"}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["best", LIST]
