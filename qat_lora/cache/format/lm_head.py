"""The teacher's LM head, kept with a cache that holds its hidden states.

Logits are the LM head applied to a hidden state, so 2H bytes a position and this one file are the teacher's whole
distribution: exact where K logits are not, and smaller from K = H/2 on. The file is plain safetensors (`weight` [V, H],
sometimes `bias` [V]; logit scale and soft cap in its metadata), and its sha256 is part of the cache's fingerprint. Its
tensors are written as bytes, because NumPy has no bfloat16 and the writer imports no torch.
"""

import hashlib
import math
from collections.abc import Iterator
from typing import NamedTuple

from qat_lora.cache.format import layout as fmt
from qat_lora.cache.format.records import Fingerprint, read_header
from qat_lora.cache.storage.location import Location, Place, locate
from qat_lora.errors import CacheDamaged, CacheError
from qat_lora.types import LMHead

_DTYPES = {"F32": ("float32", 4), "BF16": ("bfloat16", 2), "F16": ("float16", 2)}


class LMHeadFile(NamedTuple):
    """The bytes of an LM head's file."""

    width: int  # H
    sha256: str
    parts: tuple[bytes | memoryview, ...]


def lm_head_file(lm_head: LMHead) -> LMHeadFile:
    """Return an LM head as its file's bytes, padding rows cut off; CacheError unless float32, bfloat16 or float16."""
    import torch

    tensors = {"weight": lm_head.weight_VH[: lm_head.vocab_size]}
    if lm_head.bias_V is not None:
        tensors["bias"] = lm_head.bias_V[: lm_head.vocab_size].to(lm_head.weight_VH.dtype)
    name = str(lm_head.weight_VH.dtype).removeprefix("torch.")
    kind = {dtype: kind for kind, (dtype, _) in _DTYPES.items()}.get(name)
    if kind is None:
        raise CacheError(f"hidden: the teacher's output head is of type {name}; allowed: float32, bfloat16, float16")
    metadata = {"format": fmt.FORMAT, "version": str(fmt.VERSION), "logit_scale": repr(float(lm_head.logit_scale))}
    if lm_head.softcap is not None:
        metadata["softcap"] = repr(float(lm_head.softcap))
    parts: list[bytes | memoryview] = [_header(kind, {name: (*t.shape,) for name, t in tensors.items()}, metadata)]
    parts += [t.detach().cpu().contiguous().view(torch.uint8).reshape(-1).numpy().data for t in tensors.values()]
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return LMHeadFile(int(lm_head.weight_VH.shape[1]), digest.hexdigest(), tuple(parts))


def _header(kind: str, shapes: dict[str, tuple[int, ...]], metadata: dict[str, str]) -> bytes:
    width = _DTYPES[kind][1]
    arrays = [(name, kind, shape, width * math.prod(shape)) for name, shape in shapes.items()]
    return fmt.safetensors_header(metadata, arrays)


def check_lm_head(location: Location, fingerprint: Fingerprint, *, whole: bool = True) -> None:
    """Raise CacheDamaged unless the LM head's file, if there is one, has its size, and where `whole` its sha256."""
    if fingerprint.lm_head_sha256 is not None:
        for _ in _checked(location, fingerprint, whole):
            pass


def read_lm_head(place: Place, fingerprint: Fingerprint) -> LMHead:
    """Return the teacher's LM head on the CPU, as stored; CacheError: no hidden states; CacheDamaged: other bytes."""
    import torch

    location = locate(place)
    if fingerprint.lm_head_sha256 is None:
        remedy = "build the cache with --hidden"
        raise CacheError(f"{location}: holds no hidden states, and so no output head of its teacher; {remedy}")
    data = bytearray()
    for chunk in _checked(location, fingerprint):
        data += chunk
    where, held = f"{location}/{fmt.LM_HEAD}", fingerprint.contents
    header, start = read_header(data, where)
    try:  # the header is made anew and compared, never trusted
        kind, metadata = header["weight"]["dtype"], header["__metadata__"]
        shapes: dict[str, tuple[int, ...]] = {"weight": (held.vocab_size, held.hidden)}
        shapes |= {"bias": (held.vocab_size,)} if "bias" in header else {}
        expected = _header(kind, shapes, metadata)
        scale, softcap = (float(metadata.get(name, 1.0)) for name in ("logit_scale", "softcap"))
        if not (math.isfinite(scale) and math.isfinite(softcap) and "logit_scale" in metadata):
            raise ValueError("its metadata does not say how logits are made")
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CacheDamaged(f"{where}: its header cannot be read ({error})") from None
    dtype, width = _DTYPES[kind]
    total = start + sum(map(math.prod, shapes.values())) * width
    if read_header(expected, where) != (header, start) or len(data) != total:
        raise CacheDamaged(f"{where}: is not the head of {held.vocab_size:,} × {held.hidden:,} that was written")
    tensors = {}
    for name, shape in shapes.items():
        offset = start + header[name]["data_offsets"][0]
        flat = torch.frombuffer(data, dtype=getattr(torch, dtype), count=math.prod(shape), offset=offset)
        tensors[name] = flat.reshape(shape)
    cap = softcap if "softcap" in metadata else None
    return LMHead(tensors["weight"], fingerprint.vocab_size, tensors.get("bias"), scale, cap)


def largest_lm_head(fingerprint: Fingerprint) -> int:
    """Return the most bytes that the LM head's file of a cache can have."""
    held = fingerprint.contents
    return 4 * held.vocab_size * (held.hidden + 1) + fmt.HEADER_LIMIT_BYTES


def _checked(location: Location, fingerprint: Fingerprint, whole: bool = True) -> Iterator[bytes]:
    """Yield the file's bytes, if `whole`; CacheDamaged unless its size (told first) and sha256 (last) can be right."""
    held = fingerprint.contents
    try:
        size = location.size(fmt.LM_HEAD)
    except FileNotFoundError:
        remedy = "hidden states mean nothing without it: restore it from a copy"
        raise CacheDamaged(f"{location}/{fmt.LM_HEAD}: is missing; {remedy}") from None
    fewest, most = 2 * held.vocab_size * held.hidden, largest_lm_head(fingerprint)
    if not fewest < size <= most:
        right = f"a head of {held.vocab_size:,} × {held.hidden:,} has more than {fewest:,} and at most {most:,}"
        raise CacheDamaged(f"{location}/{fmt.LM_HEAD}: has {size:,} bytes; {right}")
    if not whole:
        return
    digest = hashlib.sha256()
    for chunk in location.chunks(fmt.LM_HEAD):
        digest.update(chunk)
        yield chunk
    if digest.hexdigest() != fingerprint.lm_head_sha256:
        what = f"its sha256 is {digest.hexdigest()[:16]}…, {str(fingerprint.lm_head_sha256)[:16]}… was written"
        remedy = "restore it from a copy, or delete it and manifest.json and run the same `qat-lora cache build` again"
        raise CacheDamaged(f"{location}/{fmt.LM_HEAD}: {what}; {remedy}")
