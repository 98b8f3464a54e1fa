"""A teacher larger than one device: spread over GPUs, then host memory, then disk, by accelerate's device map.

The cache is written once, so a teacher need not be fast to be worth having: with its last layers on disk it reads its
weights for every batch, and large batches (`--teacher-batch-size`) pay for that. Tensor parallelism would be faster,
but wants as many equal devices as the model needs; a device map takes what is there.

accelerate's hooks carry tensors to where each module is, but only when a module is *called*. So the output head is
called here, not multiplied by hand as in `CausalLM`, and results come back to the device that the ids were on: to the
rest of the package the teacher looks like one on one device.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from qat_lora.errors import ModelError
from qat_lora.extras import require
from qat_lora.layers.convert import quant_layers
from qat_lora.models.load import CausalLM, load_model
from qat_lora.types import LMHead


class SpreadCausalLM(CausalLM):
    """A causal language model whose modules are on several devices; only to be called, never to be moved."""

    def hidden(self, input_ids_BL: Tensor, document_ids_BL: Tensor) -> Tensor:
        """Return the last hidden states [B, L, H], on the device of the ids."""
        return super().hidden(input_ids_BL, document_ids_BL).to(input_ids_BL.device)

    def lm_head(self) -> LMHead:
        """Return the output head.

        Raises:
            ModelError: it is kept outside the devices.
        """
        head = super().lm_head()
        if head.weight_VH.is_meta:
            raise ModelError(
                "device_map: the output head is kept outside the devices and cannot be stored; leave out --hidden"
            )
        return head

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Return logits as `CausalLM.logits` does, on the device of the hidden states."""
        head = super().lm_head()
        logits = self.module.get_output_embeddings()(hidden_NH)[:, : head.vocab_size].to(hidden_NH.device)
        if head.logit_scale != 1.0:
            logits = logits.float() * head.logit_scale
        return logits if head.softcap is None else head.softcap * torch.tanh(logits.float() / head.softcap)


def load_spread(
    name: str,
    device_map: str | Mapping[str, str | int],
    *,
    revision: str | None = None,
    trust_remote_code: bool = False,
    dtype: str = "float32",
) -> SpreadCausalLM:
    """Load a full-precision model, spread over devices.

    Args:
        name: folder or Hub name.
        device_map: a rule of accelerate (`auto`, `balanced`, …), or the device of every module, `disk` allowed.
        revision: branch, tag or commit on the Hub.
        trust_remote_code: run Python code that comes with the model.
        dtype: `float32` or `bfloat16`.

    Raises:
        ModelError: as `load_model`; also a model that we quantised.
        MissingExtraError: accelerate is not installed.
    """
    require("accelerate", "big")
    loaded = load_model(
        name, revision=revision, trust_remote_code=trust_remote_code, dtype=dtype, device_map=device_map
    )
    if quant_layers(loaded.module):
        raise ModelError(f"device_map: {name} is quantised, so it fits on one device; leave out --device-map")
    return SpreadCausalLM(loaded.module, loaded.folder)
