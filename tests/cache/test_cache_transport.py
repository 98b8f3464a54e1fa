"""`cache pack` and `cache unpack`: smaller, and the same bytes again; damage is refused; kills lose nothing."""

import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import fsspec
import numpy as np
import pytest

from qat_lora.cache.format.records import optional_arrays
from qat_lora.cache.storage.store import verify_cache
from qat_lora.cache.tools.transport import pack_cache, unpack_cache
from qat_lora.cli import main
from qat_lora.errors import CacheDamaged, CacheError, MissingExtraError, OutputExistsError

zstandard = pytest.importorskip("zstandard")
GOLDEN = Path(__file__).parents[1] / "data" / "golden_cache"
LOCKS = (".lock",)


def _files(folder):
    return {name: (Path(folder) / name).read_bytes() for name in sorted(os.listdir(folder)) if name not in LOCKS}


@pytest.mark.parametrize("name", ["short", "packed", "wide", "codes", "hidden"])
def test_golden_caches_come_back(name, tmp_path):
    pack_cache(GOLDEN / name, tmp_path / "p.tar.zst")
    report = unpack_cache(tmp_path / "p.tar.zst", tmp_path / "c")
    assert _files(tmp_path / "c") == _files(GOLDEN / name)
    assert report["shards"] == len(list((tmp_path / "c").glob("?-*.safetensors")))
    verify_cache(tmp_path / "c")


def _teacher_like(fp, count, seed=0):
    """Rows of a random teacher: ids without a pattern, values like the largest of many normal numbers."""
    draw = np.random.default_rng(seed)
    shape = (count, fp.length - 1, fp.top_k)
    gaps = draw.exponential(size=shape) / np.arange(1, fp.top_k + 1)
    values = -np.cumsum(gaps, axis=-1) * 0.15
    values -= values[..., :1]
    lse = np.log(np.exp(values).sum(-1)) + 5 + draw.random(shape[:-1])
    return {
        "input_ids": draw.integers(0, fp.vocab_size, (count, fp.length)).astype(np.int32),
        "loss_mask": np.ones((count, fp.length), np.uint8),
        "doc_starts": draw.random((count, fp.length)) < 0.002,
        "head_ids": draw.integers(0, fp.vocab_size, shape).astype(np.int32),
        "head_logits": values.astype(np.float32),
        "lse": lse.astype(np.float32),
        "log_tail": np.log1p(-np.exp(np.log(np.exp(values).sum(-1)) - lse)).astype(np.float32),
    }


@pytest.mark.parametrize(("value_dtype", "most"), [("float16", 205), ("uint8", 180)])
def test_bytes_per_token_without_any_pattern(tmp_path, fingerprint, write_cache, value_dtype, most):
    fp = fingerprint(vocab_size=151_936, top_k=64, length=512, value_dtype=value_dtype)
    write_cache(tmp_path / "c", fp, _teacher_like(fp, 32), shard_rows=16)
    report = pack_cache(tmp_path / "c", tmp_path / "p.tar.zst")
    assert report["packed_bytes_per_token"] <= most
    assert report["packed_bytes"] == (tmp_path / "p.tar.zst").stat().st_size
    assert report["cache_bytes"] > 1.2 * report["packed_bytes"]
    unpack_cache(tmp_path / "p.tar.zst", tmp_path / "again")
    assert _files(tmp_path / "again") == _files(tmp_path / "c")


@pytest.fixture
def packed(tmp_path, fingerprint, random_rows, write_cache):
    fp = fingerprint(optional_arrays=optional_arrays(2, 0))
    rows = random_rows(fp, 4) | {"tail_draw_ids": np.ones((4, 4, 2), np.int32)}
    held_out = random_rows(fp, 1, seed=9) | {"tail_draw_ids": np.ones((1, 4, 2), np.int32)}
    write_cache(tmp_path / "c", fp, rows, shard_rows=2, eval_rows=held_out)
    pack_cache(tmp_path / "c", tmp_path / "p.tar.zst")
    return tmp_path / "p.tar.zst"


def test_the_same_cache_gives_the_same_bytes_wherever_it_is(packed, tmp_path):
    fsspec.filesystem("memory").store.clear()
    for name, data in _files(tmp_path / "c").items():
        fsspec.filesystem("memory").pipe_file(f"memory://kd/c/{name}", data)
        os.utime(tmp_path / "c" / name, (1, 1))
    for number, source in enumerate((tmp_path / "c", "memory://kd/c")):
        pack_cache(source, tmp_path / f"{number}.tar.zst")
        assert (tmp_path / f"{number}.tar.zst").read_bytes() == packed.read_bytes()
    fsspec.filesystem("memory").pipe_file("memory://kd/p.tar.zst", packed.read_bytes())
    unpack_cache("memory://kd/p.tar.zst", tmp_path / "u")
    assert _files(tmp_path / "u") == _files(tmp_path / "c")


