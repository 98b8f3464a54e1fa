"""What building a KD cache costs beside the teacher's bare forward.

Claim: the builder (hidden states, logits in chunks, top-K, log-sum-exp of head and tail, packing, checksums, disk)
runs at 0.93 or more of the throughput of a bare forward to logits of the same teacher, on a random model of the shape
of Qwen3-0.6B with the real vocabulary of 151,936. Two bare forwards are timed. `plain` is transformers' own, which
takes a row as one text; its attention skips what lies ahead. `packed` is the one that a cache needs, with attention
blocked at document starts by a mask; that costs the attention its shortcut. Both use transformers' `sdpa`; the builder,
as in `qat-lora cache build`, our attention in tiles, which takes the shortcut with masks too. All sides take the same
rows in turns, round after round, so that a busy machine slows all; a ratio is the median of the rounds' ratios.
Processor time is given beside the clock's: it hardly changes where other programs want the cores too.

    python benchmarks/cache_build_speed.py --machine "two cores of ..." --out benchmarks/results/cache_build_speed.json
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
from typing import NamedTuple

import numpy as np
import torch
import transformers

from qat_lora.cache.build.builder import ForwardSettings, build_kd_cache
from qat_lora.cache.build.writer import CacheWriter
from qat_lora.cache.format.records import Fingerprint
from qat_lora.models.load import CausalLM, make_qwen3
from qat_lora.runtime.native import NativeRuntime

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Row(NamedTuple):
    """One row of random tokens."""

    input_ids: np.ndarray
    loss_mask: np.ndarray
    doc_starts: np.ndarray
    cursor: int


def main() -> None:
    """Measure both sides in turns, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default=platform.machine(), help="named in the result")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--top-k", type=int, default=64)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--batch", type=int, default=2, help="rows of a forward")
    parser.add_argument("--batches", type=int, default=6, help="batches of a build")
    parser.add_argument("--repeats", type=int, default=5, help="rounds: each runs all sides once")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--out", help="JSON file for the result")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    shape = {"hidden": 1024, "layers": arguments.layers, "heads": 16, "kv_heads": 8, "mlp": 3072, "head_dim": 128}
    teacher = make_qwen3(Path("unsaved"), arguments.vocab, **shape)
    teacher.module.to(DTYPES[arguments.dtype]).eval()
    rows = random_rows(arguments.batch * arguments.batches, arguments.length, arguments.vocab)
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
    sides: dict[str, Callable[[], None]] = {
        "plain": lambda: plain(teacher, rows, arguments.batch),
        "packed": lambda: packed(teacher, rows, arguments.batch),
        "builder": lambda: build(teacher, rows, held, arguments.batch),
    }
    plain(teacher, rows[: arguments.batch], arguments.batch)  # warm
    build(teacher, rows[: arguments.batch], held, arguments.batch)
    rounds = [{name: timed(run) for name, run in sides.items()} for _ in range(arguments.repeats)]
    seconds, processor_seconds = ({name: [row[name][kind] for row in rounds] for name in sides} for kind in (0, 1))
    tokens = len(rows) * arguments.length
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": arguments.machine,
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
        "threads": torch.get_num_threads(),
        "load_before": round(os.getloadavg()[0], 2),
        **{name: getattr(arguments, name) for name in ("layers", "vocab", "top_k", "length", "batch", "dtype")},
        "rows": len(rows),
        "seconds": rounded(seconds),
        "processor_seconds": rounded(processor_seconds),
        "tokens_per_s": {name: round(tokens / statistics.median(values), 1) for name, values in seconds.items()},
        "builder_over_packed": ratio(seconds, "packed"),
        "builder_over_plain": ratio(seconds, "plain"),
        "builder_over_packed_processor": ratio(processor_seconds, "packed"),
        "builder_over_plain_processor": ratio(processor_seconds, "plain"),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out:
        Path(arguments.out).write_text(text + "\n", encoding="utf-8")


def timed(run: Callable[[], None]) -> tuple[float, float]:
    """Return the seconds of a call, by the clock and by the processor."""
    begun, begun_processor = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - begun, time.process_time() - begun_processor


def ratio(seconds: dict[str, list[float]], side: str) -> float:
    """Return the builder's throughput as part of a bare side's: the median of the rounds."""
    pairs = zip(seconds[side], seconds["builder"], strict=True)
    return round(statistics.median(bare / built for bare, built in pairs), 4)


def rounded(seconds: dict[str, list[float]]) -> dict[str, list[float]]:
    """Return seconds as they are printed."""
    return {name: [round(value, 3) for value in values] for name, values in seconds.items()}


def random_rows(count: int, length: int, vocab: int) -> list[Row]:
    """Return rows of random tokens, each one document."""
    generator = np.random.default_rng(0)
    starts = np.arange(length) == 0
    return [
        Row(generator.integers(0, vocab, length).astype(np.int32), np.ones(length, np.uint8), starts, index)
        for index in range(count)
    ]


@torch.no_grad()
def plain(teacher: CausalLM, rows: list[Row], batch: int) -> None:
    """Run transformers' own forward to logits."""
    teacher.module.set_attn_implementation("sdpa")
    for start in range(0, len(rows), batch):
        teacher.module(input_ids=tokens_of(rows[start : start + batch]), use_cache=False)


@torch.no_grad()
def packed(teacher: CausalLM, rows: list[Row], batch: int) -> None:
    """Run the forward with documents kept apart, all logits at once."""
    teacher.module.set_attn_implementation("sdpa")
    for start in range(0, len(rows), batch):
        ids_BL = tokens_of(rows[start : start + batch])
        teacher.logits(teacher.hidden(ids_BL, torch.ones_like(ids_BL, dtype=torch.int32)).flatten(0, 1))


def tokens_of(rows: list[Row]) -> torch.Tensor:
    """Return the token ids of rows, int64 [B, L]."""
    return torch.from_numpy(np.stack([row.input_ids for row in rows])).long()


def build(teacher: CausalLM, rows: list[Row], held: Fingerprint, batch: int) -> None:
    """Build a whole cache, its last fsync included."""
    teacher.tile_attention()
    with (
        tempfile.TemporaryDirectory() as folder,
        CacheWriter(folder, held, shard_rows=max(1, len(rows) // 2)) as writer,
    ):
        build_kd_cache(
            teacher, rows, writer, ForwardSettings(batch, piece_bytes=NativeRuntime("cpu").piece_bytes), quiet=True
        )


if __name__ == "__main__":
    main()
