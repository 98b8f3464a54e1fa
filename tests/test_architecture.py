"""Imports point one way, devices stay in one room, and every module has a test: read off the syntax trees."""

import ast
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from qat_lora.registry import COMMANDS

ROOT = Path(__file__).resolve().parents[1]
# A room may import rooms of its own rank or below, but no circle may come of it.
RANKS = {
    0: ("terminal", "types", "registry"),
    1: ("errors", "extras"),
    2: ("files",),
    3: ("config",),
    4: ("runtime", "quant"),
    5: ("data", "cache", "losses", "layers"),
    6: ("models", "train", "evaluate", "export"),
    7: ("options",),
    8: ("setup", "plan", "generate"),
    9: ("cli", "api", "commands", "__init__"),
    10: ("scripts", "notebooks"),
}
RANK = {part: rank for rank, parts in RANKS.items() for part in parts}
DEVICES = {"cpu", "cuda", "mps", "tpu", "xla"}
LONGEST = 500  # lines
# Asking which device names exist is the job of these two; they branch on no device to compute.
MAY_NAME_DEVICES = ("commands", "plan")
DEVICE_FLAGS = {"is_cpu", "is_cuda", "is_mps", "is_xla"}


def modules() -> dict[str, str]:
    """Return the source of every Python file and notebook that is checked, by path from the root."""
    found = {}
    for folder in ("qat_lora", "scripts"):
        for file in sorted((ROOT / folder).rglob("*.py")):
            found[file.relative_to(ROOT).as_posix()] = file.read_text(encoding="utf-8")
    for file in sorted((ROOT / "notebooks").glob("*.ipynb")):
        cells = json.loads(file.read_text(encoding="utf-8"))["cells"]
        source = "\n".join("".join(cell["source"]) + "\n" for cell in cells if cell["cell_type"] == "code")
        found[file.relative_to(ROOT).as_posix()] = '"""A notebook."""\n' + source
    return found


