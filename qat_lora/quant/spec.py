"""What a quantised weight is made of, and the one table of presets.

A weight is stored as W ~ Q * S: every entry of Q is one of 2^bits code values, S is a positive scale that many
entries share. `QuantSpec` names the code book and the sharing; a `Preset` gives each linear layer of a model its
spec by the first rule whose pattern is found in the layer's name. Peers keep such tables in nine places under
names with different meanings; here a name that is not in `PRESETS` is refused with the list.

Sources: half-integer 2-bit codes, Apple Foundation Models 2025; low-rank scales, LoRDS (arXiv 2601.22716).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from qat_lora.errors import ConfigError

SCALE_BITS = 16  # scales, low-rank factors and look-up tables are stored as float16
Code = Literal["half", "integer", "lut"]
Sharing = Literal["tensor", "channel", "group", "lowrank"]


@dataclass(frozen=True, kw_only=True)
class QuantSpec:
    """One way to store a weight matrix [O, I].

    Attributes:
        bits: bits of a code, 2 to 8.
        code: `half` = {+-1/2, +-3/2, ...}, balanced and without a zero; `integer` = {-2^(b-1) .. 2^(b-1)-1};
            `lut` = a table of 2^bits values, first the even spread over [-1, 1].
        sharing: what shares a scale: the whole `tensor`, an output `channel`, a `group` of consecutive inputs of
            one channel, or nothing (`lowrank`: S = A B, every entry its own scale from two thin factors).
        group_size: inputs of a group; the last group of a row may be shorter. With `lowrank`, the group whose
            scales A B starts from.
        rank: columns of A, with `lowrank`.
    """

    bits: int
    code: Code
    sharing: Sharing
    group_size: int | None = None
    rank: int | None = None

    def __post_init__(self) -> None:
        if self.bits not in range(2, 9):
            raise ConfigError(f"bits: {self.bits!r} is not supported; allowed: 2 to 8")
        for field, given, allowed in (
            ("code", self.code, get_args(Code)),
            ("sharing", self.sharing, get_args(Sharing)),
        ):
            if given not in allowed:  # config.json is read by people and written by others
                raise ConfigError(f"{field}: {given!r} is unknown; allowed: {', '.join(allowed)}")
        needs_group = self.sharing in ("group", "lowrank")
        if needs_group != (self.group_size is not None) or (needs_group and (self.group_size or 0) < 1):
            raise ConfigError(f"group_size: {self.group_size} does not fit scales by {self.sharing}")
        if (self.sharing == "lowrank") != (self.rank is not None) or (self.rank is not None and self.rank < 1):
            raise ConfigError(f"rank: {self.rank} does not fit scales by {self.sharing}")

    def scale_count(self, out_features: int, in_features: int) -> int:
        """Return how many stored numbers make the scales of an [O, I] weight."""
        if self.sharing == "tensor":
            return 1
        if self.sharing == "channel":
            return out_features
        if self.sharing == "group":
            assert self.group_size is not None
            return out_features * -(-in_features // self.group_size)
        assert self.rank is not None
        return self.rank * (out_features + in_features)

    def stored_bits(self, out_features: int, in_features: int) -> int:
        """Return the bits that an [O, I] weight takes: codes, scales and look-up table."""
        table = 2**self.bits if self.code == "lut" else 0
        return (
            self.bits * out_features * in_features
            + SCALE_BITS * self.scale_count(out_features, in_features)
            + SCALE_BITS * table
        )


@dataclass(frozen=True)
class Preset:
    """Specs for a whole model: the first rule whose pattern is found in a layer's name decides.

    A rule with spec None keeps the layers it matches as they are.
    """

    name: str
    rules: tuple[tuple[str, QuantSpec | None], ...]

    def spec_for(self, layer: str) -> QuantSpec | None:
        """Return the spec of a layer, or None where it stays unquantised."""
        for pattern, spec in self.rules:
            if re.search(pattern, layer):
                return spec
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, fit for a model's config.json."""
        rules = [[pattern, spec and dataclasses.asdict(spec)] for pattern, spec in self.rules]
        return {"name": self.name, "rules": rules}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Preset:
        """Read back what `to_dict` wrote.

        Raises:
            ConfigError: the mapping is not one of ours.
        """
        try:
            rules = tuple((str(p), None if s is None else QuantSpec(**s)) for p, s in data["rules"])
            for pattern, _ in rules:
                re.compile(pattern)
            return cls(str(data["name"]), rules)
        except (KeyError, TypeError, ValueError, re.error) as error:
            raise ConfigError(f"preset: {dict(data)!r} is not a preset of qat-lora ({error})") from None


MLP = r"\.(mlp|feed_forward|ffn)\."
ATTENTION = r"\.(self_attn|attention|attn)\."


def _group(bits: int, code: Code, group_size: int) -> QuantSpec:
    return QuantSpec(bits=bits, code=code, sharing="group", group_size=group_size)


def _lut(entries: int, rank: int) -> QuantSpec:
    return QuantSpec(bits=entries.bit_length() - 1, code="lut", sharing="lowrank", group_size=128, rank=rank)


def _table() -> dict[str, Preset]:
    everywhere = {
        "w2g64": _group(2, "half", 64),
        "w3g128": _group(3, "integer", 128),
        "w4g128": _group(4, "integer", 128),
        "apple2": QuantSpec(bits=2, code="half", sharing="tensor"),
        "q4_r32": _lut(16, 32),
        "q4a4": _lut(16, 4),
        "q2a2": _lut(4, 32),
    }
    presets = {name: Preset(name, ((".", spec),)) for name, spec in everywhere.items()}
    presets["q2a4"] = Preset("q2a4", ((MLP, _lut(4, 32)), (ATTENTION, _lut(16, 8))))
    return presets


PRESETS: Mapping[str, Preset] = _table()


def preset(name: str, keep: tuple[str, ...] = ()) -> Preset:
    """Return a preset by name, with layers that match a `keep` pattern left unquantised.

    Raises:
        ConfigError: unknown name (the message lists the known ones), or a pattern that is no regular expression.
    """
    if name not in PRESETS:
        raise ConfigError(f"preset: {name!r} is unknown; allowed: {', '.join(PRESETS)}")
    for pattern in keep:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ConfigError(f"keep: {pattern!r} is not a regular expression ({error})") from None
    base = PRESETS[name]
    return Preset(base.name, tuple((pattern, None) for pattern in keep) + base.rules)
