"""One training step of a recovery adapter beside its bare matrix products, and beside distillation with a live teacher.

Claims, on a CPU, student of Qwen3-0.6B's widths (four layers, the real vocabulary of 151,936), 2 x 512 tokens, in
bfloat16: a step takes at most 1.30 times the sum of its matrix products timed bare; against dense KD of the same
student with a teacher that runs beside it, at least 1.8 times the tokens/s with a teacher of the same size and 4 times
with one about seven times larger (Qwen3-4B's widths), and at most a third of the extra peak memory.

Sides, each in a process of its own, in turns, `--rounds` times; figures are medians; the result is written anew after
every round:

* `products`: every product of the step (linear layers forward and to their inputs, adapters forward and twice back,
  attention as six batched products, the head twice), timed one after the other on random matrices of its shape.
* `cached`: our step (loss from a cached head of `--head-k` entries, clipping, AdamW), batches ready in memory.
* `live_equal`, `live_large`: the same student and optimizer in a plain loop: the teacher's forward to logits without
  gradients, the student's logits, the dense KL in float32 through autograd.
* `trl_equal`: the same with TRL's `generalized_jsd_loss` (beta 0), where TRL is installed.

Extra memory is the peak of the resident set over its level when the student stood ready, so it holds a live teacher.
The larger teacher has as many layers as make its products about seven times the student's; both counts are in the
result.

    python benchmarks/train_step.py --machine "two cores of ..." --out benchmarks/results/train_step.json
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qat_lora.layers.convert import add_lora, lora_layers, make_quant_skeleton, prepare_base, quant_layers
from qat_lora.layers.lora import LoraConfig
from qat_lora.losses.objective import ObjectiveConfig, weight_tensors
from qat_lora.models.load import CausalLM, cast, make_qwen3
from qat_lora.quant.presets import preset
from qat_lora.runtime.launch.select import select_runtime
from qat_lora.train.optim import OptimConfig, build_optimizer, optimized
from qat_lora.train.step import add_sums, micro_batch, optimizer_step, zero_sums

SIDES = ("products", "cached", "live_equal", "live_large", "trl_equal")
SMALL = {"hidden": 1024, "mlp": 3072, "heads": 16, "kv_heads": 8, "head_dim": 128}  # Qwen3-0.6B
LARGE = {"hidden": 2560, "mlp": 9728, "heads": 32, "kv_heads": 8, "head_dim": 128}  # Qwen3-4B
TOY = {"hidden": 64, "mlp": 192, "heads": 4, "kv_heads": 2, "head_dim": 32}
TOY_LARGE = {"hidden": 160, "mlp": 608, "heads": 8, "kv_heads": 2, "head_dim": 32}


def widths(arguments: argparse.Namespace, large: bool) -> dict[str, int]:
    """Return the sizes of the student (and equal teacher) or of the larger teacher."""
    if arguments.toy:
        return TOY_LARGE if large else TOY
    return LARGE if large else SMALL


def linear_shapes(sizes: dict[str, int]) -> list[tuple[int, int]]:
    """Return (outputs, inputs) of a layer's seven linear maps."""
    h, m, q, kv = (
        sizes["hidden"],
        sizes["mlp"],
        sizes["heads"] * sizes["head_dim"],
        sizes["kv_heads"] * sizes["head_dim"],
    )
    return [(q, h), (kv, h), (kv, h), (h, q), (m, h), (m, h), (h, m)]


def product_weights(sizes: dict[str, int], layers: int, vocab: int) -> int:
    """Return the numbers that a token is multiplied with: linear layers and head."""
    return layers * sum(o * i for o, i in linear_shapes(sizes)) + vocab * sizes["hidden"]


def large_layers(arguments: argparse.Namespace) -> int:
    """Return the layers of the larger teacher: those that come nearest to seven times the student's products."""
    target = 7 * product_weights(widths(arguments, False), arguments.layers, arguments.vocab)
    return min(range(1, 100), key=lambda n: abs(product_weights(widths(arguments, True), n, arguments.vocab) - target))


def model(arguments: argparse.Namespace, large: bool, layers: int) -> CausalLM:
    """Make a random model in bfloat16."""
    torch.manual_seed(0)
    made = make_qwen3(Path("none"), arguments.vocab, layers=layers, **widths(arguments, large))
    made.module.requires_grad_(False)
    cast(made.module, torch.bfloat16)
    return made


