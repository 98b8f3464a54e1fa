"""The one table of presets, `presets.yaml`, how a user changes one, and how bytes are divided to meet a size.

A `Preset` gives each linear layer of a model its spec by the first rule whose pattern is found in the layer's name. A
preset that is not listed is refused. A user changes a preset by pattern: `keep` leaves layers as they are, `override`
gives them another preset's spec. Both become rules in front of its own, so a checkpoint's config.json describes it.

With a target size, every layer gets format and adapter rank by `allocate`. A point is what one layer may be: its bytes,
and what that costs the predictions in nats. Costs of layers add up, so from the smallest points on the step with the
most gain for a byte is taken, over all layers, as long as one fits. From a point of a convex hull that step leads to
the hull's next, so these are the best choices at their totals (Shoham and Gersho 1988), until the first step that is
too large; the last gap takes what still fits. An integer program would gain a share of that step, and a rule by name
(more bits for `down_proj`) knows neither model nor target.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml

from qat_lora.config import HELP, common, option, settings
from qat_lora.errors import ConfigError, errors_explained
from qat_lora.quant.spec import QuantSpec


@dataclass(frozen=True)
class Preset:
    """Specs for a whole model: the first rule whose pattern is found in a layer's name decides.

    A rule with spec None keeps the layers it matches as they are. No rule reaches the LM head, which has a spec of
    its own and stays unquantised without one. `tied`: the embedding looks its rows up in the LM head's codes.
    """

    name: str
    rules: tuple[tuple[str, QuantSpec | None], ...]
    lm_head: QuantSpec | None = None
    tied: bool = False

    def spec_for(self, layer: str) -> QuantSpec | None:
        """Return the spec of a layer, or None where it stays unquantised."""
        rule = self.rule_for(layer)
        return None if rule is None else self.rules[rule][1]

    def rule_for(self, layer: str) -> int | None:
        """Return the number of the rule that decides for a layer, None where no rule matches it."""
        return next((i for i, (pattern, _) in enumerate(self.rules) if re.search(pattern, layer)), None)

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, fit for a model's config.json."""
        rules = [[pattern, spec and dataclasses.asdict(spec)] for pattern, spec in self.rules]
        data: dict[str, Any] = {"name": self.name, "rules": rules}
        if self.lm_head is not None:
            data["head"] = dataclasses.asdict(self.lm_head)
        return data | ({"tied": True} if self.tied else {})

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Preset:
        """Read back what `to_dict` wrote; ConfigError: the mapping is not one of ours."""
        with errors_explained(ConfigError, f"preset: {data!r} is not a preset of qat-lora", passing=()):
            rules = tuple((str(p), None if s is None else _stored_spec(s)) for p, s in data["rules"])
            for pattern, _ in rules:
                re.compile(pattern)
            lm_head = _stored_spec(data["head"]) if data.get("head") else None
            return cls(str(data["name"]), rules, lm_head, bool(data.get("tied")))


def _stored_spec(data: Mapping[str, Any]) -> QuantSpec:
    """Return a spec read from a file; k-means tables, which are no longer made, are stored values like any other."""
    return QuantSpec(**({**data, "table": "even"} if data.get("table") == "kmeans" else data))


MLP = r"\.(mlp|feed_forward|ffn)\."
PATTERNS = {"mlp": MLP, "attention": r"\.(self_attn|attention|attn)\."}


def _presets() -> dict[str, Preset]:
    table, found = yaml.safe_load(Path(__file__).with_name("presets.yaml").read_text(encoding="utf-8")), {}
    for name, entry in table.items():
        rules = {PATTERNS[part]: of for part, of in entry.items()} if PATTERNS.keys() & entry else {".": entry}
        found[name] = Preset(name, tuple((pattern, QuantSpec(**of)) for pattern, of in rules.items()))
    return found


PRESETS: Mapping[str, Preset] = _presets()


