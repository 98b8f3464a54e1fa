"""A teacher larger than one device: on GPUs, then in host memory, then on disk, by accelerate's device map.

The cache is written once, so a slow teacher is still worth having: with its last layers on disk it reads weights for
every batch, which large batches (`--teacher-batch-size`) amortise. Tensor parallelism would be faster, but needs as
many equal devices as the model fills; a device map uses whatever there is.

accelerate's hooks carry tensors to where each module is, but only when a module is *called*. So the output head is
called here, not multiplied by hand as in `CausalLM`, and results return to the device of the ids: to the rest of the
package the teacher looks like a model on one device.
"""

from collections.abc import Mapping

from torch import Tensor

from qat_lora.errors import ModelError
from qat_lora.extras import require
from qat_lora.layers.convert import quant_layers
from qat_lora.models.hub import DEFAULT_HUB, HubConfig
from qat_lora.models.load import CausalLM, load_model, scale_and_cap
from qat_lora.types import LMHead


class DispatchedCausalLM(CausalLM):
    """A causal language model with modules on several devices; it can be called and must not be moved."""

    def hidden(self, input_ids_BL: Tensor, document_ids_BL: Tensor) -> Tensor:
        """Return the last hidden states [B, L, H], on the device of the ids."""
        return super().hidden(input_ids_BL, document_ids_BL).to(input_ids_BL.device)

    def lm_head(self) -> LMHead:
        """Return the output head; ModelError: it is kept outside the devices."""
        lm_head = super().lm_head()
        if lm_head.weight_VH.is_meta:
            raise ModelError("device_map: the output head is on no device, so it cannot be stored; leave out --hidden")
        return lm_head

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Return logits as `CausalLM.logits` does, on the device of the hidden states."""
        lm_head = super().lm_head()
        logits = self.module.get_output_embeddings()(hidden_NH)[:, : lm_head.vocab_size].to(hidden_NH.device)
        return scale_and_cap(logits, lm_head)


def load_dispatched(
    name: str, device_map: str | Mapping[str, str | int], hub: HubConfig = DEFAULT_HUB, dtype: str = "float32"
) -> DispatchedCausalLM:
    """Load a full-precision model over several devices; ModelError: as `load_model`, or a model that we quantised.

    `device_map` is a rule of accelerate (`auto`, `balanced`, …), or the device of every module, `disk` allowed.
    """
    require("accelerate", "big")
    loaded = load_model(name, hub, dtype, device_map)
    if quant_layers(loaded.module):
        raise ModelError(f"device_map: {name} is quantised, so it fits on one device; leave out --device-map")
    return DispatchedCausalLM(loaded.module, loaded.folder)
