"""What formats and ranks cost a model at hand, measured, and the preset that spends a target's bytes on them best.

A layer in a format costs tr(G E H Eᵀ) / 2 nats to second order, with G and H as in `layers.calibrate.fisher` and E the
error of GPTQ rounding, which is cheap and ranks formats as the final descent does. What an adapter closes of it is read
off the spectrum of G^½ E H^½, for all ranks at once, and corrected by what codes chosen beside an adapter gain: without
that, ranks went to layers that need few. An LM head, with a tied embedding, has no such G: it is put into the model,
format by format, and the KL of some rows is taken. The choice becomes an ordinary preset, with a rule for each kind of
layer and format, and adapter starts whose columns are the ranks; nothing later knows of it. With `--joint-rank 0` no
layer has a rank, and the starts that are stored are those of any preset, which count nothing.
"""

import contextlib
import copy
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from qat_lora.errors import ConfigError
from qat_lora.evaluate.score import measure
from qat_lora.export.forms import adapter_bytes, formats, layer_bytes, other_bytes
from qat_lora.layers.calibrate.fit import Metric
from qat_lora.layers.calibrate.quantize import Work, second_moments
from qat_lora.layers.calibrate.sequential import by_block, capture_calls, run_block
from qat_lora.layers.convert import LM_HEAD, check_reach, linear_layers, put_quantized
from qat_lora.layers.experts import has_split_experts
from qat_lora.layers.lora import of_one_input
from qat_lora.layers.quant_linear import QuantLinear, embedding_of
from qat_lora.models.load import CausalLM
from qat_lora.options import QuantizeOptions
from qat_lora.quant.gptq import Curvature
from qat_lora.quant.initialize import NEED_TEXT, quantize_weight
from qat_lora.quant.presets import Preset, allocate, preset
from qat_lora.quant.spec import QuantSpec
from qat_lora.runtime.base import Runtime
from qat_lora.types import Batch

HEAD_ROWS = 16  # of calibration, on which tables are measured
MEASURED_FLOOR = (
    0.1  # of outputs' mean: a metric that codes are chosen in may be flatter than one that costs are read in
)
JOINT_RANKS, JOINT_TURNS = (4, 16, 64), 2  # ranks beside which codes are chosen, and turns of codes and adapter


class Choices(NamedTuple):
    """What the layers of a model may be, in an engine's files; vLLM fuses those of one input, so they are alike."""

    points: list[tuple[tuple[str, ...], QuantSpec, int]]  # layers that are alike, each format of theirs, at all ranks
    bytes_P: np.ndarray
    other_bytes: int  # of all other tensors
    target_bytes: int  # what all shall take together
    range_text: str  # the same with what is allowed, a line for people


