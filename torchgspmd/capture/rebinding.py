"""What a module's forward assigns: buffers and other tensors are results of the program, the rest is of the trace alone."""
from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from ..errors import ShardingError, user_line
from .effects import Left, made
from .objects import opened
from .reads import ABSENT, GROWS, KEPT_BY_TORCH, LONG, overwritten

_EMPTY = CellType()


def rebound_buffers(module: nn.Module, names: Sequence[str], inputs: Sequence[Tensor]) -> dict[int, Tensor]:
    """The buffers that forward gave another tensor (self.mean = 0.9 * self.mean + ...), by place among the inputs."""
    now = dict(module.named_buffers())
    found = {i: now[name] for i, (name, tensor) in enumerate(zip(names, inputs)) if name in now and now[name] is not tensor}
    for i, value in found.items():
        if value.shape != inputs[i].shape or value.dtype != inputs[i].dtype:
            raise ShardingError(f"forward gives buffer '{names[i]}' another shape or dtype: {value.dtype} {list(value.shape)} instead of "
                                f"{inputs[i].dtype} {list(inputs[i].shape)}", where=user_line(),
                                why="one program is made for all calls, and the next one would be another", fix="return the tensor")
    return found


@dataclass
class _Table:
    """A dict or list, and what was in it before."""
    container: dict | list
    before: dict
    known: dict                             # and when it was looked at last
    root: dict | list                       # where it is: in the attributes of a module or in a table that a function names,
    path: tuple = ()                        # under these keys; () for the root itself
    owner: nn.Module | None = None          # the module


class Tables:
    """The attributes of a module and of those inside of it, and all tables and lists in which its forward and its hooks, or a function,
    may leave tensors: those in attributes, and those that they name, as in `register_forward_hook(lambda m, x, y: found.append(y))`."""

    def __init__(self, fn: Callable | nn.Module, traced: type[Tensor]):
        self.traced = traced
        self.modules = list(fn.modules()) if isinstance(fn, nn.Module) else []
        self.functions = [fn]
        for m in self.modules:
            hooks = (m._forward_hooks, m._forward_pre_hooks, m._backward_hooks, m._backward_pre_hooks)
            self.functions += [m.forward, *chain.from_iterable(map(dict.values, hooks))]
        self.tables: list[_Table] = []

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Meanwhile tensors that earlier runs have left in attributes are not there, whatever a program does with them; afterwards
        entries that were assigned tensors of the trace, which have no values, are what they were."""
        hidden = [*self._hidden()]
        self.tables = [*self._all()]
        try:
            yield
        finally:
            for table in self.tables:
                changed, appended = self._left(table, table.before)
                if appended:
                    del table.container[len(table.before):]
                for name in changed:
                    _put(table.container, name, table.before.get(name, ABSENT))
            for container, name, value in hidden:
                _put(container, name, value)

    def left(self, outputs: list[Tensor], state: Sequence[Tensor]) -> list[Left]:
        """The tensors that have been put into tables since the last look; they are added to the outputs of the program. Parameters
        and buffers do not count: an LSTM has its weights in a list, too."""
        found, known = [], frozenset(map(id, state))
        for table in self.tables:
            changed, appended = self._left(table, table.known, known)
            table.known = _entries(table.container)
            if changed or appended:
                entries = {name: made(value, outputs) for name, value in changed.items()}
                found.append(Left(table.root, table.path, entries, made(appended, outputs)))
            if table.owner is not None and (changed or appended):
                before = overwritten.setdefault(table.owner, {})
                if isinstance(table.container, list):
                    before[table.path] = GROWS
                for name in changed if isinstance(table.container, dict) else ():
                    before.setdefault((*table.path, name), table.before.get(name, ABSENT))
        return found

    def _left(self, table: _Table, old: dict, known: frozenset[int] = frozenset()) -> tuple[dict, list]:
        """Entries that hold tensors of the trace, other than the known ones: those that were assigned, and what was appended to a list."""
        now = _entries(table.container)
        changed = {name: value for name, value in now.items() if value is not old.get(name) and _holds(value, self.traced, known)}
        if not isinstance(table.container, list) or not any(name >= len(old) for name in changed):
            return changed, []
        return {name: value for name, value in changed.items() if name < len(old)}, table.container[len(old):]

    def _hidden(self) -> Iterator[tuple[dict, Any, Any]]:
        """Takes away what runs have left; yields where and what."""
        for module in self.modules:
            for path, before in overwritten.get(module, {}).items():
                container: Any = module.__dict__
                for name in path[:-1]:
                    container = container.get(name) if isinstance(container, dict) else None
                if before is not GROWS and isinstance(container, dict) and _holds(container.get(path[-1]), Tensor):
                    yield container, path[-1], container[path[-1]]
                    _put(container, path[-1], before)

    def _all(self) -> Iterator[_Table]:
        seen: set[int] = set()
        for module in self.modules:
            yield from _tables(module.__dict__, seen, module.__dict__, (), module)
        for function in self.functions:
            for value in _named(function):
                attributes = value if isinstance(value, (dict, list)) else getattr(value, "__dict__", None)
                if isinstance(attributes, (dict, list)) and not isinstance(value, (Tensor, ModuleType)):
                    yield from _tables(attributes, seen, attributes)


def _tables(container: dict | list, seen: set[int], root: dict | list, path: tuple = (),
            owner: nn.Module | None = None) -> Iterator[_Table]:
    """A table, and the tables and lists in it, unless it is a long one."""
    if id(container) in seen:
        return
    seen.add(id(container))
    entries = _entries(container)
    yield _Table(container, entries, entries, root, path, owner)
    for name, value in entries.items() if len(entries) <= LONG else ():
        if isinstance(value, (dict, list)) and name not in KEPT_BY_TORCH:
            yield from _tables(value, seen, root, (*path, name), owner)


def _named(function: Any) -> Iterator[Any]:
    """What a function can reach by name: variables around it and global ones, the object it is a method of, arguments it was given."""
    if hasattr(function, "__wrapped__"):
        yield from _named(function.__wrapped__)
    if isinstance(function, functools.partial):
        yield from (*function.args, *function.keywords.values(), *_named(function.func))
    elif isinstance(function, MethodType):
        yield from (function.__self__, *_named(function.__func__))
    elif isinstance(function, FunctionType):
        cells = [cell.cell_contents for cell in function.__closure__ or () if cell != _EMPTY]
        yield from (*cells, *(function.__defaults__ or ()), *(function.__globals__.get(name) for name in function.__code__.co_names))
    else:
        yield function


def _put(container: dict | list, name: Any, value: Any) -> None:
    if value is ABSENT:
        del container[name]
    else:
        container[name] = value


def _entries(container: dict | list) -> dict:
    return dict(enumerate(container)) if isinstance(container, list) else dict(container)


def _holds(value: Any, kind: type[Tensor], known: frozenset[int] = frozenset()) -> bool:
    """Whether a tensor of this kind is in it, by another id than these."""
    return any(isinstance(leaf, kind) and id(leaf) not in known for leaf in pytree.tree_leaves(opened(value)))
