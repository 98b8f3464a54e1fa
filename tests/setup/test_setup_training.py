"""What decides a training run, whichever command makes it; whole runs are in `tests/commands/`."""

from dataclasses import replace
from pathlib import Path

from toy_pipeline import recover_options

from qat_lora.losses.objective import ObjectiveConfig
from qat_lora.runtime.native import NativeRuntime
from qat_lora.setup.training import TrainingData, TrainingRun


def plan(**changed):
    options = recover_options("student", "cache", "out")
    options = replace(options, loop=replace(options.loop, **changed))
    data = TrainingData(None, None, ObjectiveConfig(), {"cache": "abc"})
    return TrainingRun("recover", options, data, NativeRuntime("cpu"), Path("out"))


def test_how_a_step_is_portioned_decides_nothing():
    whole, halves = plan(batch_size=8), plan(batch_size=4, accumulation_steps=2)
    assert whole.batch_rows == halves.batch_rows == 8
    assert whole.decisive(("train",)) == halves.decisive(("train",))
    assert plan(batch_size=4, global_batch_size=16).batch_rows == 16


def test_data_objective_and_named_options_decide():
    found = plan().decisive(("head_k", "lora"))
    assert found["cache"] == "abc" and found["lora"]["recovery_r"] == 2 and found["global_batch_rows"] == 16
    assert {"objective", "dtype", "seed", "max_steps", "early_stop", "autocast", "head_k"} <= found.keys()
    assert found != plan(max_steps=9).decisive(("head_k", "lora"))
