"""What a plain import costs: `import qat_lora` loads neither PyTorch nor transformers, the options no transformers."""

import subprocess
import sys

import pytest

HEAVY = ("torch", "torch._dynamo", "transformers", "torch_xla", "peft", "datasets", "matplotlib", "numpy", "yaml")


def loaded(statement: str) -> set[str]:
    """Return which heavy packages a fresh interpreter has after a statement."""
    code = f"{statement}\nimport sys\nprint(*[n for n in {HEAVY} if n in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert not result.stderr
    return set(result.stdout.splitlines()[-1].split())


def test_the_package_alone_loads_nothing():
    assert loaded("import qat_lora; dir(qat_lora); qat_lora.__version__") == set()


@pytest.mark.parametrize(
    "module", ["qat_lora.options", "qat_lora.runtime.launch.start", "qat_lora.cli", "qat_lora.runtime.xla.runtime"]
)
def test_what_comes_before_the_choice_of_a_device_leaves_transformers_alone(module):
    assert not loaded(f"import {module}") & {*HEAVY} - {"torch", "numpy", "yaml"}


def test_the_command_line_needs_no_torch_for_its_list_of_commands():
    assert loaded("from qat_lora.cli import main\nmain(['--help'])") <= {"yaml"}


def test_control_a_command_does_load_them():
    assert loaded("import os\nos.environ['USE_TORCH_XLA'] = '0'\nimport qat_lora.commands.recover") >= {
        "torch",
        "transformers",
    }
