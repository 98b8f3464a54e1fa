"""Time and memory of the fused loss beside the two matrix products that it cannot avoid.

Claims, at width 1,024, vocabulary 151,936, 1,024 tokens, K = 64, bfloat16, frozen head, two threads: at most 1.20
times the products `hidden @ W.T` and `grad @ W`, at most 64 MB of memory beyond hidden states, head and teacher. The
products are timed whole and in chunks of positions as small as the memory limit would ask for; the faster is the
yardstick, for every method, also those that cannot do with two. Every method runs in a process of its own for its
memory, taken as growth of the resident set's peak over its level before the call (the allocator's own counters miss the
matrix library's buffers).

Ours by both walks, with a frozen head, a soft-capped one, and one that trains (its gradient, as large as the head,
counts as memory; a third product cannot be avoided), and the exact KL from a teacher's hidden states (three products).
Beside them the same sparse loss through autograd on dense logits; the dense KL to a teacher's full logits, computed
online; and the forward KL of TRL (`generalized_jsd_loss`, beta 0, on bfloat16 logits as its trainers have them) and
of Liger (`LigerFusedLinearJSDLoss`, beta 0, its default chunk, not compiled; it makes the student head's gradient too).
Where a package is missing, the result says so:

    pip install --no-deps trl liger-kernel
    python benchmarks/fused_linear_kd.py --machine "two cores of ..." --out benchmarks/results/fused_linear_kd.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from qat_lora.losses.estimators import DenseTerm, TopKTerm
from qat_lora.losses.fused.op import fused_linear_kd
from qat_lora.types import LMHead, SparseTeacher

OURS = ("fused", "fused_by_positions", "fused_softcap", "fused_softcap_by_positions")
OURS += ("fused_trained", "fused_trained_by_positions", "fused_full")
METHODS = ("products", "products_in_chunks", *OURS, "dense_top_k", "dense_full", "trl_jsd", "liger_jsd")
CHUNK_TOKENS = 54  # of the products in chunks: 32 MB of float32 logits


def main() -> None:
    """Time all methods in turn, measure each one's memory in a process of its own, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default=platform.machine(), help="named in the result")
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--top-k", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--methods", help="only these, with commas; the products are always there")
    parser.add_argument("--memory-of", choices=METHODS, help="print one method's extra peak memory in bytes and stop")
    parser.add_argument("--out", help="JSON file for the result")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    methods = prepare(arguments.width, arguments.vocab, arguments.tokens, arguments.top_k)
    if arguments.memory_of:
        method = methods[arguments.memory_of]
        assert method is not None
        print(extra_peak_bytes(method))
        return
    if arguments.methods:
        methods = {name: methods[name] for name in METHODS if name in ("products", *arguments.methods.split(","))}
    load = round(os.getloadavg()[0], 2)
    missing = [name for name, method in methods.items() if method is None]
    methods = {name: method for name, method in methods.items() if method is not None}
    seconds = time_in_turn(methods, arguments.repeats)
    del methods
    yardstick_s = min(seconds["products"], seconds.get("products_in_chunks", seconds["products"]))
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": arguments.machine,
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
        "load_before": load,
        "dtype": "bfloat16",
        **{name: getattr(arguments, name) for name in ("width", "vocab", "tokens", "top_k", "threads", "repeats")},
        "methods": {
            name: {
                "median_s": round(seconds[name], 4),
                "times_the_products": round(seconds[name] / yardstick_s, 3),
                "extra_peak_mb": round(memory_in_own_process(name) / 1e6, 1),
            }
            for name in seconds
        }
        | {name: "not installed" for name in missing},
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out:
        Path(arguments.out).write_text(text + "\n", encoding="utf-8")


