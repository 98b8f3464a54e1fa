"""What a recovery adapter gives a GGUF file that llama.cpp quantised, measured in llama.cpp.

Claim: a rank-16 adapter, trained on 1 M tokens against the cached logits of the original, closes half of the KL that
llama.cpp's Q2_K and IQ2 lost (asked: 50 %) and 40 % at Q3_K, as llama.cpp computes base and adapter. Q4_0 stands beside
the floor that llama.cpp's own arithmetic sets: on a CPU it rounds activations to 8 bits, which no adapter mends.

A Qwen3 of width 256 (four layers, MLP of 768, so that every row divides by a K-quant's 256 weights) is trained on the
standard library's source, written as GGUF by us and quantised by `llama_model_quantize`, with an importance matrix. KL
is the mean over all positions of held-out rows, each a text of its own, against the original's logits in float32;
perplexity is that of the rows' own tokens.

    python benchmarks/gguf_adapters.py --out DIR --llama-python /venv/with/llama-cpp-python/bin/python --minutes 60

Interrupt it at will: what is complete in DIR is not made again.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from qat_lora.commands import demo
from qat_lora.data.packing import make_encoder, pack_rows
from qat_lora.data.sources import TextConfig, open_documents
from qat_lora.export.gguf import gguf_name, save_base
from qat_lora.files.checksums import seal
from qat_lora.layers.convert import linear_layers
from qat_lora.layers.lora import LoraConfig
from qat_lora.models.load import CausalLM, load_model, load_tokenizer, make_qwen3, make_tokenizer, save_model
from qat_lora.models.student import open_student
from qat_lora.options import CacheBuildOptions, RecoverOptions, RunConfig
from qat_lora.registry import COMMANDS
from qat_lora.runtime.launch.select import select_runtime
from qat_lora.runtime.launch.start import run
from qat_lora.setup.common import batches_of
from qat_lora.train.loop import LoopConfig
from qat_lora.train.optim import OptimConfig, set_lr

VOCABULARY, LENGTH, ROWS, EVAL_ROWS, TOKENS, RANK = 4096, 256, 16, 96, 1_000_000, 16
SHAPE = {"hidden": 256, "layers": 4, "heads": 4, "kv_heads": 2, "mlp": 768, "head_dim": 64}
TYPES = {"Q2_K": 10, "IQ2_XS": 20, "Q3_K_S": 11, "Q4_0": 2}
"""llama.cpp's numbers of the file types."""
ASKED = {"Q2_K": 0.5, "IQ2_XS": 0.5, "Q3_K_S": 0.4}

QUANTIZE = """
import ctypes, sys
import llama_cpp, numpy

source, out, kind, importance = sys.argv[1:]
parts = numpy.load(importance)
held = [(name.encode(), numpy.ascontiguousarray(parts[name], numpy.float32)) for name in parts.files]
entries = (llama_cpp.llama_model_imatrix_data * (len(held) + 1))()
for entry, (name, values) in zip(entries, held):
    entry.name, entry.size = name, values.size
    entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
settings = llama_cpp.llama_model_quantize_default_params()
settings.ftype, settings.nthread, settings.imatrix = int(kind), 1, entries
assert llama_cpp.llama_model_quantize(source.encode(), out.encode(), ctypes.byref(settings)) == 0
"""
SCORE = """
import json, sys
import llama_cpp, numpy

model, lora, rows, *references = sys.argv[1:]
rows = numpy.load(rows)
references = [numpy.load(file, mmap_mode="r") for file in references]
llama = llama_cpp.Llama(
    model, lora_path=lora or None, n_ctx=rows.shape[1], n_batch=rows.shape[1],
    n_threads=1, logits_all=True, verbose=False,
)
sums, missed = numpy.zeros(len(references)), 0.0
for i, row in enumerate(rows):
    llama.reset()
    llama.eval(row.tolist())
    logits = llama.scores[: len(row)].astype(numpy.float64)
    logits -= logits.max(1, keepdims=True)
    logits -= numpy.log(numpy.exp(logits).sum(1, keepdims=True))
    missed -= logits[numpy.arange(len(row) - 1), row[1:]].mean()
    for n, reference in enumerate(references):
        wanted = reference[i].astype(numpy.float64)
        sums[n] += (numpy.exp(wanted) * (wanted - logits[:, : wanted.shape[1]])).sum(1).mean()
print(json.dumps([numpy.exp(missed / len(rows)), *(sums / len(rows))]))
"""


