"""How a cache travels: as one archive and back to the same bytes, or as Parquet for tools that do not know our format.

`cache pack` makes a tar archive under zstandard, which any machine can list. Two things are not as in `tar --zstd`. A
shard's values become the differences of neighbours, byte plane by byte plane: they fall from entry to entry, which a
compressor sees only so (49 bytes a token instead of 89 at K = 64). And the sha256 of the compressed archive follows in
a frame that decompressors skip, so damage is found before anything is unpacked. The archive is a pure function of the
cache: the manifest's order, no dates, no owners. Unpacking takes no name from it: each member must be the regular file
that the manifest has at this place, and is compared with its sha256.

`cache export --parquet` loses and derives nothing: every array becomes a column, one record a row, ids unpacked, fp16
values as they are stored. The cache itself is not Parquet because a trainer asks for single rows in random order, and
Parquet decodes a whole group of them to find one. Groups are written as they are read, from shards checked first.
"""

import hashlib
import io
import json
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, cast

import numpy as np

from qat_lora.cache.format import layout as fmt
from qat_lora.cache.format.codec import DRAWN, decode_values, unpack_ids
from qat_lora.cache.format.lm_head import check_lm_head, largest_lm_head
from qat_lora.cache.format.records import Fingerprint, Manifest, ShardEntry, to_json
from qat_lora.cache.storage.location import LocalFolder, Location, Place, locate
from qat_lora.cache.storage.store import Progress, Shard, check_digest, check_entry, parse_manifest, read_manifest
from qat_lora.errors import CacheDamaged, CacheError, OutputExistsError
from qat_lora.extras import require
from qat_lora.files.folders import atomic_dir, atomic_file

_LEVEL = 3
_SKIPPED_FRAME = bytes.fromhex("502a4d1820000000")  # how a zstandard frame begins that decompressors skip, of 32 bytes
_TRAILER_BYTES = len(_SKIPPED_FRAME) + 32
_CHUNK_BYTES = 1 << 20


def pack_cache(path: Place, out: str | Path, progress: Progress = lambda *_: None) -> dict[str, Any]:
    """Write a finished cache as one file, usually `….tar.zst`, which must not exist and appears when it is whole.

    Returned are `out`, `shards`, their `cache_bytes`, and `packed_bytes` of the file (records included) in all and
    `packed_bytes_per_token`.
    CacheError, CacheDamaged: it is not finished or not intact; OutputExistsError; MissingExtraError: no zstandard.
    """
    zstd, source, out = require("zstandard", "transport"), locate(path), _local(out)
    manifest = read_manifest(source)
    inside = isinstance(source, LocalFolder) and out.resolve().is_relative_to(source.path.resolve())
    if inside or out.is_symlink() or out.exists():
        reason = "lies inside the cache that it is to hold" if inside else "exists already"
        raise OutputExistsError(f"--out {out}: {reason}; nothing was touched: choose another name")
    out.parent.mkdir(parents=True, exist_ok=True)
    with atomic_file(out) as draft, open(draft, "w+b") as file:
        with (
            zstd.ZstdCompressor(level=_LEVEL).stream_writer(file, closefd=False) as stream,
            tarfile.open(fileobj=stream, mode="w|", format=tarfile.GNU_FORMAT) as archive,
        ):
            for name, size, content in _members(source, manifest, progress):
                info = tarfile.TarInfo(name)  # no date, no owner
                info.size = size
                archive.addfile(info, content)
        packed_bytes = file.tell() + _TRAILER_BYTES
        file.write(_SKIPPED_FRAME + _sha256(file, file.tell()))
    return _report(out, manifest, packed_bytes)


