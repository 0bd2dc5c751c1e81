"""A graph as JSON, and back: names become Python code, so each is checked.

before   a row for every node: op, name, target, arguments, keyword arguments, metadata
ensures  names are identifiers, each used once; operands stand before their users; operators have
         the arguments in their schema; metadata has the types that fx_passes/stages.py lists; the
         output is the last node, and the only one
"""

from __future__ import annotations

import keyword
import re
from collections.abc import Collection
from dataclasses import fields
from functools import cache
from typing import Any

from torch import Tensor, fx

from ...comm.json_rows import conforms, field_types
from ...compat.fx_nodes import add_node
from ...compat.private_apis import OpOverload
from ...fx_passes.loop_call import BODY_CALLS, BodyCall, BodyReader, LoopCall
from ...fx_passes.stages import META
from ...rules import FlatCall
from ...rules.custom_ops.loops import Loop
from .decoder import REFUSALS, Decoder, natural, typed
from .json_text import Malformed, Stale
from .values import Encoder

_IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
# Names of inputs that mean something else in the code of a graph.
_TAKEN = {*keyword.kwlist, "self", "torch", "device", "inf", "nan"}
_MOST_ITERATIONS = 1 << 32
# Of a LoopCall.
COUNTS = "carries", "rows", "others", "stacks", "ahead", "held", "turned_rows", "turned_stacks"
# Only `Plan.explain` reads these, or passes that have run.
_LEFT_OUT = {"rule", "assignment", "operand_specs", "decisions"}
_VALUES = (Tensor, bool, int, float, tuple, list, type(None))


def encode_graph(graph: fx.Graph, encoder: Encoder) -> list[object]:
    """Return a row for every node: op, name, target, arguments, keyword arguments, metadata."""
    # Node numbers count within one graph: a loop's body has its own.
    outer, encoder.nodes = encoder.nodes, {}
    rows = []
    for i, node in enumerate(graph.nodes):
        meta = {key: encoder.encode(v) for key, v in node.meta.items() if key not in _LEFT_OUT}
        args, kwargs = encoder.encode(node.args), encoder.encode(dict(node.kwargs))
        rows.append([node.op, node.name, _encode_target(node, encoder), args, kwargs, meta])
        encoder.nodes[node] = i
    encoder.nodes = outer
    return rows


def _encode_target(node: fx.Node, encoder: Encoder) -> object:
    call = node.target
    if isinstance(call, BodyCall) and not isinstance(call, LoopCall):
        return call.encode(lambda graph: encode_graph(graph, encoder), encoder.encode)
    if not isinstance(call, LoopCall):
        return encoder.encode(call)
    return [
        "loop",
        str(call.loop),
        *map(call.__dict__.get, COUNTS),
        encoder.encode(call.empty),
        encode_graph(call.graph, encoder),
    ]


def decode_graph(rows: Any, decoder: Decoder, constants: Collection[str] = ()) -> fx.Graph:
    """Build the graph for these rows. constants: names that its tensors may have.

    Raises:
        Malformed: No graph has these rows.
    """
    typed(rows, None, list, "a list of nodes")
    graph, names = fx.Graph(), set[str]()
    # A loop's body is decoded within a graph, and its node numbers count from 0 again.
    outer, decoder.nodes = decoder.nodes, []
    for row in rows:
        if type(row) is not list or len(row) != 6:
            raise Malformed(row, None, "a node: op, name, target, args, kwargs and metadata")
        decoder.nodes.append(_add_node(graph, row, decoder, names, constants))
    # Nodes behind an output would be code behind a return: nothing runs it.
    ends = [i for i, row in enumerate(rows) if row[0] == "output"]
    if ends != [len(rows) - 1]:
        raise Malformed(rows, ends[0] if ends else None, "nodes of which the last is the output")
    decoder.nodes = outer
    return graph


def _add_node(
    graph: fx.Graph, row: list, decoder: Decoder, names: set[str], constants: Collection[str]
) -> fx.Node:
    op, name = row[0], identifier(row, 1)
    # A placeholder's target is the argument in the generated code: a node there would shadow it.
    if name in names or op == "placeholder" and row[2] in names:
        raise Malformed(row, 1, "a name that no other node has")
    names.add(name)
    target = _decode_target(row, decoder, constants)
    args, kwargs = decoder.decode(row[3]), decoder.decode(row[4])
    if type(args) is not tuple:
        raise Malformed(row, 3, "a tuple of arguments")
    if type(kwargs) is not dict or not all(map(_is_identifier, kwargs)):
        raise Malformed(row, 4, "a dict of arguments by identifiers")
    if op == "output" and (kwargs or len(args) != 1 or type(args[0]) not in (tuple, list)):
        raise Malformed(row, 3, "the results of a graph in one tuple")
    if op in ("placeholder", "get_attr") and (args or kwargs):
        raise Malformed(row, 3, f"no arguments of a {op}")
    called = target.target if isinstance(target, FlatCall) else target
    if isinstance(called, OpOverload) and (fault := _arity_fault(called, args, kwargs)):
        raise Malformed(row, 3, fault)
    node = add_node(graph, op, target, args, kwargs, name)
    # fx renames what it takes for a keyword or a builtin; texts refer to the name as it was.
    if node.name != name:
        node.name = name
    # Decode a node's metadata.
    for key, value in typed(row, 5, dict, "metadata", of=row).items():
        known = META.get(key)
        if known is None:
            raise Malformed(row, 5, f"metadata without {key}, which no pass writes")
        decoded = node.meta[key] = decoder.decode(value)
        kinds = _VALUES if known.type is object else known.type
        if not isinstance(decoded, kinds):
            raise Malformed(row[5], key, f"metadata: {known.meaning}")
    return node


