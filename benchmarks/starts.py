"""2-bit students by how they start and what training makes of it: ours, PEFT's LoftQ, torchao's QAT linear.

Claim: on the same layers, at the same bits and rank, our calibrated starts are nearer to the teacher than LoftQ's and
than the rounding that torchao's QAT linear begins with, and after equal training so are the results. LoftQ quantises
to its own normal-float table in blocks of 64, torchao to symmetric integers in groups of 64; ours is `w2g64`: 2.25 bits
each. The score is KL to the teacher on held-out text.

Training is one plain loop for all, not ours: AdamW on the KL over the whole vocabulary to a live teacher, the same rows
in the same order. Every student tries every rate of `--rates` for its adapter or weights and keeps the best by KL on
rows of its own; scales and ranges have `--scale-rate`. torchao is optional; without it the result says so. Interrupt
it at will: training whose result stands, with the same settings, is not done again.

    python benchmarks/starts.py --teacher DIR --library DIR --trained-on LIST --held-out LIST --work DIR --out FILE
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import platform
import random
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qat_lora.data.sources import TextConfig
from qat_lora.evaluate.score import measure
from qat_lora.layers.convert import add_lora, linear_layers, lora_layers, prepare_base, quant_layers, quantize_targets
from qat_lora.layers.lora import Factors, LoraConfig
from qat_lora.models.adapter import load_starts
from qat_lora.models.load import CausalLM, load_model, load_tokenizer
from qat_lora.options import CacheBuildOptions, QuantizeOptions, RunConfig
from qat_lora.quant.codes import decode, encode, normal_table
from qat_lora.quant.presets import preset
from qat_lora.registry import COMMANDS
from qat_lora.runtime.launch.start import run
from qat_lora.setup.common import text_batches
from qat_lora.types import Batch

BITS, PRESET, GROUP = 2, "w2g64", 64
LOFTQ_TURNS = 5
OURS: dict[str, dict[str, object]] = {
    "mse, qera": {"init": "mse"},
    "gptq, qera": {"init": "gptq"},
    "descent with adapter": {"init": "descent"},
    "descent": {"init": "descent", "joint_rank": 0, "start_rank": 0},
}
Rates = dict[str, list[nn.Parameter]]
"""What trains: `rate` (adapter or weights, tried at several rates) and `scale_rate`."""


class Student(NamedTuple):
    """A student at its start, and what of a copy of it trains."""

    model: CausalLM
    trained: Callable[[CausalLM], Rates]


def adapter_and_scales(model: CausalLM) -> Rates:
    """Train the adapter and our scales."""
    return {**adapter(model), "scale_rate": list(prepare_base(model.module, True).values())}


def adapter(model: CausalLM) -> Rates:
    """Train the adapter on a frozen base."""
    prepare_base(model.module, False)
    return {"rate": [p for layer in lora_layers(model.module).values() for p in (layer.lora_A, layer.lora_B)]}


def weights_and_scales(teacher: CausalLM) -> Callable[[CausalLM], Rates]:
    """Train our weights through their rounding, as `qat-lora qat --train-parts scales,weights` does."""

    def trained(model: CausalLM) -> Rates:
        dense = dict(linear_layers(teacher.module))
        rates: list[nn.Parameter] = []
        for name, layer in quant_layers(model.module).items():
            rates += layer.train_weight(dense[name].weight.detach()).trained().values()
        return {"rate": rates, "scale_rate": list(prepare_base(model.module, True).values())}

    return trained


def loftq(teacher: CausalLM, rank: int) -> CausalLM:
    """Return the model with every linear layer as LoftQ leaves it, adapter beside it.

    PEFT's own `loftq_init` runs on a GPU alone, and since 0.20 at 4 and 8 bits only. This is its loop with its own
    decomposition; the quantiser is what LoftQ used at 2 bits, a normal-float table scaled by the largest of a block.
    """
    from peft.utils.loftq_utils import _low_rank_decomposition

    table, starts, module = normal_table(BITS), {}, copy.deepcopy(teacher.module)
    for name in quantize_targets(module, preset(PRESET)):
        linear = module.get_submodule(name)
        weight = linear.weight.detach().clone()
        correction = torch.zeros_like(weight)
        for _ in range(LOFTQ_TURNS):
            blocks = (weight - correction).reshape(-1, GROUP)
            scale = blocks.abs().amax(1, keepdim=True).clamp_min(1e-12)
            base = (decode(encode(blocks / scale, table), table) * scale).reshape(weight.shape)
            parts = _low_rank_decomposition(weight - base, reduced_rank=rank)
            correction = parts["L"] @ parts["R"]
        linear.weight.data.copy_(base)
        starts[name] = Factors(parts["R"].contiguous(), parts["L"].contiguous())
    add_lora(module, LoraConfig(recovery_r=rank), starts)
    return replace(teacher, module=module)


def torchao(teacher: CausalLM, **settings: bool) -> CausalLM:
    """Return the model with torchao's fake-quantised linear layers, which train their weights.

    Raises:
        ImportError: torchao is not installed.
    """
    from torchao.quantization.qat import IntxFakeQuantizeConfig, initialize_fake_quantizers
    from torchao.quantization.qat.linear import FakeQuantizedLinear

    config = IntxFakeQuantizeConfig(getattr(torch, f"int{BITS}"), group_size=GROUP, is_symmetric=True, **settings)
    module = copy.deepcopy(teacher.module)
    for name in quantize_targets(module, preset(PRESET)):
        module.set_submodule(name, FakeQuantizedLinear.from_linear(module.get_submodule(name), weight_config=config))
    if settings:
        initialize_fake_quantizers(module, (torch.zeros(1, 2, dtype=torch.long),))
    return replace(teacher, module=module)


def torchao_weights(model: CausalLM) -> Rates:
    """Train the weights of torchao's layers, and their ranges where they are learned."""
    layers = [m for m in model.module.modules() if hasattr(m, "weight_fake_quantizer")]
    ranges = [p for layer in layers for p in layer.weight_fake_quantizer.parameters()]
    scales = [p for p in ranges if p.is_floating_point() and p.ndim == 2]
    return {"rate": [layer.weight for layer in layers], "scale_rate": scales}


