import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from qat_lora.cache.build.writer import CacheWriter, Partition
from qat_lora.cache.format.records import to_json
from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.cache.storage.store import read_manifest, verify_cache
from qat_lora.errors import CacheDamaged, CacheError, OutputExistsError
from qat_lora.files import folders as commit
from qat_lora.files import outputs


def _files(folder):
    return {p.name: p.read_bytes() for p in sorted(Path(folder).iterdir()) if p.name != ".lock"}


def _part(rows, start, end):
    return {name: array[start:end] for name, array in rows.items()}


# One small process without torch forks a child for every failpoint, so that a kill is a real SIGKILL and cheap.
KILLS = r"""
import json, os, signal, sys
from pathlib import Path
import numpy as np
from qat_lora.files.folders import FAILPOINT_STEPS, failpoint
from qat_lora.cache.format.records import Fingerprint
from qat_lora.cache.build.writer import CacheWriter
assert "torch" not in sys.modules

work = Path(sys.argv[1])
L, K = 5, 3
fp = Fingerprint(tokenizer_sha256="1", vocab_size=31, teacher="t", teacher_sha256="2", chat_template_sha256=None,
                 dataset="d", packing="p", length=L, eval_rows=2,
                 **({"top_k": 0, "optional_arrays": (f"draws:{K}", "lzma:1")} if sys.argv[2] == "2" else {"top_k": K}))

def row(i):
    rng = np.random.default_rng(i)
    return {"input_ids": rng.integers(0, 31, (1, L)), "loss_mask": np.ones((1, L)), "doc_starts": np.ones((1, L)),
            "head_ids": rng.integers(0, 31, (1, L - 1, K)), "lse": rng.random((1, L - 1)),
            "head_logits": -np.sort(rng.random((1, L - 1, K))), "log_tail": -rng.random((1, L - 1)),
            "draw_ids": rng.integers(0, 31, (1, L - 1, K)), "entropy": rng.random((1, 1))}

def ours(out):
    with CacheWriter(out, fp, 3) as writer:
        done = writer.resume_state()
        if done.finished:
            return
        if not done.rows:
            for i in range(done.eval_rows, 2):
                writer.append(row(100 + i), [None], "eval")
        for i in range(done.cursor["row"] if done.cursor else 0, 7):
            writer.append(row(i), [{"row": i + 1}])

def naive(out):
    out.mkdir(exist_ok=True)
    first = len(list(out.glob("shard*")))
    for shard in range(first, 3):
        with open(out / f"shard{shard}", "wb") as file:
            for i in range(3 * shard, min(7, 3 * shard + 3)):
                file.write(row(i)["lse"].tobytes())
                file.flush()
                failpoint("naive-row")
    (out / "meta.json").write_text("7")

def files(out):
    return {p.name: p.read_bytes() for p in out.iterdir() if p.name != ".lock"} if out.exists() else {}

def run(build, out, point):
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if point:
                os.environ["QAT_LORA_FAILPOINT"] = point
            build(out)
            code = 0
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    return "killed" if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL else os.WEXITSTATUS(status)

def campaign(build, name, plans):
    assert run(build, work / name, None) == 0
    whole, broken, early = files(work / name), [], []
    for number, plan in enumerate(plans):
        out = work / f"{name}{number}"
        for point in plan:
            assert run(build, out, point) == "killed", plan
            sealed = point.startswith("manifest") and point.split("-")[1].split(":")[0] in ("linked", "durable")
            if ("manifest.json" in files(out)) != sealed:
                early.append(plan)
        if run(build, out, None) != 0 or files(out) != whole:
            broken.append(plan)
    return {"kills": sum(map(len, plans)), "broken": broken, "early": early, "files": sorted(whole)}

steps = FAILPOINT_STEPS
once = [[f"{kind}-{step}:{n}"] for kind in ("shard", "sidecar") for step in steps for n in (1, 2, 3, 4)]
once += [[f"manifest-{step}"] for step in steps]
thrice = [[f"shard-{a}:1", f"sidecar-{b}:2", f"shard-{a}:1"] for a in ("started", "linked") for b in steps[:4]]
print(json.dumps({
    "ours": campaign(ours, "ours", once + thrice),
    "naive": campaign(naive, "naive", [[f"naive-row:{n}"] for n in (1, 2, 4, 5)]),
}))
"""


