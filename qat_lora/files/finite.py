"""NaN and infinity, caught before they are used or written, in tensors and in JSON.

One NaN in a scale makes all outputs NaN without an error, and Python's JSON writes a word that no other reader accepts.
So every tensor is checked when it is read and before it is written, by its minimum and maximum: both are NaN if any
entry is, an infinity is one of them. That takes one pass and no memory; `torch.isfinite` takes 100 times as long.
"""

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from qat_lora.errors import ModelError

_CHECKED = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def not_finite(tensors: Mapping[str, Tensor]) -> str | None:
    """Return which tensor is the first with NaN or infinity in it, and in how many places; None where none is."""
    for name, tensor in tensors.items():
        if tensor.dtype not in _CHECKED or tensor.is_meta or not tensor.numel():
            continue
        if not bool(torch.stack(torch.aminmax(tensor.detach())).isfinite().all()):
            bad = int((~tensor.detach().isfinite()).sum())
            return f"{name} is NaN or infinite in {bad} of {tensor.numel()} places"
    return None


def check_finite(tensors: Mapping[str, Tensor], where: object) -> None:
    """Raise a ModelError that names the first tensor of a file or folder with NaN or infinity in it."""
    if (found := not_finite(tensors)) is not None:
        raise ModelError(f"{where}: {found}; nothing can be computed with that: make it again, or restore it")


def json_text(data: Any, what: object, **form: Any) -> str:
    """Return plain values as JSON for the file `what` (`form`: of `json.dumps`); ModelError names a NaN or infinity."""
    try:
        return json.dumps(data, allow_nan=False, **form)
    except ValueError:
        for name, value in _odd(data):
            raise ModelError(f"{what}: {name} is {value}, so it was not written; look for what made it") from None
        raise


def _odd(data: Any, path: str = "") -> Iterator[tuple[str, float]]:
    """Yield the numbers in plain values that are none, with the dotted way to them."""
    if isinstance(data, float) and not math.isfinite(data):
        yield path or "the number", data
    members = data.items() if isinstance(data, Mapping) else enumerate(data) if isinstance(data, list | tuple) else ()
    for key, value in members:
        yield from _odd(value, f"{path}.{key}" if path else str(key))
