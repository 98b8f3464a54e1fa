"""Descent in the cost of errors to the predictions: an error in one output may cancel what another one does.

To second order a weight error E costs the predictions tr(G E H Eᵀ), with G the Fisher information of outputs and H the
second moment of inputs (`layers.calibrate.fisher`). Solvers that know H alone (`gptq`) take G for diagonal, and then
every row is a problem of its own. G is far from diagonal: rows that are fitted to each other's errors cost less.

Given the other rows, what row i costs is G_ii times the output error towards another target, Ŵ_i + (G E)_i / G_ii.
So the one-sided solvers do the work. Row after row would be too little of it for an accelerator, all rows at once
overshoot: every eighth row is moved together, as if these were not coupled, towards targets from the errors of all.
A layer keeps what lowers its cost. Bounds of the coupling (its row sums, its largest eigenvalue) need no such check
and gain less than half; rounding that compensates rows as GPTQ does columns ends where descent ends without it.

Source: the two-sided objective, YAQA (arXiv 2505.22988), which rounds with feedback from both sides; descent, ours.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from qat_lora.quant.gptq import Curvature
from qat_lora.quant.initialize import QuantizedWeight, refine
from qat_lora.quant.spec import QuantSpec

GROUPS = 8  # of rows that move together: with 4, more of their steps are refused; 32 gain no more
TWO_SIDED_ROUNDS = 6  # over all rows


def refine_rows(
    weight_RI: Tensor,
    spec: QuantSpec,
    start: QuantizedWeight,
    curvature: Curvature,
    outputs_LOO: Tensor,
    rounds: int = TWO_SIDED_ROUNDS,
) -> QuantizedWeight:
    """Return a start after rounds of two-sided descent; tr(G E H Eᵀ) never rises in any layer.

    Layers' rows lie one under the other; `curvature` is H, `outputs_LOO` G, float32, positive definite. A scale that a
    whole tensor shares belongs to no row: such weights stay as they are.
    """
    if spec.sharing == "tensor":
        return start
    layers, rows = outputs_LOO.shape[:2]
    weight_LOI, now = weight_RI.float().unflatten(0, (layers, -1)), start
    error_LOI = weight_LOI - now.dense(spec).unflatten(0, (layers, -1))
    # Numbers of rows are data, so that all groups are one program where programs are compiled.
    groups = [torch.arange(first, rows, GROUPS).to(error_LOI.device) for first in range(min(GROUPS, rows))]
    for group in groups * rounds:
        now, error_LOI = _moved(now, error_LOI, group, spec, curvature, outputs_LOO)
    return now


def _moved(
    now: QuantizedWeight, error_LOI: Tensor, group: Tensor, spec: QuantSpec, curvature: Curvature, outputs_LOO: Tensor
) -> tuple[QuantizedWeight, Tensor]:
    """Return weights and their errors after a step of one group of rows; in layers whose cost would rise, as given."""
    layers, coupling_LGO = len(error_LOI), outputs_LOO.index_select(1, group)
    own_LGG, pull_LGI = coupling_LGO.index_select(2, group), coupling_LGO @ error_LOI
    before = _by_rows(lambda x: x.unflatten(0, (layers, -1)).index_select(1, group).flatten(0, 1), spec, now)
    dense = before.dense(spec)
    towards_LGI = pull_LGI / own_LGG.diagonal(dim1=1, dim2=2)[..., None]
    after = refine(dense + towards_LGI.flatten(0, 1), spec, before, curvature, 1)
    change_LGI = (after.dense(spec) - dense).unflatten(0, (layers, -1))
    raised_L = ((own_LGG @ change_LGI - 2 * pull_LGI) * (change_LGI @ curvature.narrow_LII)).sum((1, 2))
    falls_L11 = (raised_L < 0)[:, None, None]

    def put(x: Tensor, *ways: Tensor) -> Tensor:
        new, old = (part.unflatten(0, (layers, -1)) for part in ways)
        return x.unflatten(0, (layers, -1)).index_copy(1, group, torch.where(falls_L11, new, old)).flatten(0, 1)

    left_LOI = error_LOI.index_add(1, group, torch.where(falls_L11, -change_LGI, 0.0))
    return _by_rows(put, spec, now, after, before), left_LOI


def _by_rows(change: Callable[..., Tensor], spec: QuantSpec, *given: QuantizedWeight) -> QuantizedWeight:
    """Return a weight with the tensors that have rows made of those of others."""
    shared = given[0].scales[1:] if spec.sharing == "lowrank" else ()
    rows = [x.scales[: len(x.scales) - len(shared)] for x in given]
    return QuantizedWeight(
        change(*(x.codes_OI for x in given)),
        given[0].values,
        (*map(change, *rows), *shared),
        tuple(map(change, *(x.whole for x in given))),
    )
