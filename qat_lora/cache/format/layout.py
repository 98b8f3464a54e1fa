"""The layout of a KD cache: file names, the arrays of a shard, and the shard's header.

A shard is a plain safetensors file: any language maps it with a JSON parser and eight bytes of arithmetic, and nothing
in it can be executed. Pickled `.pt` files run code and are read whole; MDS and Parquet need their library to find a
row; zarr has no row access below its chunks. Safetensors lacks checksums and a commit protocol, which sidecars and a
manifest have (`records`, `build.writer`). The arrays follow from the fingerprint (its `Contents`) and the row count, so
readers *compute* the header and refuse any other: no overlapping offsets, no odd types, nothing to attack.
"""

import functools
import itertools
import json
import re
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from qat_lora.errors import CacheError
from qat_lora.types import temperature_key

VALUE_DTYPES = ("float16", "uint8")  # how the logits of top-K entries may be stored
FORMAT = "qat-lora-kd-cache"
VERSION = 1
COMPRESSED, COMPRESSED_HEADER_BYTES = 2, 512  # of caches whose rows are compressed one by one
MANIFEST = "manifest.json"
LOCK = ".lock"
LM_HEAD = "teacher_head.safetensors"  # the teacher's LM head, in caches that hold its hidden states
HEADER_LIMIT_BYTES = 1 << 20
SIDECAR_LIMIT_BYTES = 1 << 20
MANIFEST_LIMIT_BYTES = 64 << 20
SERIES = {"train": "s", "eval": "e"}  # the letter of each split's shard series
PACKED_VOCAB = 1 << 18  # up to this vocabulary, ids are 16 low bits plus 2 high bits; beyond it, raw int32
SHORT_VOCAB = 1 << 16  # up to this vocabulary, the 2 high bits are always 0 and are left out
_Array = tuple[str, str, Sequence[int], int]
_SAFETENSORS_DTYPE = {"<i4": "I32", "<u4": "U32", "<f4": "F32", "<f2": "F16", "<u2": "U16", "|u1": "U8"}


class ArraySpec(NamedTuple):
    """One array of a shard; the full shape is [rows, *row_shape]."""

    name: str
    dtype: np.dtype
    row_shape: tuple[int, ...]

    @property
    def row_bytes(self) -> int:
        """Bytes that one row takes in this array."""
        return self.dtype.itemsize * int(np.prod(self.row_shape, dtype=np.int64))


class Layout(NamedTuple):
    """A whole shard file."""

    header: bytes
    starts: dict[str, int]  # the first byte of each array by its name, counted from the start of the file
    total_bytes: int


class Contents(NamedTuple):
    """What a shard holds of every position; it decides the arrays."""

    length: int  # L: tokens of a row
    top_k: int  # K: entries of a position; 0 where hidden states are stored instead of logits
    vocab_size: int
    temperatures: Sequence[float] = (1.0,)
    value_dtype: str = "float16"
    tail_draws: int = 0  # tokens drawn from the tail of a position
    draws: int = 0  # tokens drawn from the whole teacher
    weights: int = 0  # 1 where positions have weights in the loss
    lzma: int = 0  # 1 where rows are compressed (`compressed`), and draws stratified and rising
    hidden: int = 0  # H: width of the teacher's hidden states; 0 where none are stored
    tail_entropy: int = 0  # 1 where rows have what the tail draws lack of a KL

    @property
    def id_lists(self) -> dict[str, int]:
        """The lists of token ids that a position has, by array name, and their lengths."""
        lists = {"ids": self.top_k, "tail_draws": self.tail_draws, "draws": self.draws}
        return {name: entries for name, entries in lists.items() if entries}

    @property
    def entropy(self) -> bool:
        """Whether rows have the teacher's mean entropy, by which the cross-entropy with draws alone exceeds the KL."""
        return bool(self.lzma and not self.top_k and not self.hidden)

    @property
    def entropies(self) -> tuple[str, ...]:
        """The arrays of one number a row by which a cross-entropy with draws exceeds the KL."""
        held = {"entropy": self.entropy, "tail_entropy": self.tail_entropy}
        return tuple(name for name, is_held in held.items() if is_held)

    @property
    def sums(self) -> tuple[str, ...]:
        """The arrays of normalisers: `lse` and `log_tail` for each temperature; none where K is 0."""
        if not self.top_k:
            return ()
        return tuple(temperature_key(name, t) for t in self.temperatures for name in ("lse", "log_tail"))


