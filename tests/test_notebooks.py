"""The notebooks run from top to bottom, as a user would run them: in order, in one folder, each in a fresh kernel.

`make test` runs the first one as on Colab (`test_notebooks_platforms.py`), `make test-full` all. `make notebooks`
(this file as a program) runs them like the test does and writes the outputs into them. What the kernel wrote to stderr
is left out there: progress bars, and seconds that say more about the machine than about the notebook.
"""

import ast
import hashlib
import importlib.util
import json
import os
import re
import sys
import tempfile
from pathlib import Path

import nbclient
import nbformat
import pytest
import yaml
from toy_model import make_toy
from toy_paths import clean_environment

from qat_lora import api
from qat_lora.options import EstimateOptions, RecoverOptions, RunConfig
from qat_lora.plan.devices import named
from qat_lora.plan.memory import GIB, forecast, skeleton
from qat_lora.train.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "notebooks"
ORDER = ("TPU_LoRA_KD_WikiText1024", "TPU_multi_chip", "SFT_LoRA_v5e8")
FULL_SIZE, SIZED, SETUP = "full-size", "sized", "setup"
"""Tags of the cells with the parameters of the real run, with what the machine changes, and of the one in all."""
SETUP_CELL = FOLDER / "setup_cell.py"
FUNCTIONS = {
    "build_kd_cache": "CacheBuildOptions",
    "quantize_model": "QuantizeOptions",
    "train_recovery_lora": "RecoverOptions",
    "evaluate_models": "EvalOptions",
    "generate_text": "GenerateOptions",
    "export_student": "ExportOptions",
}
PRIVATE = re.compile(r"/tmp/|/work|/root|/home/|/Users/|seconds|tokens/s|\d(\.\d+)? s\b|[0-9]it/s")
"""What a shipped output may not hold: paths and user names of a machine, and how fast it is."""


def execute(name: str, folder: Path, device: str) -> nbformat.NotebookNode:
    """Run a notebook in a kernel of its own, in a folder that holds `toy`; raise what a cell raises.

    One chip is `device`: `xla`, or `cpu`, which is quicker since nothing is compiled. XLA's own CPU stands for the TPU.
    """
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)
    kept = {k: v for k, v in clean_environment().items() if not k.startswith(("WANDB", "QAT_LORA"))}
    programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**kept, "PATH": programs, "PJRT_DEVICE": "CPU"}
    environment |= {"QAT_LORA_TOY": "1", "QAT_LORA_TOY_DEVICE": device}
    client = nbclient.NotebookClient(
        notebook, timeout=1200, kernel_name="python3", resources={"metadata": {"path": folder}}, record_timing=False
    )
    return client.execute(env=environment)


def shipped(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Return an executed notebook as it is committed: without stderr, with a digest of what was run."""
    notebook = json.loads(nbformat.writes(notebook))
    for cell in code_cells(notebook):
        printed = "".join("".join(output["text"]) for output in cell["outputs"] if output.get("name") == "stdout")
        stream = {"name": "stdout", "output_type": "stream", "text": printed.splitlines(keepends=True)}
        rest = [output for output in cell["outputs"] if output["output_type"] != "stream"]
        cell["outputs"] = [*([stream] if printed else []), *rest]
    notebook["metadata"] = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
        "executed_sha256": digest(notebook),
    }
    return notebook


def code_cells(notebook: dict) -> list[dict]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def digest(notebook: dict) -> str:
    """Return what identifies the code of a notebook."""
    sources = ["".join(cell["source"]) for cell in code_cells(notebook)]
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()


def read(name: str) -> dict:
    return json.loads((FOLDER / f"{name}.ipynb").read_text(encoding="utf-8"))


def tagged(name: str, tag: str) -> str:
    """Return the code of a notebook's cell with a tag."""
    (cell,) = (cell for cell in code_cells(read(name)) if tag in cell["metadata"].get("tags", ()))
    return "".join(cell["source"])


def full_size(name: str, **machine: object) -> dict:
    """Return the parameters of a notebook's real run; with a `machine`, as that is sized."""
    found: dict = {"toy": False, "os": os, **machine}
    exec(tagged(name, FULL_SIZE), found)
    if machine:
        exec(tagged(name, SIZED), found)
    return found


def recipe(name: str) -> dict:
    """Return the settings of a recipe, without their groups."""
    settings = yaml.safe_load((ROOT / "recipes" / f"{name}.yaml").read_text(encoding="utf-8"))
    groups = [value for value in settings.values() if isinstance(value, dict)]
    return {key: value for group in (settings, *groups) for key, value in group.items()}


def streams(notebook: dict, name: str) -> str:
    """Return what the cells of a notebook printed."""
    outputs = [output for cell in code_cells(notebook) for output in cell["outputs"] if output.get("name") == name]
    return "".join("".join(output["text"]) for output in outputs)


def pictures(notebook: dict) -> int:
    outputs = [output for cell in code_cells(notebook) for output in cell["outputs"]]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def calls_of(source: str) -> list[str]:
    """Return the calls of our commands' functions in a cell."""
    called = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))
    return [
        text for node in called if (text := ast.unparse(node)).startswith(tuple(f"qat_lora.{f}(" for f in FUNCTIONS))
    ]


