"""Find lanes: regions of a program that are alike, and independent of each other.

    for w in weights:                     one lane for each weight
        x = w.grad.bfloat16()
        for _ in range(5):
            x = polynomial(x @ x.T) @ x

Work that no axis divides makes the core of a lane: `is_undivided`. Two operations are twins if they
compute the same function of inputs with the same shapes and layouts. A region has core operations
that are connected; where equal parts of two regions meet, as in a mean, both end. Regions with the
same twins are lanes.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from ...fx_passes.expand.batched_op import may_batch
from ...fx_passes.expand.undivided import Work
from ...fx_passes.ir import Op
from ...fx_passes.schedule.arithmetic import flops

MAX_OPS = 1024  # A lane with more operations is no matrix's work, but a whole model.


@dataclass
class LaneRegion:
    """Connected core operations, with all that lies between them.

    core: twin number -> the operation. members: bits of the regions that have joined. above: bits
    of those whose results an input depends on.
    """

    members: int
    above: int = 0
    core: dict[int, Op] = field(default_factory=dict)
    ops: list[Op] = field(default_factory=list)


@dataclass
class Lanes:
    """Regions alike. rows: an operation of the first lane -> its like in every lane, in order.

    inputs: a value of the first lane from outside -> its like in every lane. shared: the values
    that all lanes read. Both are by value.
    """

    count: int
    core: list[Op]
    rows: dict[fx.Node, tuple[Op, ...]] = field(default_factory=dict)
    inputs: dict[fx.Node, tuple[fx.Node, ...]] = field(default_factory=dict)
    shared: dict[fx.Node, fx.Node] = field(default_factory=dict)


def find_lanes(work: Work) -> Iterator[Lanes]:
    """Yield the lanes of a program, with those that they are like; some are alone."""
    return _Finder(work).find()


class _Finder:
    def __init__(self, work: Work) -> None:
        self.layouts, self.ops = work.layouts, work.ops
        self.makers = {v: (op, i) for op in self.ops for i, v in enumerate(op.results) if v}
        self.order = {op.node: i for i, op in enumerate(self.ops)}
        self.is_light: dict[fx.Node, bool] = {}
        self.cores: set[fx.Node] = set()
        self.seams: set[fx.Node] = set()  # sums over the batch, as gradients: how is another matter
        self.numbers: dict[tuple[Any, ...], int] = {}  # of equal functions of inputs
        self.number: dict[fx.Node, int] = {}  # by operation
        self.models = set[fx.Node]()  # operations on the batch
        for op in self.ops:
            is_core = work.is_undivided(op)
            batch = work.batch_factors(op) if flops(op.node) else set[str]()
            self.models |= {op.node} if batch else set()
            if batch & {*op.rule.reduce}:
                self.seams.add(op.node)
            self.is_light[op.node] = may_batch(op) and (is_core or not batch)
            key = op.key, *map(self._number, op.operands)
            self.number[op.node] = self.numbers.setdefault(key, len(self.numbers))
            if is_core and self.is_light[op.node]:
                self.cores.add(op.node)
        counts = Counter(self.number[node] for node in self.cores)
        # A model's own work is in lanes as far as there are several of it, as in an ensemble.
        self.cores -= {node for node in self.models if counts[self.number[node]] == 1}
        self.home: dict[fx.Node, int] = {}  # operation -> its region, before it joined others
        self.joined: list[int] = []
        self.regions: dict[int, LaneRegion] = {}
        self.above: dict[fx.Node, int] = {}  # of operations in no region

    def _number(self, value: fx.Node) -> int:
        """Return a number that is equal for values that are equal functions of equal inputs."""
        made = self.makers.get(value)
        if made is None or not self.is_light.get(made[0].node) or made[0].node in self.seams:
            val = value.meta["val"]
            key: tuple[Any, ...] = tuple(val.shape), val.dtype, str(self.layouts.spec[value])
        else:
            key = self.number[made[0].node], made[1], "result"
        return self.numbers.setdefault(key, len(self.numbers))

    def find(self) -> Iterator[Lanes]:
        for op in self.ops:
            self._place(op)
        alike: dict[tuple[int, ...], list[LaneRegion]] = {}
        for region in self.regions.values():
            alike.setdefault(tuple(sorted(region.core)), []).append(region)
        for regions in alike.values():
            core = regions[0].core.values()
            # The model's are lanes that are alone, and single products, as of queries beside keys.
            of_model = [op for op in core if op.node in self.models]
            if of_model and len(regions) == 1 or len(of_model) == len(core) == 1:
                continue
            if (lanes := self._aligned(regions)) is not None:
                yield lanes

    # ------------------------------------------------------------------------------------- regions

    def _root(self, number: int) -> int:
        while self.joined[number] != number:
            number = self.joined[number]
        return number

    def _region(self, value: fx.Node) -> int | None:
        made = self.makers.get(value)
        home = None if made is None else self.home.get(made[0].node)
        return None if home is None else self._root(home)

    def _upstream(self, value: fx.Node) -> int:
        """Return the bits of the regions that have to be computed before a value."""
        if (root := self._region(value)) is not None:
            return self.regions[root].members | self.regions[root].above
        made = self.makers.get(value)
        # A loop's carry reads a value that comes later; batch_lanes looks at the whole graph again.
        return 0 if made is None else self.above.get(made[0].node, 0)

    def _place(self, op: Op) -> None:
        """Add an operation to the region of its operands, or let it begin one."""
        roots = {r: None for v in op.operands if (r := self._region(v)) is not None}
        regions = [self.regions[root] for root in roots]
        outside = 0
        for value in op.operands:
            outside |= self._upstream(value) if self._region(value) is None else 0
        is_core = op.node in self.cores
        if not self.is_light[op.node] or not roots or not self._can_join(op, regions, outside):
            for value in op.operands:
                outside |= self._upstream(value)
            self.above[op.node] = outside
            if is_core:
                self._begin(op, outside)
            return
        first, *others = roots
        region = self.regions[first]
        for root in others:
            other, self.joined[root] = self.regions.pop(root), first
            region.members |= other.members
            region.above |= other.above
            region.core |= other.core
            region.ops += other.ops
        region.above |= outside
        self._add(op, first)

    def _begin(self, op: Op, above: int) -> None:
        number = len(self.joined)
        self.joined.append(number)
        self.regions[number] = LaneRegion(1 << number, above)
        self._add(op, number)

    def _add(self, op: Op, number: int) -> None:
        region = self.regions[number]
        self.home[op.node] = number
        region.ops.append(op)
        if op.node in self.cores:
            region.core[self.number[op.node]] = op

    def _can_join(self, op: Op, regions: Sequence[LaneRegion], outside: int) -> bool:
        """Return whether an operation may unite regions: unlike ones, with nothing between."""
        core = [number for region in regions for number in region.core]
        members = sum(region.members for region in regions)
        for region in regions:
            outside |= region.above
        return len(core) == len({*core}) and not outside & members

    # ------------------------------------------------------------------------------------ alignment

    def _aligned(self, regions: Sequence[LaneRegion]) -> Lanes | None:
        """Return the lanes of like regions; None if their operations differ beyond the core."""
        numbers = sorted(regions[0].core, key=lambda n: self.order[regions[0].core[n].node])
        cores = [tuple(region.core[n] for region in regions) for n in numbers]
        lanes = Lanes(len(regions), [row[0] for row in cores])
        if not all(self._add_row(lanes, row) for row in cores):
            return None
        # Behind the core: operations that all regions have, once each.
        tails = [self._by_number(region) for region in regions]
        for number in sorted({*tails[0]}.intersection(*tails[1:])):
            row = tuple(tail[number] for tail in tails)
            before = dict(lanes.rows), dict(lanes.inputs), dict(lanes.shared)
            if not self._add_row(lanes, row):
                lanes.rows, lanes.inputs, lanes.shared = before
        if len(lanes.rows) > MAX_OPS:
            return None
        makers = {made[0].node for value in lanes.shared if (made := self.makers.get(value))}
        return None if makers & {*lanes.rows} else lanes

    def _by_number(self, region: LaneRegion) -> dict[int, Op]:
        counts = Counter(self.number[op.node] for op in region.ops)
        numbered = ((self.number[op.node], op) for op in region.ops)
        return {n: op for n, op in numbered if counts[n] == 1 and op.node not in self.cores}

    def _add_row(self, lanes: Lanes, row: tuple[Op, ...]) -> bool:
        """Add like operations, and all that they are computed from; return whether they fit."""
        stack = [row]
        while stack:
            row = stack.pop()
            if (known := lanes.rows.get(row[0].node)) is not None:
                if any(a.node is not b.node for a, b in zip(known, row)):
                    return False
                continue
            lanes.rows[row[0].node] = row
            if len(lanes.rows) > MAX_OPS:
                return False
            for values in zip(*(op.operands for op in row)):
                above = self._add_values(lanes, values)
                if above is None:
                    return False
                stack += above
        return True

    def _add_values(self, lanes: Lanes, values: tuple[fx.Node, ...]) -> list[tuple[Op, ...]] | None:
        """Add like operands; return the operations to add with them, None if they do not fit."""
        first = values[0]
        made = [self.makers.get(value) for value in values]
        # Operations that may be computed in a lane because an operand of it is.
        ops = [each[0] for each in made if each is not None and self.is_light[each[0].node]]
        ops = [op for op in ops if op.node not in self.seams]
        if lanes.count > 1 and all(value is first for value in values):
            lanes.shared[first] = first
            return None if first in lanes.inputs else []
        alike = len(ops) == len(values) and len({op.key for op in ops}) == 1
        if alike and len({each[1] for each in made if each is not None}) == 1:
            if not ops[0].operands:  # the same numbers in each lane
                lanes.shared[first] = first
                return []
            if len({op.node for op in ops}) == len(ops):
                return [tuple(ops)]
        known = lanes.inputs.setdefault(first, values)
        types = {(tuple(v.meta["val"].shape), v.meta["val"].dtype) for v in values}
        same = all(map(operator.is_, known, values))
        return [] if same and len(types) == 1 and first not in lanes.shared else None
