"""Files that are whole or not there, locks, and a run's own files: listed first, never written over anybody else's.

A run lists the files it writes (`qat_lora_files.txt`). `--overwrite` removes those alone, and a name taken by an
unlisted file is refused; a run that owns everything in its folder deletes what people put there. The list is a
write-ahead log: a kill leaves no file unlisted. It holds names: a user's file under a listed one counts as the run's.

A new file appears whole or not at all: temporary file, fsync, link, fsync of the folder. Rename without fsync leaves an
empty one after a power cut, and overwrites what another process has just finished; `link` refuses. The lock is `flock`,
which the kernel drops with the process; a lock *file* would block the next run. Tests kill at each `failpoint`.

A file is replaced by one rename. A folder cannot be (rename wants an empty target): the new one is filled under another
name, the old one is renamed away, the new one takes its name, others' files move over, and the old one is removed last.
A kill leaves the old folder, the new one, or the old one under its other name, which `restore_dir` renames back.

The other names, `.NAME.new` and `.NAME.old`, are safe in a run's folder alone, whose list says who made them. Elsewhere
a draft has a name that nothing else has, and takes its place by one rename, which fails where anything is there.
"""

import errno
import hashlib
import json
import os
import re
import shutil
import signal
import stat
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path, PurePosixPath
from typing import Literal

from qat_lora.errors import DamagedFileError, OutputExistsError

MARK, LIST = "qat_lora_run.json", "qat_lora_files.txt"
LAST = ("config.json", "adapter_config.json", "base.gguf")  # files without which nothing loads a folder
_HEADER = re.compile(rb"# qat-lora ([a-z ]+): ")
_runs: dict[str, set[str]] = {}  # the folders that this process holds, and what their runs have listed
FAILPOINT_STEPS = ("opened", "started", "written", "synced", "linked", "durable")  # of a commit: `<kind>-<step>`
Lock = Literal["exclusive", "shared", "waiting"]  # `waiting` is exclusive too, and waits where others are refused
_reached: Counter[str] = Counter()
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)  # what renaming a folder says where something is in its place
_NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.EMLINK)


def hold(root: Path, names: set[str]) -> None:
    """Take a run's folder, with what it has listed."""
    _runs[os.path.abspath(root)] = names


def begin_list(root: Path, command: str, names: set[str]) -> None:
    """Take a run's folder with its files; write its list anew if it differs, is cut short, or is hard-linked."""
    file = root / LIST
    if listed(root) != (command, names) or not file.read_bytes().endswith(b"\n") or file.stat().st_nlink > 1:
        header = f"# qat-lora {command}: files of this run; --overwrite removes them and no others\n"
        replace_own(file, "".join([header, *map(_line, sorted(names))]))
    hold(root, names)


def release(root: Path) -> None:
    """Give a folder back: what this process writes there from now on is no run's."""
    _runs.pop(os.path.abspath(root), None)


def listed(root: Path) -> tuple[str | None, set[str]]:
    """Return the command that keeps a folder's list, None where there is no list, and the files that it lists.

    A line that a kill cut short or that lost a bit, and one that leads out of the folder, name nothing: what is not
    known to be the run's stays. DamagedFileError: there is a list, and it does not begin as one.
    """
    try:
        data = (root / LIST).read_bytes() if not (root / LIST).is_symlink() else b""
    except (FileNotFoundError, NotADirectoryError):  # nothing there, or somebody's file in the folder's place
        data = b""
    if not data:
        return None, set()
    header = _HEADER.match(data)
    if header is None:
        remedy = "restore it from a copy, or choose another --out"
        raise DamagedFileError(f"{root / LIST}: is not what was written, so what is the run's is not known; {remedy}")
    names = set()
    for line in data.split(b"\n")[1:-1]:
        with suppress(ValueError):
            name = json.loads(line[9:])
            if isinstance(name, str) and line + b"\n" == _line(name).encode():
                names |= {name} if name and not {"..", "/"} & set(PurePosixPath(name).parts) else set()
    return header[1].decode(), names


def _line(name: str) -> str:
    """Return the line of a list that names a file: its CRC-32, then the name as JSON."""
    text = json.dumps(name)
    return f"{zlib.crc32(text.encode()):08x} {text}\n"


def ours(path: Path) -> Path:
    """Note, before it is written, that the run whose folder holds `path` writes this file; return the path.

    Only folders that this process holds count: what a command writes into the folder of another run is not that run's.
    OutputExistsError: something is there already that the run did not write.
    """
    _note([path])
    return path


