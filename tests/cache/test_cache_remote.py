"""Caches behind a URL: the same bytes as in a folder, whatever is killed, and never overwritten."""

import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import bucket
import fsspec
import numpy as np
import pytest

from qat_lora.cache.build.writer import CacheWriter
from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.cache.storage.location import RemoteFolder
from qat_lora.cache.storage.store import verify_cache
from qat_lora.cache.tools.describe import describe
from qat_lora.cache.tools.transport import export_parquet
from qat_lora.data.shuffle import global_batch
from qat_lora.errors import CacheDamaged, CacheError, MissingExtraError, OutputExistsError, OvertakenError


@pytest.fixture(autouse=True)
def stores(tmp_path, monkeypatch):
    """An empty bucket and memory, a folder for copies of this test's own."""
    monkeypatch.setenv("QAT_LORA_TEST_BUCKET", str(tmp_path / "objects"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    bucket.Bucket.transferred.clear()
    bucket.Bucket.lost_answers = 0
    memory = fsspec.filesystem("memory")
    memory.store.clear()
    memory.pseudo_dirs[:] = [""]


def _objects(url):
    folder = RemoteFolder(url)
    return {name: folder.read(name, 1 << 20) for name in folder.names()}


def _put(url, data):
    fsspec.filesystem(url.split("://")[0]).pipe_file(url.split("://")[1], data)


def _files(folder):
    return {p.name: p.read_bytes() for p in sorted(Path(folder).iterdir()) if not p.name.startswith(".lock")}


def _poke(url, name, change):
    file_system = fsspec.filesystem(url.split("://")[0])
    path = f"{url.split('://')[1]}/{name}"
    data = file_system.cat_file(path)
    file_system.rm_file(path)
    if change is not None:
        file_system.pipe_file(path, change(data))
    return data


URLS = ("memory://kd/cache", "bucket://kd/cache")


@pytest.mark.parametrize("url", URLS)
def test_a_url_holds_what_a_folder_would(url, tmp_path, fingerprint, random_rows, write_cache):
    fp = fingerprint(temperatures=(1.0, 2.0))
    rows, held = random_rows(fp, 11), random_rows(fp, 2, seed=9)
    write_cache(tmp_path / "c", fp, rows, eval_rows=held)
    write_cache(url, fp, rows, eval_rows=held)
    assert _objects(url) == _files(tmp_path / "c")
    assert verify_cache(url + "/").rows == 13 and verify_cache(url).strangers == ()
    near = KDCacheDataset(tmp_path / "c", temperatures=(1.0, 2.0)).rows(range(-1, 11))
    for preload in (True, False):
        for verify in (True, False):
            far = KDCacheDataset(url, preload, temperatures=(1.0, 2.0), verify=verify)
            for name, array in far.rows(range(-1, 11)).items():
                np.testing.assert_array_equal(array, near[name])
    parts = [list(KDCacheDataset(url).batches(3, 2, 1, seed=4, replica=r, replicas=9)) for r in range(9)]  # 4 shards
    ids = [part[step]["input_ids"][0, 0] for step in range(2) for part in parts]
    wanted = np.concatenate([global_batch(11, step, 9, 4) for step in (3, 4)])
    assert ids == np.maximum(wanted, 0).tolist()
    assert describe(url)["splits"] == describe(tmp_path / "c")["splits"]
    report = export_parquet(url, tmp_path / "far.parquet")
    assert report["rows"] == 11
    export_parquet(tmp_path / "c", tmp_path / "near.parquet")
    assert (tmp_path / "far.parquet").read_bytes() == (tmp_path / "near.parquet").read_bytes()


@pytest.mark.parametrize("url", URLS)
def test_an_interrupted_build_goes_on(url, tmp_path, fingerprint, random_rows, write_cache):
    fp = fingerprint()
    rows = random_rows(fp, 7)
    write_cache(tmp_path / "c", fp, rows, 2)
    with pytest.raises(ZeroDivisionError), CacheWriter(url, fp, 2) as writer:
        writer.append({name: array[:3] for name, array in rows.items()}, [{"row": i + 1} for i in range(3)])
        raise ZeroDivisionError
    assert sorted(_objects(url)) == ["s-000000.json", "s-000000.safetensors"]
    for opened in (verify_cache, KDCacheDataset, describe):
        with pytest.raises(CacheError, match="no manifest.json"):
            opened(url)
    with CacheWriter(url, fp, 2) as writer:
        assert writer.resume_state() == (2, {"row": 2}, 0, False)
        writer.append({name: array[2:] for name, array in rows.items()}, [{"row": i + 1} for i in range(2, 7)])
    assert _objects(url) == _files(tmp_path / "c")
    with CacheWriter(url, fp) as writer:
        assert writer.resume_state() == (7, {"row": 7}, 0, True)
    with (
        pytest.raises(OutputExistsError, match="seed is 0 there, 1 was asked"),
        CacheWriter(url, fingerprint(seed=1)),
    ):
        pass
    _put(f"{url}/notes.txt", b"mine")
    with CacheWriter(url, fingerprint(seed=1), overwrite=True) as writer:
        writer.append(rows, [None] * 7)
    assert verify_cache(url).strangers == ("notes.txt",) and KDCacheDataset(url).manifest.fingerprint.seed == 1


def test_a_foreign_folder_is_refused(fingerprint):
    _put("bucket://mine/thesis.txt", b"text")
    foreign = "bucket://mine: holds files and no KD cache"
    with pytest.raises(OutputExistsError, match=foreign), CacheWriter("bucket://mine", fingerprint()):
        pass
    assert RemoteFolder("bucket://mine").names() == ["thesis.txt"]


@pytest.mark.parametrize("url", URLS)
def test_damage_is_named(url, fingerprint, random_rows, write_cache):
    fp = fingerprint()
    write_cache(url, fp, random_rows(fp, 7), 2)
    changes = (lambda data: data[:-1] + bytes([data[-1] ^ 1]), lambda data: data[:-1], lambda data: data + b"0", None)
    for name in ("s-000002.safetensors", "s-000001.json", "manifest.json"):
        for change in changes:
            good = _poke(url, name, change)
            match = name if name != "manifest.json" or change else "no manifest.json"
            for opened in (verify_cache, KDCacheDataset):
                with pytest.raises(CacheError, match=match):
                    opened(url)
            if name.startswith("s-000002"):  # without --verify: seen when the row is read
                with pytest.raises(CacheDamaged, match="s-000002"):
                    KDCacheDataset(url, verify=False).rows([5])
            _put(f"{url}/{name}", good)
    verify_cache(url)


# Two builders of the same shards that do not know of each other: nothing that was put may be overwritten.
def _two_writers(url, fp, random_rows):
    ours, theirs = random_rows(fp, 4), random_rows(fp, 4, seed=1)
    refused = None
    with CacheWriter(url, fp, 2) as first, CacheWriter(url, fp, 2) as second:
        first.append({name: array[:2] for name, array in ours.items()}, [1, 2])
        try:
            second.append(theirs, [1, 2, 3, 4])
        except OutputExistsError as error:
            refused = str(error)
        second.stop()
        first.append({name: array[2:] for name, array in ours.items()}, [3, 4])
    return refused


def test_two_writers_lose_nothing_without_a_lock(fingerprint, random_rows):
    fp = fingerprint()
    refused = _two_writers("bucket://two", fp, random_rows)
    assert refused and "there is another s-000000.safetensors already" in refused
    verify_cache("bucket://two")
    served = KDCacheDataset("bucket://two").rows(range(4))["input_ids"]
    np.testing.assert_array_equal(served, random_rows(fp, 4)["input_ids"])
    assert _two_writers("naive://other", fp, random_rows) is None  # positive control: nobody notices, and it is lost
    with pytest.raises(CacheDamaged, match="s-000000"):
        verify_cache("naive://other")


def test_two_writers_of_the_same_bytes_meet_in_the_same_cache(tmp_path, fingerprint, random_rows, write_cache):
    fp = fingerprint()
    rows = random_rows(fp, 9)
    write_cache(tmp_path / "c", fp, rows, 2)
    errors, opened = [], threading.Barrier(4)

    def build():
        try:
            with CacheWriter("bucket://same", fp, 2) as writer:
                opened.wait()
                writer.append(rows, [{"row": i + 1} for i in range(9)])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=build) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == [] and _objects("bucket://same") == _files(tmp_path / "c")


def test_a_shard_without_its_sidecar_is_taken_over_or_named(tmp_path, fingerprint, random_rows, write_cache):
    fp = fingerprint()
    rows = random_rows(fp, 4)
    write_cache(tmp_path / "c", fp, rows, 2)
    whole = _files(tmp_path / "c")
    for url, data in (("bucket://mine", whole["s-000001.safetensors"]), ("bucket://theirs", b"other bytes")):
        with CacheWriter(url, fp, 2) as writer:
            writer.append({name: array[:2] for name, array in rows.items()}, [{"row": 1}, {"row": 2}])
            writer.stop()
        _put(f"{url}/s-000001.safetensors", data)
    rest = {name: array[2:] for name, array in rows.items()}
    with CacheWriter("bucket://mine", fp, 2) as writer:
        writer.append(rest, [{"row": 3}, {"row": 4}])
    assert _objects("bucket://mine") == whole
    before = _objects("bucket://theirs")
    with pytest.raises(OutputExistsError, match="theirs: .*s-000001"), CacheWriter("bucket://theirs", fp, 2) as writer:
        writer.append(rest, [{"row": 3}, {"row": 4}])
    assert _objects("bucket://theirs") == before


def _feed(writer, rows, start=0, end=None):
    end = len(rows["input_ids"]) if end is None else end
    part = {name: array[start:end] for name, array in rows.items()}
    writer.append(part, [{"row": i + 1} for i in range(start, end)])


@pytest.mark.parametrize("dies", [None, "shard"])
def test_a_second_start_adopts_what_the_first_put(monkeypatch, fingerprint, random_rows, dies):
    """The same builder on two machines, whose values differ in the last bits: each goes on from the other's shards."""
    fp = fingerprint()
    ours = random_rows(fp, 7)
    theirs = {**ours, "head_logits": ours["head_logits"] - np.float32(2**-9) * (ours["head_logits"] < 0)}
    real, calls = bucket.Bucket.pipe_file, []

    def killed(self, path, value, mode="overwrite", **kwargs):
        calls.append(path)
        real(self, path, value, mode)
        if dies == "shard" and path.endswith("s-000001.safetensors"):
            raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(bucket.Bucket, "pipe_file", killed)
        with CacheWriter("bucket://two", fp, 2) as first, CacheWriter("bucket://two", fp, 2) as second:
            _feed(first, ours, 0, 2)
            _feed(second, theirs, 0, 2)
            if dies == "shard":
                with pytest.raises(CacheError):
                    _feed(first, ours, 2, 4)
            else:
                _feed(first, ours, 2, 4)
            _feed(second, theirs, 2)
            assert second.resume_state() == (6, {"row": 6}, 0, False)
            first.stop()
    report = verify_cache("bucket://two")
    assert report.rows == 7 and report.strangers == ()
    np.testing.assert_array_equal(KDCacheDataset("bucket://two").rows(range(7))["input_ids"], ours["input_ids"])


def test_a_start_that_was_overtaken_goes_on_behind_the_other(fingerprint, random_rows, write_cache):
    fp = fingerprint()
    rows = random_rows(fp, 8)
    with CacheWriter("bucket://far", fp, 2) as slow, CacheWriter("bucket://far", fp, 3) as fast:
        _feed(fast, rows, 0, 6)
        with pytest.raises(OvertakenError, match="s-000000: another start of builder 0/1 was faster"):
            _feed(slow, rows)
        fast.stop(), slow.stop()
    with CacheWriter("bucket://far", fp, 2) as slow:
        assert slow.resume_state().cursor == {"row": 6}
        _feed(slow, rows, 6)
    assert verify_cache("bucket://far").rows == 8
    other = {**rows, "input_ids": rows["input_ids"][::-1]}  # the text has changed: nothing is adopted
    with (
        CacheWriter("bucket://text", fp, 2) as first,
        pytest.raises(OutputExistsError, match="another s-000000.safetensors already"),
        CacheWriter("bucket://text", fp, 2) as second,
    ):
        _feed(first, rows)
        _feed(second, other)
    first.stop()


def test_an_answer_that_was_lost_is_no_second_writer(fingerprint, random_rows, write_cache, tmp_path):
    fp = fingerprint()
    write_cache(tmp_path / "c", fp, random_rows(fp, 4), 2)
    with CacheWriter("bucket://lost", fp, 2) as writer:
        bucket.Bucket.lost_answers = 2
        writer.append(random_rows(fp, 4), [{"row": i + 1} for i in range(4)])
    assert _objects("bucket://lost") == _files(tmp_path / "c")


def test_a_put_that_fails_costs_one_shard_and_says_so(monkeypatch, fingerprint, random_rows, write_cache, tmp_path):
    fp = fingerprint()
    rows = random_rows(fp, 6)
    write_cache(tmp_path / "c", fp, rows, 2)
    real, calls = bucket.Bucket.pipe_file, []

    def failing(self, path, value, mode="overwrite", **kwargs):
        calls.append(path)
        if path.endswith("s-000001.json"):
            raise PermissionError("quota is used up")
        return real(self, path, value, mode)

    with monkeypatch.context() as patch:
        patch.setattr(bucket.Bucket, "pipe_file", failing)
        with pytest.raises(
            CacheError, match=r"bucket://full: cannot be written \(.*quota is used up\); 2 rows are safe"
        ):
            write_cache("bucket://full", fp, rows, 2)
    with CacheWriter("bucket://full", fp, 2) as writer:
        done = writer.resume_state()
        assert done.rows == 2
        writer.append({name: array[2:] for name, array in rows.items()}, [{"row": i + 1} for i in range(2, 6)])
    assert _objects("bucket://full") == _files(tmp_path / "c")


def test_a_store_that_keeps_other_bytes_is_caught_at_once(monkeypatch, fingerprint, random_rows, write_cache):
    fp = fingerprint()
    real = bucket.Bucket.pipe_file

    def garbling(self, path, value, mode="overwrite", **kwargs):
        return real(self, path, value[:-1] + b"?" if path.endswith("safetensors") else value, mode)

    monkeypatch.setattr(bucket.Bucket, "pipe_file", garbling)
    with pytest.raises(CacheError, match="s-000000.safetensors is stored with other bytes than were sent"):
        write_cache("bucket://garbled", fp, random_rows(fp, 4), 2)


def test_a_driver_that_would_overwrite_is_refused(monkeypatch, fingerprint):
    monkeypatch.setattr(bucket.Bucket, "pipe_file", lambda self, path, value: None)
    old = "bucket as installed cannot put an object only where there is none"
    with pytest.raises(CacheError, match=old), CacheWriter("bucket://old", fingerprint()):
        pass


def test_missing_drivers_and_unknown_kinds(monkeypatch):
    monkeypatch.setitem(sys.modules, "gcsfs", None)
    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(MissingExtraError, match=r"gs://b/c: .*pip install 'qat-lora\[gcs\]'"):
        KDCacheDataset("gs://b/c")
    with pytest.raises(MissingExtraError, match=r"s3://b/c: .*pip install 'qat-lora\[s3\]'"):
        verify_cache("s3://b/c")
    with pytest.raises(CacheError, match="gopher://b: .*not known.*allowed"):
        verify_cache("gopher://b")
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(MissingExtraError, match=r"fsspec.core is not installed: pip install 'qat-lora\[s3\]'"):
        verify_cache("s3://b/c")


def test_what_a_driver_raises_is_one_line(monkeypatch):
    def refuse(self, path, **kwargs):
        raise RuntimeError("403 Forbidden\nno such account")

    monkeypatch.setattr(bucket.Bucket, "info", refuse)
    with pytest.raises(
        CacheError, match=r"bucket://b/manifest.json: cannot be read \(RuntimeError: 403 Forbidden no such"
    ):
        verify_cache("bucket://b")


# A small process without torch forks a child for every kill; the store lives on, as stores do.
KILLS = r"""
import json, os, signal, sys
import bucket
import numpy as np
from qat_lora.cache.format.records import Fingerprint
from qat_lora.cache.storage.location import RemoteFolder
from qat_lora.cache.build.writer import Partition
from qat_lora.cache.build.writer import CacheWriter
from qat_lora.cache.read.dataset import KDCacheDataset
L, K = 5, 3
fp = Fingerprint(tokenizer_sha256="1", vocab_size=31, teacher="t", teacher_sha256="2", chat_template_sha256=None,
                 dataset="d", packing="p", length=L, top_k=K, eval_rows=2)

def row(i):
    rng = np.random.default_rng(i)
    return {"input_ids": rng.integers(0, 31, (1, L)), "loss_mask": np.ones((1, L)), "doc_starts": np.ones((1, L)),
            "head_ids": rng.integers(0, 31, (1, L - 1, K)), "lse": rng.random((1, L - 1)),
            "head_logits": -np.sort(rng.random((1, L - 1, K))), "log_tail": -rng.random((1, L - 1))}

def build(url, share=Partition()):
    with CacheWriter(url, fp, 3, partition=share) as writer:
        done = writer.resume_state()
        if done.finished:
            return
        if not done.rows and not share.builder:
            for i in range(done.eval_rows, 2):
                writer.append(row(100 + i), [None], "eval")
        for i in range(done.cursor["row"] if done.cursor else 0, 7):
            writer.append(row(i + 1000 * share.builder), [{"row": i + 1}])

def objects(url):
    folder = RemoteFolder(url)
    return {name: folder.read(name, 1 << 20) for name in folder.names()}

def child(url, point, share=Partition()):
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            if point:
                os.environ["QAT_LORA_FAILPOINT"] = point
            build(url, share)
            code = 0
        finally:
            os._exit(code)
    return pid

def wait(pid):
    status = os.waitpid(pid, 0)[1]
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)

assert wait(child("bucket://whole", None)) == 0
whole, broken, kills = objects("bucket://whole"), [], 0
points = [f"{kind}-{step}:{n}" for kind in ("shard", "sidecar") for step in ("opened", "durable") for n in (1, 4)]
points += ["manifest-opened", "manifest-durable"]
points += [f"{step}:{n}" for step in ("send", "sent") for n in (1, 2, 8)]
plans = [[point] for point in points] + [["shard-durable:1", "send:2", "sidecar-opened:1"]]
for number, plan in enumerate(plans):
    url = f"bucket://kill{number}"
    for point in plan:
        assert wait(child(url, point)) == -signal.SIGKILL, plan
        kills += 1
    if wait(child(url, None)) != 0 or objects(url) != whole:
        broken.append(plan)
shares = [Partition(0, 2), Partition(1, 2)]
for share in shares:
    assert wait(child("bucket://whole2", None, share)) == 0
whole2 = objects("bucket://whole2")
for race in range(4):
    pids = [child(f"bucket://race{race}", None, share) for share in shares]
    if [wait(pid) for pid in pids] != [0, 0] or objects(f"bucket://race{race}") != whole2:
        broken.append(f"race{race}")
for step in ("part-opened", "part-durable", "manifest-opened", "manifest-durable"):
    assert wait(child(f"bucket://{step}", None, shares[0])) == 0
    assert wait(child(f"bucket://{step}", step, shares[1])) == -signal.SIGKILL
    kills += 1
    if wait(child(f"bucket://{step}", None, shares[1])) != 0 or objects(f"bucket://{step}") != whole2:
        broken.append(step)
assert len(KDCacheDataset("bucket://whole2", preload=True)) == 14
assert "torch" not in sys.modules
print(json.dumps({"kills": kills, "broken": broken, "objects": sorted(whole)}))
"""


def test_killed_and_resumed_gives_the_same_objects():
    paths = [str(Path(__file__).parent), *filter(None, sys.path)]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-c", KILLS], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["broken"] == [] and result["kills"] == 16 + 3 + 4
    assert "manifest.json" in result["objects"] and "s-000002.safetensors" in result["objects"]


def test_a_reader_copies_each_shard_once(tmp_path, fingerprint, random_rows, write_cache):
    fp = fingerprint()
    url = write_cache("bucket://copies", fp, random_rows(fp, 12), 2)
    bucket.Bucket.transferred.clear()
    dataset = KDCacheDataset(url)
    for row in (0, 5, 11, 3):
        assert dataset.rows([row])["input_ids"][0, 0] == row
    shards = {name: size for name, size in bucket.Bucket.transferred.items() if name.endswith("safetensors")}
    assert shards == {f"{entry.shard}.safetensors": entry.bytes for entry in dataset.manifest.train}
    folder = Path(dataset.path._copies.storage[0])
    assert len(list(folder.iterdir())) == 6
    del dataset
    gc.collect()
    assert not folder.exists()
    lazy = KDCacheDataset(url, verify=False)
    bucket.Bucket.transferred.clear()
    lazy.rows([4])
    assert [name for name in bucket.Bucket.transferred if name.endswith("safetensors")] == ["s-000002.safetensors"]


def test_a_copy_that_changes_under_a_reader_is_fetched_again_or_one_line(fingerprint, random_rows, write_cache):
    fp = fingerprint()
    dataset = KDCacheDataset(write_cache("bucket://under", fp, random_rows(fp, 6), 3), verify=False)
    good = dataset.rows(range(6))["input_ids"]
    copies = Path(dataset.path._copies.storage[0])
    for file in copies.iterdir():
        file.unlink()
    np.testing.assert_array_equal(dataset.rows(range(6))["input_ids"], good)  # open files stay readable
    dataset._shard.cache_clear()  # closed meanwhile, among many
    bucket.Bucket.transferred.clear()
    np.testing.assert_array_equal(dataset.rows(range(6))["input_ids"], good)
    assert {name for name in bucket.Bucket.transferred} == {"s-000000.safetensors", "s-000001.safetensors"}
    for file in copies.iterdir():
        os.truncate(file, 100)
    with pytest.raises(CacheDamaged, match="bucket://under/s-000001: row 2 is cut off"):
        dataset.rows([5])
    dataset._shard.cache_clear()
    with pytest.raises(CacheDamaged, match="s-000000.safetensors: has 100 bytes"):
        dataset.rows([0])


def test_eight_readers_at_once(fingerprint, random_rows, write_cache):
    fp = fingerprint()
    url = write_cache("bucket://eight", fp, random_rows(fp, 30), 2)
    read = "import sys, bucket; from qat_lora.cache.read.dataset import KDCacheDataset as D; "
    read += "d = D(sys.argv[1]); print(d.rows(range(30))['input_ids'][:, 0].tolist() == list(range(30)))"
    paths = [str(Path(__file__).parent), *filter(None, sys.path)]
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-c", read, url]
    readers = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(8)]
    assert [reader.communicate(timeout=100)[0].strip() for reader in readers] == ["True"] * 8
