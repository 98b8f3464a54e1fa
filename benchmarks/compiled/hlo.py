"""What a compiled program does, counted from the text of its optimised HLO.

The compiler's own sums (`cost_analysis`) count the body of a loop once, know nothing of custom calls and are negative
for some programs. Here everything that runs is counted as often as it runs: a loop's body times its trip count, nested
loops multiplied. The rules are those of XLA's `HloCostAnalysis`: an instruction moves its operands and its results, a
fusion those of the whole fusion; of an operand that is only sliced the slices count, of a buffer that is updated in
place the update. A product has 2 operations for each multiplication, TPU convolutions by their valid positions, and
elementwise work one for each number. So a program without loops gives the compiler's operations, and its bytes but for
copies that run beside other work, which the compiler counts more than once.

`bytes` is all traffic in HLO's sense; `hbm_bytes` leaves out what the compiler keeps in the chip's own memory (`S(1)`
in a layout), and is the part that a memory's rate bounds.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from qat_lora.errors import DamagedFileError

BITS = {"pred": 8, "token": 0, "opaque": 0, "bf16": 16, "c64": 64, "c128": 128}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id"}
FREE |= {"iota", "opt-barrier", "add-dependency", "domain"}  # they move nothing: a constant is read where it is used
ARITHMETIC = {"abs", "add", "and", "atan2", "cbrt", "ceil", "clamp", "compare", "convert", "cosine", "divide", "erf"}
ARITHMETIC |= {"count-leading-zeros", "exponential", "exponential-minus-one", "floor", "is-finite", "log", "logistic"}
ARITHMETIC |= {"log-plus-one", "maximum", "minimum", "multiply", "negate", "not", "or", "popcnt", "power", "remainder"}
ARITHMETIC |= {"round-nearest-afz", "round-nearest-even", "rsqrt", "select", "shift-left", "shift-right-arithmetic"}
ARITHMETIC |= {"shift-right-logical", "sign", "sine", "sqrt", "stochastic-convert", "subtract", "tan", "tanh", "xor"}
SLICES = frozenset({"dynamic-slice", "slice", "gather"})
CALLS: dict[str, tuple[str, ...]] = {"call": ("to_apply", "calls"), "async-start": ("to_apply", "calls")}
CALLS |= {"conditional": ("branch_computations", "true_computation", "false_computation")}  # too many: one of them runs
LARGEST = 10
_SHAPE = re.compile(r"([a-z]\w*)\[([\d,<=]*)\](?:\{([^}]*)\})?")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?\S+ = ", re.M)


class Shape(NamedTuple):
    """One array of a result."""

    dtype: str
    dims: tuple[int, ...]
    layout: str = ""  # axes from the fastest on, tiles and memory space, as in `1,0:T(8,128)(2,1)S(1)`

    @property
    def bytes(self) -> int:
        """Bytes as they lie in memory: whole tiles, so that [1024, 8] can take as much as [1024, 128]."""
        order, _, tiling = self.layout.partition(":")
        tiles = re.match(r"T\(([\d,]+)\)", tiling)
        stored = [self.dims[int(axis)] for axis in reversed(order.split(",")) if axis] if order else list(self.dims)
        if tiles:
            tile = [int(size) for size in tiles[1].split(",")]
            stored = [1] * (len(tile) - len(stored)) + stored
            whole = [-(-size // unit) * unit for size, unit in zip(stored[-len(tile) :], tile, strict=True)]
            stored = stored[: -len(tile)] + whole
        digits = re.search(r"\d+", self.dtype)
        bits = BITS.get(self.dtype, int(digits[0]) if digits else 8)
        return (math.prod(stored) * bits + 7) // 8


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    shapes: tuple[Shape, ...]
    opcode: str
    operands: tuple[str, ...]
    arguments: str  # what stands between the parentheses, for constants and parameters
    attributes: str
    is_root: bool

    def listed(self, key: str) -> list[str]:
        """Return what an attribute names, computations or axes."""
        found = re.search(rf"\b{key}=(?:\{{([^}}]*)\}}|(%?[\w.-]+))", self.attributes)
        return [name.strip().lstrip("%") for name in (found[1] or found[2] or "").split(",") if name] if found else []


Computation = dict[str, Instruction]


class Traffic(NamedTuple):
    """Bytes in HLO's sense, and those of HBM among them."""

    all: int
    hbm: int

    @classmethod
    def of(cls, shapes: tuple[Shape, ...]) -> Traffic:
        """Return the bytes of whole arrays."""
        in_hbm = (shape for shape in shapes if not re.search(r"S\([1-9]", shape.layout))
        return cls(sum(shape.bytes for shape in shapes), sum(shape.bytes for shape in in_hbm))

    def part(self, size: float) -> Traffic:
        """Return the traffic where at most `size` bytes of an array are touched."""
        return self if size >= self.all else Traffic(int(size), int(size) if self.hbm else 0)

    def plus(self, other: Traffic) -> Traffic:
        """Return the sum."""
        return Traffic(self.all + other.all, self.hbm + other.hbm)


