"""The notebooks run from top to bottom, at toy size, in a fresh interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))

RUN = """
import json, sys
names = {"__name__": "__main__"}
for cell in json.load(open(sys.argv[1], encoding="utf-8"))["cells"]:
    if cell["cell_type"] == "code":
        exec(compile("".join(cell["source"]), sys.argv[1], "exec"), names)
print(json.dumps(names["scores"]))
"""


def test_there_is_a_notebook():
    assert "quickstart" in [file.stem for file in NOTEBOOKS]


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_notebook_runs(file, tiny, tmp_path):
    toy = {"TOY": "1", "TEACHER": tiny.teacher, "TEXT": tiny.text, "HELD_OUT": tiny.held_out, "OUT": "out"}
    environment = {**os.environ, **{f"QAT_LORA_{name}": str(value) for name, value in toy.items()}}
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(file)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    scores = json.loads(done.stdout.splitlines()[-1])
    assert set(scores) == {"teacher", "quantised", "recovered"}
    assert scores["teacher"]["kl"] == 0 < scores["recovered"]["kl"]
    assert (tmp_path / "out/recovered/best/adapter_model.safetensors").is_file()


@pytest.mark.parametrize("file", NOTEBOOKS, ids=lambda file: file.stem)
def test_notebook_is_clean(file):
    """Valid version 4.5 cells with ids, no outputs, no shell magic."""
    notebook = json.loads(file.read_text(encoding="utf-8"))
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    ids = [cell["id"] for cell in notebook["cells"]]
    assert len(set(ids)) == len(ids)
    for cell in notebook["cells"]:
        source = "".join(cell["source"])
        assert not source.startswith(("!", "%")) and "\n!" not in source and "\n%" not in source
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None
