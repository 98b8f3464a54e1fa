"""Format version 2: rows that are compressed one by one, stratified draws, and positions drawn with weights."""

import json
import os
import struct
from io import BytesIO

import numpy as np
import pytest
import torch
from test_cache_topk import RandomRow, Teacher, _Unfinished

from qat_lora.cache.build.builder import ForwardSettings, Size, build_kd_cache, forecast
from qat_lora.cache.build.topk import draw, position_weights, row_uniforms
from qat_lora.cache.build.writer import CacheWriter
from qat_lora.cache.format import layout as fmt
from qat_lora.cache.format.codec import encode_rows
from qat_lora.cache.format.compressed import _bytes_of, _numbers
from qat_lora.cache.format.records import Manifest, optional_arrays, parse, render
from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.cache.storage.store import read_manifest, verify_cache
from qat_lora.cache.tools.describe import describe
from qat_lora.cache.tools.transport import export_parquet, pack_cache, unpack_cache
from qat_lora.errors import CacheDamaged, CacheError, ConfigError
from qat_lora.losses.objective import ObjectiveConfig
from qat_lora.options import CacheBuildOptions
from qat_lora.setup.training import check_arrays


def rising(rows):
    """The rows as version 2 gives them back: a position's draws in rising order."""
    return rows | {name: np.sort(rows[name], -1) for name in ("tail_draw_ids", "draw_ids") if name in rows}


@pytest.fixture
def compressed(fingerprint):
    def make(tail_draws=0, draws=6, weights=False, lzma=True, **changes):
        arrays = optional_arrays(tail_draws, draws, weights=weights, lzma=lzma)
        return fingerprint(**{"length": 9, "optional_arrays": arrays, **changes})

    return make


@pytest.mark.parametrize("vocab", [31, 70_000, 300_000])
@pytest.mark.parametrize("value_dtype", ["float16", "uint8"])
def test_a_compressed_cache_serves_what_one_of_version_1_does(
    vocab, value_dtype, tmp_path, compressed, random_rows, write_cache
):
    held = {"vocab_size": vocab, "value_dtype": value_dtype, "tail_draws": 3, "draws": 5, "weights": True}
    plain, small = compressed(lzma=False, **held), compressed(**held)
    rows = random_rows(plain, 7)
    rows["weights"] = np.random.default_rng(0).random((7, 8)).astype(np.float16)
    rows["draw_ids"][:4] = rows["draw_ids"][:4, :, :1]  # repeats, all of them
    rows["draw_ids"][2, :, 1] = vocab - 1
    old = KDCacheDataset(write_cache(tmp_path / "old", plain, rising(rows)))
    new = KDCacheDataset(write_cache(tmp_path / "new", small, rows))
    order = [6, 0, 3, -1, 3, 1]
    for name, values in old.rows(order).items():
        np.testing.assert_array_equal(new.rows(order)[name], values, err_msg=name)
    verify_cache(tmp_path / "new")
    assert describe(tmp_path / "new")["bytes_per_token_by_array"] == {}
    assert (old.manifest.version, new.manifest.version) == (1, 2)


def test_numbers_of_every_length_are_read_back():
    numbers = np.array([0, 239, 240, 2287, 2288, 2288 + (1 << 24), (1 << 27) - 1, 255, 256])
    data = b"".join(part.astype(np.uint8).tobytes() for part in _bytes_of(numbers))
    np.testing.assert_array_equal(_numbers(BytesIO(data), len(numbers)), numbers)


def test_every_byte_of_a_shard_is_accounted_for(tmp_path, compressed, random_rows, write_cache):
    fp = compressed(top_k=0)
    write_cache(tmp_path / "c", fp, random_rows(fp, 4), shard_rows=4)
    data = (tmp_path / "c" / "s-000000.safetensors").read_bytes()
    (size,) = struct.unpack("<Q", data[:8])
    header, body = json.loads(data[8 : 8 + size]), data[8 + size :]
    assert 8 + size == 512 and header["__metadata__"]["version"] == "2"
    ends = np.frombuffer(body, "<u4", 5, 20)
    assert len(body) == 5 * 8 + ends[-1] and header["rows"]["data_offsets"] == [40, 40 + ends[-1]]
    assert read_manifest(tmp_path / "c").train[0].bytes == len(data)


