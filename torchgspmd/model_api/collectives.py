"""Communication that you write yourself inside `manual`: all_reduce(x, "model") and the like.

A region runs under torch.vmap over the positions along each axis. A value is batched at an axis's
level if devices along it may have different values: it varies. All others are replicated. A
collective is an operation over the batch dimension, which propagation and partition see as any
other: all_reduce is a sum whose dimension is sharded. So every collective is differentiable and
runs on one device. A replicated value's gradient is the sum over all devices that used it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd import Function

from ..compat.patches import setting
from ..compat.private_apis import get_unwrapped, maybe_get_level, peek_interpreter_stack
from ..errors import ShardingError, did_you_mean
from ..layout.mark import mark_sharding
from ..layout.mesh import Mesh
from ..layout.spec_notation import UNCONSTRAINED


@dataclass(frozen=True)
class Level:
    """A region's axis: its vmap level, its size, and each device's position."""

    mesh: Mesh
    axis: str
    level: int
    size: int
    index: Tensor

    def marked(self, x: Tensor) -> Tensor:
        """Mark a value's first dimension, the positions, as divided among the devices."""
        return mark_sharding(x, self.mesh, (self.axis, *[UNCONSTRAINED] * (x.dim() - 1)))


_LEVELS: ContextVar[tuple[Level, ...]] = ContextVar("levels", default=())


@contextmanager
def entered(mesh: Mesh, axis: str, index: Tensor) -> Generator[Level]:
    """Enter a further axis for the block, which is the body of its vmap."""
    level = Level(mesh, axis, current_level(), mesh.count((axis,)), index)
    with setting(_LEVELS, (*_LEVELS.get(), level)):
        yield level


def current_level() -> int:
    """Return the innermost level of torch.vmap and the like; 0 outside all."""
    top = peek_interpreter_stack()
    return 0 if top is None else top.level()


def varies(x: Tensor, level: int) -> bool:
    """Return whether a value is batched at a level."""
    # Levels nest: the outermost tensor is batched at the innermost level.
    while (own := maybe_get_level(x)) > 0:
        if own == level:
            return True
        x = get_unwrapped(x)
    return False


class _OverPositions(Function):
    """An operation over one level's batch dimension."""

    @staticmethod
    def forward(
        x: Tensor, index: Tensor, level: Level, run: object, dims: tuple[int, ...]
    ) -> Tensor:
        # Never reached: a region enters the level, so vmap below takes the call.
        raise AssertionError("the level of a collective is not entered")

    @staticmethod
    def setup_context(ctx: object, inputs: object, output: object) -> None:
        """Keep nothing: vmap differentiates its own operations."""

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Any,
        x: Tensor,
        index: Tensor,
        level: Level,
        run: Callable[..., tuple[Tensor, bool]],
        dims: tuple[int, ...],
    ) -> tuple[Tensor, int | None]:
        """Run at the requested level; at a level inside it, pass the dimension through."""
        if current_level() >= level.level:
            if in_dims[0] is None:
                return _OverPositions.apply(x, index, level, run, dims), None
            x = x.movedim(in_dims[0], 0)
            return _OverPositions.apply(x, index, level, run, tuple(d + 1 for d in dims)), 0
        if in_dims[0] is None:
            # A replicated value counts once for each position, as it would on each device.
            x = x.unsqueeze(0).expand(info.batch_size, *x.shape)
        else:
            x = x.movedim(in_dims[0], 0)
        result, still_varies = run(level.marked(x), *dims)
        return (level.marked(result), 0) if still_varies else (result, None)


def _level(axis: str, what: Callable[..., object]) -> Level:
    levels = {level.axis: level for level in _LEVELS.get()}
    if axis not in levels:
        raise ShardingError.here(
            f"{what.__name__} is called for axis '{axis}' outside of a region that has it",
            fix=did_you_mean(axis, levels)
            if levels
            else f"call it in the function that manual(..., axes=('{axis}',)) is given",
        )
    return levels[axis]


def _dim(x: Tensor, dim: int, what: Callable[..., object]) -> int:
    if not -x.dim() <= dim < x.dim():
        raise ShardingError.here(
            f"{what.__name__} names dimension {dim} of a tensor of shape {list(x.shape)}"
        )
    return dim % x.dim()


def _divide(x: Tensor, dim: int, count: int, what: Callable[..., object]) -> None:
    if x.shape[dim] % count:
        raise ShardingError.here(
            f"{what.__name__} divides dimension {dim} of shape {list(x.shape)} among {count} "
            "devices",
            fix="pad it, or leave this part to propagation",
        )


_REDUCE: dict[str, Callable[[Tensor], Tensor]] = {
    "sum": lambda x: x.sum(0),
    "max": lambda x: x.amax(0),
    "min": lambda x: x.amin(0),
    "mean": lambda x: x.mean(0),
}


def all_reduce(x: Tensor, axis: str, op: str = "sum") -> Tensor:
    """Reduce a value over the devices along an axis.

    Args:
        x: A device's value.
        axis: An axis of the region.
        op: "sum", "max", "min" or "mean".

    Returns:
        The reduced value, replicated along the axis.

    Raises:
        ShardingError: The region does not have the axis, or there is no such reduction.

    Example:
        >>> total = manual(
        ...     lambda x: collectives.all_reduce(x.sum(), "model"),
        ...     Mesh(model=2), "model", "", axes=("model",)
        ... )
        >>> total(torch.arange(4))
        tensor(6)
    """
    if op not in _REDUCE:
        raise ShardingError.here(f"all_reduce has no op '{op}'", fix=did_you_mean(op, _REDUCE))
    level = _level(axis, all_reduce)
    return _OverPositions.apply(x, level.index, level, lambda x: (_REDUCE[op](x), False), ())


