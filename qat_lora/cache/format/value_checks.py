"""What every value of a shard promises, whoever wrote it: ids in the vocabulary, values in rank order, finite sums.

A checksum says that bytes are as they were written; these rules say that what was written can be a teacher. They
are what finds a writer that was wrong and sealed what it wrote.

Values are compared as the bits they are: below zero, fp16 numbers order as the unsigned numbers of the same bits do,
and converting them to float32 first would cost more than their sha256.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from qat_lora.cache.format.codec import DRAWN, LARGEST_RANGE, unpack_ids
from qat_lora.cache.format.records import Fingerprint

_LOWEST_FP16 = np.uint16(0xFBFF)
"""The bits of -65,504; beyond are minus infinity and NaN."""
_SIGN = np.uint16(0x8000)
_ROUNDING = 1e-3
"""What float32 sums may be beside the truth: how far `lse` may be below 0 and `log_tail` above it."""


def strange_ids(row: Mapping[str, np.ndarray], vocab_size: int) -> str | None:
    """Say which token ids of a decoded row are outside the vocabulary; None where none are."""
    for name in ("input_ids", "head_ids", *DRAWN.values()):
        if name in row and row[name].view(np.uint32).max() >= vocab_size:  # as such, negative ones are large
            return f"{name} from {row[name].min()} to {row[name].max()}; allowed: 0 to {vocab_size - 1}"
    return None


def promises(part: Mapping[str, np.ndarray], fingerprint: Fingerprint) -> dict[str, bool]:
    """Return the rules for values, and whether some rows of a shard keep them."""
    held = fingerprint.contents
    ids = part["input_ids"]
    kept = {
        "loss_mask of 0 and 1": bool((part["loss_mask"] <= 1).all()),
        "input_ids inside the vocabulary": bool(ids.min() >= 0 and ids.max() < held.vocab_size),
    }
    for name, entries in held.id_lists.items():
        ids = unpack_ids(part, entries, name=name)
        text = "head ids" if name == "ids" else name
        kept[f"{text} inside the vocabulary"] = bool(ids.min() >= 0 and ids.max() < held.vocab_size)
    if held.top_k:
        kept["values falling from 0 in rank order"] = (
            _fp16_falls(part["val"]) if held.value_dtype == "float16" else _codes_rise(part["val"])
        )
        kept["finite lse of 0 or more"] = all(
            bool(np.isfinite(part[name]).all() and (part[name] > -_ROUNDING).all()) for name in held.sums[::2]
        )
        kept["log_tail of 0 or less"] = all(bool((part[name] < _ROUNDING).all()) for name in held.sums[1::2])
    if "val_range" in part:
        kept["val_range from 0 to 64"] = bool(((part["val_range"] >= 0) & (part["val_range"] <= LARGEST_RANGE)).all())
    if held.hidden:
        kept["finite hidden states"] = bool(((part["hidden"].view("<u2") & 0x7C00) != 0x7C00).all())
    return kept


def _fp16_falls(values: np.ndarray) -> bool:
    bits = values.view("<u2")
    depth = bits | _SIGN  # both zeros become the same number, and depth rises as the value falls
    return bool(
        (depth[..., 0] == _SIGN).all()
        and (depth[..., 1:] >= depth[..., :-1]).all()
        and (depth[..., -1] <= _LOWEST_FP16).all()
        and ((bits == 0) | (bits >= _SIGN)).all()
    )


def _codes_rise(codes: np.ndarray) -> bool:
    return bool((codes[..., 0] == 0).all() and (codes[..., 1:] >= codes[..., :-1]).all())