def unpack_cache(path: str | Path, out: str | Path, progress: Progress = lambda *_: None) -> dict[str, Any]:
    """Write the cache packed in a file or URL into a folder, new or empty, that appears whole; return as `pack_cache`.

    CacheError, CacheDamaged: no packed cache, or not intact; OutputExistsError; MissingExtraError: no zstandard.
    """
    zstd, out = require("zstandard", "transport"), _local(out)
    text = str(path).rstrip("/")
    name = text.rpartition("/")[2]
    source = locate(text[: len(text) - len(name)] or ".")
    if out.is_symlink() or out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OutputExistsError(f"--out {out}: exists already; nothing was touched: choose another folder")
    try:
        size = source.size(name)
    except (FileNotFoundError, NotADirectoryError):
        raise CacheError(f"{path}: there is no such file; give one that `qat-lora cache pack` wrote") from None
    with source.open(name) as file:
        end = max(0, size - _TRAILER_BYTES)
        file.seek(end)
        if file.read() != _SKIPPED_FRAME + _sha256(file, end):
            raise _damaged(path, "its sha256 is not the one that was written")
        file.seek(0)
        with zstd.ZstdDecompressor().stream_reader(file, closefd=False) as stream, atomic_dir(out) as draft:
            try:
                with tarfile.open(fileobj=stream, mode="r|") as archive:
                    manifest = _extract(archive, path, LocalFolder(draft), progress)
            except (zstd.ZstdError, tarfile.TarError, EOFError) as error:
                raise _damaged(path, f"is no archive of a cache ({error})") from None
    return _report(out, manifest, size)


def _local(out: str | Path) -> Path:
    place = locate(out)
    if not isinstance(place, LocalFolder):
        remedy = "packing and unpacking write to a disk: give a path, then copy it there"
        raise CacheError(f"--out {out}: is a URL; {remedy}")
    return place.path


def _members(source: Location, manifest: Manifest, progress: Progress) -> Iterator[tuple[str, int, BinaryIO]]:
    """Yield name, size and content of an archive's files, checked."""
    text = source.read(fmt.MANIFEST, fmt.MANIFEST_LIMIT_BYTES)
    yield fmt.MANIFEST, len(text), io.BytesIO(text)
    if manifest.fingerprint.lm_head_sha256 is not None:
        check_lm_head(source, manifest.fingerprint)
        size = source.size(fmt.LM_HEAD)
        with source.open(fmt.LM_HEAD) as file:
            yield fmt.LM_HEAD, size, file
    for entry in manifest.all_shards:
        check_entry(source, entry, manifest.fingerprint)
        sidecar = source.read(f"{entry.shard}.json", fmt.SIDECAR_LIMIT_BYTES)
        yield f"{entry.shard}.json", len(sidecar), io.BytesIO(sidecar)
        data = b"".join(source.chunks(f"{entry.shard}.safetensors"))
        check_digest(source, entry, hashlib.sha256(data).hexdigest())
        yield f"{entry.shard}.safetensors", entry.bytes, io.BytesIO(_with_values(data, manifest, entry, _differences))
        progress(entry.shard, entry.bytes)


def _extract(archive: tarfile.TarFile, where: str | Path, target: LocalFolder, progress: Progress) -> Manifest:
    """Write an archive's files into a folder: names and order are the manifest's, whatever the archive says."""

    def read(name: str, most: int) -> Iterator[bytes]:
        info = archive.next()
        if info is None or info.name != name or not info.isreg() or info.size > most:
            raise _damaged(where, f"{name} is not where it should be")
        content = cast(BinaryIO, archive.extractfile(info))
        while chunk := content.read(_CHUNK_BYTES):
            yield chunk

    text = b"".join(read(fmt.MANIFEST, fmt.MANIFEST_LIMIT_BYTES))
    manifest = parse_manifest(text, f"{where}: {fmt.MANIFEST}")
    target.write_new(fmt.MANIFEST, [text], "manifest")
    if manifest.fingerprint.lm_head_sha256 is not None:
        target.write_new(fmt.LM_HEAD, read(fmt.LM_HEAD, largest_lm_head(manifest.fingerprint)), "head")
        check_lm_head(target, manifest.fingerprint)
    for entry in manifest.all_shards:
        sidecar = b"".join(read(f"{entry.shard}.json", fmt.SIDECAR_LIMIT_BYTES))
        data = b"".join(read(f"{entry.shard}.safetensors", entry.bytes))
        data = _with_values(data, manifest, entry, _sums)
        found = hashlib.sha256(data).hexdigest(), hashlib.sha256(sidecar).hexdigest()
        if found != (entry.sha256, entry.sidecar_sha256):
            raise _damaged(where, f"{entry.shard} is not the shard that the manifest lists")
        target.write_new(f"{entry.shard}.safetensors", [data], "shard")
        target.write_new(f"{entry.shard}.json", [sidecar], "sidecar")
        progress(entry.shard, entry.bytes)
    return manifest