def all_gather(x: Tensor, axis: str, dim: int = 0) -> Tensor:
    """Join the devices' values along an axis.

    Args:
        x: A device's value.
        axis: An axis of the region.
        dim: The dimension at which they are joined.

    Returns:
        The joined value, replicated along the axis.

    Raises:
        ShardingError: The region does not have the axis, or x not the dimension.

    Example:
        >>> whole = manual(
        ...     lambda x: collectives.all_gather(x, "model"),
        ...     Mesh(model=2), "model", "_", axes=("model",)
        ... )
        >>> whole(torch.arange(4))
        tensor([0, 1, 2, 3])
    """
    level = _level(axis, all_gather)

    def join(x: Tensor, dim: int) -> tuple[Tensor, bool]:
        # [n, ..., s, ...] -> [..., n s, ...]
        return x.movedim(0, dim).flatten(dim, dim + 1), False

    return _OverPositions.apply(x, level.index, level, join, (_dim(x, dim, all_gather),))


def reduce_scatter(x: Tensor, axis: str, dim: int = 0) -> Tensor:
    """Add the devices' values along an axis, and give each device its part.

    Args:
        x: A device's value.
        axis: An axis of the region.
        dim: The dimension that is divided.

    Returns:
        The device's part, which varies along the axis.

    Raises:
        ShardingError: The region lacks the axis, or the devices do not divide the dimension.

    Example:
        >>> halves = manual(
        ...     lambda x: collectives.reduce_scatter(x, "model"),
        ...     Mesh(model=2), "_", "model", axes=("model",)
        ... )
        >>> halves(torch.arange(4))
        tensor([0, 2, 4, 6])
    """
    level, dim = _level(axis, reduce_scatter), _dim(x, dim, reduce_scatter)
    _divide(x, dim, level.size, reduce_scatter)

    def scatter(x: Tensor, dim: int) -> tuple[Tensor, bool]:
        # [n, ..., s, ...] -> [..., s, ...] -> [..., n, s/n, ...] -> [n, ..., s/n, ...]
        return x.sum(0).unflatten(dim, (level.size, -1)).movedim(dim, 0), True

    # A sum with a sharded result: partition makes one reduce_scatter of both.
    return _OverPositions.apply(x, level.index, level, scatter, (dim,))


def all_to_all(x: Tensor, axis: str, split_dim: int, concat_dim: int) -> Tensor:
    """Send each device along an axis its part along one dimension, and join the parts.

    Args:
        x: A device's value.
        axis: An axis of the region.
        split_dim: The dimension that is divided.
        concat_dim: The dimension at which the parts are joined.

    Returns:
        A value that varies along the axis.

    Raises:
        ShardingError: The region lacks the axis, or the devices do not divide the dimension.

    Example:
        >>> columns = manual(
        ...     lambda x: collectives.all_to_all(x, "model", 1, 0),
        ...     Mesh(model=2), "model _", "_ model", axes=("model",)
        ... )
        >>> columns(torch.eye(4)).equal(torch.eye(4))
        True
    """
    level = _level(axis, all_to_all)
    split, concat = (_dim(x, d, all_to_all) for d in (split_dim, concat_dim))
    _divide(x, split, level.size, all_to_all)

    def exchange(x: Tensor, split: int, concat: int) -> tuple[Tensor, bool]:
        # [n, ..., s, ...] -> [receiver, sender, ..., s/n, ...]; the senders are joined at `concat`.
        parts = x.unflatten(1 + split, (level.size, -1)).movedim(1 + split, 0)
        return parts.movedim(1, 1 + concat).flatten(1 + concat, 2 + concat), True

    return _OverPositions.apply(x, level.index, level, exchange, (split, concat))


def permute(x: Tensor, axis: str, shift: int) -> Tensor:
    """Send a value to the device `shift` places further along an axis, in a ring.

    Args:
        x: A device's value.
        axis: An axis of the region.
        shift: Places; negative ones lead back.

    Returns:
        The value that the device `shift` places before had.

    Raises:
        ShardingError: The region does not have the axis.

    Example:
        >>> shifted = manual(
        ...     lambda x: collectives.permute(x, "model", 1),
        ...     Mesh(model=4), "model", "model", axes=("model",)
        ... )
        >>> shifted(torch.arange(4))
        tensor([3, 0, 1, 2])
    """
    level = _level(axis, permute)
    # A roll over the positions: partition sends each device's value to another one.
    return _OverPositions.apply(x, level.index, level, lambda x: (x.roll(shift, 0), True), ())


def axis_index(axis: str) -> Tensor:
    """Return the device's position along an axis.

    Args:
        axis: An axis of the region.

    Returns:
        An integer tensor without dimensions, which varies along the axis.

    Raises:
        ShardingError: The region does not have the axis.

    Example:
        >>> places = manual(
        ...     lambda x: x + collectives.axis_index("model"),
        ...     Mesh(model=2), "model", "model", axes=("model",)
        ... )
        >>> places(torch.zeros(4, dtype=torch.long))
        tensor([0, 0, 1, 1])
    """
    return _level(axis, axis_index).index


PUBLIC = (all_gather, all_reduce, all_to_all, axis_index, permute, reduce_scatter)
