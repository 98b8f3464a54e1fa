"""The tables that scripts/tpu_acceptance.sh and scripts/gpu_acceptance.sh end with, to paste into an issue.

`table FOLDER` compares the training runs that exits.txt there lists ("name code seconds") with the first of them, and
shows other checks (checks.txt) and measured steps (steps.jsonl). Exit code 1 where something failed or differs.

`step FOLDER` measures a training step of a random student of Qwen3-0.6B's size (on a CPU: of a toy) by the calls that
`recover` makes: graphs compiled, whether anything stops a GPU's queue (CUDA's own check, set to raise), tokens/s, peak
memory beside what `qat-lora estimate` says, and the loss.

    python benchmarks/acceptance.py step FOLDER --device cuda
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import re
import sys
import time
from pathlib import Path
from typing import Any

STEPS, WARM_UP = 10, 3
LOSS, ADAPTER, MEMORY, HALF = 1e-3, 1e-3, 0.15, 0.01  # largest differences, the last two of a share
COLUMNS = ("run", "result", "steps", "checkpoints", "largest loss difference", "largest adapter difference", "seconds")


def step(folder: Path, device: str) -> None:
    """Measure a training step and append it to the folder's steps.jsonl."""
    import estimate
    import torch

    from qat_lora.runtime.host.machine import LiveBytes
    from qat_lora.runtime.launch.select import select_runtime

    runtime, point = select_runtime(device), estimate.Point(rank=8, dtype="bfloat16")
    on_gpu = runtime.device.type == "cuda"
    if on_gpu:
        point = estimate.Point(1024, 28, 151_936, 16, 1024, 8, "bfloat16")
        estimate.CHUNK_MB = runtime.loss_chunk_mb(None)

    def work() -> dict[str, Any]:
        held, run = estimate.step(point, runtime)
        with LiveBytes(*held) as live:  # of a CPU; one step, for counting takes time
            for _ in range(1 if not on_gpu else 0):
                run()
        for _ in range(WARM_UP):
            run()
        stopped = ""
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            torch.cuda.set_sync_debug_mode("error")
        began = time.perf_counter()
        try:
            for _ in range(STEPS):
                means = run()
                runtime.step_end()
        except RuntimeError as error:
            stopped = str(error).splitlines()[0]
        if on_gpu:
            torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        peak = torch.cuda.max_memory_allocated() if on_gpu else live.peak
        graphs = sys.modules["torch._dynamo.utils"].counters["stats"]["unique_graphs"] if on_gpu else 0
        return {
            "step": "eager" if os.environ.get("TORCH_COMPILE_DISABLE") else "compiled" if on_gpu else "not compiled",
            "graphs": graphs,
            "queue": stopped or "never stopped" if on_gpu else "no GPU",
            "tokens_per_s": round(STEPS * point.rows * point.length / seconds),
            "peak_mib": round(peak / 2**20),
            "estimated_mib": round(estimate.estimated(point, device) / 2**20),
            "loss": float(means["loss"]),
        }

    with open(folder / "steps.jsonl", "a", encoding="utf-8") as file:
        file.write(json.dumps(runtime.launch(work)) + "\n")


def losses(run: Path) -> list[float]:
    """Return the losses of a run, [] where there are none."""
    file = run / "metrics.jsonl"
    return [json.loads(line)["loss"] for line in file.read_text().splitlines()] if file.is_file() else []


def compared(folder: Path, name: str, first: str) -> tuple[str, list[str]]:
    """Return what comes of a run beside the first one, and its cells; raises OSError where files are missing."""
    from safetensors.numpy import load_file

    loss = max(abs(a - b) for a, b in zip(losses(folder / name), losses(folder / first), strict=True))
    ours, theirs = (load_file(folder / run / "last" / "adapter_model.safetensors") for run in (name, first))
    weight = max(float(abs(ours[key] - theirs[key]).max()) for key in theirs)
    result = "equal" if loss < LOSS and weight < ADAPTER else "DIFFERS"
    held = re.search(r"layers: ([\d,]+) of ([\d,]+) bytes", (folder / f"{name}.txt").read_text())
    if held:
        share = int(held[1].replace(",", "")) / int(held[2].replace(",", ""))
        processes = int(re.findall(r"\d+", name)[0])
        result += f", {share:.0%} of the frozen bytes a process"
        result = result if abs(share * processes - 1) < HALF else f"DIFFERS: {result}"
    return result, [f"{loss:.1e}", f"{weight:.1e}"]


