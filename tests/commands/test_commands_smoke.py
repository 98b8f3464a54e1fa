"""The smoke test passes where things work, and says what is wrong where they do not."""

import json

import pytest
import torch

from qat_lora.cli import main
from qat_lora.commands import smoke
from qat_lora.errors import ConfigError, FailedError
from qat_lora.options import RunConfig, SmokeOptions
from qat_lora.runtime.native import NativeRuntime

CHECKS = ["device", "data", "training", "gradient sync", "checkpoint", "resume"]


def test_the_guides_command_ticks_every_check(capsys, monkeypatch):
    monkeypatch.setenv("USE_TORCH_XLA", "0")
    main(["smoke", "--run-training", "--train-epochs", "3", "device_type=cpu"])
    lines = capsys.readouterr().out.splitlines()
    assert [line[2:17].rstrip() for line in lines] == CHECKS
    assert all(line.startswith("✓ ") for line in lines)
    assert "fell from" in lines[2] and "in 3 epochs" in lines[2] and "bit for bit" in lines[5]


def test_a_fault_is_a_cross_with_its_reason_and_exit_code_1(capsys, monkeypatch, tmp_path):
    class Broken(NativeRuntime):
        """Adds the replicas' gradients instead of averaging them."""

        def reduce_gradients(self, parameters):
            for parameter in parameters:
                parameter.grad.mul_(2)

    ran = []
    for name in ("_data", "_training", "_checkpoint"):
        monkeypatch.setattr(smoke, name, lambda bench, name=name: ran.append(name) or "skipped here")
    with pytest.raises(FailedError, match="gradient sync failed on CPU.*expected 1.0 everywhere") as caught:
        smoke.smoke(SmokeOptions(run=RunConfig(out=str(tmp_path / "out"), dtype="float32")), Broken("cpu"))
    assert caught.value.exit_code == 1
    assert ran == ["_data", "_training"]
    assert capsys.readouterr().out.splitlines()[-1].startswith("✗ gradient sync  RuntimeError: expected 1.0")
    with pytest.raises(FailedError):
        smoke.smoke(SmokeOptions(run=RunConfig(quiet=True, dtype="float32")), Broken("cpu"))
    assert capsys.readouterr().out == ""


def test_a_loss_that_does_not_fall_and_a_changed_resume_are_found(tmp_path, monkeypatch):
    from safetensors.torch import load_file, save_file

    runtime = NativeRuntime("cpu")
    bench = smoke._Bench(SmokeOptions(run=RunConfig(dtype="float32")), runtime, tmp_path)
    smoke._data(bench)
    smoke._training(bench)

    training = smoke._Bench(SmokeOptions(run_training=True, run=RunConfig(dtype="float32")), runtime, tmp_path / "flat")
    (training.folder / "run").mkdir(parents=True)
    lines = [{"step": step + 1, "loss": 0.5} for step in range(training.steps)]
    monkeypatch.setattr(smoke, "_recover", lambda bench, out: bench.folder / out)
    (training.folder / "run" / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    with pytest.raises(RuntimeError, match="went from 0.5000 to 0.5000"):
        smoke._training(training)
    monkeypatch.undo()

    final = bench.folder / "run" / "checkpoints" / "step-000004" / "trained.safetensors"
    tensors = load_file(final)
    name = next(iter(tensors))
    save_file(tensors | {name: tensors[name] + 0.01}, final)
    with pytest.raises(RuntimeError, match="differ from the uninterrupted run's by up to 1.0e-02"):
        smoke._resume(bench)


def test_a_folder_of_another_run_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(Exception, match="no qat-lora run made"):
        smoke.smoke(SmokeOptions(run=RunConfig(out=str(tmp_path), dtype="float32")), NativeRuntime("cpu"))
    assert (tmp_path / "thesis.txt").read_text() == "mine"


def test_one_epoch_has_nothing_to_compare():
    with pytest.raises(ConfigError, match="allowed: 2 or more"):
        SmokeOptions(train_epochs=1)


def test_a_wrong_product_is_found(monkeypatch, tmp_path):
    bench = smoke._Bench(SmokeOptions(), NativeRuntime("cpu"), tmp_path)
    assert "matrix product" in smoke._device(bench)
    cpu = torch.Tensor.cpu
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: cpu(tensor) * 1.05)
    with pytest.raises(RuntimeError, match="off by 5.0%"):
        smoke._device(bench)
