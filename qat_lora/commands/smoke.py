"""`smoke`: every part of a recovery run on this device, at toy size, one line a check, until the first that fails.

Nothing is mocked and nothing is downloaded: the functions of the real commands make a random teacher, its cache, a
2-bit student and an adapter, so a tick means that the real thing works here.
"""

import json
import math
import random
import shutil
import tempfile
import time
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file

from qat_lora.cache.storage.store import verify_cache
from qat_lora.commands.cache import build_cache
from qat_lora.commands.quantize import quantize
from qat_lora.commands.recover import recover
from qat_lora.data.sources import TextConfig
from qat_lora.errors import FailedError, OutputExistsError
from qat_lora.files import outputs
from qat_lora.files.checksums import seal
from qat_lora.files.folders import atomic_dir, ours
from qat_lora.layers.lora import LoraConfig
from qat_lora.models.load import make_qwen3, make_tokenizer, save_model
from qat_lora.options import CacheBuildOptions, QuantizeOptions, RecoverOptions, RunConfig, SmokeOptions
from qat_lora.runtime.base import Runtime
from qat_lora.setup.common import say
from qat_lora.train.checkpoint import checkpoints
from qat_lora.train.loop import LoopConfig
from qat_lora.train.metrics import read_metrics
from qat_lora.train.optim import OptimConfig

LENGTH, VOCABULARY, TOP_K, ROWS = 64, 320, 32, 64
BATCH, ACCUMULATION = 4, 2
STEPS_PER_EPOCH = ROWS // (BATCH * ACCUMULATION)
SHORT_STEPS = 4
WORDS = "a the token layer weight scale code row head tail of to and in loss"


class _Bench(NamedTuple):
    options: SmokeOptions
    runtime: Runtime
    folder: Path

    @property
    def steps(self) -> int:
        return self.options.train_epochs * STEPS_PER_EPOCH if self.options.run_training else SHORT_STEPS

    def settings(self, name: str) -> RunConfig:
        """Return the run settings of a part: its own folder, and no output of its own."""
        return replace(self.options.run, out=str(self.folder / name), overwrite=False, quiet=True)


def smoke(options: SmokeOptions, runtime: Runtime) -> dict[str, Any]:
    """Run all checks, a printed tick each; return them with seconds, keep files with `--out`; FailedError."""
    report: dict[str, Any] = {}
    with ExitStack() as stack:
        if options.run.out is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="qat-lora-smoke-")))
        else:
            folder = Path(options.run.out)
            stack.enter_context(outputs.lock_dir(folder))
            outputs.claim(folder, "smoke", {"started": time.time()}, options.run.overwrite)  # never a run to go on with
        bench = _Bench(options, runtime, folder)
        for check in (_device, _data, _training, _gradient_sync, _checkpoint, _resume):
            name = check.__name__[1:].replace("_", " ")
            started = time.perf_counter()
            try:
                text, failed = check(bench), False
            except Exception as error:  # whatever it is, it is what this command is here to find
                text, failed = f"{type(error).__name__}: {error}", True
            seconds = time.perf_counter() - started
            report[name] = {"passed": not failed, "found": text, "seconds": round(seconds, 2)}
            say(options.run, f"{'✗' if failed else '✓'} {name:<13}  {text}  ({seconds:.1f} s)")
            if failed:
                raise FailedError(f"smoke: {name} failed on {runtime.description}: {text}")
    return report


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise RuntimeError(message)


