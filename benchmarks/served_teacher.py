r"""Caches of vLLM's and llama.cpp's servers, and of the latter's binding, against one built in-process: KL, and rates.

Claim: with float32 weights a mean KL of at most 1e-4 between the distributions that the caches hold (top K and tail,
float64). The teacher goes into a GGUF file by our own export. The server is started here with --llama-server, once as
it is (keys and values in float16) and once in float32; without the binding in this Python its row is left out. vLLM
is started by the Python that has it, in float32.

    python benchmarks/served_teacher.py --teacher teacher-small --text DIR --llama-server .../llama-server \
        --machine "two cores of ..." --out benchmarks/results/served_teacher.json
    python benchmarks/served_teacher.py --teacher teacher-small --text DIR --vllm-python .../python \
        --machine "two cores of ..." --out benchmarks/results/served_teacher_vllm.json
"""

import argparse
import importlib.util
import json
import platform
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import urllib3

from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.cli import main as run
from qat_lora.export import gguf
from qat_lora.models.load import load_model, load_tokenizer

LENGTH, TOP_K, ROWS, SLOTS = 256, 64, 32, 2
CASES = {"server": [], "server, float32 keys and values": ["-ctk", "f32", "-ctv", "f32"]}


def distributions(path: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ids [N, K], probabilities and the tail's of the positions that count, in float64, summing to one."""
    rows = KDCacheDataset(str(path)).rows(range(ROWS))
    counts = rows["target_mask"]
    p = np.exp(rows["head_logits"].astype(np.float64) - rows["lse"][..., None])[counts]
    tail = np.exp(rows["log_tail"].astype(np.float64))[counts]
    total = p.sum(-1) + tail  # not quite one: values are float16
    return rows["head_ids"][counts], p / total[:, None], tail / total


def kl(one: Path, other: Path) -> np.ndarray:
    """Return the KL [N] of two caches over the entries that both keep and one outcome for all others."""
    values = []
    for ids, p, tail, ids_b, q, tail_b in zip(*distributions(one), *distributions(other), strict=True):
        _, ours, theirs = np.intersect1d(ids, ids_b, return_indices=True)
        p_rest, q_rest = (tail + p.sum() - p[ours].sum()), (tail_b + q.sum() - q[theirs].sum())
        rest = p_rest * np.log(p_rest / q_rest) if p_rest > 0 else 0.0
        values.append((p[ours] * np.log(p[ours] / q[theirs])).sum() + rest)
    return np.array(values)


def build(arguments: argparse.Namespace, out: Path, *words: str) -> float:
    """Build a cache; return the seconds that it took, loading included."""
    words = ("--length", str(LENGTH), "--top-k", str(TOP_K), "--num-rows", str(ROWS), "--tail-draws", "0", *words)
    begun = time.perf_counter()
    run(["cache", "build", "--dataset", arguments.text, "--device", "cpu", "--quiet", "--out", str(out), *words])
    return time.perf_counter() - begun


def row(reference: Path, out: Path, seconds: float) -> dict[str, float]:
    """Return what is noted of a cache."""
    values = kl(reference, out)
    return {"mean_kl": values.mean(), "largest_kl": values.max(), "tokens_per_s": ROWS * LENGTH / seconds}


def from_server(arguments: argparse.Namespace, command: list[str], out: Path) -> float:
    """Start a server, build from it, and stop it; return the seconds of the build."""
    server = subprocess.Popen([*command, "--port", str(arguments.port)], stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{arguments.port}"
    try:
        urllib3.PoolManager().request(
            "GET", f"{url}/health", retries=urllib3.Retry(199, backoff_factor=0.2, backoff_max=1)
        )
        time.sleep(2)  # it answers before the model is loaded
        return build(arguments, out, "--teacher-url", url, "--tokenizer", arguments.teacher)
    finally:
        server.terminate()
        server.wait()


def servers(arguments: argparse.Namespace, file: Path) -> dict[str, list[str]]:
    """Return what starts each server, without its port, by case."""
    found = {}
    if arguments.llama_server:
        words = [arguments.llama_server, "-m", str(file), "-np", str(SLOTS), "-c", str(SLOTS * 2 * LENGTH), "-t", "1"]
        found |= {case: [*words, *flags] for case, flags in CASES.items()}
    if arguments.vllm_python:
        words = [arguments.vllm_python, "-m", "vllm.entrypoints.openai.api_server", "--model", arguments.teacher]
        found["vLLM"] = [*words, "--dtype", "float32", "--max-logprobs", str(TOP_K), "--enforce-eager"]
    return found


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default=platform.machine(), help="named in the result")
    parser.add_argument("--teacher", required=True, help="a model folder")
    parser.add_argument("--text", required=True, help="text for `cache build --dataset`")
    parser.add_argument("--llama-server", help="the program")
    parser.add_argument("--vllm-python", help="the Python that has vLLM")
    parser.add_argument("--port", type=int, default=8972)
    parser.add_argument("--out", help="JSON file for the result")
    arguments = parser.parse_args()
    versions = {"torch": torch.__version__}
    for name, command in {
        "llama-server": arguments.llama_server and [arguments.llama_server, "--version"],
        "vLLM": arguments.vllm_python and [arguments.vllm_python, "-c", "import vllm; print(vllm.__version__)"],
    }.items():
        if command:
            told = subprocess.run(command, capture_output=True, text=True)
            versions[name] = (told.stdout + told.stderr).splitlines()[0]
    cases = {}
    with tempfile.TemporaryDirectory() as name:
        folder, work = Path(arguments.teacher), Path(name)
        file, reference = work / "teacher.gguf", work / "in-process"
        gguf.save_base(load_model(str(folder)), {}, load_tokenizer(folder), file, "float32", "teacher")
        build(arguments, work / "first", "--teacher", str(folder))  # imports, and pages of the files
        seconds = build(arguments, reference, "--teacher", str(folder))
        cases["in-process"] = {"tokens_per_s": ROWS * LENGTH / seconds}
        for case, command in servers(arguments, file).items():
            seconds = from_server(arguments, command, work / case)
            cases[case] = row(reference, work / case, seconds)
            if case in CASES:  # one request a position
                asked = int(KDCacheDataset(str(work / case)).rows(range(ROWS))["target_mask"].sum())
                cases[case]["requests_per_s"] = asked / seconds
        if arguments.llama_server and importlib.util.find_spec("llama_cpp"):
            import llama_cpp

            versions["llama-cpp-python"] = llama_cpp.__version__
            out = work / "binding"
            seconds = build(arguments, out, "--teacher", str(file), "--tokenizer", str(folder))
            cases["binding"] = row(reference, out, seconds)
    result = {"date": time.strftime("%Y-%m-%d"), "machine": arguments.machine, "versions": versions}
    result |= {
        "shape": f"{ROWS} rows of {LENGTH}, K = {TOP_K}" + f", {SLOTS} slots" * bool(arguments.llama_server),
        "cases": cases,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out:
        Path(arguments.out).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
