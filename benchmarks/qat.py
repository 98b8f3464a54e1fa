"""What training the quantised model itself gives, beside an adapter that learned from as many tokens: one table.

Every student has the same preset. *absmax* and *mse* are rounded without text, *gptq* and *descent* fitted to rows of
the cache; none of them is trained. The next three train, from *descent*, what `qat-lora qat` can train: the scales
alone; scales and weights; scales and a mergeable low-rank change. *blockwise* is the descent student after block-wise
reconstruction, and the same three go on from there. None of these has an adapter, so all have the preset's bits; those
of `qat-lora recover` with scales have one, which costs bits. A training run sees the same rows the same number of
times, whatever it trains; reconstruction before it costs more (`blockwise_tokens`). Held-out files decide; `closed` is
the share of the KL of the MSE-clipped student that is gone.

    python benchmarks/qat.py --teacher DIR --library DIR --trained-on LIST --held-out LIST --work DIR --out FILE

Interrupt it at will: what stands in the work folder is not made again.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from qat_lora.data.sources import TextConfig
from qat_lora.layers.lora import LoraConfig
from qat_lora.options import CacheBuildOptions, EvalOptions, QatOptions, QuantizeOptions, RecoverOptions, RunConfig
from qat_lora.registry import COMMANDS
from qat_lora.runtime.launch.start import run
from qat_lora.train.blockwise import BlockwiseConfig
from qat_lora.train.loop import LoopConfig
from qat_lora.train.optim import OptimConfig

BLOCK_ROWS = 8  # rows of an optimizer step of block-wise reconstruction


def parse() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", required=True, help="Hugging Face folder")
    parser.add_argument("--library", required=True, help="folder of the texts")
    parser.add_argument("--trained-on", required=True, help="list of training files, relative to the folder")
    parser.add_argument("--held-out", required=True, help="list of held-out files")
    parser.add_argument("--work", required=True, help="folder of caches, students and runs")
    parser.add_argument("--out", required=True, help="JSON file for the result, written anew after every student")
    parser.add_argument("--machine", default=platform.machine(), help="named in the result")
    parser.add_argument("--preset", default="w2g64")
    parser.add_argument("--length", type=int, default=256, help="tokens of a row")
    parser.add_argument("--batch", type=int, default=16, help="rows of a step")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--calibration-rows", type=int, default=128)
    parser.add_argument(
        "--blockwise-steps", type=int, default=256, help=f"of {BLOCK_ROWS} rows, for each decoder layer"
    )
    parser.add_argument("--blockwise-lr", type=float, default=1e-3)
    parser.add_argument("--weight-lr", type=float, default=1e-3)
    parser.add_argument("--adapter-lr", type=float, default=2e-3)
    parser.add_argument("--mergeable-lr", type=float, default=1e-3)
    parser.add_argument("--scale-lr", type=float, default=1e-3)
    parser.add_argument("--rank", type=int, default=16, help="of the mergeable change")
    parser.add_argument("--adapter-ranks", type=int, nargs="*", default=[4, 16])
    parser.add_argument("--eval-rows", type=int, default=96)
    parser.add_argument("--top-k", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


class Study:
    """The commands of the package with what all runs of the study share."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.given = arguments
        self.work = Path(arguments.work)
        self.work.mkdir(parents=True, exist_ok=True)
        files = Path(arguments.trained_on).read_text(encoding="utf-8").split("\n")
        random.Random(arguments.seed).shuffle(files)
        mixed = self.work / "trained-on.txt"
        mixed.write_text("\n".join(files) + "\n", encoding="utf-8")
        self.seen = TextConfig(dataset=arguments.library, files_from=str(mixed), format="text")
        self.unseen = TextConfig(dataset=arguments.library, files_from=arguments.held_out, format="text")
        self.loop = LoopConfig(batch_size=arguments.batch, max_steps=arguments.steps)
        self.cache = self.build_cache()

    def part(self, name: str) -> RunConfig:
        """Return where a command writes."""
        return RunConfig(out=str(self.work / name), device="cpu", seed=self.given.seed, quiet=True)

    def build_cache(self) -> Path:
        """Return the cache that everything is calibrated on and learns from."""
        options = CacheBuildOptions(
            teacher=self.given.teacher,
            text=self.seen,
            length=self.given.length,
            top_k=self.given.top_k,
            num_rows=self.given.steps * self.given.batch,
            eval_rows=32,
            teacher_batch_size=16,
            run=self.part("cache"),
        )
        return run(COMMANDS["cache build"], options)

    def quantised(self, name: str, **settings: Any) -> Path:
        """Return an untrained student."""
        options = QuantizeOptions(
            model=self.given.teacher,
            preset=self.given.preset,
            run=self.part(name),
            **settings,
        )
        return run(COMMANDS["quantize"], options)

    def calibrated(self, name: str, **settings: Any) -> Path:
        """Return an untrained student that is fitted to rows of the cache."""
        return self.quantised(
            name, kd_cache_dir=str(self.cache), calibration_rows=self.given.calibration_rows, **settings
        )

    def rates(self, lr: float) -> OptimConfig:
        """Return the optimizer, with the peak rate of what trains beside the scales."""
        return OptimConfig(lr=lr, scale_lr=self.given.scale_lr, warmup_steps=10, min_lr_ratio=0.05)

    def trained(self, start: Path, name: str, **settings: Any) -> Path:
        """Return a student that `qat` trained."""
        options = QatOptions(
            checkpoint=str(start),
            model=self.given.teacher,
            kd_cache_dir=str(self.cache),
            loop=self.loop,
            run=self.part(name),
            **settings,
        )
        return run(COMMANDS["qat"], options)

    def recovered(self, start: Path, rank: int) -> Path:
        """Return a student with an adapter that learned, scales trained too."""
        options = RecoverOptions(
            checkpoint=str(start),
            kd_cache_dir=str(self.cache),
            train_scales=True,
            lora=LoraConfig(recovery_r=rank),
            train=self.rates(self.given.adapter_lr),
            loop=self.loop,
            run=self.part(f"recovered_{rank}"),
        )
        return run(COMMANDS["recover"], options)

    def score(self, folder: Path) -> dict[str, dict[str, float]]:
        """Return the scores of a student and its teacher on held-out text."""
        options = EvalOptions(
            teacher=self.given.teacher,
            students=(f"student={folder}",),
            text=self.unseen,
            length=self.given.length,
            eval_rows=self.given.eval_rows,
            batch_size=16,
            run=self.part(f"scores/{'_'.join(folder.relative_to(self.work).parts)}"),
        )
        names = ("ppl", "nll", "kl", "top1", "bits_per_weight")
        found = run(COMMANDS["eval"], options)
        return {who: {n: round(found[who][n], 5) for n in names if n in found[who]} for who in ("teacher", "student")}


