"""The header of a GGUF file: its settings, and where each tensor lies, checked against the size of the file.

The gguf library's reader follows every length that a file states. One damaged number keeps it counting for ever, a
file that a download cut off ends in an error of NumPy, and the tokens of a large vocabulary become a million small
arrays. Here a length is compared with what is left of the file before it is followed, and every refusal names the
tensor and its type. What a block of a type holds is the library's table, and Q2_0, which it does not know yet
(llama.cpp #24448).

Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, versions 2 and 3.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from qat_lora.errors import ModelError, one_line
from qat_lora.extras import require

GGUF = ".gguf"
Q2_0 = 42
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class Block(NamedTuple):
    """What a tensor of a GGML type is made of."""

    kind: str
    """Name of the type."""
    weights: int
    size: int
    """In bytes."""


class GGUFTensor(NamedTuple):
    """A tensor of a file."""

    number: int
    """Of its type."""
    block: Block
    shape: tuple[int, ...]
    """Rows first, as torch has it."""
    offset: int
    """From the beginning of the file, in bytes."""

    @property
    def size(self) -> int:
        """Its bytes."""
        return math.prod(self.shape) // self.block.weights * self.block.size


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


def block_of(number: int) -> Block | None:
    """Return what tensors of a GGML type are made of, None for a type that cannot be decoded.

    Raises:
        MissingExtraError: gguf is not installed.
    """
    gguf = require("gguf", "export")
    try:
        kind = gguf.GGMLQuantizationType(number)
    except ValueError:
        return Block("Q2_0", 64, 18) if number == Q2_0 else None
    return Block(kind.name, *gguf.GGML_QUANT_SIZES[kind])


def read_header(file: Path) -> GGUFHeader:
    """Read the header of a GGUF file; its weights are not read.

    Raises:
        ModelError: no GGUF file, one that is cut off or a part of several, or a tensor of an unknown type.
        MissingExtraError: gguf is not installed.
    """
    try:
        with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _parse(file, _Bytes(data))
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror})") from None
    except ModelError:
        raise
    except (struct.error, ValueError, TypeError) as error:
        raise ModelError(f"{file}: is no GGUF file that can be read ({one_line(error, 200)})") from None


class _Bytes:
    """A file's bytes, taken in order."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data, self.at = data, 0

    def take(self, count: int, size: int) -> int:
        """Pass `count` items of `size` bytes; return where they begin."""
        at, self.at = self.at, self.at + count * size
        if self.at > len(self.data):
            raise ValueError(f"it ends in its header, after {len(self.data):,} bytes")
        return at

    def number(self, code: str = "Q") -> Any:
        return struct.unpack_from(f"<{code}", self.data, self.take(1, struct.calcsize(code)))[0]

    def text(self) -> str:
        length = self.number()
        at = self.take(length, 1)
        return self.data[at : at + length].decode("utf-8", errors="replace")

    def value(self, kind: int, inside: bool = False) -> Any:
        if kind == _STRING:
            return self.text()
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind != _ARRAY or inside:
            raise ValueError(f"a setting of the unknown type {kind}")
        of, count = self.number("I"), self.number()
        if of in _SCALARS:
            at = self.take(count, struct.calcsize(_SCALARS[of]))
            return list(struct.unpack_from(f"<{count}{_SCALARS[of]}", self.data, at))
        if count * 8 > len(self.data) - self.at:
            raise ValueError(f"a list of {count:,} texts, and {len(self.data) - self.at:,} bytes are left")
        return [self.value(of, inside=True) for _ in range(count)]


def _parse(file: Path, data: _Bytes) -> GGUFHeader:
    if data.data[:4] != b"GGUF":
        raise ValueError("it does not begin with GGUF")
    data.take(4, 1)
    if (version := data.number("I")) not in (2, 3):
        raise ValueError(f"its version is {version}; allowed: 2, 3")
    count, settings = data.number(), {}
    for _ in range(data.number()):
        name = data.text()
        settings[name] = data.value(data.number("I"))
    if isinstance(parts := settings.get("split.count"), int) and parts > 1:
        whole = re.sub(r"-\d{5}-of-\d{5}", "", file.name)
        raise ModelError(
            f"{file}: is one of {parts} parts of a model; join them: llama-gguf-split --merge FIRST_PART {whole}"
        )
    found = {}
    for _ in range(count):
        name = data.text()
        dimensions = [data.number() for _ in range(min(data.number("I"), 5))]
        number, offset = data.number("I"), data.number()
        block = block_of(number)
        if block is None:
            raise ModelError(f"{file}: the tensor {name} is of the type {number}, which gguf and we cannot decode")
        if len(dimensions) > 4 or 0 in dimensions or not dimensions or dimensions[0] % block.weights:
            raise ModelError(f"{file}: the tensor {name} of type {block.kind} cannot have the shape {dimensions}")
        found[name] = GGUFTensor(number, block, tuple(reversed(dimensions)), offset)
    alignment = settings.get("general.alignment", 32)
    if not isinstance(alignment, int) or alignment not in (2**n for n in range(3, 20)):
        raise ValueError(f"its alignment is {alignment!r}")
    start = -(-data.at // alignment) * alignment
    tensors = {name: tensor._replace(offset=start + tensor.offset) for name, tensor in found.items()}
    _check_places(file, tensors, len(data.data), alignment)
    return GGUFHeader(file, settings, tensors)


def _check_places(file: Path, tensors: dict[str, GGUFTensor], size: int, alignment: int) -> None:
    """Refuse tensors that reach beyond the file or into the next one, and a Q2_0 of other blocks than llama.cpp's."""
    places = sorted((tensor.offset, name) for name, tensor in tensors.items())
    for (offset, name), (following, _) in zip(places, [*places[1:], (size, "")], strict=True):
        tensor = tensors[name]
        end = offset + tensor.size
        what = f"{file}: the tensor {name} of type {tensor.block.kind} takes {tensor.size:,} bytes"
        if end > size:
            raise ModelError(f"{what} from {offset:,} on, and the file has {size:,}; it is cut off, fetch it again")
        if end > following or tensor.number == Q2_0 and following - end >= alignment:
            blocks = f"blocks of {tensor.block.weights}"
            raise ModelError(f"{what} in {blocks}, and {following - offset:,} lie there; its writer had other blocks")
