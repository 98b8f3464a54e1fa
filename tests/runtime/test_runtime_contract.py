"""The contract of `runtime/base.py`, on every runtime that this machine has."""

import importlib.util
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import runtime_contract
import torch
from toy_paths import clean_environment

from qat_lora.runtime.native import NativeRuntime

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 120


def start(kind: str, folder: Path, **variables: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-W", "error", str(Path(runtime_contract.__file__)), kind, str(folder)],
        env=clean_environment(PYTHONPATH=str(ROOT), **variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(processes: list[subprocess.Popen]) -> None:
    try:
        for process in processes:
            output, _ = process.communicate(timeout=TIMEOUT_S)
            assert process.returncode == 0, output
    finally:
        for process in processes:
            process.kill()


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


@pytest.fixture(scope="session")
def gloo_results(tmp_path_factory):
    """Two gloo processes with the variables that torchrun sets."""
    folder = tmp_path_factory.mktemp("gloo")
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    finish([start("cpu", folder, RANK=str(rank), LOCAL_RANK=str(rank), **group) for rank in range(2)])
    return [json.loads((folder / f"results-{rank}.json").read_text()) for rank in range(2)]


@pytest.fixture(scope="session")
def xla_results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("xla")
    finish([start("xla", folder, PJRT_DEVICE="CPU")])
    return [json.loads((folder / "results-0.json").read_text())]


def assert_passed(results: list[dict[str, str]], check: str) -> None:
    for rank, result in enumerate(results):
        assert not result[check], f"rank {rank}:\n{result[check]}"


in_process = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("kind", in_process)
@pytest.mark.parametrize("check", runtime_contract.CHECKS)
def test_native_alone(kind, check, tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    runtime = NativeRuntime(kind)
    runtime.launch(lambda: runtime_contract.CHECKS[check](runtime, tmp_path))


@pytest.mark.parametrize("check", runtime_contract.CHECKS)
def test_native_in_a_group_of_two(check, gloo_results):
    assert_passed(gloo_results, check)


@pytest.mark.xla
@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="needs the xla extra")
@pytest.mark.parametrize("check", runtime_contract.CHECKS)
def test_xla_on_cpu(check, xla_results):
    assert_passed(xla_results, check)
