"""A fleet of simulated builders in one process: the real writer and store, objects in memory, a simulated clock.

Builders are killed between and inside of puts, are slow, and are started twice; a second start may run between any two
puts of the first. Afterwards the cache must verify, hold every document once, and equal that of a fleet that nothing
happened to. Along the way the finish is forecast from the objects alone, as `qat-lora cache info` does.

    python benchmarks/fleet.py --builders 1000 --out benchmarks/results/fleet.json
"""

import argparse
import contextlib
import functools
import heapq
import itertools
import json
import platform
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import fsspec
import numpy as np

from qat_lora.cache.build.writer import CacheWriter, Partition
from qat_lora.cache.format.records import Fingerprint
from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.cache.storage.store import verify_cache
from qat_lora.cache.tools.progress import progress
from qat_lora.data import sources
from qat_lora.data.packing import pack_rows
from qat_lora.data.sources import OwnText, TextConfig, own_text
from qat_lora.errors import CacheError, OvertakenError

LENGTH, SHARD_ROWS, VOCABULARY = 16, 4, 65_521
FILES_A_BUILDER, DOCUMENTS_A_FILE = 2, 25
SECONDS_A_SHARD = 600.0
SLOW_MACHINES, SLOWEST = 0.03, 2.0  # share of machines, and how many times the time of the others they may take
KILLED = 0.04  # chance of a kill in a shard's time
TWICE = 0.05  # share of builders that are started a second time
AGAIN_SECONDS = 300.0  # until a killed builder runs again
ASKED_AT = (0.25, 0.4, 0.5, 0.6, 0.75, 0.9)  # shares of the shards at which the finish is forecast


class Killed(BaseException):
    """The end of a process: nothing of it runs any more."""


class Store(fsspec.AbstractFileSystem):
    """Objects in memory, put only where there is none, with the simulated time of their put."""

    protocol, cachable, creates = "fleet", False, True
    objects: dict[str, dict[str, tuple[bytes, float]]] = {}
    clock, putting = 0.0, staticmethod(lambda name: None)

    def _at(self, path: str) -> tuple[dict[str, tuple[bytes, float]], str]:
        folder, _, name = self._strip_protocol(path).rpartition("/")
        return self.objects.setdefault(folder, {}), name

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **_: Any) -> None:
        """Put an object, where there is none if that is asked for."""
        Store.putting("before")
        held, name = self._at(path)
        if self.creates and mode == "create" and name in held:
            raise FileExistsError(path)
        held[name] = bytes(value), Store.clock
        Store.putting("after")

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        """Return an object's bytes."""
        return self._read(path)[0][start:end]

    def _read(self, path: str) -> tuple[bytes, float]:
        held, name = self._at(path)
        if name not in held:
            raise FileNotFoundError(path)
        return held[name]

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        """Return an object's size and time."""
        data, written = self._read(path)
        return {"name": path, "type": "file", "size": len(data), "mtime": written}

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """List a folder."""
        folder = self._strip_protocol(path).rstrip("/")
        names = [f"{folder}/{name}" for name in self.objects.get(folder, {})]
        return [self.info(name) for name in names] if detail else names

    def rm_file(self, path: str) -> None:
        """Delete an object."""
        held, name = self._at(path)
        held.pop(name, None)


class NaiveStore(Store):
    """One that overwrites: what a driver without create-only puts does."""

    protocol, creates = "naive-fleet", False


for _kind in (Store, NaiveStore):
    fsspec.register_implementation(_kind.protocol, _kind, clobber=True)


def tokens_of(number: int) -> np.ndarray:
    """Return the tokens of a document: its number, then a sequence that only it has."""
    return (number + 7919 * np.arange(6 + number % 17)) % VOCABULARY


