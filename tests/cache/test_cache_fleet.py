"""The simulated fleet of benchmarks/fleet.py at a small count, and the forecast from shards alone."""

import os

import numpy as np
import pytest

from qat_lora import cli
from qat_lora.cache.build.writer import CacheWriter, Partition
from qat_lora.cache.tools.progress import progress, render, unfinished
from qat_lora.commands.bench import load_program
from qat_lora.errors import CacheError

fleet = load_program("fleet", "bench")


def test_a_small_fleet(monkeypatch):
    """No fault with kills, stragglers and second starts; a store that overwrites has some, so they would be seen."""
    monkeypatch.setattr(fleet, "TWICE", 0.4)
    found = fleet.study(24, seed=3)
    assert found["faults_undisturbed"] == [] and found["shards"] > 200
    for case in ("alike", "mixed"):
        assert found[case]["faults"] == 0, found[case]["first_faults"]
        assert found[case]["kills"] > 5 and found[case]["starts"] > 24 + found[case]["kills"]
    assert found["control"]["faults"] > 0
    assert found["alike"]["worst_forecast_error"] < 0.3  # 24 builders tell less than a thousand


def _commit(out, fp, random_rows, builder, shards, share, at, every=100.0, builders=3):
    with CacheWriter(out, fp, 2, partition=Partition(builder, builders)) as writer:
        for i in range(shards):
            rows = random_rows(fp, 2, seed=i)
            writer.append(rows, [{"document": i, "token": 0, **({"share": share * (i + 1)} if share else {})}] * 2)
            name = f"{writer.partition.shard_name('train', i)}.json"
            os.utime(out / name, (at + every * (i + 1),) * 2)
        writer.stop()


def test_what_is_expected_and_when_it_ends(tmp_path, fingerprint, random_rows, capfd):
    fp = fingerprint()
    _commit(tmp_path, fp, random_rows, 0, 3, 0.1, 1e9)
    _commit(tmp_path, fp, random_rows, 1, 3, 0.1, 1e9)
    found = progress(tmp_path, 1e9 + 300)
    assert unfinished(tmp_path) and found["builders"] == [[3, 10], [3, 10], [0, 10]]
    assert (found["shards"], found["expected"], found["ended"]) == (6, 30, 0)
    assert found["finish"] == pytest.approx(1e9 + 200 + 1000)  # builder 2 has all before it
    assert found["shards_an_hour"] == pytest.approx(108) and found["slowest"][0] == 2
    assert "6 of 30 shards, by 3 builders" in render(found) and "last         builders 2 (0 of 10)" in render(found)
    with CacheWriter(tmp_path, fp, 2, partition=Partition(0, 3)):
        pass  # it ends here
    assert progress(tmp_path, 1e9 + 300)["builders"] == [[3, 3], [3, 10], [0, 7]]
    cli.main(["cache", "info", str(tmp_path)])
    assert "of which have ended" in capfd.readouterr().out


def test_a_number_of_rows_says_what_is_expected(tmp_path, fingerprint, random_rows):
    fp = fingerprint(dataset="text first 25 rows")
    _commit(tmp_path, fp, random_rows, 0, 2, None, 1e9)
    assert progress(tmp_path, 1e9)["builders"] == [[2, 4], [0, 4], [0, 5]]
    _commit(tmp_path / "u", fingerprint(), random_rows, 0, 1, None, 1e9)
    found = progress(tmp_path / "u", 1e9)
    assert found["expected"] is None and found["finish"] is None and "of unknown shards" in render(found)
    (tmp_path / "e").mkdir()
    assert not unfinished(tmp_path / "e")
    with pytest.raises(CacheError, match="holds no shard"):
        progress(tmp_path / "e")


def test_the_largest_of_many_noisy_means_is_not_taken_for_the_slowest(tmp_path, fingerprint, random_rows):
    """Builders of one pace with scattered intervals end together; the naive forecast is far behind that."""
    from qat_lora.cache.tools.progress import _paces

    rng = np.random.default_rng(0)
    commits = {b: np.cumsum(rng.exponential(100, 4)) for b in range(500)}
    naive = max(np.diff(times).mean() for times in commits.values())
    assert _paces(commits, 500).max() < 120 and naive > 250
    for builder in range(10):
        commits[builder] = np.cumsum(rng.normal(300, 5, 4))
    commits |= {b: np.cumsum(rng.normal(100, 5, 4)) for b in range(10, 500)}
    assert _paces(commits, 500)[:10].min() > 280
