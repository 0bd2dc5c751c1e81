"""Argument sizes that may differ between runs of one program.

    x [2, a], mask [2, a + 1]       two dimensions with one size, a
    x.unflatten(0, (-1, 2))         a size that every run divides evenly: its unit is 2

In a trace they are symbols in torch's ShapeEnv, as are sizes that depend on values. Sizes 0 and 1
have programs of their own: they broadcast, and programs branch on them.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from ..errors import ShardingError
from ..layout.open_sizes import RATIOS
from .assumed_sizes import UNBOUNDED, AssumingShapeEnv

LEAST = 2


@dataclass(frozen=True)
class ArgumentSizes:
    """The dimensions of tensor arguments whose size a run decides.

    dims: for (tensor, dimension) its size's name, and a number that is added to it. units: by size
    name, the number that divides it in every run; others have 1. Shards have whole units. bounds:
    by size name, the least and the greatest size for which the program's branches are right.
    """

    dims: Mapping[tuple[int, int], tuple[str, int]] = field(default_factory=dict)
    units: Mapping[str, int] = field(default_factory=dict)
    bounds: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(tuple(self.dims.items()))

    def shapes(
        self, tensors: Sequence[Tensor], first: int, env: AssumingShapeEnv
    ) -> list[Sequence[Any]]:
        """Return the shapes of a trace's inputs, with symbols for dynamic sizes.

        first: the first argument's position among the tensors.
        """
        symbols: dict[str, Any] = {}
        shapes: list[Any] = [list(t.shape) for t in tensors]
        with env.ignore_fresh_unbacked_symbols():  # they come with the inputs, from no operation
            for (tensor, dim), (name, added) in self.dims.items():
                shape = shapes[first + tensor]
                if name not in symbols:
                    symbols[name] = env.create_unbacked_symint()
                    symbol = symbols[name].node.expr
                    env.near[symbol] = shape[dim] - added
                    # A size without a ratio stays dynamic, but axes cannot shard it.
                    if len(symbols) <= len(RATIOS):
                        env.ratios[symbol] = RATIOS[len(symbols) - 1]
                shape[dim] = symbols[name] + added
                # Sizes 0 and 1 have other programs.
                torch._check(shape[dim] >= LEAST)
        return shapes

    def values(self, shapes: Sequence[Sequence[int]], least: int = LEAST) -> dict[str, int] | None:
        """Return a call's sizes by name; None if it needs another program."""
        sizes: dict[str, int] = {}
        for (tensor, dim), (name, added) in self.dims.items():
            size = shapes[tensor][dim]
            # Dimensions with one name have to agree.
            if size < least or sizes.setdefault(name, size - added) != size - added:
                return None
        return sizes

    def of_trace(self, units: Sequence[int], env: AssumingShapeEnv) -> ArgumentSizes:
        """Return the same with the bounds of a trace, and with units, in the order of its sizes."""
        names = dict.fromkeys(name for name, _ in self.dims.values())
        bounds = {name: env.bounds[s] for name, s in zip(names, env.near) if s in env.bounds}
        units_of = {name: n for name, n in zip(names, units) if n > 1}
        return replace(self, units=units_of, bounds=bounds)

    def has_branches_of(self, shapes: Sequence[Sequence[int]]) -> bool:
        """Return whether the program's branches are those of a call with these shapes."""
        return not self.bounds or all(
            low <= shapes[tensor][dim] - added <= high
            for (tensor, dim), (name, added) in self.dims.items()
            if name in self.bounds
            for low, high in (self.bounds[name],)
        )

    def numbers(self, shapes: Sequence[Sequence[int]]) -> dict[str, int]:
        """Return by name the number of units in each size, for a call with these shapes."""
        numbers: dict[str, int] = {}
        for name, size in (self.values(shapes, least=0) or {}).items():
            unit = self.units.get(name, 1)
            if size % unit:
                raise ShardingError.here(
                    f"size {name} is {size}, and the program divides it into {unit} equal parts",
                    fix=f"give a multiple of {unit}",
                )
            numbers[f"{name}_by_{unit}" if unit > 1 else name] = size // unit
        return numbers

    def without_small(self, shapes: Sequence[Sequence[int]]) -> ArgumentSizes | None:
        """Return the sizes that are symbols in the program for a call with small ones.

        None if all are symbols there, or if sizes with one name differ.
        """
        sizes: dict[str, int] = {}
        small = set()
        for (tensor, dim), (name, added) in self.dims.items():
            size = shapes[tensor][dim]
            if sizes.setdefault(name, size - added) != size - added:
                return None
            small |= {name} if size < LEAST else set()
        rest = {dim: size for dim, size in self.dims.items() if size[0] not in small}
        return ArgumentSizes(rest) if small else None

    def fits(self, tensor: int, shape: Sequence[int], planned: Sequence[int]) -> bool:
        """Return whether a tensor has the planned shape, but for dynamic sizes."""
        return len(shape) == len(planned) and all(
            size == other or (tensor, dim) in self.dims
            for dim, (size, other) in enumerate(zip(shape, planned))
        )

    def check(self, shapes: Sequence[Sequence[int]], least: int = LEAST) -> None:
        """Raise ShardingError if sizes with one name differ, or are smaller than `least`."""
        if self.values(shapes, least) is None:
            sizes = {
                f"{name}{f' + {n}' * bool(n)}": shapes[tensor][dim]
                for (tensor, dim), (name, n) in self.dims.items()
            }
            raise ShardingError.here(
                f"the arguments have sizes that the plan takes for one, or smaller than {LEAST}: "
                + ", ".join(f"{name} is {size}" for name, size in sizes.items()),
                fix='give sizes that differ different names: dynamic={"tokens": {1: "length"}}',
            )
        if not self.has_branches_of(shapes):
            ranges = [
                f"{name} from {low}" + f" to {high}" * (high < UNBOUNDED)
                for name, (low, high) in self.bounds.items()
            ]
            raise ShardingError.here(
                f"the plan is for sizes {', '.join(ranges)}",
                why="forward compares a size with a number, and takes another branch here",
                fix="make a plan for these sizes",
            )


