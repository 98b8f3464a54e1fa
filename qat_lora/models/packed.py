"""Reading weights that another tool's container holds packed: `compressed-tensors`, pack-quantized.

transformers can unpack such a folder too, but it multiplies codes and steps in float16, which rounds what the file
holds exactly. Here they are multiplied in float32. `export/compressed.py` writes the format.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from qat_lora.extras import require
from qat_lora.files.checksums import read_object
from qat_lora.models.load import PACKED


def read_packed(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """Yield the packed weights of a folder of compressed-tensors, by layer name, float32 [O, I]; of others nothing.

    Raises:
        MissingExtraError: compressed-tensors is not installed.
    """
    quantization = read_object(folder / "config.json").get("quantization_config") or {}
    if quantization.get("quant_method") != PACKED:
        return
    groups = quantization["config_groups"].values()
    bits = {target: group["weights"]["num_bits"] for group in groups for target in group["targets"]}
    packing = require("compressed_tensors.compressors.pack_quantized.helpers", "export")
    for file in sorted(folder.glob("model*.safetensors")):
        tensors = load_file(file)
        for name in sorted(key.removesuffix(".weight_packed") for key in tensors if key.endswith(".weight_packed")):
            shape = torch.Size(tensors[f"{name}.weight_shape"].tolist())
            width = bits.get(name, bits.get("Linear"))
            codes_OI = packing.unpack_from_int32(tensors[f"{name}.weight_packed"], width, shape)
            steps_OG = tensors[f"{name}.weight_scale"].float()
            yield name, codes_OI.float() * steps_OG.repeat_interleave(shape[1] // steps_OG.shape[1], dim=1)
