"""Which distance to the teacher a quantised student learns best from: held-out KL at equal tokens and at equal bytes.

One quantised student (w2g64, GPTQ, adapter start) serves every run, and one cache all runs of a K: draws from the tail
are draws behind K entries. The cache of the largest K also holds draws from the whole teacher, of which fewer are a
slice, and hidden states. A run is `recover` with one estimator, K or D, and seed; all other settings are equal, the
learning rate too. What counts is the adapter after the last step (not the best: choosing would favour noisy runs),
scored as `qat-lora eval` does, by the KL over the whole vocabulary on text that neither training nor cache saw.

What is fair. *Equal tokens*: every run sees as many rows, of `--pool` times as many in the cache, so a seed is
another sample of text, of draws, and another order. *Equal bytes*: K entries cost an id and a value each and two sums a
position, D draws an id each; hybrid both; hidden states 2 H whatever K is; `ce` nothing. So `sampled` runs with the D
that take the bytes of each K, and the plot has bytes on its axis. Repeated draws could be stored once with a count;
what that would take, one byte a count, has a column of its own. Bytes depend on the vocabulary (ids above 65,536 take
18 bits instead of 16) and `full` on the width, so on a large model the columns shift: they are this teacher's.
`compressed` is format version 2 with draws alone: there all bytes of the folder count, the text's too, which the others
leave out.

What is not fair, and known: one learning rate for all. Noisy gradients (`sampled` with few draws, `ce`) would rather
have a smaller one; run again with another `--lr` before reading much into them.

    python benchmarks/estimator_study.py --teacher DIR --train-text DIR --train-files LIST \
        --held-out-text DIR --held-out-files LIST --out DIR --seeds 0,1,2

Interrupt it at will: runs that stand in `DIR/runs.jsonl` are not made again, one that was interrupted is resumed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import random
import shutil
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qat_lora.cache.format.codec import pack_ids
from qat_lora.cache.format.compressed import compress_rows
from qat_lora.cache.format.layout import Contents, array_table, row_bytes
from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.data.sources import TextConfig
from qat_lora.files.pictures import FAINT, drawn_to
from qat_lora.layers.lora import LoraConfig
from qat_lora.losses.objective import ObjectiveConfig
from qat_lora.options import CacheBuildOptions, EvalOptions, QuantizeOptions, RecoverOptions, RunConfig
from qat_lora.registry import COMMANDS
from qat_lora.runtime.launch.start import run
from qat_lora.train.loop import LoopConfig
from qat_lora.train.optim import OptimConfig

HEADS = ("ghost", "renorm", "hybrid", "jsd", "skew", "skew_reverse")
ALONE = ("sampled", "full", "ce")
SCHEDULES: dict[str, dict[str, Any]] = {
    "ghost, T 2 then 1": {"estimator": "ghost", "temperature_schedule": (2.0, 1.0)},
    "full, T 2 to 1": {"estimator": "full", "temperature": 2.0, "temperature_end": 1.0},
}
SIZES = ("bytes_v151936", "bytes_v151936_without_pattern")
SETTINGS = ("preset", "length", "rank", "batch", "steps", "lr", "scale_lr", "tail_draws", "pool", "eval_rows", "dtype")


@dataclass(frozen=True)
class Case:
    """One point of the study."""

    estimator: str
    k: int | None = None
    draws: int | None = None
    compressed: bool = False  # a cache of its own: stratified draws alone, format version 2
    positions: str = "all"  # of that cache, or for example entropy:0.5

    @property
    def name(self) -> str:
        """For folders and tables."""
        label = self.label.replace(", ", "-").replace(" ", "-")
        parts = [f"{letter}{size}" for letter, size in (("k", self.k), ("d", self.draws)) if size]
        return "-".join([label, *parts, *([] if self.positions == "all" else self.positions.split(":"))])

    @property
    def label(self) -> str:
        """For tables and the plot."""
        return "compressed" if self.compressed else self.estimator

    def objective(self) -> ObjectiveConfig:
        """Return the settings of the loss."""
        if self.estimator == "ce":
            return ObjectiveConfig(kd_weight=0.0, ce_weight=1.0)
        if self.estimator in SCHEDULES:
            return ObjectiveConfig(**SCHEDULES[self.estimator])
        return ObjectiveConfig(estimator=self.estimator, draws=None if self.compressed else self.draws)  # type: ignore[arg-type]


def main() -> None:
    """Make cache and student, run what is missing, print and write table and plot."""
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    seen, unseen = texts(arguments, out)
    cases = list(all_cases(arguments))
    draws = max((c.draws or 1 for c in cases if c.label == "sampled"), default=1)
    caches = {k: build(arguments, seen, out, k, draws) for k in arguments.k}
    student = Path(arguments.student) if arguments.student else quantised(arguments, caches, out)
    own = {case: build_compressed(arguments, seen, out, case) for case in cases if case.compressed}
    caches = {case: own[case] if case.compressed else caches[case.k or max(arguments.k)] for case in cases}
    costs = {case: cost(case, caches[case]) for case in cases}
    settings = {name: getattr(arguments, name) for name in SETTINGS}
    lines = out / "runs.jsonl"
    start = scored(arguments, unseen, student, out / "scores" / "start")
    for seed in arguments.seeds:
        for case in cases:
            identity = {"case": case.name, "seed": seed, "settings": settings}
            if any(identity.items() <= line.items() for line in read(lines)):
                continue
            begun = time.perf_counter()
            folder = recover(arguments, case, seed, caches[case], student, out / "runs" / f"{case.name}-s{seed}")
            result = scored(arguments, unseen, folder / "last", out / "scores" / f"{case.name}-s{seed}")
            seconds = round(time.perf_counter() - begun, 1)
            line = {**identity, "estimator": case.label, "k": case.k, "draws": case.draws, **result, **costs[case]}
            append(lines, {**line, "seconds": seconds, "load": round(os.getloadavg()[0], 2)})
            print(f"{case.name} seed {seed}: KL {result['kl']:.4f}, {seconds:.0f} s", flush=True)
            shutil.rmtree(folder)
            report(arguments, settings, start, lines, out)
    report(arguments, settings, start, lines, out)
    print((out / "estimator_study.md").read_text(encoding="utf-8"))


def quantised(arguments: argparse.Namespace, caches: Mapping[int, Path], out: Path) -> Path:
    """Return the student that all cases begin with."""
    return run(
        COMMANDS["quantize"],
        QuantizeOptions(
            model=arguments.teacher,
            preset=arguments.preset,
            init="gptq",
            kd_cache_dir=str(caches[max(arguments.k)]),
            start_rank=arguments.rank,
            run=part(arguments, out / "student"),
        ),
    )


def parse() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", required=True, help="Hugging Face folder")
    parser.add_argument("--train-text", required=True, help="file or folder of the training text")
    parser.add_argument("--train-files", help="list of the training files, relative to that folder")
    parser.add_argument("--held-out-text", required=True, help="file or folder of the held-out text")
    parser.add_argument("--held-out-files", help="list of the held-out files, relative to that folder")
    parser.add_argument("--out", required=True, help="output folder")
    parser.add_argument("--machine", default=platform.machine(), help="named in the result")
    parser.add_argument("--estimators", type=words, default=(*HEADS, *ALONE), help="of " + ",".join((*HEADS, *ALONE)))
    parser.add_argument("--k", type=numbers, default=(2, 4, 8, 32, 128), help="entries; each has a cache")
    parser.add_argument("--draws", type=numbers, default=(), help="draws of sampled; default: equal bytes with each K")
    parser.add_argument("--compressed", type=numbers, default=(), help="draws of caches of version 2, each its own")
    parser.add_argument(
        "--positions",
        type=lambda text: text.split(","),
        default=["all"],
        help="of those, each: all, entropy:0.5, uniform:0.5",
    )
    parser.add_argument("--schedules", action="store_true", help="temperatures that step or move, beside the others")
    parser.add_argument("--tail-draws", type=int, default=8, help="draws of hybrid")
    parser.add_argument("--seeds", type=numbers, default=(0, 1, 2))
    parser.add_argument("--preset", default="w2g64")
    parser.add_argument("--student", help="a quantised student of an earlier study, instead of one made here")
    parser.add_argument("--length", type=int, default=256, help="tokens of a row")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--batch", type=int, default=16, help="rows of a step")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--scale-lr", type=float, default=1e-3)
    parser.add_argument("--pool", type=float, default=2.0, help="rows of the cache for each row that a run sees")
    parser.add_argument("--eval-rows", type=int, default=96)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    return parser.parse_args()


def words(text: str) -> tuple[str, ...]:
    """Read a list of estimators."""
    chosen = tuple(text.split(","))
    unknown = set(chosen) - {*HEADS, *ALONE}
    if unknown:
        raise argparse.ArgumentTypeError(f"unknown: {', '.join(sorted(unknown))}")
    return chosen


def numbers(text: str) -> tuple[int, ...]:
    """Read a list of whole numbers."""
    return tuple(int(word) for word in text.split(","))


def all_cases(arguments: argparse.Namespace) -> Iterator[Case]:
    """Yield the points, those of one K together."""
    for k in arguments.k:
        for estimator in HEADS:
            if estimator in arguments.estimators:
                yield Case(estimator, k, arguments.tail_draws if estimator == "hybrid" else None)
    if "sampled" in arguments.estimators:
        # An fp16 value is as large as a draw's 16-bit id, the two sums of a position as large as four.
        for draws in arguments.draws or tuple(2 * k + 4 for k in arguments.k):
            yield Case("sampled", draws=draws)
    for positions, draws in itertools.product(arguments.positions, arguments.compressed):
        yield Case("sampled", draws=draws, compressed=True, positions=positions)
    for estimator in ("full", "ce"):
        if estimator in arguments.estimators:
            yield Case(estimator)
    for estimator in SCHEDULES if arguments.schedules else ():
        yield Case(estimator, max(arguments.k) if estimator.startswith("ghost") else None)


def part(arguments: argparse.Namespace, out: Path, seed: int = 0) -> RunConfig:
    """Return where a part of the study goes."""
    return RunConfig(out=str(out), device="cpu", dtype=arguments.dtype, seed=seed, quiet=True)


def texts(arguments: argparse.Namespace, out: Path) -> tuple[TextConfig, TextConfig]:
    """Return training and held-out text; a list of training files is mixed, so that the cache is a fair sample."""
    listed = None
    if arguments.train_files:
        files = Path(arguments.train_files).read_text(encoding="utf-8").split("\n")
        random.Random(0).shuffle(files)
        listed = out / "train-files.txt"
        listed.write_text("\n".join(files) + "\n", encoding="utf-8")
    seen = TextConfig(dataset=arguments.train_text, files_from=str(listed) if listed else None, format="text")
    return seen, TextConfig(dataset=arguments.held_out_text, files_from=arguments.held_out_files, format="text")


def build(arguments: argparse.Namespace, seen: TextConfig, out: Path, k: int, draws: int) -> Path:
    """Return the cache of one K, made or completed; that of the largest has what the estimators without a K read."""
    largest = k == max(arguments.k)
    return run(
        COMMANDS["cache build"],
        CacheBuildOptions(
            teacher=arguments.teacher,
            text=seen,
            length=arguments.length,
            top_k=k,
            tail_draws=arguments.tail_draws,
            draws=draws if largest else 0,
            hidden=largest,
            temperatures=(1.0, 2.0) if arguments.schedules else (1.0,),
            num_rows=int(arguments.steps * arguments.batch * arguments.pool),
            teacher_batch_size=16,
            run=part(arguments, out / f"cache-k{k}"),
        ),
    )


def build_compressed(arguments: argparse.Namespace, seen: TextConfig, out: Path, case: Case) -> Path:
    """Return a cache of stratified draws alone, its rows compressed."""
    by, _, part_of_them = case.positions.partition(":")
    return run(
        COMMANDS["cache build"],
        CacheBuildOptions(
            teacher=arguments.teacher,
            text=seen,
            length=arguments.length,
            top_k=0,
            draws=case.draws or 0,
            row_codec="lzma",
            positions=by,  # type: ignore[arg-type]
            position_share=float(part_of_them or 0.5),
            num_rows=int(arguments.steps * arguments.batch * arguments.pool),
            teacher_batch_size=16,
            run=part(arguments, out / f"cache-{case.name}"),
        ),
    )


def recover(arguments: argparse.Namespace, case: Case, seed: int, cache: Path, student: Path, out: Path) -> Path:
    """Train one run; return its folder."""
    return run(
        COMMANDS["recover"],
        RecoverOptions(
            checkpoint=str(student),
            kd_cache_dir=str(cache),
            train_scales=True,
            lora=LoraConfig(recovery_r=arguments.rank),
            objective=case.objective(),
            train=OptimConfig(lr=arguments.lr, scale_lr=arguments.scale_lr, warmup_steps=10, min_lr_ratio=0.05),
            loop=LoopConfig(batch_size=arguments.batch, max_steps=arguments.steps, eval_steps=arguments.steps),
            run=part(arguments, out, seed),
        ),
    )


def scored(arguments: argparse.Namespace, unseen: TextConfig, student: Path, out: Path) -> dict[str, float]:
    """Return held-out KL, perplexity and agreement of one student."""
    scores = run(
        COMMANDS["eval"],
        EvalOptions(
            teacher=arguments.teacher,
            students=(f"student={student}",),
            text=unseen,
            length=arguments.length,
            eval_rows=arguments.eval_rows,
            batch_size=16,
            run=part(arguments, out),
        ),
    )
    return {name: scores["student"][name] for name in ("kl", "ppl", "top1")}


def cost(case: Case, cache: Path) -> dict[str, float]:
    """Return the teacher's bytes a token in a cache made for this case alone, and with repeated draws counted."""
    dataset = KDCacheDataset(cache, verify=False)
    if case.compressed:  # every byte of the folder: text, masks, checksums, ends of rows and records too
        size = sum(file.stat().st_size for file in cache.iterdir()) / (len(dataset) * dataset.fingerprint.length)
        scattered, random_ids = (size_at(dataset, patterned) for patterned in (True, False))
        sizes = {"bytes_v151936": scattered, "bytes_v151936_without_pattern": random_ids}
        return {"bytes_per_token": round(size, 2), "bytes_counted": round(size, 2), **sizes}
    held = dataset.manifest.fingerprint.contents
    needs = {
        "full": {"hidden": held.hidden},
        "full, T 2 to 1": {"hidden": held.hidden},
        "sampled": {"draws": case.draws},
        "hybrid": {"tail_draws": case.draws},
    }
    alone = Contents(held.length, case.k or 0, held.vocab_size, **needs.get(case.estimator, {}))
    text = Contents(held.length, 0, held.vocab_size)
    stored = (row_bytes(array_table(alone)) - row_bytes(array_table(text))) / held.length
    counted = stored
    key = {"sampled": "draw_ids", "hybrid": "tail_draw_ids"}.get(case.estimator)
    if key and case.draws:
        drawn = np.sort(
            dataset.rows(range(min(8, len(dataset))))[key][..., : case.draws].reshape(-1, case.draws), axis=1
        )
        distinct = 1 + (np.diff(drawn, axis=1) != 0).sum(1).mean()
        id_bytes = (stored - row_bytes_of_head(case, held) / held.length) / case.draws
        counted = stored + distinct * (id_bytes + 1) - case.draws * id_bytes
    return {"bytes_per_token": round(stored, 1), "bytes_counted": round(min(stored, counted), 1)}


