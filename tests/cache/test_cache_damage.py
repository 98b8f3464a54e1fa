"""Every changed, cut, swapped or malicious file is refused, and the message names the shard."""

import hashlib
import importlib.util
import json
import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from qat_lora.cache.format import layout as fmt
from qat_lora.cache.format.records import Manifest, Sidecar, parse, render
from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.cache.storage.location import locate
from qat_lora.cache.storage.store import Shard, read_manifest, verify_cache
from qat_lora.cache.tools.describe import describe
from qat_lora.cli import main
from qat_lora.errors import CacheDamaged, CacheError


@pytest.fixture(
    params=[{}, {"value_dtype": "uint8", "optional_arrays": ("tail_draws:2", "draws:1")}], ids=["plain", "all"]
)
def settings(request):
    return request.param


@pytest.fixture
def cache(tmp_path, fingerprint, random_rows, write_cache, settings):
    fp = fingerprint(**settings)
    return write_cache(tmp_path / "c", fp, random_rows(fp, 4), shard_rows=2, eval_rows=random_rows(fp, 1, seed=9))


def _flips(data):
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        yield bytes(changed)


@pytest.mark.parametrize(("name", "record"), [("manifest.json", Manifest), ("s-000001.json", Sidecar)])
def test_every_bit_flip_in_a_record(cache, name, record):
    for changed in _flips((cache / name).read_bytes()):
        with pytest.raises(CacheDamaged, match=name):
            parse(record, changed, name)


def test_every_bit_flip_in_a_shard(cache):
    file = cache / "s-000001.safetensors"
    good, manifest = file.read_bytes(), read_manifest(cache)
    entry, held, place = manifest.train[1], manifest.fingerprint, locate(cache)
    silent = 0  # positive control: what the container itself lets through
    for number, changed in enumerate(_flips(good)):
        with open(file, "r+b") as opened:  # not write_bytes: to truncate and grow costs a millisecond
            opened.write(changed)
        with pytest.raises(CacheDamaged, match="s-000001"):
            Shard(place, entry, held).check_sha256()
        if number >= 8 * (len(good) - 20):
            load_file(file)
            silent += 1
    assert silent == 160
    file.write_bytes(good)
    Shard(place, entry, held).check_sha256()


def test_damage_is_seen_through_the_front_doors(cache):
    rng = np.random.default_rng(0)
    for name in sorted(os.listdir(cache)):
        if name == ".lock":
            continue
        file = cache / name
        good = file.read_bytes()
        for place in rng.integers(0, 8 * len(good), 12):
            changed = bytearray(good)
            changed[place // 8] ^= 1 << place % 8
            file.write_bytes(changed)
            for opened in (verify_cache, KDCacheDataset):
                with pytest.raises(CacheDamaged, match=name.split(".")[0]):
                    opened(cache)
        file.write_bytes(good)
    report = verify_cache(cache)
    assert (report.shards, report.rows, report.strangers) == (3, 5, ())


def test_truncation_and_growth_of_every_file(cache):
    for name in ("manifest.json", "s-000001.json", "e-000000.safetensors"):
        file = cache / name
        good = file.read_bytes()
        for data in [good[:n] for n in range(0, len(good), 7)] + [good + b"\0", good + good]:
            file.write_bytes(data)
            with pytest.raises(CacheDamaged, match=name.split(".")[0]):
                KDCacheDataset(cache, verify=False)
        file.write_bytes(good)


def test_swapped_zeroed_missing_and_foreign_files(cache, tmp_path, settings, fingerprint, random_rows, write_cache):
    first, second = cache / "s-000000.safetensors", cache / "s-000001.safetensors"
    a, b = first.read_bytes(), second.read_bytes()
    assert len(a) == len(b)

    def refused(name):
        with pytest.raises(CacheDamaged, match=name):
            verify_cache(cache)
        with pytest.raises(CacheDamaged, match=name):
            KDCacheDataset(cache)

    first.write_bytes(b)
    second.write_bytes(a)
    refused("s-000000")
    first.write_bytes(a)
    second.write_bytes(b[:-64] + bytes(64))
    refused("s-000001")
    second.unlink()
    refused("s-000001")
    second.write_bytes(b)
    verify_cache(cache)
    other_fp = fingerprint(**settings, seed=1)
    other = write_cache(tmp_path / "o", other_fp, random_rows(other_fp, 4), shard_rows=2)
    for ending in ("json", "safetensors"):
        shutil.copy(other / f"s-000001.{ending}", cache / f"s-000001.{ending}")
    refused("s-000001")


def test_links_pipes_and_paths_are_not_followed(cache, tmp_path):
    shard = cache / "s-000000.safetensors"
    shutil.move(shard, tmp_path / "elsewhere")
    shard.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CacheDamaged, match="s-000000"):
        KDCacheDataset(cache)
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(CacheDamaged, match="s-000000.*regular"):
        KDCacheDataset(cache)
    shard.unlink()
    shutil.move(tmp_path / "elsewhere", shard)
    manifest = read_manifest(cache)
    for name in ("../s-000000", "/etc/passwd", "s-000000.safetensors", "e-000000", ""):
        entry = manifest.train[0].__class__(**{**vars(manifest.train[0]), "shard": name})
        fake = Manifest(fingerprint=manifest.fingerprint, train=(entry,))
        (cache / "manifest.json").write_bytes(render(fake))
        with pytest.raises(CacheDamaged, match="manifest.json"):
            KDCacheDataset(cache)
    double = Manifest(fingerprint=manifest.fingerprint, train=(manifest.train[0], manifest.train[0]))
    (cache / "manifest.json").write_bytes(render(double))
    with pytest.raises(CacheDamaged, match="once each"):
        KDCacheDataset(cache)