def row_of(folder: Path, line: str, first: str) -> list[str]:
    """Return the cells of a run, given as `name code seconds`."""
    name, code, seconds = line.split()
    steps, saved = len(losses(folder / name)), len(list((folder / name / "checkpoints").glob("step-*")))
    differences = ["", ""]
    if code == "0" and steps and steps == len(losses(folder / first)):
        result, differences = compared(folder, name, first)
    else:
        said = ((folder / f"{name}.txt").read_text().strip().splitlines() or ["no message"])[-1].replace("|", "/")
        refused = code == "2" and "is not possible here" in said
        result = "not possible here" if refused else f"FAILED, exit {code}: {said[:140]}"
    return [name, result, str(steps), str(saved), *differences, seconds]


def step_rows(folder: Path) -> list[list[str]]:
    """Return the cells of measured steps, the last with a verdict on what all of them must hold."""
    file, rows = folder / "steps.jsonl", []
    steps = [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []
    for found in steps:
        memory = found["estimated_mib"] / found["peak_mib"] - 1
        faults = [found["queue"]] if found["queue"] not in ("never stopped", "no GPU") else []
        faults += [f"estimate {memory:+.0%}"] if abs(memory) > MEMORY else []
        faults += ["loss"] if abs(found["loss"] / steps[0]["loss"] - 1) > 0.01 else []  # bfloat16
        rows.append([f"DIFFERS: {', '.join(faults)}" if faults else "fine", *map(str, found.values())])
    return rows


def show(columns: tuple[str, ...], rows: list[list[str]]) -> None:
    """Print a table in Markdown, if it has rows."""
    if rows:
        print(f"\n| {' | '.join(columns)} |", "|---" * len(columns) + "|", sep="\n")
        print(*(f"| {' | '.join(row)} |" for row in rows), sep="\n")


def machine() -> str:
    """Return what this ran on, in words."""
    versions = []
    for name in ("qat-lora", "torch", "torch_xla", "triton"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions.append(f"{name} {importlib.metadata.version(name)}")
    if "PJRT_DEVICE" in os.environ or "TPU_ACCELERATOR_TYPE" in os.environ:
        accelerator = os.environ.get("TPU_ACCELERATOR_TYPE", "not said by TPU_ACCELERATOR_TYPE")
        where = f"PJRT_DEVICE={os.environ.get('PJRT_DEVICE', '')}, accelerator {accelerator}"
    else:
        import torch

        gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        where = ", ".join(gpus) or "no GPU"
    return f"{where}, Python {platform.python_version()}, {', '.join(versions)}"


def table(folder: Path) -> int:
    """Print all tables; return 1 where something failed or differs."""
    lines = (folder / "exits.txt").read_text().splitlines()
    first, file = lines[0].split()[0], folder / "checks.txt"
    runs = [row_of(folder, line, first) for line in lines]
    checks = [line.split() for line in file.read_text().splitlines()] if file.is_file() else []
    checks = [[name, "passed" if code == "0" else f"FAILED, exit {code}", seconds] for name, code, seconds in checks]
    steps = step_rows(folder)
    print(f"\n{machine()}; differences are those to {first}")
    show(("check", "result", "seconds"), checks)
    show(("result", "step", "graphs", "GPU's queue", "tokens/s", "peak MiB", "estimated MiB", "loss"), steps)
    show(COLUMNS, runs)
    return int(any(re.match("FAILED|DIFFERS", cell) for row in (*runs, *checks, *steps) for cell in row))


def main() -> int:
    """Run a subcommand."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("step", "table"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cuda")
    given = parser.parse_args()
    if given.what == "table":
        return table(given.folder)
    step(given.folder, given.device)
    return 0


if __name__ == "__main__":
    sys.exit(main())
