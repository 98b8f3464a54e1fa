"""A shard made small for a journey: lossless, and no longer mappable.

A general compressor finds hardly anything in a shard as it lies; three views of the same numbers give it something. A
head's values fall, so the differences of neighbours (of the bits of fp16 numbers, or of codes) are small, and those of
one rank resemble each other: they are laid out rank by rank. Ids are replaced by their place in the order of frequency
within the shard, where that pays: real text has few tokens that are always among the likeliest. And the bytes of
wider numbers are laid out plane by plane. What is left has no repetitions, only uneven frequencies, for which
zstandard's fastest level is also its best.

Ids are the floor: 64 of 151,936, in rank order and without any pattern, have log2 V = 17.2 bits each, 137.7 bytes a
token; only a text's own habits go below that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from qat_lora.cache.format import layout as fmt
from qat_lora.cache.format.codec import Arrays, pack_ids, unpack_ids
from qat_lora.errors import CacheDamaged
from qat_lora.extras import require

_LEVEL = 1
_LENGTH_BYTES = 8


def pack_arrays(arrays: Mapping[str, np.ndarray], held: fmt.Contents) -> Iterator[bytes]:
    """Yield the arrays of a shard as compressed streams, each behind its length in 8 bytes.

    Raises:
        MissingExtraError: zstandard is not installed.
    """
    compressor = require("zstandard", "transport").ZstdCompressor(level=_LEVEL)

    def packed(streams: Sequence[np.ndarray]) -> list[bytes]:
        return [compressor.compress(np.ascontiguousarray(stream).data) for stream in streams]

    lists, plain = _split(held)
    for name, entries in lists.items():
        ids = unpack_ids(arrays, entries, name=name)
        ways = [packed(streams) for streams in _id_streams(ids, held.vocab_size)]
        yield from map(_framed, min(ways, key=lambda way: sum(map(len, way))))
    for spec in plain:
        values = arrays[spec.name]
        yield from map(_framed, packed(_planes(_falling(values) if spec.name == "val" else values)))


def unpack_arrays(data: memoryview, held: fmt.Contents, rows: int, where: str) -> Arrays:
    """Return the arrays that `pack_arrays` was given.

    Args:
        data: the streams.
        held: what the shard holds.
        rows: N.
        where: the file, for messages.

    Raises:
        CacheDamaged: streams that do not have the size of these arrays.
        MissingExtraError: zstandard is not installed.
    """
    streams = _Streams(data, where)
    arrays: Arrays = {}
    lists, plain = _split(held)
    for name, entries in lists.items():
        arrays |= _ids(streams, name, (rows, held.length - 1, entries), held.vocab_size)
    for spec in plain:
        shape = (rows, *spec.row_shape)
        if spec.name == "val":
            arrays["val"] = _summed(streams.array(spec.dtype, (shape[-1], *shape[:-1])))
        else:
            arrays[spec.name] = streams.array(spec.dtype, shape)
    streams.end()
    return arrays


def _split(held: fmt.Contents) -> tuple[dict[str, int], list[fmt.ArraySpec]]:
    """Return the lists of ids that are stored packed, and the arrays that are no part of one."""
    lists = held.id_lists if held.vocab_size <= fmt.PACKED_VOCAB else {}
    parts = {f"{name}_{end}" for name in lists for end in ("lo", "hi")}
    return lists, [spec for spec in fmt.array_table(held) if spec.name not in parts]


def _framed(frame: bytes) -> bytes:
    return len(frame).to_bytes(_LENGTH_BYTES, "little") + frame


class _Streams:
    """Takes streams off packed data, one after the other."""

    def __init__(self, data: memoryview, where: str) -> None:
        self._data = data
        self._where = where
        self._zstd: Any = require("zstandard", "transport")
        self._place = 0

    def take(self, size: int | None, limit: int = 0) -> np.ndarray:
        """Return the next stream as bytes: of this size, or of any up to a limit."""
        begin = self._place + _LENGTH_BYTES
        self._place = begin + int.from_bytes(self._data[self._place : begin], "little")
        frame = self._data[begin : self._place]
        most = limit if size is None else size
        try:
            claimed = self._zstd.frame_content_size(frame)
            if claimed < 0 or claimed > most or self._place > len(self._data):
                raise self.damaged()
            raw = self._zstd.ZstdDecompressor().decompress(frame) if claimed else b""
        except self._zstd.ZstdError:
            raise self.damaged() from None
        if len(raw) != (claimed if size is None else size):
            raise self.damaged()
        return np.frombuffer(raw, np.uint8)

    def array(self, dtype: np.dtype, shape: tuple[int, ...]) -> np.ndarray:
        """Return the next array, put together from its byte planes."""
        count = int(np.prod(shape, dtype=np.int64))
        planes = [self.take(count) for _ in range(dtype.itemsize)]
        return np.stack(planes, axis=-1).reshape(-1).view(dtype).reshape(shape)

    def end(self) -> None:
        """Refuse what follows the last stream."""
        if self._place != len(self._data):
            raise self.damaged()

    def damaged(self) -> CacheDamaged:
        """Return the error for streams that are not what they should be."""
        return CacheDamaged(f"{self._where}: its streams are not those of this cache's arrays")


def _planes(values: np.ndarray) -> list[np.ndarray]:
    """Return the first, second, … bytes of numbers, each kind together."""
    return list(np.ascontiguousarray(values).reshape(-1).view(np.uint8).reshape(-1, values.dtype.itemsize).T)


def _falling(values: np.ndarray) -> np.ndarray:
    """Return the differences of head values as unsigned numbers, rank by rank: [K, N, L-1]."""
    bits = values.view(f"<u{values.dtype.itemsize}")
    steps = bits.copy()
    steps[..., 1:] -= bits[..., :-1]  # wraps around, and so does the sum that undoes it
    return np.moveaxis(steps, -1, 0)


def _summed(steps: np.ndarray) -> np.ndarray:
    """Undo `_falling`."""
    unsigned = steps.view(f"<u{steps.dtype.itemsize}")
    bits = np.cumsum(unsigned, axis=0, dtype=unsigned.dtype)
    return np.ascontiguousarray(np.moveaxis(bits, 0, -1)).view(steps.dtype)


def _id_streams(ids: np.ndarray, vocab_size: int) -> list[list[np.ndarray]]:
    """Return the two ways to write ids: behind an empty table as they are, behind a table as ranks of frequency."""
    counts = np.bincount(ids.reshape(-1), minlength=vocab_size)
    table = np.argsort(-counts, kind="stable")[: np.count_nonzero(counts)].astype("<u4")
    ranks = np.zeros(vocab_size, np.int32)
    ranks[table] = np.arange(len(table))
    ways = []
    for found, numbers in ((table[:0], ids), (table, ranks[ids])):
        low, *high = pack_ids(numbers, vocab_size).values()
        ways.append([found.view(np.uint8), *_planes(low), *high])
    return ways


def _ids(streams: _Streams, name: str, shape: tuple[int, ...], vocab_size: int) -> Arrays:
    """Undo `_id_streams`."""
    raw = streams.take(None, 4 * vocab_size)
    stored: Arrays = {f"{name}_lo": streams.array(np.dtype("<u2"), shape)}
    if vocab_size > fmt.SHORT_VOCAB:
        stored[f"{name}_hi"] = streams.array(np.dtype("|u1"), (*shape[:-1], -(-shape[-1] // 4)))
    if not len(raw):
        return stored
    table = raw[: len(raw) // 4 * 4].view("<u4")
    ranks = unpack_ids(stored, shape[-1], name=name)
    if len(raw) % 4 or ranks.max() >= len(table) or table.max() >= vocab_size:
        raise streams.damaged()
    return pack_ids(table[ranks].astype(np.int32), vocab_size, name)
