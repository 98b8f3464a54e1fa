"""The records of a cache: fingerprint, sidecars and manifest, as strictly read JSON.

Every record is *closed*: an unknown, absent or repeated key is an error, so no typing mistake or newer version passes.
It is *bounded*: files above a size are not parsed. It is *sealed*: its last value is the sha256 of everything before
it. A checksum over "canonical JSON" would need one JSON writer in every language.
"""

import dataclasses
import functools
import hashlib
import json
import math
import re
from dataclasses import dataclass, field
from typing import Any, Self, TypeVar

import qat_lora.config as config
from qat_lora.cache.format import layout as fmt
from qat_lora.errors import CacheDamaged, CacheError, ConfigError

R = TypeVar("R")
_SEAL, _SEAL_END = '"checksum": "', '"\n}\n'
_OPTIONAL = re.compile(
    r"(tail_draws|draws):([1-9]\d{0,5})|(tail_entropy|weights|lzma):(1)|(hidden):([1-9]\d{0,6}):([\da-f]{64})", re.A
)
_OPTIONAL_ORDER = ("tail_draws", "tail_entropy", "draws", "weights", "lzma", "hidden")


def optional_arrays(
    tail_draws: int = 0,
    draws: int = 0,
    hidden: int = 0,
    sha256: str | None = None,
    weights: int = 0,
    lzma: int = 0,
    tail_entropy: int = 0,
) -> tuple[str, ...]:
    """Return the names by which a fingerprint says what is stored beyond the standard arrays; sha256: the LM head's."""
    counts = {"tail_draws": tail_draws, "tail_entropy": int(tail_entropy), "draws": draws}
    counts |= {"weights": int(weights), "lzma": int(lzma)}
    names = [f"{name}:{count}" for name, count in counts.items() if count]
    return (*names, f"hidden:{hidden}:{sha256}") if hidden else tuple(names)


