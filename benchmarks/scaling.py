"""What data-parallel training costs beyond the work itself: bytes exchanged, and efficiency of two pinned processes.

Claims: the bytes that a process hands to an exchange in an optimizer step are 4 x trained parameters within 5 %, and
two gloo processes pinned to one core each do at least 0.85 times twice the tokens per second of one pinned process.
Each process trains the same number of rows a step in every run (weak scaling, as chips are added), on a toy with the
shape of the real work: a frozen base, large products, a small trained part. The runs alternate, so that other load on
the machine affects both; the medians are compared. On a busy machine the ratio means nothing: `load_before` is
recorded. `modelled_efficiency` is the figure of docs/tpu.md's scaling model for this machine, from the measured step of
one process and the measured time of the exchange alone; the gap to `efficiency` is shared caches and memory.

    python benchmarks/scaling.py --machine "two cores of ..." --out benchmarks/results/scaling.json
    python benchmarks/scaling.py --model        the table of docs/tpu.md: computed from data sheets, not measured
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from qat_lora.losses.objective import ObjectiveConfig
from qat_lora.runtime.base import Runtime
from qat_lora.runtime.launch.select import select_runtime
from qat_lora.runtime.launch.start import run_group
from qat_lora.train.step import add_sums, micro_batch, optimizer_step, zero_sums
from qat_lora.types import Batch, LMHead

LENGTH = 128


class Student(nn.Module):
    """Frozen matrices with a low-rank correction each, under a frozen head."""

    def __init__(self, width: int, layers: int, vocab: int, rank: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Parameter(torch.randn(vocab, width) * 0.05, requires_grad=False)
        self.base = nn.Parameter(torch.randn(layers, width, width) * width**-0.5, requires_grad=False)
        self.a = nn.ParameterList(torch.randn(rank, width) * 0.02 for _ in range(layers))
        self.b = nn.ParameterList(torch.zeros(width, rank) for _ in range(layers))
        self.vocab_size = vocab

    def hidden(self, input_ids_BL: Tensor, document_ids_BL: Tensor) -> Tensor:
        """Return hidden states [B, L, H]."""
        x = self.embed[input_ids_BL]
        for base, a, b in zip(self.base, self.a, self.b, strict=True):
            x = x + torch.tanh(x @ base.T + (x @ a.T) @ b.T)
        return x

    def lm_head(self) -> LMHead:
        """Return the tied head."""
        return LMHead(self.embed, self.vocab_size)

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Return logits [N, V]."""
        return hidden_NH @ self.embed.T


def batch(rows: int, vocab: int, seed: int) -> Batch:
    """Return random token rows, scored against their own next tokens."""
    draw = torch.Generator().manual_seed(seed)
    return {
        "input_ids": torch.randint(vocab, (rows, LENGTH), generator=draw),
        "document_ids": torch.zeros(rows, LENGTH, dtype=torch.int32),
        "target_mask": torch.ones(rows, LENGTH - 1, dtype=torch.bool),
    }


def train_pinned(shape: dict[str, int], rows: int, accumulation: int, steps: int) -> dict[str, Any]:
    """Train in this process, alone or in a group, on one core; return seconds and the bytes handed to exchanges."""
    runtime = select_runtime("cpu")
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[runtime.rank % len(cores)]})
    return runtime.launch(lambda: _train(runtime, shape, rows, accumulation, steps))


