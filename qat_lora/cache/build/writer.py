"""Writes a KD cache, shard by shard, so that a kill at any moment costs at most the shard in work.

A shard is committed by its sidecar, which also holds the source's position after the shard's last row. Resuming is
therefore a look at the last sidecar: no replay of the text, no counters that can disagree with the data. The manifest
is written last and only by a build that ran to its end: leaving the `with` block by an exception writes none.

Evaluation rows come first, as a shard series of their own (`e-`), then the training rows (`s-`). A cache is a pure
function of its rows: no dates, no host names, so equal builds have equal bytes.

Of n builders that fill one folder, builder i owns its part of the text and the shard numbers j with j mod n = i.
It never waits for another and never writes a name that another writes, so builders may run on machines that share
nothing but the folder, and each resumes by itself. A common queue of documents would balance the load better, but rows
would depend on timing, and no killed build could go on to the same bytes. A builder whose rows have ended writes a
record of its own (`b-000001.json`); the one that finds all n writes the manifest, under a lock, at any later start too.
"""

import contextlib
import dataclasses
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import numpy as np

from qat_lora.cache.format import layout as fmt
from qat_lora.cache.format.codec import Arrays, encode_rows
from qat_lora.cache.format.compressed import compress_rows
from qat_lora.cache.format.lm_head import LMHeadFile, check_lm_head
from qat_lora.cache.format.records import Fingerprint, Manifest, Part, ShardEntry, Sidecar, parse, render
from qat_lora.cache.storage import store
from qat_lora.cache.storage.location import LocalFolder, Location, Place, locate
from qat_lora.errors import CacheDamaged, CacheError, ConfigError, OutputExistsError, OvertakenError
from qat_lora.files import folders as files

_BUILDER = re.compile(r"([0-9]{1,6})/([0-9]{1,6})")
# A file that a kill can leave, unless it is a shard with its sidecar.
_UNCOMMITTED = re.compile(r"\.[seb]-([0-9]{6})\.(?:safetensors|json)\.tmp|([se]-([0-9]{6}))\.safetensors")
_MANIFEST_TEMPORARY = f".{fmt.MANIFEST}.tmp"
_RECORD, _OUTPUT, _LOCK = map(re.escape, (fmt.MANIFEST, fmt.LM_HEAD, fmt.LOCK))
# The files that a builder writes, by kind: their names, and how each begins. One that a kill cut off begins with
# anything, and is ours in a folder that is a cache.
_KINDS = {
    "record": (rf"{_RECORD}|[seb]-[0-9]{{6}}\.json", rf'\{{\s*"format": "{fmt.FORMAT}"'),
    "tensors": (rf"{_OUTPUT}|[se]-[0-9]{{6}}\.safetensors", rf'(?s).{{8}}\{{"__metadata__":\{{"format":"{fmt.FORMAT}"'),
    "lock": (rf"{_LOCK}(\.manifest|\.[0-9]+)?", r"([0-9]+\n)?\Z"),
    "temporary": (rf"\.({_RECORD}|{_OUTPUT}|[seb]-[0-9]{{6}}\.[a-z]+)\.tmp", ""),
}


class Partition(NamedTuple):
    """Builder number `builder` of `builders`."""

    builder: int = 0
    builders: int = 1

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read `i/n`; ConfigError for anything else."""
        match = _BUILDER.fullmatch(text)
        if match is None or int(match[1]) >= int(match[2]):
            raise ConfigError(f"builder: {text!r} does not fit; allowed: i/n with i from 0 to n - 1, for example 0/2")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        """Return what `parse` reads."""
        return f"{self.builder}/{self.builders}"

    def shard_name(self, split: str, index: int) -> str:
        """Return the name of this builder's shard number `index`."""
        return fmt.shard_name(split, index * self.builders + self.builder)

    def of(self, rows: int) -> int:
        """Return this builder's part of a number of rows; all parts sum to it and differ by at most one."""
        return rows * (self.builder + 1) // self.builders - rows * self.builder // self.builders


class ResumeState(NamedTuple):
    """Where a builder stands: its rows safely on disk, and the source's position after them."""

    rows: int  # for training
    cursor: Any  # what the source gave with the last committed training row; None before the first
    eval_rows: int  # they are few and counted, not found by a cursor
    finished: bool  # whether the cache has its manifest


