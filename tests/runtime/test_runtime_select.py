"""Device choice: a table of what was asked, what the environment says and what is there."""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from qat_lora.errors import ConfigError, DeviceError, MissingExtraError
from qat_lora.runtime.launch import select
from qat_lora.runtime.launch.select import (
    ChipsConfig,
    DeviceChoice,
    Found,
    choose,
    find_tpu,
    look,
    select_runtime,
    status_line,
)
from qat_lora.runtime.native import NativeRuntime
from qat_lora.runtime.xla.runtime import XlaRuntime, _chip_name, is_xla_device, xla_mark_step
from qat_lora.runtime.xla.spmd import XlaSpmdRuntime

ROOT = Path(__file__).resolve().parents[2]
LAPTOP = {}
GPU = {"cuda_devices": 1}
APPLE = {"mps": True}
TPU = {"torch_xla": True, "tpu": "/dev/accel0"}
XLA = {"torch_xla": True}
EVERYTHING = {**GPU, **APPLE, **TPU}


@pytest.mark.parametrize(
    ("device", "tpu", "machine", "pjrt", "expected"),
    [
        ("auto", False, LAPTOP, "", DeviceChoice("cpu")),
        ("auto", False, GPU, "", DeviceChoice("cuda")),
        ("auto", False, APPLE, "", DeviceChoice("mps")),
        ("auto", False, {**GPU, **APPLE}, "", DeviceChoice("cuda")),
        ("auto", False, EVERYTHING, "", DeviceChoice("xla", "TPU")),
        ("auto", False, XLA, "", DeviceChoice("cpu")),
        ("auto", False, {**XLA, **GPU}, "", DeviceChoice("cuda")),
        # PJRT_DEVICE says what XLA would run on; only TPU makes `auto` an XLA run.
        ("auto", False, XLA, "CPU", DeviceChoice("cpu")),
        ("auto", False, EVERYTHING, "CPU", DeviceChoice("cuda")),
        ("auto", False, XLA, "TPU", DeviceChoice("xla", "TPU")),
        ("auto", False, {**XLA, **GPU}, "TPU", DeviceChoice("xla", "TPU")),
        # What is asked for by name is taken, whatever else is there.
        ("cpu", False, EVERYTHING, "", DeviceChoice("cpu")),
        ("cpu", False, EVERYTHING, "TPU", DeviceChoice("cpu")),
        ("cuda", False, EVERYTHING, "", DeviceChoice("cuda")),
        ("mps", False, EVERYTHING, "", DeviceChoice("mps")),
        ("tpu", False, TPU, "", DeviceChoice("xla", "TPU")),
        ("auto", True, TPU, "", DeviceChoice("xla", "TPU")),
        ("xla", True, TPU, "", DeviceChoice("xla", "TPU")),
        # A TPU command tried without a TPU.
        ("auto", True, XLA, "CPU", DeviceChoice("xla", "CPU")),
        ("tpu", False, EVERYTHING, "CPU", DeviceChoice("xla", "CPU")),
        ("xla", False, XLA, "", DeviceChoice("xla", "CPU")),
        ("xla", False, TPU, "", DeviceChoice("xla", "TPU")),
        ("xla", False, TPU, "CPU", DeviceChoice("xla", "CPU")),
        ("tpu", False, XLA, "TPU", DeviceChoice("xla", "TPU")),
    ],
)
def test_choice(device, tpu, machine, pjrt, expected):
    assert choose(device, tpu, Found(**machine, pjrt_device=pjrt)) == expected


