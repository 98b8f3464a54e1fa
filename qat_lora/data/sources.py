"""Where text comes from: a file, a folder, or a Hugging Face dataset, as one numbered series of documents.

Document numbers make a build resumable: the same settings give the same documents in one order everywhere, and
`open_documents(config, start=n)` continues at number n. Folders are read in order of relative paths and rows in the
order of their file; nothing is shuffled here, and blank documents keep their numbers. Skipped documents are not parsed.

Of several builders each opens its own files, or row groups where files are few: dealing out documents has n machines
read, and copy from a bucket, everything. Only a text with fewer of these `units` than builders is dealt out so.

Local text is read with the standard library (Parquet with pyarrow); `datasets` serves the hub and its own folders.

Text behind a URL (gs://, s3://, hf://, any file system of fsspec) is copied once, then read as files of this machine.
Read in place it would be fetched several times, and by every process. A copy is named by the URL and by what the store
lists (names, sizes, versions), so changed text is another.
"""

import contextlib
import functools
import hashlib
import heapq
import itertools
import json
import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from qat_lora.config import HELP, common, option
from qat_lora.data import file_rows as parsed
from qat_lora.data.file_rows import ROW_SUFFIXES, Row, as_row, file_rows, lines_of, open_text, reading, well_formed
from qat_lora.data.layouts import CHATS, Format, articles, layout_of, starts_with_title, text_of, tokens_of, weight_of
from qat_lora.data.tokenize import WINDOW_CHARS, slices
from qat_lora.errors import MissingExtraError, QatLoraError, TextError, one_line
from qat_lora.extras import URL_EXTRAS, require
from qat_lora.terminal import redact

PLAIN_SUFFIXES = (".txt", ".md", ".rst", ".py")
TEXTS = tuple(f"**/*{suffix}" for suffix in (*PLAIN_SUFFIXES, ".jsonl", ".parquet"))  # of a folder, by default
_VERSION_KEYS = ("size", "etag", "ETag", "md5Hash", "blob_id", "mtime", "LastModified", "updated")
FILES_A_BUILDER = 8  # with fewer, Parquet files are divided into row groups, so that shares differ less


class Document(NamedTuple):
    """One document: a text, or a chat as messages with `role` and `content`."""

    text: str | Path | None  # the file, where it is too large to hold
    messages: list[dict[str, str]] | None
    name: str  # where it comes from, for people
    tokens: tuple[list[int], int] | None = None  # of a text that a model wrote: its ids, how many are the prompt's
    weight: float = 1.0  # of its tokens in a loss

    @property
    def is_blank(self) -> bool:
        """Whether there is nothing to read."""
        return not self.messages and all(part.isspace() for part in self.parts())

    def parts(self) -> Iterable[str]:
        """Return the text in parts, which make the whole when joined; a file is read anew each time."""
        return _file_parts(self.name, self.text) if isinstance(self.text, Path) else slices(self.text or "")


def _file_parts(name: str, path: Path) -> Iterator[str]:
    """Yield parts of at most `WINDOW_CHARS` characters; TextError if the file cannot be read."""
    with reading(name), open_text(path) as file:
        yield from iter(partial(file.read, WINDOW_CHARS), "")


@dataclass(frozen=True)
class TextConfig:
    """What text to read."""

    dataset: str | None = common(None, HELP["dataset"])
    dataset_config: str | None = option(None, "configuration of the Hugging Face dataset, e.g. wikitext-103-raw-v1")
    dataset_revision: str | None = option(None, "branch, tag or commit of the Hugging Face dataset")
    split: str = option("train", "split of the Hugging Face dataset; files have none")
    text_field: str = option("text", "field of a row that holds its text")
    weight_field: str | None = option(None, "field of a row that holds its weight in the loss; default: all weigh 1")
    format: Format = option("auto", HELP["format"])
    glob: tuple[str, ...] = option(TEXTS, HELP["glob"])
    files_from: str | None = option(None, HELP["files_from"])
    streaming: bool = option(False, "read the Hugging Face dataset over the network instead of storing it first")


_Load = Callable[[], Document]


