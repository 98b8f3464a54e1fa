"""Several builders fill one folder, in any order, killed or not, to the same bytes."""

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from qat_lora.cache.build.writer import CacheWriter, Partition
from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.cache.storage.store import read_manifest, verify_cache
from qat_lora.errors import CacheDamaged, CacheError, ConfigError, OutputExistsError


def _files(folder):
    return {p.name: p.read_bytes() for p in sorted(Path(folder).iterdir()) if not p.name.startswith(".lock")}


COUNTS = (7, 0, 4)
"""Training rows of three builders; the second has no document."""


def _run(out, fp, random_rows, builder, builders=3, until=None):
    """One builder's whole work, or up to a row."""
    rows = random_rows(fp, COUNTS[builder], seed=builder)
    with CacheWriter(out, fp, 2, partition=Partition(builder, builders)) as writer:
        done = writer.resume_state()
        if builder == 0 and not done.rows and done.eval_rows < fp.eval_rows:
            held = random_rows(fp, fp.eval_rows, seed=9)
            part = {name: array[done.eval_rows :] for name, array in held.items()}
            writer.append(part, [None] * (fp.eval_rows - done.eval_rows), "eval")
        start = done.cursor["row"] if done.cursor else 0
        end = COUNTS[builder] if until is None else until
        if start < end:
            part = {name: array[start:end] for name, array in rows.items()}
            writer.append(part, [{"row": i + 1} for i in range(start, end)])
        if until is not None:
            writer.stop()
        return writer.finish() if until is None else None


def test_every_order_of_ending_gives_the_same_cache(tmp_path, fingerprint, random_rows):
    fp = fingerprint(eval_rows=3)
    seen = []
    for order in itertools.permutations(range(3)):
        out = tmp_path / "".join(map(str, order))
        for place, builder in enumerate(order):
            manifest = _run(out, fp, random_rows, builder)
            assert (manifest is not None) == ("manifest.json" in _files(out)) == (place == 2)
        seen.append(_files(out))
    assert all(files == seen[0] for files in seen)
    names = [entry.shard for entry in read_manifest(out).train]
    assert names == ["s-000000", "s-000002", "s-000003", "s-000005", "s-000006", "s-000009"]
    assert [entry.shard for entry in read_manifest(out).eval] == ["e-000000", "e-000003"]
    assert verify_cache(out).strangers == ()
    ids = KDCacheDataset(out).rows(range(11))["input_ids"][:, 1:]
    mine, theirs = (random_rows(fp, COUNTS[b], seed=b)["input_ids"][:, 1:] for b in (0, 2))
    expected = [mine[0:2], theirs[0:2], mine[2:4], theirs[2:4], mine[4:6], mine[6:7]]
    np.testing.assert_array_equal(ids, np.concatenate(expected))


def test_each_builder_resumes_by_itself(tmp_path, fingerprint, random_rows):
    fp = fingerprint(eval_rows=3)
    for builder in range(3):
        _run(tmp_path / "whole", fp, random_rows, builder)
    for builder, until in ((0, 3), (2, 3), (0, 5)):
        _run(tmp_path / "c", fp, random_rows, builder, until=until)
        # What a killed neighbour leaves is not ours to remove.
        (tmp_path / "c" / "s-000001.safetensors").write_bytes(
            b"8 bytes." + b'{"__metadata__":{"format":"qat-lora-kd-cache"'
        )
        (tmp_path / "c" / ".s-000001.json.tmp").write_bytes(b"half")
    assert {"s-000001.safetensors", ".s-000001.json.tmp"} <= set(_files(tmp_path / "c"))
    for builder in (2, 1, 0):
        _run(tmp_path / "c", fp, random_rows, builder)
    assert _files(tmp_path / "c") == _files(tmp_path / "whole")


def test_what_does_not_go_together_is_refused(tmp_path, fingerprint, random_rows):
    fp = fingerprint(eval_rows=3)
    _run(tmp_path, fp, random_rows, 0)
    before = _files(tmp_path)
    for share in (Partition(), Partition(0, 2), Partition(1, 2), Partition(3, 4)):
        with pytest.raises(OutputExistsError, match="filled by 3 builders"), CacheWriter(tmp_path, fp, partition=share):
            pass
    with pytest.raises(OutputExistsError, match="seed is 0 there, 1"):
        _run(tmp_path, fingerprint(eval_rows=3, seed=1), random_rows, 2)
    with pytest.raises(ConfigError, match="overwrite: builder 1/3 would delete"):
        CacheWriter(tmp_path, fp, overwrite=True, partition=Partition(1, 3))
    with pytest.raises(CacheError, match="complete"), CacheWriter(tmp_path, fp, 2, partition=Partition(0, 3)) as writer:
        assert writer.waiting_for() == (1, 2)
        writer.append(random_rows(fp, 1), [None])
    assert _files(tmp_path) == before
    with CacheWriter(tmp_path, fp, partition=Partition(1, 3)) as one:
        for other in (Partition(1, 3), Partition()):
            with (
                pytest.raises(OutputExistsError, match="another builder|filled by"),
                CacheWriter(tmp_path, fp, partition=other),
            ):
                pass
        one.stop()
    (tmp_path / "s-000003.json").unlink()
    _run(tmp_path, fp, random_rows, 1)
    with pytest.raises(CacheDamaged, match="s-000003"):
        _run(tmp_path, fp, random_rows, 2)
    assert "manifest.json" not in _files(tmp_path)