@pytest.mark.parametrize(
    ("device", "tpu", "machine", "pjrt", "error", "texts"),
    [
        ("cuda", False, APPLE, "", DeviceError, ["--device cuda", "found: cpu, mps, no torch_xla", "CUDA_VISIBLE"]),
        ("mps", False, GPU, "", DeviceError, ["--device mps", "found: cpu, cuda (1), no torch_xla"]),
        ("auto", True, LAPTOP, "", DeviceError, ["--tpu", "not installed", "pip install 'qat-lora[tpu]'"]),
        ("auto", False, LAPTOP, "TPU", DeviceError, ["PJRT_DEVICE=TPU", "pip install 'qat-lora[tpu]'"]),
        ("auto", True, LAPTOP, "CPU", DeviceError, ["--tpu", "pip install 'qat-lora[xla]'", "PJRT_DEVICE=CPU"]),
        ("xla", False, GPU, "", DeviceError, ["--device xla", "pip install 'qat-lora[xla]'"]),
        ("tpu", False, XLA, "", DeviceError, ["--device tpu", "no TPU on this machine", "PJRT_DEVICE=CPU to try"]),
        ("auto", True, {**XLA, **GPU}, "", DeviceError, ["--tpu", "found: cpu, cuda (1), torch_xla"]),
        ("gpu", False, GPU, "", ConfigError, ["--device gpu", "allowed: auto, cpu, cuda, mps, tpu, xla"]),
        ("cuda:1", False, GPU, "", ConfigError, ["CUDA_VISIBLE_DEVICES"]),
        ("cuda", True, EVERYTHING, "", ConfigError, ["--tpu with --device cuda"]),
    ],
)
def test_refusal_says_what_was_found_and_what_to_do(device, tpu, machine, pjrt, error, texts):
    with pytest.raises(error) as caught:
        choose(device, tpu, Found(**machine, pjrt_device=pjrt))
    message = str(caught.value)
    assert all(text in message for text in texts), message
    assert "\n" not in message


def test_a_tpu_without_torch_xla_is_mentioned():
    choice = choose("auto", False, Found(tpu="/dev/accel0", cuda_devices=1))
    assert choice.kind == "cuda"
    assert "pip install 'qat-lora[tpu]'" in choice.note


def test_find_tpu(tmp_path):
    assert find_tpu({}, tmp_path) == ""
    (tmp_path / "dev/accel").mkdir(parents=True)  # other makers' accelerators
    (tmp_path / "dev/accel/accel0").touch()
    (tmp_path / "dev/vfio").mkdir()  # any passed-through device
    (tmp_path / "dev/vfio/0").touch()
    for name, vendor, device in [("a", "0x10de", "0x006f"), ("b", "0x1ae0", "0x0042"), ("c", "0x1ae0", "")]:
        folder = tmp_path / f"sys/bus/pci/devices/{name}"
        folder.mkdir(parents=True)
        (folder / "vendor").write_text(vendor + "\n")
        if device:
            (folder / "device").write_text(device + "\n")
    assert find_tpu({}, tmp_path) == ""
    assert find_tpu({"TPU_WORKER_ID": "0"}, tmp_path) == "TPU_WORKER_ID"
    (tmp_path / "sys/bus/pci/devices/b/device").write_text("0x006f\n")
    assert find_tpu({}, tmp_path) == "PCI device b"
    (tmp_path / "dev/accel0").touch()
    assert find_tpu({}, tmp_path) == str(tmp_path / "dev/accel0")


def test_look_reads_the_environment():
    assert look({"PJRT_DEVICE": " cpu "}).pjrt_device == "CPU"
    assert look({}).pjrt_device == ""


@pytest.fixture
def clean_environment(monkeypatch):
    group = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    for name in ("PJRT_DEVICE", "USE_TORCH_XLA", "THP_MEM_ALLOC_ENABLE", *group):
        monkeypatch.setenv(name, "")  # so that monkeypatch takes away what the code sets
        monkeypatch.delenv(name)
    return monkeypatch


def test_select_makes_the_runtime_and_writes_the_choice_to_the_environment(clean_environment):
    clean_environment.setattr(select, "look", lambda: Found(torch_xla=True))
    runtime = select_runtime("auto")
    assert isinstance(runtime, NativeRuntime) and runtime.device.type == "cpu"
    assert (os.environ["USE_TORCH_XLA"], os.environ.get("PJRT_DEVICE")) == ("0", None)
    assert os.environ["THP_MEM_ALLOC_ENABLE"] == "1"  # which torch reads as it makes its first tensor
    runtime = select_runtime("xla")
    assert isinstance(runtime, XlaRuntime)
    assert os.environ["PJRT_DEVICE"] == "CPU"
    assert runtime.description == "XLA on CPU · 1 device"
    runtime = select_runtime("xla", chips=ChipsConfig(parallel="spmd", shard_base=True))
    assert isinstance(runtime, XlaSpmdRuntime)
    runtime.replicas = 4
    way = "SPMD, frozen weights sharded (run on 0 real chips so far)"
    assert runtime.description == f"XLA on CPU · 4 devices · {way}"


