"""The one table of presets, `presets.yaml`, and how a user changes one.

A `Preset` gives each linear layer of a model its spec by the first rule whose pattern is found in the layer's name.
Peers keep such tables in nine places under names of different meanings; here an unknown name is refused.

A user changes a preset by pattern: `keep` leaves layers as they are, `override` gives them another preset's spec.
Both become rules in front of the preset's own, so that the preset in a checkpoint's config.json describes it fully.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from qat_lora.errors import ConfigError
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
        try:
            rules = tuple((str(p), None if s is None else _stored_spec(s)) for p, s in data["rules"])
            for pattern, _ in rules:
                re.compile(pattern)
            lm_head = _stored_spec(data["head"]) if data.get("head") else None
            return cls(str(data["name"]), rules, lm_head, bool(data.get("tied")))
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, re.error) as error:
            raise ConfigError(f"preset: {data!r} is not a preset of qat-lora ({error})") from None


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
    rules: list[tuple[str, QuantSpec | None]] = [(_pattern("keep", pattern), None) for pattern in keep]
    for word in override:
        pattern, equals, other = word.rpartition("=")
        if not (pattern and equals):
            raise ConfigError(rf"override: {word!r} is not PATTERN=PRESET, for example layers\.(0|27)\.=w4g128")
        rules.append((_pattern("override", pattern), _only_spec("override", other)))
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


def _pattern(field: str, pattern: str) -> str:
    try:
        re.compile(pattern)
    except re.error as error:
        raise ConfigError(f"{field}: {pattern!r} is not a regular expression ({error})") from None
    return pattern
