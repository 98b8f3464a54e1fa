r"""Rows of local files: JSON lines, JSON arrays, Parquet.

A row is parsed when it is used, so skipping to row n of a long file only reads lines. Files are read a row at a time,
arrays too, so memory follows the longest row; one of more than `ROW_CHARS` is refused. Parquet goes through pyarrow, as
`datasets` would first copy the file into its own cache. Bytes that are not UTF-8 become U+FFFD, and so does a lone
surrogate (`"\ud800"`, which JSON can express and no tokenizer accepts), in fields and in their names: `well_formed`.
"""

import itertools
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import IO, Any, NamedTuple

from qat_lora.errors import TextError, one_line
from qat_lora.extras import require

ROW_SUFFIXES = (".jsonl", ".json", ".parquet")
ROW_CHARS = 1 << 27  # characters of the longest row that is read; it is held three times over while it is parsed
_READ_CHARS = 1 << 20
_PARQUET_BYTES = 1 << 25  # rows that are decoded at once take about so many
_SURROGATE = re.compile("[\ud800-\udfff]")
_GAP = re.compile(r"[ \t\n\r]*")
_DECODER = json.JSONDecoder()


class Row(NamedTuple):
    """A row that is read when it is needed."""

    name: str
    load: Callable[[], dict[str, Any]]


def file_rows(name: str, path: Path, group: int | None = None) -> Iterator[Row]:
    """Yield the rows of a .jsonl (or JSON lines in a .json), .json or .parquet file, of a row `group` alone if given.

    Blank lines are none. TextError: not JSON or Parquet, unreadable, too long a row; MissingExtraError: no pyarrow.
    """
    with reading(name):
        if path.suffix.lower() == ".parquet":
            yield from _parquet_rows(name, path, group)
            return
        with open_text(path) as file:
            if path.suffix.lower() == ".json" and file.read(4096).lstrip().startswith("["):
                file.seek(0)
                for i, row in enumerate(_members(file, name)):
                    yield Row(f"{name}[{i}]", partial(as_row, row, f"{name}[{i}]"))
                return
        for number, line in enumerate(lines_of(name, path), 1):
            if line.strip():
                yield Row(f"{name}:{number}", partial(_parse_row, line, f"{name}:{number}"))


def group_bytes(path: Path) -> list[int]:
    """Return the sizes of a Parquet file's row groups."""
    meta = require("pyarrow.parquet", "hub").read_metadata(path)
    return [meta.row_group(i).total_byte_size for i in range(meta.num_row_groups)]


