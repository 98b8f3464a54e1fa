"""A file size as the target: which format each layer gets, so that the whole stays below it and costs least KL.

A uniform preset spends as many bits on a layer that hardly matters as on one that decides, and none of the usual ones
is of the size that a user has room for. Here every layer has choices, each with its bytes in the file of one engine and
its cost in nats, and their sum is minimised under the target: always by the step that saves the most cost a byte, of
those that still fit. The steepest step from a choice leads along its layer's convex hull, so until the first one that
does not fit this is what a Lagrange multiplier would choose. `layers.calibrate.format_costs` measures the costs.

The result is a `Preset` like any other, one rule a format, so nothing that quantises, trains or exports knows of it.

Sources: convex hulls of rate and distortion, Shoham and Gersho (1988); formats by layer under a size, HAWQ-V2
(arXiv 1911.03852).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, NamedTuple

from qat_lora.config import option, settings
from qat_lora.errors import ConfigError
from qat_lora.quant.presets import PRESETS, Preset
from qat_lora.quant.spec import SUPER, QuantSpec

Engine = Literal["llama.cpp", "mlx", "vllm"]
FORMATS: Mapping[str | None, tuple[str, ...]] = {
    None: ("q2_0", "w2g64", "q2_k", "w3g128", "q3g64", "q3_k", "w4g128", "q4_0", "q4_k", "q6_k", "q8_0"),
    "llama.cpp": ("q2_0", "q2_k", "q3_k", "q4_0", "q4_k", "q6_k", "q8_0"),
    **dict.fromkeys(("mlx", "vllm"), ("q2_0", "q3g64", "w4g128", "q4_0", "q8_0")),
}
"""Presets whose layers an engine's files hold exactly; None: our own folder."""
KEPT = "kept"
FLOAT_BYTES = 2  # of a number that is kept as it is
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


@settings
class TargetConfig:
    """How large a file may be, in place of a preset for all layers."""

    target_size: str | None = option(
        None,
        "largest size of weights, embedding and an adapter of --joint-rank together, such as 232MB; every layer gets "
        "the format that costs least, in place of --preset",
        unit="MB are 10^6 bytes",
    )
    target_bits: float | None = option(None, "the same, for each weight of the model", unit="bits", above=0)
    engine: Engine | None = option(None, "whose files it is for: formats that these hold exactly", alias="for")

    def __post_init__(self) -> None:
        if self.target_size is not None and self.target_bits is not None:
            raise ConfigError("target_bits: the target is given twice; leave --target-size or --target-bits out")
        if self.engine is not None and not self.is_given:
            raise ConfigError("for: says whose file a target is for; give --target-size or --target-bits too")
        if self.target_size is not None:
            parse_size(self.target_size)

    @property
    def is_given(self) -> bool:
        """Whether there is a target."""
        return self.target_size is not None or self.target_bits is not None

    def bytes_for(self, weights: int) -> int:
        """Return the target of a model with so many weights."""
        return parse_size(self.target_size) if self.target_size else int((self.target_bits or 0) * weights / 8)


class Choice(NamedTuple):
    """One way to store a layer."""

    format: str  # name of a preset, or `KEPT`
    size_bytes: int
    cost: float  # nats of KL


def parse_size(given: str) -> int:
    """Return the bytes of `232MB`, `1.5 GB` or `5000000`, MB being 10^6; ConfigError: it is no size."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKMG]?B)?\s*", given)
    size = int(float(match[1]) * UNITS[(match[2] or "B").upper()]) if match else 0
    if not size:
        raise ConfigError(f"target_size: {given!r} is not a size; give a number above 0 with MB or GB, such as 232MB")
    return size


def spec_of(name: str) -> QuantSpec | None:
    """Return the spec of a format, None for `KEPT`."""
    return None if name == KEPT else PRESETS[name].rules[0][1]


def formats(engine: str | None, out_features: int, in_features: int, lm_head: bool = False) -> list[str]:
    """Return the formats in which an engine's file holds a weight [O, I] exactly; an LM head may also be kept."""
    if lm_head and engine == "vllm":  # GPTQ packs linear layers inside the model
        return [KEPT]
    found = [KEPT] * lm_head
    for name in FORMATS[engine]:
        spec = spec_of(name)
        assert spec is not None and spec.group_size is not None
        if in_features % (SUPER if spec.step_bits else spec.group_size) == 0:
            found += [name] * (engine != "vllm" or out_features % 32 == 0)
    return found


def size_bytes(name: str, out_features: int, in_features: int, engine: str | None) -> int:
    """Return the bytes of a weight [O, I] in an engine's file."""
    spec = spec_of(name)
    if spec is None:
        return FLOAT_BYTES * out_features * in_features
    bits, groups = spec.stored_bits(out_features, in_features), out_features * spec.groups(in_features)
    if engine == "mlx":
        bits += 16 * groups  # a bias beside every step
    elif engine == "vllm":
        bits += spec.bits * groups + 32 * in_features  # GPTQ's zero points and `g_idx`
    return -(-bits // 8)


def allocate(units: Mapping[str, Sequence[Choice]], target_bytes: int) -> dict[str, Choice]:
    """Return the choices of least cost found in `target_bytes` altogether; ConfigError: below the smallest sum."""
    chosen = {name: min(choices, key=lambda c: (c.size_bytes, c.cost)) for name, choices in units.items()}
    left = target_bytes - sum(choice.size_bytes for choice in chosen.values())
    if left < 0:
        raise ConfigError(f"target_size: {-left:,} bytes below the smallest of all formats")
    while found := max(_steps(units, chosen, left), default=None):
        _, name, choice = found
        chosen[name], left = choice, left - (choice.size_bytes - chosen[name].size_bytes)
    return chosen


def _steps(
    units: Mapping[str, Sequence[Choice]], chosen: Mapping[str, Choice], left: int
) -> Iterator[tuple[float, str, Choice]]:
    """Yield the changes of one layer that fit and lower its cost, with what each saves a byte."""
    for name, choices in units.items():
        now = chosen[name]
        for choice in choices:
            more = choice.size_bytes - now.size_bytes
            if 0 < more <= left and choice.cost < now.cost:
                yield (now.cost - choice.cost) / more, name, choice


def as_preset(chosen: Mapping[str, str], lm_head: str, keep: Sequence[str]) -> Preset:
    """Return the preset that stores every layer in its format: one rule for each, behind those of `keep`."""
    by_format: dict[str, list[str]] = {}
    for layer, name in chosen.items():
        by_format.setdefault(name, []).append(re.escape(layer))
    rules = [(f"^({'|'.join(layers)})$", spec_of(name)) for name, layers in sorted(by_format.items())]
    return Preset("allocated", (*((pattern, None) for pattern in keep), *rules), spec_of(lm_head))
