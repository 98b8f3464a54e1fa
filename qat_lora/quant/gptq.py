"""Codes and scales that disturb a layer's *output* least: error-compensated rounding, and descent from there.

The output error of Ŵ over calibration inputs x is tr(E H Eᵀ) with E = W - Ŵ and H = E[x xᵀ]. `gptq` rounds column by
column, pushes each column's error onto those not yet rounded, along the inverse of H, and never revisits an early
column. `descend` sweeps over the columns and gives each the nearest code to its optimum given all others, and
`refit_scales` solves for the scales given the codes; neither raises the error, so they may alternate, which takes an
eighth off GPTQ's at 2 bits. K-quants' scales have two levels, all on grids and too many to solve for: `refit_parts`
goes through them, scale and minimum together. All work from the slope E H, in float32; factors are summed in float64.

A column is too little work for an accelerator, so layers of one shape are solved together: their rows R one under the
other, each layer L with its own H. The loops are `runtime.loop`'s, and stay loops where programs are compiled.

Sources: GPTQ (arXiv 2210.17323); coordinate descent, QuantEase (arXiv 2309.01885); `NOISE`, Marquardt (1963).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from qat_lora.quant.codes import cells, decode, encode
from qat_lora.quant.scales import TINY, stored
from qat_lora.quant.spec import QuantSpec
from qat_lora.runtime.loop import Number, Tensors, factorised, fits_a_piece, loop, part, rest, rows_at_once, whole_parts

DAMPING = 0.01  # added to the second moment's diagonal, as a share of its mean: GPTQ's own default
NOISE = 0.2  # added to every diagonal entry, as a share of itself: least KL on text that calibration has not seen
GRAM = 2**19  # numbers of the matrices of scales' equations that a host holds at a time; a device four times as many
PANEL = 256  # columns of a factor that are in float64 at a time
BLOCK = 64  # columns handled before their joint effect is pushed on: fewer, larger matrix products
IN_ONE_THREAD = 2**15  # numbers of a matrix that NumPy multiplies by a vector without waking others


class Curvature:
    """The damped second moments of layers' inputs and their factors, computed once: turns of fitting share them."""

    def __init__(self, second_moment: Tensor) -> None:
        """Take one layer's [I, I], or those of layers that are solved together, [L, I, I]; all keep their type."""
        self.second_moment_LII = second_moment.reshape(-1, *second_moment.shape[-2:])
        self.diagonal_LI = self.second_moment_LII.diagonal(dim1=1, dim2=2).clone()

    @functools.cached_property
    def damped_LII(self) -> Tensor:
        """The second moments, damped; the plain ones, as large, are let go of."""
        moment_LII, self.second_moment_LII = self.second_moment_LII, torch.empty(0)
        return damped(moment_LII, own=NOISE)

    @functools.cached_property
    def inverse_root_LII(self) -> Tensor:
        """Upper triangular R with H⁻¹ = Rᵀ R."""
        return factorised(_inverse_root, self.damped_LII)


def _inverse_root(damped_LII: Tensor) -> Tensor:
    """Return R: R⁻¹ is the Cholesky factor of H, columns counted from the last; H is not inverted."""
    backwards = damped_LII.flip(1, 2)
    for moment_II in backwards:
        invert(cholesky(moment_II))
    return backwards.flip(1, 2)


def damped(second_moment: Tensor, share: float = DAMPING, own: float = 0.0) -> Tensor:
    """Return second moments [.., I, I] with a share of the diagonal's mean added to it, and of each entry's own."""
    moment = second_moment.clone()
    diagonal = moment.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(own * diagonal + share * diagonal.double().mean(-1, keepdim=True).clamp_min(1e-12))
    return moment


def cholesky(moment_II: Tensor) -> Tensor:
    """Overwrite a matrix by its lower Cholesky factor, from float64 sums, and return it; LinAlgError: not definite."""
    for at in range(0, len(moment_II), PANEL):
        known = moment_II[at : at + PANEL, :at].double()
        rows = moment_II[at:].split(PANEL)
        panel = torch.cat([row[:, at : at + PANEL].double() - row[:, :at].double() @ known.mT for row in rows])
        own = torch.linalg.cholesky(panel[:PANEL])
        moment_II[at:, at : at + PANEL] = torch.linalg.solve_triangular(own.mT, panel, upper=True, left=False)
    return moment_II.tril_()


