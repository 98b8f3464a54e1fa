"""Students of other quantisation tools for `peers.py`, each made under that tool's own Python.

A folder of environments that agree on one version of torch does not exist, so this file imports nothing of qat_lora
and nothing of a tool before it runs that tool. It reads what `peers.py prepare` wrote (the same calibration rows for
everybody) and leaves one folder a setting: the file as the tool packs it where our reader knows the format, else the
weights that the tool itself computes with, and `made.json` with version, bytes and seconds.

Bytes are those of tensors in the file: codes, scales, zero points, norms. What a tool leaves dense counts 16 bits a
weight whatever type the toy teacher has, and so do scales in float32; index lists that follow from the position count
nothing. `computed` says that there is no such file and the bytes are the sum of what it would hold.

    /env/of/hqq/bin/python benchmarks/peer_tools.py hqq --work DIR

llama.cpp needs llama-quantize and llama-imatrix (Debian: llama.cpp-tools and llama.cpp-tools-extra); mlx-lm wants torch
beside it, to read files; GPTQModel is built with a new setuptools and without build isolation.

A setting that stands is not made again; one that fails leaves its reason, which becomes its row.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

STEP_ROWS, RANK, LOFTQ_TURNS = 8, 16, 5
TRIVIAL = (".g_idx", ".weight_shape", ".weight_g_idx")
LINEAR = re.compile(r"\.layers\.\d+\..*_proj\.weight$")
GGUF_TYPES = (
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ2_M", "Q2_0", "Q2_K_S", "Q2_K"),
    *("IQ3_XXS", "IQ3_XS", "IQ3_S", "IQ3_M", "Q3_K_S", "Q3_K_M", "Q3_K_L"),
    *("IQ4_XS", "IQ4_NL", "Q4_0", "Q4_1", "Q4_K_S", "Q4_K_M", "Q5_0", "Q5_1", "Q5_K_S", "Q5_K_M", "Q6_K", "Q8_0"),
)
NEED_IMPORTANCE = ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "Q2_K_S")
"""Types that llama-quantize refuses without an importance matrix."""


class Job(NamedTuple):
    """What every tool gets: the teacher's folder, rows [N, L] of token ids, a place for files, the command line."""

    teacher: Path
    calibration: np.ndarray
    train: np.ndarray
    valid: np.ndarray
    work: Path
    arguments: argparse.Namespace


Maker = Callable[[Path], dict[str, Any]]  # writes one student into a folder; returns `bytes` and what else is shown


def stored_bytes(folder: Path) -> int:
    """Return the bytes of the tensors in a folder's safetensors files, counted as the module says."""
    from safetensors import safe_open

    total = 0
    for file in folder.glob("*.safetensors"):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 (no iterator)
                tensor = tensors.get_tensor(name)
                if not name.endswith(TRIVIAL):
                    most = 2 if tensor.dtype.is_floating_point else 8
                    total += tensor.numel() * min(most, tensor.element_size())
    return total


def teacher_state(job: Job) -> dict[str, Any]:
    """Return the teacher's tensors by name."""
    from safetensors.torch import load_file

    state: dict[str, Any] = {}
    for file in sorted(job.teacher.glob("*.safetensors")):
        state |= load_file(file)
    return state


def save_dense(job: Job, out: Path, changed: dict[str, Any]) -> None:
    """Write the teacher with some tensors changed as a plain folder."""
    from safetensors.torch import save_file

    state = {name: tensor.float().contiguous() for name, tensor in (teacher_state(job) | changed).items()}
    save_file(state, out / "model.safetensors", {"format": "pt"})
    copy_texts(job, out)
    shutil.copyfile(job.teacher / "config.json", out / "config.json")


def copy_texts(job: Job, out: Path) -> None:
    """Copy the tokenizer, which some tools leave out of what they write."""
    for file in job.teacher.glob("*token*"):
        shutil.copyfile(file, out / file.name)


