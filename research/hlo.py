"""Parser of XLA's text of a compiled program: launches, their counts, and traffic and products of kernels.

A launch is a fusion, a kernel of a library or of ours, or a copy. Loops multiply their content by their trip count, if
the compiler knows it and so the text has it. The branch with the fewest launches counts for a conditional. If a trip
count is not known, or a branch is chosen, the host reads a predicate.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterator, Mapping

Trips = Callable[[int], float]  # iterations of a loop whose text does not have them, by the number of loops around it
Shares = Mapping[int, float]  # by bytes of an array: the fraction that our kernels read, which have no text here

# Instructions that launch nothing.
FREE = (
    "parameter", "bitcast", "get-tuple-element", "tuple", "constant", "after-all", "opt-barrier", "partition-id",
    "replica-id",
)  # fmt: skip
PREDICATES = ("while", "conditional")
_CALLS = {"call": "to_apply", "async-start": "calls"}
_SLICES = ("slice", "dynamic-slice", "gather")  # they read as much of their first operand as they return
_UPDATES = ("dynamic-update-slice", "scatter")  # they change their first operand in place
_ARRAY = re.compile(r"\b([a-z]+\d*\w*)\[([\d,]*)\]")
_KNOWN = re.compile(r'"known_trip_count":\s*\{\s*"n":\s*"(\d+)"')
_BEGIN = re.compile(r"(?:ENTRY )?%(\S+) \(.*\{\s*$")
_LINE = re.compile(r"\s+(ROOT )?%(\S+) = (.*)$")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction.

    Attributes:
      type: Type of the result, as text.
      arguments: Text between the parentheses.
      attributes: Text after them.
    """

    name: str
    type: str
    opcode: str
    arguments: str
    attributes: str

    @functools.cached_property
    def operands(self) -> tuple[str, ...]:
        return tuple(re.findall(r"%([\w.\-]+)", self.arguments)) if self.opcode != "constant" else ()

    @functools.cached_property
    def arrays(self) -> tuple[Array, ...]:
        """Arrays of the result, several for a tuple."""
        return tuple(Array.of(*found) for found in _ARRAY.findall(self.type))

    @functools.cached_property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.arrays)

    @functools.cached_property
    def aliased(self) -> frozenset[int]:
        """Numbers of the results that are operands changed in place."""
        found = re.search(r"output_to_operand_aliasing=\{(.*?\))\}", self.attributes)
        return frozenset(int(number or 0) for number in re.findall(r"\{(\d*)\}: \(", found[1] if found else ""))

    def called(self, attribute: str) -> list[str]:
        """Return the names of the computations in an attribute."""
        found = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%\S+)", self.attributes)
        return re.findall(r"%([\w.\-]+)", found[1]) if found else []


@dataclasses.dataclass(frozen=True)
class Array:
    """The shape of an array, and the bits of a value."""

    shape: tuple[int, ...]
    bits: int

    @classmethod
    def of(cls, dtype: str, shape: str) -> Array:
        bits = re.match(r"[a-z]+(\d+)", dtype)
        known = int(bits[1]) if bits else {"pred": 8}.get(dtype, 0)
        return cls(tuple(map(int, filter(None, shape.split(",")))), known)

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.bits // 8


@dataclasses.dataclass(frozen=True)
class Launch:
    """An instruction that is launched, or whose predicate the host reads, and its count.

    Attributes:
      block: Its computation.
      loops: Number of loops around it.
    """

    instruction: Instruction
    block: dict[str, Instruction]
    times: float
    loops: int

    @property
    def is_predicate(self) -> bool:
        return self.instruction.opcode in PREDICATES


@dataclasses.dataclass(frozen=True)
class Traffic:
    """Bytes that a kernel moves: reads of the program's arguments, other reads, and writes."""

    arguments: float
    temporaries: float

    @property
    def bytes(self) -> float:
        return self.arguments + self.temporaries


