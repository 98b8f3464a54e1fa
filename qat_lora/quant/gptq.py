"""Codes and scales that disturb a layer's *output* least: error-compensated rounding, and descent from there.

The output error of Ŵ over calibration inputs x is tr(E H Eᵀ) with E = W - Ŵ and H = E[x xᵀ]. `gptq` rounds column by
column, pushes each column's error onto those not yet rounded, along the inverse of H, and never revisits an early
column. `descend` sweeps over the columns and gives each the nearest code to its optimum given all others, and
`refit_scales` solves for the scales given the codes; neither raises the error, so they may alternate, which takes an
eighth off GPTQ's at 2 bits. Both work from the slope E H, in float32; inverting H needs float64.

Sources: GPTQ (arXiv 2210.17323); coordinate descent, QuantEase (arXiv 2309.01885).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from qat_lora.quant.codes import decode, encode
from qat_lora.quant.scales import TINY
from qat_lora.quant.spec import QuantSpec

DAMPING = 0.01  # added to the second moment's diagonal, as a share of its mean: GPTQ's own default
BLOCK = 64  # columns handled before their joint effect is pushed on: fewer, larger matrix products


class Curvature:
    """The damped second moment of a layer's inputs and its factors, each computed once: turns of fitting share them."""

    def __init__(self, second_moment_II: Tensor) -> None:
        self.second_moment_II = second_moment_II

    @functools.cached_property
    def damped_II(self) -> Tensor:
        """The second moment, damped, float64."""
        return damped(self.second_moment_II)

    @functools.cached_property
    def narrow_II(self) -> Tensor:
        """The same in float32."""
        return self.damped_II.float()

    @functools.cached_property
    def inverse_root_II(self) -> Tensor:
        """Upper triangular R with H⁻¹ = Rᵀ R, float64.

        R⁻¹ is the Cholesky factor of H with the columns counted from the last, so H itself need not be inverted.
        """
        backwards = torch.linalg.cholesky(self.damped_II.flip(0, 1)).flip(0, 1)
        eye = torch.eye(len(backwards), dtype=backwards.dtype, device=backwards.device)
        return torch.linalg.solve_triangular(backwards, eye, upper=True)


class Grid(NamedTuple):
    """The meaning of the codes of a weight (or of some columns): (value - zero) * scale."""

    values: Tensor
    """Sorted code book."""
    scale: Tensor
    """Scale of every weight, [O, I]."""
    zero: Tensor | None = None
    """Zero point of every weight, [O, I], with asymmetric codes."""
    first: float | None = None
    """Least code value where they count up by ones; None for tables."""

    def by_column(self, start: int, stop: int) -> Grid:
        """Return the grid of some columns, transposed, each in one piece of memory."""
        return self._part(lambda wide: wide[:, start:stop].T.contiguous())

    def row(self, index: int) -> Grid:
        """Return the grid of one row: of one column of the weight after `by_column`."""
        return self._part(lambda wide: wide[index])

    def _part(self, take: Callable[[Tensor], Tensor]) -> Grid:
        return self._replace(scale=take(self.scale), zero=None if self.zero is None else take(self.zero))

    def snap(self, target: Tensor) -> Tensor:
        """Return the unscaled values of the codes nearest to a target."""
        ratio = target / self.scale
        if self.zero is not None:
            ratio += self.zero
        if self.first is None:
            chosen = decode(encode(ratio, self.values), self.values)
        else:  # rounding is a third of the cost of a search in vectors as short as a column
            chosen = ratio.sub_(self.first - 0.5).floor_().clamp_(0, len(self.values) - 1).add_(self.first)
        return chosen if self.zero is None else chosen.sub_(self.zero)

    def codes(self, code_values: Tensor) -> Tensor:
        """Return the codes of values that `snap` returned."""
        values = code_values if self.zero is None else code_values + self.zero
        return encode(values, self.values) if self.first is None else (values - self.first).to(torch.uint8)

    def code_values(self, codes: Tensor) -> Tensor:
        """Return the unscaled values of codes."""
        chosen = decode(codes, self.values)
        return chosen if self.zero is None else chosen - self.zero

    def dense(self, codes: Tensor) -> Tensor:
        """Return the weight that codes make."""
        return self.code_values(codes) * self.scale


def damped(second_moment_II: Tensor) -> Tensor:
    """Return the second moment in float64 with a share of its mean on the diagonal."""
    moment = second_moment_II.double().clone()
    moment.diagonal().add_(DAMPING * moment.diagonal().mean().clamp_min(1e-12))
    return moment


