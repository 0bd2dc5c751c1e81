"""ShardSpec: how one tensor is laid out on a mesh. Immutable; parses and prints.

Notation (GSPMD, arXiv 2105.04663, section 3.1, with named axes): one word per dimension,

    _            not sharded             data          sharded along the axis
    ?            propagation decides     data+model    along two axes, the first one major
    data?        sharded, and propagation may shard it further
    data:p1      as data, but propagated only after all marks of priority 0, that of the others

and, for a value whose devices hold terms in a pending reduction, a last word `sum@model` (or max@,
min@, prod@). A scalar's layout is the empty string.

A plan may store a weight as `3*model _`: its rows are 3 parts of equal size, such as queries, keys
and values, and each part is sharded along the axis. Users write `model _`.

A dimension with size d over n devices is stored as ceil(d/n) rows on each. Rows past d are padding.
If an operation needs other rows, its operand has a Window on that dimension, such as
`s[8i-1:+10 in 0:64 else 0]`. Users do not write windows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Union

from ..errors import ShardingError
from .halo_window import Window
from .mesh import Mesh
from .spec_notation import Axes, Interned, SpecFields, parse_sequence, parse_string

SpecLike = Union[str, "ShardSpec", Sequence[Any]]


@dataclass(frozen=True, eq=False)
class ShardSpec(metaclass=Interned):
    """A tensor's layout: mesh axes for every dimension, and for a pending reduction.

    Args:
        dims: For every dimension the axes that shard it, major first.
        open: For every dimension whether propagation may shard it further.
        pending: Axes along which devices hold terms in a pending reduction.
        reduction: That reduction's kind: "sum", "max", "min" or "prod".
        windows: For every dimension None, or the rows that a device holds in place of its shard.
            Empty if there are none.
        priorities: For every dimension, a mark's propagation round; empty if all are 0.
        parts: For every dimension, the number of parts that are each sharded; empty if all are 1.

    Example:
        >>> str(ShardSpec((("data",), ()), pending=("model",)))
        'data _ sum@model'
    """

    dims: tuple[Axes, ...]
    open: tuple[bool, ...] = ()
    pending: Axes = ()
    reduction: str = "sum"
    windows: tuple[Window | None, ...] = ()
    priorities: tuple[int, ...] = ()
    parts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("open", "windows", "priorities", "parts"):
            if len(getattr(self, name)) not in (0, len(self.dims)):
                raise ValueError(f"{name} has no entry for each of {len(self.dims)} dimensions")
        # Defaults in full, so that equal layouts have equal fields.
        if not self.open:
            object.__setattr__(self, "open", (False,) * len(self.dims))
        if not self.pending:
            object.__setattr__(self, "reduction", "sum")  # without pending axes it means nothing
        for name, nothing in (("windows", None), ("priorities", 0), ("parts", 1)):
            if all(value == nothing for value in getattr(self, name)):
                object.__setattr__(self, name, ())

    def _fields(self) -> SpecFields:
        """Return all fields, an interned spec's key."""
        how = self.reduction, self.windows, self.priorities, self.parts
        return self.dims, self.open, self.pending, *how

    def __reduce__(self) -> tuple[type[ShardSpec], SpecFields]:
        # Through the constructor, so that an unpickled spec is the interned one.
        return ShardSpec, self._fields()

    @classmethod
    def replicated(cls, rank: int) -> ShardSpec:
        """Return the layout for a tensor that every device has whole.

        Args:
            rank: The number of dimensions.

        Returns:
            The spec.

        Example:
            >>> str(ShardSpec.replicated(2))
            '_ _'
        """
        return cls(((),) * rank)

    @classmethod
    def unconstrained(cls, rank: int) -> ShardSpec:
        """Return the layout with every dimension open: propagation decides.

        Args:
            rank: Number of dimensions.

        Returns:
            The spec.

        Example:
            >>> str(ShardSpec.unconstrained(2))
            '? ?'
        """
        return cls(((),) * rank, (True,) * rank)

    @classmethod
    def parse(cls, spec: SpecLike) -> ShardSpec:
        """Parse a spec.

        Args:
            spec: A string; or a sequence: None, axis names, tuples of axis names, UNCONSTRAINED.

        Returns:
            The spec. str() is the inverse.

        Raises:
            ShardingError: The notation is malformed.

        Example:
            >>> ShardSpec.parse(("data", None)) == ShardSpec.parse("data _")
            True
        """
        if isinstance(spec, ShardSpec):
            return spec
        if isinstance(spec, str):
            return _from_string(spec)
        return cls(*parse_sequence(spec))

    def __str__(self) -> str:
        # An open dimension without axes is "?" alone.
        words = [
            (f"{parts}*" if parts > 1 else "")
            + ("+".join(axes) or ("" if is_open else "_"))
            + "?" * is_open
            + f":p{priority}" * (priority > 0)
            + (f"[{window}]" if window else "")
            for axes, is_open, window, priority, parts in zip(
                self.dims,
                self.open,
                self.windows or (None,) * self.rank,
                self.priorities or (0,) * self.rank,
                self.parts or (1,) * self.rank,
            )
        ]
        pending = [f"{self.reduction}@{'+'.join(self.pending)}"] if self.pending else []
        return " ".join(words + pending)

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return len(self.dims)

    @cached_property
    def sharding_axes(self) -> Axes:
        """All axes that shard some dimension."""
        return tuple(axis for axes in self.dims for axis in axes)

    @property
    def is_replicated(self) -> bool:
        """True if every device has the whole value, and no reduction is pending."""
        return not any(self.dims) and not self.pending

    def closed(self) -> ShardSpec:
        """Return the same axes with no dimension open and no windows.

        Returns:
            The spec.

        Example:
            >>> str(ShardSpec.parse("data? ?").closed())
            'data _'
        """
        return ShardSpec(self.dims, (), self.pending, self.reduction)

    def with_pending(self, axes: Axes, reduction: str | None = None) -> ShardSpec:
        """Return the same layout with another pending reduction.

        Args:
            axes: The reduction's axes; () for none.
            reduction: Its kind, by default this spec's.

        Returns:
            The spec.

        Example:
            >>> str(ShardSpec.parse("data _").with_pending(("model",), "max"))
            'data _ max@model'
        """
        return ShardSpec(self.dims, self.open, axes, reduction or self.reduction, self.windows)

    def with_dim(self, dim: int, axes: Axes) -> ShardSpec:
        """Return the same layout with other axes on one dimension.

        Args:
            dim: The dimension.
            axes: The axes that shard it, major first.

        Returns:
            The spec.

        Example:
            >>> str(ShardSpec.parse("data _").with_dim(1, ("model",)))
            'data model'
        """
        dims = (*self.dims[:dim], axes, *self.dims[dim + 1 :])
        return ShardSpec(dims, self.open, self.pending, self.reduction, self.windows)

    def stacked(self) -> ShardSpec:
        """Return the layout of several such tensors, stacked in front.

        Returns:
            The spec, with one more dimension, which is whole.

        Example:
            >>> str(ShardSpec.parse("data _").stacked())
            '_ data _'
        """
        own = (self.open, False), (self.windows, None), (self.priorities, 0), (self.parts, 1)
        opened, *others = ((nothing, *values) if values else () for values, nothing in own)
        return ShardSpec(((), *self.dims), opened, self.pending, self.reduction, *others)

    def window(self, dim: int) -> Window | None:
        """Return the rows that a device holds in place of a dimension's shard.

        Args:
            dim: The dimension.

        Returns:
            The window; None if the device holds its shard.

        Example:
            >>> ShardSpec.parse("s[8i-1:+10 in 0:64] _").window(0).length
            10
        """
        return self.windows[dim] if self.windows else None

    def with_window(self, dim: int, window: Window | None) -> ShardSpec:
        """Return the same layout with another window on one dimension.

        Args:
            dim: The dimension.
            window: The rows that a device holds; None for its shard.

        Returns:
            The spec.

        Example:
            >>> str(ShardSpec.parse("s[8i-1:+10 in 0:64] _").with_window(0, None))
            's _'
        """
        windows = self.windows or (None,) * self.rank
        windows = (*windows[:dim], window, *windows[dim + 1 :])
        return ShardSpec(self.dims, self.open, self.pending, self.reduction, windows)

    def map_axes(self, change: Callable[[Axes], Axes]) -> ShardSpec:
        """Return the same layout with other names for its axes.

        Args:
            change: Maps a dimension's axes, and the pending axes, to new ones.

        Returns:
            The spec.

        Example:
            >>> str(ShardSpec.parse("data _").map_axes(lambda axes: tuple(a[0] for a in axes)))
            'd _'
        """
        dims, pending = tuple(map(change, self.dims)), change(self.pending)
        return ShardSpec(dims, self.open, pending, *self._fields()[3:])

    def with_priorities(self, priorities: tuple[int, ...] = ()) -> ShardSpec:
        """Return the same layout with other priorities for its dimensions.

        Args:
            priorities: One per dimension; empty for 0 everywhere.

        Returns:
            The spec.

        Example:
            >>> str(ShardSpec.parse("data _").with_priorities((1, 0)))
            'data:p1 _'
        """
        return ShardSpec(*self._fields()[:-2], priorities, self.parts)

    def plain(self) -> ShardSpec:
        """Return the same axes without windows and parts.

        Returns:
            The spec.

        Example:
            >>> str(ShardSpec.parse("s?[8i-1:+10 in 0:64] _").plain())
            's? _'
        """
        if not (self.windows or self.parts):
            return self
        return ShardSpec(self.dims, self.open, self.pending, self.reduction)

    def local_shape(self, shape: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
        """Return one device's shard shape, padding included.

        Args:
            shape: The global shape.
            mesh: The devices.

        Returns:
            The local shape, which is the same on every device.

        Example:
            >>> ShardSpec.parse("data _").local_shape([5, 8], Mesh(data=2))
            (3, 8)
        """
        # Rounded up, so that all devices have equal shards, as collectives need.
        rows = tuple(
            -(-size // mesh.count(axes)) if axes else size for size, axes in zip(shape, self.dims)
        )
        if not self.windows:
            return rows
        return tuple(w.held(n) if w else n for w, n in zip(self.windows, rows))

    def shards(self, mesh: Mesh) -> int:
        """Count the different shards.

        Args:
            mesh: The devices.

        Returns:
            The devices along all axes that shard a dimension.

        Example:
            >>> ShardSpec.parse("data _").shards(Mesh(data=2, model=4))
            2
        """
        return mesh.count(self.sharding_axes)

    def of_rank(self, rank: int) -> ShardSpec:
        """Return the spec for another rank: dimensions that no axis shards go or come.

        Args:
            rank: The number of dimensions.

        Returns:
            The spec with the first sharded dimensions, each once.

        Example:
            >>> spec = ShardSpec.parse("_ model")
            >>> str(spec.of_rank(1)), str(spec.of_rank(3))
            ('model', '_ model _')
        """
        dims = self.dims if rank >= self.rank else tuple(filter(None, self.dims))
        return ShardSpec((*dims[:rank], *((),) * (rank - len(dims))))

    def check(self, mesh: Mesh, shape: Sequence[int], what: str = "the tensor") -> ShardSpec:
        """Check that the spec fits a mesh and a tensor.

        Args:
            mesh: The devices.
            shape: The tensor's global shape.
            what: The tensor's name in messages.

        Returns:
            The spec itself.

        Raises:
            ShardingError: The rank differs, or an axis is unknown or occurs twice.

        Example:
            >>> str(ShardSpec.parse("data _").check(Mesh(data=2), [5, 8]))
            'data _'
        """
        if self.rank != len(shape):
            raise ShardingError.here(
                f"spec '{self}' has {self.rank} entries, "
                f"but {what} has {len(shape)} dimensions {list(shape)}",
                fix=f"write one entry per dimension, such as '{self.of_rank(len(shape))}'",
            )
        if self.parts:
            raise ShardingError.here(
                f"spec '{self}' names the parts of a dimension",
                why="a plan chooses the parts in which it stores a weight, by how forward cuts it",
                fix=f"write '{self.plain()}'",
            )
        seen: set[str] = set()
        for axis in self.sharding_axes + self.pending:
            mesh.check_axis(axis)
            if axis in seen:
                raise ShardingError.here(
                    f"'{axis}' occurs twice in spec '{self}'",
                    why="an axis shards at most one dimension of a tensor",
                    fix="remove one of the two",
                )
            seen.add(axis)
        return self


@lru_cache(maxsize=4096)
def _from_string(text: str) -> ShardSpec:
    return ShardSpec(*parse_string(text))