def array_table(held: Contents) -> tuple[ArraySpec, ...]:
    """Return the arrays of a shard in file order: types of 4, 2, then 1 bytes, so all are aligned without padding."""
    positions = held.length - 1
    wide, packed = held.vocab_size > PACKED_VOCAB, SHORT_VOCAB < held.vocab_size <= PACKED_VOCAB
    lists = held.id_lists.items()
    table: list[tuple[str, str, tuple[int, ...]]] = [("row_crc32", "<u4", ()), ("input_ids", "<i4", (held.length,))]
    table = table[held.lzma :]  # compressed rows have their checksums outside
    table += [(name, "<i4", (positions, entries)) for name, entries in lists if wide]
    table += [(name, "<f4", (positions,)) for name in held.sums]
    table += [(name, "<f4", (1,)) for name in held.entropies]
    if held.top_k:
        floats, codes = ("val", "<f2", (positions, held.top_k)), ("val_range", "<f2", (positions,))
        table.append(floats if held.value_dtype == "float16" else codes)
    if held.weights:
        table.append(("weights", "<f2", (positions,)))
    if held.hidden:
        table.append(("hidden", "<f2", (positions, held.hidden)))
    table += [(f"{name}_lo", "<u2", (positions, entries)) for name, entries in lists if not wide]
    if held.top_k and held.value_dtype == "uint8":
        table.append(("val", "|u1", (positions, held.top_k)))
    table += [(f"{name}_hi", "|u1", (positions, -(-entries // 4))) for name, entries in lists if packed]
    table += [("loss_mask", "|u1", (held.length,)), ("doc_starts", "|u1", (-(-held.length // 8),))]
    return tuple(ArraySpec(name, np.dtype(dtype), shape) for name, dtype, shape in table)


@functools.lru_cache(maxsize=64)  # the same in all shards of as many rows, and a cache can have 20,000
def layout(table: tuple[ArraySpec, ...], rows: int, fingerprint_sha256: str) -> Layout:
    """Return the header and the array positions of a shard with `rows` rows."""
    metadata = {"format": FORMAT, "version": str(VERSION), "fingerprint": fingerprint_sha256}
    arrays = [(s.name, _SAFETENSORS_DTYPE[s.dtype.str], (rows, *s.row_shape), rows * s.row_bytes) for s in table]
    header = safetensors_header(metadata, arrays)
    *starts, end = itertools.accumulate((rows * spec.row_bytes for spec in table), initial=len(header))
    return Layout(header, dict(zip((spec.name for spec in table), starts, strict=True)), end)


@functools.lru_cache(maxsize=64)
def compressed_layout(rows: int, total_bytes: int, fingerprint_sha256: str) -> Layout:
    """Return the same of a shard of compressed rows, which has `total_bytes`; the first of its blobs is no row."""
    metadata = {"format": FORMAT, "version": str(COMPRESSED), "fingerprint": fingerprint_sha256}
    index = 4 * (rows + 1)
    size = max(0, total_bytes - COMPRESSED_HEADER_BYTES - 2 * index)
    arrays = [(name, "U32", (rows + 1,), index) for name in ("row_crc32", "row_ends")]
    header = safetensors_header(metadata, [*arrays, ("rows", "U8", (size,), size)], COMPRESSED_HEADER_BYTES)
    starts = {name: len(header) + number * index for number, name in enumerate(("row_crc32", "row_ends", "rows"))}
    return Layout(header, starts, starts["rows"] + size)


def safetensors_header(metadata: dict[str, str], arrays: Iterable[_Array], least: int = 0) -> bytes:
    """Return a safetensors file's header and before it its length; `arrays`: name, type, shape and bytes, in order."""
    header: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for name, kind, shape, size in arrays:
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode("ascii")
    text = (text + b" " * (-len(text) % 8)).ljust(least - 8)
    return len(text).to_bytes(8, "little") + text


def row_bytes(table: Sequence[ArraySpec]) -> int:
    """Return the bytes that one row takes in a shard, everything counted but the header."""
    return sum(spec.row_bytes for spec in table)


def default_shard_rows(table: Sequence[ArraySpec]) -> int:
    """Return the rows that make a shard of about 128 MB: 0.1 s to check, little to lose."""
    return max(1, (128 << 20) // row_bytes(table))


def shard_name(split: str, index: int) -> str:
    """Return `s-000123` (train) or `e-000123` (eval): a shard's file name without its ending; CacheError: too high."""
    if not 0 <= index <= 999_999:
        what = f"shard number {index:,}: a split holds at most 1,000,000 shards, those of all builders together"
        raise CacheError(f"{what}; build the cache again with a larger --shard-rows")
    return f"{SERIES[split]}-{index:06d}"


def part_name(builder: int) -> str:
    """Return `b-000001.json`: the file in which one of several builders says that it has ended."""
    return f"b-{builder:06d}.json"


def shard_number(split: str, name: str) -> int | None:
    """Return the number in the name of a split's shard, or None for any other text; so a path cannot pass."""
    match = re.fullmatch(rf"{SERIES[split]}-([0-9]{{6}})", name)
    return match and int(match[1])
