"""Floating types: what `--dtype auto` means, when CUDA may round, and products that keep their bits everywhere."""

import importlib.util
import json
import re
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
from toy_paths import clean_environment

from qat_lora.data.sources import TextConfig
from qat_lora.errors import ConfigError
from qat_lora.options import EvalOptions, QatOptions, RecoverOptions, RunConfig
from qat_lora.registry import Command
from qat_lora.runtime import precision
from qat_lora.runtime.launch.select import DeviceChoice
from qat_lora.runtime.launch.start import work_here
from qat_lora.runtime.native import NativeRuntime
from qat_lora.train.callbacks import LoopConfig

ROOT = Path(__file__).resolve().parents[2]
SCORED = EvalOptions(teacher="t", text=TextConfig(dataset="d"))
RECOVERED = RecoverOptions(checkpoint="q", kd_cache_dir="c")
TRAINED = QatOptions(checkpoint="q", kd_cache_dir="c")


@pytest.mark.parametrize(
    ("device", "flags", "expected"),
    [
        ("cpu", "fpu avx2 avx512_bf16", torch.bfloat16),
        ("cpu", "fpu avx512f amx_bf16", torch.bfloat16),
        ("cpu", "fpu avx2 avx512f", torch.float32),
        ("cpu", None, torch.float32),
        ("cuda", None, torch.bfloat16),
        ("xla", None, torch.bfloat16),
    ],
)
def test_fast_dtype(device, flags, expected, tmp_path, monkeypatch):
    monkeypatch.delenv("ONEDNN_MAX_CPU_ISA", raising=False)
    cpuinfo = tmp_path / "cpuinfo"
    if flags is not None:
        cpuinfo.write_text(f"flags : {flags}\n")
    assert precision.fast_dtype(torch.device(device), cpuinfo) == expected


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        ("AVX2", torch.float32),
        ("AVX512_CORE_VNNI", torch.float32),
        ("AVX512_CORE_BF16", torch.bfloat16),
        ("avx512_core_amx", torch.bfloat16),
        ("ALL", torch.bfloat16),
        ("", torch.bfloat16),
    ],
)
def test_units_that_onednn_may_not_use_are_not_there(allowed, expected, tmp_path, monkeypatch):
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", allowed)
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("flags : fpu avx2 avx512_bf16 amx_bf16\n")
    assert precision.fast_dtype(torch.device("cpu"), cpuinfo) == expected


@pytest.fixture
def gpu(monkeypatch):
    def found(bfloat16):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda emulated: bfloat16)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla V100")

    return found


@pytest.fixture
def processor(monkeypatch):
    """Units for bfloat16, or none."""

    def of(dtype):
        monkeypatch.setattr(precision, "fast_dtype", lambda device: dtype)

    return of


def test_auto_is_bfloat16_on_a_processor_with_units_for_it(processor):
    processor(torch.bfloat16)
    assert precision.with_dtype(SCORED, "cpu")[0].run.dtype == "bfloat16"
    for device in ("mps", "xla"):
        assert precision.with_dtype(SCORED, device)[0].run.dtype == "float32"
    kept = RecoverOptions(checkpoint="q", kd_cache_dir="c", train_norms=True)
    chosen, note = precision.with_dtype(kept, "cpu")
    assert chosen.run.dtype == "float32" and note == "dtype: float32, because --train-norms needs it"


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (DeviceChoice("cpu"), "float32"),
        (DeviceChoice("mps"), "float32"),
        (DeviceChoice("xla", "CPU"), "float32"),
        (DeviceChoice("xla", "TPU"), "bfloat16"),
        (DeviceChoice("cuda"), "bfloat16"),
    ],
)
def test_auto_is_bfloat16_where_the_device_is_made_for_it(gpu, choice, expected):
    gpu(bfloat16=True)
    options, note = precision.with_dtype(SCORED, choice.name)
    assert options.run.dtype == expected and not note
    for asked in ("float32", "bfloat16"):  # what was asked for stays
        options = EvalOptions(teacher="t", text=TextConfig(dataset="d"), run=RunConfig(dtype=asked))
        assert precision.with_dtype(options, choice.name) == (options, "")


def test_a_gpu_without_bfloat16_is_named(gpu):
    gpu(bfloat16=False)
    options, note = precision.with_dtype(SCORED, "cuda")
    assert options.run.dtype == "float32" and note == "dtype: float32, because Tesla V100 has no bfloat16"


@pytest.mark.parametrize(
    ("options", "flag"),
    [
        (RecoverOptions(checkpoint="q", kd_cache_dir="c", train_norms=True), "--train-norms"),
        (RecoverOptions(checkpoint="q", kd_cache_dir="c", loop=LoopConfig(autocast=True)), "--autocast"),
        (QatOptions(checkpoint="q", kd_cache_dir="c", train_parts=("scales", "norms")), "--train-parts"),
        (QatOptions(checkpoint="q", kd_cache_dir="c", loop=LoopConfig(autocast=True)), "--autocast"),
    ],
)
def test_what_needs_float32_weights_gets_them_and_says_why(options, flag):
    chosen, note = precision.with_dtype(options, "tpu")
    assert chosen.run.dtype == "float32" and note == f"dtype: float32, because {flag} needs it"
    assert precision.with_dtype(options, "cpu")[1] == ""
    assert precision.with_dtype(type(options)(checkpoint="q", kd_cache_dir="c"), "tpu")[0].run.dtype == "bfloat16"