def students(study: Study) -> Iterator[tuple[str, Path]]:
    """Make the students one after the other."""
    given = study.given
    for name in ("absmax", "mse"):
        yield name, study.quantised(name, init=name, start_rank=0)
    yield "gptq", study.calibrated("gptq", init="gptq", start_rank=0)
    descent = study.calibrated("descent", init="descent", start_rank=0, joint_rank=0)
    yield "descent", descent
    scales: dict[str, Any] = {"train": study.rates(given.weight_lr)}
    weights = {**scales, "train_parts": ("scales", "weights")}
    change: dict[str, Any] = {"train": study.rates(given.mergeable_lr), "mergeable": True, "mergeable_r": given.rank}
    kinds = {"scales": scales, "scales and weights": weights, "scales and mergeable change": change}
    for name, settings in kinds.items():
        yield f"descent + {name}", study.trained(descent, name.replace(" ", "_"), **settings)
    for rank in given.adapter_ranks:
        start = study.calibrated(f"start_{rank}", init="descent", start_rank=rank, joint_rank=rank)
        recovered = study.recovered(start, rank)
        yield f"descent with rank {rank}, untrained", recovered / "start"
        yield f"descent + scales and adapter of rank {rank}", recovered
    blocks = BlockwiseConfig(given.blockwise_steps, given.blockwise_lr, given.scale_lr)
    settings = {"blockwise": blocks, "calibration_rows": given.calibration_rows, **kinds.pop("scales")}
    first = study.trained(descent, "blockwise_scales", **settings)
    yield "blockwise", first / "blockwise"
    yield "blockwise + scales", first
    for name, settings in kinds.items():
        folder = f"blockwise_{name.replace(' ', '_')}"
        yield f"blockwise + {name}", study.trained(first / "blockwise", folder, **settings)


def main() -> None:
    """Make and score all students; print and write the table as it grows."""
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    study = Study(arguments)
    tokens = arguments.batch * arguments.length
    paths = ("teacher", "library", "trained_on", "held_out", "work", "out", "machine")
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": arguments.machine,
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
        "teacher_name": Path(arguments.teacher).name,
        "settings": {name: value for name, value in vars(arguments).items() if name not in paths},
        "training_tokens": arguments.steps * tokens,
        "blockwise_tokens": arguments.blockwise_steps * BLOCK_ROWS * arguments.length,
        "scores": {},
    }
    scores = result["scores"]
    for name, folder in students(study):
        found = study.score(folder)
        scores["teacher"], scores[name] = found["teacher"], found["student"]
        if "mse" in scores:
            for score in scores.values():
                score["closed"] = round(1 - score["kl"] / scores["mse"]["kl"], 4)
        Path(arguments.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        print(name, json.dumps(scores[name]), flush=True)
    print("\n".join(table(scores)))


def table(scores: dict[str, dict[str, float]]) -> list[str]:
    """Return the scores as a Markdown table."""
    lines = ["| student | bits per weight | perplexity | KL | closed |", "|---|---:|---:|---:|---:|"]
    for name, score in scores.items():
        bits = f"{score['bits_per_weight']:.2f}" if "bits_per_weight" in score else ""
        lines.append(f"| {name} | {bits} | {score['ppl']:.2f} | {score['kl']:.3f} | {score['closed']:.1%} |")
    return lines


if __name__ == "__main__":
    main()