class Module:
    """A compiled program.

    Attributes:
      computations: Their instructions by name, in their order.
      entry: Name of the first computation.
    """

    def __init__(self, text: str):
        self.computations: dict[str, dict[str, Instruction]] = {}
        self._roots: dict[str, Instruction] = {}
        self.entry = ""
        name = ""
        for line in text.splitlines():
            if not line.startswith(" "):
                begin = _BEGIN.match(line)
                name = begin[1] if begin else ""
                if begin:
                    self.computations[name] = {}
                    self.entry = name if line.startswith("ENTRY") else self.entry
            elif name and (found := _LINE.match(line)):
                instruction = _instruction(found[2], found[3])
                self.computations[name][instruction.name] = instruction
                if found[1]:
                    self._roots[name] = instruction
        if not self.entry:
            raise ValueError(f"text must be of a compiled program, got {text[:100]!r}")

    def launches(self, trips: Trips) -> list[Launch]:
        """Return all launches and all predicates."""
        return list(self._launches(self.entry, 1.0, 0, trips))

    def _launches(self, name: str, times: float, loops: int, trips: Trips) -> Iterator[Launch]:
        block = self.computations[name]
        for instruction in block.values():
            if instruction.opcode in FREE or instruction.opcode.endswith("-done"):
                continue
            launch = Launch(instruction, block, times, loops)
            if instruction.opcode == "while":
                known = trip_count(instruction)
                turns = times * (trips(loops) if known is None else known)
                if known is None:
                    yield dataclasses.replace(launch, times=turns)
                    yield from self._launches(instruction.called("condition")[0], turns, loops + 1, trips)
                yield from self._launches(instruction.called("body")[0], turns, loops + 1, trips)
            elif instruction.opcode == "conditional":
                names = ("branch_computations", "true_computation", "false_computation")
                branches = [branch for attribute in names for branch in instruction.called(attribute)]
                yield launch
                ways = [list(self._launches(branch, times, loops, trips)) for branch in branches]
                yield from min(ways, key=lambda way: sum(one.times for one in way))
            elif instruction.opcode in _CALLS and (callees := instruction.called(_CALLS[instruction.opcode])):
                yield from self._launches(callees[0], times, loops, trips)
            else:
                yield launch

    def traffic(self, launch: Launch, shares: Shares) -> Traffic:
        """Return the traffic of a kernel: operands as far as it reads them, results as far as they are not changed in
        place.
        """
        arguments = 0.0
        temporaries = float(sum(self._written(launch.instruction, launch.block)))
        for at, name in enumerate(launch.instruction.operands):
            size, maker = launch.block[name].bytes, source(launch.block, name)
            read = self._read(launch.instruction, at, size, shares)
            if maker.opcode == "parameter":
                arguments += read
            elif maker.opcode != "constant":
                temporaries += read
        return Traffic(arguments, temporaries)

    def operations(self, launch: Launch) -> int:
        """Return the multiplications and additions of a kernel's matrix products that the text has."""
        return self._operations(launch.instruction, launch.block)

    def _operations(self, instruction: Instruction, block: dict[str, Instruction]) -> int:
        if instruction.opcode == "fusion":
            inner = self.computations[instruction.called("calls")[0]]
            return sum(self._operations(one, inner) for one in inner.values())
        if instruction.opcode == "dot":
            axes = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes)
        elif instruction.opcode == "custom-call" and '"__cublas' in instruction.attributes:
            axes = re.search(r'"lhs_contracting_dimensions":\s*\[([\d",\s]*)\]', instruction.attributes)
        else:
            return 0
        if axes is None:
            raise ValueError(f"a product must name the axes it sums over, got {instruction}")
        [left, *_] = block[instruction.operands[0]].arrays
        summed = math.prod(left.shape[int(axis)] for axis in re.findall(r"\d+", axes[1]))
        return 2 * math.prod(instruction.arrays[0].shape) * summed

    def _written(self, instruction: Instruction, block: dict[str, Instruction]) -> list[int]:
        """Return the bytes that each part of a result is written with."""
        if instruction.opcode == "fusion":
            name = instruction.called("calls")[0]
            return self._written(self._roots[name], self.computations[name])
        if instruction.opcode == "tuple":
            return [size for name in instruction.operands for size in self._written(block[name], block)]
        if instruction.opcode == "bitcast":
            return self._written(block[instruction.operands[0]], block)
        if instruction.opcode == "dynamic-update-slice":
            return [block[instruction.operands[1]].bytes]
        if instruction.opcode == "scatter":  # arrays, indices, and as many updates
            return [block[name].bytes for name in instruction.operands[len(instruction.operands) // 2 + 1 :]]
        return [array.bytes for i, array in enumerate(instruction.arrays) if i not in instruction.aliased]

    def _read(self, instruction: Instruction, at: int, size: int, shares: Shares) -> float:
        """Return the bytes that an instruction reads of its operand number `at`, which has `size`."""
        if instruction.opcode in _SLICES and at == 0:
            return min(size, instruction.bytes)
        if instruction.opcode in _UPDATES and at == 0:
            return 0
        if instruction.opcode == "fusion":
            block = self.computations[instruction.called("calls")[0]]
            parameter = next(one for one in block.values() if one.opcode == "parameter" and one.arguments == str(at))
            return min(size, self._read_inside(block, parameter.name, size, shares))
        return size * shares.get(size, 1) if instruction.opcode == "custom-call" else size

    def _read_inside(self, block: dict[str, Instruction], name: str, size: int, shares: Shares) -> float:
        total = 0.0
        for user in block.values():
            for at, operand in enumerate(user.operands):
                if operand == name:
                    if user.opcode == "bitcast":
                        total += self._read_inside(block, user.name, size, shares)
                    else:
                        total += self._read(user, at, size, shares)
        return total


def trip_count(loop: Instruction) -> int | None:
    """Return the number of iterations of a loop, if the compiler knows it."""
    known = _KNOWN.search(loop.attributes)
    return int(known[1]) if known else None


def _instruction(name: str, text: str) -> Instruction:
    """Parse an instruction from the text after its name."""
    end = _closing(text, 0) if text.startswith("(") else text.index(" ")
    written, rest = text[:end], text[end:].lstrip()
    opcode, begin = rest[: rest.index("(")], rest.index("(")
    end = _closing(rest, begin)
    return Instruction(name, written, opcode, rest[begin + 1 : end - 1], rest[end:])


def _closing(text: str, begin: int) -> int:
    """Return the position after the parenthesis that closes the one at `begin`."""
    depth = 0
    for at in range(begin, len(text)):
        depth += (text[at] == "(") - (text[at] == ")")
        if not depth:
            return at + 1
    raise ValueError(f"a parenthesis is never closed: {text[begin : begin + 100]}")


def source(block: dict[str, Instruction], name: str) -> Instruction:
    """Return the instruction that made an array, or the argument that it is."""
    instruction = block[name]
    while instruction.opcode in ("bitcast", "get-tuple-element") and instruction.operands:
        instruction = block[instruction.operands[0]]
    return instruction