@pytest.mark.parametrize("quiet", [False, True])
def test_a_command_sees_the_type_and_people_the_reason(monkeypatch, capsys, quiet):
    monkeypatch.setattr(Command, "load", lambda self, name="function": lambda options, runtime: options.run.dtype)
    monkeypatch.setattr("qat_lora.runtime.launch.select.make_runtime", lambda *_: NativeRuntime("cpu"))
    options = RecoverOptions(
        checkpoint="q", kd_cache_dir="c", train_norms=True, run=RunConfig(device="cpu", quiet=quiet)
    )
    command = Command("x", "x:x", "X.")
    assert work_here(command, options, DeviceChoice("xla", "TPU")) == "float32"
    assert ("--train-norms needs it" in capsys.readouterr().out) is not quiet
    assert work_here(command, SCORED, DeviceChoice("xla", "TPU")) == "bfloat16"
    with pytest.raises(ConfigError, match="train_norms: needs float32 weights; leave out --dtype bfloat16"):
        RecoverOptions(checkpoint="q", kd_cache_dir="c", train_norms=True, run=RunConfig(dtype="bfloat16"))


# --- TF32: the switches are of the process, whether there is a GPU or not


def rounds():
    with warnings.catch_warnings():  # the older switch, which torch's compiler reads, warns of its end
        warnings.simplefilter("ignore")
        return torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision()


def test_tf32_is_allowed_for_a_while_and_never_on_the_host():
    host = torch.backends.mkldnn.matmul.fp32_precision
    with precision.tf32(True):
        assert rounds() == (True, "high") and torch.backends.mkldnn.matmul.fp32_precision == host
        with pytest.raises(ZeroDivisionError), precision.tf32(False):
            assert rounds() == (False, "highest")
            raise ZeroDivisionError
        assert rounds() == (True, "high")
    assert rounds() == (False, "highest")


def test_the_cuda_runtime_allows_it_while_it_runs_and_no_other_does(monkeypatch):
    for kind, expected in (("cpu", False), ("cuda", True)):
        runtime = NativeRuntime("cpu")
        runtime.device = torch.device(kind)
        monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
        assert runtime.launch(rounds)[0] is expected
        assert rounds()[0] is False


def test_an_exact_product_on_cuda_is_one_operator_that_does_not_round(monkeypatch):
    """The host stands in for the GPU: same operator, same switches."""
    monkeypatch.setattr(precision, "_ROUNDING", ("cpu",))
    a, b, c = (torch.randn(*shape, requires_grad=True) for shape in ((6, 3), (3, 5), (6, 5)))
    expected = torch.autograd.grad((c + 0.5 * a @ b).square().sum(), (a, b, c))
    compiled = torch.compile(precision.exact_addmm, backend="aot_eager", fullgraph=True)
    seen, matmul = [], torch.Tensor.__matmul__
    monkeypatch.setattr(torch.Tensor, "__matmul__", lambda x, y: seen.append(rounds()[0]) or matmul(x, y))
    with precision.tf32(True):
        precision.exact_matmul(a, b)
        assert seen == [False] and rounds()[0] is True
        for addmm in (precision.exact_addmm, compiled):
            found = torch.autograd.grad(addmm(c, a, b, 0.5).square().sum(), (a, b, c))
            for mine, right in zip(found, expected, strict=True):
                torch.testing.assert_close(mine, right)


# --- XLA: which products of a training step's graph have the highest precision

DOT = re.compile(r"= \w+\[([\d,]*)\]\S* dot\(\w+\[([\d,]*)\][^)]*\), .*?lhs_contracting_dims=\{(\d)\}(.*)")


@pytest.mark.xla
@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="needs the xla extra")
def test_on_xla_the_products_that_form_stored_weights_are_exact_and_no_others(tmp_path):
    program = [sys.executable, str(Path(__file__).with_name("exact_program.py")), str(tmp_path / "graphs.json")]
    environment = clean_environment(PJRT_DEVICE="CPU", PYTHONPATH=str(ROOT))
    done = subprocess.run(program, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads((tmp_path / "graphs.json").read_text())
    assert found.pop("error") < 1e-6 and found.pop("after") == "default"
    for name, text in found.items():
        dots = [line for line in text.splitlines() if " dot(" in line]
        forming, others = [], []
        for line in dots:
            match = DOT.search(line)
            assert match, line
            inner = match[2].split(",")[int(match[3])]
            # Ranks of the factors that weights are formed of; no other product of the toy sums over so many.
            (forming if inner in ("32", "7") else others).append(match[4])
        layers = 7 * (1 if name.endswith("1") else 2)
        assert len(forming) >= layers * (2 if name.startswith("1") else 1), (name, len(forming))
        assert all("operand_precision={highest,highest}" in rest for rest in forming), name
        assert len(others) > 3 * layers and not any("highest" in rest for rest in others), name


def test_exact_products_end_with_their_context():
    matmul = torch.backends.cuda.matmul
    with precision.tf32(True):
        with NativeRuntime("cpu").exact_products():
            assert not matmul.allow_tf32
        assert matmul.allow_tf32
