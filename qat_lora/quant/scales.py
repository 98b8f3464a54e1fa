"""Scales and zero points: from the few stored numbers to one for every weight, and how to choose the numbers.

Scales are a tuple of tensors, one (`scale`) for tensor, channel and group sharing, two (`scale_a`, `scale_b`) for
low-rank. `meaning` alone knows what numbers of every group make of codes, and is differentiable.

Asymmetric codes have a range [low, high] for each group, which always contains zero: s = (high - low) / (2^b - 1) and z
= round(-low / s), so that zero itself is a code, at `bits` bits a zero point. A lower end stored as a float (GGUF's
Q4_1) takes 16, and loses the exact zero. K-quants have two levels: the scale of a group is `scale` of 256 inputs times
its `steps`, and with the code `minimum` its lowest value is -`minimum` times its `minima`. Both are exact in float32.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from qat_lora.quant.codes import code_values, decode, encode, full_range, nearest_value, pack, packed_width, unpack
from qat_lora.quant.spec import SUPER, QuantSpec
from qat_lora.runtime.loop import Tensors, loop, rows_at_once
from qat_lora.runtime.precision import exact_matmul

Scales = tuple[Tensor, ...]
LARGEST = 65504.0  # of float16
TINY = 1e-6  # smallest scale: keeps W / S finite for rows of zeros, and is a float16 number
# Candidate clips between 0.2 and 1 times absmax. Scales above absmax lower the weighted error (by 3 % at 4 bits, normal
# weights, uneven importance) but not the KL of the model: 0.99 to 1.01 times as large on a saturated teacher. Two
# passes find what 64 clips do, to 0.3 % of the error.
CLIPS, FINER = 17, (-0.5, -0.25, 0.25, 0.5)  # from 1 to 0.2; then around the best, in steps between those
SWEEPS = 8  # of codes and low-rank factors


class Cost(NamedTuple):
    """What errors [rows, G, members] cost, [rows, G]."""

    of: Callable[..., Tensor]  # from the errors and what it was given
    given: Tensor


def scale_shapes(spec: QuantSpec, out_features: int, in_features: int) -> dict[str, tuple[int, ...]]:
    """Return names and shapes of the stored scales of an [O, I] weight."""
    if spec.sharing == "lowrank":
        assert spec.rank is not None
        return {"scale_a": (out_features, spec.rank), "scale_b": (spec.rank, in_features)}
    if spec.step_bits is not None:
        return dict.fromkeys(("scale", "minimum")[: len(spec.whole)], (out_features, in_features // SUPER))
    return {"scale": (1 if spec.sharing == "tensor" else out_features, spec.groups(in_features))}


def whole_shapes(spec: QuantSpec, out_features: int, in_features: int) -> dict[str, tuple[int, int]]:
    """Return names and packed shapes of the whole numbers of groups: zero points, or multiples of K-quants."""
    rows = 1 if spec.sharing == "tensor" else out_features
    return dict.fromkeys(spec.whole, (rows, packed_width(spec.groups(in_features), spec.whole_bits)))


def pack_whole(whole: Tensor, spec: QuantSpec) -> Tensor:
    """Pack the whole numbers [rows, G] of groups into bytes; those with a sign as they are above the least."""
    return pack((whole + lift(spec)).to(torch.uint8), spec.whole_bits)


def unpack_whole(packed: Tensor, spec: QuantSpec, in_features: int) -> Tensor:
    """Return the whole numbers [rows, G] of packed bytes, float32."""
    return unpack(packed, spec.whole_bits, spec.groups(in_features)).float() - lift(spec)


def lift(spec: QuantSpec) -> int:
    """Return what is added to the whole numbers of groups to store them: steps of integer codes have a sign."""
    return 2 ** (spec.whole_bits - 1) if spec.step_bits and spec.code == "integer" else 0


class Meaning(NamedTuple):
    """What code values q stand for, (q - zero) * scale - minimum; each [O, I] or what broadcasts to it."""

    scale: Tensor
    zero: Tensor | None = None
    minimum: Tensor | None = None

    def of(self, values_OI: Tensor) -> Tensor:
        """Return the weight that code values make."""
        product = (values_OI if self.zero is None else values_OI - self.zero) * self.scale
        return product if self.minimum is None else product - self.minimum


def meaning(spec: QuantSpec, scales: Scales, whole: Scales, out_features: int, in_features: int) -> Meaning:
    """Return the meaning of the codes of an [O, I] weight with these scales and whole numbers of groups."""
    sizes = spec.group_size, out_features, in_features
    if spec.step_bits is None:
        return Meaning(expand(scales, *sizes), expand(whole, *sizes) if whole else None)
    assert spec.group_size is not None
    above, groups = SUPER // spec.group_size, spec.groups(in_features)
    of_groups = [expand((x,), above, out_features, groups) * n for x, n in zip(scales, whole, strict=True)]
    wide = [expand((x,), *sizes) for x in of_groups]
    return Meaning(wide[0], minimum=wide[1] if len(wide) > 1 else None)


def expand(scales: Scales, group_size: int | None, out_features: int, in_features: int) -> Tensor:
    """Return the scale of every weight, [O, I] (or something that broadcasts to it)."""
    if len(scales) == 2:
        return exact_matmul(scales[0], scales[1])
    (scale,) = scales
    if scale.shape[1] == 1:
        return scale
    assert group_size is not None
    return scale[:, :, None].expand(-1, -1, group_size).reshape(scale.shape[0], -1)[:, :in_features]


def grouped(weight_OI: Tensor, spec: QuantSpec) -> Tensor:
    """View a weight as [rows, G, members] of entries that share a scale; a short last group is zero-padded."""
    out_features, in_features = weight_OI.shape
    if spec.sharing == "tensor":
        return weight_OI.reshape(1, 1, -1)
    size = spec.group_size or in_features
    return torch.nn.functional.pad(weight_OI, (0, -in_features % size)).reshape(out_features, -1, size)


def absmax_scale(weight_OI: Tensor, spec: QuantSpec) -> Tensor:
    """Return the scale [rows, G] that maps a group's largest weight to the book's end, a signed one to the longer."""
    members = grouped(weight_OI, spec)
    if spec.signed:
        return away_from_zero(_largest(members) / code_values(spec)[0])
    return (members.abs().amax(-1) / full_range(spec)).clamp_min(TINY)


def importance_cost(weight_OI: Tensor, spec: QuantSpec, importance_I: Tensor | None = None) -> Cost:
    """Return the cost of errors [rows, G, members] as [rows, G]: squares, times each column's mean square input."""
    ones = torch.ones_like(weight_OI)  # only its shape and type count
    importance = grouped(ones if importance_I is None else ones * importance_I.to(weight_OI), spec)
    return Cost(lambda error, importance: (error.square() * importance).sum(-1), importance)


