"""The table of tools: KL to the teacher and perplexity against bytes, all on one teacher, one text, one machine.

Claim: from the smallest file that any tool makes up to 5 bits over all weights, a student of ours has the lowest KL at
its size. Published figures cannot show that: each tool reports its own models at its own sizes, often without the
embedding. Here all tools read the same drawn calibration rows, those that train the same training rows, and one
evaluator scores the weights that each file stands for on the same held-out rows.

    python benchmarks/peers.py prepare --teacher DIR --library DIR --trained-on LIST --held-out LIST --work DIR
    /env/of/TOOL/bin/python benchmarks/peer_tools.py TOOL --work DIR
    python benchmarks/peers.py ours --work DIR
    python benchmarks/peers.py score --work DIR --out RESULT
    python benchmarks/peers.py show --results RESULT ... --page benchmarks/README.md --picture docs/peers.png

`peer_tools.py` says how bytes count. Bits are those bytes over all weights of the teacher, embedding, norms and
adapter included. A student that stands is neither made nor scored again, so tools are added one at a time.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import random
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qat_lora import __version__
from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.data.sources import TextConfig
from qat_lora.evaluate.score import measure
from qat_lora.export.gguf import save_base
from qat_lora.extras import pyplot
from qat_lora.files.folders import atomic_file
from qat_lora.files.pictures import COLOURS, FAINT, INK, STYLE
from qat_lora.layers.convert import lora_layers, quant_layers, weight_count
from qat_lora.layers.lora import LoraConfig
from qat_lora.models.load import CausalLM, load_model, load_tokenizer
from qat_lora.models.student import Student, open_student
from qat_lora.options import CacheBuildOptions, QatOptions, QuantizeOptions, RecoverOptions, RunConfig
from qat_lora.quant.presets import Engine, TargetConfig
from qat_lora.registry import COMMANDS
from qat_lora.runtime.launch.start import run
from qat_lora.setup.common import cached_calibration_rows, text_batches
from qat_lora.train.loop import LoopConfig

OURS, BATCH, AT_ONCE, ACCENT = "qat-lora", 8, 12, COLOURS[1]
ROUNDED = (
    *(("q2_0", "q2_0"), ("w3g128", "q3g64"), ("w3g128", "q4_0"), ("q4_0", "q4_0"), ("w4g128", "q8_0")),
    *(("q2_0", "q3g64"), ("w4g128", "q4_0"), ("w4g128", "q3g64"), ("q2_0", None), ("w3g128", None), ("w4g128", None)),
    *(("q2_0", "q4_0"), ("q2_0", "q8_0"), ("q2g128", "q2g128"), ("q2g128", "q2_0")),
)
"""Presets of the layers and of the embedding, None: 16 bits."""
ALLOCATED = (2.4, 2.8, 3.2, 3.6, 4.0, 4.4, 4.8, 5.6, 6.5)
"""Bits over all weights, embedding included, for which `--target-bits` chooses formats, of ours or of one engine."""
ENGINES: tuple[Engine, ...] = ("any", "llama.cpp")
TRAINED, RANKS = (("q2_0", "q3g64"), ("w3g128", "q4_0"), ("w4g128", "q4_0")), (4, 16)
BLOCK = re.compile(r"(?<=<!-- peers -->\n).*?(?=<!-- end -->)", re.S)


def prepare(arguments: argparse.Namespace) -> None:
    """Write the rows that every tool reads, the teacher as GGUF, and the text of the calibration rows."""
    work = arguments.work
    work.mkdir(parents=True, exist_ok=True)
    files = arguments.trained_on.read_text(encoding="utf-8").split()
    random.Random(0).shuffle(files)
    (work / "files.txt").write_text("\n".join(files) + "\n", encoding="utf-8")
    options = CacheBuildOptions(
        teacher=str(arguments.teacher),
        text=TextConfig(dataset=str(arguments.library), files_from=str(work / "files.txt"), format="text"),
        length=arguments.length,
        top_k=64,
        num_rows=arguments.train_rows,
        eval_rows=32,
        run=RunConfig(out=str(work / "cache"), device="cpu", quiet=True),
    )
    dataset = KDCacheDataset(run(COMMANDS["cache build"], options))
    kept = {
        "calibration": cached_calibration_rows(dataset, arguments.calibration_rows, 0),
        "train": dataset.batches(0, arguments.train_rows // BATCH, BATCH, seed=0),
        "valid": KDCacheDataset(work / "cache", split="eval").batches(0, 32 // BATCH, BATCH, seed=0),
    }
    rows = {name: np.concatenate([batch["input_ids"] for batch in batches]) for name, batches in kept.items()}
    for name, ids in rows.items():
        np.save(work / f"{name}.npy", ids.astype(np.int32))
    teacher = load_model(str(arguments.teacher))
    tokenizer = load_tokenizer(teacher.folder)
    text = "".join(tokenizer.decode(row.tolist(), skip_special_tokens=True) for row in rows["calibration"])
    (work / "calibration.txt").write_text(text, encoding="utf-8")
    save_base(teacher, {}, tokenizer, work / "teacher.gguf", "float32", "teacher")
    paths = {name: str(getattr(arguments, name).resolve()) for name in ("teacher", "library", "held_out")}
    settings = {name: len(ids) for name, ids in rows.items()} | {"length": arguments.length}
    prepared = {**paths, "weights": weight_count(teacher.module), "rows": settings}
    (work / "prepared.json").write_text(json.dumps(prepared, indent=1) + "\n", encoding="utf-8")


def ours(arguments: argparse.Namespace) -> None:
    """Make our students: presets by head, from rounding alone to trained adapters."""
    work, prepared = arguments.work, read(arguments.work / "prepared.json")
    steps = prepared["rows"]["train"] // BATCH
    loop = LoopConfig(batch_size=BATCH, max_steps=steps)
    tokens = steps * BATCH * prepared["rows"]["length"]

    def part(name: str) -> RunConfig:
        return RunConfig(out=str(work / "ours" / name), device="cpu", quiet=True)

    def quantised(preset: str, head: str | None, rank: int, bits: float | None = None, engine: Engine = "any") -> Path:
        options = QuantizeOptions(
            model=prepared["teacher"],
            preset=preset,
            quantize_head=head,
            kd_cache_dir=str(work / "cache"),
            joint_rank=rank,
            start_rank=rank,
            target=TargetConfig(target_bits=bits, engine=engine),
            run=part(f"{preset}-{head}-{rank}" if bits is None else f"allocated-{bits}-{engine}"),
        )
        return run(COMMANDS["quantize"], options)

    def scales(preset: str, head: str) -> Path:
        options = QatOptions(
            checkpoint=str(quantised(preset, head, 0)),
            kd_cache_dir=str(work / "cache"),
            loop=loop,
            run=part(f"{preset}-{head}-scales"),
        )
        return run(COMMANDS["qat"], options)

    def place(setting: str) -> Path:
        return work / "students" / re.sub(r"[^A-Za-z0-9_.-]+", "_", f"ours_{setting}")

    def keep(setting: str, student: Path, seconds: float, **more: Any) -> None:
        made = {"tool": OURS, "version": __version__, "setting": setting, "computed": True, **more}
        made |= {"bytes": stored_bytes(open_student(str(student)).model), "seconds": round(seconds, 1)}
        folder = place(setting)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "made.json").write_text(json.dumps(made | {"folder": str(student)}, indent=1) + "\n")
        print(json.dumps(made), flush=True)

    def wanted(setting: str) -> bool:
        return bool(re.search(arguments.only, setting)) and not place(setting).joinpath("made.json").is_file()

    for preset, head in ROUNDED:
        name, started = f"{preset}, embedding {head or '16 bits'}", time.perf_counter()
        if wanted(name):
            student = quantised(preset, head, 0)
            keep(name, student, time.perf_counter() - started)
    for engine, bits in itertools.product(ENGINES, ALLOCATED):
        of_engine = "" if engine == "any" else f", {engine}'s"
        name, started = f"formats by layer for {bits} bits{of_engine}", time.perf_counter()
        if wanted(name):
            student = quantised("q2_0", None, 0, bits, engine)
            keep(name, student, time.perf_counter() - started)
    for preset, head in TRAINED:
        name, started = f"{preset}, embedding {head}", time.perf_counter()
        if wanted(f"{name}, scales trained"):
            keep(f"{name}, scales trained", scales(preset, head), time.perf_counter() - started, tokens=tokens)
        for rank in RANKS:
            started = time.perf_counter()
            if not wanted(f"{name}, rank {rank} recovered"):
                continue
            student = quantised(preset, head, rank)
            begun = time.perf_counter() - started
            options = RecoverOptions(
                checkpoint=str(student),
                kd_cache_dir=str(work / "cache"),
                train_scales=True,
                lora=LoraConfig(recovery_r=rank),
                loop=loop,
                run=part(f"{preset}-{head}-{rank}-recovered"),
            )
            recovered = run(COMMANDS["recover"], options)
            keep(f"{name}, rank {rank} start", recovered / "start", begun)
            keep(f"{name}, rank {rank} recovered", recovered, time.perf_counter() - started, tokens=tokens)


def stored_bytes(model: CausalLM) -> int:
    """Return the bytes of a student of ours: codes and scales as its preset stores them, all else in 16 bits."""
    layers = quant_layers(model.module)
    coded = {id(p) for layer in layers.values() for n, p in layer.named_parameters() if n != "bias"}
    factors = [p for a in lora_layers(model.module).values() for p in (a.lora_A, a.lora_B)]
    others = {id(p): p.numel() for p in [*model.module.parameters(), *factors] if id(p) not in coded}
    return (sum(layer.stored_bits for layer in layers.values()) + 16 * sum(others.values())) // 8


def score(arguments: argparse.Namespace) -> None:
    """Score what was made and is not scored yet, and write all rows, by bytes."""
    work, prepared = arguments.work, read(arguments.work / "prepared.json")
    teacher = load_model(prepared["teacher"])
    text = TextConfig(dataset=prepared["library"], files_from=prepared["held_out"], format="text")
    found = text_batches(text, load_tokenizer(teacher.folder), prepared["rows"]["length"], arguments.eval_rows, BATCH)
    batches = [{name: torch.from_numpy(array) for name, array in batch.items()} for batch in found]
    rows = [(file, read(file)) for file in sorted(work.glob("students/*/made.json"))]
    waiting = [(file, row) for file, row in rows if not {"kl", "failed"} & set(row)]
    for some in (waiting[start : start + AT_ONCE] for start in range(0, len(waiting), AT_ONCE)):
        students = {str(file): open_made(file, row).model for file, row in some}
        tallies = measure(teacher, students, batches, quiet=True)
        for file, row in some:
            tally = tallies[str(file)].figures
            row |= {"kl": round(tally["kl"], 5), "perplexity": round(tally["ppl"], 4)}
            file.write_text(json.dumps(row, indent=1) + "\n", encoding="utf-8")
            print(f"{row['tool']:16} {row['setting']:48} {row['bytes']:9,} {row['kl']:.4f} {row['perplexity']:.3f}")
    alone = measure(teacher, {}, batches, quiet=True)["teacher"].figures
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": arguments.machine,
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
        "teacher_name": Path(prepared["teacher"]).name,
        "weights": prepared["weights"],
        "perplexity_of_teacher": round(alone["ppl"], 4),
        "settings": prepared["rows"] | {"held_out": arguments.eval_rows},
        "rows": [{k: v for k, v in row.items() if k != "folder"} for _, row in rows],
    }
    for row in result["rows"]:
        if "kl" in row:
            row["bits"] = round(8 * row["bytes"] / prepared["weights"], 3)
    result["rows"].sort(key=lambda row: (row.get("bytes", 0), row["tool"], row["setting"]))
    result["against_peers"] = against_peers(result["rows"])
    arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def open_made(file: Path, row: dict[str, Any]) -> Student:
    """Open a student: the folder that its row names, a GGUF file, or the folder of `made.json`."""
    gguf = file.parent / "model.gguf"
    return open_student(str(row.get("folder") or (gguf if gguf.is_file() else file.parent)))


def lowest(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows that no smaller or equal file beats, by bytes."""
    front: list[dict[str, Any]] = []
    for row in sorted((row for row in rows if "kl" in row), key=lambda row: (row["bytes"], row["kl"])):
        if not front or row["kl"] < front[-1]["kl"]:
            front.append(row)
    return front