def test_headers_are_compared_not_trusted(cache, fingerprint, settings):
    fp = fingerprint(**settings)
    plan = fmt.layout(fp.arrays, 2, fp.sha256)
    file, entry = cache / "s-000000.safetensors", read_manifest(cache).train[0]
    good = file.read_bytes()
    Shard(locate(cache), entry, fp)
    size = len(plan.header) - 8
    text = plan.header[8:].decode()
    for bad in (
        (10 << 30).to_bytes(8, "little") + good[8:],
        b"\xff" * 8 + good[8:],
        b"",
        good[:8],
        plan.header[:8] + text.replace('"F16"', '"F32"', 1).encode(),
        plan.header[:8] + text.replace('"data_offsets":[0,8]', '"data_offsets":[8,0]', 1).encode(),
        plan.header[:8] + text.replace('"version":"1"', '"format":"1"', 1).encode(),
        plan.header[:8] + b"[" * size,
    ):
        file.write_bytes(bad.ljust(len(good), b"\0"))
        with pytest.raises(CacheDamaged, match="s-000000.safetensors: its header"):
            Shard(locate(cache), entry, fp)


def test_unfinished_and_absent_caches_are_refused(cache, tmp_path):
    (cache / "manifest.json").unlink()
    for path in (cache, tmp_path / "nowhere"):
        for opened in (verify_cache, KDCacheDataset, describe):
            with pytest.raises(CacheError, match="no manifest.json"):
                opened(path)


def test_a_writer_that_was_wrong_is_found_by_the_row_checks(cache):
    """Right sha256 everywhere, but a row's bytes are not those of its CRC."""
    file = cache / "s-000000.safetensors"
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    manifest = read_manifest(cache)
    sidecar = parse(Sidecar, (cache / "s-000000.json").read_bytes(), "")
    digest = hashlib.sha256(data).hexdigest()
    text = render(Sidecar(**{**vars(sidecar), "sha256": digest}))
    (cache / "s-000000.json").write_bytes(text)
    changed = {"sha256": digest, "sidecar_sha256": hashlib.sha256(text).hexdigest()}
    entry = manifest.train[0].__class__(**{**vars(manifest.train[0]), **changed})
    forged = Manifest(fingerprint=manifest.fingerprint, train=(entry, manifest.train[1]), eval=manifest.eval)
    (cache / "manifest.json").write_bytes(render(forged))
    with pytest.raises(CacheDamaged, match="s-000000: row . does not have its checksum"):
        verify_cache(cache)


