"""A run's files among others': drawn sequences of runs, kills, overwriting and people who put files everywhere.

What is checked after every step: each byte that somebody else wrote is still in some file, each link still leads where
it led, the folders that were given as inputs are as they were, and after the next run that ends well everything has its
own name again. The control is what `--overwrite` did before there was a list: it fails the same steps.
"""

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from qat_lora.errors import DamagedFileError, OutputExistsError
from qat_lora.files import folders as files
from qat_lora.files import outputs
from qat_lora.files.folders import (
    LIST,
    MARK,
    atomic_dir,
    discard,
    is_ours,
    moved_into,
    ours,
    remove_leftovers,
    restore_dir,
    write_text,
)

NAMES = (
    "notes.txt",
    "thesis/chapter.tex",
    "config.yaml",
    ".tmp-config.yaml",
    "metrics.jsonl",
    ".scratch",
    "best",
    "best/notes.txt",
    "best/base",
    "best/base/notes.txt",
    "best/base/weights",
    "best/weights",
    ".best.new/notes.txt",
    ".best.old/weights",
    ".best.old/notes.txt",
    ".new/notes.txt",
    "weights",
    "checkpoints/step-000001/notes.txt",
    "checkpoints/step-000002/state",
    "checkpoints/.step-000001.old/notes.txt",
    "checkpoints/.step-000002.new/notes.txt",
    "checkpoints/step-000009/COMPLETE",
    f".tmp-{LIST}",
    f"thesis/{MARK}",
)
KINDS = ("file", "link to a file", "link to a folder", "hard link", "backup")
COMMANDS = {"recover": False, "quantize": True}


def fill(folder, text):
    (folder / "base").mkdir()
    (folder / "base" / "weights").write_text(text)
    (folder / "weights").write_text(text)


def work(out, into):
    """What runs do, in small: texts, lines, folders in the place of folders, checkpoints that come and go."""
    write_text(out / "config.yaml", "settings")
    ours(out / ".scratch").write_text("0")
    (out / ".scratch").unlink()
    restore_dir(out / "best")
    if into:
        with moved_into(out) as draft:
            fill(draft, "quantised")
    for step in (1, 2, 3):
        if (out / "metrics.jsonl").exists():
            write_text(ours(out / "metrics.jsonl"), (out / "metrics.jsonl").read_text())
        with ours(out / "metrics.jsonl").open("a") as lines:
            lines.write(f"{step}\n")
        with atomic_dir(out / "best") as draft:
            fill(draft, str(step))
        with atomic_dir(out / "checkpoints" / f"step-{step:06d}") as draft:
            (draft / "state").write_text(str(step))
            (draft / "COMPLETE").write_text("")
        for old in sorted((out / "checkpoints").glob("step-*"))[:-1]:
            if (old / "COMPLETE").is_file() and is_ours(old / "COMPLETE"):
                discard(old)
        remove_leftovers(out / "checkpoints")


def run(root, command, seed, overwrite):
    """Run a command; say whether it ended well or was refused."""
    out, inputs = root / "out", [root / "input"]
    try:
        with outputs.claimed(out, command, {"seed": seed}, overwrite, inputs) as complete:
            if not complete:
                work(out, COMMANDS[command])
                outputs.complete(out)
    except (OutputExistsError, DamagedFileError):
        return False
    return True


def run_killed(after, *arguments):
    """Run in a process that ends at some call that changes the disk, as a kill would: nothing is cleaned up."""
    child = os.fork()
    if child == 0:
        left = [after]
        for name in ("replace", "rename", "unlink", "rmdir", "mkdir", "write", "open"):
            real = getattr(os, name)

            def last(*a, real=real, **k):
                left[0] -= 1
                if left[0] < 0:
                    os._exit(0)
                return real(*a, **k)

            setattr(os, name, last)
        try:
            run(*arguments)
        finally:
            os._exit(0)
    os.waitpid(child, 0)


class Owned:
    """What is not the run's, and a look whether all of it is still there."""

    def __init__(self, root):
        self.root, self.out = root, root / "out"
        self.files, self.links = {}, {}
        for name in ("outside", "input", "backup"):
            (root / name).mkdir(parents=True)
        for folder in ("outside", "input"):
            for name in ("weights", "notes.txt"):
                (root / folder / name).write_text(f"{folder} {name}")

    def drop(self, name, kind):
        """Put something where nothing is yet, and where nothing is listed: that name would be the run's own."""
        path, number = self.out / name, len(self.files) + len(self.links)
        _, listed = files.listed(self.out)
        above = [parent.as_posix() for parent in Path(name).parents]
        real = all(not p.is_symlink() and (p.is_dir() or not p.exists()) for p in path.parents)
        if kind == "backup":  # of a file of the run, as `cp -l` makes it
            target = self.root / "backup" / str(number)
            if name in listed and path.is_file() and not path.is_symlink():
                os.link(path, target)
                self.files[target] = target.read_bytes()
            return
        drafts = {f"{parent}/" for parent in above if parent.endswith((".new", ".old"))}
        if name in listed or os.path.lexists(path) or not real or drafts & listed:
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        if kind == "file":
            path.write_text(f"mine {number}")
        elif kind == "hard link":
            os.link(self.root / "outside" / "notes.txt", path)
        else:
            path.symlink_to(self.root / "outside" / ("notes.txt" if kind == "link to a file" else "."))
        if path.is_symlink():
            self.links[path] = os.readlink(path)
        else:
            self.files[path] = path.read_bytes()

    def lost(self, exactly):
        """Return what is gone; `exactly`: also what is not where it was put."""
        everything = [p for p in self.root.rglob("*") if not p.is_dir() or p.is_symlink()]
        held = {p.read_bytes() for p in everything if p.is_file() and not p.is_symlink()}
        links = {os.readlink(p) for p in everything if p.is_symlink()}
        gone = [p for p, data in self.files.items() if data not in held]
        gone += [p for p, target in self.links.items() if target not in links]
        gone += [p for p, data in self.files.items() if "backup" in p.parts and p.read_bytes() != data]
        for folder in ("outside", "input"):
            for name in ("weights", "notes.txt"):
                p = self.root / folder / name
                gone += [] if p.exists() and p.read_text() == f"{folder} {name}" else [p]
        if exactly:
            gone += [p for p, data in self.files.items() if not p.is_file() or p.read_bytes() != data]
            gone += [p for p, target in self.links.items() if not p.is_symlink() or os.readlink(p) != target]
        return gone