def student(arguments: argparse.Namespace) -> tuple[CausalLM, dict[str, Tensor]]:
    """Make the quantised student in its training state, and return it with what trains."""
    made = model(arguments, False, arguments.layers)
    make_quant_skeleton(made.module, preset("w2g64", ()))
    for layer in quant_layers(made.module).values():
        layer.codes.random_(0, 255)
        for scale in layer.scales:
            scale.data.fill_(0.02)
    add_lora(made.module, LoraConfig(recovery_r=arguments.rank))
    prepare_base(made.module, False, torch.bfloat16)
    made.module.train()
    trained = {}
    for name, adapter in lora_layers(made.module).items():
        trained |= {f"{name}.lora_A": adapter.lora_A, f"{name}.lora_B": adapter.lora_B}
    return made, trained


def batch(arguments: argparse.Namespace) -> dict[str, Tensor]:
    """Return a micro-batch as the cache serves it, with random tokens."""
    rows, length, k = arguments.batch, arguments.length, arguments.head_k
    logits = torch.randn(rows, length - 1, k).sort(-1, descending=True).values
    logits = logits - logits[..., :1]
    lse = torch.logsumexp(logits, -1) + 0.1
    first = torch.randint(0, arguments.vocab - k, (rows, length - 1, 1))
    return {
        "input_ids": torch.randint(0, arguments.vocab, (rows, length)),
        "document_ids": torch.zeros(rows, length, dtype=torch.int32),
        "target_mask": torch.ones(rows, length - 1, dtype=torch.bool),
        "head_ids": first + torch.arange(k),
        "head_logits": logits,
        "lse": lse,
        "log_tail": torch.log(-torch.expm1(torch.logsumexp(logits, -1) - lse)),
    }


def cached_step(arguments: argparse.Namespace, ready: Callable[[], None]) -> Callable[[], None]:
    """Return our step."""
    runtime = select_runtime("cpu")
    made, trained = student(arguments)
    made.tile_attention()
    optimizer = build_optimizer(OptimConfig(), {"adapter": trained}, runtime)
    ready()
    objective = ObjectiveConfig(loss_walk=runtime.loss_walk)
    weights = weight_tensors(objective.weights_at(0.0), runtime.numbers)
    rows, parameters = batch(arguments), optimized(optimizer)

    def step() -> None:
        sums = zero_sums(objective, runtime.device)
        sums = add_sums(sums, micro_batch(made, rows, objective, weights))
        optimizer_step(optimizer, parameters, sums, 1.0, runtime)

    return step


def trl_loss() -> Callable[..., Tensor] | None:
    """Return TRL's distillation loss, None where it is not installed."""
    try:
        from trl.experimental.gkd.gkd_trainer import GKDTrainer
    except ImportError:
        return None
    return GKDTrainer.generalized_jsd_loss


def dense_kl(student_logits: Tensor, teacher_logits: Tensor) -> Tensor:
    """Return the mean KL(teacher || student) over positions, from full logits in float32."""
    log_p = torch.log_softmax(student_logits.float(), -1)
    log_t = torch.log_softmax(teacher_logits.float(), -1)
    return torch.nn.functional.kl_div(log_p, log_t, reduction="batchmean", log_target=True)


def live_step(
    arguments: argparse.Namespace, ready: Callable[[], None], large: bool, loss: Callable[[Tensor, Tensor], Tensor]
) -> Callable[[], None]:
    """Return a step of dense distillation with the teacher beside the student."""
    made, trained = student(arguments)
    parameters = list(trained.values())
    optimizer = torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.99))
    ready()
    teacher = model(arguments, large, large_layers(arguments) if large else arguments.layers)
    rows = batch(arguments)

    def logits(which: CausalLM) -> Tensor:
        hidden = which.hidden(rows["input_ids"], rows["document_ids"])[:, :-1]
        return torch.nn.functional.linear(hidden, which.lm_head().weight_VH)

    def step() -> None:
        with torch.no_grad():
            target = logits(teacher)
        value = loss(logits(made).flatten(0, 1), target.flatten(0, 1))
        value.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def products_step(arguments: argparse.Namespace, ready: Callable[[], None]) -> Callable[[], None]:
    """Return all matrix products of the step, one after the other, with nothing in between."""
    sizes, tokens, r = widths(arguments, False), arguments.batch * arguments.length, arguments.rank

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape).to(torch.bfloat16)

    calls: list[tuple[Callable[[Tensor, Tensor], Tensor], Tensor, Tensor]] = []
    for outputs, inputs in linear_shapes(sizes) * arguments.layers:
        x, g, w = random(tokens, inputs), random(tokens, outputs), random(outputs, inputs)
        a, b, low = random(r, inputs), random(outputs, r), random(tokens, r)
        calls += [(torch.mm, x, w.t()), (torch.mm, g, w)]  # forward, gradient of the input
        calls += [(torch.mm, x, a.t()), (torch.mm, low, b.t()), (torch.mm, g, b), (torch.mm, low, a)]
        calls += [(torch.mm, g.t(), low), (torch.mm, low.t(), x)]  # gradients of B and A
    heads, d, length = arguments.batch * sizes["heads"], sizes["head_dim"], arguments.length
    q, scores = random(heads, length, d), random(heads, length, length)
    # Scores and their two gradients; the weighted sum of values and its two.
    attention = [(q, q.transpose(1, 2))] * 2 + [(scores, q)] * 4
    calls += [(torch.bmm, *pair) for pair in attention] * arguments.layers
    positions = arguments.batch * (arguments.length - 1)
    hidden, head = random(positions, sizes["hidden"]), random(arguments.vocab, sizes["hidden"])
    gradient = random(positions, arguments.vocab)
    calls += [(torch.mm, hidden, head.t()), (torch.mm, gradient, head)]
    ready()

    def step() -> None:
        for product, left, right in calls:
            product(left, right)

    return step


