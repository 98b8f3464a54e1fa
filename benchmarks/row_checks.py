"""What it costs to compare each row of a KD cache with its CRC-32 as training reads it.

Claim: less than 3 % of a training step at the shape of Qwen3-0.6B (V = 151,936, rows of 1,024 tokens, K = 128, 4 rows a
micro-batch). A thread reads ahead, so a step waits only for reading that takes longer than the step; the share that is
shown is that of the check alone, as if nothing were hidden. Batches with and without the check take turns in one run;
what is measured is the reading thread's CPU time, the cache being in memory.
Two steps are held against it: the CPU's, from results/train_step.json (4 of the 28 layers and a quarter of the tokens,
times 4 for the tokens alone: a real step is longer), and an accelerator's at an assumed 115,000 tokens a second.

    python benchmarks/row_checks.py --machine "two cores of ..." --out benchmarks/results/row_checks.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
from cache_speed import random_rows

from qat_lora.cache.build.writer import CacheWriter
from qat_lora.cache.format import layout as fmt
from qat_lora.cache.format.codec import crc32
from qat_lora.cache.format.records import Fingerprint
from qat_lora.cache.read.dataset import KDCacheDataset

ROWS, BATCH, ROUNDS = 96, 4, 15
ASSUMED_TOKENS_PER_S = 115_000


def main() -> None:
    """Build a cache in a temporary folder, read it in the three ways in turn, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default=platform.machine(), help="named in the result")
    parser.add_argument("--out", help="JSON file for the result")
    arguments = parser.parse_args()
    held = Fingerprint(
        tokenizer_sha256="0" * 64,
        vocab_size=151_936,
        teacher="random",
        teacher_sha256="0" * 64,
        chat_template_sha256=None,
        dataset="random",
        packing="random",
        length=1024,
        top_k=128,
        optional_arrays=("tail_draws:8",),
    )
    load = round(os.getloadavg()[0], 2)
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), held)
        # In a thread, as training reads: the main thread's heap gives freed memory back, and faults it in again.
        reader = threading.Thread(target=lambda: found.update(measure(Path(folder))))
        reader.start()
        reader.join()
    train_step = json.loads((Path(__file__).parent / "results" / "train_step.json").read_text(encoding="utf-8"))
    tokens = BATCH * held.length
    cpu_ms = 1e3 * train_step["sides"]["cached"]["step_s"] * tokens / train_step["tokens"]
    accelerator_ms = 1e3 * tokens / ASSUMED_TOKENS_PER_S
    check_ms = found["all"] - found["off"]
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": arguments.machine,
        "versions": f"Python {platform.python_version()}, NumPy {np.__version__}, CRC-32 of {crc32.__module__}",
        "load_before": load,
        "row_bytes": fmt.row_bytes(held.arrays),
        "micro_batch_rows": BATCH,
        "read_ms": {way: round(ms, 3) for way, ms in found.items()},
        "check_ms": round(check_ms, 3),
        "cpu_step_ms_at_least": round(cpu_ms),
        "check_percent_of_cpu_step": round(100 * check_ms / cpu_ms, 3),
        "accelerator_step_ms_assumed": round(accelerator_ms, 1),
        "check_percent_of_accelerator_step": round(100 * check_ms / accelerator_ms, 2),
        "read_percent_of_accelerator_step": round(100 * found["all"] / accelerator_ms, 2),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out:
        Path(arguments.out).write_text(text + "\n", encoding="utf-8")


def write(folder: Path, held: Fingerprint) -> None:
    """Write a cache of random rows."""
    made = random_rows(held, 8)
    positions = made["head_ids"].shape[:2]
    made["tail_draw_ids"] = np.random.default_rng(1).integers(0, held.vocab_size, (*positions, 8), dtype=np.int32)
    with CacheWriter(folder, held, shard_rows=16) as writer:
        for _ in range(ROWS // 8):
            writer.append(made, [None] * 8)


def measure(folder: Path) -> dict[str, float]:
    """Return CPU milliseconds of a micro-batch by way of checking: medians over rounds in which the ways take turns."""
    ways = {way: KDCacheDataset(folder, verify=False, verify_rows=way) for way in ("off", "sampled", "all")}
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(ROUNDS + 1):
        for way, dataset in ways.items():
            begun = time.thread_time()
            for _batch in dataset.batches(0, ROWS // BATCH, BATCH):
                pass
            seconds[way].append((time.thread_time() - begun) / (ROWS // BATCH))
    return {way: 1e3 * statistics.median(found[1:]) for way, found in seconds.items()}


if __name__ == "__main__":
    main()