def choices(options: QuantizeOptions, module: Any, itemsize: int) -> Choices:
    """Return what the layers of a full-precision model may be; `itemsize`: bytes of a number in its files.

    ModelError: as `check_reach`. ConfigError: a setting that the target decides, a target that cannot be met.
    """
    target, engine = options.target, options.target.engine
    usual = {"override": (), "quantize_head": None, "metric": "fisher"}
    for name, value in (usual if options.init in NEED_TEXT else {"init": "descent"}).items():
        if getattr(options, name) != value:
            raise ConfigError(f"{name}: {target.name} decides by what it measures; leave it out (--keep is allowed)")
    if has_split_experts(module):
        raise ConfigError("target_size: not for mixtures, whose experts share a format; give --preset")
    specs = {name: formats(engine, name, module) for name in check_reach(module, preset("q8_0", options.keep))}
    for name, lm_head in linear_layers(module, lm_head=True) if engine != "vllm" else ():  # which reads it dense
        with contextlib.suppress(ConfigError):  # tied to an embedding that does more than look up
            embedding_of(module, lm_head)
            if not any(re.search(pattern, name) for pattern in options.keep):
                specs[name] = formats(engine, name, module)
    points, sizes = list[tuple[tuple[str, ...], QuantSpec, int]](), list[int]()
    least = most = others = other_bytes(engine, module, specs, itemsize)
    alike = of_one_input(specs) if engine == "vllm" else []
    most_rank = options.start_rank if options.joint_rank != 0 else 0  # codes that stand alone
    for names in [*alike, *((name,) for name in specs if not any(name in names for names in alike))]:
        shapes = [module.get_submodule(name).weight.shape for name in names]
        first = len(points)
        for spec in specs[names[0]]:
            highest = 0 if LM_HEAD.search(names[0]) else min(most_rank, *map(min, shapes))
            for rank in range(1 + highest):
                points.append((names, spec, rank))
                sizes += [sum(layer_bytes(engine, spec, o, i) + adapter_bytes(engine, o, i, rank) for o, i in shapes)]
        least, most = least + min(sizes[first:]), most + max(sizes[first:])
    wanted = target.bytes(sum(p.numel() for p in module.parameters()))
    low, high = math.ceil(least / 1e3) / 1e3, math.floor(most / 1e3) / 1e3
    beside = "adapters of up to --start-rank included" if most_rank else "without adapters"
    span = f"--for {engine} allows {low:.3f}MB to {high:.3f}MB, {beside}"
    if not least <= wanted <= most:
        raise ConfigError(f"target_size: {target.name} ({wanted / 1e6:.3f} MB) cannot be met; {span}")
    return Choices(points, np.array(sizes), others, wanted, f"\ntarget   {target.name} ({wanted / 1e6:.3f} MB); {span}")


