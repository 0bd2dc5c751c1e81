"""Read a printed graph: text tests of passes have a program as text before, and one after.

    mesh a=2                            global shapes with layouts: `annotated`
      %x   : f32[8@a, 4] = input
      %mul : f32[8@a, 4] = mul(%x, 2)
      return %mul

    one device                          shapes of one device: `local_program`
      %x    : f32[4, 4] = input
      %h    : f32[4, 4] = loop_carry(%x, 1x8)
      ...

The overload of an operator follows from its arguments, as in eager calls. A value without a type
that an operator of Python computes is a number. Columns need not be aligned.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import fx

from torchgspmd import Mesh, ShardSpec
from torchgspmd.fx_passes.printer import dtype_name
from torchgspmd.fx_passes.propagate.layouts import Layouts

_DTYPES = {dtype_name(t): t for t in (torch.float32, torch.bfloat16, torch.int64, torch.bool)}
_LINE = re.compile(r"%(\w+)\s*:\s*(.*?)\s*= (.*)")
_CALL = re.compile(r"(\w+)\((.*)\)")
_ITEM = re.compile(r"%(\w+)\[(\d+)\]")
_TYPE = re.compile(r"(\w+)\[(.*)\]")

Value = fx.Node | list["Value"] | int | float | bool | str | torch.dtype | None


class Line(NamedTuple):
    """A line of a printed graph. type: empty where the value has none."""

    name: str
    type: str
    call: str


def annotated(text: str) -> tuple[fx.Graph, Layouts]:
    """Return the graph of a text with global shapes, and its layouts, each of which is fixed."""
    head, _, body = text.strip().partition("\n")
    mesh = Mesh.parse(head.removeprefix("mesh ").replace(" ", ","))
    specs: dict[fx.Node, ShardSpec] = {}

    def annotate(node: fx.Node, type: str) -> None:
        dims, dtype = _type(type)
        sizes, axes = zip(*(d.partition("@")[::2] for d in dims)) if dims else ((), ())
        node.meta["val"] = torch.empty(list(map(int, sizes)), dtype=dtype, device="meta")
        node.meta["spec"] = specs[node] = ShardSpec.parse(" ".join(a or "_" for a in axes))

    graph = _graph(body, annotate)
    fixed = {node: (True,) * len(spec.dims) for node, spec in specs.items()}
    return graph, Layouts(mesh, specs, fixed)


def local_program(text: str) -> fx.Graph:
    """Return the graph of a text with the shapes of one device."""

    def annotate(node: fx.Node, type: str) -> None:
        if type:
            dims, dtype = _type(type)
            node.meta.update(shape=tuple(map(int, dims)), dtype=dtype, step=None)
            node.meta["spec"] = ShardSpec.replicated(len(dims))

    head, _, body = text.strip().partition("\n")
    assert head == "one device"
    return _graph(body, annotate)


def _type(text: str) -> tuple[list[str], torch.dtype]:
    match = _TYPE.fullmatch(text)
    assert match, f"{text} is no type such as f32[8@data, 4]"
    return [d for d in match[2].split(", ") if d], _DTYPES[match[1]]


def _graph(body: str, annotate: Callable[[fx.Node, str], None]) -> fx.Graph:
    graph, nodes = fx.Graph(), dict[str, fx.Node]()
    for text in body.strip().splitlines():
        if text.strip().startswith("return"):
            results = text.strip().removeprefix("return").split(", ")
            graph.output(tuple(nodes[name.strip()[1:]] for name in results))
            continue
        match = _LINE.fullmatch(text.strip())
        assert match, f"{text} is no line such as %y : f32[8] = neg(%x)"
        line = Line(*match.groups())
        nodes[line.name] = node = _node(graph, line, nodes)
        annotate(node, line.type)
    return graph


def _node(graph: fx.Graph, line: Line, nodes: dict[str, fx.Node]) -> fx.Node:
    if line.call == "input":
        return graph.placeholder(line.name)
    if match := _ITEM.fullmatch(line.call):
        target, args, kwargs = operator.getitem, [nodes[match[1]], int(match[2])], {}
    else:
        match = _CALL.fullmatch(line.call)
        assert match, f"{line.call} is no call such as neg(%x)"
        args, kwargs = _arguments(match[2], nodes)
        target = _target(match[1], line, args, kwargs)
    node = graph.create_node("call_function", target, tuple(args), kwargs, line.name)
    assert node.name == line.name, f"two values have the name {line.name}"
    return node


def _target(
    name: str, line: Line, args: list[Value], kwargs: dict[str, Value]
) -> Callable[..., object]:
    """Return the operator of a name: of Python for numbers, else of ATen or of the package."""
    if not line.type:
        return getattr(operator, name)
    spaces = torch.ops.torchgspmd, torch.ops.aten
    packet = next(getattr(space, name) for space in spaces if hasattr(space, name))

    def example(x: Value) -> object:
        if isinstance(x, fx.Node):
            return torch.empty(0, device="meta") if "dtype" in x.meta or "val" in x.meta else 0
        return list(map(example, x)) if isinstance(x, list) else x

    kwargs = {key: example(value) for key, value in kwargs.items()}
    overload = torch._C._jit_resolve_packet(
        packet._qualified_op_name, *map(example, args), **kwargs
    )
    return getattr(packet, overload or "default")


def _arguments(text: str, nodes: dict[str, fx.Node]) -> tuple[list[Value], dict[str, Value]]:
    args, kwargs = list[Value](), dict[str, Value]()
    for part in _split(text):
        key, equals, value = part.partition("=")
        if equals and key.isidentifier():
            kwargs[key] = _value(value, nodes)
        else:
            args.append(_value(part, nodes))
    return args, kwargs


def _split(text: str) -> Iterator[str]:
    """Yield the parts between commas, but for those in brackets; `ik,kj->ij` is one part."""
    depth = start = 0
    for i, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if depth == 0 and text.startswith(", ", i):
            yield text[start:i]
            start = i + 2
    if text:
        yield text[start:]


def _value(text: str, nodes: dict[str, fx.Node]) -> Value:
    if text.startswith("%"):
        return nodes[text[1:]]
    if text.startswith("["):
        return [_value(part, nodes) for part in _split(text[1:-1])]
    words: dict[str, Value] = {"None": None, "True": True, "False": False, **_DTYPES}
    if text in words:
        return words[text]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            pass
    return text
