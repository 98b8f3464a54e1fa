"""A dry run against the build that it speaks of."""

import json
import os
import shutil
import time

import pytest

from qat_lora.cache.build.builder import TIMED_BATCHES
from qat_lora.cache.storage.store import read_manifest
from qat_lora.cli import main
from qat_lora.data.sources import TextConfig
from qat_lora.errors import ConfigError
from qat_lora.models.load import CausalLM
from qat_lora.options import CacheBuildOptions, RunConfig
from qat_lora.registry import COMMANDS
from qat_lora.runtime.launch.start import run


@pytest.fixture
def build(tiny, tmp_path):
    def options(out="c", **changes):
        values = {
            "teacher": str(tiny.teacher),
            "text": TextConfig(dataset=str(tiny.text), format="text"),
            "length": 64,
            "top_k": 4,
            "shard_rows": 7,
            "teacher_batch_size": 2,
            "run": RunConfig(out=str(tmp_path / out), device="cpu", quiet=True),
        }
        return run(COMMANDS["cache build"], CacheBuildOptions(**{**values, **changes}))

    return options


@pytest.mark.parametrize(
    "changes",
    [{}, {"eval_rows": 3}, {"num_rows": 11, "eval_rows": 2}, {"num_rows": 5}, {"num_rows": 10_000}, {"num_rows": 1}],
)
def test_rows_and_bytes_are_those_of_the_build(build, tmp_path, capsys, changes):
    cost = build(dry_run=True, **changes)
    assert os.listdir(tmp_path) == []  # nothing was written, no folder made
    assert "hours" in capsys.readouterr().out
    build(**changes)
    manifest = read_manifest(tmp_path / "c")
    if changes.get("num_rows") == 10_000:  # a limit beyond the text: three batches do not tell
        assert cost["rows"] == 10_000 > manifest.rows("train")
        return
    assert (cost["rows"], cost["eval_rows"]) == (manifest.rows("train"), manifest.rows("eval"))
    assert cost["bytes"] == sum(entry.bytes for entry in (*manifest.train, *manifest.eval))
    assert cost["tokens"] == 64 * (cost["rows"] + cost["eval_rows"])


def test_a_text_that_ends_before_the_limit_is_noticed_if_it_is_short(build, tmp_path):
    assert build(dry_run=True, length=200, teacher_batch_size=64, num_rows=500)["rows"] < 200


def test_the_shares_of_builders_sum_to_the_whole(build):
    parts = [build(dry_run=True, builder=f"{i}/3", num_rows=20, eval_rows=2) for i in range(3)]
    assert sum(part["rows"] for part in parts) == 20
    assert [part["eval_rows"] for part in parts] == [2, 0, 0]
    with pytest.raises(ConfigError, match="num_rows: 2 leaves builder 0/3 nothing"):
        build(dry_run=True, builder="0/3", num_rows=2)


def test_the_time_is_the_teachers(build, monkeypatch):
    """A teacher that takes 50 ms a batch: 128 tokens in 50 ms and a little, the slow first forward not counted."""
    calls, real = [], CausalLM.hidden

    def slow(self, *arguments):
        calls.append(1)
        time.sleep(1.0 if len(calls) == 1 else 0.05)
        return real(self, *arguments)

    monkeypatch.setattr(CausalLM, "hidden", slow)
    cost = build(dry_run=True, num_rows=1000)
    assert len(calls) == 1 + TIMED_BATCHES
    assert 300 < cost["tokens_per_second"] < 128 / 0.05
    assert cost["hours"] == pytest.approx(64_000 / cost["tokens_per_second"] / 3600)


def test_free_disk_and_json(tiny, tmp_path, capsys):
    flags = ["--teacher", tiny.teacher, "--dataset", tiny.text, "--out", tmp_path / "a" / "b", "--device", "cpu"]
    main(["cache", "build", *map(str, flags), "--length", "64", "--dry-run", "--json", "--top-k", "4"])
    found = json.loads(capsys.readouterr().out)
    assert found["free_bytes"] == pytest.approx(shutil.disk_usage(tmp_path).free, rel=0.05)
    assert os.listdir(tmp_path) == []
