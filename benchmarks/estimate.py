"""Is the memory that `qat-lora estimate` predicts what a training step really takes?

Claim: within 15 % of the measured peak, on a CPU and under PyTorch/XLA, over widths, depths, vocabularies, batches,
ranks, both types, a frozen base and scales that train, with layers' activations kept and computed again. Random
students of Qwen3's shape (w2g64), one micro-batch and one optimizer step by the calls that `recover` makes, each point
in a process of its own. Estimates are asked as a user would, with the device's name and no other hint. Measured are:

* `cpu`: the most bytes of tensors alive at once, counted at torch's dispatcher (`runtime/host/memory.py`).
* `xla`: what the run holds on the device, and the temporary memory and new results that XLA's buffer assignment gives
  the micro-batch's graph (`--xla_dump_to`, on XLA's CPU backend: the only one that can be had without a TPU).

XLA's CPU backend deletes optimisation barriers *before* it decides on the order of the work, so nothing keeps what is
computed again (attention always, whole layers with checkpointing) apart from its first computation, and recomputing
saves next to nothing there. The GPU's compiler orders first and deletes then, and so does the TPU's by all that is
known of it. So `xla` points are compiled with that pass switched off (`--xla_disable_hlo_passes=cse_barrier_expander`).
That backend also computes bfloat16 in float32 and keeps it so. What it takes by itself is measured at one point each
and listed under `not_compared`; no ratio is claimed there. A TPU pads tensors to tiles and fuses otherwise: nothing of
it was measured on one.

A run that was cut off goes on from what `--out` holds, and estimates anew what is measured already.

    python benchmarks/estimate.py --machine "two cores of ..." --out benchmarks/results/estimate.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

TARGET = 0.15
HEAD_K, CHUNK_MB, HEAD_DIM = 64, 8, 64
BARRIERS_KEPT = "--xla_disable_hlo_passes=cse_barrier_expander"


@dataclass(frozen=True)
class Point:
    """One student and batch."""

    hidden: int = 256
    layers: int = 2
    vocab: int = 8192
    rows: int = 2
    length: int = 256
    rank: int = 4
    dtype: str = "float32"
    train_scales: bool = False
    checkpointing: bool = False

    @property
    def sizes(self) -> dict[str, int]:
        """Widths in the proportions of Qwen3-0.6B."""
        heads = self.hidden // HEAD_DIM
        return {
            "hidden": self.hidden,
            "layers": self.layers,
            "heads": heads,
            "kv_heads": heads // 2,
            "mlp": 3 * self.hidden,
            "head_dim": HEAD_DIM,
        }


BF16 = "bfloat16"
POINTS = (
    Point(),
    Point(dtype=BF16),
    Point(hidden=512, layers=4, rank=16),
    Point(hidden=512, layers=4, vocab=32768, rows=4, length=128, dtype=BF16),
    Point(layers=8, rows=4, length=512),
    Point(hidden=1024, rows=2, length=512, vocab=32768, dtype=BF16, rank=16),
    Point(hidden=512, layers=4, train_scales=True),
    Point(hidden=512, layers=3, rows=4, length=512, dtype=BF16, train_scales=True),
    Point(layers=4, checkpointing=True),
    Point(hidden=512, layers=8, rows=4, length=512, dtype=BF16, checkpointing=True),
    Point(hidden=512, layers=4, rows=4, length=512, rank=16, checkpointing=True),
    Point(hidden=512, layers=4, length=512, dtype=BF16, train_scales=True, checkpointing=True),
)
BY_ITSELF = (
    (Point(layers=4, checkpointing=True), "XLA's CPU backend deletes the barriers of checkpointing before it orders"),
    (Point(dtype=BF16), "XLA's CPU backend computes bfloat16 in float32"),
)
XLA_POINTS = tuple(dict.fromkeys(replace(point, dtype="float32") for point in POINTS))


def step(point: Point, runtime: Any) -> tuple[list[Any], Any]:
    """Build student, optimizer and batch as `recover` does; return what is held, and the step as a function."""
    import torch

    from qat_lora.layers.convert import add_lora, make_quant_skeleton, prepare_base
    from qat_lora.layers.lora import LoraConfig
    from qat_lora.losses.objective import ObjectiveConfig, weight_tensors
    from qat_lora.models.load import DTYPES, cast, make_qwen3
    from qat_lora.quant.presets import preset
    from qat_lora.setup.common import fit_attention
    from qat_lora.train.optim import OptimConfig, build_optimizer
    from qat_lora.train.step import add_sums, micro_batch, optimizer_step, zero_sums

    torch.manual_seed(0)
    model = make_qwen3(Path("none"), point.vocab, **point.sizes)
    model.module.requires_grad_(False)
    make_quant_skeleton(model.module, preset("w2g64", ()))
    cast(model.module, DTYPES[point.dtype])
    add_lora(model.module, LoraConfig(recovery_r=point.rank))
    runtime.place(model.module)
    fit_attention(model, runtime)
    scales = prepare_base(model.module, point.train_scales, DTYPES[point.dtype])
    model.module.train()
    if point.checkpointing:
        model.checkpoint_gradients(runtime.checkpoint_function())
    adapter = {name: p for name, p in model.module.named_parameters() if "lora_" in name}
    optimizer = build_optimizer(OptimConfig(), {"adapter": adapter, "scales": scales}, runtime)
    shape = (point.rows, point.length - 1)
    batch = {
        "input_ids": torch.randint(0, point.vocab, (point.rows, point.length)),
        "document_ids": torch.zeros(point.rows, point.length, dtype=torch.int32),
        "target_mask": torch.ones(shape, dtype=torch.bool),
        "head_ids": torch.arange(HEAD_K).expand(*shape, HEAD_K).contiguous(),
        "head_logits": -torch.arange(HEAD_K).float().expand(*shape, HEAD_K).contiguous(),
        "lse": torch.full(shape, 1.0),
        "log_tail": torch.full(shape, -1.0),
    }
    here, ahead = runtime.feed([batch, {name: value.clone() for name, value in batch.items()}])
    objective = ObjectiveConfig(loss_chunk_mb=CHUNK_MB, loss_walk=runtime.loss_walk)
    weights = weight_tensors(objective.weights_at(0.0), runtime.numbers)
    start = zero_sums(objective, runtime.device)
    trained = [*adapter.values(), *scales.values()]
    held = [*model.module.parameters(), *model.module.buffers()]
    held += [p.grad for p in trained] + [v for state in optimizer.state.values() for v in state.values()]
    held += [*here.values(), *ahead.values()]

    def run() -> dict[str, Any]:
        sums = add_sums(start, micro_batch(model, here, objective, weights))
        runtime.mark_step()
        return optimizer_step(optimizer, trained, sums, 1.0, runtime)

    return held, run


def on_cpu(point: Point) -> int:
    """Return the most bytes alive at once in a step."""
    from qat_lora.runtime.host.memory import LiveBytes
    from qat_lora.runtime.native import NativeRuntime

    held, run = step(point, NativeRuntime("cpu"))
    with LiveBytes(*held) as live:
        run()
    return live.peak


def on_xla(point: Point, dump: Path) -> int:
    """Return the bytes held, and what buffer assignment adds for the micro-batch's graph."""
    from qat_lora.runtime.xla.runtime import XlaRuntime

    runtime = XlaRuntime("CPU")

    def measure() -> int:
        held, run = step(point, runtime)
        runtime.mark_step()  # what preparing has left is a graph of its own, as in `recover`
        there = set(dump.glob("*buffer-assignment.txt"))
        run()  # the micro-batch's graph is the first of two
        runtime.step_end()
        (graph, *_) = sorted(set(dump.glob("*buffer-assignment.txt")) - there)
        allocations = re.findall(r"^allocation \d+: size (\d+),(.*)$", graph.read_text(encoding="utf-8"), re.M)
        added = sum(int(size) for size, kind in allocations if " parameter " not in kind)
        return added + sum({id(t): t.numel() * t.element_size() for t in held}.values())

    result: int = runtime.launch(measure)
    return result


