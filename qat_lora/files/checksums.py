"""Checksums of the files we write, in the format of `sha256sum -c SHA256SUMS`, and the identity of a model.

Safetensors has no checksum: a flipped bit in a weight gives a slightly different model, and no loader notices. So every
folder that can be loaded by itself gets a `SHA256SUMS`, written last. Checksums inside each file would need a reader of
our own for every format; these survive copying and can be checked with standard tools. In a checkpoint missing sums are
damage; in a model, adapter or export, where `qat_lora.json` promises them. Not `config.json`: transformers copies
unknown keys along, so a model that somebody fine-tunes and saves would promise sums that nobody wrote.

A base, teacher or adapter is known by one sha256 over its weights and those settings that change what they compute,
such as `rms_norm_eps`; the version that wrote them and notes for people are left out.
"""

import fnmatch
import functools
import hashlib
import json
import math
import re
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qat_lora.errors import DamagedFileError, ModelError, one_line

SUMS, NOTE = "SHA256SUMS", "qat_lora.json"
STATE = "best.pt"  # an export's state dict: weights of a folder that has no other
TOKENIZER = ("tokenizer*", "*_tokens*.json", "vocab*", "merges.txt", "*.jinja", "chat_template*", "*processor*.json")
WEIGHTS = ("*.safetensors", "*.index.json", "*.gguf")
LOADED = ("config.json", "generation_config.json", "adapter_config.json", NOTE, *TOKENIZER, *WEIGHTS)
"""Names of the files that decide what is loaded. Cards and pictures, which people may edit, are not among them."""
CHANGES_NOTHING = ("transformers_version", "_name_or_path", "architectures", "base_model_name_or_path")
_LINE = re.compile(r"([0-9a-f]{64})  ([^/\0\n]+)")
_SUMS_LIMIT_BYTES = 1 << 20
_TICK_NS = 50_000_000  # longer than a file system's clock stands still: a file changed within it may keep its times


def sha256_of(file: Path) -> str:
    """Return a file's sha256 in hex; read once as long as its size and times stay."""
    status = file.stat()
    changed_ns = max(status.st_mtime_ns, status.st_ctime_ns)
    known = _sha256 if time.time_ns() - changed_ns > _TICK_NS else _sha256.__wrapped__
    return known(str(file.absolute()), status.st_ino, status.st_size, changed_ns)


