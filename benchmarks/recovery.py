"""How much recovery closes, on a teacher and text of your own: the demo's pipeline with other inputs.

Claim: a 2-bit student gets back at least 90 % of the log-perplexity gap and of the KL that plain rounding cost it,
on files that neither training nor cache saw. The rows that come out are those of `qat-lora eval`; beside the
absmax student stand the calibrated start (GPTQ codes and activation-aware adapter, untrained) and the recovered one.

    python benchmarks/recovery.py --teacher DIR --library DIR --trained-on LIST --held-out LIST --out DIR \
        --machine "two cores of ..."
"""

from __future__ import annotations

import argparse
import json
import random
import time
from pathlib import Path

from qat_lora.evaluate.score import recovery
from qat_lora.launch import run
from qat_lora.layers.lora import LoraConfig
from qat_lora.options import CacheBuildOptions, EvalOptions, QuantizeOptions, RecoverOptions, RunConfig
from qat_lora.runtime.machine import made_with
from qat_lora.text.sources import TextConfig
from qat_lora.train.loop import LoopConfig
from qat_lora.train.optim import OptimConfig


def main() -> None:
    """Parse the arguments, run the pipeline, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", required=True, help="Hugging Face folder")
    parser.add_argument("--library", required=True, help="folder of the texts")
    parser.add_argument("--trained-on", required=True, help="list of training files, relative to the folder")
    parser.add_argument("--held-out", required=True, help="list of held-out files")
    parser.add_argument("--out", required=True, help="output folder")
    parser.add_argument("--preset", default="w2g64")
    parser.add_argument("--length", type=int, default=256, help="tokens of a row")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch", type=int, default=16, help="rows of a step")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--eval-rows", type=int, default=96)
    parser.add_argument("--top-k", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--machine", help="named in the result; default: as the system names it")
    arguments = parser.parse_args()
    out = Path(arguments.out)
    started = time.perf_counter()
    # Mixed, so that seeds draw different samples of the text (a sorted list did no worse: docs/log.md).
    files = Path(arguments.trained_on).read_text(encoding="utf-8").split("\n")
    random.Random(arguments.seed).shuffle(files)
    mixed = out / "trained-on.txt"
    out.mkdir(parents=True, exist_ok=True)
    mixed.write_text("\n".join(files) + "\n", encoding="utf-8")
    seen = TextConfig(dataset=arguments.library, files_from=str(mixed), format="text")
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
    rough = run(
        "quantize",
        QuantizeOptions(
            model=arguments.teacher, preset=arguments.preset, init="absmax", start_rank=0, run=part("quantised")
        ),
    )
    student = run(
        "quantize",
        QuantizeOptions(model=arguments.teacher, preset=arguments.preset, kd_cache_dir=str(cache), run=part("student")),
    )
    recovered = run(
        "recover",
        RecoverOptions(
            checkpoint=str(student),
            kd_cache_dir=str(cache),
            train_scales=True,
            lora=LoraConfig(recovery_r=arguments.rank),
            train=OptimConfig(lr=2e-3, scale_lr=1e-3, warmup_steps=10, min_lr_ratio=0.05),
            loop=LoopConfig(batch_size=arguments.batch, max_steps=arguments.steps),
            run=part("recovered"),
        ),
    )
    students = (f"quantised={rough}", f"calibrated={recovered / 'start'}", f"recovered={recovered}")
    scores = run(
        "evaluate",
        EvalOptions(
            teacher=arguments.teacher,
            students=students,
            text=unseen,
            length=arguments.length,
            eval_rows=arguments.eval_rows,
            batch_size=16,
            run=part("eval"),
        ),
    )
    shares = recovery(scores["quantised"], scores["recovered"], scores["teacher"])
    tokens = arguments.steps * arguments.batch * arguments.length
    settings = ("preset", "length", "rank", "batch", "steps", "eval_rows", "top_k", "seed")
    result = {
        **made_with(),
        **({"machine": arguments.machine} if arguments.machine else {}),
        "teacher_name": Path(arguments.teacher).name,
        "settings": {name: getattr(arguments, name) for name in settings},
        **scores,
        **shares,
        "training_tokens": tokens,
        "seconds": round(time.perf_counter() - started, 1),
    }
    (out / "result.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(json.dumps({**shares, "training_tokens": tokens, "seconds": result["seconds"]}, indent=2))


if __name__ == "__main__":
    main()
