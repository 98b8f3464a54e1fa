"""`recover --lr auto` against five fixed rates, on teachers, presets and ranks that nothing here was tuned to.

Claims, for every case of the matrix, at 0.2 M training tokens: what `--lr auto` trains has less KL than its start, and
at most 3 % more than the best of five fixed rates, which no user knows beforehand. Steps of the probe are counted.

A case is `teacher:preset:rank:seed`; the rates are powers of 2, since the best one lies between neighbours then. KL is
exact, over the whole vocabulary, on files that neither cache, calibration nor training saw; what counts is the adapter
that `recover` calls best. The third teacher is made here: Llama (no norms of queries and keys, own output head),
trained by AdamW on few tokens, where the others are Qwen3 trained by Muon.

    python benchmarks/lr_matrix.py --teachers DIR,DIR --library DIR --trained-on LIST --held-out LIST --out DIR \
        --cases teacher-small:w2g64:16:0,teacher-llama:w4g128:4:0

Interrupt it at will, or give each process cases of its own: runs that stand in `DIR/points.jsonl` are not made again,
and teacher, cache and quantised student are made once. `--rates auto` runs the probe alone. From all runs it also says
which power of the run's length fits the best rates (`HORIZON_POWERS` in `train/lr_probe.py`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.data.packing import make_encoder, pack_rows
from qat_lora.data.sources import TextConfig, open_documents
from qat_lora.files.checksums import seal
from qat_lora.layers.lora import LoraConfig
from qat_lora.losses.objective import ObjectiveConfig
from qat_lora.models.load import CausalLM, load_tokenizer, make_tokenizer, save_model
from qat_lora.models.student import open_student
from qat_lora.options import CacheBuildOptions, QuantizeOptions, RecoverOptions, RunConfig
from qat_lora.registry import COMMANDS
from qat_lora.runtime.launch.select import select_runtime
from qat_lora.runtime.launch.start import run
from qat_lora.setup.common import batches_of
from qat_lora.setup.training import TrainingData, evaluation
from qat_lora.train.loop import LoopConfig
from qat_lora.train.optim import OptimConfig, set_lr

LENGTH, ROWS, STEPS = 256, 8, 100  # 204,800 tokens
FIXED = (1.5e-4, 3e-4, 6e-4, 1.2e-3, 2.4e-3)
ALLOWED = 0.03
LLAMA = {"hidden_size": 160, "num_hidden_layers": 3, "num_attention_heads": 5, "intermediate_size": 448}
TEACHER_STEPS, TEACHER_LENGTH, TEACHER_ROWS, TEACHER_LR, VOCABULARY = 1500, 128, 16, 3e-3, 1024


def main() -> None:
    """Make the runs that are missing, write the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teachers", required=True, help="Hugging Face folders, by commas; teacher-llama is made")
    parser.add_argument("--library", required=True, help="folder of the texts")
    parser.add_argument("--trained-on", required=True, help="list of training files, relative to the folder")
    parser.add_argument("--held-out", required=True, help="list of held-out files")
    parser.add_argument("--out", required=True, type=Path, help="work folder; the summary is lr_matrix.json in it")
    parser.add_argument("--cases", default="", help="teacher:preset:rank:seed by commas; default: those that have runs")
    parser.add_argument("--rates", default=",".join(["auto", *map(str, FIXED)]))
    parser.add_argument("--machine", default="a machine that was not named", help="for the result")
    arguments = parser.parse_args()
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    for case in filter(None, arguments.cases.split(",")):
        for rate in arguments.rates.split(","):
            known = {(point["case"], point["rate"]) for point in points(out)}
            if (case, rate) not in known:
                line = {"case": case, "rate": rate, **trained(arguments, case, rate)}
                with (out / "points.jsonl").open("a", encoding="utf-8") as stream:
                    stream.write(json.dumps(line) + "\n")
                print(line, flush=True)
                report(arguments)
    report(arguments)


