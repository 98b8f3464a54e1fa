"""Does a recovery compile for a TPU, and what does its program hold, move and compute? Asked of the TPU's own compiler.

Every graph of a run (`qat-lora doctor --compile-for`) at Qwen3-0.6B's shape, or at that of `--model`'s config.json:
instructions and CPU seconds of tracing, seconds of compiling, HBM, and what the optimised program moves and computes,
every loop's body times its trip count. No TPU is used and nothing is run, so no time of a device is in the result.
Beside the counts stand the compiler's own sums, which count a loop's body once, and copies beside other work more than
once. `estimate` is held against what was compiled for one chip.

A run that was cut off goes on from what `--out` holds. `make tpu-compiler` makes the compiler's environment.

    python benchmarks/tpu_compile.py --machine "two cores of ..." --out benchmarks/results/tpu_compile_v6e-1.json
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from compiled import NAMES, QWEN3_06B, Asked
from compiled.report import TOPOLOGIES, compile_recovery, find_compiler, table
from estimate import forecast_on


def estimated(chip: str, asked: Asked, graph: dict[str, Any]) -> dict[str, Any]:
    """Return the estimate of a step's memory beside the compiled micro-batch and the moments, which it does not see."""
    with tempfile.TemporaryDirectory() as folder:
        if not asked.model:
            Path(folder, "config.json").write_text(json.dumps(QWEN3_06B), encoding="utf-8")
            asked = replace(asked, model=folder)
        found = forecast_on(chip, asked)
    compiled = sum(graph["hbm"].values()) + found["bytes"]["optimizer state"]
    total = found["total_bytes"]
    return {"parts": found["bytes"], "total": total, "compiled": compiled, "ratio": round(total / compiled, 3)}


def main() -> None:
    """Compile the graphs that the result lacks, and write it after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chip", choices=TOPOLOGIES, default="v6e-1")
    parser.add_argument("--graphs", default=",".join(NAMES))
    parser.add_argument("--compiler", help="Python with jax and libtpu")
    kinds = {"loss_chunk_mb": int} | {name: int for name, value in asdict(Asked()).items() if type(value) is int}
    for name, value in asdict(Asked()).items():
        if isinstance(value, bool):
            parser.add_argument(f"--{name.replace('_', '-')}", action="store_true")
        elif name not in ("chips", "graphs"):
            parser.add_argument(f"--{name.replace('_', '-')}", type=kinds.get(name, str), default=value)
    parser.add_argument("--machine", default=platform.processor() or platform.machine(), help="what this runs on")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    arguments = parser.parse_args()
    given = {name: getattr(arguments, name) for name in asdict(Asked()) if name not in ("chips", "graphs")}
    compiler = find_compiler(arguments.compiler)
    result: dict[str, Any] = {"graphs": {}}
    if arguments.out and arguments.out.is_file():
        result = json.loads(arguments.out.read_text(encoding="utf-8"))
    for name in arguments.graphs.split(","):
        if name in result["graphs"]:
            continue
        asked = Asked(**given, graphs=(name,))
        report = compile_recovery(
            arguments.chip, asked, compiler, say=lambda line: print(line, file=sys.stderr, flush=True)
        )
        graphs = result["graphs"] | {name: report["graphs"][name]}
        graphs = {graph: graphs[graph] for graph in NAMES if graph in graphs}
        result = report | {"model": arguments.model or "Qwen3-0.6B's shape", "graphs": graphs}
        if name == "micro-batch" and report["settings"]["chips"] == 1 and "hbm" in graphs[name]:
            graphs[name]["estimate"] = estimated(arguments.chip, asked, graphs[name])
        result |= {"machine": arguments.machine, "date": time.strftime("%Y-%m-%d")}
        result |= {"command": "python benchmarks/tpu_compile.py " + " ".join(sys.argv[1:])}
        if arguments.out:
            arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(table(result))


if __name__ == "__main__":
    main()
