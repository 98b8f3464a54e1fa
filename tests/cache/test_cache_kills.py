"""SIGKILL at random moments of a real build's writes: the campaign is `benchmarks/cache_kills.py`.

Its control, a writer without protection, is killed at named steps: random kills found no fault even in that one. That
every step of a commit can be the last is proved in `test_cache_writer.py`; here the moment is the kernel's choice.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

CAMPAIGN = Path(__file__).parents[2] / "benchmarks" / "cache_kills.py"


@pytest.mark.parametrize("kills", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_a_build_killed_at_any_moment_goes_on_to_the_same_bytes(kills, tmp_path):
    command = [sys.executable, str(CAMPAIGN), "--kills", str(kills), "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=580)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["kills"] == kills and result["faults"] == 0, result
    assert result["mid_write"] >= 1, result
    assert result["control_faults"] == result["control_kills"] == 4, result
