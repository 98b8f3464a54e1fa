"""`quantize --target-size`: the budget of a file, from shapes, and the preset that keeps to it, from measured costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from qat_lora.errors import ConfigError
from qat_lora.layers.calibrate.finished import Work
from qat_lora.layers.calibrate.fisher import Sensitivity
from qat_lora.layers.calibrate.format_costs import input_squares, layer_costs, lm_head_costs
from qat_lora.layers.convert import linear_layers, quantize_targets, weight_count
from qat_lora.models.load import CausalLM
from qat_lora.options import QuantizeOptions
from qat_lora.quant.allocate import FLOAT_BYTES, FORMATS, KEPT, Choice, allocate, as_preset, formats, size_bytes
from qat_lora.quant.initialize import NEED_TEXT
from qat_lora.quant.presets import Preset, preset
from qat_lora.types import Batch

HEAD_BATCHES = 2  # of calibration rows, on which the output head's formats are measured
PIECE = "allocation-formats"


class Budget(NamedTuple):
    """What a file of the target's size has room for."""

    target_bytes: int
    fixed_bytes: int  # of the adapter and of what is stored as it is
    shapes: dict[str, tuple[int, int]]  # outputs and inputs of every layer
    lm_head: str | None
    engine: str | None

    def sizes(self) -> dict[str, dict[str, int]]:
        """Return the bytes of every layer, and of the output head, in each of its formats."""
        return {
            name: {
                kind: size_bytes(kind, *shape, self.engine)
                for kind in formats(self.engine, *shape, lm_head=name == self.lm_head)
            }
            for name, shape in self.shapes.items()
        }

    def range_bytes(self) -> tuple[int, int]:
        """Return the smallest and the largest file."""
        ends = [(min(sizes.values()), max(sizes.values())) for sizes in self.sizes().values()]
        least, most = map(sum, zip(*ends, strict=True))
        return self.fixed_bytes + least, self.fixed_bytes + most


def budget(module: nn.Module, options: QuantizeOptions) -> Budget:
    """Return the budget of a full-precision model, which may be on the meta device.

    ConfigError: a target out of reach, a layer that the engine holds in no format, or nothing to measure costs on.
    """
    has_text = options.text.dataset or options.kd_cache_dir
    if not (has_text and options.metric == "fisher" and options.init in NEED_TEXT):
        needs = "--dataset or --kd-cache-dir, --metric fisher, and --init descent"
        raise ConfigError(f"target_size: what layers cost is measured on text; give {needs}")
    engine, rank = options.target.engine, options.rank_of_codes
    wanted = quantize_targets(module, preset(options.preset, options.keep))
    heads = [name for name, _ in linear_layers(module, lm_head=True)]
    shapes = {name: _shape(module, name) for name in (*wanted, *heads[:1])}
    adapter = sum(FLOAT_BYTES * min(rank, *shapes[name]) * sum(shapes[name]) for name in wanted)
    inside = {id(module.get_submodule(name).get_parameter("weight")) for name in shapes}
    # llama.cpp's norms and biases are float32.
    wide = 2 if engine == "llama.cpp" else 1
    others = [p for p in module.parameters() if id(p) not in inside]
    kept = sum(FLOAT_BYTES * p.numel() * (wide if p.dim() == 1 else 1) for p in others)
    weights, goal = weight_count(module), options.target
    target = goal.bytes_for(weights)
    found = Budget(target, adapter + kept, shapes, heads[0] if heads else None, engine)
    for name, sizes in found.sizes().items():
        if not sizes:
            raise ConfigError(f"for: {engine} holds {name} of {shapes[name]} in no format exactly; leave --for out")
    least, most = found.range_bytes()
    if not least <= target <= most:
        what = "target_bits" if goal.target_size is None else "target_size"
        raise ConfigError(
            f"{what}: {target / 1e6:,.3f} MB are out of reach; allowed: {math.ceil(least / 1e3) / 1e3:,.3f} to "
            f"{most // 1e3 / 1e3:,.3f} MB ({8 * least / weights:.2f} to {8 * most / weights:.2f} bits a weight), of "
            f"which the adapter of rank {rank} (--joint-rank) has {adapter / 1e6:,.3f}"
        )
    return found


def _shape(module: nn.Module, name: str) -> tuple[int, int]:
    outputs, inputs = module.get_submodule(name).get_parameter("weight").shape
    return outputs, inputs


def allocated(
    model: CausalLM,
    options: QuantizeOptions,
    batches: list[Batch],
    costs: Mapping[str, Sensitivity],
    forward: Callable[[Batch], Tensor],
    work: Work,
) -> Preset:
    """Return the preset that keeps to the target; a run that goes on gets the one it had."""
    room = budget(model.module, options)
    names = [KEPT, *FORMATS[room.engine]]
    kept = work.take(PIECE)
    if kept is None:
        squares, units = input_squares(model.module, costs, batches, forward), dict[str, list[Choice]]()
        for name, sizes in tqdm(room.sizes().items(), desc="formats", unit="layer", disable=options.run.quiet):
            layer = model.module.get_submodule(name)
            assert isinstance(layer, nn.Linear)
            if name == room.lm_head:
                found = lm_head_costs(layer, [*sizes], batches[:HEAD_BATCHES], forward, model.logits)
            else:
                found = layer_costs(layer.weight.data, sizes, squares[name], costs[name].outputs_OO)
            units[name] = [Choice(kind, size, found[kind]) for kind, size in sizes.items()]
        choices = allocate(units, room.target_bytes - room.fixed_bytes)
        chosen = {layer: choice.format for layer, choice in choices.items()}
        work.keep(PIECE, {layer: torch.tensor(names.index(kind)) for layer, kind in chosen.items()}, {})
    else:
        chosen = {layer: names[int(kept[0][layer])] for layer in room.shapes}
    lm_head = chosen.pop(room.lm_head) if room.lm_head else KEPT
    return as_preset(chosen, lm_head, options.keep)