class CacheWriter:
    """Appends rows to a cache folder; a context manager that holds the folder's lock (a builder's own, if several).

    A folder or URL `out` with the same fingerprint is resumed; `overwrite` first deletes an existing cache (its own
    files only; ConfigError with several builders). `shard_rows` are by default about 128 MB. A cache that holds hidden
    states needs the teacher's `lm_head`, which is written before the first row.
    """

    def __init__(
        self,
        out: Place,
        fingerprint: Fingerprint,
        shard_rows: int | None = None,
        *,
        overwrite: bool = False,
        partition: Partition | None = None,
        lm_head: LMHeadFile | None = None,
    ) -> None:
        self.partition = partition or Partition()
        if overwrite and self.partition.builders > 1:
            what = f"builder {self.partition} would delete what the other builders have written"
            raise ConfigError(f"overwrite: {what}; delete {out} yourself before starting them, or choose another --out")
        self.out = locate(out)
        self.fingerprint = fingerprint
        self.shard_rows = shard_rows or fmt.default_shard_rows(fingerprint.arrays)
        self.finished = self.stopped = self._ended = False
        self._overwrite, self._lm_head = overwrite, lm_head
        self._stack = contextlib.ExitStack()
        self._entries: dict[str, list[ShardEntry]] = {"train": [], "eval": []}
        self._pending: list[Arrays] = []
        self._pending_split, self._pending_rows = "eval", 0
        self._pending_cursor: Any = None
        self._cursor: Any = None

    def __enter__(self) -> Self:
        self._wrap(self._open)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._stack:
            if kind is None and not (self.stopped or self.finished):
                self.finish()

    def resume_state(self) -> ResumeState:
        """Return what is committed: give `cursor` to the row source and go on from there."""
        return ResumeState(self._rows("train"), self._cursor, self._rows("eval"), self.finished)

    def waiting_for(self) -> tuple[int, ...]:
        """Return the other builders that must end before there is a manifest."""
        if self.finished:
            return ()
        names = {fmt.part_name(self.partition.builder), *self.out.names()}  # one listing, not a request a builder
        return tuple(other for other in range(self.partition.builders) if fmt.part_name(other) not in names)

    def append(self, rows: Mapping[str, np.ndarray], cursors: Sequence[Any], split: str = "train") -> None:
        """Add n rows, arrays as `codec.encode_rows` takes them; every full shard is committed before this returns.

        `cursors` are n JSON values, the source's position after each row; `split` is `eval` (only before the first
        training row, only in builder 0) or `train`. CacheError: rows that do not fit the fingerprint, a full disk.
        """
        if self.finished or self._ended or self.stopped:
            raise CacheError(f"--out {self.out}: is complete or was stopped; nothing can be added to it")
        if split != self._pending_split:
            self._wrap(self._flush)
            self._pending_split = split
        arrays, end = encode_rows(rows, self.fingerprint), 0
        while (start := end) < len(cursors):
            end = min(len(cursors), start + self.shard_rows - self._pending_rows)
            self._pending.append({name: array[start:end] for name, array in arrays.items()})
            self._pending_rows += end - start
            self._pending_cursor = cursors[end - 1]
            if self._pending_rows == self.shard_rows:
                self._wrap(self._flush)

    def stop(self) -> None:
        """End without completing: the shard in work is dropped, what is committed stays for a later resume."""
        self.stopped = True
        self._pending, self._pending_rows = [], 0

    def finish(self) -> Manifest | None:
        """Commit the last shard, read all shards back, write the manifest; None where other builders are still at work.

        CacheError: no training row was written; CacheDamaged: a shard is not what was written.
        """
        if self.finished:
            return store.read_manifest(self.out)
        self._wrap(self._flush)
        check_lm_head(self.out, self.fingerprint, whole=not self.out.far)
        for entry in (*self._entries["eval"], *self._entries["train"]):
            store.check_shard_size(self.out, entry)
            if not self.out.far:  # there it was read back when it was put: no second transfer of everything
                store.Shard(self.out, entry, self.fingerprint).check_sha256()
        return self._wrap((lambda: self._seal(self._entries)) if self.partition.builders == 1 else self._end)

    def _end(self) -> Manifest | None:
        """Say that this builder has ended; as the last to do so, write the manifest."""
        if not self._ended:
            shards: dict[str, Any] = {f"{split}_shards": len(entries) for split, entries in self._entries.items()}
            part = Part(**self.partition._asdict(), **shards, **self._version())
            self.out.write_new(fmt.part_name(self.partition.builder), [render(part)], "part")
            self._ended = True
        with self.out.lock(f"{fmt.LOCK}.manifest", "waiting"):
            if not self.out.has(fmt.MANIFEST):
                if self.waiting_for():
                    return None
                self.out.delete(_MANIFEST_TEMPORARY)  # of a builder that was killed right here
                entries = gather(self.out, self.partition.builders, self.fingerprint)
                with contextlib.suppress(OutputExistsError):  # no lock on a store: two builders may end at once
                    return self._seal(entries)
            self.finished = True
            return store.read_manifest(self.out)

    def _seal(self, entries: Mapping[str, Sequence[ShardEntry]]) -> Manifest:
        train, held = (sum(entry.rows for entry in entries[split]) for split in ("train", "eval"))
        if not train:
            kept = f" (all {held} rows went to the evaluation split)" if held else ""
            raise CacheError(f"--out {self.out}: no training row to store{kept}; give more text or fewer --eval-rows")
        shards: dict[str, Any] = {split: (*entries[split],) for split in ("train", "eval")}
        manifest = Manifest(**self._version(), **shards)
        self.out.write_new(fmt.MANIFEST, [render(manifest)], "manifest")
        self.finished = True
        return manifest

    def _version(self) -> dict[str, Any]:
        return {"version": self.fingerprint.version, "fingerprint": self.fingerprint}

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
            remedy = f"{rows:,} rows are safe: make room or give permission, then run the same command again"
            raise CacheError(f"--out {self.out}: cannot be written ({error.strerror}); {remedy}") from error

    def _open(self) -> None:
        self._refuse_foreign()
        if isinstance(self.out, LocalFolder):
            self.out.path.mkdir(parents=True, exist_ok=True)
        with contextlib.ExitStack() as stack:
            if self.partition.builders == 1:
                stack.enter_context(self.out.lock(fmt.LOCK, "exclusive"))
            else:  # keep out the same builder a second time, and builders that divide the work differently
                stack.enter_context(self.out.lock(fmt.LOCK, "shared"))
                stack.enter_context(self.out.lock(f"{fmt.LOCK}.{self.partition.builder}", "exclusive"))
            if self._overwrite:
                self.out.delete(fmt.MANIFEST)  # first: what remains after a kill is an unfinished build
                for name in self.out.names():
                    if _kind(name) in ("record", "tensors"):
                        self.out.delete(name)
            else:
                self._load()
            self._remove_leftovers()
            if self.fingerprint.lm_head_sha256 is not None and not self.finished:
                self._put_lm_head()
            self._stack = stack.pop_all()

    def _put_lm_head(self) -> None:
        """Write the teacher's LM head, or check the one that is there; of several builders one at a time."""
        file, several = self._lm_head, self.partition.builders > 1
        with self.out.lock(f"{fmt.LOCK}.manifest", "waiting") if several else contextlib.nullcontext():
            self.out.delete(f".{fmt.LM_HEAD}.tmp")  # of a builder that was killed right here
            if self.out.has(fmt.LM_HEAD):
                check_lm_head(self.out, self.fingerprint)
            elif file is None or file.sha256 != self.fingerprint.lm_head_sha256:
                what = "is to hold hidden states, but the output head that was given is not the one of its fingerprint"
                remedy = "give the writer `lm_head_file(teacher.lm_head())` of the same teacher"
                raise CacheError(f"{self.out}: {what}; {remedy}")
            else:
                self.out.write_new(fmt.LM_HEAD, file.parts, "head")

    def _load(self) -> None:
        """Take over what is committed; raises before anything in the folder is changed."""
        if self.out.has(fmt.MANIFEST):
            manifest = store.read_manifest(self.out)
            self._require_same(manifest.fingerprint)
            self._require_files(manifest)
            self.finished = True
        for split in ("eval", "train"):
            numbers = store.committed(self.out, split)
            for number in numbers[:1]:  # one tells, whichever builder wrote it
                sidecar, _ = store.read_sidecar(self.out, fmt.shard_name(split, number))
                self._require_same(sidecar.fingerprint)
                if sidecar.builders != self.partition.builders:
                    what = f"is filled by {sidecar.builders} builders, and this is builder {self.partition}"
                    remedy = "nothing was touched: give the same number, or choose another --out"
                    raise OutputExistsError(f"--out {self.out}: {what}; {remedy}")
            for sidecar, entry in store.read_sidecars(self.out, split, *self.partition, numbers):
                self._require_same(sidecar.fingerprint)
                if sidecar.first_row != self._rows(split):
                    what = f"starts at row {sidecar.first_row}, expected {self._rows(split)}"
                    cause = "the shards before it are not those it was made with"
                    raise CacheDamaged(f"{self.out}/{entry.shard}.json: {what}; {cause}")
                self._entries[split].append(entry)
                if split == "train":
                    self._cursor = sidecar.cursor
        if self._entries["train"] or self.partition.builder:
            self._pending_split = "train"
        self._ended = read_part(self.out, self.partition, self.fingerprint) is not None

    def _require_files(self, manifest: Manifest) -> None:
        """Raise CacheDamaged unless every file of a finished cache is there, whichever builder wrote it."""
        there = set(self.out.names())
        wanted = [f"{entry.shard}.{ending}" for entry in manifest.all_shards for ending in ("safetensors", "json")]
        if self.fingerprint.lm_head_sha256 is not None:
            wanted.append(fmt.LM_HEAD)
        if missing := [name for name in wanted if name not in there]:
            more = f" and {len(missing) - 1:,} more files" if len(missing) > 1 else ""
            again = "build all again with --overwrite"
            if self.partition.builders > 1:
                again = "delete the folder and start all builders again"
            what = f"is missing{more}, and {fmt.MANIFEST} lists it; nothing was touched"
            raise CacheDamaged(f"{self.out}/{missing[0]}: {what}: copy it back from where it is whole, or {again}")

    def _require_same(self, found: Fingerprint) -> None:
        if different := found.difference(self.fingerprint):
            name, there, asked = different
            what = f"holds another cache: {name} is {there!r} there, {asked!r} was asked for"
            remedy = "nothing was touched: choose another --out, or add --overwrite to start again"
            raise OutputExistsError(f"--out {self.out}: {what}; {remedy}")
        self.fingerprint = found  # its shards say how the teacher was spelt, and all of a cache say the same

    def _refuse_foreign(self) -> None:
        """Refuse a folder with files and no cache of ours, or others' files under a cache's names, unread so far."""
        names = self.out.names()
        kinds = {name: kind for name in names if (kind := _kind(name)) is not None}
        told = [name for name, kind in kinds.items() if kind != "temporary"]
        known = {name for name in told if self._overwrite or kinds[name] == "lock"}
        known |= {name for name in kinds if kinds[name] == "tensors" and f"{name.partition('.')[0]}.json" not in kinds}
        foreign = [name for name in sorted(known) if not self._is_ours(name, kinds[name])]
        rest = (name for name in told if name not in known)
        is_part = isinstance(self.out, LocalFolder) and files.is_part(self.out.path)
        is_cache = len(foreign) < len(known) or any(self._is_ours(name, kinds[name]) for name in rest)
        if names and not (is_part or is_cache):
            raise OutputExistsError(f"--out {self.out}: holds files and no KD cache; choose another folder")
        if foreign:
            what = f"{foreign[0]} is no file of a KD cache and in the way of one"
            remedy = "nothing was touched: move it away, or choose another --out"
            raise OutputExistsError(f"--out {self.out}: {what}; {remedy}")
        if self._overwrite and (others := [name for name in names if name not in kinds]):
            print(f"note: {self.out}: not of a KD cache, so left as it is: {', '.join(others[:8])}", file=sys.stderr)

    def _is_ours(self, name: str, kind: str) -> bool:
        """Tell by its first bytes whether a file is of a KD cache; the name alone does not."""
        try:
            with contextlib.closing(self.out.chunks(name)) as chunks:  # type: ignore[type-var]
                return re.match(_KINDS[kind][1].encode(), next(chunks, b"")[:256]) is not None
        except FileNotFoundError:  # removed meanwhile
            return True
        except (OSError, CacheDamaged):
            return False

    def _remove_leftovers(self) -> None:
        """Remove what this builder left when it was killed: temporary files, the shard that it had not committed.

        A kill leaves one such shard, the next of its series, and none once this builder has ended. Every other one was
        committed and has lost its sidecar: CacheDamaged, and nothing is removed.
        """
        if not isinstance(self.out, LocalFolder):  # a store has no half objects; one without sidecar may be another's
            return
        kept = {entry.shard for entries in self._entries.values() for entry in entries}
        number, builders = self.partition
        may_be_left: set[str] = set()
        if not (self.finished or self._ended):
            series = {fmt.SERIES[split]: len(entries) for split, entries in self._entries.items()}
            may_be_left = {f"{letter}-{count * builders + number:06d}" for letter, count in series.items()}
        leftovers: list[str] = []
        committed: list[str] = []
        for file in self.out.names():
            match = _UNCOMMITTED.fullmatch(file)
            if match is None or int(match[1] or match[3]) % builders != number or match[2] in kept:
                continue
            if match[2] is None or match[2] in may_be_left:
                leftovers.append(file)
            elif not self.finished:  # there a shard that the manifest does not list is no part of the cache
                committed.append(match[2])
        if committed:
            more = f" (nor have {len(committed) - 1:,} more shards)" if len(committed) > 1 else ""
            what = f"has no sidecar{more}, and no kill leaves such a shard; nothing was touched"
            part = f" and {fmt.part_name(number)}" if self._ended else ""
            remedy = f"copy {committed[0]}.json back from where it is, or delete the shard{part} to build it again"
            raise CacheDamaged(f"{self.out}/{committed[0]}.safetensors: {what}: {remedy}")
        if builders == 1 or self.finished:  # else another builder may be writing it now
            leftovers.append(_MANIFEST_TEMPORARY)
        for file in leftovers:
            self.out.delete(file)
        files.fsync(self.out.path)

    def _flush(self) -> None:
        """Commit the rows that wait, if there are any."""
        split, rows = self._pending_split, self._pending_rows
        if not rows:
            return
        name = self.partition.shard_name(split, len(self._entries[split]))
        held, table = self.fingerprint.contents, self.fingerprint.arrays
        body = compress_rows(self._pending, held, table) if held.lzma else []
        plan = self.fingerprint.layout(rows, fmt.COMPRESSED_HEADER_BYTES + sum(map(len, body)))

        def chunks() -> Iterator[bytes | memoryview]:
            yield plan.header
            yield from body
            for array in () if body else plan.starts:
                for piece in self._pending:
                    yield np.ascontiguousarray(piece[array]).view(np.uint8).reshape(-1).data

        found: dict[str, Any] = {"shard": name, "first_row": self._rows(split), "rows": rows, "bytes": plan.total_bytes}
        found |= {**self._version(), **self.partition._asdict(), "cursor": self._pending_cursor}
        sidecar = Sidecar(**found, sha256="")
        text_bytes = len(render(sidecar))
        if text_bytes > fmt.SIDECAR_LIMIT_BYTES - 128:  # a cursor that cannot be stored must not cost the shard
            allowed = "allowed: 1 MB; a cursor should name a place in the source, not copy its text"
            raise CacheError(f"cursor: the source's position takes {text_bytes:,} bytes in {name}.json; {allowed}")
        try:
            _, digest = self.out.write_new(f"{name}.safetensors", chunks(), "shard")
            entry = self._commit(dataclasses.replace(sidecar, sha256=digest))
        except FileExistsError as error:
            entry = self._adopt(sidecar, error)
        self._entries[split].append(entry)
        if split == "train":
            self._cursor = self._pending_cursor
        self._pending, self._pending_rows = [], 0

    def _commit(self, sidecar: Sidecar) -> ShardEntry:
        text = render(sidecar)
        self.out.write_new(f"{sidecar.shard}.json", [text], "sidecar")
        return store.shard_entry(sidecar, text)

    def _adopt(self, ours: Sidecar, taken: FileExistsError) -> ShardEntry:
        """Return the shard of our name that another start of this builder put first, if it has the same tokens.

        Its values may differ in the last bits, as of another machine. One that was killed before its sidecar gets ours.
        OvertakenError: it ends elsewhere, so the source goes on from there; `taken` is raised for any other shard.
        """
        name, committed = ours.shard, self.out.has(f"{ours.shard}.json")
        theirs = store.read_sidecar(self.out, name)[0] if committed else ours
        self._require_same(theirs.fingerprint)
        if theirs.builders != ours.builders or theirs.first_row != ours.first_row:
            raise taken
        if (theirs.rows, theirs.cursor) != (ours.rows, ours.cursor):
            raise OvertakenError(f"{self.out}/{name}: another start of builder {self.partition} was faster; run again")
        try:
            ours = dataclasses.replace(ours, bytes=self.out.size(f"{name}.safetensors"))
            entry = ShardEntry(shard=name, rows=ours.rows, bytes=ours.bytes, sha256="", sidecar_sha256="")
            there = store.Shard(self.out, entry, self.fingerprint, preload=self.out.far)
            rows, digest = there.rows(0, ours.rows), there.sha256()
        except (CacheDamaged, FileNotFoundError):
            raise taken from None
        for array in ("input_ids", "loss_mask", "doc_starts"):
            if not np.array_equal(rows[array], np.concatenate([piece[array] for piece in self._pending])):
                raise taken
        with contextlib.suppress(FileExistsError):  # put meanwhile
            return self._commit(dataclasses.replace(ours, sha256=digest))
        return store.read_sidecar(self.out, name)[1]