@pytest.mark.parametrize("version", ["1", "2"])
def test_killed_at_every_step_and_resumed_gives_the_same_bytes(version, tmp_path):
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", KILLS, str(tmp_path), version],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    ours, naive = result["ours"], result["naive"]
    assert read_manifest(tmp_path / "ours").version == int(version)
    assert ours["kills"] == 4 * 6 * 2 + 6 + 3 * 8
    assert ours["broken"] == [] and ours["early"] == []
    assert [name for name in ours["files"] if name.endswith("safetensors")] == [
        "e-000000.safetensors",
        "s-000000.safetensors",
        "s-000001.safetensors",
        "s-000002.safetensors",
    ]
    assert len(naive["broken"]) == 4  # positive control: the kills do land where a plain writer is hurt


def test_two_writers_in_one_folder(tmp_path, fingerprint):
    with CacheWriter(tmp_path, fingerprint()) as first:
        with (
            pytest.raises(OutputExistsError, match=f"another builder.*process {os.getpid()}"),
            CacheWriter(tmp_path, fingerprint()),
        ):
            pass
        first.stop()
    with CacheWriter(tmp_path, fingerprint()) as later:  # the lock file alone blocks nobody
        later.stop()


def test_another_cache_in_the_folder_is_left_alone(tmp_path, fingerprint, random_rows, write_cache):
    fp = fingerprint()
    write_cache(tmp_path, fp, random_rows(fp, 4))
    before = _files(tmp_path)
    changes = {
        "tokenizer_sha256": "44" * 32,
        "vocab_size": 32,
        "teacher": "other",
        "teacher_sha256": "55" * 32,
        "chat_template_sha256": "66" * 32,
        "dataset": "letters",
        "packing": "best fit",
        "length": 6,
        "top_k": 2,
        "temperatures": (1.0, 2.0),
        "seed": 1,
        "eval_rows": 1,
        "builder": "another stack",
    }
    assert {*changes, "value_dtype", "optional_arrays"} == set(to_json(fp))
    del changes["teacher"]  # a name for people; see below
    for finished in (True, False):
        if not finished:
            (tmp_path / "manifest.json").unlink()
            del before["manifest.json"]
        for name, value in changes.items():
            with (
                pytest.raises(OutputExistsError, match=rf"{name} is .* there, .* was asked.*--overwrite"),
                CacheWriter(tmp_path, fingerprint(**{name: value})),
            ):
                pass
    assert _files(tmp_path) == before
    (tmp_path / "notes.txt").write_text("mine")
    with CacheWriter(tmp_path, fingerprint(top_k=2), overwrite=True) as writer:
        assert writer.resume_state() == (0, None, 0, False)
        writer.stop()
    assert _files(tmp_path) == {"notes.txt": b"mine"}


def test_a_teacher_spelt_otherwise_goes_on(tmp_path, fingerprint, random_rows, write_cache):
    """The first spelling stays in all shards, so that the cache is the one of an uninterrupted build."""
    fp = fingerprint()
    rows = random_rows(fp, 8)
    write_cache(tmp_path / "whole", fp, rows)
    out, half = tmp_path / "half", {name: value[:4] for name, value in rows.items()}
    with CacheWriter(out, fp, shard_rows=2) as writer:
        writer.append(half, list(range(4)))
        writer.stop()
    with CacheWriter(out, fingerprint(teacher=f"./{fp.teacher}/"), shard_rows=2) as writer:
        assert writer.resume_state().rows == 4
        writer.append({name: value[4:] for name, value in rows.items()}, list(range(4, 8)))
    assert verify_cache(out).rows == 8
    assert read_manifest(out).fingerprint == fp


def test_a_finished_cache_takes_no_more(tmp_path, fingerprint, random_rows, write_cache):
    fp = fingerprint()
    rows = random_rows(fp, 4)
    write_cache(tmp_path, fp, rows)
    stranger = tmp_path / "s-000009.safetensors"
    stranger.write_bytes((tmp_path / "s-000000.safetensors").read_bytes())
    before = _files(tmp_path)
    with CacheWriter(tmp_path, fp) as writer:
        assert writer.resume_state() == (4, {"row": 4}, 0, True)
        with pytest.raises(CacheError, match="complete"):
            writer.append(rows, [None] * 4)
    assert _files(tmp_path) == before


