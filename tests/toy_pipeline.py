"""The pipeline at toy size, through the functions that the commands call."""

from dataclasses import replace

from qat_lora.data.sources import TextConfig
from qat_lora.layers.lora import LoraConfig
from qat_lora.options import CacheBuildOptions, EvalOptions, ExportOptions, QuantizeOptions, RecoverOptions, RunConfig
from qat_lora.registry import COMMANDS
from qat_lora.runtime.launch.select import DeviceChoice
from qat_lora.runtime.launch.start import work_here
from qat_lora.train.loop import LoopConfig
from qat_lora.train.optim import OptimConfig


def call(name, options, **changed):
    """Run a command on the CPU, in this process."""
    command = next(c for c in COMMANDS.values() if c.options and c.function.endswith(f":{name}"))
    return work_here(command, replace(options, **changed), DeviceChoice("cpu"))


def part(out, **changed):
    return RunConfig(out=str(out), device="cpu", quiet=True, **{"dtype": "float32", **changed})


def cache_options(tiny, out, **changed):
    options = CacheBuildOptions(
        teacher=str(tiny.teacher),
        text=TextConfig(dataset=str(tiny.text)),
        length=32,
        top_k=64,
        tail_draws=0,  # eight steps of a toy do not average their noise; tests of hybrid ask for them
        num_rows=96,
        eval_rows=12,
        teacher_batch_size=16,
        run=part(out),
    )
    return replace(options, **changed)


def quantize_options(tiny, out, cache=None, **changed):
    """With a cache: calibrated, adapter starts stored; without: plain rounding with the absmax scale."""
    options = QuantizeOptions(
        model=str(tiny.teacher),
        preset="w2g64",
        init="gptq" if cache else "absmax",
        kd_cache_dir=str(cache) if cache else None,
        calibration_rows=64,
        start_rank=2 if cache else 0,
        run=part(out),
    )
    return replace(options, **changed)


def cache_and_student(tiny, root):
    """Make a cache and a student that was calibrated on it."""
    cache = call("build_cache", cache_options(tiny, root / "cache"))
    return cache, call("quantize", quantize_options(tiny, root / "student", cache))


def recover_options(student, cache, out, **changed):
    options = RecoverOptions(
        checkpoint=str(student),
        kd_cache_dir=str(cache),
        lora=LoraConfig(recovery_r=2),
        train=OptimConfig(lr=2e-3, scale_lr=2e-3, warmup_steps=1),
        loop=LoopConfig(batch_size=16, max_steps=8, log_steps=3, eval_steps=2, save_steps=4),
        run=part(out),
    )
    return replace(options, **changed)


def eval_options(tiny, students, out, **changed):
    options = EvalOptions(
        teacher=str(tiny.teacher),
        students=tuple(f"{name}={folder}" for name, folder in students.items()),
        text=TextConfig(dataset=str(tiny.held_out)),
        length=32,
        eval_rows=0,
        batch_size=8,
        run=part(out),
    )
    return replace(options, **changed)


def export_options(student, out, **changed):
    return replace(ExportOptions(student=str(student), run=part(out)), **changed)