def test_select_warns_of_an_unused_tpu(clean_environment, caplog):
    clean_environment.setattr(select, "look", lambda: Found(tpu="/dev/accel0"))
    select_runtime()
    assert "a TPU seems to be here (/dev/accel0)" in caplog.text


def test_status_lines(clean_environment):
    clean_environment.setenv("PJRT_DEVICE", "TPU")
    tpu = XlaRuntime("TPU")
    tpu._chip = _chip_name("TPU v6 lite")
    assert status_line(tpu, torch.bfloat16, 32) == "TPU v6e detected · 1 chip · bf16 · effective batch 32"
    assert [_chip_name(kind) for kind in ("TPU v5 lite", "TPU v5", "TPU v4")] == ["TPU v5e", "TPU v5p", "TPU v4"]
    cpu = status_line(NativeRuntime("cpu"), torch.float32, 16)
    threads = torch.get_num_threads()
    assert cpu == f"CPU · {threads} thread{'s' if threads > 1 else ''} · float32 · effective batch 16"


@pytest.mark.parametrize(
    "capability,hip,triton,walk",
    [
        ((9, 0), None, True, "kernel"),
        ((8, 0), None, True, "kernel"),
        ((7, 5), None, True, "positions"),
        ((9, 0), None, False, "positions"),
        ((9, 4), "6.4", True, "positions"),
        (None, None, True, "positions"),
    ],
)
def test_the_kernel_is_for_recent_gpus_with_triton(capability, hip, triton, walk, clean_environment):
    clean_environment.setattr(torch.cuda, "is_available", lambda: capability is not None)
    clean_environment.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    clean_environment.setattr(torch.version, "hip", hip)
    clean_environment.setattr("importlib.util.find_spec", lambda name: object() if triton else None)
    assert NativeRuntime("cuda").loss_walk == walk


def test_a_group_needs_its_variables(clean_environment):
    clean_environment.setenv("WORLD_SIZE", "2")
    with pytest.raises(DeviceError, match="also needs RANK, LOCAL_RANK, MASTER_ADDR, MASTER_PORT; start through"):
        NativeRuntime("cpu")
    with pytest.raises(DeviceError, match="device mps: WORLD_SIZE=2"):
        NativeRuntime("mps")


def test_xla_without_torch_xla(clean_environment):
    clean_environment.setitem(sys.modules, "torch_xla", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'qat-lora\[xla\]'"):
        XlaRuntime("CPU").launch(lambda: None)
    assert not is_xla_device()
    assert is_xla_device("xla:0")
    xla_mark_step()


LEAN = """
import sys
import qat_lora.runtime.xla.runtime
from qat_lora.runtime.launch.select import select_runtime
assert not {"transformers", "torch_xla"} & set(sys.modules)
select_runtime("cpu")
from transformers import PreTrainedModel
assert "torch_xla" not in sys.modules
"""

ABSENT_TPU = """
from qat_lora.errors import DeviceError
from qat_lora.runtime.launch.select import select_runtime
runtime = select_runtime("auto")
try:
    runtime.launch(lambda: None)
except DeviceError as error:
    assert "PJRT_DEVICE=TPU: PyTorch/XLA could not start it" in str(error), error
    assert "\\n" not in str(error)
else:
    raise AssertionError
"""


def run_program(program: str, **variables: str) -> None:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("PJRT", "USE_TORCH_XLA", "RANK", "WORLD"))}
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**clean, "PYTHONPATH": str(ROOT), **variables},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert "PJRT_DEVICE" not in result.stderr, result.stderr  # torch_xla's "Defaulting to PJRT_DEVICE=CPU"


def test_a_native_run_never_loads_torch_xla():
    run_program(LEAN)


@pytest.mark.xla
@pytest.mark.skipif(find_spec("torch_xla") is None or find_spec("libtpu") is not None, reason="needs xla, no libtpu")
def test_a_tpu_that_is_not_there_is_an_error_for_people():
    run_program(ABSENT_TPU, PJRT_DEVICE="TPU")


def test_free_memory_is_what_the_system_tells(tmp_path):
    told = tmp_path / "meminfo"
    told.write_text("MemTotal:       24597524 kB\nMemFree:  1 kB\nMemAvailable:   21000000 kB\n", encoding="utf-8")
    assert select.free_memory_bytes(told) == 21_000_000 * 1024
    assert select.free_memory_bytes(tmp_path / "missing") is None
