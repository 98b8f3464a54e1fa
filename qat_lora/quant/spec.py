"""What a quantised weight is made of.

A weight is stored as W ~ Q * S: every entry of Q is one of 2^bits code values, S is a scale that many entries share.
`QuantSpec` names the code book and the sharing, and counts the bits. A scale is positive unless it is `signed`: a code
book with one more value below zero than above then turns its long end to where a group's weights need it. Groups of
16 or 32 weights cannot pay for 16 bits each; their scales are small multiples of one float16 number of 256 inputs
(llama.cpp's K-quants, `ggml-common.h`), chosen on that grid, so that its files hold them exactly. Other sources:
half-integer 2-bit codes, Apple Foundation Models 2025; LoRDS (arXiv 2601.22716); NF4 of QLoRA (arXiv 2305.14314).
"""

from dataclasses import dataclass
from typing import Literal, get_args

from qat_lora.config import INT_LIMIT
from qat_lora.errors import ConfigError

SCALE_BITS = 16  # scales, low-rank factors and look-up tables are stored as float16
SUPER = 256  # inputs that share a float16 scale where `step_bits` make those of groups
Code = Literal["half", "integer", "asymmetric", "minimum", "lut"]
Table = Literal["even", "normal"]
Sharing = Literal["tensor", "channel", "group", "lowrank"]


@dataclass(frozen=True, kw_only=True)
class QuantSpec:
    """One way to store a weight matrix [O, I].

    Attributes:
        bits: bits of a code, 2 to 8.
        code: `half` = {+-1/2, +-3/2, ...}, balanced and without a zero; `integer` = {-2^(b-1) .. 2^(b-1)-1};
            `asymmetric` = {-z .. 2^b-1-z} with a zero point z of `bits` bits for every scale; `minimum` = {0 .. 2^b-1},
            less a float for every group (only with `step_bits`); `lut` = a trainable table of 2^bits values a layer.
        sharing: what shares a scale: the whole `tensor`, an output `channel`, a `group` of consecutive inputs of
            one channel, or nothing (`lowrank`: S = A B, every entry its own scale from two thin factors).
        group_size: inputs of a group, or of fewer at a row's end. With `lowrank`, A B starts from such groups' scales.
        rank: columns of A, with `lowrank`.
        table: what a `lut` starts from: `even` values in [-1, 1], or `normal` quantiles with an exact zero.
        signed: a scale may be negative, with `integer` codes by group.
        step_bits: bits of a group's step: scale (and minimum) of a group are this whole number times a float16 number
            of `SUPER` inputs; signed with `integer` codes, from 0 with `minimum`.
    """

    bits: int
    code: Code
    sharing: Sharing
    group_size: int | None = None
    rank: int | None = None
    table: Table = "even"
    signed: bool = False
    step_bits: int | None = None

    def __post_init__(self) -> None:
        for field in ("bits", "group_size", "rank", "step_bits"):
            value = getattr(self, field)
            if value is not None and (type(value) is not int or value >= INT_LIMIT):
                raise ConfigError(f"{field}: {value!r} is not a whole number below 2^31")
        if self.bits not in range(2, 9):
            raise ConfigError(f"bits: {self.bits!r} is not supported; allowed: 2 to 8")
        for field, names in {"code": Code, "sharing": Sharing, "table": Table}.items():
            given, allowed = getattr(self, field), get_args(names)
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
        if type(self.signed) is not bool or (self.signed and (self.code, self.sharing) != ("integer", "group")):
            raise ConfigError(f"signed: {self.signed!r} does not fit {self.code} codes by {self.sharing}")
        blocks = self.sharing == "group" and self.code in ("integer", "minimum") and SUPER % (self.group_size or 1) == 0
        widths: tuple[int | None, ...] = tuple(range(2, 9)) if blocks else ()
        if self.step_bits not in (widths if self.code == "minimum" else (None, *widths)):
            raise ConfigError(f"step_bits: {self.step_bits} does not fit {self.code} codes by {self.sharing}")

    def scale_count(self, out_features: int, in_features: int) -> int:
        """Return the count of stored float16 numbers that make the scales of an [O, I] weight, and its minima."""
        if self.rank is not None:
            return self.rank * (out_features + in_features)
        rows = 1 if self.sharing == "tensor" else out_features
        return rows * (len(self.whole) * (in_features // SUPER) if self.step_bits else self.groups(in_features))

    def groups(self, in_features: int) -> int:
        """Return how many groups with a scale of their own a row has."""
        return -(-in_features // self.group_size) if self.group_size else 1

    def check_width(self, layer: str, in_features: int) -> None:
        """Raise ConfigError where a row cannot be stored so."""
        if self.step_bits is not None and in_features % SUPER:
            what = f"{layer} has {in_features} inputs, which blocks of {SUPER} do not divide"
            remedy = f"--override '{layer.rpartition('.')[2]}=q4_0' (or q2_0); an output head: --quantize-head q8_0"
            raise ConfigError(f"preset: {what}; store it otherwise: {remedy}")

    @property
    def whole(self) -> tuple[str, ...]:
        """Names of the whole numbers that are stored for every group."""
        if self.step_bits is not None:
            return ("steps", "minima") if self.code == "minimum" else ("steps",)
        return ("zeros",) if self.code == "asymmetric" else ()

    @property
    def whole_bits(self) -> int:
        """Bits of each of them."""
        return self.step_bits or self.bits

    def stored_bits(self, out_features: int, in_features: int) -> int:
        """Return the bits that an [O, I] weight takes: codes, scales, whole numbers of groups, and look-up table."""
        floats = self.scale_count(out_features, in_features) + (2**self.bits if self.code == "lut" else 0)
        rows = 1 if self.sharing == "tensor" else out_features
        whole = len(self.whole) * rows * self.groups(in_features)
        return self.bits * out_features * in_features + self.whole_bits * whole + SCALE_BITS * floats
