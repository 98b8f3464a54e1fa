"""Output folders: new, resumed, already complete, or somebody else's.

Every command that writes a folder claims it first with the settings that decide its content, and holds it while it
writes. The same settings again mean "go on" or "it is there"; other settings are refused, naming the first that
differs, and so is a second process in the same folder. Only `--overwrite` removes anything, and only a folder that a
claim of ours marks.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qat_lora.errors import OutputExistsError

MARK = "qat_lora_run.json"


@contextlib.contextmanager
def alone(out: Path) -> Iterator[None]:
    """Hold a run's folder (made if missing) so that no other process of ours works there; freed even by a kill.

    The lock is `flock` on the folder itself: nothing is left behind, and nothing is to be cleaned up. A file system
    that cannot lock a folder (some network ones) gives no protection.

    Raises:
        OutputExistsError: another process holds it, or the folder is a file.
    """
    import fcntl

    if out.is_file():
        raise OutputExistsError(f"--out {out}: is a file; give a folder")
    out.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(out, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise OutputExistsError(
                    f"--out {out}: another process is working there; wait for it, stop it, or choose another --out"
                ) from None
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def claimed(out: Path, command: str, settings: Mapping[str, Any], overwrite: bool) -> Iterator[bool]:
    """Hold a folder (`alone`) and `claim` it; give True where an equal run has completed there.

    Raises:
        OutputExistsError: another process works there, or the folder holds another run, or files that are not ours.
    """
    with alone(out):
        yield claim(out, command, settings, overwrite)


def claim(out: Path, command: str, settings: Mapping[str, Any], overwrite: bool) -> bool:
    """Take a folder for a run; return True where an equal run has completed there.

    Args:
        out: the folder, made if missing.
        command: what runs, for example `recover`.
        settings: JSON values that decide the content.
        overwrite: remove an earlier run of ours first.

    Raises:
        OutputExistsError: the folder holds another run, or files that are not ours.
    """
    settings = json.loads(json.dumps({"command": command, **settings}))
    mark = out / MARK
    if out.is_file():
        raise OutputExistsError(f"--out {out}: is a file; give a folder")
    if out.is_dir() and any(path != _draft(mark) for path in out.iterdir()):
        if not mark.is_file():
            raise OutputExistsError(f"--out {out}: holds files that no qat-lora run made; choose another folder")
        if overwrite:
            _empty(out)
        else:
            was = _read(mark)
            for name in ("command", *sorted(settings.keys() | was["settings"].keys())):
                here, there = settings.get(name), was["settings"].get(name)
                if here != there:
                    raise OutputExistsError(
                        f"--out {out}: holds another run: {name} was {_short(there)}, now {_short(here)}; "
                        "choose another --out, or --overwrite to start again"
                    )
            return was["complete"]
    out.mkdir(parents=True, exist_ok=True)
    _write(mark, settings, complete=False)
    return False


def noted(out: Path) -> str:
    """Return what the run in a folder noted about itself, as text; nothing where there is none."""
    mark = out / MARK
    return mark.read_text(encoding="utf-8", errors="replace") if mark.is_file() else ""


def _read(mark: Path) -> dict[str, Any]:
    try:
        was = json.loads(mark.read_text(encoding="utf-8"))
        return {"settings": dict(was["settings"]), "complete": bool(was["complete"])}
    except (ValueError, KeyError, TypeError):
        raise OutputExistsError(f"--out {mark.parent}: {MARK} in it is damaged; --overwrite starts again") from None


def ours(path: Path) -> Path:
    """Note, before it is written, that the run whose folder holds `path` writes this file; return the path."""
    return path


def complete(out: Path) -> None:
    """Mark the run in a claimed folder as complete."""
    mark = out / MARK
    _open_to_others(out)
    _write(mark, json.loads(mark.read_text(encoding="utf-8"))["settings"], complete=True)


def _open_to_others(out: Path) -> None:
    """Give files that safetensors made private (0600) the mode that the user's umask gives all others."""
    umask = os.umask(0)
    os.umask(umask)
    for file in out.rglob("*.safetensors"):
        file.chmod(0o666 & ~umask)


def _empty(out: Path) -> None:
    """Remove all but the mark, which first stops being anybody's: a kill in here leaves no run that looks whole."""
    _write(out / MARK, {}, complete=False)
    for path in out.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MARK:
            path.unlink()


def _draft(mark: Path) -> Path:
    return mark.with_suffix(".tmp")


def _write(mark: Path, settings: Mapping[str, Any], complete: bool) -> None:
    draft = _draft(mark)
    draft.write_text(json.dumps({"settings": settings, "complete": complete}, indent=1), encoding="utf-8")
    draft.replace(mark)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
