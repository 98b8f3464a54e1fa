"""Attention that skips what documents and causality block, for devices with a compiler of their own kernels.

A mask in memory rules out the flash kernels of torch's fused attention: all L x L scores are computed, keys and values
are repeated for every query head, and the mask is read in every layer. FlexAttention takes a *block mask* instead:
which tiles of 128 x 128 scores hold anything, which of these are whole, and a rule for the others, compiled into the
kernel. Documents, windows and causality become tiles that are never visited, and key heads are shared as they are.

One block mask serves all layers of a micro-batch. Its shapes are those of the batch and its rule reads document ids
from a tensor, so another batch is no other program. Not variable-length flash attention: it wants packed rows of
unknown number, whose counts a host would have to read, and a package of its own. Uncompiled, `flex_attention` computes
all scores in plain operations: that is for tests.

Source: FlexAttention (Dong et al., 2024, arXiv 2412.05496).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

BLOCK = 128  # tokens on either side of a tile; rows of other lengths than multiples have no block mask


def document_block_mask(first_BL: Tensor) -> BlockMask:
    """Return the block mask of packed rows, without reading anything back; L is a multiple of `BLOCK`.

    Every token sees from its `first` position, which never falls along a row, to its own.
    """
    length = first_BL.shape[1]
    tile = torch.arange(length // BLOCK, device=first_BL.device)
    begin_BQ, end_BQ = first_BL[:, ::BLOCK] // BLOCK, first_BL[:, BLOCK - 1 :: BLOCK]
    seen_BQK = (tile >= begin_BQ[:, :, None]) & (tile <= tile[:, None])
    whole_BQK = (tile * BLOCK >= end_BQ[:, :, None]) & (tile < tile[:, None])

    def rule(row: Tensor, _of_head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (key >= first_BL[row, query])

    partial, whole = (seen_BQK & ~whole_BQK)[:, None], whole_BQK[:, None]
    return BlockMask.from_kv_blocks(
        *_listed(partial), *_listed(whole), BLOCK_SIZE=BLOCK, mask_mod=rule, seq_lengths=(length, length)
    )


def _listed(tiles_B1QK: Tensor) -> tuple[Tensor, Tensor]:
    """Return how many tiles each row of tiles has, and the numbers of these first."""
    marks = tiles_B1QK.to(torch.int32)
    return marks.sum(-1, dtype=torch.int32), marks.argsort(dim=-1, descending=True, stable=True).to(torch.int32)


def flex_or(otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """Return an attention function for transformers: FlexAttention for a block mask, else `otherwise`."""

    def attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **others: Any) -> Any:
        if not isinstance(attention_mask, BlockMask) or others.get("dropout"):
            return otherwise(module, query, key, value, attention_mask, **others)
        shared = query.shape[1] != key.shape[1]
        output: Any = flex_attention(
            query, key, value, block_mask=attention_mask, scale=others.get("scaling"), enable_gqa=shared
        )
        return output.transpose(1, 2), None

    return attend