def trained(arguments: argparse.Namespace, case: str, rate: str) -> dict[str, Any]:
    """Recover at one rate; return KL of start and result, and what the probe did."""
    name, preset, rank, seed = case.split(":")
    home: Path = arguments.out / name
    teacher = next((path for path in arguments.teachers.split(",") if Path(path).name == name), None)
    files = Path(arguments.trained_on).read_text(encoding="utf-8").split("\n")
    random.Random(int(seed)).shuffle(files)
    home.mkdir(parents=True, exist_ok=True)
    (home / f"seen-s{seed}.txt").write_text("\n".join(files) + "\n", encoding="utf-8")
    seen, unseen = (
        TextConfig(dataset=arguments.library, files_from=str(listing), format="text")
        for listing in (home / f"seen-s{seed}.txt", arguments.held_out)
    )
    if teacher is None:
        config = transformers.LlamaConfig(
            vocab_size=VOCABULARY, **LLAMA, max_position_embeddings=1024, bos_token_id=0, eos_token_id=0
        )
        teacher = str(make_teacher(seen, home / "teacher", transformers.LlamaForCausalLM, config))

    def part(folder: str) -> RunConfig:
        return RunConfig(out=str(home / folder), device="cpu", seed=int(seed), quiet=True)

    build = CacheBuildOptions(teacher=teacher, text=seen, length=LENGTH, top_k=64, teacher_batch_size=16)
    known = replace(build, num_rows=1000, eval_rows=32, run=part(f"cache-s{seed}"))
    exact = replace(build, text=unseen, top_k=0, hidden=True, num_rows=64, run=replace(part("held-out"), seed=0))
    cache, held_out = run(COMMANDS["cache build"], known), run(COMMANDS["cache build"], exact)
    quantised = QuantizeOptions(
        model=teacher, preset=preset, kd_cache_dir=str(cache), start_rank=16, run=part(f"{preset}-s{seed}")
    )
    student = run(COMMANDS["quantize"], quantised)
    options = RecoverOptions(
        checkpoint=str(student),
        kd_cache_dir=str(cache),
        train_scales=True,
        lora=LoraConfig(recovery_r=int(rank)),
        train=OptimConfig() if rate == "auto" else OptimConfig(lr=float(rate), scale_lr=float(rate) / 2),
        loop=LoopConfig(batch_size=ROWS, max_steps=STEPS, eval_steps=STEPS // 4),
        run=part(f"runs/{preset}-r{rank}-s{seed}-{rate}"),
    )
    begun = time.process_time()
    folder = run(COMMANDS["recover"], options)
    seconds = time.process_time() - begun
    curve = [json.loads(line)["kl"] for line in (folder / "evaluations.jsonl").read_text().splitlines()]
    found = {"kl": exact_kl(folder / "best", held_out), "curve": [round(kl, 6) for kl in curve]}
    found |= {"start": exact_kl(folder / "start", held_out), "cpu_s": round(seconds, 1)}
    if (folder / "lr_probe.json").is_file():
        found["probe"] = json.loads((folder / "lr_probe.json").read_text(encoding="utf-8"))
    shutil.rmtree(folder)
    return found


def exact_kl(student: Path, held_out: Path) -> float:
    """Return the mean KL of a student to its teacher's full distribution."""
    rows, runtime, loop = KDCacheDataset(str(held_out)), select_runtime("cpu"), LoopConfig(batch_size=ROWS)
    data = TrainingData(rows, rows, ObjectiveConfig(), {})
    model = data.with_vocabulary(open_student(str(student)).model)
    measure = evaluation(data, model, loop, runtime, rows.teacher_lm_head())
    assert measure is not None
    return round(measure(), 6)


def make_teacher(text: TextConfig, out: Path, make: Callable[[Any], Any], config: Any) -> Path:
    """Train a teacher and its tokenizer, unless they are there; a few minutes on one core."""
    if (out / "config.json").is_file():
        return out
    out.mkdir(parents=True, exist_ok=True)
    make_tokenizer(("".join(d.parts()) for d in itertools.islice(open_documents(text), 300)), VOCABULARY, out)
    torch.manual_seed(0)
    module, runtime = make(config), select_runtime("cpu")
    model = CausalLM(module, out)
    module.train().requires_grad_(True)
    optimizer = torch.optim.AdamW(module.parameters(), lr=TEACHER_LR, betas=(0.9, 0.95), weight_decay=0.1)
    optimizer.param_groups[0]["peak_lr"] = TEACHER_LR
    packed = pack_rows(open_documents(text), make_encoder(load_tokenizer(out)), TEACHER_LENGTH)
    rows = list(itertools.islice(packed, 12_000))
    order = np.random.default_rng(0).permutation(np.tile(np.arange(len(rows)), 2))[: TEACHER_STEPS * TEACHER_ROWS]
    for step, batch in enumerate(runtime.feed(batches_of((rows[i] for i in order), TEACHER_LENGTH, TEACHER_ROWS))):
        set_lr(optimizer, min(1.0, (step + 1) / 50, (1 - step / TEACHER_STEPS) / 0.4))
        hidden = model.hidden(batch["input_ids"], batch["document_ids"])
        logits = model.logits(hidden[:, :-1].flatten(0, 1)).float()
        targets = batch["input_ids"][:, 1:].long().masked_fill(~batch["target_mask"], -100).reshape(-1)
        torch.nn.functional.cross_entropy(logits, targets).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    save_model(module, out)
    seal(out)
    return out


def points(out: Path) -> Iterator[dict[str, Any]]:
    """Yield the runs that stand."""
    if (out / "points.jsonl").is_file():
        yield from map(json.loads, (out / "points.jsonl").read_text(encoding="utf-8").splitlines())


def vertex(by_rate: dict[float, float]) -> float:
    """Return the minimum of the parabola in log rate through the best rate and its neighbours; the best at an end."""
    rates = sorted(by_rate)
    i = min(range(len(rates)), key=lambda i: by_rate[rates[i]])
    if not 0 < i < len(rates) - 1:
        return rates[i]
    low, mid, high = (by_rate[rates[j]] for j in (i - 1, i, i + 1))
    step = math.log(rates[i + 1] / rates[i])
    return rates[i] * math.exp(step * (low - high) / (2 * (low - 2 * mid + high)))


def report(arguments: argparse.Namespace) -> None:
    """Write the summary of all runs that stand."""
    out, rows = arguments.out, []
    cases = {point["case"]: {} for point in points(out)}
    for point in points(out):
        cases[point["case"]][point["rate"]] = point
    for case, by_rate in cases.items():
        fixed = {float(rate): point["kl"] for rate, point in by_rate.items() if rate != "auto"}
        row: dict[str, Any] = {"case": case, "start": next(iter(by_rate.values()))["start"], "fixed": fixed}
        if fixed:
            row["best_rate"] = float(f"{vertex(fixed):.3g}")
        auto = by_rate.get("auto")
        if auto:
            row |= {"auto": auto["kl"], "auto_rate": auto["probe"]["lr"], "probe_steps": auto["probe"]["steps"]}
            row["curve_rises"] = max(auto["curve"]) > auto["curve"][0]
        if auto and len(fixed) == len(FIXED):
            row["over_best"] = round(auto["kl"] / min(fixed.values()) - 1, 4)
            row["holds"] = row["over_best"] <= ALLOWED and auto["kl"] < auto["start"]
            trial = auto["probe"]
            ratio = row["best_rate"] / trial["best_of_trials"]
            row["power"] = round(math.log(ratio) / math.log(STEPS / trial["trial_steps"]), 3)
        rows.append(row)
    whole = [row for row in rows if "holds" in row]
    powers = [row["power"] for row in whole]
    summary = {
        "settings": {"tokens": LENGTH * ROWS * STEPS, "steps": STEPS, "rows": ROWS, "length": LENGTH, "fixed": FIXED},
        "date": date.today().isoformat(),
        "machine": arguments.machine,
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
        "cases": len(whole),
        "cases_that_hold": sum(row["holds"] for row in whole),
        "worst_over_best": max((row["over_best"] for row in whole), default=None),
        "probe_share": max((row["probe_steps"] for row in whole), default=0) / STEPS,
        "power": {"mean": round(float(np.mean(powers)), 3), "sd": round(float(np.std(powers)), 3)} if powers else None,
        "rows": rows,
        "points": list(points(out)),
    }
    (out / "lr_matrix.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