def is_ours(path: Path, folder: str = "") -> bool:
    """Tell whether a file, or a folder ("/"), is of the run whose folder holds it; in no run's folder all files are."""
    _, known, name = _run_of(path)
    return not folder if known is None else name + folder in known


def is_part(folder: Path) -> bool:
    """Tell whether a folder lies in one that this process holds: then others' files in it are known to be safe."""
    return bool(_run_of(folder)[0])


def _run_of(path: Path) -> tuple[str, set[str] | None, str]:
    """Return the innermost held folder that a path lies in ("": none), what its run has listed, the path from there."""
    text = os.path.abspath(path)
    root = max((root for root in _runs if text.startswith(root.rstrip(os.sep) + os.sep)), key=len, default="")
    return root, _runs.get(root), os.path.relpath(text, root).replace(os.sep, "/") if root else ""


def _note(paths: Iterable[Path], folder: str = "") -> None:
    """List files, or (`folder` is "/") folders with everything in them, whose files get no line of their own."""
    new: dict[str, list[str]] = {}
    for path in paths:
        root, known, name = _run_of(path)
        if known is None or not folder and any(f"{parent}/" in known for parent in PurePosixPath(name).parents):
            continue
        _refuse_taken(root, name, stat.S_ISDIR if folder else stat.S_ISREG, name + folder in known)
        if name + folder not in known:
            new.setdefault(root, []).append(name + folder)
    for root, names in new.items():
        _append(Path(root) / LIST, "".join(map(_line, names)))
        _runs[root].update(names)


def _refuse_taken(root: str, name: str, is_kind: Callable[[int], bool], known: bool) -> None:
    """Refuse a name that is, or lies under, what the run did not write: also a link in the place of its own folder."""
    parts = name.split("/")
    for count in range(1, len(parts) + 1):
        place = "/".join((root, *parts[:count]))
        try:
            mode = os.lstat(place).st_mode
        except (FileNotFoundError, NotADirectoryError):
            return
        if not (known and is_kind(mode) if count == len(parts) else stat.S_ISDIR(mode)):
            remedy = "nothing was touched: move it away, then run the same command again, or choose another --out"
            raise OutputExistsError(f"{place}: is in the way, and this run did not write it; {remedy}")


def _append(file: Path, text: str) -> None:
    """Append to the list, all or nothing, and flush it to disk."""
    descriptor = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with os.fdopen(descriptor, "ab", buffering=0) as stream:
        size, data = os.fstat(descriptor).st_size, text.encode()
        try:
            written = os.write(descriptor, data)
            os.fsync(descriptor)  # a full disk says so here at the latest
            if written < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            stream.truncate(size)
            raise OSError(error.errno, error.strerror, str(file)) from None


def replace_own(file: Path, text: str) -> None:
    """Write the list or the mark of a run, which are on no list; a draft that a kill left is known by how it begins."""
    draft = file.with_name(f".tmp-{file.name}")
    if not is_draft(draft, text):
        raise OutputExistsError(f"{draft}: is in the way, and no run wrote it; move it away, or choose another --out")
    draft.unlink(missing_ok=True)
    with _replacing(file, draft), draft.open("x", encoding="utf-8") as stream:
        stream.write(text)


