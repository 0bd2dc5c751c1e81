"""Program values as JSON; decoder.py reads them, and evaluates nothing.

    1, "a", None                 themselves
    (1, [2, 3])                  ["tuple", 1, ["list", 2, 3]]
    torch.float32                ["torch", "float32"]
    aten.mm.default              ["operator", "aten.mm.default"]
    %mm                          ["node", 7]: the eighth node of its graph
    ShardSpec, Step, ...         ["record", 3]: equal ones are in the text once

A value with another type cannot be shared: every process plans the program then.
"""

from __future__ import annotations

import math
import operator
import re
from dataclasses import fields
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor, fx
from torch.fx.immutable_collections import immutable_dict, immutable_list

from ...capture import ArgumentSizes, Input, Output
from ...capture.assumed_sizes import at_least, at_most
from ...comm import local_ops
from ...comm.collective import start, wait
from ...comm.hardware import Hardware, Link
from ...comm.kinds import Step
from ...comm.kinds.kind import Kind
from ...compat.operators import find
from ...compat.private_apis import OpOverload
from ...compat.private_apis import _pytree as pytree
from ...fx_passes.partition.cost_constants import CostConstants
from ...fx_passes.replication_report import ReplicatedOp
from ...layout.halo_window import Window
from ...layout.mesh import Mesh
from ...rules import FlatCall
from ...rules.registry import RULES, rule_function
from ...shard_spec import ShardSpec
from .json_text import Stale as Stale
from .json_text import Unshareable

