"""What training the quantised model itself gives, beside the starts it trains from: one teacher, one cache, one table.

Every student has the same preset and no adapter. *absmax*, *mse* and *gptq* are untrained; *blockwise* is the gptq
student after block-wise reconstruction; all others then train on the same rows for the same number of steps: the
scales alone (from gptq, and from blockwise), scales and weights, and scales with a mergeable low-rank change. Scored on
held-out files; `closed` is the share of the KL of the MSE-clipped student that is gone.

    python benchmarks/qat.py --teacher DIR --library DIR --trained-on LIST --held-out LIST --out DIR
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import replace
from pathlib import Path

from qat_lora.launch import run
from qat_lora.options import CacheBuildOptions, EvalOptions, QatOptions, QuantizeOptions, RunConfig
from qat_lora.text.sources import TextConfig
from qat_lora.train.blockwise import BlockwiseConfig
from qat_lora.train.loop import LoopConfig
from qat_lora.train.optim import OptimConfig


def main() -> None:
    """Parse the arguments, make and score all students, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", required=True, help="Hugging Face folder")
    parser.add_argument("--library", required=True, help="folder of the texts")
    parser.add_argument("--trained-on", required=True, help="list of training files, relative to the folder")
    parser.add_argument("--held-out", required=True, help="list of held-out files")
    parser.add_argument("--out", required=True, help="output folder")
    parser.add_argument("--preset", default="w2g64")
    parser.add_argument("--length", type=int, default=256, help="tokens of a row")
    parser.add_argument("--batch", type=int, default=16, help="rows of a step")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--calibration-rows", type=int, default=256)
    parser.add_argument("--blockwise-steps", type=int, default=256, help="of 8 rows, for every decoder layer")
    parser.add_argument("--blockwise-lr", type=float, default=1e-3)
    parser.add_argument("--weight-lr", type=float, default=3e-4)
    parser.add_argument("--change-lr", type=float, default=2e-3, help="of the mergeable change")
    parser.add_argument("--scale-lr", type=float, default=1e-3)
    parser.add_argument("--rank", type=int, default=16, help="of the mergeable change")
    parser.add_argument("--eval-rows", type=int, default=96)
    parser.add_argument("--top-k", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    out, started = Path(arguments.out), time.perf_counter()
    files = Path(arguments.trained_on).read_text(encoding="utf-8").split("\n")
    random.Random(arguments.seed).shuffle(files)
    out.mkdir(parents=True, exist_ok=True)
    (out / "trained-on.txt").write_text("\n".join(files) + "\n", encoding="utf-8")
    seen = TextConfig(dataset=arguments.library, files_from=str(out / "trained-on.txt"), format="text")
    unseen = TextConfig(dataset=arguments.library, files_from=arguments.held_out, format="text")

    def part(name: str) -> RunConfig:
        return RunConfig(out=str(out / name), device="cpu", seed=arguments.seed)

    cache = run(
        "build_cache",
        CacheBuildOptions(
            teacher=arguments.teacher,
            text=seen,
            length=arguments.length,
            top_k=arguments.top_k,
            num_rows=arguments.steps * arguments.batch,
            eval_rows=32,
            teacher_batch_size=16,
            run=part("cache"),
        ),
    )
    start = QuantizeOptions(
        model=arguments.teacher,
        preset=arguments.preset,
        kd_cache_dir=str(cache),
        calibration_rows=arguments.calibration_rows,
        start_rank=0,
    )
    students = {
        name: run("quantize", replace(start, init=name, run=part(name)))  # type: ignore[arg-type]
        for name in ("absmax", "mse", "gptq")
    }
    rates = OptimConfig(scale_lr=arguments.scale_lr, warmup_steps=10, min_lr_ratio=0.05)
    base = QatOptions(
        checkpoint=str(students["gptq"]),
        model=arguments.teacher,
        kd_cache_dir=str(cache),
        calibration_rows=arguments.calibration_rows,
        train=rates,
        loop=LoopConfig(batch_size=arguments.batch, max_steps=arguments.steps),
    )
    blocks = BlockwiseConfig(arguments.blockwise_steps, arguments.blockwise_lr, arguments.scale_lr)
    weights, change = (replace(rates, lr=lr) for lr in (arguments.weight_lr, arguments.change_lr))
    runs = {
        "gptq + scales": base,
        "blockwise + scales": replace(base, blockwise=blocks),
        "gptq + scales, weights": replace(base, train_parts=("scales", "weights"), train=weights),
        "blockwise + scales, weights": replace(
            base, blockwise=blocks, train_parts=("scales", "weights"), train=weights
        ),
        "gptq + scales, mergeable": replace(base, mergeable=True, mergeable_r=arguments.rank, train=change),
    }
    for name, options in runs.items():
        folder = name.replace(" + ", "_").replace(", ", "_")
        students[name] = run("qat", replace(options, run=part(folder)))
    students["blockwise"] = students["blockwise + scales"] / "blockwise"
    scores = run(
        "evaluate",
        EvalOptions(
            teacher=arguments.teacher,
            students=tuple(f"{name.replace(', ', ' and ')}={folder}" for name, folder in students.items()),
            text=unseen,
            length=arguments.length,
            eval_rows=arguments.eval_rows,
            batch_size=16,
            run=part("eval"),
        ),
    )
    yardstick = scores["mse"]["kl"]
    for name, score in scores.items():
        score["closed"] = round(1 - score["kl"] / yardstick, 4)
        print(f"{name:32} perplexity {score['ppl']:8.3f}  KL {score['kl']:.4f}  closed {score['closed']:.1%}")
    tokens = arguments.steps * arguments.batch * arguments.length
    result = {"settings": vars(arguments), "training_tokens": tokens, "scores": scores}
    result["seconds"] = round(time.perf_counter() - started, 1)
    (out / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
