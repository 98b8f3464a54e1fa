"""Attention masks for packed rows and for generation, as additive masks that are built in the graph.

Given a 2-D mask or none, transformers inspects it on the host in each forward, which stops an XLA device, and packed
documents would see each other. So the mask is built here, from document ids or positions, in the form that transformers
passes through unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qat_lora.errors import ModelError


def attention_inputs(config: Any, document_ids_BL: Tensor, dtype: torch.dtype) -> tuple[Any, Tensor]:
    """Return additive attention masks and positions for packed rows, without reading anything back.

    The mask is [B, 1, L, L], or one per layer kind where the model mixes full and sliding attention; positions
    count the earlier tokens of the same document.
    """
    length = document_ids_BL.shape[1]
    index = torch.arange(length, device=document_ids_BL.device)
    distance = index[:, None] - index[None, :]
    same = document_ids_BL[:, :, None] == document_ids_BL[:, None, :]
    full = same & (distance >= 0)
    positions = full.sum(-1) - 1
    return additive_masks(config, full, distance, dtype), positions


def additive_masks(config: Any, full: Tensor, distance: Tensor, dtype: torch.dtype) -> Any:
    """Return additive masks [B, 1, T, L] by layer kind, or one where all layers are of one kind.

    `full` [B, T, L] is what layers without a window may see, `distance` [T, L] how far each of T tokens is behind
    each of L.

    Raises:
        ModelError: a kind of attention that is not supported.
    """
    window: Any = getattr(config, "sliding_window", None)
    # Mistral, Mixtral, Phi 3 and Starcoder 2 name no kinds: with a window, all their layers slide.
    one_kind = "full_attention" if window is None else "sliding_attention"
    kinds = set(getattr(config, "layer_types", None) or [one_kind])
    unknown = kinds - {"full_attention", "sliding_attention"}
    if unknown:
        raise ModelError(f"model: attention of kind {', '.join(sorted(unknown))} is not supported")

    def additive(allowed: Tensor) -> Tensor:
        blocked = torch.full((), torch.finfo(dtype).min, dtype=dtype, device=allowed.device)
        return torch.where(allowed[:, None], torch.zeros_like(blocked), blocked)

    masks = {}
    for kind in kinds:
        sliding = kind == "sliding_attention" and window is not None
        masks[kind] = additive(full & (distance < int(window)) if sliding else full)
    return masks if len(masks) > 1 else next(iter(masks.values()))
