"""Output folders: new, to be resumed, complete, or somebody else's.

Every command claims its output folder with the settings that decide the content, and locks it while it writes. The same
settings again mean "resume" or "already there"; other settings, and a second process, are refused. Only `--overwrite`
removes anything: the files listed by an earlier run of the same command (`files/folders.py`), none if one is an input.
"""

import contextlib
import errno
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from qat_lora.errors import DamagedFileError, OutputExistsError
from qat_lora.files import folders as files
from qat_lora.files.checksums import sha256_of
from qat_lora.files.folders import LIST, MARK
from qat_lora.terminal import redact

HASHED_BELOW_BYTES = 16 << 20  # of a complete run, smaller files are read when it is asked for again, else sizes count
_NOT_KEPT = ("checkpoints", "tensorboard", "unfinished", "wandb")  # folders that only resuming or watching needs
_EDITED = (".md", ".png", ".html")  # files that people may edit; neither is checked in a complete run
_SHOWN = 8


class _Mark(NamedTuple):
    settings: dict[str, Any]
    complete: bool
    files: dict[str, Any]  # size and sha256 of a complete run's


@contextlib.contextmanager
def lock_dir(out: Path) -> Iterator[None]:
    """Lock a run's folder, made if missing, by `flock`, which a kill frees; OutputExistsError: it is held."""
    import fcntl

    if out.is_file():
        raise OutputExistsError(f"--out {out}: is a file; give a folder")
    out.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    with contextlib.ExitStack() as stack:
        stack.callback(os.close, descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                remedy = "wait for it, stop it, or choose another --out"
                raise OutputExistsError(f"--out {out}: another process is working there; {remedy}") from None
        stack.callback(files.release, out)
        yield


@contextlib.contextmanager
def claimed(
    out: Path, command: str, settings: Mapping[str, Any], overwrite: bool, inputs: Iterable[object] = ()
) -> Iterator[bool]:
    """Hold a folder (`lock_dir`) and `claim` it; give True where an equal run has completed there; raises as both."""
    with lock_dir(out):
        yield claim(out, command, settings, overwrite, inputs)


def claim(out: Path, command: str, settings: Mapping[str, Any], overwrite: bool, inputs: Iterable[object] = ()) -> bool:
    """Take a folder, made if missing, for a run; return True where an equal run has completed there.

    `settings` are JSON values that decide the content, and are written and compared without the credentials of the
    addresses in them; `overwrite` removes an earlier run of the same command first;
    `inputs` are what the command reads, as it was given: None, URLs and Hub names are passed over.

    OutputExistsError: the folder holds another run, an input, or files that are not ours; nothing was touched.
    DamagedFileError: an equal run has completed there, and a file of it is missing or changed.
    """
    settings, mark = _redacted(json.loads(json.dumps({"command": command, **settings}))), out / MARK
    if out.is_file():
        raise OutputExistsError(f"--out {out}: is a file; give a folder")
    out.mkdir(parents=True, exist_ok=True)
    if not mark.is_file() or mark.is_symlink():
        draft = mark.with_name(f".tmp-{MARK}")
        foreign = (path for path in out.iterdir() if path != draft)
        if not files.is_draft(draft, _text(settings, False, {})) or any(foreign) and not files.is_part(out):
            raise OutputExistsError(f"--out {out}: holds files that no qat-lora run made; choose another folder")
        files.ours(mark)  # of a run that this one is a part of
        files.replace_own(mark, _text(settings, False, {}))
        files.begin_list(out, command, set())
        return False
    keeper, names = files.listed(out)
    try:
        was = _read(mark)
    except OutputExistsError:
        if not overwrite or keeper != command:
            raise
        was = _Mark({"command": command}, False, {})
    differing = next((name for name in ("command", *sorted(settings.keys() | was.settings.keys()))
                      if settings.get(name) != was.settings.get(name)), None)  # fmt: skip
    if not overwrite and differing is None:
        if was.complete:
            _check_whole(out, was, names)
        if keeper is None and any(path.name not in (MARK, LIST) for path in out.iterdir()):
            remedy = "restore it from a copy, or choose another --out"
            raise DamagedFileError(f"{out / LIST}: is missing, so what is this run's is not known; {remedy}")
        if was.complete:
            files.hold(out, names)
        else:
            files.begin_list(out, command, {name for name in names if os.path.lexists(out / name)})
        return was.complete
    refuse_inputs(out, inputs, names)
    if differing == "command" or not overwrite:
        there, here = (of.get(str(differing)) for of in (was.settings, settings))
        while isinstance(there, dict) and isinstance(here, dict):
            inner = next(name for name in sorted({*there, *here}) if there.get(name) != here.get(name))
            differing, there, here = f"{differing}.{inner}", there.get(inner), here.get(inner)
        limit = " (--overwrite removes runs of the same command only)"
        remedy = f"choose another --out{limit if differing == 'command' else ', or --overwrite to start again'}"
        change = f"{differing} was {_short(there)}, now {_short(here)}"
        raise OutputExistsError(f"--out {out}: holds another run: {change}; {remedy}")
    # First: a kill in here leaves no run that looks whole.
    files.replace_own(mark, _text({"command": command}, False, {}))
    _remove(out, names)
    others = (path for path in out.iterdir() if path.name not in (MARK, LIST))
    if kept := sorted(f"{path.name}/" if path.is_dir() else path.name for path in others):
        more = f" and {len(kept) - _SHOWN} more" if len(kept) > _SHOWN else ""
        print(f"note: {out}: not this run's, so left as it is: {', '.join(kept[:_SHOWN])}{more}", file=sys.stderr)
    files.begin_list(out, command, set())
    files.replace_own(mark, _text(settings, False, {}))
    return False


def refuse_inputs(out: Path, inputs: Iterable[object], names: Iterable[str]) -> None:
    """Raise OutputExistsError where `out` is or holds an input, or its `names`, to be removed, are an input's."""
    home, doomed = out.resolve(), {_identity(out / name) for name in names} - {None}
    for given in filter(None, inputs):
        meant = Path(str(given).removeprefix("file://")).expanduser()
        for path in filter(Path.exists, (meant, meant.with_suffix("")) if meant.suffix else (meant,)):
            real = path.resolve()
            held = real == home or home in real.parents
            if held or doomed and any(_identity(file) in doomed for file in _inside(path, home)):
                what = "is the same folder as" if real == home else "holds" if held else "has files in common with"
                remedy = "nothing was touched: choose another --out"
                raise OutputExistsError(f"--out {out}: {what} the input {given}; {remedy}")


def _inside(path: Path, home: Path) -> Iterator[Path]:
    """Yield a file, or the files of a folder but for those in `home`; a link counts as what it leads to."""
    yield path
    for folder, folders, names in os.walk(path):
        links = [name for name in folders if os.path.islink(f"{folder}/{name}")]
        yield from (Path(folder) / name for name in names)
        for link in links:
            yield from (Path(root) / name for root, _, found in os.walk(f"{folder}/{link}") for name in found)
        folders[:] = [name for name in folders if Path(folder, name).resolve() != home]


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def settings_of(out: Path, command: str) -> dict[str, Any]:
    """Return the settings of the command's run that has claimed a folder, none where no mark of it can be read."""
    settings: dict[str, Any] = {}
    with contextlib.suppress(OutputExistsError):
        if (out / MARK).is_file():
            settings = _read(out / MARK).settings
    return settings if settings.get("command") == command else {}


def complete(out: Path) -> None:
    """Mark the run in a claimed folder as complete, with the size and sha256 of every file that it leaves."""
    mark, (_, names) = out / MARK, files.listed(out)
    was = _read(mark)
    names = {name for name in names if os.path.lexists(out / name)}  # a name that is free again may be another's later
    files.begin_list(out, was.settings["command"], names)
    # What safetensors made private (0600) gets the mode that the user's umask gives all others.
    os.umask(umask := os.umask(0))
    for file in (out / name for name in names):
        if file.suffix == ".safetensors" and file.is_file() and not file.is_symlink():
            file.chmod(0o666 & ~umask)
    found = {
        name: [(out / name).stat().st_size, sha256_of(out / name)]
        for name in sorted(names)
        if not name.endswith((*_EDITED, "/", MARK)) and name.split("/")[0] not in _NOT_KEPT and (out / name).is_file()
    }
    files.replace_own(mark, _text(was.settings, True, found))


def reopen(out: Path) -> None:
    """Mark a run as not complete, as a kill would have left it; for tests and `smoke`."""
    was = _read(out / MARK)
    files.replace_own(out / MARK, _text(was.settings, False, was.files))


def _check_whole(out: Path, was: _Mark, names: Iterable[str]) -> None:
    """Refuse a complete run of which a file is missing or changed, also in the runs that are parts of it."""
    for name, (size, sha256) in was.files.items():
        file = out / name
        gone = not file.is_file()
        if gone or file.stat().st_size != size or size < HASHED_BELOW_BYTES and sha256_of(file) != sha256:
            what = f"{'is missing' if gone else 'is not what was written'}, and the run in {out} was complete with it"
            raise DamagedFileError(f"{file}: {what}; restore it from a copy, or --overwrite makes everything again")
    for mark in (out / name for name in names):
        if mark.name == MARK and mark.is_file():
            _check_whole(mark.parent, _read(mark), files.listed(mark.parent)[1])


def check_listed(file: Path) -> None:
    """Raise DamagedFileError unless a file is what its folder's complete run wrote; OutputExistsError: bad mark."""
    mark = file.parent / MARK
    found = _read(mark).files if mark.is_file() else {}
    if file.name in found and file.is_file() and sha256_of(file) != found[file.name][1]:
        remedy = "restore it from a copy, or make it again"
        raise DamagedFileError(f"{file}: is not what was written by the run in its folder; {remedy}")


def _remove(out: Path, names: set[str]) -> None:
    """Remove the listed files of a run, and the runs that are parts of it likewise."""
    for name in sorted(names):
        part = (out / name).parent
        keeper, own = files.listed(part)
        if Path(name).name == MARK and keeper is not None and os.path.lexists(out / name):
            with lock_dir(part):
                _remove(part, own)
                for last in (LIST, MARK):
                    (part / last).unlink(missing_ok=True)
            with contextlib.suppress(OSError):  # it holds something of others
                part.rmdir()
    files.hold(out, names)
    files.remove_listed(out, names)


def _read(mark: Path) -> _Mark:
    try:
        text = mark.read_text(encoding="utf-8")
        was = json.loads(text)
        found = _Mark(dict(was["settings"]), bool(was["complete"]), dict(was["files"]))
        if text != _text(*found):
            raise ValueError("its checksum does not fit")
    except (ValueError, KeyError, TypeError, RecursionError):
        what = f"{MARK} in it is damaged; --overwrite starts again, if the list in {LIST} is of this command"
        remedy = "else delete the folder by hand, or choose another --out"
        raise OutputExistsError(f"--out {mark.parent}: {what}; {remedy}") from None
    return found._replace(settings=_redacted(found.settings))  # an older release wrote them as they were given


def _redacted(value: Any) -> Any:
    """Return a JSON value with `***` for the credentials of the addresses in it."""
    if isinstance(value, dict):
        return {redact(name): _redacted(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_redacted(inner) for inner in value]
    return redact(value) if isinstance(value, str) else value


def _text(settings: Mapping[str, Any], complete: bool, found: Mapping[str, Any]) -> str:
    """Return the text of a mark: its last key is the sha256 of the others, so that a flipped bit is noticed."""
    content: dict[str, Any] = {"settings": settings, "complete": complete, "files": found}
    content["checksum"] = hashlib.sha256(json.dumps(content).encode()).hexdigest()
    return json.dumps(content, indent=1)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
