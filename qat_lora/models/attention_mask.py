"""What every token of packed rows sees, built in the graph: by first positions, in memory, or as FlexAttention's tiles.

Given a 2-D mask or none, transformers inspects it on the host in each forward, which stops an XLA device, and packed
documents would see each other. So the mask is built here, from document ids or positions, in a form that transformers
passes through unchanged. Documents are contiguous, so the first position that each token sees says it all, and memory
is linear in the length of a row; a mask of L x L is made only for attention that reads nothing else.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from qat_lora.errors import ModelError
from qat_lora.layers.attention import MASK_TILE, dense_mask, document_block_mask

LONGEST_DENSE = 4096  # tokens: a mask in memory is 32 MB a row in bfloat16 there, and faster where kernels are torch's
MaskForm = Literal["first", "blocks", "dense"]
# Kinds of layers that carry a state from token to token (`layers/recurrent.py`), and need no mask.
STATEFUL = {"linear_attention", "conv", "hybrid"}


def attention_inputs(config: Any, document_ids_BL: Tensor, dtype: torch.dtype, form: MaskForm) -> tuple[Any, Tensor]:
    """Return attention masks and positions for packed rows, without reading anything back.

    A mask holds first positions [B, 1, 1, L], is additive [B, 1, L, L], or a block mask; where the model mixes kinds of
    layers there is one for each. Positions count a document's earlier tokens. ModelError: an unsupported kind of
    attention.
    """
    begin_BL, own_L = document_begins(document_ids_BL)

    def make(window: int | None) -> Any:
        first_BL = begin_BL if window is None else torch.maximum(begin_BL, own_L - window + 1)
        if form == "blocks" and first_BL.shape[1] % MASK_TILE == 0:
            return document_block_mask(first_BL)
        return dense_mask(first_BL[:, None, None], dtype) if form == "dense" else first_BL[:, None, None]

    return _by_kind(config, make), own_L - begin_BL


def document_begins(document_ids_BL: Tensor) -> tuple[Tensor, Tensor]:
    """Return where each token's document begins, by a running maximum of doublings, int32 [B, L], and positions [L]."""
    length = document_ids_BL.shape[1]
    own_L = torch.arange(length, dtype=torch.int32, device=document_ids_BL.device)
    is_begin = torch.nn.functional.pad(document_ids_BL[:, 1:] != document_ids_BL[:, :-1], (1, 0))
    begin_BL, reach = own_L * is_begin, 1
    while reach < length:
        begin_BL = torch.maximum(begin_BL, torch.nn.functional.pad(begin_BL[:, :-reach], (reach, 0)))
        reach *= 2
    return begin_BL, own_L


def step_masks(config: Any, position_1: Tensor, length: int, dtype: torch.dtype, pad_B: Tensor | None = None) -> Any:
    """Return additive masks [B or 1, 1, 1, L] of one token at a position, by kind of layers; `pad_B` are unseen."""
    distance_L = position_1 - torch.arange(length, device=position_1.device)

    def make(window: int | None) -> Tensor:
        seen_L = (distance_L >= 0) & (distance_L < (length if window is None else window))
        seen_BL = seen_L[None] if pad_B is None else seen_L & (position_1 - distance_L >= pad_B[:, None])
        return torch.where(seen_BL, 0.0, torch.finfo(dtype).min).to(dtype)[:, None, None]

    return _by_kind(config, make)


def keeps_state(config: Any) -> bool:
    """Return whether some layers carry a state from token to token."""
    return bool(STATEFUL & set(getattr(config, "layer_types", None) or ()))


def _by_kind(config: Any, make: Callable[[int | None], Any]) -> Any:
    """Return what `make` makes of the window of a kind of layers; by kind where there are several."""
    window: Any = getattr(config, "sliding_window", None)
    # Mistral, Mixtral, Phi 3 and Starcoder 2 name no kinds: with a window, all their layers slide.
    one_kind = "full_attention" if window is None else "sliding_attention"
    kinds = set(getattr(config, "layer_types", None) or [one_kind])
    unknown = kinds - {"full_attention", "sliding_attention"} - STATEFUL
    if unknown:
        raise ModelError(f"model: attention of kind {', '.join(sorted(unknown))} is not supported")
    if "hybrid" in kinds:  # layers that have both
        kinds |= {"full_attention", "linear_attention"}
    is_sliding = {"sliding_attention": None if window is None else int(window)}
    masks = {kind: None if kind in STATEFUL else make(is_sliding.get(kind)) for kind in kinds}
    return masks if len(masks) > 1 else next(iter(masks.values()))