NOTHING = Traffic(0, 0)


@dataclass
class Counts:
    """What a program does, everything as often as it runs."""

    instructions: int = 0  # of the text, each once
    executed: int = 0  # instructions that move something, with their repetitions: about the launches
    bytes: int = 0
    hbm_bytes: int = 0
    matrix_operations: int = 0
    operations: int = 0
    collectives: dict[str, dict[str, int]] = field(default_factory=dict)  # number and bytes by kind
    custom_calls: dict[str, dict[str, int]] = field(default_factory=dict)
    largest: list[dict[str, Any]] = field(default_factory=list)  # the instructions that move most, fusions mostly
    loops: int = 0
    unknown_trips: list[str] = field(default_factory=list)  # loops that count once, their trip count not being known


def instruction_count(text: str) -> int:
    """Return the instructions of all computations of a module."""
    return len(_INSTRUCTION.findall(text))


def parse(text: str) -> tuple[dict[str, Computation], str]:
    """Read a module's text, or raise DamagedFileError; return its computations by name, and the name of the entry."""
    computations: dict[str, Computation] = {}
    entry, inside = "", None
    for line in re.sub(r"/\*.*?\*/", "", text).splitlines():
        header = re.match(r"(ENTRY )?%?([\w.-]+) .*\{$", line)
        if header and not line.startswith((" ", "HloModule")):
            inside = computations[header[2]] = {}
            entry = header[2] if header[1] else entry
        elif line.startswith("}"):
            inside = None
        elif inside is not None and line.strip():
            instruction = _instruction(line)
            inside[instruction.name] = instruction
    if not entry:
        raise DamagedFileError("hlo: the text has no ENTRY computation; give the optimised HLO of a compiled program")
    return computations, entry


def _instruction(line: str) -> Instruction:
    name, equals, rest = line.strip().partition(" = ")
    end = _closing(rest, 0) + 1 if rest.startswith("(") else rest.find(" ")
    opens = rest.find("(", end)
    if not equals or end <= 0 or opens < 0:
        raise DamagedFileError(f"hlo: cannot read the instruction {line.strip()[:200]!r}")
    closes = _closing(rest, opens)
    shapes = tuple(
        Shape(kind, tuple(int(d.lstrip("<=")) for d in dims.split(",") if d), layout)
        for kind, dims, layout in _SHAPE.findall(rest[:end])
    )
    own, opcode, arguments = name.removeprefix("ROOT ").lstrip("%"), rest[end:opens].strip(), rest[opens + 1 : closes]
    operands = tuple(re.findall(r"%([\w.-]+)", arguments))
    return Instruction(own, shapes, opcode, operands, arguments, rest[closes + 1 :], name.startswith("ROOT "))


def _closing(text: str, opens: int) -> int:
    """Return where the parenthesis that opens at a place is closed."""
    depth = 0
    for found in re.compile(r"[()]").finditer(text, opens):
        depth += 1 if found[0] == "(" else -1
        if not depth:
            return found.start()
    return -1


def count(text: str) -> Counts:
    """Count a module; raises as `parse`."""
    computations, entry = parse(text)
    counter = _Counter(computations)
    counter.walk(entry, 1)
    counter.totals.largest = sorted(counter.totals.largest, key=lambda row: -row["bytes"])[:LARGEST]
    return counter.totals