def output_cost(weight_OI: Tensor, spec: QuantSpec, second_moment_II: Tensor) -> Cost:
    """Return errors' cost as each group's own effect on the output, e H_gg eᵀ; by importance where no groups are."""
    if spec.sharing == "tensor":
        return importance_cost(weight_OI, spec, second_moment_II.diagonal())
    size = spec.group_size or weight_OI.shape[1]
    pad = -weight_OI.shape[1] % size
    padded = torch.nn.functional.pad(second_moment_II.to(weight_OI), (0, pad, 0, pad))
    blocks = torch.stack([padded[s : s + size, s : s + size] for s in range(0, len(padded), size)])
    return Cost(lambda error, blocks: (torch.einsum("ogm,gmn->ogn", error, blocks) * error).sum(-1), blocks)


def clip_scale(weight_OI: Tensor, spec: QuantSpec, cost: Cost) -> Tensor:
    """Return the clipped scale [rows, G] that costs least, of either sign where it may have one."""
    values = code_values(spec).to(weight_OI)

    def at(clip: Tensor | float, members: Tensor, widest: Tensor) -> tuple[Tensors, Tensor]:
        scale = away_from_zero(widest * clip)
        return [scale], nearest_value(members / scale[..., None], values, spec).mul_(scale[..., None]).sub_(members)

    widest = absmax_scale(weight_OI, dataclasses.replace(spec, signed=False))
    return _cheapest(at, [grouped(weight_OI, spec), widest], cost, spec.signed)[0]