def distance(student: CausalLM, teacher: CausalLM, batch: Batch, known_BLH: Tensor) -> Tensor:
    """Return the mean KL(teacher || student) of a batch over the whole vocabulary."""
    kept = batch["target_mask"].bool()
    hidden = student.hidden(batch["input_ids"], batch["document_ids"])[:, :-1][kept]
    ours_NV = student.logits(hidden).log_softmax(-1)
    theirs_NV = teacher.logits(known_BLH[:, :-1][kept]).log_softmax(-1)
    return (theirs_NV.exp() * (theirs_NV - ours_NV)).sum(-1).mean()


def train(
    student: CausalLM, rates: Rates, lr: dict[str, float], data: list[tuple[Batch, Tensor]], teacher: CausalLM
) -> None:
    """Take one step a batch, with 10 steps of warm-up and a cosine to 5 % of the peak."""
    student.module.requires_grad_(False).train()
    groups = [{"params": tensors, "lr": lr[name]} for name, tensors in rates.items() if tensors]
    for parameter in (p for group in groups for p in group["params"]):
        parameter.requires_grad_(True)
    optimizer = torch.optim.AdamW(groups, weight_decay=0.0, betas=(0.9, 0.99))

    def share(step: int) -> float:
        return min(1.0, (step + 1) / 10) * (0.05 + 0.95 * (1 + math.cos(math.pi * step / len(data))) / 2)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, share)
    for batch, known in data:
        distance(student, teacher, batch, known).backward()
        torch.nn.utils.clip_grad_norm_([p for tensors in rates.values() for p in tensors], 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    student.module.eval()


def parse() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--teacher", required=True, help="Hugging Face folder")
    parser.add_argument("--library", required=True, help="folder of the texts")
    parser.add_argument("--trained-on", required=True, help="files to calibrate and train on, relative to the folder")
    parser.add_argument("--held-out", required=True, help="list of held-out files")
    parser.add_argument("--work", required=True, help="folder of cache and students")
    parser.add_argument("--out", required=True, help="JSON file for the result, written anew after every student")
    parser.add_argument("--machine", default=platform.machine(), help="named in the result")
    parser.add_argument("--length", type=int, default=256, help="tokens of a row")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--calibration-rows", type=int, default=128)
    parser.add_argument("--eval-rows", type=int, default=96)
    parser.add_argument("--batch", type=int, default=8, help="rows of a step")
    parser.add_argument("--steps", type=int, default=100, help="of training; 0: starts alone")
    parser.add_argument("--rates", type=float, nargs="+", default=[5e-4, 1e-3, 2e-3])
    parser.add_argument("--scale-rate", type=float, default=1e-3)
    parser.add_argument("--choosing-rows", type=int, default=32, help="that choose between the rates")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    return parser.parse_args()


def ours(arguments: argparse.Namespace, seen: TextConfig) -> dict[str, CausalLM]:
    """Return our untrained students by name, each with its adapter if it has one."""
    work, students = Path(arguments.work), {}

    def part(name: str) -> RunConfig:
        return RunConfig(out=str(work / name), device="cpu", seed=arguments.seed, quiet=True)

    cache = run(
        COMMANDS["cache build"],
        CacheBuildOptions(
            teacher=arguments.teacher,
            text=seen,
            length=arguments.length,
            top_k=1,
            num_rows=8 * arguments.calibration_rows,
            run=part("cache"),
        ),
    )
    for name, settings in OURS.items():
        options = QuantizeOptions(
            model=arguments.teacher,
            preset=PRESET,
            kd_cache_dir=str(cache),
            calibration_rows=arguments.calibration_rows,
            run=part(name.replace(", ", "_").replace(" ", "_")),
            **settings,  # type: ignore[arg-type]
        )
        made = run(COMMANDS["quantize"], options)
        students[name] = load_model(str(made))
        if settings.get("start_rank") != 0:
            add_lora(students[name].module, LoraConfig(recovery_r=arguments.rank), load_starts(made))
    return students


def others(teacher: CausalLM, rank: int) -> tuple[dict[str, CausalLM], list[str]]:
    """Return the untrained students of the other libraries, and what is missing."""
    makers: dict[str, Callable[[], CausalLM]] = {
        "LoftQ (PEFT's loop, nf2)": lambda: loftq(teacher, rank),
        "torchao QAT linear": lambda: torchao(teacher),
        "torchao QAT linear, learned ranges": lambda: torchao(teacher, is_dynamic=False, range_learning=True),
    }
    students, missing = {}, []
    for name, make in makers.items():
        try:
            students[name] = make()
        except ImportError as error:
            missing.append(f"{name}: not installed ({error})")
    return students, missing


def main() -> None:
    """Make the students, score them, train them, score them again; the result is written as it grows."""
    arguments = parse()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    Path(arguments.work).mkdir(parents=True, exist_ok=True)
    files = Path(arguments.trained_on).read_text(encoding="utf-8").split()
    random.Random(arguments.seed).shuffle(files)
    mixed = Path(arguments.work) / "files.txt"
    mixed.write_text("\n".join(files) + "\n", encoding="utf-8")
    seen = TextConfig(dataset=arguments.library, files_from=str(mixed), format="text")
    unseen = TextConfig(dataset=arguments.library, files_from=arguments.held_out, format="text")
    teacher = load_model(arguments.teacher)
    teacher.module.requires_grad_(False).eval()
    tokenizer = load_tokenizer(teacher.folder)

    def rows(text: TextConfig, count: int) -> list[Batch]:
        found = text_batches(text, tokenizer, arguments.length, count, arguments.batch)
        return [{key: torch.from_numpy(array) for key, array in batch.items()} for batch in found]

    def kl(student: CausalLM, batches: list[Batch]) -> float:
        return measure(teacher, {"student": student}, batches, quiet=True)["student"].figures["kl"]

    held_out = rows(unseen, arguments.eval_rows)
    learned = rows(seen, arguments.steps * arguments.batch + arguments.choosing_rows)
    data = [(batch, teacher.hidden(batch["input_ids"], batch["document_ids"])) for batch in learned[: arguments.steps]]
    students, missing = others(teacher, arguments.rank)
    students |= ours(arguments, seen)
    paths = ("teacher", "library", "trained_on", "held_out", "work", "out", "machine")
    result: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": arguments.machine,
        "versions": versions(),
        "teacher_name": Path(arguments.teacher).name,
        "settings": {name: value for name, value in vars(arguments).items() if name not in paths},
        "training_tokens": arguments.steps * arguments.batch * arguments.length,
        "missing": missing,
        "starts_kl": {},
        "trained": {},
    }

    if Path(arguments.out).exists():
        earlier = json.loads(Path(arguments.out).read_text(encoding="utf-8"))
        if all(earlier.get(key) == result[key] for key in ("versions", "teacher_name", "settings", "missing")):
            result["trained"] = earlier["trained"]

    def write() -> None:
        Path(arguments.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    for name, student in students.items():
        result["starts_kl"][name] = round(kl(student, held_out), 4)
        print(f"{name:36} untrained KL {result['starts_kl'][name]:.4f}", flush=True)
        write()
    for title, (name, trained) in plans(teacher).items():
        if name not in students or not data or title in result["trained"]:
            continue
        tried = {}
        for rate in arguments.rates:
            student = copy.deepcopy(students[name])
            rates = {"rate": rate, "scale_rate": arguments.scale_rate}
            train(student, trained(student), rates, data, teacher)
            tried[rate] = {"choosing_kl": round(kl(student, learned[arguments.steps :]), 4)}
            tried[rate]["kl"] = round(kl(student, held_out), 4)
        best = min(tried, key=lambda rate: tried[rate]["choosing_kl"])
        result["trained"][title] = {"start": name, "kl": tried[best]["kl"], "rate": best, "tried": tried}
        print(f"{title:36} trained   KL {tried[best]['kl']:.4f} at {best:g}", flush=True)
        write()
    print("\n".join(table(result)))


def plans(teacher: CausalLM) -> dict[str, tuple[str, Callable[[CausalLM], Rates]]]:
    """Return what is trained: the start's name and the tensors, by title; first with an adapter, then without."""
    return {
        "ours: adapter": ("descent with adapter", adapter),
        "ours: adapter and scales": ("descent with adapter", adapter_and_scales),
        "LoftQ: adapter": ("LoftQ (PEFT's loop, nf2)", adapter),
        "ours: weights and scales": ("descent", weights_and_scales(teacher)),
        "torchao: weights": ("torchao QAT linear", torchao_weights),
        "torchao: weights and ranges": ("torchao QAT linear, learned ranges", torchao_weights),
    }


def versions() -> str:
    """Return the versions that the result depends on."""
    import importlib.metadata

    names = ("torch", "transformers", "peft", "torchao")
    found = []
    for name in names:
        try:
            found.append(f"{name} {importlib.metadata.version(name)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join((f"Python {platform.python_version()}", *found))


def table(result: dict[str, Any]) -> list[str]:
    """Return the result as a Markdown table."""
    lines = ["| student | KL at the start | trained | rate |", "|---|---:|---:|---:|"]
    begun = {trained["start"] for trained in result["trained"].values()}
    lines += [f"| {name} | {kl:.3f} | | |" for name, kl in result["starts_kl"].items() if name not in begun]
    for title, trained in result["trained"].items():
        start = result["starts_kl"][trained["start"]]
        lines.append(f"| {title} | {start:.3f} | {trained['kl']:.3f} | {trained['rate']:g} |")
    return lines


if __name__ == "__main__":
    main()
