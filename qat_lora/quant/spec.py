"""What a quantised weight is made of.

A weight is stored as W ~ Q * S: every entry of Q is one of 2^bits code values, S is a positive scale that many
entries share. `QuantSpec` names the code book and the sharing, and counts the bits.

Sources: half-integer 2-bit codes, Apple Foundation Models 2025; low-rank scales, LoRDS (arXiv 2601.22716); normal
tables, NF4 of QLoRA (arXiv 2305.14314).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from qat_lora.config import INT_LIMIT
from qat_lora.errors import ConfigError

SCALE_BITS = 16  # scales, low-rank factors and look-up tables are stored as float16
Code = Literal["half", "integer", "asymmetric", "lut"]
Table = Literal["even", "normal"]
Sharing = Literal["tensor", "channel", "group", "lowrank"]


@dataclass(frozen=True, kw_only=True)
class QuantSpec:
    """One way to store a weight matrix [O, I].

    Attributes:
        bits: bits of a code, 2 to 8.
        code: `half` = {+-1/2, +-3/2, ...}, balanced and without a zero; `integer` = {-2^(b-1) .. 2^(b-1)-1};
            `asymmetric` = {-z .. 2^b-1-z} with a zero point z of `bits` bits for every scale; `lut` = a table of
            2^bits values, stored per layer, free to train.
        sharing: what shares a scale: the whole `tensor`, an output `channel`, a `group` of consecutive inputs of
            one channel, or nothing (`lowrank`: S = A B, every entry its own scale from two thin factors).
        group_size: inputs of a group; the last group of a row may be shorter. With `lowrank`, the group whose
            scales A B starts from.
        rank: columns of A, with `lowrank`.
        table: what a `lut` starts from: the `even` spread over [-1, 1], or quantiles of the `normal` distribution
            with an exact zero.
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
        """Return the count of stored numbers that make the scales of an [O, I] weight."""
        if self.rank is not None:
            return self.rank * (out_features + in_features)
        return (1 if self.sharing == "tensor" else out_features) * self.groups(in_features)

    def groups(self, in_features: int) -> int:
        """Return how many groups with a scale of their own a row has."""
        return -(-in_features // self.group_size) if self.group_size else 1

    def stored_bits(self, out_features: int, in_features: int) -> int:
        """Return the bits that an [O, I] weight takes: codes, scales, zero points and look-up table."""
        scales = self.scale_count(out_features, in_features)
        table = 2**self.bits if self.code == "lut" else 0
        zeros = scales if self.code == "asymmetric" else 0
        return self.bits * (out_features * in_features + zeros) + SCALE_BITS * (scales + table)
