"""Gives damaged and hostile files to every parser that reads what others may have written, and counts what comes of it.

Claim: each is read, or refused in one line that says why; never a traceback, a hang, or a file written elsewhere. The
program behind it is that of the tests (tests/fuzzing.py: Hypothesis draws files with a changed structure, changed bytes
or arbitrary bytes; calls are counted, and writes watched). `--before` gives the same files to an earlier state of the
package, as the control: a search that finds nothing there either would be blind.

    python benchmarks/fuzz.py --machine "two cores of ..." --before FOLDER --out benchmarks/results/fuzz.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]


def survey(package: Path, cases: int, seed: int) -> dict[str, Any]:
    """Return the outcomes by parser of the package in a folder."""
    command = [sys.executable, str(ROOT / "tests" / "fuzzing.py"), "--cases", str(cases), "--seed", str(seed)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "PYTHONPATH": str(package)}
    )
    return json.loads(done.stdout[done.stdout.index("{") :])["parsers"]  # libraries print before it


def main() -> None:
    """Run the survey, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default=platform.machine(), help="named in the result")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--before", help="folder with an earlier state of the package")
    parser.add_argument("--out", help="JSON file for the result")
    arguments = parser.parse_args()
    parsers = survey(ROOT, arguments.cases, arguments.seed)
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": arguments.machine,
        "versions": f"Python {platform.python_version()}, hypothesis {version('hypothesis')}",
        "seed": arguments.seed,
        "cases": sum(of["cases"] for of in parsers.values()),
        "faulty": sum(of["faulty"] for of in parsers.values()),
        "parsers": parsers,
    }
    if arguments.before:
        before = survey(Path(arguments.before).resolve(), arguments.cases, arguments.seed)
        result["before"] = {
            "faulty": sum(of["faulty"] for of in before.values()),
            "kinds": sum(len(of["faults"]) for of in before.values()),
            "parsers": {name: {"faulty": of["faulty"], "faults": sorted(of["faults"])} for name, of in before.items()},
        }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out:
        Path(arguments.out).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
