"""How much memory `quantize` needs beside the size of the model: what is its own, and what is the file's.

Claim: a bfloat16 checkpoint is never in memory in float32. Its matrices are views of the file (they count as the
file's pages, which the system may drop), and of the wide ones there is one layer's at a time. A model of random
weights is written in shards and quantised in a process of its own, which samples /proc: `own` is anonymous memory,
`file` is what of mapped files is in memory. `baseline` is the same program with one decoder layer, so the difference
is what grows with the model. Where own memory grows by less than twice the checkpoint's size, a model larger than half
the memory can be quantised.

    python benchmarks/quantize_memory.py --work DIR [--layers 40 --hidden 512 --init gptq --metric outputs]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch

from qat_lora.models import make_qwen3, make_tokenizer

TEXT = "def quantise(weight, bits):\n    return round(weight * 2 ** bits) / 2 ** bits\n"


def make(folder: Path, layers: int, hidden: int) -> int:
    """Write a random bfloat16 model in shards; return its bytes."""
    make_tokenizer([TEXT] * 50, 320, folder)
    torch.manual_seed(0)
    model = make_qwen3(folder, 320, hidden=hidden, layers=layers, heads=8, kv_heads=4, mlp=3 * hidden)
    model.module.to(torch.bfloat16).save_pretrained(folder, max_shard_size="100MB")
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def memory_mb() -> dict[str, float]:
    """Return this process's memory now, in MB: its own and that of mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) / 1e3 for line in lines if line.startswith("Rss")}
    return {"own": found["RssAnon"], "file": found["RssFile"]}


def measure(model: str, out: str, init: str, metric: str, calibrate_on: str) -> dict[str, float]:
    """Quantise and return the peaks, in MB, sampled every 20 ms."""
    from qat_lora.launch import run
    from qat_lora.options import QuantizeOptions, RunConfig
    from qat_lora.text.sources import TextConfig

    text = Path(out).parent / "text.txt"
    text.write_text(TEXT * 2000)
    peaks = {"own": 0.0, "file": 0.0}
    done = threading.Event()

    def watch() -> None:
        while not done.wait(0.02):
            for name, value in memory_mb().items():
                peaks[name] = max(peaks[name], value)

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.process_time()
    options = QuantizeOptions(
        model=model,
        init=init,  # type: ignore[arg-type]
        metric=metric,  # type: ignore[arg-type]
        calibrate_on=calibrate_on,  # type: ignore[arg-type]
        text=TextConfig(dataset=str(text)),
        calibration_rows=8,
        calibration_length=64,
        start_rank=0,
        run=RunConfig(out=out, device="cpu", quiet=True, overwrite=True),
    )
    run("quantize", options)
    done.set()
    watcher.join()
    return {**{name: round(value) for name, value in peaks.items()}, "cpu_s": round(time.process_time() - started)}


def main() -> None:
    """Make both models, quantise each in its own process, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", required=True)
    parser.add_argument("--layers", type=int, default=40)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--init", default="gptq")
    parser.add_argument("--metric", default="outputs")
    parser.add_argument("--calibrate-on", default="student")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    work = Path(arguments.work)
    settings = (arguments.init, arguments.metric, arguments.calibrate_on)
    if arguments.measure:
        print(json.dumps(measure(str(work / arguments.measure), str(work / f"{arguments.measure}-out"), *settings)))
        return
    result: dict[str, object] = {"settings": vars(arguments)}
    for name, layers in (("baseline", 1), ("model", arguments.layers)):
        (work / name).mkdir(parents=True, exist_ok=True)
        size = make(work / name, layers, arguments.hidden)
        command = [sys.executable, __file__, *sys.argv[1:], "--measure", name]
        lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.strip().splitlines()
        result[name] = {"checkpoint_mb": round(size / 1e6, 1), **json.loads(lines[-1])}
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