def _device(bench: _Bench) -> str:
    """A product of known matrices comes back right."""
    a, b = (torch.randn(64, 96, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    device = bench.runtime.device
    product = (a.to(device) @ b.to(device).T).cpu()
    error = ((product - a @ b.T).norm() / (a @ b.T).norm()).item()
    # A TPU multiplies float32 in one pass of bfloat16, CUDA in TF32; everything else is a thousand times nearer.
    _require(error < 1e-2, f"a matrix product is off by {error:.1%}")
    return f"{bench.runtime.description}, matrix product within {error:.0e}"


def _data(bench: _Bench) -> str:
    """Text becomes a teacher, a KD cache that verifies, and a 2-bit student."""
    text, teacher = bench.folder / "text", bench.folder / "teacher"
    text.mkdir(exist_ok=True)
    draw, words = random.Random(bench.options.run.seed), WORDS.split()
    written = ["".join(" ".join(draw.choices(words, k=12)) + ".\n" for _ in range(12)) for _ in range(80)]
    for i, lines in enumerate(written):
        ours(text / f"{i:03d}.txt").write_text(lines, encoding="utf-8")
    torch.manual_seed(bench.options.run.seed)
    model = make_qwen3(
        teacher, VOCABULARY, hidden=64, layers=2, heads=2, kv_heads=1, mlp=128, max_position_embeddings=LENGTH
    )
    with torch.no_grad():  # as made, logits are nearly flat and quantisation changes nothing worth learning
        for parameter in model.module.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4.0)
    with atomic_dir(teacher) as draft:
        make_tokenizer(iter(written), VOCABULARY, draft)
        save_model(model.module, draft)
        seal(draft)
    source, run = TextConfig(dataset=str(text)), bench.settings("cache")
    build = CacheBuildOptions(teacher=str(teacher), text=source, length=LENGTH, top_k=TOP_K, num_rows=ROWS, run=run)
    verify_cache(build_cache(build, bench.runtime), None)
    student = QuantizeOptions(model=str(teacher), init="absmax", start_rank=0, run=bench.settings("student"))
    quantize(student, bench.runtime)
    return f"cache of {ROWS} rows of {LENGTH} tokens verified, {student.preset} student made"


def _recover(bench: _Bench, out: str) -> Path:
    student, cache, steps = str(bench.folder / "student"), str(bench.folder / "cache"), bench.steps
    loop = LoopConfig(batch_size=BATCH, accumulation_steps=ACCUMULATION, max_steps=steps, save_steps=steps // 2)
    train, lora = OptimConfig(lr=3e-3, scale_lr=1e-3, warmup_steps=2), LoraConfig(recovery_r=8)
    parts: dict[str, Any] = {"lora": lora, "train": train, "loop": loop, "run": bench.settings(out)}
    return recover(RecoverOptions(checkpoint=student, kd_cache_dir=cache, train_scales=True, **parts), bench.runtime)


def _training(bench: _Bench) -> str:
    """The recovery run; its loss falls, if it is long enough to say so."""
    _recover(bench, "run")
    losses = [line["loss"] for line in read_metrics(bench.folder / "run" / "metrics.jsonl")]
    _require(len(losses) == bench.steps, f"the log has {len(losses)} of {bench.steps} steps")
    _require(all(map(math.isfinite, losses)), f"the loss is not finite: {losses}")
    compiled = bench.runtime.compile_report().get("graphs_compiled")
    note = "" if compiled is None else f", {compiled} graphs compiled so far"
    if not bench.options.run_training:
        return f"{bench.steps} steps, loss {losses[-1]:.4f}{note} (--run-training checks that it falls)"
    first, last = (sum(part) / STEPS_PER_EPOCH for part in (losses[:STEPS_PER_EPOCH], losses[-STEPS_PER_EPOCH:]))
    _require(last < first, f"the mean loss of an epoch went from {first:.4f} to {last:.4f}")
    return f"mean loss of an epoch fell from {first:.4f} to {last:.4f} in {bench.options.train_epochs} epochs{note}"


def _gradient_sync(bench: _Bench) -> str:
    """Replica r gives the gradient r + 1; everyone gets the mean, and a value likewise."""
    runtime = bench.runtime
    parameter = torch.nn.Parameter(torch.zeros(5, device=runtime.device))
    parameter.grad = torch.full((5,), float(runtime.rank + 1), device=runtime.device)
    runtime.reduce_gradients([parameter])
    value = runtime.all_reduce_mean(torch.tensor(float(runtime.rank + 1), device=runtime.device))
    runtime.step_end()
    expected = (runtime.replicas + 1) / 2
    got = [*parameter.grad.cpu().tolist(), value.item()]
    _require(all(abs(x - expected) < 1e-5 for x in got), f"expected {expected} everywhere, got {got}")
    return f"mean over {runtime.replicas} replica{'s' if runtime.replicas > 1 else ''} is right"


def _checkpoint(bench: _Bench) -> str:
    """Complete checkpoints at both save points, and a file written by `save` holds what was given."""
    runtime, saved = bench.runtime, ours(bench.folder / "saved.safetensors")
    tensor = torch.arange(6.0, device=runtime.device).reshape(2, 3) * 2
    runtime.save({"tensor": tensor}, saved)
    expected = torch.tensor([[0.0, 2.0, 4.0], [6.0, 8.0, 10.0]])
    _require(torch.equal(load_file(saved)["tensor"], expected), "a saved tensor reads back changed")
    names = [path.name for path in checkpoints(bench.folder / "run" / "checkpoints")]
    wanted = [f"step-{step:06d}" for step in (bench.steps // 2, bench.steps)]
    _require(names == wanted, f"expected the checkpoints {wanted}, found {names}")
    return f"{' and '.join(names)} complete"


def _resume(bench: _Bench) -> str:
    """A run killed after its first checkpoint goes on from there and ends where the whole one did."""
    killed, middle = bench.folder / "killed", bench.steps // 2
    if killed.exists():
        raise OutputExistsError(f"{killed}: holds files that no run made; move it away, or choose another --out")
    ours(killed / outputs.MARK)
    shutil.copytree(bench.folder / "run", killed)
    outputs.reopen(killed)
    shutil.rmtree(checkpoints(killed / "checkpoints")[-1])
    result = json.loads((_recover(bench, "killed") / "result.json").read_text(encoding="utf-8"))
    _require(result["resumed_from"] == middle, f"went on from step {result['resumed_from']}, not {middle}")
    lasts = (checkpoints(run / "checkpoints")[-1] for run in (bench.folder / "run", killed))
    ends = [load_file(last / "trained.safetensors") for last in lasts]
    difference = max((ends[0][name] - ends[1][name]).abs().max().item() for name in ends[0])
    # A CPU repeats its sums in the same order; other devices need not.
    allowed = 0.0 if bench.runtime.device.type == "cpu" else 1e-3
    _require(difference <= allowed, f"trained tensors differ from the uninterrupted run's by up to {difference:.1e}")
    same = "bit for bit" if difference == 0 else f"within {difference:.0e}"
    return f"went on from step {middle}, equal to the uninterrupted run {same}"