def _parse_optional(names: tuple[str, ...]) -> dict[str, tuple[int, str | None]]:
    """Return size and hash by name; names that are unknown, repeated or out of order are refused."""
    known = [match for match in map(_OPTIONAL.fullmatch, names) if match]
    found: dict[str, tuple[int, str | None]] = {m[1] or m[3] or m[5]: (int(m[2] or m[4] or m[6]), m[7]) for m in known}
    if len(found) != len(names) or [*found] != [name for name in _OPTIONAL_ORDER if name in found]:
        last = "hidden:1024:<sha256 of the LM head>; a newer qat-lora may know more"
        allowed = f"tail_draws:8, tail_entropy:1, draws:32, weights:1, lzma:1, {last}"
        raise ConfigError(f"optional_arrays: {names!r} does not fit; allowed, in this order: {allowed}")
    return found


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """Everything that decides what a cache holds: resuming compares all of it, `check_student` what a student needs."""

    tokenizer_sha256: str
    vocab_size: int  # V: entries that the teacher's probabilities run over; padded rows are not counted
    teacher: str  # name or folder, for people; `teacher_sha256` is what identifies it
    teacher_sha256: str
    chat_template_sha256: str | None
    dataset: str
    packing: str
    length: int  # L: tokens of a row
    top_k: int  # K: entries of a position; 0 where hidden states are stored instead of logits
    temperatures: tuple[float, ...] = (1.0,)
    value_dtype: str = "float16"  # or `uint8`: codes and a range a position
    seed: int = 0
    eval_rows: int = 0
    builder: str = ""  # software and number format that ran the teacher: another stack gives other last bits
    optional_arrays: tuple[str, ...] = ()  # beyond the standard arrays; `optional_arrays` makes the names

    def __post_init__(self) -> None:
        extras = _parse_optional(self.optional_arrays)
        fits_codec = "lzma" not in extras or 1 <= extras.get("draws", (0,))[0] <= 256
        fewest, topk_allowed = int(not {"hidden", "lzma"} & {*extras}), f"1 to {self.vocab_size}, or 0 with --hidden"
        known = all(math.isfinite(t) and t > 0 and float(f"{t:g}") == t for t in self.temperatures)
        rising = known and (*sorted({1.0, *self.temperatures}),) == self.temperatures
        numbers = "positive numbers of at most six digits, rising, 1 among them, for example 1,2"
        rules = [
            ("length", self.length, 2 <= self.length < 1 << 24, "2 or more tokens: a row of 1 predicts nothing"),
            ("vocab_size", self.vocab_size, 1 <= self.vocab_size < 1 << 31, "1 to 2^31 - 1"),
            ("top_k", self.top_k, fewest <= self.top_k <= self.vocab_size, topk_allowed),
            ("value_dtype", self.value_dtype, self.value_dtype in fmt.VALUE_DTYPES, " or ".join(fmt.VALUE_DTYPES)),
            ("eval_rows", self.eval_rows, self.eval_rows >= 0, "0 or more"),
            ("tail_draws", self.optional_arrays, self.top_k or "tail_draws" not in extras, "none where --top-k is 0"),
            (
                "tail_entropy",
                self.optional_arrays,
                extras.keys() >= {"tail_draws"} or "tail_entropy" not in extras,
                "with tail_draws only",
            ),
            ("temperatures", self.temperatures, rising, numbers),
            ("row_codec", self.optional_arrays, fits_codec, "lzma with --draws 1 to 256 only"),
        ]
        for name, given, fits, allowed in rules:
            if not fits:
                raise ConfigError(f"{name}: {given!r} does not fit; allowed: {allowed}")

    @functools.cached_property
    def contents(self) -> fmt.Contents:
        """What a shard holds of every position."""
        sizes = {name: size for name, (size, _) in _parse_optional(self.optional_arrays).items()}
        return fmt.Contents(self.length, self.top_k, self.vocab_size, self.temperatures, self.value_dtype, **sizes)

    @property
    def lm_head_sha256(self) -> str | None:
        """The sha256 of the teacher's LM head in the folder; None where the cache holds no hidden states."""
        return _parse_optional(self.optional_arrays).get("hidden", (0, None))[1]

    @functools.cached_property
    def arrays(self) -> tuple[fmt.ArraySpec, ...]:
        """The arrays of every shard."""
        return fmt.array_table(self.contents)

    @functools.cached_property
    def sha256(self) -> str:
        """One hash for all fields."""
        return config.fingerprint({"version": self.version, **to_json(self)})

    @property
    def version(self) -> int:
        """The format's version, as old as it can be."""
        return fmt.COMPRESSED if self.contents.lzma else fmt.VERSION

    def layout(self, rows: int, total_bytes: int) -> fmt.Layout:
        """Return the layout of a shard; its size is only taken at its word where that does not follow from the rows."""
        if self.contents.lzma:
            return fmt.compressed_layout(rows, total_bytes, self.sha256)
        return fmt.layout(self.arrays, rows, self.sha256)

    def difference(self, other: Self) -> tuple[str, Any, Any] | None:
        """Return the first field that differs, with both values, if any; a teacher's sha256 counts, not its name."""
        for item in dataclasses.fields(self):
            here, there = getattr(self, item.name), getattr(other, item.name)
            if here != there and not (item.name == "teacher" and self.teacher_sha256 == other.teacher_sha256):
                return item.name, here, there
        return None


@dataclass(frozen=True, kw_only=True)
class Sidecar:
    """The commit of one shard: a shard without a sidecar does not exist."""

    format: str = fmt.FORMAT
    version: int = fmt.VERSION
    shard: str
    first_row: int  # its number within the split and builder
    rows: int
    bytes: int
    sha256: str
    builder: int = 0
    builders: int = 1
    cursor: Any  # where the source stands after the shard's last row: any JSON value, opaque to the cache
    fingerprint: Fingerprint


@dataclass(frozen=True, kw_only=True)
class Part:
    """The end of one builder's work where several share a cache."""

    format: str = fmt.FORMAT
    version: int = fmt.VERSION
    builder: int
    builders: int
    train_shards: int
    eval_shards: int
    fingerprint: Fingerprint