def size_at(dataset: KDCacheDataset, patterned: bool, vocab: int = 151_936, rows: int = 256) -> float:
    """Return bytes a token of rows at even distances with their tokens scattered over a larger vocabulary.

    Or, not `patterned`, with every drawn token another at every position, as no model draws them: an upper bound.
    """
    rng, held = np.random.default_rng(0), dataset.fingerprint.contents._replace(vocab_size=vocab)
    batch = dataset.rows(np.unique(np.linspace(0, len(dataset) - 1, rows).astype(np.int64)))
    ids = batch["draw_ids"].astype(np.int64)
    places = rng.permutation(vocab)
    mapped = places[ids]
    if not patterned:
        own = rng.integers(0, vocab, (*ids.shape[:2], 1)) + ids * rng.integers(1, vocab, (*ids.shape[:2], 1))
        mapped = own % vocab
    arrays = {"input_ids": places[batch["input_ids"]].astype("<i4"), **pack_ids(np.sort(mapped, -1), vocab, "draws")}
    arrays |= {
        name: batch[name].astype(kind) for name, kind in (("entropy", "<f4"), ("weights", "<f2")) if name in batch
    }
    arrays["loss_mask"] = np.ones(arrays["input_ids"].shape, np.uint8)
    arrays["doc_starts"] = np.zeros((len(ids), -(-held.length // 8)), np.uint8)
    return round(sum(map(len, compress_rows([arrays], held, array_table(held)))) / batch["input_ids"].size, 2)


def row_bytes_of_head(case: Case, held: Contents) -> int:
    """Return what a row's head entries and sums take."""
    with_head = row_bytes(array_table(Contents(held.length, case.k or 0, held.vocab_size)))
    return with_head - row_bytes(array_table(Contents(held.length, 0, held.vocab_size)))


def read(lines: Path) -> list[dict[str, Any]]:
    """Return the runs so far; a last line that an interruption cut off is left out."""
    found = []
    for line in lines.read_text(encoding="utf-8").splitlines() if lines.exists() else []:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return found


def append(lines: Path, line: dict[str, Any]) -> None:
    """Write a run's line and have it on disk before its folder goes."""
    broken = lines.exists() and not lines.read_bytes().endswith(b"\n")
    with open(lines, "a", encoding="utf-8") as file:
        file.write(("\n" if broken else "") + json.dumps(line) + "\n")
        file.flush()
        os.fsync(file.fileno())


def report(
    arguments: argparse.Namespace, settings: dict[str, Any], start: dict[str, float], lines: Path, out: Path
) -> None:
    """Write means and spreads as JSON and Markdown, and the plot where matplotlib is installed."""
    grouped: dict[str, list[dict[str, Any]]] = {}
    for line in read(lines):
        if line["settings"] == settings:
            grouped.setdefault(line["case"], []).append(line)
    rows = []
    for name, group in grouped.items():
        values = [line["kl"] for line in group]
        rows.append(
            {
                "case": name,
                **{key: group[0][key] for key in SIZES if key in group[0]},
                **{key: group[0][key] for key in ("estimator", "k", "draws", "bytes_per_token", "bytes_counted")},
                "seeds": len(group),
                "kl_mean": round(statistics.mean(values), 5),
                "kl_sd": round(statistics.stdev(values), 5) if len(values) > 1 else None,
                "ppl_mean": round(statistics.mean(line["ppl"] for line in group), 4),
                "top1_mean": round(statistics.mean(line["top1"] for line in group), 5),
            }
        )
    tokens = arguments.steps * arguments.batch * arguments.length
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": arguments.machine,
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
        "teacher": Path(arguments.teacher).name,
        "settings": settings,
        "training_tokens": tokens,
        "start": start,
        "runs": rows,
    }
    (out / "estimator_study.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    (out / "estimator_study.md").write_text(table(rows, start, tokens), encoding="utf-8")
    try:
        plot(rows, out / "estimator_study.png")
    except ImportError as error:  # the extra `plot` is not installed
        print(f"no plot: {error}")


def table(rows: list[dict[str, Any]], start: dict[str, float], tokens: int) -> str:
    """Return the runs as a Markdown table."""
    text = f"{tokens:,} training tokens; held-out KL before training {start['kl']:.4f}; mean ± standard deviation.\n\n"
    text += (
        "| estimator | K | draws | teacher bytes/token | draws counted | seeds | held-out KL | perplexity | top-1 |\n"
    )
    text += "|---|---|---|---|---|---|---|---|---|\n"
    for row in rows:
        spread = f" ± {row['kl_sd']:.4f}" if row["kl_sd"] is not None else ""
        text += f"| {row['estimator']} | {row['k'] or ''} | {row['draws'] or ''} | {row['bytes_per_token']:.4g} | "
        text += f"{row['bytes_counted']:.4g} | {row['seeds']} | {row['kl_mean']:.4f}{spread} | "
        text += f"{row['ppl_mean']:.3f} | {row['top1_mean']:.4f} |\n"
    return text


def plot(rows: list[dict[str, Any]], file: Path) -> None:
    """Draw held-out KL over bytes a token, with error bars; `ce`, which needs none, as a line across."""
    with drawn_to(file, size=(7, 4.5)) as (_, axes):
        axis = axes[0, 0]
        for estimator in (*HEADS, "sampled", "compressed", "full", *SCHEDULES):
            points = sorted((r for r in rows if r["estimator"] == estimator), key=lambda r: r["bytes_per_token"])
            if points:
                bars = [r["kl_sd"] or 0.0 for r in points]
                place = [r["bytes_per_token"] for r in points]
                axis.errorbar(place, [r["kl_mean"] for r in points], bars, fmt="o-", ms=4, capsize=3, label=estimator)
        for row in rows:
            if row["estimator"] == "ce":
                axis.axhline(row["kl_mean"], color=FAINT, ls="--", lw=1, label="ce (no teacher)")
        places = sorted({round(row["bytes_per_token"]) for row in rows if row["estimator"] != "ce"})
        for place, after in zip(places, places[1:], strict=False):
            if after < 1.2 * place:  # their labels would overlap
                places.remove(after)
        axis.set_xscale("log")
        axis.set_xticks(places, [str(x) for x in places], fontsize=8)
        axis.minorticks_off()
        axis.set(xlabel="teacher's bytes per token in the cache", ylabel="held-out KL to the teacher (nats)")
        axis.set_title("Recovery at equal tokens, by what the cache holds")
        axis.legend()
        axis.grid(alpha=0.3)


if __name__ == "__main__":
    main()
