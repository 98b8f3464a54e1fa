"""The overlap of a text with a cache, against sets of tuples; streamed, and over shard and row ends."""

import numpy as np
import pytest

from qat_lora.cache.tools import overlap as room
from qat_lora.cache.tools.overlap import overlap, summary
from qat_lora.data.packing import PackedRow
from qat_lora.errors import CacheError

LENGTH = 24


def row(ids, starts=(0,), counted=None):
    ids = np.asarray(ids, np.int32)
    mask = np.ones(len(ids), np.uint8)
    mask[list(starts)] = 0
    begins = np.zeros(len(ids), np.bool_)
    begins[list(starts)] = True
    return PackedRow(ids, mask if counted is None else np.asarray(counted, np.uint8), begins, {})


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """Three shards of rows of few different tokens, so that short runs repeat."""
    draw = np.random.default_rng(0)
    shards = [[row(draw.integers(0, 5, LENGTH), (0, 9)) for _ in range(n)] for n in (4, 1, 3)]

    class Held:
        tokenizer_sha256 = "t"

    class Manifest:
        fingerprint = Held

    def rows(place, manifest):
        for shard in shards:
            yield np.stack([r.input_ids for r in shard]), np.stack([r.doc_starts for r in shard])

    monkeypatch.setattr(room, "read_manifest", lambda path: Manifest)
    monkeypatch.setattr(room, "_cache_rows", rows)
    return [r for shard in shards for r in shard]


def runs(r, n):
    documents = np.cumsum(r.doc_starts)
    return {
        i: tuple(r.input_ids[i : i + n].tolist())
        for i in range(len(r.input_ids) - n + 1)
        if documents[i] == documents[i + n - 1]
    }


@pytest.mark.parametrize("n", [1, 3, 4, 6, 24, 25])
@pytest.mark.parametrize("at_once", [1, 3, 1024])
def test_as_sets_of_runs_say(cache, n, at_once, monkeypatch):
    monkeypatch.setattr(room, "_ROWS_AT_ONCE", at_once)
    draw = np.random.default_rng(7)
    texts = {
        "new": [row(draw.integers(0, 5, LENGTH), (0, 15)) for _ in range(5)],
        "old": [cache[2], cache[6]],
        "other": [row(draw.integers(100, 105, LENGTH))],
    }
    held = {gram for r in cache for gram in runs(r, n).values()}
    found = overlap("c", texts, "t", n)
    for name, rows in texts.items():
        covered = counted = 0
        for r in rows:
            seen = {j for i, gram in runs(r, n).items() if gram in held for j in range(i, i + n)}
            counted += int(r.loss_mask.sum())
            covered += sum(1 for j in seen if r.loss_mask[j])
        assert found["by_text"][name] == pytest.approx(covered / counted), name
    assert found["by_text"]["other"] == 0 and found["cache_tokens"] == 8 * LENGTH
    assert found["share"] == found["seen"] / found["tokens"]
    if n in (3, 4, 6):
        assert found["by_text"]["old"] == 1 > found["by_text"]["new"]


def test_padding_and_text_without_runs(cache):
    padded = row([7] * 4 + [0] * 20, (0, 4), [0, 1, 1, 1] + [0] * 20)
    assert overlap("c", {"t": [padded]}, "t")["seen"] == 0
    assert overlap("c", {"t": [row([1, 2, 3])]}, "t") | {"cache_tokens": 0} == {
        "run": 13,
        "tokens": 2,
        "seen": 0,
        "share": 0.0,
        "by_text": {"t": 0.0},
        "cache_tokens": 0,
    }


def test_another_tokenizer_is_refused(cache):
    with pytest.raises(CacheError, match="another tokenizer"):
        overlap("c", {"t": [row([1, 2])]}, "u")


def test_what_is_said(cache):
    quiet = summary(overlap("c", {"t": [row(range(50, 74))]}, "t"))
    assert quiet.startswith("0.0% of the 23 evaluation tokens lie in a run of 13")
    loud = summary(overlap("c", {"mine": [cache[0]], "other": [row(range(50, 74))]}, "t", 5))
    assert loud.startswith("warning: ") and "mine 100.0%" in loud and "other 0.0%" in loud
