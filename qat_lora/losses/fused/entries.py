"""Single entries of rows of logits: read them, take them out, add to them; by index, or by products with one-hots.

A GPU or a CPU indexes. A TPU moves whole vectors, and one scalar at a time costs it as much: the top 128 of 4,096
positions would be 1.6 million turns (and by its own compiler's account three times the bytes). What it does best is
multiply. An id is 128 · high + low, so with `high_CEG` and `low_CEW` one-hot and the vocabulary as a matrix [G, W],

    read: rows_CEW = high @ logits_CGW, of which `low` picks one,     write: highᵀ @ (low · value) = values_CGW,

a twentieth of the operations of the output head's own product (one-hots over the whole vocabulary would be [C, E, V]).
A product with ones and zeros is exact where its inputs are bfloat16, which float32 on a TPU is not; so this is the way
of bfloat16 on XLA, whose products are bfloat16 already, and every other case indexes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qat_lora.runtime.xla.runtime import is_xla_device

LANES = 128  # W: the width of a TPU's vector, so that [C, V] and [C, G, W] are one order in memory


class Entries(NamedTuple):
    """Some entries of each of C rows; `high_CEG` and `low_CEW` are one-hot, where that is the way."""

    ids: Sequence[Tensor]  # int64 [C, E_i] each; repeated ids stand for themselves
    high_CEG: Tensor | None = None
    low_CEW: Tensor | None = None


def one_hot_like(values: Tensor) -> bool:
    """Return whether entries of these rows are to be found by products; the rows are then multiples of `LANES`."""
    return values.dtype == torch.bfloat16 and is_xla_device(values)


def entries_of(ids: Sequence[Tensor], rows_CV: Tensor) -> Entries:
    """Return the entries of `rows_CV` with these ids; of any rows of this shape, too."""
    if not ids or not one_hot_like(rows_CV):
        return Entries(ids)
    ids_CE1 = torch.cat(list(ids), 1).int()[..., None]
    high_CEG = ids_CE1 // LANES == torch.arange(rows_CV.shape[1] // LANES, dtype=torch.int32, device=rows_CV.device)
    low_CEW = ids_CE1 % LANES == torch.arange(LANES, dtype=torch.int32, device=rows_CV.device)
    return Entries(ids, high_CEG.to(rows_CV.dtype), low_CEW.to(rows_CV.dtype))


def read(rows_CV: Tensor, entries: Entries) -> list[Tensor]:
    """Return the values at the entries, [C, E_i] for each list of ids."""
    if entries.high_CEG is None or entries.low_CEW is None:
        return [rows_CV.gather(1, ids_CE) for ids_CE in entries.ids]
    groups_CEW = entries.high_CEG @ rows_CV.unflatten(1, (-1, LANES))
    values_CE = torch.where(entries.low_CEW > 0, groups_CEW, torch.zeros_like(groups_CEW)).sum(2)
    return list(values_CE.split([ids_CE.shape[1] for ids_CE in entries.ids], 1))


def remove_first(rows_CV: Tensor, entries: Entries) -> Tensor:
    """Return rows with -inf at the entries of the first list; may overwrite them."""
    if entries.high_CEG is None or entries.low_CEW is None:
        return rows_CV.scatter_(1, entries.ids[0], float("-inf"))
    count = entries.ids[0].shape[1]
    here_CV = _to_dense(entries.high_CEG[:, :count], entries.low_CEW[:, :count])
    return rows_CV.masked_fill(here_CV > 0, float("-inf"))


def add(rows_CV: Tensor, entries: Entries, values: Sequence[Tensor]) -> Tensor:
    """Return rows with values [C, E_i] added at the first entries; may overwrite them. By products all is bfloat16."""
    if entries.high_CEG is None or entries.low_CEW is None:
        for ids_CE, values_CE in zip(entries.ids, values, strict=False):
            rows_CV.scatter_add_(1, ids_CE, values_CE)
        return rows_CV
    values_CE1 = torch.cat(list(values), 1)[..., None]
    count = values_CE1.shape[1]
    high_CEG, low_CEW = entries.high_CEG[:, :count], entries.low_CEW[:, :count]
    dense_CV = _to_dense(high_CEG, low_CEW * values_CE1.to(low_CEW.dtype))
    return rows_CV.to(dense_CV.dtype) + dense_CV  # wide, the sum would make the product wide, and written as such


def _to_dense(high_CEG: Tensor, values_CEW: Tensor) -> Tensor:
    return (high_CEG.transpose(1, 2) @ values_CEW).flatten(1)
