"""Kills real builds of a KD cache at random moments of their writes, resumes them, and compares every byte.

Claim: whenever a build dies, the same command goes on to the cache that an uninterrupted build writes. A child process
runs `build_kd_cache` with a small teacher; it tells this program through a pipe when it begins and ends each file. The
program waits for the beginning of a file drawn at random, then for a random part of the time that this takes, and sends
SIGKILL. Each folder is killed one to three times in a row before it is finished and compared.

The control is a writer as one first writes it: final names at once, resuming by counting files. It leaves half a file
only within the microseconds between two of its writes, so random kills say nothing about it (fifteen found no fault).
It is killed at named steps instead: four kills, each of which must show as a fault, or the comparison is blind.

    python benchmarks/cache_kills.py --kills 200 --machine "two cores of ..." --out benchmarks/results/cache_kills.json
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import signal
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from qat_lora.cache.build.builder import ForwardSettings, build_kd_cache
from qat_lora.cache.build.writer import CacheWriter, Partition, ResumeState
from qat_lora.cache.format.codec import encode_rows
from qat_lora.cache.format.records import Fingerprint
from qat_lora.files import folders as commit
from qat_lora.files.folders import failpoint

LENGTH, TOP_K, VOCAB, SHARD_ROWS, TRAIN_ROWS, EVAL_ROWS = 32, 8, 512, 4, 22, 3
FILES = 2 * (-(-TRAIN_ROWS // SHARD_ROWS) + 1) + 1
"""Shards and sidecars of both splits, and the manifest."""
MOST_KILLS_IN_A_ROW = 3
CONTROL_STEPS = (3, 14, 25, 36)
"""Arrays written before the control is killed; it writes seven for each file."""


class Row(NamedTuple):
    """A row as the builder takes it."""

    input_ids: np.ndarray
    loss_mask: np.ndarray
    doc_starts: np.ndarray
    cursor: Any


class Teacher:
    """Random embeddings and a random linear head."""

    vocab_size = VOCAB

    def __init__(self) -> None:
        draw = np.random.default_rng(0)
        self.embed, self.weight = (
            torch.from_numpy(draw.normal(size=(VOCAB, 8)).astype(np.float32)) for _ in ("in", "out")
        )

    def hidden(self, input_ids_BL: torch.Tensor, document_ids_BL: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of the tokens."""
        return self.embed[input_ids_BL.long()]

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return hidden_NH @ self.weight.T


class NaiveWriter:
    """The control: a writer as one first writes it. Files get their final name at once, resuming counts them."""

    def __init__(self, out: Path, fingerprint: Fingerprint) -> None:
        self.out, self.fingerprint, self.partition, self.stopped = out, fingerprint, Partition(), False
        out.mkdir(exist_ok=True)
        self.pending: list[dict[str, np.ndarray]] = []

    def resume_state(self) -> ResumeState:
        """Return how many rows the files should hold."""
        counts = {split: len(list(self.out.glob(f"{split}-*"))) for split in ("train", "eval")}
        rows = min(TRAIN_ROWS, counts["train"] * SHARD_ROWS)
        return ResumeState(rows, {"row": rows}, EVAL_ROWS * min(1, counts["eval"]), (self.out / "meta.json").exists())

    def append(self, rows: Mapping[str, np.ndarray], cursors: Sequence[Any], split: str = "train") -> None:
        """Write a file for every shard of rows."""
        if split == "eval":
            self._write("eval-0", [encode_rows(rows, self.fingerprint)])
            return
        arrays = encode_rows(rows, self.fingerprint)
        for i in range(len(cursors)):
            self.pending.append({name: array[i : i + 1] for name, array in arrays.items()})
            if len(self.pending) == SHARD_ROWS or cursors[i]["row"] == TRAIN_ROWS:
                self._write(f"train-{(cursors[i]['row'] - 1) // SHARD_ROWS}", self.pending)
                self.pending = []

    def _write(self, name: str, rows: Sequence[Mapping[str, np.ndarray]]) -> None:
        with open(self.out / name, "wb") as file:
            for array in rows[0]:
                file.write(b"".join(row[array].tobytes() for row in rows))
                file.flush()
                failpoint("naive-array")

    def finish(self) -> None:
        """Write the notes that mark it as complete."""
        (self.out / "meta.json").write_text(str(TRAIN_ROWS))

    def waiting_for(self) -> tuple[int, ...]:
        """Return nobody: there is one builder."""
        return ()


HELD = Fingerprint(
    tokenizer_sha256="0" * 64,
    vocab_size=VOCAB,
    teacher="random",
    teacher_sha256="0" * 64,
    chat_template_sha256=None,
    dataset="random",
    packing="none",
    length=LENGTH,
    top_k=TOP_K,
    eval_rows=EVAL_ROWS,
)


def rows_from(first: int, end: int) -> Iterator[Row]:
    """Yield rows; each is a pure function of its number."""
    for number in range(first, end):
        draw = np.random.default_rng(number)
        ids = draw.integers(0, VOCAB, LENGTH).astype(np.int32)
        yield Row(ids, np.ones(LENGTH, np.uint8), draw.random(LENGTH) < 0.1, {"row": number + 1})