def _kind(name: str) -> str | None:
    """Return what a file would be in a cache, None for a name that no builder writes."""
    return next((kind for kind, (names, _) in _KINDS.items() if re.fullmatch(names, name)), None)


def read_part(folder: Location, partition: Partition, fingerprint: Fingerprint) -> Part | None:
    """Return a builder's record of having ended, if it has; CacheDamaged; OutputExistsError: of another build."""
    name = fmt.part_name(partition.builder)
    file = f"{folder}/{name}"
    try:
        part = parse(Part, folder.read(name, fmt.SIDECAR_LIMIT_BYTES), file)
    except FileNotFoundError:
        return None
    if part.builder != partition.builder:
        raise CacheDamaged(f"{file}: is the record of builder {part.builder}; restore it from a copy")
    if part.builders != partition.builders or part.fingerprint != fingerprint:
        what = f"builder {part.builder} of {part.builders} has written another cache there than {partition} asks for"
        remedy = "nothing was touched: give all builders the same settings, or another --out"
        raise OutputExistsError(f"--out {folder}: {what}; {remedy}")
    return part


def gather(folder: Location, builders: int, fingerprint: Fingerprint) -> dict[str, list[ShardEntry]]:
    """Return all builders' shards in row order; CacheDamaged unless all have ended and their shards are there."""
    gathered: dict[str, list[ShardEntry]] = {split: [] for split in fmt.SERIES}
    for split in fmt.SERIES:
        numbers = store.committed(folder, split)
        for number in range(builders):
            partition = Partition(number, builders)
            found = list(store.read_sidecars(folder, split, number, builders, numbers))
            part = read_part(folder, partition, fingerprint)
            wanted = -1 if part is None else getattr(part, f"{split}_shards")
            if len(found) != wanted or any(sidecar.fingerprint != fingerprint for sidecar, _ in found):
                what = f"builder {partition} wrote {wanted} {split} shards, {len(found)} are there"
                own = f"shard numbers that leave {number} when divided by {builders}, and {fmt.part_name(number)}"
                remedy = f"restore the folder from a copy, or delete that builder's files ({own})"
                raise CacheDamaged(f"{folder}/{partition.shard_name(split, len(found))}: {what}; {remedy}")
            gathered[split] += [entry for _, entry in found]
        gathered[split].sort(key=lambda entry: entry.shard)
    return gathered