def against_peers(rows: list[dict[str, Any]], most_bits: float = 5.0) -> dict[str, Any]:
    """Return, for every file on the peers' front up to 5 bits, our lowest KL at its size or below, over the peer's."""
    mine = lowest(row for row in rows if row["tool"] == OURS)
    compared = []
    for peer in lowest(row for row in rows if row["tool"] != OURS):
        if peer["bits"] <= most_bits:
            fits = [row for row in mine if row["bytes"] <= peer["bytes"]]
            line = {name: peer[name] for name in ("tool", "setting", "bytes", "kl")}
            compared.append(line | ({"ours": fits[-1]["setting"], "ours_kl": fits[-1]["kl"]} if fits else {}))
    won = sum(line["ours_kl"] < line["kl"] for line in compared if "ours_kl" in line)
    return {"sizes": len(compared), "won": won, "compared": compared}


def show(arguments: argparse.Namespace) -> None:
    """Renew the tables of the page from results, and draw the picture of the last."""
    results = [read(file) for file in arguments.results]
    draw(results[-1:], arguments.picture)
    page = arguments.page.read_text(encoding="utf-8")
    lines = "\n".join(line for result in results for line in (*table(result), ""))
    arguments.page.write_text(BLOCK.sub(lambda _: f"\n{lines}\n", page), encoding="utf-8")


