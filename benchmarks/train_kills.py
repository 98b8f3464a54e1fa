"""Kills and stops real training runs at random moments, resumes them, and compares every tensor and log line.

Claim: whenever a run dies, also in the middle of a checkpoint, one complete checkpoint loads and the same command goes
on to the bit-identical result of an uninterrupted run; SIGTERM leaves a checkpoint and exit code 143 within 15 seconds.
The program behind it is that of the tests (tests/train/train_kills.py: a toy student, forked runs that save at every
step, SIGKILL and SIGTERM at random times); this one counts more of them and keeps the result, also what was counted by
the time a run of it is ended itself (`complete` is false then).

    python benchmarks/train_kills.py --kills 100 --stops 30 --machine "two cores of ..." --out FILE
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
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

from qat_lora.train.checkpoint import checkpoints
from qat_lora.train.metrics import read_metrics

PROGRAM = Path(__file__).resolve().parents[1] / "tests" / "train" / "train_kills.py"


def differences(run: Path, whole: Path) -> list[str]:
    """Return what two finished runs do not share, bit for bit; times are not compared."""
    found = []
    for part in ("trained", "optimizer"):
        mine, theirs = (load_file(checkpoints(r / "checkpoints")[-1] / f"{part}.safetensors") for r in (run, whole))
        if mine.keys() != theirs.keys():
            found.append(f"{part}: other names")
        found += [f"{part}/{name}" for name in mine.keys() & theirs.keys() if not torch.equal(mine[name], theirs[name])]
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        lines = [read_metrics(r / name) for r in (run, whole)]
        stripped = [[{k: v for k, v in line.items() if not k.endswith("_per_s")} for line in each] for each in lines]
        if stripped[0] != stripped[1]:
            found.append(name)
    return found


def keep(out: Path | None, result: dict[str, Any]) -> None:
    """Write the result so far, where a file was given."""
    if out:
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    """Run the program and write the result; exit code 1 where a run was not recovered exactly."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--stops", type=int, default=30)
    parser.add_argument("--machine", default=platform.processor() or platform.machine(), help="what this runs on")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    arguments = parser.parse_args()
    begun = time.perf_counter()
    result: dict[str, Any] = {
        "complete": False,
        "machine": arguments.machine,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python benchmarks/train_kills.py --kills {arguments.kills} --stops {arguments.stops}",
    }
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        command = [sys.executable, str(PROGRAM), folder, str(arguments.kills), str(arguments.stops)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) as program:
            assert program.stdout is not None
            for line in program.stdout:  # a line of counts every few runs
                result |= {**json.loads(line), "seconds": round(time.perf_counter() - begun, 1)}
                print(line.rstrip(), file=sys.stderr, flush=True)
                keep(arguments.out, result)
        if program.returncode:
            return 1
        different = {name: differences(root / name, root / "whole") for name in ("killed", "stopped")}
    result |= {"complete": True, "differences": different, "recovered_exactly": not any(different.values())}
    print(json.dumps(result, indent=1))
    keep(arguments.out, result)
    return 0 if result["recovered_exactly"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
