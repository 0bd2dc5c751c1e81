"""A program's values on a mesh against one device's: the findings of compare."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx

from ..comm.rank_failure import listed
from ..compat.private_apis import _pytree as pytree
from ..fx_passes.digest import module_path
from ..fx_passes.lower.verify_in_flight import STARTS
from ..layout.mesh import Mesh
from ..shard_spec import ShardSpec


@dataclass(frozen=True)
class Difference:
    """A value that differs.

    Args:
        name: The value's name: a parameter, a gradient, a result, or a node.
        module: The module whose forward computes it.
        line: file:line in the code that computes it.
        phase: "parameter", "forward", "backward" or "result".
        ranks: The ranks on which it differs.
        index: The element in the whole value that differs most on the first such rank.
        found: This element there.
        expected: The same element on one device.
        largest: The largest absolute value on one device.

    Example:
        >>> print(Difference("w", "up", "model.py:3", "forward", (1,), (0, 2), 1.0, 2.0, 4.0))
        w of module 'up' at model.py:3, forward: [0, 2] is 1.0 on rank 1, on one device 2.0
          its values there go up to 4.0
    """

    name: str
    module: str
    line: str
    phase: str
    ranks: tuple[int, ...]
    index: tuple[int, ...]
    found: float
    expected: float
    largest: float

    def __str__(self) -> str:
        of = f" of module '{self.module}'" if self.module else ""
        at = f" at {self.line}" if self.line else ""
        return (
            f"{self.name}{of}{at}, {self.phase}: {list(self.index)} is {self.found:.9} on "
            f"{listed(self.ranks)}, on one device {self.expected:.9}\n"
            f"  its values there go up to {self.largest:.9}"
        )


@dataclass(frozen=True)
class Comparison:
    """The findings of compare; true if no value differs.

    Args:
        first: The first value that differs, in the one-device program's order.
        compared: How many values have been compared.
        equal_before: How many stand before the first one.
        others: Names of further values that differ.
        skipped: Names of values that no node has whole.

    Example:
        >>> print(Comparison(None, 24, 24))
        all 24 values of the program are equal
    """

    first: Difference | None
    compared: int
    equal_before: int
    others: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return self.first is None

    def __str__(self) -> str:
        skipped = f"; {len(self.skipped)} are inside of others" if self.skipped else ""
        if self.first is None:
            return f"all {self.compared} values of the program are equal{skipped}"
        return (
            f"{self.first}\n  {self.equal_before} values before it are equal; "
            f"{len(self.others)} behind it differ{skipped}"
        )

    __repr__ = __str__


def denoted(node: fx.Node) -> str | None:
    """Return the captured node whose value this one has; None if it has none."""
    spec = node.meta.get("spec")
    # A window has neighbors' rows, too; a pending value is one term.
    is_value = isinstance(spec, ShardSpec) and not spec.pending and not spec.windows
    return node.meta.get("captured") if is_value and node.target not in STARTS else None


@dataclass(frozen=True)
class OneDevice:
    """The one-device program's values, by node names.

    gradients: words for a node that is an input's gradient. result: what the function returns.
    """

    nodes: Mapping[str, fx.Node]
    values: Mapping[str, Tensor]
    gradients: Mapping[str, str]
    result: object

    def rounding(self, name: str) -> float:
        """Return how far sums with the same terms may differ where they cancel, but for epsilon.

        That is an element's number of terms, times the largest that a term can be.
        """
        node, sizes, largest = self.nodes[name], [1], [1.0]
        while node.target is operator.getitem:
            node = node.all_input_nodes[0]
        for operand in node.all_input_nodes:
            value = self.values.get(operand.name)
            if value is not None and value.is_floating_point() and value.numel():
                sizes.append(value.numel())
                largest.append(float(value.abs().max()))
        # Elements of the largest operand per element of the result: the length of a sum.
        terms = max(sizes) / self.values[name].numel()
        return max(terms, 1.0) * max(math.prod(largest), *largest)


@dataclass
class Check:
    """The compared values, and the differences by name."""

    one: OneDevice
    mesh: Mesh
    tolerance: float | None
    compared: set[str] = field(default_factory=set)
    found: dict[str, dict[int, Difference]] = field(default_factory=dict)

    def look(self, node: fx.Node, value: object, rank: int) -> None:
        """Compare a node's value on one rank, if it has one from the captured program."""
        name = denoted(node)
        if name is None or not isinstance(value, Tensor) or name not in self.one.values:
            return
        whole, spec = self.one.values[name], node.meta["spec"]
        coordinates, begins, parts, rows = self.mesh.coordinates(rank), [], [], []
        for size, axes in zip(whole.shape, spec.dims):
            block = -(-size // self.mesh.count(axes))
            begins.append(min(self.mesh.index(axes, coordinates) * block, size))
            parts.append(slice(begins[-1], min(begins[-1] + block, size)))
            rows.append(block)
        wanted = whole[tuple(parts)]
        # Another shape: in a loop or a stage a node has only a part of the value.
        if len(rows) != value.dim() or tuple(value.shape) not in (tuple(rows), wanted.shape):
            return
        self.compared.add(name)
        own = value[tuple(slice(0, n) for n in wanted.shape)]
        node = self.one.nodes[name]
        phase = "backward" if node.meta.get("backward") else "forward"
        shown = self.one.gradients.get(name, f"%{name}")
        self.add(name, shown, node, phase, rank=rank, begins=begins, own=own, wanted=wanted)

    def add(
        self,
        key: str,
        name: str,
        node: fx.Node | None,
        phase: str,
        *,
        rank: int,
        begins: Sequence[int],
        own: Tensor,
        wanted: Tensor,
    ) -> None:
        """Note how a value differs, if by more than rounding."""
        # A rank's first difference counts: the same value may follow in other layouts.
        if not wanted.numel() or rank in self.found.get(key, {}):
            return
        difference, largest = _distance(own, wanted)
        tolerance = self.tolerance
        if tolerance is None:
            exact = not (wanted.is_floating_point() or wanted.is_complex())
            tolerance = 0.0 if exact else math.sqrt(torch.finfo(wanted.dtype).eps)
        worst = difference.max()
        # Relative to the largest value: small elements carry the rounding of large terms.
        if bool(worst <= tolerance * largest):
            return
        if wanted.is_floating_point() and key in self.one.nodes:  # it may be zero by cancellation
            if bool(worst <= torch.finfo(wanted.dtype).eps * self.one.rounding(key)):
                return
        place = torch.unravel_index(difference.argmax(), difference.shape)
        at = tuple(int(i) for i in place)
        meta = {} if node is None else node.meta
        self.found.setdefault(key, {})[rank] = Difference(
            name=name,
            module="" if node is None else module_path(node),
            line=meta.get("source") or "",
            phase=phase,
            ranks=(rank,),
            index=tuple(b + i for b, i in zip(begins, at)),
            found=_number(own[at]),
            expected=_number(wanted[at]),
            largest=float(largest),
        )

    def results(self, eager: object) -> None:
        pairs = zip(pytree.tree_leaves(self.one.result), pytree.tree_leaves(eager))
        for i, (own, wanted) in enumerate(pairs):
            if isinstance(own, Tensor) and isinstance(wanted, Tensor):
                begins = [0] * wanted.dim()
                values = {"own": own, "wanted": wanted}
                self.add(
                    f"result {i}", f"result {i}", None, "result", rank=0, begins=begins, **values
                )


def _distance(own: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """Return absolute differences, and the largest wanted value; equal infinities and NaN are 0."""
    # In 64 bits, where differences of narrower numbers are exact.
    kind = torch.complex128 if wanted.is_complex() else torch.float64
    own, wanted = own.detach().to(kind), wanted.detach().to(kind)
    same = (own == wanted) | (own.isnan() & wanted.isnan())
    # NaN on one side alone is an infinite difference.
    difference = torch.where(same, 0, (own - wanted).abs()).nan_to_num(nan=math.inf)
    # An infinity among the values would allow any difference.
    finite = wanted.abs().nan_to_num(0, 0, 0)
    return difference, finite.max()


def _number(value: Tensor) -> float:
    return abs(value.item()) if value.is_complex() else float(value.item())


def row_of(check: Check) -> dict[str, object]:
    found = [[key, *map(asdict, by_rank.values())] for key, by_rank in check.found.items()]
    return {"compared": sorted(check.compared), "found": found}


def conclusion(check: Check, rows: Sequence[dict[str, Any]]) -> Comparison:
    """Return the comparison that all ranks have made."""
    order = {name: i for i, name in enumerate(check.one.nodes)}
    by_key: dict[str, list[Difference]] = {}
    for row in rows:
        for key, *found in row["found"]:
            by_key.setdefault(key, []).extend(
                Difference(**{**d, "ranks": tuple(d["ranks"]), "index": tuple(d["index"])})
                for d in found
            )
    last = len(order)
    # State comes first: a wrong weight makes all values behind it differ.
    places = {key: -1 if key.startswith("state ") else order.get(key, last) for key in by_key}
    keys = sorted(by_key, key=lambda key: places[key])
    compared = {name for row in rows for name in row["compared"]}
    first = None
    if keys:
        all_ranks = sorted({rank for each in by_key[keys[0]] for rank in each.ranks})
        first = replace(by_key[keys[0]][0], ranks=tuple(all_ranks))
    before = places[keys[0]] if keys else last
    return Comparison(
        first=first,
        compared=len(compared),
        equal_before=sum(order[name] < before for name in compared),
        others=tuple(by_key[key][0].name for key in keys[1:]),
        skipped=tuple(name for name in check.one.values if name not in compared),
    )
