"""Which dimensions of a carry the map to the next carry mixes, by the rules of its operations.

%r = einsum("bck,bkv->bcv", %w, %h);  %s = einsum("bkc,bcv->bkv", %kT, %r);  %h1 = sub(%h, %s)

Each column v of the next carry follows from the same column of this one: v is kept, and so is b.
All rows k follow from all rows: k is mixed. %w and %kT have no v, so that all columns have one map.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from os.path import commonprefix

from torch import fx

from ...fx_passes.ir import Op
from ...rules.notation import FactorRule
from ...rules.ops.pointwise import named

Piece = tuple[int, int | None]  # a part of a dimension: its size, and the carry's kept dimension
Tags = list[list[Piece]]  # for each dimension its pieces, major first, without those of one row


@dataclass(frozen=True)
class CarryDims:
    """A carry's dimensions. uniform: kept ones whose indices all have the same map; mixed: above.

    depends: whether the next carry depends on this one at all.
    """

    mixed: tuple[int, ...]
    uniform: tuple[int, ...]
    depends: bool = True


# Linear in the first operand, a gradient. Their rules do not say so: sums are reduced in front.
_GRADIENTS = {
    *named("""
        elu_backward gelu_backward hardsigmoid_backward hardswish_backward hardtanh_backward
        leaky_relu_backward log_sigmoid_backward sigmoid_backward silu_backward softplus_backward
        tanh_backward threshold_backward
    """)
}
Groups = Callable[[Op], Sequence[frozenset[int]]]  # of operands in which an operation is linear


def carry_dims(
    path: Sequence[Op], carry: fx.Node, again: fx.Node, groups: Groups
) -> CarryDims | None:
    """Return how a map mixes a carry's dimensions; None if the rules show no linear map.

    path: the operations from the carry to the next one, in order.
    """
    shape = carry.meta["val"].shape
    mixed: set[int] = set()
    while True:
        varied = _Mixing(path, carry, mixed, groups)
        if not varied.walk():
            return None
        tags = varied.tags.get(again)
        if tags is None:
            return CarryDims((), (), depends=False)
        for d, pieces in enumerate(tags):
            if pieces != _own(shape[d], d, varied.mixed):
                varied.mixed |= {d} | _kept(pieces)
        if varied.mixed == mixed:
            kept = [d for d in range(len(shape)) if d not in mixed]
            return CarryDims(tuple(sorted(mixed)), tuple(d for d in kept if d not in varied.varied))
        mixed = varied.mixed


def _own(size: int, d: int, mixed: set[int]) -> list[Piece]:
    return [(size, None if d in mixed else d)] if size > 1 else []


def _kept(pieces: Iterable[Piece]) -> set[int]:
    return {d for _, d in pieces if d is not None}


class _Mixing:
    """Follows a carry's dimensions through operations. varied: along these, operands differ."""

    def __init__(self, path: Sequence[Op], carry: fx.Node, mixed: set[int], groups: Groups) -> None:
        self.path, self.mixed, self.varied = path, {*mixed}, set[int]()
        self.groups = groups
        sizes = carry.meta["val"].shape
        self.tags: dict[fx.Node, Tags] = {carry: [_own(n, d, mixed) for d, n in enumerate(sizes)]}

    def walk(self) -> bool:
        """Return False if an operation is not linear in what depends on the carry."""
        for op in self.path:
            places = [i for i, v in enumerate(op.operands) if v in self.tags]
            group = linear_group(self.groups(op), places)
            if group is None or op.results != (op.node,):
                return False
            self.tags[op.node] = self._behind(op.rule, op, places, group)
        return True

    def _behind(
        self, rule: FactorRule, op: Op, places: Sequence[int], group: frozenset[int]
    ) -> Tags:
        """Return the tags of an operation's result."""
        content: dict[str, list[Piece]] = {}
        for i in places:
            for names, pieces in zip(rule.operands[i], self.tags[op.operands[i]]):
                for factor, own in self._matched(rule.sizes, names, pieces).items():
                    if content.setdefault(factor, own) != own:
                        self.mixed |= _kept(content[factor]) | _kept(own)
        moved = {f for i, d in rule.row_access for f in rule.operands[i][d]}
        for factor in rule.replicated.union(rule.reduce, rule.special, moved):
            self.mixed |= _kept(content.get(factor, ()))
        (dims,) = rule.results
        kept = [d for names in dims for f in names for d in _kept(content.get(f, ()))]
        others = [d for own in content.values() for d in _kept(own)]
        # One that is lost is summed; one that is there twice is spread over a diagonal.
        self.mixed |= {d for d in others if others.count(d) > 1 or kept.count(d) != 1}
        for i, names in enumerate(rule.operands):
            if i not in group:
                self.varied |= {d for dim in names for f in dim for d in _kept(content.get(f, ()))}
        return [
            [piece for f in names for piece in content.get(f) or [(rule.sizes[f], None)]]
            for names in dims
        ]

    def _matched(
        self, sizes: Mapping[str, int], names: Sequence[str], pieces: Sequence[Piece]
    ) -> dict[str, list[Piece]]:
        """Return each factor's pieces of a dimension. Those that no factor has alone are mixed."""
        result: dict[str, list[Piece]] = {}
        rest = [*pieces]
        for factor in names:
            own: list[Piece] = []
            while rest and prod(n for n, _ in own) < sizes[factor]:
                own.append(rest.pop(0))
            if prod(n for n, _ in own) == sizes[factor]:
                result[factor] = own
                continue
            self.mixed |= _kept((*own, *rest))
            return result
        self.mixed |= _kept(rest)
        return result


def linear_group(groups: Sequence[frozenset[int]], places: Sequence[int]) -> frozenset[int] | None:
    """Return the group of operands that has these places."""
    return next((g for g in groups if g.issuperset(places)), None)


def sums(op: Op) -> Sequence[frozenset[int]]:
    """Return the groups of operands in which an operation is linear."""
    return (frozenset((0,)),) if op.node.target in _GRADIENTS else op.rule.linear


def joint_shapes(shapes: Sequence[Sequence[int]]) -> Iterator[tuple[list[list[int]], int]]:
    """Yield ways to concatenate carries: their shapes, and the dimension in which these differ."""
    largest = max(shapes, key=len)
    if all(shape == largest for shape in shapes):
        yield [[1, *shape] for shape in shapes], 0
        return
    for d in range(len(largest)):
        rest = [*largest[:d], *largest[d + 1 :]]
        wide = [[*s[:d], 1, *s[d:]] if len(s) < len(largest) else [*s] for s in shapes]
        if all([*s[:d], *s[d + 1 :]] == rest for s in wide):
            yield wide, d
    lead = len(commonprefix([[*shape] for shape in shapes]))
    yield [[*shape[:lead], prod(shape[lead:])] for shape in shapes], lead
