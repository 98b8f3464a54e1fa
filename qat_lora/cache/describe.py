"""What is in a cache, for people: sizes, the mass that the head misses, a few rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from qat_lora.cache import format as fmt
from qat_lora.cache.reader import CacheReader
from qat_lora.cache.records import to_json

QUANTILES = (0.5, 0.9, 0.99, 1.0)


def describe(path: str | Path, *, sample_rows: int = 64, show_rows: int = 2, show_tokens: int = 16) -> dict[str, Any]:
    """Return a cache's fingerprint, sizes, tail-mass quantiles and the start of a few rows, as plain JSON values.

    Shards are not checked (`verify_cache` does that), so this is quick on any size.

    Args:
        path: the cache folder.
        sample_rows: training rows, evenly spread, from which the tail mass is taken.
        show_rows: rows of which the beginning is shown.
        show_tokens: positions shown of each.

    Raises:
        CacheError: no finished cache.
        CacheDamaged: a record or a size is not what was written.
    """
    reader = CacheReader(path, verify=False)
    manifest, held = reader.manifest, reader.fingerprint
    splits = {}
    for split in fmt.SERIES:
        shards = manifest.shards(split)
        rows = manifest.rows(split)
        size = sum(shard.bytes for shard in shards)
        splits[split] = {"shards": len(shards), "rows": rows, "tokens": rows * held.length, "bytes": size}
    tokens = sum(split["tokens"] for split in splits.values())
    chosen = np.unique(np.linspace(0, reader.rows("train") - 1, sample_rows).astype(np.int64))
    tails, targets = [], 0
    for row in chosen:
        batch = reader.read("train", [row], None, (1.0,))
        tails.append(np.exp(batch["log_tail"][batch["target_mask"]], dtype=np.float64))
        targets += int(batch["target_mask"].sum())
    mass = np.concatenate(tails) if targets else np.zeros(1)
    return {
        "path": str(path),
        "fingerprint": to_json(held),
        "fingerprint_sha256": held.sha256,
        "info": manifest.info,
        "splits": splits,
        "bytes_per_token": sum(split["bytes"] for split in splits.values()) / tokens,
        "bytes_per_token_by_array": {spec.name: spec.row_bytes / held.length for spec in held.arrays},
        "sampled_rows": len(chosen),
        "target_fraction": targets / (len(chosen) * (held.length - 1)),
        "tail_mass": {
            "mean": float(mass.mean()),
            **{f"p{q * 100:g}": float(np.quantile(mass, q)) for q in QUANTILES},
        },
        "rows": [_show(reader, int(row), show_tokens) for row in chosen[:show_rows]],
    }


def _show(reader: CacheReader, row: int, tokens: int) -> dict[str, Any]:
    batch = reader.read("train", [row], min(3, reader.fingerprint.top_k), (1.0,))
    probabilities = np.exp(batch["head_logits"][0] - batch["lse"][0][:, None])
    return {
        "row": row,
        "input_ids": batch["input_ids"][0][:tokens].tolist(),
        "top_ids": batch["head_ids"][0][:tokens].tolist(),
        "top_probabilities": np.round(probabilities[:tokens], 4).tolist(),
    }


def render(description: dict[str, Any]) -> str:
    """Return what `describe` found as text for a terminal."""
    held = description["fingerprint"]
    temperatures = ", ".join(f"{t:g}" for t in held["temperatures"])
    lines = [
        f"{description['path']}: rows of {held['length']:,} tokens, the teacher's {held['top_k']} likeliest at each",
        *(
            f"{n:<12} {s['rows']:>9,} rows {s['shards']:>6,} shards {s['bytes'] / 1e6:>12,.1f} MB"
            for n, s in description["splits"].items()
        ),
        f"teacher      {held['teacher']} (vocabulary {held['vocab_size']:,}), temperatures {temperatures}",
        f"text         {held['dataset']}",
        f"packing      {held['packing']}",
        f"size         {description['bytes_per_token']:.0f} bytes a token",
        f"targets      {description['target_fraction']:.1%} of the positions count",
        "tail mass    " + ", ".join(f"{name} {value:.2g}" for name, value in description["tail_mass"].items()),
        f"fingerprint  {description['fingerprint_sha256']}",
    ]
    for row in description["rows"]:
        lines.append(f"row {row['row']}: tokens {' '.join(map(str, row['input_ids']))}")
        first, sure = row["top_ids"][0], row["top_probabilities"][0]
        lines.append("  after the first: " + ", ".join(f"{i} ({p:.1%})" for i, p in zip(first, sure, strict=True)))
    return "\n".join(lines)
