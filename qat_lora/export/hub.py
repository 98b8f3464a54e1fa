"""Exports and KD caches on the Hugging Face Hub: which files are sent, every reason not to, and caches fetched again.

All checks come before anything is sent, since what was once public stays public: weights that run code when they are
read, a card without a licence, an adapter with the wrong base, keys and tokens, paths of the sender's machine. The
files to send are chosen by the kinds that exports hold, not by a list of exceptions, which nobody can complete.

A cache is a dataset repository. Its shards go through the client's own folder upload, which commits in parts and, run
again, goes on where it stopped; manifest and card follow in a commit of their own: a repository with a manifest is
whole, and can be read in place (`hf://datasets/OWNER/NAME`). One commit for everything, as `upload` makes, cannot be
resumed. A pull fills a folder beside `out`, which gets its name when every byte was read and is what was written.
"""

import fnmatch
import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import qat_lora
from qat_lora.cache.format import layout as fmt
from qat_lora.cache.format.records import Manifest, to_json
from qat_lora.cache.storage.location import LocalFolder, locate
from qat_lora.cache.storage.store import Progress, read_manifest, verify_cache
from qat_lora.errors import CacheDamaged, CacheError, ConfigError, ModelError, OutputExistsError, errors_explained
from qat_lora.export.card import check_model_card, dataset_in_words
from qat_lora.export.forms import display_name
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
SECRET = re.compile("|".join(Path(__file__).with_name("secrets.txt").read_text(encoding="utf-8").splitlines()))
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
            raise ModelError(f"folder: {name} may be pickled and run code when read; only safetensors and gguf go")
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
        with errors_explained(ModelError, f"folder: {file} cannot be read as text", remedy="take it out first"):
            text = (folder / file).read_text(encoding="utf-8")
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

    The repository is made if missing; `api` is by default `huggingface_hub.HfApi()`. ModelError: the Hub refuses.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api = api or HfApi()
    # Of the network, the login or the Hub: the user can mend all of them.
    with errors_explained(ModelError, f"repo: {repo} did not take the upload", remedy="log in with `hf auth login`"):
        api.create_repo(repo, private=private, exist_ok=True)
        # Not upload_folder: its allow_patterns are patterns, and a file may be named `*`.
        commit = api.create_commit(
            repo_id=repo,
            operations=[CommitOperationAdd(name, str(folder / name)) for name in files],
            commit_message="Upload a model exported by qat-lora",
        )
    return str(getattr(commit, "commit_url", commit))


_SHARDS = [f"[es]-{'[0-9]' * 6}.{ending}" for ending in ("json", "safetensors")]
MOST_FILES = 10_000  # of a folder, as the Hub recommends
_SIZES = ("n<1K", "1K<n<10K", "10K<n<100K", "100K<n<1M", "1M<n<10M", "10M<n<100M", "100M<n<1B", "1B<n<10B")


def check_cache(path: str, allow_paths: bool = False, progress: Progress | None = None) -> tuple[Path, Manifest]:
    """Return folder and manifest of a cache that may be sent; CacheError: it is behind a URL, or too many files.

    CacheError too: a record holds what looks like a secret, or, unless `allow_paths`, a path of this machine.
    CacheDamaged: a file is not what was written.
    """
    place = locate(path)
    if not isinstance(place, LocalFolder):
        raise CacheError(f"{place}: is behind a URL; copy the cache to a disk and push that folder")
    strangers = verify_cache(path, progress).strangers
    manifest = read_manifest(path)
    if mixed := [name for name in strangers if any(fnmatch.fnmatch(name, form) for form in _SHARDS)]:
        raise CacheError(f"{path}: {mixed[0]} is named as a shard and is none of this cache; move it away")
    records = [fmt.MANIFEST, *(f"{entry.shard}.json" for entry in manifest.all_shards)]
    if 2 * len(records) > MOST_FILES:
        remedy = "`qat-lora cache pack` makes one file; a build with more --shard-rows makes fewer"
        raise CacheError(f"{path}: has {2 * len(records):,} files; the Hub takes {MOST_FILES:,} a folder: {remedy}")
    for name in records:
        text = place.read(name, fmt.MANIFEST_LIMIT_BYTES).decode()
        if match := SECRET.search(text):
            raise CacheError(f"{path}/{name}: holds what looks like a secret ({match[0][:8]}…), so it is not sent")
        if not allow_paths and (match := PATH.search(text)):
            remedy = "--allow-paths sends it; a build by the teacher's Hub name or a relative path holds none"
            raise CacheError(f"{path}/{name}: names a path of this machine ({match[1]}); {remedy}")
    return place.path, manifest


