"""Teachers that transformers cannot run on one device: too large for it, or in a file that only llama.cpp knows.

A teacher larger than one device lies on GPUs, then in host memory, then on disk, by accelerate's device map. The cache
is written once, so a slow teacher is still worth having: with its last layers on disk it reads weights for every batch,
which large batches (`--teacher-batch-size`) amortise. Tensor parallelism would be faster, but needs as many equal
devices as the model fills; a device map uses whatever there is. accelerate's hooks carry tensors to where each module
is, but only when a module is *called*. So the output head is called here, not multiplied by hand as in `CausalLM`, and
results return to the device of the ids: to the rest of the package the teacher looks like a model on one device.

llama.cpp runs a teacher in a GGUF file of an architecture or block format that only it knows. Its server gives the top
K of one position a request; here, in the same process, the logits of all positions come from one pass, so draws and
temperatures are to be had as well. Hidden states are not: llama.cpp keeps the last layer's outputs or the logits.
`hidden` therefore returns logits, and `logits` what it is given.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from qat_lora.errors import ModelError, errors_explained
from qat_lora.extras import require
from qat_lora.files.gguf_header import read_header
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
    """Load a full-precision model over devices by accelerate's `device_map`; ModelError: as `load_model`, or ours."""
    require("accelerate", "big")
    loaded = load_model(name, hub, dtype, device_map)
    if quant_layers(loaded.module):
        raise ModelError(f"device_map: {name} is quantised, so it fits on one device; leave out --device-map")
    return DispatchedCausalLM(loaded.module, loaded.folder)


class LlamaCppModel:
    """A `LanguageModel` of llama.cpp, for rows of up to `length` tokens; ModelError: it does not load the file."""

    def __init__(self, file: Path, length: int) -> None:
        llama_cpp = require("llama_cpp", "llama")
        self.folder, self.max_positions = file, read_header(file).of_model("context_length")
        threads = torch.get_num_threads()  # OMP_NUM_THREADS: they spin, and are 40 times slower on a busy processor
        exact = llama_cpp.GGML_TYPE_F32  # keys and values as the weights give them: one row's are little memory
        with errors_explained(ModelError, f"model: llama.cpp does not load {file}", ValueError, RuntimeError):
            self._llama = llama_cpp.Llama(
                str(file), n_ctx=length, n_gpu_layers=-1, logits_all=True, type_k=exact, type_v=exact,
                n_threads=threads, n_threads_batch=threads, verbose=False,
            )  # fmt: skip
        self.vocab_size = self._llama.n_vocab()
        self.version = f"llama.cpp by llama-cpp-python {llama_cpp.__version__}"

    def hidden(self, input_ids_BL: Tensor, document_ids_BL: Tensor) -> Tensor:
        """Return the logits [B, L, V] in float32, every document of a row computed by itself."""
        documents = []
        for ids_L, documents_L in zip(input_ids_BL, document_ids_BL, strict=True):
            for document in ids_L.split(torch.unique_consecutive(documents_L, return_counts=True)[1].tolist()):
                self._llama.reset()
                self._llama.eval(document.tolist())
                documents.append(torch.from_numpy(np.array(self._llama.scores[: len(document)], np.float32)))
        return torch.cat(documents).unflatten(0, input_ids_BL.shape)

    def lm_head(self) -> LMHead:
        """Refuse: llama.cpp does not hand it out."""
        raise ModelError(f"model: {self.folder} is run by llama.cpp, which gives no hidden states; leave out --hidden")

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Return what it is given: these are logits already."""
        return hidden_NH
