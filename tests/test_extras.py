"""Optional dependencies: the module where it is there, the install command where it is not."""

import json
import sys

import pytest

from qat_lora.errors import MissingExtraError
from qat_lora.extras import pyplot, require


def test_an_installed_module_is_returned():
    assert require("json", "plot") is json


def test_a_missing_module_names_the_extra_to_install():
    with pytest.raises(MissingExtraError) as caught:
        require("qat_lora_no_such_module", "plot")
    assert str(caught.value) == "qat_lora_no_such_module is not installed: pip install 'qat-lora[plot]'"
    assert caught.value.exit_code == 2


def test_plots_go_to_files_only():
    pytest.importorskip("matplotlib")
    assert pyplot().get_backend().lower() == "agg"


def test_a_notebook_keeps_its_backend(monkeypatch):
    matplotlib = pytest.importorskip("matplotlib")
    monkeypatch.setitem(sys.modules, "ipykernel", None)
    monkeypatch.setattr(matplotlib, "use", lambda backend: pytest.fail(f"switched to {backend}"))
    assert pyplot()


def test_the_extras_that_messages_name_exist():
    """Every `qat-lora[extra]` in the package is an extra of pyproject.toml."""
    import re
    import tomllib
    from pathlib import Path

    root = Path(__file__).resolve().parents[1]
    known = set(tomllib.loads((root / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    sources = [file.read_text(encoding="utf-8") for file in (root / "qat_lora").rglob("*.py")]
    named = {name for s in sources for found in re.findall(r"qat-lora\[([a-z,]+)\]", s) for name in found.split(",")}
    assert named and named <= known
