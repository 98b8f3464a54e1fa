"""The notebooks' setup on Colab and Kaggle, as far as it can be tried without either, and a whole "Run all" on Colab.

A new virtual environment that has all packages but ours, a folder of its own, the platform's variables, and stand-ins
for its modules and for `pip`, which needs a network: it notes its arguments and does what an editable install does;
`git clone` is real, from a folder. The variables are those that the platforms' users report; no platform was tried.
"""

import importlib.util
import json
import shutil
import site
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from test_notebooks import ORDER, ROOT, SETUP, read, tagged
from toy_model import make_toy
from toy_paths import clean_environment

SECRETS = {"HF_TOKEN": "hf_never_shown", "WANDB_API_KEY": "wandb_never_shown"}
PLATFORMS = {
    "Colab T4": {"COLAB_RELEASE_TAG": "release-colab", "COLAB_GPU": "1"},
    "Colab v5e-1": {"COLAB_RELEASE_TAG": "release-colab", "COLAB_GPU": "", "TPU_ACCELERATOR_TYPE": "v5litepod-1"},
    "Colab v6e-1": {"COLAB_RELEASE_TAG": "release-colab", "COLAB_GPU": "", "TPU_ACCELERATOR_TYPE": "v6e-1"},
    "Kaggle v5e-8": {
        "KAGGLE_KERNEL_RUN_TYPE": "Interactive",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_PROCESS_ADDRESSES": "local",
        "CLOUD_TPU_TASK_ID": "0",
    },
}
STAND_IN_PIP = """
import json, os, sys, sysconfig
json.dump(sys.argv, open(os.environ["PIP_NOTES"], "w"))
packages = sysconfig.get_path("purelib")
open(f"{packages}/qat_lora.pth", "w").write(sys.argv[-1].partition("[")[0])
if os.path.isdir(older := f"{packages}/older-1.dist-info"):
    os.rename(older, newer := f"{packages}/older-2.dist-info")
    open(f"{newer}/METADATA", "w").write("Name: older\\nVersion: 2\\n")
"""
STAND_INS = {
    "google/colab/drive.py": "import os\ndef mount(at): os.makedirs(at + '/MyDrive', exist_ok=True)\n",
    "google/colab/userdata.py": f"get = {SECRETS}.__getitem__\n",
    "google/colab/__init__.py": "",
    "kaggle_secrets.py": f"class UserSecretsClient:\n    get_secret = {SECRETS}.get\n",
    "ipywidgets.py": "",
    "pip/__init__.py": "",
    "pip/__main__.py": STAND_IN_PIP,
}
RUN_ALL = """
import json, sys
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.kernel = type("Kernel", (), {"do_shutdown": lambda self, restart: print("restart", restart)})()
for cell in json.load(open(sys.argv[1])):
    done = shell.run_cell(cell)
    if not done.success:
        print("ended by", type(done.error_in_exec).__name__)
        break
else:
    print("ALL", json.dumps({name: str(shell.user_ns.get(name)) for name in ("device", "chips", "memory_gib", "kept")}))
"""