def layer_by_layer(job: Job, quantise: Callable[[Any], tuple[Any, float]]) -> Maker:
    """Return a maker that replaces linear weights by `quantise`'s, which also says their bytes; all else is dense."""

    def make(out: Path) -> dict[str, Any]:
        changed, total = {}, 0.0
        for name, weight in teacher_state(job).items():
            if LINEAR.search(name):
                changed[name], size = quantise(weight.float())
                total += size
            else:
                total += 2 * weight.numel()
        save_dense(job, out, changed)
        return {"bytes": round(total)}

    return make


def dataset(rows: np.ndarray) -> list[dict[str, list[int]]]:
    """Return rows as the list of token lists that GPTQModel takes."""
    return [{"input_ids": row.tolist(), "attention_mask": [1] * len(row)} for row in rows]


def autoround(job: Job) -> Iterator[tuple[str, Maker]]:
    """AutoRound: its default 200 iterations, and its `best` 1,000 with the extended algorithm."""
    import torch
    from auto_round import AutoRound
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def maker(bits: int, group: int, sym: bool, **settings: Any) -> Maker:
        def make(out: Path) -> dict[str, Any]:
            rows = [{k: torch.tensor([v]) for k, v in row.items()} for row in dataset(job.calibration)]
            read = {"dataset": torch.utils.data.DataLoader(rows, batch_size=None), "nsamples": len(rows)}
            read |= {"seqlen": job.calibration.shape[1], "device_map": "cpu", "enable_torch_compile": False}
            tokenizer = AutoTokenizer.from_pretrained(job.teacher)
            model = AutoModelForCausalLM.from_pretrained(job.teacher, dtype=torch.float32)
            tool = AutoRound(model, tokenizer, bits=bits, group_size=group, sym=sym, **read, **settings)
            quantised, _ = tool.quantize()
            save_dense(job, out, {k: v for k, v in quantised.state_dict().items() if LINEAR.search(k)})
            packed = Path(f"{out}.packed")
            tool.save_quantized(str(packed), format="auto_round")
            size = stored_bytes(next(packed.rglob("*.safetensors")).parent)
            shutil.rmtree(packed)
            return {"bytes": size}

        return make

    for bits, group, sym in ((2, 64, False), (2, 64, True), (3, 128, True), (4, 128, True)):
        shape = f"W{bits} g{group} {'symmetric' if sym else 'zero points'}"
        yield f"{shape}, 200 iterations", maker(bits, group, sym, iters=200)
        yield f"{shape}, best (1,000, alg_ext)", maker(bits, group, sym, iters=1000, enable_alg_ext=True)


def hqq(job: Job) -> Iterator[tuple[str, Maker]]:
    """HQQ: no calibration; both axes, 16-bit scales and zero points as it saves them."""
    import torch
    from hqq.core.quantize import Quantizer

    def quantise(bits: int, group: int, axis: int) -> Callable[[Any], tuple[Any, float]]:
        def one(weight: Any) -> tuple[Any, float]:
            about = {"axis": axis, "round_zero": bits == 4, "device": "cpu", "compute_dtype": torch.float32}
            made = Quantizer.quantize(weight, bits, group_size=group, **about)
            size = made[0].nbytes + 2 * (made[1]["scale"].numel() + made[1]["zero"].numel())
            return Quantizer.dequantize(*made).reshape(weight.shape), size

        return one

    for bits, group in ((2, 16), (2, 32), (2, 64), (3, 32), (3, 64), (4, 64), (8, 64)):
        for axis in (0, 1):
            yield f"{bits} bits, g{group}, axis {axis}", layer_by_layer(job, quantise(bits, group, axis))