def test_describe_counts_everything(cache, fingerprint):
    found = describe(cache, show_tokens=3)
    assert found["splits"]["train"] == {
        "shards": 2,
        "rows": 4,
        "tokens": 20,
        "bytes": sum(os.path.getsize(cache / f"s-00000{i}.safetensors") for i in range(2)),
    }
    assert found["splits"]["eval"]["rows"] == 1
    assert found["fingerprint"]["vocab_size"] == 31
    batch = KDCacheDataset(cache).rows(range(4))
    mass = np.exp(batch["log_tail"][batch["target_mask"]].astype(np.float64))
    assert found["tail_mass"]["mean"] == pytest.approx(mass.mean())
    assert found["tail_mass"]["p100"] == pytest.approx(mass.max())
    assert np.shape(found["rows"][0]["top_ids"]) == (3, 3)


def test_rules_of_the_format_are_checked_where_every_checksum_is_right(tmp_path, monkeypatch):
    """A writer that is wrong but seals what it wrote: the one that made the golden caches, given bad values."""
    path = Path(__file__).parents[1] / "data" / "golden_cache" / "make.py"
    spec = importlib.util.spec_from_file_location("golden_make", path)
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    draw_row, bits_of = make.draw_row, make.bits_of
    monkeypatch.setattr(make, "bits_of", lambda values, width: bits_of([value & 3 for value in values], width))

    def spoil(change):
        def draw(*arguments):
            row = draw_row(*arguments)
            change(row)
            return row

        return draw

    def put(name, value, *place):
        def change(row):
            target = row[name]
            for index in place[:-1]:
                target = target[index]
            target[place[-1]] = value

        return change

    wide = make.CACHES["wide"] | {"vocab_size": 2**18 + 5}
    packed = make.CACHES["packed"]
    short = make.CACHES["short"]
    codes, hidden = make.CACHES["codes"], make.CACHES["hidden"]
    cases = [
        (packed, put("loss_mask", 1, 0), None),  # positive control: allowed, and so are these
        (packed, put("head_ids", 151935, 2, 3), None),
        (packed, put("head_logits", [0.0, -0.0, -0.0, -1.0, -65504.0], 1), None),
        (packed, put("log_tail", -math.inf, 0), None),
        (packed, put("input_ids", 151935, 0), None),
        (packed, put("input_ids", 151936, 0), "input_ids inside the vocabulary"),
        (packed, put("input_ids", -5, 3), "input_ids inside the vocabulary"),
        (hidden, put("input_ids", 2**31 - 1, 3), "input_ids inside the vocabulary"),
        (packed, put("head_ids", 151936, 2, 3), "vocabulary"),
        (packed, put("head_ids", 262143, 2, 3), "vocabulary"),
        (short, put("head_ids", 300, 2, 1), "vocabulary"),
        (wide, put("head_ids", 2**18 + 5, 1, 1), "vocabulary"),
        (wide, put("head_ids", -1, 1, 1), "vocabulary"),
        (packed, put("head_logits", [-0.5, -1.0, -1.0, -1.0, -2.0], 1), "rank order"),
        (packed, put("head_logits", [0.5, -1.0, -1.0, -1.0, -2.0], 1), "rank order"),
        (packed, put("head_logits", [0.0, -1.0, -0.5, -1.0, -2.0], 1), "rank order"),
        (packed, put("head_logits", [0.0, 6e-8, -0.5, -1.0, -2.0], 1), "rank order"),
        (packed, put("head_logits", [0.0, -0.5, -1.0, -2.0, -math.inf], 1), "rank order"),
        (packed, put("head_logits", [0.0, -0.5, -1.0, -2.0, math.nan], 1), "rank order"),
        (packed, put("head_logits", [0.0, math.nan, -1.0, -2.0, -3.0], 1), "rank order"),
        (packed, put("head_logits", [math.nan, -0.1, -1.0, -2.0, -3.0], 1), "rank order"),
        (packed, put("lse", math.nan, 0), "finite lse"),
        (packed, put("lse@2", math.inf, 7), "finite lse"),
        (packed, put("lse", -0.5, 3), "finite lse"),
        (packed, put("log_tail", math.nan, 0), "log_tail"),
        (packed, put("log_tail@2", 0.5, 0), "log_tail"),
        (packed, put("loss_mask", 2, 0), "loss_mask"),
        (codes, put("draw_ids", 151935, 2, 3), None),
        (codes, put("head_logits", [0.0, -0.0, -64.0, -64.0, -64.0], 1), None),
        (codes, put("draw_ids", 151936, 2, 3), "draws inside the vocabulary"),
        (codes, put("tail_draw_ids", 262143, 0, 0), "tail_draws inside the vocabulary"),
        (codes, put("head_logits", [0.0, -3.0, -1.0, -4.0, -5.0], 1), "rank order"),
        (codes, put("head_logits", [-0.1, -3.0, -3.0, -4.0, -5.0], 1), "rank order"),
        (codes, put("head_logits", [0.0, -3.0, -3.0, -4.0, -65.0], 1), "val_range"),
        (codes, put("head_logits", [0.0, 3.0, 3.0, 4.0, 5.0], 1), "val_range"),
        (hidden, put("teacher_hidden", 65504.0, 1, 1), None),
        (hidden, put("teacher_hidden", math.inf, 1, 1), "hidden"),
        (hidden, put("teacher_hidden", math.nan, 0, 2), "hidden"),
        (hidden, put("draw_ids", 300, 0, 0), "draws inside the vocabulary"),
    ]
    for number, (setting, change, promise) in enumerate(cases):
        monkeypatch.setattr(make, "draw_row", spoil(change))
        make.write_cache(tmp_path / f"{number}", setting, 0)
        if promise is None:
            verify_cache(tmp_path / f"{number}")
        else:
            with pytest.raises(CacheDamaged, match=f"-00000.: rows 0 to .*{promise}"):
                verify_cache(tmp_path / f"{number}")
        if promise is None or "input_ids" in promise:  # the rules that rows are held to as they are read
            rows = KDCacheDataset(tmp_path / f"{number}")
            for row in range(len(rows)):
                if promise is None:
                    rows.rows([row])
                else:
                    with pytest.raises(CacheDamaged, match=r"-00000.: row \d has input_ids from .*; allowed: 0 to"):
                        rows.rows([row])