class _Counter:
    def __init__(self, computations: Mapping[str, Computation]) -> None:
        self._computations = computations
        self.totals = Counts(instructions=sum(map(len, computations.values())))
        self._operations = functools.cache(self._operations_of)
        self._used: dict[int, dict[str, list[Instruction]]] = {}

    def walk(self, name: str, times: int) -> None:
        """Add a computation that runs so many times."""
        computation = self._computations[name]
        for instruction in computation.values():
            if instruction.opcode == "while":
                trips = trip_count(self._computations, computation, instruction)
                self.totals.loops += 1
                self.totals.unknown_trips += [instruction.name] if trips is None else []
                self.walk(instruction.listed("body")[0], times * (1 if trips is None else trips))
                self.walk(instruction.listed("condition")[0], times * (1 if trips is None else trips + 1))
            elif keys := CALLS.get(instruction.opcode):
                for called in itertools.chain(*map(instruction.listed, keys)):
                    self.walk(called, times)
            else:
                self._add(computation, instruction, times)

    def _add(self, computation: Computation, instruction: Instruction, times: int) -> None:
        totals = self.totals
        traffic = self._traffic(computation, instruction)
        matrix, other = self._work(computation, instruction)
        totals.matrix_operations += matrix * times
        totals.operations += (matrix + other) * times
        if traffic.all:
            totals.executed += times
            totals.bytes += traffic.all * times
            totals.hbm_bytes += traffic.hbm * times
            traced = re.search(r'op_name="([^"]*)"', instruction.attributes)
            label = traced[1] if traced else instruction.name
            moved = {"name": instruction.name, "opcode": instruction.opcode, "from": label[:120]}
            counted = {"times": times, "bytes": traffic.all * times, "operations": matrix * times}
            totals.largest.append(moved | counted)
        if instruction.opcode == "custom-call" and traffic.all:
            target = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
            _tally(totals.custom_calls, target[1] if target else "?", traffic.all, times)
        for kind, size in self._exchanges(computation, instruction):
            _tally(totals.collectives, kind, size, times)

    def _exchanges(self, computation: Computation, instruction: Instruction) -> Iterator[tuple[str, int]]:
        """Yield the collectives of an instruction, inside a fusion too: kind, and bytes of the larger side."""
        if instruction.opcode == "fusion":
            inner = self._called(instruction)
            for part in inner.values():
                yield from self._exchanges(inner, part)
        kind = instruction.opcode.removesuffix("-start")
        if kind in COLLECTIVES and not self._is_continued(computation, instruction):
            sent = sum(Traffic.of(computation[name].shapes).all for name in instruction.operands)
            yield kind, max(sent, Traffic.of(self._result(computation, instruction)).all)

    def _traffic(self, computation: Computation, instruction: Instruction) -> Traffic:
        opcode, operands = instruction.opcode, [computation[name] for name in instruction.operands]
        if opcode in FREE or opcode.endswith(("-done", "-update")) or "AllocateBuffer" in instruction.attributes:
            return NOTHING
        result = Traffic.of(self._result(computation, instruction))
        if opcode == "fusion":
            return self._fusion_traffic(instruction, operands)
        if opcode.removesuffix("-start") in SLICES:
            return result.plus(Traffic.of(operands[0].shapes).part(result.all))
        if opcode == "dynamic-update-slice":
            update = Traffic.of(operands[1].shapes)
            return update.plus(result.part(update.all))
        if opcode == "scatter":
            update = Traffic.of(operands[-1].shapes)
            return update.plus(update).plus(result.part(update.all))
        return functools.reduce(Traffic.plus, [Traffic.of(operand.shapes) for operand in operands], result)

    def _fusion_traffic(self, fusion: Instruction, operands: list[Instruction]) -> Traffic:
        inner, total = self._called(fusion), NOTHING
        for part in inner.values():
            if part.opcode == "parameter":
                total = total.plus(Traffic.of(operands[int(part.arguments)].shapes).part(self._touched(inner, part)))
        root = next(part for part in inner.values() if part.is_root)
        ends = [inner[name] for name in root.operands] if root.opcode == "tuple" else [root]
        if len(ends) != len(fusion.shapes):
            return total.plus(Traffic.of(fusion.shapes))
        for end, shape in zip(ends, fusion.shapes, strict=True):
            whole, end = Traffic.of((shape,)), _origin(inner, end)
            if end.opcode == "parameter" or self._is_continued(inner, end):
                continue  # handed on
            if end.opcode == "dynamic-update-slice":
                whole = whole.part(Traffic.of(inner[end.operands[1]].shapes).all)
            total = total.plus(whole)
        return total

    def _called(self, fusion: Instruction) -> Computation:
        return self._computations[fusion.listed("calls")[0]]

    def _touched(self, computation: Computation, value: Instruction) -> float:
        """Return how many bytes of a fusion's parameter are read where that is less than all; infinity for all."""
        return sum(self._touched_by(computation, user, value) for user in self._users(computation, value))

    def _touched_by(self, computation: Computation, user: Instruction, value: Instruction) -> float:
        if user.opcode in SLICES and user.operands[0] == value.name:
            return Traffic.of(user.shapes).all
        if user.opcode == "dynamic-update-slice" and value.name not in user.operands[1:]:
            return 0  # updated in place
        if (user.opcode == "tuple" and user.is_root) or self._is_continued(computation, user):
            return 0  # handed on
        if user.opcode == "fusion":
            inner = self._called(user)
            given = [part for part in inner.values() if part.opcode == "parameter"]
            found = sum(self._touched(inner, p) for p in given if user.operands[int(p.arguments)] == value.name)
            if found < math.inf:
                return found
        return self._touched(computation, user) if _only_lays_out(user) and not user.is_root else math.inf

    def _is_continued(self, computation: Computation, instruction: Instruction) -> bool:
        """Return whether this is a later part of a collective, which is in every fusion that runs beside it."""
        if "AsyncCollectiveDone" in instruction.attributes:
            return True
        if instruction.opcode not in COLLECTIVES or "async_collective_fusion_config" not in instruction.attributes:
            return False
        return not any("AsyncCollectiveStart" in user.attributes for user in self._users(computation, instruction))

    def _users(self, computation: Computation, value: Instruction) -> list[Instruction]:
        if id(computation) not in self._used:  # they all live as long as this object
            users = self._used[id(computation)] = defaultdict(list)
            for instruction in computation.values():
                for name in dict.fromkeys(instruction.operands):
                    users[name].append(instruction)
        return self._used[id(computation)].get(value.name, [])

    def _result(self, computation: Computation, instruction: Instruction) -> tuple[Shape, ...]:
        """Return the arrays that an instruction gives; of the start of an asynchronous one, what its end will give."""
        users = self._users(computation, instruction) if instruction.opcode.endswith("-start") else ()
        return next((user.shapes for user in users if user.opcode.endswith("-done")), instruction.shapes)

    def _work(self, computation: Computation, instruction: Instruction) -> tuple[int, int]:
        """Return an instruction's operations: of matrix products, and others."""
        elements = sum(math.prod(shape.dims) for shape in instruction.shapes[:1])
        if instruction.opcode == "fusion":
            return self._operations(instruction.listed("calls")[0])
        if instruction.opcode == "dot":
            left = computation[instruction.operands[0]].shapes[0].dims
            return 2 * elements * math.prod(left[int(d)] for d in instruction.listed("lhs_contracting_dims")), 0
        if instruction.opcode == "convolution":
            left, right = (computation[name].shapes[0].dims for name in instruction.operands)
            return convolution_operations(left, right, instruction.shapes[0].dims, instruction.attributes), 0
        if instruction.opcode in ("reduce", "reduce-window"):
            return 0, math.prod(computation[instruction.operands[0]].shapes[0].dims)
        return 0, elements if instruction.opcode in ARITHMETIC else 0

    def _operations_of(self, name: str) -> tuple[int, int]:
        computation = self._computations[name]
        found = [self._work(computation, instruction) for instruction in computation.values()]
        return sum(matrix for matrix, _ in found), sum(other for _, other in found)