def test_a_flipped_bit_and_a_cut_are_found_in_their_row(tmp_path, compressed, random_rows, write_cache):
    fp = compressed()
    rows = random_rows(fp, 3)
    write_cache(tmp_path / "c", fp, rows)
    file = tmp_path / "c" / "s-000000.safetensors"
    whole = file.read_bytes()
    ends = np.frombuffer(whole, "<u4", 4, 512 + 16) + 512 + 32
    for place in range(int(ends[1]), int(ends[2])):  # row 1
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        dataset = KDCacheDataset(tmp_path / "c", verify=False)
        dataset.rows([0, 2])
        with pytest.raises(CacheDamaged, match="row 1 does not have its checksum"):
            dataset.rows([1])
        unchecked = KDCacheDataset(tmp_path / "c", verify=False, verify_rows="off")
        try:
            unchecked.rows([1])
        except CacheDamaged as error:
            assert "row 1" in str(error)
        with pytest.raises(CacheDamaged, match="sha256"):
            verify_cache(tmp_path / "c")
    for place in range(512, int(ends[0])):  # checksums, ends, the table of tokens
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 1 << place % 8]) + whole[place + 1 :])
        with pytest.raises(CacheDamaged):
            KDCacheDataset(tmp_path / "c", verify=False).rows([0, 1, 2])
    file.write_bytes(whole)
    dataset = KDCacheDataset(tmp_path / "c", verify=False)
    dataset.rows([0])
    with open(file, "r+b") as opened:
        opened.truncate(int(ends[2]) - 1)
    dataset.rows([0])
    with pytest.raises(CacheDamaged, match="row 1 is cut off"):
        dataset.rows([1])


def test_a_row_is_read_by_itself(tmp_path, compressed, random_rows, write_cache, monkeypatch):
    """No other row's bytes are touched, in whatever order rows are asked for, and none twice."""
    fp = compressed(top_k=0)
    write_cache(tmp_path / "c", fp, random_rows(fp, 8), shard_rows=4)
    whole = KDCacheDataset(tmp_path / "c").rows(range(8))
    sizes = []
    for name in ("s-000000", "s-000001"):
        ends = np.frombuffer((tmp_path / "c" / f"{name}.safetensors").read_bytes(), "<u4", 5, 512 + 20)
        sizes += np.diff(ends).tolist()
    dataset = KDCacheDataset(tmp_path / "c", verify=False)
    dataset.rows([0, 4])  # opens both shards
    preadv, reads = os.preadv, []
    monkeypatch.setattr(os, "preadv", lambda file, into, at: reads.append(preadv(file, into, at)) or reads[-1])
    for row in (5, 2, 7, 2):
        reads.clear()
        batch = dataset.rows([row])
        assert reads == [sizes[row]]
        for name, values in batch.items():
            np.testing.assert_array_equal(values[0], whole[name][row], err_msg=name)


def _build(out, fp, rows=range(9), batch_rows=2, settings=None):
    with CacheWriter(out, fp, 3) as writer:
        done = writer.resume_state()
        rows = (RandomRow(i, fp.length, fp.vocab_size) for i in range(done.cursor or 0, 9))
        settings = settings or ForwardSettings(batch_rows, positions=("entropy", 0.5))
        build_kd_cache(Teacher(fp.vocab_size), rows, writer, settings, quiet=True)


def test_a_killed_build_goes_on_to_the_same_bytes_and_packs(tmp_path, compressed):
    fp = compressed(weights=True, vocab_size=61, length=17, top_k=0)
    _build(tmp_path / "a", fp)
    with CacheWriter(tmp_path / "c", fp, 3) as writer:
        rows = (RandomRow(i, fp.length, fp.vocab_size) for i in range(4))
        settings = ForwardSettings(3, positions=("entropy", 0.5))
        build_kd_cache(Teacher(61), rows, _Unfinished(writer), settings, quiet=True)
        writer.stop()
    _build(tmp_path / "c", fp, batch_rows=4)

    def files(folder):
        return {file.name: file.read_bytes() for file in folder.iterdir() if not file.name.startswith(".lock")}

    assert files(tmp_path / "a") == files(tmp_path / "c")
    pack_cache(tmp_path / "a", tmp_path / "a.tar.zst")
    unpack_cache(tmp_path / "a.tar.zst", tmp_path / "b")
    assert files(tmp_path / "a") == files(tmp_path / "b")
    batch = KDCacheDataset(tmp_path / "a").rows(range(9))
    assert 0.4 < (batch["weights"] > 0).mean() < 0.6 and not batch["draw_ids"][batch["weights"] == 0].any()
    size = sum(entry.bytes for entry in read_manifest(tmp_path / "a").train)
    rows = [RandomRow(i, 17, 61) for i in range(9)]
    cost = forecast(Teacher(61), rows, fp, tmp_path / "d", Size(shard_rows=3), settings, quiet=True)
    assert abs(cost.bytes / size - 1) < 0.3


def test_parquet_has_the_weights(tmp_path, compressed, random_rows, write_cache):
    parquet = pytest.importorskip("pyarrow.parquet")
    for lzma in (False, True):
        fp = compressed(weights=True, lzma=lzma)
        rows = random_rows(fp, 4) | {"weights": np.linspace(0, 2, 32).reshape(4, 8).astype(np.float16)}
        write_cache(tmp_path / f"c{lzma}", fp, rising(rows))
        export_parquet(tmp_path / f"c{lzma}", tmp_path / f"{lzma}.parquet")
        table = parquet.read_table(tmp_path / f"{lzma}.parquet")
        np.testing.assert_array_equal(np.array(table["weights"].to_pylist(), np.float16), rows["weights"])
        np.testing.assert_array_equal(np.array(table["draw_ids"].to_pylist()), np.sort(rows["draw_ids"], -1))


