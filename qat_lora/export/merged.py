"""A merged dense model: codes, scales and adapter folded into ordinary weights, loadable by anything.

The size advantage is gone; what stays is the recovered quality, for tools that know neither our codes nor
adapters. Nothing is re-quantised: a delta smaller than half a code step would be rounded away.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from qat_lora.errors import ModelError
from qat_lora.layers.convert import lora_layers, merge, quant_layers
from qat_lora.models.load import DTYPES, cast, save_model


def check_mergeable(module: nn.Module) -> None:
    """Raise a ModelError if there is nothing to merge."""
    if not quant_layers(module) and not lora_layers(module):
        raise ModelError("model: has neither quantised layers nor adapters, so there is nothing to merge")


def save_merged(module: Any, out: Path, dtype: str = "float32") -> None:
    """Merge a transformers model in place and write it as an ordinary folder, without tokenizer files.

    Args:
        module: the model, in float32: weights are rounded once, after adapter and base were added.
        out: the folder.
        dtype: type of the weights, `float32` or `bfloat16`.

    Raises:
        ModelError: nothing to merge.
    """
    check_mergeable(module)
    merge(module)
    cast(module, DTYPES[dtype])
    module.hf_quantizer = None
    if hasattr(module.config, "quantization_config"):
        del module.config.quantization_config
    save_model(module, out)
