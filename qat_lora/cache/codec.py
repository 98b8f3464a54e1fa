"""How rows become bytes and back: packed ids, fp16 values, row checksums, any k ≤ K.

An id below 2^18 is kept as 16 low bits in one array and 2 high bits, four to a byte, in another: 18 bits
against 32, still mapped and sliced without unpacking what is not asked for. Delta-coded or compressed ids would be
smaller still and would lose that. A value is the logit minus the position's largest, in fp16, where its rounding
costs a mean KL below 1e-7 nats on our teachers (`qat-lora cache audit`); bfloat16, of the same size, has an eighth of
its precision.

Decoding looks bits up in tables, four ids at a time: shifts and masks over whole arrays read every number several
times and are six times slower.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from qat_lora.cache.format import PACKED_VOCAB, SHORT_VOCAB, ArraySpec
from qat_lora.cache.records import Fingerprint
from qat_lora.errors import CacheError
from qat_lora.types import Batch, temperature_key

Arrays = dict[str, np.ndarray]
_FP16_LOWEST = -65504.0
_PAIRS = (np.arange(256)[:, None] >> np.array([0, 2, 4, 6])) & 3
"""The four 2-bit numbers in a byte, lowest bits first."""
_HIGH_IDS = (_PAIRS << 16).astype(np.int32)
"""What a byte of `ids_hi` adds to four ids."""
_FP16 = np.arange(1 << 16, dtype="<u2").view("<f2").astype(np.float32)
"""Every fp16 number by its bits."""


def pack_ids(ids: np.ndarray, vocab_size: int) -> Arrays:
    """Return the array or arrays that hold head ids [..., K] of a vocabulary.

    Raises:
        CacheError: an id outside the vocabulary.
    """
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        raise CacheError(f"head ids: from {ids.min()} to {ids.max()}; allowed: 0 to vocab_size - 1 = {vocab_size - 1}")
    if vocab_size > PACKED_VOCAB:
        return {"ids": ids.astype("<i4")}
    arrays = {"ids_lo": (ids & 0xFFFF).astype("<u2")}
    if vocab_size > SHORT_VOCAB:
        high = (ids >> 16).astype(np.uint8)
        missing = -ids.shape[-1] % 4
        high = np.pad(high, [(0, 0)] * (ids.ndim - 1) + [(0, missing)])
        high = high.reshape(*ids.shape[:-1], -1, 4)
        arrays["ids_hi"] = high[..., 0] | high[..., 1] << 2 | high[..., 2] << 4 | high[..., 3] << 6
    return arrays


def unpack_ids(arrays: Mapping[str, np.ndarray], k: int, out: np.ndarray | None = None) -> np.ndarray:
    """Return the first k head ids [..., k] of every position as int32, in `out` (contiguous) if it is given."""
    low = arrays["ids" if "ids" in arrays else "ids_lo"][..., :k]
    ids = np.empty(low.shape, np.int32) if out is None else out
    if "ids_hi" not in arrays:
        np.copyto(ids, low)
        return ids
    packed = arrays["ids_hi"][..., : -(-k // 4)]
    if k % 4:
        ids[...] = np.take(_HIGH_IDS, packed, axis=0, mode="clip").reshape(*packed.shape[:-1], -(-k // 4) * 4)[..., :k]
    else:
        np.take(_HIGH_IDS, packed, axis=0, mode="clip", out=ids.reshape(*packed.shape, 4))
    ids |= low
    return ids


def encode_rows(rows: Mapping[str, np.ndarray], fingerprint: Fingerprint) -> Arrays:
    """Turn n rows into the arrays of a shard, checksums included.

    Args:
        rows: `input_ids` int [n, L], `loss_mask` [n, L] (0 or 1), `doc_starts` bool [n, L], `head_ids` int
            [n, L-1, K] and `head_logits` float [n, L-1, K] (logit minus maximum, rank order), `lse` and
            `log_tail` float32 [n, L-1] for every temperature.
        fingerprint: what the cache holds.

    Raises:
        CacheError: an array of another shape, an id outside the vocabulary, a teacher that gave NaN.
    """
    length, top_k = fingerprint.length, fingerprint.top_k
    n = len(rows["input_ids"])
    shapes: dict[str, tuple[int, ...]] = {name: (n, length) for name in ("input_ids", "loss_mask", "doc_starts")}
    shapes |= {name: (n, length - 1, top_k) for name in ("head_ids", "head_logits")}
    keys = [temperature_key(name, t) for t in fingerprint.temperatures for name in ("lse", "log_tail")]
    shapes |= {name: (n, length - 1) for name in keys}
    for name, shape in shapes.items():
        if name not in rows or rows[name].shape != shape:
            given = rows[name].shape if name in rows else "absent"
            raise CacheError(f"{name}: shape {given}; this cache needs {shape}")
    for name in keys:
        _check_finite(name, rows[name])
    if rows["input_ids"].min(initial=0) < 0:
        raise CacheError("input_ids: a negative token id; allowed: 0 and up")
    arrays: Arrays = {
        "input_ids": rows["input_ids"].astype("<i4"),
        "loss_mask": (rows["loss_mask"] != 0).astype(np.uint8),
        "doc_starts": np.packbits(rows["doc_starts"] != 0, axis=1, bitorder="little"),
        "val": np.maximum(rows["head_logits"], _FP16_LOWEST).astype("<f2"),
        **{name: rows[name].astype("<f4") for name in keys},
        **pack_ids(rows["head_ids"], fingerprint.vocab_size),
    }
    arrays["row_crc32"] = row_checksums(arrays, fingerprint.arrays)
    return {spec.name: np.ascontiguousarray(arrays[spec.name]) for spec in fingerprint.arrays}


def _check_finite(name: str, values: np.ndarray) -> None:
    bad = np.isnan(values) | (np.isposinf(values) if name.startswith("log_tail") else np.isinf(values))
    if bad.any():
        row, position = np.argwhere(bad)[0]
        raise CacheError(
            f"{name}: the teacher's logits at row {row}, position {position} are NaN or infinite; allowed: finite "
            "logits; run the teacher in bfloat16 or float32 (float16 overflows), or check its weights"
        )


def row_checksums(arrays: Mapping[str, np.ndarray], table: Sequence[ArraySpec]) -> np.ndarray:
    """Return the CRC-32 of each row: over its bytes in every array, in file order, `row_crc32` left out."""
    parts = [np.ascontiguousarray(arrays[spec.name]) for spec in table if spec.name != "row_crc32"]
    sums = np.zeros(len(parts[0]), "<u4")
    for row in range(len(sums)):
        crc = 0
        for part in parts:
            crc = zlib.crc32(part[row].data, crc)
        sums[row] = crc
    return sums


def empty_batch(count: int, fingerprint: Fingerprint, k: int, temperatures: Sequence[float]) -> Batch:
    """Return the arrays of a batch, not filled in."""
    length = fingerprint.length
    positions = (count, length - 1)
    batch: dict[str, Any] = {
        "input_ids": np.empty((count, length), np.int32),
        "document_ids": np.empty((count, length), np.int32),
        "target_mask": np.empty(positions, np.bool_),
        "head_ids": np.empty((*positions, k), np.int32),
        "head_logits": np.empty((*positions, k), np.float32),
    }
    for temperature in temperatures:
        for name in ("lse", "log_tail"):
            batch[temperature_key(name, temperature)] = np.empty(positions, np.float32)
    return batch


def decode_row(
    arrays: Mapping[str, np.ndarray], fingerprint: Fingerprint, k: int, temperatures: Sequence[float], out: Batch
) -> None:
    """Write one row with the first k of K head entries into `out`: views of a batch, without the row dimension.

    Straight from the mapped file to its place: gathering rows first, then decoding them, touches three times the
    fresh memory, and the page faults of that cost more than the decoding.

    With k < K the dropped entries join the tail, at every temperature, so that head and tail still sum to one.
    """
    starts = np.unpackbits(arrays["doc_starts"], count=fingerprint.length, bitorder="little")
    np.copyto(out["input_ids"], arrays["input_ids"])
    np.cumsum(starts, dtype=np.int32, out=out["document_ids"])
    np.not_equal(arrays["loss_mask"][1:], 0, out=out["target_mask"])
    unpack_ids(arrays, k, out["head_ids"])
    np.take(_FP16, arrays["val"][..., :k].view("<u2"), mode="clip", out=out["head_logits"])
    top_k = fingerprint.top_k
    dropped = arrays["val"][..., k:].astype(np.float64) if k < top_k else None
    for temperature in temperatures:
        lse_key, tail_key = (temperature_key(name, temperature) for name in ("lse", "log_tail"))
        lse, log_tail = arrays[lse_key], arrays[tail_key]
        if dropped is not None:
            # Both in log space: a tail of 1e-30 next to a dropped 1e-3 must not be rounded away first.
            log_tail = np.logaddexp(log_tail.astype(np.float64), _logsumexp(dropped / temperature) - lse)
        out[lse_key][...], out[tail_key][...] = lse, log_tail


def _logsumexp(values: np.ndarray) -> np.ndarray:
    top = values[..., 0]  # rank order: the first is the largest
    return top + np.log(np.exp(values - top[..., None]).sum(axis=-1))


def mask_row(fingerprint: Fingerprint, k: int, temperatures: Sequence[float], out: Batch) -> None:
    """Write a row that no loss counts, with a uniform teacher so that masked arithmetic stays finite."""
    vocab_size = fingerprint.vocab_size
    for name in ("input_ids", "document_ids", "target_mask", "head_logits"):
        out[name][...] = 0
    out["head_ids"][...] = np.arange(k)
    for temperature in temperatures:
        out[temperature_key("lse", temperature)][...] = np.log(vocab_size)
        tail = np.log1p(-k / vocab_size) if k < vocab_size else -np.inf
        out[temperature_key("log_tail", temperature)][...] = tail