def test_a_record_of_another_version_than_its_content_is_refused(compressed):
    for fp, version in ((compressed(), 1), (compressed(lzma=False), 2)):
        with pytest.raises(CacheDamaged, match=f"its version is {version}"):
            parse(Manifest, render(Manifest(version=version, fingerprint=fp, train=())), "m")
    with pytest.raises(CacheError, match="format version 3, this program reads 1 and 2"):
        parse(Manifest, render(Manifest(version=3, fingerprint=compressed(), train=())), "m")
    with pytest.raises(ConfigError, match="row_codec"):
        compressed(draws=0, weights=True)
    assert fmt.VERSION == 1  # a reader of version 1 refuses `version: 2` by this number


DRAWS, SEEDS, VOCAB = 6, 1500, 23


def test_stratified_draws_are_unbiased_in_gradient_too_and_vary_less():
    logits = np.random.default_rng(1).normal(size=(1, VOCAB)) * 2
    truth = np.exp(logits[0]) / np.exp(logits[0]).sum()
    row, found = RandomRow(0, 2, VOCAB), {}
    for stratified in (True, False):
        numbers = [row_uniforms(seed, "draws", [row], (1, 2, DRAWS), stratified)[0] for seed in range(SEEDS)]
        weights = torch.from_numpy(logits).float().expand(SEEDS, -1)
        ids = np.sort(draw(weights, torch.from_numpy(np.concatenate(numbers))).numpy(), -1)
        found[stratified] = np.stack([(ids == token).mean(-1) for token in range(VOCAB)], -1)
    student = np.full(VOCAB, 1 / VOCAB)
    for shares in found.values():  # the gradient of the cross-entropy is student - shares, linear in the shares
        errors = (shares.mean(0) - truth) / np.sqrt(truth * (1 - truth) / DRAWS / SEEDS)
        assert abs(errors).max() < 5
        np.testing.assert_allclose((student - shares).mean(0), student - truth, atol=0.02)
    spread = {kind: ((shares - truth) ** 2).sum(-1).mean() for kind, shares in found.items()}
    assert spread[True] < 0.7 * spread[False]
    first = np.sort(draw(weights, torch.from_numpy(np.concatenate(numbers))).numpy(), -1)[:, :2]
    naive = np.stack([(first == token).mean(-1) for token in range(VOCAB)], -1).mean(0)
    assert abs(naive - truth).max() > 0.05  # why fewer of them are refused


def test_drawn_positions_leave_loss_and_gradient_unbiased():
    rng = np.random.default_rng(2)
    scores = rng.gamma(0.5, size=(1, 40))
    gradients = rng.normal(size=(40, 3)) + 3 * scores[0][:, None]  # what high scores have more of
    uniforms = (np.arange(4000) + 0.5) / 4000
    scores = np.repeat(scores, 4000, 0)
    weights = position_weights(np.ones_like(scores, bool), scores, 0.5, uniforms)
    assert weights.dtype == np.float32 and np.array_equal(weights, weights.astype(np.float16))
    kept = (weights > 0).sum(-1)
    assert kept.max() - kept.min() <= 1 and abs(kept.mean() / 40 - 0.5) < 0.05
    np.testing.assert_allclose(weights.mean(0), 1, atol=2e-2)
    exact = gradients.sum(0)
    np.testing.assert_allclose((weights.astype(np.float64) @ gradients).mean(0), exact, rtol=5e-3)
    naive = ((weights > 0) @ gradients).mean(0) * 40 / kept.mean()  # chosen, and not weighted
    assert (abs(naive / exact - 1) > 0.1).all()


def test_settings_that_do_not_go_together_are_refused(tmp_path, compressed, random_rows, write_cache):
    from qat_lora.data.sources import TextConfig

    wanted = {"teacher": "t", "text": TextConfig(dataset="d")}
    for changes in ({"position_share": 0.0}, {"position_share": 1.5}, {"row_codec": "lzma"}, {"top_k": 0, "draws": 4}):
        with pytest.raises(ConfigError):
            CacheBuildOptions(**wanted, **changes)
    CacheBuildOptions(**wanted, top_k=0, draws=4, row_codec="lzma", positions="uniform")
    fp = compressed()
    dataset = KDCacheDataset(write_cache(tmp_path / "c", fp, random_rows(fp, 3)))
    check_arrays(dataset, ObjectiveConfig(estimator="sampled"))
    with pytest.raises(CacheError, match="tail_draw_ids: estimator hybrid needs it"):
        check_arrays(dataset, ObjectiveConfig(estimator="hybrid", draws=2))
    alone = compressed(top_k=0)
    alone = KDCacheDataset(write_cache(tmp_path / "alone", alone, random_rows(alone, 3)))
    with pytest.raises(CacheError, match="needs the teacher's likeliest tokens.*give --estimator sampled"):
        check_arrays(alone, ObjectiveConfig(estimator="ghost"))
    with pytest.raises(CacheError, match="stratified draws are biased"):
        check_arrays(dataset, ObjectiveConfig(estimator="sampled", draws=2))
    assert encode_rows(random_rows(fp, 1), fp).keys() == {spec.name for spec in fp.arrays}
