r"""What formats and ranks cost a model at hand, measured, and the preset that spends a target's bytes on them best.

A layer in a format costs tr(G E H Eᵀ) / 2 nats to second order, with G and H as in `layers.calibrate.fisher` and E the
error of GPTQ rounding, which is cheap and ranks formats as the final descent does. What an adapter closes of it is read
off the spectrum of G^½ E H^½, for all ranks at once. The table of an LM head, with a tied embedding, has no such G: it
is put into the model, format by format, and the KL of some rows is taken.

What is chosen becomes an ordinary preset, with a rule for each kind of layer and format such as
`^model\.layers\.(0|3)\.mlp\.down_proj$`, and adapter starts whose columns are the ranks; nothing later knows of it.
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
from qat_lora.layers.calibrate.finished import NOT_KEPT, Work
from qat_lora.layers.calibrate.fisher import Sensitivity
from qat_lora.layers.calibrate.fit import Metric
from qat_lora.layers.calibrate.quantize import second_moments
from qat_lora.layers.convert import LM_HEAD, block_of, check_reach, linear_layers, put_quantized
from qat_lora.layers.quant_linear import QuantLinear
from qat_lora.layers.tied_embedding import embedding_of
from qat_lora.models.load import CausalLM
from qat_lora.options import QuantizeOptions
from qat_lora.quant.allocate import allocate, reachable
from qat_lora.quant.gptq import Curvature
from qat_lora.quant.initialize import quantize_weight
from qat_lora.quant.presets import Preset, preset
from qat_lora.quant.spec import QuantSpec
from qat_lora.runtime.base import Runtime
from qat_lora.types import Batch

HEAD_ROWS = 16  # of calibration, on which tables are measured


class Point(NamedTuple):
    """What a layer may be; spec None: as it is."""

    layer: str
    spec: QuantSpec | None
    rank: int
    bytes: int


class Choices(NamedTuple):
    """What the layers of a model may be, in an engine's files."""

    specs: dict[str, list[QuantSpec | None]]
    """By name, the LM head last; empty where no block of the engine divides a row."""
    points: list[Point]
    """In the order of `specs`, every format at all ranks."""
    other_bytes: int
    """Of all other tensors."""

    def columns(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the number of the layer and the bytes of every point."""
        numbers = {name: i for i, name in enumerate(dict.fromkeys(point.layer for point in self.points))}
        return np.array([numbers[point.layer] for point in self.points]), np.array([p.bytes for p in self.points])


class Allocation(NamedTuple):
    """How a student is stored: ranks of the layers that get an adapter, and the sum of the costs, in nats."""

    preset: Preset
    ranks: dict[str, int]
    bytes: int
    cost: float


def choices(options: QuantizeOptions, module: Any, itemsize: int) -> Choices:
    """Return what the layers of a full-precision model may be; `itemsize`: bytes of a number in its files.

    Raises:
        ModelError, ConfigError: as `check_reach`.
    """
    reached, engine = check_reach(module, preset("q8_0", options.keep)), options.engine
    specs: dict[str, list[QuantSpec | None]] = {}
    for name in reached:
        specs[name] = [*formats(engine, module.get_submodule(name).in_features)]
    for name, head in linear_layers(module, lm_head=True) if engine != "vllm" else ():  # which reads it dense
        with contextlib.suppress(ConfigError):  # tied to an embedding that does more than look up
            embedding_of(module, head)
            kept = any(re.search(pattern, name) for pattern in options.keep)
            dense: list[None] = [None] if engine == "any" else []
            specs[name] = [] if kept else [*formats(engine, head.in_features), *dense]
    points = []
    for name, allowed in specs.items():
        rows, columns = module.get_submodule(name).weight.shape
        for spec in allowed:
            size = itemsize * rows * columns if spec is None else layer_bytes(engine, spec, rows, columns)
            for rank in range(1 + _most(options, name, rows, columns)):
                points.append(Point(name, spec, rank, size + adapter_bytes(engine, rows, columns, rank)))
    quantised = {name for name, allowed in specs.items() if allowed}
    return Choices(specs, points, other_bytes(engine, module, quantised, itemsize))


def _most(options: QuantizeOptions, name: str, rows: int, columns: int) -> int:
    return 0 if LM_HEAD.search(name) else min(options.start_rank, rows, columns)


def check_target(options: QuantizeOptions, module: Any, found: Choices) -> int:
    """Return the bytes that the target allows; ConfigError where it cannot be met, with the range of those that can."""
    target_bytes = options.target_bytes(sum(p.numel() for p in module.parameters()))
    least, most = (found.other_bytes + end for end in reachable(*found.columns()))
    if least <= target_bytes <= most:
        return target_bytes
    name = "target_size" if options.target_size else "target_bits"
    low, high = math.ceil(least / 1e3) / 1e3, math.floor(most / 1e3) / 1e3
    raise ConfigError(
        f"{name}: {target_bytes / 1e6:.3f} MB cannot be met; "
        f"--for {options.engine} allows {low:.3f}MB to {high:.3f}MB, adapters up to --start-rank"
    )


@torch.no_grad()
def measured_costs(
    options: QuantizeOptions,
    model: CausalLM,
    found: Choices,
    batches: Sequence[Batch],
    sensitivity: Mapping[str, Sensitivity],
    runtime: Runtime,
    work: Work = NOT_KEPT,
) -> np.ndarray:
    """Return what every point costs, in nats."""
    pieces = {name: kept[0]["costs"] for name in found.specs if (kept := work.take(f"allocation-{name}"))}
    names = [name for name, specs in found.specs.items() if specs and name not in pieces]

    def forward(batch: Batch) -> Tensor:
        work.may_stop()
        return model.hidden(batch["input_ids"], batch["document_ids"])

    moments = second_moments(model.module, names, batches, forward, sensitivity) if names else {}
    for name in tqdm(names, desc="formats and ranks", unit="layer", disable=options.run.quiet):
        work.may_stop()
        linear, curvature, parts = model.module.get_submodule(name), Curvature(moments[name]), list[Tensor]()
        weight, few = linear.weight.detach().float(), batches[: -(-HEAD_ROWS // len(batches[0]["input_ids"]))]
        for spec in found.specs[name]:
            codes = None if spec is None else quantize_weight(weight, spec, "gptq", curvature)
            if spec is None or codes is None:
                parts.append(torch.zeros(1, dtype=torch.float64))
            elif name in sensitivity:
                metric = Metric.of(weight, moments[name], sensitivity[name].outputs_OO.to(weight.device))
                parts.append(metric.costs(weight - codes.dense(spec), _most(options, name, *weight.shape)).cpu() / 2)
            else:
                parts.append(_kl_with(model, name, QuantLinear.from_linear(linear, spec, codes), few, runtime))
        pieces[name] = torch.cat(parts)
        work.keep(f"allocation-{name}", {"costs": pieces[name]}, {})
    return torch.cat([pieces[name] for name, specs in found.specs.items() if specs]).numpy()


def _kl_with(model: CausalLM, name: str, layer: QuantLinear, batches: Sequence[Batch], runtime: Runtime) -> Tensor:
    """Return the KL, nats a token, of a model in which one layer alone is quantised, float64 [1]."""
    shared = {id(tensor): tensor for tensor in (*model.module.parameters(), *model.module.buffers())}
    module = copy.deepcopy(model.module, shared)
    put_quantized(module, name, layer)
    student = {"student": replace(model, module=module)}
    found = measure(model, student, batches, True, runtime.mark_step, piece_bytes=runtime.piece_bytes)
    return torch.tensor([found["student"].figures["kl"]], dtype=torch.float64)


def allocated(options: QuantizeOptions, found: Choices, costs: np.ndarray, target_bytes: int) -> Allocation:
    """Return the cheapest way to store a student in at most so many bytes."""
    layers, sizes = found.columns()
    picked = allocate(layers, sizes, costs, target_bytes - found.other_bytes)
    chosen = {found.points[i].layer: found.points[i] for i in picked}
    head = next((chosen.pop(name).spec for name in list(chosen) if LM_HEAD.search(name)), None)
    groups: dict[tuple[str, str, QuantSpec | None], list[str]] = {}
    for name, specs in found.specs.items():
        if name in chosen or not specs:
            stack, _, number = (block_of(name) or "").rpartition(".")
            key = stack, name.removeprefix(f"{stack}.{number}."), chosen[name].spec if specs else None
            groups.setdefault(key, []).append(number)
    rules: list[tuple[str, QuantSpec | None]] = [(pattern, None) for pattern in options.keep]
    for (stack, inside, spec), numbers in groups.items():
        before = rf"{re.escape(stack)}\.({'|'.join(numbers)})\." if stack else ""
        rules.append((f"^{before}{re.escape(inside)}$", spec))
    ranks = {name: point.rank for name, point in chosen.items() if point.rank}
    total = found.other_bytes + int(sizes[picked].sum())
    return Allocation(Preset(options.label, tuple(rules), head), ranks, total, float(costs[picked].sum()))