def losses(run: Path) -> list[float]:
    return [line["loss"] for line in read_metrics(run / "metrics.jsonl")]


@pytest.mark.xla
@pytest.mark.skipif(importlib.util.find_spec("torch_xla") is None, reason="needs the xla extra")
@pytest.mark.filterwarnings("default")  # of Jupyter's packages, which are not ours to mend
@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "xla"])
def test_the_first_two_run_in_order(tmp_path, device):
    make_toy(tmp_path / "toy", steps=120)
    first, second = (shipped(execute(name, tmp_path, device)) for name in ORDER[:2])
    assert (pictures(first), pictures(second)) == (3, 1)

    runs = tmp_path / "runs"
    scores = json.loads((runs / "toy_w2g64_scores/scores.json").read_text())
    assert scores["teacher"]["kl"] == 0 < scores["recovered"]["kl"] < scores["quantised"]["kl"]
    assert (runs / "toy_w2g64_export/base/model.safetensors").is_file()

    one = losses(runs / "chips/one")
    kls = [line["kl"] for line in read_metrics(runs / "chips/one/evaluations.jsonl")]
    assert len(one) == 40 and kls[-1] != pytest.approx(kls[0], rel=0.5), "hardly trained, so this compares nothing"
    for run in ("spawn", "spmd"):
        assert losses(runs / "chips" / run) == pytest.approx(one, rel=1e-4), run
    assert 5 <= json.loads((runs / "chips/spawn/result.json").read_text())["resumed_from"] < 40
    assert "exit code 143" in streams(second, "stdout")


@pytest.mark.skipif(importlib.util.find_spec("wandb") is None, reason="needs the log extra")
@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_fine_tuning_runs(tmp_path):
    make_toy(tmp_path / "toy", steps=30)
    done = shipped(execute(ORDER[2], tmp_path, "cpu"))
    assert pictures(done) == 1
    nll = [line["nll"] for line in read_metrics(tmp_path / "runs/toy_sft/evaluations.jsonl")]
    assert min(nll) < nll[0]
    assert "step-000040, step-000060" in streams(done, "stdout")
    assert (tmp_path / "runs/toy_sft_merged/model.safetensors").is_file()


def test_these_are_the_notebooks_and_share_their_setup():
    assert {file.stem for file in FOLDER.glob("*.ipynb")} == set(ORDER)
    for name in ORDER:
        assert tagged(name, SETUP) == SETUP_CELL.read_text(encoding="utf-8").rstrip("\n"), "make notebooks"


@pytest.mark.parametrize("name", ORDER)
def test_a_notebook_ships_the_outputs_of_its_code(name):
    """Valid version 4.5, executed in order as it stands, nothing of the machine in it, no shell magic."""
    notebook = read(name)
    nbformat.validate(notebook)
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["executed_sha256"] == digest(notebook), "make notebooks"
    cells = code_cells(notebook)
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    assert pictures(notebook) and streams(notebook, "stdout") and not streams(notebook, "stderr")
    first = "".join(notebook["cells"][0]["source"])
    assert "toy run on a CPU, not on a TPU" in first and not re.search(r"^[!%]", first, re.M)
    shown = json.dumps([cell["outputs"] for cell in cells]).replace("image/png", "")
    assert not PRIVATE.findall(re.sub(r'"": "[^"]*"', "", shown))


def test_what_is_private_is_found():
    for text in ("in /tmp/x", "/root/a.py", "12.5 s", "took 3 seconds", "80 tokens/s", "5.00it/s"):
        assert PRIVATE.search(text), text
    assert not PRIVATE.search("60 steps, loss 3.25, runs/toy")