DROP = st.tuples(st.just("drop"), st.sampled_from(NAMES), st.sampled_from(KINDS))
RUN = st.tuples(
    st.just("run"),
    st.sampled_from(tuple(COMMANDS)),
    st.sampled_from((0, 0, 1)),
    st.booleans(),
    st.none() | st.integers(0, 160),
)
LINK = st.tuples(st.just("input"), st.sampled_from(("weights", "best/weights")), st.booleans())


def play(root, steps):
    """Take the steps; return what was lost at the first that lost something."""
    owned = Owned(root)
    run(root, "recover", 0, False)
    for step in steps:
        match step:
            case ("drop", name, kind):
                owned.drop(name, kind)
            case ("input", name, hard):  # an input made of a run's own files, as a model folder may be
                source, link = root / "out" / name, root / "input" / "linked"
                if source.is_file() and not source.is_symlink() and not os.path.lexists(link):
                    os.link(source, link) if hard else link.symlink_to(source)
            case ("run", command, seed, overwrite, None):
                linked = root / "input" / "linked"
                before = linked.read_bytes() if linked.exists() else None
                ended = run(root, command, seed, overwrite)
                if overwrite and before is not None:
                    assert linked.read_bytes() == before
                lost = owned.lost(exactly=ended)
                if lost:
                    return step, lost
            case ("run", command, seed, overwrite, after):
                run_killed(after, root, command, seed, overwrite)
                if lost := owned.lost(exactly=False):
                    return step, lost
    return None


STEPS = st.lists(DROP | DROP | RUN | LINK, min_size=2, max_size=9)
DRAWN = settings(
    max_examples=40,
    derandomize=True,
    deadline=None,
    database=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(autouse=True)
def no_disk(monkeypatch):
    """A kill of a process loses nothing that is not yet on the disk; flushing thousands of times takes minutes."""
    monkeypatch.setattr(os, "fsync", lambda _: None)


@DRAWN
@given(steps=STEPS)
def test_nothing_of_others_is_lost_whatever_runs_and_is_killed(tmp_path, steps):
    assume(any(step[0] == "run" for step in steps))
    root = tmp_path / "play"
    shutil.rmtree(root, ignore_errors=True)
    assert play(root, steps) is None


@pytest.mark.slow
@settings(DRAWN, max_examples=1500)
@given(steps=STEPS)
def test_nothing_of_others_is_lost_in_many_more(tmp_path, steps):
    shutil.rmtree(tmp_path / "play", ignore_errors=True)
    assert play(tmp_path / "play", steps) is None


def test_outside_of_a_run_no_name_makes_a_folder_ours(tmp_path):
    """`.NAME.new` and `.NAME.old` are known by a run's list; where there is none they are somebody's."""
    names = (".new", ".best.new", ".best.old", ".step-1.old", ".step-1.new")
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "thesis").write_text(name)
    restore_dir(tmp_path / "best")
    remove_leftovers(tmp_path)
    with atomic_dir(tmp_path / "best") as draft:
        fill(draft, "first")
    with pytest.raises(OutputExistsError, match="best: exists already"), atomic_dir(tmp_path / "best"):
        raise AssertionError("no folder to fill")
    with moved_into(tmp_path) as draft:
        fill(draft, "moved")
    (tmp_path / "step-1").mkdir()
    discard(tmp_path / "step-1")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*names, "best", "base", "weights"])
    assert [(tmp_path / name / "thesis").read_text() for name in names] == [*names]
    assert (tmp_path / "best" / "base" / "weights").read_text() == "first"
    assert (tmp_path / "base" / "weights").read_text() == (tmp_path / "weights").read_text() == "moved"


def test_a_draft_of_another_process_is_not_removed(tmp_path):
    """Two that write one name where the file system's locks keep nobody out."""
    (tmp_path / ".s.tmp").write_bytes(b"theirs, half written")
    with pytest.raises(FileExistsError):
        files.write_new(tmp_path / "s", [b"ours"], "shard")
    assert (tmp_path / ".s.tmp").read_bytes() == b"theirs, half written" and not (tmp_path / "s").exists()


def test_control_emptying_the_folder_fails_the_same_steps(tmp_path, monkeypatch):
    def empty(out, names):
        for path in out.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != MARK:
                path.unlink()

    steps = [("drop", "thesis/chapter.tex", "file"), ("run", "recover", 1, True, None)]
    assert play(tmp_path / "ours", steps) is None
    monkeypatch.setattr(outputs, "_remove", empty)
    assert play(tmp_path / "naive", steps) is not None