def llamacpp(job: Job) -> Iterator[tuple[str, Maker]]:
    """llama.cpp: every type of llama-quantize from Q8_0 down, without and with the rows' importance matrix.

    It runs under our Python: the `gguf` package does not know every type that the programs write.
    """
    from qat_lora.files.gguf_header import read_header

    def program(name: str, *words: object) -> str:
        run = subprocess.run([*job.arguments.llama.split(), name, *map(str, words)], capture_output=True, text=True)
        if run.returncode:
            raise RuntimeError((run.stderr or run.stdout).strip().splitlines()[-1])
        return run.stdout + run.stderr

    importance, length = job.work / "importance.gguf", job.calibration.shape[1]
    whole, text = job.work / "teacher.gguf", job.work / "calibration.txt"
    if not importance.is_file():
        program("llama-imatrix", "-m", whole, "-f", text, "-o", importance, "-c", length, "-t", 1, "--no-ppl")

    def maker(kind: str, *words: object) -> Maker:
        def make(out: Path) -> dict[str, Any]:
            said = program("llama-quantize", *words, whole, out / "model.gguf", kind, 1)
            copy_texts(job, out)
            fell = re.search(r"(\d+) of \d+ tensor\(s\) required fallback", said)
            tensors = read_header(out / "model.gguf").tensors.values()
            note = f"{fell[1]} tensors of another type: rows too short" if fell and int(fell[1]) > 1 else ""
            return {"bytes": sum(tensor.size for tensor in tensors), "note": note}

        return make

    for kind in GGUF_TYPES:
        if kind not in NEED_IMPORTANCE:
            yield kind, maker(kind)
        if kind not in ("Q2_0", "Q8_0"):  # whose rounding does not read one
            yield f"{kind}, importance matrix", maker(kind, "--imatrix", importance)


def mlx(job: Job) -> Iterator[tuple[str, Maker]]:
    """mlx-lm: plain, its mixed recipes, GPTQ, dynamic quantisation, and DWQ (distilled scales and biases)."""
    import mlx.core as mx
    import mlx.optimizers as optimizers
    from mlx_lm.convert import mixed_quant_predicate_builder
    from mlx_lm.quant.dwq import dwq_quantize
    from mlx_lm.quant.dynamic_quant import estimate_sensitivities, estimate_threshold
    from mlx_lm.quant.gptq import gptq_quantize
    from mlx_lm.tuner.losses import kl_div_loss
    from mlx_lm.utils import load, quantize_model, save

    calibration = mx.array(job.calibration)

    def opened() -> tuple[Any, Any, Any]:
        return load(str(job.teacher), return_config=True)

    def finished(out: Path, tokenizer: Any, model: Any, config: Any) -> dict[str, Any]:
        model.set_dtype(mx.float16)
        save(str(out), str(job.teacher), model, tokenizer, config)
        copy_texts(job, out)
        return {"bytes": stored_bytes(out)}

    def changed(change: Callable[[Any, Any], tuple[Any, Any]]) -> Maker:
        def make(out: Path) -> dict[str, Any]:
            model, tokenizer, config = opened()
            return finished(out, tokenizer, *change(model, config))

        return make

    def plain(bits: int, group: int, recipe: str = "") -> Maker:
        def change(model: Any, config: Any) -> tuple[Any, Any]:
            rule = mixed_quant_predicate_builder(recipe, model, group) if recipe else None
            return quantize_model(model, config, group, bits, quant_predicate=rule)

        return changed(change)

    def gptq(bits: int, group: int) -> Maker:
        def change(model: Any, config: Any) -> tuple[Any, Any]:
            model, quantization = gptq_quantize(model, calibration, bits, group, 6, 64)
            return model, config | {"quantization": quantization}

        return changed(change)

    def dynamic(low: int, high: int, target: float) -> Maker:
        def change(model: Any, config: Any) -> tuple[Any, Any]:
            found = dict(estimate_sensitivities(model, calibration, low, 64, high, 64))
            least = estimate_threshold(model, found, target, low, 64, high, 64)

            def rule(path: str, module: Any) -> Any:
                raised = hasattr(module, "to_quantized") and found[path] > least
                return {"bits": high, "group_size": 64} if raised else hasattr(module, "to_quantized")

            return quantize_model(model, config, 64, low, quant_predicate=rule)

        return changed(change)

    def distilled(bits: int, group: int) -> Maker:
        def make(out: Path) -> dict[str, Any]:
            teacher, tokenizer, config = opened()
            train, valid = ([(row.tolist(), 0) for row in rows] for rows in (job.train, job.valid))
            tried = {}
            for rate in job.arguments.rates:
                model, quantised = quantize_model(opened()[0], dict(config), group, bits)
                optimizer = optimizers.Adam(learning_rate=rate, bias_correction=True)
                most = job.train.shape[1] + 1
                dwq_quantize(model, lambda b, *_, **__: teacher(b), optimizer, train, valid, 4, most, 123, mx.float32)
                tried[rate] = (distance(teacher, model), model, quantised)
            rate = min(tried, key=lambda rate: tried[rate][0])
            return finished(out, tokenizer, *tried[rate][1:]) | {"tokens": job.train.size, "rate": rate}

        return make

    def distance(teacher: Any, student: Any) -> float:
        rows = [mx.array(job.valid[i : i + 8]) for i in range(0, len(job.valid), 8)]
        return sum(kl_div_loss(student(batch), teacher(batch)).mean().item() for batch in rows) / len(rows)

    for bits, group in ((2, 32), (2, 64), (2, 128), (3, 64), (3, 128), (4, 32), (4, 64), (5, 64), (6, 64), (8, 64)):
        yield f"{bits} bits, g{group}", plain(bits, group)
    for recipe in ("mixed_2_6", "mixed_3_4", "mixed_3_6", "mixed_4_6"):
        yield recipe, plain(4, 64, recipe)
    for bits, group in ((2, 64), (4, 64)):
        yield f"GPTQ, {bits} bits, g{group}", gptq(bits, group)
    for low, high, target in ((2, 4, 3.3), (3, 5, 4.3), (4, 5, 5.0)):
        yield f"dynamic, {low} and {high} bits", dynamic(low, high, target)
    for bits, group in ((2, 32), (2, 64), (3, 64), (4, 64)):
        yield f"DWQ, {bits} bits, g{group}", distilled(bits, group)


