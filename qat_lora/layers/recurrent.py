"""Layers that carry a state (gated delta rule, Mamba-2, short convolutions), with packed documents kept apart in it.

A state passes from token to token whatever the attention mask says. torch's functions for these layers know no
documents (CUDA packages do, each in its form), so documents become rows of their own, around a layer's convolution and
scan alone: what mixes no tokens, the projections and all that is quantised, still sees the packed rows once.

Documents of about one length go together, padded behind, which a causal function never sees: at most twice the tokens,
in at most log2 L calls. How many they are depends on the text, so XLA would compile every batch anew, and is refused.
"""

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import yaml
from torch import Tensor, nn

from qat_lora.errors import ModelError

_CONVOLUTION = "causal_conv1d_fn"
SUPPORTED = yaml.safe_load(Path(__file__).with_name("recurrent.yaml").read_text(encoding="utf-8"))
"""By model type, as tested against transformers document by document: its convolution, its scan."""
_MARK = "qat_lora_keeps_documents_apart"


class Documents(NamedTuple):
    """Where the tokens of packed rows are when each document is a row of its own."""

    groups: list[Tensor]  # [documents, longest]: numbers of tokens in the flattened rows, B L for padding
    back_N: Tensor  # of each token of the flattened rows: its place in the flattened groups, one after the other


def split_documents(begin_BL: Tensor) -> Documents | None:
    """Return how to split rows by the position at which each token's document begins; None if they have one each."""
    begin, (rows, length) = begin_BL.cpu(), begin_BL.shape
    starts_D = (begin == torch.arange(length)).flatten().nonzero()[:, 0]
    if len(starts_D) == rows:
        return None
    sizes_D = torch.diff(starts_D, append=torch.tensor([rows * length]))
    bits_D = (2 * sizes_D - 1).log2().int()  # sizes 2^k + 1 to 2^(k + 1) go together
    groups = []
    for bits in bits_D.unique():
        start_G1, size_G1 = starts_D[bits_D == bits, None], sizes_D[bits_D == bits, None]
        offset = torch.arange(int(size_G1.max()))
        groups.append(torch.where(offset < size_G1, start_G1 + offset, rows * length))
    back_N = torch.empty(rows * length + 1, dtype=torch.int64)
    places = torch.cat([group.flatten() for group in groups])
    back_N[places] = torch.arange(len(places))
    return Documents([group.to(begin_BL.device) for group in groups], back_N[:-1].to(begin_BL.device))


def keep_documents_apart(model: nn.Module, kind: str) -> None:
    """Let the functions that pass on a state in a model's layers take `documents`; ModelError: an untested kind."""
    names = vars(sys.modules[type(model).__module__])
    if kind not in SUPPORTED or not set(SUPPORTED[kind]) <= set(names):
        what = "layers that carry a state from document to document, and none of the kinds in which they are kept apart"
        raise ModelError(f"model: {kind} has {what}; allowed: {', '.join(sorted(SUPPORTED))}")
    if _MARK not in names:
        names |= {name: _apart(names[name], name == _CONVOLUTION) for name in SUPPORTED[kind]} | {_MARK: True}
    for layer in model.modules():  # while it trains, a kernel would do both and project, without an adapter
        layer.training &= not hasattr(layer, "A_log")


def _apart(function: Callable[..., Any], time_is_last: bool) -> Callable[..., Any]:
    """Return a function of tensors [B, L, ...], or [B, X, L] if time is last, that knows `documents`."""

    def turned(value: Tensor) -> Tensor:
        return value.mT if time_is_last else value

    @functools.wraps(function)
    def run(*args: Any, documents: Documents | None = None, **kwargs: Any) -> Any:
        if documents is None:
            return function(*args, **kwargs)
        shape, outputs, result = turned(args[0]).shape[:2], [], None

        def of_group(value: Any, group: Tensor) -> Any:
            if not isinstance(value, Tensor) or value.ndim < 3 or turned(value).shape[:2] != shape:
                return value
            flat = turned(value).flatten(0, 1)
            return turned(torch.cat([flat, flat.new_zeros(1, *flat.shape[1:])])[group])

        for group in documents.groups:
            named = {name: of_group(value, group) for name, value in kwargs.items()}
            result = function(*(of_group(value, group) for value in args), **named)
            outputs.append(turned(result[0] if isinstance(result, tuple) else result).flatten(0, 1))
        joined = turned(torch.cat(outputs)[documents.back_N].unflatten(0, shape))
        return (joined, None) if isinstance(result, tuple) else joined

    return run
