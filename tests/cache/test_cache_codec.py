"""Values and the optional arrays: what comes back at any k, what storing costs, which values are refused."""

import numpy as np
import pytest

from qat_lora.cache.build.writer import CacheWriter
from qat_lora.cache.format.codec import DEEPEST, decode_values, encode_rows, encode_values, promises
from qat_lora.cache.format.records import optional_arrays
from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.cache.storage.store import verify_cache
from qat_lora.errors import CacheError


def _zipf(slope, positions=200, vocab=151_936, seed=0):
    """Sorted logits minus maximum of teachers whose probabilities fall as a power of the rank, with noise."""
    draw = np.random.default_rng(seed)
    logits = -slope * np.log(np.arange(1, vocab + 1)) + 0.5 * draw.normal(size=(positions, vocab))
    logits = -np.sort(-logits, axis=1)
    return logits - logits[:, :1]


def _kl(logits, values, k):
    """KL between teacher and what is stored, K+1 outcomes renormalised as the losses do, in float64."""
    lse = np.logaddexp.reduce(logits, axis=1, keepdims=True)
    tail = np.logaddexp.reduce(logits[:, k:], axis=1, keepdims=True) - lse
    p, q = (np.concatenate([head - lse, tail], axis=1) for head in (logits[:, :k], values.astype(np.float64)))
    q -= np.logaddexp.reduce(q, axis=1, keepdims=True)
    assert np.exp(q).sum(axis=1) == pytest.approx(1, abs=1e-12)
    return (np.exp(p) * (p - q)).sum(axis=1).mean()


@pytest.mark.parametrize("slope", [1.0, 2.0, 4.0])
def test_what_storing_costs(slope):
    logits = _zipf(slope, positions=20)
    for k in (8, 64):
        stored = encode_values(logits[:, :k], "uint8")
        assert stored["val"].dtype == np.uint8 and stored["val"].nbytes + stored["val_range"].nbytes == 20 * (k + 2)
        values = decode_values(stored, k)
        assert _kl(logits, values, k) <= 5e-5
        assert (values[:, 0] == 0).all() and not np.signbit(values[:, 0]).any()
        assert (np.diff(values) <= 0).all()
        assert _kl(logits, decode_values(encode_values(logits[:, :k], "float16"), k), k) <= 1e-5
        again = encode_values(values, "uint8")
        np.testing.assert_array_equal(again["val"], stored["val"])  # storing twice is storing once
        # Positive control: 4-bit codes of the same form would not do.
        coarse = -((np.rint(15 * (logits[:, :k] / logits[:, k - 1 : k]) ** (1 / 1.5)) / 15) ** 1.5)
        assert _kl(logits, coarse * -logits[:, k - 1 : k], k) > 5e-5


@pytest.mark.parametrize("deepest", [-30.0, -64.0, -60_000.0, -np.inf])
def test_one_entry_far_below_the_others_does_not_take_their_codes(deepest):
    draw = np.random.default_rng(0)
    logits = -np.log(np.arange(1, 65)) * draw.uniform(0.8, 2.5, (2_000, 1))
    logits[:, -1] = deepest
    finite = np.concatenate([np.maximum(logits, -100.0), np.full((2_000, 1), -9.0)], axis=1)  # and a tail
    stored = encode_values(logits, "uint8")
    assert _kl(finite, decode_values(stored, 64), 64) <= 8e-5
    if deepest <= -64:  # positive control: the range up to it, as long as the format lets it be
        wide = encode_values(logits, "uint8", temperature=64 / DEEPEST)
        assert (wide["val_range"] == 64).all()
        assert _kl(finite, decode_values(wide, 64), 64) > 3e-4


def test_values_used_at_a_higher_temperature_go_deeper():
    logits = np.linspace(0, -70, 64)[None]
    for temperature, deepest in ((0.5, 20), (1.0, 20), (2.0, 40), (8.0, 64)):
        stored = encode_values(logits, "uint8", temperature)
        assert decode_values(stored, 64).min() == -deepest
        with_tail = np.concatenate([logits, [[-9.0]]], axis=1)
        assert _kl(with_tail / temperature, decode_values(stored, 64) / temperature, 64) <= 1e-4


def test_odd_values():
    cases = [[0, 0, 0], [0, -1e-9, -2e-9], [0, -1, -np.inf], [0, -1e5, -2e5], [0, -np.inf, -np.inf], [0, -3, -70]]
    stored = encode_values(np.array(cases, np.float32), "uint8")
    values = decode_values(stored, 3)
    assert np.isfinite(values).all() and values.min() == -DEEPEST and (np.diff(values) <= 0).all()
    assert values[0].tolist() == [0, 0, 0]
    assert values[2, 1] == pytest.approx(-1, abs=0.1)
    np.testing.assert_array_equal(decode_values(stored, 2), values[:, :2])
    assert decode_values(encode_values(np.zeros((4, 1)), "uint8"), 1).tolist() == [[0]] * 4  # K = 1