def _train(runtime: Runtime, shape: dict[str, int], rows: int, accumulation: int, steps: int) -> dict[str, Any]:
    sent = [0]
    exchange = dist.all_reduce

    def counted(tensor: Tensor, *arguments: Any, **named: Any) -> Any:
        sent[0] += tensor.numel() * tensor.element_size()
        return exchange(tensor, *arguments, **named)

    dist.all_reduce = counted
    student = Student(**shape)
    trained = [p for p in student.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    objective = ObjectiveConfig(kd_weight=0.0, ce_weight=1.0)
    zeros = zero_sums(objective, runtime.device)
    batches = [batch(rows, shape["vocab"], 97 * runtime.rank + i) for i in range(accumulation)]

    def step() -> None:
        sums = zeros
        for part in batches:
            sums = add_sums(sums, micro_batch(student, part, objective, objective.weights_at(0.0)))
        optimizer_step(optimizer, trained, sums, 1.0, runtime)
        runtime.agree(False)

    step()
    runtime.barrier("warm")
    sent[0], began_s = 0, time.perf_counter()
    for _ in range(steps):
        step()
    seconds = time.perf_counter() - began_s
    return {
        "s_per_step": seconds / steps,
        "tokens_per_s": runtime.replicas * rows * accumulation * (LENGTH - 1) * steps / seconds,
        "bytes_per_step": sent[0] / steps,
        "trained": sum(p.numel() for p in trained),
    }


def exchange_s(numbers: int, repeats: int) -> float:
    """Return the median seconds of one averaging of so many numbers between two processes of this machine."""
    runtime = select_runtime("cpu")

    def measure() -> float:
        parameter = nn.Parameter(torch.zeros(numbers))
        parameter.grad = torch.ones(numbers)
        times = []
        for _ in range(repeats):
            runtime.barrier("start")
            began_s = time.perf_counter()
            runtime.reduce_gradients([parameter])
            times.append(time.perf_counter() - began_s)
        return statistics.median(times)

    return runtime.launch(measure)


CHIPS = {"v5e": (197e12, 200e9), "v6e": (918e12, 448e9)}
"""bf16 FLOP/s and interconnect bytes/s of a chip, both from Google's data sheets."""


def model_s(chips: int, tokens: int, kind: str) -> tuple[float, float]:
    """Return the modelled seconds of compute and of exchange in an optimizer step (docs/tpu.md says from what)."""
    flops, link = CHIPS[kind]
    weights, trained, utilisation, hop_s = 0.6e9, 10_092_544, 0.4, 1e-6
    compute = 4 * weights * tokens / (utilisation * flops)
    exchange = 2 * (chips - 1) / chips * 4 * trained / link + 2 * (chips - 1) * hop_s
    return compute, exchange


def model_table() -> str:
    """Return the modelled efficiency at 1 to 256 chips as Markdown."""
    columns = [(kind, tokens) for kind in CHIPS for tokens in (32_768, 4_096)]
    lines = [
        "| chips | " + " | ".join(f"{kind}, {tokens:,} tokens" for kind, tokens in columns) + " |",
        "|---" * (len(columns) + 1) + "|",
    ]
    for chips in (1, 4, 8, 16, 64, 256):
        times = [model_s(chips, tokens, kind) for kind, tokens in columns]
        cells = (f"{compute / (compute + exchange):.1%} ({1e3 * exchange:.2f} ms)" for compute, exchange in times)
        lines.append(f"| {chips} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    """Run one and two pinned processes in turn, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default=platform.machine(), help="named in the result")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--accumulation", type=int, default=2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", help="JSON file for the result")
    parser.add_argument("--model", action="store_true", help="print the scaling model's table and stop")
    given = parser.parse_args()
    if given.model:
        print(model_table())
        return
    shape = {name: getattr(given, name) for name in ("width", "layers", "vocab", "rank")}
    load = round(os.getloadavg()[0], 2)
    work = functools.partial(train_pinned, shape, given.rows, given.accumulation, given.steps)
    runs: dict[int, list[dict[str, Any]]] = {1: [], 2: []}
    for _ in range(given.repeats):
        for count in runs:
            runs[count].append(run_group(work, count, 1, "spawn"))
    alone, pair = (statistics.median(r["tokens_per_s"] for r in runs[count]) for count in (1, 2))
    trained, sent = runs[2][0]["trained"], runs[2][0]["bytes_per_step"]
    step_s = statistics.median(r["s_per_step"] for r in runs[1])
    own_exchange_s, large_exchange_s = (
        run_group(functools.partial(exchange_s, numbers, 20), 2, 1, "spawn") for numbers in (trained, 1_000_000)
    )
    arguments = {name: getattr(given, name) for name in (*shape, "rows", "accumulation", "steps", "repeats")}
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": given.machine,
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
        "command": "python benchmarks/scaling.py " + " ".join(f"--{name} {value}" for name, value in arguments.items()),
        "load_before": load,
        **arguments,
        "length": LENGTH,
        "trained_parameters": trained,
        "bytes_per_step": sent,
        "bytes_per_step_over_4_x_trained": round(sent / (4 * trained), 4),
        "exchange_s": own_exchange_s,
        "exchange_of_4_mb_s": large_exchange_s,
        "tokens_per_s_one_process": round(alone, 1),
        "tokens_per_s_two_processes": round(pair, 1),
        "efficiency": round(pair / (2 * alone), 3),
        "modelled_efficiency": round(step_s / (step_s + own_exchange_s), 3),
        "s_per_step": {str(count): [round(r["s_per_step"], 4) for r in runs[count]] for count in runs},
    }
    text = json.dumps(result, indent=1)
    print(text)
    if given.out:
        Path(given.out).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
