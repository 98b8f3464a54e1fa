"""Every command from teacher to served file at Qwen3-0.6B's true shape: memory, bytes and time of each phase.

Claims: each phase takes at most 1.8 times what its operations take at the rate of plain float32 products, measured in
the same run; no process holds more than 6 GiB of its own; every phase that is killed in the middle goes on to the same
result. The weights are random and the vocabulary has Qwen3's 151,936 rows, of which a tokenizer made here uses the
first 4,096: what a phase costs depends on shapes alone.

Phases are the commands that a user types, each in a process of its own, sampled in /proc: `own` is anonymous memory,
`file` what of mapped files was in memory, which the system may drop. Operations are counted from shapes (`operations`);
elementwise work and the solvers' searches are not among them but for `quantize`, whose solvers `--dry-run` counts.
Times that are compared are those of the processor, of all threads together, and the rate is that of one thread: other
programs on the machine do not change them much. With `--kill` every phase, or those named, runs a second time, is
killed (SIGKILL) half way and started again; `same` says that its files have the same bytes then.

    python benchmarks/pipeline.py --shape 0.6b --text DIR --work DIR --machine "two cores of ..." --out FILE

Interrupt it at will: phases that stand in FILE, with the same settings, are not run again, and one that was cut off
goes on from what it had finished; its times are then those of all its runs, `runs` of them. 20 training steps of 4 x
1,024 tokens at 0.6 B; `--shape 1.7b` has 2 steps and 16 rows; `--shape toy` shows in a minute that all of it works.
`--init absmax` rounds without calibration, for the phases after it alone: their costs do not depend on the codes.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from qat_lora.models.load import make_qwen3, make_tokenizer

USED_TOKENS = 4096
TEXT_BYTES = 3_000_000  # that the tokenizer is made from
ALLOWED = 1.8
GIB = 2**30
SAMPLE_S, NOTE_S = 0.05, 60.0
Note = Callable[[dict[str, Any]], None]
QAT_LORA = [sys.executable, "-c", "from qat_lora.cli import main; main()"]


class Shape(NamedTuple):
    """A model, and how much of each phase is run."""

    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    rows: int  # of the cache, and of the evaluation
    calibration_rows: int
    steps: int
    batch: int
    length: int = 1024

    @property
    def weights(self) -> int:
        """Weights of all linear layers in decoder blocks."""
        attention = (2 * self.heads + 2 * self.kv_heads) * self.head_dim * self.hidden
        return self.layers * (attention + 3 * self.hidden * self.mlp)

    def forward(self, tokens: int, passes: int = 1, logits: bool = True) -> int:
        """Return the operations of so many passes over tokens: products of all layers, attention, and the head."""
        scores = 2 * self.layers * self.length * self.heads * self.head_dim  # q k and p v of half of all pairs
        return passes * tokens * (2 * self.weights + scores + 2 * self.vocab * self.hidden * logits)


SHAPES = {
    "toy": Shape(5000, 128, 2, 2, 1, 64, 256, 16, 8, 4, 2, 128),
    "0.6b": Shape(151_936, 1024, 28, 16, 8, 128, 3072, 80, 16, 20, 4),
    "1.7b": Shape(151_936, 2048, 28, 16, 8, 128, 6144, 16, 4, 2, 4),
}


def phases(shape: Shape, text: str, work: Path, init: str) -> dict[str, tuple[list[str], str]]:
    """Return the commands in order, by phase, each with its folder."""
    size = ["--length", str(shape.length)]
    cache = ["cache", "build", "--teacher", f"{work}/teacher", "--dataset", text, *size, "--teacher-batch-size", "2"]
    cache += ["--num-rows", str(shape.rows), "--eval-rows", "2", "--shard-rows", "8", "--top-k", "64"]
    quantize = ["quantize", "--model", f"{work}/teacher", "--preset", "q2_0", "--kd-cache-dir", f"{work}/cache"]
    quantize += ["--calibration-rows", str(shape.calibration_rows), "--init", init]
    quantize += ["--start-rank", "0"] if init == "absmax" else []  # which has no text to fit it to
    recover = ["recover", "--checkpoint", f"{work}/student", "--kd-cache-dir", f"{work}/cache", "--train-scales"]
    recover += ["--max-steps", str(shape.steps), "--batch-size", str(shape.batch), "--lr", "3e-4"]
    recover += ["--save-steps", str(max(1, shape.steps // 4))]
    recover += ["--gradient-checkpointing"]  # without it the activations of 4 x 1,024 tokens take 20 GB
    score = ["eval", "--teacher", f"{work}/teacher", "--students", f"{work}/run", "--dataset", text, *size]
    score += ["--eval-rows", str(max(2, shape.rows // 10)), "--batch-size", "2"]
    export = ["export", "--student", f"{work}/run", "--form", "gguf"]
    reload = ["generate", "--model", f"{work}/run", "--prompt", "def", "--max-new-tokens", "8"]
    found = {"cache": cache, "quantize": quantize, "recover": recover, "eval": score, "export": export}
    folders = {"cache": "cache", "quantize": "student", "recover": "run", "eval": "scores", "export": "served"}
    return {
        **{name: ([*order, "--out", f"{work}/{folders[name]}"], folders[name]) for name, order in found.items()},
        "reload": (reload, "run"),
    }


def operations(shape: Shape, solvers: int) -> dict[str, int]:
    """Return what each phase computes, from shapes; `solvers` is what `quantize --dry-run` counts."""
    cached, calibrated = (shape.rows + 2) * shape.length, shape.calibration_rows * shape.length
    trained, scored = shape.steps * shape.batch * shape.length, max(2, shape.rows // 10) * shape.length
    exported = min(4096, shape.rows * shape.length)  # 16 rows of 256 tokens, or as many of the cache's
    kv, wide = shape.kv_heads * shape.head_dim, shape.heads * shape.head_dim
    # Fisher: forward, once more in the backward pass, gradients of activations; logits and their gradients.
    fisher = shape.forward(calibrated, 3, logits=False) + 2 * calibrated * (
        2 * shape.vocab * shape.hidden + shape.layers * (wide**2 + 2 * kv**2 + 2 * shape.hidden**2 + 2 * shape.mlp**2)
    )
    # Calibration in order: two streams through every block, and up to each of its stages (0.27, 0.4 and 0.8 of the
    # weights of Qwen3-0.6B's block); two moments a layer.
    streams = shape.forward(calibrated, 5, logits=False)
    moments = 4 * calibrated * shape.layers * (5 * shape.hidden**2 + wide**2 + shape.mlp**2)
    return {
        "cache": shape.forward(cached),
        "quantize": fisher + streams + moments + solvers,
        # Layers: forward, once more in the backward pass, gradients of activations, and those of the weights, which are
        # frozen but whose scales' gradients are sums of them. The frozen head: logits once, gradients of activations.
        "recover": shape.forward(trained, 4, logits=False) + 4 * trained * shape.vocab * shape.hidden,
        "eval": shape.forward(scored, 2),
        # The student, whose states also weigh the head's errors, and what the container holds.
        "export": shape.forward(exported, 2),
    }


def rate() -> float:
    """Return the operations of a processor second of plain products on one thread, the median of nine."""
    torch.set_num_threads(1)
    a, found = torch.randn(2048, 2048), []
    for _ in range(9):
        begun = time.process_time()
        a @ a
        found.append(2 * 2048**3 / (time.process_time() - begun))
    return sorted(found)[4]


def run(
    order: Sequence[str],
    log: Path,
    kill_after_s: float | None = None,
    note: Callable[[dict[str, Any]], None] | None = None,
) -> dict[str, Any]:
    """Run a command; return its times and peaks, and `note` them once a minute.

    `kill_after_s`: it is killed then, if it still runs.
    """
    begun = noted = time.perf_counter()
    peaks = {"RssAnon": 0, "RssFile": 0}

    def measured(cpu_s: float) -> dict[str, Any]:
        return {
            "seconds": round(time.perf_counter() - begun, 1),
            "cpu_s": round(cpu_s, 1),
            "own_gib": round(peaks["RssAnon"] / GIB, 3),
            "file_gib": round(peaks["RssFile"] / GIB, 3),
        }

    with log.open("ab") as stream:
        process = subprocess.Popen([*QAT_LORA, *order], stdout=stream, stderr=stream, start_new_session=True)
    while True:
        pid, status, usage = os.wait4(process.pid, os.WNOHANG)
        seconds = time.perf_counter() - begun
        if pid:
            break
        for line in Path(f"/proc/{process.pid}/status").read_text().splitlines():
            name = line.partition(":")[0]
            if name in peaks:
                peaks[name] = max(peaks[name], int(line.split()[1]) * 1024)
        if kill_after_s is not None and seconds > kill_after_s:
            os.killpg(process.pid, signal.SIGKILL)
        if note and time.perf_counter() - noted > NOTE_S:
            noted = time.perf_counter()
            ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[11:13]
            note(measured(sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")))
        time.sleep(SAMPLE_S)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode and kill_after_s is None:
        raise SystemExit(f"{' '.join(order)}: exit code {process.returncode}, see {log}")
    return measured(usage.ru_utime + usage.ru_stime)


def joined(earlier: dict[str, Any], later: dict[str, Any]) -> dict[str, Any]:
    """Return the times of all runs of a phase that was cut off together, and their peaks; {} for no run before."""
    if not earlier:
        return later
    times = {name: round(earlier[name] + later[name], 1) for name in ("seconds", "cpu_s")}
    peaks = {name: max(earlier[name], later[name]) for name in ("own_gib", "file_gib")}
    return {**times, **peaks, "runs": earlier.get("runs", 1) + 1}


def contents(folder: Path) -> dict[str, str]:
    """Return the checksums of what a phase makes, by file: tensors and rows, no notes of times and places."""
    kinds = {".safetensors", ".npy", ".bin", ".gguf"}
    found = {}
    for file in sorted(folder.rglob("*")):
        if file.suffix in kinds and "checkpoints" not in file.parts:
            with file.open("rb") as stream:
                found[str(file.relative_to(folder))] = hashlib.file_digest(stream, "sha256").hexdigest()
    return found


def killed(order: list[str], folder: str, whole: dict[str, Any], work: Path) -> dict[str, Any]:
    """Run a phase in another folder, kill it half way, start it again; return how that went."""
    out = work / f"{folder}-killed"
    again = [*order[: order.index("--out")], "--out", str(out)]
    run(again, work / "log.txt", whole["seconds"] / 2)
    resumed = run(again, work / "log.txt")
    same = contents(out) == contents(work / folder)
    shutil.rmtree(out)
    return {"after_s": round(whole["seconds"] / 2, 1), "resumed_s": resumed["seconds"], "same": same}


def make_teacher(shape: Shape, text: str, folder: Path) -> int:
    """Write a random bfloat16 model and its tokenizer; return the bytes of its weights."""
    if not (folder / "config.json").is_file():
        folder.mkdir(parents=True, exist_ok=True)
        files = sorted(Path(text).rglob("*.py")) if Path(text).is_dir() else [Path(text)]
        read = "".join(file.read_text(encoding="utf-8", errors="ignore") for file in files[:400])[:TEXT_BYTES]
        make_tokenizer([read], min(USED_TOKENS, shape.vocab - 100), folder)
        torch.manual_seed(0)
        sizes = {name: getattr(shape, name) for name in ("hidden", "layers", "heads", "kv_heads", "head_dim", "mlp")}
        model = make_qwen3(folder, shape.vocab, **sizes, max_position_embeddings=shape.length)
        model.module.to(torch.bfloat16).save_pretrained(folder)
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def planned(order: list[str]) -> dict[str, Any]:
    """Return what `--dry-run` says of a command."""
    command = [*QAT_LORA, *order, "--dry-run", "--json"]
    lines = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return dict(json.loads(lines[lines.index("{") :]))


def planned_seconds(plan: dict[str, Any]) -> float:
    """Return the time that a plan of any command says for this CPU: a cache's is measured, another's is by device."""
    if "solvers" in plan:
        return float(plan["solvers"]["seconds"]["this CPU"])
    return 3600 * float(plan["devices"]["this CPU"]["hours"] if "devices" in plan else plan["hours"])


def main() -> None:
    """Run the phases that are missing, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default="toy")
    parser.add_argument("--text", required=True, help="folder of Python files to read")
    parser.add_argument("--work", type=Path, required=True, help="folder for the model and all results; 10 GB at 0.6 B")
    parser.add_argument("--init", default="descent", help="of the codes: as in `quantize`")
    parser.add_argument("--steps", type=int, help="training steps; default: the shape's")
    parser.add_argument("--rows", type=int, help="rows of the cache; default: the shape's")
    parser.add_argument("--kill", nargs="*", help="run these phases, or all, once more, killed half way")
    parser.add_argument("--machine", default=platform.machine(), help="named in the result")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the result")
    arguments = parser.parse_args()
    shape, work = SHAPES[arguments.shape], arguments.work.resolve()
    shape = shape._replace(steps=arguments.steps or shape.steps, rows=arguments.rows or shape.rows)
    work.mkdir(parents=True, exist_ok=True)
    checkpoint = make_teacher(shape, arguments.text, work / "teacher")
    result: dict[str, Any] = {
        "machine": arguments.machine,
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
        "shape": {"name": arguments.shape, **shape._asdict()},
        "init": arguments.init,
        "checkpoint_gib": round(checkpoint / GIB, 3),
        "phases": {},
        "cut_off": {},  # times and peaks so far of a phase that has not ended
    }
    if arguments.out.is_file():
        earlier = json.loads(arguments.out.read_text(encoding="utf-8"))
        if all(earlier[name] == result[name] for name in ("versions", "shape", "init")):
            result["phases"], result["cut_off"] = earlier["phases"], earlier.get("cut_off", {})
    per_s, commands = rate(), phases(shape, arguments.text, work, arguments.init)
    result |= {"date": time.strftime("%Y-%m-%d"), "gflops_a_thread": round(per_s / 1e9, 1)}
    for name, (order, folder) in commands.items():
        found = result["phases"].get(name)
        if found is None:
            plan = planned(order) if "--out" in order and (name, arguments.init) != ("quantize", "absmax") else {}
            if "solvers" in plan:
                result["solver_operations"] = plan["solvers"]["operations"]
            before = result["cut_off"].get(name, {})

            def note(now: dict[str, Any], name: str = name, before: dict[str, Any] = before) -> None:
                result["cut_off"][name] = joined(before, now)
                arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

            found = joined(before, run(order, work / "log.txt", note=note))
            result["cut_off"].pop(name, None)
            if plan:
                found["planned_s"] = round(planned_seconds(plan), 1)
            found["bytes"] = sum(file.stat().st_size for file in (work / folder).rglob("*") if file.is_file())
            tokens = {"cache": shape.rows + 2, "recover": shape.steps * shape.batch, "eval": max(2, shape.rows // 10)}
            if name in tokens:
                found["tokens_per_s"] = round(tokens[name] * shape.length / found["seconds"], 1)
            counted = operations(shape, result.get("solver_operations", 0)).get(name)
            if counted and (name != "quantize" or arguments.init != "absmax"):
                ratio = found["cpu_s"] / (counted / per_s)
                found |= {"operations": counted, "ratio": round(ratio, 2), "holds": ratio <= ALLOWED}
            result["phases"][name] = found
        to_kill = arguments.kill is not None and name in (arguments.kill or commands)
        if to_kill and "--out" in order and "killed" not in found:
            found["killed"] = killed(order, folder, found, work)
        print(name, json.dumps(found), flush=True)
        result["peak_own_gib"] = max(phase["own_gib"] for phase in result["phases"].values())
        ratios = [phase["ratio"] for phase in result["phases"].values() if "ratio" in phase]
        result["worst_ratio"] = max(ratios, default=None)
        kills = {name: phase["killed"]["same"] for name, phase in result["phases"].items() if "killed" in phase}
        result.update(kills=len(kills), kills_with_other_bytes=sum(not same for same in kills.values()))
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