@pytest.mark.parametrize("ended", [(0, 1, 2), (0, 1)])
def test_no_start_removes_a_shard_that_lost_its_sidecar(tmp_path, fingerprint, random_rows, ended):
    """A copy left the sidecars out: of a finished cache, and of one where a builder is still at work."""
    fp = fingerprint(eval_rows=3)
    for builder in ended:
        _run(tmp_path, fp, random_rows, builder)
    whole = _files(tmp_path)
    for name in whole:
        if name.startswith(("s-", "e-")) and name.endswith(".json"):
            (tmp_path / name).unlink()
    before = _files(tmp_path)
    for builder in (0, 2):
        if 2 not in ended and builder == 2:
            continue
        expected = r"-00000\d.(json: is missing.* delete the folder|safetensors: has no sidecar.* b-000000.json)"
        with pytest.raises(CacheDamaged, match=expected):
            _run(tmp_path, fp, random_rows, builder)
        assert _files(tmp_path) == before
    for name, data in whole.items():
        (tmp_path / name).write_bytes(data)
    for builder in range(3):
        _run(tmp_path, fp, random_rows, builder)
    assert verify_cache(tmp_path).strangers == ()


def test_a_builder_that_never_wrote_a_shard_can_still_end(tmp_path, fingerprint, random_rows):
    """All empty: then there is nothing to train on, and the last one says so."""
    fp = fingerprint()
    with CacheWriter(tmp_path, fp, partition=Partition(0, 2)):
        pass
    with pytest.raises(CacheError, match="no training row"), CacheWriter(tmp_path, fp, partition=Partition(1, 2)):
        pass
    assert sorted(_files(tmp_path)) == ["b-000000.json", "b-000001.json"]
    with CacheWriter(tmp_path, fp, overwrite=True) as writer:
        writer.append(random_rows(fp, 1), [None])
    assert "b-000000.json" not in _files(tmp_path)


def test_how_shares_are_written():
    assert Partition.parse("1/3") == (1, 3) and str(Partition(1, 3)) == "1/3"
    for bad in ("", "1", "3/3", "-1/3", "1/0", "1/3/4", " 0/1", "a/b", "0/1\n"):
        with pytest.raises(ConfigError, match="builder: .*0/2"):
            Partition.parse(bad)
    for builders in (1, 2, 3, 7):
        parts = [Partition(i, builders).of(17) for i in range(builders)]
        assert sum(parts) == 17 and max(parts) - min(parts) <= 1


