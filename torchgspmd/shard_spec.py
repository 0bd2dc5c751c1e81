"""ShardSpec: how one tensor is laid out on a mesh. Immutable; parses and prints.

Notation (GSPMD, arXiv 2105.04663, section 3.1, with named axes): one word per dimension,

    _            not sharded             data          sharded along the axis
    ?            propagation decides     data+model    along two axes, the first one major
    data?        sharded, and propagation may shard it further

and, for a value whose devices hold terms of a reduction that is still to be done, a last word
`sum@model` (or max@, min@, prod@). The layout of a scalar is the empty string.

A dimension of size d over n devices is stored as ceil(d/n) rows on each; what lies past d is
padding. Where an operation needs other rows, its operand has a Window for that dimension:
`s[8i-1:+10 in 0:64 else 0]`. No user writes one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, Final, Union

from .errors import ShardingError, user_line
from .halo import Window
from .mesh import Mesh, sub_axis

Axes = tuple[str, ...]


class _Unconstrained:
    """Entry of a spec: propagation may decide how this dimension is sharded."""

    def __repr__(self) -> str:
        return "UNCONSTRAINED"


UNCONSTRAINED: Final = _Unconstrained()
SpecLike = Union[str, "ShardSpec", Sequence]
REDUCTIONS = ("sum", "max", "min", "prod")


class _Interned(type):
    """Makes equal objects one, so that they are compared and hashed by identity: planning does so
    millions of times.
    """

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        made = super().__call__(*args, **kwargs)
        return _INTERNED.setdefault(made.fields(), made)


_INTERNED: dict[tuple, Any] = {}


@dataclass(frozen=True, eq=False)
class ShardSpec(metaclass=_Interned):
    """For every dimension its axes (major first) and whether it is open; and the axes of a pending
    reduction.

    windows: for every dimension None or the rows that a device holds instead of its part; empty if
    there are none.
    """

    dims: tuple[Axes, ...]
    open: tuple[bool, ...] = ()
    pending: Axes = ()
    reduction: str = "sum"
    windows: tuple[Window | None, ...] = ()

    def __post_init__(self):
        if not self.open:
            object.__setattr__(self, "open", (False,) * len(self.dims))
        if not self.pending:
            object.__setattr__(self, "reduction", "sum")  # so that equal layouts are equal
        if not any(self.windows):
            object.__setattr__(self, "windows", ())

    def fields(self) -> tuple:
        """dims, open, pending, reduction and windows: what makes two of them equal, and so one
        object.
        """
        return self.dims, self.open, self.pending, self.reduction, self.windows

    def __reduce__(self) -> tuple:
        return ShardSpec, self.fields()

    @classmethod
    def replicated(cls, rank: int) -> ShardSpec:
        """Of a tensor with `rank` dimensions that every device has whole."""
        return cls(((),) * rank)

    @classmethod
    def unconstrained(cls, rank: int) -> ShardSpec:
        """Every dimension open: propagation decides."""
        return cls(((),) * rank, (True,) * rank)

    @classmethod
    def parse(cls, spec: SpecLike) -> ShardSpec:
        """From the string, or from a sequence of None, axis name, tuple of axis names and
        UNCONSTRAINED.
        """
        if isinstance(spec, ShardSpec):
            return spec
        if isinstance(spec, str):
            return _parse_string(spec)
        if isinstance(spec, Sequence):
            return _parse_sequence(spec)
        raise ShardingError(
            f"a spec is a string such as 'data _' or a tuple such as ('data', None), not {spec!r}",
            where=user_line(),
        )

    def __str__(self) -> str:
        words = [
            ("+".join(axes) or ("" if is_open else "_"))
            + "?" * is_open
            + (f"[{window}]" if window else "")
            for axes, is_open, window in zip(
                self.dims, self.open, self.windows or (None,) * self.rank
            )
        ]
        return " ".join(
            words + ([f"{self.reduction}@{'+'.join(self.pending)}"] if self.pending else [])
        )

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
        """Whether every device has the whole value, nothing pending."""
        return not any(self.dims) and not self.pending

    def closed(self) -> ShardSpec:
        """The same axes with no dimension open."""
        return ShardSpec(self.dims, (), self.pending, self.reduction)

    def with_pending(self, axes: Axes, reduction: str | None = None) -> ShardSpec:
        return ShardSpec(self.dims, self.open, axes, reduction or self.reduction, self.windows)

    def with_dim(self, dim: int, axes: Axes) -> ShardSpec:
        return ShardSpec(
            self.dims[:dim] + (axes,) + self.dims[dim + 1 :],
            self.open,
            self.pending,
            self.reduction,
            self.windows,
        )

    def window(self, dim: int) -> Window | None:
        return self.windows[dim] if self.windows else None

    def with_window(self, dim: int, window: Window | None) -> ShardSpec:
        windows = self.windows or (None,) * self.rank
        return ShardSpec(
            self.dims,
            self.open,
            self.pending,
            self.reduction,
            (*windows[:dim], window, *windows[dim + 1 :]),
        )

    def map_axes(self, change: Callable[[Axes], Axes]) -> ShardSpec:
        """The same layout with other names for its axes."""
        return ShardSpec(
            tuple(map(change, self.dims)),
            self.open,
            change(self.pending),
            self.reduction,
            self.windows,
        )

    def plain(self) -> ShardSpec:
        """The same axes without windows."""
        return (
            ShardSpec(self.dims, self.open, self.pending, self.reduction) if self.windows else self
        )

    def local_shape(self, shape: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
        """Shape of one device's shard, padding included; the same on every device."""
        rows = tuple(
            -(-size // mesh.count(axes)) if axes else size for size, axes in zip(shape, self.dims)
        )
        return (
            tuple(w.length if w else n for w, n in zip(self.windows, rows))
            if self.windows
            else rows
        )

    def shards(self, mesh: Mesh) -> int:
        """Number of different shards."""
        return mesh.count(self.sharding_axes)

    def check(self, mesh: Mesh, shape: Sequence[int], what: str = "the tensor") -> ShardSpec:
        """Itself; ShardingError if it does not fit the mesh or a tensor of this shape."""
        if self.rank != len(shape):
            raise ShardingError(
                f"spec '{self}' has {self.rank} entries, but {what} has {len(shape)} dimensions {list(shape)}",
                where=user_line(),
                fix=f"one entry per dimension, such as '{' '.join('_' * len(shape))}'",
            )
        seen: set[str] = set()
        for axis in self.sharding_axes + self.pending:
            mesh.check_axis(axis)
            if axis in seen:
                raise ShardingError(
                    f"'{axis}' occurs twice in spec '{self}'",
                    where=user_line(),
                    why="an axis shards at most one dimension of a tensor",
                    fix="remove one of the two",
                )
            seen.add(axis)
        return self


def nests(size: int, coarse: Axes, fine: Axes, mesh: Mesh) -> bool:
    """Whether every block of a dimension sharded along `fine` lies within one of `coarse`, which
    `fine` begins with.
    """
    if not coarse:
        return True
    n, m = mesh.count(coarse), mesh.count(fine)
    return -(-size // m) * (m // n) == -(-size // n)


def padding(size: int, count: int) -> int:
    """Rows of padding that `count` shards of a dimension of this size hold together."""
    return math.ceil(size / count) * count - size if count else 0


def _is_axis(name: Any) -> bool:
    return isinstance(name, str) and (
        name.isidentifier() and name != "_" or sub_axis(name) is not None
    )


_WORD = re.compile(r"(?:[^\s\[]|\[[^\]]*\])+")


@lru_cache(maxsize=4096)
def _parse_string(text: str) -> ShardSpec:
    words, pending, reduction = _WORD.findall(text), (), "sum"
    if words and "@" in words[-1]:
        reduction, _, names = words.pop().partition("@")
        pending = tuple(names.split("+"))
        if reduction not in REDUCTIONS:
            raise ShardingError(
                f"'{reduction}' in spec '{text}' is not a reduction; known are {', '.join(REDUCTIONS)}",
                where=user_line(),
            )
        if not all(map(_is_axis, pending)):
            raise ShardingError(
                f"'{names}' in spec '{text}' is not an axis name",
                where=user_line(),
                fix="behind '@' an axis, or axes joined by '+'",
            )
    dims, opens, windows = [], [], []
    for word in words:
        word, window = _split_window(word)
        windows.append(window)
        is_open = word.endswith("?")
        word = word[:-1] if is_open else word
        axes = () if word in ("", "_") else tuple(word.split("+"))
        if not all(map(_is_axis, axes)):
            raise ShardingError(
                f"'{word}' in spec '{text}' is not an axis name",
                where=user_line(),
                fix="one word per dimension: '_', '?', an axis, or axes joined by '+'",
            )
        dims.append(axes)
        opens.append(is_open)
    return ShardSpec(tuple(dims), tuple(opens), pending, reduction, tuple(windows))


def _split_window(word: str) -> tuple[str, Window | None]:
    """The axes and the window of `s[8i-1:+10 in 0:64]`; a word without a proper one as it is."""
    axes, _, text = word.removesuffix("]").partition("[")
    try:
        return axes, Window.parse(text)
    except ValueError:
        return word, None


def _parse_sequence(entries: Sequence) -> ShardSpec:
    dims, opens = [], []
    for entry in entries:
        opens.append(entry is UNCONSTRAINED)
        if entry is None or entry is UNCONSTRAINED:
            dims.append(())
        elif _is_axis(entry):
            dims.append((entry,))
        elif isinstance(entry, (tuple, list)) and all(map(_is_axis, entry)):
            dims.append(tuple(entry))
        else:
            raise ShardingError(
                f"{entry!r} is not an entry of a spec; use None, an axis name, a tuple of axis names or UNCONSTRAINED",
                where=user_line(),
            )
    return ShardSpec(tuple(dims), tuple(opens))
