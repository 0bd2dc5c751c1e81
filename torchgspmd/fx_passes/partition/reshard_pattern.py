"""Reduce a reshard to its pattern: two layouts without names and scale.

before   x: f32[16, 4096, 2048] on data=8,seq=8,model=4, from "data seq _" to "data _ seq"
after    a pattern on p0=3,p1=3, from "p0 p1 _" to "p0 _ p1": any size but 2 will do here

A pattern's steps hold for all values with this pattern, so a process searches each once. How many
patterns there are, and how large each is, depends on the layouts and not on the device count:

* Axes that stand together in both layouts are one piece. Pieces have names by their first use.

* Axes that neither layout uses are left out. Where a size does not divide they stay: replicas can
pass on values that few devices have.

* A size that only a run knows is one row, of an open size too.

* A size that divides counts by its shards. If nothing is reduced, that is the least common multiple
between the shards before and after. A size that does not divide stays.

* A unit's bytes do not matter where they are many more than all fees.

Why nothing is lost: where all sizes divide and nothing is reduced, a permute sends exactly the
missing elements, and no path sends less. So only the fees for one collective and for a permute are
compared, and dimensions or piece parts that neither layout touches cannot help. Where terms are
reduced, pieces are joined only if all fit on dimensions: terms are then cut as finely as with
parts.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from ...comm.box_exchange import lacking
from ...comm.kinds import SEARCHED, CollectiveKind, Step, StepKind
from ...layout.mesh import Mesh
from ...layout.open_sizes import OpenSize, is_whole, like
from ...shard_spec import Axes, ShardSpec
from .cost_constants import (
    RESHARD_LIMITED,
    RESHARD_PERMUTES,
    RESHARD_SEARCHES,
    RESHARD_STATES,
    CostConstants,
    SearchCounts,
)
from .reshard_search import ReshardSearch, fee_of

MAX_PATTERNS = 2**16  # Patterns whose steps a process remembers.
MANY_BYTES = 2**16  # Bytes of a unit in the place of all large ones.
_ONE_OPEN = OpenSize(1)  # No step touches such a dimension: its rows are bytes of a unit.
_PRIMES = (3, 5, 7, 11, 13, 17, 19, 23)  # Sizes in the place of all but 2, where any size will do.
MIN_UNIT = 64  # A unit of so many bytes outweighs all fees of a path.


class Pattern(NamedTuple):
    """A reshard without names and scale. sizes: for pieces p0, p1. unit: bytes per element."""

    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    unit: int
    before: ShardSpec
    after: ShardSpec


class Send(NamedTuple):
    """A step that communicates. payload: in pattern elements. devices: per group."""

    kind: CollectiveKind
    payload: float
    devices: int
    fee: float


@dataclass(frozen=True)
class PatternSolution:
    """A pattern's cheapest steps, and the effort to search them."""

    steps: tuple[Step, ...]
    sends: tuple[Send, ...]
    states: int
    permutes: int
    limited: bool

    def add_to(self, counts: SearchCounts) -> None:
        counts[RESHARD_SEARCHES] += 1
        counts[RESHARD_STATES] += self.states
        counts[RESHARD_PERMUTES] += self.permutes
        if self.limited:
            counts[RESHARD_LIMITED] += 1


