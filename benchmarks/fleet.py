"""Builds one KD cache by a simulated fleet: kills, stragglers, duplicate starts; and forecasts its end.

Claim: whatever happens to the builders, the finished cache has the bytes of the undisturbed build, each builder has
read its own files alone, and from a quarter of the shards on `cache info` says within 10 % when the fleet will be done
(the last to end is a slow builder, and what kills it will meet is not known: one fleet in some is forecast worse).

The clock is simulated; text, packing, `CacheWriter` and `cache.tools.progress` are the package's. Builders share an
object store in memory that, like the real ones, shows an object whole or not at all and lets one of several create-only
puts succeed. A kill comes between two puts, or before or after the effect of one. A second start runs beside the first,
and goes on in the middle of the other's puts. Times are invented: a shard takes 5 minutes (builders differ by 10 %,
three in a hundred are 1.5 to 3 times slower, shards differ by 5 %), a start 1 to 3 minutes, a new machine 1 to 10.

The control deals out every n-th document and overwrites what is there. Second starts compute other last bits in its
comparison, as another machine does, so that a shard under another's sidecar shows.

    python benchmarks/fleet.py --builders 1000 --machine "one core of ..." --out benchmarks/results/fleet.json
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import heapq
import itertools
import json
import platform
import random
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import torch
from fsspec.spec import AbstractFileSystem

from qat_lora.cache.build.builder import ForwardSettings, run_batch
from qat_lora.cache.build.writer import CacheWriter, Partition
from qat_lora.cache.format.records import Fingerprint
from qat_lora.cache.storage.store import read_manifest, verify_cache
from qat_lora.cache.tools.progress import progress
from qat_lora.data import sources
from qat_lora.data.packing import Document, Encoder, OpenDocuments, PackedRow, Tokens, pack_rows, share
from qat_lora.data.sources import TextConfig, open_documents, own_documents, units
from qat_lora.errors import OvertakenError, QatLoraError

LENGTH, TOP_K, VOCAB, SHARD_ROWS, ROWS, FILES = 16, 2, 128, 4, 94, 9
"""Of a row, a position, the text's bytes, a shard, a builder's training rows, its files."""
BEGUN, SHARD_S, KILLS, DUPLICATES = 1.8e9, 300.0, 0.55, 0.1
"""The clock at the start; of a shard; kills and second starts that a builder meets in an undisturbed build's time."""
PUT_S = 120.0
"""What a put may last: a second start that would go on within it does so in its middle."""
ASKED_AT = [percent / 100 for percent in range(25, 100, 5)]


class Killed(BaseException):
    """A builder's process is gone."""


class Store(AbstractFileSystem):
    """Objects in memory, with the simulated time of their puts."""

    protocol = "fleet"
    cachable = False
    objects: dict[str, tuple[bytes, float]] = {}
    at_put: Callable[[str, bool], None]
    clock: float = BEGUN
    overwrites = False
    sidecars = 0

    def pipe_file(self, path, value, mode="overwrite", **kwargs):
        """Put an object; with mode `create` only where there is none."""
        path = self._strip_protocol(path)
        Store.at_put(path, False)
        if mode == "create" and path in self.objects and not self.overwrites:
            raise FileExistsError(path)
        Store.sidecars += path.startswith("cache/s-") and path.endswith(".json") and path not in self.objects
        self.objects[path] = bytes(value), Store.clock
        Store.at_put(path, True)

    def cat_file(self, path, start=None, end=None, **kwargs):
        """Return an object or a part of it."""
        return self._get(path)[0][start:end]

    def info(self, path, **kwargs):
        """Return what the store says of an object."""
        data, when = self._get(path)
        return {"name": self._strip_protocol(path), "type": "file", "size": len(data), "mtime": when}

    def ls(self, path, detail=True, **kwargs):
        """List the objects; there is one folder."""
        return [self.info(name) for name in self.objects] if detail else list(self.objects)

    def rm_file(self, path):
        """Delete an object."""
        self._get(path)
        del self.objects[self._strip_protocol(path)]

    def _get(self, path):
        path = self._strip_protocol(path)
        if path not in self.objects:
            raise FileNotFoundError(path)
        return self.objects[path]


fsspec.register_implementation(Store.protocol, Store, clobber=True)
PLACE = "fleet://cache"


