"""How rows become bytes and back: packed ids, fp16 or uint8 values, row checksums, any k ≤ K.

An id below 2^18 is kept as 16 low bits in one array and 2 high bits, four to a byte, in another, and can be sliced
without unpacking the rest; delta coding or compression would be smaller and lose that. A value is the logit minus the
position's largest, in fp16, whose rounding costs a mean KL below 1e-7 nats on our teachers (`qat-lora cache audit`);
bfloat16 has an eighth of its precision, `uint8` takes half. Decoding looks bits up in tables, four ids at a time:
shifts and masks over whole arrays read every number several times and are six times slower.
"""

from collections.abc import Container, Mapping, Sequence

import numpy as np

try:
    from isal.isal_zlib import crc32  # at 36 GB/s where zlib's own takes 2.4: checking a row costs next to nothing
except ImportError:  # a machine for which there is no build of it; the sums are the same
    from zlib import crc32

from qat_lora.cache.format.layout import PACKED_VOCAB, SHORT_VOCAB, ArraySpec, Contents
from qat_lora.cache.format.records import Fingerprint
from qat_lora.errors import CacheError
from qat_lora.types import Batch, temperature_key

Arrays = Mapping[str, np.ndarray]
_FP16_LARGEST = np.float32(65504.0)
LARGEST_RANGE = 64.0  # nats below the top entry at which `uint8` values end at the latest
DEEPEST = 20.0
"""The same at temperature 1, e^-20 = 2e-9 being as good as nothing; it grows with the largest temperature. With one
entry at -64 and the range up to it, the others would share half of the codes, for a KL of 3e-4 instead of 7e-5."""
_ROUNDING = 1e-3  # how far float32 sums may be from the truth: `lse` below 0, `log_tail` above it
_DEPTHS = (0.0 - (np.arange(256) / 255) ** 1.5).astype(np.float32)  # part of the range that a `uint8` code stands for
_CODE_ENDS = ((np.arange(255) + 0.5) / 255) ** 1.5  # where a code ends, likewise: half way in codes, not in nats
DRAWN = {"tail_draws": "tail_draw_ids", "draws": "draw_ids"}  # lists of drawn tokens: name in a shard, key in a batch
_LISTS = {"ids": "head_ids", **DRAWN}  # the same for all lists of tokens
OPTIONAL = (*DRAWN.values(), "teacher_hidden")  # keys of a batch that only caches built for them have
_HIGH_IDS = ((np.arange(256)[:, None] >> np.array([0, 2, 4, 6]) & 3) << 16).astype(np.int32)
"""What a byte of `ids_hi`, four 2-bit numbers, lowest bits first, adds to four ids."""
_FP16 = np.arange(1 << 16, dtype="<u2").view("<f2").astype(np.float32)  # every fp16 number by its bits


def position_arrays(held: Contents) -> dict[str, tuple[type[np.generic], tuple[int, ...]]]:
    """Return the arrays of a batch that a cache fills: the type and the shape at one position, by key."""
    arrays: dict[str, tuple[type[np.generic], tuple[int, ...]]]
    arrays = {_LISTS[name]: (np.int32, (size,)) for name, size in held.id_lists.items()}
    if held.top_k:
        arrays["head_logits"] = (np.float32, (held.top_k,))
    if held.weights:
        arrays["weights"] = (np.float32, ())
    if held.hidden:
        arrays["teacher_hidden"] = (np.float16, (held.hidden,))
    return arrays | {name: (np.float32, ()) for name in held.sums}


def pack_ids(ids: np.ndarray, vocab_size: int, name: str = "ids") -> Arrays:
    """Return what holds token ids [..., K], named `name` in the shard; CacheError for an id outside the vocabulary."""
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        label = "head ids" if name == "ids" else name
        raise CacheError(f"{label}: from {ids.min()} to {ids.max()}; allowed: 0 to vocab_size - 1 = {vocab_size - 1}")
    if vocab_size > PACKED_VOCAB:
        return {name: ids.astype("<i4")}
    arrays = {f"{name}_lo": (ids & 0xFFFF).astype("<u2")}
    if vocab_size > SHORT_VOCAB:
        high = np.pad((ids >> 16).astype(np.uint8), [(0, 0)] * (ids.ndim - 1) + [(0, -ids.shape[-1] % 4)])
        high = high.reshape(*ids.shape[:-1], -1, 4)
        arrays[f"{name}_hi"] = high[..., 0] | high[..., 1] << 2 | high[..., 2] << 4 | high[..., 3] << 6
    return arrays


