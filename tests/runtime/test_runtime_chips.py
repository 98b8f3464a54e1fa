"""How many chips: a table of what is asked for, on what, and what is started with which variables."""

import pytest

from qat_lora.errors import ConfigError
from qat_lora.runtime.launch.select import ChipsConfig, DeviceChoice, Found, LaunchPlan, count_tpu_chips, plan_chips

ONE = {"TPU_VISIBLE_CHIPS": "0", "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,1,1", "TPU_PROCESS_BOUNDS": "1,1,1"}
HALF = {"TPU_VISIBLE_CHIPS": "0,1", "TPU_CHIPS_PER_PROCESS_BOUNDS": "1,2,1", "TPU_PROCESS_BOUNDS": "1,1,1"}


def plan(asked, kind="cpu", backend="", chips=0, parallel="spawn", shard_base=False, **environ):
    config = ChipsConfig(asked, parallel, shard_base)
    device = DeviceChoice(kind, backend)
    planned = plan_chips(config, device, Found(cores=2, cuda_devices=4, tpu_chips=chips), environ)
    assert planned.device is device
    return planned


def starts(*how):
    """Return whether a plan has these chips, this start and these variables."""
    return lambda planned: planned == LaunchPlan(planned.device, *how)


@pytest.mark.parametrize(
    ("expected", "given"),
    [
        (starts(1), {"asked": None}),
        (starts(2, "group"), {"asked": "all"}),
        (starts(4, "group"), {"asked": "4"}),
        (starts(4, "group"), {"asked": "all", "kind": "cuda"}),
        (starts(1), {"asked": "all", "kind": "mps"}),
        (starts(2, "group"), {"asked": "2", "shard_base": True}),
        (starts(1), {"asked": None, "kind": "cuda", "shard_base": True, "WORLD_SIZE": "2"}),
        (starts(1), {"asked": "2", "WORLD_SIZE": "2"}),
        (starts(1), {"asked": "2", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "2"}),
        (starts(1), {"asked": None, "kind": "xla", "backend": "CPU"}),
        (starts(1, "torch_xla"), {"asked": "all", "kind": "xla", "backend": "CPU"}),
        (starts(1, "here", {"CPU_NUM_DEVICES": "1"}), {"asked": None, "kind": "xla", "parallel": "spmd"}),
        (starts(8, "here", {"CPU_NUM_DEVICES": "8"}), {"asked": "8", "kind": "xla", "parallel": "spmd"}),
        (
            starts(4, "here", {"CPU_NUM_DEVICES": "4"}),
            {"asked": "all", "kind": "xla", "parallel": "spmd", "CPU_NUM_DEVICES": "4"},
        ),
    ],
)
def test_plan(expected, given):
    assert expected(plan(**given)), plan(**given)


@pytest.mark.parametrize(
    ("expected", "given"),
    [
        (starts(1, "here", ONE), {"asked": None, "chips": 4}),
        (starts(1, "here", ONE), {"asked": "1", "chips": 8}),
        (starts(4, "torch_xla"), {"asked": "all", "chips": 4}),
        (starts(0, "torch_xla"), {"asked": "all", "chips": 0}),
        (starts(2, "torch_xla", {"TPU_PROCESS_BOUNDS": "1,2,1"}), {"asked": "2", "chips": 4}),
        (starts(4, "torch_xla", {"TPU_PROCESS_BOUNDS": "2,2,1"}), {"asked": "4", "chips": 8}),
        (starts(2, "torch_xla", {"TPU_PROCESS_BOUNDS": "1,2,1"}), {"asked": None, "chips": 4, "TPU_NUM_DEVICES": "2"}),
        (starts(4), {"asked": None, "chips": 4, "parallel": "spmd"}),
        (starts(2, "here", HALF), {"asked": "2", "chips": 4, "parallel": "spmd"}),
    ],
)
def test_plan_on_a_tpu(expected, given):
    planned = plan(kind="xla", backend="TPU", **given)
    assert expected(planned), planned


@pytest.mark.parametrize(
    ("message", "given"),
    [
        (r"num_chips: 9 is not possible here \(cpu\); possible: 1 to 8, or all", {"asked": "9"}),
        ("possible: 1 to 4, or all", {"asked": "5", "kind": "cuda"}),
        ("possible: 1, or all", {"asked": "2", "kind": "mps"}),
        ("num_chips: 3 is not possible here .* possible: 1, 2, 4, or all", {"asked": "3", "kind": "xla", "chips": 4}),
        ("possible: 1, 4, 8, or all", {"asked": None, "kind": "xla", "chips": 8, "TPU_NUM_DEVICES": "2"}),
        ("XLA on CPU has no exchange", {"asked": "2", "kind": "xla", "backend": "CPU"}),
        ("num_chips: 3, but this is one of 2 processes", {"asked": "3", "WORLD_SIZE": "2"}),
        ("spmd is one process a machine, but WORLD_SIZE=2", {"asked": None, "parallel": "spmd", "WORLD_SIZE": "2"}),
        ("parallel: spmd exists on XLA only", {"asked": None, "parallel": "spmd"}),
        ("shard_base: one process has none .* --num-chips 2 or more", {"asked": None, "shard_base": True}),
        ("shard_base: one process has none to share with", {"asked": "all", "kind": "mps", "shard_base": True}),
        ("shard_base: on XLA .* add --parallel spmd", {"asked": "all", "kind": "xla", "shard_base": True}),
        ("every process would take the same", {"asked": "2", "kind": "xla", "chips": 4, "TPU_VISIBLE_CHIPS": "0,1"}),
    ],
)
def test_impossible_plans_name_the_possible_ones(message, given):
    if given.get("kind") == "xla":
        given = {"backend": "TPU", **given}
    if "is one process" in message:
        given = {"kind": "xla", "backend": "CPU", **given}
    with pytest.raises(ConfigError, match=message):
        plan(**given)


@pytest.mark.parametrize("asked", ["0", "two", "-1", "1.5"])
def test_no_number(asked):
    with pytest.raises(ConfigError, match="allowed: 1 or more, or all"):
        ChipsConfig(asked)


def test_chips_are_counted(tmp_path):
    assert count_tpu_chips(tmp_path) == 0
    (tmp_path / "dev/vfio").mkdir(parents=True)
    for name in ("vfio/0", "vfio/1", "vfio/vfio"):
        (tmp_path / "dev" / name).touch()
    assert count_tpu_chips(tmp_path) == 2
    for name in ("accel0", "accel1", "accel2", "accel3", "accel"):
        (tmp_path / "dev" / name).touch()
    assert count_tpu_chips(tmp_path) == 4
