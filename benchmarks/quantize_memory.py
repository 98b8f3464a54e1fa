r"""How much memory `quantize` needs beside the size of the model: what is its own, and what is the file's.

Claim: own memory grows by less than twice a bfloat16 checkpoint, so a model larger than half the memory can be
quantised. The checkpoint is never in memory in float32: its matrices are views of the file (they count as the file's
pages, which the system may drop), and of the wide ones there is one layer's at a time. What the Fisher metric keeps of
every layer lies on disk and counts as the file's, too.

A model of random weights is written in shards and quantised in a process of its own, which samples /proc: `own` is
anonymous memory, `file` is what of mapped files is in memory, and `planned` is what `--dry-run` counts as own.
`baseline` is the same program with one decoder layer, so the difference is what grows with the model; `half` has half
of the layers, and the picture shows all three. A setting is INIT:METRIC:LAYERSxHIDDEN or, with MLPs of another width
than three times HIDDEN, LAYERSxHIDDENxMLP: with one layer it compares `planned` and `own` where the solvers' matrices
are most of both. `descent:fisher` is the default of `quantize`, rank 64 is what it stores of adapter starts.

    python benchmarks/quantize_memory.py --work DIR --machine "two cores of ..." \
        --out benchmarks/results/quantize_memory.json --picture docs/quantize_memory.png
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from qat_lora.files.pictures import FAINT, drawn_to
from qat_lora.models.load import make_qwen3, make_tokenizer

TEXT = "def quantise(weight, bits):\n    return round(weight * 2 ** bits) / 2 ** bits\n"


def make(folder: Path, layers: int, hidden: int, mlp: int | None = None) -> int:
    """Write a random bfloat16 model in shards; return its bytes."""
    make_tokenizer([TEXT] * 50, 320, folder)
    torch.manual_seed(0)
    model = make_qwen3(folder, 320, hidden=hidden, layers=layers, heads=8, kv_heads=4, mlp=mlp or 3 * hidden)
    model.module.to(torch.bfloat16).save_pretrained(folder, max_shard_size="100MB")
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def memory_mb() -> dict[str, float]:
    """Return this process's memory now, in MB: its own and that of mapped files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.split(":")[0]: int(line.split()[1]) / 1e3 for line in lines if line.startswith("Rss")}
    return {"own": found["RssAnon"], "file": found["RssFile"]}


def measure(model: str, out: str, init: str, metric: str, rank: int) -> dict[str, float]:
    """Quantise and return the peaks, in MB, sampled every 20 ms, and the processor time."""
    from qat_lora.data.sources import TextConfig
    from qat_lora.options import QuantizeOptions, RunConfig
    from qat_lora.plan.quantize import plan_quantize
    from qat_lora.registry import COMMANDS
    from qat_lora.runtime.launch.start import run

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
        text=TextConfig(dataset=str(text)),
        calibration_rows=8,
        calibration_length=64,
        start_rank=rank,
        run=RunConfig(out=out, device="cpu", quiet=True, overwrite=True),
    )
    run(COMMANDS["quantize"], options)
    done.set()
    watcher.join()
    planned = {"planned": round(plan_quantize(options).report["own_bytes"] / 1e6)}
    used = round(time.process_time() - started)
    return {**{name: round(value) for name, value in peaks.items()}, **planned, "cpu_s": used}


def grown(setting: str, work: Path, rank: int) -> dict[str, Any]:
    """Return what one setting takes of a model and of its first layer alone."""
    init, metric, size = setting.split(":")
    layers, hidden, *mlp = map(int, size.split("x"))
    result: dict[str, Any] = {"setting": setting, "init": init, "metric": metric, "layers": layers, "hidden": hidden}
    depths = {"baseline": 1, "half": layers // 2, "model": layers}
    for name, count in {"model": 1}.items() if layers == 1 else depths.items():
        folder = work / f"{name}-{count}x{hidden}"
        folder.mkdir(parents=True)
        size_mb = round(make(folder, count, hidden, *mlp) / 1e6, 1)
        order = [sys.executable, __file__, "--work", str(work), "--rank", str(rank), "--settings", setting]
        lines = subprocess.run([*order, "--measure", folder.name], check=True, stdout=subprocess.PIPE, text=True).stdout
        result[name] = {"checkpoint_mb": size_mb, "layers": count, **json.loads(lines.strip().splitlines()[-1])}
        shutil.rmtree(folder)
        shutil.rmtree(work / f"{folder.name}-out")
    result["own_over_planned"] = round(result["model"]["own"] / result["model"]["planned"], 3)
    if layers == 1:
        return result
    more = {key: result["model"][key] - result["baseline"][key] for key in ("checkpoint_mb", "own")}
    return result | {"own_growth_over_checkpoint": round(more["own"] / more["checkpoint_mb"], 3)}


def draw(settings: list[dict[str, Any]], file: Path) -> None:
    """Draw own memory, what the dry run counts of it, and the checkpoint over the number of layers."""
    deep = [setting for setting in settings if setting["layers"] > 1]
    with drawn_to(file, 1, len(deep), size=(3.5 * len(deep), 3)) as (_, axes):
        for axis, setting in zip(axes[0], deep, strict=True):
            points = [setting[name] for name in ("baseline", "half", "model")]
            depths = [point["layers"] for point in points]
            axis.plot(depths, [point["own"] for point in points], "o-", ms=4, label="own memory")
            axis.plot(depths, [point["planned"] for point in points], "--", lw=1, label="counted by --dry-run")
            axis.plot(depths, [point["checkpoint_mb"] for point in points], color=FAINT, label="bfloat16 checkpoint")
            axis.set_title(f"{setting['init']}, {setting['metric']}, width {setting['hidden']}")
            axis.set(xlabel="decoder layers", ylabel="MB", ylim=(0, None), xticks=depths)
            axis.legend(loc="center right")
            axis.grid(alpha=0.3)


def main() -> None:
    """Make both models of every setting, quantise each in its own process, print and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", required=True, help="folder for the models, which are removed again")
    settings = "gptq:outputs:24x512,descent:fisher:16x256,descent:fisher:1x512x6144"
    parser.add_argument("--settings", default=settings)
    parser.add_argument("--rank", type=int, default=64, help="of the adapter starts that are stored")
    parser.add_argument("--machine", default=platform.machine(), help="named in the result")
    parser.add_argument("--out", help="JSON file for the result")
    parser.add_argument("--picture", type=Path, help="PNG file for memory by depth")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    work = Path(arguments.work)
    if arguments.measure:
        init, metric, _ = arguments.settings.split(":")
        model = work / arguments.measure
        print(json.dumps(measure(str(model), f"{model}-out", init, metric, arguments.rank)))
        return
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": arguments.machine,
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
        "command": f"quantize_memory.py --work DIR --settings {arguments.settings} --rank {arguments.rank}",
        "calibration": "8 rows of 64 tokens",
        "settings": [],
    }
    for setting in arguments.settings.split(","):
        result["settings"].append(grown(setting, work, arguments.rank))
        print(json.dumps(result["settings"][-1]), flush=True)
        if arguments.out:
            Path(arguments.out).write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    if arguments.picture:
        draw(result["settings"], arguments.picture)


if __name__ == "__main__":
    main()
