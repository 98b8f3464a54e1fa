"""The structure of the package, counted and held: imports, rooms, lines, functions; read off the syntax trees.

Imports point one way without circles, devices stay in one room, every command is registered once, and every module has
a test. `python tests/test_architecture.py` prints the counts.
"""

import ast
import functools
import json
import re
from collections.abc import Iterator, Mapping
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
    9: ("cli", "api", "commands", "layer_qat", "__init__"),
    10: ("scripts", "notebooks"),
}
RANK = {part: rank for rank, parts in RANKS.items() for part in parts}
DEVICES = {"cpu", "cuda", "mps", "tpu", "xla"}
ROOMS = 26  # first-level packages and modules
FUNCTION_PARAMETERS = 8  # of a function in the rooms below
SMALL_FUNCTIONS = ("train", "losses", "layers", "runtime")
# Private words that the terms of docs/glossary.md have replaced; no part of an identifier, and none on a page.
PRIVATE_WORDS = {"feeding", "lesson", "lessons", "likeliest", "pushing", "redraw"}
PRIVATE_WORDS |= {"speakers", "spool", "sweep", "trainee"}
# On a page these may be plain English; `head` alone could be the LM head, an attention head or the top K.
PRIVATE_NAMES = {"head", "settle", "spread"}
# Asking which device names exist is the job of these two; they branch on no device to compute.
MAY_NAME_DEVICES = ("commands", "plan", "notebooks")
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
    # Tensors alone, and in one place: `best.pt` of an export.
    safe = {
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and path == "qat_lora/models/load.py"
        if any(word.arg == "weights_only" and getattr(word.value, "value", None) is True for word in node.keywords)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            dotted = f"{node.value.id}.{node.attr}"
            if dotted == "sys.path" or dotted == "torch.load" and node.lineno not in safe:
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
    "load.py:2: torch.load": ("qat_lora/models/load.py", "import torch\ntorch.load('x')"),
    "branches on a device name": (
        "qat_lora/export/x.py",
        "def f(d):\n    if d.type in ('cuda', 'mps'):\n        pass",
    ),
    "asks a tensor": ("qat_lora/layers/x.py", "def f(x):\n    return 1 if x.is_cuda else 2"),
    "no module docstring": ("qat_lora/commands/x.py", "#"),
}


@pytest.mark.parametrize("message", OFFENDERS)
def test_offending_source_is_flagged(message):
    path, source = OFFENDERS[message]
    assert any(message in line for line in problems(path, source)), problems(path, source)
    fine = '"""Text."""\nfrom qat_lora.quant.spec import QuantSpec\nfrom qat_lora.errors import ConfigError\n'
    assert problems("qat_lora/layers/x.py", fine) == []


def test_every_part_has_a_rank():
    assert {part_of(path) for path in modules()} <= set(RANK)


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax tree of every module of the package, by dotted name."""
    sources = {path: source for path, source in modules().items() if path.startswith("qat_lora/")}
    return {
        path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): ast.parse(source)
        for path, source in sources.items()
    }


def room_of(module: str) -> str:
    """Return the room of a module: the first word after the package."""
    return module.split(".")[1] if "." in module else "__init__"


@functools.cache
def import_graph() -> dict[str, set[str]]:
    """Return which modules each module imports, anywhere in it: in functions and for type checkers as well.

    The registry names functions by strings, imports none, and everything may import it: it has no arrows.
    """
    names = trees().keys()
    graph = {name: (set(imported(tree)) & names) - {name, "qat_lora"} for name, tree in trees().items()}
    graph["qat_lora.registry"] = set()
    return graph


def room_graph() -> dict[str, set[str]]:
    """Return which rooms each room imports."""
    graph: dict[str, set[str]] = {room_of(name): set() for name in trees()}
    for name, others in import_graph().items():
        graph[room_of(name)] |= {room_of(other) for other in others} - {room_of(name)}
    return graph


def reached(graph: Mapping[str, set[str]], node: str) -> set[str]:
    """Return what a node leads to over any number of arrows."""
    found, left = set(), [node]
    while left:
        new = graph[left.pop()] - found
        found |= new
        left += new
    return found


def circles(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the groups of nodes that reach each other, each as one line."""
    reach = {node: reached(graph, node) for node in graph}
    groups = {
        frozenset(other for other in reach[node] if node in reach[other]) for node in graph if node in reach[node]
    }
    return sorted(" <-> ".join(sorted(group)) for group in groups)


