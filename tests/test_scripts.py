"""The documented scripts, run as a person runs them: the guide's flags, small numbers, the CPU."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from toy_paths import clean_environment

ROOT = Path(__file__).resolve().parents[1]


def script(name: str, *arguments: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / name), *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300)


@pytest.fixture(scope="module")
def work(tiny, tmp_path_factory):
    """A cache from the script and a student in `runs/v2_q4/best`, as in the guide."""
    from qat_lora import quantize_model

    root = tmp_path_factory.mktemp("scripts")
    rows = root / "rows.jsonl"
    texts = [file.read_text() for file in sorted(tiny.text.iterdir())]
    rows.write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    built = script(
        "build_kd_cache.py",
        *("--teacher", tiny.teacher, "--dataset", rows, "--text-field", "body", "--format", "text"),
        *("--split", "train", "--length", 32, "--top-k", 8, "--out", "caches/toy_L32_K8", "--device", "cpu"),
        cwd=root,
    )
    quantize_model(model=tiny.teacher, init="mse", out=root / "runs/v2_q4/best", device="cpu", quiet=True)
    return root, built


def test_build_kd_cache(work):
    from qat_lora import KDCacheDataset

    root, built = work
    assert built.returncode == 0, built.stderr
    assert "written to caches/toy_L32_K8" in built.stdout
    dataset = KDCacheDataset(root / "caches/toy_L32_K8")
    assert dataset.k == 8 and dataset.rows([0])["input_ids"].shape == (1, 32)


def test_train_recovery_lora(work):
    """`--checkpoint runs/v2_q4/best.pt` names no file here; it means the folder beside it."""
    root, _ = work
    done = script(
        "train_recovery_lora.py",
        *("--model", "M", "--checkpoint", "runs/v2_q4/best.pt", "--kd-cache-dir", "caches/toy_L32_K8"),
        *("--recovery-r", 8, "--batch-size", 2, "--accumulation-steps", 2, "--max-steps", 3, "--device", "cpu"),
        cwd=root,
    )
    assert done.returncode == 0, done.stderr
    assert "effective batch 4" in done.stdout
    run = root / "runs/recovery_best"
    assert json.loads((run / "result.json").read_text())["step"] == 3
    assert json.loads((run / "last/adapter_config.json").read_text())["r"] == 8
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3]


def guides_command() -> list[str]:
    """Return the words of the recovery by script, as docs/tpu.md shows it."""
    guide = (ROOT / "docs/tpu.md").read_text(encoding="utf-8").replace("\\\n", " ")
    (line,) = re.findall(r"^    python (scripts/train_recovery_lora\.py --tpu .*)$", guide, re.M)
    return shlex.split(line)


@pytest.mark.xla
@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="needs the xla extra")
def test_the_guides_command_runs_as_it_stands_on_xla(work):
    """Word for word, with a toy under the names that it gives; two steps instead of the default number."""
    root, _ = work
    (root / "caches/wikitext103_L1024_K128").symlink_to("toy_L32_K8")
    (root / "runs/Qwen3-0.6B_q4_r32").symlink_to("v2_q4/best")
    file, *words = guides_command()
    command = [sys.executable, str(ROOT / file), *words, "--max-steps", "2", "--save-minutes", "0"]
    environment = clean_environment(PJRT_DEVICE="CPU")
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "XLA on CPU · 1 device · bf16 · effective batch 32" in done.stdout, done.stdout
    assert json.loads((root / "runs/recovery_Qwen3-0.6B_q4_r32/result.json").read_text())["step"] == 2


def test_the_guides_tpu_flag_says_what_is_there(work):
    root, _ = work
    done = script(
        "train_recovery_lora.py", *["--tpu", "--device", "cpu", "--checkpoint", "x", "--kd-cache-dir", "y"], cwd=root
    )
    assert done.returncode == 2 and done.stderr.startswith("error: --tpu with --device cpu")


@pytest.mark.parametrize("file", sorted((ROOT / "scripts").glob("*.py")), ids=lambda file: file.stem)
def test_scripts_are_short_and_have_help(file, tmp_path):
    assert len(file.read_text(encoding="utf-8").splitlines()) <= 30
    shown = script(file.name, "--help", cwd=tmp_path)
    assert shown.returncode == 0 and shown.stdout.startswith("Usage: qat-lora "), shown.stderr