def prepare(width: int, vocab: int, tokens: int, top_k: int) -> dict[str, Callable[[], object] | None]:
    """Return every method on the same random hidden states, head and teacher; None where a package is missing."""
    draw = torch.Generator().manual_seed(0)
    weight_VH = torch.empty(vocab, width, dtype=torch.bfloat16).normal_(0, 0.05, generator=draw)
    hidden_NH = torch.empty(tokens, width, dtype=torch.bfloat16).normal_(generator=draw).requires_grad_()
    apart = vocab // top_k
    ids_NK = torch.randint(0, apart, (tokens, top_k), generator=draw) + apart * torch.arange(top_k)
    log_mass_NK = torch.randn(tokens, top_k + 1, generator=draw).log_softmax(1)
    teacher = SparseTeacher(ids_NK, log_mass_NK[:, :-1].contiguous(), log_mass_NK[:, -1].contiguous(), 1.0)

    logits_NV = torch.empty(tokens, vocab, dtype=torch.bfloat16)  # set aside: the yardstick pays no page faults

    def products() -> None:
        torch.mm(hidden_NH.detach(), weight_VH.t(), out=logits_NV)
        torch.mm(logits_NV, weight_VH)

    def products_in_chunks() -> None:
        for hidden_CH in hidden_NH.detach().split(CHUNK_TOKENS):
            (hidden_CH @ weight_VH.t()) @ weight_VH

    def ours(walk: str, head: LMHead, term: TopKTerm | DenseTerm) -> Callable[[], None]:
        def method() -> None:
            fused_linear_kd(hidden_NH, head, [term], walk=walk).loss_sum.backward()  # type: ignore[arg-type]
            head.weight_VH.grad = None

        return method

    plain, capped = LMHead(weight_VH, vocab), LMHead(weight_VH, vocab, softcap=30.0)
    trained = LMHead(weight_VH.detach().requires_grad_(), vocab)
    other_NH = hidden_NH.detach().roll(1, 0)  # of a teacher with the same head and other hidden states
    fused = {
        "fused": ours("vocabulary", plain, TopKTerm(teacher)),
        "fused_by_positions": ours("positions", plain, TopKTerm(teacher)),
        "fused_softcap": ours("vocabulary", capped, TopKTerm(teacher)),
        "fused_softcap_by_positions": ours("positions", capped, TopKTerm(teacher)),
        "fused_trained": ours("vocabulary", trained, TopKTerm(teacher)),
        "fused_trained_by_positions": ours("positions", trained, TopKTerm(teacher)),
        "fused_full": ours("positions", plain, DenseTerm(other_NH, plain)),
    }

    def dense_top_k() -> None:
        log_p_NV = (hidden_NH @ weight_VH.t()).float().log_softmax(1)
        log_p_NK = log_p_NV.gather(1, ids_NK)
        log_rest_N = torch.log1p(-log_p_NK.exp().sum(1))
        head_NK = teacher.log_probs_NK.exp() * (teacher.log_probs_NK - log_p_NK)
        tail_N = teacher.log_tail_N.exp() * (teacher.log_tail_N - log_rest_N)
        (head_NK.sum() + tail_N.sum()).backward()

    def dense_full() -> None:
        with torch.no_grad():
            log_t_NV = (other_NH @ weight_VH.t()).float().log_softmax(1)
        log_p_NV = (hidden_NH @ weight_VH.t()).float().log_softmax(1)
        torch.nn.functional.kl_div(log_p_NV, log_t_NV, reduction="sum", log_target=True).backward()

    peers = {"trl_jsd": trl_jsd(hidden_NH, other_NH, weight_VH), "liger_jsd": liger_jsd(hidden_NH, other_NH, weight_VH)}
    return {f.__name__: f for f in (products, products_in_chunks, dense_top_k, dense_full)} | fused | peers


def trl_jsd(hidden_NH: torch.Tensor, other_NH: torch.Tensor, weight_VH: torch.Tensor) -> Callable[[], object] | None:
    """Return TRL's forward KL on full logits of both sides, None where TRL is missing."""
    try:
        from trl.experimental.gkd.gkd_trainer import GKDTrainer
    except ImportError:
        return None

    def method() -> None:
        with torch.no_grad():
            teacher_1NV = (other_NH @ weight_VH.t())[None]
        student_1NV = (hidden_NH @ weight_VH.t())[None]
        GKDTrainer.generalized_jsd_loss(student_1NV, teacher_1NV, beta=0.0, reduction="sum").backward()

    return method


def liger_jsd(hidden_NH: torch.Tensor, other_NH: torch.Tensor, weight_VH: torch.Tensor) -> Callable[[], object] | None:
    """Return Liger's fused forward KL, in plain PyTorch, None where Liger is missing."""
    try:
        from liger_kernel.chunked_loss import LigerFusedLinearJSDLoss
    except ImportError:
        return None
    labels_N = torch.zeros(hidden_NH.shape[0], dtype=torch.long)
    loss = LigerFusedLinearJSDLoss(weight_hard_loss=0.0, weight_soft_loss=1.0, beta=0.0, compiled=False)
    return lambda: loss(hidden_NH, weight_VH, other_NH, weight_VH, labels_N).backward()


def time_in_turn(methods: dict[str, Callable[[], object]], repeats: int) -> dict[str, float]:
    """Return each method's median seconds; rounds go through all of them, so that a busy moment hits all alike."""
    taken: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(repeats + 1):
        for name, method in methods.items():
            begun = time.perf_counter()
            method()
            taken[name].append(time.perf_counter() - begun)
    return {name: statistics.median(durations[1:]) for name, durations in taken.items()}


def extra_peak_bytes(method: Callable[[], object]) -> int:
    """Return by how much a call raised this process's peak resident memory over what was resident before."""
    torch.ones(64, 64, dtype=torch.bfloat16) @ torch.ones(64, 64, dtype=torch.bfloat16)  # threads and kernels
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again at what is resident now
    before = peak_bytes()
    method()
    return peak_bytes() - before


def peak_bytes() -> int:
    """Return the peak of this process's resident set (Linux)."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def memory_in_own_process(name: str) -> int:
    """Return `extra_peak_bytes` of a method, from a fresh process with the same arguments."""
    command = [sys.executable, *sys.argv, "--memory-of", name]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


if __name__ == "__main__":
    main()