# Real processes: each builder is killed (SIGKILL) at a step of its end, and two end at the same moment.
PROCESSES = r"""
import json, os, signal, sys
from pathlib import Path
import numpy as np
from qat_lora.files.folders import FAILPOINT_STEPS
from qat_lora.cache.format.records import Fingerprint
from qat_lora.cache.build.writer import Partition
from qat_lora.cache.build.writer import CacheWriter
assert "torch" not in sys.modules

work = Path(sys.argv[1])
L, K = 4, 2
fp = Fingerprint(tokenizer_sha256="1", vocab_size=31, teacher="t", teacher_sha256="2", chat_template_sha256=None,
                 dataset="d", packing="p", length=L,
                 **({"top_k": 0, "optional_arrays": (f"draws:{K}", "lzma:1")} if sys.argv[3] == "2" else {"top_k": K}))

def build(out, builder, point=None):
    child = os.fork()
    if child:
        return child
    code = 1
    try:
        if point:
            os.environ["QAT_LORA_FAILPOINT"] = point
        with CacheWriter(out, fp, 2, partition=Partition(builder, 2)) as writer:
            done = writer.resume_state()
            for i in range(done.cursor or 0, 3):
                rng = np.random.default_rng(10 * builder + i)
                writer.append({"input_ids": rng.integers(0, 31, (1, L)), "loss_mask": np.ones((1, L)),
                               "doc_starts": np.ones((1, L)), "head_ids": rng.integers(0, 31, (1, L - 1, K)),
                               "head_logits": -np.sort(rng.random((1, L - 1, K))), "lse": rng.random((1, L - 1)),
                               "log_tail": -rng.random((1, L - 1)), "draw_ids": rng.integers(0, 31, (1, L - 1, K)),
                               "entropy": rng.random((1, 1))}, [i + 1])
        code = 0
    finally:
        os._exit(code)

def wait(child):
    status = os.waitpid(child, 0)[1]
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)

def files(out):
    return {p.name: p.read_bytes() for p in out.iterdir() if not p.name.startswith(".lock")}

assert wait(build(work / "whole", 0)) == wait(build(work / "whole", 1)) == 0
whole, broken, kills = files(work / "whole"), [], 0
for step in FAILPOINT_STEPS:
    for kind in ("part", "manifest"):
        for again in (0, 1):
            out = work / f"{kind}-{step}-{again}"
            assert wait(build(out, 0)) == 0
            assert wait(build(out, 1, f"{kind}-{step}")) == -signal.SIGKILL
            kills += 1
            if wait(build(out, again)) != 0 or wait(build(out, 1)) != 0 or files(out) != whole:
                broken.append(f"{kind}-{step}-{again}")
for race in range(int(sys.argv[2])):
    out = work / f"race{race}"
    children = [build(out, 0), build(out, 1)]
    if [wait(child) for child in children] != [0, 0] or files(out) != whole:
        broken.append(f"race{race}")
print(json.dumps({"kills": kills, "broken": broken, "files": sorted(whole)}))
"""


@pytest.mark.parametrize("version", ["1", "2"])
@pytest.mark.parametrize("races", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_killed_at_the_end_and_ending_together(tmp_path, races, version):
    environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", PROCESSES, str(tmp_path), str(races), version],
        capture_output=True,
        text=True,
        env=environment,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result["kills"] == 24 and result["broken"] == []
    assert [name for name in result["files"] if name.startswith("b-")] == ["b-000000.json", "b-000001.json"]


def test_two_builds_of_a_text_hold_all_of_it_once(tmp_path, tiny):
    """Through the command: documents dealt out, evaluation rows from builder 0 only, against a packing by hand."""
    from qat_lora.data.sources import TextConfig, open_documents, own_documents, units
    from qat_lora.models.load import load_tokenizer
    from qat_lora.options import CacheBuildOptions, RunConfig
    from qat_lora.registry import COMMANDS
    from qat_lora.runtime.launch.start import run

    text = TextConfig(dataset=str(tiny.text), format="text")
    out, length = tmp_path / "c", 48

    def build(builder):
        return CacheBuildOptions(
            teacher=str(tiny.teacher),
            text=text,
            length=length,
            top_k=4,
            eval_rows=3,
            shard_rows=5,
            builder=builder,
            run=RunConfig(out=str(out), device="cpu", quiet=True),
        )

    run(COMMANDS["cache build"], build("1/2"))
    assert "manifest.json" not in _files(out)
    again = _files(out)
    run(COMMANDS["cache build"], build("1/2"))  # already ended: nothing happens
    assert _files(out) == again
    run(COMMANDS["cache build"], build("0/2"))
    assert verify_cache(out).strangers == ()

    tokenizer = load_tokenizer(tiny.teacher)
    documents = [[*tokenizer(d.text)["input_ids"], tokenizer.eos_token_id] for d in open_documents(text)]
    first, tokens = 0, []
    while len(tokens) < 3 * length:
        tokens += documents[first]
        first += 1
    np.testing.assert_array_equal(
        KDCacheDataset(out, split="eval").rows(range(3))["input_ids"].reshape(-1), tokens[: 3 * length]
    )
    dataset = KDCacheDataset(out)
    held = dataset.rows(range(len(dataset)))["input_ids"]
    place = 0
    streams, seen = {0: [], 1: []}, []
    for entry in dataset.manifest.train:
        streams[int(entry.shard[2:]) % 2].append(held[place : place + entry.rows])
        place += entry.rows
    for builder, parts in streams.items():
        own = {document.name for document in own_documents(text, units(text, 2), first, builder, 2)(0)}
        mine = [j for j, document in enumerate(open_documents(text)) if document.name in own]
        assert len(mine) == len(own) and min(mine) >= first
        seen += mine
        wanted = list(itertools.chain.from_iterable(documents[j] for j in mine))
        stream = np.concatenate(parts).reshape(-1)
        assert 0 <= len(stream) - len(wanted) < length
        np.testing.assert_array_equal(stream[: len(wanted)], wanted)
    assert sorted(seen) == list(range(first, len(documents)))
    shutil.rmtree(out)
