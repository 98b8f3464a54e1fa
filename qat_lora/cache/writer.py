"""Writes a KD cache, shard by shard, so that a kill at any moment costs at most the shard in work.

A shard is committed by its sidecar, which also holds the source's position after the shard's last row. Resuming
is therefore a look at the last sidecar: no replay of the text, no counters that can disagree with the data (the
predecessor's `--resume` restored its counter and started the text again, so its caches held everything twice).
The manifest is written last and only by a build that ran to its end: leaving the `with` block by an exception
writes none, where other dataset writers happily seal half a dataset.

Evaluation rows come first, as a shard series of their own (`e-`), then the training rows (`s-`). A cache is a pure
function of its rows: no dates, no host names, so equal builds have equal bytes.
"""

from __future__ import annotations

import contextlib
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from qat_lora.cache import format as fmt
from qat_lora.cache.codec import Arrays, encode_rows
from qat_lora.cache.commit import exclusive, sync_folder, write_new
from qat_lora.cache.records import Fingerprint, Manifest, ShardEntry, Sidecar, render
from qat_lora.cache.store import Progress, check_shard_bytes, read_manifest, read_sidecars
from qat_lora.errors import CacheDamaged, CacheError, OutputExistsError

_TEMPORARY = re.compile(r"\.([se]-[0-9]{6}\.(safetensors|json)|manifest\.json)\.tmp")


class ResumeState(NamedTuple):
    """Where a build stands: rows safely on disk, and the source's position after them."""

    rows: int
    """Training rows committed."""
    cursor: Any
    """What the source gave with the last committed training row; None before the first."""
    eval_rows: int
    """Evaluation rows committed; they are few and counted, not found by a cursor."""
    finished: bool