def open_documents(config: TextConfig, start: int = 0) -> Iterator[Document]:
    """Return the documents from number `start` on, read as they are taken.

    A plain text file is one document (bytes that are not UTF-8 become U+FFFD, line ends newlines), a WikiText file one
    per article, any row one. A path that exists is taken before a Hugging Face name. TextError: no such path, no files,
    only blank text (checked when `start` is 0), no text, a row without the field; MissingExtraError: no `datasets`.
    """
    path = _local_path(config)
    if path is None or _is_saved_dataset(path):
        loads = _dataset_loads(_load_dataset(config, path), config, start)
    else:
        each = itertools.starmap(partial(_file_loads, config), _files(path, config))
        loads = itertools.islice(itertools.chain.from_iterable(each), start, None)
    documents, seen = (load() for load in loads), list[Document]()
    if start:
        return documents
    for document in documents:  # to the first with something in it, so that an empty source is refused at once
        seen.append(document)
        if not document.is_blank:
            return itertools.chain(seen, documents)
    raise TextError(f"dataset: {config.dataset} is empty: {len(seen)} documents, all blank; give some text")


class Unit(NamedTuple):
    """A file, or a row group of one: what a builder owns."""

    name: str
    path: Callable[[], Path]  # copies a file from behind a URL when it is first read
    bytes: int
    group: int | None = None


def units(config: TextConfig, builders: int) -> list[Unit] | None:
    """Return what is dealt out to builders, in the order of the text; None: one builder, or deal out documents."""
    url, found = str(config.dataset), list[Unit]()
    if builders == 1 or ("://" in url and config.files_from):
        return None
    if far := "://" in url and not url.startswith(("file://", "local://")):
        for name, size in listing(url, config.glob):
            found.append(Unit(name, partial(fetched, f"{url.rstrip('/')}/{name}" if name else url), size))
    elif (path := _local_path(config)) is not None and not _is_saved_dataset(path):
        found = [Unit(name, partial(Path, file), file.stat().st_size) for name, file in _chosen_files(path, config)]
    if len(found) < builders * (1 if far else FILES_A_BUILDER):  # far: to see its row groups a file is copied
        found = [part for unit in found for part in _row_groups(config, unit)]
    return found if len(found) >= builders else None


def _row_groups(config: TextConfig, unit: Unit) -> list[Unit]:
    if not unit.name.lower().endswith(".parquet") or _is_articles(file_rows(unit.name, unit.path()), config):
        return [unit]  # articles go on over the ends of row groups
    return [unit._replace(bytes=size, group=group) for group, size in enumerate(parsed.group_bytes(unit.path()))]


def own_documents(
    config: TextConfig, dealt: Sequence[Unit], first: int = 0, builder: int = 0, builders: int = 1
) -> Callable[[int], Iterator[Document]]:
    """Return a builder's own series, numbered anew from 0; documents before number `first` of all are left out."""
    own, left_out, least = list[int](), list[int](), [(0, i) for i in range(builders)]
    for number in sorted(range(len(dealt)), key=lambda number: -dealt[number].bytes):
        size, i = least[0]
        heapq.heapreplace(least, (size + dealt[number].bytes, i))
        own += [number] if i == builder else []
    while (left := first - sum(left_out)) > 0:
        left_out.append(sum(1 for _ in itertools.islice(_unit_loads(config, dealt[len(left_out)]), left)))

    def open_at(start: int) -> Iterator[Document]:
        each = (itertools.islice(_unit_loads(config, dealt[n]), sum(left_out[n : n + 1]), None) for n in sorted(own))
        return (load() for load in itertools.islice(itertools.chain.from_iterable(each), start, None))

    return open_at


def _unit_loads(config: TextConfig, unit: Unit) -> Iterator[_Load]:
    _check_text(unit.name, path := unit.path())
    return _file_loads(config, unit.name, path, unit.group)


