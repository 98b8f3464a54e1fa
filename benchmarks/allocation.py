"""Formats and ranks by measure beside one preset for all layers, at the same bytes of everything that is served.

Claim: a student of `quantize --target-size` has at least 20 % less KL than the uniform preset with a rank-16 adapter
that takes the same bytes, untrained and after the same short recovery (adapter and scales train). Bytes are those of
all tensors in `--for`'s files, embedding and adapter included. A case is PRESET:RANK:HEAD: a uniform student whose LM
head, tied to the embedding, is quantised too, as an export would do it (q4_0) or better (q8_0): against tables of 16
bits, the allocation would win by those alone. `ranks:PRESET:RANK:SHARE` keeps the preset and a dense LM head and lets
only ranks vary, at that share of the bytes of the uniform adapter in float16: the claim there is no more KL at 0.6. A
recovered adapter of the allocation is scored as llama.cpp's file stores it, in Q8_0 where blocks fit.

    python benchmarks/allocation.py --teacher DIR --library DIR --trained-on LIST --held-out LIST --work DIR --out FILE

Run it again to go on: finished students stay in --work, and other teachers are added to FILE.
"""

from __future__ import annotations

import argparse
import json
import platform
import time
from pathlib import Path
from typing import Any
from unittest import mock

import gguf
import torch

from qat_lora.data.sources import TextConfig
from qat_lora.evaluate.score import measure
from qat_lora.export.forms import FORMATS, adapter_bytes, layer_bytes, other_bytes
from qat_lora.layers.convert import LM_HEAD, add_lora, check_reach, lora_layers
from qat_lora.layers.lora import LoraConfig
from qat_lora.models.adapter import allocated_ranks, load_starts
from qat_lora.models.hub import HubConfig
from qat_lora.models.load import CausalLM, load_model, load_tokenizer
from qat_lora.models.student import open_student
from qat_lora.options import CacheBuildOptions, QatOptions, QuantizeOptions, RecoverOptions, RunConfig
from qat_lora.quant.presets import TargetConfig, preset
from qat_lora.registry import COMMANDS
from qat_lora.runtime.launch.start import run
from qat_lora.setup import allocation
from qat_lora.setup.common import text_batches
from qat_lora.train.loop import LoopConfig
from qat_lora.types import Batch

CASES = ("q2_0:16:q4_0", "q2_0:16:q8_0", "q2_0:4:q8_0", "ranks:q2_0:16:0.6")
BATCH = 8
UNREAD = ("work", "out", "machine", "teacher", "library", "trained_on", "held_out", "cases", "seed")


def main() -> None:
    """Make the students of every case, score them, write the result."""
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    out, name = Path(arguments.out), Path(arguments.teacher).name
    result = json.loads(out.read_text(encoding="utf-8")) if out.exists() else begun(arguments)
    kept = {key: value for key, value in vars(arguments).items() if key not in UNREAD}
    if result["settings"] != kept:
        raise SystemExit(f"{out} has other settings; give another --out")
    teacher = load_model(arguments.teacher)
    teacher.module.requires_grad_(False).eval()
    unseen = TextConfig(dataset=arguments.library, files_from=arguments.held_out, format="text")
    batches = text_batches(unseen, load_tokenizer(teacher.folder), arguments.length, arguments.eval_rows, BATCH)
    held_out = [{key: torch.from_numpy(array) for key, array in batch.items()} for batch in batches]
    for case in arguments.cases:
        label = f"{case} seed {arguments.seed}" if arguments.seed else case
        done = result["teachers"].setdefault(name, {}).setdefault(label, {})
        if "untrained" not in done or (arguments.max_steps and "recovered" not in done):
            done |= (by_rank if case.startswith("ranks:") else compared)(arguments, teacher, held_out, case)
            out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
            print(name, label, json.dumps(done), flush=True)


def compared(arguments: argparse.Namespace, teacher: CausalLM, held_out: list[Batch], case: str) -> dict[str, Any]:
    """Return bytes and KL of the uniform student of a case and of the allocated one."""
    name, rank, head = case.split(":")
    work = folder_of(arguments)
    size = uniform_bytes(arguments.engine, teacher, name, int(rank), head)
    bits = 8 * size / sum(p.numel() for p in teacher.module.parameters())
    common = {"start_rank": int(rank), "joint_rank": int(rank), "preset": name, "quantize_head": head}
    students = {
        "uniform": quantised(arguments, work / case.replace(":", "-"), **common),
        "allocated": quantised(
            arguments,
            work / f"as-{case}".replace(":", "-"),
            target=TargetConfig(target_bits=bits, engine=arguments.engine),
        ),
    }
    chosen = json.loads((students["allocated"] / "result.json").read_text(encoding="utf-8"))
    found: dict[str, Any] = {"bytes": size, "allocated_bytes": chosen["bytes"], "bits_over_all_weights": round(bits, 4)}
    found["allocated"] = {key: chosen[key] for key in ("predicted_kl", "adapter_ranks", "rules")}
    return found | scored(arguments, teacher, held_out, students, int(rank))


