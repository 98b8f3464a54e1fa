"""Forward and backward of our quantised layers beside what they replace, on the layer shapes of Qwen3-0.6B.

Claims, in float32 and bfloat16, two threads: a frozen quantised base with its adapter takes at most 1.15 times a plain
`nn.Linear` with a textbook adapter in the activations' type; a layer whose rank-32 scales train is at least 8 times
faster than the form that runs one product per rank (y = sum over r of a_r * (Q (b_r * x)), as the scales are often
written down). Beside the frozen layer stand the same layer as loaded, which forms its weight in every forward, and one
whose codes train through a latent weight.

What is compared takes turns, each turn in the reverse order of the one before, so that neither a disturbance nor a
place in the order favours a side; a ratio is the median of the ratios of the turns. On a busy machine, `--clock cpu
--threads 1` counts the process's own time instead.

    python benchmarks/quant_layers.py --machine "two cores of ..." --out benchmarks/results/quant_layers.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from qat_lora.layers.lora import LoraLinear
from qat_lora.layers.quant_linear import QuantLinear
from qat_lora.quant.codes import code_values
from qat_lora.quant.initialize import QuantizedWeight
from qat_lora.quant.presets import PRESETS
from qat_lora.quant.scales import scale_shapes
from qat_lora.quant.spec import QuantSpec

SHAPES = {"q_proj": (2048, 1024), "k_proj": (1024, 1024), "o_proj": (1024, 2048)}
SHAPES |= {"gate_proj": (3072, 1024), "down_proj": (1024, 3072)}
RANK = 16  # of the adapters


class PlainLora(nn.Module):
    """A frozen dense layer with an adapter, nothing else."""

    def __init__(self, base: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__()
        self.base = base
        self.a = nn.Linear(base.in_features, RANK, bias=False, dtype=dtype)
        self.b = nn.Linear(RANK, base.out_features, bias=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Apply base and adapter."""
        return self.base(x) + self.b(self.a(x))


class RankByRank(nn.Module):
    """The same layer with one product per rank of its scales."""

    def __init__(self, layer: QuantLinear, dtype: torch.dtype) -> None:
        super().__init__()
        self.q_OI = layer.code_values().to(dtype)
        self.a = nn.Parameter(layer.scale_a.detach().clone())
        self.b = nn.Parameter(layer.scale_b.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        """Add up the ranks."""
        q, a, b = self.q_OI, self.a.to(x.dtype), self.b.to(x.dtype)
        out = nn.functional.linear(x * b[0], q) * a[:, 0]
        for r in range(1, a.shape[1]):
            out = out + nn.functional.linear(x * b[r], q) * a[:, r]
        return out


def quantised(linear: nn.Linear, spec: QuantSpec) -> QuantLinear:
    """Return a quantised layer with random codes, which cost the same as good ones."""
    rows, columns = linear.weight.shape
    codes = torch.randint(2**spec.bits, (rows, columns), dtype=torch.uint8)
    scales = tuple(torch.rand(shape) * 0.1 + 0.01 for shape in scale_shapes(spec, rows, columns).values())
    return QuantLinear.from_linear(linear, spec, QuantizedWeight(codes, code_values(spec), scales))


def contests(rows: int, columns: int, dtype: torch.dtype) -> tuple[dict[str, nn.Module], dict[str, nn.Module]]:
    """Return the layers that are compared, those of each claim apart."""
    linear = nn.Linear(columns, rows, bias=False).requires_grad_(False)
    specs = (PRESETS[name].rules[0][1] for name in ("w2g64", "w2g64", "w2g64", "q4_r32"))
    frozen, packed, weights, scales = (quantised(linear, spec) for spec in specs)
    frozen.hold_dense(dtype)
    weights.train_weight()
    weights.train_scales()
    scales.train_scales()
    adapters = {
        "plain": PlainLora(linear.to(dtype), dtype),
        "frozen": LoraLinear(frozen, RANK, RANK),
        "packed": LoraLinear(packed, RANK, RANK),
        "weights": weights,
    }
    return adapters, {"scales": scales, "rank_by_rank": RankByRank(scales, dtype)}


def run(layer: nn.Module, x: Tensor, grad: Tensor) -> Callable[[], None]:
    """Return one forward and backward, gradients to the input included."""

    def once() -> None:
        layer(x).backward(grad)
        x.grad = None
        for parameter in layer.parameters():
            parameter.grad = None

    return once


def take_turns(calls: dict[str, Callable[[], None]], turns: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Return the seconds of every turn by method."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(turns + 1):  # the first warms up
        for name in list(calls)[:: 1 if turn % 2 else -1]:
            started = clock()
            calls[name]()
            if turn:
                times[name].append(clock() - started)
    return times


def measure(
    rows: int, columns: int, dtype: torch.dtype, tokens: int, turns: tuple[int, int], clock: Callable[[], float]
) -> dict[str, float]:
    """Return median milliseconds by method, and ratios."""
    x = torch.randn(tokens, columns).to(dtype).requires_grad_()
    grad = torch.randn(tokens, rows).to(dtype)
    times: dict[str, list[float]] = {}
    for layers, count in zip(contests(rows, columns, dtype), turns, strict=True):
        times |= take_turns({name: run(layer, x, grad) for name, layer in layers.items()}, count, clock)

    def ratio(above: str, below: str) -> float:
        return round(statistics.median(a / b for a, b in zip(times[above], times[below], strict=True)), 3)

    result = {f"{name}_ms": round(1e3 * statistics.median(values), 2) for name, values in times.items()}
    return result | {
        "frozen_over_plain": ratio("frozen", "plain"),
        "packed_over_plain": ratio("packed", "plain"),
        "weights_over_plain": ratio("weights", "plain"),
        "rank_by_rank_over_scales": ratio("rank_by_rank", "scales"),
    }


def main() -> None:
    """Measure all shapes in both types, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default=platform.machine(), help="named in the result")
    parser.add_argument("--tokens", type=int, default=1024, help="of a micro-batch")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--turns", type=int, nargs=2, default=(20, 4), help="of the adapters' contest, of the scales'")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--out", help="JSON file for the result")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    load = round(os.getloadavg()[0], 2)
    clock = {"wall": time.perf_counter, "cpu": time.process_time}[arguments.clock]
    layers, started = {}, time.perf_counter()
    for dtype in (torch.float32, torch.bfloat16):
        for name in arguments.shapes:
            key = f"{name} {str(dtype).removeprefix('torch.')}"
            layers[key] = measure(*SHAPES[name], dtype, arguments.tokens, tuple(arguments.turns), clock)
            print(key, json.dumps(layers[key]), flush=True)
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": arguments.machine,
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
        "threads": arguments.threads,
        "tokens": arguments.tokens,
        "turns": arguments.turns,
        "clock": arguments.clock,
        "load_before": load,
        "seconds": round(time.perf_counter() - started),
        "layers": layers,
        "worst_frozen_over_plain": max(layer["frozen_over_plain"] for layer in layers.values()),
        "worst_rank_by_rank_over_scales": min(layer["rank_by_rank_over_scales"] for layer in layers.values()),
    }
    print(json.dumps({name: value for name, value in result.items() if name.startswith("worst")}))
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
