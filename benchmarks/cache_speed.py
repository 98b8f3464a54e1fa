"""Size and speed of KD caches, from real files: bytes a token, writing, reading, verifying.

Claims, for a vocabulary of 151,936 and K = 64: at most 290 bytes a token with everything counted (sidecars and
manifest too); at least 1 GB/s decoded by one worker from a warm cache; at least 1 GB/s verified. The rows are random
but shaped like a teacher's: ids all over the vocabulary, values that fall, documents that begin within rows. GB/s are
stored bytes, so that figures of different K compare.

    python benchmarks/cache_speed.py --machine "two cores of ..." --out benchmarks/results/cache_speed.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from qat_lora.cache.build.writer import CacheWriter
from qat_lora.cache.format.records import Fingerprint
from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.cache.storage.store import verify_cache
from qat_lora.types import VerifyRows

REPEATS = 5


def main() -> None:
    """Build a cache in a temporary folder, measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default=platform.machine(), help="named in the result")
    parser.add_argument("--megabytes", type=int, default=192, help="size of the cache")
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--top-k", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--batch", type=int, default=8, help="rows of a micro-batch")
    parser.add_argument("--out", help="JSON file for the result")
    arguments = parser.parse_args()
    held = Fingerprint(
        tokenizer_sha256="0" * 64,
        vocab_size=arguments.vocab,
        teacher="random",
        teacher_sha256="0" * 64,
        chat_template_sha256=None,
        dataset="random",
        packing="random",
        length=arguments.length,
        top_k=arguments.top_k,
    )
    with tempfile.TemporaryDirectory() as folder:
        result = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": arguments.machine,
            "versions": f"Python {platform.python_version()}, NumPy {np.__version__}",
            "load_before": round(os.getloadavg()[0], 2),
            "vocab_size": held.vocab_size,
            "top_k": held.top_k,
            "length": held.length,
            **measure(Path(folder), held, arguments.megabytes << 20, arguments.batch),
        }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out:
        Path(arguments.out).write_text(text + "\n", encoding="utf-8")


def measure(folder: Path, held: Fingerprint, size_bytes: int, batch: int) -> dict[str, float]:
    """Write a cache of about a size and return the figures."""
    row_bytes = sum(spec.row_bytes for spec in held.arrays)
    rows = max(8 * batch, size_bytes // row_bytes // batch * batch)
    made = random_rows(held, 4 * batch)
    begun = time.perf_counter()
    with CacheWriter(folder, held, shard_rows=max(batch, rows // 8)) as writer:
        for start in range(0, rows, 4 * batch):
            part = {name: array[: rows - start] for name, array in made.items()}
            writer.append(part, [start] * len(part["input_ids"]))
    wrote = time.perf_counter() - begun
    stored = sum(file.stat().st_size for file in folder.iterdir())
    dataset = KDCacheDataset(folder, verify=False)
    steps = dataset.steps_per_epoch(batch)

    def read(k: int | None, verify_rows: VerifyRows = "all") -> Callable[[], None]:
        source = KDCacheDataset(folder, verify=False, k=k, verify_rows=verify_rows)

        def epoch() -> None:
            for _ in source.batches(0, steps, batch):
                pass

        return epoch

    return {
        "rows": rows,
        "megabytes": round(stored / 1e6, 1),
        "bytes_per_token": round(stored / (rows * held.length), 2),
        "write_gb_s": round(stored / wrote / 1e9, 2),
        "read_gb_s": rate(read(None), stored),
        "read_unchecked_gb_s": rate(read(None, "off"), stored),
        "read_half_k_gb_s": rate(read(held.top_k // 2), stored),
        "read_ms_per_micro_batch": round(1e3 * stored / steps / (rate(read(None), stored) * 1e9), 2),
        "verify_one_thread_gb_s": rate(lambda: verify_cache(folder, threads=1), stored),
        "verify_gb_s": rate(lambda: verify_cache(folder), stored),
    }


def rate(work: Callable[[], object], size_bytes: int) -> float:
    """Return GB/s, the median of some runs after one that is not counted."""
    durations = []
    for _ in range(REPEATS + 1):
        begun = time.perf_counter()
        work()
        durations.append(time.perf_counter() - begun)
    return round(size_bytes / statistics.median(durations[1:]) / 1e9, 2)


def random_rows(held: Fingerprint, count: int) -> dict[str, np.ndarray]:
    """Return rows as a teacher might give them."""
    draw = np.random.default_rng(0)
    positions = (count, held.length - 1)
    values = -np.sort(draw.exponential(3.0, (*positions, held.top_k)).astype(np.float32), axis=-1)
    values -= values[..., :1]
    lse = np.log(np.exp(values).sum(axis=-1) + 0.05)
    return {
        "input_ids": draw.integers(0, held.vocab_size, (count, held.length), dtype=np.int32),
        "loss_mask": np.ones((count, held.length), np.uint8),
        "doc_starts": draw.random((count, held.length)) < 1 / 500,
        "head_ids": draw.integers(0, held.vocab_size, (*positions, held.top_k), dtype=np.int32),
        "head_logits": values,
        "lse": lse.astype(np.float32),
        "log_tail": (np.log(0.05) - lse).astype(np.float32),
    }


if __name__ == "__main__":
    main()
