"""Flips single bits in all that a toy pipeline writes, and has the commands that read each file load it.

Claim: a flipped bit in a checkpoint, an adapter, a student, an export, a tokenizer, a log, a run's mark, list, settings
or results, or in a checksum is refused in one line that names the file, or changes nothing that is read; none is taken
in silence, none ends in a traceback. Pictures and pages are not read; the cache has its own checks. The program behind
it is that of the tests (tests/flips.py: student, recovery with checkpoints and trained scales, qat, four exports,
evaluation); this one flips more bits, as many in each kind of file as in the others.

    python benchmarks/flips.py --flips 300 --machine "two cores of ..." --out FILE
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

TESTS = Path(__file__).resolve().parents[1] / "tests"


def main() -> int:
    """Run the program and write the result; exit code 1 where a bit was taken in silence or ended in a traceback."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--flips", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--machine", default=platform.processor() or platform.machine(), help="what this runs on")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    arguments = parser.parse_args()
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(TESTS / "flips.py"), folder, str(arguments.flips), str(arguments.seed)]
        path = os.pathsep.join(filter(None, (str(TESTS), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        program = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
        found = json.loads(program.stdout.splitlines()[-1].replace(folder, "RUN"))
    outcomes: dict[str, int] = {}
    for kind, by in found["kinds"].items():
        for what, number in by.items() if kind != "not read" else ():
            outcomes[what] = outcomes.get(what, 0) + number
    result: dict[str, Any] = {
        "machine": arguments.machine,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d"),
        "command": f"python benchmarks/flips.py --flips {arguments.flips} --seed {arguments.seed}",
        "seconds": round(time.perf_counter() - begun, 1),
        "flips": sum(outcomes.values()),
        "outcomes": outcomes,
        **found,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out:
        arguments.out.write_text(text + "\n", encoding="utf-8")
    return 1 if found["faults"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
