"""A linear layer's codes, scales and adapter start, chosen together.

The best low-rank correction of a weight error E has a closed form in any metric tr(G E H Eᵀ): the truncated SVD of
G^(1/2) E H^(1/2), carried back. With H the second moment of inputs and no G that is QERA; with G the Fisher
information of outputs it is what the predictions want. LoftQ's SVD of the plain error closes less than half as much.
Cholesky factors as roots make the same corrections as symmetric roots do, at a thirtieth of the cost.

Codes that are chosen first waste their freedom on what the adapter corrects anyway. With a `joint_rank` the two
alternate: codes of W - B A by the chosen method, then B A of what they leave; the best turn is kept. Where G is known
whole, `descent` goes on in both metrics (`refine_rows`). B A is the best for the codes that are and follows those that
come, so to first order what B's columns or A's rows span costs nothing: G becomes G - G B (Bᵀ G B)⁻¹ Bᵀ G, H alike.

Sources: QERA (arXiv 2410.06040), EoRA (2410.21271); alternation, LoftQ (2310.08659) and CALDERA (2405.18886).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn

from qat_lora.layers.lora import Factors
from qat_lora.quant import initialize
from qat_lora.quant.gptq import Curvature, cholesky, damped
from qat_lora.quant.initialize import COMPENSATED, ROUNDS, TWO_SIDED_ROUNDS, Method, QuantizedWeight
from qat_lora.quant.spec import QuantSpec
from qat_lora.runtime.host.machine import give_back

TURN_ROUNDS = 1  # of descent in a turn; only the turn that is kept is descended to the end
FOLLOWED = 2  # two-sided rounds after which the adapter follows
OVERSAMPLED, ITERATIONS = 32, 4  # extra columns, and passes, of the subspace iteration that replaces large SVDs
INPUT_FLOOR = 1e-4  # of the mean eigenvalue: inputs that calibration never saw must not get infinite weight
OUTPUT_FLOOR = 1.0  # the same for outputs, whose gradients are noisier and of fewer tokens
Found = list[QuantizedWeight]  # of layers of one shape
SPAN_FLOOR = 1e-3  # of an output's metric, where an adapter corrects all of it


EffortName = Literal["light", "default", "best"]


class Effort(NamedTuple):
    """How long a layer is solved for, on how much text."""

    turns: int  # of codes and adapter after the first
    rounds: int  # of refitted scales and descent, before two-sided rounds
    two_sided_rounds: int
    calibration_tokens: int  # of inputs
    fisher_tokens: int  # of these that outputs' gradients are taken for, which costs five times as much


# Points of the curve of KL against minutes (benchmarks/real_model.py).
EFFORTS: dict[EffortName, Effort] = {
    "light": Effort(0, 1, 2, 16_384, 4_096),
    "default": Effort(0, 1, 6, 32_768, 8_192),
    "best": Effort(3, ROUNDS, TWO_SIDED_ROUNDS, 131_072, 32_768),
}


class FitSettings(NamedTuple):
    """How layers are fitted."""

    method: Method  # how codes and scales are chosen
    start_rank: int = 0  # columns of the adapter start; 0 for none
    joint_rank: int = 0  # rank of the adapter that codes are chosen together with; 0: codes first
    device: torch.device | None = None  # where codes and scales are solved for; None: where the weights are, as starts
    effort: Effort = EFFORTS["best"]


class Fit(NamedTuple):
    """A linear layer's quantised weight, and the adapter start where one was asked for."""

    quantised: QuantizedWeight
    factors: Factors | None


