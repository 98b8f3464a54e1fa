"""`import qat_lora` is all that transformers and PEFT need to load our checkpoints, in whatever order they come."""

import subprocess
import sys

import pytest
import torch

from qat_lora.files.checksums import checkpoint_sha256
from qat_lora.layers.calibrate.quantize import quantize_model
from qat_lora.layers.convert import add_lora
from qat_lora.layers.lora import LoraConfig
from qat_lora.models.adapter import save_adapter
from qat_lora.models.hf_quantizer import QUANT_METHOD
from qat_lora.models.load import load_model, save_quantised
from qat_lora.models.register import FOLLOWER, TARGET
from qat_lora.quant.presets import preset

LOAD = """
model = transformers.AutoModelForCausalLM.from_pretrained({base!r})
print(type(model.model.layers[0].mlp.up_proj).__name__)
"""
PEFT = """
from peft import PeftModel
model = PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained({base!r}), {adapter!r})
print(type(model.base_model.model.model.layers[0].mlp.up_proj.base_layer).__name__)
"""


@pytest.fixture(scope="module")
def folders(tiny, tmp_path_factory):
    root = tmp_path_factory.mktemp("registered")
    model = load_model(str(tiny.teacher))
    quantize_model(model.module, preset("w2g64"), "absmax", quiet=True)
    save_quantised(model, root / "base", preset("w2g64"), {})
    torch.manual_seed(0)
    lora = LoraConfig(recovery_r=2)
    add_lora(model.module, lora)
    save_adapter(model.module, lora, root / "adapter", root / "base", checkpoint_sha256(root / "base"))
    return {"base": str(root / "base"), "adapter": str(root / "adapter")}


def python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    "imports",
    [
        "import qat_lora; import transformers",
        "import transformers; import qat_lora",
        "import transformers.quantizers; import qat_lora",
        "import transformers; transformers.AutoModelForCausalLM; import qat_lora",
        "import qat_lora, importlib; importlib.reload(qat_lora); import transformers",
    ],
)
def test_transformers_loads_our_checkpoint(folders, imports):
    done = python(imports + LOAD.format(**folders))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["QuantLinear"]


@pytest.mark.parametrize("imports", ["import qat_lora; import transformers", "import peft, transformers, qat_lora"])
def test_peft_loads_our_adapter_on_it(folders, imports):
    done = python(imports + PEFT.format(**folders))
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == ["QuantLinear"]


def test_control_without_our_import_transformers_does_not_know_the_method(folders):
    done = python("import transformers" + LOAD.format(**folders))
    assert QUANT_METHOD in done.stderr and "QuantLinear" not in done.stdout


def test_looking_for_the_module_neither_imports_nor_breaks_it():
    done = python(
        "import qat_lora, sys, importlib.util\n"
        f"assert {TARGET!r} not in sys.modules and {FOLLOWER!r} not in sys.modules\n"
        "assert 'transformers' not in sys.modules and 'torch' not in sys.modules\n"
        "spec = importlib.util.find_spec('transformers.quantizers')\n"
        "assert spec.origin.endswith('quantizers/__init__.py') and 'qat_lora.models.hf_quantizer' not in sys.modules\n"
        "import transformers.quantizers as found, inspect\n"
        "assert 'qat_lora.models.hf_quantizer' in sys.modules and 'qat_lora.models.load' not in sys.modules\n"
        "assert type(found.__loader__).__name__ == type(found.__spec__.loader).__name__ == 'SourceFileLoader'\n"
        "assert 'HfQuantizer' in inspect.getsource(found)\n"
    )
    assert done.returncode == 0, done.stderr[-3000:]
