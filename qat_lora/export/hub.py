"""Uploading an export to the Hugging Face Hub: which files of a folder are sent, and every reason not to send them.

All checks come before anything is sent, since what was once public stays public: weights that run code when they are
read, a card without a licence, an adapter with the wrong base, keys and tokens, paths of the sender's machine. The
files to send are chosen by the kinds that exports hold, not by a list of exceptions, which nobody can complete.
"""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from qat_lora.errors import ConfigError, ModelError, one_line
from qat_lora.export.card import check_model_card
from qat_lora.files.checksums import check_folder, checkpoint_sha256, read_object
from qat_lora.files.folders import LIST, MARK
from qat_lora.files.outputs import check_listed
from qat_lora.models.adapter import CONFIG, read_adapter

WEIGHTS = (".safetensors", ".gguf")
TEXTS = (".json", ".jinja", ".md")
SENT = {"merges.txt", "vocab.txt", "tokenizer.model", "SHA256SUMS", "LICENSE", "LICENSE.txt", "LICENSE.md", "NOTICE"}
SENT |= {"Modelfile"}  # other files that are sent, by their whole name
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib", ".npy", ".npz")
_PICKLE = re.compile(rb"\x80[\x02-\x05]|PK\x03\x04")  # how pickles begin, and torch's archives of them
_SECRET_NAME = re.compile(r"\.env(\..*)?|\.netrc|id_(rsa|dsa|ecdsa|ed25519)|.*\.(pem|key|p12|pfx|kdbx|keystore)", re.I)
_SECRET_STEM = re.compile(r"\.?(token|credentials?|secrets?|passwords?)", re.I)
SECRET = re.compile(
    r"\bhf_[A-Za-z0-9]{20,}|\bgh[pousr]_[A-Za-z0-9]{30,}|\bgithub_pat_\w{30,}|\bAKIA[0-9A-Z]{16}\b|\bAIza[\w-]{35}"
    r"|\bsk-[\w-]{20,}|\bxox[abprs]-[\w-]{10,}|-----BEGIN [A-Z ]*PRIVATE KEY-----|://[^/\s:@\"]+:[^/\s:@\"]+@"
    r'|"(api_?key|access_token|auth_token|hf_token|password|secret\w*|private_key)"\s*:\s*"[^"]{8,}"'
)
# Pieces of a training text, in which anything may look like a secret.
VOCABULARIES = ("tokenizer.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model")
OURS = {MARK, LIST, "config.yaml", "metrics.jsonl"}  # files of a run that say where it ran; they are not sent
CARD = "README.md"
_REPO = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
PATH = re.compile(r'"(/[^"/]+/[^"]*|[A-Z]:\\\\[^"]*)"')  # in JSON


def check_repo(repo: str) -> None:
    """Raise a ConfigError where a text is no name of a repository."""
    if not _REPO.fullmatch(repo):
        raise ConfigError(f"repo: {repo!r} is no repository name; give OWNER/NAME")


def files_to_upload(folder: Path) -> dict[str, int]:
    """Return the files of a folder that would be sent, bytes by name: weights, settings, tokenizer and card.

    DamagedFileError: one of them is not what was written; ModelError: the folder is missing, holds pickles, what looks
    like a secret, or a link, lacks a card or weights, or an adapter that does not belong to the base beside it.
    """
    if not folder.is_dir():
        raise ModelError(f"folder: there is no folder {folder}; make one with `qat-lora export`")
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            raise ModelError(f"folder: {name} is a link, which may lead out of {folder}; put the file itself there")
        if path.is_dir() or any(part.startswith(".") for part in name.split("/")[:-1]):
            continue
        if _SECRET_NAME.fullmatch(path.name) or _SECRET_STEM.fullmatch(path.stem):
            raise ModelError(f"folder: {name} looks like a secret by its name; take it out of {folder} first")
        if path.name.startswith(".") or path.name in OURS:
            continue
        if _is_pickle(path):
            why = "may be pickled and run code when it is read"
            raise ModelError(f"folder: {name} {why}; only safetensors and gguf go")
        if path.suffix in WEIGHTS + TEXTS or path.name in SENT:
            found[name] = path.stat().st_size
    if not any(name.endswith(WEIGHTS) for name in found):
        raise ModelError(f"folder: {folder} holds no weights (.safetensors or .gguf); make it with `qat-lora export`")
    check_model_card(folder / CARD)
    _check_adapter(folder)
    _check_texts(folder, found)
    for part in filter(Path.is_dir, (folder, *(folder / part for part in ("base", "adapter", "adapters")))):
        check_folder(part)
    return found


def _is_pickle(path: Path) -> bool:
    """Decide by name and first bytes, of which a safetensors file has a length: any bytes, then a brace."""
    with path.open("rb") as file:
        begin = file.read(9)
    if path.suffix == ".safetensors":
        return begin[8:] != b"{"
    return path.suffix.lower() in PICKLES or _PICKLE.match(begin) is not None


def _check_adapter(folder: Path) -> None:
    for adapter, base in ((folder, folder / "base"), (folder / "adapter", folder)):
        if not (adapter / CONFIG).is_file():
            continue
        info = read_adapter(adapter)
        if not (base / "config.json").is_file():
            remedy = "`qat-lora export --form adapter` puts both into one folder"
            raise ModelError(f"adapter: {adapter} would go without its base {info.base}; {remedy}")
        if info.base_sha256 != checkpoint_sha256(base):
            raise ModelError(f"adapter: {adapter} does not belong to the base {base} beside it; export the pair again")


def _check_texts(folder: Path, files: Iterable[str]) -> None:
    for file in files:
        name = Path(file).name
        if name.endswith(WEIGHTS) or name in VOCABULARIES:
            continue
        try:
            text = (folder / file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"folder: {file} cannot be read as text ({error}); take it out first") from None
        if match := SECRET.search(text):
            raise ModelError(f"folder: {file} holds what looks like a secret ({match[0][:8]}…); take it out first")
        if name.endswith((".json", ".md")) and "tokenizer" not in name and (match := PATH.search(text)):
            raise ModelError(f"folder: {file} names a path of this machine ({match[1]}); take it out first")


def upload_summary(folder: Path, files: dict[str, int]) -> dict[str, object]:
    """Return what is sent as plain values."""
    result = folder / "result.json"
    check_listed(result)
    made = read_object(result) if result.is_file() else {}
    return {"form": made.get("form"), "size_bytes": sum(files.values()), "files": files}


def upload(folder: Path, files: Iterable[str], repo: str, private: bool, api: Any = None) -> str:
    """Send files in one commit, so that a repository never shows a card without its weights; return its address.

    The repository is made if it is missing. `api` is a client of the Hub; default: `huggingface_hub.HfApi()`, with the
    login of this machine. ModelError: the Hub refuses.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api = api or HfApi()
    try:
        api.create_repo(repo, private=private, exist_ok=True)
        # Not upload_folder: its allow_patterns are patterns, and a file may be named `*`.
        commit = api.create_commit(
            repo_id=repo,
            operations=[CommitOperationAdd(name, str(folder / name)) for name in files],
            commit_message="Upload a model exported by qat-lora",
        )
    except Exception as error:  # of the network, the login or the Hub: the user can mend all of them
        reason = one_line(error, 300)
        raise ModelError(f"repo: {repo} did not take the upload ({reason}); log in with `hf auth login`") from None
    return str(getattr(commit, "commit_url", commit))
