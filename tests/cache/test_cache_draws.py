"""Drawn tokens: their distribution against float64, and that they depend on seed and row alone."""

import numpy as np
import pytest
import torch

from qat_lora.cache.build.builder import ForwardSettings, build_kd_cache
from qat_lora.cache.build.topk import draw
from qat_lora.cache.build.writer import CacheWriter
from qat_lora.cache.format.records import optional_arrays
from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.cache.tools.verify import verify_cache

LARGEST_Z = 5.0


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
    logits[::3] = -np.inf  # as a head that is cut out
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


class Row:
    def __init__(self, number, length, vocab):
        rng = np.random.default_rng(number)
        self.input_ids = rng.integers(0, vocab, length).astype(np.int32)
        self.loss_mask = np.ones(length, np.uint8)
        self.doc_starts = rng.random(length) < 0.2
        self.cursor = number + 1


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
        rows = (Row(i, fp.length, fp.vocab_size) for i in range(done.cursor or 0, count))
        build_kd_cache(Teacher(fp.vocab_size), rows, writer, ForwardSettings(batch_rows), quiet=True)


def _shards(folder):
    return [file.read_bytes() for file in sorted(folder.glob("*.safetensors"))]


def test_builds_with_another_batch_size_or_in_two_parts_store_the_same(tmp_path, fingerprint):
    fp = fingerprint(vocab_size=61, top_k=4, length=17, optional_arrays=optional_arrays(5, 7), seed=3)
    _build(tmp_path / "a", fp)
    _build(tmp_path / "b", fp, batch_rows=5)
    with CacheWriter(tmp_path / "c", fp, 3) as writer:  # killed after four rows: one shard of three is kept
        rows = (Row(i, fp.length, fp.vocab_size) for i in range(4))
        build_kd_cache(Teacher(61), rows, _Unfinished(writer), ForwardSettings(3), quiet=True)
        writer.stop()
    _build(tmp_path / "c", fp, batch_rows=4)
    assert _shards(tmp_path / "a") == _shards(tmp_path / "b") == _shards(tmp_path / "c")
    other = fingerprint(vocab_size=61, top_k=4, length=17, optional_arrays=optional_arrays(5, 7), seed=4)
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
    fp = fingerprint(vocab_size=7, top_k=7, length=5, optional_arrays=optional_arrays(2, 0))
    _build(tmp_path / "c", fp, count=3)
    batch = KDCacheDataset(tmp_path / "c").rows(range(3))
    assert not batch["tail_draw_ids"].any() and np.isneginf(batch["log_tail"]).all()