def _arity_fault(op: OpOverload, args: tuple, kwargs: dict) -> str | None:
    """Return which arguments an operator takes, unless it takes these."""
    names, positional, required = _arguments(op)
    count = len(args)
    if count <= positional and required <= {*names[:count], *kwargs}:
        # A keyword may only name an argument that no position has given.
        if not kwargs or names[count:] and {*names[count:]}.issuperset(kwargs):
            return None
    return f"the arguments of {op}: {', '.join(names) or 'none'}"


@cache
def _arguments(op: OpOverload) -> tuple[list[str], int, set[str]]:
    """Return an operator's arguments, how many are positional, and which have no default."""
    arguments: Any = op._schema.arguments
    names = [each.name for each in arguments]
    required = {each.name for each in arguments if not each.has_default_value()}
    return names, sum(not each.kwarg_only for each in arguments), required


def _decode_target(row: list, decoder: Decoder, constants: Collection[str]) -> Any:
    """Return a row's target, which depends on its op."""
    op, target = row[0], row[2]
    if op == "placeholder":
        if row[2] in _TAKEN:
            raise Malformed(row, 2, "a name that is free in the code of a graph")
        return identifier(row, 2)
    if op == "get_attr":
        # fx would read any attribute of the module: only constants may be named.
        if type(target) is not str or target not in constants:
            raise Malformed(row, 2, "the name of a constant")
        return identifier(row, 2)
    if op == "output":
        if target != "output":
            raise Malformed(row, 2, '"output"')
        return target
    if op != "call_function":
        raise Malformed(row, 0, "placeholder, get_attr, call_function or output")
    tag = target[0] if type(target) is list and target else None
    try:
        if tag == "loop":
            # The loop for a target.
            _, loop, *counts, empty, rows = target
            others = dict(zip(COUNTS, map(natural, counts), strict=True))
            shapes = decoder.decode(empty)
            if not conforms(shapes, field_types(LoopCall)["empty"]):
                raise ValueError(shapes)
            return LoopCall(_loop(loop), decode_graph(rows, decoder), **others, empty=shapes)
        if tag in BODY_CALLS:
            return _decode_call(BODY_CALLS[tag], target, decoder)
    except Stale:
        raise
    except REFUSALS as error:
        raise Malformed(row, 2, f"the parts of {tag}") from error
    if tag not in ("operator", "function", "kind", "record"):
        raise Malformed(row, 2, "an operator, a function or a kind that programs call")
    decoded = decoder.decode(target)
    if tag == "record" and not (
        isinstance(decoded, FlatCall) and isinstance(decoded.target, OpOverload)
    ):
        raise Malformed(row, 2, "a call of an operator on flattened dimensions")
    return decoded


def _loop(text: Any) -> Loop:
    """Parse a loop whose printed form is exactly this text."""
    loop = Loop.parse(text)
    # A loop with 2^40 iterations prints well, too, but a run of it would not end.
    if str(loop) != text or not 0 < loop.length <= _MOST_ITERATIONS:
        raise ValueError(text)
    return loop


def _decode_call(kind: type[BodyCall], target: list[Any], decoder: Decoder) -> BodyCall:
    read = BodyReader(
        lambda rows: decode_graph(rows, decoder),
        decoder.decode,
        natural,
        _loop,
        lambda axis: not decoder.mesh or axis in decoder.mesh.names,
    )
    call = kind.decode(target, read)
    for part in call.checked:
        # Raise ValueError if a pipeline's field has another type than it declares.
        for each in fields(part):
            hint = field_types(type(part))[each.name]
            # The transport belongs to processes, and is made when they run.
            if each.name != "transport" and not conforms(getattr(part, each.name), hint):
                raise ValueError(each.name)
    return call


def identifier(row: list, key: int) -> str:
    """Return the identifier in a row; it goes into the graph's code unchanged."""
    if not _is_identifier(row[key]):
        raise Malformed(row, key, "an identifier of Python")
    return row[key]


def _is_identifier(name: object) -> bool:
    return type(name) is str and _IDENTIFIER.fullmatch(name) is not None