def by_rank(arguments: argparse.Namespace, teacher: CausalLM, held_out: list[Batch], case: str) -> dict[str, Any]:
    """Return bytes and KL of a uniform adapter in float16 and of one whose ranks are allocated, on the same format."""
    _, name, rank, share = case.split(":")
    work = folder_of(arguments)
    targets = check_reach(teacher.module, preset(name))
    shapes = {layer: teacher.module.get_submodule(layer).weight.shape for layer in targets}
    base = other_bytes(arguments.engine, teacher.module, targets, teacher.module.dtype.itemsize)
    base += sum(layer_bytes(arguments.engine, spec, *shapes[layer]) for layer, spec in targets.items())
    in_halves = sum(adapter_bytes("any", *shape, int(rank)) for shape in shapes.values())
    bits = 8 * (base + float(share) * in_halves) / sum(p.numel() for p in teacher.module.parameters())
    target = TargetConfig(None, bits, arguments.engine)
    students = {
        "uniform": quantised(
            arguments, work / f"{name}-{rank}", preset=name, start_rank=int(rank), joint_rank=int(rank)
        )
    }
    only = mock.patch.dict(FORMATS, {arguments.engine: (name,)})
    with only, mock.patch.object(allocation, "linear_layers", lambda *_, **__: ()):
        students["allocated"] = quantised(arguments, work / case.replace(":", "-"), target=target)
    chosen = json.loads((students["allocated"] / "result.json").read_text(encoding="utf-8"))
    found = {"adapter_bytes": in_halves, "allocated_adapter_bytes": chosen["bytes"] - base}
    found["share"] = round(found["allocated_adapter_bytes"] / in_halves, 4)
    found["adapter_ranks"] = chosen["adapter_ranks"]
    return found | scored(arguments, teacher, held_out, students, int(rank))


def scored(
    arguments: argparse.Namespace, teacher: CausalLM, held_out: list[Batch], students: dict[str, Path], rank: int
) -> dict[str, Any]:
    """Return the KL of two students as they are, and after recovery where that is asked for."""
    work, found, untrained = students["uniform"].parent, dict[str, Any](), {}
    for kind, folder in students.items():
        student = load_model(str(folder))
        add_lora_if_any(student, folder, rank)
        untrained[kind] = kl(teacher, student, held_out)
    found["untrained"] = with_gain(untrained)
    if arguments.max_steps:
        recovered = {}
        for kind, folder in students.items():
            asked = LoraConfig(recovery_r=rank) if kind == "uniform" else LoraConfig()
            student = open_student(str(trained(arguments, work, folder, asked)), HubConfig()).model
            if kind == "allocated" and arguments.engine == "llama.cpp":
                in_blocks(student)
            recovered[kind] = kl(teacher, student, held_out)
        found["recovered"] = with_gain(recovered)
    return found


def in_blocks(student: CausalLM) -> None:
    """Round an adapter's factors to the Q8_0 that llama.cpp's file has of those whose rows blocks divide."""
    for layer in lora_layers(student.module).values():
        for factor in (layer.lora_A, layer.lora_B):
            if factor.shape[1] % 32 == 0:
                rounded = gguf.quantize(factor.detach().numpy(), gguf.GGMLQuantizationType.Q8_0)
                factor.data = torch.from_numpy(gguf.dequantize(rounded, gguf.GGMLQuantizationType.Q8_0))


def add_lora_if_any(student: CausalLM, folder: Path, rank: int) -> None:
    """Put the adapter start of a student onto it, of its own ranks or of one for all."""
    ranks, starts = allocated_ranks(folder), load_starts(folder)
    if starts:
        add_lora(student.module, LoraConfig(recovery_r=rank), starts, ranks)


def with_gain(kls: dict[str, float]) -> dict[str, float]:
    """Return two KLs, and how much less that of the allocation is."""
    return {**kls, "less": round(1 - kls["allocated"] / kls["uniform"], 4)}


def folder_of(arguments: argparse.Namespace) -> Path:
    """Return where the students of a teacher and a seed lie."""
    seed = f"seed-{arguments.seed}" if arguments.seed else ""
    return Path(arguments.work) / seed / Path(arguments.teacher).name / arguments.engine


