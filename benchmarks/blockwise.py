"""`recover --blockwise` beside `recover`: how much of the gain is left, and how much memory.

Claims: with one decoder layer in memory at a time, an adapter closes at least 70 % of the KL that `recover` closes from
the same start in the same steps of the same rows; and own memory (the files' pages aside) does not grow with depth but
for the student's codes and adapters, where that of `recover` does.

    python benchmarks/blockwise.py --student DIR --teacher DIR --cache DIR --held CACHE --steps 100 --rank 16 \
        --work DIR --out benchmarks/results/blockwise.json

`--held` is a cache of other files with the teacher's hidden states (`--hidden`), for the exact KL. Memory is that of
random models of 1 and of 16 layers of width 512, each trained in a process of its own, which samples /proc.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from quantize_memory import TEXT, make, memory_mb

from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.data.sources import TextConfig
from qat_lora.layers.lora import LoraConfig
from qat_lora.losses.objective import ObjectiveConfig
from qat_lora.models.student import open_student
from qat_lora.options import CacheBuildOptions, QuantizeOptions, RecoverOptions, RunConfig
from qat_lora.registry import COMMANDS
from qat_lora.runtime.host.machine import made_with
from qat_lora.runtime.launch.select import select_runtime
from qat_lora.runtime.launch.start import run
from qat_lora.setup.training import TrainingData, evaluation
from qat_lora.train.loop import LoopConfig

WIDTH, DEPTHS, LENGTH, ROWS = 512, (1, 16), 256, 8


def options(student: Path, teacher: Path, cache: Path, out: Path, steps: int, rank: int, blockwise: bool) -> Any:
    """Return the settings of one recovery."""
    return RecoverOptions(
        checkpoint=str(student),
        model=str(teacher) if blockwise else None,
        kd_cache_dir=str(cache),
        blockwise=blockwise,
        lora=LoraConfig(recovery_r=rank),
        loop=LoopConfig(max_steps=steps, batch_size=ROWS),
        run=RunConfig(out=str(out), device="cpu", dtype="float32", quiet=True),
    )


def quality(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the exact KL on held-out rows of the start and of what both runs made of it."""
    runtime = select_runtime("cpu")
    held = KDCacheDataset(str(arguments.held))
    data = TrainingData(held, held, ObjectiveConfig(), {})
    kl = {}
    for name, blockwise in (("recover", False), ("blockwise", True)):
        out = arguments.work / name
        given = arguments.student, arguments.teacher, arguments.cache, out, arguments.steps, arguments.rank
        run(COMMANDS["recover"], options(*given, blockwise))
        for key, folder in (("start", out / "start"), (name, out / "best")):
            if key not in kl and not (key == "start" and blockwise):
                measured = evaluation(
                    data, open_student(str(folder)).model, LoopConfig(), runtime, held.teacher_lm_head()
                )
                assert measured is not None
                kl[key] = round(measured(), 6)
    closed = (kl["start"] - kl["blockwise"]) / (kl["start"] - kl["recover"])
    return {"steps": arguments.steps, "rank": arguments.rank, "kl": kl, "share_of_gain": round(closed, 3)}


def memory(work: Path) -> list[dict[str, Any]]:
    """Return the own memory of both runs on random models of several depths."""
    rows = []
    for layers in DEPTHS:
        folder = work / f"layers-{layers}"
        teacher = folder / "teacher"
        teacher.mkdir(parents=True)
        size = make(teacher, layers, WIDTH)
        (folder / "text.txt").write_text(TEXT * 2000, encoding="utf-8")
        text = TextConfig(dataset=str(folder / "text.txt"))

        def here(name: str, folder: Path = folder) -> RunConfig:
            return RunConfig(out=str(folder / name), device="cpu", quiet=True)

        caching = CacheBuildOptions(teacher=str(teacher), text=text, length=LENGTH, top_k=16, run=here("cache"))
        run(COMMANDS["cache build"], caching)
        made = {"model": str(teacher), "preset": "w2g64", "start_rank": 0}
        run(COMMANDS["quantize"], QuantizeOptions(**made, init="mse", run=here("student")))
        for blockwise in (False, True):
            name = "blockwise" if blockwise else "recover"
            order = [sys.executable, __file__, "--work", str(folder), "--measure", name]
            lines = subprocess.run(order, check=True, stdout=subprocess.PIPE, text=True).stdout
            peak = json.loads(lines.strip().splitlines()[-1])
            rows.append({"layers": layers, "run": name, "checkpoint_mb": round(size / 1e6, 1), "own_mb": peak})
            print(json.dumps(rows[-1]), flush=True)
        shutil.rmtree(folder)
    return rows


def measure(folder: Path, blockwise: bool) -> int:
    """Train a few steps in this process and return its peak of own memory, in MB."""
    peak, done = [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            peak[0] = max(peak[0], memory_mb()["own"])

    watcher = threading.Thread(target=watch)
    watcher.start()
    names = (folder / name for name in ("student", "teacher", "cache", "blockwise" if blockwise else "recover"))
    run(COMMANDS["recover"], options(*names, 4, 16, blockwise))
    done.set()
    watcher.join()
    return round(peak[0])


def main() -> None:
    """Measure both, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--student", type=Path, help="quantised, with adapter starts")
    parser.add_argument("--teacher", type=Path, help="full-precision model")
    parser.add_argument("--cache", type=Path, help="its KD cache")
    parser.add_argument("--held", type=Path, help="cache of held-out files")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    parser.add_argument("--work", type=Path, required=True, help="folder for runs and models")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(measure(arguments.work, arguments.measure == "blockwise"))
        return
    rows = memory(arguments.work)
    own = {(row["layers"], row["run"]): row["own_mb"] for row in rows}
    growth = {name: own[DEPTHS[1], name] - own[DEPTHS[0], name] for name in ("recover", "blockwise")}
    result = {**made_with(), "quality": quality(arguments), "memory": rows, "own_mb_of_15_layers_more": growth}
    print(json.dumps(result["quality"]))
    arguments.out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
