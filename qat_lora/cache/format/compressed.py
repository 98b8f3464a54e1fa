"""Rows of a cache of format version 2: lists of draws as counts and gaps, and every row compressed by itself.

Draws of version 2 are stratified (`build.topk.row_uniforms`), so their order says nothing. A list is stored as its
different tokens, the most frequent first, with how often each was drawn; tokens drawn equally often as gaps between
ranks in the shard's table of tokens, the text as places in these lists, which hold three of four next tokens. LZMA
takes a quarter off (zlib less). Rows compressed together would be smaller, but rows are read in random order.
"""

from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any

import numpy as np

from qat_lora.cache.format.codec import DRAWN, Arrays, crc32, pack_ids, unpack_ids
from qat_lora.cache.format.layout import ArraySpec, Contents, row_bytes
from qat_lora.errors import CacheError

_SHORT, _LONG = 240, 248  # bytes from which on one and three more follow; all below are numbers themselves
_FAR = _SHORT + 256 * (_LONG - _SHORT)  # the first number of four bytes
# LZMA2 without a container; contexts of no bits, since rows are too short to learn from more.
_FILTERS = [{"id": 0x21, "preset": 9, "dict_size": 1 << 20, "lc": 0, "lp": 0, "pb": 0}]
_WORD = 1 << 8 * np.arange(3)  # what the bytes of three weigh


def compress_rows(pieces: Sequence[Arrays], held: Contents, table: Sequence[ArraySpec]) -> list[bytes]:
    """Return a shard behind its header: checksums, ends, the table of tokens, rows; CacheError: 4 GB or more."""
    used = [piece["input_ids"].reshape(-1) for piece in pieces]
    lists = (unpack_ids(piece, size, name=name) for name, size in _drawn(held).items() for piece in pieces)
    used += [ids[np.diff(ids, prepend=-1, axis=-1) != 0] for ids in lists]
    tokens, counts = np.unique(np.concatenate(used), return_counts=True)
    by_rank = np.argsort(-counts, kind="stable")
    ranks = np.argsort(by_rank)
    blobs = [_compress(tokens[by_rank].astype("<i4").tobytes())]
    for piece in pieces:
        for number in range(len(piece["input_ids"])):
            row = {name: array[number] for name, array in piece.items()}
            blobs.append(_compress(_encode(row, held, table, lambda ids: ranks[np.searchsorted(tokens, ids)])))
    ends = np.cumsum([len(blob) for blob in blobs])
    if ends[-1] >= 1 << 32:
        raise CacheError(f"shard_rows: a shard of {ends[-1]:,} bytes; allowed: below 4 GB, so give fewer --shard-rows")
    return [np.array([crc32(blob) for blob in blobs], "<u4").tobytes(), ends.astype("<u4").tobytes(), *blobs]


def decompress_row(
    blob: bytes, held: Contents, table: Sequence[ArraySpec], tokens: np.ndarray, out: dict[str, np.ndarray]
) -> None:
    """Write one row's arrays, as version 1 stores them, into `out`; ValueError or IndexError for no such row."""
    plain = BytesIO(decompress(blob, 64 + 4 * row_bytes(table)))
    positions = held.length - 1
    for name, size in _drawn(held).items():
        many = _take(plain, positions)
        common, starts = _take(plain, many.sum()) + 2, np.cumsum(many) - many
        owners = np.repeat(np.arange(positions), many)
        single = size - np.bincount(owners, common, positions).astype(np.int64)
        first = np.cumsum(many + single) - many - single
        counts = np.ones(many.sum() + single.sum(), np.int64)
        counts[np.arange(len(common)) - starts[owners] + first[owners]] = common
        owners = np.repeat(np.arange(positions), many + single)
        ranks, gap = _numbers(plain, len(counts)), _continues(owners, counts)
        sums = np.cumsum(ranks + gap)
        begins = np.maximum.accumulate(np.where(gap, 0, np.arange(len(gap))))
        found = tokens[sums - (sums - ranks)[begins]]
        ids = np.sort(np.repeat(found, counts).reshape(positions, size), axis=-1)
        for array, values in pack_ids(ids, held.vocab_size, name).items():
            out[array][...] = values
    place = _take(plain, positions)
    out["input_ids"][1:] = found[np.where(place, first + place - 1, 0)]
    out["input_ids"][np.append(True, place == 0)] = tokens[_numbers(plain, 1 + int((place == 0).sum()))]
    for spec in _others(table):
        planes = _take(plain, spec.row_bytes).astype(np.uint8).reshape(spec.dtype.itemsize, -1)
        out[spec.name][...] = np.ascontiguousarray(planes.T).view(spec.dtype).reshape(spec.row_shape)