def describe_source(config: TextConfig, dealt: Sequence[Unit] | None = None) -> str:
    """Return what the text is, as canonical JSON: equal text, equal description, wherever it lies.

    Local text counts by relative paths, sizes and content (sha256), a hub dataset by name, configuration, split
    and revision: without `dataset_revision` a change on the hub goes unnoticed. So does one of `dealt` text that keeps
    names and sizes, since no builder reads all of it. Raises as `open_documents` does.
    """
    layout = {"format": config.format, "text_field": config.text_field}
    layout |= {"weight_field": config.weight_field} if config.weight_field else {}
    path = None if dealt else _local_path(config)
    described: dict[str, Any]
    if dealt:
        names = json.dumps([(unit.name, unit.group, unit.bytes) for unit in dealt]).encode()
        size = sum(unit.bytes for unit in dealt)
        described = {"kind": "units", "units": len(dealt), "bytes": size, "sha256": hashlib.sha256(names).hexdigest()}
    elif path is None:
        described = {"kind": "hub", "dataset": config.dataset, "config": config.dataset_config}
        described |= {"split": config.split, "revision": config.dataset_revision}
    elif _is_saved_dataset(path):
        # cache-*.arrow are results that `datasets` keeps beside the data
        found = [file for file in sorted(path.rglob("*")) if file.is_file() and not file.name.startswith("cache-")]
        files = [(file.relative_to(path).as_posix(), file) for file in found]
        described = {"kind": "saved dataset", "split": config.split, **_digest(files)}
    else:
        described = {"kind": "files", **_digest(_files(path, config))}
    return json.dumps(described | layout, sort_keys=True)


def _digest(files: list[tuple[str, Path]]) -> dict[str, Any]:
    total, digest = 0, hashlib.sha256()
    for name, path in files:
        with reading(name), path.open("rb") as file:
            content, size = hashlib.file_digest(file, "sha256").digest(), path.stat().st_size
        digest.update(f"{name}\0{size}\0".encode(errors="surrogateescape") + content)
        total += size
    return {"files": len(files), "bytes": total, "sha256": digest.hexdigest()}


def _local_path(config: TextConfig) -> Path | None:
    """Return the path that `dataset` means, None if it names a Hugging Face dataset."""
    name = config.dataset
    if not name:
        raise TextError("dataset: not given; allowed: a file, a folder or the name of a Hugging Face dataset")
    path = fetched(name) if "://" in name else Path(name).expanduser()
    if path.exists():
        return path
    like_a_path = name.startswith((".", "/", "~")) or "\\" in name or name.endswith("/") or name.count("/") > 1
    if like_a_path or path.suffix in PLAIN_SUFFIXES + ROW_SUFFIXES:
        raise TextError(f"dataset: {name}: no such file or folder; check the path")
    return None


def _is_saved_dataset(path: Path) -> bool:
    return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()


def _files(path: Path, config: TextConfig) -> list[tuple[str, Path]]:
    """Return (relative path, path) of the files to read, in order; one that is no text is refused now, not in hours."""
    files = _chosen_files(path, config)
    for name, file in files:
        _check_text(name, file)
    return files


def _check_text(name: str, file: Path) -> None:
    if file.suffix.lower() in ROW_SUFFIXES:
        return
    with reading(name), file.open("rb") as opened:
        start = opened.read(1 << 16)
    text = start.decode("utf-8-sig", errors="replace")
    # Python sources may declare an old encoding, which costs a few characters, so they are read all the same
    replaced = 0 if file.suffix == ".py" else text.count("\ufffd")
    if b"\0" in start or replaced > len(text) / 10:
        raise TextError(f"dataset: {name} is not UTF-8 text; convert it, or leave it out with --glob or --files-from")


def _chosen_files(path: Path, config: TextConfig) -> list[tuple[str, Path]]:
    if path.is_file():
        if config.files_from:
            raise TextError(f"files_from: lists files of a folder, and dataset {path} is a file; give its folder")
        return [(path.name, path)]
    if config.files_from:
        return _listed_files(path, config.files_from)
    try:
        found = {file for pattern in config.glob for file in path.glob(pattern) if file.is_file()}
    except (ValueError, NotImplementedError) as error:
        raise TextError(f"glob: {', '.join(config.glob)}: {error}; example: **/*.txt") from None
    names = sorted(file.relative_to(path).as_posix() for file in found)
    files = [(name, path / name) for name in names if not any(part.startswith(".") for part in name.split("/"))]
    if not files:
        raise TextError(f"dataset: no file in {path} matches {', '.join(config.glob)}; name others with --glob")
    return files