Dims = int | Iterable[int] | Mapping[int, str]


def sizes_of(
    dynamic: Mapping[str, Dims] | None,
    names: Sequence[str],
    leaves: Sequence[object],
    programs_for_small: bool = False,
) -> ArgumentSizes:
    """Return the sizes that `plan(dynamic=)` names. names: one for each leaf.

    programs_for_small: leave out sizes 0 and 1, which have programs of their own.
    """
    tensors = [(name, x) for name, x in zip(names, leaves) if isinstance(x, Tensor)]
    dims: dict[tuple[int, int], tuple[str, int]] = {}
    for pattern, asked in (dynamic or {}).items():
        chosen = [i for i, (name, _) in enumerate(tensors) if fnmatchcase(name, str(pattern))]
        if not chosen:
            raise ShardingError.here(
                f"dynamic names '{pattern}', which is no tensor among the arguments",
                fix=f"name one of these tensors: {', '.join(name for name, _ in tensors)}",
            )
        for i in chosen:
            for dim, size in _named(asked, *tensors[i]).items():
                dims[i, dim] = size
    # A size without a name is known by its number so far; equal numbers get one name.
    numbers = [name for name, _ in dims.values() if name.isdigit()]
    named = {number: f"n{i}" for i, number in enumerate(dict.fromkeys(numbers))}
    dims = {dim: (named.get(name, name), added) for dim, (name, added) in dims.items()}
    sizes, shapes = ArgumentSizes(dims), [t.shape for _, t in tensors]
    sizes.check(shapes, least=0)
    return programs_for_small and sizes.without_small(shapes) or sizes


def _named(asked: Dims, name: str, tensor: Tensor) -> dict[int, tuple[str, int]]:
    """Return each dimension's size; those with one size now have one name."""
    if not isinstance(asked, Mapping):
        asked = dict.fromkeys([asked] if isinstance(asked, int) else asked, "")
    rank, named = tensor.dim(), {}
    for dim, size in asked.items():
        if not -rank <= dim < rank:
            raise ShardingError.here(f"dynamic names dimension {dim} of '{name}', which has {rank}")
        match = re.fullmatch(r"(\w+)(?: *\+ *(\d+))?", size or str(tensor.shape[dim]))
        if match is None:
            raise ShardingError.here(
                f"dynamic names the size '{size}' of dimension {dim} of '{name}'",
                fix="give a name, or a name and a number, as 'length + 1'",
            )
        named[dim % rank] = match[1], int(match[2] or 0)
    return named
