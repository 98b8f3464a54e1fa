"""The scripts for several chips, as a person runs them, against the same run on one."""

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from toy_paths import clean_environment
from toy_pipeline import call, quantize_options, recover_options

from qat_lora.cache.storage.store import verify_cache
from qat_lora.commands.cache import as_builder
from qat_lora.commands.qat import qat
from qat_lora.errors import CacheError, ConfigError, ModelError
from qat_lora.options import QatOptions
from qat_lora.runtime.launch.select import select_runtime
from qat_lora.setup.common import fetch
from qat_lora.train.loop import LoopConfig
from qat_lora.train.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
STEPS, GLOBAL = 4, 8
TRAINING = (
    f"--recovery-r 2 --batch-size 2 --global-batch-size {GLOBAL} --max-steps {STEPS} --log-steps 2 --eval-steps 2"
)


def script(name: str, *arguments: object, cwd: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "scripts" / name), *map(str, arguments)],
        cwd=cwd,
        env=clean_environment(**variables),
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.fixture(scope="module")
def work(tiny, tmp_path_factory):
    """A cache that two chips built, a student, and what one chip learns from them."""
    root = tmp_path_factory.mktemp("multi")
    built = script(
        "build_kd_cache.py",
        *("--teacher", tiny.teacher, "--dataset", tiny.text, "--length", 32, "--top-k", 8, "--num-rows", 30),
        *("--eval-rows", 6, "--out", "cache", "--device", "cpu", "--num-chips", 2, "--json"),
        cwd=root,
    )
    assert built.returncode == 0, built.stderr
    student = call("quantize", quantize_options(tiny, root / "student"))
    options = recover_options(student, root / "cache", root / "alone")
    loop = LoopConfig(batch_size=2, global_batch_size=GLOBAL, max_steps=STEPS, log_steps=2, eval_steps=2)
    lora = replace(options.lora, recovery_r=2)
    call("recover", replace(options, loop=loop, lora=lora, train=type(options.train)()))
    return root, built


def same_as_alone(root: Path, run: Path, tolerance: float) -> None:
    alone, mine = (read_metrics(folder / "metrics.jsonl") for folder in (root / "alone", run))
    assert [line["step"] for line in mine] == list(range(1, STEPS + 1))
    for name in ("loss", "tokens"):
        assert [line[name] for line in mine] == pytest.approx([line[name] for line in alone], rel=tolerance), name
    alone_kl, my_kl = ([x["kl"] for x in read_metrics(f / "evaluations.jsonl")] for f in (root / "alone", run))
    assert len(my_kl) == 3 and my_kl == pytest.approx(alone_kl, rel=tolerance)
    assert json.loads((run / "result.json").read_text())["step"] == STEPS
    assert (run / "best/adapter_model.safetensors").is_file()


def test_two_chips_build_one_cache(work):
    root, built = work
    assert json.loads(built.stdout)["out"] == "cache"  # one result, and nothing else
    report = verify_cache(root / "cache")
    assert report.rows == 36 and report.shards == 3


def test_two_chips_learn_what_one_learns(work):
    root, _ = work
    done = script(
        "train_recovery_lora_multi.py",
        *("--checkpoint", "student", "--kd-cache-dir", "cache", *TRAINING.split()),
        *("--out", "two", "--device", "cpu", "--num-chips", 2),
        cwd=root,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("2 processes · float32 · effective batch 8") == 1, done.stdout
    same_as_alone(root, root / "two", 1e-5)


@pytest.mark.xla
@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="needs the xla extra")
def test_torch_xla_launches_the_whole_script(work):
    """`torch_xla.launch` on the one device that XLA has on a CPU, rendezvous and saves included."""
    root, _ = work
    done = script(
        "train_recovery_lora_multi.py",
        *("--tpu", "--checkpoint", "student", "--kd-cache-dir", "cache", *TRAINING.split(), "--out", "xla"),
        cwd=root,
        PJRT_DEVICE="CPU",
    )
    assert done.returncode == 0, done.stderr
    assert "XLA on CPU · 1 device · float32 · effective batch 8" in done.stdout
    same_as_alone(root, root / "xla", 1e-4)


def test_a_refusal_is_one_line(work):
    root, _ = work
    arguments = ("--checkpoint", "nowhere", "--kd-cache-dir", "cache", "--device", "cpu")
    done = script("train_recovery_lora_multi.py", *arguments, "--num-chips", 2, cwd=root)
    assert done.returncode == 2 and "there is no folder nowhere" in done.stderr
    assert done.stderr.count("error:") == 1 and "Traceback" not in done.stderr, done.stderr


def test_the_main_process_fetches(tiny):
    runtime = select_runtime("cpu")
    fetch(runtime, str(tiny.teacher), recover_options("s", "c", "o").hub)
    with pytest.raises(ModelError):
        fetch(runtime, "./nowhere", recover_options("s", "c", "o").hub)


def test_a_chip_is_a_builder(tiny):
    from toy_pipeline import cache_options

    class Two:
        processes, replicas, rank = 2, 2, 1

    class Spmd:
        processes, replicas, rank = 1, 4, 0

    assert as_builder(cache_options(tiny, "out"), Two()).builder == "1/2"
    assert as_builder(cache_options(tiny, "out", builder="1/3"), Two()).builder == "3/6"
    assert as_builder(cache_options(tiny, "out"), select_runtime("cpu")).builder == "0/1"
    with pytest.raises(ConfigError, match="leave spmd out"):
        as_builder(cache_options(tiny, "out"), Spmd())


@pytest.mark.parametrize(("processes", "replicas", "refused"), [(2, 8, True), (1, 8, False), (8, 8, False)])
def test_qat_refuses_spmd_over_hosts_before_anything_is_read(processes, replicas, refused):
    runtime = SimpleNamespace(processes=processes, replicas=replicas, rank=0, is_main=True, auto_dtype=False)
    options = QatOptions(from_scratch=True, model="m", kd_cache_dir="nowhere")
    with pytest.raises(ConfigError if refused else CacheError, match="spmd over 2 hosts" if refused else "nowhere"):
        qat(options, runtime)
