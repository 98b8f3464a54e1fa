"""Kills and stops real training runs at random moments, resumes them, and compares every tensor and log line.

Claim: whenever a run dies, also in the middle of a checkpoint, one complete checkpoint loads and the same command goes
on to the bit-identical result of an uninterrupted run; SIGTERM leaves a checkpoint and exit code 143 within 15 seconds.
The program behind it is that of the tests (tests/train/train_kills.py: a toy student, forked runs that save at every
step, SIGKILL and SIGTERM at random times); this one counts more of them and keeps the result.

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
        stripped = [[{k: v for k, v in line.items() if k != "tokens_per_s"} for line in each] for each in lines]
        if stripped[0] != stripped[1]:
            found.append(name)
    return found


def main() -> int:
    """Run the program and write the result; exit code 1 where a run was not recovered exactly."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--stops", type=int, default=30)
    parser.add_argument("--machine", default=platform.processor() or platform.machine(), help="what this runs on")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    arguments = parser.parse_args()
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        command = [sys.executable, str(PROGRAM), folder, str(arguments.kills), str(arguments.stops)]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if done.returncode:
            sys.stderr.write(done.stderr)
            return 1
        different = {name: differences(root / name, root / "whole") for name in ("killed", "stopped")}
    result = {
        **json.loads(done.stdout.splitlines()[-1]),
        "differences": different,
        "recovered_exactly": not any(different.values()),
        "seconds": round(time.perf_counter() - begun, 1),
        "machine": arguments.machine,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python benchmarks/train_kills.py --kills {arguments.kills} --stops {arguments.stops}",
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")
    return 0 if result["recovered_exactly"] else 1


if __name__ == "__main__":
    raise SystemExit(main())
