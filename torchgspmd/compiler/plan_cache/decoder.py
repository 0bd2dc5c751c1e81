"""Program values from JSON: each is checked as it is read, and no text in it is evaluated.

A name (an operator, a function, a kind, a pytree class, a dtype) is looked up in its table. A value
with a notation (meshes, layouts, windows) is read by its own parser. Record fields have the types
that their class declares.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from ...comm.json_rows import conforms, field_types
from ...comm.kinds import KINDS
from ...compat.fx_nodes import fake_mode
from ...compat.private_apis import FakeTensor
from ...compat.private_apis import _pytree as pytree
from ...layout.mesh import Mesh
from ...layout.sub_axes import sub_axis
from ...shard_spec import ShardSpec
from .json_text import Malformed, Stale
from .values import FUNCTIONS, OF_TORCH, RECORDS, class_name, operator_of

# What parsers and constructors raise for values that they do not take.
REFUSALS = (
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RuntimeError,
    AssertionError,
    SyntaxError,
    MemoryError,
)
_PLAIN = frozenset({str, int, bool, float, type(None)})
_DEEPEST = 64  # of tuples in one another; Python's parser takes 200
_LARGEST_SIZE = 1 << 48  # of a dimension, and of a number of elements
_FROM_ITEMS: dict[str, Callable[[list], Any]] = {
    "tuple": tuple,
    "list": list,
    "Size": torch.Size,
    "frozenset": frozenset,
}


class Decoder:
    """Decodes an Encoder's text, with its records. mesh: has the axes that layouts name."""

    def __init__(self, records: object, mesh: Mesh) -> None:
        self.mesh, self.fake_mode = mesh, fake_mode()
        self.nodes: list[fx.Node] = []
        self._depth = 0  # of the value that is decoded
        self.records: list[Any] = []
        self.operators: dict[str, Any] = {}
        self._readers: dict[str, tuple[int, Callable[..., Any], str]] = {
            "float": (1, _number, "a float as Python prints it"),
            "torch": (1, _part_of_torch, "a dtype, layout or memory format"),
            "device": (1, torch.device, "a device"),
            "operator": (1, self._operator, "an operator that programs have"),
            "kind": (1, KINDS.__getitem__, "a kind of collective or step"),
            "function": (2, lambda *key: FUNCTIONS[key], "a function that programs call"),
            "slice": (3, lambda *bounds: slice(*map(self.decode, bounds)), "a slice"),
            "complex": (2, lambda *parts: complex(*map(_number, parts)), "a complex number"),
            "mesh": (1, Mesh.parse, "a mesh"),
            "tensor": (4, self._tensor, "shape, strides, dtype and device of a tensor"),
            "tree": (
                1,
                lambda t: pytree.tree_flatten(self._tree(t))[1],
                "a structure of containers that pytree knows",
            ),
        }
        # Record by record: a later one may refer to those before it, and to no other.
        for row in typed(records, None, list, "a list of records", of=records):
            self.records.append(self._new_record(row))

    def decode(self, value: object) -> Any:
        """Decode a JSON value.

        Raises:
            Stale: No encoder writes it, or it names an object that this process does not have.
        """
        # The exact type, here and below: json yields no subclasses.
        if type(value) is not list:
            if type(value) in _PLAIN:
                return value
            raise Malformed(value, None, "a value: a number, text, null or a list with a tag")
        tag, items = value[0] if value else None, value[1:]
        if (tag == "node" or tag == "record") and len(items) == 1 and type(items[0]) is int:
            known = self.nodes if tag == "node" else self.records
            if 0 <= items[0] < len(known):
                return known[items[0]]
            raise Malformed(value, 1, f"the number of a {tag} before it")
        if type(tag) is not str:
            raise Malformed(value, None, "a list with a tag")
        if (build := _FROM_ITEMS.get(tag)) is not None:
            # Nested arguments become Python code, whose parser has a limit of its own.
            self._depth += 1
            if self._depth > _DEEPEST:
                raise Malformed(value, None, f"a value: it is nested more than {_DEEPEST} deep")
            result = self._built(value, build, [*map(self.decode, items)])
            self._depth -= 1
            return result
        if tag == "dict":
            return self._dict(value)
        if (reader := self._readers.get(tag)) is None:
            raise Malformed(value, 0, "a tag of values")
        count, read, expected = reader
        if len(items) != count:
            raise Malformed(value, None, expected)
        try:
            return read(*items)
        except Stale:
            raise
        except REFUSALS as error:
            raise Malformed(value, None, expected) from error

    def _built(self, value: list, build: Callable[[list], Any], items: list) -> Any:
        try:
            return build(items)
        except REFUSALS as error:
            raise Malformed(value, None, f"a {value[0]}") from error

    def _dict(self, value: list) -> dict:
        result = {}
        for item in value[1:]:
            if type(item) is not list or len(item) != 2:
                raise Malformed(value, None, "a dict: pairs of a key and a value")
            key, entry = map(self.decode, item)
            try:
                is_new = key not in result
            except TypeError:
                is_new = False
            if not is_new:
                raise Malformed(item, 0, "a key that can be one, once")
            result[key] = entry
        return result

    def _operator(self, name: str) -> object:
        if name not in self.operators:
            if (op := operator_of(name)) is None:
                raise KeyError(name)
            self.operators[name] = op
        return self.operators[name]

    def _tensor(self, shape: Any, strides: Any, dtype: Any, device: str) -> Tensor:
        """Return a tensor without values: a program knows only shapes."""
        sizes = [*map(natural, shape)], [*map(natural, strides)]
        dtype = self.decode(dtype)
        if len(sizes[0]) != len(sizes[1]) or type(dtype) is not torch.dtype:
            raise ValueError(shape)
        # Strides may claim far more memory than the shape has elements.
        reach = 1 + sum((n - 1) * step for n, step in zip(*sizes) if n)  # elements of its memory
        if max(math.prod(sizes[0]), reach) > _LARGEST_SIZE:
            raise ValueError(shape)
        meta = torch.empty_strided(*sizes, dtype=dtype, device="meta")
        return FakeTensor(self.fake_mode, meta, torch.device(device))

    def _tree(self, tree: Any) -> object:
        """Return nested containers with 0 as every leaf."""
        if tree is None:
            return 0
        name, context, *children = tree
        node = next((n for c, n in pytree.SUPPORTED_NODES.items() if class_name(c) == name), None)
        if node is None:
            raise Stale(f"{name} is unknown to torch.utils._pytree")
        return node.unflatten_fn([*map(self._tree, children)], self.decode(context))

    def _new_record(self, row: Any) -> Any:
        """Return the record for a row: its class name, and its fields."""
        cls = RECORDS.get(row[0]) if type(row) is list and row and type(row[0]) is str else None
        if cls is None:
            known = ", ".join(map(str, RECORDS))
            raise Malformed(row, None, f"a record: one of {known}, and its fields")
        hints = field_types(cls)
        if len(row) != len(hints) + 1:
            raise Malformed(row, None, f"a {row[0]} of {len(hints)} fields")
        values = [*map(self.decode, row[1:])]
        for i, ((name, hint), value) in enumerate(zip(hints.items(), values), 1):
            if not conforms(value, hint):
                kind = hint.__name__ if type(hint) is type else hint
                raise Malformed(row, i, f"{name} of a {row[0]}: {kind}")
        record = self._built(row, lambda items: cls(*items), values)
        # The class cannot check axes: a spec has no mesh.
        if cls is ShardSpec and not self._is_legal(record):
            raise Malformed(row, None, f"a layout on mesh {self.mesh}")
        return record

    def _is_legal(self, spec: ShardSpec) -> bool:
        """Return whether a layout reads as it prints, and has the mesh's axes, each once."""
        axes = spec.sharding_axes + spec.pending
        try:
            if ShardSpec.parse(str(spec)) != spec or len({*axes}) != len(axes):
                return False
        except ValueError:
            return False
        return all(map(self._has_axis, axes))

    def _has_axis(self, axis: str) -> bool:
        sizes = dict(self.mesh.axes)
        whole, before, size = sub_axis(axis) or (axis, 1, 1)
        # A sub-axis is legal if its borders divide the whole axis.
        return whole in sizes and before * size > 0 and sizes[whole] % (before * size) == 0


def natural(number: object) -> int:
    """Return a number 0, 1, ..., up to the largest size; raise ValueError for others."""
    if type(number) is not int or not 0 <= number <= _LARGEST_SIZE:
        raise ValueError(number)
    return number


def typed(value: Any, key: int | str | None, kind: type, expected: str, of: Any = None) -> Any:
    """Return the value at a key if it has the JSON type `kind`.

    Raises:
        Malformed: It has another type. of: the list or dict that has it.
    """
    holder = value if of is None else of
    try:
        found = holder if key is None else holder[key]
    except (LookupError, TypeError):
        found = None
    # The exact type: bool is an int for isinstance().
    if type(found) is not kind:
        raise Malformed(holder, key, expected)
    return found


def _number(text: str) -> float:
    # Only the form that the encoder writes: "1e0" and "1.0" would be one number with two texts.
    if repr(number := float(text)) != text:
        raise ValueError(text)
    return number


def _part_of_torch(name: str) -> object:
    """Return a dtype, layout or memory format by its name in torch."""
    value = vars(torch)[name]
    if not isinstance(value, OF_TORCH):
        raise KeyError(name)
    return value