def loftq(job: Job) -> Iterator[tuple[str, Maker]]:
    """PEFT's LoftQ loop on bitsandbytes' nf4, the only bits that PEFT still has (its own code insists on CUDA)."""
    import torch
    from bitsandbytes.functional import dequantize_4bit, quantize_4bit
    from peft.utils.loftq_utils import _low_rank_decomposition

    def quantise(rank: int) -> Callable[[Any], tuple[Any, float]]:
        def one(weight: Any) -> tuple[Any, float]:
            correction, size = torch.zeros_like(weight), 0.0
            for _ in range(LOFTQ_TURNS):
                codes, state = quantize_4bit((weight - correction).contiguous(), quant_type="nf4")
                base = dequantize_4bit(codes, state).reshape(weight.shape)
                parts = _low_rank_decomposition(weight - base, reduced_rank=rank)
                correction = parts["L"] @ parts["R"]
                size = codes.nbytes + 2 * state.absmax.numel() + 2 * (parts["L"].numel() + parts["R"].numel())
            return base + correction, size

        return one

    for rank in (4, RANK):
        yield f"nf4 g64, rank {rank}, {LOFTQ_TURNS} turns", layer_by_layer(job, quantise(rank))


def torchao(job: Job) -> Iterator[tuple[str, Maker]]:
    """torchao: weight-only rounding; QAT of the weights on KL to the live teacher, which has symmetric codes alone."""
    import torch
    from torchao.quantization import IntxWeightOnlyConfig, MappingType, quantize_
    from torchao.quantization.granularity import PerGroup
    from torchao.quantization.qat import QATConfig
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(1)

    def opened() -> Any:
        return AutoModelForCausalLM.from_pretrained(job.teacher, dtype=torch.float32)

    def config(bits: int, group: int, symmetric: bool) -> Any:
        mapping = MappingType.SYMMETRIC if symmetric else MappingType.ASYMMETRIC
        return IntxWeightOnlyConfig(getattr(torch, f"int{bits}"), PerGroup(group), mapping)

    def layers(module: Any, name: str) -> bool:
        return isinstance(module, torch.nn.Linear) and bool(LINEAR.search(f".{name}.weight"))

    def finished(out: Path, model: Any, bits: int, group: int, symmetric: bool) -> dict[str, Any]:
        quantize_(model, config(bits, group, symmetric), filter_fn=layers)
        coded = {n: t.dequantize().detach() for n, t in model.state_dict().items() if LINEAR.search(n)}
        save_dense(job, out, coded)
        dense = sum(t.numel() for n, t in teacher_state(job).items() if n not in coded)
        # codes in their bits, for each group a float16 scale and an int8 zero point where there is one
        spent = bits + (16 if symmetric else 24) / group
        return {"bytes": round(sum(t.numel() for t in coded.values()) * spent / 8 + 2 * dense), "computed": True}

    def distance(teacher: Any, student: Any, rows: np.ndarray) -> Any:
        ids = torch.from_numpy(rows).long()
        with torch.no_grad():
            wanted = teacher(ids).logits[:, :-1].log_softmax(-1)
        found = student(ids).logits[:, :-1].log_softmax(-1)
        return (wanted.exp() * (wanted - found)).sum(-1).mean()

    def trained(bits: int, group: int) -> Maker:
        def make(out: Path) -> dict[str, Any]:
            teacher, tried = opened().eval(), {}
            for rate in job.arguments.rates:
                student = opened()
                quantize_(student, QATConfig(config(bits, group, True), step="prepare"), filter_fn=layers)
                weights = [p for n, p in student.named_parameters() if LINEAR.search(n)]
                optimizer = torch.optim.AdamW(weights, rate, (0.9, 0.99), weight_decay=0.0)
                steps = len(job.train) // STEP_ROWS
                schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps, pct_start=0.1)
                for step in range(steps):
                    distance(teacher, student, job.train[step * STEP_ROWS :][:STEP_ROWS]).backward()
                    torch.nn.utils.clip_grad_norm_(weights, 1.0)
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                tried[rate] = (float(distance(teacher, student, job.valid).detach()), student)
            rate = min(tried, key=lambda r: tried[r][0])
            quantize_(student := tried[rate][1], QATConfig(step="convert"))
            return finished(out, student, bits, group, True) | {"tokens": job.train.size, "rate": rate}

        return make

    for bits in (2, 3, 4):
        yield f"intx, {bits} bits, g64", lambda out, bits=bits: finished(out, opened(), bits, 64, False)
    for bits in (2, 3, 4):
        yield f"QAT, {bits} bits, g64", trained(bits, 64)