def table(result: dict[str, Any]) -> list[str]:
    """Return a result as a Markdown table: of each tool the students that none of its smaller ones beats, by bytes."""
    scored = [row for row in result["rows"] if "kl" in row]
    kept = [row for tool in sorted({row["tool"] for row in scored}) for row in front_of(scored, tool)]
    rows, length = result["settings"], result["settings"]["length"]
    lines = [
        f"`{result['teacher_name']}`: {result['weights']:,} weights, perplexity {result['perplexity_of_teacher']:.2f}; "
        f"{rows['calibration']} calibration and {rows['held_out']} held-out rows of {length} tokens.",
        "",
        "| bytes | bits | KL | perplexity | tool | setting | s |",
        "|---:|---:|---:|---:|---|---|---:|",
    ]
    for row in sorted(kept, key=lambda row: row["bytes"]):
        own = "**" if row["tool"] == OURS else ""
        note = f" ({row['note']})" if row.get("note") else ""
        trained = f", {row['tokens'] / 1e6:.1f} M tokens" if row.get("tokens") else ""
        size = f"{row['bytes']:,}{' (c)' if row.get('computed') else ''}"
        lines.append(
            f"| {size} | {row['bits']:.2f} | {own}{row['kl']:.4f}{own} | {row['perplexity']:.3f} "
            f"| {row['tool']} {row['version']} | {row['setting']}{trained}{note} | {row['seconds']:.0f} |"
        )
    for row in result["rows"]:
        if "failed" in row:
            lines.append(f"| - | - | - | - | {row['tool']} {row['version']} | {row['setting']}: {row['failed']} | - |")
    return lines