def _with_values(data: bytes, manifest: Manifest, entry: ShardEntry, change: Any) -> bytes:
    """Return a shard with its array `val` changed, if it has one; as it is where it has not a shard's size."""
    plan = fmt.layout(manifest.fingerprint.arrays, entry.rows, manifest.fingerprint.sha256)
    for spec in manifest.fingerprint.arrays:
        if spec.name == "val" and len(data) == plan.total_bytes and not manifest.fingerprint.contents.lzma:
            start, size = plan.starts["val"], entry.rows * spec.row_bytes
            stored = np.frombuffer(data, np.uint8, size, start)
            changed = change(stored, (entry.rows, *spec.row_shape), spec.dtype.itemsize)
            return b"".join((data[:start], changed.tobytes(), data[start + size :]))
    return data


def _differences(stored: np.ndarray, shape: tuple[int, ...], width: int) -> np.ndarray:
    """Return the bytes of values as differences along the last axis, rank by rank, byte plane by byte plane."""
    bits = stored.view(f"<u{width}").reshape(shape)
    steps = np.diff(bits, axis=-1, prepend=bits.dtype.type(0))  # wraps around, and so does the sum that undoes it
    return np.ascontiguousarray(np.moveaxis(steps, -1, 0)).view(np.uint8).reshape(-1, width).T


def _sums(planes: np.ndarray, shape: tuple[int, ...], width: int) -> np.ndarray:
    """Undo `_differences`."""
    steps = np.ascontiguousarray(planes.reshape(width, -1).T).view(f"<u{width}").reshape(shape[-1], *shape[:-1])
    return np.moveaxis(np.cumsum(steps, axis=0, dtype=steps.dtype), 0, -1)


def _sha256(file: BinaryIO, end: int) -> bytes:
    """Return the sha256 of a file up to `end`, where the file's position is afterwards."""
    digest = hashlib.sha256()
    file.seek(0)
    for start in range(0, end, _CHUNK_BYTES):
        digest.update(file.read(min(_CHUNK_BYTES, end - start)))
    return digest.digest()


def _damaged(where: str | Path, what: str) -> CacheDamaged:
    return CacheDamaged(f"{where}: {what}; copy it again from where it was packed")


def _report(out: Path, manifest: Manifest, packed_bytes: int) -> dict[str, Any]:
    entries = manifest.all_shards
    tokens = sum(entry.rows for entry in entries) * manifest.fingerprint.length
    sizes = {"packed_bytes": packed_bytes, "packed_bytes_per_token": packed_bytes / tokens}
    return {"out": str(out), "shards": len(entries), "cache_bytes": sum(entry.bytes for entry in entries), **sizes}


GROUP_BYTES = 32 << 20  # stored bytes that make a row group, about; a group does not reach over the end of a shard


