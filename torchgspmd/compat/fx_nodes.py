"""torch.fx nodes: added without torch's search for symbols, and the memory that they write.

torch 2.13's `Graph.create_node` flattens all arguments to warn about symbols among them: 6 of 10
us. Programs have none. Nodes are traced with fake tensors, in a process that may fork afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from operator import attrgetter
from typing import Any

import torch
from torch import fx

from .operators import aten
from .private_apis import FakeTensorMode, OpOverload, _disable_current_modes

# Views, though their schemas do not say so: their operands are meant to be temporary.
_UNSAFE = (
    aten._unsafe_view.default,
    aten.unsafe_split.Tensor,
    aten.unsafe_split_with_sizes.default,
)

# Where in the user's program a node is from, and the collective that it belongs to.
ORIGIN = ("source", "module", "backward", "collective")


def origin_of(node: fx.Node) -> dict[str, Any]:
    """Return the metadata that says where in the user's program a node is from."""
    return {key: node.meta[key] for key in ORIGIN if key in node.meta}


def add_node(
    graph: fx.Graph,
    op: str,
    target: object,
    args: tuple,
    kwargs: Mapping[str, object],
    name: str | None = None,
) -> fx.Node:
    """Add a node at the graph's insert point, as `Graph.create_node` does."""
    node: Any = graph.create_node(op, target, None, None, name)
    node._update_args_kwargs(args, kwargs)
    return node


def copy_node(
    graph: fx.Graph, node: fx.Node, new: Callable[[fx.Node], Any] = lambda node: node
) -> fx.Node:
    """Add a node's copy, as `Graph.node_copy` does. new: its operands there."""
    args, kwargs = fx.map_arg(node.args, new), fx.map_arg(node.kwargs, new)
    result = add_node(graph, node.op, node.target, args, kwargs, node.name)
    result.meta.update(node.meta)
    return result


def calls_any(graph: fx.Graph, targets: Iterable[Any]) -> bool:
    """Return whether a graph calls one of the targets, by fx's table of nodes: without a walk."""
    return any(graph.find_nodes(op="call_function", target=target) for target in targets)


def reached(
    starts: Iterable[fx.Node],
    further: Callable[[fx.Node], Iterable[fx.Node]] = attrgetter("all_input_nodes"),
) -> Iterator[fx.Node]:
    """Yield nodes and all that `further` leads to, each once; by default their ancestors."""
    found, stack = set[fx.Node](), [*starts]
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            yield node
            stack += further(node)


def drop_unused(graph: fx.Graph) -> None:
    """Erase nodes without users, as `Graph.eliminate_dead_code` does, which checks all first."""
    nodes: Any = graph.nodes
    # Backwards: a user that is erased may leave its operands without users.
    for node in reversed(nodes):
        if not node.users and not node.is_impure():
            graph.erase_node(node)


def inline(
    graph: fx.Graph, inner: fx.Graph, inputs: Sequence[fx.Node], meta: Mapping[str, object]
) -> Any:
    """Copy a graph of calls to another one's insert point. Return its output's arguments.

    inputs: replace its placeholders. meta: all copies get it, besides their values.
    """
    values: dict[fx.Node, Any] = dict(zip(inner.find_nodes(op="placeholder"), inputs))
    for step in inner.nodes:
        if step.op == "call_function":
            values[step] = graph.node_copy(step, values.__getitem__)
            values[step].meta = {**meta, "val": step.meta["val"]}
    return fx.map_arg(inner.output_node().args[0], values.__getitem__)


def allocates(node: fx.Node) -> bool:
    """Return True if an operation returns its own memory. Python functions say so: `owns`."""
    op = node.target
    return getattr(op, "owns", False) or (
        isinstance(op, OpOverload)
        and op not in _UNSAFE
        and not any(each.alias_info for each in op._schema.returns)
    )


def viewed_operands(node: fx.Node) -> list[fx.Node]:
    """Return the operands in whose memory the result may lie."""
    if allocates(node):
        return []
    # Without a schema that tells, any operand's memory may be in the result.
    if not isinstance(node.target, OpOverload) or node.target in _UNSAFE:
        return written_operands(node) or node.all_input_nodes
    return _operands(node, lambda alias: True)


def written_operands(node: fx.Node) -> list[fx.Node]:
    """Return the operands that a node writes to.

    A Python function writes to out= and, if its name ends with _, to its first argument, or to
    those whose positions it says: `writes`.
    """
    op: Any = node.target
    if isinstance(op, OpOverload):
        return _operands(node, lambda alias: alias.is_write)
    name = getattr(op, "__name__", "")
    is_in_place = node.op == "call_function" and name.endswith("_") and not name.endswith("__")
    written = [node.args[i] for i in getattr(op, "writes", (0,) * is_in_place)]
    return _nodes_of([*written, node.kwargs.get("out")])


def _operands(node: fx.Node, of_alias: Callable[[Any], bool]) -> list[fx.Node]:
    """Return the operands whose schema arguments have such an alias."""
    op: Any = node.target
    arguments = op._schema.arguments
    given = {a.name: x for a, x in zip(arguments, node.args)} | {**node.kwargs}
    names = [a.name for a in arguments if a.alias_info and of_alias(a.alias_info)]
    return _nodes_of([given[name] for name in names if name in given])


def _nodes_of(values: list[Any]) -> list[fx.Node]:
    nodes: list[fx.Node] = []
    fx.map_arg(values, nodes.append)
    return nodes


def fake_mode(**options: Any) -> FakeTensorMode:
    """Return a mode of fake tensors.

    Without a GPU, entering it gives a CUDA build of torch a GPU that does nothing. An autograd
    engine that begins later starts a thread for that GPU, and forbids a backward in forks: those of
    `launch`, or of a DataLoader.
    """
    _start_engine()
    return FakeTensorMode(**options)


@cache
def _start_engine() -> None:
    """Start autograd's engine, which is one for the process."""
    if torch.cuda.is_available():
        return
    with _disable_current_modes(), torch.inference_mode(False), torch.enable_grad():
        one = torch.ones((), requires_grad=True, device="cpu")
        try:
            one.backward()
        except RuntimeError:
            return  # This is a fork of such a process: the caller's own backward says so.
