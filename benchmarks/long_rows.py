"""How does the memory of a cache build, a training step and an evaluation grow with the length of a row?

Claim: linearly. A mask of L x L would take 4 GB in float32 at 32,768 tokens, the scores of one head as much, and logits
[L, V] 1 GB here; none of them is made (a cache build holds logits of at most 512 MB at a time, for the speed). The
model is narrow (two layers of width 128, a vocabulary of 8,192), so that these would stand out. Each command runs as a
process of its own on rows of each length, one row a batch; its memory is the most that the kernel saw it hold
(`ru_maxrss`).

`bytes_a_token` is the growth from each length to the next over the tokens between: linear growth keeps it as it is, and
quadratic growth multiplies it by four. `worst_growth` is the last over the one before; at 2,048 tokens the libraries
are most of what a process holds.

    python benchmarks/long_rows.py --machine "two cores of ..." --out benchmarks/results/long_rows.json
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from qat_lora.models.load import load_tokenizer, make_qwen3, make_tokenizer

VOCABULARY, WORDS = 8192, 3000
PROGRAM = "import sys; from qat_lora.cli import main; sys.exit(main(sys.argv[1:]))"


def make_inputs(folder: Path, longest: int) -> tuple[Path, Path]:
    """Make a text of a few documents, some longer than a row, and an untrained model with its tokenizer."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefghijklmnop", k=draw.randint(3, 9))) for _ in range(WORDS)]
    text, model = folder / "text", folder / "model"
    text.mkdir()
    for number in range(12):
        count = longest if number % 3 == 0 else draw.randint(20, longest // 8)
        (text / f"{number}.txt").write_text(" ".join(draw.choices(words, k=count)), encoding="utf-8")
    make_tokenizer([file.read_text(encoding="utf-8") for file in sorted(text.iterdir())], VOCABULARY, model)
    torch.manual_seed(0)
    sizes = {"hidden": 128, "layers": 2, "heads": 4, "kv_heads": 2, "head_dim": 32, "mlp": 256}
    make_qwen3(model, VOCABULARY, **sizes, max_position_embeddings=longest).module.save_pretrained(model)
    assert len(load_tokenizer(model)) <= VOCABULARY
    return text, model


def run(*command: str) -> dict[str, float]:
    """Run a command of the package; return its seconds and the most memory that it held."""
    begun = time.perf_counter()
    process = subprocess.Popen([sys.executable, "-c", PROGRAM, *command, "--device", "cpu", "--quiet"])
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return {"peak_mb": round(usage.ru_maxrss * 1024 / 1e6, 1), "seconds": round(time.perf_counter() - begun, 1)}


def measure(folder: Path, text: Path, model: Path, length: int) -> dict[str, dict[str, float]]:
    """Return what the three commands took with rows of a length."""
    place = folder / str(length)
    cache, student = str(place / "cache"), str(folder / "student")
    if not Path(student).is_dir():
        run("quantize", "--model", str(model), "--preset", "w4g128", "--init", "absmax", "--out", student)
    rows = ("--dataset", str(text), "--length", str(length))
    build = ("--teacher", str(model), "--num-rows", "2", "--eval-rows", "1", "--teacher-batch-size", "1")
    learn = ("--checkpoint", student, "--kd-cache-dir", cache, "--out", str(place / "run"))
    steps = ("--max-steps", "2", "--batch-size", "1", "--eval-steps", "2", "--save-steps", "2", "--lr", "1e-3")
    return {
        "cache build": run("cache", "build", *build, *rows, "--out", cache),
        "recover": run("recover", *learn, *steps),
        "eval": run(
            *("eval", "--teacher", str(model), "--students", f"student={student}", *rows),
            *("--eval-rows", "1", "--batch-size", "1", "--out", str(place / "eval")),
        ),
    }


def growth(by_length: dict[int, dict[str, dict[str, float]]], command: str) -> list[float]:
    """Return the bytes of memory for each token more, from each length to the next."""
    peaks = [(length, found[command]["peak_mb"]) for length, found in sorted(by_length.items())]
    return [round((more - less) * 1e6 / (long - short)) for (short, less), (long, more) in itertools.pairwise(peaks)]


def main() -> None:
    """Measure every length, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default=platform.machine(), help="named in the result")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32768], help="tokens of a row")
    parser.add_argument("--out", help="JSON file for the result")
    given = parser.parse_args()
    by_length: dict[int, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as name:
        text, model = make_inputs(Path(name), max(given.lengths))
        for length in sorted(given.lengths):
            by_length[length] = measure(Path(name), text, model, length)
            print(f"{length:,}: {by_length[length]}", flush=True)
    grown: dict[str, Any] = {command: growth(by_length, command) for command in next(iter(by_length.values()))}
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": given.machine,
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
        "command": f"python benchmarks/long_rows.py --lengths {' '.join(map(str, given.lengths))}",
        "lengths": by_length,
        "bytes_a_token": grown,
        "worst_growth": max((round(of[-1] / of[-2], 2) for of in grown.values() if len(of) > 1), default=None),
    }
    print(grown, result["worst_growth"])
    if given.out:
        Path(given.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
