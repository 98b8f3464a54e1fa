"""TensorBoard and Weights & Biases, the real packages, offline."""

import json
import sys
import warnings

import pytest
from train_toys import run

from qat_lora.errors import ConfigError, MissingExtraError
from qat_lora.train.loop import LoopConfig
from qat_lora.train.metrics import TRACKERS


def test_an_unknown_tracker_is_refused():
    with pytest.raises(ConfigError, match="^log_to: 'mlflow' is unknown; allowed: tensorboard, wandb"):
        LoopConfig(log_to=("tensorboard", "mlflow"))


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_with_its_extra(tmp_path, monkeypatch, name):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtraError, match=rf"{name} is not installed: pip install 'qat-lora\[log\]'"):
        TRACKERS[name](tmp_path, 0, {})


@pytest.mark.filterwarnings("default")  # of the packages, which are not ours to mend
def test_tensorboard_has_every_step_once_also_after_a_resume(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    out = tmp_path / "run"
    run(out, max_steps=10, log_to=("tensorboard",), save_steps=4, eval_steps=5, keep_checkpoints=9)
    for step in (8, 10):  # as if killed after step 4's checkpoint
        for file in sorted((out / "checkpoints" / f"step-{step:06d}").iterdir()):
            file.unlink()
        (out / "checkpoints" / f"step-{step:06d}").rmdir()
    run(out, max_steps=10, log_to=("tensorboard",), save_steps=4, eval_steps=5, keep_checkpoints=9)
    events = EventAccumulator(str(out / "tensorboard"))
    events.Reload()
    metrics = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    seen = {event.step: event.value for event in events.Scalars("train/loss")}
    assert sorted(seen) == list(range(1, 11))
    assert [seen[line["step"]] for line in metrics] == pytest.approx([line["loss"] for line in metrics], rel=1e-6)
    assert {event.step for event in events.Scalars("evaluation/kl")} == {0, 5, 10}


@pytest.mark.filterwarnings("default")
def test_weights_and_biases_offline_writes_a_run_and_resumes_it_by_its_id(tmp_path, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "home"))
    out = tmp_path / "run"
    run(out, max_steps=4, log_to=("wandb",), save_steps=2)
    number = (out / "wandb_id.txt").read_text()
    run(out, max_steps=4, log_to=("wandb",), save_steps=2)
    assert (out / "wandb_id.txt").read_text() == number
    folders = sorted((out / "wandb").glob(f"offline-run-*-{number}"))
    assert folders and all(list(folder.glob("*.wandb")) for folder in folders)
