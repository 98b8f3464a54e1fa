"""The header of a GGUF file: its settings, and where each tensor lies, checked against the size of the file.

The gguf library's reader follows every length that a file states: one damaged number keeps it counting for ever, and
the tokens of a large vocabulary become a million small arrays. Here a length is compared with what is left of the file
before it is followed. What a block of a type holds is the library's table, and Q2_0, which it does not know yet
(llama.cpp #24448). Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.
"""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from qat_lora.errors import ModelError, errors_explained
from qat_lora.extras import require

GGUF = ".gguf"
BASE, ADAPTER = "base.gguf", "adapter.gguf"  # of an export
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY, _MAGIC = 8, 9, int.from_bytes(b"GGUF", "little")


class GGUFTensor(NamedTuple):
    """A tensor of a file, or a type of tensors: `block` weights lie in `block_bytes` bytes."""

    number: int
    kind: str
    block: int
    block_bytes: int
    shape: tuple[int, ...] = ()  # rows first, as torch has it
    offset: int = 0  # from the beginning of the file, in bytes

    @property
    def size(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) // self.block * self.block_bytes


Q2_0 = GGUFTensor(42, "Q2_0", 64, 18)


@dataclass(frozen=True)
class GGUFHeader:
    """All of a file but its weights."""

    file: Path
    settings: dict[str, Any]
    tensors: dict[str, GGUFTensor]

    @property
    def architecture(self) -> str:
        """The word that begins the keys of the model's settings."""
        return str(self.settings.get("general.architecture"))

    def of_model(self, name: str, default: Any = None) -> Any:
        """Return a setting of the model by the part of its key after the architecture."""
        return self.settings.get(f"{self.architecture}.{name}", default)


def read_header(file: Path) -> GGUFHeader:
    """Read a GGUF file's header, not its weights; ModelError: it is no whole file; MissingExtraError: no gguf."""
    what = f"{file}: is no GGUF file that can be read"
    try:
        with (
            errors_explained(ModelError, what, struct.error, ValueError, TypeError),
            file.open("rb") as stream,
            mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data,
        ):
            return _parse(file, _Bytes(data))
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror})") from None


class _Bytes:
    """A file's bytes, taken in order."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def take(self, count: int, size: int = 1) -> int:
        """Pass `count` items of `size` bytes; return where they begin."""
        at, self.at = self.at, self.at + count * size
        if self.at > len(self.data):
            raise ValueError(f"it ends in its header, after {len(self.data):,} bytes")
        return at

    def numbers(self, code: str, count: int = 1) -> tuple[Any, ...]:
        return struct.unpack_from(f"<{count}{code}", self.data, self.take(count, struct.calcsize(code)))

    def text(self) -> str:
        at = self.take(*self.numbers("Q"))
        return self.data[at : self.at].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        of, count = (kind, 1) if kind != _ARRAY else (*self.numbers("I"), *self.numbers("Q"))
        if of not in _SCALARS and of != _STRING:
            raise ValueError(f"a setting is of the unknown type {of}")
        values = [self.text() for _ in range(count)] if of == _STRING else list(self.numbers(_SCALARS[of], count))
        return values if kind == _ARRAY else values[0]


def _parse(file: Path, data: _Bytes) -> GGUFHeader:
    magic, version, count, keys = (data.numbers(code)[0] for code in "IIQQ")
    if magic != _MAGIC or version not in (2, 3):
        raise ValueError("it does not begin with GGUF, version 2 or 3")
    settings: dict[str, Any] = {}
    found: dict[str, GGUFTensor] = {}
    for _ in range(keys):
        name = data.text()
        settings[name] = data.value(*data.numbers("I"))
    if isinstance(parts := settings.get("split.count"), int) and parts > 1:
        raise ModelError(f"{file}: is one of {parts} parts; join them: llama-gguf-split --merge FIRST_PART WHOLE.gguf")
    for _ in range(count):
        name, (dimensions,) = data.text(), data.numbers("I")
        shape = data.numbers("Q", min(dimensions, 5))[::-1]
        (number,), (offset,) = data.numbers("I"), data.numbers("Q")
        kind = _type(number)
        if kind is None:
            raise ModelError(f"{file}: the tensor {name} is of the type {number}, which gguf and we cannot decode")
        if not 0 < len(shape) < 5 or 0 in shape or shape[-1] % kind.block:
            raise ModelError(f"{file}: the tensor {name} of type {kind.kind} cannot have the shape {shape}")
        found[name] = kind._replace(shape=shape, offset=offset)
    alignment = settings.get("general.alignment", 32)
    if alignment not in (2**n for n in range(3, 20)):
        raise ValueError(f"its alignment is {alignment!r}")
    start, size = -(-data.at // alignment) * alignment, len(data.data)
    tensors = {name: tensor._replace(offset=start + tensor.offset) for name, tensor in found.items()}
    places = sorted((tensor.offset, name) for name, tensor in tensors.items())
    for (offset, name), (following, _) in zip(places, [*places[1:], (size, "")], strict=True):
        tensor = tensors[name]
        end, what = offset + tensor.size, f"{file}: the tensor {name} of type {tensor.kind} takes {tensor.size:,} bytes"
        if end > size:
            raise ModelError(f"{what} from {offset:,} on, and the file has {size:,}; it is cut off, fetch it again")
        # A Q2_0 of other blocks than llama.cpp's would lie in gaps.
        if end > following or tensor.kind == Q2_0.kind and following - end >= alignment:
            raise ModelError(f"{what} in blocks of {tensor.block}, and {following - offset:,} lie there")
    return GGUFHeader(file, settings, tensors)


def _type(number: int) -> GGUFTensor | None:
    gguf = require("gguf", "export")
    if number == Q2_0.number or number not in set(gguf.GGMLQuantizationType):
        return Q2_0 if number == Q2_0.number else None
    kind = gguf.GGMLQuantizationType(number)
    return GGUFTensor(number, kind.name, *gguf.GGML_QUANT_SIZES[kind])