def test_an_exception_leaves_no_manifest(tmp_path, fingerprint, random_rows):
    fp = fingerprint()
    rows = random_rows(fp, 5)
    with pytest.raises(ZeroDivisionError), CacheWriter(tmp_path, fp, 2) as writer:
        writer.append(rows, [1, 2, 3, 4, 5])
        raise ZeroDivisionError
    assert sorted(_files(tmp_path)) == [f"s-00000{i}.{end}" for i in (0, 1) for end in ("json", "safetensors")]
    with CacheWriter(tmp_path, fp, 2) as writer:
        assert writer.resume_state() == (4, 4, 0, False)
        writer.append(_part(rows, 4, 5), [5])
    assert len(KDCacheDataset(tmp_path)) == 5
    assert KDCacheDataset(tmp_path).rows(range(5))["input_ids"][:, 0].tolist() == [0, 1, 2, 3, 4]


def test_batches_and_shards_need_not_divide(tmp_path, fingerprint, random_rows, write_cache):
    fp = fingerprint()
    rows = random_rows(fp, 11)
    whole = [_files(write_cache(tmp_path / f"{n}", fp, rows, 4, batch_rows=n)) for n in (1, 3, 11)]
    assert whole[0] == whole[1] == whole[2]


def test_no_rows_no_cache(tmp_path, fingerprint, random_rows):
    fp = fingerprint()
    with pytest.raises(CacheError, match="no training row"), CacheWriter(tmp_path, fp):
        pass
    with pytest.raises(CacheError, match="eval-rows"), CacheWriter(tmp_path, fp) as writer:
        writer.append(random_rows(fp, 1), [None], "eval")
    assert "manifest.json" not in _files(tmp_path)


def test_eval_rows_have_shards_of_their_own(tmp_path, fingerprint, random_rows):
    fp = fingerprint()
    with CacheWriter(tmp_path, fp) as writer:
        writer.append(random_rows(fp, 2, seed=1), [None] * 2, "eval")
        writer.append(random_rows(fp, 2), [None] * 2)
    held = KDCacheDataset(tmp_path, split="eval").rows([0, 1])
    np.testing.assert_array_equal(held["input_ids"], random_rows(fp, 2, seed=1)["input_ids"])


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EIO])
@pytest.mark.parametrize("call", ["fsync", "link"])
@pytest.mark.parametrize("when", range(4))
def test_a_full_disk_costs_one_shard_and_says_so(
    tmp_path, monkeypatch, fingerprint, random_rows, write_cache, code, call, when
):
    """The operating system refuses the n-th fsync or link; the same build then completes."""
    fp = fingerprint()
    rows = random_rows(fp, 5)
    whole = _files(write_cache(tmp_path / "whole", fp, rows, 2))
    real, calls = getattr(os, call), []

    def failing(*arguments, **names):
        calls.append(1)
        if len(calls) == when + 2:  # the first fsync belongs to opening
            raise OSError(code, os.strerror(code))
        return real(*arguments, **names)

    with monkeypatch.context() as patch:
        patch.setattr(commit.os, call, failing)
        with pytest.raises(CacheError, match=rf"cannot be written \({os.strerror(code)}\).*rows are safe"):
            write_cache(tmp_path / "c", fp, rows, 2)
    left = _files(tmp_path / "c")
    assert not any(name.endswith(".tmp") for name in left)
    assert "manifest.json" not in left
    with CacheWriter(tmp_path / "c", fp, 2) as writer:
        done = writer.resume_state()
        writer.append(_part(rows, done.rows, 5), [{"row": i + 1} for i in range(done.rows, 5)])
    assert _files(tmp_path / "c") == whole


def test_file_systems_without_links(tmp_path, monkeypatch, fingerprint, random_rows, write_cache):
    fp = fingerprint()

    def no_links(*_):
        raise OSError(errno.EOPNOTSUPP, "no links")

    monkeypatch.setattr(commit.os, "link", no_links)
    write_cache(tmp_path / "c", fp, random_rows(fp, 5))
    verify_cache(tmp_path / "c")
    with pytest.raises(FileExistsError):
        commit.write_new(tmp_path / "c" / "manifest.json", [b""], "manifest")


