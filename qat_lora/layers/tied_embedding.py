"""An embedding that looks its rows up in a quantised LM head: one matrix, stored once as codes.

Small models tie the two, and their matrix is a large share of all weights (a quarter in Qwen3-0.6B). As codes for the
LM head and floats for the embedding it would take more room than before. So the LM head holds codes, scales and
whatever trains, and the embedding asks it for its weight. transformers ties *parameters* by name and would expect one
here; so a checkpoint's config says `tie_word_embeddings: false`, and the preset in it says that the two are one.
"""

import torch
from torch import Tensor, nn

from qat_lora.errors import ConfigError
from qat_lora.layers.calibrate.upcast import UpcastEmbedding
from qat_lora.layers.quant_linear import QuantLinear


class TiedEmbedding(nn.Module):
    """Rows of a quantised LM head, [..., H], for token ids [...]."""

    like: Tensor

    def __init__(self, lm_head: QuantLinear, dtype: torch.dtype) -> None:
        super().__init__()
        self._lm_head = (lm_head,)  # a tuple hides the submodule: the state dict names its tensors once
        self.register_buffer("like", torch.empty(0, dtype=dtype), persistent=False)

    @property
    def computes_in(self) -> torch.dtype:
        """Type of the rows, and so of the model's activations."""
        return self.like.dtype

    @property
    def weight(self) -> Tensor:
        """The effective weight [V, H], formed on access."""
        return self._lm_head[0].weight

    def forward(self, ids: Tensor) -> Tensor:
        """Look rows up, in the type that the model computes in."""
        return nn.functional.embedding(ids, self._lm_head[0].effective()).to(self.like.dtype)


def embedding_of(model: nn.Module, lm_head: nn.Linear) -> str | None:
    """Return the name of the embedding that an LM head is tied to, if any; ConfigError: it does more than look up."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.weight is lm_head.weight:
            if type(module) not in (nn.Embedding, UpcastEmbedding):
                raise ConfigError(
                    f"quantize_head: the head is tied to {name}, a {type(module).__name__}, which does more than to "
                    "look rows up; leave --quantize-head out"
                )
            return name
    return None


def tie_embedding(model: nn.Module, name: str, lm_head: QuantLinear) -> None:
    """Let an embedding look its rows up in a quantised LM head."""
    table = model.get_submodule(name)
    assert isinstance(table, nn.Embedding)
    dtype = torch.float32 if isinstance(table, UpcastEmbedding) else table.weight.dtype
    model.set_submodule(name, TiedEmbedding(lm_head, dtype))
