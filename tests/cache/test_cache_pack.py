"""`cache pack` and `cache unpack`: smaller, and the same bytes again; damage is refused; kills lose nothing."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from qat_lora.cache.format.records import optional_arrays
from qat_lora.cache.tools.pack import pack_cache, unpack_cache
from qat_lora.cache.tools.verify import verify_cache
from qat_lora.cli import main
from qat_lora.errors import CacheDamaged, CacheError, MissingExtraError, OutputExistsError

pytest.importorskip("zstandard")
GOLDEN = Path(__file__).parents[1] / "data" / "golden_cache"
LOCKS = (".lock",)


def _files(folder):
    return {name: (Path(folder) / name).read_bytes() for name in sorted(os.listdir(folder)) if name not in LOCKS}


@pytest.mark.parametrize("name", ["short", "packed", "wide", "codes", "hidden"])
def test_golden_caches_come_back(name, tmp_path):
    pack_cache(GOLDEN / name, tmp_path / "p")
    report = unpack_cache(tmp_path / "p", tmp_path / "c")
    assert _files(tmp_path / "c") == _files(GOLDEN / name)
    assert report.shards == len(list((tmp_path / "c").glob("?-*.safetensors")))
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
    report = pack_cache(tmp_path / "c", tmp_path / "p")
    assert report.packed_bytes_per_token <= most
    assert report.packed_bytes == sum(len(data) for name, data in _files(tmp_path / "p").items() if name[1] == "-")
    assert report.cache_bytes > 1.2 * report.packed_bytes
    unpack_cache(tmp_path / "p", tmp_path / "again")
    assert _files(tmp_path / "again") == _files(tmp_path / "c")


def test_ids_of_a_text_become_smaller_than_log2_v(tmp_path, fingerprint, write_cache):
    fp = fingerprint(vocab_size=151_936, top_k=16, length=256)
    rows = _teacher_like(fp, 16)
    usual = np.random.default_rng(1).permutation(fp.vocab_size)
    rows["head_ids"] = usual[np.minimum(np.random.default_rng(2).zipf(1.3, rows["head_ids"].shape), 100_000)]
    rows["head_ids"] = rows["head_ids"].astype(np.int32)
    write_cache(tmp_path / "c", fp, rows)
    report = pack_cache(tmp_path / "c", tmp_path / "p")
    assert report.packed_bytes_per_token < 16 * 17.2 / 8 + 22
    unpack_cache(tmp_path / "p", tmp_path / "again")
    assert _files(tmp_path / "again") == _files(tmp_path / "c")


@pytest.fixture
def packed(tmp_path, fingerprint, random_rows, write_cache):
    fp = fingerprint(optional_arrays=optional_arrays(2, 0))
    rows = random_rows(fp, 4) | {"tail_draw_ids": np.ones((4, 4, 2), np.int32)}
    held_out = random_rows(fp, 1, seed=9) | {"tail_draw_ids": np.ones((1, 4, 2), np.int32)}
    write_cache(tmp_path / "c", fp, rows, shard_rows=2, eval_rows=held_out)
    pack_cache(tmp_path / "c", tmp_path / "p")
    return tmp_path / "p"


def test_every_damage_is_refused_and_named(packed, tmp_path):
    for name in ("s-000001.packed", "packed.json"):
        good = (packed / name).read_bytes()
        changes = [good[:n] for n in range(0, len(good), 83)] + [good + b"\0"]
        for bit in range(0, 8 * len(good), 191):
            changed = bytearray(good)
            changed[bit // 8] ^= 1 << bit % 8
            changes.append(bytes(changed))
        for number, data in enumerate(changes):
            (packed / name).write_bytes(data)
            with pytest.raises(CacheDamaged, match=name.split(".")[0]):
                unpack_cache(packed, tmp_path / f"{name}-{number}")
            assert not (tmp_path / f"{name}-{number}" / "manifest.json").exists()
        (packed / name).write_bytes(good)
    swapped = [(packed / f"s-00000{i}.packed").read_bytes() for i in (1, 0)]
    for i, data in enumerate(swapped):
        (packed / f"s-00000{i}.packed").write_bytes(data)
    with pytest.raises(CacheDamaged, match="s-000000"):
        unpack_cache(packed, tmp_path / "x")
    (packed / "s-000000.packed").unlink()
    with pytest.raises(CacheDamaged, match="s-000000.*missing"):
        unpack_cache(packed, tmp_path / "x")


def test_streams_that_are_sealed_and_wrong(packed, tmp_path, monkeypatch):
    """Past the sha256, as somebody who forges it would come: sizes are compared before anything is unpacked."""
    import zstandard

    from qat_lora.cache.tools import pack

    data = (packed / "s-000000.packed").read_bytes()
    begin = 8 + 32 + 8 + int.from_bytes(data[40:48], "little")
    bomb = zstandard.compress(bytes(1 << 24))
    endings = [
        b"",
        data[begin : begin + 20],
        data[begin:] + b"\0",
        len(bomb).to_bytes(8, "little") + bomb,
        (1 << 40).to_bytes(8, "little") + b"x",
        (12).to_bytes(8, "little") + b"no zstandard",
    ]
    for number, ending in enumerate(endings):
        monkeypatch.setattr(pack, "_read_checked", lambda *_, ending=ending: data[:begin] + ending)
        with pytest.raises(CacheDamaged, match="s-00000|e-00000"):
            unpack_cache(packed, tmp_path / f"bad{number}")


def test_what_is_in_the_way_is_not_touched(packed, tmp_path, fingerprint, random_rows, write_cache):
    other = write_cache(tmp_path / "o", fingerprint(seed=5), random_rows(fingerprint(), 4), shard_rows=2)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("text")
    for work, source, out in (
        (pack_cache, other, mine),
        (unpack_cache, packed, mine),
        (pack_cache, other, packed),
        (unpack_cache, packed, other),
    ):
        before = _files(out)
        with pytest.raises(OutputExistsError):
            work(source, out)
        assert _files(out) == before
    with pytest.raises(CacheError, match="no packed.json"):
        unpack_cache(other, tmp_path / "x")
    with pytest.raises(CacheError, match="no manifest.json"):
        pack_cache(packed, tmp_path / "x")
    before = _files(packed)
    pack_cache(tmp_path / "c", packed)  # there already
    assert _files(packed) == before
    damaged = tmp_path / "c" / "s-000001.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\xff")
    with pytest.raises(CacheDamaged, match="s-000001"):
        pack_cache(tmp_path / "c", tmp_path / "y")
    assert not (tmp_path / "y" / "packed.json").exists()


@pytest.mark.parametrize("point", ["shard-written:2", "shard-linked", "sidecar-synced", "manifest-written"])
def test_kills_and_going_on(packed, tmp_path, point):
    whole, packed_whole = _files(tmp_path / "c"), _files(packed)
    for words, source, out, expected in (
        ("pack", tmp_path / "c", tmp_path / "p2", packed_whole),
        ("unpack", packed, tmp_path / "c2", whole),
    ):
        if words == "pack" and point.startswith("sidecar"):
            continue
        code = f"from qat_lora.cache.tools.pack import *; {words}_cache({str(source)!r}, {str(out)!r})"
        environment = os.environ | {"QAT_LORA_FAILPOINT": point}
        died = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, timeout=100)
        assert died.returncode == -signal.SIGKILL, died.stderr.decode()[-500:]
        {"pack": pack_cache, "unpack": unpack_cache}[words](source, out)
        assert _files(out) == expected


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
    assert json.loads(capfd.readouterr().out)["packed_bytes"] > 0
    assert _files(tmp_path / "v") == _files(packed)
    shutil.rmtree(tmp_path / "u")
    with pytest.raises(SystemExit) as left:
        main(["cache", "unpack", str(tmp_path / "nowhere"), str(tmp_path / "u")])
    assert left.value.code == 2
