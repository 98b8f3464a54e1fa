"""Is the memory that `qat-lora estimate` predicts what a training step really takes?

Claim: within 15 % of the measured peak on a CPU, and of what the TPU's own compiler gives a micro-batch's program, over
widths, depths, vocabularies, batches, ranks, both types, a frozen base and scales that train, with layers' activations
kept and computed again. Estimates are asked as a user would, with the device's name and no other hint.

* `cpu`: random students of Qwen3's shape (w2g64), one micro-batch and one optimizer step by the calls that `recover`
  makes, each point in a process of its own; the most bytes of tensors alive at once, counted at torch's dispatcher
  (`runtime/host/machine.py`).
* `v6e-1`, `v6e-4`: the micro-batch's graph compiled without a TPU (`qat-lora doctor --compile-for`): its program,
  arguments, temporaries and results in the chip's memory, and the optimizer's moments, which it does not see. Nothing
  was measured on a TPU. XLA's CPU backend is no stand-in: it deletes the barriers of recomputation before it orders the
  work, and computes bfloat16 in float32.

A run that was cut off goes on from what `--out` holds, and estimates anew what is measured already.

    python benchmarks/estimate.py --machine "two cores of ..." --out benchmarks/results/estimate.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, fields, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

TARGET = 0.15
HEAD_K, CHUNK_MB, HEAD_DIM = 64, 8, 64


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


@dataclass(frozen=True)
class Compiled:
    """One student of Qwen3-0.6B's widths and batch, compiled for chips of a TPU."""

    chip: str = "v6e-1"
    layers: int = 28
    vocab: int = 151_936
    rows: int = 4
    length: int = 1024
    rank: int = 8
    dtype: str = BF16
    preset: str | None = None
    train_scales: bool = False
    checkpointing: bool = False
    shard_base: bool = False

    @property
    def asked(self) -> dict[str, Any]:
        """The settings of `compiled/__init__.py`."""
        names = ("length", "rank", "dtype", "preset", "train_scales", "shard_base")
        given = {"batch_size": self.rows, "gradient_checkpointing": self.checkpointing, "graphs": ("micro-batch",)}
        return {name: getattr(self, name) for name in names} | given


SMALL = Compiled(layers=4, rows=2, length=512)
COMPILED = (
    Compiled(),
    Compiled(checkpointing=True),
    Compiled(preset="w2g64", train_scales=True, rank=32),
    Compiled(layers=8, vocab=4096),
    Compiled(layers=8, vocab=4096, checkpointing=True),
    Compiled(layers=8, vocab=32_768, rows=2, length=2048),
    SMALL,
    replace(SMALL, checkpointing=True),
    replace(SMALL, preset="q4_r32"),
    replace(SMALL, preset="w2g64", train_scales=True, rank=32),
    replace(SMALL, dtype="float32"),
    replace(SMALL, chip="v6e-4", shard_base=True),
)


def step(point: Point, runtime: Any) -> tuple[list[Any], Any]:
    """Build student, optimizer and batch as `recover` does; return what is held, and the step as a function."""
    import torch

    from qat_lora.layers.convert import add_lora, make_quant_skeleton
    from qat_lora.layers.lora import LoraConfig
    from qat_lora.losses.objective import ObjectiveConfig, weight_tensors
    from qat_lora.models.load import DTYPES, cast, make_qwen3
    from qat_lora.quant.presets import preset
    from qat_lora.setup.common import fit_attention
    from qat_lora.setup.trainable import recovery_parts
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
    groups = recovery_parts(model, point.train_scales, False, DTYPES[point.dtype])
    if point.checkpointing:
        model.checkpoint_gradients(runtime.checkpoint_function())
    optimizer = build_optimizer(OptimConfig(), groups, runtime)
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
    trained = [p for tensors in groups.values() for p in tensors.values()]
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
    from qat_lora.runtime.host.machine import LiveBytes
    from qat_lora.runtime.native import NativeRuntime

    held, run = step(point, NativeRuntime("cpu"))
    with LiveBytes(*held) as live:
        run()
    return live.peak


def on_tpu(point: Compiled, compiler: str | None) -> int:
    """Return the bytes of a micro-batch's program, and of the moments beside it."""
    from compiled import QWEN3_06B, Asked
    from compiled.report import compile_recovery, find_compiler

    config = QWEN3_06B | {"num_hidden_layers": point.layers, "vocab_size": point.vocab}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
        asked = Asked(model=folder, **point.asked)
        graph = compile_recovery(point.chip, asked, find_compiler(compiler))["graphs"]["micro-batch"]
        if "error" in graph:
            sys.exit(f"{point}: {graph['error']}")
        return sum(graph["hbm"].values()) + forecast_on(point.chip, asked)["bytes"]["optimizer state"]