def estimated(point: Point, device: str) -> int:
    """Return what the command says."""
    from qat_lora.layers.lora import LoraConfig
    from qat_lora.models.load import make_qwen3
    from qat_lora.options import EstimateOptions, RunConfig
    from qat_lora.plan.devices import named
    from qat_lora.plan.memory import forecast, skeleton

    with tempfile.TemporaryDirectory() as folder:
        make_qwen3(Path(folder), point.vocab, **point.sizes).module.config.save_pretrained(folder)
        options = EstimateOptions(
            model=folder,
            preset="w2g64",
            train_scales=point.train_scales,
            lora=LoraConfig(recovery_r=point.rank),
            length=point.length,
            head_k=HEAD_K,
            batch_size=point.rows,
            gradient_checkpointing=point.checkpointing,
            loss_chunk_mb=CHUNK_MB,
            run=RunConfig(dtype=point.dtype, device=device),
        )
        total: int = forecast(skeleton(options), options, named(()))["total_bytes"]
        return total


def measure(device: str, point: Point, *flags: str) -> int:
    """Run one point in a process of its own; return its measured bytes."""
    with tempfile.TemporaryDirectory() as dump:
        environment = {**os.environ, "USE_TORCH_XLA": "0"}
        if device == "xla":
            environment |= {"PJRT_DEVICE": "CPU", "USE_TORCH_XLA": "1"}
            # The order of the machine code's passes does not change the buffers; without them it is made sooner.
            environment["XLA_FLAGS"] = " ".join((f"--xla_dump_to={dump}", "--xla_backend_optimization_level=0", *flags))
        command = [sys.executable, __file__, "--point", json.dumps(asdict(point)), "--device", device, "--dump", dump]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        return int(done.stdout.strip().splitlines()[-1])


