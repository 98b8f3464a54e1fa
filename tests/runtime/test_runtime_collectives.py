"""Variables of a process group: read strictly, and what is wrong with them said by name."""

import subprocess
import sys
from pathlib import Path

import pytest

from qat_lora.errors import ConfigError, DeviceError
from qat_lora.runtime.host.collectives import RankInfo, group_size, rank_info, whole_number
from qat_lora.runtime.launch.select import ChipsConfig, DeviceChoice, Found, plan_chips

ROOT = Path(__file__).resolve().parents[2]
GROUP = {"WORLD_SIZE": "4", "RANK": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


def test_a_place():
    assert rank_info(GROUP) == RankInfo(2, 4, 0)
    assert rank_info({}) == rank_info({"WORLD_SIZE": "1", "RANK": "0"}) == RankInfo(0, 1, 0)
    assert rank_info({"RANK": "3"}) == RankInfo()  # left behind by a scheduler: this process is the main one
    assert (group_size({}), group_size(GROUP), whole_number({}, "X", 7)) == (1, 4, 7)


@pytest.mark.parametrize("name", ["WORLD_SIZE", "RANK", "LOCAL_RANK", "MASTER_PORT"])
@pytest.mark.parametrize(("value", "given"), [("two", "'two'"), ("-1", "'-1'"), ("1.5", "'1.5'")])
def test_no_number(name, value, given):
    with pytest.raises(ConfigError, match=f"{name}: is {given} in the environment; allowed: a number .* unset {name}"):
        rank_info({**GROUP, name: value})


def test_empty_is_no_number():
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        with pytest.raises(ConfigError, match=f"{name}: is empty in the environment"):
            rank_info({name: " "})
    with pytest.raises(DeviceError, match="WORLD_SIZE=4: a process group also needs MASTER_ADDR, MASTER_PORT; start"):
        rank_info({**GROUP, "MASTER_ADDR": "", "MASTER_PORT": ""})


@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK"])
def test_a_rank_beyond_the_group(name):
    with pytest.raises(ConfigError, match="ranks of 4 processes are 0 to 3"):
        rank_info({**GROUP, name: "4"})


@pytest.mark.parametrize(
    ("name", "kind", "backend", "parallel"),
    [
        ("WORLD_SIZE", "cpu", "", "spawn"),
        ("TPU_NUM_DEVICES", "xla", "TPU", "spawn"),
        ("CPU_NUM_DEVICES", "xla", "CPU", "spmd"),
    ],
)
@pytest.mark.parametrize("value", ["", "0", "all"])
def test_a_plan_names_the_variable(name, kind, backend, parallel, value):
    config = ChipsConfig(parallel=parallel)
    with pytest.raises(ConfigError, match=f"{name}: is .* in the environment; allowed: a number from 1"):
        plan_chips(config, DeviceChoice(kind, backend), Found(cores=2, tpu_chips=4), {name: value})


def test_a_command_says_it_in_one_line(tmp_path):
    script = str(ROOT / "scripts" / "train_recovery_lora.py")
    program = [sys.executable, script, "--kd-cache-dir", "cache", "--checkpoint", "student"]
    variables = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "WORLD_SIZE": "", "RANK": ""}
    done = subprocess.run(program, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and done.stderr.startswith("error: WORLD_SIZE: is empty"), done.stderr
    assert done.stderr.count("\n") == 1
