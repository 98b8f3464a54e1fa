"""Damaged and hostile files for every parser that reads what others may have written.

Hypothesis draws each case: a valid file with one to three changes in its structure (a value dropped, doubled, of
another type, nested deep, huge, NaN, a lone surrogate ...), one with changed bytes (cut off, flipped, inserted), or
arbitrary bytes. A reader may succeed or raise a `QatLoraError` of one line that is not empty and under about a thousand
characters. Everything else is a fault: another exception, more calls than any honest file needs (a hang, counted rather
than timed), a file written outside the case's folder.

    python tests/fuzzing.py --cases 10000 --seed 0        # prints outcomes by parser as JSON
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import os
import re
import shutil
import struct
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

import qat_lora
from qat_lora import options
from qat_lora.cache.build.writer import Partition, read_part
from qat_lora.cache.format.records import Fingerprint, Part, render
from qat_lora.cache.read.dataset import KDCacheDataset
from qat_lora.cache.storage.location import locate
from qat_lora.cache.storage.store import read_manifest, read_sidecar
from qat_lora.config import leaves, resolve
from qat_lora.data.sources import TextConfig, open_documents
from qat_lora.errors import QatLoraError
from qat_lora.export import card, hub
from qat_lora.export.gguf import save_base
from qat_lora.files import outputs
from qat_lora.files.gguf_header import read_header
from qat_lora.layers.convert import add_lora, make_quant_skeleton
from qat_lora.layers.lora import LoraConfig
from qat_lora.models.adapter import CONFIG, NOTE, WEIGHTS, read_adapter, save_adapter
from qat_lora.models.load import load_model, load_tokenizer, make_qwen3, make_tokenizer, save_quantised
from qat_lora.models.student import base_folder
from qat_lora.quant.presets import Preset, preset
from qat_lora.runtime.launch.select import select_runtime
from qat_lora.train.checkpoint import load_checkpoint, save_checkpoint
from qat_lora.train.metrics import cut_back, log_mark, read_metrics

GOLDEN = Path(__file__).parent / "data" / "golden_cache" / "short"
SHARD_BYTES = (GOLDEN / "s-000000.safetensors").stat().st_size
MOST_CALLS = 1_000_000
LONGEST_MESSAGE = 1100
EXAMPLES = 3
"""Kept of each fault."""

# --- what is drawn --------------------------------------------------------------------------------------------

# Written as texts first, since neither JSON's nor YAML's writer would write them.
RAW = {
    "@digits": b"9" * 5000,
    "@deep": b"[" * 500 + b"]" * 500,
    "@abyss": b"[" * 100_000,
    "@objects": b'{"a":' * 2000 + b"1" + b"}" * 2000,
}
ODD: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 7, 2**31, 2**63, -(2**64), 10**400, 0.5, -0.0, 1e308),
    *(float("nan"), float("inf"), float("-inf"), "", " ", "x", "a\nb", "\ud800", "\0", "é" * 600, "x" * 5000),
    *("../../../etc/passwd", "/dev/zero", "1e9", "true", "(", "*", "{0.__class__}", [], {}, [[]], [None], {"": None}),
    *({"a": [1]}, *RAW),
)


def _spots(tree: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key) of a tree."""
    found, left = [], [tree]
    while left:
        node = left.pop()
        items = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
        for key, value in items:
            found.append((node, key))
            left.append(value)
    return found


@st.composite
def changed_tree(draw: Any, tree: Any) -> Any:
    """One to three changes in the structure."""
    root = {"root": copy.deepcopy(tree)}
    for _ in range(draw(st.integers(1, 3))):
        spots = _spots(root)
        node, key = spots[draw(st.integers(0, len(spots) - 1))]
        change = draw(st.sampled_from(("odd", "odd", "odd", "drop", "double", "swap", "wrap", "rename", "add")))
        other_node, other_key = spots[draw(st.integers(0, len(spots) - 1))]
        if change == "odd":
            node[key] = copy.deepcopy(draw(st.sampled_from(ODD)))
        elif change == "swap":
            node[key] = copy.deepcopy(other_node[other_key])
        elif change == "wrap":
            node[key] = [node[key]] if draw(st.booleans()) else {"x": node[key]}
        elif node is not root and change == "drop":
            del node[key]
        elif isinstance(node, list):
            node.insert(draw(st.integers(0, len(node))), copy.deepcopy(node[key]))
        elif node is not root and change in ("rename", "add"):
            name = draw(st.sampled_from(("x", "", "é", "\ud800", "a\nb", "x" * 3000, str(other_key))))
            node[name] = node.pop(key) if change == "rename" else draw(st.sampled_from(ODD))
        elif node is not root:
            node[f"@twice{key}"] = draw(st.sampled_from(ODD))
    return root["root"]