def _parquet_rows(name: str, path: Path, group: int | None) -> Iterator[Row]:
    arrow, parquet = require("pyarrow", "hub"), require("pyarrow.parquet", "hub")
    try:
        with parquet.ParquetFile(path, buffer_size=_READ_CHARS) as table:
            meta = table.metadata
            size = sum(meta.row_group(i).total_byte_size for i in range(meta.num_row_groups))
            at_once = max(1, min(1024, _PARQUET_BYTES * meta.num_rows // max(size, 1)))
            i = itertools.count(sum(meta.row_group(before).num_rows for before in range(group or 0)))
            for batch in table.iter_batches(at_once, None if group is None else [group]):
                fields = batch.schema.names
                columns = [_column(batch.column(j), f"{name}: field {field!r}") for j, field in enumerate(fields)]
                for values in zip(*columns, strict=True):
                    where = f"{name}[{next(i)}]"
                    yield Row(where, partial(as_row, dict(zip(fields, values, strict=True)), where))
    except arrow.ArrowException as error:
        raise TextError(f"dataset: {name} is not a Parquet file: {one_line(error)}") from None


def _column(column: Any, where: str) -> list[Any]:
    """Return a column of an Arrow batch; bytes of a text that are not UTF-8, which Parquet allows, as U+FFFD."""
    try:
        return column.to_pylist()
    except UnicodeDecodeError:
        width = {"string": "binary", "large_string": "large_binary"}.get(str(column.type))
        if width is None:
            raise TextError(f"dataset: {where} holds bytes that are not UTF-8; write the file anew as UTF-8") from None
        return [value and value.decode("utf-8", "replace") for value in column.view(width).to_pylist()]


def lines_of(name: str, path: Path) -> Iterator[str]:
    """Yield the lines of a file; TextError if it cannot be read, or for one of more than `ROW_CHARS` characters."""
    with reading(name), open_text(path) as file:
        for number, line in enumerate(iter(partial(file.readline, ROW_CHARS), ""), 1):
            if len(line) == ROW_CHARS and line[-1] != "\n":
                raise too_long(f"{name}:{number}")
            yield line


def too_long(where: str) -> TextError:
    """Say that a row or an article is longer than what is read whole."""
    remedy = "divide it, or give its text as a plain file, which may have any size"
    return TextError(f"dataset: {where} has more than {ROW_CHARS:,} characters; {remedy}")


def _members(file: IO[str], name: str) -> Iterator[Any]:
    """Yield the members of a JSON array, reading on as they are taken."""
    text, count = file.read(_READ_CHARS), 0
    at = _gap(text, 0) + 1
    while True:
        where, end = f"{name}[{count}]", _gap(text, at)
        if count or text[end : end + 1] != "]":
            fault: Exception = ValueError("the array has no end")
            try:
                row, end = _DECODER.raw_decode(text, end)
                end = _gap(text, end)
            except (ValueError, RecursionError) as error:
                # It may have failed only because the text goes on.
                cut = isinstance(error, json.JSONDecodeError) and error.pos > len(text) - len("-Infinity")
                if not cut and not getattr(error, "msg", "").startswith("Unterminated string"):
                    raise _not_json(where, error) from None
                fault, end = error, len(text)
            if end == len(text):  # text may go on, and 12 become 123
                further = file.read(max(_READ_CHARS, len(text) - at))
                if not further:
                    raise _not_json(where, fault)
                if len(text) - at > ROW_CHARS:
                    raise too_long(where)
                text, at = text[at:] + further, 0
                continue
            yield row
            count += 1
        if text[end] == "]" and not (text[end + 1 :] + file.read(_READ_CHARS)).strip():
            return
        if text[end] != ",":
            raise _not_json(where, ValueError("neither a comma nor the end of the array comes behind it"))
        at = end + 1


def _gap(text: str, at: int) -> int:
    """Return where white space ends."""
    return _GAP.match(text, at).end()  # type: ignore[union-attr]  # it matches nothing at all too


def _not_json(where: str, error: Exception) -> TextError:
    reason = "it is nested too deeply" if isinstance(error, RecursionError) else getattr(error, "msg", error)
    return TextError(f"dataset: {where} is not JSON that can be read: {reason}")


def _parse_row(line: str, where: str) -> dict[str, Any]:
    try:
        row = _DECODER.decode(line)
    except (ValueError, RecursionError) as error:
        raise _not_json(where, error) from None
    return as_row(row, where)


def as_row(row: Any, where: str) -> dict[str, Any]:
    """Return a row with its texts `well_formed`; TextError if it is no object with fields, or nested too deeply."""
    if not isinstance(row, dict):
        raise TextError(f"dataset: {where} holds {type(row).__name__}; a row is an object with fields")
    try:
        return _well_formed_values(row)
    except RecursionError as error:
        raise _not_json(where, error) from None


def _well_formed_values(value: Any) -> Any:
    if isinstance(value, str):
        return well_formed(value)
    if isinstance(value, list):
        return [_well_formed_values(each) for each in value]
    if isinstance(value, dict):
        return {_well_formed_values(name): _well_formed_values(each) for name, each in value.items()}
    return value


def well_formed(text: str) -> str:
    """Return a text with U+FFFD for every lone surrogate, as text files have it for bytes that are not UTF-8."""
    return text if text.isascii() else _SURROGATE.sub("\ufffd", text)


@contextmanager
def reading(name: str) -> Iterator[None]:
    """Turn errors of the disk into a TextError that names the file."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error
        raise TextError(f"dataset: {name} cannot be read: {reason}; check the path and its permissions") from None


def open_text(path: Path) -> IO[str]:
    """Open a text as UTF-8, without its byte order mark, with U+FFFD for bytes that are not."""
    return path.open(encoding="utf-8-sig", errors="replace")
