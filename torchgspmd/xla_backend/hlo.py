"""Parse the collectives in a partitioned XLA program's text: kind, mesh axes, bytes.

XLA on a TPU or GPU turns an all-reduce whose result is only sliced into a reduce-scatter. XLA:CPU
does not; such an all-reduce is counted as reduce_scatter here.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ..comm.collective import Collective
from ..comm.kinds import collective_kinds
from ..layout.mesh import Mesh

KINDS = {kind.xla: kind for kind in collective_kinds().values() if kind.xla}
# Operations that may stand between an all-reduce and its slices.
_MOVES = {"bitcast", "copy", "reshape", "transpose", "convert", "pad"}
_NAMES = {"pred": "bool", "s8": "i8", "s16": "i16", "s32": "i32", "s64": "i64"}
_SHAPE = r"[a-z]\w*\[[\d,]*\](?:\{[^}]*\})?"
_LINE = re.compile(
    rf"^\s*(?:ROOT )?%(?P<name>[\w.\-]+) = (?P<shape>\(.*?\)|{_SHAPE}) "
    r"(?P<op>[\w\-]+)\((?P<args>.*?)\)(?:, (?P<rest>.*))?$"
)


@dataclass(frozen=True)
class HloInstruction:
    """One line in an XLA program."""

    name: str
    op: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...]  # (element type, dimensions), one per result
    operands: tuple[str, ...]
    number: str  # of a parameter
    rest: str  # attributes

    @property
    def bytes(self) -> int:
        # A type's name has its bits, such as bf16; pred has none.
        bits = [int(re.sub(r"\D", "", kind) or 8) for kind, _ in self.shapes]
        return sum(math.prod(dims) * n // 8 for n, (_, dims) in zip(bits, self.shapes))

    @property
    def size(self) -> int:
        return sum(math.prod(dims) for _, dims in self.shapes)


class HloModule:
    """An XLA module's instructions, by computation, and their users."""

    def __init__(self, text: str) -> None:
        self.computations: dict[str, dict[str, HloInstruction]] = {}
        current: dict[str, HloInstruction] = {}
        for line in text.splitlines():
            # Comments such as /*index=5*/ stand inside of shapes.
            line = re.sub(r"/\*.*?\*/", "", line)
            head = re.match(r"^(?:ENTRY )?%([\w.\-]+) \(.*\{$", line)
            if head:
                current = self.computations[head[1]] = {}
            match = _LINE.match(line)
            if match:
                shapes = tuple(
                    (kind, tuple(int(n) for n in dims.split(",") if n))
                    for kind, dims in re.findall(r"([a-z]\w*)\[([\d,]*)\]", match["shape"])
                )
                number = match["args"] if match["op"] == "parameter" else ""
                name, operands = match["name"], tuple(re.findall(r"%([\w.\-]+)", match["args"]))
                rest = match["rest"] or ""
                current[name] = HloInstruction(name, match["op"], shapes, operands, number, rest)
        self.users = {name: _users(body) for name, body in self.computations.items()}

    def collectives(self) -> Iterator[tuple[str, HloInstruction]]:
        for name, body in self.computations.items():
            for instruction in body.values():
                if instruction.op in KINDS:
                    yield name, instruction

    def is_scattered(self, computation: str, value: HloInstruction, group: int) -> bool:
        """True if a value is only used in equal slices, one per device in the group."""
        users = self.users[computation].get(value.name, [])
        return bool(users) and all(self._slices(computation, user, value, group) for user in users)

    def _slices(
        self, computation: str, user: HloInstruction, value: HloInstruction, group: int
    ) -> bool:
        if user.op == "dynamic-slice":
            return user.operands[0] == value.name and user.size * group <= value.size
        if user.op in _MOVES:
            return self.is_scattered(computation, user, group)
        called = re.search(r"calls=%([\w.\-]+)", user.rest)
        if user.op != "fusion" or called is None:
            return False
        places = {str(i) for i, name in enumerate(user.operands) if name == value.name}
        # A fusion has the slices in its own computation.
        inner = [
            i
            for i in self.computations[called[1]].values()
            if i.op == "parameter" and i.number in places
        ]
        return all(self.is_scattered(called[1], parameter, group) for parameter in inner)


def _users(body: dict[str, HloInstruction]) -> dict[str, list[HloInstruction]]:
    users: dict[str, list[HloInstruction]] = {}
    for instruction in body.values():
        for name in dict.fromkeys(instruction.operands):
            users.setdefault(name, []).append(instruction)
    return users


def collectives(text: str, mesh: Mesh) -> tuple[Collective, ...]:
    program = HloModule(text)
    return tuple(
        _collective(program, computation, instruction, mesh)
        for computation, instruction in program.collectives()
    )


def _collective(
    program: HloModule, computation: str, instruction: HloInstruction, mesh: Mesh
) -> Collective:
    kind, rest = KINDS[instruction.op], instruction.rest
    has_pairs = "source_target_pairs" in rest
    groups = _pairs(rest) if has_pairs else _groups(rest)
    axes = _axes(groups, mesh)
    # Pairs name two devices each, however many devices exchange.
    size = mesh.count(axes) if has_pairs else len(groups[0])
    payload = kind.payload_from(instruction.bytes, size)
    if kind.sliced and program.is_scattered(computation, instruction, size):
        kind = kind.sliced
    dtype = instruction.shapes[0][0]
    return Collective(
        kind.name, axes, size, _NAMES.get(dtype, dtype), payload, kind.sent(payload, size)
    )


def _pairs(rest: str) -> list[list[int]]:
    pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", rest)
    assert pairs is not None, rest
    return [[int(n) for n in pair.split(",")] for pair in re.findall(r"\{(\d+,\d+)", pairs[1])]


def _groups(rest: str) -> list[list[int]]:
    """Parse replica_groups: a list {{0,1},{2,3}} or a transposed grid [2,2]<=[2,2]T(1,0)."""
    grid = re.search(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", rest)
    if grid is None:
        groups = re.search(r"replica_groups=\{(.*?\})\}", rest)
        assert groups is not None, rest
        texts = re.findall(r"\{([\d,]+)\}", groups[1])
        return [[int(n) for n in group.split(",")] for group in texts]
    (_, width), shape = ([int(n) for n in part.split(",")] for part in (grid[1], grid[2]))
    order = [int(n) for n in grid[3].split(",")] if grid[3] else range(len(shape))
    strides = [math.prod(shape[i + 1 :]) for i in range(len(shape))]
    flat = [
        sum(i * strides[d] for i, d in zip(place, order))
        for place in itertools.product(*(range(shape[d]) for d in order))
    ]
    return [flat[i : i + width] for i in range(0, len(flat), width)]


def _axes(groups: list[list[int]], mesh: Mesh) -> tuple[str, ...]:
    """Return the fewest mesh axes that every group lies along."""
    places = [[mesh.coordinates(device) for device in group] for group in groups]
    return tuple(
        name
        for name in mesh.names
        if any(len({place[name] for place in group}) > 1 for group in places)
    )
