"""One linear layer's codes, scales and adapter start, chosen together.

The best low-rank correction of a weight error E has a closed form in any metric tr(G E H Eᵀ): the truncated SVD of
G^(1/2) E H^(1/2), carried back. With H the second moment of inputs and no G that is QERA; with G the Fisher
information of outputs it is what the model's predictions want. LoftQ's SVD of the plain weight error, which ignores
which inputs matter, closes less than half as much on our saturated teacher.

Codes that are chosen first waste their freedom on what the adapter corrects anyhow. So with `joint_rank` the two
take turns: codes of W - B A by the chosen method, B A of what they leave; the best turn is kept. LoftQ alternates
likewise, in the plain metric and with rounding to nearest, where more turns soon help no more.

Sources: QERA (arXiv 2410.06040), EoRA (arXiv 2410.21271); alternation, LoftQ (arXiv 2310.08659) and CALDERA
(arXiv 2405.18886).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from qat_lora.errors import ConfigError
from qat_lora.layers.lora import Factors
from qat_lora.quant.initialise import Method, QuantisedWeight, quantise_weight
from qat_lora.quant.spec import QuantSpec

StartMethod = Literal["svd", "qera", "best"]
TURNS = 3  # of codes and adapter; the fourth changed the objective by less than 1 %
INPUT_FLOOR = 1e-4  # of the mean eigenvalue: inputs that calibration never saw must not get infinite weight
OUTPUT_FLOOR = 1e-2  # the same for outputs, whose gradients are noisier


class Fit(NamedTuple):
    """What stands for a linear layer."""

    quantised: QuantisedWeight
    factors: Factors | None
    """The adapter start; None where none was asked for, or where none was best."""


class _Root(NamedTuple):
    """A square root of a metric and its inverse, float64."""

    root: Tensor
    inverse: Tensor

    @classmethod
    def of(cls, moment: Tensor, floor: float) -> _Root:
        """Return the symmetric roots of a second moment, given whole or by its diagonal."""
        if moment.dim() == 1:
            values = moment.double() + floor * moment.double().mean().clamp_min(1e-12)
            return cls(values.sqrt().diag(), values.rsqrt().diag())
        values, basis = torch.linalg.eigh(moment.double())
        values = values.clamp_min(0) + floor * moment.double().diagonal().mean().clamp_min(1e-12)
        return cls(basis * values.sqrt() @ basis.T, basis * values.rsqrt() @ basis.T)

    @classmethod
    def plain(cls, size: int, like: Tensor) -> _Root:
        """Return the roots of a metric in which everything counts alike."""
        eye = torch.eye(size, dtype=torch.float64, device=like.device)
        return cls(eye, eye)


class Metric(NamedTuple):
    """What a weight error costs: tr(G E H Eᵀ)."""

    outputs: _Root
    inputs: _Root

    @classmethod
    def of(cls, like_OI: Tensor, second_moment_II: Tensor | None, outputs_OO: Tensor | None = None) -> Metric:
        """Return the metric of a layer; parts that are not known count alike."""
        rows, columns = like_OI.shape
        left = _Root.plain(rows, like_OI) if outputs_OO is None else _Root.of(outputs_OO, OUTPUT_FLOOR)
        right = _Root.plain(columns, like_OI) if second_moment_II is None else _Root.of(second_moment_II, INPUT_FLOOR)
        return cls(left, right)

    def correction(self, error_OI: Tensor, rank: int, joint_rank: int = 0) -> tuple[Factors, float]:
        """Return the best rank-r correction of an error, and what `joint_rank` of its columns leave uncorrected."""
        u, s, vh = torch.linalg.svd(self.outputs.root @ error_OI.double() @ self.inputs.root, full_matrices=False)
        half = s[:rank].sqrt()
        a = half[:, None] * vh[:rank] @ self.inputs.inverse
        b = self.outputs.inverse @ (u[:, :rank] * half)
        return Factors(a.float(), b.float()), float(s[joint_rank:].square().sum())


def best_start(error_OI: Tensor, candidates: Mapping[str, Factors | None], fresh: Metric, rank: int) -> str:
    """Return which correction leaves least of an error in the metric of rows that none of them was made from.

    Args:
        error_OI: full-precision minus quantised weight.
        candidates: corrections by name; None corrects nothing.
        fresh: the metric of held-out rows.
        rank: columns of a correction that count.
    """

    def left(factors: Factors | None) -> float:
        rest = error_OI if factors is None else error_OI - factors.b_OR[:, :rank] @ factors.a_RI[:rank]
        return float((fresh.outputs.root @ rest.double() @ fresh.inputs.root).square().sum())

    return min(candidates, key=lambda name: left(candidates[name]))


def fit_layer(
    weight_OI: Tensor,
    spec: QuantSpec,
    method: Method,
    second_moment_II: Tensor | None = None,
    outputs_OO: Tensor | None = None,
    start_rank: int = 0,
    joint_rank: int = 0,
    start_method: StartMethod = "qera",
    fresh_II: Tensor | None = None,
) -> Fit:
    """Quantise one layer and find its adapter start.

    Args:
        weight_OI: the weight to come near.
        spec: how to store it.
        method: how codes and scales are chosen.
        second_moment_II: of the layer's inputs.
        outputs_OO: Fisher information of its outputs, whole or [O].
        start_rank: columns of the adapter start to return; 0 for none.
        joint_rank: rank of the adapter that codes are chosen together with; 0: codes first.
        start_method: `qera`, in the metric given, `svd`, in the plain one, or `best`: of both and none at all, what
            leaves the least output error over held-out rows, at rank `joint_rank` or all columns.
        fresh_II: second moment of the layer's inputs over those rows, which `best` needs.

    Raises:
        ConfigError: an unknown start method, `best` without held-out rows, a joint rank without the start that
            belongs to it, and what `quantise_weight` refuses.
    """
    if start_method not in get_args(StartMethod):
        raise ConfigError(f"start_method: {start_method!r} is unknown; allowed: {', '.join(get_args(StartMethod))}")
    if joint_rank > start_rank:
        raise ConfigError(f"joint_rank: {joint_rank} is more than the {start_rank} columns of --start-rank")
    if start_method == "best" and start_rank and fresh_II is None:
        raise ConfigError("start_method: best compares on held-out calibration rows; give --dataset or --kd-cache-dir")
    most = min(weight_OI.shape)
    start_rank, joint_rank = min(start_rank, most), min(joint_rank, most)
    weight = weight_OI.float()
    quantised = quantise_weight(weight, spec, method, second_moment_II)
    if not start_rank:
        return Fit(quantised, None)
    known = start_method != "svd"
    metric = Metric.of(weight, second_moment_II if known else None, outputs_OO if known else None)
    factors, left = metric.correction(weight - quantised.dense(spec), start_rank, joint_rank)
    best, last = Fit(quantised, factors), factors
    for _ in range(TURNS if joint_rank else 0):
        target = weight - last.b_OR[:, :joint_rank] @ last.a_RI[:joint_rank]
        quantised = quantise_weight(target, spec, method, second_moment_II)
        last, now = metric.correction(weight - quantised.dense(spec), start_rank, joint_rank)
        if now < left:
            best, left = Fit(quantised, last), now
    if fresh_II is None or start_method != "best":
        return best
    error = weight - best.quantised.dense(spec)
    plain = Metric.of(weight, None).correction(error, start_rank)[0]
    candidates = {"qera": best.factors, "svd": plain, "zero": None}
    fresh = Metric.of(weight, fresh_II, outputs_OO)
    return best._replace(factors=candidates[best_start(error, candidates, fresh, joint_rank or start_rank)])
