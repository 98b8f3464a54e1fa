"""A shard that changes, shrinks or vanishes while it is open: one error that names shard and row, and no SIGBUS."""

import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from qat_lora.cache.format import layout as fmt
from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.cache.storage import store as shards
from qat_lora.cache.tools.describe import describe
from qat_lora.cache.tools.transport import export_parquet
from qat_lora.errors import CacheDamaged

OPTIONAL = ("tail_draws:2", "draws:1")


@pytest.fixture(params=[{}, {"value_dtype": "uint8", "optional_arrays": OPTIONAL}], ids=["plain", "all"])
def cache(request, tmp_path, fingerprint, random_rows, write_cache):
    fp = fingerprint(**request.param)
    return write_cache(tmp_path / "c", fp, random_rows(fp, 6), shard_rows=3, eval_rows=random_rows(fp, 2, seed=9))


def places(dataset, row):
    """Yield the file's places of a row of the second shard: the first and last byte of the row in every array."""
    held = dataset.manifest.fingerprint
    plan = fmt.layout(held.arrays, 3, held.sha256)
    for spec in held.arrays:
        start = plan.starts[spec.name]
        yield from {start + row * spec.row_bytes, start + (row + 1) * spec.row_bytes - 1}


def flip(file, place):
    with open(file, "r+b") as opened:
        opened.seek(place)
        byte = opened.read(1)[0]
        opened.seek(place)
        opened.write(bytes([byte ^ 4]))


def test_every_row_is_checked_as_it_is_read(cache):
    checked, unchecked = KDCacheDataset(cache), KDCacheDataset(cache, verify_rows="off")
    file = cache / "s-000001.safetensors"
    good = checked.rows(range(6))
    wrong = 0
    for place in places(checked, 1):
        flip(file, place)
        for index in (3, 5):  # the rows beside it
            np.testing.assert_array_equal(checked.rows([index])["input_ids"][0], good["input_ids"][index])
        with pytest.raises(CacheDamaged, match=r"/s-000001: row 1 does not have its checksum; restore"):
            checked.rows([0, 4])
        try:  # positive control: without the check
            batch = unchecked.rows([4])
            wrong += any(not np.array_equal(batch[name][0], good[name][4]) for name in batch)
        except CacheDamaged as error:
            assert "s-000001: row 1 has" in str(error) and "allowed: 0 to 30" in str(error)
        flip(file, place)
    assert wrong > 5
    checked.rows(range(6))


def test_sampled_rows_are_checked_now_and_then(cache):
    dataset = KDCacheDataset(cache, verify_rows="sampled")
    flip(cache / "s-000001.safetensors", next(places(dataset, 1)))
    for _ in range(15):
        dataset.rows([4])
    with pytest.raises(CacheDamaged, match="row 1 does not have its checksum"):
        dataset.rows([4])


@pytest.mark.parametrize(
    ("damage", "what"),
    [
        (lambda file: os.truncate(file, file.stat().st_size - 1), "row 2 is cut off"),
        (lambda file: os.truncate(file, 0), "row 2 is cut off"),
        (lambda file: file.unlink(), "row 2 cannot be read: the file was removed or replaced"),
        (lambda file: os.replace(shutil.copy(file, f"{file}.new"), file), "row 2 cannot be read: the file was removed"),
    ],
    ids=["a byte less", "emptied", "removed", "replaced"],
)
def test_a_file_that_shrinks_or_vanishes_while_it_is_open(cache, damage, what):
    file, copy = cache / "s-000001.safetensors", cache / "copy"
    shutil.copy(file, copy)
    dataset, loaded = KDCacheDataset(cache), KDCacheDataset(cache, preload=True)
    good = dataset.rows(range(6))
    damage(file)
    with pytest.raises(CacheDamaged, match=f"/s-000001: {what}"):
        dataset.rows([5])
    dataset._shard.cache_clear()  # closed meanwhile, among many
    if not file.exists() or file.stat().st_size != copy.stat().st_size:
        with pytest.raises(
            CacheDamaged, match="s-000001.safetensors: (is missing|has .* were written).*its row 2 was wanted"
        ):
            dataset.rows([5])
    shutil.copy(copy, file)
    for served in (dataset.rows(range(6)), loaded.rows(range(6))):
        assert all(np.array_equal(served[name], good[name]) for name in good)


