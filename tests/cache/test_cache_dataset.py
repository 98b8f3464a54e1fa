import subprocess
import sys

import numpy as np
import pytest

from qat_lora.cache.format.codec import encode_rows
from qat_lora.cache.format.records import optional_arrays
from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.cache.storage.store import verify_cache
from qat_lora.data.shuffle import global_batch, permuted
from qat_lora.errors import CacheError, ConfigError


@pytest.fixture
def dataset(tmp_path, fingerprint, random_rows, write_cache):
    fp = fingerprint(temperatures=(1.0, 2.0))
    return KDCacheDataset(write_cache(tmp_path / "c", fp, random_rows(fp, 29), shard_rows=4))


def _by_the_book(position, rows, seed, epoch):
    """docs/cache-format.md in plain Python numbers."""
    mask = 2**64 - 1

    def splitmix(x):
        x = (x + 0x9E3779B97F4A7C15) & mask
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
        return x ^ (x >> 31)

    half = 1
    while 4**half < rows:
        half += 1
    first = splitmix(splitmix(seed) ^ epoch)
    while True:
        key, left, right = first, position >> half, position % 2**half
        for _ in range(8):
            key = splitmix(key)
            left, right = right, left ^ splitmix(right ^ key) % 2**half
        position = left * 2**half + right
        if position < rows:
            return position


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 5, 16, 17, 64, 65, 1000])
def test_order_is_a_permutation_and_follows_the_specification(rows):
    for seed, epoch in ((0, 0), (0, 1), (7, 0), (2**63 + 1, 5)):
        order = permuted(np.arange(rows), rows, seed, epoch)
        assert sorted(order.tolist()) == list(range(rows))
        assert order[:40].tolist() == [_by_the_book(i, rows, seed, epoch) for i in range(min(rows, 40))]
        half = rows // 2  # the order of a part is the part of the order
        np.testing.assert_array_equal(permuted(np.arange(half, rows), rows, seed, epoch), order[half:])


def test_order_never_changes():
    assert permuted(np.arange(10), 10, 0, 0).tolist() == [7, 9, 3, 1, 5, 6, 2, 4, 8, 0]


def test_every_row_is_equally_likely_everywhere():
    counts = np.zeros((5, 5))
    for epoch in range(2000):
        counts[np.arange(5), permuted(np.arange(5), 5, 1, epoch)] += 1
    chi_square = ((counts - 400) ** 2 / 400).sum()
    assert chi_square < 40  # 16 degrees of freedom: 39.3 at one in a thousand


def test_ten_million_rows_are_reached_at_once():
    order = permuted(np.arange(5_000_000, 5_000_064), 10_000_000, 3, 12)
    assert len(set(order.tolist())) == 64
    assert order.min() >= 0 and order.max() < 10_000_000


@pytest.mark.parametrize("rows_a_step", [12, 36])
def test_replicas_share_one_order_and_every_row_counts_once(dataset, rows_a_step):
    steps = dataset.steps_per_epoch(rows_a_step)
    wanted = [global_batch(len(dataset), step, rows_a_step, 5) for step in range(steps)]
    real = np.concatenate(wanted)
    assert sorted(real[real >= 0].tolist()) == list(range(29))
    assert (real == -1).sum() == steps * rows_a_step - 29
    for replicas in (1, 2, 3, 4):
        for accumulation in (1, 3):
            batch_rows, rest = divmod(rows_a_step, replicas * accumulation)
            if rest:
                continue
            parts = [
                list(dataset.batches(0, steps, batch_rows, accumulation, 5, replica, replicas))
                for replica in range(replicas)
            ]
            for step, order in enumerate(wanted):
                seen = []
                for micro in range(accumulation):
                    for replica in range(replicas):
                        batch = parts[replica][step * accumulation + micro]
                        assert batch["input_ids"].shape == (batch_rows, 5)
                        seen += batch["input_ids"][:, 0].tolist()  # the row's number: see random_rows
                assert seen == np.maximum(order, 0).tolist()


