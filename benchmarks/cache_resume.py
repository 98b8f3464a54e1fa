"""How soon a run goes on in a cache of ten million rows: opening it, and the first batch of any step.

Claim: from a fresh process, the first batch of any step of 10 M rows is there in under 2 seconds (opened without
reading every shard again, `verify=False`, as a resumed run may). The rows are as small as the format allows (L = 2,
K = 1), so that ten million fit on a disk; what the claim is about, the manifest, the sidecars, the order of the rows
and the walk to a shard, depends on the numbers of rows and shards and not on the size of a row. Two caches are
measured: few large shards, and as many shards as ten million rows of 1,024 tokens at K = 64 would have (about 23,000
of 128 MB). Opening with `verify=True` reads all bytes and is measured with one thread and with all.

    python benchmarks/cache_resume.py --machine "two cores of ..." --out benchmarks/results/cache_resume.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from qat_lora.cache.build.writer import CacheWriter
from qat_lora.cache.format.records import Fingerprint
from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.cache.storage import store
from qat_lora.cache.storage.location import Location

GLOBAL_BATCH_ROWS = 64
FRESH_PROCESSES = 5
EPOCHS = 20
"""The last of the steps looked at is in this epoch."""

FRESH = """
import sys, time
begun = time.perf_counter()
from qat_lora.cache.read.dataset import KDCacheDataset
imported = time.perf_counter()
dataset = KDCacheDataset(sys.argv[1], verify=False)
opened = time.perf_counter()
next(dataset.batches(int(sys.argv[2]), 1, 64, seed=3))
print(imported - begun, opened - imported, time.perf_counter() - opened)
"""


def main() -> None:
    """Make the caches in a temporary folder, measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default=platform.machine(), help="named in the result")
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--shards", type=int, nargs="+", default=[100, 23_000])
    parser.add_argument("--out", help="JSON file for the result")
    arguments = parser.parse_args()
    caches = {}
    for shards in arguments.shards:
        with tempfile.TemporaryDirectory() as folder:
            caches[f"{shards} shards"] = measure(Path(folder) / "cache", arguments.rows, shards)
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": arguments.machine,
        "versions": f"Python {platform.python_version()}, NumPy {np.__version__}",
        "load_before": round(os.getloadavg()[0], 2),
        "rows": arguments.rows,
        "global_batch_rows": GLOBAL_BATCH_ROWS,
        "caches": caches,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out:
        Path(arguments.out).write_text(text + "\n", encoding="utf-8")


def measure(folder: Path, rows: int, shards: int) -> dict[str, Any]:
    """Build a cache and return seconds: to open it, and to the first batch of steps all over some epochs."""
    begun = time.perf_counter()
    build(folder, rows, -(-rows // shards))
    built = time.perf_counter() - begun
    per_epoch = -(-rows // GLOBAL_BATCH_ROWS)
    draw = np.random.default_rng(0)
    steps = [0, 1, per_epoch - 1, per_epoch, EPOCHS * per_epoch - 1, *draw.integers(0, EPOCHS * per_epoch, 15).tolist()]
    fresh = [fresh_process(folder, step) for step in steps[:FRESH_PROCESSES]]
    dataset = KDCacheDataset(folder, verify=False)
    jumps = []
    for step in steps:
        begun = time.perf_counter()
        next(dataset.batches(step, 1, GLOBAL_BATCH_ROWS, seed=3))
        jumps.append(time.perf_counter() - begun)
    return {
        "shards": len(dataset.manifest.train),
        "megabytes": round(sum(entry.bytes for entry in dataset.manifest.train) / 1e6, 1),
        "build_s": round(built, 1),
        "steps": len(steps),
        "import_s": round(max(times[0] for times in fresh), 3),
        "open_s": round(max(times[1] for times in fresh), 3),
        "first_batch_s": round(max(times[2] for times in fresh), 3),
        "open_and_first_batch_s": round(max(times[1] + times[2] for times in fresh), 3),
        "later_jump_ms": round(1e3 * max(jumps), 2),
        "open_verified_s": open_verified(folder, None),
        "open_verified_one_thread_s": open_verified(folder, 1),
    }


def build(folder: Path, rows: int, shard_rows: int) -> None:
    """Write a cache of tiny rows."""
    held = Fingerprint(
        tokenizer_sha256="0" * 64,
        vocab_size=1000,
        teacher="none",
        teacher_sha256="0" * 64,
        chat_template_sha256=None,
        dataset="none",
        packing="none",
        length=2,
        top_k=1,
    )
    with CacheWriter(folder, held, shard_rows) as writer, mock.patch("os.fsync"):  # only reading is measured
        for start in range(0, rows, shard_rows):
            count = min(shard_rows, rows - start)
            numbers = np.arange(start, start + count, dtype=np.int32)[:, None] % 1000
            part = {
                "input_ids": np.repeat(numbers, 2, axis=1),
                "loss_mask": np.ones((count, 2), np.uint8),
                "doc_starts": np.tile([True, False], (count, 1)),
                "head_ids": numbers[:, :, None],
                "head_logits": np.zeros((count, 1, 1), np.float32),
                "lse": np.full((count, 1), 0.1, np.float32),
                "log_tail": np.full((count, 1), -2.0, np.float32),
            }
            writer.append(part, [start + i for i in range(count)])


def fresh_process(folder: Path, step: int) -> list[float]:
    """Return seconds of a new process: imports, opening, first batch of a step."""
    done = subprocess.run([sys.executable, "-c", FRESH, str(folder), str(step)], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return list(map(float, done.stdout.split()))


def open_verified(folder: Path, threads: int | None) -> float:
    """Return the seconds that opening with every byte checked takes."""
    real = store.at_once

    def at_once(place: Location, action: Any, items: Any, chosen: int | None = None) -> Any:
        return real(place, action, items, threads or chosen)

    with mock.patch("qat_lora.cache.read.dataset.at_once", at_once):
        begun = time.perf_counter()
        KDCacheDataset(folder)
        return round(time.perf_counter() - begun, 3)


if __name__ == "__main__":
    main()