class Machine(NamedTuple):
    folder: Path
    environment: dict[str, str]

    def run_all(self, cells: list[str], **variables: str) -> str:
        """Run cells of a notebook from the top; return what was printed."""
        file = self.folder / "cells.json"
        file.write_text(json.dumps(cells), encoding="utf-8")
        done = subprocess.run(
            [str(self.folder / "env/bin/python"), "-c", RUN_ALL, str(file)],
            cwd=self.folder,
            env=self.environment | variables,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        for value in SECRETS.values():
            assert value not in done.stdout + done.stderr
        return done.stdout

    @property
    def root(self) -> Path:
        return self.folder / "root/working"


def packages_of(folder: Path) -> Path:
    (packages,) = (folder / "env/lib").glob("python*/site-packages")
    return packages


@pytest.fixture
def machine(tmp_path) -> Machine:
    """Make a folder with an environment that has all packages but ours, and a repository to clone."""
    pytest.importorskip("IPython")
    if not shutil.which("git"):
        pytest.skip("needs git")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    packages = packages_of(tmp_path)
    (packages / "base.pth").write_text("\n".join(site.getsitepackages()) + "\n")  # editable installs do not follow
    for name, text in STAND_INS.items():
        (packages / name).parent.mkdir(parents=True, exist_ok=True)
        (packages / name).write_text(text, encoding="utf-8")
    repository = tmp_path / "repository"
    shutil.copytree(ROOT / "qat_lora", repository / "qat_lora", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", repository)
    git = ["git", "-C", str(repository), "-c", "user.name=t", "-c", "user.email=t@t"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "all"]):
        subprocess.run([*git, *words], check=True)
    for folder in ("tmp", "root/working"):
        (tmp_path / folder).mkdir(parents=True)
    outside = ("PYTHONPATH", "WANDB_API_KEY", "HF_TOKEN")
    environment = {name: value for name, value in clean_environment().items() if name not in outside}
    environment |= {"QAT_LORA_REPOSITORY": repository.as_uri(), "QAT_LORA_ROOT": str(tmp_path / "root/working")}
    environment |= {"TMPDIR": str(tmp_path / "tmp"), "PIP_NOTES": str(tmp_path / "pip.json")}
    return Machine(tmp_path, environment)


@pytest.mark.parametrize(
    "platform", [pytest.param(name, marks=[pytest.mark.slow] * ("v6e" in name)) for name in PLATFORMS]
)
def test_the_setup_installs_and_looks_at_the_machine(machine, platform):
    ends = "import os; print('left', [n for n in ('TPU_PROCESS_ADDRESSES', 'CLOUD_TPU_TASK_ID') if n in os.environ])"
    shown = machine.run_all([tagged(ORDER[0], SETUP), ends, "print(os.getcwd())"], **PLATFORMS[platform])
    assert "left []" in shown and "ALL" in shown
    found = json.loads(shown.rpartition("ALL ")[2])
    installed = json.loads((machine.folder / "pip.json").read_text())[-1]
    assert installed.startswith(str(machine.folder / "tmp/qat-lora[hub,plot,log,notebook"))
    is_tpu = "T4" not in platform
    assert installed.endswith(",tpu]") == is_tpu and (found["device"] == "tpu") == is_tpu
    if is_tpu:
        assert float(found["memory_gib"]) == pytest.approx(29.8 if "v6e" in platform else 14.9, abs=0.1)
    if platform.startswith("Colab"):
        assert found["kept"] == str(machine.root / "drive/MyDrive/qat-lora")
        assert (machine.root / "qat-lora-work/runs").resolve().is_relative_to(machine.root / "drive")
    else:
        assert found["kept"] == "None" and f"{machine.root}\n" in shown


def test_a_package_that_was_loaded_in_another_version_restarts_the_kernel_once(machine):
    packages = packages_of(machine.folder)
    (packages / "older.py").write_text("")
    (packages / "older-1.dist-info").mkdir()
    (packages / "older-1.dist-info/METADATA").write_text("Name: older\nVersion: 1\n")
    (packages / "older-1.dist-info/top_level.txt").write_text("older\n")
    cells = ["import older", tagged(ORDER[0], SETUP), "print('further')"]
    shown = machine.run_all(cells, **PLATFORMS["Kaggle v5e-8"])
    assert "older: loaded in an older version" in shown and "restart True" in shown and "further" not in shown
    assert "further" in machine.run_all(cells, **PLATFORMS["Kaggle v5e-8"])


def test_without_secrets_and_with_outputs_of_an_earlier_version(machine):
    packages = packages_of(machine.folder)
    (packages / "kaggle_secrets.py").write_text("class UserSecretsClient:\n    def get_secret(self, name): 1 / 0\n")
    earlier = machine.root.parent / "input/earlier/caches/toy"
    earlier.mkdir(parents=True)
    (earlier / "manifest.json").write_text("{}")
    shown = machine.run_all([tagged(ORDER[2], SETUP)], **PLATFORMS["Kaggle v5e-8"])
    assert "no secret HF_TOKEN (ZeroDivisionError)" in shown and "ALL" in shown
    assert (machine.root / "caches/toy/manifest.json").is_file()


@pytest.mark.parametrize("name", [ORDER[0], pytest.param(ORDER[2], marks=pytest.mark.slow)])
def test_run_all_on_colab_then_a_second_session(machine, name):
    """Clone, pip and every cell in toy size on a CPU; a new machine with the same Drive has what was made."""
    for module in ("datasets", "matplotlib", "wandb"):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs {module}")
    make_toy(machine.root / "qat-lora-work/toy", steps=30)
    colab = PLATFORMS["Colab T4"] | {"QAT_LORA_TOY": "1", "QAT_LORA_TOY_DEVICE": "cpu", "WANDB_MODE": "offline"}
    cells = ["".join(cell["source"]) for cell in read(name)["cells"] if cell["cell_type"] == "code"]
    shown = machine.run_all(cells, **colab)
    assert "ALL" in shown, shown
    drive = machine.root / "drive/MyDrive/qat-lora"
    made = {path.relative_to(drive).as_posix() for path in drive.glob("*/*")}
    if name == ORDER[0]:
        wanted = {"caches/toy", *(f"runs/toy_w2g64{end}" for end in ("", "_recovered", "_scores", "_export"))}
    else:
        wanted = {"runs/toy_sft", "runs/toy_sft_merged"}
    assert made >= wanted
    shutil.rmtree(machine.root / "qat-lora-work")
    again = machine.run_all([cells[0], "print(sorted(os.listdir('runs')), os.path.isdir('caches/toy'))"], **colab)
    assert f"{sorted(Path(part).name for part in made if part.startswith('runs'))} {name == ORDER[0]}" in again
    assert "installing" not in again, "the second session of this test has the packages"