def test_the_real_run_is_that_of_the_recipes():
    """The parameters in the first notebook are those of the recipes of one chip; the second one goes on from there."""
    found = full_size(ORDER[0])
    cache = recipe("cache_wikitext103_L1024_K128")
    student, run = recipe("quantize_qwen3-0.6b_q4_r32"), recipe("recover_qwen3-0.6b_q4_r32_v6e-1")
    for mine, theirs in (
        (found["text"] | found["cached"] | {"out": found["cache_folder"]}, cache),
        (found["quantised"] | {"out": found["student_folder"], "model": found["teacher"]}, student),
        (found["recovery"] | {"dtype": found["run"]["dtype"], "checkpoint": found["student_folder"]}, run),
    ):
        assert mine == {name: float(theirs[name]) if name == "lr" else theirs[name] for name in mine}
    assert {full_size(ORDER[1])[name] for name in ("cache", "student")} == {cache["out"], student["out"]}


MACHINES = {
    "Colab T4": {"device": "cuda", "chips": 1, "memory_gib": 15.0, "rate": 8.1, "disk_gib": 70.0},
    "Colab v5e-1": {"device": "tpu", "chips": 1, "memory_gib": 14.9, "rate": 197, "disk_gib": 180.0},
    "Colab v6e-1": {"device": "tpu", "chips": 1, "memory_gib": 29.8, "rate": 918, "disk_gib": 180.0},
    "Kaggle v5e-8": {"device": "tpu", "chips": 8, "memory_gib": 14.9, "rate": 8 * 197, "disk_gib": 19.5},
    "laptop": {"device": "cpu", "chips": 1, "memory_gib": 8.0, "rate": 0.5, "disk_gib": 8.5},
}


@pytest.mark.parametrize(("name", "count"), [(ORDER[0], 6), (ORDER[2], 4)])
@pytest.mark.parametrize("machine", MACHINES)
def test_the_real_run_of_a_notebook_is_one_that_the_commands_take(name, count, machine, tmp_path, monkeypatch):
    """Settings that do not exist, or contradict each other, are found here, not on the chip."""
    made, sized = Path("runs/made"), MACHINES[machine]
    known = {**full_size(name, **sized), **dict.fromkeys(("cache", "student", "recovered", "tuned"), made)}
    monkeypatch.setattr(api, "run", lambda command, options: options)
    known["qat_lora"] = api
    calls = [call for cell in code_cells(read(name)) for call in calls_of("".join(cell["source"]))]
    taken = [eval(call, known) for call in calls]
    assert len(calls) == count and all(taken)
    for options in taken:
        if isinstance(options, RecoverOptions):
            assert gib_of(options, machine, tmp_path) < 0.9 * sized["memory_gib"], machine


def gib_of(options: RecoverOptions, machine: str, folder: Path) -> float:
    """Return GiB of a recovery's step on a machine, by the estimate."""
    (folder / "config.json").write_bytes((ROOT / "tests/data/qwen3-0.6b.json").read_bytes())
    kinds = {"Colab T4": "t4", "Colab v6e-1": "v6e-1", "laptop": "laptop"}
    of = MACHINES[machine]["device"]
    wanted = EstimateOptions(
        model=str(folder),
        preset="q4_r32" if options.checkpoint else None,
        lora=options.lora,
        batch_size=options.loop.batch_size,
        gradient_checkpointing=options.loop.gradient_checkpointing,
        run=RunConfig(device=of, dtype="bfloat16" if of == "tpu" else "float32"),
    )
    device = named((kinds.get(machine, "v5e-1"),))
    return forecast(skeleton(wanted), wanted, device)["devices"][device[0].name]["total_bytes"] / GIB


def test_a_disk_without_room_is_said_before_the_first_download():
    with pytest.raises(OSError, match="6.2 GiB of disk are free, 6 are needed"):
        full_size(ORDER[0], **MACHINES["laptop"] | {"disk_gib": 6.2})
    assert full_size(ORDER[0], **MACHINES["Colab v6e-1"] | {"disk_gib": 8.0})["cached"]["num_rows"] < 4000


def write_setup() -> None:
    """Put the common cell into every notebook."""
    for name in ORDER:
        notebook = read(name)
        for cell in code_cells(notebook):
            if SETUP in cell["metadata"].get("tags", ()):
                cell["source"] = SETUP_CELL.read_text(encoding="utf-8").rstrip("\n").splitlines(keepends=True)
        text = json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"
        (FOLDER / f"{name}.ipynb").write_text(text, encoding="utf-8")


def main() -> None:
    """Run the notebooks, all in order, and write the common cell and the outputs into them."""
    write_setup()
    with tempfile.TemporaryDirectory(prefix="qat-lora-notebooks-") as folder:
        make_toy(Path(folder) / "toy", steps=600)
        for name in ORDER:
            done = shipped(execute(name, Path(folder), "xla"))
            text = json.dumps(done, indent=1, ensure_ascii=False) + "\n"
            (FOLDER / f"{name}.ipynb").write_text(text, encoding="utf-8")
            print(name)


if __name__ == "__main__":
    main()