def gptqmodel(job: Job) -> Iterator[tuple[str, Maker]]:
    """GPTQModel: its GPTQ in act-group-aware order (two workers: on two cores it asks its pool of one for two)."""
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    from gptqmodel import GPTQModel, QuantizeConfig

    def maker(bits: int, group: int) -> Maker:
        def make(out: Path) -> dict[str, Any]:
            config = QuantizeConfig(bits=bits, group_size=group)
            model = GPTQModel.load(str(job.teacher), config, device="cpu")
            model.quantize(dataset(job.calibration), batch_size=1)
            model.save(str(out))
            copy_texts(job, out)
            return {"bytes": stored_bytes(out)}

        return make

    for bits, group in ((2, 64), (3, 128), (4, 128)):
        yield f"GPTQ, W{bits} g{group}", maker(bits, group)


def llmcompressor(job: Job) -> Iterator[tuple[str, Maker]]:
    """llm-compressor: GPTQ and AWQ through `oneshot`, packed as compressed-tensors."""
    import torch
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier
    from transformers import AutoModelForCausalLM

    def maker(bits: int, group: int, symmetric: bool) -> Maker:
        def make(out: Path) -> dict[str, Any]:
            model = AutoModelForCausalLM.from_pretrained(job.teacher, dtype=torch.float32)
            weights = QuantizationArgs(num_bits=bits, strategy="group", group_size=group, symmetric=symmetric)
            scheme = QuantizationScheme(targets=["Linear"], weights=weights)
            recipe = GPTQModifier(config_groups={"group_0": scheme}, ignore=["lm_head"])
            rows, length = Dataset.from_list(dataset(job.calibration)), job.calibration.shape[1]
            oneshot(model=model, dataset=rows, recipe=recipe, max_seq_length=length, num_calibration_samples=len(rows))
            save_dense(job, out, {n: t.detach() for n, t in model.state_dict().items() if LINEAR.search(n)})
            packed = Path(f"{out}.packed")
            model.save_pretrained(packed, save_compressed=True)
            size = stored_bytes(packed)
            shutil.rmtree(packed)
            return {"bytes": size}

        return make

    for bits, group in ((2, 64), (3, 128), (4, 128)):
        for symmetric in (True, False):
            kind = "symmetric" if symmetric else "zero points"
            yield f"GPTQ, W{bits} g{group} {kind}", maker(bits, group, symmetric)