def _listed_files(folder: Path, files_from: str) -> list[tuple[str, Path]]:
    try:
        lines = Path(files_from).expanduser().read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TextError(f"files_from: {files_from} cannot be read: {error}; give a text file of paths") from None
    names = [line.strip() for line in lines if line.strip()]
    if not names:
        raise TextError(f"files_from: {files_from} lists no file; one relative path a line")
    with reading(f"a file of {files_from}"):  # a name may be too long
        missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise TextError(f"files_from: {missing[0]}, listed in {files_from}, is not in {folder} ({len(missing)} so)")
    return [(name, folder / name) for name in names]


def _file_loads(config: TextConfig, name: str, path: Path, group: int | None = None) -> Iterator[_Load]:
    name = well_formed(name)
    if path.suffix.lower() in ROW_SUFFIXES:
        return _row_loads(name, lambda _: file_rows(name, path, group), config)
    needs = f"format: {config.format}" if config.format in CHATS else "weight_field:" if config.weight_field else ""
    if needs:
        raise TextError(f"{needs} needs rows ({', '.join(ROW_SUFFIXES)}), and {name} is plain text")
    if config.format == "wikitext" or (config.format == "auto" and starts_with_title(_file_parts(name, path))):
        return _article_loads(name, lines_of(name, path))
    return iter([partial(_plain_document, name, path)])


def _article_loads(name: str, lines: Iterable[str]) -> Iterator[_Load]:
    return (partial(Document, text, None, f"{name}: {title}") for title, text in articles(lines))


def _plain_document(name: str, path: Path) -> Document:
    with reading(name):
        small = path.stat().st_size <= WINDOW_CHARS
    return Document("".join(_file_parts(name, path)) if small else path, None, name)


def _load_dataset(config: TextConfig, path: Path | None) -> Any:
    """Open a dataset of the hub, or one that `datasets` saved to a folder."""
    datasets = require("datasets", "hub")
    try:
        if path is None:
            options = {"split": config.split, "revision": config.dataset_revision, "streaming": config.streaming}
            return datasets.load_dataset(config.dataset, config.dataset_config, **options)
        saved = datasets.load_from_disk(str(path))
    except Exception as error:  # the hub, the network and the dataset's author have many ways to fail
        raise TextError(f"dataset: {config.dataset} cannot be loaded: {one_line(error)}") from None
    if not isinstance(saved, dict):
        return saved
    if config.split not in saved:
        raise TextError(f"split: {config.dataset} has no {config.split!r}; splits there: {', '.join(saved)}")
    return saved[config.split]


def _dataset_loads(dataset: Any, config: TextConfig, start: int) -> Iterator[_Load]:
    name = str(config.dataset)

    def rows(first: int) -> Iterator[Row]:
        # a stored dataset refuses to skip to its own end, where a finished build resumes
        at_end = hasattr(dataset, "__len__") and first >= len(dataset)
        i = first
        try:
            for i, row in enumerate(() if at_end else dataset.skip(first) if first else dataset, first):
                yield Row(f"{name}[{i}]", partial(as_row, dict(row), f"{name}[{i}]"))
        except UnicodeDecodeError:
            raise TextError(f"dataset: {name}, behind row {i}: bytes that are not UTF-8; write it anew") from None

    return _row_loads(name, rows, config, start)


def _row_loads(name: str, rows: Callable[[int], Iterator[Row]], config: TextConfig, start: int = 0) -> Iterator[_Load]:
    """Return the documents from `start` on: the rows from a number on, or the articles of which they are the lines."""
    if not _is_articles(rows(0), config):
        return (partial(_weighed_document, row, config) for row in rows(start))
    if config.weight_field:
        raise TextError(f"weight_field: rows of {name} are lines of articles, which have no weights; leave it out")
    lines = (line for row in rows(0) for line in text_of(row, config.text_field).removesuffix("\n").split("\n"))
    return itertools.islice(_article_loads(name, lines), start, None)