def build(writer: Any) -> None:
    """Run the builder from where the writer stands to the end."""
    done = writer.resume_state()
    if not done.finished:
        rows = rows_from(done.cursor["row"] if done.cursor else 0, TRAIN_ROWS)
        evaluation = list(rows_from(1000, 1000 + EVAL_ROWS))
        build_kd_cache(Teacher(), rows, writer, ForwardSettings(3), eval_rows=evaluation, quiet=True)


def ours(out: Path, report: int) -> None:
    """Build with the writer of the package, telling of each file that begins (B) and ends (E)."""
    write_new = commit.write_new

    def marked(*arguments: Any) -> tuple[int, str]:
        os.write(report, b"B%d\n" % time.monotonic_ns())
        result = write_new(*arguments)
        os.write(report, b"E%d\n" % time.monotonic_ns())
        return result

    commit.write_new = marked
    with CacheWriter(out, HELD, SHARD_ROWS) as writer:
        build(writer)


def naive(out: Path, report: int) -> None:
    """Build with the control."""
    build(NaiveWriter(out, HELD))


class End(NamedTuple):
    """How a child ended."""

    status: int
    """Exit status, or minus the signal."""
    marks: list[str]


def run(work: Callable[[Path, int], None], out: Path, kill_at: tuple[int, int] | None = None, step: int = 0) -> End:
    """Run a build in a child process.

    Args:
        work: `ours` or `naive`.
        out: the cache folder.
        kill_at: (n, nanoseconds): kill it so long after the beginning of its n-th file.
        step: kill it after so many arrays of the control; 0: not.
    """
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        with contextlib.suppress(BaseException):
            if step:
                os.environ["QAT_LORA_FAILPOINT"] = f"naive-array:{step}"
            work(out, writing)
            code = 0
        os._exit(code)
    os.close(writing)
    begun, marks = 0, []
    with open(reading, encoding="ascii") as pipe:
        for line in pipe:
            marks.append(line)
            begun += line.startswith("B")
            if kill_at and begun == kill_at[0]:
                while time.monotonic_ns() < int(line[1:]) + kill_at[1]:
                    pass
                os.kill(child, signal.SIGKILL)
                kill_at = None
    return End(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), marks)


def files(out: Path) -> dict[str, bytes]:
    """Return the files of a folder, locks left out."""
    return {path.name: path.read_bytes() for path in out.iterdir() if not path.name.startswith(".lock")}


def traces(out: Path) -> str:
    """Return what a kill left in a folder."""
    names = {path.name for path in out.iterdir()}
    if any(name.endswith(".tmp") for name in names):
        return "temporary_file"
    shards = {name.partition(".")[0] for name in names if name.endswith(".safetensors")}
    return "uncommitted_shard" if any(f"{shard}.json" not in names for shard in shards) else "nothing"


def campaign(folder: Path, kills: int, draw: random.Random) -> dict[str, Any]:
    """Kill, resume and compare until there were enough kills."""
    lengths: list[int] = []
    for number in range(3):
        end = run(ours, folder / f"whole-{number}")
        assert end.status == 0, "the uninterrupted build failed"
        times = [int(mark[1:]) for mark in end.marks]
        lengths += [b - a for a, b in zip(times[::2], times[1::2], strict=True)]
    whole = files(folder / "whole-0")
    assert len(whole) == FILES
    window_ns = int(statistics.median(lengths))
    count, left, folders = Counter[str](), Counter[str](), 0
    while count["kills"] < kills:
        folders += 1
        out = folder / f"killed-{folders}"
        for _ in range(min(draw.randint(1, MOST_KILLS_IN_A_ROW), kills - count["kills"])):
            end = run(ours, out, (draw.randint(1, FILES), draw.randrange(window_ns)))
            if end.status == -signal.SIGKILL:
                count["kills"] += 1
                count["mid_write"] += end.marks[-1].startswith("B")
                left[traces(out)] += 1
            elif end.status != 0:
                count["faults"] += 1
        count["faults"] += run(ours, out).status != 0 or files(out) != whole
    assert run(naive, folder / "naive").status == 0
    plain, found = files(folder / "naive"), 0
    for step in CONTROL_STEPS:
        out = folder / f"naive-{step}"
        assert run(naive, out, step=step).status == -signal.SIGKILL
        found += run(naive, out).status != 0 or files(out) != plain
    return {
        "kills": count["kills"],
        "mid_write": count["mid_write"],
        "left_behind": dict(sorted(left.items())),
        "folders": folders,
        "faults": count["faults"],
        "median_file_ms": round(window_ns / 1e6, 3),
        "control_kills": len(CONTROL_STEPS),
        "control_faults": found,
    }


def main() -> None:
    """Run the campaign in a temporary folder, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default=platform.machine(), help="named in the result")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0, help="of the draws; what they hit depends on the clock too")
    parser.add_argument("--folder", help="where the temporary folder is made")
    parser.add_argument("--out", help="JSON file for the result")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        result = {
            "date": time.strftime("%Y-%m-%d"),
            "machine": arguments.machine,
            "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
            "seed": arguments.seed,
            **campaign(Path(folder), arguments.kills, random.Random(arguments.seed)),
        }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out:
        Path(arguments.out).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