def is_draft(draft: Path, text: str) -> bool:
    """Tell whether a draft of the mark or the list is one of ours, by its first characters, or is not there."""
    if draft.is_symlink() or draft.exists() and not draft.is_file():
        return False
    begin = text[:12].encode()
    return begin.startswith(draft.read_bytes()[: len(begin)] if draft.exists() else b"")


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yield a draft's path; it takes the place of `path` if the block ends well. OutputExistsError: others' file."""
    draft = path.with_name(f".tmp-{path.name}" if is_part(path) else f".tmp-{os.getpid()}-{path.name}")
    _note([path, draft])
    with _replacing(path, draft):
        yield draft


@contextmanager
def _replacing(path: Path, draft: Path) -> Iterator[None]:
    """Flush a draft that the block wrote to disk and rename it to `path`; remove it if anything fails."""
    try:
        yield
        fsync(draft)
        draft.replace(path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise


def write_text(path: Path, text: str) -> None:
    """Write a text as UTF-8: the old file stays, or the whole new one is there."""
    with atomic_file(path) as draft:
        draft.write_text(text, encoding="utf-8")


@contextmanager
def atomic_dir(final: Path) -> Iterator[Path]:
    """Yield an empty folder to take the place of `final` when the block ends well.

    In a run's folder it also replaces what the run has written there; others' files stay, or are an OutputExistsError.
    Elsewhere OutputExistsError: `final` is there and no empty folder.
    """
    if not is_part(final):
        with _new_dir(final) as draft:
            yield draft
        return
    restore_dir(final)
    draft, old = final.with_name(f".{final.name}.new"), _set_aside(final)
    with _filled(draft):
        yield draft
        _note(final / name for name in _files(draft))
        replaces = final.exists()
        if replaces:
            _note([old], "/")
            final.rename(old)
        draft.rename(final)
        fsync(final.parent)
    if replaces:
        _dissolve(old, final)


@contextmanager
def _new_dir(final: Path) -> Iterator[Path]:
    """Yield an empty folder that becomes `final` by one rename; OutputExistsError: `final` is no empty folder."""
    remedy = "exists already; nothing was touched: choose another folder"
    if final.is_symlink() or final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise OutputExistsError(f"{final}: {remedy}")
    with _apart(final) as place:
        draft = place / final.name
        draft.mkdir()
        yield draft
        _files(draft)
        try:
            draft.rename(final)
        except OSError as error:
            if error.errno not in _TAKEN:
                raise
            raise OutputExistsError(f"{final}: {remedy}") from None
        fsync(final.parent)


@contextmanager
def _apart(final: Path) -> Iterator[Path]:
    """Yield an empty folder beside `final`, of a name that nothing else has; remove it with what is left in it."""
    final.parent.mkdir(parents=True, exist_ok=True)
    place = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
    try:
        yield place
    finally:
        shutil.rmtree(place, ignore_errors=True)


@contextmanager
def moved_into(out: Path) -> Iterator[Path]:
    """Yield an empty folder to fill; when the block ends well its files move into `out`, where others' files stay.

    Those without which nothing loads the folder go first and come last, so that a kill leaves no half that loads.
    OutputExistsError: a file that the run did not write has the name of one that is written.
    """
    draft = out / ".new"
    with _filled(draft) if is_part(draft) else _apart(out / "new") as place:
        yield place
        names = sorted(_files(place), key=lambda name: (name.name in LAST, -len(name.parts), name))
        _note(out / name for name in names)
        for name in reversed(names):
            if name.name in LAST:
                (out / name).unlink(missing_ok=True)
        for name in names:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).replace(out / name)
        for folder in {(out / name).parent for name in names}:
            fsync(folder)
        shutil.rmtree(place)


@contextmanager
def _filled(draft: Path) -> Iterator[Path]:
    """Yield an empty folder of a run, in the place of one that a kill left there; remove it if the block fails."""
    _note([draft], "/")
    if draft.exists():
        shutil.rmtree(draft)
    draft.mkdir(parents=True)
    try:
        yield draft
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)
        raise


def _files(draft: Path) -> list[Path]:
    """Return the files of a draft by their paths in it, flushed to disk with its folders."""
    found = list(draft.rglob("*"))
    for path in (*found, draft):
        fsync(path)
    return [path.relative_to(draft) for path in found if not path.is_dir()]


def restore_dir(final: Path) -> None:
    """Finish what a kill of a run interrupted: put back a folder that was set aside and not yet replaced."""
    old = _set_aside(final)
    if old.is_dir() and is_ours(old, "/"):
        if final.exists():
            _dissolve(old, final)
        else:
            old.rename(final)


def discard(folder: Path) -> None:
    """Remove a folder so that a kill cannot leave a part of it under its name; others' files in a run's stay."""
    if not is_part(folder):
        with _apart(folder) as place:
            folder.rename(place / folder.name)
        return
    old = _set_aside(folder)
    _note([old], "/")
    if old.exists():
        _dissolve(old, folder)
    folder.rename(old)
    _dissolve(old, folder)


def remove_leftovers(folder: Path) -> None:
    """Remove what kills of a run left of folders that were being made or removed in this one."""
    for left in folder.glob(".*"):
        if left.is_dir() and is_ours(left, "/"):
            if left.name.endswith(".new"):
                shutil.rmtree(left)
            elif left.name.endswith(".old"):
                _dissolve(left, left.with_name(left.name[1:-4]))


def _dissolve(old: Path, home: Path) -> None:
    """Remove what was a run's folder `home`; what the run did not write goes (back) to `home`."""
    _, known, name = _run_of(home)
    assert known is not None
    for folder, folders, names in os.walk(old, topdown=False):
        inside = Path(folder).relative_to(old)
        for part in (*names, *(sub for sub in folders if os.path.islink(f"{folder}/{sub}"))):
            path = Path(folder) / part
            if f"{name}/{(inside / part).as_posix()}" in known and not path.is_symlink():
                path.unlink()
            else:
                _carry(path, home / inside / part)
        if not (names or folders) and inside.parts:
            _carry(Path(folder), home / inside)
        with suppress(OSError):  # it holds something that could not go home
            os.rmdir(folder)


