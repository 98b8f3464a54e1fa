"""Allocation under a size: never above, near the best of all ways, and the bytes that engines' files really have."""

import itertools

import numpy as np
import pytest
import torch

from qat_lora.errors import ConfigError
from qat_lora.export.ggml_blocks import to_blocks
from qat_lora.export.gptq import tensors as gptq_tensors
from qat_lora.export.gptq import to_gptq
from qat_lora.export.mlx import tensors as mlx_tensors
from qat_lora.export.mlx import to_mlx
from qat_lora.layers.calibrate.quantize import quantize_model
from qat_lora.layers.quant_linear import QuantLinear
from qat_lora.quant.allocate import (
    FORMATS,
    KEPT,
    Choice,
    TargetConfig,
    allocate,
    as_preset,
    formats,
    parse_size,
    size_bytes,
    spec_of,
)
from qat_lora.quant.presets import Preset


def random_units(rng, layers, choices):
    units = {}
    for i in range(layers):
        sizes = np.sort(rng.choice(np.arange(10, 200), choices, replace=False))
        costs = np.sort(rng.random(choices))[::-1] * 10 ** rng.uniform(-2, 1)
        units[f"layer{i}"] = [
            Choice(f"f{j}", int(s), float(c)) for j, (s, c) in enumerate(zip(sizes, costs, strict=True))
        ]
    return units


@pytest.mark.parametrize("seed", range(8))
def test_it_is_near_the_best_of_all_ways_and_never_above_the_target(seed):
    rng = np.random.default_rng(seed)
    units = random_units(rng, 6, 4)
    least, most = (sum(end(c.size_bytes for c in choices) for choices in units.values()) for end in (min, max))
    for target in np.linspace(least, most, 7).astype(int):
        chosen = allocate(units, int(target))
        size, cost = (sum(getattr(c, name) for c in chosen.values()) for name in ("size_bytes", "cost"))
        ways = [
            (sum(c.size_bytes for c in way), sum(c.cost for c in way)) for way in itertools.product(*units.values())
        ]
        best = min(total for taken, total in ways if taken <= target)
        assert size <= target and cost <= best + max(c.cost for choices in units.values() for c in choices) * 0.5
        left = target - size  # too little for any change that would lower the cost
        for name, now in chosen.items():
            assert not any(c.cost < now.cost and c.size_bytes - now.size_bytes <= left for c in units[name])


def test_many_small_layers_leave_next_to_nothing_to_the_best_bound():
    """The relaxed problem, in which layers may be cut in two, bounds the cost from below."""
    units = random_units(np.random.default_rng(1), 300, 5)
    chosen = allocate(units, 300 * 90)
    size, cost = (sum(getattr(c, name) for c in chosen.values()) for name in ("size_bytes", "cost"))
    bounds = []
    for price in np.geomspace(1e-6, 1, 400):  # each multiplier bounds it
        bounds.append(
            sum(min(c.cost + price * c.size_bytes for c in choices) for choices in units.values()) - price * 300 * 90
        )
    assert cost <= 1.005 * max(bounds) and 300 * 90 - size <= 1


def test_a_target_below_all_is_refused():
    with pytest.raises(ConfigError, match=r"15 bytes below the smallest of all formats"):
        allocate({"a": [Choice("x", 20, 1.0), Choice("y", 30, 0.5)]}, 5)


def test_a_format_that_costs_more_at_more_bytes_is_never_taken():
    assert allocate({"a": [Choice("x", 20, 1.0), Choice("y", 30, 2.0)]}, 100)["a"].format == "x"


@pytest.mark.parametrize(
    ("given", "size"), [("232MB", 232_000_000), ("1.5 GB", 1_500_000_000), ("7kB", 7000), ("12", 12)]
)
def test_sizes_are_decimal(given, size):
    assert parse_size(given) == size


@pytest.mark.parametrize("given", ["", "MB", "-3MB", "0", "1e3MB", "5MiB", "3 TB"])
def test_what_is_no_size_is_refused(given):
    with pytest.raises(ConfigError, match="target_size"):
        TargetConfig(target_size=given)


def test_settings_that_exclude_each_other():
    with pytest.raises(ConfigError, match="given twice"):
        TargetConfig(target_size="1MB", target_bits=2.5)
    with pytest.raises(ConfigError, match="for: says whose file"):
        TargetConfig(engine="mlx")
    assert TargetConfig(target_bits=2.5).bytes_for(1_000_000) == 312_500 and not TargetConfig().is_given


@pytest.mark.parametrize("engine", FORMATS)
@pytest.mark.parametrize(("outputs", "inputs"), [(64, 256), (96, 512), (32, 128)])
def test_bytes_are_those_of_the_engines_files(engine, outputs, inputs):
    torch.manual_seed(0)
    for name in formats(engine, outputs, inputs):
        model = torch.nn.ModuleDict({"layer": torch.nn.Linear(inputs, outputs, bias=False)})
        quantize_model(model, Preset(name, ((".", spec_of(name)),)), "absmax", quiet=True)
        layer = model["layer"]
        assert isinstance(layer, QuantLinear)
        if engine is None:
            written = sum(t.nbytes for t in layer.stored().values())
        elif engine == "llama.cpp":
            blocks = to_blocks(layer)
            written = blocks.data.nbytes
            assert blocks.error == 0
        else:
            integers = (to_mlx if engine == "mlx" else to_gptq)(model)["layer"]
            written = sum(t.nbytes for t in (mlx_tensors if engine == "mlx" else gptq_tensors)(integers).values())
            assert integers.error < 1e-6
        assert size_bytes(name, outputs, inputs, engine) == written, name
    assert size_bytes(KEPT, outputs, inputs, engine) == 2 * outputs * inputs


def test_what_an_engine_does_not_hold_is_no_choice():
    assert "q4_k" in formats("llama.cpp", 64, 256) and "q4_k" not in formats("llama.cpp", 64, 320)
    assert formats("llama.cpp", 64, 32) == ["q4_0", "q8_0"] and formats("mlx", 8, 24) == []
    assert formats("vllm", 64, 256, lm_head=True) == [KEPT] and formats("vllm", 40, 256) == []
    assert formats(None, 8, 64, lm_head=True)[0] == KEPT


def test_the_preset_has_a_rule_a_format_and_survives_a_file():
    found = as_preset(
        {"model.layers.0.up": "q2_0", "model.layers.10.up": "q8_0", "model.layers.1.up": "q2_0"}, "q4_0", ["gate"]
    )
    assert Preset.from_dict(found.to_dict()) == found and len(found.rules) == 3
    assert found.spec_for("model.layers.1.up") == spec_of("q2_0") and found.spec_for("model.layers.10.up") == spec_of(
        "q8_0"
    )
    assert found.spec_for("model.layers.0.gate") is None and found.spec_for("model.layers.11.up") is None
    assert found.lm_head == spec_of("q4_0") and as_preset({}, KEPT, []).lm_head is None