def test_other_readers_of_rows_check_them_too(cache, tmp_path):
    dataset = KDCacheDataset(cache)
    flip(cache / "s-000000.safetensors", next(places(dataset, 0)))
    for read in (describe, lambda path: export_parquet(path, tmp_path / "x.parquet", "train")):
        with pytest.raises(CacheDamaged, match="s-000000"):
            read(cache)


SHRINK = """
import os, sys
import numpy as np
file, way = sys.argv[1:]
size = os.path.getsize(file)
if way == "mapped":
    rows = np.memmap(file, np.uint8, "r")
    os.truncate(file, 0)
    print(rows[size - 1])
else:
    from qat_lora.cache.read.dataset import KDCacheDataset
    dataset = KDCacheDataset(os.path.dirname(file))
    dataset.rows([5])
    os.truncate(file, 0)
    dataset.rows([5])
"""


def python(code, *arguments):
    """Run a program with the package that is tested."""
    paths = [str(Path(__file__).parents[2]), str(Path(__file__).parent), *os.environ.get("PYTHONPATH", "").split(":")]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, env=environment, timeout=120
    )


def test_a_mapped_file_that_shrinks_kills_the_process(tmp_path, fingerprint, random_rows, write_cache):
    """The positive control: what the reader did before it read rows with `pread`."""
    fp = fingerprint()
    file = write_cache(tmp_path / "c", fp, random_rows(fp, 6)) / "s-000001.safetensors"
    good = file.read_bytes()
    assert python(SHRINK, file, "mapped").returncode == -signal.SIGBUS
    file.write_bytes(good)
    done = python(SHRINK, file, "read")
    assert done.returncode == 1 and "s-000001: row 2 is cut off" in done.stderr


MANY = """
import os, resource, sys, tempfile
tempfile.tempdir = sys.argv[1]
from conftest import _fingerprint, _random_rows, _write_cache
import numpy as np
from qat_lora.cache.storage import store as shard
from qat_lora.cache.tools import overlap
from qat_lora.cache.format import layout as fmt
from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.cache.tools.describe import describe
from qat_lora.cache.storage.store import verify_cache
from qat_lora.errors import CacheDamaged

resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
assert shard.most_open() == 16
fp = _fingerprint(vocab_size=401)
for place in (sys.argv[1] + "/c", "memory://c"):
    made = _random_rows(fp, 120)
    _write_cache(place, fp, made, shard_rows=1, eval_rows=_random_rows(fp, 20, seed=9))
    assert verify_cache(place).shards == 140
    sets = [KDCacheDataset(place, split=split) for split in ("train", "eval")]
    for _ in range(2):
        assert np.array_equal(sets[0].rows(range(120))["input_ids"], made["input_ids"])
        assert len(sets[1].rows(range(20))["input_ids"]) == 20
    describe(place)
    print("open", len(os.listdir("/proc/self/fd")))
    sets.clear()
shard.most_open = lambda: 1_000
import qat_lora.cache.read.dataset as dataset
dataset.most_open = shard.most_open
try:
    KDCacheDataset(sys.argv[1] + "/c").rows(range(120))
except CacheDamaged as error:
    print(error)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="counts the open files in /proc")
def test_more_shards_than_files_may_be_open(tmp_path):
    done = python(MANY, tmp_path)
    assert done.returncode == 0, done.stderr
    *counts, control = done.stdout.splitlines()
    assert len(counts) == 2 and all(int(line.split()[1]) < 56 for line in counts), counts
    assert "Too many open files" in control


def test_the_limit_of_open_shards_follows_the_process(monkeypatch):
    for soft, most in ((256, 64), (1024, 256), (10**6, 256), (2, 1), (resource.RLIM_INFINITY, 256)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert shards.most_open() == most