def _carry(path: Path, target: Path) -> None:
    if not os.path.lexists(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        path.rename(target)


def remove_listed(root: Path, names: set[str]) -> None:
    """Remove what a run has listed, but for marks and what links lead to, and the folders that are empty then."""
    for folder in {PurePosixPath(name).parent for name in names if name.endswith("/")}:
        if _leads_to(root, f"{folder}/x"):
            remove_leftovers(root / folder)
    for name in names:
        path = root / name
        if path.name != MARK and _leads_to(root, name) and (path.is_symlink() or path.is_file()):
            path.unlink()
    parents = {parent for name in names for parent in PurePosixPath(name).parents}
    for parent in sorted(parents, key=lambda parent: -len(parent.parts)):
        if parent.parts and _leads_to(root, f"{parent}/x"):
            with suppress(OSError):  # it holds something of others
                os.rmdir(root / parent)


def _leads_to(root: Path, name: str) -> bool:
    """Tell whether a name in a run's folder leads through real folders only."""
    parents = list(PurePosixPath(name).parents)[:-1]
    return all((root / parent).is_dir() and not (root / parent).is_symlink() for parent in parents)


def appeared(folder: Path, before: set[Path]) -> None:
    """List the files in a folder that were not there `before`: those of a library that chooses its names itself."""
    for path in sorted(tree(folder) - before):
        root, known, name = _run_of(path)
        if known is not None:
            _append(Path(root) / LIST, _line(name))
            known.add(name)


def tree(folder: Path) -> set[Path]:
    """Return the files and links under a folder."""
    return {path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()}


def fsync(path: Path) -> None:
    """Flush a file's content, or the names in a folder, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _set_aside(final: Path) -> Path:
    return final.with_name(f".{final.name}.old")


def failpoint(name: str) -> None:
    """Kill this process if QAT_LORA_FAILPOINT is `name`, or `name:3` on the third time; for tests only."""
    if "QAT_LORA_FAILPOINT" not in os.environ:
        return  # uncounted: a forked test sets it in the child
    point, _, times = os.environ["QAT_LORA_FAILPOINT"].partition(":")
    _reached[name] += 1
    if point == name and _reached[name] == int(times or 1):
        os.kill(os.getpid(), signal.SIGKILL)


def write_new(path: Path, chunks: Iterable[bytes | memoryview], kind: str) -> tuple[int, str]:
    """Write a file, whole under a free name; return bytes and sha256. FileExistsError; OSError: nothing is left."""
    partial, digest, size = path.with_name(f".{path.name}.tmp"), hashlib.sha256(), 0
    ours(partial), ours(path)
    opened = False
    try:
        with open(partial, "xb") as file:
            opened = True
            failpoint(f"{kind}-opened")
            for number, chunk in enumerate(chunks):
                file.write(chunk)
                digest.update(chunk)
                size += len(chunk)
                if number == 0:
                    file.flush()
                    failpoint(f"{kind}-started")
            failpoint(f"{kind}-written")
            file.flush()
            os.fsync(file.fileno())
        failpoint(f"{kind}-synced")
        try:
            os.link(partial, path)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            # Some network and FAT file systems have no links. Our lock keeps other builders out of this gap.
            if path.exists():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(path)) from None
            os.rename(partial, path)
        failpoint(f"{kind}-linked")
    finally:
        if opened:  # else the draft is another process's
            partial.unlink(missing_ok=True)
    fsync(path.parent)
    failpoint(f"{kind}-durable")
    return size, digest.hexdigest()


@contextmanager
def lock(path: Path, kind: Lock) -> Iterator[None]:
    """Hold a lock on a file, freed by the kernel if the process dies; OutputExistsError if another process holds it."""
    import fcntl

    if not path.exists():
        ours(path)
    operation = fcntl.LOCK_SH if kind == "shared" else fcntl.LOCK_EX
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
    with os.fdopen(descriptor, "r+b", buffering=0) as file:
        try:
            fcntl.flock(file, operation if kind == "waiting" else operation | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = file.read(32).decode("ascii", "replace").strip() or "unknown"
            what = f"another builder is writing there (process {holder})"
            remedy = "wait for it, stop it, or choose another --out"
            raise OutputExistsError(f"--out {path.parent}: {what}; {remedy}") from None
        if kind == "exclusive":
            file.truncate(0)
            file.write(f"{os.getpid()}\n".encode())
        yield