@torch.no_grad()
def measured_costs(
    options: QuantizeOptions,
    model: CausalLM,
    found: Choices,
    batches: Sequence[Batch],
    sensitivity: Mapping[str, Tensor],
    runtime: Runtime,
    work: Work,
) -> np.ndarray:
    """Return what every point costs, in nats."""
    most = {name: rank for names, _, rank in found.points for name in names}  # the last is the highest
    few, costs = batches[: -(-HEAD_ROWS // len(batches[0]["input_ids"]))], dict[str, Tensor]()
    ids, places = ("input_ids", "document_ids"), by_block(most) if options.calibrate_on == "student" else ({}, [*most])
    moments = _moments(model.module, *places, batches, lambda x: model.hidden(*map(x.get, ids)))
    for name, moment in tqdm(moments, "formats and ranks", len(most), unit="layer", disable=options.run.quiet):
        kept = work.take(f"allocation-{name}")
        costs[name] = torch.empty(0) if kept is None else kept[0]["costs"]
        linear, curvature, shares = model.module.get_submodule(name), Curvature(moment), None
        for spec in dict.fromkeys(spec for names, spec, _ in found.points if name in names and kept is None):
            codes = quantize_weight(linear.weight, spec, "gptq", curvature)
            if name in sensitivity:
                outputs_OO = sensitivity[name].to(linear.weight.device)
                metric = Metric.of(linear.weight, moment, outputs_OO, MEASURED_FLOOR)
                error = linear.weight.float() - codes.dense(spec)
                cost = metric.costs(error, most[name]).cpu() / 2
                if shares is None and options.rank_of_codes:
                    shares = _shares(linear.weight.float(), spec, curvature, metric, error)
                cost *= 1.0 if shares is None else shares[: len(cost)]
            else:
                cost = _kl_with(model, name, QuantLinear.from_linear(linear, spec, codes), few, runtime)
            costs[name] = torch.cat([costs[name], cost])
        if kept is None:
            work.keep(f"allocation-{name}", {"costs": costs[name]}, {})
    alike = dict.fromkeys(names for names, _, _ in found.points)
    return torch.cat([torch.stack([costs[name] for name in names]).sum(0) for names in alike]).double().numpy()


def _moments(
    module: nn.Module, blocks: Mapping[str, list[str]], outside: list[str], batches: Any, forward: Any
) -> Iterator[tuple[str, Tensor]]:
    """Yield the second moments of layers' inputs, block by block: together they would take more than the model."""
    stack = [module.get_submodule(name) for name in blocks]
    states, calls = capture_calls(stack, batches, forward) if stack else ([], [])
    for block, of_block, layers in zip(stack, calls, blocks.values(), strict=True):
        inputs, states = list(zip(states, of_block, strict=True)), []
        through = partial(lambda run, put, given: put(run(*given)), partial(run_block, block), states.append)
        yield from second_moments(module, layers, inputs, through).items()
    if outside:
        yield from second_moments(module, outside, batches, forward).items()


def _shares(weight_OI: Tensor, spec: QuantSpec, curvature: Curvature, metric: Metric, error_OI: Tensor) -> Tensor:
    """Return the shares of GPTQ's costs, by rank, that are left if codes are chosen in G too and beside the adapter."""
    alone_R, left, most = metric.costs(error_OI, max(JOINT_RANKS)), {0: 1.0}, min(weight_OI.shape)
    for rank in (rank for rank in JOINT_RANKS if rank < most):
        beside = error_OI
        for _ in range(JOINT_TURNS):
            a_RI, b_OR = metric.correction(beside, rank)[0]
            beside = weight_OI - quantize_weight(weight_OI - b_OR @ a_RI, spec, "gptq", curvature).dense(spec)
        left[rank] = min(1.0, float(metric.costs(beside, rank)[-1] / alone_R[rank].clamp_min(1e-30)))
    root = metric.outputs.factor  # rounding in G leaves what is on its diagonal, as Babai's nearest plane does
    in_outputs = float(root.diagonal().norm() / root.norm()) ** 2 if root.dim() == 2 else 1.0
    return torch.from_numpy(in_outputs * np.interp(np.log1p(range(1 + most)), np.log1p([*left]), [*left.values()]))


def _kl_with(model: CausalLM, name: str, layer: QuantLinear, batches: Sequence[Batch], runtime: Runtime) -> Tensor:
    """Return the KL, nats a token, of a model in which one layer alone is quantised, float64 [1]."""
    shared = {id(tensor): tensor for tensor in (*model.module.parameters(), *model.module.buffers())}
    module = copy.deepcopy(model.module, shared)
    put_quantized(module, name, layer)
    student = {"student": replace(model, module=module)}
    found = measure(model, student, batches, True, runtime.mark_step, piece_bytes=runtime.piece_bytes)
    return torch.tensor([found["student"].figures["kl"]], dtype=torch.float64)


def allocated(options: QuantizeOptions, found: Choices, costs_P: np.ndarray) -> tuple[Preset, dict[str, Any]]:
    """Return the cheapest way to store a student within its target, and facts: `adapter_ranks` by layer, `bytes`."""
    firsts = [names[0] for names, _, _ in found.points]
    picked = allocate(firsts, found.bytes_P, costs_P, found.target_bytes - found.other_bytes)
    lm_head, groups = None, dict[tuple[str, str, QuantSpec], list[str]]()
    points = {name: found.points[i] for i in picked for name in found.points[i][0]}
    for name, (_, spec, _) in points.items():
        before, number, after = re.split(r"(\d+|$)", name, maxsplit=1)
        if LM_HEAD.search(name):
            lm_head = spec
        else:
            groups.setdefault((re.escape(before), re.escape(after), spec), []).append(number)
    rules = [(f"^{before}({'|'.join(numbers)}){after}$", spec) for (before, after, spec), numbers in groups.items()]
    kept: list[tuple[str, QuantSpec | None]] = [(pattern, None) for pattern in options.keep]
    told: dict[str, Any] = {"target": options.target.name, "engine": options.target.engine}
    told |= {"bytes": found.other_bytes + int(found.bytes_P[picked].sum())}
    told |= {"predicted_kl": float(costs_P[picked].sum()), "adapter_ranks": {n: p[2] for n, p in points.items()}}
    return Preset(options.target.name, (*kept, *rules), lm_head), told
