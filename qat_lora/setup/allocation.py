"""What formats and ranks cost a model at hand, measured, and the preset that spends a target's bytes on them best.

A layer in a format costs tr(G E H Eᵀ) / 2 nats to second order, with G and H as in `layers.calibrate.fisher` and E the
error of GPTQ rounding, which is cheap and ranks formats as the final descent does. What an adapter closes of it is read
off the spectrum of G^½ E H^½, for all ranks at once. The table of an LM head, with a tied embedding, has no such G: it
is put into the model, format by format, and the KL of some rows is taken.

What is chosen becomes an ordinary preset, with a rule for each kind of layer and format, and adapter starts whose
columns are the ranks; nothing later knows of it.
"""

import contextlib
import copy
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from qat_lora.errors import ConfigError
from qat_lora.evaluate.score import measure
from qat_lora.export.engines import adapter_bytes, formats, layer_bytes, other_bytes
from qat_lora.layers.calibrate.finished import Work
from qat_lora.layers.calibrate.fisher import Sensitivity
from qat_lora.layers.calibrate.fit import Metric
from qat_lora.layers.calibrate.quantize import second_moments
from qat_lora.layers.convert import LM_HEAD, check_reach, linear_layers, put_quantized
from qat_lora.layers.experts import has_split_experts
from qat_lora.layers.quant_linear import QuantLinear
from qat_lora.layers.tied_embedding import embedding_of
from qat_lora.models.load import CausalLM
from qat_lora.options import QuantizeOptions
from qat_lora.quant.allocate import allocate, reachable
from qat_lora.quant.gptq import Curvature
from qat_lora.quant.initialize import COMPENSATED, quantize_weight
from qat_lora.quant.presets import Preset, preset
from qat_lora.quant.spec import QuantSpec
from qat_lora.runtime.base import Runtime
from qat_lora.types import Batch

HEAD_ROWS = 16  # of calibration, on which tables are measured


class Choices(NamedTuple):
    """What the layers of a model may be, in an engine's files."""

    points: list[tuple[str, QuantSpec, int]]
    """Layer, format and rank: every format of every layer at all ranks, in order."""
    layers_P: np.ndarray
    """Number of the layer of every point."""
    bytes_P: np.ndarray
    other_bytes: int
    """Of all other tensors."""
    target_bytes: int
    """What all shall take together."""
    range_text: str
    """The same with what is allowed, a line for people."""


def choices(options: QuantizeOptions, module: Any, itemsize: int) -> Choices:
    """Return what the layers of a full-precision model may be; `itemsize`: bytes of a number in its files.

    ModelError: as `check_reach`. ConfigError: a setting that a target does not leave open, rows that no block divides,
    a target that cannot be met.
    """
    target, engine = options.target, options.target.engine
    open_settings: dict[str, Any] = {
        "override": [()],
        "quantize_head": [None],
        "metric": ["fisher"],
        "init": COMPENSATED,
    }
    for name, allowed in open_settings.items():
        if getattr(options, name) not in allowed:
            raise ConfigError(f"{name}: {target.name} decides by what it measures; leave it out (--keep is allowed)")
    if has_split_experts(module):
        raise ConfigError("target_size: not for mixtures, whose experts share a format; give --preset")
    specs = {name: formats(engine, name, module) for name in check_reach(module, preset("q8_0", options.keep))}
    for name, lm_head in linear_layers(module, lm_head=True) if engine != "vllm" else ():  # which reads it dense
        with contextlib.suppress(ConfigError):  # tied to an embedding that does more than look up
            embedding_of(module, lm_head)
            if not any(re.search(pattern, name) for pattern in options.keep):
                specs[name] = formats(engine, name, module)
    points, numbers, sizes = [], [], []
    for number, (name, allowed) in enumerate(specs.items()):
        rows, columns = module.get_submodule(name).weight.shape
        for spec in allowed:
            for rank in range(1 + (0 if LM_HEAD.search(name) else min(options.start_rank, rows, columns))):
                points.append((name, spec, rank))
                numbers.append(number)
                sizes.append(layer_bytes(engine, spec, rows, columns) + adapter_bytes(engine, rows, columns, rank))
    found = np.array(numbers), np.array(sizes), other_bytes(engine, module, specs, itemsize)
    wanted = target.bytes(sum(p.numel() for p in module.parameters()))
    least, most = (found[2] + end for end in reachable(*found[:2]))
    low, high = math.ceil(least / 1e3) / 1e3, math.floor(most / 1e3) / 1e3
    span = f"--for {engine} allows {low:.3f}MB to {high:.3f}MB, adapters of up to --start-rank included"
    if not least <= wanted <= most:
        raise ConfigError(f"target_size: {target.name} ({wanted / 1e6:.3f} MB) cannot be met; {span}")
    return Choices(points, *found, wanted, f"\ntarget   {target.name} ({wanted / 1e6:.3f} MB); {span}")


