"""The forward of generation: one token at a time, over keys and values in tensors of fixed shape.

transformers' own caches either grow, which gives a compiling device a new graph for each token, or count tokens apart
from the positions. Here the first forward takes the whole row, padding included, and keeps all its keys and values;
from then on each token overwrites its place and attends to the places up to it. So padding is never seen, positions are
data, and there are two graphs: of the row, and of a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from qat_lora.layers.calibrate.upcast import computing_dtype
from qat_lora.models.attention_mask import additive_masks

if TYPE_CHECKING:  # transformers takes seconds to import, and the command line's options import this module
    from qat_lora.models.load import CausalLM


class KeyValueCache:
    """Keys and values of a row [B, heads, L, D] by layer, with the one method that transformers' layers call."""

    def __init__(self) -> None:
        self.positions_T = torch.empty(0, dtype=torch.int64)
        """Of the tokens in the current forward."""
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Put the keys and values of these tokens in their places; return those of the whole row."""
        if layer_idx not in self.kept:
            self.kept[layer_idx] = keys.contiguous(), values.contiguous()
        else:
            for kept, new in zip(self.kept[layer_idx], (keys, values), strict=True):
                kept.index_copy_(2, self.positions_T, new)
        return self.kept[layer_idx]


def begin(model: CausalLM, input_ids_BL: Tensor) -> tuple[Tensor, KeyValueCache]:
    """Return the last hidden states [B, L, H] of whole rows, one document each, and the cache for `step`."""
    cache = KeyValueCache()
    length = input_ids_BL.shape[1]
    return _forward(model, input_ids_BL, torch.arange(length, device=input_ids_BL.device), length, cache), cache


def step(model: CausalLM, input_ids_B1: Tensor, position_1: Tensor, cache: KeyValueCache) -> Tensor:
    """Return the last hidden states [B, 1, H] of the tokens at a position, which is data on the model's device."""
    length = next(iter(cache.kept.values()))[0].shape[2]
    return _forward(model, input_ids_B1, position_1, length, cache)


def _forward(model: CausalLM, ids_BT: Tensor, positions_T: Tensor, length: int, cache: KeyValueCache) -> Tensor:
    module = model.module
    cache.positions_T = positions_T
    distance_TL = positions_T[:, None] - torch.arange(length, device=ids_BT.device)[None, :]
    masks = additive_masks(model.config, (distance_TL >= 0)[None], distance_TL, computing_dtype(module))
    backbone = getattr(module, module.base_model_prefix)
    output = backbone(
        input_ids=ids_BT, attention_mask=masks, position_ids=positions_T[None], past_key_values=cache, use_cache=True
    )
    return output.last_hidden_state