def front_of(rows: list[dict[str, Any]], tool: str) -> list[dict[str, Any]]:
    """Return a tool's front, trained students apart from the others: they cost more."""
    own = [row for row in rows if row["tool"] == tool]
    return lowest(row for row in own if not row.get("tokens")) + lowest(row for row in own if row.get("tokens"))


def draw(results: list[dict[str, Any]], file: Path) -> None:
    """Draw KL against bits, a panel for each teacher: ours in colour, peers in grey by marker, trained ones filled."""
    plt = pyplot()
    tools = sorted({row["tool"] for result in results for row in result["rows"] if "kl" in row} - {OURS})
    markers = dict(zip(tools, "osD^vP*Xhd", strict=False)) | {OURS: "o"}
    with plt.rc_context(STYLE | {"font.size": 12, "axes.titlesize": 13, "legend.fontsize": 10.5}):
        figure, axes = plt.subplots(1, len(results), figsize=(8 * len(results), 5), squeeze=False, layout="constrained")
        for axis, result in zip(axes[0], results, strict=True):
            scored = [row for row in result["rows"] if "kl" in row]
            _fronts(axis, scored)
            for (tool, marker), trained in itertools.product(markers.items(), (False, True)):
                some = [row for row in scored if row["tool"] == tool and bool(row.get("tokens")) == trained]
                colour = ACCENT if tool == OURS else FAINT
                form = {"color": colour, "markerfacecolor": colour if trained else "none", "markersize": 6, "ls": ""}
                label = f"{tool}{', trained' if trained else ''}" if some else None
                xs, ys = [row["bits"] for row in some], [row["kl"] for row in some]
                axis.plot(xs, ys, marker=marker, label=label, zorder=3 if tool == OURS else 2, **form)
            axis.set(xscale="log", yscale="log", xlabel="bits a weight: the whole file over all weights")
            axis.set(ylabel="KL to the teacher, nats a token")
            axis.set_xticks([2, 2.5, 3, 4, 5, 6, 8, 10], ["2", "2.5", "3", "4", "5", "6", "8", "10"])
            axis.set_xticks([], minor=True)
            axis.set_yticks([1, 0.1, 0.01, 0.001, 0.0001], ["1", "0.1", "0.01", "0.001", "0.0001"])
            axis.set_title(
                f"{result['teacher_name']}, {result['weights'] / 1e6:.1f} M weights: every tool on one teacher"
            )
            axis.legend(loc="lower left", ncols=2, columnspacing=1.2, handletextpad=0.2, borderaxespad=0.2)
        with atomic_file(file) as draft:
            figure.savefig(draft, dpi=150, format="png")
        plt.close(figure)