def main() -> None:
    """Make what is missing, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--llama-python", default=sys.executable, help="a Python that has llama-cpp-python")
    parser.add_argument("--teacher", type=Path, help="a trained one, with its lists of files beside its folder")
    parser.add_argument("--minutes", type=float, default=60, help="at most, for training the teacher")
    parser.add_argument("--steps", type=int, default=2500, help="of the teacher's training")
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--machine", default=platform.machine(), help="named in the result")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    out, python = arguments.out, arguments.llama_python
    out.mkdir(parents=True, exist_ok=True)
    library, held_out, trained_on = demo._list_files(out)
    text = TextConfig(dataset=str(library), files_from=str(trained_on), format="text")
    teacher = arguments.teacher or train_teacher(text, out / "teacher", arguments.steps, 60 * arguments.minutes)
    model = load_model(str(teacher))
    rows = held_out_rows(replace_list(text, held_out), teacher)
    np.save(out / "rows.npy", rows)
    reference = log_probabilities(model, rows, out / "teacher.npy")
    whole = out / "model-F32.gguf"
    if not whole.is_file():
        save_base(model, {}, load_tokenizer(teacher), whole, "float32", "teacher")
    cache = build_cache(text, teacher, out / "cache")
    importance = out / "importance.npz"
    if not importance.is_file():
        np.savez(importance, **importance_of(model, text, teacher))
    report: dict[str, Any] = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": arguments.machine,
        "versions": {"torch": torch.__version__, "gguf": importlib.metadata.version("gguf")}
        | {"llama-cpp-python": ask(python, "import llama_cpp; print(llama_cpp.__version__)").strip()},
        "settings": {"rank": RANK, "tokens": TOKENS, "rows": EVAL_ROWS, "length": LENGTH, "vocabulary": VOCABULARY},
        "teacher": {**SHAPE, **json.loads((teacher.parent / "teacher.json").read_text())},
        "float32_in_llama_cpp": dict(zip(("perplexity", "kl"), score(python, whole, "", out, reference), strict=True)),
        "types": {},
    }
    for kind in arguments.types.split(","):
        report["types"][kind] = one_type(kind, out, python, teacher, cache, whole, rows)
        print(json.dumps({kind: report["types"][kind]}), flush=True)
        (out / "gguf_adapters.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def one_type(kind: str, out: Path, python: str, teacher: Path, cache: Path, whole: Path, rows: np.ndarray) -> Any:
    """Quantise, recover and measure one type."""
    file, reference = out / f"model-{kind}.gguf", out / "teacher.npy"
    if not file.is_file():
        ask(python, QUANTIZE, whole, file, TYPES[kind], out / "importance.npz")
    done = call(
        "recover",
        RecoverOptions(
            checkpoint=str(file),
            tokenizer=str(teacher),
            kd_cache_dir=str(cache),
            lora=LoraConfig(recovery_r=RANK),
            train=OptimConfig(lr=2e-3, warmup_steps=10, min_lr_ratio=0.05),
            loop=LoopConfig(batch_size=ROWS, max_steps=TOKENS // (ROWS * LENGTH), autocast=True),
            run=RunConfig(out=str(out / f"recovered-{kind}"), device="cpu", dtype="float32"),
        ),
    )
    here = {}
    for name, student in (("base", str(file)), ("recovered", str(done))):
        opened = open_student(student, tokenizer=teacher).model
        ours = log_probabilities(opened, rows, out / f"{kind}-{name}.npy")
        lora = done / "best" / "adapter.gguf" if name == "recovered" else ""
        perplexity, theirs, floor = score(python, file, lora, out, reference, ours)
        here[name] = {"perplexity": perplexity, "kl": theirs, "kl_here": kl(reference, ours)}
        here[name]["kl_of_llama_cpp_to_here"] = floor
        ours.unlink()
    closed = {at: 1 - here["recovered"][at] / here["base"][at] for at in ("kl", "kl_here")}
    sizes = {"file_mb": file.stat().st_size / 1e6, "adapter_mb": (done / "best" / "adapter.gguf").stat().st_size / 1e6}
    return {**here, "closed": closed["kl"], "closed_here": closed["kl_here"], "asked": ASKED.get(kind), **sizes}


def score(python: str, model: Path, lora: Path | str, out: Path, *references: Path) -> list[float]:
    """Return what llama.cpp finds on the held-out rows: perplexity, then the KL to each reference."""
    return json.loads(ask(python, SCORE, model, lora, out / "rows.npy", *references))


def ask(python: str, program: str, *words: Any) -> str:
    """Run a program in the Python that has llama.cpp; return what it prints."""
    done = subprocess.run([python, "-c", program, *map(str, words)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-2000:])
    return done.stdout


def call(command: str, options: Any) -> Path:
    """Run a command of ours, which goes on where it was interrupted."""
    return run(COMMANDS[command], options)


def replace_list(text: TextConfig, files: Path) -> TextConfig:
    """Return the text of other files of the library."""
    return TextConfig(dataset=text.dataset, files_from=str(files), format="text")


def train_teacher(text: TextConfig, out: Path, steps: int, seconds: float) -> Path:
    """Train tokenizer and teacher by Muon, as `demo` does, until the steps or the time are over."""
    if (out / "model.safetensors").is_file():
        return out
    runtime, started = select_runtime("cpu"), time.monotonic()
    make_tokenizer(("".join(d.parts()) for d in open_documents(text)), VOCABULARY, out)
    rows = list(pack_rows(open_documents(text), make_encoder(load_tokenizer(out)), LENGTH))
    torch.manual_seed(0)
    model, order = make_qwen3(out, VOCABULARY, **SHAPE), np.random.default_rng(0)
    model.tile_attention()
    model.module.train().requires_grad_(True)
    optimizers, step, share = demo._optimizers(model, torch.bfloat16), 0, 0.0
    while share < 1:
        chosen = order.permutation(len(rows))[: len(rows) // ROWS * ROWS]
        for batch in runtime.feed(batches_of((rows[i] for i in chosen), LENGTH, ROWS)):
            share = max(step / steps, (time.monotonic() - started) / seconds)
            if share >= 1:
                break
            for optimizer in optimizers:
                set_lr(optimizer, min(1.0, (step + 1) / 30, (1 - share) / 0.4))
            with runtime.autocast(torch.bfloat16):
                hidden = model.hidden(batch["input_ids"], batch["document_ids"])
                logits = model.logits(hidden[:, :-1].flatten(0, 1)).float()
            mask = batch["target_mask"].reshape(-1)
            targets = batch["input_ids"][:, 1:].reshape(-1).long().masked_fill(~mask, -100)
            loss = torch.nn.functional.cross_entropy(logits, targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.module.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            if step % 20 == 0:
                print(f"teacher: step {step}, loss {loss.item():.3f}", flush=True)
            step += 1
    save_model(model.module, out)
    seal(out)
    (out.parent / "teacher.json").write_text(json.dumps({"tokens_trained": step * ROWS * LENGTH}), encoding="utf-8")
    return out


def held_out_rows(text: TextConfig, teacher: Path) -> np.ndarray:
    """Return rows [96, 256] of held-out files, each beginning as a document does."""
    tokenizer, rows = load_tokenizer(teacher), []
    for document in open_documents(text):
        ids = tokenizer("".join(document.parts()), add_special_tokens=False)["input_ids"]
        width = LENGTH - 1
        rows += [[tokenizer.eos_token_id, *ids[i : i + width]] for i in range(0, len(ids) - width + 1, width)]
    chosen = np.random.default_rng(0).permutation(len(rows))[:EVAL_ROWS]
    return np.array([rows[i] for i in chosen], np.int32)


@torch.no_grad()
def log_probabilities(model: CausalLM, rows: np.ndarray, file: Path) -> Path:
    """Write a model's log-probabilities [rows, 256, vocabulary] as float32."""
    if not file.is_file():
        found = []
        for row in torch.from_numpy(rows):
            hidden = model.hidden(row[None], torch.zeros(1, len(row), dtype=torch.int32))
            found.append(torch.log_softmax(model.logits(hidden[0]).float(), -1).numpy())
        np.save(file, np.stack(found))
    return file