def forecast_on(chip: str, asked: Any) -> dict[str, Any]:
    """Return what the command says of a recovery that is compiled."""
    from qat_lora.plan.devices import named
    from qat_lora.plan.memory import forecast, skeleton

    return forecast(skeleton(asked.estimate), asked.estimate, named((chip,)))


def estimated(point: Point | Compiled, device: str = "cpu") -> int:
    """Return what the command says; of a point that is no compiled one, on a `--device`."""
    from compiled import QWEN3_06B, Asked

    from qat_lora.layers.lora import LoraConfig
    from qat_lora.models.load import make_qwen3
    from qat_lora.options import EstimateOptions, RunConfig
    from qat_lora.plan.devices import named
    from qat_lora.plan.memory import forecast, skeleton

    with tempfile.TemporaryDirectory() as folder:
        if isinstance(point, Compiled):
            config = QWEN3_06B | {"num_hidden_layers": point.layers, "vocab_size": point.vocab}
            Path(folder, "config.json").write_text(json.dumps(config), encoding="utf-8")
            total: int = forecast_on(point.chip, Asked(model=folder, **point.asked))["total_bytes"]
            return total
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
        total = forecast(skeleton(options), options, named(()))["total_bytes"]
        return total


def measure(point: Point) -> int:
    """Run one point on the CPU in a process of its own; return its measured bytes."""
    command = [sys.executable, __file__, "--point", json.dumps(asdict(point))]
    done = subprocess.run(
        command, env=os.environ | {"USE_TORCH_XLA": "0"}, stdout=subprocess.PIPE, text=True, check=True
    )
    return int(done.stdout.strip().splitlines()[-1])


def compare(point: Point | Compiled, measured: int) -> dict[str, Any]:
    """Return a point's result."""
    guess = estimated(point)
    found = {"measured_mib": round(measured / 2**20, 2), "estimated_mib": round(guess / 2**20, 2)}
    return {**name(point), **found, "ratio": round(guess / measured, 3)}


def name(point: Point | Compiled) -> dict[str, Any]:
    """Return what a point is known by in the result."""
    return {**({} if isinstance(point, Compiled) else {"chip": "cpu"}), **asdict(point)}


def of_result(found: dict[str, Any]) -> Point | Compiled:
    """Return the point of a result; one that was written before codes trained does not name them."""
    kind = Point if found["chip"] == "cpu" else Compiled
    return kind(**{field.name: found[field.name] for field in fields(kind) if field.name in found})


def main() -> None:
    """Compare every point, print and write the result anew after each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default=platform.machine(), help="named in the result")
    parser.add_argument(
        "--out", type=Path, help="JSON file for the result; points that it holds are not measured again"
    )
    parser.add_argument("--compiler", help="Python with jax and libtpu (`make tpu-compiler`)")
    parser.add_argument("--point", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.point:
        print(on_cpu(Point(**json.loads(given.point))))
        return
    os.environ["USE_TORCH_XLA"] = "0"  # or transformers would start it here, too
    before = json.loads(given.out.read_text(encoding="utf-8")) if given.out and given.out.exists() else {}
    known = {of_result(p): round(p["measured_mib"] * 2**20) for p in before.get("points", [])}
    found: list[dict[str, Any]] = []
    versions = (f"Python {platform.python_version()}", *(f"{name} {version(name)}" for name in ("torch", "torch_xla")))
    for point in (*POINTS, *COMPILED):
        if (measured := known.get(point)) is None:
            measured = measure(point) if isinstance(point, Point) else on_tpu(point, given.compiler)
        found.append(compare(point, measured))
        print(json.dumps(found[-1]), flush=True)
        off = [abs(p["ratio"] - 1) for p in found]
        result = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": given.machine,
            "versions": ", ".join(versions),
            "command": "python benchmarks/estimate.py",
            "points_count": len(found),
            "worst_ratio": found[off.index(max(off))]["ratio"],
            "farthest_percent": round(100 * max(off), 1),
            "beyond_15_percent": [p for p in found if abs(p["ratio"] - 1) > TARGET],
            "points": found,
        }
        if given.out:
            given.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
