"""A cache as one Parquet file, for tools that know nothing of our format: DuckDB, pandas, polars, datasets.

Nothing is lost or derived: every array of a shard becomes a column, one record a row of the cache, ids unpacked and
document starts spelled out, fp16 values as they are stored. The cache itself is not Parquet because a trainer asks for
single rows in random order, and Parquet decodes a whole group of them to find one.

Groups of rows are written as they are read, from shards that are checked first, so memory does not grow with the cache.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from qat_lora.cache.format import layout as fmt
from qat_lora.cache.format.codec import DRAWN, decode_values, unpack_ids
from qat_lora.cache.format.records import Fingerprint, to_json
from qat_lora.cache.storage.location import Place, locate
from qat_lora.cache.storage.store import Progress, Shard, check_entry, read_manifest
from qat_lora.errors import CacheError, OutputExistsError
from qat_lora.extras import require
from qat_lora.files.folders import atomic_file

GROUP_BYTES = 32 << 20  # stored bytes that make a row group, about; a group does not reach over the end of a shard


def export_parquet(
    path: Place, out: str | Path, split: str = "train", *, progress: Progress | None = None
) -> dict[str, Any]:
    """Write a split of a cache to a Parquet file, which appears when it is whole; return its sizes by name.

    Columns, all of fixed-size lists, for rows of L tokens and K entries each: `input_ids` int32 [L], `loss_mask` uint8
    [L], `doc_starts` bool [L], `head_ids` int32 [L-1, K], `head_logits` [L-1, K] (logit minus the position's largest;
    float16, or float32 where the cache stores it as uint8 codes), `lse` and `log_tail` float32 [L-1], with `lse@2` and
    so on for other temperatures; where the cache has them `tail_draw_ids` and `draw_ids` int32 [L-1, D] and
    `teacher_hidden` float16 [L-1, H]. The log-probability of an entry is `head_logits` / T - `lse`. The file's metadata
    holds the fingerprint as JSON; the teacher's LM head is not copied: it is in the cache's folder.

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
            if progress is not None:
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
    if contents.hidden:
        columns["teacher_hidden"] = arrays["hidden"]
    return columns | {name: arrays[name] for name in contents.sums}


def _lists(arrow: Any, values: np.ndarray) -> Any:
    """Return an array [rows, ...] as (nested) lists of fixed size."""
    made = arrow.array(np.ascontiguousarray(values).reshape(-1))
    for size in reversed(values.shape[1:]):
        made = arrow.FixedSizeListArray.from_arrays(made, size)
    return made
