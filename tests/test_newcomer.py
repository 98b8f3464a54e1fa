"""What a newcomer adds takes at most three files, and CONTRIBUTING says which: a test of its table.

Each line of the table names an example that is there already. Its name, as a string, a function, a class or an import,
or as a key or a value of a data file, may occur in no file of the package but those that the line lists.
"""

import ast
import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "qat_lora"
ROW = re.compile(r"^\| ([a-z ]+) \| `(\w[\w-]*)` \| (.+) \|$")
FILES = 3


def table() -> dict[str, tuple[str, list[str]]]:
    """Return the example and the files of every line of the table."""
    lines = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()
    matches = [match for line in lines if (match := ROW.match(line))]
    return {match[1]: (match[2], re.findall(r"`([^`]+)`", match[3])) for match in matches}


def knows(source: str, name: str) -> bool:
    """Tell whether a module has a name as a string of its own, or defines or imports it."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Constant(value=str(found)) | ast.alias(name=found):
                pass
            case ast.FunctionDef(name=found) | ast.ClassDef(name=found):
                pass
            case _:
                continue
        if found == name:
            return True
    return False


def holds(data: object, name: str) -> bool:
    """Tell whether a data file has a name as a key or a value."""
    if isinstance(data, dict):
        return name in data or any(holds(value, name) for value in data.values())
    return any(holds(value, name) for value in data) if isinstance(data, list) else data == name


def known_in(name: str) -> set[str]:
    modules = (file for file in PACKAGE.rglob("*.py") if knows(file.read_text(encoding="utf-8"), name))
    files = (f for f in PACKAGE.rglob("*.yaml") if holds(yaml.safe_load(f.read_text(encoding="utf-8")), name))
    return {file.relative_to(PACKAGE).as_posix() for file in (*modules, *files)}


def test_the_table_has_all():
    assert list(table()) == [
        "a loss estimator",
        "a preset",
        "a runtime",
        "an export form",
        "a command",
        "an optimizer",
        "a text format",
        "a cache value type",
    ]


@pytest.mark.parametrize("item", table())
def test_at_most_three_files(item):
    name, files = table()[item]
    assert len(files) <= FILES
    assert all((PACKAGE / file).is_file() for file in files)
    known = known_in(name)
    assert known, f"{name} is nowhere: the example is gone"
    assert known <= set(files)


def test_names_are_found():
    assert knows("FORMS = {'gguf': 1}", "gguf")
    assert knows("from a import AdamW", "AdamW")
    assert not knows('"""Writes gguf files."""\ngguf.write()', "gguf")
