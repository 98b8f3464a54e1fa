"""How much host memory the processes of a run need to hold one model: is it flat, or a copy each?

Claim: a model that is loaded in the type of its files stays memory-mapped, so 1, 2 and 4 gloo workers together hold one
copy of it, until each has placed its own on its chip. The control is a conversion (bfloat16 files, float32 asked for),
which cannot be anything but a copy per process. Every worker loads the model and reads every weight; the result is the
growth of all workers together, their shared pages counted once (the sum of Linux's PSS), at the end and at the worst
moment of loading (sampled; each process's own worst, so their sum is an upper bound).

    python benchmarks/host_memory.py --machine "two cores of ..." --out benchmarks/results/host_memory.json
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import re
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from qat_lora.models.load import load_model, make_qwen3, make_tokenizer
from qat_lora.runtime.launch.select import select_runtime
from qat_lora.runtime.launch.start import run_group

CASES = (("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"))
"""Type in the files, type asked for."""


def pss_mb() -> float:
    """Return this process's share of the memory that it uses, in MB: a page that two use counts half in each."""
    text = Path("/proc/self/smaps_rollup").read_text(encoding="ascii")
    found = re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE)
    assert found is not None, text
    return int(found[1]) * 1024 / 1e6


def load_and_read(folder: str, dtype: str) -> dict[str, float]:
    """Load a model in every process of the group; return the MB that all have together beyond what they had."""
    runtime = select_runtime("cpu")

    def measure() -> dict[str, float]:
        runtime.barrier("imported")
        before, worst, done = pss_mb(), 0.0, threading.Event()

        def sample() -> None:
            nonlocal worst
            while not done.wait(0.02):
                worst = max(worst, pss_mb())

        sampler = threading.Thread(target=sample)
        sampler.start()
        model = load_model(folder, dtype=dtype)
        for parameter in model.module.parameters():
            parameter.view(torch.uint8).max()
        done.set()
        sampler.join()
        runtime.barrier("loaded")
        after = pss_mb()
        runtime.barrier("measured")
        sums = torch.tensor([after - before, max(worst, after) - before], dtype=torch.float64)
        if runtime.replicas > 1:
            dist.all_reduce(sums)
        return dict(zip(("held_mb", "worst_mb"), (round(x, 1) for x in sums.tolist()), strict=True))

    return runtime.launch(measure)


def main() -> None:
    """Measure every case with every number of workers, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default=platform.machine(), help="named in the result")
    parser.add_argument("--layers", type=int, default=10, help="of width 512, about 13 MB each in float32")
    parser.add_argument("--out", help="JSON file for the result")
    given = parser.parse_args()
    cases: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        for stored, asked in CASES:
            folder = Path(name) / stored
            make_tokenizer(["a few words"], 320, folder)
            model = make_qwen3(folder, 32768, hidden=512, layers=given.layers, heads=8, kv_heads=4, mlp=1536)
            model.module.to(getattr(torch, stored)).save_pretrained(folder)
            files_mb = sum(file.stat().st_size for file in folder.glob("*.safetensors")) / 1e6
            workers = {
                n: run_group(functools.partial(load_and_read, str(folder), asked), n, 1, "spawn") for n in (1, 2, 4)
            }
            cases[f"{stored} as {asked}"] = {"files_mb": round(files_mb, 1), "workers": workers}
            print(f"{stored} as {asked}: {cases[f'{stored} as {asked}']}", flush=True)
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": given.machine,
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
        "command": f"python benchmarks/host_memory.py --layers {given.layers}",
        "cases": cases,
    }
    if given.out:
        Path(given.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