class Teacher:
    """Random embeddings and a random linear head; `bits` scales it by a little, as another machine would."""

    vocab_size = VOCAB

    def __init__(self, bits: float = 0.0) -> None:
        draw = np.random.default_rng(0)
        drawn = (draw.normal(size=(VOCAB, 8)).astype(np.float32) for _ in ("in", "out"))
        self.embed, self.weight = map(torch.from_numpy, drawn)
        self.weight = self.weight * (1 + bits)

    def hidden(self, input_ids_BL: torch.Tensor, document_ids_BL: torch.Tensor) -> torch.Tensor:
        """Return the embeddings of the tokens."""
        return self.embed[input_ids_BL.long()]

    def logits(self, hidden_NH: torch.Tensor) -> torch.Tensor:
        """Return logits."""
        return hidden_NH @ self.weight.T


@Encoder
def encode(document: Document) -> Iterator[Tokens]:
    """Make a token of every byte."""
    ids = np.frombuffer(str(document.text).encode("ascii"), np.uint8).astype(np.int32)
    return iter([(ids, np.ones(len(ids), np.uint8))])


def write_text(folder: Path, builders: int, draw: random.Random) -> None:
    """Write files of different sizes: together 9 % more rows than are asked for."""
    sizes = [draw.uniform(0.5, 1.5) for _ in range(builders * FILES)]
    for number, size in enumerate(sizes):
        words = "".join(draw.choices("abcdefgh \n", k=round(1.09 * builders * ROWS * LENGTH * size / sum(sizes))))
        (folder / f"{number:06d}.txt").write_text(words, encoding="ascii")


class Attempt:
    """One start of a builder."""

    def __init__(self, fleet: Fleet, builder: int, duplicate: bool = False) -> None:
        self.builder, self.steps, self.running = builder, fleet.steps(builder, duplicate), False
        self.end: str | None = None  # how it is killed at its next put
        self.alive, self.due = True, 0.0


