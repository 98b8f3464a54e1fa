"""The forward of generation: one token at a time, over keys and values in tensors of fixed shape.

transformers' own caches either grow, which gives a compiling device a new graph for each token, or count tokens apart
from the positions. Here the first forward takes the whole row, padding included, and keeps all its keys and values;
from then on each token overwrites its place and attends to the places up to it. So padding is never seen, positions are
data, and there are two graphs: of the row, and of a token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from qat_lora.layers.attention import MaskForm, attention_inputs, keeps_state, step_masks
from qat_lora.layers.calibrate.upcast import computing_dtype

if TYPE_CHECKING:  # transformers takes seconds to import, and the command line's options import this module
    from qat_lora.models.load import CausalLM


class KeyValueCache:
    """Keys and values of a row [B, heads, L, D] by layer, with the one method that transformers' layers call."""

    def __init__(self, length: int, padding_B: Tensor | None = None) -> None:
        self.length = length  # of the row
        self.padding_B = padding_B  # tokens before each row's text that nothing sees
        self.positions_T = torch.empty(0, dtype=torch.int64)  # of the tokens in the current forward
        self.kept: dict[int, tuple[Tensor, Tensor]] = {}

    def update(self, keys: Tensor, values: Tensor, layer_idx: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Put the keys and values of these tokens in their places; return those of the whole row."""
        if layer_idx not in self.kept:
            room = (0, 0, 0, self.length - keys.shape[2])
            self.kept[layer_idx] = pad(keys, room).contiguous(), pad(values, room).contiguous()
            return keys, values
        for kept, new in zip(self.kept[layer_idx], (keys, values), strict=True):
            kept.index_copy_(2, self.positions_T, new)
        return self.kept[layer_idx]


def begin(
    model: CausalLM, input_ids_BL: Tensor, prompt_length: int, padding_B: Tensor | None = None, room: int = 0
) -> tuple[Tensor, Any]:
    """Return the last hidden states [B, L, H] of whole rows, one document each, and the cache for `step`.

    Up to `padding_B` first tokens are not seen; the cache has `room` for more. With layer states: of the prompt alone.
    """
    backbone = model.backbone
    if keeps_state(model.config):
        output = backbone(input_ids=input_ids_BL[:, :prompt_length], use_cache=True)
        return output.last_hidden_state, output.past_key_values
    length = input_ids_BL.shape[1]
    form: MaskForm = "dense" if model.mask_form() == "dense" else "first"
    documents_BL = torch.zeros_like(input_ids_BL[:1])
    if padding_B is not None:
        documents_BL = (torch.arange(length, device=padding_B.device) >= padding_B[:, None]).to(torch.int64)
    masks, positions = attention_inputs(model.config, documents_BL, computing_dtype(model.module), form)
    cache = KeyValueCache(length + room, padding_B)
    seen = {"attention_mask": masks, "past_key_values": cache, "use_cache": True}
    return backbone(input_ids=input_ids_BL, position_ids=positions, **seen).last_hidden_state, cache


def step(model: CausalLM, input_ids_B1: Tensor, position_1: Tensor, cache: Any) -> Tensor:
    """Return the last hidden states [B, 1, H] of the tokens at a position, which is data on the model's device."""
    module, masks, positions = model.module, None, position_1[None]
    if isinstance(cache, KeyValueCache):
        cache.positions_T = position_1
        masks = step_masks(model.config, position_1, cache.length, computing_dtype(module), cache.padding_B)
        positions = positions if cache.padding_B is None else positions - cache.padding_B[:, None]
    seen = {"attention_mask": masks, "past_key_values": cache, "use_cache": True}
    return model.backbone(input_ids=input_ids_B1, position_ids=positions, **seen).last_hidden_state