def _rows(fp, count, random_rows, seed=0):
    rows = random_rows(fp, count, seed)
    draw = np.random.default_rng(seed + 1)
    held = fp.contents
    for name, size in (("tail_draw_ids", held.tail_draws), ("draw_ids", held.draws)):
        if size:
            rows[name] = draw.integers(0, fp.vocab_size, (count, fp.length - 1, size)).astype(np.int32)
    if held.hidden:
        rows["teacher_hidden"] = draw.normal(size=(count, fp.length - 1, held.hidden)).astype(np.float32)
    return rows


@pytest.mark.parametrize("vocab", [31, 70_001, 300_000])
def test_all_arrays_together_at_odd_sizes(tmp_path, fingerprint, random_rows, write_cache, vocab):
    fp = fingerprint(
        vocab_size=vocab, top_k=5, length=4, value_dtype="uint8", optional_arrays=optional_arrays(3, 6), eval_rows=1
    )
    rows, held_out = _rows(fp, 5, random_rows), _rows(fp, 1, random_rows, seed=9)
    write_cache(tmp_path / "c", fp, rows, 2, held_out)
    verify_cache(tmp_path / "c")
    order = [4, 0, -1, 2]
    batch = KDCacheDataset(tmp_path / "c").rows(order)
    for name in ("input_ids", "head_ids", "tail_draw_ids", "draw_ids", "lse", "log_tail"):
        np.testing.assert_array_equal(batch[name][[0, 1, 3]], rows[name][[4, 0, 2]], err_msg=name)
    np.testing.assert_allclose(batch["head_logits"][[0, 1, 3]], rows["head_logits"][[4, 0, 2]], atol=0.1)
    assert not batch["target_mask"][2].any() and not batch["draw_ids"][2].any()
    dataset = KDCacheDataset(tmp_path / "c", k=2)
    with pytest.raises(CacheError, match="k: the cache's draws are from the tail behind 5 entries.*--top-k 2"):
        dataset.rows(order)
    dataset.optional = ["draw_ids"]
    fewer = dataset.rows(order)
    np.testing.assert_array_equal(fewer["draw_ids"], batch["draw_ids"])
    np.testing.assert_array_equal(fewer["head_logits"], batch["head_logits"][..., :2])
    for name, read in (("all", batch), ("fewer", fewer)):
        logs = np.concatenate([read["head_logits"] - read["lse"][..., None], read["log_tail"][..., None]], -1)
        sums = np.exp(logs.astype(np.float64)).sum(-1)
        np.testing.assert_allclose(sums, 1, atol=0.05, err_msg=name)


def test_shapes_that_do_not_fit_are_named(tmp_path, fingerprint, random_rows):
    fp = fingerprint(optional_arrays=optional_arrays(2, 3))
    rows = _rows(fp, 2, random_rows)
    with CacheWriter(tmp_path / "c", fp) as writer:
        for name in ("tail_draw_ids", "draw_ids"):
            with pytest.raises(CacheError, match=name):
                writer.append({**rows, name: rows[name][..., :1]}, [0, 1])
            with pytest.raises(CacheError, match=f"{name.removesuffix('_ids')}s: from .* vocab_size"):
                writer.append({**rows, name: rows[name] + fp.vocab_size}, [0, 1])
        writer.append(rows, [0, 1])
    assert len(KDCacheDataset(tmp_path / "c")) == 2


# The rules for values say which one is broken; `test_cache_damage.py` has them on sealed files, rule by rule.


@pytest.mark.parametrize("value_dtype", ["float16", "uint8"])
def test_what_was_encoded_keeps_them_and_a_swap_breaks_one(fingerprint, random_rows, value_dtype):
    fp = fingerprint(vocab_size=97, top_k=9, length=17, value_dtype=value_dtype, optional_arrays=("draws:3",))
    arrays = encode_rows(random_rows(fp, 3), fp)
    assert all(promises(arrays, fp).values())
    values = arrays["val"].copy()
    values[1, 5] = values[1, 5, ::-1]
    broken = promises({**arrays, "val": values}, fp)
    assert [name for name, kept in broken.items() if not kept] == ["values falling from 0 in rank order"]
    high = promises({**arrays, "draws_lo": np.full_like(arrays["draws_lo"], 97)}, fp)
    assert [name for name, kept in high.items() if not kept] == ["draws inside the vocabulary"]