def _tally(table: dict[str, dict[str, int]], kind: str, size: int, times: int) -> None:
    row = table.setdefault(kind, {"number": 0, "bytes": 0})
    row["number"] += times
    row["bytes"] += size * times


def _only_lays_out(instruction: Instruction) -> bool:
    """Return whether an instruction inside a fusion gives the numbers that it takes, laid out or stored otherwise."""
    return len(instruction.operands) == 1 and instruction.opcode in ("bitcast", "convert", "copy", "fusion")


def _origin(computation: Computation, instruction: Instruction) -> Instruction:
    """Return what an instruction lays out otherwise, or itself."""
    while _only_lays_out(instruction):
        instruction = computation[instruction.operands[0]]
    return instruction


def trip_count(computations: Mapping[str, Computation], computation: Computation, loop: Instruction) -> int | None:
    """Return how often a loop's body runs: as the compiler noted it, or from a counter's start, step 1 and bound."""
    noted = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', loop.attributes)
    if noted:
        return int(noted[1])
    condition = computations[loop.listed("condition")[0]]
    compared = next(part for part in condition.values() if part.is_root)
    if compared.opcode == "fusion":  # its parameters are what it is given
        inner = computations[compared.listed("calls")[0]]
        given = [condition[name] for name in compared.operands]
        named = {part.name: given[int(part.arguments)] for part in inner.values() if part.opcode == "parameter"}
        condition, compared = condition | inner | named, next(part for part in inner.values() if part.is_root)
    direction = re.search(r"direction=(LT|LE|NE)", compared.attributes)
    if compared.opcode != "compare" or not direction:
        return None
    sides = [_origin(condition, condition[name]) for name in compared.operands]
    bound = next((side for side in sides if side.opcode == "constant"), None)
    counter = next((side for side in sides if side.opcode == "get-tuple-element"), None)
    index = counter and re.search(r"index=(\d+)", counter.attributes)
    if bound is None or not index:
        return None
    start = computation[loop.operands[0]]
    first = computation.get(start.operands[int(index[1])]) if start.opcode == "tuple" else None
    first = first and _origin(computation, first)
    if first is None or first.opcode != "constant":
        return None
    return int(bound.arguments) - int(first.arguments) + (direction[1] == "LE")