def test_a_hole_in_the_series_is_not_papered_over(tmp_path, fingerprint, random_rows, write_cache):
    fp = fingerprint()
    write_cache(tmp_path, fp, random_rows(fp, 6), 2)
    (tmp_path / "manifest.json").unlink()
    kept = (tmp_path / "s-000001.json").read_bytes()
    (tmp_path / "s-000001.json").unlink()
    with pytest.raises(CacheDamaged, match="s-000001.json: is missing"), CacheWriter(tmp_path, fp, 2):
        pass
    (tmp_path / "s-000001.json").write_bytes(kept)
    file = tmp_path / "s-000001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)  # the right size, so only reading it back at the end can tell
    with pytest.raises(CacheDamaged, match="s-000001"), CacheWriter(tmp_path, fp, 2):
        pass
    assert not (tmp_path / "manifest.json").exists()


@pytest.mark.parametrize("finished", [True, False])
@pytest.mark.parametrize("lost", [("s-000000.json", "s-000001.json", "s-000002.json"), ("s-000002.json",)])
def test_a_shard_that_lost_its_sidecar_is_named_and_stays(
    tmp_path, fingerprint, random_rows, write_cache, finished, lost
):
    """The same build again after a copy that left sidecars out; before, it removed the shards and said nothing."""
    fp = fingerprint()
    rows = random_rows(fp, 6)
    whole = _files(write_cache(tmp_path / "whole", fp, rows, 2))
    shutil.copytree(tmp_path / "whole", tmp_path / "c")
    for name in lost if finished else (*lost, "manifest.json"):
        (tmp_path / "c" / name).unlink()
    before = _files(tmp_path / "c")
    if finished or len(lost) > 1:
        what = "s-00000[012].json: is missing.*--overwrite" if finished else "s-000001.safetensors: has no sidecar"
        with pytest.raises(CacheDamaged, match=what), CacheWriter(tmp_path / "c", fp, 2):
            pass
        assert _files(tmp_path / "c") == before
        for name in lost:
            (tmp_path / "c" / name).write_bytes(whole[name])
    with CacheWriter(tmp_path / "c", fp, 2) as writer:  # the last shard alone may be what a kill left
        done = writer.resume_state().rows
        if not finished:
            writer.append(_part(rows, done, 6), [{"row": i + 1} for i in range(done, 6)])
    assert _files(tmp_path / "c") == whole


@pytest.mark.parametrize("name", ["s-000001.safetensors", "e-000000.safetensors", "e-000000.json"])
def test_a_finished_cache_without_one_of_its_files_is_not_complete(
    tmp_path, fingerprint, random_rows, write_cache, name
):
    fp = fingerprint()
    write_cache(tmp_path, fp, random_rows(fp, 6), 2, eval_rows=random_rows(fp, 1, seed=9))
    (tmp_path / name).unlink()
    before = _files(tmp_path)
    expected = f"{name}: is missing.* copy it back.*--overwrite"
    with pytest.raises(CacheDamaged, match=expected), CacheWriter(tmp_path, fp):
        pass
    assert _files(tmp_path) == before


def test_what_a_row_must_be(tmp_path, fingerprint, random_rows):
    fp = fingerprint()
    good = random_rows(fp, 2)

    def refused(match, **changes):
        rows = {name: array for name, array in {**good, **changes}.items() if array is not None}
        with pytest.raises(CacheError, match=match):
            writer.append(rows, [None, None])

    def put(name, value):
        array = good[name].astype(np.float64)
        array[1, 2] = value
        return {name: array}

    with CacheWriter(tmp_path, fp) as writer:
        refused("lse: shape", lse=good["lse"][:, 1:])
        refused("log_tail: shape absent", log_tail=None)
        refused("head_ids: shape", head_ids=good["head_ids"][..., :2])
        refused("head ids: .* vocab_size", **put("head_ids", 31))
        refused("row 1, position 2 are NaN", **put("lse", np.nan))
        refused("row 1, position 2 are NaN", **put("lse", np.inf))
        refused("row 1, position 2 are NaN", **put("log_tail", np.nan))
        refused("input_ids: from -1.* to 30.*; allowed: 0 to 30", **put("input_ids", -1))
        refused("input_ids: .*; allowed: 0 to 30", **put("input_ids", 31))
        assert writer.resume_state().rows == 0
        writer.stop()