def uniform_bytes(engine: Any, teacher: CausalLM, name: str, rank: int, head: str) -> int:
    """Return the bytes of a uniform student with an adapter on all layers in an engine's files."""
    targets = check_reach(teacher.module, preset(name, lm_head=head))
    total = other_bytes(engine, teacher.module, targets, teacher.module.dtype.itemsize)
    for layer, spec in targets.items():
        shape = teacher.module.get_submodule(layer).weight.shape
        total += layer_bytes(engine, spec, *shape)
        total += 0 if LM_HEAD.search(layer) else adapter_bytes(engine, *shape, rank)
    return total


def settings(arguments: argparse.Namespace, out: Path) -> RunConfig:
    """Return where a command writes."""
    return RunConfig(out=str(out), device="cpu", dtype="float32", quiet=True, seed=arguments.seed)


def seen(arguments: argparse.Namespace) -> TextConfig:
    """Return the text that students are calibrated and trained on."""
    return TextConfig(dataset=arguments.library, files_from=arguments.trained_on, format="text")


def quantised(arguments: argparse.Namespace, out: Path, **changed: Any) -> Path:
    """Return a student; one that is there already is taken."""
    rows = {"calibration_rows": arguments.calibration_rows, "calibration_length": arguments.length}
    folder = RunConfig(out=str(out), device="cpu", quiet=True, seed=arguments.seed)
    options = QuantizeOptions(model=arguments.teacher, text=seen(arguments), run=folder, **rows, **changed)
    run(COMMANDS["quantize"], options)
    return out


def trained(arguments: argparse.Namespace, work: Path, student: Path, lora: LoraConfig) -> Path:
    """Return the folder of a student after a recovery of its adapter and scales."""
    cache = work.parent / "cache"
    steps, batch = arguments.max_steps, arguments.batch_size
    rows = {"length": arguments.length, "num_rows": steps * batch, "top_k": 64}
    run(
        COMMANDS["cache build"],
        CacheBuildOptions(arguments.teacher, text=seen(arguments), **rows, run=settings(arguments, cache)),
    )
    out = work / f"{student.name}-recovered"
    loop = LoopConfig(batch_size=batch, max_steps=steps)
    given: dict[str, Any] = {
        "checkpoint": str(student),
        "kd_cache_dir": str(cache),
        "loop": loop,
        "run": settings(arguments, out),
    }
    if allocated_ranks(student) == {}:  # all bytes went to codes: scales are what is left to train
        run(COMMANDS["qat"], QatOptions(**given, train_parts=("scales",)))
    else:
        run(COMMANDS["recover"], RecoverOptions(**given, train_scales=True, lora=lora))
    return out / "best"


def kl(teacher: CausalLM, student: CausalLM, held_out: list[Batch]) -> float:
    """Return the mean KL to the teacher over held-out tokens, in nats."""
    return round(measure(teacher, {"student": student}, held_out, quiet=True)["student"].figures["kl"], 5)


def begun(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return a result without teachers."""
    import transformers

    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": arguments.machine,
        "versions": f"torch {torch.__version__}, transformers {transformers.__version__}",
        "settings": {key: value for key, value in vars(arguments).items() if key not in UNREAD},
        "teachers": {},
    }


def parse() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", required=True, help="Hugging Face folder")
    parser.add_argument("--library", required=True, help="folder of the texts")
    parser.add_argument("--trained-on", required=True, help="files to calibrate on, relative to the folder")
    parser.add_argument("--held-out", required=True, help="list of held-out files")
    parser.add_argument("--out", required=True, help="JSON file for the result, written anew after every case")
    parser.add_argument("--work", required=True, help="folder of the students, kept between runs")
    parser.add_argument("--machine", default=platform.machine(), help="named in the result")
    parser.add_argument("--for", dest="engine", default="llama.cpp", help="engine whose files count")
    parser.add_argument("--cases", nargs="+", default=list(CASES), help="PRESET:RANK:HEAD")
    parser.add_argument("--length", type=int, default=256, help="tokens of a row")
    parser.add_argument("--calibration-rows", type=int, default=128)
    parser.add_argument("--eval-rows", type=int, default=96)
    parser.add_argument("--max-steps", type=int, default=0, help="of recovery; 0: none")
    parser.add_argument("--batch-size", type=int, default=16, help="rows of a step")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0, help="of draws; another one is another row of the result")
    return parser.parse_args()


if __name__ == "__main__":
    main()
