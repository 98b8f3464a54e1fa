"""Top K, sums and draws against slow float64 that shares no code, at sizes on both sides of every branch."""

import numpy as np
import pytest
import torch

from qat_lora.cache.build.builder import ForwardSettings, build_kd_cache
from qat_lora.cache.build.topk import draw, row_uniforms, sparse_arrays, top_k_entries
from qat_lora.cache.build.writer import CacheWriter
from qat_lora.cache.format.records import optional_arrays
from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.cache.storage.store import verify_cache
from qat_lora.types import temperature_key

LARGEST_Z = 5.0
KNOWN = [[11563034, 6821631], [8059886, 2691079]]


@pytest.mark.parametrize("vocab", [1, 31, 1009, 4099, 20_011])
@pytest.mark.parametrize("k", [1, 5, 64])
def test_top_k_entries_are_those_of_a_full_sort(vocab, k):
    k = min(k, vocab)
    logits = torch.randn(7, vocab, generator=torch.Generator().manual_seed(vocab + k))
    values, indices = top_k_entries(logits, k)
    expected = np.sort(logits.numpy(), axis=1)[:, ::-1][:, :k]
    assert np.array_equal(values.numpy(), expected)
    assert torch.equal(logits.gather(1, indices), values)
    assert all(len(set(row)) == k for row in indices.tolist())


def test_the_largest_are_found_wherever_they_lie():
    """All in one stretch, one in each, and in the rest behind the last whole stretch."""
    vocab, k = 20_011, 8
    for places in ([100 + i for i in range(k)], [i * 2_500 for i in range(k)], [vocab - 1 - i for i in range(k)]):
        logits = torch.zeros(1, vocab)
        logits[0, places] = torch.arange(1.0, k + 1)
        assert sorted(top_k_entries(logits, k)[1][0].tolist()) == sorted(places)


def test_ties_and_nan_do_not_break_the_ranking():
    values, indices = top_k_entries(torch.zeros(2, 20_011), 8)
    assert (values == 0).all()
    assert all(len(set(row)) == 8 for row in indices.tolist())
    spoilt = torch.randn(1, 20_011)
    spoilt[0, 12_345] = float("nan")
    assert torch.isnan(top_k_entries(spoilt, 8)[0][0, 0])  # on top, where the writer refuses it


@pytest.mark.parametrize("piece_bytes", [None, 1, 3 * 4 * 5003])
@pytest.mark.parametrize("top_k", [1, 40, 5003])
@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_sums_against_float64(piece_bytes, top_k, scale):
    vocab = 5003
    logits = scale * torch.randn(11, vocab, generator=torch.Generator().manual_seed(1))
    arrays = sparse_arrays(logits.clone(), top_k, (1.0, 2.5), {}, piece_bytes)
    exact = logits.double().numpy()
    ids = arrays["head_ids"].numpy()
    np.testing.assert_array_equal(ids[:, 0], exact.argmax(1))
    for temperature in (1.0, 2.5):
        lse = arrays[temperature_key("lse", temperature)].double().numpy()
        log_tail = arrays[temperature_key("log_tail", temperature)].double().numpy()
        for row in range(len(exact)):
            z = (exact[row] - exact[row].max()) / temperature
            outside = np.ones(vocab, bool)
            outside[ids[row]] = False
            total = np.log(np.exp(z).sum())
            assert abs(lse[row] - total) < 1e-5
            if top_k == vocab:
                assert log_tail[row] == -np.inf
            else:
                largest = z[outside].max()
                tail = largest + np.log(np.exp(z[outside] - largest).sum()) - total
                assert abs(log_tail[row] - tail) < 1e-5 * max(1.0, abs(tail))


def test_pieces_change_no_bit():
    logits = torch.randn(11, 20_011, generator=torch.Generator().manual_seed(2))
    uniforms = {"tail_draw_ids": torch.rand(11, 3, 2), "draw_ids": torch.rand(11, 2, 2)}
    whole = sparse_arrays(logits.clone(), 64, (1.0, 2.0), uniforms)
    cut = sparse_arrays(logits.clone(), 64, (1.0, 2.0), uniforms, 4 * 20_011 * 2)
    assert whole.keys() == cut.keys()
    for name, values in whole.items():
        assert torch.equal(values, cut[name]), name