class Instance(NamedTuple):
    """A reshard as an instance of its pattern: each piece's axes, by its name, and the value.

    unit: bytes per pattern element; 0 if the pattern does not have the pieces' sizes.
    """

    pattern: Pattern
    pieces: dict[str, Axes]
    mesh: Mesh  # the mesh of the layouts
    shape: tuple[int, ...]
    itemsize: int
    pending: Axes  # of the layout before, in order
    unit: int

    def cost(self, solution: PatternSolution) -> float:
        """Return the bytes sent, plus the collectives' fees."""
        sends = solution.sends
        if self.unit:
            return sum(s.kind.sent(s.payload * self.unit, s.devices) + s.fee for s in sends)
        if not sends:
            return 0.0
        # The pattern's sizes are others, so the bytes are counted on the true shapes.
        missing = lacking(self._own_mesh(), self.shape, self.pattern.before, self.pattern.after)
        return missing * self.itemsize + sum(s.fee for s in sends)

    def steps(self, solution: PatternSolution, constants: CostConstants) -> Iterator[Step]:
        """Yield the steps with this reshard's axes and bytes."""
        mesh, spec = self._own_mesh(), self.pattern.before
        search = ReshardSearch(mesh, self.shape, self.itemsize, self.pattern.after, constants)
        for each in solution.steps:
            # Made again on the true mesh and shape: a step's bytes follow from these.
            moves = each.target.moves(search, spec, math.inf)
            same = (m for m in moves if m.args == each.args and m.spec == each.spec)
            step, spec = next(same), each.spec
            kind, axes = step.target, self._rename(step.axes)
            args = kind.rename(step.args, step.axes, self._rename)
            if "+".join(step.axes) not in step.args:  # a set of axes, in the mesh's order
                axes = tuple(axis for axis in self.mesh.names if axis in axes)
            new = spec.map_axes(self._rename)
            new = new.with_pending(tuple(a for a in self.pending if a in new.pending))
            yield Step(kind, args, new, axes, step.payload, step.sent)

    def _own_mesh(self) -> Mesh:
        return _mesh(tuple(map(self.mesh.count, self.pieces.values())))

    def _rename(self, pieces: Axes) -> Axes:
        return tuple(axis for piece in pieces for axis in self.pieces[piece])


@lru_cache(maxsize=4096)
def _mesh(sizes: tuple[int, ...]) -> Mesh:
    return Mesh(**{f"p{i}": n for i, n in enumerate(sizes)})