def compare(device: str, point: Point, measured: int | None = None) -> dict[str, Any]:
    """Return a point's result; what was measured before is estimated only."""
    if measured is None:
        measured = measure(device, point, *([BARRIERS_KEPT] if device == "xla" else []))
    guess = estimated(point, device)
    found = {"measured_mib": round(measured / 2**20, 2), "estimated_mib": round(guess / 2**20, 2)}
    return {**name(device, point), **found, "ratio": round(guess / measured, 3)}


def name(device: str, point: Point) -> dict[str, Any]:
    """Return what a point is known by in the result."""
    return {"device": device, **asdict(point)}


def main() -> None:
    """Compare every point, print and write the result anew after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default=platform.machine(), help="named in the result")
    parser.add_argument("--out", help="JSON file for the result; points that it holds are not measured again")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    parser.add_argument("--device", help=argparse.SUPPRESS)
    parser.add_argument("--dump", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.point:
        point = Point(**json.loads(given.point))
        print(on_xla(point, Path(given.dump)) if given.device == "xla" else on_cpu(point))
        return
    os.environ["USE_TORCH_XLA"] = "0"  # or transformers would start it here, too
    before = json.loads(Path(given.out).read_text(encoding="utf-8")) if given.out and Path(given.out).exists() else {}
    names = list(name("cpu", POINTS[0]))
    known = {
        json.dumps({key: p[key] for key in names} | {"why": p.get("why")}): p["measured_mib"]
        for p in before.get("points", []) + before.get("not_compared", [])
    }
    found: list[dict[str, Any]] = []
    by_itself: list[dict[str, Any]] = []

    versions = (f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in ("torch", "torch_xla")))

    def save() -> None:
        worst = max((p["ratio"] for p in found), key=lambda ratio: abs(ratio - 1))
        result = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": given.machine,
            "versions": ", ".join(versions),
            "command": "python benchmarks/estimate.py",
            "points_count": len(found),
            "worst_ratio": worst,
            "farthest_percent": round(100 * max(abs(p["ratio"] - 1) for p in found), 1),
            "beyond_15_percent": [p for p in found if abs(p["ratio"] - 1) > TARGET],
            "points": found,
            "not_compared": by_itself,
        }
        if given.out:
            Path(given.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    for device, points in (("cpu", POINTS), ("xla", XLA_POINTS)):
        for point in points:
            mib = known.get(json.dumps({**name(device, point), "why": None}))
            found.append(compare(device, point, None if mib is None else round(mib * 2**20)))
            print(json.dumps(found[-1]), flush=True)
            save()
    for point, why in BY_ITSELF:
        mib = known.get(json.dumps({**name("xla", point), "why": why}))
        mib = round(measure("xla", point) / 2**20, 2) if mib is None else mib
        by_itself.append({**name("xla", point), "why": why, "measured_mib": mib})
        print(json.dumps(by_itself[-1]), flush=True)
        save()


if __name__ == "__main__":
    main()
