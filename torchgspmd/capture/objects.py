"""Tensors inside of objects that pytree does not know, such as the key-value caches that transformers' models take and return."""
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.utils import _pytree as pytree


@dataclass
class Opened:
    """Stands for an object while its tensors are replaced: its class, and its attributes with what is inside of them opened too."""
    cls: type
    attributes: dict[str, Any]


pytree.register_pytree_node(
    Opened, lambda o: (list(o.attributes.values()), (o.cls, tuple(o.attributes))),
    lambda values, context: Opened(context[0], dict(zip(context[1], values))),
    flatten_with_keys_fn=lambda o: ([(pytree.MappingKey(k), v) for k, v in o.attributes.items()], (o.cls, tuple(o.attributes))))


def opened(tree: Any, around: tuple[int, ...] = ()) -> Any:
    """The tree with Opened for every object that holds tensors."""
    return pytree.tree_map(lambda leaf: _opened(leaf, around), tree)


def has_attributes(leaf: Any) -> bool:
    """Whether it is an object that may hold tensors: no tensor itself, no class and no function."""
    return bool(getattr(leaf, "__dict__", None)) and not isinstance(leaf, (Tensor, type)) and not callable(leaf)


def _opened(leaf: Any, around: tuple[int, ...]) -> Any:
    if not has_attributes(leaf) or id(leaf) in around:
        return leaf
    inside = {name: opened(value, (*around, id(leaf))) for name, value in vars(leaf).items()}
    return Opened(type(leaf), inside) if any(isinstance(x, Tensor) for x in pytree.tree_leaves(inside)) else leaf


def closed(tree: Any) -> Any:
    """The tree with objects again, new ones, where `opened` took them apart."""
    return pytree.tree_map(_closed, tree, is_leaf=lambda x: isinstance(x, Opened))


def _closed(leaf: Any) -> Any:
    if not isinstance(leaf, Opened):
        return leaf
    made = leaf.cls.__new__(leaf.cls)
    made.__dict__.update({name: closed(value) for name, value in leaf.attributes.items()})
    return made

