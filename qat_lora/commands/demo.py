"""`demo`: a small trained model loses its quality at 2 bits and gets it back, in minutes and offline.

The text is the source of Python's own library. A small Qwen3 model is trained on it towards saturation, because only a
model that uses all its weights shows what low bits cost; Muon on the matrices gets there in a fraction of AdamW's
tokens. The rest are the functions of `qat-lora cache build`, `quantize`, `recover` and `eval`. Whole files are held
out, which tokenizer, teacher, cache, calibration and recovery never see.
"""

import json
import random
import sysconfig
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from tqdm.auto import tqdm

from qat_lora.commands.cache import build_cache
from qat_lora.commands.evaluate import evaluate
from qat_lora.commands.quantize import quantize
from qat_lora.commands.recover import recover
from qat_lora.data.packing import PackedRow, make_encoder, pack_rows
from qat_lora.data.sources import TextConfig, open_documents
from qat_lora.errors import TextError
from qat_lora.evaluate.report import html_report, markdown_table, plot_report, save_json, table_rows, text_table
from qat_lora.evaluate.score import recovery
from qat_lora.files import outputs
from qat_lora.files.checksums import seal
from qat_lora.files.folders import moved_into, write_text
from qat_lora.generate.sample import continue_text
from qat_lora.layers.lora import LoraConfig
from qat_lora.models.load import CausalLM, load_model, load_tokenizer, make_qwen3, make_tokenizer, save_model
from qat_lora.models.student import open_student
from qat_lora.options import CacheBuildOptions, DemoOptions, EvalOptions, QuantizeOptions, RecoverOptions, RunConfig
from qat_lora.runtime.base import Runtime
from qat_lora.runtime.precision import fast_dtype
from qat_lora.setup.common import batches_of, picture
from qat_lora.train.loop import LoopConfig
from qat_lora.train.metrics import LOGS, draw_curve, read_metrics
from qat_lora.train.optim import set_lr
from qat_lora.types import Batch

LENGTH = 128  # tokens of a row
VOCABULARY = 1024
HELD_OUT_FILES = 30
TEACHER_STEPS, TEACHER_ROWS = 2000, 16
MUON_LR, ADAMW_LR = 1e-2, 5e-3
CACHE_ROWS, TOP_K = 4000, 64
RECOVERY_STEPS, RECOVERY_ROWS, RANK = 250, 16, 16
EVAL_ROWS = 256
PRESET = "q2_0"  # the recommended one at 2 bits: every engine holds it, and it costs no more KL than `w2g64`
PROMPT = "    def __init__(self, name, value=None):\n        self."


def demo(options: DemoOptions, runtime: Runtime) -> dict[str, Any]:
    """Run everything that is not yet complete under the output folder; print and return the report."""
    run = options.run
    out, identity = Path(run.out or "runs/demo"), _identity(run)
    with outputs.claimed(out, "demo", identity, run.overwrite) as complete:
        if not complete:
            _make(out, run, runtime)
            outputs.complete(out)
    if not run.json:  # JSON goes alone to standard output
        print((out / "report.txt").read_text(encoding="utf-8"))
        print(f"{out / 'report.html'} holds the same and more, with pictures; {out / 'report.md'} as text")
    return dict(json.loads((out / "report.json").read_text(encoding="utf-8")))


def _make(out: Path, run: RunConfig, runtime: Runtime) -> None:
    """Run the parts that are not yet complete; write the report."""
    started = time.perf_counter()
    library, held_out, trained_on = _list_files(out)
    seen = TextConfig(dataset=str(library), files_from=str(trained_on), format="text")
    unseen = TextConfig(dataset=str(library), files_from=str(held_out), format="text")
    teacher = str(out / "teacher")
    with outputs.claimed(out / "teacher", "teacher", _identity(run), overwrite=False) as complete:
        if not complete:
            with moved_into(out / "teacher") as draft:
                _train(seen, draft, runtime, run)
            outputs.complete(out / "teacher")

    def part(name: str) -> RunConfig:
        return replace(run, out=str(out / name), overwrite=False)

    rows: dict[str, Any] = {"length": LENGTH, "num_rows": CACHE_ROWS, "eval_rows": 32, "teacher_batch_size": 32}
    build = CacheBuildOptions(teacher=teacher, text=seen, top_k=TOP_K, run=part("cache"), **rows)
    cache = str(build_cache(build, runtime))
    rough = QuantizeOptions(model=teacher, preset=PRESET, init="absmax", start_rank=0, run=part("quantised"))
    start = QuantizeOptions(model=teacher, preset=PRESET, start_rank=RANK, kd_cache_dir=cache, run=part("student"))
    quantised, student = quantize(rough, runtime), quantize(start, runtime)
    loop, lora = LoopConfig(batch_size=RECOVERY_ROWS, max_steps=RECOVERY_STEPS), LoraConfig(recovery_r=RANK)
    training = RecoverOptions(
        checkpoint=str(student), kd_cache_dir=cache, train_scales=True, lora=lora, loop=loop, run=part("recovered")
    )
    recovered = recover(training, runtime)
    students = {"quantised": quantised, "calibrated": recovered / "start", "recovered": recovered}
    named, silent = tuple(f"{name}={folder}" for name, folder in students.items()), replace(part("eval"), quiet=True)
    scoring = EvalOptions(
        teacher=teacher, students=named, text=unseen, length=LENGTH, eval_rows=EVAL_ROWS, batch_size=32, run=silent
    )
    scores = evaluate(scoring, runtime)
    report = {**scores, **recovery(scores["quantised"], scores["recovered"], scores["teacher"])}
    report["seconds"] = round(time.perf_counter() - started, 1)
    _write_report(report, scores, {"teacher": Path(teacher), **students}, part(""), runtime)


