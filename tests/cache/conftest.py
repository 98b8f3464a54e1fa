"""Makes small caches: `fingerprint(**changes)`, `random_rows(...)`, `write_cache(...)`."""

import numpy as np
import pytest

from qat_lora.cache.build.writer import CacheWriter
from qat_lora.cache.format.records import Fingerprint
from qat_lora.types import temperature_key


def _fingerprint(**changes):
    values = {
        "tokenizer_sha256": "11" * 32,
        "vocab_size": 31,
        "teacher": "toy",
        "teacher_sha256": "22" * 32,
        "chat_template_sha256": None,
        "dataset": "numbers",
        "packing": "none",
        "length": 5,
        "top_k": 3,
    }
    return Fingerprint(**{**values, **changes})


def _random_rows(fp, count, seed=0):
    """Rows of a random teacher, computed densely in float64; row i begins with token i."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(count, fp.length - 1, fp.vocab_size)) * 4
    order = np.argsort(-logits, axis=-1, kind="stable")[..., : fp.top_k]
    shifted = logits - logits.max(axis=-1, keepdims=True)
    rows = {
        "input_ids": rng.integers(0, fp.vocab_size, (count, fp.length)).astype(np.int32),
        "loss_mask": rng.integers(0, 2, (count, fp.length)).astype(np.uint8),
        "doc_starts": rng.integers(0, 3, (count, fp.length)) == 0,
        "head_ids": order.astype(np.int32),
        "head_logits": np.take_along_axis(shifted, order, -1).astype(np.float32),
    }
    rows["input_ids"][:, 0] = np.arange(count)
    for name, size in (("tail_draw_ids", fp.contents.tail_draws), ("draw_ids", fp.contents.draws)):
        if size:
            rows[name] = rng.integers(0, fp.vocab_size, (count, fp.length - 1, size)).astype(np.int32)
    for name in fp.contents.entropies:
        rows[name] = rng.random((count, 1), np.float32)
    tail = shifted.copy()
    np.put_along_axis(tail, order, -np.inf, -1)
    for temperature in fp.temperatures:
        lse = np.log(np.exp(shifted / temperature).sum(-1))
        with np.errstate(divide="ignore"):
            log_tail = np.log(np.exp(tail / temperature).sum(-1)) - lse
        rows[temperature_key("lse", temperature)] = lse.astype(np.float32)
        rows[temperature_key("log_tail", temperature)] = log_tail.astype(np.float32)
    return rows


def _write_cache(path, fp, rows, shard_rows=3, eval_rows=None, batch_rows=2):
    with CacheWriter(path, fp, shard_rows) as writer:
        for split, source in (("eval", eval_rows), ("train", rows)):
            if source is None:
                continue
            for start in range(0, len(source["input_ids"]), batch_rows):
                part = {name: array[start : start + batch_rows] for name, array in source.items()}
                writer.append(part, [{"row": start + i + 1} for i in range(len(part["input_ids"]))], split)
    return path


@pytest.fixture
def fingerprint():
    return _fingerprint


@pytest.fixture
def random_rows():
    return _random_rows


@pytest.fixture
def write_cache():
    return _write_cache
