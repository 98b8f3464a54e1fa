"""NaN and infinity, caught before they are used or written, in tensors and in JSON.

One NaN in a scale makes a whole model's output NaN without an error: comparisons with it are false, averages absorb it,
and Python's JSON writes a word that no other reader accepts. So every tensor is checked once when it is read and once
before it is written. Its minimum and maximum suffice: both are NaN if any entry is, and an infinity is one of the two.
That takes one pass and no memory; `torch.isfinite` takes a hundred times as long.
"""

from __future__ import annotations

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
        ends = torch.stack(torch.aminmax(tensor.detach()))
        if not bool(ends.isfinite().all()):
            bad = int((~tensor.detach().isfinite()).sum())
            return f"{name} is NaN or infinite in {bad} of {tensor.numel()} places"
    return None


def check_finite(tensors: Mapping[str, Tensor], where: object) -> None:
    """Refuse NaN and infinity in tensors.

    Args:
        tensors: by name.
        where: the file or folder, for people.

    Raises:
        ModelError: names the first such tensor.
    """
    if (found := not_finite(tensors)) is not None:
        raise ModelError(f"{where}: {found}; nothing can be computed with that: make it again, or restore it")


def json_text(data: Any, what: object, **form: Any) -> str:
    """Return data as JSON, in which every number is one.

    Args:
        data: plain values.
        what: the file that it is for, for people.
        form: further arguments of `json.dumps`.

    Raises:
        ModelError: a number is NaN or infinite; the message says which.
    """
    try:
        return json.dumps(data, allow_nan=False, **form)
    except ValueError:
        for path, value in _odd(data, ()):
            name = ".".join(map(str, path)) or "the number"
            raise ModelError(f"{what}: {name} is {value}, so it was not written; look for what made it") from None
        raise


def _odd(data: Any, path: tuple[Any, ...]) -> Iterator[tuple[tuple[Any, ...], float]]:
    """Yield the numbers in plain values that are none, with the way to them."""
    if isinstance(data, float) and not math.isfinite(data):
        yield path, data
    elif isinstance(data, Mapping):
        for key, value in data.items():
            yield from _odd(value, (*path, key))
    elif isinstance(data, list | tuple):
        for index, value in enumerate(data):
            yield from _odd(value, (*path, index))
