"""The table of benchmark results, and running a program by name."""

import json

import pytest

from qat_lora import cli
from qat_lora.diagnose import bench
from qat_lora.errors import ConfigError

PROGRAM = '''"""Speed of nothing.

    python benchmarks/nothing.py --out benchmarks/results/nothing.json
"""
import argparse
import sys

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--row-count", type=int, default=3)
    parser.add_argument("--out")
    sys.exit(parser.parse_args().row_count)
'''


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "results").mkdir()
    (tmp_path / "nothing.py").write_text(PROGRAM)
    result = {
        "date": "2026-01-02",
        "machine": "m",
        "row_count": 3,
        "load_before": 1.0,
        "misses": 7,
        "new_over_old": 1.25,
    }
    (tmp_path / "results" / "nothing_small.json").write_text(json.dumps(result))
    (tmp_path / "results" / "stray.json").write_text("[1]")
    return tmp_path


def test_a_row_a_result_with_what_the_files_say(folder):
    head, nothing, stray = bench.table_rows(folder)
    assert nothing == [
        "nothing_small",
        "new_over_old 1.25, misses 7",
        "2026-01-02",
        "m",
        "-",
        "python benchmarks/nothing.py --out benchmarks/results/nothing.json",
    ]
    assert stray == ["stray", "-", "-", "-", "-", "see benchmarks/README.md"] and len(head) == 6


def test_a_program_runs_with_its_own_arguments_and_exit_code(folder):
    assert bench.run_benchmark(folder, "nothing", ["--row-count", "5"]) == 5
    with pytest.raises(ConfigError, match="no program 'nothin'; allowed: nothing"):
        bench.run_benchmark(folder, "nothin", [])


def test_the_repository_lists_its_own_and_a_bare_package_says_why_not(capfd, monkeypatch, tmp_path):
    cli.main(["bench"])
    out = capfd.readouterr().out
    assert out.startswith("result") and "cache_speed" in out and "fused_linear_kd" in out
    with pytest.raises(SystemExit) as caught:
        cli.main(["bench", "no_such_program", "--anything"])
    assert caught.value.code == 2 and "no_such_program" in capfd.readouterr().err
    monkeypatch.setattr("qat_lora.__file__", str(tmp_path / "qat_lora" / "__init__.py"))
    with pytest.raises(ConfigError, match="clone it"):
        bench.benchmarks_folder()