def export_parquet(
    path: Place, out: str | Path, split: str = "train", *, progress: Progress = lambda *_: None
) -> dict[str, Any]:
    """Write a split of a cache to a Parquet file, which appears when it is whole; return its sizes by name.

    Columns, all of fixed-size lists, for rows of L tokens and K entries each: `input_ids` int32 [L], `loss_mask` uint8
    [L], `doc_starts` bool [L], `head_ids` int32 [L-1, K], `head_logits` [L-1, K] (logit minus the position's largest;
    float16, or float32 where the cache stores it as uint8 codes), `lse` and `log_tail` float32 [L-1], with `lse@2` and
    so on for other temperatures; where the cache has them `tail_draw_ids` and `draw_ids` int32 [L-1, D],
    `tail_entropy` float32 [1], `weights` float16 [L-1] and `teacher_hidden` float16 [L-1, H]. The log-probability of an
    entry is `head_logits` / T - `lse`. The file's metadata holds the fingerprint as JSON; the teacher's LM head stays
    in the cache's folder.

    CacheError: no finished cache, a split without rows; CacheDamaged: a shard is not what was written; no file is left;
    OutputExistsError: there is a file of that name; MissingExtraError: pyarrow is not installed.
    """
    arrow, parquet = require("pyarrow", "hub"), require("pyarrow.parquet", "hub")
    path, out = locate(path), Path(out)
    manifest = read_manifest(path)
    if not manifest.rows(split):
        raise CacheError(f"{path}: has no rows in the {split} split; build it with --eval-rows to have one")
    if out.exists() or out.is_symlink():
        raise OutputExistsError(f"--out {out}: exists already and was not touched; delete it or choose another name")
    out.parent.mkdir(parents=True, exist_ok=True)
    held, groups = manifest.fingerprint, 0
    step = max(1, GROUP_BYTES // fmt.row_bytes(held.arrays))
    none = _columns({spec.name: np.empty((0, *spec.row_shape), spec.dtype) for spec in held.arrays}, held)
    fields = [(name, _lists(arrow, values).type) for name, values in none.items()]
    schema = arrow.schema(fields, metadata={fmt.FORMAT: json.dumps(to_json(held))})
    with atomic_file(out) as draft, parquet.ParquetWriter(draft, schema, compression="zstd") as writer:
        for entry in manifest.shards(split):
            check_entry(path, entry, held)
            shard = Shard(path, entry, held, preload=path.far)
            shard.check_sha256()
            for _, part in shard.parts(step):
                columns = _columns(part, held)
                lists = [_lists(arrow, columns[name]) for name in schema.names]
                writer.write_table(arrow.Table.from_arrays(lists, schema=schema))
                groups += 1
            progress(entry.shard, entry.bytes)
    size = out.stat().st_size
    return {"out": str(out), "split": split, "rows": manifest.rows(split), "row_groups": groups, "bytes": size}


def _columns(arrays: Mapping[str, np.ndarray], held: Fingerprint) -> dict[str, np.ndarray]:
    starts = np.unpackbits(arrays["doc_starts"], axis=1, count=held.length, bitorder="little")
    columns = {name: arrays[name] for name in ("input_ids", "loss_mask")} | {"doc_starts": starts.astype(np.bool_)}
    contents = held.contents
    if contents.top_k:
        stored = contents.value_dtype == "float16"
        columns["head_ids"] = unpack_ids(arrays, contents.top_k)
        columns["head_logits"] = arrays["val"] if stored else decode_values(arrays, contents.top_k)
    for name, size in contents.id_lists.items():
        if name in DRAWN:
            columns[DRAWN[name]] = unpack_ids(arrays, size, name=name)
    named = {"weights": "weights", "hidden": "teacher_hidden", "tail_entropy": "tail_entropy"}
    named |= {name: name for name in contents.sums}
    return columns | {column: arrays[name] for name, column in named.items() if name in arrays}


def _lists(arrow: Any, values: np.ndarray) -> Any:
    """Return an array [rows, ...] as (nested) lists of fixed size."""
    made = arrow.array(np.ascontiguousarray(values).reshape(-1))
    for size in reversed(values.shape[1:]):
        made = arrow.FixedSizeListArray.from_arrays(made, size)
    return made