def dataset_card(manifest: Manifest, repo: str, license: str) -> str:
    """Return the card of a cache as Markdown with the Hub's front matter."""
    held, rows = manifest.fingerprint, [manifest.rows(split) for split in fmt.SERIES]
    size, tokens = sum(entry.bytes for entry in manifest.all_shards), sum(rows) * held.length
    told = {"rows": ", ".join(f"{count:,} {split}" for split, count in zip(fmt.SERIES, rows, strict=True))}
    told |= {"size": f"{size:,} bytes, {tokens:,} tokens, {size / tokens:.0f} bytes a token"}
    told |= {field: value for field, value in to_json(held).items() if value not in (None, "", [])}
    told |= {"teacher": display_name(held.teacher), "dataset": dataset_in_words(held.dataset)}
    told |= {"fingerprint": held.sha256, "sent by": f"qat-lora {qat_lora.__version__}"}
    facts = (f"| {field.replace('_', ' ')} | `{str(value).replace('|', '/')}` |" for field, value in told.items())
    sizes = _SIZES[min(len(_SIZES), max(3, len(str(sum(rows))))) - 3]
    card, name = Path(__file__).with_name("dataset_card.md").read_text(encoding="utf-8"), json.dumps(told["teacher"])
    return card.format(license=json.dumps(license), name=name, size=sizes, facts="\n".join(facts), repo=repo)


def push_cache(folder: Path, manifest: Manifest, repo: str, license: str, private: bool, api: Any = None) -> str:
    """Send a checked cache to a dataset repository, made if it is missing; return the address of the last commit.

    CacheError: the Hub refuses, or the repository holds another cache or is public where `private` was asked for.
    """
    from huggingface_hub import CommitOperationAdd, HfApi

    api, there, record = api or HfApi(), {"repo_id": repo, "repo_type": "dataset"}, folder / fmt.MANIFEST
    remedy = "log in with `hf auth login`; the same command goes on where it stopped"
    with errors_explained(CacheError, f"repo: {repo} did not take the cache", remedy=remedy):
        api.create_repo(private=private, exist_ok=True, **there)
        if private and not api.repo_info(**there).private:
            raise CacheError(f"repo: {repo} is public already; make it private, or give --public")
        if api.file_exists(filename=fmt.MANIFEST, **there):
            held = Path(api.hf_hub_download(filename=fmt.MANIFEST, **there)).read_bytes()
            if held != record.read_bytes():
                raise CacheError(f"repo: {repo} holds another cache already; choose another name")
        send = getattr(api, "upload_large_folder", api.upload_folder)  # of older clients, where the other starts anew
        send(folder_path=folder, allow_patterns=[*_SHARDS, fmt.LM_HEAD], **there)
        card = dataset_card(manifest, repo, license).encode()
        last = [CommitOperationAdd(CARD, card), CommitOperationAdd(fmt.MANIFEST, record.read_bytes())]
        commit = api.create_commit(operations=last, commit_message="Complete a KD cache of qat-lora", **there)
    return str(getattr(commit, "commit_url", commit))


def pull_cache(repo: str, out: Path, revision: str | None = None, progress: Progress | None = None) -> Manifest:
    """Fetch a cache into a folder, which appears when every byte is verified; run again, it goes on where it stopped.

    OutputExistsError: `out` holds something; CacheError: no finished cache there, too little room, or the Hub refuses.
    CacheDamaged: what arrived is not what was written.
    """
    from huggingface_hub import snapshot_download

    if out.is_symlink() or out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise OutputExistsError(f"--out {out}: exists already; nothing was touched: choose another folder")
    draft = out.with_name(f".{out.name}.pull")
    draft.mkdir(parents=True, exist_ok=True)

    def fetch(*names: str) -> None:
        snapshot_download(repo, repo_type="dataset", revision=revision, local_dir=draft, allow_patterns=[*names])

    remedy = "check name, revision, network and login (`hf auth login`); the same command goes on from there"
    with errors_explained(CacheError, f"repo: {repo} cannot be fetched", remedy=remedy):
        fetch(fmt.MANIFEST)
        manifest = read_manifest(draft)
        lacking = (entry for entry in manifest.all_shards if not (draft / f"{entry.shard}.safetensors").exists())
        missing = sum(entry.bytes for entry in lacking)
        if missing > (free := LocalFolder(draft).free_bytes()):
            raise CacheError(f"--out {out}: {missing:,} bytes are to come and {free:,} are free; choose another disk")
        fetch(fmt.MANIFEST, CARD, fmt.LM_HEAD, *_SHARDS)
    shutil.rmtree(draft / ".cache", ignore_errors=True)  # the client's notes; without them it compares by checksums
    try:
        strangers = verify_cache(draft, progress).strangers
    except CacheDamaged as error:
        raise CacheDamaged(f"{error}; {out} was not made: the same command fetches again what differs") from None
    for name in {*strangers} - {CARD}:  # of another revision
        (draft / name).unlink()
    os.rename(draft, out)
    return manifest
