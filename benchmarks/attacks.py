"""Attacks the commands as a careless user, a failing disk and a hostile file would, and counts what is lost or silent.

Claim: whatever is done to it, a command ends well or with one line and an exit code; no input and no file of others is
touched; nothing damaged passes; and the same command goes on once the cause is gone. Every try runs the command line
itself, in a process of its own; a fault is a traceback, a death by signal, a lost byte of others, a success on damaged
input, or a run that does not come to the result of an undisturbed one. The program reads only the command line and the
files, so it runs on older versions as well, where it must find faults: that is its control.

    git worktree add old ce51e38 && PYTHONPATH=old python benchmarks/attacks.py --out before.json
    python benchmarks/attacks.py --before before.json --out benchmarks/results/attacks.json
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import hashlib
import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file

from qat_lora.cli import main as command_line
from qat_lora.runtime.host.machine import made_with
from qat_lora.runtime.launch.select import select_runtime

select_runtime("cpu")  # before transformers is imported
from qat_lora.models.load import make_qwen3, make_tokenizer  # noqa: E402

WORDS = [
    "the",
    "a",
    "model",
    "layer",
    "weight",
    "token",
    "of",
    "to",
    "and",
    "in",
    "loss",
    "cache",
    "quant",
    "scale",
    "row",
]
SECONDS = 300


class Ended(NamedTuple):
    """How a command ended."""

    code: int
    """Exit code; below 0 the signal that killed it."""
    out: str
    err: str
    peak_mb: float

    @property
    def is_clean(self) -> bool:
        """Whether it ended well, or with one line that says why."""
        lines = [line for line in self.err.strip().splitlines() if line.startswith(("error:", "stopped"))]
        silent = self.code == 0 or len(lines) == 1
        return self.code >= 0 and silent and "Traceback" not in self.out + self.err


class Started:
    """A command that runs in a process of its own."""

    def __init__(self, *words: Any, before: Callable[[], Any] = lambda: None, **environment: str) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="try-"))
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            code = 99
            try:
                os.environ.update(environment)
                for number, name in ((1, "out"), (2, "err")):
                    os.dup2(os.open(self.folder / name, os.O_WRONLY | os.O_CREAT), number)
                encoding = environment.get("PYTHONIOENCODING", "utf-8")
                for stream in (sys.stdout, sys.stderr):
                    stream.reconfigure(encoding=encoding, errors="strict")
                before()
                command_line([str(word) for word in words])
                code = 0
            except SystemExit as error:
                code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
            except BaseException:
                import traceback

                traceback.print_exc()
                code = 70
            finally:
                with contextlib.suppress(Exception):
                    sys.stdout.flush()
                    sys.stderr.flush()
                os._exit(code)

    def wait(self, seconds: float = SECONDS) -> Ended:
        """Wait for its end; one that takes too long is killed, and counts as death by signal."""
        until, status, usage = time.monotonic() + seconds, 0, None
        while usage is None:
            pid, status, used = os.wait4(self.pid, os.WNOHANG)
            if pid:
                usage = used
            elif time.monotonic() > until:
                os.kill(self.pid, signal.SIGKILL)
                until = math.inf
            else:
                time.sleep(0.01)
        code = os.waitstatus_to_exitcode(status)
        texts = [(self.folder / name).read_text(errors="replace") for name in ("out", "err")]
        shutil.rmtree(self.folder)
        return Ended(code, *texts, usage.ru_maxrss / 1024)


def run(*words: Any, **settings: Any) -> Ended:
    """Run a command to its end."""
    return Started(*words, **settings).wait()


def bytes_of(*places: Path) -> dict[str, str]:
    """Return the sha256 of every file in folders, by path."""
    files = [f for place in places for f in ([place] if place.is_file() else sorted(place.rglob("*"))) if f.is_file()]
    return {str(file): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def flip(file: Path, draw: random.Random) -> bytes:
    """Flip one bit of a file in place; return what it held."""
    held = file.read_bytes()
    changed = bytearray(held)
    bit = draw.randrange(8 * len(changed))
    changed[bit // 8] ^= 1 << bit % 8
    file.write_bytes(changed)
    return held


class Toys(NamedTuple):
    """What is attacked: made once, copied for every try."""

    root: Path
    teacher: Path
    text: Path
    held_out: Path
    cache: Path
    student: Path
    run: Path

    def copy(self, name: str, to: str) -> Path:
        """Return a fresh copy of a toy."""
        target = self.root / "tries" / to
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(exist_ok=True)
        return Path(shutil.copytree(getattr(self, name), target))

    def fresh(self, name: str) -> Path:
        """Return a folder name that nothing has."""
        target = self.root / "tries" / name
        shutil.rmtree(target, ignore_errors=True)
        target.parent.mkdir(exist_ok=True)
        return target

    def cache_words(self, out: Path) -> list[Any]:
        """Return the words that build the cache."""
        return ["cache", "build", "--teacher", self.teacher, "--dataset", self.text, "--length", 32, "--top-k", 16,
                "--eval-rows", 8, "--num-rows", 96, "--shard-rows", 12, "--quiet", "--device", "cpu",
                "--out", out]  # fmt: skip

    def quantize_words(self, out: Path, model: Path | None = None) -> list[Any]:
        """Return the words that quantise the teacher."""
        return ["quantize", "--model", model or self.teacher, "--preset", "w2g64", "--kd-cache-dir", self.cache,
                "--calibration-rows", 16, "--start-rank", 4, "--quiet", "--device", "cpu", "--out", out]  # fmt: skip

    def recover_words(
        self, out: Path, student: Path | None = None, cache: Path | None = None, steps: int = 12
    ) -> list[Any]:
        """Return the words that recover the student."""
        return ["recover", "--checkpoint", student or self.student, "--kd-cache-dir", cache or self.cache,
                "--device", "cpu", "--recovery-r", 4, "--train-scales", "--batch-size", 4, "--max-steps", steps,
                "--log-steps", 1, "--eval-steps", 6, "--save-steps", 4, "--quiet", "--out", out]  # fmt: skip

    def eval_words(self, out: Path, student: Path | None = None, teacher: Path | None = None) -> list[Any]:
        """Return the words that score a student."""
        return ["eval", "--teacher", teacher or self.teacher, "--students", student or self.run,
                "--dataset", self.held_out, "--length", 32, "--eval-rows", 8, "--quiet", "--device", "cpu",
                "--out", out]  # fmt: skip

    def export_words(self, out: Path, student: Path | None = None, form: str = "merged") -> list[Any]:
        """Return the words that export a student."""
        return ["export", "--student", student or self.run, "--form", form, "--quiet", "--device", "cpu", "--out", out]


def _write_text(folder: Path, documents: int, seed: int) -> Path:
    folder.mkdir()
    draw = random.Random(seed)
    for i in range(documents):
        lines = [" ".join(draw.choices(WORDS, k=draw.randint(4, 12))) + "." for _ in range(draw.randint(5, 30))]
        (folder / f"{i:03d}.txt").write_text("\n".join(lines) + "\n")
    return folder


def make_toys(root: Path) -> Toys:
    """Make teacher, texts, cache, student and a complete recovery run."""
    text, held_out = _write_text(root / "text", 24, 0), _write_text(root / "held-out", 6, 1)
    toys = Toys(root, root / "teacher", text, held_out, root / "cache", root / "student", root / "run")
    child = os.fork()
    if child == 0:
        make_tokenizer((file.read_text() for file in sorted(text.iterdir())), 320, toys.teacher)
        torch.manual_seed(0)
        model = make_qwen3(
            toys.teacher, 320, hidden=64, layers=3, heads=2, kv_heads=1, mlp=96, max_position_embeddings=256
        )
        for name, parameter in model.module.named_parameters():
            if parameter.ndim == 2:
                parameter.data.mul_(4.0 if "embed" not in name else 2.0)
        model.module.save_pretrained(toys.teacher)
        os._exit(0)
    os.waitpid(child, 0)
    for words in (toys.cache_words(toys.cache), toys.quantize_words(toys.student), toys.recover_words(toys.run)):
        ended = run(*words)
        assert ended.code == 0, ended
    return toys


class Tally:
    """Counts tries and keeps what went wrong."""

    def __init__(self) -> None:
        self.tries = 0
        self.faults: list[str] = []

    def check(self, right: bool, what: str, ended: Ended | None = None) -> None:
        """Count one try."""
        self.tries += 1
        if not right:
            said = "" if ended is None else f" (exit {ended.code}: {ended.err.strip().splitlines()[-1:]})"
            self.faults.append((what + said)[:300])

    def refused(self, ended: Ended, what: str) -> None:
        """Count a try that must end with one line and without success."""
        self.check(ended.is_clean and ended.code > 0, what, ended)


# What a user can lose


def overwrite(toys: Toys, tally: Tally, scale: float) -> None:
    """--overwrite with inputs in the way and files of others in the folder."""
    untouched = (toys.teacher, toys.text, toys.cache, toys.student, toys.run)
    before = bytes_of(*untouched)

    def attack(what: str, words: list[Any], guarded: list[Path]) -> None:
        held = bytes_of(*guarded)
        ended = run(*words, "--overwrite")
        now = bytes_of(*guarded)
        lost = [path for path in held if now.get(path) != held[path]]
        tally.check(not lost and ended.is_clean, f"{what}: {len(lost)} of {len(held)} files lost", ended)

    own = toys.copy("student", "own")
    attack("recover --checkpoint S --out S", toys.recover_words(own, own), [own])
    inside = toys.copy("student", "inside")
    shutil.copytree(toys.teacher, inside / "teacher")
    attack("quantize --model S/teacher --out S", toys.quantize_words(inside, inside / "teacher"), [inside])
    for word, words in (("export", toys.export_words), ("eval", toys.eval_words)):
        own = toys.copy("run", "own")
        attack(f"{word} R --out R", words(own, own), [own])
    linked = toys.copy("student", "linked")
    link = toys.fresh("link")
    link.symlink_to(linked)
    attack("recover --checkpoint LINK --out S", toys.recover_words(linked, link), [linked])
    link.unlink()
    hard = toys.copy("student", "hard")
    model = toys.copy("teacher", "hard-model")
    (hard / "model.safetensors").unlink()
    os.link(model / "model.safetensors", hard / "model.safetensors")
    attack("quantize onto hard links of its model", toys.quantize_words(hard, model), [model])
    commands: list[tuple[str, Callable[[Path], list[Any]]]] = [
        ("quantize", toys.quantize_words),
        ("recover", toys.recover_words),
        ("eval", toys.eval_words),
        ("export", toys.export_words),
        ("cache build", toys.cache_words),
    ]
    for name, words in commands:
        out = toys.fresh("foreign")
        assert run(*words(out)).code == 0
        names = ["thesis/chapter.tex", "best/notes.txt", "checkpoints/mine.bin", ".hidden", "model-notes.safetensors"]
        for path in names:
            (out / path).parent.mkdir(parents=True, exist_ok=True)
            (out / path).write_text("mine")
        attack(f"{name} with files of others", words(out), [out / path for path in names])
    foreign = toys.fresh("foreign-cache")
    foreign.mkdir()
    for name in ("manifest.json", "teacher_head.safetensors", ".lock", "s-000001.safetensors", "s-000001.json"):
        shutil.rmtree(foreign)
        foreign.mkdir()
        (foreign / name).write_text('{"mine": 1}')
        (foreign / "thesis.txt").write_text("mine")
        attack(f"cache build over a foreign {name}", toys.cache_words(foreign), [foreign])
    tally.check(bytes_of(*untouched) == before, "inputs of all these commands changed")


def damaged_while_read(toys: Toys, tally: Tally, scale: float) -> None:
    """A cache that changes, shrinks or vanishes while it is trained from."""
    draw = random.Random(0)
    kinds = ["flip"] * max(3, round(6 * scale)) + ["truncate", "delete", "zero", "ids"]
    whole = toys.fresh("whole")
    assert run(*toys.recover_words(whole, steps=60)).code == 0

    def result(out: Path) -> list[str]:
        return [sha256 for path, sha256 in bytes_of(out / "last").items() if path.endswith("model.safetensors")]

    expected = result(whole)
    for kind in kinds:
        cache, out = toys.copy("cache", "cache"), toys.fresh("damaged")
        begun = Started(*toys.recover_words(out, cache=cache, steps=60))
        log = out / "metrics.jsonl"
        until = time.monotonic() + 60
        while time.monotonic() < until and not (log.exists() and log.read_bytes().count(b"\n") >= 5):
            time.sleep(0.005)
        shards = sorted(cache.glob("s-*.safetensors"))
        held = {shard: shard.read_bytes() for shard in shards}
        for shard in shards:
            size = shard.stat().st_size
            if kind == "flip":
                with shard.open("r+b") as file:  # in place: what has it mapped sees it
                    at = draw.randrange(size // 2, size)
                    file.seek(at)
                    byte = file.read(1)[0] ^ 1 << draw.randrange(8)
                    file.seek(at)
                    file.write(bytes([byte]))
            elif kind == "truncate":
                os.truncate(shard, size // 3)
            elif kind == "delete":
                os.truncate(shard, 0)
                shard.unlink()
            else:
                with shard.open("r+b") as file:
                    file.seek(size // 4)
                    file.write((b"\0" if kind == "zero" else b"\xff") * (size // 2))
        ended = begun.wait()
        named = ended.is_clean and (ended.code == 0 or "s-0" in ended.err)
        if ended.code == 0:  # then no damaged row was read again
            named = result(out) == expected
        tally.check(named, f"{kind} while training", ended)
        for shard, data in held.items():
            shard.write_bytes(data)
        again = run(*toys.recover_words(out, cache=cache, steps=60))
        same = again.code == 0 and result(out) == expected
        tally.check(same, f"{kind}: the same command afterwards", again)


def flips_at_rest(toys: Toys, tally: Tally, scale: float) -> None:
    """A bit flipped in a checkpoint, an adapter, a student or a cache before a command reads it."""
    draw = random.Random(1)
    stopped, part = toys.root / "tries" / "stopped", toys.root / "tries" / "part"
    toys.fresh("stopped")
    begun = Started(*toys.recover_words(part, steps=200))
    while not list(part.glob("checkpoints/step-*/COMPLETE")):
        time.sleep(0.01)
    os.kill(begun.pid, signal.SIGTERM)
    begun.wait()
    shutil.copytree(part, stopped)
    newest = sorted(part.glob("checkpoints/step-*/COMPLETE"))[-1].parent
    for name in ("trained.safetensors", "optimizer.safetensors", "state.json"):
        for _ in range(max(2, round(5 * scale))):
            shutil.rmtree(part)
            shutil.copytree(stopped, part)
            flip(newest / name, draw)
            tally.refused(run(*toys.recover_words(part, steps=200)), f"a flipped bit in a checkpoint's {name}")
    targets = []
    run_copy, student = toys.copy("run", "flipped-run"), toys.copy("student", "flipped-student")
    for name in ("adapter_model.safetensors", "adapter_config.json", "qat_lora.json"):
        targets.append((run_copy / "best" / name, toys.export_words(toys.root / "tries" / "o", run_copy)))
    for name in ("model.safetensors", "config.json", "tokenizer.json", "adapter_start.safetensors"):
        targets.append((student / name, toys.recover_words(toys.root / "tries" / "o", student)))
    for file, words in targets:
        for _ in range(max(1, round(3 * scale))):
            shutil.rmtree(toys.root / "tries" / "o", ignore_errors=True)
            held = flip(file, draw)
            tally.refused(run(*words), f"a flipped bit in {file.name}")
            file.write_bytes(held)
    cache = toys.copy("cache", "flipped-cache")
    files = sorted(cache.glob("[sem]*.*"))
    for _ in range(round(60 * scale)):
        file = draw.choice(files)
        held = flip(file, draw)
        tally.refused(run("cache", "verify", cache, "--quiet"), f"a flipped bit in the cache's {file.name}")
        file.write_bytes(held)


def other_config(toys: Toys, tally: Tally, scale: float) -> None:
    """A base whose config changed under an adapter."""
    run_copy, student = toys.copy("run", "run"), toys.copy("student", "student-other")
    config = json.loads((student / "config.json").read_text())
    config["rms_norm_eps"] = 1e-2
    (student / "config.json").write_text(json.dumps(config))
    for file in run_copy.glob("best/adapter_config.json"):
        adapter = json.loads(file.read_text())
        adapter["base_model_name_or_path"] = str(student)
        file.write_text(json.dumps(adapter))
    shutil.rmtree(run_copy / "best" / "base", ignore_errors=True)
    tally.refused(run(*toys.export_words(toys.fresh("o"), run_copy)), "export on a base with another rms_norm_eps")
    first = run_copy / "start" / "qat_lora.json"
    tally.check("tokenizer_sha256" in json.loads(first.read_text()), "start/ without the tokenizer's fingerprint")


def not_finite(toys: Toys, tally: Tally, scale: float) -> None:
    """NaN and infinity in weights, adapters, scales and settings."""
    for bad in (math.nan, math.inf):
        teacher, student, run_copy = toys.copy("teacher", "t"), toys.copy("student", "s"), toys.copy("run", "r")

        def poison(file: Path, name_part: str, bad: float = bad) -> None:
            tensors = load_file(file)
            name = next(n for n in sorted(tensors) if name_part in n and tensors[n].is_floating_point())
            tensors[name].view(-1)[0] = bad
            save_file(tensors, file, metadata={"format": "pt"})
            (file.parent / "SHA256SUMS").unlink(missing_ok=True)  # as if it had been written so
            for note in ("config.json", "qat_lora.json"):
                if (file.parent / note).exists():
                    values = json.loads((file.parent / note).read_text())
                    values.pop("checksums", None)
                    (file.parent / note).write_text(json.dumps(values))

        poison(teacher / "model.safetensors", "mlp")
        tally.refused(run(*toys.eval_words(toys.fresh("o"), teacher=teacher)), f"eval of a {bad} teacher")
        tally.refused(run(*toys.quantize_words(toys.fresh("o"), teacher)), f"quantize of a {bad} model")
        poison(student / "model.safetensors", "scale")
        tally.refused(run(*toys.recover_words(toys.fresh("o"), student)), f"recover of a student with a {bad} scale")
        config = run_copy / "best" / "adapter_config.json"
        held = config.read_text()
        config.write_text(json.dumps({**json.loads(held), "lora_alpha": bad}))
        tally.refused(run(*toys.export_words(toys.fresh("o"), run_copy)), f"export with lora_alpha {bad}")
        config.write_text(held)
        poison(run_copy / "best" / "adapter_model.safetensors", "lora_A")
        tally.refused(run(*toys.export_words(toys.fresh("o"), run_copy)), f"export of a {bad} adapter")
        tally.refused(run(*toys.eval_words(toys.fresh("o"), run_copy)), f"eval of a {bad} adapter")


def quantise_killed(toys: Toys, tally: Tally, scale: float) -> None:
    """Quantising killed and stopped at random moments."""
    draw = random.Random(2)
    whole = toys.fresh("whole")
    begun = time.monotonic()
    assert run(*toys.quantize_words(whole)).code == 0
    takes = time.monotonic() - begun
    names = ("model.safetensors", "adapter_start.safetensors", "config.json")
    for number in range(max(4, round(12 * scale))):
        out = toys.fresh("killed")
        stop = signal.SIGTERM if number % 2 else signal.SIGKILL
        begun_ = Started(*toys.quantize_words(out))
        time.sleep(takes * draw.uniform(0.3, 0.98))
        with contextlib.suppress(ProcessLookupError):
            os.kill(begun_.pid, stop)
        ended = begun_.wait()
        late = ended.code == 0
        kept = late or any(f.stat().st_size > 4096 for f in out.rglob("*") if f.is_file())
        if stop == signal.SIGTERM:
            tally.check(late or (ended.code == 143 and ended.is_clean), "SIGTERM while quantising", ended)
        again = run(*toys.quantize_words(out))
        same = again.code == 0 and all((out / n).read_bytes() == (whole / n).read_bytes() for n in names)
        tally.check(same, f"{stop.name} while quantising, then the same command", again)
        tally.check(kept or stop == signal.SIGKILL, f"{stop.name} while quantising left nothing to go on from")


# What stops a user


@contextlib.contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[Path]:
    """Mount a file system of a given size."""
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def disk_full(toys: Toys, tally: Tally, scale: float) -> None:
    """Every command on a disk that is too small, which then grows."""
    commands: list[tuple[str, Callable[[Path], list[Any]]]] = [
        ("quantize", toys.quantize_words),
        ("recover", toys.recover_words),
        ("eval", toys.eval_words),
        ("export merged", toys.export_words),
        ("export adapter", functools.partial(toys.export_words, form="adapter")),
        ("export gguf", functools.partial(toys.export_words, form="gguf")),
        ("cache build", toys.cache_words),
    ]
    sizes = (4, 40, 160, 400, 900)
    for name, words in commands:
        for kilobytes in sizes[:: 1 if scale >= 1 else 2]:
            with small_disk(toys.root / "disk", kilobytes) as disk:
                out = disk / "out"
                ended = run(*words(out))
                tally.check(ended.is_clean, f"{name} on a disk of {kilobytes} kB", ended)
                if ended.code:
                    subprocess.run(["mount", "-o", "remount,size=200m", str(disk)], check=True)
                    again = run(*words(out))
                    tally.check(again.code == 0, f"{name} after the disk of {kilobytes} kB grew", again)


def odd_places(toys: Toys, tally: Tally, scale: float) -> None:
    """Outputs that cannot be: names too long, below a file, on a read-only disk, with few descriptors."""
    file = toys.fresh("a-file")
    file.write_text("mine")
    for words in (toys.quantize_words, toys.recover_words, toys.eval_words, toys.export_words, toys.cache_words):
        name = words(Path("x"))[0]
        tally.refused(run(*words(toys.root / ("n" * 300))), f"{name} --out with 300 letters")
        tally.refused(run(*words(file / "below")), f"{name} --out below a file")
        tally.refused(run(*words(Path("/proc/nothing/here"))), f"{name} --out where nothing can be made")
        with small_disk(toys.root / "disk", 4096) as disk:
            subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
            tally.refused(run(*words(disk / "out")), f"{name} on a read-only disk")
        out = toys.fresh("few")

        def few() -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (24, 24))

        ended = run(*words(out), before=few)
        tally.check(ended.is_clean, f"{name} with 24 descriptors", ended)
        again = run(*words(out))
        tally.check(again.code == 0, f"{name} after it had too few descriptors", again)
    tally.check(file.read_text() == "mine", "the file in the way changed")


def few_descriptors(toys: Toys, tally: Tally, scale: float) -> None:
    """A cache of many shards and `ulimit -n 64`."""
    cache = toys.fresh("many")
    words = [word if word != 12 else 1 for word in toys.cache_words(cache)]

    def few() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))

    for words_ in (
        words,
        ["cache", "verify", cache, "--quiet"],
        ["cache", "info", cache],
        toys.recover_words(toys.fresh("o"), cache=cache),
    ):
        ended = run(*words_, before=few)
        tally.check(ended.code == 0, f"{words_[0]} {words_[1]} with 64 descriptors and 100 shards", ended)


def odd_text(toys: Toys, tally: Tally, scale: float) -> None:
    """Any bytes as text."""
    folder = toys.fresh("odd")
    folder.mkdir()
    plain = " ".join(WORDS * 60)
    cases: dict[str, bytes] = {
        "surrogate.jsonl": b"".join(b'{"text": "' + plain.encode() + b' \\ud800 tail"}\n' for _ in range(20)),
        "surrogate.json": b'[{"text": "' + plain.encode() * 20 + b' \\udfff"}]',
        "invalid.txt": plain.encode() * 20 + b"\xff\xfe\xed\xa0\x80" + plain.encode(),
        "nul.txt": plain.encode() * 200 + b"\0" + plain.encode(),
        "chat.jsonl": b"".join(
            b'{"messages": [{"role": "user", "content": "\\ud83d a model"}, {"role": "assistant", "content": "'
            + plain.encode() + b'\\udc00"}]}\n' for _ in range(20)
        ),
        "deep.jsonl": b'{"text": ' + b"[" * 100_000 + b"\n",
        "digits.jsonl": b'{"text": "' + plain.encode() * 20 + b'", "id": ' + b"9" * 6000 + b"}\n",
        "line.txt": plain.encode() * 2000,
        "cr.txt": plain.replace(" ", "\r").encode() * 20,
    }  # fmt: skip
    for name, data in cases.items():
        (folder / name).write_bytes(data)
        words = toys.cache_words(toys.fresh("o"))
        words[words.index("--dataset") + 1] = folder / name
        words[words.index("--num-rows") + 1] = 4
        words[words.index("--eval-rows") + 1] = 0
        ended = run(*words)
        may_be_refused = name.startswith(("deep", "digits", "nul", "chat"))
        tally.check(ended.is_clean and (ended.code == 0 or may_be_refused), name, ended)
    sizes = [1, 4]
    peaks = []
    for megabytes in sizes:
        (folder / "large.txt").write_text((plain + "\n") * (megabytes * 10**6 // (len(plain) + 1)))
        words = toys.cache_words(toys.fresh("o"))
        words[words.index("--dataset") + 1] = folder / "large.txt"
        words[words.index("--eval-rows") + 1] = 0
        ended = run(*words)
        peaks.append(ended.peak_mb)
        tally.check(ended.code == 0, f"a document of {megabytes} MB", ended)
    grows = (peaks[1] - peaks[0]) / (sizes[1] - sizes[0])
    tally.check(grows < 20, f"memory grows by {grows:.0f} MB with each MB of a document")


def signals(toys: Toys, tally: Tally, scale: float) -> None:
    """SIGHUP, SIGTERM and SIGINT in training and building."""
    for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGINT):
        out = toys.fresh("stopped")
        begun = Started(*toys.recover_words(out, steps=4000))
        log = out / "metrics.jsonl"
        while not (log.exists() and log.read_bytes().count(b"\n") > 4):
            time.sleep(0.01)
        os.kill(begun.pid, number)
        ended = begun.wait(60)
        saved = list(out.glob("checkpoints/step-*/COMPLETE"))
        tally.check(ended.is_clean and ended.code > 0 and bool(saved), f"{number.name} while training", ended)


def narrow_terminal(toys: Toys, tally: Tally, scale: float) -> None:
    """A terminal that knows ASCII alone."""
    for words in (
        [w for w in toys.quantize_words(toys.fresh("o")) if w != "--quiet"],
        [w for w in toys.recover_words(toys.fresh("o")) if w != "--quiet"],
        [w for w in toys.eval_words(toys.fresh("o")) if w != "--quiet"],
        ["cache", "info", toys.cache, "--tokenizer", toys.teacher],
        ["recover", "--help"],
        ["generate", "--model", toys.teacher, "--prompt", "the ünïcode 模型", "--device", "cpu"],
    ):
        ended = run(*words, PYTHONIOENCODING="ascii")
        tally.check(ended.is_clean, f"{words[0]} on an ASCII terminal", ended)


def small_ones(toys: Toys, tally: Tally, scale: float) -> None:
    """Odd recipes, numbers and files."""
    file = toys.fresh("recipe.yaml")
    bomb = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
        f"{b}: &{b} [{','.join(['*' + a] * 9)}]\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
    )
    for what, text in {
        "an alias bomb": bomb + "seed: *i\n",
        "deep YAML": "seed: " + "[" * 5000 + "]" * 5000,
        "a number of 5,000 digits": "seed: " + "9" * 5000,
        "NaN": "train: {lr: .nan}",
        "a list": "- 1",
        "NUL": "seed: \0",
    }.items():
        file.write_text(text)
        tally.refused(run(*toys.recover_words(toys.fresh("o")), "--recipe", file), f"a recipe with {what}")
    for flag, value in (
        ("--teacher-batch-size", 2**62),
        ("--num-rows", 10**20),
        ("--top-k", 10**15),
        ("--length", 2**40),
        ("--shard-rows", 2**62),
        ("--seed", "9" * 5000),
    ):
        ended = run(*toys.cache_words(toys.fresh("o")), flag, value)
        tally.check(ended.is_clean, f"cache build {flag} {str(value)[:24]}", ended)
    run_copy = toys.copy("run", "r")
    for value in (None, 3, [], {}):
        config = run_copy / "best" / "adapter_config.json"
        held = config.read_text()
        config.write_text(json.dumps({**json.loads(held), "base_model_name_or_path": value}))
        tally.refused(run(*toys.export_words(toys.fresh("o"), run_copy)), f"base_model_name_or_path {value}")
        config.write_text(held)
    gone = toys.copy("student", "gone")
    (gone / "model.safetensors").unlink()
    tally.refused(run(*toys.quantize_words(gone)), "a complete folder whose weights are gone")
    spelled = toys.fresh("spelled")
    words = toys.cache_words(spelled)
    assert run(*words).code == 0
    words[words.index("--teacher") + 1] = f"{toys.teacher.parent}/./{toys.teacher.name}/"
    ended = run(*words)
    tally.check(ended.code == 0, "the same teacher in another spelling", ended)


ATTACKS: tuple[Callable[[Toys, Tally, float], None], ...] = (
    overwrite, damaged_while_read, flips_at_rest, other_config, not_finite, quantise_killed, disk_full, odd_places,
    few_descriptors, odd_text, signals, narrow_terminal, small_ones,
)  # fmt: skip


def main() -> int:
    """Run the attacks, print the table, write the result; exit code 1 where a fault was found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="names of attacks, with commas between [default: all]")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the random tries [default: 1]")
    parser.add_argument("--before", type=Path, help="result of an earlier version, to be kept beside this one")
    parser.add_argument("--out", type=Path, help="JSON file for the result")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    chosen = [a for a in ATTACKS if not arguments.only or a.__name__ in arguments.only.split(",")]
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        toys = make_toys(Path(folder))
        for attack in chosen:
            tally, begun = Tally(), time.monotonic()
            try:
                attack(toys, tally, arguments.scale)
            except Exception as error:  # an attack that cannot go on is a fault of what it attacks, or of itself
                tally.check(False, f"the attack broke off: {type(error).__name__}: {error}")
            found[attack.__name__] = {
                "what": str(attack.__doc__).strip(),
                "tries": tally.tries,
                "faults": len(tally.faults),
                "found": tally.faults,
            }
            took = f"{time.monotonic() - begun:6.0f} s"
            print(f"{attack.__name__:20} {tally.tries:5} tries {len(tally.faults):4} faults {took}", flush=True)
            for fault in tally.faults:
                print(f"    {fault}", flush=True)
    total = {key: sum(of[key] for of in found.values()) for key in ("tries", "faults")}
    print(total)
    if arguments.out:
        result = made_with() | {"command": "python benchmarks/attacks.py", "scale": arguments.scale, **total}
        result["attacks"] = found
        if arguments.before:
            before = json.loads(arguments.before.read_text(encoding="utf-8"))
            counts = {name: {key: of[key] for key in ("tries", "faults")} for name, of in before["attacks"].items()}
            result["before"] = {"tries": before["tries"], "faults": before["faults"], "attacks": counts}
        arguments.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if total["faults"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