class Fleet:
    """Builders on a clock; `disturbed` ones are killed and started twice."""

    def __init__(
        self, text: TextConfig, builders: int, seed: int, disturbed: bool, naive: bool = False, other_bits: bool = False
    ) -> None:
        self.builders, self.draw, self.count = builders, random.Random(seed), Counter[str]()
        self.disturbed, self.other_bits, self.faults = disturbed, other_bits, list[str]()
        self.read: dict[str, set[int]] = {}
        self.done: set[int] = set()
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.order, self.active, self.live = itertools.count(), list[Attempt](), dict[int, list[Attempt]]()
        self.teachers = Teacher(), Teacher(1e-3 if other_bits else 0.0)
        slow = (self.draw.uniform(1.5, 3.0) if self.draw.random() < 0.03 else 1.0 for _ in range(builders))
        self.paces = [SHARD_S * factor * self.draw.lognormvariate(0, 0.1) for factor in slow]
        dealt = units(text, builders)
        assert dealt is not None
        self.documents: list[OpenDocuments] = [
            share(functools.partial(open_documents, text), 0, i, builders)
            if naive
            else own_documents(text, dealt, 0, i, builders)
            for i in range(builders)
        ]
        held = {"teacher": "random", "teacher_sha256": "0" * 64, "tokenizer_sha256": "0" * 64, "packing": "bytes"}
        self.total = builders * ROWS
        self.held = Fingerprint(
            **held,
            chat_template_sha256=None,
            dataset=f"text first {self.total} rows",
            vocab_size=VOCAB,
            length=LENGTH,
            top_k=TOP_K,
        )
        self.forecasts: dict[str, float] = {}
        self.seconds = 0.0  # to the manifest
        Store.objects, Store.clock, Store.overwrites, Store.at_put, Store.sidecars = {}, BEGUN, naive, self.at_put, 0

    def steps(self, builder: int, duplicate: bool) -> Iterator[float]:
        """Do a builder's work as `cache build` does; yield the seconds that pass before it goes on."""
        part, draw, teacher = Partition(builder, self.builders), self.draw, self.teachers[duplicate]
        settings = ForwardSettings(SHARD_ROWS)
        while True:
            yield draw.uniform(60, 180)
            try:
                with CacheWriter(PLACE, self.held, SHARD_ROWS, partition=part) as writer:
                    state = writer.resume_state()
                    if state.finished:
                        return
                    left = part.of(self.total) - state.rows
                    for batch in self.batches(builder, state.cursor, left):
                        yield self.paces[builder] * draw.lognormvariate(0, 0.05) * len(batch) / SHARD_ROWS
                        arrays = run_batch(teacher, batch, self.held, settings)
                        arrays = {name: array[: len(batch)] for name, array in arrays.items()}
                        writer.append(arrays, [row.cursor for row in batch])
                return
            except OvertakenError:
                self.count["overtaken"] += 1

    def batches(self, builder: int, cursor: Any, left: int) -> Iterator[list[PackedRow]]:
        """Yield the rows of a shard at a time, noting which files are read."""
        with noted(self.read, builder):
            documents = self.documents[builder](cursor["document"] if cursor else 0)
        rows = itertools.islice(pack_rows(documents, encode, LENGTH, cursor), left)
        while True:
            with noted(self.read, builder):
                batch = list(itertools.islice(rows, SHARD_ROWS))
            if not batch:
                return
            yield batch

    def start(self, builder: int, duplicate: bool = False) -> None:
        """Start a builder, and decide whether this start is killed or another comes beside it."""
        if builder in self.done:
            return
        attempt = Attempt(self, builder, duplicate)
        self.live.setdefault(builder, []).append(attempt)
        self.wait(attempt, 0)
        if self.disturbed:
            whole = ROWS / SHARD_ROWS * SHARD_S
            if (kill := self.draw.expovariate(KILLS / whole)) < 4 * whole:
                self.at(kill, lambda: self.kill(attempt))
            if not duplicate and (second := self.draw.expovariate(DUPLICATES / whole)) < whole:
                self.at(second, lambda: self.second(attempt))

    def wait(self, attempt: Attempt, seconds: float) -> None:
        """Let a start go on later, unless it has gone on by then."""
        due = attempt.due = Store.clock + seconds
        self.at(seconds, lambda: self.step(attempt) if attempt.due == due else None)

    def second(self, attempt: Attempt) -> None:
        """Start a builder again beside a start that lives."""
        if attempt.alive:
            self.count["duplicate_starts"] += 1
            self.start(attempt.builder, duplicate=True)

    def at(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something later."""
        heapq.heappush(self.queue, (Store.clock + seconds, next(self.order), action))

    def kill(self, attempt: Attempt) -> None:
        """Kill a start now, or at its next put: before its effect or after it."""
        if attempt.alive:
            attempt.end = self.draw.choice(["now", "before", "after"])
            if attempt.end == "now":
                attempt.steps.close()  # type: ignore[attr-defined]
                self.lost(attempt)

    def lost(self, attempt: Attempt) -> None:
        """Note a killed start; the scheduler starts the builder again."""
        attempt.alive = False
        self.count["kills"] += 1
        self.count[f"killed_{attempt.end}"] += 1
        self.live[attempt.builder].remove(attempt)
        if not self.live[attempt.builder]:
            self.at(self.draw.uniform(60, 600), lambda: self.start(attempt.builder))

    def step(self, attempt: Attempt) -> None:
        """Let a start go on to its next wait."""
        if not attempt.alive or attempt.running:
            return
        attempt.running = True
        self.active.append(attempt)
        try:
            self.wait(attempt, next(attempt.steps))
        except StopIteration:
            attempt.alive = False
            self.live[attempt.builder].remove(attempt)
            self.done.add(attempt.builder)
        except Killed:
            self.lost(attempt)
        except QatLoraError as error:  # the scheduler tries again
            self.faults.append(str(error))
            attempt.end = "fault"
            self.lost(attempt)
        finally:
            self.active.pop()
            attempt.running = False

    def at_put(self, path: str, done: bool) -> None:
        """Kill whoever puts an object, where that was decided; else let a second start go on in the middle."""
        attempt = self.active[-1]
        if attempt.end == ("after" if done else "before"):
            raise Killed
        others = [other for other in self.live[attempt.builder] if not other.running]
        if others and others[0].due < Store.clock + PUT_S:
            self.count["interleaved"] += 1
            self.step(others[0])

    def run(self) -> None:
        """Build the cache; forecast it on the way."""
        for builder in range(self.builders):
            self.at(self.draw.uniform(0, 60), functools.partial(self.start, builder))
        shards, asked = self.builders * -(-ROWS // SHARD_ROWS), list(ASKED_AT)
        while self.queue and len(self.faults) <= 10 * self.builders:
            Store.clock, _, action = heapq.heappop(self.queue)
            action()
            if len(self.done) == self.builders:  # a start after that has nothing to do
                break
            if asked and Store.sidecars >= asked[0] * shards:
                self.forecasts[f"{asked.pop(0):.0%}"] = (progress(PLACE, now=Store.clock) or {})["finish"] - BEGUN
        self.seconds = Store.objects.get("cache/manifest.json", (b"", 0.0))[1] - BEGUN


@contextlib.contextmanager
def noted(read: dict[str, set[int]], builder: int) -> Iterator[None]:
    """Note which builder opens which file of the text."""
    load = sources._file_loads

    def opened(config: TextConfig, name: str, *arguments: Any) -> Any:
        read.setdefault(name, set()).add(builder)
        return load(config, name, *arguments)

    sources._file_loads = opened
    try:
        yield
    finally:
        sources._file_loads = load


def check(fleet: Fleet, whole: dict[str, bytes] | None) -> list[str]:
    """Return what is wrong with a finished cache: faults on the way, other bytes, damage, files that several read."""
    found = list(fleet.faults)
    try:
        if read_manifest(PLACE).rows("train") != fleet.total:
            found.append("rows are missing")
        verify_cache(PLACE)
    except QatLoraError as error:
        found.append(str(error))
    now = {name: data for name, (data, _) in Store.objects.items()}
    if whole is not None:
        found += [f"{name}: other bytes" for name in now.keys() | whole.keys() if now.get(name) != whole.get(name)]
    found += [f"{name}: read by {len(who)} builders" for name, who in fleet.read.items() if len(who) > 1]
    return found


def campaign(folder: Path, builders: int, control: int, seed: int) -> dict[str, Any]:
    """Build undisturbed and disturbed, then a smaller fleet with other last bits, and its control."""
    write_text(folder, builders, random.Random(seed))
    text = TextConfig(dataset=str(folder), format="text")
    calm = Fleet(text, builders, seed, disturbed=False)
    calm.run()
    faults, whole = check(calm, None), {name: data for name, (data, _) in Store.objects.items()}
    fleet = Fleet(text, builders, seed, disturbed=True)
    fleet.run()
    faults += check(fleet, whole)
    errors = {at: abs(finish / fleet.seconds - 1) for at, finish in fleet.forecasts.items()}
    result = {
        "builders": builders,
        "shards": len(read_manifest(PLACE).train),
        **dict(sorted(fleet.count.items())),
        "stragglers": sum(pace > 1.4 * SHARD_S for pace in fleet.paces),
        "faults": len(faults),
        "first_fault": faults[:1],
        "hours_undisturbed": round(calm.seconds / 3600, 3),
        "hours": round(fleet.seconds / 3600, 3),
        "forecast_error": {at: round(error, 4) for at, error in errors.items()},
        "largest_forecast_error": round(max(errors.values()), 4),
    }
    small = folder / "control"
    small.mkdir()
    write_text(small, control, random.Random(seed))
    for name, naive in (("other_bits_faults", False), ("naive_faults", True)):
        other = Fleet(TextConfig(dataset=str(small), format="text"), control, seed, True, naive, other_bits=True)
        other.run()
        found = check(other, None)
        result[name] = len(found)
        result[f"{name}_of_upload"] = sum("read by" not in fault for fault in found)
    return result


def main() -> None:
    """Run the campaign in a temporary folder, print and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default=platform.machine(), help="named in the result")
    parser.add_argument("--builders", type=int, default=1000)
    parser.add_argument("--control", type=int, default=20, help="builders of the control, which read everything")
    parser.add_argument("--seeds", default="0,1,2", help="a fleet for each")
    parser.add_argument("--folder", help="where the temporary folder is made")
    parser.add_argument("--out", help="JSON file for the result")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    fleets: dict[str, dict[str, Any]] = {}
    for seed in arguments.seeds.split(","):
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            fleets[seed] = campaign(Path(folder), arguments.builders, arguments.control, int(seed))
    errors = [error for fleet in fleets.values() for error in fleet["forecast_error"].values()]
    result = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": arguments.machine,
        "versions": f"Python {platform.python_version()}, torch {torch.__version__}",
        **{name: sum(fleet[name] for fleet in fleets.values()) for name in ("faults", "kills", "naive_faults")},
        "forecasts": len(errors),
        "forecasts_within_10_percent": sum(error <= 0.1 for error in errors),
        "median_forecast_error": statistics.median(errors),
        "largest_forecast_error": max(errors),
        "by_seed": fleets,
    }
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.out:
        Path(arguments.out).write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