def _fronts(axis: Any, scored: list[dict[str, Any]]) -> None:
    """Draw the lowest KL at each size, ours and the peers', each named at its line."""
    for mine, colour, style, above in ((True, ACCENT, "-", -50), (False, INK, ":", 10)):
        front = lowest(row for row in scored if (row["tool"] == OURS) == mine)
        axis.plot([row["bits"] for row in front], [row["kl"] for row in front], color=colour, lw=1.4, ls=style)
        name, first = OURS if mine else "the best of the others", (front[0]["bits"], front[0]["kl"])
        offset = {"xytext": (-4, above), "textcoords": "offset points"}
        axis.annotate(name, first, color=colour, fontsize=13, fontweight="bold", **offset)


def read(file: Path) -> Any:
    """Return a JSON file's object."""
    return json.loads(file.read_text(encoding="utf-8"))


def main() -> None:
    """Run one of the subcommands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)

    def command(function: Any, *paths: str) -> argparse.ArgumentParser:
        found = commands.add_parser(function.__name__, help=function.__doc__)
        found.set_defaults(function=function)
        for path in paths:
            found.add_argument(path, type=Path, required=True)
        return found

    start = command(prepare, "--teacher", "--library", "--trained-on", "--held-out", "--work")
    start.add_argument("--length", type=int, default=256, help="tokens of a row")
    start.add_argument("--calibration-rows", type=int, default=128)
    start.add_argument("--train-rows", type=int, default=1024, help="that students may be trained on")
    command(ours, "--work").add_argument("--only", default="", help="settings with this regular expression in them")
    scoring = command(score, "--work", "--out")
    scoring.add_argument("--eval-rows", type=int, default=96)
    scoring.add_argument("--machine", default=platform.machine(), help="named in the result")
    command(show, "--page", "--picture").add_argument("--results", type=Path, nargs="+", required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.function(arguments)


if __name__ == "__main__":
    main()
