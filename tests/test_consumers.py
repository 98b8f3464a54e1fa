"""`benchmarks/consumers.py` on a small student: every engine that is installed reads every form.

llama.cpp and mlx-lm are in a Python of their own (`make engines`), GPTQModel in one that `QAT_LORA_GPTQ` names,
vLLM for CPUs in that of `QAT_LORA_VLLM`.
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from toy_pipeline import cache_options, call, quantize_options, recover_options

ROOT = Path(__file__).resolve().parents[1]
ENGINES = {"llama": "QAT_LORA_ENGINES", "mlx": "QAT_LORA_ENGINES", "gptq": "QAT_LORA_GPTQ"}
ENGINES |= {"vllm": "QAT_LORA_VLLM"}
PYTHONS = {engine: os.environ[name] for engine, name in ENGINES.items() if Path(os.environ.get(name, "")).is_file()}


def most(consumer: str, compared: str) -> float:
    """Return what random weights may miss of the bounds for trained ones, which engines round less."""
    if consumer == "llama.cpp" and compared.endswith("gap of the two best there, ours"):
        return 0.1  # of trained ones at two bits too, see docs/serving.md
    return 0.01 if compared == "logits, share of the largest (float16)" else 0.0


@pytest.mark.slow
@pytest.mark.skipif(not PYTHONS, reason="no engines: make engines, QAT_LORA_ENGINES names their Python")
def test_every_engine_reads_what_we_write(wide, tmp_path):
    cache = call("build_cache", cache_options(wide, tmp_path / "cache"))
    student = call("quantize", quantize_options(wide, tmp_path / "student", cache, preset="q2_0"))
    run = call("recover", recover_options(student, cache, tmp_path / "run"))
    text = tmp_path / "text.txt"
    text.write_text("".join(file.read_text() for file in sorted(wide.held_out.iterdir())))
    command = [sys.executable, str(ROOT / "benchmarks" / "consumers.py"), "--student", str(run), "--text", str(text)]
    command += ["--out", str(tmp_path / "out"), *(word for e, p in PYTHONS.items() for word in (f"--{e}-python", p))]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stderr
    rows = json.loads((tmp_path / "out" / "consumers.json").read_text())["rows"]
    wrong = [row for row in rows if row["verdict"].startswith(("TOO", "FAILED"))]
    missed = [row for row in wrong if row.get("difference", 1.0) <= most(row["consumer"], row.get("compared", ""))]
    assert wrong == missed, done.stdout + done.stderr
    read = {re.split(",| \\+", row["consumer"])[0] for row in rows if row["verdict"] == "ok"}
    names = {"llama": "llama.cpp", "mlx": "mlx-lm", "vllm": "vLLM", "gptq": "PEFT"}
    assert read >= {"PEFT", "transformers", "gguf reader"} | {names[engine] for engine in PYTHONS}
