"""What a quantised weight is made of, and the one table of presets.

A weight is stored as W ~ Q * S: every entry of Q is one of 2^bits code values, S is a positive scale that many
entries share. `QuantSpec` names the code book and the sharing; a `Preset` gives each linear layer of a model its
spec by the first rule whose pattern is found in the layer's name. Peers keep such tables in nine places under
names with different meanings; here a name that is not in `PRESETS` is refused with the list.

A user changes a preset by pattern: `keep` leaves layers as they are, `override` gives them another preset's spec.
Both are rules put before the preset's own, so that a checkpoint's config.json says all there is to say.

Sources: half-integer 2-bit codes, Apple Foundation Models 2025; low-rank scales, LoRDS (arXiv 2601.22716); normal
tables, NF4 of QLoRA (arXiv 2305.14314).
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from qat_lora.config import INT_LIMIT
from qat_lora.errors import ConfigError

SCALE_BITS = 16  # scales, low-rank factors and look-up tables are stored as float16
Code = Literal["half", "integer", "asymmetric", "lut"]
Table = Literal["even", "normal", "kmeans"]
Sharing = Literal["tensor", "channel", "group", "lowrank"]


@dataclass(frozen=True, kw_only=True)
class QuantSpec:
    """One way to store a weight matrix [O, I].

    Attributes:
        bits: bits of a code, 2 to 8.
        code: `half` = {+-1/2, +-3/2, ...}, balanced and without a zero; `integer` = {-2^(b-1) .. 2^(b-1)-1};
            `asymmetric` = {-z .. 2^b-1-z} with a zero point z of `bits` bits beside every scale; `lut` = a table
            of 2^bits values, stored per layer, free to train.
        sharing: what shares a scale: the whole `tensor`, an output `channel`, a `group` of consecutive inputs of
            one channel, or nothing (`lowrank`: S = A B, every entry its own scale from two thin factors).
        group_size: inputs of a group; the last group of a row may be shorter. With `lowrank`, the group whose
            scales A B starts from.
        rank: columns of A, with `lowrank`.
        table: what a `lut` starts from: the `even` spread over [-1, 1], quantiles of the `normal` distribution with
            an exact zero, or the `kmeans` of the layer's own weights, by importance where calibration exists.
    """

    bits: int
    code: Code
    sharing: Sharing
    group_size: int | None = None
    rank: int | None = None
    table: Table = "even"

    def __post_init__(self) -> None:
        for field in ("bits", "group_size", "rank"):
            value = getattr(self, field)
            if value is not None and (type(value) is not int or value >= INT_LIMIT):
                raise ConfigError(f"{field}: {value!r} is not a whole number below 2^31")
        if self.bits not in range(2, 9):
            raise ConfigError(f"bits: {self.bits!r} is not supported; allowed: 2 to 8")
        for field, given, allowed in (
            ("code", self.code, get_args(Code)),
            ("sharing", self.sharing, get_args(Sharing)),
            ("table", self.table, get_args(Table)),
        ):
            if given not in allowed:  # config.json is read by people and written by others
                raise ConfigError(f"{field}: {given!r} is unknown; allowed: {', '.join(allowed)}")
        needs_group = self.sharing in ("group", "lowrank")
        if needs_group != (self.group_size is not None) or (needs_group and (self.group_size or 0) < 1):
            raise ConfigError(f"group_size: {self.group_size} does not fit scales by {self.sharing}")
        if (self.sharing == "lowrank") != (self.rank is not None) or (self.rank is not None and self.rank < 1):
            raise ConfigError(f"rank: {self.rank} does not fit scales by {self.sharing}")
        if self.table != "even" and self.code != "lut":
            raise ConfigError(f"table: {self.table!r} does not fit the code {self.code}; only lut has a table")
        if self.code == "asymmetric" and self.sharing == "lowrank":
            raise ConfigError("sharing: lowrank does not fit the code asymmetric, whose zero points belong to groups")

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
        """Return the bits that an [O, I] weight takes: codes, scales, zero points and look-up table."""
        scales = self.scale_count(out_features, in_features)
        table = 2**self.bits if self.code == "lut" else 0
        zeros = scales if self.code == "asymmetric" else 0
        return self.bits * (out_features * in_features + zeros) + SCALE_BITS * (scales + table)


@dataclass(frozen=True)
class Preset:
    """Specs for a whole model: the first rule whose pattern is found in a layer's name decides.

    A rule with spec None keeps the layers it matches as they are. No rule reaches the output head, which has a spec
    of its own and stays unquantised without one. `tied`: the embedding looks its rows up in the head's codes.
    """

    name: str
    rules: tuple[tuple[str, QuantSpec | None], ...]
    head: QuantSpec | None = None
    tied: bool = False

    def spec_for(self, layer: str) -> QuantSpec | None:
        """Return the spec of a layer, or None where it stays unquantised."""
        for pattern, spec in self.rules:
            if re.search(pattern, layer):
                return spec
        return None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, fit for a model's config.json."""
        rules = [[pattern, spec and dataclasses.asdict(spec)] for pattern, spec in self.rules]
        head: dict[str, Any] = {} if self.head is None else {"head": dataclasses.asdict(self.head)}
        head |= {"tied": True} if self.tied else {}
        return {"name": self.name, "rules": rules, **head}

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
            head = QuantSpec(**data["head"]) if data.get("head") else None
            return cls(str(data["name"]), rules, head, bool(data.get("tied")))
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError, RecursionError, re.error) as error:
            raise ConfigError(f"preset: {data!r} is not a preset of qat-lora ({error})") from None


