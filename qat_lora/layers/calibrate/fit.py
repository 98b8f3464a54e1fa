"""One linear layer's codes, scales and adapter start, chosen together.

The best low-rank correction of a weight error E has a closed form in any metric tr(G E H Eᵀ): the truncated SVD of
G^(1/2) E H^(1/2), carried back. With H the second moment of inputs and no G that is QERA; with G the Fisher
information of outputs it is what the predictions want. LoftQ's SVD of the plain error closes less than half as much.
Cholesky factors as roots make the same corrections as symmetric roots do, at a thirtieth of the cost.

Codes that are chosen first waste their freedom on what the adapter corrects anyway. With a `joint_rank` the two
alternate: codes of W - B A by the chosen method, then B A of what they leave; the best turn is kept.

Sources: QERA (arXiv 2410.06040), EoRA (arXiv 2410.21271); alternation, LoftQ (arXiv 2310.08659) and CALDERA
(arXiv 2405.18886).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from qat_lora.errors import ConfigError
from qat_lora.layers.lora import Factors
from qat_lora.quant.gptq import Curvature
from qat_lora.quant.initialize import ROUNDS, Method, QuantizedWeight, quantize_weight, refine
from qat_lora.quant.spec import QuantSpec

TURNS = 3  # of codes and adapter; the fourth changed the objective by less than 1 %
TURN_ROUNDS = 1  # of descent in a turn; only the turn that is kept is descended to the end
OVERSAMPLED, ITERATIONS = 32, 4  # extra columns, and passes, of the subspace iteration that replaces large SVDs
INPUT_FLOOR = 1e-4  # of the mean eigenvalue: inputs that calibration never saw must not get infinite weight
OUTPUT_FLOOR = 1e-2  # the same for outputs, whose gradients are noisier


class FitSettings(NamedTuple):
    """How layers are fitted."""

    method: Method
    """How codes and scales are chosen."""
    start_rank: int = 0
    """Columns of the adapter start; 0 for none."""
    joint_rank: int = 0
    """Rank of the adapter that codes are chosen together with; 0: codes first."""


class Fit(NamedTuple):
    """A linear layer's quantised weight, and the adapter start where one was asked for."""

    quantised: QuantizedWeight
    factors: Factors | None


class _Root(NamedTuple):
    """A root L of a metric, L Lᵀ, float64: lower triangular, or [n] where it is diagonal."""

    factor: Tensor

    @classmethod
    def of(cls, moment: Tensor, floor: float) -> _Root:
        """Return the root of a second moment, given whole or by its diagonal."""
        moment = moment.double()
        diagonal = moment if moment.dim() == 1 else moment.diagonal()
        lift = floor * diagonal.mean().clamp_min(1e-12)
        if moment.dim() == 1:
            return cls((moment + lift).sqrt())
        factor, failed = torch.linalg.cholesky_ex(moment + lift * torch.eye(len(moment)).to(moment))
        if int(failed):  # float32 sums of few, huge features have eigenvalues below zero by more than the lift
            values, basis = torch.linalg.eigh(moment)
            factor = torch.linalg.qr(((values.clamp_min(0) + lift).sqrt() * basis).T).R.T
        return cls(factor)

    @classmethod
    def plain(cls, size: int, like: Tensor) -> _Root:
        """Return the root of the metric in which everything counts alike."""
        return cls(torch.ones(size, dtype=torch.float64, device=like.device))

    def times(self, rows: Tensor) -> Tensor:
        """Return X L for X [.., n]."""
        factor = self.factor.to(rows.dtype)
        return rows * factor if factor.dim() == 1 else rows @ factor

    def over(self, rows: Tensor) -> Tensor:
        """Return X L⁻¹ for X [.., n], float64."""
        if self.factor.dim() == 1:
            return rows.double() / self.factor
        return torch.linalg.solve_triangular(self.factor, rows.double(), upper=False, left=False)