def convolution_operations(left: tuple[int, ...], right: tuple[int, ...], out: tuple[int, ...], attributes: str) -> int:
    """Return the operations of a convolution: 2 for each product of numbers that are really there.

    A TPU's compiler writes every product of matrices as one, a batched one over dilated or padded positions of which
    most hold nothing.
    """
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", attributes)
    if labels is None:
        raise DamagedFileError(f"hlo: a convolution without dim_labels: {attributes[:200]!r}")
    groups = re.search(r"batch_group_count=(\d+)", attributes)
    window = re.search(r"window=\{([^}]*)\}", attributes)
    fields = dict(part.split("=") for part in window[1].split()) if window else {}
    spatial = sorted(set(labels[1]) - set("bf"))
    positions = 1
    for place, axis in enumerate(spatial):
        of = {name: value.split("x")[place] for name, value in fields.items()}
        sizes = (left[labels[1].index(axis)], right[labels[2].index(axis)], out[labels[3].index(axis)])
        low = int(of.get("pad", "0_0").split("_")[0])
        steps = tuple(int(of.get(name, 1)) for name in ("stride", "lhs_dilate", "rhs_dilate"))
        positions *= _valid_positions(*sizes, low, *steps)
    batch = left[labels[1].index("b")] // (int(groups[1]) if groups else 1)
    return 2 * positions * batch * right[labels[2].index("i")] * out[labels[3].index("f")]


@functools.cache
def _valid_positions(size: int, kernel: int, out: int, low: int, stride: int, lhs_dilate: int, rhs_dilate: int) -> int:
    """Return for how many pairs of output and kernel positions one axis of a convolution has an input."""
    at = np.arange(out)[:, None] * stride - low + np.arange(kernel)[None] * rhs_dilate
    return int(((at >= 0) & (at <= (size - 1) * lhs_dilate) & (at % lhs_dilate == 0)).sum())
