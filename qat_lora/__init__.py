"""qat-lora gives quantised language models their quality back.

The public names (`__init__.pyi` tells type checkers), loaded at first use: `import qat_lora` imports no PyTorch:

* `build_kd_cache`, `quantize_model`, `train_recovery_lora`, `evaluate_models`, `generate_text`, `export_student`: the
  commands as functions (`qat_lora.api`);
* `KDCacheDataset`: a KD cache as training data;
* `fused_linear_kd`, `kd_soft_ce`: the losses, from hidden states in chunks and from dense logits;
* `QuantSpec`: how one weight matrix is stored;
* `notebook_launch`: a function of one's own on several chips, from a notebook;
* `is_xla_device`, `xla_mark_step`: for scripts of one's own that may run on PyTorch/XLA.

After the import `AutoModelForCausalLM.from_pretrained` and PEFT load our checkpoints (`qat_lora.models.register`).
"""

import importlib
from typing import Any

from qat_lora.models.register import register_with_transformers

__version__ = "0.1.0"

_COMMANDS = "build_kd_cache evaluate_models export_student generate_text quantize_model train_recovery_lora"
_HOMES = dict.fromkeys(_COMMANDS.split(), "qat_lora.api")
_HOMES |= dict.fromkeys(("is_xla_device", "xla_mark_step"), "qat_lora.runtime.xla.runtime")
_HOMES |= {"KDCacheDataset": "qat_lora.cache.read.dataset", "QuantSpec": "qat_lora.quant.spec"}
_HOMES |= {"fused_linear_kd": "qat_lora.losses.fused.op", "kd_soft_ce": "qat_lora.losses.estimators"}
_HOMES["notebook_launch"] = "qat_lora.runtime.launch.start"

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'qat_lora' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


register_with_transformers()
