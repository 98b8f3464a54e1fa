"""Code books, and codes packed into bytes.

A code book is the sorted list of values that an entry of Q may take. Encoding is a search among the midpoints between
neighbours, one exact rule (ties go up) for all books, where rounding formulas need a special case for each. An even
table spends as many codes on the rare large weights as on the many small ones; quantiles of the normal distribution do
not, and need no calibration (NF4 of QLoRA, arXiv 2305.14314).

Packed codes are a little-endian bit stream, each row padded to a whole byte: code i of a row occupies bits
i*b .. i*b+b-1, lowest bit first. It holds any width from 1 to 8 without waste, also 3 bits.
"""

import functools
import math

import torch
from torch import Tensor

from qat_lora.quant.spec import QuantSpec
from qat_lora.runtime.loop import fits_a_piece
from qat_lora.runtime.xla.runtime import is_xla_device

SMALL = 2**9  # numbers up to which one search beats the calls of a look-up
FEW = 16  # codes of a book that XLA selects from


def code_values(spec: QuantSpec) -> Tensor:
    """Return the sorted float32 code book [2^bits] of a spec, tables as float16; what is subtracted comes later."""
    n = 2**spec.bits
    if spec.code in ("integer", "asymmetric", "minimum"):
        return torch.arange(n, dtype=torch.float32) - (n // 2 if spec.code == "integer" else 0)
    if spec.table == "normal":
        return normal_table(spec.bits).half().float()
    half = torch.arange(n, dtype=torch.float32) - (n - 1) / 2
    return half if spec.code == "half" else (half / ((n - 1) / 2)).half().float()


def normal_table(bits: int) -> Tensor:
    """Return 2^bits sorted float32 quantiles of the normal distribution, -1 to 1, with a zero; at 4 bits NF4's."""
    count = 2**bits
    outermost = 1 - (1 / (2 * count) + 1 / (2 * count - 2)) / 2
    above, below = (
        torch.special.ndtri(torch.linspace(outermost, 0.5, count // 2 + extra, dtype=torch.float64)[:-1])
        for extra in (1, 0)  # one more code is above zero than below
    )
    table = torch.cat([-below, torch.zeros(1, dtype=torch.float64), above.flip(0)])
    return (table / table.abs().max()).float()


def full_range(spec: QuantSpec) -> float:
    """Return the code value for a group's largest weight: half the book's width, compressed-tensors' 7.5 at 4 bits."""
    return 1.0 if spec.code == "lut" else (2**spec.bits - 1) / 2


@functools.lru_cache(64)
def cells(midpoints: tuple[float, ...], dtype: torch.dtype) -> tuple[float, float, Tensor, Tensor] | None:
    """Return what makes a search among sorted midpoints one step, None if two of them are too close for that.

    x * factor + shift, in float32, is the cell of a number; a cell has the code of what lies below its one midpoint and
    that midpoint, NaN if it has none. A CPU guesses every other turn of a search wrong: 18 ns a number, not 2.
    """
    exact = torch.tensor(midpoints, dtype=dtype)
    factor = 1.5 / float(exact.diff(append=exact[-1:] + 1).min().clamp_min(2**-16))
    shift = 1.0 - factor * midpoints[0]
    own = exact.float().mul(factor).add(shift).int()
    codes_C = torch.searchsorted(own, torch.arange(int(own[-1]) + 2, dtype=torch.int32))
    midpoints_C = torch.cat([exact, exact.new_full((1,), torch.nan)])[codes_C]
    return None if len(own.unique()) < len(own) else (factor, shift, codes_C.to(torch.uint8), midpoints_C)


def encode(x: Tensor, values: Tensor) -> Tensor:
    """Return the uint8 index of the nearest code value for every entry of x."""
    midpoints = ((values[1:] + values[:-1]) / 2).to(x.dtype)
    if is_xla_device(x):  # which has no search
        return functools.reduce(torch.add, ((x >= midpoint).to(torch.uint8) for midpoint in midpoints))
    found = cells(tuple(midpoints.tolist()), x.dtype) if x.numel() > SMALL and fits_a_piece(midpoints) else None
    if found is None:
        return torch.bucketize(x.contiguous(), midpoints, right=True).to(torch.uint8)
    factor, shift, codes_C, midpoints_C = found
    at = x.detach().float().mul(factor).add_(shift).nan_to_num_().clamp_(0, len(codes_C) - 1).int().flatten()
    return codes_C.index_select(0, at).add_(x.flatten() >= midpoints_C.index_select(0, at)).view(x.shape)


def nearest_value(x: Tensor, values: Tensor, spec: QuantSpec) -> Tensor:
    """Return the nearest code value of every entry of x, the one that `encode` finds.

    Compiles on every device, as a search does not on XLA: even books round, tables are compared midpoint by midpoint.
    """
    if spec.code == "lut":
        return nearest(x, values, spec)[0]
    least = -(2**spec.bits // 2) if spec.code in ("integer", "half") else 0
    # Halves go up: x + 0.5 would be rounded, twice x is not.
    below = x.floor() if spec.code == "half" else x.mul(2.0).floor_().add_(1.0).mul_(0.5).floor_()
    below.clamp_(least, least + 2**spec.bits - 1)
    return below.add_(0.5) if spec.code == "half" else below


def nearest(x: Tensor, values: Tensor, spec: QuantSpec) -> tuple[Tensor, Tensor]:
    """Return the nearest code value of every entry of x, and its uint8 index."""
    if spec.code == "lut":
        codes = encode(x, values)
        return decode(codes, values), codes
    found = nearest_value(x, values, spec)
    return found, (found - values[0]).to(torch.uint8)


def decode(codes: Tensor, values: Tensor) -> Tensor:
    """Return the code values of uint8 indices; differentiable in the values.

    On XLA a short book is selected from: fifteen selections are one pass, where an index is a turn for every weight.
    """
    if len(values) > FEW or not is_xla_device(values):
        return values.index_select(0, codes.flatten().int()).view(codes.shape)
    found = values[0].expand(codes.shape)
    for code in range(1, len(values)):
        found = torch.where(codes == code, values[code], found)
    return found


def first_value(spec: QuantSpec) -> float | None:
    """Return the least value of a code book that counts up by ones, None for a table."""
    return None if spec.code == "lut" else float(code_values(spec)[0])


def packed_width(count: int, bits: int) -> int:
    """Return the bytes of a packed row of `count` codes."""
    return -(-count * bits // 8)


def pack(codes: Tensor, bits: int) -> Tensor:
    """Pack uint8 codes [O, I] into bytes [O, ceil(I * bits / 8)]."""
    rows, unit = len(codes), math.gcd(bits, 8)  # bits that lie in one byte
    stream = (codes[..., None] >> torch.arange(0, bits, unit, dtype=torch.uint8, device=codes.device)) & (2**unit - 1)
    stream = stream.reshape(rows, -1)
    stream = torch.nn.functional.pad(stream, (0, -stream.shape[1] % (8 // unit))).reshape(rows, -1, 8 // unit)
    return (stream * 2 ** torch.arange(0, 8, unit, dtype=torch.uint8, device=codes.device)).sum(-1, dtype=torch.uint8)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Unpack bytes [O, ceil(I * bits / 8)] into uint8 codes [O, I]."""
    rows, unit = len(packed), math.gcd(bits, 8)
    stream = (packed[..., None] >> torch.arange(0, 8, unit, dtype=torch.uint8, device=packed.device)) & (2**unit - 1)
    stream = stream.reshape(rows, -1)[:, : count * bits // unit].reshape(rows, count, bits // unit)
    weights = 2 ** torch.arange(0, bits, unit, dtype=torch.uint8, device=packed.device)
    return (stream * weights).sum(-1, dtype=torch.uint8)
