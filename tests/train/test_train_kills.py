"""Real kills of real processes: SIGKILL at random moments of a run that saves at every step, and SIGTERM twice."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_train_loop import assert_same

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks processes to kill them")


def kill(tmp_path, kills, stops):
    script = Path(__file__).with_name("train_kills.py")
    command = [sys.executable, "-W", "error", script, tmp_path, str(kills), str(stops)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    for name in ("killed", "stopped"):
        assert_same(tmp_path / name, tmp_path / "whole")


def test_killed_and_stopped_at_random_moments_it_is_the_uninterrupted_run(tmp_path):
    kill(tmp_path, 10, 3)


@pytest.mark.slow
def test_killed_a_hundred_times_and_stopped_thirty_times(tmp_path):
    kill(tmp_path, 100, 30)