def invert(lower_II: Tensor) -> Tensor:
    """Overwrite a lower triangular matrix by its inverse, from float64 sums, and return it."""
    for at in reversed(range(0, len(lower_II), PANEL)):
        own, end = lower_II[at : at + PANEL, at : at + PANEL], min(at + PANEL, len(lower_II))
        inverse = torch.linalg.solve_triangular(own.double(), torch.eye(len(own)).to(own.double()), upper=False)
        below, beyond = lower_II[end:, at:end].double() @ inverse, lower_II[end:, end:].split(PANEL)
        for place, row in zip(lower_II[end:, at:end].split(PANEL), beyond, strict=True):
            place.copy_(row.double() @ below).neg_()
        own.copy_(inverse)
    return lower_II


class Grid(NamedTuple):
    """The meaning of the codes of weights (or of some columns): (value - zero) * scale.

    A book that counts up by ones is given as 0, 1, ..., what is missing in its zero: then rounding is all of a search.
    """

    values: Tensor  # sorted code book
    scale: Tensor  # scale of every weight, [R, I]
    zero: Tensor | float = 0.0  # zero point of every weight, [R, I], or one of all
    counts: bool = False

    def parts(self) -> list[Tensor]:
        """Return the tensors that have an entry for every weight."""
        return [self.scale, self.zero] if isinstance(self.zero, Tensor) else [self.scale]

    def of(self, parts: Sequence[Tensor]) -> Grid:
        """Return the same grid with other `parts`."""
        return self._replace(scale=parts[0], zero=parts[1] if len(parts) > 1 else self.zero)

    def by_column(self, number: Number, size: int) -> Grid:
        """Return the grid of a part of the columns, transposed, each in one piece of memory."""
        return self.of([_turned(part(x, number, size, 1)) for x in self.parts()])

    def whole(self, size: int) -> Grid:
        """Return the grid with `whole_parts` of columns."""
        return self.of([whole_parts(x, size, 1, fill=1.0) for x in self.parts()])

    def snap(self, values: Tensor) -> Tensor:
        """Return the code values nearest to others, which may be overwritten."""
        if self.counts:
            return values.round_().clamp_(0, self.values.numel() - 1)
        return decode(encode(values, self.values), self.values)

    def codes(self, values: Tensor) -> Tensor:
        """Return the codes of code values."""
        return values.to(torch.uint8) if self.counts else encode(values, self.values)

    def of_codes(self, codes: Tensor) -> Tensor:
        """Return the code values of codes."""
        return codes.to(self.scale.dtype) if self.counts else decode(codes, self.values)

    def dense(self, codes: Tensor) -> Tensor:
        """Return the weight that codes make."""
        return (self.of_codes(codes) - self.zero) * self.scale


class Steps(NamedTuple):
    """The numbers that parts of `size` columns may have."""

    size: int
    first: Callable[[Tensor], Tensor]  # the number nearest to one that the first of them may be
    second: Callable[[Tensor], Tensor]
    shifts: tuple[float, ...]  # what is added to optima of the first before that, to try its neighbours


GridOf = Callable[[Number, Tensor, Tensors], tuple[Grid, Tensors]]
"""From a block's number, its weights [R, columns] as compensation has left them, and what `gptq` was given to their
grid, columns first (`Grid.by_column`), and what to keep of it, one of each."""