@dataclass(frozen=True, kw_only=True)
class ShardEntry:
    """A shard as the manifest lists it."""

    shard: str
    rows: int
    bytes: int
    sha256: str
    sidecar_sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The list of all shards, written last: a folder without one is an unfinished build."""

    format: str = fmt.FORMAT
    version: int = fmt.VERSION
    fingerprint: Fingerprint
    train: tuple[ShardEntry, ...]
    eval: tuple[ShardEntry, ...] = ()
    info: dict[str, Any] = field(default_factory=dict)  # free notes for people (command, versions); decides nothing

    def shards(self, split: str) -> tuple[ShardEntry, ...]:
        """Return the shards of a split, in row order."""
        return {"train": self.train, "eval": self.eval}[split]

    @property
    def all_shards(self) -> tuple[ShardEntry, ...]:
        """The shards of both splits, in the order in which they were written."""
        return (*self.eval, *self.train)

    def rows(self, split: str) -> int:
        """Return the number of rows of a split."""
        return sum(shard.rows for shard in self.shards(split))


def to_json(record: Any) -> dict[str, Any]:
    """Return a record as plain JSON values, keys in order of declaration."""
    return json.loads(json.dumps(dataclasses.asdict(record), allow_nan=False))


def render(record: Any) -> bytes:
    """Return a record as the sealed JSON text that goes on disk."""
    text = json.dumps({**to_json(record), "checksum": ""}, indent=1, ensure_ascii=True, allow_nan=False) + "\n"
    body = text.removesuffix(_SEAL_END)
    return (body + hashlib.sha256(body.encode()).hexdigest() + _SEAL_END).encode()


def parse(cls: type[R], data: bytes, where: str) -> R:
    """Return sealed JSON text as a record; CacheDamaged names `where`; CacheError: a cache of another version."""
    try:
        text = data.decode("ascii")
        body, digest = text[: -64 - len(_SEAL_END)], text[-64 - len(_SEAL_END) : -len(_SEAL_END)]
        if not (body.endswith(_SEAL) and text.endswith(_SEAL_END)):
            raise ValueError("the checksum at its end is missing: it is cut off or overwritten")
        if hashlib.sha256(body.encode()).hexdigest() != digest:
            raise ValueError("its checksum does not fit its text: bytes have changed since it was written")
        tree = strict_json(text)  # an object, by its end
        tree.pop("checksum", None)
        if tree.get("format") != fmt.FORMAT:
            raise ValueError(f"format is {tree.get('format')!r}, expected {fmt.FORMAT!r}")
        if tree.get("version") not in (fmt.VERSION, fmt.COMPRESSED):
            what = f"is of cache format version {tree.get('version')!r}, this program reads 1 and 2"
            raise CacheError(f"{where}: {what}; use the qat-lora that wrote it, or build the cache again")
        record: Any = config.from_dict(cls, tree, cls.__name__, exact=True)
        if record.version != record.fingerprint.version:
            raise ValueError(f"its version is {record.version}, its fingerprint's is {record.fingerprint.version}")
        return record
    except CacheError:
        raise
    except (ValueError, TypeError, RecursionError, OverflowError) as error:
        raise CacheDamaged(f"{where}: {error or 'is nested too deeply'}") from None


def strict_json(text: str) -> Any:
    """Parse JSON, refusing repeated keys and the non-standard NaN and Infinity."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) != len(pairs):
            raise ValueError("a key occurs twice")
        return found

    def refuse(word: str) -> Any:
        raise ValueError(f"{word} is not JSON")

    return json.loads(text, object_pairs_hook=unique, parse_constant=refuse)


def read_header(data: bytes | bytearray, where: str) -> tuple[Any, int]:
    """Return a safetensors file's JSON header and its end; CacheDamaged if it is too long or no strict JSON."""
    size = int.from_bytes(data[:8], "little")
    if len(data) < 8 or size > min(fmt.HEADER_LIMIT_BYTES, len(data) - 8):
        raise CacheDamaged(f"{where}: its header claims {size:,} bytes; allowed: 1 MB within the file")
    try:
        return strict_json(data[8 : 8 + size].decode("ascii")), 8 + size
    except (ValueError, RecursionError) as error:
        raise CacheDamaged(f"{where}: its header cannot be read ({error})") from None