def range_scale(weight_OI: Tensor, spec: QuantSpec, cost: Cost | None) -> tuple[Tensor, Tensor]:
    """Return float16-exact scales and whole zeros [rows, G] of the cheapest range, without a cost of the whole one."""
    values, members = code_values(spec).to(weight_OI), grouped(weight_OI, spec)
    low, high, most = members.amin(-1).clamp_max(0), members.amax(-1).clamp_min(0), len(values) - 1

    def of(clip: Tensor | float, low: Tensor, high: Tensor) -> Tensors:
        scale = ((high - low) * clip / most).clamp_min(TINY).half().to(weight_OI.dtype)
        return [scale, (-low * clip / scale).round().clamp(0, most)]

    def at(clip: Tensor | float, members: Tensor, low: Tensor, high: Tensor) -> tuple[Tensors, Tensor]:
        scale, zero = of(clip, low, high)
        chosen = nearest_value((members / scale[..., None]).add_(zero[..., None]), values, spec)
        return [scale, zero], chosen.sub_(zero[..., None]).mul_(scale[..., None]).sub_(members)

    scale, zero = of(1.0, low, high) if cost is None else _cheapest(at, [members, low, high], cost)
    return scale, zero


def step_scales(weight_OI: Tensor, spec: QuantSpec, cost: Cost | None) -> tuple[Scales, Scales]:
    """Return float16-exact scales (and minima) of `SUPER` inputs and their multiples [rows, G]; no step is 0."""
    if spec.code == "integer":
        wanted = [absmax_scale(weight_OI, spec) if cost is None else clip_scale(weight_OI, spec, cost)]
    else:
        wanted = _minimum_scale(weight_OI, spec, cost)
    scales, whole = zip(*(_on_steps(x, spec, least) for x, least in zip(wanted, (1, 0), strict=False)), strict=True)
    return scales, whole


def multiples(spec: QuantSpec, least: int, wanted: Tensor) -> Tensor:
    """Return the nearest whole numbers that a K-quant stores; steps are at least 1 in size, minima 0."""
    found = wanted.round().clamp(-lift(spec), 2**spec.whole_bits - 1 - lift(spec))
    return torch.where(found == 0, float(least), found)


def stored(scale: Tensor) -> Tensor:
    """Return scales of either sign as float16 numbers that can be divided by."""
    return away_from_zero(scale.clamp(-LARGEST, LARGEST)).half().to(scale.dtype)