def part_of(path: str) -> str:
    """Return what the arrows are drawn between: a room, a top-level module, `scripts` or `notebooks`."""
    top, *rest = path.removesuffix(".py").split("/")
    return rest[0] if top == "qat_lora" else top


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield the dotted names that a module imports, anywhere in it, also as texts given to importlib."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield base
            yield from (f"{base}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("qat_lora."):
            yield node.value


def problems(path: str, source: str) -> list[str]:
    """Return what is wrong with a module, one line each."""
    tree = ast.parse(source)
    here = part_of(path)
    names = set(imported(tree)) if here != "registry" else set()  # it names functions and imports none
    tops = {name.split(".")[0] for name in names}
    found = []
    for name in sorted(name for name in names if name.startswith("qat_lora.")):
        there = name.split(".")[1]
        if there not in RANK:
            continue  # a name of the package itself, such as qat_lora.quantize_model
        if RANK[there] > RANK[here]:
            found.append(f"{path} imports {name}: that arrow points up")
    if any(name.startswith(".") for name in names):
        found.append(f"{path}: relative import")
    if "torch_xla" in tops and not path.startswith("qat_lora/runtime/xla"):
        found.append(f"{path} imports torch_xla: only runtime/xla*.py may")
    if "transformers" in tops and path not in ("qat_lora/models/load.py", "qat_lora/models/hf_quantizer.py"):
        found.append(f"{path} imports transformers: only models.py and quantizer.py may")
    if tops & {"pickle", "cPickle", "dill", "joblib"}:
        found.append(f"{path} imports pickle")
    asked = any(isinstance(node, ast.Attribute) and node.attr in DEVICE_FLAGS for node in ast.walk(tree))
    if here != "runtime" and asked:
        found.append(f"{path}: asks a tensor for its device outside runtime/")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            dotted = f"{node.value.id}.{node.attr}"
            if dotted in ("sys.path", "torch.load"):
                found.append(f"{path}:{node.lineno}: {dotted}")
        if isinstance(node, ast.Compare) and here not in ("runtime", *MAY_NAME_DEVICES):
            texts = {n.value for n in ast.walk(node) if isinstance(n, ast.Constant) and isinstance(n.value, str)}
            if texts & DEVICES:
                found.append(f"{path}:{node.lineno}: branches on a device name outside runtime/")
        if isinstance(node, ast.match_case) and here != "runtime":
            texts = {n.value for n in ast.walk(node.pattern) if isinstance(n, ast.Constant)}
            if texts & DEVICES:
                found.append(f"{path}: branches on a device name outside runtime/")
    if not ast.get_docstring(tree):
        found.append(f"{path}: no module docstring")
    if source.count("\n") > LONGEST:
        found.append(f"{path}: more than {LONGEST} lines")
    return found


@pytest.mark.parametrize("path", modules())
def test_module(path):
    assert problems(path, modules()[path]) == []


OFFENDERS = {
    "imports qat_lora.commands: that arrow points up": ("qat_lora/losses/x.py", "import qat_lora.commands"),
    "that arrow points up": ("qat_lora/train/x.py", "import importlib\nimportlib.import_module('qat_lora.commands')"),
    "relative import": ("qat_lora/cache/x.py", "from . import format"),
    "torch_xla": ("qat_lora/runtime/native.py", "import torch_xla.core.xla_model as xm"),
    "transformers": ("qat_lora/commands/x.py", "from transformers import AutoConfig"),
    "pickle": ("qat_lora/train/x.py", "import pickle"),
    "sys.path": ("scripts/x.py", "import sys\nsys.path.insert(0, '.')"),
    "torch.load": ("qat_lora/train/x.py", "import torch\ntorch.load('x')"),
    "branches on a device name": (
        "qat_lora/export/x.py",
        "def f(d):\n    if d.type in ('cuda', 'mps'):\n        pass",
    ),
    "asks a tensor": ("qat_lora/layers/x.py", "def f(x):\n    return 1 if x.is_cuda else 2"),
    "no module docstring": ("qat_lora/commands/x.py", "#"),
    "more than 500 lines": ("qat_lora/commands/x.py", "\n" * 501),
}


@pytest.mark.parametrize("message", OFFENDERS)
def test_offending_source_is_flagged(message):
    path, source = OFFENDERS[message]
    assert any(message in line for line in problems(path, source)), problems(path, source)
    fine = '"""Text."""\nfrom qat_lora.quant.spec import QuantSpec\nfrom qat_lora.errors import ConfigError\n'
    assert problems("qat_lora/layers/x.py", fine) == []


def test_every_part_has_a_rank():
    assert {part_of(path) for path in modules()} <= set(RANK)


def import_graph() -> dict[str, set[str]]:
    """Return which modules of the package each one imports when it is imported itself."""
    sources = {path: source for path, source in modules().items() if path.startswith("qat_lora/")}
    names = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in sources}
    graph = {}
    for name, path in names.items():
        body = [node for node in ast.parse(sources[path]).body if isinstance(node, ast.Import | ast.ImportFrom)]
        graph[name] = {n for node in body for n in imported(node) if n in names and n != "qat_lora"}
    return graph


def test_no_circles():
    graph = import_graph()
    done: set[str] = set()

    def visit(name: str, trail: tuple[str, ...]) -> None:
        assert name not in trail, " -> ".join((*trail, name))
        if name not in done:
            for other in graph[name]:
                visit(other, (*trail, name))
            done.add(name)

    for name in graph:
        visit(name, ())
    assert len(done) > 40


def test_every_module_has_its_tests():
    """For `a/b.py` some file under tests/ imports `qat_lora.a.b`, or names a command of it (`toy_pipeline.call`)."""
    tested = {command.function.partition(":")[0] for command in COMMANDS.values()}
    for file in (ROOT / "tests").rglob("*.py"):
        tested |= set(imported(ast.parse(file.read_text(encoding="utf-8"))))
    names = {
        path.removesuffix(".py").replace("/", ".")
        for path in modules()
        if path.startswith("qat_lora/") and not path.endswith("__init__.py")
    }
    assert sorted(names - tested) == []