def _identity(run: RunConfig) -> dict[str, Any]:
    recipe = {name: value for name, value in globals().items() if name.isupper() and name != "PROMPT"}
    return {"seed": run.seed, "recipe": recipe}


def _list_files(out: Path) -> tuple[Path, Path, Path]:
    """Write the lists of held-out and training files; return the library folder and both lists."""
    library = Path(sysconfig.get_path("stdlib"))
    skipped = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    found = (file.relative_to(library) for file in library.rglob("*.py") if file.stat().st_size > 200)
    files = sorted(name.as_posix() for name in found if not skipped & set(name.parts))
    if len(files) < 10 * HELD_OUT_FILES:
        few = f"{library} has only {len(files)} source files"
        raise TextError(f"standard library: {few}; run the demo with a full Python")
    random.Random(0).shuffle(files)
    held_out, trained_on = out / "held-out.txt", out / "trained-on.txt"
    write_text(held_out, "\n".join(files[:HELD_OUT_FILES]) + "\n")
    write_text(trained_on, "\n".join(files[HELD_OUT_FILES:]) + "\n")
    return library, held_out, trained_on


def _train(text: TextConfig, out: Path, runtime: Runtime, run: RunConfig) -> None:
    """Train tokenizer and teacher; an ordinary Hugging Face folder."""
    make_tokenizer(("".join(d.parts()) for d in open_documents(text)), VOCABULARY, out)
    encode = make_encoder(load_tokenizer(out))
    rows = list(tqdm(pack_rows(open_documents(text), encode, LENGTH), desc="tokenize", unit="row", disable=run.quiet))
    torch.manual_seed(run.seed)
    model = make_qwen3(out, VOCABULARY, hidden=128, layers=3, heads=4, kv_heads=2, mlp=384)
    runtime.place(model.module)
    model.module.train().requires_grad_(True)
    optimizers = _optimizers(model, fast_dtype(runtime.device))
    batches = runtime.feed(_teacher_batches(rows, run.seed))
    bar = tqdm(range(TEACHER_STEPS), desc="train teacher", unit="step", disable=run.quiet)
    for step in bar:
        batch = next(batches)
        factor = min(1.0, (step + 1) / 30, (1 - step / TEACHER_STEPS) / 0.4)  # warm-up, stable, linear decay
        for optimizer in optimizers:
            set_lr(optimizer, factor)
        with runtime.autocast(fast_dtype(runtime.device)):
            hidden = model.hidden(batch["input_ids"], batch["document_ids"])
            logits = model.logits(hidden[:, :-1].flatten(0, 1)).float()
        mask = batch["target_mask"].reshape(-1)
        targets = batch["input_ids"][:, 1:].reshape(-1).long().masked_fill(~mask, -100)
        loss_sum, tokens = torch.nn.functional.cross_entropy(logits, targets, reduction="sum"), mask.sum()
        (loss_sum / tokens).backward()
        torch.nn.utils.clip_grad_norm_(model.module.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        runtime.step_end()
        if step % 50 == 49:
            bar.set_postfix_str(f"loss {float(loss_sum.detach() / tokens):.3f}")
    save_model(model.module.to("cpu"), out)
    seal(out)


class Muon(torch.optim.Optimizer):
    """torch.optim.Muon with updates of AdamW's size; products in `dtype`, as a CPU may emulate torch's bfloat16."""

    def __init__(
        self, params: Iterable[torch.Tensor], lr: float, weight_decay: float, dtype: torch.dtype, momentum: float = 0.95
    ) -> None:
        """Optimise 2-D `params`; the updates are made orthogonal in `dtype`."""
        self.dtype = dtype
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Move every parameter that has a gradient."""
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("momentum", torch.zeros_like(p))
                average.lerp_(p.grad, 1 - group["momentum"])
                update = _nearly_orthogonal(p.grad.lerp(average, group["momentum"]).to(self.dtype))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(update, alpha=-group["lr"] * 0.2 * max(p.shape) ** 0.5)


def _nearly_orthogonal(update_MN: torch.Tensor, steps: int = 5) -> torch.Tensor:
    """Bring all singular values near 1 by Newton-Schulz's quintic iteration, with Muon's coefficients."""
    x_MN = update_MN.T if update_MN.shape[0] > update_MN.shape[1] else update_MN
    x_MN = x_MN / x_MN.norm().clamp(min=1e-7)
    for _ in range(steps):
        gram_MM = x_MN @ x_MN.T
        x_MN = torch.addmm(x_MN, torch.addmm(gram_MM, gram_MM, gram_MM, beta=-4.775, alpha=2.0315), x_MN, beta=3.4445)
    return x_MN.T if update_MN.shape[0] > update_MN.shape[1] else x_MN


def _optimizers(model: CausalLM, muon_dtype: torch.dtype) -> list[torch.optim.Optimizer]:
    embedding = model.module.get_input_embeddings().weight
    matrices = [p for p in model.module.parameters() if p.ndim == 2 and p is not embedding]
    rest = [p for p in model.module.parameters() if p.ndim != 2 or p is embedding]
    muon = Muon(matrices, lr=MUON_LR, weight_decay=0.01, dtype=muon_dtype)
    adamw = torch.optim.AdamW(rest, lr=ADAMW_LR, betas=(0.9, 0.95), weight_decay=0.0)
    for group in (*muon.param_groups, *adamw.param_groups):
        group["peak_lr"] = group["lr"]
    return [muon, adamw]


def _teacher_batches(rows: list[PackedRow], seed: int) -> Iterator[Batch]:
    generator = np.random.default_rng(seed)
    while True:
        order = generator.permutation(len(rows))[: len(rows) // TEACHER_ROWS * TEACHER_ROWS]
        yield from batches_of((rows[i] for i in order), LENGTH, TEACHER_ROWS)


def _write_report(
    report: dict[str, Any], scores: dict[str, Any], folders: dict[str, Path], run: RunConfig, runtime: Runtime
) -> None:
    """Write report.json, report.md, report.png, and report.txt, which is what the terminal shows."""
    out, table = Path(str(run.out)), table_rows(scores)
    save_json(report, out / "report.json")
    curves = [out / "recovered" / name for name in LOGS]
    steps, evaluations = map(read_metrics, curves)
    name = "kl" if any("kl" in line for line in steps) else "kl_bound"
    kls, edge = [line[name] for line in steps if name in line], max(1, len(steps) // 25)
    lines = [
        f"gap recovered (log perplexity): {report['gap_recovered_log']:.1%}",
        f"KL recovered:                   {report['kl_recovered']:.1%}",
        f"seconds:                        {report['seconds']}",
    ]
    if kls:
        ends = f"{fmean(kls[:edge]):.4f} to {fmean(kls[-edge:]):.4f}, kept apart {evaluations[0][name]:.4f} to"
        label = "KL of rows trained on:" if name == "kl" else "lower bound of that KL:"
        lines.append(f"{label:31} {ends} {evaluations[-1][name]:.4f}")
    continued = {name: PROMPT + _continuation(name, folder, runtime) for name, folder in folders.items()}
    samples = [f"--- {name}\n{text}" for name, text in continued.items()]
    shown = ["the same prompt, continued by each model:", *samples, "", text_table(table), "", *lines]
    write_text(out / "report.txt", "\n".join(shown) + "\n")
    blocks = [f"```python\n# {name}\n{text}\n```" for name, text in continued.items()]
    form = Path(__file__).with_name("demo.md").read_text(encoding="utf-8")
    texts = {"facts": "\n".join(f"* {line}" for line in lines), "samples": "\n\n".join(blocks)}
    write_text(out / "report.md", form.format(table=markdown_table(table), **texts))
    scored = json.loads((out / "eval" / "report.json").read_text(encoding="utf-8"))
    scored["samples"] = {name: [text] for name, text in continued.items()}
    picture(run, lambda: plot_report(scored, out / "report.png", lambda axis: draw_curve(axis, *curves)))
    write_text(out / "report.html", html_report(scored, "qat-lora demo", out / "report.png"))


def _continuation(name: str, folder: Path, runtime: Runtime) -> str:
    model = load_model(str(folder)) if name == "teacher" else open_student(str(folder)).model
    runtime.place(model.module)
    tokenizer, generator = load_tokenizer(model.folder), torch.Generator().manual_seed(0)
    return continue_text(model, tokenizer, PROMPT, 64, device=runtime.device, temperature=0.5, generator=generator)
