"""One block of a region: the rows of one shard, with the columns of another one.

The block's program consists of the operations' local forms, as if one axis sharded the rows and a
second one the columns. The blocks of all devices are computed at once, by torch.vmap.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from ...comm.local_ops import as_dtype
from ...compat.operators import aten
from ...fx_passes.ir import Op, tensors_of
from ...rules import Shapes
from ...rules.local_builder import LocalTensor
from ...rules.notation import Dims


class BlockSide(NamedTuple):
    """A shard of rows or columns. size: of all. count: the shards. index: a tensor, which one."""

    size: int
    count: int
    index: Tensor

    @property
    def rows(self) -> int:
        return -(-self.size // self.count)

    def masked(self, x: Tensor, dim: int, fill: float) -> Tensor:
        """Return a value with `fill` in the padding of the last shard."""
        if self.size % self.count == 0:
            return x
        place = torch.arange(self.rows, device=x.device) + self.index * self.rows
        inside = (place < self.size).view([-1] + [1] * (x.dim() - 1 - dim))
        return torch.where(inside, x, as_dtype(fill, x.dtype))


def local_shape(
    dims: Dims, shape: Sequence[int], shards: Mapping[str, BlockSide]
) -> tuple[int, ...]:
    """Return the shape of an operand or result in a block."""
    return tuple(
        shards[names[0]].rows if names and names[0] in shards else size
        for names, size in zip(dims, shape)
    )


class BlockBuilder:
    """Computes an operation's local form: a LocalBuilder whose values are tensors."""

    places = None

    def __init__(self, op: Op, shards: Mapping[str, BlockSide]) -> None:
        self.target, self.rule, self.shards = op.node.target, op.rule, shards
        self.operands = tuple(v.meta["val"] for v in op.operands)
        self.assignment = {factor: (factor,) for factor in shards}
        self.results = [
            LocalTensor(local_shape(dims, t.shape, shards), t.dtype, t.device)
            for t, dims in zip(tensors_of(op.node), op.rule.results)
        ]

    def size(self, factor: str) -> int:
        return self.shards[factor].rows if factor in self.shards else self.rule.sizes.get(factor, 1)

    def known_size(self, factor: str) -> int | None:
        return self.rule.sizes.get(factor, 1)

    def index(self, factor: str) -> Any:
        return self.shards[factor].index if factor in self.shards else 0

    def start(self, factor: str) -> Any:
        return self.index(factor) * self.size(factor)

    def sharded(self, factor: str) -> bool:
        return factor in self.shards

    def masked(self, value: Tensor, dim: int, factor: str, fill: float) -> Tensor:
        shard = self.shards.get(factor)
        return value if shard is None else shard.masked(value, dim, fill)

    def shape(self, value: Tensor) -> tuple[int, ...]:
        return tuple(value.shape)

    def position(self, dim: int) -> Tensor:
        names, result = self.rule.results[0][dim], self.results[0]
        place = torch.arange(result.shape[dim], device=result.device)
        place = place + (self.start(names[0]) if names else 0)
        return place.view([-1] + [1] * (len(result.shape) - 1 - dim))

    def _refuse(self, *_: object) -> Any:
        raise NotImplementedError("rows of windows differ from block to block")

    first_row = global_shape = narrow = window = _refuse

    def note(self, *_: object) -> None:
        """Tensors have their shapes."""

    def limit(self, *_: object) -> None:
        """Tensors have no notes for a profile."""

    def scalar(self, value: Any, dtype: torch.dtype | None = None) -> Tensor:
        dtype, device = dtype or self.results[0].dtype, self.results[0].device
        if isinstance(value, Tensor):
            return value.to(dtype)
        return torch.full((), value, dtype=dtype, device=device)

    def call(self, op: Any, *args: Any, **kwargs: Any) -> Any:
        # A shard's index is a tensor here, which other overloads take.
        return op.overloadpacket(*args, **kwargs)


def computed(op: Op, operands: Sequence[Tensor], shards: Mapping[str, BlockSide]) -> Sequence[Any]:
    """Return an operation's results in a block. shards: by factor. operands: their parts."""
    rule, local = op.rule, op.rule.local
    masked = [_masked(op, i, x, shards) for i, x in enumerate(operands)]
    rest = iter(masked)
    args, kwargs = fx.map_arg((op.node.args, dict(op.node.kwargs)), lambda _: next(rest))
    if local.emit is not None and (local.always or not {*local.when}.isdisjoint(shards)):
        results = local.emit(BlockBuilder(op, shards), args, kwargs)
    else:
        if local.arguments is not None:
            inputs = zip(rule.operands, op.operands)
            outputs = zip(rule.results, tensors_of(op.node))
            shapes = Shapes(
                tuple(local_shape(dims, v.meta["val"].shape, shards) for dims, v in inputs),
                tuple(local_shape(dims, t.shape, shards) for dims, t in outputs),
            )
            args, kwargs = local.arguments(args, kwargs, shapes)
        target: Callable = op.node.target  # pyright: ignore
        results = target(*args, **kwargs)
    return results if isinstance(results, (tuple, list)) else [results]


def _masked(op: Op, operand: int, x: Tensor, shards: Mapping[str, BlockSide]) -> Tensor:
    """Overwrite an operand's padding if the operation would reduce it or look it up."""
    for dim, names in enumerate(op.rule.operands[operand]):
        if names and (shard := shards.get(names[0])) is not None:
            fill = op.rule.fill(names[0])
            fill = op.rule.local.fill.get(operand) if fill is None else fill
            x = x if fill is None else shard.masked(x, dim, fill)
    return x


COMBINED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "prod": torch.mul,
}
REDUCED: dict[str, Callable[[Tensor, int], Tensor]] = {
    "sum": lambda x, dim: x.sum(dim, dtype=x.dtype),
    "max": lambda x, dim: aten.amax(x, [dim]),
    "min": lambda x, dim: aten.amin(x, [dim]),
    "prod": lambda x, dim: x.prod(dim, dtype=x.dtype),
}
