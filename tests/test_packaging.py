"""What is shipped: one version, examples in the wheel and where a command puts them, workflows of make targets only."""

import ast
import re
import shutil
import tomllib
from pathlib import Path

import pytest
import yaml

import qat_lora
from qat_lora import cli
from qat_lora.commands import repository

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
OTHER_ACTIONS = {"actions/checkout@v4", "actions/setup-python@v5", "actions/upload-artifact@v4"}


def test_the_version_is_written_once_and_cited():
    assert "version" in PROJECT["project"]["dynamic"]
    assert PROJECT["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "qat_lora.__version__"}
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["version"] == qat_lora.__version__ and citation["license"] == PROJECT["project"]["license"]


def test_examples_are_those_of_the_wheel(tmp_path, monkeypatch, capfd):
    """From an installed package, as `setup.py` lays it out (`make wheel` does the whole of it), and from a clone."""
    tree = ast.parse((ROOT / "setup.py").read_text(encoding="utf-8"))
    (copied,) = (ast.literal_eval(n.value) for n in tree.body if isinstance(n, ast.Assign))
    assert copied == repository.FOLDERS and repository.home() == ROOT
    clone = {f"{folder}/{p.name}" for folder, kind in repository.FOLDERS.items() for p in (ROOT / folder).glob(kind)}
    assert len(clone) > 20
    for name in clone:
        (tmp_path / "lib/qat_lora/examples" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / "lib/qat_lora/examples" / name)

    monkeypatch.setattr(qat_lora, "__file__", str(tmp_path / "lib/qat_lora/__init__.py"))
    out = tmp_path / "mine"
    cli.main(["examples", "--out", str(out)])
    assert clone == {p.relative_to(out).as_posix() for p in out.rglob("*.*")}
    recipe = out / "recipes/quantize_qwen3-0.6b_q2_0.yaml"
    assert recipe.read_bytes() == (ROOT / "recipes" / recipe.name).read_bytes()

    recipe.write_text("mine")
    capfd.readouterr()
    cli.main(["examples", "--out", str(out)])
    printed = capfd.readouterr().out
    assert recipe.read_text() == "mine" and f"other than ours: {recipe}" in printed and printed.startswith("0 of")


def test_without_examples_the_command_says_where_it_looked(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr(qat_lora, "__file__", str(tmp_path / "qat_lora/__init__.py"))
    with pytest.raises(SystemExit):
        cli.main(["examples"])
    assert capfd.readouterr().err.startswith(f"error: examples: {tmp_path} holds none; install the wheel")


def targets() -> set[str]:
    """Return the targets of the Makefile."""
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return {name for line in re.findall(r"^([a-z-]+(?: [a-z-]+)*):(?!=)", makefile, re.M) for name in line.split()}


@pytest.mark.parametrize("file", WORKFLOWS, ids=lambda file: file.stem)
def test_a_workflow_calls_make_targets_only(file):
    (job,) = yaml.safe_load(file.read_text(encoding="utf-8"))["jobs"].values()
    assert {step["uses"] for step in job["steps"] if "uses" in step} <= OTHER_ACTIONS
    (run,) = (step["run"] for step in job["steps"] if "run" in step)
    named = job.get("strategy", {}).get("matrix", {}).get("target", [run.removeprefix("make ")])
    assert run.startswith("make ") and {word for line in named for word in line.split()} <= targets()


def test_these_are_the_workflows():
    assert [file.stem for file in WORKFLOWS] == ["docs", "nightly", "tests", "wheel"]


def test_every_extra_is_resolved_by_make():
    script = (ROOT / ".ci/resolve").read_text(encoding="utf-8")
    pattern = re.search(r"s/(\^.*?)/\\1/p", script)
    assert pattern and "make resolve" in (ROOT / "Makefile").read_text(encoding="utf-8")
    names = re.compile(pattern[1].replace(r"\(", "(").replace(r"\)", ")"), re.M)
    section = (ROOT / "pyproject.toml").read_text(encoding="utf-8").split("[project.optional-dependencies]")[1]
    found = names.findall(section.split("[project.scripts]")[0])
    assert set(found) == set(PROJECT["project"]["optional-dependencies"])


def test_files_beside_the_modules_are_in_the_wheel():
    package, patterns = ROOT / "qat_lora", PROJECT["tool"]["setuptools"]["package-data"]["qat_lora"]
    beside = {file for file in package.rglob("*.*") if file.is_file() and file.suffix not in (".py", ".pyc")}
    assert beside and beside <= {file for pattern in patterns for file in package.glob(pattern)}