@pytest.mark.parametrize("threads", [1, 4])
def test_the_first_damaged_shard_is_named_and_all_bytes_are_told(
    tmp_path, fingerprint, random_rows, write_cache, threads
):
    fp = fingerprint()
    cache = write_cache(tmp_path / "c", fp, random_rows(fp, 24), shard_rows=2)
    told = {}

    def progress(shard, read):
        told[shard] = told.get(shard, 0) + read

    report = verify_cache(cache, progress, threads=threads)
    assert told == {file.stem: file.stat().st_size for file in cache.glob("*.safetensors")}
    assert report.bytes == sum(told.values()) and report.shards == 12
    for name in ("s-000009", "s-000003", "s-000007"):
        file = cache / f"{name}.safetensors"
        file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    with pytest.raises(CacheDamaged, match="s-000003"):
        verify_cache(cache, threads=threads)


def test_verify_on_the_command_line(cache, capsys):
    main(["cache", "verify", str(cache)])
    shown = capsys.readouterr()
    assert "intact: 3 shards, 5 rows" in shown.out and "verify" in shown.err and "100%" in shown.err
    main(["cache", "verify", str(cache), "--quiet", "--json"])
    shown = capsys.readouterr()
    assert json.loads(shown.out)["intact"] is True and shown.err == ""
    file = cache / "s-000001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
    with pytest.raises(SystemExit) as left:
        main(["cache", "verify", str(cache), "--quiet"])
    assert left.value.code == 1
    shown = capsys.readouterr()
    assert shown.err.startswith("error: ") and "s-000001" in shown.err and shown.err.count("\n") == 1
