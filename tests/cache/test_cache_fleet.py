"""A simulated fleet with kills, stragglers and duplicate starts: the campaign is `benchmarks/fleet.py`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from qat_lora.cache.build.writer import CacheWriter, Partition
from qat_lora.cache.storage.location import LocalFolder
from qat_lora.cache.tools.progress import progress, render
from qat_lora.cli import main
from qat_lora.errors import CacheError

CAMPAIGN = Path(__file__).parents[2] / "benchmarks" / "fleet.py"


@pytest.mark.parametrize(
    ("builders", "off_by"), [(40, 0.35), pytest.param(1000, 0.1, marks=pytest.mark.slow)]
)  # the fewer the builders, the more one kill of the last is worth
def test_a_fleet_that_is_killed_and_started_twice_writes_the_undisturbed_bytes(builders, off_by, tmp_path):
    command = [sys.executable, str(CAMPAIGN), "--builders", str(builders), "--seeds", "0", "--folder", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=3000)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)["by_seed"]["0"]
    assert result["faults"] == result["other_bits_faults"] == 0, result
    assert min(result[name] for name in ("killed_now", "killed_before", "killed_after", "interleaved")) > 0, result
    assert result["largest_forecast_error"] < off_by, result
    assert result["naive_faults_of_upload"] > 0 and result["naive_faults"] > result["naive_faults_of_upload"], result


@pytest.fixture
def unfinished(tmp_path, fingerprint, random_rows, monkeypatch):
    """Two builders of 12 rows each, two a shard: a shard takes the first 10 s, the second 30 s; both began at 1000."""
    fp, times = fingerprint(dataset="numbers first 24 rows"), {}
    for builder, (shards, pace) in enumerate(((5, 10.0), (2, 30.0))):
        with CacheWriter(tmp_path / "c", fp, 2, partition=Partition(builder, 2)) as writer:
            writer.append(random_rows(fp, 2 * shards), [{"row": i + 1} for i in range(2 * shards)])
            writer.stop()
        times[f".lock.{builder}"] = 1000.0
        for shard in range(shards):
            times[f"s-{2 * shard + builder:06d}.json"] = 1000 + pace * (shard + 1)
    real = LocalFolder.times
    monkeypatch.setattr(LocalFolder, "times", lambda self: {name: times.get(name, 0.0) for name in real(self)})
    return tmp_path / "c", times


def test_a_steady_fleet_is_forecast_exactly(unfinished):
    found = progress(unfinished[0], now=1070.0)
    assert (found["builders"], found["shards"], found["planned_shards"], found["ended"]) == (2, 7, 12, 0)
    assert (found["finish"], found["last_builder"]) == (pytest.approx(1180.0), 1)
    assert progress(unfinished[0], rows=20, now=1070.0)["finish"] == pytest.approx(1150.0)
    assert "finish 1970-01-01 00:19 UTC, last builder 1" in render(found)


def test_a_killed_builder_is_not_taken_for_a_slow_one(unfinished):
    """Its first shard came late, and the time of its lock says that it was started again at 1030."""
    folder, times = unfinished
    times |= {".lock.0": 1030.0, **{f"s-{2 * i:06d}.json": 1040 + 10.0 * i for i in range(5)}}
    times |= {".lock.1": 1050.0, "s-000001.json": 1060.0, "s-000003.json": 1070.0}
    assert progress(folder, now=1080.0)["finish"] == pytest.approx(1110.0, abs=1)


def test_info_shows_how_far_a_build_is(unfinished, tmp_path, capsys):
    main(["cache", "info", str(unfinished[0])])
    assert "unfinished: 7 of 12 shards; 0 of 2 builders have ended; finish" in capsys.readouterr().out
    main(["cache", "info", str(unfinished[0]), "--json", "--rows", "40"])
    assert json.loads(capsys.readouterr().out)["planned_shards"] == 20
    with pytest.raises(CacheError, match="holds no manifest"):
        progress(tmp_path)


def test_without_a_number_of_rows_there_is_no_forecast(tmp_path, fingerprint, random_rows):
    fp = fingerprint()
    with CacheWriter(tmp_path / "c", fp, 2) as writer:
        writer.append(random_rows(fp, 4), [None] * 4)
        writer.stop()
    found = progress(tmp_path / "c")
    assert found["finish"] is None and "2 of None shards" in render(found) and "--rows" in render(found)