def preset(name: str, keep: tuple[str, ...] = (), override: tuple[str, ...] = (), lm_head: str | None = None) -> Preset:
    """Return a preset by name, changed as the user asked.

    Layers that match `keep` stay unquantised, whatever other rules say; `override` is a list of `PATTERN=PRESET`, of
    which the first match decides; `lm_head` is the preset whose spec the LM head gets, None leaves it unquantised.

    ConfigError: unknown name (the message lists the known ones), or a pattern that is no regular expression.
    """
    base = _known("preset", name)
    rules: list[tuple[str, QuantSpec | None]] = [(checked_pattern("keep", pattern), None) for pattern in keep]
    for word in override:
        pattern, equals, other = word.rpartition("=")
        if not (pattern and equals):
            raise ConfigError(rf"override: {word!r} is not PATTERN=PRESET, for example layers\.(0|27)\.=w4g128")
        rules.append((checked_pattern("override", pattern), _only_spec("override", other)))
    return Preset(base.name, (*rules, *base.rules), None if lm_head is None else _only_spec("quantize_head", lm_head))


def _known(field: str, name: str) -> Preset:
    if name not in PRESETS:
        raise ConfigError(f"{field}: {name!r} is unknown; allowed: {', '.join(PRESETS)}")
    return PRESETS[name]


def _only_spec(field: str, name: str) -> QuantSpec:
    """Return the spec of a preset that treats all layers alike."""
    chosen = _known(field, name)
    spec = chosen.rules[0][1]
    if len(chosen.rules) > 1 or spec is None:
        alike = [other for other, entry in PRESETS.items() if len(entry.rules) == 1]
        raise ConfigError(f"{field}: {name} has a rule each for MLP and attention; allowed: {', '.join(alike)}")
    return spec


def checked_pattern(field: str, pattern: str) -> str:
    """Return a regular expression as it was given; ConfigError, by the `field` that it was given in: it is none."""
    with errors_explained(ConfigError, f"{field}: {pattern!r} is not a regular expression", re.error):
        return re.compile(pattern).pattern


Engine = Literal["any", "llama.cpp", "mlx", "vllm"]


@settings
class TargetConfig:
    """The size that a student shall have."""

    target_size: str | None = common(None, HELP["target_size"])
    target_bits: float | None = option(None, "the same as bits over all weights of the model", unit="bits", above=0)
    engine: Engine = option("any", "engine whose formats are allowed and whose files are counted", alias="for")

    def __post_init__(self) -> None:
        if None not in (self.target_size, self.target_bits):
            raise ConfigError("target_bits: --target-size says it already; give one of the two")
        if self.engine != "any" and not self.name:
            raise ConfigError(f"engine: --for {self.engine} counts nothing without --target-size or --target-bits")
        self.bytes(0)

    @property
    def name(self) -> str:
        """What is wanted; empty where a preset decides."""
        return self.target_size or ("" if self.target_bits is None else f"{self.target_bits:g}bits")

    def bytes(self, weights: int) -> int:
        """Return the bytes that a model of so many weights may take; ConfigError where it is no size."""
        if self.target_size is None:
            return int((self.target_bits or 0) * weights / 8)
        if found := re.fullmatch(r"(\d+(?:\.\d+)?) ?([kMG])B", self.target_size):
            return round(float(found[1]) * 1000 ** ("kMG".index(found[2]) + 1))
        raise ConfigError(f"target_size: {self.target_size!r} is no size; give kB, MB or GB, for example 232MB")


def allocate(layers: Sequence[str], bytes_P: np.ndarray, costs_P: np.ndarray, budget_bytes: int) -> list[int]:
    """Return one point of each layer, within a budget beside which no better fits; ConfigError: the least exceed it."""
    layers_P = np.unique(layers, return_inverse=True)[1]
    order = np.lexsort((costs_P, bytes_P, layers_P))
    chosen_L = order[np.unique(layers_P[order], return_index=True)[1]]
    left = budget_bytes - int(bytes_P[chosen_L].sum())
    if left < 0:
        raise ConfigError(f"budget: {budget_bytes:,} bytes are {-left:,} too few")
    while True:
        more_P = bytes_P - bytes_P[chosen_L][layers_P]
        gain_P = costs_P[chosen_L][layers_P] - costs_P
        fits_P = (more_P > 0) & (more_P <= left) & (gain_P > 0)
        if not fits_P.any():
            return sorted(chosen_L.tolist())
        best = int(np.argmax(np.where(fits_P, gain_P / np.maximum(more_P, 1), -1.0)))
        chosen_L[layers_P[best]], left = best, left - int(more_P[best])