class _Root(NamedTuple):
    """A root L of a metric, L Lᵀ, of the metric's type: lower triangular, or [n] where it is diagonal."""

    factor: Tensor

    @classmethod
    def of(cls, moment: Tensor, floor: float) -> _Root:
        """Return the root of a second moment, given whole or by its diagonal."""
        lift = floor * (moment if moment.dim() == 1 else moment.diagonal()).double().mean().clamp_min(1e-12)
        if moment.dim() == 1:
            return cls((moment.double() + lift).sqrt())
        try:
            return cls(cholesky(damped(moment, floor)))
        except torch.linalg.LinAlgError:  # float32 sums of few, huge features have eigenvalues below zero by more
            values, basis = torch.linalg.eigh(moment.double())
            return cls(torch.linalg.qr(((values.clamp_min(0) + lift).sqrt() * basis).T).R.T.to(moment.dtype))

    def times(self, rows: Tensor, into: Tensor | None = None) -> Tensor:
        """Return X L for X [.., n], without most of the zeros above the diagonal; `into` may be X itself."""
        factor, size = self.factor.to(rows.dtype), -(-len(self.factor) // 4)
        if factor.dim() == 1:
            return rows * factor
        products = torch.empty_like(rows) if into is None else into
        for i, x in enumerate(factor.split(size, 1)):
            products[..., i * size : (i + 1) * size] = rows[..., i * size :] @ x[i * size :]
        return products

    def over(self, rows: Tensor) -> Tensor:
        """Return X L⁻¹ for X [.., n], of the root's type."""
        if self.factor.dim() == 1:
            return rows / self.factor
        return torch.linalg.solve_triangular(self.factor, rows.to(self.factor.dtype), upper=False, left=False)


class Metric(NamedTuple):
    """What a weight error costs: tr(G E H Eᵀ)."""

    outputs: _Root
    inputs: _Root

    @classmethod
    def of(
        cls,
        like_OI: Tensor,
        second_moment_II: Tensor | None,
        outputs_OO: Tensor | None = None,
        output_floor: float = OUTPUT_FLOOR,
    ) -> Metric:
        """Return the metric of a layer; without a moment everything counts alike."""
        sides = zip(like_OI.shape, (outputs_OO, second_moment_II), (output_floor, INPUT_FLOOR), strict=True)
        ones = functools.partial(torch.ones, dtype=torch.float64, device=like_OI.device)
        return cls(*(_Root(ones(size)) if given is None else _Root.of(given, floor) for size, given, floor in sides))

    def weigh(self, error_OI: Tensor) -> Tensor:
        """Return an error between the roots, in its own type; the sum of the squares is its cost."""
        return self.outputs.times(weighed := self.inputs.times(error_OI).T, weighed).T

    def correction(self, error_OI: Tensor, rank: int, joint_rank: int = 0) -> tuple[Factors, float]:
        """Return the best rank-r correction of an error, and the cost that `joint_rank` of its columns leave."""
        u, s, v, left = self._decomposed(error_OI, rank, joint_rank)
        a, b = self.inputs.over((v * s.sqrt()).T), self.outputs.over((u * s.sqrt()).T).T
        return Factors(a.float(), b.float()), left

    def spans(self, error_OI: Tensor, rank: int) -> tuple[Tensor, Tensor, float]:
        """Return S [O, r] and S [I, r], S Sᵀ what G and H have where the best correction is, and the cost it leaves."""
        u, _, v, left = self._decomposed(error_OI, rank, rank)
        g, h = self.outputs.factor, self.inputs.factor
        return g @ u.to(g), h @ v.to(h), left

    def _decomposed(self, error_OI: Tensor, rank: int, joint_rank: int) -> tuple[Tensor, Tensor, Tensor, float]:
        weighed = self.weigh(error_OI)
        u, s, v = _leading(weighed, rank)
        norms = (torch.linalg.vector_norm(part, dim=-1).double() for part in (weighed, s[:joint_rank]))
        whole, corrected = (float(norm.square().sum()) for norm in norms)
        return u, s, v, whole - corrected

    def costs(self, error_OI: Tensor, most: int) -> Tensor:
        """Return what an error costs after its best corrections of ranks 0 to `most`, float64 [most + 1]."""
        weighed = self.weigh(error_OI)
        closed = _leading(weighed, most)[1].double().square().cumsum(0)
        whole = torch.linalg.vector_norm(weighed, dim=-1).double().square().sum()
        return (whole - nn.functional.pad(closed, (1, 0))).clamp_min(0)


def _leading(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest singular values and their vectors as columns, of a large matrix by subspace iteration."""
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


def together(spec: QuantSpec, settings: FitSettings) -> bool:
    """Return True if layers of one shape shall be solved in one go: a column of one is little work for a device."""
    return settings.device is not None and settings.method in COMPENSATED and spec.sharing in ("group", "channel")


def fit_layers(
    weights_OI: Sequence[Tensor],
    spec: QuantSpec,
    settings: FitSettings,
    second_moments_II: list[Tensor | None],
    outputs_OO: Sequence[Tensor | None],
) -> list[Fit]:
    """Quantise layers of one shape and find their adapter starts; several only where they may go `together`.

    Given are the second moments of their inputs, a list that is emptied as they are the largest matrices here, and the
    Fisher information of their outputs, whole or [O]. ConfigError: what `quantize_weight` refuses.
    """
    start_rank, joint_rank = (min(rank, *weights_OI[0].shape) for rank in settings[1:3])
    weights, known = [weight.float() for weight in weights_OI], [m for m in second_moments_II if m is not None]
    curvature = None
    if len(known) == len(weights):  # else the method says what it lacks
        curvature = Curvature((known[0] if len(known) == 1 else torch.stack(known)).to(settings.device))
    solver = _Solver(spec, settings, curvature)
    if not (start_rank or settings.method == "descent"):
        return [Fit(quantised, None) for quantised in solver.quantised(weights)]
    outputs = [None if given is None else given.to(weights[0].device) for given in outputs_OO]
    metrics = [Metric.of(*given) for given in zip(weights, second_moments_II, outputs, strict=True)]
    second_moments_II.clear()
    known.clear()
    found = solver.with_adapter(weights, metrics, joint_rank) if joint_rank else solver.quantised(weights)
    found = solver.two_sided(weights, metrics, outputs, found)
    return [
        Fit(quantised, metric.correction(weight - quantised.dense(spec), start_rank)[0] if start_rank else None)
        for weight, metric, quantised in zip(weights, metrics, found, strict=True)
    ]


class _Solver(NamedTuple):
    """What finds codes and scales of layers of one shape, on a device of its own if need be."""

    spec: QuantSpec
    settings: FitSettings
    curvature: Curvature | None

    def _stacked(self, weights_OI: Sequence[Tensor]) -> Tensor:
        """Return the weights' rows, one layer under the other, where they are solved for."""
        return (weights_OI[0] if len(weights_OI) == 1 else torch.cat(tuple(weights_OI))).to(self.settings.device)

    def quantised(self, weights_OI: Sequence[Tensor], rounds: int | None = None) -> Found:
        """Return codes and scales of every weight, where the weights are."""
        weights, method = self._stacked(weights_OI), self.settings.method
        rounds = self.settings.effort.rounds if rounds is None else rounds
        found = initialize.quantize_weight(weights, self.spec, method, self.curvature, rounds)
        return found.to(weights_OI[0].device).split(len(weights_OI))

    def with_adapter(self, weights_OI: Sequence[Tensor], metrics: Sequence[Metric], rank: int) -> Found:
        """Return the codes that an adapter of this rank corrects best; the two are fitted in turn."""

        def rest(i: int, codes: QuantizedWeight) -> tuple[Factors, float]:
            return metrics[i].correction(codes.dense(self.spec).neg_().add_(weights_OI[i]), rank, rank)

        def targets(beside: Sequence[Factors | None]) -> list[Tensor]:
            pairs = zip(weights_OI, beside, strict=True)
            return [w if x is None else (x.b_OR @ x.a_RI).neg_().add_(w) for w, x in pairs]

        beside: list[Factors | None] = [None] * len(weights_OI)
        best = dict[int, tuple[float, QuantizedWeight, Factors | None]]()
        for _ in range(1 + self.settings.effort.turns):
            for i, quantised in enumerate(self.quantised(targets(beside), TURN_ROUNDS)):
                following, left = rest(i, quantised)
                if i not in best or left < best[i][0]:
                    best[i] = left, quantised, beside[i]
                beside[i] = following
        least, found, kept = zip(*best.values(), strict=True)
        if self.settings.method != "descent" or self.curvature is None:
            return list(found)
        vars(self.curvature).pop("inverse_root_LII", None)  # no start follows
        aim = self._stacked(targets(kept))
        start = QuantizedWeight.joined(found).to(aim.device)
        rounds = self.settings.effort.rounds - TURN_ROUNDS
        if not rounds:
            return list(found)
        refined = initialize.refine(aim, self.spec, start, self.curvature, rounds)
        split = refined.to(weights_OI[0].device).split(len(found))
        return [new if rest(i, new)[1] < least[i] else found[i] for i, new in enumerate(split)]

    def two_sided(
        self, weights_OI: Sequence[Tensor], metrics: Sequence[Metric], outputs: Sequence[Tensor | None], found: Found
    ) -> Found:
        """Return weights after descent in both metrics, beside the joint adapter; as given without a whole G."""
        known = [x for x in outputs if x is not None and x.dim() == 2]
        if self.settings.method != "descent" or len(known) < len(metrics):
            return found
        assert (curvature := self.curvature) is not None
        vars(curvature).pop("inverse_root_LII", None)  # no start follows
        aim, rank = self._stacked(weights_OI), min(self.settings.joint_rank, *weights_OI[0].shape)
        metric_LOO = damped(torch.stack(known).float(), OUTPUT_FLOOR + SPAN_FLOOR * bool(rank)).to(aim.device)

        def refined(rounds: int, *spans: list[Tensor]) -> Found:
            start = QuantizedWeight.joined(found).to(aim.device)
            # Here, so that on XLA it is part of the first round's graph; nothing reads the moments after the last one.
            for metric_LNN, *moved in zip((metric_LOO, curvature.damped_LII), *spans, strict=True) if spans else ():
                _move_out(metric_LNN, *moved)
            fitted = initialize.refine_rows(aim, self.spec, start, curvature, metric_LOO, rounds)
            return fitted.to(weights_OI[0].device).split(len(found))

        if not rank:
            return refined(self.settings.effort.two_sided_rounds)
        best = [(math.inf, quantised) for quantised in found]
        without = [torch.zeros(*metric.shape[:2], rank) for metric in (metric_LOO, curvature.damped_LII)]
        for turns_left in range(self.settings.effort.two_sided_rounds // FOLLOWED, -1, -1):
            give_back()
            given = zip(metrics, weights_OI, found, strict=True)
            spans = [metric.spans(weight - now.dense(self.spec), rank) for metric, weight, now in given]
            ways = zip(best, ((left, now) for (*_, left), now in zip(spans, found, strict=True)), strict=True)
            best = [min(way, key=operator.itemgetter(0)) for way in ways]
            if turns_left:
                of_outputs, of_inputs, _ = zip(*spans, strict=True)
                spanned = [torch.stack(of_outputs), torch.stack(of_inputs)]
                without, found = spanned, refined(FOLLOWED, without, spanned)
        return [quantised for _, quantised in best]


def _move_out(metric_LNN: Tensor, old_LNR: Tensor, new_LNR: Tensor) -> None:
    """Put back what metrics had in old spans, take out what they have in new ones; in place, as they are large."""
    old, new = old_LNR.to(metric_LNN), new_LNR.to(metric_LNN)
    metric_LNN.baddbmm_(old, old.mT).baddbmm_(new, new.mT, alpha=-1)