@lru_cache(maxsize=MAX_PATTERNS)
def instance(
    mesh: Mesh, shape: tuple[int, ...], itemsize: int, before: ShardSpec, after: ShardSpec
) -> Instance:
    """Return a reshard's pattern, with its names and bytes."""
    count, reduces = mesh.count, before.pending != after.pending
    used = tuple(dict.fromkeys(before.sharding_axes + after.sharding_axes + before.pending))
    even = all(
        b == a or not (n % count(b) or n % count(a))
        for n, b, a in zip(shape, before.dims, after.dims)
    )
    total = count(used) if even else mesh.size
    pieces = _joined(used, before, after) if even else ()
    if not even or reduces and not _has_room(mesh, shape, before, after, pieces):
        unused = () if even else tuple(a for a in mesh.names if a not in used and count((a,)) > 1)
        pieces = tuple((axis,) for axis in (*used, *unused))
    named, old, new = _named(pieces, before, after)
    sizes = tuple(map(count, pieces))
    rest = named, mesh, shape, itemsize, before.pending
    bytes_of_shard = itemsize * math.prod(shape) // max(total, 1)
    if even and not reduces and bytes_of_shard >= MIN_UNIT:
        named_sizes = tuple(2 if n == 2 else _PRIMES[i % len(_PRIMES)] for i, n in enumerate(sizes))
        shards = _mesh(named_sizes).count
        small = tuple(
            _ONE_OPEN if is_whole(n) else like(n, math.lcm(shards(b), shards(a)))
            for n, b, a in zip(shape, old.dims, new.dims)
        )
        return Instance(Pattern(named_sizes, small, MANY_BYTES, old, new), *rest, 0)
    small = tuple(
        _ONE_OPEN if is_whole(n) else like(n, total if _divides(n, total) else n) for n in shape
    )
    # An empty tensor has units too: they have bytes, and it has none of them.
    unit = itemsize * (math.prod(shape) // math.prod(small) if 0 not in small else 1)
    large = unit >= MIN_UNIT * total
    return Instance(Pattern(sizes, small, MANY_BYTES if large else unit, old, new), *rest, unit)


def _divides(size: int, devices: int) -> bool:
    """Return whether a dimension can be sharded over all devices without padding."""
    return not is_whole(size) and size > 0 and not size % devices


def _has_room(
    mesh: Mesh, shape: tuple[int, ...], before: ShardSpec, after: ShardSpec, pieces: Sequence[Axes]
) -> bool:
    """Return whether dimensions can take all other pieces beside the axes before and after.

    They take whole pieces, without padding, beside those before alone and beside both.
    """
    for layouts in ((before,), (before, after)):
        shards = [mesh.count({*itertools.chain(*dims)}) for dims in zip(*(s.dims for s in layouts))]
        rows = (n // s if _divides(n, s) else 1 for n, s in zip(shape, shards))
        placed = {axis for spec in layouts for axis in spec.sharding_axes}
        # Largest first: they have the fewest places, so a search for room fails early.
        free = sorted((mesh.count(p) for p in pieces if p[0] not in placed), reverse=True)
        if not _fits(tuple(free), tuple(rows)):
            return False
    return True


@lru_cache(maxsize=4096)
def _fits(counts: tuple[int, ...], rows: tuple[int, ...]) -> bool:
    """Return whether each count can divide the rows in a dimension, along with others there."""
    if not counts:
        return True
    first, *rest = counts
    return any(
        _divides(n, first) and _fits(tuple(rest), (*rows[:d], n // first, *rows[d + 1 :]))
        for d, n in enumerate(rows)
    )


# Values of many shapes share two layouts: their pieces and names follow from these alone.


@lru_cache(maxsize=MAX_PATTERNS)
def _named(
    pieces: tuple[Axes, ...], before: ShardSpec, after: ShardSpec
) -> tuple[dict[str, Axes], ShardSpec, ShardSpec]:
    """Return the pieces by their names, and both layouts with these names."""
    named = {f"p{i}": axes for i, axes in enumerate(pieces)}
    piece_of = {axis: name for name, axes in named.items() for axis in axes}

    def rename(axes: Axes) -> Axes:
        """Return the pieces that some axes form."""
        return tuple(dict.fromkeys(map(piece_of.__getitem__, axes)))

    return named, before.map_axes(rename), after.map_axes(rename)


@lru_cache(maxsize=MAX_PATTERNS)
def _joined(used: Axes, before: ShardSpec, after: ShardSpec) -> tuple[Axes, ...]:
    """Return the axes in pieces: those that follow on each other in both layouts are one."""
    old, new = _places(before), _places(after)
    pieces: dict[str, list[str]] = {}  # by the last axis
    for axis in used:
        last = next(
            (
                end
                for end in pieces
                if _follows(old.get(end), old.get(axis)) and _follows(new.get(end), new.get(axis))
            ),
            None,
        )
        pieces[axis] = [axis] if last is None else [*pieces.pop(last), axis]
    order = {axis: i for i, axis in enumerate(used)}
    return tuple(sorted(map(tuple, pieces.values()), key=lambda p: order[p[0]]))


def _places(spec: ShardSpec) -> dict[str, tuple[int, int]]:
    """Return each axis's dimension and position; dimension -1 for pending ones."""
    places = {a: (d, i) for d, axes in enumerate(spec.dims) for i, a in enumerate(axes)}
    return {**places, **{axis: (-1, 0) for axis in spec.pending}}


def _follows(first: tuple[int, int] | None, second: tuple[int, int] | None) -> bool:
    """Return whether an axis stands right behind another, or both stand nowhere, or are pending."""
    if first is None or second is None:
        return first is second
    return first == second or first[0] == second[0] >= 0 and first[1] + 1 == second[1]


def solve(pattern: Pattern, constants: CostConstants) -> PatternSolution:
    """Return a pattern's cheapest steps; a process searches each once."""
    # The kinds are part of the key, as tests and users may add some.
    return _solve(pattern, constants, tuple(SEARCHED))


@lru_cache(maxsize=MAX_PATTERNS)
def _solve(
    pattern: Pattern, constants: CostConstants, kinds: tuple[StepKind, ...]
) -> PatternSolution:
    """Return a pattern's cheapest steps, taken from these kinds."""
    mesh = _mesh(pattern.sizes)
    search = ReshardSearch(mesh, pattern.shape, pattern.unit, pattern.after, constants)
    steps = search.run(pattern.before)
    sends = tuple(
        Send(s.target, s.payload / pattern.unit, mesh.count(s.axes), fee_of(s, constants))
        for s in steps
        if isinstance(s.target, CollectiveKind) and s.collective
    )
    return PatternSolution(steps, sends, search.states, search.permutes, search.limited)
