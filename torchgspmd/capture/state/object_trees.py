"""Pytrees for objects that pytree does not know.

model(x, past_key_values=cache)      # a transformers cache holds tensors in attributes
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any, cast

import torch
from torch import Tensor

from ...compat.private_apis import _pytree as pytree
from ...compat.private_apis import is_missing
from ..rewrites.sparse_coo import Entries, is_sparse
from .source import Attribute, Source, Step, components, set_component, slots_of

# A symbolic number holds the trace's shapes: a large tree without tensors of the program.
_NO_OBJECTS = (Tensor, type, Enum, ModuleType, torch.SymInt, torch.SymFloat, torch.SymBool)
_COLLECTIONS = (dict, list, tuple)
_KNOWN_PACKAGES = "builtins", "collections", "torch", __name__.partition(".")[0]
OF_PYTHON = 1 << 9  # flag on classes that a class statement defines: Py_TPFLAGS_HEAPTYPE


@dataclass
class Opened:
    """An object taken apart: its class and its components, themselves opened."""

    cls: type
    components: dict[Step, Any]
    origin: Source | None = None  # in the arguments, if it is there


@dataclass
class Rebuilt:
    """An object of a class that a user registered with pytree: its class, context and children.

    Its constructor may check its tensors, so it runs when they are there.
    """

    cls: type
    context: Any
    children: list


def _with_keys(opened: Any) -> Any:
    items = [
        (pytree.MappingKey(step.name if isinstance(step, Attribute) else step), value)
        for step, value in opened.components.items()
    ]
    return items, (opened.cls, tuple(opened.components), opened.origin)


def _with_numbers(rebuilt: Any) -> Any:
    items = [(pytree.SequenceKey(i), x) for i, x in enumerate(rebuilt.children)]
    return items, (rebuilt.cls, rebuilt.context)


if not is_missing(pytree):
    pytree.register_pytree_node(
        Opened,
        lambda o: (list(o.components.values()), (o.cls, tuple(o.components), o.origin)),
        lambda values, context: Opened(context[0], dict(zip(context[1], values)), context[2]),
        flatten_with_keys_fn=_with_keys,
    )
    pytree.register_pytree_node(
        Rebuilt,
        lambda r: (r.children, (r.cls, r.context)),
        lambda children, context: Rebuilt(context[0], context[1], list(children)),
        flatten_with_keys_fn=_with_numbers,
    )


def taken_apart(tree: object) -> Any:
    """Return the tree with Rebuilt for objects of classes that users registered with pytree."""

    def take(part: Any) -> Any:
        if not _is_registered(part):
            return part
        children, context = pytree.SUPPORTED_NODES[type(part)].flatten_fn(part)
        return Rebuilt(type(part), context, [*map(taken_apart, children)])

    return pytree.tree_map(take, tree, is_leaf=_is_registered)


def leaves_with_paths(tree: object) -> list[tuple[tuple, Any]]:
    """Return the leaves of a tree with their paths; users' classes have numbers for names."""
    return pytree.tree_flatten_with_path(taken_apart(tree))[0]


def _is_registered(part: object) -> bool:
    known = type(part).__module__.partition(".")[0] in _KNOWN_PACKAGES
    return type(part) in pytree.SUPPORTED_NODES and not known


def opened(
    tree: object, origins: Mapping[int, Source] | None = None, around: tuple[int, ...] = ()
) -> Any:
    """Return the tree with Opened for objects that hold tensors, and Entries for sparse tensors.

    An object whose id has an origin is Opened without components: the program's writes into these
    go to the origin. around: the ids of objects that contain the tree.
    """
    return pytree.tree_map(lambda leaf: _open_leaf(leaf, origins or {}, around), tree)


def _open_leaf(leaf: Any, origins: Mapping[int, Source], around: tuple[int, ...]) -> object:
    if is_sparse(leaf):
        return Entries.of(leaf)
    # An object that contains itself ends the search.
    if not is_object(leaf) or id(leaf) in around:
        return leaf
    if (origin := origins.get(id(leaf))) is not None:
        return Opened(type(leaf), {}, origin)
    inside = {
        key: opened(value, origins, (*around, id(leaf))) for key, value in components(leaf).items()
    }
    holds = any(isinstance(x, Tensor) for x in pytree.tree_leaves(inside))
    return Opened(type(leaf), inside) if holds else leaf


def closed(tree: object, arguments: object = None) -> Any:
    """Return the tree with objects in place of Opened, and sparse tensors in place of Entries.

    Objects are new ones; those with an origin are the ones in `arguments`.
    """
    return pytree.tree_map(lambda leaf: _close_leaf(leaf, arguments), tree, is_leaf=is_opened)


def is_opened(part: object) -> bool:
    """Return whether the value is Opened, Rebuilt or Entries."""
    return isinstance(part, (Opened, Rebuilt, Entries))


def _close_leaf(leaf: object, arguments: object) -> object:
    if isinstance(leaf, Entries):
        return leaf.tensor()
    if isinstance(leaf, Rebuilt):
        children = [closed(child, arguments) for child in leaf.children]
        return pytree.SUPPORTED_NODES[leaf.cls].unflatten_fn(children, leaf.context)
    if not isinstance(leaf, Opened):
        return leaf
    if leaf.origin is not None:
        return leaf.origin.read(arguments)
    inside = {step: closed(value, arguments) for step, value in leaf.components.items()}
    items = {s: value for s, value in inside.items() if not isinstance(s, Attribute)}
    # Python classes' own __new__ may expect arguments; the base is most often `object`.
    base: Any = next(c for c in leaf.cls.__mro__ if not c.__flags__ & OF_PYTHON)
    result = (
        base.__new__(leaf.cls, items.values())
        if issubclass(base, tuple)
        else base.__new__(leaf.cls)
    )
    if isinstance(result, list):
        list.extend(result, items.values())
    elif isinstance(result, dict):
        for name, value in items.items():
            cast(Any, base).__setitem__(result, name, value)
    for step, value in inside.items():
        if isinstance(step, Attribute):
            set_component(result, step, value)
    return result


def is_object(leaf: object) -> bool:
    """Return whether a pytree leaf may hold tensors.

    It is no tensor, class, function, module or symbolic number.
    """
    return (
        not isinstance(leaf, _NO_OBJECTS)
        and not callable(leaf)
        and (
            isinstance(leaf, _COLLECTIONS)
            or bool(getattr(leaf, "__dict__", None))
            or bool(slots_of(type(leaf)))
        )
    )