def test_any_step_can_be_the_first(dataset):
    every = list(dataset.batches(0, 12, 2, 2, seed=1))
    for start in range(12):
        first = next(dataset.batches(start, 1, 2, 2, seed=1))
        for name, array in first.items():
            np.testing.assert_array_equal(array, every[2 * start][name])
    epochs = [np.concatenate([global_batch(29, e * 8 + s, 4, 1) for s in range(8)]) for e in range(2)]
    assert epochs[0].tolist() != epochs[1].tolist()


def test_padding_rows_count_for_nothing_and_stay_finite(dataset):
    batch = dataset.rows([-1, 3])
    assert not batch["target_mask"][0].any()
    assert not batch["input_ids"][0].any()
    head = np.exp(batch["head_logits"][0] - batch["lse"][0][:, None]).sum(-1)
    np.testing.assert_allclose(head + np.exp(batch["log_tail"][0]), 1, rtol=1e-6)
    np.testing.assert_array_equal(batch["input_ids"][1], dataset.rows([3])["input_ids"][0])


def test_preload_and_files_serve_the_same(dataset):
    loaded = KDCacheDataset(dataset.path, preload=True, k=2, temperatures=(1.0, 2.0))
    read = KDCacheDataset(dataset.path, k=2, temperatures=(1.0, 2.0), verify=False)
    for name, array in loaded.rows(range(29)).items():
        np.testing.assert_array_equal(array, read.rows(range(29))[name])


def test_more_shards_than_may_be_open(dataset, monkeypatch):
    monkeypatch.setattr("qat_lora.cache.storage.store._MOST_OPEN", 2)
    again = KDCacheDataset(dataset.path)
    np.testing.assert_array_equal(again.rows(range(29))["input_ids"][:, 0], np.arange(29))
    assert again._shard.cache_info().currsize == 2


def test_requests_that_the_cache_cannot_serve(dataset):
    with pytest.raises(CacheError, match="temperature: 3"):
        KDCacheDataset(dataset.path, temperatures=(3.0,))
    for k in (0, 4):
        with pytest.raises(CacheError, match="k: "):
            KDCacheDataset(dataset.path, k=k)
    with pytest.raises(CacheError, match="eval-rows"):
        KDCacheDataset(dataset.path, split="eval")
    with pytest.raises(CacheError, match="split"):
        KDCacheDataset(dataset.path, split="test")
    with pytest.raises(CacheError, match="rows"):
        dataset.rows([29])
    with pytest.raises(ConfigError, match="replica"):
        next(dataset.batches(0, 1, 2, replica=2, replicas=2))


def test_a_student_that_does_not_fit_is_told_the_field(dataset):
    dataset.check_student("11" * 32, 31, 5)
    dataset.check_student(None, 64, None)
    for arguments, field in ((("33" * 32, 31, 5), "tokenizer"), (("11" * 32, 30, 5), "vocab_size"),
                             (("11" * 32, 31, 4), "length")):  # fmt: skip
        with pytest.raises(CacheError, match=f"^{field}: "):
            dataset.check_student(*arguments)


def test_reader_and_writer_need_no_torch():
    modules = "qat_lora.cache.build.writer, qat_lora.cache.read.dataset, qat_lora.cache.tools.transport"
    code = f"import sys, {modules}; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_weights_of_positions_are_served_and_bad_ones_refused(tmp_path, fingerprint, random_rows, write_cache):
    fp = fingerprint(optional_arrays=optional_arrays(weights=True))
    rows = random_rows(fp, 3)
    given = np.linspace(0, 2, 3 * (fp.length - 1)).reshape(3, -1).astype(np.float16)
    path = write_cache(tmp_path / "c", fp, rows | {"weights": given})
    served = KDCacheDataset(path).rows([2, -1, 0])["weights"]
    np.testing.assert_array_equal(served, [given[2], 0 * given[0], given[0]])
    assert served.dtype == np.float32
    verify_cache(path)
    for bad in (-1.0, np.nan, 1e6):
        with pytest.raises(CacheError, match="weights: some are negative"):
            encode_rows(rows | {"weights": np.full(given.shape, bad)}, fp)
    with pytest.raises(CacheError, match="weights: shape absent"):
        encode_rows({name: array for name, array in rows.items() if name != "weights"}, fp)