@st.composite
def changed_bytes(draw: Any, data: bytes) -> bytes:
    """One to three changes of bytes."""
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.integers(0, len(data)))
        end = min(len(data), at + draw(st.sampled_from((1, 2, 8, 64, 4096))))
        change = draw(st.sampled_from(("cut", "flip", "insert", "delete", "repeat", "zero")))
        if change == "cut":
            data = data[:at]
        elif change == "flip" and at < len(data):
            data = data[:at] + bytes([data[at] ^ (1 << draw(st.integers(0, 7)))]) + data[at + 1 :]
        elif change == "insert":
            data = data[:at] + draw(st.binary(min_size=1, max_size=8)) + data[at:]
        elif change == "delete":
            data = data[:at] + data[end:]
        elif change == "repeat":
            data = data[:at] + data[at:end] * 3 + data[end:]
        else:
            data = data[:at] + bytes(end - at) + data[end:]
    return data


def _raw(text: str) -> bytes:
    data = text.encode("utf-8", errors="surrogatepass")
    for name, value in RAW.items():
        data = re.sub(b"[\"']" + name.encode() + b"[\"']", lambda _, value=value: value, data)
    return data.replace(b"@twice", b"")


class Form(NamedTuple):
    """How a file's bytes become a tree, and a tree bytes."""

    parse: Callable[[bytes], Any]
    render: Callable[[Any], bytes]
    extra: tuple[bytes, ...] = ()
    """Texts that are inserted in the middle of a valid file."""


def _json(tree: Any) -> bytes:
    return _raw(json.dumps(tree, indent=1))


def _sealed(tree: Any) -> bytes:
    """A record of a cache with its checksum renewed: without, every change would end at the checksum."""
    if not isinstance(tree, dict):
        return _json(tree)
    body = _json({**tree, "checksum": ""}).removesuffix(b'"\n}')
    return body + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'


def _rows(tree: Any) -> bytes:
    return b"\n".join(_raw(json.dumps(row)) for row in tree) if isinstance(tree, list) else _json(tree)


def _lines(tree: Any) -> bytes:
    return _raw("".join(f"{line}\n" for line in tree) if isinstance(tree, list) else str(tree))


def _header(data: bytes) -> Any:
    size = int.from_bytes(data[:8], "little")
    return {"header": json.loads(data[8 : 8 + size]), "data": data[8 + size :].hex()}


def _safetensors(tree: Any) -> bytes:
    if not isinstance(tree, dict) or not isinstance(tree.get("header"), dict):
        return _json(tree)
    text = _raw(json.dumps(tree["header"], separators=(",", ":")))
    text += b" " * (-len(text) % 8)
    data = bytes.fromhex(tree["data"]) if re.fullmatch("([0-9a-f]{2})+", str(tree.get("data"))) else b""
    whole = len(text).to_bytes(8, "little") + text + data
    return whole.ljust(SHARD_BYTES, b"\0")[:SHARD_BYTES]  # another size would be refused before the header is looked at


def _gguf_value(value: Any) -> tuple[int, bytes]:
    """A setting as GGUF writes it: its type and bytes."""
    if isinstance(value, int) and not isinstance(value, bool):
        return 4, (value & 0xFFFFFFFF).to_bytes(4, "little")
    if isinstance(value, float):
        return 12, struct.pack("<d", value)
    if isinstance(value, list):
        return 9, b"\x08\0\0\0" + len(value).to_bytes(8, "little") + b"".join(map(_gguf_text, value))
    return 8, _gguf_text(value)


def _gguf_text(value: Any) -> bytes:
    text = str(value).encode("utf-8", errors="replace")
    return len(text).to_bytes(8, "little") + text