def test_a_position_gives_the_same_bits_wherever_it_stands():
    """A resumed build has the same rows at other places of its batches."""
    logits = torch.randn(37, 1009, generator=torch.Generator().manual_seed(3))
    together = sparse_arrays(logits.clone(), 8, (1.0, 2.0), {})
    for row in range(len(logits)):
        alone = sparse_arrays(logits[row : row + 1].clone(), 8, (1.0, 2.0), {})
        for name, values in together.items():
            assert torch.equal(values[row : row + 1], alone[name]), (name, row)


# Drawn tokens: their distribution, and that they depend on seed and row alone.


def _numbers(seed, *shape):
    return torch.from_numpy(np.random.default_rng(seed).random((*shape, 2)).astype(np.float32).clip(0, 1 - 2**-24))


def _chi_square_z(drawn, probabilities):
    """How many standard deviations the chi-square of counts is above its mean; rare tokens are put together."""
    expected = probabilities * len(drawn)
    order = np.argsort(expected)
    groups = (np.cumsum(expected[order]) // max(50, len(drawn) / 400)).astype(int)
    counts = np.bincount(drawn, minlength=len(probabilities))
    seen, wanted = (np.bincount(groups, weights=values[order]) for values in (counts, expected))
    seen, wanted = seen[wanted > 10], wanted[wanted > 10]
    freedom = len(seen) - 1
    return (((seen - wanted) ** 2 / wanted).sum() - freedom) / np.sqrt(2 * freedom)


@pytest.mark.parametrize("vocab", [7, 31, 1009, 151_936])
@pytest.mark.parametrize("scale", [0.5, 3.0])
def test_the_distribution(vocab, scale):
    logits = np.random.default_rng(1).normal(size=vocab) * scale
    logits[::3] = -np.inf  # as a top K that is cut out
    truth = np.exp(logits - logits[np.isfinite(logits)].max())
    truth /= truth.sum()
    drawn = draw(torch.from_numpy(logits).float()[None].repeat(4, 1), _numbers(2, 4, 25_000)).numpy().reshape(-1)
    assert (drawn % 3 != 0).all() and drawn.min() >= 0 and drawn.max() < vocab
    assert abs(_chi_square_z(drawn, truth)) < LARGEST_Z
    wrong = np.exp(np.where(np.isfinite(logits), logits * 0.8, -np.inf))  # positive control: a warmer one
    assert _chi_square_z(drawn, wrong / wrong.sum()) > LARGEST_Z


def test_the_rear_of_a_large_vocabulary_is_drawn_too():
    """A flat teacher: one float32 sum over the vocabulary would be off by whole tokens at its end."""
    vocab = 151_936
    drawn = draw(torch.zeros(1, vocab), _numbers(3, 1, 200_000))[0].numpy()
    assert abs(drawn.mean() / (vocab - 1) - 0.5) < 5 / np.sqrt(12 * len(drawn))
    assert abs((drawn >= vocab - vocab // 8).mean() - 1 / 8) < 5 * np.sqrt(7 / 64 / len(drawn))


def test_edges():
    last = torch.full((1, 10), -torch.inf)
    last[0, 9] = -1e4
    ends = torch.tensor([[[0.0, 0.0], [1 - 2**-24, 1 - 2**-24]]])
    assert draw(last, ends).tolist() == [[9, 9]]
    assert draw(torch.full((2, 10), -torch.inf), ends.expand(2, -1, -1)).tolist() == [[0, 0]] * 2  # an empty tail
    assert draw(torch.zeros(1, 1), ends).tolist() == [[0, 0]]
    assert draw(torch.zeros(1, 10), ends).tolist() == [[0, 9]]


class RandomRow:
    def __init__(self, number, length, vocab):
        rng = np.random.default_rng(number)
        self.input_ids = rng.integers(0, vocab, length).astype(np.int32)
        self.loss_mask = np.ones(length, np.uint8)
        self.doc_starts = rng.random(length) < 0.2
        self.cursor = number + 1
        self.weights = None


class Teacher:
    """Logits that are the same whatever else is in the batch."""

    def __init__(self, vocab):
        self.vocab_size = vocab
        draw = np.random.default_rng(5)
        self.embed, self.weight = (torch.from_numpy(draw.normal(size=(vocab, 6))) for _ in range(2))

    def hidden(self, input_ids_BL, document_ids_BL):
        return (self.embed[input_ids_BL.long()] + 0.25 * document_ids_BL[..., None]).float()

    def logits(self, hidden_NH):
        return (hidden_NH.double() @ self.weight.T).float()


def _build(out, fp, count=9, batch_rows=2):
    with CacheWriter(out, fp, 3) as writer:
        done = writer.resume_state()
        rows = (RandomRow(i, fp.length, fp.vocab_size) for i in range(done.cursor or 0, count))
        build_kd_cache(Teacher(fp.vocab_size), rows, writer, ForwardSettings(batch_rows), quiet=True)


def _shards(folder):
    return [file.read_bytes() for file in sorted(folder.glob("*.safetensors"))]


def test_builds_with_another_batch_size_or_in_two_parts_store_the_same(tmp_path, fingerprint):
    arrays = optional_arrays(5, 7, tail_entropy=True)
    fp = fingerprint(vocab_size=61, top_k=4, length=17, optional_arrays=arrays, seed=3)
    _build(tmp_path / "a", fp)
    _build(tmp_path / "b", fp, batch_rows=5)
    with CacheWriter(tmp_path / "c", fp, 3) as writer:  # killed after four rows: one shard of three is kept
        rows = (RandomRow(i, fp.length, fp.vocab_size) for i in range(4))
        build_kd_cache(Teacher(61), rows, _Unfinished(writer), ForwardSettings(3), quiet=True)
        writer.stop()
    _build(tmp_path / "c", fp, batch_rows=4)
    assert _shards(tmp_path / "a") == _shards(tmp_path / "b") == _shards(tmp_path / "c")
    other = fingerprint(vocab_size=61, top_k=4, length=17, optional_arrays=arrays, seed=4)
    _build(tmp_path / "d", other)
    a, d = (KDCacheDataset(tmp_path / name).rows(range(9)) for name in "ad")
    assert (a["draw_ids"] != d["draw_ids"]).mean() > 0.3
    np.testing.assert_array_equal(a["head_ids"], d["head_ids"])


class _Unfinished:
    """A writer that is not asked to finish, as after a kill."""

    def __init__(self, writer):
        self._writer = writer

    def __getattr__(self, name):
        return getattr(self._writer, name)

    def finish(self):
        return None


def test_a_cache_holds_draws_from_tail_and_teacher(tmp_path, fingerprint):
    fp = fingerprint(vocab_size=61, top_k=4, length=9, optional_arrays=optional_arrays(400, 400))
    _build(tmp_path / "c", fp, count=3)
    verify_cache(tmp_path / "c")
    batch = KDCacheDataset(tmp_path / "c").rows(range(3))
    teacher = Teacher(61)
    hits = (batch["tail_draw_ids"][..., None] == batch["head_ids"][:, :, None]).any(-1)
    assert not hits.any()
    with torch.no_grad():
        hidden = teacher.hidden(torch.from_numpy(batch["input_ids"]), torch.from_numpy(batch["document_ids"]))
        truth = teacher.logits(hidden[:, :-1]).double().softmax(-1).numpy()
    for name in ("tail_draw_ids", "draw_ids"):
        wanted = truth.copy()
        if name == "tail_draw_ids":
            np.put_along_axis(wanted, batch["head_ids"], 0, -1)
        wanted /= wanted.sum(-1, keepdims=True)
        found = np.stack([(batch[name] == token).mean(-1) for token in range(61)], -1)
        errors = (found - wanted) / np.sqrt(np.maximum(wanted * (1 - wanted), 1e-3) / 400)
        assert abs(errors).max() < 6 and 0.5 < errors.std() < 1.1, name


def test_no_tail_gives_draws_of_zero(tmp_path, fingerprint):
    fp = fingerprint(vocab_size=7, top_k=7, length=5, optional_arrays=optional_arrays(2, 0, tail_entropy=True))
    _build(tmp_path / "c", fp, count=3)
    batch = KDCacheDataset(tmp_path / "c").rows(range(3))
    assert not batch["tail_draw_ids"].any() and np.isneginf(batch["log_tail"]).all()
    assert not batch["tail_entropy"].any()


@pytest.mark.parametrize("weights", [False, True])
def test_the_tails_entropy_is_the_draws_own_over_the_rows_targets(tmp_path, fingerprint, weights):
    arrays = optional_arrays(400, weights=weights, tail_entropy=True)
    fp = fingerprint(vocab_size=61, top_k=4, length=9, temperatures=(0.5, 1.0), optional_arrays=arrays)
    documents = np.linspace(0, 2, 9).astype(np.float32)
    rows = [RandomRow(i, 9, 61) for i in range(3)]
    for row in rows:
        row.weights = documents if weights else None
        row.loss_mask = np.arange(9) % 4 != row.cursor
    with CacheWriter(tmp_path / "c", fp, 3) as writer:
        build_kd_cache(Teacher(61), rows, writer, ForwardSettings(2), quiet=True)
    verify_cache(tmp_path / "c")
    dataset, teacher = KDCacheDataset(tmp_path / "c"), Teacher(61)
    batch = dataset.rows([0, 1, 2, -1])
    assert batch["tail_entropy"].shape == (4, 1) and batch["tail_entropy"][3] == 0
    with torch.no_grad():
        hidden = teacher.hidden(torch.from_numpy(batch["input_ids"]), torch.from_numpy(batch["document_ids"]))
        log_t = teacher.logits(hidden[:, :-1]).double().log_softmax(-1).numpy()
    tail = np.exp(log_t)
    np.put_along_axis(tail, batch["head_ids"], 0, -1)
    own = -tail.sum(-1) * np.take_along_axis(log_t, batch["tail_draw_ids"], -1).mean(-1)
    whole = -(tail * log_t).sum(-1)
    counted = batch["target_mask"] * (documents[1:] if weights else 1.0)
    assert not batch["target_mask"].all()  # positive control: the mask matters
    for row in range(3):
        wanted, analytic = ((values[row] * counted[row]).sum() / counted[row].sum() for values in (own, whole))
        assert batch["tail_entropy"][row, 0] == pytest.approx(wanted, rel=1e-5)
        assert wanted == pytest.approx(analytic, rel=0.05)  # which is its mean over all draws
    dataset.optional = []
    assert "tail_entropy" not in dataset.rows([0])


# The random numbers of a row: uniform, and decided by seed, name and tokens alone.


class TokenRow:
    def __init__(self, ids, starts=None):
        self.input_ids = np.array(ids, np.int32)
        self.doc_starts = np.zeros(len(ids), bool) if starts is None else np.array(starts)


def test_the_same_row_anywhere_has_the_same_numbers():
    rows = [TokenRow([number, 5, 7]) for number in range(4)]
    whole = row_uniforms(3, "draws", rows, (5, 3, 6))
    assert whole.shape == (5, 2, 6, 2) and whole.dtype == np.float32 and not whole[4].any()
    for place, row in enumerate(rows):
        np.testing.assert_array_equal(row_uniforms(3, "draws", [row], (1, 3, 6))[0], whole[place])
    others = [
        row_uniforms(4, "draws", rows[:1], (1, 3, 6)),
        row_uniforms(3, "tail_draws", rows[:1], (1, 3, 6)),
        row_uniforms(3, "draws", [TokenRow([0, 5, 7], [0, 1, 0])], (1, 3, 6)),
        whole[1:2],
    ]
    assert all((other != whole[:1]).all() for other in others)


def test_known_numbers():
    """A resumed cache of another year, with another NumPy, goes on with the same draws."""
    found = row_uniforms(0, "draws", [TokenRow([1, 2])], (1, 2, 2))[0, 0] * 2**24
    assert found.tolist() == KNOWN


def test_uniform():
    numbers = row_uniforms(0, "draws", [TokenRow(range(257))], (1, 257, 200)).reshape(-1).astype(np.float64)
    assert numbers.min() >= 0 and numbers.max() < 1
    counts = np.bincount((numbers * 64).astype(int), minlength=64)
    expected = len(numbers) / 64
    assert abs(((counts - expected) ** 2 / expected).sum() - 63) < 5 * np.sqrt(126)
    assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 5 / np.sqrt(len(numbers))