@functools.lru_cache(maxsize=4096)
def _sha256(path: str, _inode: int, _size: int, _changed_ns: int) -> str:
    with open(path, "rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def read_object(file: Path) -> dict[str, Any]:
    """Return the object in a JSON file; ModelError: it cannot be read, is no JSON object, or a number in it is none."""

    def number(text: str) -> float:
        value = float(text)
        if math.isnan(value) or math.isinf(value) and file.name != "config.json":  # Mamba's has infinities
            raise ValueError(f"{text} is no {'' if math.isnan(value) else 'finite '}number")
        return value

    try:
        data = json.loads(file.read_text(encoding="utf-8"), parse_constant=number, parse_float=number)
    except OSError as error:
        raise ModelError(f"{file}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{file}: is no JSON that can be used ({one_line(error, 200)})") from None
    if not isinstance(data, dict):
        raise ModelError(f"{file}: holds a JSON {type(data).__name__} and no object")
    return data


def write_sums(folder: Path, names: Iterable[str]) -> None:
    """Write the checksums of some files of a folder; to be called when all of them are there."""
    lines = [f"{sha256_of(folder / name)}  {name}\n" for name in sorted(set(names))]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def seal(folder: Path) -> None:
    """Write the checksums of a folder that can be loaded, and the promise of them; the last step of writing one."""
    note = folder / NOTE
    held = read_object(note) if note.is_file() else {}
    note.write_text(json.dumps({**held, "checksums": SUMS}, indent=2) + "\n", encoding="utf-8")
    write_sums(folder, _matching((path.name for path in folder.iterdir() if path.is_file()), (*LOADED, STATE)))


def check_folder(folder: Path, patterns: Iterable[str] = LOADED) -> None:
    """Compare the files of a folder that are about to be loaded with its checksums; DamagedFileError names the file."""
    note = folder / NOTE
    check_sums(folder, note.is_file() and read_object(note).get("checksums") == SUMS, patterns)


def check_sums(folder: Path, promised: bool, patterns: Iterable[str]) -> None:
    """Compare a folder's files with its checksums, where it has any.

    Where one of its files says that it has checksums (`promised`), every file that matches `patterns` needs one.
    DamagedFileError names the file that is missing or is not what was written, or the checksums themselves.
    """
    sums = folder / SUMS
    if not sums.exists():
        if promised:
            remedy = f"or, if you trust the files, make it again: cd {folder} && sha256sum FILES > {SUMS}"
            what = f"is missing, and {folder} was written with it; restore it from a copy, {remedy}"
            raise DamagedFileError(f"{sums}: {what}")
        return
    found = _read_sums(sums)
    if found is None:
        if promised:
            raise DamagedFileError(f"{sums}: is damaged: a line is not `sha256  name`; restore it from a copy")
        return  # of somebody else's making
    for name in _matching({*found, *(path.name for path in folder.iterdir() if path.is_file())}, patterns):
        file = folder / name
        if name in found:
            try:
                actual = sha256_of(file)
            except OSError as error:
                raise DamagedFileError(f"{file}: cannot be read ({error.strerror}), and {SUMS} lists it") from None
            if actual != found[name]:
                what = f"is not what was written (its sha256 is {actual[:12]}…, {SUMS} says {found[name][:12]}…)"
                remedy = f"restore it from a copy. If you changed it on purpose, write the new sum into {sums}"
                raise DamagedFileError(f"{file}: {what}; {remedy}")
        elif promised:
            remedy = f"if you put it there, add one: cd {folder} && sha256sum {name} >> {SUMS}"
            raise DamagedFileError(f"{file}: has no checksum; {remedy}")


def _read_sums(sums: Path) -> dict[str, str] | None:
    with sums.open("rb") as stream:
        text = stream.read(_SUMS_LIMIT_BYTES).decode("utf-8", errors="replace")
    *lines, end = text.split("\n")
    found = {match[2]: match[1] for match in map(_LINE.fullmatch, lines) if match is not None}
    return found if found and not end and len(found) == len(lines) else None


def _matching(names: Iterable[str], patterns: Iterable[str]) -> list[str]:
    """Return the names that match, in order; the checksums themselves never do."""
    wanted = tuple(patterns)
    return sorted(name for name in names if name != SUMS and any(fnmatch.fnmatchcase(name, p) for p in wanted))


def checkpoint_sha256(folder: Path) -> str:
    """Return the identity of a folder's weights and settings, of a file its sha256; ModelError: none, or no object."""
    if folder.is_file():
        return sha256_of(folder)
    weights = hashlib.sha256()
    for file in model_files(folder):
        weights.update(file.name.encode() + bytes.fromhex(sha256_of(file)))
    files = (folder / "config.json", folder / "adapter_config.json")
    settings = [_canonical(read_object(file)) for file in files if file.is_file()]
    return hashlib.sha256(json.dumps([weights.hexdigest(), *settings], sort_keys=True).encode()).hexdigest()


def model_files(folder: Path) -> list[Path]:
    """Return a model's weight files, without what lies beside them, or its one file; ModelError: there are none."""
    return [folder] if folder.is_file() else sorted(folder.glob("model*.safetensors")) or weight_files(folder)


def weight_files(folder: Path) -> list[Path]:
    """Return a folder's weight files, the state dict of an export if it has no other; ModelError if there are none."""
    files = sorted(folder.glob("*.safetensors"))
    if not files and is_state(folder / STATE):
        return [folder / STATE]
    if not files:
        raise ModelError(f"model: {folder} holds no .safetensors weights (pickled weights are not read)")
    return files


def is_state(file: Path) -> bool:
    """Decide whether a pickled file is the state dict of an export of ours, which has its config beside it."""
    beside = all((file.parent / name).is_file() for name in (STATE, NOTE, "config.json"))
    return file.name == STATE and beside and not any(file.parent.glob("*.safetensors"))


def _canonical(settings: dict[str, Any]) -> dict[str, Any]:
    """Return what decides in a model's settings; the type of its weights under the newer of its two names."""
    kept = {name: value for name, value in settings.items() if name not in CHANGES_NOTHING}
    if "torch_dtype" in kept:
        kept.setdefault("dtype", kept.pop("torch_dtype"))
    if isinstance(quantization := kept.get("quantization_config"), dict):
        kept["quantization_config"] = {name: value for name, value in quantization.items() if name != "details"}
    return kept