_SEQUENCES: dict[type, str] = {
    tuple: "tuple",
    list: "list",
    immutable_list: "list",
    torch.Size: "Size",
    frozenset: "frozenset",
}
OF_TORCH = (torch.dtype, torch.layout, torch.memory_format)
RECORDS = {
    cls.__name__: cls
    for cls in (
        *(ShardSpec, Window, Step, Input, Output, ReplicatedOp, ArgumentSizes),
        *(CostConstants, Hardware, Link, FlatCall),
    )
}
# The functions besides operators that are targets of nodes.
FUNCTIONS: dict[tuple[str, str], Any] = {
    (f.__module__, f.__name__): f
    for f in (
        *(f for f in vars(local_ops).values() if isinstance(f, FunctionType)),
        *(start, wait, at_least, at_most, operator.getitem, operator.neg),
        *(operator.add, operator.sub, operator.mul, operator.floordiv, operator.truediv),
        *(operator.mod, operator.pow, operator.and_, operator.or_),
        *(operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
        *(torch.sym_max, torch.sym_min, torch.sym_not, torch.sym_float, torch.sym_int, math.ceil),
        *(math.floor, math.trunc),
    )
}


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
        # JSON has no NaN and no infinity; repr gives every other float exactly, too.
        if cls is float:
            return value if math.isfinite(value) else ["float", repr(value)]
        if cls is fx.Node:
            return ["node", self.nodes[value]]
        if cls in _SEQUENCES:
            return [_SEQUENCES[cls], *map(self.encode, value)]
        if cls.__name__ in RECORDS and cls is RECORDS[cls.__name__]:
            return ["record", self._number(value)]
        return self._encode_other(cls, value)

    def _encode_other(self, cls: type, value: Any) -> object:
        """Encode a value with a less frequent type."""
        if cls in (dict, immutable_dict):
            return ["dict", *([self.encode(k), self.encode(v)] for k, v in value.items())]
        if cls in OF_TORCH:
            return ["torch", str(value).removeprefix("torch.")]
        if cls is torch.device:
            return ["device", str(value)]
        if isinstance(value, OpOverload):
            if not is_emitted(value):
                raise Unshareable(f"it calls {value}, which has no rule: gspmd.rule() gives it one")
            return ["operator", str(value)]
        if isinstance(value, Kind):
            return ["kind", value.name]
        if cls in (FunctionType, BuiltinFunctionType):
            key = value.__module__, value.__name__
            if FUNCTIONS.get(key) is not value:
                raise Unshareable(f"it calls {'.'.join(key)}")
            return ["function", *key]
        if cls is slice:
            return ["slice", *map(self.encode, (value.start, value.stop, value.step))]
        if cls is complex:
            return ["complex", repr(value.real), repr(value.imag)]
        if cls is Mesh:
            return ["mesh", str(value)]
        if isinstance(value, Tensor):
            shape, strides = ([*map(self.encode, n)] for n in (value.shape, value.stride()))
            return ["tensor", shape, strides, self.encode(value.dtype), str(value.device)]
        if isinstance(value, pytree.TreeSpec):
            return self._encode_tree(value)
        raise Unshareable(f"it has a {cls.__qualname__}")

    def _number(self, record: Any) -> int:
        """Return a record's position among all; reports tell steps apart by identity."""
        key = id(record) if type(record) in (Step, Hardware) else record
        if (number := self._numbers.get(key)) is None:
            row = [type(record).__name__]
            row += [self.encode(getattr(record, f.name)) for f in fields(record)]
            number = self._numbers[key] = len(self.records)
            self.records.append(row)
        return number

    def _encode_tree(self, tree: Any) -> object:
        """Return a structure: for each node its class, its context, and its children."""

        def encode(value: object) -> Any:
            # Leaves are numbered 0, 1, ... below, so that an int is a leaf and no value.
            if type(value) is int:  # a leaf
                return None
            if (node := pytree.SUPPORTED_NODES.get(type(value))) is None:
                raise Unshareable(f"an argument or result is a {type(value).__qualname__}")
            children, context = node.flatten_fn(value)
            return [class_name(type(value)), self.encode(context), *map(encode, children)]

        try:
            numbered = pytree.tree_unflatten([*range(tree.num_leaves)], tree)
        except Exception as error:  # a user's class that takes tensors alone
            raise Unshareable("a class of an argument or result takes no numbers") from error
        return ["tree", encode(numbered)]


def class_name(cls: type) -> str:
    """Return a class's name with its module."""
    return f"{cls.__module__}.{cls.__qualname__}"


# Operators that a text may name: ours, those with a rule (a user's by gspmd.rule too) or a rewrite,
# and those of aten that write to no argument, which run replicated.
_NAME = re.compile(r"([a-zA-Z]\w*)\.(\w+)\.(\w+)", re.ASCII)
_OF_TORCH = ("aten", "prims")
_OWN = "torchgspmd"


def operator_of(name: str) -> OpOverload | None:
    """Return the operator of a name such as aten.mm.default; None if no program has it."""
    match = _NAME.fullmatch(name)
    # torch.ops makes an entry for every namespace that it is asked for: unknown ones end here.
    if match is None or not _has_rules(match[1]):
        return None
    op = find(*match.groups())
    return op if isinstance(op, OpOverload) and str(op) == name and is_emitted(op) else None


def is_emitted(op: OpOverload) -> bool:
    """Return whether a program may have an operator."""
    if op.namespace == _OWN or rule_function(op) is not None:
        return True
    return op.namespace in _OF_TORCH and _is_pure(op)


def _has_rules(namespace: str) -> bool:
    """Return whether a library has operators in the table."""
    if namespace == _OWN or namespace in _OF_TORCH:
        return True
    return any(
        namespace == (key.partition("::")[0] if isinstance(key, str) else key.namespace)
        for key in RULES
        if isinstance(key, (str, OpOverload))
    )


def _is_pure(op: OpOverload) -> bool:
    """Return whether an operator computes with tensors, and writes to no argument.

    aten.from_file reads a file: its text is no option of a tensor.
    """
    arguments: Any = op._schema.arguments
    types = [str(each.type) for each in arguments]
    # Without a tensor, a text could make the operator read a file or the environment.
    return not op._schema.is_mutable and (
        any("Tensor" in each for each in types) or "str" not in types
    )
