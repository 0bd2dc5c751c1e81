"""FlatCall: an operation on flattened dimensions, on operands that keep their parts apart.

    %x : f32[8, 2048@seq, 64]
    %y : f32[8*2048@seq, 64] = cumsum(%x, 1)        on [16384, 64]; the parts of 16384 stay

A reshape that flattens [8, 2048@seq] has no layout for the result: a device's rows are no interval.
As two dimensions the value has one. The operation is called on the flattened shards, which is right
along each factor that it computes row by row. `keep_dims` says which these are.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor, fx

from ..compat.operators import aten
from ..compat.private_apis import _pytree as pytree
from .local_builder import LocalBuilder, LocalTensor
from .notation import Call, Dims, FactorRule, LocalForm, Shapes
from .rewrites import SplitRequest

Parts = tuple[tuple[int, ...], ...]  # for each dimension of an operation: the sizes of its parts


@dataclass(frozen=True)
class FlatCall:
    """Calls an operation on flattened dimensions.

    target: the operation. operands: for each tensor, how many dimensions each of the operation's
    has. results: the sizes of these dimensions.
    """

    target: Any
    operands: tuple[tuple[int, ...], ...]
    results: tuple[Parts, ...]

    @property
    def __name__(self) -> str:
        return f"flat_{getattr(self.target, 'overloadpacket', self.target).__name__}"

    @cached_property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """For each result, how many dimensions each of the operation's has."""
        return tuple(tuple(map(len, parts)) for parts in self.results)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.applied(self.target, *args, **kwargs)

    def applied(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call a function of the flattened operands; its results get their parts back."""
        args, kwargs = self.flattened((args, kwargs))
        return self.shaped(function(*args, **kwargs))

    def shaped(self, results: Any) -> Any:
        """Return the operation's results with the parts of their dimensions."""
        all_parts = iter(self.results)

        def kept(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return x.reshape([n for parts in next(all_parts) for n in parts])

        return pytree.tree_map(kept, results)

    def flattened(self, arguments: Any) -> Any:
        leaves, tree = pytree.tree_flatten(arguments)
        groups = iter(self.operands)
        flat = [
            x.reshape(flat_shape(x.shape, next(groups))) if isinstance(x, Tensor) else x
            for x in leaves
        ]
        return pytree.tree_unflatten(flat, tree)

    def inner(self, call: Call) -> Call:
        """Return the call of the operation itself."""
        args, kwargs = self.flattened((call.args, dict(call.kwargs)))
        tensors = tuple(t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor))
        results = tuple(
            t.reshape(flat_shape(t.shape, groups)) for t, groups in zip(call.results, self.groups)
        )
        return Call(self.target, args, kwargs, tensors, results)

    def cuts(self, request: SplitRequest | None) -> SplitRequest | None:
        """Return how the flattened operation is sharded that has to be split."""
        if request is None or not request.operands:
            return request
        results = zip(request.results, self.groups)
        return request._replace(
            operands=tuple(map(flat_shape, request.operands, self.operands)),
            results=tuple(counts and flat_shape(counts, groups) for counts, groups in results),
        )


def flat_shape(shape: Sequence[Any], groups: Sequence[int]) -> tuple[Any, ...]:
    """Multiply the sizes in each group: [8, 2048, 64] in groups of 2 and 1 is (16384, 64)."""
    sizes = iter(shape)
    return tuple(math.prod(next(sizes) for _ in range(count)) for count in groups)


def flat_rule(call: Call, lookup: Callable[[Call], FactorRule]) -> FactorRule:
    """Return a FlatCall's rule: that of the operation, with factors in place of flattened ones."""
    flat: FlatCall = call.target
    inner = lookup(flat.inner(call))
    shapes = tuple(tuple(t.shape) for t in (*call.tensors, *call.results))
    kept = _Kept(inner, (*flat.operands, *flat.groups), shapes)
    count = len(inner.operands)
    return replace(
        inner,
        operands=kept.dims[:count],
        results=kept.dims[count:],
        sizes=kept.sizes,
        reduce={part: kind for f, kind in inner.reduce.items() for part in kept.parts_of(f)},
        replicated=kept.all_parts(inner.replicated),
        row_access={
            (operand, sum(flat.operands[operand][:d])): reach
            for (operand, d), reach in inner.row_access.items()
        },
        moves=False,
        local=LocalForm(
            _Emission(flat, inner, kept.parts),
            when=kept.all_parts(inner.local.when),
            fill=inner.local.fill,
            positional=kept.all_parts(inner.special),
            always=True,
        ),
        instead=None,
        balance=None,
        chosen=kept.all_parts(inner.chosen),
        text="",
    )


class _Kept:
    """A rule's dimensions where flattened ones are apart. parts: a factor's parts."""

    def __init__(
        self, rule: FactorRule, groups: Sequence[Sequence[int]], shapes: Sequence[Sequence[int]]
    ) -> None:
        self.parts: dict[str, tuple[str, ...]] = {}
        self.sizes = dict(rule.sizes)
        tensors = [*zip((*rule.operands, *rule.results), groups, shapes)]
        for dims, counts, shape in tensors:
            sizes = iter(shape)
            for factors, count in zip(dims, counts):
                own = [next(sizes) for _ in range(count)]
                if count > 1 and len(factors) == 1:
                    self._divide(factors[0], own)
        self.dims = tuple(self._dims(*tensor) for tensor in tensors)

    def _divide(self, factor: str, sizes: Sequence[int]) -> None:
        names = tuple(f"{factor}_{i}" for i in range(len(sizes)))
        if self.parts.setdefault(factor, names) != names:
            raise ValueError(f"{factor} has other parts elsewhere")
        self.sizes.pop(factor, None)
        self.sizes.update((name, n) for name, n in zip(names, sizes) if n > 1)

    def _dims(self, dims: Dims, groups: Sequence[int], shape: Sequence[int]) -> Dims:
        result: list[tuple[str, ...]] = []
        for factors, count in zip(dims, groups):
            names = [n for f in factors for n in self.parts_of(f)]
            if count == 1:
                result.append(tuple(n for n in names if n in self.sizes))
            else:  # a broadcast dimension has no factors
                result += [
                    tuple(n for n in names[i : i + 1] if n in self.sizes) for i in range(count)
                ]
        return tuple(result)

    def parts_of(self, factor: str) -> tuple[str, ...]:
        return self.parts.get(factor, (factor,))

    def all_parts(self, factors: object) -> frozenset[str]:
        names = factors.split() if isinstance(factors, str) else factors
        return frozenset(n for f in names for n in self.parts_of(f) if n in self.sizes)  # type: ignore


@dataclass(frozen=True, eq=False)
class _Emission:
    """A FlatCall's local form: the operation on flattened shards."""

    flat: FlatCall
    rule: FactorRule
    parts: Mapping[str, tuple[str, ...]]

    def __call__(self, local: LocalBuilder, args: tuple, kwargs: dict) -> Any:
        groups, shapes = iter(self.flat.operands), list[tuple[int, ...]]()

        def flattened(x: Any) -> Any:
            shape = local.shape(x)
            shapes.append(flat_shape(shape, next(groups)))
            return x if shapes[-1] == shape else reshaped(local, x, shapes[-1])

        args, kwargs = fx.map_arg((args, kwargs), flattened)
        builder = FlatBuilder(local, self.rule, self.flat, self.parts)
        result = self._result(builder, args, kwargs, shapes)
        places = local.places
        if not isinstance(result, (list, tuple)):
            if places is None:
                return self._kept(local, result, 0)
            count = range(places[-1] + 1)
            result = [
                local.call(operator.getitem, result, i) if i in places else None for i in count
            ]
        order = {at: i for i, at in enumerate(places or (0,))}
        return [
            self._kept(local, x, order[i]) if i in order else None for i, x in enumerate(result)
        ]

    def _result(
        self, local: FlatBuilder, args: tuple, kwargs: dict, shapes: Sequence[tuple[int, ...]]
    ) -> Any:
        """Call the operation as `localize` does, on flattened operands."""
        rule, form = self.rule, self.rule.local
        if form.emit is not None and (
            form.always or any(map(local.sharded, {*form.when, *rule.windowed}))
        ):
            return form.emit(local, args, kwargs)
        if form.arguments is not None:
            results = tuple(r.shape for r in local.results)
            args, kwargs = form.arguments(args, kwargs, Shapes(tuple(shapes), results))
        return local.call(self.flat.target, *args, **kwargs)

    def _kept(self, local: LocalBuilder, x: Any, index: int) -> Any:
        shape = local.results[index].shape
        if all(count == 1 for count in self.flat.groups[index]):
            local.note(x.node if isinstance(x, fx.Proxy) else x, shape)
            return x
        return reshaped(local, x, shape)


def reshaped(local: LocalBuilder, x: Any, shape: tuple[int, ...]) -> fx.Node:
    result = local.call(aten.reshape.default, x, list(shape))
    local.note(result, shape)
    return result


class FlatBuilder:
    """The builder for the operation inside a FlatCall: its factors, dimensions and results."""

    def __init__(
        self,
        outer: LocalBuilder,
        rule: FactorRule,
        flat: FlatCall,
        parts: Mapping[str, tuple[str, ...]],
    ) -> None:
        self.outer, self.rule, self.flat, self.parts = outer, rule, flat, parts
        self.target = flat.target
        self.operands = flat.flattened(tuple(outer.operands))
        self.assignment = {f: axes for f, axes in outer.assignment.items() if f in rule.sizes}
        self.results = [
            LocalTensor(flat_shape(r.shape, groups), r.dtype, r.device)
            for r, groups in zip(outer.results, flat.groups)
        ]

    def __getattr__(self, name: str) -> Any:
        # call, shape, note, scalar, narrow: these have no factors.
        return getattr(self.outer, name)

    def sharded(self, factor: str) -> bool:
        return any(map(self.outer.sharded, self.parts.get(factor, (factor,))))

    def size(self, factor: str) -> Any:
        return math.prod(map(self.outer.size, self.parts.get(factor, (factor,))))

    def index(self, factor: str) -> Any:
        self._check(factor)
        return self.outer.index(factor)

    def start(self, factor: str) -> Any:
        self._check(factor)
        return self.outer.start(factor)

    def first_row(self, operand: int, dim: int) -> Any:
        return self.outer.first_row(operand, sum(self.flat.operands[operand][:dim]))

    def window(self, operand: int, dim: int) -> Any:
        return self.outer.window(operand, sum(self.flat.operands[operand][:dim]))

    def global_shape(self, operand: int) -> tuple[Any, ...]:
        return flat_shape(self.outer.global_shape(operand), self.flat.operands[operand])

    def masked(self, value: object, dim: int, factor: str, fill: float) -> Any:
        self._check(factor)
        return self.outer.masked(value, dim, factor, fill)

    def position(self, dim: int) -> fx.Node:
        """Return each local row's global index along a dimension of the operation's result."""
        parts, groups = self.flat.results[0], self.flat.groups[0]
        first, rank = sum(groups[:dim]), len(groups)
        total, stride = None, 1
        for i in reversed(range(groups[dim])):
            rows = self.outer.position(first + i)
            rows = self.call(aten.mul.Scalar, rows, stride) if stride > 1 else rows
            total = rows if total is None else self.call(aten.add.Tensor, rows, total)
            stride *= parts[dim][i]
        shape = (self.results[0].shape[dim], *(1,) * (rank - 1 - dim))
        return reshaped(self.outer, total, shape)

    def _check(self, factor: str) -> None:
        assert factor not in self.parts, f"the shards of {factor} are no intervals"
