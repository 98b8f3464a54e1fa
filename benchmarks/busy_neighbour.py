"""Training on every core while another program is busy on one: how OpenMP's threads wait for each other.

Claim: the slowest run of a small model, alone or beside a program that keeps one core, is five times as fast as the
slowest with OpenMP's own setting. GNU's OpenMP, which torch brings, lets a thread spin for some milliseconds at a
barrier; with as many threads as cores the spinning one may hold the core that the last thread waits for, at each of the
thousands of barriers of a step. Whether it does is chance, so runs of one setting differ by ten times. `qat-lora` sets
GOMP_SPINCOUNT to 3,000.

Steps are those of the demo's teacher, on random tokens; each setting is a process of its own, and `busy` runs a second
one that counts. What counts is the slowest of all rounds.

    python benchmarks/busy_neighbour.py --machine "two cores of ..." --out benchmarks/results/busy_neighbour.json
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from qat_lora.commands import demo
from qat_lora.models.load import make_qwen3, make_tokenizer
from qat_lora.runtime.launch.select import select_runtime

SETTINGS = {
    "OpenMP's own": {},
    "ours": {"GOMP_SPINCOUNT": "3000"},
    "passive": {"OMP_WAIT_POLICY": "passive"},
    "one thread": {"OMP_NUM_THREADS": "1"},
}
LONGEST_S = 30.0


def main() -> None:
    """Run every setting alone and beside a busy program, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="training steps of a process, 30 s at most")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--machine", default="a machine that was not named", help="for the result")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    parser.add_argument("--train", action="store_true", help="only print the steps a second of this process")
    arguments = parser.parse_args()
    if arguments.train:
        print(steps_per_s(arguments.steps))
        return
    found: dict[str, dict[str, list[float]]] = {name: {"alone": [], "busy": []} for name in SETTINGS}
    for _ in range(arguments.rounds):
        for name in SETTINGS:
            found[name]["alone"].append(measured(name, arguments.steps))
            other = subprocess.Popen([sys.executable, "-c", "while True: pass"])
            try:
                found[name]["busy"].append(measured(name, arguments.steps))
            finally:
                other.kill()
                other.wait()
            print(name, {place: speeds[-1] for place, speeds in found[name].items()}, flush=True)
    slowest = {name: min(min(speeds) for speeds in places.values()) for name, places in found.items()}
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": arguments.machine,
        "versions": f"Python {sys.version.split()[0]}, torch {torch.__version__}",
        "threads": torch.get_num_threads(),
        "steps_per_s": found,
        "slowest_ours_over_own": round(slowest["ours"] / slowest["OpenMP's own"], 1),
    }
    print(json.dumps(result, indent=1))
    if arguments.out:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def measured(setting: str, steps: int) -> float:
    """Return the steps a second of a process with this setting."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    command = [sys.executable, __file__, "--train", "--steps", str(steps)]
    done = subprocess.run(command, env=kept | SETTINGS[setting], stdout=subprocess.PIPE, text=True, check=True)
    return float(done.stdout.splitlines()[-1])


def steps_per_s(steps: int) -> float:
    """Train the demo's teacher on random tokens; return the steps a second after three."""
    runtime, folder = select_runtime("cpu"), Path(tempfile.mkdtemp())
    make_tokenizer(["def f(x):\n    return x\n"] * 50, 300, folder)
    model = make_qwen3(folder, demo.VOCABULARY, hidden=128, layers=3, heads=4, kv_heads=2, mlp=384)
    model.module.train().requires_grad_(True)
    optimizers = demo._optimizers(model, torch.bfloat16)
    ids_NL = torch.randint(0, demo.VOCABULARY, (demo.TEACHER_ROWS, demo.LENGTH))
    begun, done = 0.0, -3
    while done < steps and (done < 1 or time.perf_counter() - begun < LONGEST_S):
        if done == 0:
            begun = time.perf_counter()
        with runtime.autocast(torch.bfloat16):
            hidden = model.hidden(ids_NL, torch.zeros_like(ids_NL))
            logits = model.logits(hidden[:, :-1].flatten(0, 1)).float()
        torch.nn.functional.cross_entropy(logits, ids_NL[:, 1:].reshape(-1)).backward()
        torch.nn.utils.clip_grad_norm_(model.module.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        done += 1
    return round(done / (time.perf_counter() - begun), 3)


if __name__ == "__main__":
    main()