def _gguf(tree: Any) -> bytes:
    if not isinstance(tree, dict) or not isinstance(tree.get("settings"), dict):
        return _json(tree)
    settings, tensors = tree["settings"], tree["tensors"] if isinstance(tree.get("tensors"), list) else []
    out = [b"GGUF\3\0\0\0", struct.pack("<QQ", len(tensors), len(settings))]
    for name, value in settings.items():
        kind, data = _gguf_value(value)
        out += [_gguf_text(name), struct.pack("<I", kind), data]
    for tensor in tensors:
        name, *numbers = tensor if isinstance(tensor, list) else [tensor]
        shape = numbers[0] if numbers and isinstance(numbers[0], list) else []
        rest = [number if isinstance(number, int) else 7 for number in [*shape, *numbers[1:], 0, 0]]
        out += [_gguf_text(name), struct.pack("<I", len(shape))]
        out += [struct.pack("<Q", number & 2**64 - 1) for number in rest[: len(shape)]]
        out.append(struct.pack("<IQ", rest[len(shape)] & 0xFFFFFFFF, rest[len(shape) + 1] & 2**64 - 1))
    whole = b"".join(out)
    return whole + bytes(-len(whole) % 32) + bytes(1 << 17)


def _gguf_tree(file: Path) -> Any:
    header = read_header(file)
    start = min(tensor.offset for tensor in header.tensors.values())
    tensors = [[n, [*t.shape[::-1]], t.number, t.offset - start] for n, t in header.tensors.items()]
    return {"settings": header.settings, "tensors": tensors}


def _bomb(first: str, item: str) -> bytes:
    lines = [f"a0: &a0 {first}"] + [f"a{i}: &a{i} " + item.format(", ".join([f"*a{i - 1}"] * 9)) for i in range(1, 7)]
    return "\n".join(["", *lines, ""]).encode()


def _yaml(tree: Any) -> bytes:
    return _raw(yaml.safe_dump(tree, sort_keys=False, width=10**9))


YAML_EXTRA = (
    _bomb("[x, x]", "[{}]"),
    _bomb("{x: 1}", "{{<<: [{}]}}"),
    *(b" &a [*a]", b" !!int ''", b" !!bool x", b" !!timestamp x", b" 2001-99-99", b" 0x" + b"f" * 5000, b"\n---\n"),
    *(
        b" !!python/object/apply:os.system [ls]",
        b" *gone",
        b" !!binary x",
        b" .inf",
        b" 1:" + b"60:" * 2000 + b"1",
        b"\t",
    ),
)
JSON = Form(json.loads, _json)
SEALED = Form(lambda data: {k: v for k, v in json.loads(data).items() if k != "checksum"}, _sealed)
ROWS = Form(lambda data: [json.loads(line) for line in data.splitlines()], _rows)
LINES = Form(lambda data: data.decode().splitlines(), _lines, (b"\n/etc/passwd\n", b"\n../x\n", b"\r\n", b"\n\0\n"))
YAML = Form(yaml.safe_load, _yaml, YAML_EXTRA)
SAFETENSORS = Form(_header, _safetensors)
FRONT = Form(
    lambda data: yaml.safe_load(data.split(b"---\n")[1]), lambda tree: b"---\n" + _yaml(tree) + b"---\n", YAML_EXTRA
)


class Target(NamedTuple):
    """A parser: the valid file that cases are made from, and what reads it."""

    file: Path
    form: Form
    read: Callable[[], Any]
    weight: float = 1.0
    """Of the cases, beside other parsers: less where one case is slow."""

    def cases(self) -> st.SearchStrategy[bytes]:
        """Return the strategy that draws a file's bytes."""
        valid = self.file.read_bytes()
        structured = changed_tree(self.form.parse(valid)).map(self.form.render)
        kinds = [structured, structured, structured, changed_bytes(valid), st.binary(max_size=100)]
        if self.form.extra:
            places = st.tuples(st.integers(0, len(valid)), st.sampled_from(self.form.extra))
            kinds.append(places.map(lambda drawn: valid[: drawn[0]] + drawn[1] + valid[drawn[0] :]))
            kinds.append(st.sampled_from(self.form.extra).map(lambda extra: valid.rstrip() + extra))
        return st.one_of(kinds)


# --- what is watched ------------------------------------------------------------------------------------------


class Endless(BaseException):
    """More calls than any honest file needs; no `except Exception` takes it for a mistake in the file."""


@dataclass
class _Watch:
    root: str | None = None
    written: list[str] = field(default_factory=list)


