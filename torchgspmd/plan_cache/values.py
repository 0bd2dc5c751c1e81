"""Values of a program as JSON, and back; nothing of the text is evaluated.

    1, "a", None                 themselves
    (1, [2, 3])                  ["tuple", 1, ["list", 2, 3]]
    torch.float32                ["torch", "float32"]
    aten.mm.default              ["operator", "aten.mm.default"]
    %mm                          ["node", 7]: the eighth node of its graph
    ShardSpec, Step, ...         ["record", 3]: equal ones are in the text once

A value of another type cannot be shared: the program is planned by every process then.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import fields
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.immutable_collections import immutable_dict, immutable_list

from ..capture import ArgumentSizes, Input, Output
from ..comm import local_ops
from ..comm.collective import start, wait
from ..comm.kinds import KINDS, Step
from ..comm.kinds.kind import Kind
from ..compat.private_apis import OpOverload
from ..compat.private_apis import _pytree as pytree
from ..custom_ops.numbers import at_least
from ..fx_passes.replication_report import ReplicatedOp
from ..halo import Window
from ..mesh import Mesh
from ..shard_spec import ShardSpec

_SEQUENCES: dict[type, str] = {
    tuple: "tuple",
    list: "list",
    immutable_list: "list",
    torch.Size: "Size",
    frozenset: "frozenset",
}
_FROM_ITEMS: dict[str, Callable[[list], Any]] = {
    "tuple": tuple,
    "list": list,
    "Size": torch.Size,
    "frozenset": frozenset,
}
_OF_TORCH = (torch.dtype, torch.layout, torch.memory_format)
_RECORDS = {
    cls.__name__: cls
    for cls in (ShardSpec, Window, Step, Input, Output, ReplicatedOp, ArgumentSizes)
}
# The functions besides operators that are targets of nodes.
_FUNCTIONS: dict[tuple[str, str], Any] = {
    (f.__module__, f.__name__): f
    for f in (
        *(f for f in vars(local_ops).values() if isinstance(f, FunctionType)),
        *(start, wait, at_least, operator.getitem, operator.neg),
        *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv),
        *(operator.mod, operator.pow, operator.and_, operator.or_),
        *(operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
        *(torch.sym_max, torch.sym_min, torch.sym_not, torch.sym_float, torch.sym_int, math.ceil),
        *(math.floor, math.trunc),
    )
}


class Unshareable(Exception):
    """A program that has no text, and why."""


class Stale(Exception):
    """A text that is not for this process, and why."""


class Encoder:
    """Encodes values; `records` are the frozen dataclasses that it has met."""

    def __init__(self) -> None:
        self.nodes: dict[fx.Node, int] = {}
        self.records: list[Any] = []
        self._numbers: dict[Any, int] = {}  # of records

    def encode(self, value: Any) -> Any:
        """Return a value as JSON.

        Raises:
            Unshareable: Its type has no encoding.
        """
        cls = type(value)
        if value is None or cls in (bool, int, str):
            return value
        if cls is float:
            return value if math.isfinite(value) else ["float", repr(value)]
        if cls is fx.Node:
            return ["node", self.nodes[value]]
        if cls in _SEQUENCES:
            return [_SEQUENCES[cls], *map(self.encode, value)]
        if cls.__name__ in _RECORDS and cls is _RECORDS[cls.__name__]:
            return ["record", self._number(value)]
        return self._encode_other(cls, value)

    def _encode_other(self, cls: type, value: Any) -> Any:
        """Return a value of a less frequent type as JSON."""
        if cls in (dict, immutable_dict):
            return ["dict", *([self.encode(k), self.encode(v)] for k, v in value.items())]
        if cls in _OF_TORCH:
            return ["torch", str(value).removeprefix("torch.")]
        if cls is torch.device:
            return ["device", str(value)]
        if isinstance(value, OpOverload):
            return ["operator", str(value)]
        if isinstance(value, Kind):
            return ["kind", value.name]
        if cls in (FunctionType, BuiltinFunctionType):
            return self._encode_function(value)
        if cls is slice:
            return ["slice", *map(self.encode, (value.start, value.stop, value.step))]
        if cls is complex:
            return ["complex", repr(value.real), repr(value.imag)]
        if cls is Mesh:
            return ["mesh", str(value)]
        if isinstance(value, Tensor):
            shape, strides = list(value.shape), list(value.stride())
            return ["tensor", shape, strides, self.encode(value.dtype)]
        if isinstance(value, pytree.TreeSpec):
            return self._encode_tree(value)
        raise Unshareable(f"it has a {cls.__qualname__}")

    def _number(self, record: Any) -> int:
        """Return the position of a record among all; reports tell steps apart by identity."""
        key = id(record) if type(record) is Step else record
        if (number := self._numbers.get(key)) is None:
            row = [type(record).__name__]
            row += [self.encode(getattr(record, f.name)) for f in fields(record)]
            number = self._numbers[key] = len(self.records)
            self.records.append(row)
        return number

    def _encode_function(self, function: Any) -> Any:
        key = function.__module__, function.__name__
        if _FUNCTIONS.get(key) is not function:
            raise Unshareable(f"it calls {'.'.join(key)}")
        return ["function", *key]

    def _encode_tree(self, tree: Any) -> Any:
        """Return a structure: for each node its class, its context, and its children."""

        def encode(value: Any) -> Any:
            if type(value) is int:  # a leaf
                return None
            if (node := pytree.SUPPORTED_NODES.get(type(value))) is None:
                raise Unshareable(f"an argument or result is a {type(value).__qualname__}")
            children, context = node.flatten_fn(value)
            return [_name(type(value)), self.encode(context), *map(encode, children)]

        return ["tree", encode(pytree.tree_unflatten([*range(tree.num_leaves)], tree))]


class Decoder:
    """Decodes what an Encoder wrote, with its records."""

    def __init__(self, records: list[Any]) -> None:
        self.nodes: list[fx.Node] = []
        self.records: list[Any] = []
        self._others: dict[str, Callable[..., Any]] = {
            "float": float,
            "torch": _of_torch,
            "device": torch.device,
            "operator": _operator,
            "kind": KINDS.__getitem__,
            "function": _function,
            "slice": lambda *bounds: slice(*map(self.decode, bounds)),
            "complex": lambda real, imag: complex(float(real), float(imag)),
            "mesh": Mesh.parse,
            "tensor": self._tensor,
            "tree": lambda tree: pytree.tree_flatten(self._tree(tree))[1],
        }
        for name, *values in records:
            self.records.append(_RECORDS[name](*map(self.decode, values)))

    def decode(self, value: Any) -> Any:
        """Return the value of JSON.

        Raises:
            Stale: It names what this process does not have.
        """
        if type(value) is not list:
            return value
        tag, items = value[0], value[1:]
        if tag == "node":
            return self.nodes[items[0]]
        if tag == "record":
            return self.records[items[0]]
        if (build := _FROM_ITEMS.get(tag)) is not None:
            return build([*map(self.decode, items)])
        if tag == "dict":
            return {self.decode(k): self.decode(v) for k, v in items}
        return self._others[tag](*items)

    def _tensor(self, shape: list[int], strides: list[int], dtype: Any) -> Tensor:
        """Return a tensor on meta: a program has the shapes of its values alone."""
        return torch.empty_strided(shape, strides, dtype=self.decode(dtype), device="meta")

    def _tree(self, tree: Any) -> Any:
        """Return nested containers with 0 for every leaf."""
        if tree is None:
            return 0
        name, context, *children = tree
        node = next((n for c, n in pytree.SUPPORTED_NODES.items() if _name(c) == name), None)
        if node is None:
            raise Stale(f"{name} is unknown to torch.utils._pytree")
        return node.unflatten_fn([*map(self._tree, children)], self.decode(context))


def _name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _of_torch(name: str) -> Any:
    """Return a dtype, layout or memory format."""
    value = getattr(torch, name)
    if not isinstance(value, _OF_TORCH):
        raise Stale(f"torch.{name} is no dtype")
    return value


def _operator(name: str) -> OpOverload:
    """Return an operator that this process has."""
    value: Any = torch.ops
    for part in name.split("."):
        value = getattr(value, part)
    if not isinstance(value, OpOverload):
        raise Stale(f"{name} is no operator")
    return value


def _function(module: str, name: str) -> Any:
    """Return a function that is the target of nodes."""
    function = _FUNCTIONS.get((module, name))
    if function is None:
        raise Stale(f"{module}.{name} is no function of a program")
    return function
