"""A teacher in a GGUF file, run by llama.cpp: architectures and block formats that only it knows.

Its server gives the top K of one position a request; here, in the same process, the logits of all positions come from
one pass, so draws and temperatures are to be had as well. Hidden states are not: llama.cpp keeps the last layer's
outputs or the logits. `hidden` therefore returns logits, and `logits` what it is given.
"""

from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from qat_lora.errors import ModelError, one_line
from qat_lora.extras import require
from qat_lora.files.gguf_header import read_header
from qat_lora.types import LMHead


class LlamaCppModel:
    """A `LanguageModel` of llama.cpp, for rows of up to `length` tokens; ModelError: it does not load the file."""

    def __init__(self, file: Path, length: int) -> None:
        llama_cpp = require("llama_cpp", "llama")
        self.folder, self.max_positions = file, read_header(file).of_model("context_length")
        threads = torch.get_num_threads()  # OMP_NUM_THREADS: they spin, and are 40 times slower on a busy processor
        exact = llama_cpp.GGML_TYPE_F32  # keys and values as the weights give them: one row's are little memory
        try:
            self._llama = llama_cpp.Llama(
                str(file), n_ctx=length, n_gpu_layers=-1, logits_all=True, type_k=exact, type_v=exact,
                n_threads=threads, n_threads_batch=threads, verbose=False,
            )  # fmt: skip
        except (ValueError, RuntimeError) as error:
            raise ModelError(f"model: llama.cpp does not load {file} ({one_line(error, 200)})") from None
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