_watch = _Watch()
_CHANGES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.truncate", "shutil.rmtree")


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    if _watch.root is None or not (event == "open" or event in _CHANGES):
        return
    if event == "open" and not (
        isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    ):
        return
    path = arguments[0]
    if isinstance(path, str | bytes | os.PathLike):
        text = os.path.abspath(os.fsdecode(path))
        if not text.startswith((_watch.root, "/dev/null")) and "__pycache__" not in text:
            _watch.written.append(text)


sys.addaudithook(_audit)


@contextmanager
def watched(root: Path) -> Iterator[None]:
    """Count calls, and notice what is written outside a folder.

    Raises:
        Endless: too many calls.
    """
    count = 0

    def profile(*_: Any) -> None:
        nonlocal count
        count += 1
        if count > MOST_CALLS:
            sys.setprofile(None)
            raise Endless(f"more than {MOST_CALLS:,} calls")

    _watch.root, _watch.written = str(root), []
    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(before)
        _watch.root = None


def outcome(read: Callable[[], Any], root: Path) -> str:
    """Return `read`, `refused`, or what is wrong."""
    try:
        with watched(root), warnings.catch_warnings(action="ignore"):
            read()
        result = "read"
    except QatLoraError as error:
        text, result = str(error), "refused"
        if not text or "\n" in text or len(text) > LONGEST_MESSAGE:
            result = f"message of {type(error).__name__}: {'empty' if not text else 'too long or of several lines'}"
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.name != "profile"]
        ours = [f for f in frames if f"{os.sep}qat_lora{os.sep}" in f.filename] or frames[-1:]
        where = f"{Path(ours[-1].filename).name}:{ours[-1].name}"
        result = f"{type(error).__name__} in {where}"
    return f"written outside: {_watch.written[0]}" if _watch.written else result


@dataclass
class Survey:
    """What came of the cases of one parser."""

    cases: int = 0
    read: int = 0
    refused: int = 0
    faults: dict[str, list[bytes]] = field(default_factory=dict)
    """By what is wrong: the shortest files that show it."""
    count: int = 0
    """Of cases that show a fault."""

    def add(self, result: str, example: bytes) -> None:
        """Count an outcome."""
        self.cases += 1
        if result in ("read", "refused"):
            setattr(self, result, getattr(self, result) + 1)
        else:
            self.count += 1
            self.faults[result] = sorted([*self.faults.get(result, []), example], key=len)[:EXAMPLES]


def _draw(strategy: st.SearchStrategy[Any], case: Callable[[Any], None], cases: int, seed: int | None) -> None:
    quiet = settings(
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        max_examples=cases,
        report_multiple_bugs=False,
        derandomize=seed is None,
    )
    run = quiet(given(strategy)(case))
    (run if seed is None else seeded(seed)(run))()


class _FoundError(Exception):
    """Ends a survey early."""


def survey(target: Target, cases: int, seed: int | None = None, until_found: bool = False) -> Survey:
    """Give a parser many files; nothing is raised.

    Args:
        target: the parser.
        cases: how many.
        seed: of the draws; None: always the same ones.
        until_found: leave the rest out after the first fault.
    """
    found, valid = Survey(), target.file.read_bytes()
    draft, root = target.file.with_name(".draft"), target.file.parent

    def case(data: bytes) -> None:
        if until_found and found.faults:
            raise _FoundError
        draft.write_bytes(data)
        draft.replace(target.file)  # a new file: the old one may still be mapped
        found.add(outcome(target.read, root), data)

    try:
        with suppress(_FoundError):
            _draw(target.cases(), case, cases, seed)
    finally:
        target.file.write_bytes(valid)
    return found


# --- the parsers ----------------------------------------------------------------------------------------------