def longest_chain(graph: Mapping[str, set[str]]) -> list[str]:
    """Return the longest chain of nodes in which each imports the next; arrows of circles are left out."""
    reach = {node: reached(graph, node) for node in graph}
    chains: dict[str, list[str]] = {}

    def chain(node: str) -> list[str]:
        if node not in chains:
            below = [chain(other) for other in sorted(graph[node]) if node not in reach[other]]
            chains[node] = [node, *max(below, key=len, default=[])]
        return chains[node]

    return max(map(chain, sorted(graph)), key=len)


def functions() -> Iterator[tuple[str, int, int]]:
    """Yield the name (`module:Class.function`), lines and parameters (`self` not counted) of every function."""

    def inside(node: ast.AST, name: str) -> Iterator[tuple[str, int, int]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                inner = f"{name}.{child.name}".replace(":.", ":")
                if not isinstance(child, ast.ClassDef):
                    given = child.args
                    names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
                    names += [a.arg for a in (given.vararg, given.kwarg) if a is not None]
                    count = len(names) - (names[:1] in (["self"], ["cls"]))
                    yield inner, (child.end_lineno or 0) - child.lineno + 1, count
                yield from inside(child, inner)
            else:
                yield from inside(child, name)

    for module, tree in trees().items():
        yield from inside(tree, f"{module}:")


def second_tables(sources: Mapping[str, ast.Module]) -> list[str]:
    """Return where, outside the registry, a literal table has two or more commands as keys or entries."""
    found = []
    for module, tree in sources.items():
        for node in ast.walk(tree) if module != "qat_lora.registry" else ():
            entries: list[ast.expr | None] = []
            if isinstance(node, ast.Dict):
                entries = list(node.keys)
            elif isinstance(node, ast.List | ast.Tuple | ast.Set):
                entries = [e.elts[0] if isinstance(e, ast.Tuple) and e.elts else e for e in node.elts]
            named = {e.value for e in entries if isinstance(e, ast.Constant) and e.value in COMMANDS}
            if len(named) > 1:
                found.append(f"{module}:{node.lineno}: {', '.join(sorted(named))}")
    return found


def counts() -> dict[str, object]:
    """Return the numbers that describe the structure."""
    rooms = room_graph()
    longest = max(functions(), key=lambda function: function[1])
    return {
        "rooms": len(rooms),
        "arrows": sum(map(len, rooms.values())),
        "floors": len(longest_chain(rooms)),
        "longest chain": " -> ".join(longest_chain(rooms)),
        "modules": len(trees()),
        "lines": package_lines(),
        "longest function": f"{longest[0]} ({longest[1]} lines)",
        "circles": circles(import_graph()) + circles(rooms),
    }


def package_lines() -> int:
    """Return the lines of the package."""
    return sum(source.count("\n") for path, source in modules().items() if path.startswith("qat_lora/"))


def test_no_circles():
    assert set(circles(import_graph())) | set(circles(room_graph())) == set()
    assert len(import_graph()) > 100


def test_circles_and_chains_are_found():
    graph = {"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": {"a"}}
    assert circles(graph) == ["b <-> c"]
    assert longest_chain(graph) == ["d", "a", "b"]
    assert longest_chain({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == ["a", "b", "c"]


def test_rooms():
    assert len(room_graph()) <= ROOMS, sorted(room_graph())


def identifiers(tree: ast.AST) -> Iterator[str]:
    """Return every name that a source defines, reads or passes."""
    for node in ast.walk(tree):
        for field in ("name", "id", "attr", "arg"):
            if isinstance(name := getattr(node, field, None), str):
                yield name.lower().strip("_")


def test_private_words_stay_replaced():
    assert set(identifiers(ast.parse("class Spool: pass\nf(likeliest=head.lessons)"))) >= {"spool", "likeliest", "head"}
    for module, tree in trees().items():
        for name in set(identifiers(tree)):
            assert name not in PRIVATE_NAMES and not PRIVATE_WORDS.intersection(name.split("_")), f"{module}: {name}"
    for page in [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]:
        assert not PRIVATE_WORDS.intersection(re.findall(r"\w+", page.read_text(encoding="utf-8").lower())), page


def test_functions_are_small():
    large = {
        name
        for name, _, parameters in functions()
        if parameters > FUNCTION_PARAMETERS and room_of(name.partition(":")[0]) in SMALL_FUNCTIONS
    }
    assert large == set()


def test_commands_are_registered_once():
    assert second_tables(trees()) == []
    assert second_tables({"x": ast.parse("DEVICES = {'quantize': 1, 'recover': 8}")}) == ["x:1: quantize, recover"]
    assert second_tables({"x": ast.parse("HELP = [('eval', 'Score.'), ('qat', 'Train.')]")}) == ["x:1: eval, qat"]


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


if __name__ == "__main__":
    for what, number in counts().items():
        print(f"{what:<18}{number}")
