"""Rows of local files: JSON lines, JSON arrays, Parquet; and what a row's fields say.

A row is parsed when it is used, so that skipping to row n of a long file costs reading its lines and no more.
Parquet goes through pyarrow rather than `datasets`, which would first copy the file into its own cache.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from qat_lora.errors import MissingExtraError, TextError

ROW_SUFFIXES = (".jsonl", ".json", ".parquet")


class Row(NamedTuple):
    """A row that is read when it is needed."""

    name: str
    load: Callable[[], dict[str, Any]]


def file_rows(name: str, path: Path) -> Iterator[Row]:
    """Yield the rows of a .jsonl (or JSON lines in a .json), .json or .parquet file; blank lines are no rows.

    Raises:
        TextError: not JSON or Parquet, no permission.
        MissingExtraError: Parquet without pyarrow.
    """
    try:
        if path.suffix.lower() == ".parquet":
            yield from _parquet_rows(name, path)
            return
        with path.open(encoding="utf-8-sig", errors="replace") as file:
            if path.suffix.lower() == ".json" and file.read(4096).lstrip().startswith("["):
                file.seek(0)
                for i, row in enumerate(_parse(file.read(), name)):
                    yield Row(f"{name}[{i}]", partial(_mapping, row, f"{name}[{i}]"))
                return
            file.seek(0)
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield Row(f"{name}:{number}", partial(_parse_row, line, f"{name}:{number}"))
    except OSError as error:
        raise unreadable(name, error) from None


def _parquet_rows(name: str, path: Path) -> Iterator[Row]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise MissingExtraError("reading Parquet files needs pyarrow: pip install 'qat-lora[hub]'") from None
    try:
        table = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise TextError(f"dataset: {name} is not a Parquet file: {error}") from None
    with table:
        rows = (row for batch in table.iter_batches(1024) for row in batch.to_pylist())
        for i, row in enumerate(rows):
            yield Row(f"{name}[{i}]", partial(_mapping, row, f"{name}[{i}]"))


def _parse(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise TextError(f"dataset: {where} is not JSON: {error}") from None


def _mapping(row: Any, where: str) -> dict[str, Any]:
    if not isinstance(row, dict):
        raise TextError(f"dataset: {where} holds {type(row).__name__}; a row is an object with fields")
    return row


def _parse_row(line: str, where: str) -> dict[str, Any]:
    return _mapping(_parse(line, where), where)


def unreadable(name: str, error: OSError) -> TextError:
    """Say that a file cannot be read, and why."""
    return TextError(f"dataset: {name} cannot be read: {error.strerror or error}; check the path and its permissions")


def layout_of(row: Row) -> str:
    """Tell a row's layout by its fields.

    Chat layouts go before `text`: where both are there, the text is the chat as one model's template writes it.
    """
    fields = row.load()
    if "messages" in fields:
        return "messages"
    if "conversations" in fields:
        return "sharegpt"
    return "alpaca" if {"instruction", "output"} <= fields.keys() else "text"


def text_of(row: Row, field: str) -> str:
    """Return a row's text, "" where it is null.

    Raises:
        TextError: no such field (with the fields there are), or no text in it.
    """
    fields = row.load()
    if field not in fields:
        raise TextError(
            f"text_field: {row.name} has no field {field!r}; fields there: "
            f"{', '.join(fields) or 'none'}; choose one with --text-field"
        )
    text = fields[field]
    if text is not None and not isinstance(text, str):
        raise TextError(f"text_field: {field!r} of {row.name} holds {type(text).__name__}; allowed: text")
    return text or ""