class Metric(NamedTuple):
    """What a weight error costs: tr(G E H Eᵀ)."""

    outputs: _Root
    inputs: _Root

    @classmethod
    def of(cls, like_OI: Tensor, second_moment_II: Tensor | None, outputs_OO: Tensor | None = None) -> Metric:
        """Return the metric of a layer; without a moment everything counts alike."""
        rows, columns = like_OI.shape
        left = _Root.plain(rows, like_OI) if outputs_OO is None else _Root.of(outputs_OO, OUTPUT_FLOOR)
        right = _Root.plain(columns, like_OI) if second_moment_II is None else _Root.of(second_moment_II, INPUT_FLOOR)
        return cls(left, right)

    def weigh(self, error_OI: Tensor) -> Tensor:
        """Return an error between the roots, in its own type; the sum of the squares is its cost."""
        return self.outputs.times(self.inputs.times(error_OI).T).T

    def correction(self, error_OI: Tensor, rank: int, joint_rank: int = 0) -> tuple[Factors, float]:
        """Return the best rank-r correction of an error, and the cost that `joint_rank` of its columns leave."""
        weighed = self.weigh(error_OI)
        u, s, v = _leading(weighed, rank)
        half = s.sqrt()
        a = self.inputs.over((v * half).T)
        b = self.outputs.over((u * half).T).T
        whole, corrected = (float(part.double().square().sum()) for part in (weighed, s[:joint_rank]))
        return Factors(a.float(), b.float()), whole - corrected


def _leading(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest singular values with their vectors, as columns.

    A matrix much larger than the rank takes subspace iteration from a fixed start: it misses little of the last
    columns where values are close together, and nothing where they are not.
    """
    width = rank + OVERSAMPLED
    if 4 * width >= min(matrix.shape):
        u, s, vh = torch.linalg.svd(matrix.double(), full_matrices=False)
        return u[:, :rank], s[:rank], vh[:rank].T
    start = torch.randn(matrix.shape[1], width, generator=torch.Generator().manual_seed(0))
    basis = torch.linalg.qr(matrix @ start.to(matrix)).Q
    for _ in range(ITERATIONS):
        basis = torch.linalg.qr(matrix @ torch.linalg.qr(matrix.T @ basis).Q).Q
    u, s, vh = torch.linalg.svd(basis.T @ matrix, full_matrices=False)
    return basis @ u[:, :rank], s[:rank], vh[:rank].T


def fit_layer(
    weight_OI: Tensor,
    spec: QuantSpec,
    settings: FitSettings,
    second_moment_II: Tensor | None = None,
    outputs_OO: Tensor | None = None,
) -> Fit:
    """Quantise one layer and find its adapter start.

    Args:
        weight_OI: the weight to approximate.
        spec: how to store it.
        settings: how to fit it.
        second_moment_II: of the layer's inputs.
        outputs_OO: Fisher information of its outputs, whole or [O].

    Raises:
        ConfigError: a joint rank without the start that belongs to it, or what `quantize_weight` refuses.
    """
    method, start_rank, joint_rank = settings
    if joint_rank > start_rank:
        raise ConfigError(f"joint_rank: {joint_rank} is more than the {start_rank} columns of --start-rank")
    start_rank, joint_rank = (min(rank, *weight_OI.shape) for rank in (start_rank, joint_rank))
    weight = weight_OI.float()
    curvature = None if second_moment_II is None else Curvature(second_moment_II)
    if not start_rank:
        return Fit(quantize_weight(weight, spec, method, curvature), None)
    metric = Metric.of(weight, second_moment_II, None if outputs_OO is None else outputs_OO.to(weight.device))
    if joint_rank:
        quantised = _with_adapter(weight, spec, method, curvature, metric, joint_rank)
    else:
        quantised = quantize_weight(weight, spec, method, curvature)
    return Fit(quantised, metric.correction(weight - quantised.dense(spec), start_rank)[0])


def _with_adapter(
    weight_OI: Tensor, spec: QuantSpec, method: Method, curvature: Curvature | None, metric: Metric, rank: int
) -> QuantizedWeight:
    """Return the codes that an adapter of this rank corrects best; the two are fitted in turn."""

    def rest(codes: QuantizedWeight) -> tuple[Tensor, float]:
        factors, left = metric.correction(weight_OI - codes.dense(spec), rank, rank)
        return weight_OI - factors.b_OR @ factors.a_RI, left

    target, best, aim, least = weight_OI, None, weight_OI, torch.inf
    for _ in range(1 + TURNS):
        quantised = quantize_weight(target, spec, method, curvature, TURN_ROUNDS)
        following, left = rest(quantised)
        if best is None or left < least:
            best, aim, least = quantised, target, left
        target = following
    assert best is not None
    if method != "descent" or curvature is None:
        return best
    refined = refine(aim, spec, best, curvature, ROUNDS - TURN_ROUNDS)
    return refined if rest(refined)[1] < least else best