PEERS: dict[str, tuple[str, str, Callable[[Job], Iterator[tuple[str, Maker]]]]] = {
    "autoround": ("AutoRound", "auto-round", autoround),
    "hqq": ("HQQ", "hqq", hqq),
    "llamacpp": ("llama.cpp", "", llamacpp),
    "mlx": ("mlx-lm", "mlx-lm", mlx),
    "loftq": ("PEFT LoftQ", "peft", loftq),
    "torchao": ("torchao", "torchao", torchao),
    "gptqmodel": ("GPTQModel", "gptqmodel", gptqmodel),
    "llmcompressor": ("llm-compressor", "llmcompressor", llmcompressor),
}
"""By name on the command line: the table's name, the distribution, the function."""


def parse() -> argparse.Namespace:
    """Return the arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tool", choices=PEERS)
    parser.add_argument("--work", type=Path, required=True, help="folder of `peers.py prepare`")
    parser.add_argument("--only", default="", help="settings whose name has this regular expression")
    parser.add_argument(
        "--llama", default="", help="command before the name of a program of llama.cpp, for example env"
    )
    parser.add_argument("--version", help="of a tool that is no Python package")
    parser.add_argument("--rows", type=int, help="of training, for DWQ: mlx's CPU kernels are slow; default: all")
    parser.add_argument("--rates", type=float, nargs="+", default=[1e-5, 1e-4, 1e-3], help="of DWQ and QAT")
    return parser.parse_args()


def main() -> None:
    """Make the students of one tool that are missing."""
    arguments = parse()
    work = arguments.work
    prepared = json.loads((work / "prepared.json").read_text(encoding="utf-8"))
    rows = [np.load(work / f"{name}.npy") for name in ("calibration", "train", "valid")]
    rows[1] = rows[1][: arguments.rows]
    job = Job(Path(prepared["teacher"]), *rows, work, arguments)
    title, distribution, settings = PEERS[arguments.tool]
    version = arguments.version or importlib.metadata.version(distribution)
    students = work / "students"
    students.mkdir(exist_ok=True)

    def leave(folder: Path, setting: str, made: dict[str, Any]) -> None:
        line = {"tool": title, "version": version, "setting": setting, **made}
        (folder / "made.json").write_text(json.dumps(line, indent=1) + "\n", encoding="utf-8")
        print(json.dumps(line), flush=True)

    try:
        for setting, make in settings(job):
            out = students / re.sub(r"[^A-Za-z0-9_.-]+", "_", f"{arguments.tool}_{setting}").strip("_")
            if not re.search(arguments.only, setting) or (out / "made.json").is_file():
                continue
            shutil.rmtree(out, ignore_errors=True)
            out.mkdir()
            started = time.perf_counter()
            try:
                made = make(out)
            except Exception as error:  # a peer that fails is a row with the reason
                made = {"failed": f"{type(error).__name__}: {error}".splitlines()[0].replace(f"{work}/", "")[:200]}
            leave(out, setting, {**made, "seconds": round(time.perf_counter() - started, 1)})
    except ImportError as error:
        (out := students / arguments.tool).mkdir(exist_ok=True)
        leave(out, "", {"failed": f"does not import: {error}".splitlines()[0][:200]})


if __name__ == "__main__":
    main()
