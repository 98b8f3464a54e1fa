"""What scoring costs beside the bare forwards that it makes.

Claim: `qat-lora eval` (teacher and one student: loss, full-vocabulary KL, top-1, calibration, summed up by row) runs at
0.90 or more of the throughput of the bare forwards of the same two models to logits, on random models of the shape of
Qwen3-0.6B with the real vocabulary of 151,936. Both sides take the same batches in turns, one batch at a time and now
the one, now the other first, so that a busy machine slows both; the ratio is that of the median seconds of a batch. The
processor time of all threads is given beside the clock's: a neighbour changes it less. The bare side computes its
logits in the same chunks as scoring does, and drops them.

    python benchmarks/eval_speed.py --machine "two cores of ..." --out benchmarks/results/eval_speed.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from qat_lora.evaluate import score
from qat_lora.models.load import CausalLM, make_qwen3
from qat_lora.runtime.launch.select import select_runtime
from qat_lora.types import Batch

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def main() -> None:
    """Measure both sides in turns, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default=platform.machine(), help="named in the result")
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--length", type=int, default=1024, help="tokens of a row")
    parser.add_argument("--batch", type=int, default=1, help="rows of a forward")
    parser.add_argument("--batches", type=int, default=2, help="different batches")
    parser.add_argument("--repeats", type=int, default=3, help="times that each side takes each batch")
    parser.add_argument("--dtype", choices=list(DTYPES), default="bfloat16")
    parser.add_argument("--out", help="JSON file for the result")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    shape = {"hidden": arguments.hidden, "layers": arguments.layers, "heads": arguments.hidden // 64}
    shape |= {"kv_heads": max(1, arguments.hidden // 128), "mlp": 3 * arguments.hidden, "head_dim": 128}
    teacher, student = (make_qwen3(Path("unsaved"), arguments.vocab, **shape) for _ in range(2))
    for model in (teacher, student):
        model.module.to(DTYPES[arguments.dtype]).eval()
    batches = [random_batch(arguments.batch, arguments.length, arguments.vocab) for _ in range(arguments.batches)]
    piece_bytes = select_runtime("cpu").piece_bytes
    sides: dict[str, Callable[[list[Batch]], Any]] = {
        "bare": lambda batches: bare([teacher, student], batches),
        "eval": lambda batches: score.measure(teacher, {"student": student}, batches, True, piece_bytes=piece_bytes),
    }
    for run in sides.values():
        run(batches[:1])  # warm
    clock, processor = ({name: list[float]() for name in sides} for _ in range(2))
    for turn in range(arguments.repeats * len(batches)):
        for name in ("bare", "eval") if turn % 2 else ("eval", "bare"):
            begun = time.perf_counter(), time.process_time()
            sides[name]([batches[turn % len(batches)]])
            clock[name].append(time.perf_counter() - begun[0])
            processor[name].append(time.process_time() - begun[1])
    tokens = arguments.batch * arguments.length
    medians = {name: statistics.median(seconds) for name, seconds in clock.items()}
    work = {name: statistics.median(seconds) for name, seconds in processor.items()}
    names = ("layers", "hidden", "vocab", "length", "batch", "batches", "dtype")
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "command": " ".join(["python", *sys.argv]),
        "machine": arguments.machine,
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}, "
        f"transformers {transformers.__version__}",
        "threads": torch.get_num_threads(),
        "load_before": round(os.getloadavg()[0], 2),
        **{name: getattr(arguments, name) for name in names},
        "seconds_of_a_batch": {name: [round(s, 3) for s in seconds] for name, seconds in clock.items()},
        "processor_seconds_of_a_batch": {name: [round(s, 3) for s in seconds] for name, seconds in processor.items()},
        "tokens_per_s": {name: round(tokens / seconds, 1) for name, seconds in medians.items()},
        "eval_over_bare": round(medians["bare"] / medians["eval"], 4),
        "eval_over_bare_by_processor_time": round(work["bare"] / work["eval"], 4),
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out:
        Path(arguments.out).write_text(text + "\n", encoding="utf-8")


def random_batch(rows: int, length: int, vocab: int) -> Batch:
    """Return rows of random tokens, each one document."""
    return {
        "input_ids": torch.randint(0, vocab, (rows, length)),
        "document_ids": torch.zeros(rows, length, dtype=torch.int32),
        "target_mask": torch.ones(rows, length - 1, dtype=torch.bool),
    }


@torch.no_grad()
def bare(models: list[CausalLM], batches: list[Batch]) -> None:
    """Compute the models' logits and drop them."""
    for batch in batches:
        for model in models:
            hidden_NH = model.hidden(batch["input_ids"], batch["document_ids"])[:, :-1].flatten(0, 1)
            for part_NH in hidden_NH.split(score.chunk_positions(model.vocab_size)):
                model.logits(part_NH)


if __name__ == "__main__":
    main()