def _encode(document: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    ids = tokens_of(int(document.text))
    return [(ids, np.ones(len(ids), np.uint8))]


class Fleet:
    """The builders of one cache, run to its end."""

    def __init__(self, url: str, text: TextConfig, builders: int, seed: int, *, faults: bool, machines: int) -> None:
        about = {"tokenizer_sha256": "1" * 64, "vocab_size": VOCABULARY, "teacher": "toy", "teacher_sha256": "2" * 64}
        about |= {"dataset": "numbers", "packing": f"files dealt out to {builders} builders", "length": LENGTH}
        self.fingerprint = Fingerprint(**about, chat_template_sha256=None, top_k=2)  # type: ignore[arg-type]
        self.url, self.text, self.builders, self.faults, self.machines = url, text, builders, faults, machines
        self.random = random.Random(seed)
        self.kills = self.overtaken = self.starts = 0
        self.wrong: list[str] = []
        self.asked: dict[float, tuple[float, float]] = {}  # share of the shards: time, forecast finish

    @functools.cache  # noqa: B019
    def own(self, builder: int) -> OwnText:
        """Return the files of a builder, as `cache build --builder` deals them out."""
        found = own_text(self.text, builder, self.builders)
        assert found is not None
        return found

    def start(self, builder: int) -> Iterator[float]:
        """Run one start of a builder; yields the seconds to its next step, after which it goes on."""
        self.starts += 1
        values = -np.arange(2.0) * (1 + self.random.randrange(self.machines) / 64)  # another machine, other last bits
        slow = self.random.uniform(1.2, SLOWEST) if self.faults and self.random.random() < SLOW_MACHINES else 1.0
        pace = SECONDS_A_SHARD * slow * self.random.uniform(0.97, 1.03)
        yield self.random.uniform(0, 60)
        while True:
            with contextlib.suppress(OvertakenError):
                partition = Partition(builder, self.builders)
                with CacheWriter(self.url, self.fingerprint, SHARD_ROWS, partition=partition) as writer:
                    done = writer.resume_state()
                    documents = self.own(builder).open(self.text, 0, (done.cursor or {"document": 0})["document"])
                    rows = pack_rows(documents, _encode, LENGTH, done.cursor)
                    while batch := list(itertools.islice(rows, SHARD_ROWS)):
                        yield pace * self.random.uniform(0.95, 1.05)
                        arrays = {name: np.stack([getattr(r, name) for r in batch]) for name in batch[0]._fields[:3]}
                        shape = (len(batch), LENGTH - 1)
                        arrays |= {
                            "head_ids": np.tile([1, 2], (*shape, 1)),
                            "head_logits": np.tile(values, (*shape, 1)),
                        }
                        arrays |= {"lse": np.ones(shape), "log_tail": np.full(shape, -1.5)}
                        writer.append(arrays, [row.cursor for row in batch])
                return
            self.overtaken += 1

    def run(self, shards: int | None = None) -> float:
        """Run all builders to the end of the cache; return its time. With `shards`, forecast it on the way."""
        queue: list[tuple[float, int, int, Iterator[float]]] = []
        order = itertools.count()
        alive: dict[int, list[Iterator[float]]] = {builder: [] for builder in range(self.builders)}
        running: list[Iterator[float]] = []

        def begin(at: float, builder: int) -> None:
            start = self.start(builder)
            alive[builder].append(start)
            heapq.heappush(queue, (at, next(order), builder, start))

        def step(at: float, builder: int, start: Iterator[float]) -> None:
            if start not in alive[builder]:
                return
            running.append(start)
            try:
                heapq.heappush(queue, (at + next(start), next(order), builder, start))
            except StopIteration:
                alive[builder].remove(start)
            except Killed:
                self.kills += 1
                alive[builder].remove(start)
                begin(at + AGAIN_SECONDS * self.random.uniform(0.5, 1.5), builder)
            except CacheError as error:
                self.wrong.append(str(error))
                alive[builder].remove(start)
            finally:
                running.pop()

        def putting(when: str) -> None:
            if not self.faults:
                return
            if self.random.random() < KILLED / 4:  # a shard is two puts, each with a before and an after
                raise Killed
            if len(running) == 1:
                builder = next(b for b in at_work if running[0] in alive[b])
                twins = [start for start in alive[builder] if start is not running[0]]
                if twins and self.random.random() < 0.3:
                    twin = twins[0]
                    entry = next(item for item in queue if item[3] is twin)
                    queue.remove(entry)
                    heapq.heapify(queue)
                    step(Store.clock, builder, twin)

        Store.clock, Store.putting, at_work = 0.0, staticmethod(putting), []
        for builder in range(self.builders):
            begin(0.0, builder)
            if self.faults and self.random.random() < TWICE:
                begin(self.random.uniform(0, 3 * SECONDS_A_SHARD), builder)
        folder = Store.objects.setdefault(self.url.split("://")[1], {})
        left = [share for share in ASKED_AT if shards]
        while queue:
            Store.clock, _, builder, start = heapq.heappop(queue)
            at_work[:] = [builder]
            step(Store.clock, builder, start)
            if left and shards and sum(1 for _ in folder) / 2 >= left[0] * shards:
                done = sum(name.endswith(".json") and name.startswith("s-") for name in folder)
                if done >= left[0] * shards:
                    self.asked[left.pop(0)] = Store.clock, progress(self.url, Store.clock)["finish"]
        Store.putting = staticmethod(lambda name: None)
        return folder.get("manifest.json", (b"", float("nan")))[1]

    def faults_found(self, documents: int) -> list[str]:
        """Return what is wrong with the cache: damage, documents that are missing or there twice."""
        try:
            verify_cache(self.url)
            dataset = KDCacheDataset(self.url)
        except CacheError as error:
            return [*self.wrong, str(error)]
        ids, at, found = dataset.rows(range(len(dataset)))["input_ids"], 0, list(self.wrong)
        streams: dict[int, list[np.ndarray]] = {builder: [] for builder in range(self.builders)}
        for entry in dataset.manifest.train:
            streams[int(entry.shard[2:]) % self.builders].append(ids[at : at + entry.rows].reshape(-1))
            at += entry.rows
        seen = []
        for builder, parts in streams.items():
            numbers = [int(str(document.text)) for document in self.own(builder).open(self.text, 0, 0)]
            wanted, held = np.concatenate([*map(tokens_of, numbers)]), np.concatenate(parts)
            if not (len(wanted) <= len(held) < len(wanted) + LENGTH and np.array_equal(held[: len(wanted)], wanted)):
                found.append(f"builder {builder} holds other text than its own")
            seen += numbers
        return found + (["documents are missing or there twice"] if sorted(seen) != list(range(documents)) else [])


def write_text(folder: Path, builders: int) -> int:
    """Write the files of a fleet's text; return how many documents they hold."""
    number = 0
    for file in range(FILES_A_BUILDER * builders):
        count = DOCUMENTS_A_FILE + file % 5
        lines = (json.dumps({"text": str(i), "pad": " " * (6 + i % 17)}) + "\n" for i in range(number, number + count))
        (folder / f"{file:06d}.jsonl").write_text("".join(lines))
        number += count
    return number


def study(builders: int, seed: int = 0, cases: Sequence[str] = ("alike", "mixed", "control")) -> dict[str, Any]:
    """Run the fleets; return counts, faults and the forecasts' errors.

    `alike` has machines that compute the same bits, `mixed` four kinds, `control` these and a store that overwrites.
    """
    with tempfile.TemporaryDirectory() as name:
        text = TextConfig(dataset=name, format="text")
        documents = write_text(Path(name), builders)
        result: dict[str, Any] = {"builders": builders, "documents": documents}
        listed = sources._chosen_files  # a thousand builders in one process need not list one folder a thousand times
        sources._chosen_files = functools.cache(listed)
        whole = Fleet("fleet://whole/c", text, builders, seed, faults=False, machines=1)
        undisturbed = whole.run()
        expected = {name: data for name, (data, _) in Store.objects["whole/c"].items()}
        shards = sum(name.startswith("s-") for name in expected) // 2
        result |= {"shards": shards, "undisturbed_s": undisturbed, "faults_undisturbed": whole.faults_found(documents)}
        for case in cases:
            scheme, machines = "naive-fleet" if case == "control" else "fleet", 1 if case == "alike" else 4
            fleet = Fleet(f"{scheme}://{case}/c", text, builders, seed + 1, faults=True, machines=machines)
            finish = fleet.run(shards if case != "control" else None)
            held = {name: data for name, (data, _) in Store.objects[f"{case}/c"].items()}
            wrong = fleet.faults_found(documents)
            if case == "alike" and held != expected:
                wrong.append("the bytes differ from those of the undisturbed fleet")
            errors = {str(at): (told - now) / (finish - now) - 1 for at, (now, told) in fleet.asked.items()}
            of_all = {str(at): told / finish - 1 for at, (_, told) in fleet.asked.items()}
            result[case] = {"kills": fleet.kills, "starts": fleet.starts, "overtaken": fleet.overtaken}
            result[case] |= {"finish_s": finish, "faults": len(wrong), "first_faults": wrong[:3]}
            if of_all:
                result[case] |= {"forecast_error": of_all, "forecast_error_of_the_rest": errors}
                result[case]["worst_forecast_error"] = max(map(abs, of_all.values()))
        Store.objects.clear()
        sources._chosen_files = listed
    return result


def main() -> None:
    """Run the study and print it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine", default=platform.machine(), help="named in the result")
    parser.add_argument("--builders", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="JSON file for the result")
    arguments = parser.parse_args()
    begun = time.perf_counter()
    result = {"date": time.strftime("%Y-%m-%d"), "machine": arguments.machine, "versions": {"numpy": np.__version__}}
    result |= study(arguments.builders, arguments.seed, ["alike"])
    result["a tenth"] = study(arguments.builders // 10, arguments.seed)
    result["seconds"] = round(time.perf_counter() - begun)
    print(json.dumps(result, indent=1))
    if arguments.out:
        Path(arguments.out).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