MLP = r"\.(mlp|feed_forward|ffn)\."
ATTENTION = r"\.(self_attn|attention|attn)\."


def _group(bits: int, code: Code, group_size: int) -> QuantSpec:
    return QuantSpec(bits=bits, code=code, sharing="group", group_size=group_size)


def _low_rank(entries: int, rank: int) -> QuantSpec:
    return QuantSpec(bits=entries.bit_length() - 1, code="lut", sharing="lowrank", group_size=128, rank=rank)


def _table() -> dict[str, Preset]:
    everywhere = {
        "w2g64": _group(2, "half", 64),
        "w3g128": _group(3, "integer", 128),
        "w4g128": _group(4, "integer", 128),
        "w4g64a": _group(4, "asymmetric", 64),
        "nf4g64": QuantSpec(bits=4, code="lut", sharing="group", group_size=64, table="normal"),
        "apple2": QuantSpec(bits=2, code="half", sharing="tensor"),
        "q4_r32": _low_rank(16, 32),
        "q4a4": _low_rank(16, 4),
        "q2a2": _low_rank(4, 32),
    }
    presets = {name: Preset(name, ((".", spec),)) for name, spec in everywhere.items()}
    presets["q2a4"] = Preset("q2a4", ((MLP, _low_rank(4, 32)), (ATTENTION, _low_rank(16, 8))))
    return presets


PRESETS: Mapping[str, Preset] = _table()


def preset(name: str, keep: tuple[str, ...] = (), override: tuple[str, ...] = (), head: str | None = None) -> Preset:
    """Return a preset by name, changed as the user asked.

    Args:
        name: an entry of `PRESETS`.
        keep: patterns of layers that stay unquantised; they come before everything else.
        override: `PATTERN=PRESET`: layers with the spec of another preset; the first that is found decides.
        head: preset whose spec the output head gets; None leaves it unquantised.

    Raises:
        ConfigError: unknown name (the message lists the known ones), or a pattern that is no regular expression.
    """
    base = _known("preset", name)
    rules: list[tuple[str, QuantSpec | None]] = [(_pattern("keep", pattern), None) for pattern in keep]
    for word in override:
        pattern, equals, other = word.rpartition("=")
        if not (pattern and equals):
            raise ConfigError(rf"override: {word!r} is not PATTERN=PRESET, for example layers\.(0|27)\.=w4g128")
        rules.append((_pattern("override", pattern), _only_spec("override", other)))
    head_spec = None if head is None else _only_spec("quantize_head", head)
    return Preset(base.name, (*rules, *base.rules), head_spec)


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
