"""Tensors that a side of a branch on a value leaves in attributes and buffers.

    if y.sum() > 0:             y = cond(..., y), and so are norm.running_mean, norm.running_var
        y = self.norm(y)        and norm.num_batches_tracked: they are written behind the branch

Both sides are traced. Each leaves the tables of the module's state as they were before it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from contextvars import ContextVar
from typing import Any

from torch import Tensor

from ...compat.private_apis import TorchDispatchMode
from ...compat.private_apis import _pytree as pytree
from ...errors import ShardingError
from ..state.source import ABSENT as NONE
from ..state.source import LISTS, set_component

_Ask = Callable[[Tensor], Tensor | None]
# (asks for a tensor's value, returns the tables of the module's state, the Side of prints.py, tells
# whether no trace can pass an error) in the trace that runs
TRACE: ContextVar[tuple[_Ask, Callable[[], list], Any, Callable[[Exception], bool]]]
TRACE = ContextVar("TRACE")


class Effects:
    """Attributes and buffers that sides of a branch change: results, as names are."""

    def __init__(self) -> None:
        self.tables = [(table, table.entries()) for table in TRACE.get()[1]()]
        self.places: dict[tuple[int, Any], None] = {}  # a table's number and its step, in order
        self.copied: set[tuple[int, Any]] = set()  # those whose tensors a side changes in place

    def run(
        self, side: Callable[..., tuple], before: Sequence[object], is_traced: bool = False
    ) -> tuple[tuple, dict]:
        """Run a side; return its results and the entries that it changed, which are put back.

        Where it is not traced, its operations are dropped: it is run for the kinds of its values,
        and raises ShardingError for other effects.
        """
        while True:
            try:
                copies = {
                    place: self.tables[place[0]][1][place[1]].clone() for place in self.copied
                }
                for (i, step), tensor in copies.items():
                    set_component(self.tables[i][0].container, step, tensor)
                with nullcontext() if is_traced else _Writes({id(x): x for x in copies.values()}):
                    results = side(*before)
                return results, self._left()
            except _WritesInPlace as found:
                self.copied |= self._places_of(found.tensors)
            finally:
                self._restore()

    def _places_of(self, tensors: dict[int, Tensor]) -> set[tuple[int, Any]]:
        places = {
            (i, step)
            for i, (table, entries) in enumerate(self.tables)
            for step, value in entries.items()
            if id(value) in tensors and not isinstance(table.container, LISTS)
        }
        if len({id(self.tables[i][1][step]) for i, step in places}) < len(tensors):
            raise effect("changes a tensor in place")
        return places

    def _left(self) -> dict[tuple[int, Any], object]:
        left = dict[tuple[int, Any], object]()
        for i, (table, entries) in enumerate(self.tables):
            now = table.entries()
            steps = [k for k in {**entries, **now} if now.get(k, self) is not entries.get(k, self)]
            if steps and isinstance(table.container, LISTS):
                raise effect("changes a list")
            for step in steps:
                if step not in now or step not in entries:
                    raise effect(f"creates or deletes '{table.source.at(step)}'")
                left[i, step] = now[step]
        self.places |= dict.fromkeys(left)
        return left

    def _restore(self) -> None:
        for table, entries in self.tables:
            if isinstance(table.container, LISTS):
                items: Any = table.container
                if len(items) != len(entries):
                    items[:] = entries.values()
                continue
            for step, value in table.entries().items():
                if value is not entries.get(step, self):
                    set_component(table.container, step, entries.get(step, NONE))

    def names(self) -> list[str]:
        return [str(self.tables[i][0].source.at(step)) for i, step in self.places]

    def values(self, left: dict[tuple[int, Any], object]) -> list[object]:
        """Return the values at all places behind a side: those that it left, or those before."""
        return [left.get((i, step), self.tables[i][1][step]) for i, step in self.places]

    def apply(self, after: Sequence[object]) -> None:
        """Leave the values behind the branch in the tables."""
        for (i, step), value in zip(self.places, after):
            table, entries = self.tables[i]
            if isinstance(value, Tensor) and not isinstance(entries[step], Tensor | None):
                raise effect(f"assigns another number to '{table.source.at(step)}'")
            if (i, step) in self.copied and isinstance(value, Tensor):
                entries[step].copy_(value)
            else:
                set_component(table.container, step, value)


def owned(*objects: object) -> None:
    """Raise ShardingError unless attributes of these objects are in the module's tables."""
    tables = TRACE.get()[1]()
    if not all(any(table.container is each for table in tables) for each in objects):
        raise effect("assigns an attribute of an object that the model does not name")


def effect(what: str) -> ShardingError:
    return ShardingError.here(
        f"the program depends on values: a side of a branch on a value {what}",
        why="both sides are traced, and a run computes one of them: its results alone count",
        fix="compute new tensors there, and assign them behind the branch; or use torch.where",
    )


class _WritesInPlace(Exception):
    """An operation would change tensors in place that were there before a side."""

    def __init__(self, tensors: dict[int, Tensor]) -> None:
        super().__init__()
        self.tensors = tensors


_STATISTICS = "running_mean", "running_var"


class _Writes(TorchDispatchMode):
    """Raises if an operation changes a tensor in place that was there before."""

    def __init__(self, own: dict[int, Tensor]) -> None:
        super().__init__()
        self.own = own

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple = (), kwargs: Any = None
    ) -> Any:
        kwargs, others = kwargs or {}, dict[int, Tensor]()
        parameters = func._schema.arguments
        named = {**dict(zip((p.name for p in parameters), args)), **kwargs}
        for parameter in parameters:
            value, alias = named.get(parameter.name), parameter.alias_info
            # Some schemas of batch norm do not say that it changes these.
            is_updated = parameter.name in _STATISTICS and named.get("training", named.get("train"))
            if is_updated or alias is not None and alias.is_write:
                leaves = (x for x in pytree.tree_leaves(value) if isinstance(x, Tensor))
                others |= {id(x): x for x in leaves if id(x) not in self.own}
        if others:
            raise _WritesInPlace(others)
        result = func(*args, **kwargs)
        if not getattr(func, "is_view", False) or id(args[0]) in self.own:
            self.own |= {id(x): x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)}
        return result
