"""What recovery closes: presets x ranks x seeds on one teacher, against the MSE-clipped rounding of the same preset.

Claims (three seeds each where the result has them): the calibrated start alone closes most of the KL that rounding
cost; training adapter and scales on at most 1.5 M tokens closes most of the rest; and bits that go into an adapter
can be weighed against bits that go into the codes, by the table at equal bits.

Two baselines, both named in the result: `mse` is round to nearest with scales that minimise the weight error (the
strict one, since nobody ships plain absmax), `start` the best calibrated start, adapter included, before training. A
seed is another order and selection of the training text, other calibration rows, other draws; held-out rows are the
same for all. What counts is the adapter that `recover` calls best (by its own evaluation split), scored as
`qat-lora eval` does: KL over the whole vocabulary on files that neither training, calibration nor cache saw.

    python benchmarks/recovery_matrix.py --teacher DIR --library DIR --trained-on LIST --held-out LIST --out DIR \
        --cases w2g64:16,w2g64:4 --seeds 0,1,2

Interrupt it at will, or give each process its own seeds: points that stand in `DIR/points.jsonl` are not made again.
`--cases w4g128:0` scores rounding and calibrated codes without adapter or training: such cases belong into the table
at equal bits, `DIR/equal_bits.md`, which is written beside the summary. With `--train-codes` codes and scales of rank 0
train (`qat`), from the calibrated start. `tokens_read` counts calibration, the trials of `--lr auto`, and training.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import statistics
import time
from collections.abc import Iterator
from datetime import date
from pathlib import Path
from typing import Any

import torch
import transformers

from qat_lora.data.sources import TextConfig
from qat_lora.layers.lora import LoraConfig
from qat_lora.options import CacheBuildOptions, EvalOptions, QatOptions, QuantizeOptions, RecoverOptions, RunConfig
from qat_lora.registry import COMMANDS
from qat_lora.runtime.launch.start import run
from qat_lora.train.loop import LoopConfig
from qat_lora.train.optim import OptimConfig

SETTINGS = (
    "length", "batch", "steps", "lr", "scale_lr", "norm_lr", "train_codes", "weight_lr", "ema", "eval_rows", "top_k",
    "calibration_rows",
)  # fmt: skip


def main() -> None:
    """Make the points that are missing, write the summary."""
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    settings = {name: getattr(arguments, name) for name in SETTINGS}
    for seed in arguments.seeds:
        seen, cache = None, None
        for preset, rank in arguments.cases:
            identity = {"preset": preset, "rank": rank, "seed": seed, "settings": settings}
            if any(identity.items() <= line.items() for line in points(out)):
                continue
            if cache is None:
                seen = text(arguments, seed, out)
                cache = build(arguments, seen, seed, out)
            begun = time.perf_counter()
            scores = point(arguments, preset, rank, seed, cache, out)
            line = {**identity, **scores, "seconds": round(time.perf_counter() - begun)}
            with (out / "points.jsonl").open("a", encoding="utf-8") as stream:
                stream.write(json.dumps(line) + "\n")
            print({name: value for name, value in line.items() if name != "settings"}, flush=True)
            report(arguments, settings, out)
    report(arguments, settings, out)


def parse() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", required=True, help="Hugging Face folder")
    parser.add_argument("--library", required=True, help="folder of the texts")
    parser.add_argument("--trained-on", required=True, help="list of training files, relative to the folder")
    parser.add_argument("--held-out", required=True, help="list of held-out files")
    parser.add_argument("--out", required=True, help="work folder; the summary stands there as recovery_matrix.json")
    parser.add_argument("--cases", type=cases, default=cases("w2g64:16,w2g64:4,w3g128:16,w3g128:4,w4g128:16,w4g128:4"))
    parser.add_argument("--seeds", type=lambda given: [int(seed) for seed in given.split(",")], default=[0, 1, 2])
    parser.add_argument("--length", type=int, default=256, help="tokens of a row")
    parser.add_argument("--batch", type=int, default=16, help="rows of a step")
    parser.add_argument("--steps", type=int, default=366, help="optimizer steps; 366 x 16 x 256 = 1.5 M tokens")
    parser.add_argument("--rows", type=int, help="rows of the cache; default: those that a run reads, once")
    parser.add_argument("--calibration-rows", type=int, default=128, help="of them, for quantize")
    parser.add_argument("--lr", type=lambda given: given if given == "auto" else float(given), default="auto")
    parser.add_argument("--scale-lr", type=float, help="default: half of --lr")
    parser.add_argument("--norm-lr", type=float, default=0.0, help="peak learning rate of norms; 0: they do not train")
    parser.add_argument("--train-codes", action="store_true", help="codes train, of rank 0")
    parser.add_argument("--weight-lr", type=float, default=1e-3, help="of latent weights, rank 0")
    parser.add_argument("--ema", type=float, default=0.0, help="decay of the average that is exported")
    parser.add_argument("--eval-rows", type=int, default=96, help="held-out rows")
    parser.add_argument("--top-k", type=int, default=64)
    parser.add_argument("--machine", default="a machine that was not named", help="for the result")
    parser.add_argument("--threads", type=int, default=1, help="threads of the process")
    return parser.parse_args()


def cases(given: str) -> list[tuple[str, int]]:
    """Return (preset, rank) pairs of `w2g64:16,w3g128:4`."""
    return [(preset, int(rank)) for preset, rank in (case.split(":") for case in given.split(","))]


def text(arguments: argparse.Namespace, seed: int, out: Path) -> TextConfig:
    """Return the training text, mixed by the seed."""
    files = Path(arguments.trained_on).read_text(encoding="utf-8").split("\n")
    random.Random(seed).shuffle(files)
    mixed = out / f"trained-on-s{seed}.txt"
    mixed.write_text("\n".join(files) + "\n", encoding="utf-8")
    return TextConfig(dataset=arguments.library, files_from=str(mixed), format="text")


def part(out: Path, name: str, seed: int = 0) -> RunConfig:
    """Return where a step of the pipeline runs."""
    return RunConfig(out=str(out / name), device="cpu", seed=seed, quiet=True, overwrite=False)


def build(arguments: argparse.Namespace, seen: TextConfig, seed: int, out: Path) -> Path:
    """Return the cache of a seed."""
    return run(
        COMMANDS["cache build"],
        CacheBuildOptions(
            teacher=arguments.teacher,
            text=seen,
            length=arguments.length,
            top_k=arguments.top_k,
            num_rows=arguments.rows or arguments.steps * arguments.batch,
            eval_rows=32,
            teacher_batch_size=16,
            run=part(out, f"cache-s{seed}", seed),
        ),
    )


def quantised(arguments: argparse.Namespace, preset: str, out: Path, name: str, **settings: Any) -> Path:
    """Return a quantised student."""
    folder = part(out, f"students/{name}", settings.pop("seed", 0))
    return run(COMMANDS["quantize"], QuantizeOptions(model=arguments.teacher, preset=preset, run=folder, **settings))


def point(
    arguments: argparse.Namespace, preset: str, rank: int, seed: int, cache: Path, out: Path
) -> dict[str, dict[str, float]]:
    """Return the scores of one preset, rank and seed: rounding, calibrated start, recovered."""
    name = f"{preset}-r{rank}-s{seed}"
    students = {
        "absmax": quantised(arguments, preset, out, f"{name}-absmax", init="absmax", start_rank=0),
        "mse": quantised(arguments, preset, out, f"{name}-mse", init="mse", start_rank=0),
    }
    calibration: dict[str, Any] = {"kd_cache_dir": str(cache), "start_rank": rank, "joint_rank": rank, "seed": seed}
    calibration["calibration_rows"] = arguments.calibration_rows
    student = quantised(arguments, preset, out, f"{name}-start", **calibration)
    run_folder = part(out, f"runs/{name}", seed)
    train = OptimConfig(
        lr=arguments.lr if rank else arguments.weight_lr,
        scale_lr=arguments.scale_lr,
        norm_lr=arguments.norm_lr or OptimConfig.norm_lr,
        ema=arguments.ema,
        warmup_steps=10,
        min_lr_ratio=0.05,
    )
    given: dict[str, Any] = {
        "checkpoint": str(student),
        "model": arguments.teacher,
        "kd_cache_dir": str(cache),
        "train": train,
        "loop": LoopConfig(
            batch_size=arguments.batch, max_steps=arguments.steps, eval_steps=max(1, arguments.steps // 7)
        ),
        "run": run_folder,
    }
    if rank:
        parts = {"train_scales": True, "train_norms": arguments.norm_lr > 0, "lora": LoraConfig(recovery_r=rank)}
        recovered = run(COMMANDS["recover"], RecoverOptions(**given, **parts))
        students |= {"start": recovered / "start", "recovered": recovered}
    elif arguments.train_codes:
        parts = {"train_parts": ("scales", "weights", *(("norms",) if arguments.norm_lr else ()))}
        students |= {"start": student, "recovered": run(COMMANDS["qat"], QatOptions(**given, **parts))}
    else:
        students["start"] = student
    trials = out / f"runs/{name}/lr_probe.json"
    probed = json.loads(trials.read_text(encoding="utf-8"))["steps"] if trials.is_file() else 0
    scores = run(
        COMMANDS["eval"],
        EvalOptions(
            teacher=arguments.teacher,
            students=tuple(f"{key}={folder}" for key, folder in students.items()),
            text=TextConfig(dataset=arguments.library, files_from=arguments.held_out, format="text"),
            length=arguments.length,
            eval_rows=arguments.eval_rows,
            batch_size=16,
            run=part(out, f"scores/{name}"),
        ),
    )
    for folder in (*(Path(student) for student in students.values()), student, out / f"scores/{name}"):
        shutil.rmtree(folder, ignore_errors=True)
    found = {key: kept(scores[key]) for key in ("teacher", *students)}
    steps = arguments.steps + probed if "recovered" in students else 0
    return found | {"read": {"tokens": (steps * arguments.batch + arguments.calibration_rows) * arguments.length}}


def kept(score: dict[str, Any]) -> dict[str, float]:
    """Return the figures that the summary needs."""
    names = ("kl", "nll", "top1", "bits_per_weight")
    return {name: round(float(score[name]), 6) for name in names if score.get(name) is not None}


def points(out: Path) -> Iterator[dict[str, Any]]:
    """Yield the points that stand."""
    lines = out / "points.jsonl"
    if lines.exists():
        yield from (json.loads(line) for line in lines.read_text(encoding="utf-8").splitlines())


def shares(line: dict[str, Any]) -> dict[str, float]:
    """Return what start and training closed, of the KL and of the log-perplexity gap."""
    found = {"start_of_mse": 1 - line["start"]["kl"] / line["mse"]["kl"]}
    if "recovered" in line:
        after, teacher = line["recovered"], line["teacher"]["nll"]
        found["kl_of_mse"] = 1 - after["kl"] / line["mse"]["kl"]
        found["kl_of_start"] = 1 - after["kl"] / line["start"]["kl"]
        for baseline in ("absmax", "mse"):
            lost = line[baseline]["nll"] - teacher
            found[f"log_gap_of_{baseline}"] = (lost - (after["nll"] - teacher)) / lost
    return found


def report(arguments: argparse.Namespace, settings: dict[str, Any], out: Path) -> None:
    """Write the means over seeds, with their spread, and every point."""
    lines = [line for line in points(out) if line["settings"] == settings]
    rows = []
    for preset, rank in sorted({(line["preset"], line["rank"]) for line in lines}):
        mine = [line for line in lines if (line["preset"], line["rank"]) == (preset, rank)]
        closed = [shares(line) for line in mine]
        means = {name: mean([each[name] for each in closed]) for name in closed[0]}
        final = "recovered" if "recovered" in mine[0] else "start"
        rows.append(
            {
                "preset": preset,
                "rank": rank,
                "seeds": sorted(line["seed"] for line in mine),
                "bits_without_adapter": mine[0]["mse"]["bits_per_weight"],
                "bits": mine[0][final]["bits_per_weight"],
                "tokens_read": max(line["read"]["tokens"] for line in mine),
                "kl": {name: mean([line[name]["kl"] for line in mine]) for name in ("mse", "start", final)},
                "perplexity": mean([math.exp(line[final]["nll"]) for line in mine]),
                "closed": means,
            }
        )
    summary = {
        "teacher": Path(arguments.teacher).name,
        "settings": settings,
        "date": date.today().isoformat(),
        "machine": arguments.machine,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "rows": rows,
        "points": lines,
    }
    (out / "recovery_matrix.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
    (out / "equal_bits.md").write_text("\n".join(equal_bits(lines)) + "\n", encoding="utf-8")


def equal_bits(lines: list[dict[str, Any]]) -> list[str]:
    """Return a Markdown table of all students by stored bits per weight; bold: no other has less KL at as few bits."""
    students: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for line in lines:
        preset, rank = line["preset"], line["rank"]
        names = {"mse": "rounded (mse)", "start": f"calibrated start, rank {rank}" if rank else "calibrated"}
        names["recovered"] = f"adapter of rank {rank} and scales trained"
        for key in names.keys() & line.keys():
            score = {"codes_bits": line["mse"]["bits_per_weight"], "seed": line["seed"], **line[key]}
            students.setdefault((preset, names[key]), []).append(score)
    rows = sorted(students.items(), key=lambda row: (row[1][0]["bits_per_weight"], row[1][0]["kl"]))
    table = ["| student | bits per weight | without adapter | KL | perplexity | seeds |", "|---" + "|---:" * 5 + "|"]
    least = math.inf
    for (preset, name), scores in rows:
        kl, bits, codes = (mean([s[key] for s in scores]) for key in ("kl", "bits_per_weight", "codes_bits"))
        ppl, seeds = statistics.fmean(math.exp(s["nll"]) for s in scores), len({s["seed"] for s in scores})
        spread = f" ({kl['min']:.3f}–{kl['max']:.3f})" if kl["max"] > kl["min"] else ""
        label, value = f"{preset}, {name}", f"{kl['mean']:.3f}{spread}"
        if kl["mean"] < least:
            least, label, value = kl["mean"], f"**{label}**", f"**{value}**"
        table.append(f"| {label} | {bits['mean']:.2f} | {codes['mean']:.2f} | {value} | {ppl:.2f} | {seeds} |")
    return table


def mean(values: list[float]) -> dict[str, float]:
    """Return mean, least and largest."""
    return {"mean": round(statistics.fmean(values), 5), "min": round(min(values), 5), "max": round(max(values), 5)}


if __name__ == "__main__":
    main()
