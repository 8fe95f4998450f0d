"""Reads compiled programs: XLA's HLO text, and its dump of the thunks that run it."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator

# Instructions that hand on arrays and write none.
HANDS_ON = {"parameter", "get-tuple-element", "tuple", "bitcast", "while", "conditional", "call", "constant"}


@dataclasses.dataclass(frozen=True)
class Instruction:
    opcode: str
    shapes: tuple[tuple[int, ...], ...]  # of the array or arrays that it gives
    text: str

    @property
    def largest(self) -> int:
        """Elements."""
        return max(map(math.prod, self.shapes), default=0)

    @property
    def scope(self) -> str:
        """Where in the Python code it comes from: ``jit(step)/.../op/...``."""
        found = re.search(r'op_name="([^"]*)"', self.text)
        return found[1] if found else ""

    @property
    def in_place(self) -> bool:
        return "output_to_operand_aliasing=" in self.text


def instructions(hlo: str) -> list[Instruction]:
    """Those that run by themselves: what is inside a fusion or a reduction is left out, but for custom calls, whose
    operands XLA slices in a fusion where that saves a copy."""
    inner = set()
    for line in hlo.splitlines():
        inner |= set(re.findall(r"calls=%([\w.\-]+)", line))
        if not re.search(r" call\(", line):
            inner |= set(re.findall(r"to_apply=%([\w.\-]+)", line))
    parsed = ((name, _parse(line)) for name, line in _lines(hlo))
    return [i for name, i in parsed if i and (name not in inner or i.opcode == "custom-call")]


def _lines(hlo: str) -> Iterator[tuple[str, str]]:
    """Each line with the name of its computation."""
    name = ""
    for line in hlo.splitlines():
        if header := re.match(r"(?:ENTRY )?%([\w.\-]+) \(.*\{$", line):
            name = header[1]
        elif line.startswith("  "):
            yield name, line


def _parse(line: str) -> Instruction | None:
    match = re.match(r"  (?:ROOT )?%[\w.\-]+ = (.*)", line)
    if not match:
        return None
    rest = match[1]
    end = _closing(rest) if rest.startswith("(") else rest.index(" ")
    shapes = tuple(
        tuple(map(int, filter(None, dims.split(",")))) for dims in re.findall(r"\w+\[([\d,]*)\]", rest[:end])
    )
    opcode = re.match(r"\s*([\w\-]+)\(", rest[end:])
    return Instruction(opcode[1], shapes, line) if opcode else None


def _closing(text: str) -> int:
    """Index after the parenthesis that closes the first one."""
    depth = 0
    for i, c in enumerate(text):
        depth += (c == "(") - (c == ")")
        if depth == 0:
            return i + 1
    raise ValueError(f"unbalanced: {text[:100]}")


def aliased_outputs(hlo: str) -> int:
    """How many outputs of the program are the memory of an argument."""
    head = hlo.splitlines()[0]
    return len(re.findall(r"\(\d+, \{\}, (?:may|must)-alias\)", head))


def launched_singly(thunks: str) -> int:
    """Custom calls outside of command buffers: the host launches each of them by itself.

    ``thunks``: lines such as ``    012: kCustomCall ...``, indented by what they are part of.
    """
    count, buffer = 0, None
    for line in thunks.splitlines():
        depth = len(line) - len(line.lstrip())
        if buffer is not None and depth <= buffer:
            buffer = None
        if buffer is None and ": kCommandBuffer" in line:
            buffer = depth
        count += buffer is None and ": kCustomCall " in line
    return count