def _is_articles(rows: Iterable[Row], config: TextConfig) -> bool:
    """Tell whether rows are lines of WikiText; with `auto` the first that is not blank tells."""
    if config.format != "auto":
        return config.format == "wikitext"
    found = (_row_document(row, config) for row in rows)
    first = next((document for document in found if not document.is_blank), None)
    return first is not None and first.text is not None and starts_with_title(first.parts())


def _weighed_document(row: Row, config: TextConfig) -> Document:
    document = _row_document(row, config)
    return document._replace(weight=weight_of(row, config.weight_field)) if config.weight_field else document


def _row_document(row: Row, config: TextConfig) -> Document:
    layout = layout_of(row) if config.format == "auto" else config.format
    if layout == "tokens":
        return Document(text_of(row, "text"), None, row.name, tokens_of(row))
    if layout in CHATS:
        return Document(None, CHATS[layout](row.load(), row.name), row.name)
    return Document(text_of(row, config.text_field), None, row.name)


@functools.lru_cache  # a run asks several times and reads one text
def fetched(url: str) -> Path:
    """Return the file or folder on this machine that holds the text of a URL, copied if it is not there yet.

    Copies are kept in qat-lora/text below XDG_CACHE_HOME, by default ~/.cache. TextError: nothing is there, or it
    cannot be read; MissingExtraError: its driver is not installed.
    """
    if url.startswith(("file://", "local://")):
        return Path(url.split("://", 1)[1])
    shown = redact(url)
    with _reading(url) as (fs, root):
        files = {path: info for path, info in fs.find(root, detail=True).items() if info.get("type") != "directory"}
        if not files:
            raise TextError(f"dataset: {shown}: nothing is there; check the address")
        seen = [(path, *(str(info.get(key)) for key in _VERSION_KEYS)) for path, info in sorted(files.items())]
        below = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "qat-lora" / "text"
        home = below / hashlib.sha256(json.dumps([shown, seen]).encode()).hexdigest()[:16]
        name = root.rstrip("/").rsplit("/", 1)[-1] or "text"
        if not home.is_dir():
            _copy(fs, files, root, home, name)
        return home / name


def listing(url: str, patterns: Sequence[str]) -> list[tuple[str, int]]:
    """Return the files behind a URL that fit a pattern, by name, with sizes; a file by itself has the name ""."""
    with _reading(url) as (fs, root):
        found = {path[len(root) :].strip("/"): info for path, info in fs.find(root, detail=True).items()}
        fits = re.compile("|".join(map(require("fsspec.utils", "gcs").glob_translate, patterns))).match
        shown = (name for name in sorted(found) if not name.startswith(".") and "/." not in name)
        return [(name, int(found[name]["size"])) for name in shown if not name or fits(name)]


@contextlib.contextmanager
def _reading(url: str) -> Iterator[tuple[Any, str]]:
    """Yield a URL's file system and root, and turn what drivers raise into one line."""
    extra, shown = URL_EXTRAS.get(url.split("://")[0], "gcs"), redact(url)
    fsspec = require("fsspec.core", extra)
    try:
        yield fsspec.url_to_fs(url)
    except ImportError:
        raise MissingExtraError(f"{shown}: its driver is not installed: pip install 'qat-lora[{extra}]'") from None
    except QatLoraError:
        raise
    except Exception as error:  # each driver has errors of its own
        reason = f"{type(error).__name__}: {redact(' '.join(str(error).split()), url)[:200]}"
        raise TextError(f"dataset: {shown}: cannot be read ({reason}); check address and credentials") from None


def _copy(fs: Any, files: Mapping[str, Any], root: str, home: Path, name: str) -> None:
    """Copy files to `home`/`name`, whole or not at all; another process may copy the same."""
    draft = home.with_name(f".{home.name}-{uuid.uuid4().hex[:8]}")
    try:
        for path in files:
            target = draft / name / path[len(root) :].strip("/")
            if ".." in target.parts:
                raise TextError(f"dataset: {path} leads out of its folder")
            target.parent.mkdir(parents=True, exist_ok=True)
            fs.get_file(path, str(target))
        if not home.is_dir():
            draft.rename(home)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