def _encode(row: Arrays, held: Contents, table: Sequence[ArraySpec], rank: Callable[[Any], Any]) -> bytes:
    positions, parts = held.length - 1, []
    for name, size in _drawn(held).items():
        ids = unpack_ids(row, size, name=name)
        starts = np.flatnonzero(np.diff(ids, prepend=-1, axis=-1))
        owners, counts, ranks = starts // size, np.diff(starts, append=ids.size), rank(ids.reshape(-1)[starts])
        order = np.lexsort((ranks, -counts, owners))
        counts, ranks = counts[order], ranks[order]
        gaps = np.where(_continues(owners, counts), ranks - np.append(0, ranks[:-1]) - 1, ranks)
        parts += [np.bincount(owners[counts > 1], minlength=positions), counts[counts > 1] - 2, *_bytes_of(gaps)]
    first = np.searchsorted(owners, np.arange(positions))  # of `draws`, which come last
    following = rank(row["input_ids"])
    same = np.flatnonzero(ranks == following[1:][owners])
    place = np.zeros(positions, np.int64)
    place[owners[same]] = same - first[owners[same]] + 1
    place[place > 255] = 0
    parts += [place, *_bytes_of(following[np.append(True, place == 0)])]
    parts += [row[spec.name].reshape(-1, 1).view(np.uint8).T for spec in _others(table)]
    return b"".join(part.astype(np.uint8).tobytes() for part in parts)


def _drawn(held: Contents) -> dict[str, int]:
    return {name: held.id_lists[name] for name in DRAWN if name in held.id_lists}


def _others(table: Sequence[ArraySpec]) -> list[ArraySpec]:
    return [spec for spec in table if spec.name.removesuffix("_lo").removesuffix("_hi") not in ("input_ids", *DRAWN)]


def _continues(owners: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return where an entry is of the same position and count as the one before it."""
    return np.append(False, (owners[1:] == owners[:-1]) & (counts[1:] == counts[:-1]))


def _bytes_of(numbers: np.ndarray) -> list[np.ndarray]:
    """Return numbers below 2^27 as bytes, the first of all, then the others."""
    short, long = numbers[(numbers >= _SHORT) & (numbers < _FAR)] - _SHORT, numbers[numbers >= _FAR] - _FAR
    leading = np.minimum(numbers, _SHORT + (np.maximum(numbers, _SHORT) - _SHORT >> 8))
    leading[numbers >= _FAR] = _LONG + (long >> 24)
    return [leading, short & 255, *(long // weight & 255 for weight in _WORD)]


def _take(stream: BytesIO, count: int) -> np.ndarray:
    part = np.frombuffer(stream.read(int(count)), np.uint8)
    if len(part) != count:
        raise ValueError("it is cut off")
    return part.astype(np.int64)


def _numbers(stream: BytesIO, count: int) -> np.ndarray:
    values = _take(stream, count)
    short, long = (values >= _SHORT) & (values < _LONG), values >= _LONG
    values[short] = _SHORT + (values[short] - _SHORT << 8) + _take(stream, short.sum())
    values[long] = _FAR + (values[long] - _LONG << 24) + _WORD @ _take(stream, 3 * long.sum()).reshape(3, -1)
    return values


def _compress(data: bytes) -> bytes:
    import lzma  # not above: there are Pythons without, and version 1 needs none

    return lzma.compress(data, lzma.FORMAT_RAW, filters=_FILTERS)


def decompress(blob: bytes, most: int) -> bytes:
    """Return at most so many bytes from a blob; ValueError for what no writer writes."""
    import lzma

    try:
        return lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=_FILTERS).decompress(blob, most)
    except lzma.LZMAError as error:
        raise ValueError(str(error)) from None