def test_any_tar_lists_it(packed, tmp_path):
    with zstandard.open(packed, "rb") as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        members = archive.getmembers()
    names = ["manifest.json", "e-000000.json", "e-000000.safetensors"]
    names += [f"s-{i:06d}.{ending}" for i in (0, 1) for ending in ("json", "safetensors")]
    assert [member.name for member in members] == names
    assert {(m.mtime, m.uid, m.gid, m.uname, m.gname, m.mode) for m in members} == {(0, 0, 0, "", "", 0o644)}


def test_every_damage_is_refused_and_named(packed, tmp_path):
    good = packed.read_bytes()
    changes = [good[:n] for n in range(0, len(good), 83)] + [good + b"\0"]
    for bit in range(0, 8 * len(good), 191):
        changed = bytearray(good)
        changed[bit // 8] ^= 1 << bit % 8
        changes.append(bytes(changed))
    for data in changes:
        packed.write_bytes(data)
        with pytest.raises(CacheDamaged, match=r"p.tar.zst: its sha256 .* copy it again"):
            unpack_cache(packed, tmp_path / "x")
        assert not list(tmp_path.glob("*x*"))


def _forge(path, members, ending=b""):
    """Write a pack of these members, sealed as ours are: as somebody who wants to do harm would."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as tar:
        for info, data in members:
            info.size = len(data) if info.isreg() else 0
            tar.addfile(info, io.BytesIO(data))
    frame = ending or zstandard.compress(archive.getvalue())
    path.write_bytes(frame + bytes.fromhex("502a4d1820000000") + hashlib.sha256(frame).digest())


def _members(packed):
    with zstandard.open(packed, "rb") as stream, tarfile.open(fileobj=stream, mode="r|") as archive:
        return [(member, archive.extractfile(member).read()) for member in archive]


def test_an_archive_that_is_sealed_and_wrong(packed, tmp_path):
    """Past the sha256: names, kinds and sizes are compared before anything is written, contents before it stays."""
    good = _members(packed)
    swapped = [*good[:3], good[5], good[6], good[3], good[4]]
    kinds = {"../evil": None, "/tmp/evil": None, "manifest.json/../../evil": None, "manifest.json": tarfile.SYMTYPE}
    for number, (name, kind) in enumerate(kinds.items()):
        info = tarfile.TarInfo(name)
        info.type, info.linkname = kind or tarfile.REGTYPE, "../../evil"
        for place in (0, 3):
            forged = tmp_path / f"{number}-{place}.tar.zst"
            _forge(forged, [*good[:place], (info, good[0][1]), *good[place + 1 :]])
            with pytest.raises(CacheDamaged, match="is not where it should be"):
                unpack_cache(forged, tmp_path / "x")
    cut = [*good[:-1], (good[-1][0], good[-1][1][:-1])]
    flipped = [*good[:-1], (good[-1][0], good[-1][1][:-1] + b"?")]
    for members in (swapped, good[:-1], cut, flipped, []):
        _forge(tmp_path / "f.tar.zst", members)
        with pytest.raises(CacheDamaged, match="f.tar.zst: "):
            unpack_cache(tmp_path / "f.tar.zst", tmp_path / "x")
    bomb = zstandard.compress(bytes(1 << 24))
    for frame in (b"no zstandard", bomb, zstandard.compress(b"x" * 5000), zstandard.compress(good[0][1])[:20]):
        _forge(tmp_path / "f.tar.zst", [], frame)
        with pytest.raises(CacheDamaged, match="f.tar.zst: "):
            unpack_cache(tmp_path / "f.tar.zst", tmp_path / "x")
    assert not list(tmp_path.glob("*x*")) and not list(tmp_path.parent.glob("*evil*"))


def test_what_is_in_the_way_is_not_touched(packed, tmp_path, fingerprint, random_rows, write_cache):
    other = write_cache(tmp_path / "o", fingerprint(seed=5), random_rows(fingerprint(), 4), shard_rows=2)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("text")
    for work, source, out in ((pack_cache, other, mine), (unpack_cache, packed, mine), (unpack_cache, packed, other)):
        before = _files(out)
        with pytest.raises(OutputExistsError, match="exists already"):
            work(source, out)
        assert _files(out) == before
    before = packed.read_bytes(), _files(other)
    with pytest.raises(OutputExistsError, match="exists already"):
        pack_cache(other, packed)
    for inside in (other / "p.tar.zst", other / "a" / "p.tar.zst", tmp_path / "mine" / ".." / "o" / "p"):
        with pytest.raises(OutputExistsError, match="lies inside the cache"):
            pack_cache(other, inside)
    assert (packed.read_bytes(), _files(other)) == before
    with pytest.raises(CacheError, match="no manifest.json"):
        pack_cache(mine, tmp_path / "x")
    damaged = tmp_path / "c" / "s-000001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    with pytest.raises(CacheDamaged, match="s-000001"):
        pack_cache(tmp_path / "c", tmp_path / "y")
    assert not list(tmp_path.glob("*y"))


def test_a_pack_and_its_cache_are_written_to_a_disk(packed, tmp_path):
    for work, source in ((pack_cache, tmp_path / "c"), (unpack_cache, packed)):
        with pytest.raises(CacheError, match="--out memory://x/p: is a URL"):
            work(source, "memory://x/p")


def test_what_lies_beside_the_output_is_others(packed, tmp_path):
    """Also under the names that runs give their drafts in folders of their own."""
    for name in (".d.new", ".d.old", ".d.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis.txt").write_text(name)
    (tmp_path / "d").mkdir()
    unpack_cache(packed, tmp_path / "d")
    assert _files(tmp_path / "d") == _files(tmp_path / "c")
    for name in (".d.new", ".d.old", ".d.tmp"):
        assert (tmp_path / name / "thesis.txt").read_text() == name
    assert sorted(path.name for path in tmp_path.glob(".d.*")) == [".d.new", ".d.old", ".d.tmp"]
    assert (tmp_path / "d").stat().st_mode == (tmp_path / "c").stat().st_mode


def test_two_unpacks_to_one_place_and_what_somebody_puts_there_meanwhile(packed, tmp_path):
    """The first that ends has the place; the other is refused, and removes its own draft alone."""
    began = []

    def while_unpacking(work):
        def progress(shard, size):
            if not began:
                began.append(shard)
                work()

        with pytest.raises(OutputExistsError, match="exists already; nothing was touched"):
            unpack_cache(packed, tmp_path / "d", progress)

    while_unpacking(lambda: unpack_cache(packed, tmp_path / "d"))
    assert _files(tmp_path / "d") == _files(tmp_path / "c")
    shutil.rmtree(tmp_path / "d")
    began.clear()

    def put():
        (tmp_path / "d").mkdir()
        (tmp_path / "d" / "thesis.txt").write_text("mine")

    while_unpacking(put)
    assert _files(tmp_path / "d") == {"thesis.txt": b"mine"}
    assert not list(tmp_path.glob(".d*"))


@pytest.mark.parametrize("point", ["shard-written:2", "sidecar-synced", "manifest-written"])
def test_a_kill_leaves_nothing_half_written(packed, tmp_path, point):
    code = f"from qat_lora.cache.tools.transport import *; unpack_cache({str(packed)!r}, {str(tmp_path / 'c2')!r})"
    environment = os.environ | {"QAT_LORA_FAILPOINT": point}
    died = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=100)
    assert died.returncode == -signal.SIGKILL, died.stderr.decode()[-500:]
    assert not (tmp_path / "c2").exists()
    unpack_cache(packed, tmp_path / "c2")
    assert _files(tmp_path / "c2") == _files(tmp_path / "c")


def test_a_kill_while_packing_leaves_no_pack(packed, tmp_path):
    code = """
import os, signal, sys
from qat_lora.cache.tools import transport
seen = []
def progress(shard, size):
    seen.append(shard)
    if len(seen) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
transport.pack_cache(sys.argv[1], sys.argv[2], progress)
"""
    again = tmp_path / "p2.tar.zst"
    died = subprocess.run([sys.executable, "-c", code, str(tmp_path / "c"), str(again)], timeout=100)
    assert died.returncode == -signal.SIGKILL and not again.exists()
    pack_cache(tmp_path / "c", again)
    assert again.read_bytes() == packed.read_bytes()


def test_without_zstandard(packed, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "zstandard", None)
    for work in (pack_cache, unpack_cache):
        with pytest.raises(MissingExtraError, match=r"qat-lora\[transport\]"):
            work(packed, tmp_path / "x")
    assert not (tmp_path / "x").exists()


def test_the_commands(packed, tmp_path, capfd):
    main(["cache", "unpack", str(packed), str(tmp_path / "u"), "--quiet"])
    assert "3 shards" in capfd.readouterr().out
    assert _files(tmp_path / "u") == _files(tmp_path / "c")
    main(["cache", "pack", str(tmp_path / "u"), str(tmp_path / "v"), "--json"])
    report = json.loads(capfd.readouterr().out)
    assert list(report) == ["out", "shards", "cache_bytes", "packed_bytes", "packed_bytes_per_token"]
    assert report["packed_bytes"] == packed.stat().st_size
    assert (tmp_path / "v").read_bytes() == packed.read_bytes()
    shutil.rmtree(tmp_path / "u")
    with pytest.raises(SystemExit) as left:
        main(["cache", "unpack", str(tmp_path / "nowhere"), str(tmp_path / "u")])
    assert left.value.code == 2
