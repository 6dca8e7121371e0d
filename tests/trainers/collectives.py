"""Reads compiled text: which collectives a program has, how much they move, and how deep in loops they lie."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

_KINDS = ("all-reduce", "all-gather", "all-to-all", "reduce-scatter", "collective-permute", "collective-broadcast")
_HEAD = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .* )?\{")
_OPERATION = re.compile(rf"= (.*?) ({'|'.join(_KINDS)})(?:-start)?\(")
_SHAPE = re.compile(r"\b(?:pred|bf16|[fsuc]\d+)\[([\d,]*)\]")
_CALLED = re.compile(r"(body|condition|calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"(?:branch_computations|called_computations)=\{([^}]*)\}")


class Collective(NamedTuple):
    """`kind`; `sizes`, elements of each array it gives; `depth`, while loops around it."""

    kind: str
    sizes: tuple[int, ...]
    depth: int


def collectives(text: str) -> list[Collective]:
    """All collectives of a compiled program, reached from its entry."""
    bodies, entry, name = {}, None, None
    for line in text.splitlines():
        head = _HEAD.match(line)
        if head:
            name = head.group(1)
            bodies[name] = []
            entry = name if line.startswith("ENTRY") else entry
        elif line.startswith("}"):
            name = None
        elif name is not None:
            bodies[name].append(line)
    assert entry is not None, "no ENTRY computation found in the compiled text"
    found: list[Collective] = []
    _walk(bodies, entry, 0, found)
    return found


def _walk(bodies: dict[str, list[str]], name: str, depth: int, found: list[Collective]) -> None:
    for line in bodies[name]:
        operation = _OPERATION.search(line)
        if operation:
            shapes = _SHAPE.findall(operation.group(1))
            sizes = tuple(math.prod(int(n) for n in s.split(",") if n) for s in shapes)
            found.append(Collective(operation.group(2), sizes, depth))
        called = [(where, inner) for where, inner in _CALLED.findall(line)]
        for names in _BRANCHES.findall(line):
            called += [("branch", n.strip().lstrip("%")) for n in names.split(",")]
        for where, inner in called:
            _walk(bodies, inner, depth + (where in ("body", "condition")), found)