def resident_mb(field: str) -> float:
    """Return this process's resident set (`VmRSS`) or its peak (`VmHWM`), in 10^6 bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024 / 1e6
    raise RuntimeError(f"no {field} in /proc/self/status")


def child(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run one side in this process."""
    level: list[float] = []

    def ready() -> None:
        level.append(resident_mb("VmRSS"))
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew here

    torch.set_num_threads(arguments.threads)
    if arguments.side == "trl_equal":
        theirs = trl_loss()
        if theirs is None:
            return {"missing": "trl is not installed"}
        step = live_step(arguments, ready, False, lambda p, t: theirs(p[None], t[None], beta=0.0))
    elif arguments.side.startswith("live"):
        step = live_step(arguments, ready, arguments.side == "live_large", dense_kl)
    else:
        step = {"products": products_step, "cached": cached_step}[arguments.side](arguments, ready)
    step()
    times = []
    for _ in range(arguments.repeats):
        begun = time.perf_counter()
        step()
        times.append(time.perf_counter() - begun)
    return {"step_s": statistics.median(times), "extra_peak_mb": resident_mb("VmHWM") - level[0]}


def report(arguments: argparse.Namespace, runs: dict[str, list[dict[str, Any]]]) -> str:
    """Return the result of the rounds so far as JSON."""
    medians = {
        side: found[0]
        if "missing" in found[0]
        else {name: round(statistics.median(run[name] for run in found), 4) for name in found[0]}
        for side, found in runs.items()
    }
    ours = medians["cached"]
    against = {
        side: {
            "tokens_per_s_ratio": round(medians[side]["step_s"] / ours["step_s"], 3),
            "extra_memory_share": round(ours["extra_peak_mb"] / medians[side]["extra_peak_mb"], 3),
        }
        for side in SIDES[2:]
        if "missing" not in medians[side]
    }
    weights = [
        product_weights(widths(arguments, large), n, arguments.vocab)
        for large, n in (
            (False, arguments.layers),
            (True, large_layers(arguments)),
        )
    ]
    result = {
        "student": {**widths(arguments, False), "layers": arguments.layers, "vocab": arguments.vocab},
        "large_teacher": {**widths(arguments, True), "layers": large_layers(arguments)},
        "large_teacher_products": round(weights[1] / weights[0], 2),
        "tokens": arguments.batch * arguments.length,
        "sides": medians,
        "runs": runs,
        "tokens_per_s": round(arguments.batch * arguments.length / ours["step_s"], 1),
        "step_over_products": round(ours["step_s"] / medians["products"]["step_s"], 3),
        "against": against,
        "machine": arguments.machine,
        "threads": arguments.threads,
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "command": "python benchmarks/train_step.py " + " ".join(sys.argv[1:]),
    }
    return json.dumps(result, indent=1)


def main() -> None:
    """Measure all sides in turns and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=151_936)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--head-k", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of a process, after one that is not")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each side, in turns")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--toy", action="store_true", help="tiny widths, to try the program")
    parser.add_argument("--machine", default=platform.processor() or platform.machine(), help="what this runs on")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.side:
        print(json.dumps(child(arguments)))
        return
    runs: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(arguments.rounds):
            for side in SIDES:
                command = [sys.executable, __file__, *sys.argv[1:], "--side", side]
                done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
                if done.returncode:
                    sys.exit(f"{side} failed:\n{done.stderr[-3000:]}")
                runs[side].append(json.loads(done.stdout.splitlines()[-1]))
                print(side, runs[side][-1], file=sys.stderr, flush=True)
            if arguments.out:
                arguments.out.write_text(report(arguments, runs) + "\n", encoding="utf-8")
    print(report(arguments, runs))


if __name__ == "__main__":
    main()