def gptq(weight_OI: Tensor, inverse_root_II: Tensor, size: int, grid_of: Callable[[int, int, Tensor], Grid]) -> Tensor:
    """Return error-compensated uint8 codes of a float64 weight.

    Args:
        weight_OI: the weight.
        inverse_root_II: `Curvature.inverse_root_II` of its inputs.
        size: columns that share a grid.
        grid_of: from first column, last column and the weights there, as compensation has left them, to their grid,
            columns first (`Grid.by_column`).
    """
    weight = weight_OI.clone()
    in_features = weight.shape[1]
    codes = torch.zeros(weight.shape, dtype=torch.uint8, device=weight.device)
    for start in range(0, in_features, size):
        stop = min(start + size, in_features)
        block = grid_of(start, stop, weight[:, start:stop])
        left = weight[:, start:stop].T.contiguous()  # [columns, O]: a column is contiguous
        found, errors = torch.empty_like(left), torch.empty_like(left)
        for j in range(stop - start):
            column, row = block.row(j), inverse_root_II[start + j, start + j : stop]
            found[j] = column.snap(left[j])
            errors[j] = (left[j] - found[j] * column.scale) / row[0]
            left[j + 1 :].addr_(row[1:], errors[j], alpha=-1)
        codes[:, start:stop] = block.codes(found).T
        weight[:, stop:] -= errors.T @ inverse_root_II[start:stop, stop:]
    return codes


def slope_of(weight_OI: Tensor, dense_OI: Tensor, damped_II: Tensor) -> Tensor:
    """Return (W - Ŵ) H, half the negative gradient of the output error at every weight."""
    return (weight_OI - dense_OI) @ damped_II


def descend(slope_OI: Tensor, damped_II: Tensor, grid: Grid, codes_OI: Tensor, sweeps: int) -> tuple[Tensor, Tensor]:
    """Return codes after sweeps of coordinate descent, and the slope there.

    The output error falls or stays with every column. All tensors but the codes are of one type.

    Args:
        slope_OI: `slope_of` the weight and these codes.
        damped_II: damped second moment of the layer's inputs.
        grid: what the codes mean.
        codes_OI: the codes.
        sweeps: over all columns, at most; one that changes nothing is the last.
    """
    codes, slope = codes_OI.clone(), slope_OI.clone()
    in_features = codes.shape[1]
    pull = damped_II.diagonal().reciprocal().tolist()
    for _ in range(sweeps):
        before = codes.clone()
        for start in range(0, in_features, BLOCK):
            stop = min(start + BLOCK, in_features)
            within = damped_II[start:stop, start:stop]
            block, local = grid.by_column(start, stop), slope[:, start:stop].T.contiguous()
            found = block.code_values(codes[:, start:stop].T)
            steps = found * block.scale  # the weights of now, then column by column how much they change
            for j in range(stop - start):
                column = block.row(j)
                found[j] = column.snap(torch.add(steps[j], local[j], alpha=pull[start + j]))
                torch.sub(found[j] * column.scale, steps[j], out=steps[j])
                local[j + 1 :].addr_(within[j, j + 1 :], steps[j], alpha=-1)
            codes[:, start:stop] = block.codes(found).T
            slope -= steps.T @ damped_II[start:stop]
        if torch.equal(codes, before):
            break
    return codes, slope


def refit_scales(
    slope_OI: Tensor, damped_II: Tensor, grid: Grid, codes_OI: Tensor, scale: Tensor, spec: QuantSpec
) -> Tensor:
    """Return the scales [rows, G] with the least output error for given codes; rows that gain nothing keep theirs.

    The first four are as for `descend`; `scale` are the stored scales now, float16 numbers.
    """
    q = grid.code_values(codes_OI)
    rows, in_features = q.shape
    size = spec.group_size or in_features
    starts = range(0, in_features, size)
    slopes, right = q * slope_OI, q.new_empty(rows, len(starts), dtype=torch.float64)
    gram = right.new_empty(rows, len(starts), len(starts))
    for i, s in enumerate(starts):
        right[:, i] = slopes[:, s : s + size].sum(1)
        pushed = (q[:, s : s + size] @ damped_II[s : s + size, s:]) * q[:, s:]
        for k, part in enumerate(pushed.split(size, dim=1), start=i):
            gram[:, i, k] = gram[:, k, i] = part.sum(1)
    if spec.sharing == "tensor":
        gram, right = gram.sum(0, keepdim=True), right.sum(0, keepdim=True)
    ridge = 1e-9 * gram.diagonal(dim1=1, dim2=2).mean(-1).clamp_min(1e-30)  # a group of zero codes has no scale
    eye = torch.eye(gram.shape[1], dtype=gram.dtype, device=gram.device)
    wanted = scale.double() + torch.linalg.solve(gram + ridge[:, None, None] * eye, right)
    found = wanted.clamp(TINY, 65504.0).half()
    fitted = torch.where(torch.isfinite(found), found, scale.half()).to(scale.dtype)
    change = (fitted - scale).double()
    raised = (change[:, None] @ gram @ change[:, :, None]).flatten() - 2 * (change * right).sum(1)  # the output error
    return torch.where((raised < 0)[:, None], fitted, scale)
