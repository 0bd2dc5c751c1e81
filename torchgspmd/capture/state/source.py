"""Sources: the places where values live.

    Source(module, (Attribute("hidden"),))              self.hidden
    Source(module, (Attribute("caches"), 3, "keys"))    self.caches[3]['keys']
    Source(ARGUMENTS, (0, 1, "x"))                      args[1]['x']
    Source(math.__dict__, ("pi",))                      global math.pi
    Source(cell, (Attribute("n"),))                     closure cell n

A step is an Attribute, or else an item: a dict key, or a position in a list or tuple. The model is
torch._dynamo's Source, whose roots are the names in a frame. Here a root is the object itself,
since guards are compared and state is read at every call.
"""

from __future__ import annotations

import functools
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial, reduce
from types import CellType
from typing import Any, NamedTuple

from torch import nn

LISTS = (list, deque)
_BASES = (tuple, dict, *LISTS)
LONG = 1000  # containers with more components are not searched
DEEP = 8  # deepest nesting; a container may contain itself


class Marker:
    """A marker that stands for a value."""

    def __init__(self, meaning: str) -> None:
        self.meaning = meaning

    def __repr__(self) -> str:
        return self.meaning


ABSENT = Marker("absent")
ARGUMENTS = Marker("the arguments")  # root for every call's (args, kwargs)


class Attribute(NamedTuple):
    """The step to a component that is no item.

    It is an attribute on an object, in its __dict__ or in a slot, or on a class itself. For a
    closure cell or context variable it is the content, and the name is the variable's.
    """

    name: str


Step = Any  # an Attribute, or an item's key


@dataclass(frozen=True, eq=False)
class Source:
    """The root and the steps to a value. Two sources are equal if they have the same root."""

    root: Any
    steps: tuple[Step, ...] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Source) and self.root is other.root and self.steps == other.steps

    def __hash__(self) -> int:
        return hash((id(self.root), self.steps))

    def __str__(self) -> str:
        return self.text({})

    def text(self, roots: Mapping[int, str]) -> str:
        """Return the source as an expression. roots: objects' expressions, by their ids."""
        root, steps = self.root, self.steps
        if root is ARGUMENTS:
            head, steps = ("args", "kwargs")[steps[0]], steps[1:]
        elif isinstance(root, (CellType, ContextVar)):
            kind = "closure cell" if isinstance(root, CellType) else "context variable"
            head, steps = f"{kind} {steps[0].name}", steps[1:]
        elif isinstance(root, dict) and "__name__" in root:
            head, steps = f"global {root['__name__']}.{steps[0]}", steps[1:]
        elif isinstance(root, nn.Module):
            head = roots.get(id(root), "self")
        else:
            head = roots.get(id(root)) or getattr(root, "__qualname__", type(root).__name__)
        return head + "".join(
            f".{step.name}" if isinstance(step, Attribute) else f"[{step!r}]" for step in steps
        )

    @property
    def name(self) -> str:
        return ".".join(map(step_name, self.steps)) or "a table"

    @property
    def entry(self) -> Source:
        """Return the source for the root's component that leads to the value."""
        return Source(self.root, self.steps[:1])

    def at(self, *steps: Step) -> Source:
        """Return the source for a component of the value."""
        return Source(self.root, (*self.steps, *steps))

    def holder(self, arguments: object = None) -> Any:
        return Source(self.root, self.steps[:-1]).read(arguments)

    def read(self, arguments: object = None) -> Any:
        """Return the value, or ABSENT. arguments: the call's (args, kwargs)."""
        return reduce(component, self.steps, arguments if self.root is ARGUMENTS else self.root)

    def write(self, value: Any, arguments: Any = None) -> None:
        """Put a value there; ABSENT removes it. A tuple on the way is replaced by a new one."""
        holder, step = self.holder(arguments), self.steps[-1]
        if not isinstance(holder, tuple):
            set_component(holder, step, value)
            return
        items = [value if i == step else item for i, item in enumerate(holder)]
        Source(self.root, self.steps[:-1]).write(
            type(holder)(*items) if hasattr(holder, "_fields") else type(holder)(items), arguments
        )

    def dict_entry(self) -> tuple[dict, Any] | None:
        """Return the dict and key at which the value is, if it is a component of the root.

        Guards read such entries in C.
        """
        if len(self.steps) != 1:
            return None
        (step,) = self.steps
        if not isinstance(step, Attribute):
            return (self.root, step) if isinstance(self.root, dict) else None
        table = None if step.name in slots_of(type(self.root)) else attributes_of(self.root)
        return None if table is None else (table, step.name)

    def reader(self) -> Callable[[], Any]:
        """Return a function that reads the value; for one step it is in C."""
        if (entry := self.dict_entry()) is not None:
            return partial(dict.get, *entry, ABSENT)
        if isinstance(self.root, type) and len(self.steps) == 1:
            return partial(self.root.__dict__.get, self.steps[0].name, ABSENT)
        return self.read

    def leaves(self) -> Iterator[tuple[Source, Any]]:
        """Yield source and value for the leaves in nested tuples, lists and dicts."""
        return _leaves(self, self.read(), 0)