def test_more_shards_than_there_are_numbers_are_refused_in_one_line(tmp_path, fingerprint, random_rows):
    fp = fingerprint()
    last = Partition(999_998, 999_999)
    expected = "shard number 1,999,997: .*--shard-rows"
    with pytest.raises(CacheError, match=expected), CacheWriter(tmp_path, fp, 1, partition=last) as writer:
        writer.append(random_rows(fp, 2), [1, 2])
    left = sorted(name for name in _files(tmp_path) if not name.startswith(".lock"))
    assert left == ["s-999998.json", "s-999998.safetensors"]


def test_a_cursor_that_copies_the_text_is_refused_before_the_shard(tmp_path, fingerprint, random_rows):
    fp = fingerprint()
    with pytest.raises(CacheError, match="cursor: .*1 MB"), CacheWriter(tmp_path, fp, 1) as writer:
        writer.append(random_rows(fp, 1), ["x" * (1 << 20)])
    assert _files(tmp_path) == {}


def test_files_can_be_read_by_those_whom_umask_allows(tmp_path, fingerprint, random_rows, write_cache):
    fp = fingerprint()
    for mask, mode in ((0o022, 0o644), (0o077, 0o600)):
        before = os.umask(mask)
        try:
            out = write_cache(tmp_path / f"{mask}", fp, random_rows(fp, 2))
        finally:
            os.umask(before)
        modes = {path.stat().st_mode & 0o777 for path in out.iterdir() if path.name != ".lock"}
        assert modes == {mode}


def test_a_folder_of_other_files_is_refused_and_left_alone(tmp_path, fingerprint):
    (tmp_path / "thesis.txt").write_text("do not touch")
    with pytest.raises(OutputExistsError, match="holds files and no KD cache"), CacheWriter(tmp_path, fingerprint()):
        raise AssertionError("opened")
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]
    with outputs.claimed(tmp_path / "run", "demo", {}, False):  # as a part of a run it is no mistyped folder
        (tmp_path / "run" / "cache").mkdir()
        thesis = (tmp_path / "thesis.txt").rename(tmp_path / "run" / "cache" / "thesis.txt")
        with CacheWriter(thesis.parent, fingerprint()) as writer:
            writer.stop()
    assert thesis.read_text() == "do not touch"


FOREIGN = {
    "manifest.json": b'{"name": "my web page"}',
    "teacher_head.safetensors": b"\x10\0\0\0\0\0\0\0" + b'{"mine": [1]}   ',
    "s-000001.safetensors": b"thesis",
    "s-000009.json": b"[1, 2]",
    "b-000001.json": b"{}",
    ".lock": b"held by emacs",
    ".s-000001.safetensors.tmp": b"half a thesis",
}


@pytest.mark.parametrize("overwrite", [False, True])
@pytest.mark.parametrize("name", FOREIGN)
def test_a_file_that_only_has_the_name_of_a_cache_s_stays(
    tmp_path, fingerprint, random_rows, write_cache, name, overwrite
):
    """Alone it makes no folder a cache; in a cache of ours it is in the way, unless it is one more file of others."""
    for out, cached in ((tmp_path / "folder", False), (tmp_path / "cache", True)):
        if cached:
            write_cache(out, fingerprint(), random_rows(fingerprint(), 4), shard_rows=4)
        out.mkdir(exist_ok=True)
        if name == ".lock":
            (out / name).unlink(missing_ok=True)
        if (out / name).exists() or cached and name.endswith(".tmp"):
            continue  # a temporary in a cache is what a kill left
        (out / name).write_bytes(FOREIGN[name])
        before = {path: path.read_bytes() for path in out.iterdir()}
        with pytest.raises((OutputExistsError, CacheDamaged)):
            CacheWriter(out, fingerprint(seed=5), overwrite=overwrite).__enter__()
        assert {path: path.read_bytes() for path in out.iterdir()} == before


def test_overwriting_a_cache_names_what_it_leaves(tmp_path, fingerprint, random_rows, write_cache, capsys):
    write_cache(tmp_path / "c", fingerprint(), random_rows(fingerprint(), 4))
    (tmp_path / "c" / "notes.txt").write_text("mine")
    (tmp_path / "c" / "s-1.json").write_text("mine")
    with CacheWriter(tmp_path / "c", fingerprint(seed=2), overwrite=True) as writer:
        assert not writer.resume_state().rows
        writer.stop()
    assert "left as it is: notes.txt, s-1.json" in capsys.readouterr().err
    assert {path.name for path in (tmp_path / "c").iterdir()} == {".lock", "notes.txt", "s-1.json"}