def unpack_ids(arrays: Arrays, k: int, out: np.ndarray | None = None, name: str = "ids") -> np.ndarray:
    """Return the first k ids [..., k] of every position as int32, in `out` (contiguous) if it is given."""
    low = arrays[name if name in arrays else f"{name}_lo"][..., :k]
    ids = np.empty(low.shape, np.int32) if out is None else out
    if f"{name}_hi" not in arrays:
        np.copyto(ids, low)
        return ids
    packed = arrays[f"{name}_hi"][..., : -(-k // 4)]
    if k % 4:
        ids[...] = np.take(_HIGH_IDS, packed, axis=0, mode="clip").reshape(*packed.shape[:-1], -(-k // 4) * 4)[..., :k]
    else:
        np.take(_HIGH_IDS, packed, axis=0, mode="clip", out=ids.reshape(*packed.shape, 4))
    ids |= low
    return ids


def encode_values(head_logits: np.ndarray, value_dtype: str, temperature: float = 1.0) -> Arrays:
    """Return the array or arrays that hold top-K values [..., K], at most 0 and falling.

    `uint8` values are codes c of -R·(c/255)^1.5 with one fp16 range R a position: the top entry is exactly 0, and the
    steps grow with depth, slower than the probabilities fall. With ranges from 4 to 25 nats this costs a KL of about
    1e-5; even steps (c/255) cost up to twice that where ranges are wide, square-law ones where they are narrow. The
    losses renormalise, so top K and tail still sum to one. `temperature` is the largest at which they are used.
    """
    if value_dtype == "float16":
        return {"val": np.maximum(head_logits, -_FP16_LARGEST).astype("<f2")}
    deepest = min(LARGEST_RANGE, DEEPEST * max(1.0, temperature))
    depths = np.minimum(-head_logits.astype(np.float64), deepest)
    ranges = depths[..., -1].astype("<f2")
    parts = depths / np.maximum(ranges.astype(np.float64), 1e-30)[..., None]
    return {"val": np.searchsorted(_CODE_ENDS, parts).astype(np.uint8), "val_range": ranges}


def decode_values(arrays: Arrays, k: int, out: np.ndarray | None = None) -> np.ndarray:
    """Return the first k values [..., k] of every position as float32, in `out` (contiguous) if it is given."""
    stored = arrays["val"][..., :k]
    values = np.empty(stored.shape, np.float32) if out is None else out
    if "val_range" not in arrays:
        return np.take(_FP16, stored.view("<u2"), mode="clip", out=values)
    np.take(_DEPTHS, stored, mode="clip", out=values)
    values *= arrays["val_range"].astype(np.float32)[..., None]
    return values


def encode_rows(rows: Arrays, fingerprint: Fingerprint) -> Arrays:
    """Turn n rows into the arrays of a shard, checksums included.

    They are `input_ids` int [n, L], `loss_mask` [n, L] (0 or 1), `doc_starts` bool [n, L], `head_ids` int [n, L-1, K]
    and `head_logits` float [n, L-1, K] (logit minus maximum, rank order), `lse` and `log_tail` float32 [n, L-1] for
    every temperature; if held, `tail_draw_ids` and `draw_ids` int [n, L-1, D], `entropy` and `tail_entropy` float
    [n, 1], and `teacher_hidden` float [n, L-1, H].

    CacheError: an array of another shape, an id outside the vocabulary, NaN, hidden states beyond float16.
    """
    held = fingerprint.contents
    n = len(rows["input_ids"])
    shapes: dict[str, tuple[int, ...]] = {name: (n, held.length) for name in ("input_ids", "loss_mask", "doc_starts")}
    shapes |= {name: (n, held.length - 1, *shape) for name, (_, shape) in position_arrays(held).items()}
    shapes |= {name: (n, 1) for name in held.entropies}
    for name, shape in shapes.items():
        if name not in rows or rows[name].shape != shape:
            given = rows[name].shape if name in rows else "absent"
            raise CacheError(f"{name}: shape {given}; this cache needs {shape}")
    for name in held.sums:
        values = rows[name]
        bad = np.isnan(values) | (np.isposinf(values) if name.startswith("log_tail") else np.isinf(values))
        if bad.any():
            row, position = np.argwhere(bad)[0]
            what = f"the teacher's logits at row {row}, position {position} are NaN or infinite; allowed: finite logits"
            remedy = "run the teacher in bfloat16 or float32 (float16 overflows), or check its weights"
            raise CacheError(f"{name}: {what}; {remedy}")
    ids = rows["input_ids"]
    if ids.min(initial=0) < 0 or ids.max(initial=0) >= held.vocab_size:
        raise CacheError(f"input_ids: from {ids.min()} to {ids.max()}; allowed: 0 to {held.vocab_size - 1}")
    arrays: dict[str, np.ndarray] = {
        "input_ids": ids.astype("<i4"),
        "loss_mask": (rows["loss_mask"] != 0).astype(np.uint8),
        "doc_starts": np.packbits(rows["doc_starts"] != 0, axis=1, bitorder="little"),
        **{name: rows[name].astype("<f4") for name in held.sums},
    }
    if held.top_k:
        arrays |= encode_values(rows["head_logits"], held.value_dtype, max(held.temperatures))
    for name in held.id_lists:
        ids = np.sort(rows[_LISTS[name]], axis=-1) if held.lzma and name in DRAWN else rows[_LISTS[name]]
        arrays |= pack_ids(ids, held.vocab_size, name)
    if held.weights:
        if not ((rows["weights"] >= 0) & (rows["weights"] <= _FP16_LARGEST)).all():
            raise CacheError("weights: some are negative, NaN or too large; allowed: 0 to 65,504 (float16)")
        arrays["weights"] = rows["weights"].astype("<f2")
    if held.hidden:
        arrays["hidden"] = _half(rows["teacher_hidden"])
    arrays |= {name: rows[name].astype("<f4") for name in held.entropies}
    arrays["row_crc32"] = row_checksums(arrays, fingerprint.arrays)
    return {spec.name: np.ascontiguousarray(arrays[spec.name]) for spec in fingerprint.arrays}


def _half(hidden: np.ndarray) -> np.ndarray:
    too_large = ~(np.abs(hidden) <= _FP16_LARGEST)
    if too_large.any():
        row, position, place = np.argwhere(too_large)[0]
        state = f"row {row}, position {position} has the value {hidden[row, position, place]:g}"
        remedy = "build the cache without --hidden (--tail-draws 8 also makes the loss unbiased)"
        raise CacheError(f"hidden: the teacher's last state at {state}; allowed: -65,504 to 65,504 (float16); {remedy}")
    return hidden.astype("<f2")


def row_checksums(arrays: Arrays, table: Sequence[ArraySpec]) -> np.ndarray:
    """Return the CRC-32 of each row: over its bytes in every array, in file order, `row_crc32` left out."""
    parts = [np.ascontiguousarray(arrays[spec.name]) for spec in table if spec.name != "row_crc32"]
    sums = np.zeros(len(parts[0]), "<u4")
    for row in range(len(sums)):
        crc = 0
        for part in parts:
            crc = crc32(part[row].data, crc)
        sums[row] = crc
    return sums


def empty_batch(
    count: int, fingerprint: Fingerprint, k: int, temperatures: Sequence[float], optional: Container[str] = OPTIONAL
) -> Batch:
    """Return the arrays of a batch, not filled in; of the optional ones that there are, those named in `optional`.

    `tail_entropy` comes with the tail draws, without which it says nothing.
    """
    held = fingerprint.contents._replace(top_k=k, temperatures=temperatures)
    entropies = [name for name in held.entropies if name != "tail_entropy" or "tail_draw_ids" in optional]
    wanted = {name: of for name, of in position_arrays(held).items() if name not in OPTIONAL or name in optional}
    return {
        "input_ids": np.empty((count, held.length), np.int32),
        "document_ids": np.empty((count, held.length), np.int32),
        "target_mask": np.empty((count, held.length - 1), np.bool_),
        **{name: np.empty((count, 1), np.float32) for name in entropies},
        **{name: np.empty((count, held.length - 1, *shape), kind) for name, (kind, shape) in wanted.items()},
    }


def decode_row(arrays: Arrays, fingerprint: Fingerprint, k: int, temperatures: Sequence[float], out: Batch) -> None:
    """Write one row with the first k of K entries into `out`: views of a batch, without the row dimension.

    Gathering rows first and then decoding them touches three times the fresh memory, and its page faults cost more than
    the decoding. With k < K the dropped entries join the tail, at every temperature, so that both still sum to one.
    """
    starts = np.unpackbits(arrays["doc_starts"], count=fingerprint.length, bitorder="little")
    np.copyto(out["input_ids"], arrays["input_ids"])
    np.cumsum(starts, dtype=np.int32, out=out["document_ids"])
    np.not_equal(arrays["loss_mask"][1:], 0, out=out["target_mask"])
    for name, key in _LISTS.items():
        if key in out:
            unpack_ids(arrays, out[key].shape[-1], out[key], name)
    for name in {"weights", "entropy", "tail_entropy"} & out.keys():
        np.copyto(out[name], arrays[name])
    if "teacher_hidden" in out:
        np.copyto(out["teacher_hidden"], arrays["hidden"])
    top_k = fingerprint.top_k
    if not top_k:
        return
    values = decode_values(arrays, top_k, out["head_logits"] if k == top_k else None)
    dropped = values[:, k:].astype(np.float64)
    if k < top_k:
        np.copyto(out["head_logits"], values[:, :k])
    for temperature in temperatures:
        lse_key, tail_key = (temperature_key(name, temperature) for name in ("lse", "log_tail"))
        lse, log_tail = arrays[lse_key], arrays[tail_key]
        if k < top_k:  # both in log space: a tail of 1e-30 next to a dropped 1e-3 must not be rounded away
            scaled = dropped / temperature
            top = scaled[:, 0]  # rank order: the first is the largest
            log_dropped = top + np.log(np.exp(scaled - top[:, None]).sum(axis=-1))
            log_tail = np.logaddexp(log_tail.astype(np.float64), log_dropped - lse)
        out[lse_key][...], out[tail_key][...] = lse, log_tail


def mask_row(fingerprint: Fingerprint, k: int, temperatures: Sequence[float], out: Batch) -> None:
    """Write a row that no loss counts, with a uniform teacher so that masked arithmetic stays finite."""
    for array in out.values():
        array[...] = 0
    if not fingerprint.top_k:
        return
    vocab_size = fingerprint.vocab_size
    tail = np.log1p(-k / vocab_size) if k < vocab_size else -np.inf
    out["head_ids"][...] = np.arange(k)
    for temperature in temperatures:
        out[temperature_key("lse", temperature)][...] = np.log(vocab_size)
        out[temperature_key("log_tail", temperature)][...] = tail


def strange_ids(row: Arrays, vocab_size: int) -> str | None:
    """Say which token ids of a decoded row are outside the vocabulary; None where none are."""
    for name in ("input_ids", *_LISTS.values()):
        if name in row and row[name].view(np.uint32).max() >= vocab_size:  # as such, negative ones are large
            return f"{name} from {row[name].min()} to {row[name].max()}; allowed: 0 to {vocab_size - 1}"
    return None


def promises(part: Arrays, fingerprint: Fingerprint) -> dict[str, bool]:
    """Return the rules for values, which find a writer that was wrong, and whether some rows of a shard keep them."""
    held = fingerprint.contents
    kept = {"loss_mask of 0 and 1": bool((part["loss_mask"] <= 1).all())}
    for name, entries in {"input_ids": 0, **held.id_lists}.items():
        ids = unpack_ids(part, entries, name=name) if entries else part[name]
        text = "head ids" if name == "ids" else name
        kept[f"{text} inside the vocabulary"] = bool(ids.min() >= 0 and ids.max() < held.vocab_size)
    if held.top_k:
        kept["values falling from 0 in rank order"] = _falls(part["val"])
        lses, tails = ([part[name] for name in held.sums[first::2]] for first in (0, 1))
        kept["finite lse of 0 or more"] = all(bool(np.isfinite(lse).all() and (lse > -_ROUNDING).all()) for lse in lses)
        kept["log_tail of 0 or less"] = all(bool((tail < _ROUNDING).all()) for tail in tails)
    if "val_range" in part:
        kept["val_range from 0 to 64"] = bool(((part["val_range"] >= 0) & (part["val_range"] <= LARGEST_RANGE)).all())
    if held.weights:
        kept["weights from 0 to 65,504"] = bool(((part["weights"] >= 0) & (part["weights"] < np.inf)).all())
    for name in held.entropies:
        kept[f"{name} of 0 or more"] = bool((part[name] > -_ROUNDING).all() and np.isfinite(part[name]).all())
    if held.hidden:
        kept["finite hidden states"] = bool(((part["hidden"].view("<u2") & 0x7C00) != 0x7C00).all())
    return kept


def _falls(values: np.ndarray) -> bool:
    """Return whether values, fp16 or codes, begin with 0 and never rise."""
    depth = values if values.dtype == np.uint8 else -values.astype(np.float32)
    rises = bool((depth[..., 0] == 0).all() and (depth[..., 1:] >= depth[..., :-1]).all())
    return rises and bool(np.isfinite(depth[..., -1]).all())
