"""Attention masks for packed rows and for generation, built in the graph: additive, or as tiles for FlexAttention.

Given a 2-D mask or none, transformers inspects it on the host in each forward, which stops an XLA device, and packed
documents would see each other. So the mask is built here, from document ids or positions, in the form that transformers
passes through unchanged.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qat_lora.errors import ModelError
from qat_lora.layers.flex_attention import BLOCK, document_block_mask


def attention_inputs(
    config: Any, document_ids_BL: Tensor, dtype: torch.dtype, in_blocks: bool = False
) -> tuple[Any, Tensor]:
    """Return attention masks and positions for packed rows, without reading anything back.

    The mask is additive [B, 1, L, L], or one per layer kind where the model mixes full and sliding attention;
    positions count the earlier tokens of the same document. With `in_blocks` it is a block mask where L allows one.
    """
    length = document_ids_BL.shape[1]
    index = torch.arange(length, device=document_ids_BL.device)
    distance = index[:, None] - index[None, :]
    same = document_ids_BL[:, :, None] == document_ids_BL[:, None, :]
    full = same & (distance >= 0)
    positions = full.sum(-1) - 1
    if not in_blocks or length % BLOCK:
        return additive_masks(config, full, distance, dtype), positions
    masks = _by_kind(config, full, distance, lambda seen, window: document_block_mask(seen, document_ids_BL, window))
    return masks, positions


def additive_masks(config: Any, full: Tensor, distance: Tensor, dtype: torch.dtype) -> Any:
    """Return additive masks [B, 1, T, L] by layer kind, or one where all layers are of one kind.

    `full` [B, T, L] is what layers without a window may see, `distance` [T, L] how far each of T tokens is behind
    each of L.

    Raises:
        ModelError: a kind of attention that is not supported.
    """

    def additive(allowed: Tensor, _window: int | None) -> Tensor:
        blocked = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=allowed.device)
        return torch.where(allowed[:, None], torch.zeros_like(blocked), blocked)

    return _by_kind(config, full, distance, additive)


def _by_kind(config: Any, full: Tensor, distance: Tensor, make: Callable[[Tensor, int | None], Any]) -> Any:
    """Return what `make` makes of what a kind of layers may see and its window; by kind where there are several."""
    window: Any = getattr(config, "sliding_window", None)
    # Mistral, Mixtral, Phi 3 and Starcoder 2 name no kinds: with a window, all their layers slide.
    one_kind = "full_attention" if window is None else "sliding_attention"
    kinds = set(getattr(config, "layer_types", None) or [one_kind])
    unknown = kinds - {"full_attention", "sliding_attention"}
    if unknown:
        raise ModelError(f"model: attention of kind {', '.join(sorted(unknown))} is not supported")
    masks = {}
    for kind in kinds:
        sliding = kind == "sliding_attention" and window is not None
        masks[kind] = make(full & (distance < int(window)), int(window)) if sliding else make(full, None)
    return masks if len(masks) > 1 else next(iter(masks.values()))