def gptq(
    weight_RI: Tensor, inverse_root_LII: Tensor, size: int, grid_of: GridOf, given: Sequence[Tensor] = ()
) -> tuple[Tensor, Tensors]:
    """Return error-compensated uint8 codes, and what `grid_of` kept of every block [blocks, ...].

    Weights are of the roots' type, `size` columns share a grid; `given` is what it is found from, in `whole_parts`.
    """
    layers, columns = inverse_root_LII.shape[:2]
    own_LI = whole_parts(inverse_root_LII.diagonal(dim1=1, dim2=2), size, 1, fill=1.0)

    def round_column(grid: Grid, j: Number, carry: Tensors, slices: Tensors, _: Tensors) -> tuple[Tensors, Tensors]:
        (left_CLO,), (row_CL1, own_1L1, *parts) = carry, slices
        column, target_1LO = grid.of(parts), part(left_CLO, j, 1, 0)
        found_1LO = column.snap(target_1LO / column.scale + column.zero)
        errors_1LO = (target_1LO - (found_1LO - column.zero) * column.scale) / own_1L1
        return [left_CLO.addcmul_(row_CL1, errors_1LO, value=-1)], [found_1LO, errors_1LO]

    def round_block(number: Number, carry: Tensors, _: Tensors, constants: Tensors) -> tuple[Tensors, Tensors]:
        (weight_RI,), (roots_LII, own_LI, *given) = carry, constants
        left_RC, rows_LCI = part(weight_RI, number, size, 1), part(roots_LII, number, size, 1)
        grid, kept = grid_of(number, left_RC, given)
        body, left_CLO = functools.partial(round_column, grid), _by_layer(_turned(left_RC), layers)
        own_C1L1 = part(own_LI, number, size, 1).T[:, None, :, None]
        grids = (_by_layer(x, layers)[:, None] for x in grid.parts())
        inputs = [_later(part(rows_LCI, number, size, 2)), own_C1L1, *grids]
        _, (found_CLO, errors_CLO) = loop(body, len(left_CLO), [left_CLO], inputs)
        _take(rest(weight_RI, number, size, 1), errors_CLO, rest(rows_LCI, number, size, 2))
        return [weight_RI], [grid.codes(found_CLO.flatten(1)), *(x[None] for x in kept)]

    constants = [whole_parts(inverse_root_LII, size, 1, 2), own_LI, *given]
    start_RI = whole_parts(weight_RI, size, 1).clone()
    _, (codes_IR, *kept) = loop(round_block, -(-columns // size), [start_RI], constants=constants)
    return codes_IR[:columns].T.contiguous(), kept


def _turned(x_RC: Tensor) -> Tensor:
    """Return a copy of some columns, as rows; at once from a wide tensor a host takes up to seven times as long."""
    return x_RC.contiguous().T.clone(memory_format=torch.contiguous_format)


def _by_layer(x_CR: Tensor, layers: int) -> Tensor:
    """Return columns [C, L, O]."""
    return x_CR.unflatten(1, (layers, -1))


def _later(rows_LCC: Tensor) -> Tensor:
    """Return what each column of a block pushes on to those after it, [C, C, L, 1]: to add zeros beats to cut."""
    return rows_LCC.triu(1).permute(1, 2, 0)[..., None]


def _take(from_RI: Tensor, errors_CLO: Tensor, rows_LCI: Tensor) -> None:
    """Take what the errors of a block's columns do from all columns, layer by layer, in place: Eᵀ H."""
    from_RI.unflatten(0, (len(rows_LCI), -1)).baddbmm_(errors_CLO.permute(1, 2, 0), rows_LCI, alpha=-1)


def _products(errors_CR: Tensor, rows_LCI: Tensor) -> Tensor:
    """Return what the errors of a block's columns do to all columns, layer by layer: Eᵀ H, [R, I]."""
    if len(rows_LCI) == 1:
        return errors_CR.T @ rows_LCI[0]
    return (errors_CR.unflatten(1, (len(rows_LCI), -1)).permute(1, 2, 0) @ rows_LCI).flatten(0, 1)


def slope_of(weight_RI: Tensor, dense_RI: Tensor, damped_LII: Tensor) -> Tensor:
    """Return (W - Ŵ) H, half the negative gradient of the output error at every weight."""
    return _products((weight_RI - dense_RI).T, damped_LII)


def descend(slope_RI: Tensor, damped_LII: Tensor, grid: Grid, codes_RI: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes after a sweep of coordinate descent, and the slope there; no column raises the output error.

    `slope_RI` is `slope_of` the weights and these codes; all tensors but the codes are of one type.
    """
    layers, columns = damped_LII.shape[:2]

    def turn_column(j: Number, carry: Tensors, slices: Tensors, _: Tensors) -> tuple[Tensors, Tensors]:
        (local_CLO,), (row_CL1, pull_1LO, now_1LO, scale_1LO) = carry, slices
        found_1LO = grid.snap(torch.addcmul(now_1LO, part(local_CLO, j, 1, 0), pull_1LO))
        step_1LO = (found_1LO - now_1LO).mul_(scale_1LO)
        return [local_CLO.addcmul_(row_CL1, step_1LO, value=-1)], [found_1LO, step_1LO]

    def turn_block(number: Number, carry: Tensors, _: Tensors, constants: Tensors) -> tuple[Tensors, Tensors]:
        (slope_RI,), (damped_LII, pull_LI, codes_RI, *parts) = carry, constants
        block, rows_LCI = grid.of(parts).by_column(number, BLOCK), part(damped_LII, number, BLOCK, 1)
        now_CR = block.of_codes(_turned(part(codes_RI, number, BLOCK, 1)))
        local_CR = _turned(part(slope_RI, number, BLOCK, 1))
        local_CLO, now_CLO, scale_CLO = (_by_layer(x, layers) for x in (local_CR, now_CR, block.scale))
        pull_CLO = part(pull_LI, number, BLOCK, 1).T[..., None] / scale_CLO
        within_LCC, of_columns = part(rows_LCI, number, BLOCK, 2), (pull_CLO, now_CLO, scale_CLO)
        if layers == 1 and fits_a_piece(local_CLO):
            given = (x[:, 0] for x in (local_CLO, within_LCC.permute(1, 0, 2), *of_columns))
            found_CR, steps_CLO = _turned_columns(grid, *given)
        else:
            inputs = [_later(within_LCC), *(x[:, None] for x in of_columns)]
            _, (found_CLO, steps_CLO) = loop(turn_column, len(now_CLO), [local_CLO], inputs)
            found_CR = block.codes(found_CLO.flatten(1))
        _take(slope_RI, steps_CLO, rows_LCI)
        return [slope_RI], [found_CR]

    pull_LI = whole_parts(damped_LII.diagonal(dim1=1, dim2=2).reciprocal(), BLOCK, 1)
    constants = [whole_parts(damped_LII, BLOCK, 1, 2), pull_LI, whole_parts(codes_RI, BLOCK, 1)]
    constants, start_RI = [*constants, *grid.whole(BLOCK).parts()], whole_parts(slope_RI, BLOCK, 1).clone()
    (slope,), (codes_IR,) = loop(turn_block, -(-columns // BLOCK), [start_RI], constants=constants)
    return codes_IR[:columns].T.contiguous(), slope[:, :columns]


def _turned_columns(grid: Grid, local_CR: Tensor, rows_CC: Tensor, *given_CR: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes and steps of `turn_column`s by NumPy: few rows cost calls: a column takes all before it at once."""
    midpoints = ((grid.values[1:] + grid.values[:-1]) / 2).to(local_CR.dtype)
    search = cells(tuple(midpoints.tolist()), midpoints.dtype)
    assert search is not None  # no book of a preset is too narrow
    book, codes_C, midpoints_C = (x.numpy() for x in (grid.values, search[2].long(), search[3]))
    steps_CR, found, codes = torch.empty_like(local_CR), np.empty(local_CR.shape, midpoints_C.dtype), []
    steps, few = steps_CR.numpy(), max(1, IN_ONE_THREAD // local_CR.shape[1])
    pushed, at = np.empty_like(steps[0]), np.empty_like(steps[0], steps.dtype if grid.counts else np.float32)
    last = len(book if grid.counts else codes_C) - 1
    per_unit, shift, none, all_ = (np.full_like(at, x) for x in (*search[:2], 0, last))  # NumPy converts numbers
    before = zip(*(x.numpy() for x in (local_CR, rows_CC.T.contiguous(), *given_CR)), found, steps, strict=True)
    for j, (left, row, pull, now, scale, code, step) in enumerate(before):
        known = slice(j // few * few, j)
        if j == known.start:
            local_CR[j:].addmm_(rows_CC[j - few : j, j:].T, steps_CR[j - few : j], alpha=-1)
        else:
            np.subtract(left, row[known].dot(steps[known], out=pushed), out=left)
        np.add(np.multiply(left, pull, out=code), now, out=code)
        if grid.counts:
            np.minimum(np.fmax(np.rint(code, out=code), none, out=code), all_, out=code)
        else:
            np.add(np.multiply(code, per_unit, out=at, casting="same_kind", dtype=at.dtype), shift, out=at)
            cell = np.minimum(np.fmax(at, none, out=at), all_, out=at).astype(np.int64)
            codes.append(codes_C.take(cell) + (code >= midpoints_C.take(cell)))
            book.take(codes[-1], out=code, mode="clip")
        np.multiply(np.subtract(code, now, out=step), scale, out=step)
    return torch.from_numpy(np.array(codes or found, np.uint8)), steps_CR[:, None]


def refit_scales(
    slope_RI: Tensor, damped_LII: Tensor, grid: Grid, codes_RI: Tensor, scale: Tensor, spec: QuantSpec
) -> Tensor:
    """Return scales [rows, G] of least output error for `descend`'s codes; rows that gain nothing keep theirs."""
    columns = slope_RI.shape[1]
    size = spec.group_size or columns
    groups = -(-columns // size)

    def gram_row(number: Number, carry: Tensors, _: Tensors, constants: Tensors) -> tuple[Tensors, Tensors]:
        q_RI, damped_LII = constants
        rows_LCI = rest(part(damped_LII, number, size, 1), number - 1, size, 2)
        sums = _part_sums(_products(part(q_RI, number, size, 1).T, rows_LCI) * rest(q_RI, number - 1, size, 1), size)
        return carry, [torch.nn.functional.pad(sums, (groups - sums.shape[1], 0))[None]]

    q_RI = grid.of_codes(codes_RI) - grid.zero
    right = _part_sums(q_RI * slope_RI, size)
    constants = [whole_parts(q_RI, size, 1), whole_parts(damped_LII, size, 1, 2)]
    _, (rows_GRG,) = loop(gram_row, groups, [], constants=constants)
    return factorised(functools.partial(_fitted, spec=spec), rows_GRG, right, scale)


def _part_sums(x: Tensor, size: int) -> Tensor:
    """Return the sums of parts of `size` columns; the last one may be shorter."""
    if x.shape[1] % size == 0:
        return x.unflatten(1, (-1, size)).sum(2)
    return torch.stack([columns.sum(1) for columns in x.split(size, dim=1)], 1)


def refit_parts(
    slope_RI: Tensor, damped_LII: Tensor, bases: Sequence[Tensor], numbers: Sequence[Tensor], steps: Steps
) -> Tensors:
    """Return two numbers [R, parts] of every part of columns after a turn of exact steps, those of a part together.

    Steps are onto the numbers' grid, and the output error falls or stays with every part. `slope_RI` is `slope_of` the
    weights now; `bases` [R, I] are what a unit of each number adds to the weight.
    """

    def turn(number: Number, carry: Tensors, now: Tensors, constants: Tensors) -> tuple[Tensors, Tensors]:
        (slope_RI,), (damped_LII, *bases) = carry, constants
        (b, c), rows_LCI = (part(x, number, steps.size, 1) for x in bases), part(damped_LII, number, steps.size, 1)
        slope, within_LCC = part(slope_RI, number, steps.size, 1), part(rows_LCI, number, steps.size, 2)
        pulled_b, pulled_c = _products(b.T, within_LCC), _products(c.T, within_LCC)
        bb, bc, cc = ((x * y).sum(1) for x, y in ((b, pulled_b), (b, pulled_c), (c, pulled_c)))
        right_b, right_c, bb, cc = (b * slope).sum(1), (c * slope).sum(1), bb.clamp_min(1e-30), cc.clamp_min(1e-30)
        joint, alone = (right_b - bc / cc * right_c) / (bb - bc / cc * bc).clamp_min(1e-30), right_b / bb
        optima = torch.stack([now[0] + optimum + shift for optimum in (joint, alone) for shift in steps.shifts])
        first = torch.cat([now[0][None], steps.first(optima)])  # [T, R], of T that are tried
        change = first - now[0]
        second = steps.second(now[1] + (right_c - bc * change) / cc)
        other = second - now[1]
        raised = (bb * change + 2 * (bc * other - right_b)) * change + (cc * other - 2 * right_c) * other
        least, at = raised.min(0, keepdim=True)
        best = [torch.where(least < 0, x.gather(0, at), y)[0] for x, y in zip((first, second), now, strict=True)]
        added = b * (best[0] - now[0])[:, None] + c * (best[1] - now[1])[:, None]
        _take(slope_RI, _by_layer(added.T, len(rows_LCI)), rows_LCI)
        return [slope_RI], [x[None] for x in best]

    inputs = [x.T.contiguous() for x in numbers]
    _, found = loop(turn, len(inputs[0]), [slope_RI.clone()], inputs, [damped_LII, *bases])
    return [x.T.contiguous() for x in found]


def _fitted(rows_GRG: Tensor, right_RG: Tensor, scale: Tensor, spec: QuantSpec) -> Tensor:
    """Return the scales that solve the normal equations, given by the upper triangles of their matrices."""
    most = min(rows_at_once(rows_GRG.transpose(0, 1), GRAM), max(1, 4 * GRAM // right_RG.shape[1] ** 2))
    if len(right_RG) > most:
        parts = zip(rows_GRG.split(most, 1), right_RG.split(most), scale.split(most), strict=True)
        return torch.cat([_fitted(*part, spec) for part in parts])
    gram, right = rows_GRG.permute(1, 0, 2).double().triu_(), right_RG.double()
    gram += gram.triu(1).mT
    if spec.sharing == "tensor":
        gram, right = gram.sum(0, keepdim=True), right.sum(0, keepdim=True)
    ridge = 1e-9 * gram.diagonal(dim1=1, dim2=2).mean(-1).clamp_min(1e-30)  # a group of zero codes has no scale
    wanted = scale.double() + torch.linalg.solve(gram + torch.diag_embed(ridge[:, None].expand(right.shape)), right)
    found = stored(wanted if spec.signed else wanted.clamp_min(TINY))
    fitted = torch.where(torch.isfinite(found), found, scale.double()).to(scale.dtype)
    change = (fitted - scale).double()
    raised = (change[:, None] @ gram @ change[:, :, None]).flatten() - 2 * (change * right).sum(1)  # the output error
    return torch.where((raised < 0)[:, None], fitted, scale)
