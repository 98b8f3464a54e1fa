"""Rescale the channels between the layers of a block, so that its weights are easier to quantise.

The weights of a group share one scale, so a column of small weights is rounded as coarsely as the
largest column beside it. Three kinds of channels can be rescaled without changing what the model
computes, if the weights that read them take the inverse: what a norm puts out, what `v_proj` hands
to `o_proj`, and what `up_proj` hands to `down_proj`. Columns are multiplied by

    f = h^(1/8) σ^(-1/2),

with σ the root mean square of a column's weights and h the mean square of its input. That is half
of the way to columns of one size, and a little more for large inputs. AWQ (arXiv 2306.00978)
searches f = h^(α/2) and does not look at the weights; SmoothQuant (2211.10438) looks at both.

Measured at 2 bits with error feedback and an adapter, on the first five blocks: a tenth of the KL
on a model of 135 M weights whose columns had been rescaled at random (part of it takes this back),
nothing on Gemma 3 270M (docs/log.md, 2026-11-30).

A run of the block shows which layers read which norm. Every change is tried on a batch, and undone
where the block's output moves: a router, a second reader or an unknown norm keeps its scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

OF_INPUTS = 0.125  # the exponent of an input's second moment
OF_WEIGHTS = 0.5  # the exponent of 1 / σ
MOST = 8.0  # times larger or smaller than the mean
MOVED = 0.02  # of what a block adds to the hidden states, which a change may not move


class NormCall(NamedTuple):
    """What a norm got and put out once, and its path in the block."""

    path: str
    given: Tensor
    output: Tensor


def gain_of(norm: nn.Module, call: NormCall) -> Tensor | None:
    """Return the gains of an RMS norm, float32 [N], found by what it did; None for any other norm."""
    if [name for name, _ in norm.named_parameters()] != ["weight"] or norm.get_parameter("weight").dim() != 1:
        return None
    stored = norm.get_parameter("weight").data.float()
    x = call.given.reshape(-1, len(stored)).float()
    normed = x * x.square().mean(-1, keepdim=True).clamp_min(1e-12).rsqrt()
    output = call.output.reshape(-1, len(stored)).float()
    measured = (output * normed).sum(0) / normed.square().sum(0).clamp_min(1e-12)
    for gain in (stored, 1 + stored):  # Gemma stores a gain less one
        if torch.linalg.vector_norm(measured - gain) < 0.02 * torch.linalg.vector_norm(gain):
            return gain
    return None


class Scales(NamedTuple):
    """What columns and rows of weights are multiplied by, by path, and the new weights of norms."""

    columns: dict[str, Tensor]
    rows: dict[str, Tensor]
    norms: dict[str, Tensor]

    def weight(self, path: str, weight_OI: Tensor) -> Tensor:
        """Return a scaled weight, float32."""
        scaled = weight_OI.float()
        if path in self.columns:
            scaled = scaled * self.columns[path]
        if path in self.rows:
            scaled = scaled * self.rows[path][:, None]
        return scaled


def block_scales(
    block: nn.Module,
    stages: Sequence[Sequence[str]],
    norms: Mapping[str, NormCall],
    squares: Mapping[str, Tensor],
    is_unmoved: Callable[[Scales], bool],
) -> Scales:
    """Return the scales of a block's layers: those by which its output `is_unmoved`.

    `stages` has the layers of one input together. By the first layer of a stage, `norms` has the
    norm that it reads, and `squares` the mean square of its inputs, [I].
    """
    scales = Scales({}, {}, {})
    layers = {path for stage in stages for path in stage}
    for stage in stages:
        first = stage[0]
        if first not in squares:
            continue
        trial = _of_norm(block, stage, norms[first], squares[first]) if first in norms else None
        if trial is None and len(stage) == 1:
            trial = _of_pair(block, first, squares[first], layers)
        if trial is None:
            continue
        joined = Scales(*(mine | new for mine, new in zip(scales, trial, strict=True)))
        if is_unmoved(joined):
            scales = joined
    return scales


Heads = tuple[int, int]
"""How many query heads share one head of values, and the size of a head."""


def _factors(squares: Tensor, weights_OI: Sequence[Tensor], heads: Heads | None = None) -> Tensor:
    """Return f for the columns of weights, [I]; `heads` that share values get the same f."""
    sigma = torch.cat([weight.float() for weight in weights_OI]).square().mean(0).sqrt()
    # log f = log(h) / 8 - log(σ) / 2
    logarithm = OF_INPUTS * squares.clamp_min(1e-12).log()
    logarithm = logarithm - OF_WEIGHTS * sigma.clamp_min(1e-12).log()
    if heads is not None:
        count, size = heads
        by_head = logarithm.view(-1, count, size)
        logarithm = by_head.mean(1, keepdim=True).expand_as(by_head).reshape(-1)
    bound = math.log(MOST)
    return (logarithm - logarithm.mean()).clamp(-bound, bound).exp()


def _of_norm(
    block: nn.Module,
    stage: Sequence[str],
    call: NormCall,
    squares: Tensor,
) -> Scales | None:
    """Return the scales of the layers that read a norm; None for one that is no RMS norm."""
    norm = block.get_submodule(call.path)
    gain = gain_of(norm, call)
    if gain is None:
        return None
    stored = norm.get_parameter("weight").data
    offset = round(float((gain - stored.float()).mean()))
    wanted = _factors(squares, [block.get_parameter(f"{path}.weight").data for path in stage])
    # In bfloat16 whatever the stored type, so that the student is the same from either file.
    new = (gain / wanted - offset).bfloat16().to(stored.dtype)
    new_gain = new.float() + offset
    # The columns take what rounding did to the new gain: the product stays exact.
    usable = (new_gain.abs() > 1e-6) & (gain.abs() > 1e-6)
    new = torch.where(usable, new, stored)
    factors = torch.where(usable, gain / new_gain, 1.0)
    return Scales(dict.fromkeys(stage, factors), {}, {call.path: new})


_WRITERS = {"o_proj": "v_proj", "down_proj": "up_proj"}  # the layer whose rows take the inverse


def _of_pair(block: nn.Module, path: str, squares: Tensor, layers: Container[str]) -> Scales | None:
    """Return the scales between a layer and the one before it; None where that is unknown."""
    parent, _, name = path.rpartition(".")
    module = block.get_submodule(parent)
    reader_OI = block.get_parameter(f"{path}.weight").data
    writer = getattr(module, _WRITERS.get(name, ""), None)
    writer_path = f"{parent}.{_WRITERS.get(name)}".lstrip(".")
    if writer_path not in layers or not isinstance(writer, nn.Linear) or writer.bias is not None:
        return None
    heads, rest = divmod(reader_OI.shape[1], writer.out_features)
    size = getattr(module, "head_dim", writer.out_features) if heads > 1 else writer.out_features
    if rest or not isinstance(size, int) or writer.out_features % size:
        return None
    factors = _factors(squares, [reader_OI], (heads, size))
    rows = factors.view(-1, heads, size)[:, 0].reshape(-1)
    return Scales({path: factors}, {writer_path: 1 / rows}, {})