def _leaves(source: Source, value: Any, depth: int) -> Iterator[tuple[Source, Any]]:
    if not (isinstance(value, tuple) or is_table(value)):
        yield source, value
    elif length(value) <= LONG and depth < DEEP:
        for key, item in value.items() if isinstance(value, dict) else enumerate(items_of(value)):
            yield from _leaves(source.at(key), item, depth + 1)


def step_name(step: Step) -> str:
    """Return a step's name, the same on all ranks; a key may be an object's id."""
    if isinstance(step, Attribute):
        return step.name
    is_text = isinstance(step, str) or type(step) is int and step < LONG
    return str(step) if is_text else type(step).__name__


def is_table(value: object) -> bool:
    """Return whether the value is a list, or a dict that returns its stored values.

    False for a dict that computes values in __getitem__.
    """
    return (
        isinstance(value, LISTS)
        or isinstance(value, dict)
        and type(value).__getitem__ is dict.__getitem__
    )


def component(holder: Any, step: Step) -> Any:
    """Return the holder's component, or ABSENT."""
    if not isinstance(step, Attribute):
        if isinstance(holder, dict):
            # The stored entry, whatever a subclass would compute.
            return dict.get(holder, step, ABSENT)
        is_position = isinstance(holder, (tuple, *LISTS)) and type(step) is int
        return holder[step] if is_position and step < length(holder) else ABSENT
    if isinstance(holder, CellType):
        # An empty cell equals another one, and has no contents to read.
        return ABSENT if holder == CellType() else holder.cell_contents
    if isinstance(holder, ContextVar):
        return holder.get(ABSENT)
    if isinstance(holder, type):
        return holder.__dict__.get(step.name, ABSENT)
    if step.name in slots_of(type(holder)):
        try:
            return object.__getattribute__(holder, step.name)
        except AttributeError:
            return ABSENT
    return (attributes_of(holder) or {}).get(step.name, ABSENT)


def set_component(holder: Any, step: Step, value: Any) -> None:
    """Write the holder's component; ABSENT removes it.

    A position that a list does not have any more is left out.
    """
    if not isinstance(step, Attribute):
        if value is not ABSENT:
            if isinstance(holder, dict) or step < length(holder):
                holder[step] = value
        elif step in holder:
            del holder[step]
    elif isinstance(holder, ContextVar):
        holder.set(value)
    elif isinstance(holder, type):
        _set_attribute(type, holder, step.name, value)
    elif isinstance(holder, CellType):
        _set_attribute(object, holder, "cell_contents", value)
    elif step.name in slots_of(type(holder)):
        _set_attribute(object, holder, step.name, value)  # also on a frozen dataclass
    elif (table := attributes_of(holder)) is not None:
        set_component(table, step.name, value)


def _set_attribute(base: Any, holder: Any, name: str, value: Any) -> None:
    if value is ABSENT:
        base.__delattr__(holder, name)
    else:
        base.__setattr__(holder, name, value)


def length(container: Any) -> int:
    """Return a tuple's, list's or dict's number of items; a subclass's __len__ may be another."""
    return _base(container).__len__(container)


def items_of(container: Any) -> Sequence[Any]:
    """Return a tuple's or list's items; a subclass's __iter__ may yield others."""
    return container if type(container) in _BASES else [*_base(container).__iter__(container)]


def _base(container: Any) -> Any:
    return next((each for each in _BASES if isinstance(container, each)), type(container))


def components(holder: object) -> dict[Step, Any]:
    """Return a collection's or an object's items and attributes, by their steps."""
    items = (
        holder.items()
        if isinstance(holder, dict)
        else enumerate(items_of(holder))
        if isinstance(holder, (tuple, *LISTS))
        else ()
    )
    return {**dict(items), **attributes(holder)}


def attributes(holder: object) -> dict[Step, Any]:
    """Return the attributes that an object has in its __dict__ and in slots, by their steps."""
    table = attributes_of(holder) or {}
    return {Attribute(name): value for name, value in table.items()} | slots(holder)


def slots(holder: object) -> dict[Step, Any]:
    """Return the attributes that an object has in slots, by their steps."""
    steps = map(Attribute, slots_of(type(holder)))
    return {s: value for s in steps if (value := component(holder, s)) is not ABSENT}


def attributes_of(holder: object) -> dict | None:
    try:
        # Past a patched __getattribute__, which would record the read (recorder.py).
        of_thread = isinstance(holder, threading.local)
        table = holder.__dict__ if of_thread else object.__getattribute__(holder, "__dict__")
    except AttributeError:
        return None
    return table if isinstance(table, dict) else None


@functools.lru_cache(maxsize=4096)
def slots_of(cls: type) -> tuple[str, ...]:
    """Return the attribute names that a Python class keeps in slots."""
    declared = [c.__dict__.get("__slots__", ()) for c in cls.__mro__ if c.__module__ != "builtins"]
    return tuple(
        name
        for names in declared
        for name in ((names,) if isinstance(names, str) else names)
        if not name.startswith("__")
    )