def kl(reference: Path, other: Path) -> float:
    """Return the mean KL of one file of log-probabilities to another."""
    p, q = (np.load(file, mmap_mode="r") for file in (reference, other))
    rows = [(np.exp(a.astype(np.float64)) * (a - b)).sum(1).mean() for a, b in zip(p, q, strict=True)]
    return float(np.mean(rows))


def build_cache(text: TextConfig, teacher: Path, out: Path) -> Path:
    """Build the cache of the recovery's tokens."""
    options = CacheBuildOptions(
        teacher=str(teacher),
        text=text,
        length=LENGTH,
        top_k=64,
        num_rows=-(-TOKENS // LENGTH),
        eval_rows=32,
        teacher_batch_size=16,
        run=RunConfig(out=str(out), device="cpu", dtype="float32"),
    )
    return call("cache build", options)


@torch.no_grad()
def importance_of(model: CausalLM, text: TextConfig, teacher: Path) -> dict[str, np.ndarray]:
    """Return llama.cpp's importance matrix of a text: the mean square of every layer's inputs, by GGUF's names."""
    sums: dict[str, torch.Tensor] = {}
    layers = [(gguf_name(model, name), layer) for name, layer in linear_layers(model.module)]
    for name, layer in layers:

        def add(_: Any, inputs: Any, name: str = f"{name}.weight") -> None:
            sums[name] = sums.get(name, 0) + inputs[0].flatten(0, -2).square().sum(0)

        layer.register_forward_pre_hook(add)
    packed = pack_rows(open_documents(text), make_encoder(load_tokenizer(teacher)), LENGTH)
    for _, batch in zip(range(16), batches_of(packed, LENGTH, 8), strict=False):
        model.hidden(torch.from_numpy(batch["input_ids"]), torch.from_numpy(batch["document_ids"]))
    return {name: (total / (16 * 8 * LENGTH)).numpy() for name, total in sums.items()}


if __name__ == "__main__":
    main()
