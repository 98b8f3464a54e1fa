"""Out of memory, on every device in its own words, answered with what to lower."""

import importlib
import re
import subprocess
import sys
from dataclasses import replace

import click
import pytest
import torch
from toy_pipeline import cache_options, call, eval_options, part, quantize_options, recover_options

from qat_lora import cli
from qat_lora.data.sources import TextConfig
from qat_lora.errors import CacheError, OutOfMemoryError, QatLoraError, is_out_of_memory, memory_errors_explained
from qat_lora.losses.objective import ObjectiveConfig
from qat_lora.options import QatOptions, RecoverOptions, RunConfig
from qat_lora.plan.advice import memory_warning, recover_advice
from qat_lora.registry import COMMANDS
from qat_lora.runtime.host.machine import peak_memory_bytes
from qat_lora.runtime.launch.start import run
from qat_lora.train.loop import LoopConfig

ERRORS = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    RuntimeError("MPS backend out of memory (MPS allocated: 17.9 GB)"),
    RuntimeError("Bad StatusOr access: RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in hbm."),
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory: you tried 3 bytes"),
    MemoryError(),
]


def advice(model):
    options = RecoverOptions(model=str(model), learn="ce", text=TextConfig(dataset="none"), run=RunConfig(device="cpu"))
    return memory_errors_explained(lambda: recover_advice(options))


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: str(error)[:12] or "host")
def test_every_device_is_understood(tiny, error):
    with pytest.raises(OutOfMemoryError) as caught, advice(tiny.teacher):
        raise error
    message = str(caught.value)
    assert isinstance(caught.value, QatLoraError) and caught.value.__cause__ is error
    assert message.startswith(f"out of memory ({str(error)[:20]}") or not str(error)
    assert "--gradient-checkpointing, or --batch-size 2 --accumulation-steps 2" in message
    assert re.search(r"activations \d+\.\d\d GiB", message)


@pytest.mark.parametrize("error", [RuntimeError("shapes do not match"), CacheError("out of memory"), KeyError("x")])
def test_other_errors_pass_as_they_are(tiny, error):
    assert not is_out_of_memory(error) or isinstance(error, QatLoraError)
    with pytest.raises(type(error)) as caught, advice(tiny.teacher):
        raise error
    assert caught.value is error


def test_a_model_that_cannot_be_estimated_gets_the_general_answer(tmp_path):
    with pytest.raises(OutOfMemoryError, match="Lower --batch-size"), advice(tmp_path):
        raise MemoryError


def test_a_run_that_does_not_fit_says_what_to_lower(tiny, tmp_path, monkeypatch):
    from qat_lora.train import loop

    cache = call("build_cache", cache_options(tiny, tmp_path / "cache", num_rows=16, eval_rows=0))
    student = call("quantize", quantize_options(tiny, tmp_path / "student"))

    def starved(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")

    monkeypatch.setattr(loop.step, "micro_batch", starved)
    config = LoopConfig(batch_size=8, max_steps=2, gradient_checkpointing=True)
    with pytest.raises(OutOfMemoryError, match="9.00 GiB.*--batch-size 4 --accumulation-steps 2") as caught:
        call("recover", recover_options(student, cache, tmp_path / "run", loop=config))
    whole = replace(config, global_batch_size=8)
    with pytest.raises(OutOfMemoryError, match="--batch-size 4[,);]") as followed:
        call("recover", recover_options(student, cache, tmp_path / "whole", loop=whole))
    assert "--accumulation-steps" not in str(followed.value), "it follows from --global-batch-size"
    assert caught.value.exit_code == 1 and "--gradient-checkpointing," not in str(caught.value)
    qat = QatOptions(checkpoint=str(student), kd_cache_dir=str(cache), run=part(tmp_path / "qat"), loop=config)
    with pytest.raises(OutOfMemoryError, match="9.00 GiB.*Try --batch-size 4 --accumulation-steps 2, or --loss-chunk"):
        call("qat", qat)
    monkeypatch.undo()
    smaller = replace(config, batch_size=4, accumulation_steps=2)  # what the message says is the same run
    less = ObjectiveConfig(loss_chunk_mb=16)
    call("recover", recover_options(student, cache, tmp_path / "run", loop=smaller, objective=less))


STARVED = {
    "cache build": ("cache", "build_kd_cache", ["--teacher-batch-size 8", "--dtype bfloat16", "--device-map auto"]),
    "quantize": ("quantize", "quantize_layers", ["a machine with more memory (--dry-run"]),
    "quantize with text": (
        "quantize",
        "sensitivities",
        ["--calibration-rows 32", "--calibration-length 128", "--metric outputs", "--calibrate-on teacher", "--init"],
    ),
    "eval": ("evaluate", "measure", ["--batch-size 4", "--dtype bfloat16", "fewer --students", "--length 16"]),
}


@pytest.mark.parametrize("case", STARVED)
def test_other_commands_name_what_they_have_to_lower(tiny, tmp_path, monkeypatch, case):
    module, function, answers = STARVED[case]

    def starved(*args, **named):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9.00 GiB.")

    monkeypatch.setattr(importlib.import_module(f"qat_lora.commands.{module}"), function, starved)
    out = tmp_path / "out"
    commands = {
        "cache build": ("build_cache", cache_options(tiny, out)),
        "quantize": ("quantize", quantize_options(tiny, out)),
        "quantize with text": (
            "quantize",
            quantize_options(tiny, out, init="descent", text=TextConfig(dataset=str(tiny.text)), start_rank=16),
        ),
        "eval": ("evaluate", eval_options(tiny, {"a": tiny.teacher, "b": tiny.teacher}, out)),
    }
    with pytest.raises(OutOfMemoryError, match="9.00 GiB") as caught:
        call(*commands[case])
    message = str(caught.value)
    assert all(answer in message for answer in answers), message
    command = cli.OptionsCommand(COMMANDS[case.removesuffix(" with text")])
    flags = {opt for parameter in command.get_params(click.Context(command)) for opt in parameter.opts}
    assert set(re.findall(r"--[a-z-]+", message)) <= flags


def test_peak_memory_of_a_process_is_that_of_the_process():
    assert 2**25 < peak_memory_bytes(torch.device("cpu")) < 2**38


def test_peak_memory_is_not_that_of_the_process_that_started_this_one():
    """getrusage's is, and a test that ran after a large one in the same process failed by it."""
    held = torch.ones(2**28)  # 1 GiB
    program = "import torch; from qat_lora.runtime.host.machine import peak_memory_bytes as peak; "
    program += "print(peak(torch.device('cpu')))"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(ran.stdout) < held.nbytes


def test_a_run_that_will_not_fit_is_warned_of_before_it_starts(tiny, tmp_path, capsys, monkeypatch):
    folder = tmp_path / "student"
    command, options = COMMANDS["quantize"], quantize_options(tiny, folder, run=replace(part(folder), quiet=False))
    files = sum(file.stat().st_size for file in tiny.teacher.glob("*.safetensors"))
    needs = command.load("plan")(options).requirements.host
    assert memory_warning(command, options, needs) == memory_warning(command, options, None) == ""
    text = memory_warning(command, options, files)
    assert re.match(r"warning: this quantisation is estimated to need [0-9.]+ GiB, and 0.0 GiB are free; .*Try ", text)
    assert memory_warning(command, replace(options, preset="no such"), files) == ""  # refused by the command itself
    monkeypatch.setattr("qat_lora.runtime.launch.select.free_memory_bytes", lambda: files)
    run(command, options)
    assert capsys.readouterr().err.count("the system may end it") == 1