class CacheWriter:
    """Appends rows to a cache folder; a context manager that holds the folder's lock.

    Args:
        out: the cache folder, made if absent. A folder with the same fingerprint is resumed.
        fingerprint: what the cache will hold.
        shard_rows: rows of a shard; default: about 128 MB.
        info: notes for people, kept in the manifest.
        overwrite: delete an existing cache in `out` first (its own files only).
    """

    def __init__(
        self,
        out: str | Path,
        fingerprint: Fingerprint,
        shard_rows: int | None = None,
        *,
        info: Mapping[str, Any] | None = None,
        overwrite: bool = False,
    ) -> None:
        self.out = Path(out)
        self.fingerprint = fingerprint
        self.shard_rows = shard_rows or fmt.default_shard_rows(fingerprint.arrays)
        self.finished = False
        self.stopped = False
        self._info = dict(info or {})
        self._overwrite = overwrite
        self._stack = contextlib.ExitStack()
        self._entries: dict[str, list[ShardEntry]] = {"train": [], "eval": []}
        self._pending: list[Arrays] = []
        self._pending_split = "eval"
        self._pending_cursor: Any = None
        self._pending_rows = 0
        self._cursor: Any = None

    def __enter__(self) -> CacheWriter:
        self._wrap(self._open)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._stack:
            if kind is None and not (self.stopped or self.finished):
                self.finish()

    def resume_state(self) -> ResumeState:
        """Return what is committed: give `cursor` to the row source and go on from there."""
        return ResumeState(self._rows("train"), self._cursor, self._rows("eval"), self.finished)

    def append(self, rows: Mapping[str, np.ndarray], cursors: Sequence[Any], split: str = "train") -> None:
        """Add n rows; every full shard is committed before this returns.

        Args:
            rows: arrays as `codec.encode_rows` takes them.
            cursors: n JSON values: the source's position after each row.
            split: `eval` (only before the first training row) or `train`.

        Raises:
            CacheError: rows that do not fit the fingerprint, a full disk.
        """
        if self.finished or self.stopped:
            raise CacheError(f"--out {self.out}: is complete or was stopped; nothing can be added to it")
        if len(cursors) != len(rows["input_ids"]):
            raise CacheError(f"cursors: {len(cursors)} for {len(rows['input_ids'])} rows; give one a row")
        if split != self._pending_split:
            if split != "train":
                raise CacheError("split: eval rows came after train rows; evaluation rows come first")
            self._flush()
            self._pending_split = split
        arrays = encode_rows(rows, self.fingerprint)
        taken = 0
        while taken < len(cursors):
            end = min(len(cursors), taken + self.shard_rows - self._pending_rows)
            self._pending.append({name: array[taken:end] for name, array in arrays.items()})
            self._pending_rows += end - taken
            self._pending_cursor = cursors[end - 1]
            taken = end
            if self._pending_rows == self.shard_rows:
                self._flush()

    def stop(self) -> None:
        """End without completing: the shard in work is dropped, what is committed stays for a later resume."""
        self.stopped = True
        self._pending, self._pending_rows = [], 0

    def finish(self, progress: Progress | None = None) -> Manifest:
        """Commit the last, partial shard, read every shard back and write the manifest.

        Args:
            progress: called with (shard, bytes read) while reading back.

        Raises:
            CacheError: no training row was written.
            CacheDamaged: a shard is not what was written.
        """
        if self.finished:
            return read_manifest(self.out)
        self._flush()
        if not self._rows("train"):
            kept = f" (all {self._rows('eval')} rows went to the evaluation split)" if self._rows("eval") else ""
            raise CacheError(f"--out {self.out}: no training row to store{kept}; give more text or fewer --eval-rows")
        for entry in (*self._entries["eval"], *self._entries["train"]):
            check_shard_bytes(self.out, entry, progress)
        manifest = Manifest(
            fingerprint=self.fingerprint,
            train=tuple(self._entries["train"]),
            eval=tuple(self._entries["eval"]),
            info=self._info,
        )
        self._wrap(lambda: write_new(self.out / fmt.MANIFEST, [render(manifest)], "manifest"))
        self.finished = True
        return manifest

    def _rows(self, split: str) -> int:
        return sum(entry.rows for entry in self._entries[split])

    def _wrap(self, action: Callable[[], Any]) -> Any:
        """Run file work; an operating-system error becomes one line that says what is safe."""
        try:
            return action()
        except (OutputExistsError, CacheError):
            raise
        except OSError as error:
            rows = self._rows("train") + self._rows("eval")
            raise CacheError(
                f"--out {self.out}: cannot be written ({error.strerror}); {rows:,} rows are safe: make room "
                "or give permission, then run the same command again"
            ) from error

    def _open(self) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            stack.enter_context(exclusive(self.out / fmt.LOCK))
            if self._overwrite:
                self._delete()
            else:
                self._load()
            self._sweep()
            self._stack = stack.pop_all()

    def _load(self) -> None:
        """Take over what is committed; raises before anything in the folder is changed."""
        if (self.out / fmt.MANIFEST).exists() or (self.out / fmt.MANIFEST).is_symlink():
            manifest = read_manifest(self.out)
            self._require_same(manifest.fingerprint)
            self.finished = True
        for split in ("eval", "train"):
            for sidecar, entry in read_sidecars(self.out, split):
                self._require_same(sidecar.fingerprint)
                if sidecar.first_row != self._rows(split):
                    raise CacheDamaged(
                        f"{self.out}/{entry.shard}.json: starts at row {sidecar.first_row}, expected "
                        f"{self._rows(split)}; the shards before it are not those it was made with"
                    )
                self._entries[split].append(entry)
                if split == "train":
                    self._cursor = sidecar.cursor
        if self._entries["train"]:
            self._pending_split = "train"

    def _require_same(self, found: Fingerprint) -> None:
        different = found.difference(self.fingerprint)
        if different is not None:
            name, there, asked = different
            raise OutputExistsError(
                f"--out {self.out}: holds another cache: {name} is {there!r} there, {asked!r} was asked for; "
                "nothing was touched: choose another --out, or add --overwrite to start again"
            )

    def _delete(self) -> None:
        (self.out / fmt.MANIFEST).unlink(missing_ok=True)  # first: what remains after a kill is an unfinished build
        for ending in ("json", "safetensors"):
            for path in self.out.glob(f"*.{ending}"):
                if fmt.parse_shard_name(path.stem):
                    path.unlink()

    def _sweep(self) -> None:
        """Remove what a killed build left: temporary files, and shards that were never committed."""
        committed = {entry.shard for entries in self._entries.values() for entry in entries}
        for path in sorted(self.out.iterdir()):
            orphan = path.suffix == ".safetensors" and fmt.parse_shard_name(path.stem) and path.stem not in committed
            if orphan or _TEMPORARY.fullmatch(path.name):
                path.unlink()
        sync_folder(self.out)

    def _flush(self) -> None:
        if self._pending_rows:
            self._wrap(self._commit)

    def _commit(self) -> None:
        split, rows = self._pending_split, self._pending_rows
        name = fmt.shard_name(split, len(self._entries[split]))
        plan = fmt.layout(self.fingerprint.arrays, rows, self.fingerprint.sha256)

        def chunks() -> Iterator[bytes | memoryview]:
            yield plan.header
            for placed in plan.arrays:
                for piece in self._pending:
                    yield np.ascontiguousarray(piece[placed.spec.name]).view(np.uint8).reshape(-1).data

        sidecar = Sidecar(
            shard=name,
            first_row=self._rows(split),
            rows=rows,
            bytes=plan.total_bytes,
            sha256="",
            cursor=self._pending_cursor,
            fingerprint=self.fingerprint,
        )
        _check_sidecar(render(sidecar), name)  # before the shard: a cursor that cannot be stored must not cost it
        size, digest = write_new(self.out / f"{name}.safetensors", chunks(), "shard")
        text = render(Sidecar(**{**_shallow(sidecar), "sha256": digest, "bytes": size}))
        write_new(self.out / f"{name}.json", [text], "sidecar")
        self._entries[split].append(
            ShardEntry(
                shard=name, rows=rows, bytes=size, sha256=digest, sidecar_sha256=hashlib.sha256(text).hexdigest()
            )
        )
        if split == "train":
            self._cursor = self._pending_cursor
        self._pending, self._pending_rows = [], 0


def _shallow(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__dataclass_fields__}


def _check_sidecar(text: bytes, name: str) -> None:
    if len(text) > fmt.SIDECAR_LIMIT_BYTES - 128:
        raise CacheError(
            f"cursor: the source's position takes {len(text):,} bytes in {name}.json; allowed: 1 MB; a "
            "cursor should name a place in the source, not copy its text"
        )