def _on_steps(wanted_RG: Tensor, spec: QuantSpec, least: int) -> tuple[Tensor, Tensor]:
    """Return float16-exact scales of `SUPER` inputs, and their multiples [rows, G] nearest to what groups want."""
    assert spec.group_size is not None
    blocks = wanted_RG.unflatten(1, (-1, SUPER // spec.group_size))
    scale = stored(_largest(blocks, keepdim=True) / (-lift(spec) or 2**spec.whole_bits - 1))  # the end with most room
    return scale.squeeze(2), multiples(spec, least, blocks / scale).flatten(1)


def _largest(members: Tensor, keepdim: bool = False) -> Tensor:
    """Return the entry of the greatest size along the last dimension, with its sign."""
    high, low = members.amax(-1, keepdim), members.amin(-1, keepdim)
    return torch.where(high >= -low, high, low)


def _minimum_scale(weight_OI: Tensor, spec: QuantSpec, cost: Cost | None) -> Tensors:
    """Return scales and minima [rows, G], 0 or more, of the cheapest clipped ranges, fitted by least squares."""
    values, members = code_values(spec).to(weight_OI), grouped(weight_OI, spec)
    low, high = members.amin(-1).clamp_max(0), members.amax(-1)

    def of(clip: Tensor | float, low: Tensor, high: Tensor) -> Tensors:
        return [((high - low) * clip / values[-1]).clamp_min(TINY), -low * clip]

    def at(clip: Tensor | float, members: Tensor, low: Tensor, high: Tensor) -> tuple[Tensors, Tensor]:
        scale, minimum = (x[..., None] for x in of(clip, low, high))
        q = nearest_value((members + minimum) / scale, values, spec)
        centre, own = q.mean(-1, keepdim=True), members.mean(-1, keepdim=True)
        varies = (q - centre).square().sum(-1, keepdim=True).clamp_min(TINY)
        rise = ((q - centre) * members).sum(-1, keepdim=True) / varies
        fits = (rise > TINY) & (rise * centre >= own)  # the line through codes and weights, where it is one of ours
        scale, minimum = torch.where(fits, rise, scale), torch.where(fits, rise * centre - own, minimum)
        return [scale[..., 0], minimum[..., 0]], q * scale - minimum - members

    return of(1.0, low, high) if cost is None else _cheapest(at, [members, low, high], cost)


def _cheapest(at: Callable[..., tuple[Tensors, Tensor]], given: Tensors, cost: Cost, signed: bool = False) -> Tensors:
    """Return group by group the numbers [rows, G] of the clip whose errors cost least, found in two passes.

    `at` gives the numbers and errors of a clip, 1 being the first, from what it is `given`; `signed` tries both signs.
    """

    def cheaper(_: object, carry: Tensors, slices: Tensors, constants: Tensors) -> tuple[Tensors, Tensors]:
        least, (centre, importance, *given) = carry[0], constants
        clip = (centre + slices[0]).clamp(-1.0, 1.0)
        found, errors = at(clip, *given)
        price = cost.of(errors, importance)
        return [torch.where(price < least, new, old) for new, old in zip([price, clip, *found], carry, strict=True)], []

    def search(prices: Tensor, *given: Tensor) -> Tensors:
        best, errors = at(1.0, *given)
        least = cost.of(errors, prices)
        least = least.masked_fill(least.isnan(), torch.inf)
        clips = torch.linspace(1.0, 0.2, CLIPS).to(least.dtype)
        finer = torch.tensor(FINER).to(least.dtype) * (clips[0] - clips[1])
        clips, none = torch.cat([clips[1:], -clips]) if signed else clips[1:], torch.zeros_like(least)
        found, _ = loop(cheaper, len(clips), [least, none + 1, *best], [clips], [none, prices, *given])
        return loop(cheaper, len(finer), found, [finer], [found[1], prices, *given])[0][2:]

    if len(cost.given) != len(given[0]):  # which has no rows
        return search(cost.given, *given)
    rows = rows_at_once(given[0])
    pieces = [search(*piece) for piece in zip(*(x.split(rows) for x in (cost.given, *given)), strict=True)]
    return [torch.cat(found) for found in zip(*pieces, strict=True)]


def low_rank_scales(weight_OI: Tensor, spec: QuantSpec, importance_I: Tensor | None = None) -> Scales:
    """Fit S = A B so that codes times S approximate the weight.

    Starts from the clipped scales of groups, cut to the rank by SVD; then alternates between rounding to the nearest
    codes and solving A and B by least squares for those codes. Each half lowers the squared error, weighted by
    importance where it is known. Without the second, codes and factors disagree, at a hundredfold perplexity.

    Source: LoRDS (arXiv 2601.22716) for the form; the alternation is ours.
    """
    assert spec.rank is not None and spec.group_size is not None
    out_features, in_features = weight_OI.shape
    values = code_values(spec).to(weight_OI)
    even = dataclasses.replace(spec, sharing="group", rank=None, code="half")  # rounding, not a search of a table
    start = clip_scale(weight_OI, even, importance_cost(weight_OI, even, importance_I))
    start = start * (full_range(even) / values[-1])
    # Columns of a group are alike, so the factors of the whole are those of one column each; ranks beyond them start as
    # directions of chance that the first half of the alternation weighs.
    size = torch.full((start.shape[1],), float(min(spec.group_size, in_features))).to(start)
    size[-1] = in_features - (len(size) - 1) * size[0]
    u, s, vh = torch.linalg.svd(start * size.sqrt(), full_matrices=False)
    rank, known = min(spec.rank, *weight_OI.shape), min(spec.rank, s.numel())
    root = s[:known].sqrt()
    a = torch.nn.functional.pad(u[:, :known] * root, (0, rank - known))
    b = (root[:, None] * vh[:known] / size.sqrt()).repeat_interleave(size.long(), 1)
    chance = torch.randn(rank - known, in_features, generator=torch.Generator().manual_seed(0)).to(b)
    b = torch.cat([b, chance * b.square().mean().sqrt()])
    importance = 1.0 if importance_I is None else importance_I.to(b).view(-1, in_features).mean(0)
    for _ in range(SWEEPS):
        parts = zip(*(x.split(rows_at_once(weight_OI)) for x in (weight_OI, a)), strict=True)
        q = torch.cat([decode(encode(weight / away_from_zero(own @ b), values), values) for weight, own in parts])
        a = _least_squares(q, weight_OI, a, b, b * importance)
        b = _least_squares(q.T, weight_OI.T, b.T, a.T, a.T).T  # the importance of a column is that of its equation
    a = torch.nn.functional.pad(a, (0, spec.rank - rank))
    b = torch.nn.functional.pad(b, (0, 0, 0, spec.rank - rank))
    # Equal norms for both factors, so that neither leaves float16 and one learning rate serves both.
    balance = (b.norm(dim=1) / a.norm(dim=0).clamp_min(1e-12)).sqrt().clamp(1e-4, 1e4)
    return a * balance, b / balance[:, None]


def away_from_zero(scale: Tensor) -> Tensor:
    """Return scales with their sign but at least `TINY` in size, safe to divide by."""
    sign = (scale >= 0).to(scale.dtype) * 2 - 1  # `where` takes a CPU four times as long: signs cannot be guessed
    return scale.abs().clamp_min(TINY) * sign


def divisor(scale: Tensor, spec: QuantSpec) -> Tensor:
    """Return a weight's scales safe to divide by: all are stored so, but that factors' product may be near zero."""
    return away_from_zero(scale) if spec.sharing == "lowrank" else scale


def _least_squares(q_OI: Tensor, weight_OI: Tensor, a_OR: Tensor, b_RI: Tensor, weighed_RI: Tensor) -> Tensor:
    """Solve min over A of (W - Q * (A B))² row by row, pulled slightly towards the A given; B is weighed too."""
    first, second = torch.triu_indices(len(b_RI), len(b_RI), device=b_RI.device)
    upper = q_OI.square() @ (b_RI[first] * weighed_RI[second]).T  # one product for all rows
    places = first.new_empty(len(b_RI), len(b_RI))
    places[first, second] = places[second, first] = torch.arange(len(first)).to(places)
    gram = upper.index_select(1, places.flatten()).unflatten(1, places.shape)
    ridge = 1e-4 * gram.diagonal(dim1=1, dim2=2).mean(-1).clamp_min(1e-12)
    gram.diagonal(dim1=1, dim2=2).add_(ridge[:, None])
    right = (q_OI * weight_OI) @ weighed_RI.T + ridge[:, None] * a_OR
    return torch.cholesky_solve(right[..., None], torch.linalg.cholesky(gram))[..., 0]
