"""From a full-precision weight to codes and scales: five methods, named by what each minimises.

* `absmax`: scale from the largest weight, round to nearest. What most tools mean by "quantised"; the yardstick.
* `mse`: the clip with the least squared weight error, each input weighted by its second moment where text is given.
* `awq`: the clip that disturbs the outputs least, group by group (AWQ's clip search), round to nearest.
* `gptq`: error-compensated rounding, so that the *output* changes least.
* `descent`: from there, coordinate descent over the codes alternates with least-squares scales.

`refine_rows` goes on in both metrics: an error in one output may cancel what another one does. To second order a weight
error E costs the predictions tr(G E H Eᵀ), with G the Fisher information of outputs and H the second moment of inputs
(`layers.calibrate.fisher`). Solvers that know H alone take G for diagonal; it is far from that, and rows that are
fitted to each other's errors cost less. Given the other rows, what row i costs is G_ii times the output error towards
another target, Ŵ_i + (G E)_i / G_ii. So the one-sided solvers do the work. Row after row would be too little of it for
an accelerator, all rows at once overshoot: every eighth row is moved together, and a layer keeps what lowers its cost.

Sources: AWQ (arXiv 2306.00978), the clip search; YAQA (2505.22988), the two-sided objective; `gptq` for the others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from qat_lora.errors import ConfigError
from qat_lora.quant import scales as scaling
from qat_lora.quant.codes import code_values, decode, first_value, nearest
from qat_lora.quant.gptq import BLOCK, Curvature, Grid, Steps, descend, gptq, refit_parts, refit_scales, slope_of
from qat_lora.quant.scales import Cost, Scales, multiples, stored
from qat_lora.quant.spec import SUPER, QuantSpec
from qat_lora.runtime.loop import Number, Tensors, part, rows_at_once, whole_parts
from qat_lora.runtime.xla.runtime import xla_mark_step

Method = Literal["absmax", "mse", "awq", "gptq", "descent"]
METHODS: tuple[str, ...] = get_args(Method)
COMPENSATED = ("gptq", "descent")
NEED_TEXT = ("awq", *COMPENSATED)
LARGEST = 32_000.0  # weight whose scale fits float16 with every code book and scale search
PART = 2**22  # weights that a host solves for at a time: what a layer takes beside its curvature is some times as much
ROUNDS = 4  # of scale refits and a sweep of descent


class QuantizedWeight(NamedTuple):
    """A weight as codes and scales."""

    codes_OI: Tensor  # uint8 indices into `values`
    values: Tensor  # float32 code book
    scales: Scales  # float16 numbers held as float32
    whole: Scales = ()  # whole numbers [rows, G] as float32, by the names in `QuantSpec.whole`

    def changed(self, change: Callable[..., Tensor], *others: QuantizedWeight, fixed: int = 0) -> QuantizedWeight:
        """Return what `change` makes, tensor by tensor, of this and others; code book and last `fixed` scales stay."""
        given, own = (self, *others), len(self.scales) - fixed
        scales = (*map(change, *(x.scales[:own] for x in given)), *self.scales[own:])
        whole = tuple(map(change, *(x.whole for x in given)))
        return self._replace(codes_OI=change(*(x.codes_OI for x in given)), scales=scales, whole=whole)

    def to(self, device: torch.device) -> QuantizedWeight:
        """Return the same on another device."""
        if self.codes_OI.device == device:
            return self
        xla_mark_step()  # one graph for all that is read
        return self.changed(lambda x: x.to(device))._replace(values=self.values.to(device))

    def split(self, layers: int) -> list[QuantizedWeight]:
        """Return the rows in parts, of one layer each where they are several; scales must be by channel or group."""
        parts = range(len(self.codes_OI.chunk(layers)))
        return [self.changed(lambda x, i=i: x.chunk(layers)[i]) for i in parts] if layers > 1 else [self]

    @classmethod
    def joined(cls, layers: Sequence[QuantizedWeight]) -> QuantizedWeight:
        """Return what `split` took apart."""
        return layers[0].changed(lambda *parts: torch.cat(parts), *layers[1:]) if len(layers) > 1 else layers[0]

    def meaning(self, spec: QuantSpec) -> scaling.Meaning:
        """Return what code values stand for."""
        return scaling.meaning(spec, self.scales, self.whole, *self.codes_OI.shape)

    def grid(self, spec: QuantSpec, dtype: torch.dtype = torch.float64) -> Grid:
        """Return the meaning of the codes, a minimum as a zero point."""
        scale, zero, minimum = self.meaning(spec)
        scale, shape = scaling.divisor(scale, spec).to(dtype), self.codes_OI.shape
        zero = zero if minimum is None else minimum.to(dtype) / scale
        first = first_value(spec)
        moved = (0.0 if zero is None else zero.to(dtype).expand(shape)) - (first or 0.0)
        return Grid(self.values.to(dtype) - (first or 0.0), scale.expand(shape), moved, first is not None)

    def dense(self, spec: QuantSpec) -> Tensor:
        """Return what the codes stand for, float32 [O, I], computed as `QuantLinear` does."""
        return self.meaning(spec).of(decode(self.codes_OI, self.values))


def quantize_weight(
    weight_OI: Tensor, spec: QuantSpec, method: Method, moment: Tensor | Curvature | None = None, rounds: int = ROUNDS
) -> QuantizedWeight:
    """Quantise one weight matrix of any float type.

    `moment` is the mean of x xᵀ over calibration tokens [I, I], or its curvature where it serves several calls, or
    several layers; needed by `awq`, `gptq` and `descent`, used for importance by `mse`. `rounds` are of `descent`.

    ConfigError: unknown method, one that lacks its calibration, or a weight that is not finite or too large.
    """
    if method not in METHODS:
        raise ConfigError(f"init: {method!r} is unknown; allowed: {', '.join(METHODS)}")
    largest = float(weight_OI.abs().max())
    if not math.isfinite(largest):
        raise ConfigError("weight: holds NaN or infinite entries; check the checkpoint")
    if largest > LARGEST:
        raise ConfigError(f"weight: holds entries above {LARGEST:g}, whose scales float16 cannot hold")
    if method in NEED_TEXT and moment is None:
        raise ConfigError(f"init: {method} needs calibration text; give --dataset, or choose mse or absmax")
    spec.check_width("weight", weight_OI.shape[1])
    weight = weight_OI.float()
    curvature = Curvature(moment) if isinstance(moment, Tensor) else moment
    if method in COMPENSATED:
        assert curvature is not None
        start = _compensated(weight, spec, curvature)
        return start if method == "gptq" else refine(weight, spec, start, curvature, rounds)
    if method == "absmax":
        return _rounded(weight, spec)
    if method == "awq":
        assert curvature is not None
        moment_II = curvature.second_moment_LII[0].float()
        return _rounded(weight, spec, moment_II.diagonal(), scaling.output_cost(weight, spec, moment_II))
    importance = None if curvature is None else _importance(curvature, weight)
    return _rounded(weight, spec, importance, scaling.importance_cost(weight, spec, importance))


def refine(
    weight_RI: Tensor, spec: QuantSpec, start: QuantizedWeight, curvature: Curvature, rounds: int = ROUNDS
) -> QuantizedWeight:
    """Return a start after rounds of refitted scales and descent; output errors never rise, low-rank scales stay."""
    if (parts := _parts(weight_RI, spec, curvature)) > 1:
        pairs = zip(weight_RI.chunk(parts), start.split(parts), strict=True)
        return QuantizedWeight.joined([refine(weight, spec, own, curvature, rounds) for weight, own in pairs])
    moment = curvature.damped_LII.float()
    slope = slope_of(weight_RI.float(), start.grid(spec, torch.float32).dense(start.codes_OI), moment)
    return _refined(start, slope, spec, moment, rounds)[0]


def _refined(
    now: QuantizedWeight, slope_RI: Tensor, spec: QuantSpec, moment: Tensor, rounds: int
) -> tuple[QuantizedWeight, Tensor, Tensor]:
    """Return a weight after rounds, what it changed by, and the slope there, from `slope_of` what it shall be."""
    grid = now.grid(spec, torch.float32)
    levels = () if spec.sharing == "lowrank" else ("scales", "whole") if spec.step_bits else ("scales",)
    dense = start = grid.dense(now.codes_OI)
    for _ in range(rounds):
        for level in levels:
            before, now = dense, _refitted(now, spec, level, slope_RI, moment)
            grid = now.grid(spec, torch.float32)
            dense = grid.dense(now.codes_OI)
            slope_RI = slope_RI + slope_of(before, dense, moment)
        codes, slope_RI = descend(slope_RI, moment, grid, now.codes_OI)
        now, dense = now._replace(codes_OI=codes), grid.dense(codes)
    return now, dense - start, slope_RI


def _parts(weight_RI: Tensor, spec: QuantSpec, curvature: Curvature) -> int:
    """Return in how many parts a host solves for the rows of a layer, which share nothing but the curvature."""
    apart = spec.sharing in ("group", "channel") and len(curvature.diagonal_LI) == 1
    return -(-len(weight_RI) // rows_at_once(weight_RI, PART)) if apart else 1


def _refitted(now: QuantizedWeight, spec: QuantSpec, level: str, slope: Tensor, moment: Tensor) -> QuantizedWeight:
    """Return a weight whose scales, or with `whole` the multiples of a K-quant, are refitted to its codes."""
    if spec.step_bits is None:
        grid = now.grid(spec, torch.float32)
        return now._replace(scales=(refit_scales(slope, moment, grid, now.codes_OI, now.scales[0], spec),))
    assert spec.group_size is not None
    shape, q = now.codes_OI.shape, decode(now.codes_OI, now.values)
    if level == "scales":
        numbers, others, width, steps = now.scales, now.whole, spec.group_size, Steps(SUPER, stored, stored, (0.0,))
    else:
        numbers, others, width = now.whole, now.scales, SUPER
        steps = Steps(spec.group_size, partial(multiples, spec, 1), partial(multiples, spec, 0), (-0.5, 0.5))
    units = [scaling.expand((x,), width, *shape).expand(shape) for x in others]
    bases = [q * units[0], -units[1] if len(units) > 1 else torch.zeros_like(q)]
    both = [numbers[0], numbers[-1]]  # without minima the second has no effect
    found = tuple(refit_parts(slope, moment, bases, both, steps)[: len(numbers)])
    return now._replace(scales=found) if level == "scales" else now._replace(whole=found)


def _importance(curvature: Curvature, weight_RI: Tensor) -> Tensor:
    """Return the mean square of every weight's input, or what broadcasts to it, float32."""
    importance_LI = curvature.diagonal_LI.float()
    layers = len(importance_LI)
    return importance_LI if layers == 1 else importance_LI.repeat_interleave(len(weight_RI) // layers, 0)


def _scales(weight_RI: Tensor, spec: QuantSpec, importance: Tensor | None, cost: Cost | None) -> tuple[Scales, Scales]:
    """Return stored scales and whole numbers: float16 ones, so that codes are chosen for what will be loaded."""
    if spec.sharing == "lowrank":
        return tuple(s.half().float() for s in scaling.low_rank_scales(weight_RI, spec, importance)), ()
    if spec.step_bits is not None:
        return scaling.step_scales(weight_RI, spec, cost)
    if spec.code == "asymmetric":
        scale, zeros = scaling.range_scale(weight_RI, spec, cost)
        return (scale,), (zeros,)
    scale = scaling.absmax_scale(weight_RI, spec) if cost is None else scaling.clip_scale(weight_RI, spec, cost)
    return (scale.half().float(),), ()


def _rounded(
    weight_RI: Tensor, spec: QuantSpec, importance: Tensor | None = None, cost: Cost | None = None
) -> QuantizedWeight:
    """Return the codes nearest to a weight, or to some groups' columns, with the scales that cost least."""
    values, (scales, whole) = code_values(spec).to(weight_RI.device), _scales(weight_RI, spec, importance, cost)
    scale, zero, minimum = scaling.meaning(spec, scales, whole, *weight_RI.shape)
    ratio = (weight_RI if minimum is None else weight_RI + minimum) / scaling.divisor(scale, spec)
    return QuantizedWeight(nearest(ratio if zero is None else ratio + zero, values, spec)[1], values, scales, whole)


def _compensated(weight_RI: Tensor, spec: QuantSpec, curvature: Curvature) -> QuantizedWeight:
    """Return the GPTQ start; the scale of a group is chosen from its weights as compensation has left them."""
    if (parts := _parts(weight_RI, spec, curvature)) > 1:
        return QuantizedWeight.joined([_compensated(part, spec, curvature) for part in weight_RI.chunk(parts)])
    importance, root = _importance(curvature, weight_RI), curvature.inverse_root_LII
    wide = weight_RI.to(root.dtype)
    if spec.sharing != "group":  # scales that span columns are fixed before rounding begins
        whole = _rounded(weight_RI, spec, importance, scaling.importance_cost(weight_RI, spec, importance))
        grid = whole.grid(spec, root.dtype)

        def fixed(number: Number, _: Tensor, given: Tensors) -> tuple[Grid, Tensors]:
            return grid.of(given).by_column(number, BLOCK), []

        return whole._replace(codes_OI=gptq(wide, root, BLOCK, fixed, grid.whole(BLOCK).parts())[0])
    assert spec.group_size is not None
    size = SUPER if spec.step_bits else spec.group_size  # the groups of a K-quant get their scales together

    def chosen(number: Number, left_RC: Tensor, given: Tensors) -> tuple[Grid, Tensors]:
        left, importance = left_RC.float(), part(given[0], number, size, 1)
        found = _rounded(left, spec, importance, scaling.importance_cost(left, spec, importance))
        return found.grid(spec, root.dtype).by_column(0, left.shape[1]), [*found.scales, *found.whole]

    codes, kept = gptq(wide, root, size, chosen, [whole_parts(importance, size, 1)])
    numbers = tuple(x.transpose(0, 1).flatten(1) for x in kept)  # by block first
    end = len(numbers) - len(spec.whole)
    return QuantizedWeight(codes, code_values(spec).to(weight_RI.device), numbers[:end], numbers[end:])


GROUPS = 8  # of rows that move together: with 4, more of their steps are refused; 32 gain no more
TWO_SIDED_ROUNDS = 10  # over all rows


def refine_rows(
    weight_RI: Tensor, spec: QuantSpec, start: QuantizedWeight, curvature: Curvature, outputs_LOO: Tensor, rounds: int
) -> QuantizedWeight:
    """Return a start after rounds of two-sided descent; tr(G E H Eᵀ) never rises in any layer.

    Layers' rows lie one under the other; `curvature` is H, `outputs_LOO` G, float32. Scales of whole tensors stay.
    """
    if spec.sharing == "tensor":
        return start
    layers, rows = outputs_LOO.shape[:2]
    now, moment = start, curvature.damped_LII.float()
    slope_LOI = slope_of(weight_RI.float(), start.dense(spec), moment).unflatten(0, (layers, -1))
    # Numbers of rows are data, so that all groups are one program where programs are compiled.
    groups = [torch.arange(first, rows, GROUPS).to(slope_LOI.device) for first in range(min(GROUPS, rows))]
    for group in groups * rounds:
        now, slope_LOI = _moved(now, slope_LOI, group, spec, moment, outputs_LOO)
    return now


def _moved(
    now: QuantizedWeight, slope_LOI: Tensor, group: Tensor, spec: QuantSpec, moment_LII: Tensor, outputs_LOO: Tensor
) -> tuple[QuantizedWeight, Tensor]:
    """Return weights and slopes E H after a step of a group of rows, by G E H; where a cost would rise, as given."""
    layers, coupling_LGO = len(slope_LOI), outputs_LOO.index_select(1, group)
    own_LGG, pull_LGI = coupling_LGO.index_select(2, group), coupling_LGO @ slope_LOI
    fixed = int(spec.sharing == "lowrank")  # whose second factor has no rows of these
    before = now.changed(lambda x: x.unflatten(0, (layers, -1)).index_select(1, group).flatten(0, 1), fixed=fixed)
    start_LGI = pull_LGI / own_LGG.diagonal(dim1=1, dim2=2)[..., None]
    after, change, end = _refined(before, start_LGI.flatten(0, 1), spec, moment_LII, 1)
    change_LGI, fall_LGI = change.unflatten(0, (layers, -1)), start_LGI - end.unflatten(0, (layers, -1))
    falls_L11 = (((own_LGG @ change_LGI) * fall_LGI - 2 * pull_LGI * change_LGI).sum((1, 2)) < 0)[:, None, None]

    def put(x: Tensor, *ways: Tensor) -> Tensor:
        new, old = (part.unflatten(0, (layers, -1)) for part in ways)
        return x.unflatten(0, (layers, -1)).index_copy(1, group, torch.where(falls_L11, new, old)).flatten(0, 1)

    left_LOI = slope_LOI.index_add_(1, group, torch.where(falls_L11, -fall_LGI, 0.0))
    return now.changed(put, after, before, fixed=fixed), left_LOI
