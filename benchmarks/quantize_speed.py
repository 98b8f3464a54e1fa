"""How long `quantize` solves for codes, scales and adapter starts at Qwen3-0.6B's shape, beside what it counts.

Claim: every preset takes at most 1.8 times what its operations take at the rate of plain float32 products, measured in
the same run. The seven linear layers of one decoder layer are fitted as `quantize` does by default (`descent`, Fisher
metric, codes chosen together with the adapter start), with random weights and moments of inputs and outputs that have
the spectrum of real ones, 1/i; 28 such layers are the model. Forward and backward passes over the calibration text are
products of their own and not in here. Operations are counted at torch's dispatcher while the same layers are fitted a
second time: products as `FlopCounterMode` counts them, factorisations by the usual formulas, and elementwise work,
all rounding and the search of scales, one for each number that an operator writes.

Times are those of the processor, of all threads together, and the rate is that of one thread: other programs on the
machine do not change them much.

    python benchmarks/quantize_speed.py --machine "two cores of ..." --out benchmarks/results/quantize_speed.json
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from qat_lora.layers.calibrate.fit import FitSettings, fit_layers
from qat_lora.options import QuantizeOptions
from qat_lora.quant.presets import preset
from qat_lora.runtime.host.machine import large_tensors_apart
from qat_lora.runtime.launch.select import select_runtime

LAYERS = 28
SHAPES = {  # outputs, inputs
    "q_proj": (2048, 1024),
    "k_proj": (1024, 1024),
    "v_proj": (1024, 1024),
    "o_proj": (1024, 2048),
    "gate_proj": (3072, 1024),
    "up_proj": (3072, 1024),
    "down_proj": (1024, 3072),
}
PRESETS = "w2g64,q2_0,q2_k,w3g128,w4g128,w4g64a,q4_0,q4_k,q4_r32"


def rate() -> float:
    """Return the operations a processor second of plain products, the median of nine."""
    a, found = torch.randn(2048, 2048), []
    for _ in range(9):
        begun = time.process_time()
        a @ a
        found.append(2 * 2048**3 / (time.process_time() - begun))
    return sorted(found)[4]


def moment(size: int, generator: torch.Generator) -> Tensor:
    """Return a second moment with eigenvalues 1/i in a random basis."""
    basis = torch.linalg.qr(torch.randn(size, size, generator=generator)).Q
    return (basis / torch.arange(1.0, size + 1)) @ basis.T


def further_counts() -> dict[Any, Any]:
    """Return operations of what LAPACK does, and of products in place, which torch does not count, from shapes."""
    linalg = torch.ops.aten

    def cholesky(shape: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
        return _batch(shape) * shape[-1] ** 3 // 3

    def triangular(shape: Any, right: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
        return _batch(right) * right[-1] * right[-2] * shape[-1]

    def solve(shape: Any, right: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
        return _batch(shape) * (2 * shape[-1] ** 3 // 3 + 2 * shape[-1] * right[-1])

    def qr(shape: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
        return 4 * shape[-2] * shape[-1] ** 2

    def svd(shape: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
        long, short = max(shape[-2:]), min(shape[-2:])
        return 6 * long * short**2 + 20 * short**3

    def product(_into: Any, left: Any, right: Any, *_: Any, out_shape: Any = None, **__: Any) -> int:
        return 2 * math.prod(left) * right[-1]

    return {
        linalg.linalg_cholesky_ex: cholesky,
        linalg.linalg_solve_triangular: triangular,
        linalg._linalg_solve_ex: solve,
        linalg.linalg_qr: qr,
        linalg._linalg_svd: svd,
        linalg.baddbmm_: product,
        linalg.addmm_: product,
    }


class Written(TorchDispatchMode):
    """Counts the numbers that elementwise operators write."""

    numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator; what reads and writes the same shape is elementwise."""
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and torch.Tag.pointwise in func.tags:
            self.numbers += result.numel()
        return result


def _batch(shape: Any) -> int:
    count = 1
    for size in shape[:-2]:
        count *= size
    return count


def measure(name: str, method: str, start_rank: int, joint_rank: int, per_s: float) -> dict[str, Any]:
    """Fit the layers, twice; return processor seconds of the model, operations, and how the two stand."""
    settings, spent, counted = FitSettings(method, start_rank, joint_rank), 0.0, 0  # type: ignore[arg-type]
    for layer, (rows, columns) in SHAPES.items():
        generator = torch.Generator().manual_seed(rows + columns)
        weight = torch.randn(rows, columns, generator=generator) * 0.02
        inputs, outputs = moment(columns, generator), moment(rows, generator)
        spec = preset(name).spec_for(f"model.layers.0.mlp.{layer}")
        assert spec is not None
        begun = time.process_time()
        fit_layers([weight], spec, settings, [inputs], [outputs])
        spent += time.process_time() - begun
        with Written() as written, FlopCounterMode(display=False, custom_mapping=further_counts()) as counter:
            fit_layers([weight], spec, settings, [inputs], [outputs])
        counted += counter.get_total_flops() + written.numbers
    ratio = spent / (counted / per_s)
    return {
        "preset": name,
        "method": method,
        "start_rank": start_rank,
        "joint_rank": joint_rank,
        "cpu_s": round(LAYERS * spent, 1),
        "operations": LAYERS * counted,
        "cpu_s_of_products": round(LAYERS * counted / per_s, 1),
        "ratio": round(ratio, 2),
    }


def main() -> None:
    """Measure preset by preset, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default=PRESETS, help="comma-separated; PRESET:mse rounds and fits nothing else")
    parser.add_argument("--machine", default=platform.machine(), help="named in the result")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    arguments = parser.parse_args()
    select_runtime("cpu")  # as the command has its memory: in large pages, which temporaries share
    torch.set_num_threads(1)
    default = QuantizeOptions(model="")
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": arguments.machine,
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
        "command": "python benchmarks/quantize_speed.py",
        "presets": [],
    }
    for word in arguments.presets.split(","):
        name, _, method = word.partition(":")
        ranks = (0, 0) if method == "mse" else (default.start_rank, default.rank_of_codes)
        per_s = rate()
        with large_tensors_apart(16):
            found = measure(name, method or default.init, *ranks, per_s) | {"gflops": round(per_s / 1e9, 1)}
        result["presets"].append(found)
        print(json.dumps(found), flush=True)
        if arguments.out:
            arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