@torch.no_grad()
def measured_costs(
    model: CausalLM,
    found: Choices,
    batches: Sequence[Batch],
    sensitivity: Mapping[str, Sensitivity],
    runtime: Runtime,
    work: Work,
) -> np.ndarray:
    """Return what every point costs, in nats."""
    most = {name: rank for name, _, rank in found.points}  # the last is the highest
    pieces = {name: kept[0]["costs"] for name in most if (kept := work.take(f"allocation-{name}"))}
    names = [name for name in most if name not in pieces]

    def forward(batch: Batch) -> Tensor:
        work.may_stop()
        return model.hidden(batch["input_ids"], batch["document_ids"])

    moments = second_moments(model.module, names, batches, forward, sensitivity) if names else {}
    few = batches[: -(-HEAD_ROWS // len(batches[0]["input_ids"]))]
    for name in tqdm(names, desc="formats and ranks", unit="layer", disable=None):
        work.may_stop()
        linear, curvature, parts = model.module.get_submodule(name), Curvature(moments[name]), list[Tensor]()
        weight = linear.weight.detach().float()
        for spec in dict.fromkeys(spec for layer, spec, _ in found.points if layer == name):
            codes = quantize_weight(weight, spec, "gptq", curvature)
            if name in sensitivity:
                metric = Metric.of(weight, moments[name], sensitivity[name].outputs_OO.to(weight.device))
                parts.append(metric.costs(weight - codes.dense(spec), most[name]).cpu() / 2)
            else:
                kl = _kl_with(model, name, QuantLinear.from_linear(linear, spec, codes), few, runtime)
                parts.append(torch.tensor([kl], dtype=torch.float64))
        pieces[name] = torch.cat(parts)
        work.keep(f"allocation-{name}", {"costs": pieces[name]}, {})
    return torch.cat([pieces[name] for name in most]).numpy()


def _kl_with(model: CausalLM, name: str, layer: QuantLinear, batches: Sequence[Batch], runtime: Runtime) -> float:
    """Return the KL, nats a token, of a model in which one layer alone is quantised."""
    shared = {id(tensor): tensor for tensor in (*model.module.parameters(), *model.module.buffers())}
    module = copy.deepcopy(model.module, shared)
    put_quantized(module, name, layer)
    student = {"student": replace(model, module=module)}
    found = measure(model, student, batches, True, runtime.mark_step, piece_bytes=runtime.piece_bytes)
    return float(found["student"].figures["kl"])


def allocated(
    options: QuantizeOptions, found: Choices, costs_P: np.ndarray
) -> tuple[Preset, dict[str, int], dict[str, Any]]:
    """Return the cheapest way to store a student within its target: preset, ranks by layer above 0, facts of both."""
    picked = allocate(found.layers_P, found.bytes_P, costs_P, found.target_bytes - found.other_bytes)
    ranks, lm_head, groups = dict[str, int](), None, dict[tuple[str, str, QuantSpec], list[str]]()
    for name, spec, rank in (found.points[i] for i in picked):
        before, number, after = re.split(r"(\d+|$)", name, maxsplit=1)
        if LM_HEAD.search(name):
            lm_head = spec
        else:
            groups.setdefault((re.escape(before), re.escape(after), spec), []).append(number)
        ranks |= {name: rank} if rank else {}
    rules = [(f"^{before}({'|'.join(numbers)}){after}$", spec) for (before, after, spec), numbers in groups.items()]
    kept: list[tuple[str, QuantSpec | None]] = [(pattern, None) for pattern in options.keep]
    size, cost = found.other_bytes + int(found.bytes_P[picked].sum()), float(costs_P[picked].sum())
    facts: dict[str, Any] = {"target": options.target.name, "engine": options.target.engine, "bytes": size}
    facts |= {"predicted_kl": cost, "adapter_ranks": ranks}
    return Preset(options.target.name, (*kept, *rules), lm_head), ranks, facts