RECIPE = """kd_cache_dir: caches/x
checkpoint: runs/q
head_k: 8
train_scales: true
lora: {recovery_r: 8, lora_targets: "q_proj|v_proj", dropout: 0.1}
train: {lr: 3.0e-4, warmup_steps: 5}
loop: {batch_size: 4, max_steps: 100, log_to: [tensorboard]}
run: {out: runs/r, device: cpu, seed: 1, chips: {num_chips: 2}}
"""
CHATS = (
    {"messages": [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c"}]},
    {"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}], "system_prompt": "be brief"},
    {"instruction": "add", "input": "1 2", "output": "3"},
)
SCORES = {
    "teacher": {"ppl": 9.5, "nll": 2.25, "kl": 0.0, "top1": 1.0, "tokens": 99},
    "student": {"ppl": 10.5, "nll": 2.35, "kl": 0.1, "top1": 0.9, "tokens": 99, "bits_per_weight": 2.25},
}
EMPTY_SHA256 = hashlib.sha256(b"").hexdigest()


def _written(file: Path, content: bytes | str | Any) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    if not isinstance(content, bytes | str):
        content = json.dumps(content, indent=1)
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return file


def _resealed(folder: Path) -> Path:
    """Return a folder whose checksums, if it has any, are those of its files: cases shall get past them."""
    sums = folder / "SHA256SUMS"
    if sums.is_file():
        lines = sums.read_text(encoding="utf-8").splitlines()
        names = [line.split("  ", 1)[1] for line in lines]
        sha256 = [hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names]
        sums.write_text("".join(f"{s}  {name}\n" for s, name in zip(sha256, names, strict=True)), encoding="utf-8")
    return folder


def _model(folder: Path) -> Any:
    make_tokenizer(["the cache of a model"] * 5, 270, folder)
    torch.manual_seed(0)
    return make_qwen3(folder, 320, hidden=32, layers=1, heads=1, kv_heads=1, mlp=32, max_position_embeddings=32)


def _config_targets(root: Path) -> Iterator[tuple[str, Target]]:
    recipe = _written(root / "recipe" / "r.yaml", RECIPE)
    yield "recipe", Target(recipe, YAML, lambda: resolve(options.RecoverOptions, recipe=recipe, words=["num_chips=1"]))
    run = _written(root / "card" / "run" / "config.yaml", yaml.safe_dump({"kd_cache_dir": "gone", "learn": "kd"}))
    quantization = {"preset": preset("w2g64").to_dict(), "details": {"model": "m/x"}}
    shown = type("Config", (), {"quantization_config": quantization})()
    yield "config.yaml of the card", Target(run, YAML, lambda: card.read_origin(shown, run.parent / "best"))
    said = _written(root / "said" / "config.json", quantization)

    def read_origin() -> Any:
        try:
            tree = json.loads(said.read_bytes())
        except (ValueError, RecursionError):
            return None  # transformers' to read
        if isinstance(tree, dict):
            card.read_origin(type("Config", (), {"quantization_config": tree})(), None)

    yield "quantization_config in the card", Target(said, JSON, read_origin)
    readme = _written(root / "ship" / "README.md", "---\nlicense: mit\ntags: [a, b]\n---\n# x\n")
    _written(root / "ship" / "model.safetensors", b"\x02\0\0\0\0\0\0\0{}")
    yield "front matter of a card", Target(readme, FRONT, lambda: hub.files_to_upload(readme.parent))
    result = _written(root / "shipped" / "result.json", {"form": "adapter", "size_bytes": 5})
    yield "result.json", Target(result, JSON, lambda: hub.upload_summary(result.parent, {}))
    scores = _written(root / "scores" / "scores.json", SCORES)
    yield "scores.json", Target(scores, JSON, lambda: card.read_scores(str(scores.parent)))


def _cache_targets(root: Path) -> Iterator[tuple[str, Target]]:
    def opened(folder: Path) -> None:
        KDCacheDataset(folder).rows([0])

    for name, file, form in (
        ("cache manifest", "manifest.json", SEALED),
        ("shard header", "s-000000.safetensors", SAFETENSORS),
    ):
        folder = Path(shutil.copytree(GOLDEN, root / name.replace(" ", "-")))
        yield name, Target(folder / file, form, lambda folder=folder: opened(folder))
    folder = Path(shutil.copytree(GOLDEN, root / "sidecar"))
    yield "sidecar", Target(folder / "s-000000.json", SEALED, lambda: read_sidecar(locate(folder), "s-000000"))
    fingerprint: Fingerprint = read_manifest(GOLDEN).fingerprint
    part = Part(builder=0, builders=2, train_shards=1, eval_shards=0, fingerprint=fingerprint)
    file = _written(root / "part" / "b-000000.json", render(part))
    yield "part", Target(file, SEALED, lambda: read_part(locate(file.parent), Partition(0, 2), fingerprint))


def _model_targets(root: Path) -> Iterator[tuple[str, Target]]:
    made = _model(root / "dense")
    chosen = replace(preset("w2g64"), rules=((r"mlp\.", preset("w2g64").rules[0][1]), (r".", None)))
    make_quant_skeleton(made.module, chosen)
    save_quantised(made, root / "quantised", chosen, {"model": "x"})
    config = root / "quantised" / "config.json"
    whole = json.loads(config.read_text())
    form = Form(
        lambda data: json.loads(data)["quantization_config"], lambda tree: _json({**whole, "quantization_config": tree})
    )
    yield "quantization_config", Target(config, form, lambda: load_model(str(_resealed(root / "quantised"))), 0.05)
    rules = _written(root / "preset" / "preset.json", preset("q2a4", lm_head="w4g128").to_dict())

    def read_preset() -> Any:
        try:
            tree = json.loads(rules.read_bytes())
        except (ValueError, RecursionError):
            return None  # transformers' to read
        return Preset.from_dict(tree)

    yield "preset", Target(rules, JSON, read_preset)
    tokenizer = root / "tokenizer" / "tokenizer.json"
    make_tokenizer(["a b"], 260, tokenizer.parent)
    yield "tokenizer.json", Target(tokenizer, JSON, lambda: load_tokenizer(tokenizer.parent), 0.2)

    base, adapter, made = root / "base", root / "adapter", _model(root / "gguf")
    file = root / "gguf" / "x.gguf"
    save_base(made, {}, load_tokenizer(file.parent), file, "float32", "x")
    tree = _gguf_tree(file)
    gguf = Form(lambda _: tree, _gguf, (b"\xff" * 8, bytes(64)))
    yield "GGUF", Target(file, gguf, lambda: load_model(str(file), dequantize=True), 0.2)
    made = _model(base)
    made.module.config.save_pretrained(base)
    add_lora(made.module, lora := LoraConfig(recovery_r=2))
    save_adapter(made.module, lora, adapter, base, "0" * 64)

    def read() -> Any:
        base_folder(_resealed(adapter))
        return read_adapter(adapter)

    yield CONFIG, Target(adapter / CONFIG, JSON, read)
    yield NOTE, Target(adapter / NOTE, JSON, read)
    assert (adapter / WEIGHTS).is_file()


def _run_targets(root: Path) -> Iterator[tuple[str, Target]]:
    weight = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = torch.optim.AdamW([weight], lr=0.1)
    weight.sum().backward()
    optimizer.step()
    fingerprint = {"seed": 1, "nested": {"r": 2}}
    state = {"fingerprint": fingerprint, "best_kl": 0.5, "best_step": 1, "evaluations_since_best": 0}
    saved = save_checkpoint(root / "checkpoints", 3, {"w": weight}, optimizer, state, 2, select_runtime("cpu"))
    yield (
        "state.json",
        Target(
            saved / "state.json", JSON, lambda: load_checkpoint(_resealed(saved), {"w": weight}, optimizer, fingerprint)
        ),
    )
    lines = [{"step": step, "loss": 1.0 / step, "lr": 1e-3, "tokens_per_s": 5.5} for step in range(1, 6)]
    metrics = _written(root / "metrics" / "metrics.jsonl", "".join(json.dumps(line) + "\n" for line in lines))

    def read() -> None:
        read_metrics(metrics)
        cut_back(metrics, log_mark(metrics))

    yield "metrics.jsonl", Target(metrics, ROWS, read)
    run = root / "run"
    run.mkdir()
    outputs.claim(run, "recover", {"seed": 1, "lora": {"r": 2}}, overwrite=False)

    def claim() -> None:
        outputs.claim(run, "recover", {"seed": 1, "lora": {"r": 2}}, overwrite=False)

    yield "run mark", Target(run / outputs.MARK, JSON, claim)
    try:
        from qat_lora.files.checksums import check_sums
    except ImportError:  # code before there were checksums
        return
    sums = _written(root / "sums" / "SHA256SUMS", f"{EMPTY_SHA256}  a.json\n{EMPTY_SHA256}  model.safetensors\n")
    for name in ("a.json", "model.safetensors"):
        _written(root / "sums" / name, b"")
    yield "SHA256SUMS", Target(sums, LINES, lambda: check_sums(sums.parent, True, ("*",)))


def _text_targets(root: Path) -> Iterator[tuple[str, Target]]:
    def documents(config: TextConfig) -> None:
        for document in open_documents(config):
            assert document.text is None or isinstance(document.text, str)

    texts = [{"text": f"row {i}", "id": i} for i in range(4)]
    for name, rows, suffix, form in (
        ("text rows (.jsonl)", texts, "jsonl", ROWS),
        ("text rows (.json)", texts, "json", JSON),
        *((f"chat rows ({next(iter(chat))})", [chat, chat], "jsonl", ROWS) for chat in CHATS),
    ):
        file = _written(root / re.sub(r"\W+", "-", name) / f"t.{suffix}", form.render(rows))
        yield name, Target(file, form, lambda file=file: documents(TextConfig(dataset=str(file))))
    listed = _written(root / "listed" / "list", "a.txt\nb/c.txt\n")
    for name in ("a.txt", "b/c.txt"):
        _written(root / "listed" / "data" / name, "some words")
    config = TextConfig(dataset=str(root / "listed" / "data"), files_from=str(listed))
    yield "files_from", Target(listed, LINES, lambda: documents(config))


def targets(root: Path) -> dict[str, Target]:
    """Return all parsers by name; their valid files are written below a folder."""
    made: dict[str, Target] = {}
    for group in (_config_targets, _cache_targets, _model_targets, _run_targets, _text_targets):
        made |= dict(group(root))
    return made


def shared_out(found: Iterable[Target], cases: int) -> list[int]:
    """Return how many of the cases each parser gets, by its weight."""
    weights = [target.weight for target in found]
    return [max(1, round(cases * weight / sum(weights))) for weight in weights]


# --- command lines --------------------------------------------------------------------------------------------

WORDS = st.one_of(
    st.sampled_from(
        [str(value) for value in ODD if not isinstance(value, str)] + [v for v in ODD if isinstance(v, str)]
    ),
    st.sampled_from(
        ("9" * 5000, "-1", "0", "nan", "inf", "-inf", "1e400", "0x10", "1_000", "²", "٣", ",", "a=b", "0/0")
    ),
    st.text(max_size=20),
    st.integers().map(str),
    st.floats().map(str),
)


@st.composite
def command_line(draw: Any) -> tuple[type, dict[tuple[str, ...], str], list[str]]:
    """An options class, and values for some of its settings as flags and as words."""
    classes = [cls for name, cls in sorted(vars(options).items()) if name.endswith("Options")]
    cls = draw(st.sampled_from(classes))
    found = list(leaves(cls))
    needed = {("teacher",), ("model",), ("student",), ("kd_cache_dir",), ("folder",), ("repo",), ("text", "dataset")}
    flags = {leaf.path: "x" for leaf in found if leaf.path in needed and draw(st.integers(0, 9))}
    for leaf in draw(st.lists(st.sampled_from(found), max_size=3)):
        flags[leaf.path] = draw(WORDS)
    words = [
        f"{draw(st.sampled_from(('.'.join(leaf.path), leaf.name)))}={draw(WORDS)}"
        for leaf in draw(st.lists(st.sampled_from(found), max_size=2))
    ]
    return cls, flags, words + ([draw(WORDS)] if not draw(st.integers(0, 9)) else [])


def survey_command_lines(cases: int, seed: int | None = None) -> Survey:
    """Give `config.resolve` many command lines; nothing is raised."""
    found = Survey()

    def case(line: Any) -> None:
        cls, flags, words = line
        result = outcome(lambda: resolve(cls, flags=flags, words=words), Path("/nonexistent"))
        found.add(result, ascii((cls.__name__, flags, words)).encode())

    _draw(command_line(), case, cases, seed)
    return found


def main() -> None:
    """Survey all parsers and print what came of it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=10_000, help="of files, over all parsers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", help="part of a parser's name")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        found = targets(Path(folder).resolve())
        for (name, target), cases in zip(found.items(), shared_out(found.values(), arguments.cases), strict=True):
            if (arguments.only or "") in name:
                result[name] = survey(target, cases, arguments.seed)
        if (arguments.only or "") in "command lines":
            result["command lines"] = survey_command_lines(arguments.cases // 10, arguments.seed)
    plain = {
        name: {
            "cases": of.cases,
            "read": of.read,
            "refused": of.refused,
            "faulty": of.count,
            "faults": {what: ascii(files[0][:200]) for what, files in sorted(of.faults.items())},
        }
        for name, of in result.items()
    }
    print(json.dumps({"package": qat_lora.__version__, "parsers": plain}, indent=1))


if __name__ == "__main__":
    main()
