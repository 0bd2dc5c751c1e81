"""Programs that differ from another one by one node: a pattern may not take them for its own."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from torch import fx

CALLS = ("call_function", "call_method")


def mutate(graph: fx.Graph, rng: random.Random) -> str:
    """Change one node of a graph in place; return what was changed. The result may not run."""
    kinds = [_swap, _other_operand, _other_number, _another_user, _between, _other_dtype, _order]
    nodes = [node for node in graph.nodes if node.op in CALLS]
    while True:
        node, kind = rng.choice(nodes), rng.choice(kinds)
        if (text := kind(graph, node, rng)) is not None:
            return f"{kind.__name__.strip('_')} of {node.name}: {text}"


def _swap(graph: fx.Graph, node: fx.Node, rng: random.Random) -> str | None:
    places = [i for i, arg in enumerate(node.args) if isinstance(arg, fx.Node)]
    if len(places) < 2:
        return None
    i, j = rng.sample(places, 2)
    args = [*node.args]
    args[i], args[j] = args[j], args[i]
    node.args = tuple(args)
    return f"{i}, {j}"


def _other_operand(graph: fx.Graph, node: fx.Node, rng: random.Random) -> str | None:
    order = [*graph.nodes]
    before = [n for n in order[: order.index(node)] if n.op != "output"]
    places = [i for i, arg in enumerate(node.args) if isinstance(arg, fx.Node)]
    if not places:
        return None
    i, other = rng.choice(places), rng.choice(before)
    node.update_arg(i, other)
    return f"{i} is {other}"


def _other_number(graph: fx.Graph, node: fx.Node, rng: random.Random) -> str | None:
    """Another dimension, size or scalar, also inside of a list."""
    places = [
        (holder, i)
        for holder in (node.args, *(a for a in node.args if isinstance(a, (list, tuple))))
        for i, arg in enumerate(holder)
        if type(arg) in (int, float, bool)
    ]
    names = [name for name, arg in node.kwargs.items() if type(arg) in (int, float, bool)]
    if names and (not places or rng.random() < 0.5):
        name = rng.choice(names)
        value = _number(node.kwargs[name], rng)
        node.update_kwarg(name, value)
        return f"{name} is {value}"
    if not places:
        return None
    holder, i = rng.choice(places)
    value = _number(holder[i], rng)
    changed = type(holder)([*holder[:i], value, *holder[i + 1 :]])
    node.args = (
        changed
        if holder is node.args
        else tuple(changed if arg is holder else arg for arg in node.args)
    )
    return f"{holder[i]} is {value}"


def _number(value: bool | int | float, rng: random.Random) -> bool | int | float:
    if type(value) is bool:
        return not value
    if type(value) is float:
        return rng.choice([value * 2, -value, 0.0, 1.0])
    return rng.choice([value + 1, value - 1, -value, 0, -1])


def _another_user(graph: fx.Graph, node: fx.Node, rng: random.Random) -> str | None:
    (output,) = graph.find_nodes(op="output")
    output.args = ((*output.args[0], node),)
    return "a result"


BETWEEN: tuple[Callable, ...] = (
    lambda x: x.neg(),
    lambda x: x * 2,
    lambda x: x + 1,
    lambda x: x.mT,
    lambda x: x.flip(0),
    lambda x: x.detach(),
    lambda x: x.clone(),
    lambda x: x.narrow(0, 0, 1),
    lambda x: x.sum(-1, keepdim=True),
)


def _between(graph: fx.Graph, node: fx.Node, rng: random.Random) -> str | None:
    """Another operation between a value and one of its users."""
    users = [user for user in node.users if user.op in CALLS]
    if not users:
        return None
    user, at = rng.choice(users), rng.randrange(len(BETWEEN))
    with graph.inserting_before(user):
        new = graph.call_function(BETWEEN[at], (node,))
    user.replace_input_with(node, new)
    return f"before {user.name}: {at}"


def _other_dtype(graph: fx.Graph, node: fx.Node, rng: random.Random) -> str | None:
    users = [user for user in node.users if user.op in CALLS]
    if not users:
        return None
    user = rng.choice(users)
    with graph.inserting_before(user):
        low = graph.call_function(to_float, (node,))
        new = graph.call_function(to_double, (low,))
    user.replace_input_with(node, new if rng.random() < 0.5 else low)
    return f"float32 before {user.name}"


def to_float(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float32) if x.is_floating_point() else x


def to_double(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float64) if x.is_floating_point() else x


def _order(graph: fx.Graph, node: fx.Node, rng: random.Random) -> str | None:
    """Another order of the letters of an equation, or of the items of a list."""
    for i, arg in enumerate(node.args):
        if isinstance(arg, str) and "->" in arg:
            terms, out = arg.split("->")
            parts = [*terms.split(","), out]
            at = rng.randrange(len(parts))
            parts[at] = "".join(rng.sample(parts[at], len(parts[at])))
            text = f"{','.join(parts[:-1])}->{parts[-1]}"
            node.update_arg(i, text)
            return text
        if isinstance(arg, (list, tuple)) and len(arg) > 1:
            items = rng.sample([*arg], len(arg))
            node.update_arg(i, items)
            return str(items)
    return None


def copied(graph: fx.Graph) -> fx.Graph:
    new = fx.Graph()
    new.output(new.graph_copy(graph, {}))
    return new


def one_node_apart(
    graph: fx.Graph, rng: random.Random, run: Callable[[fx.Graph], object]
) -> tuple[fx.Graph, str, object]:
    """Return a mutant that runs, what was changed, and what `run` returns for it."""
    while True:
        mutant = copied(graph)
        try:
            text = mutate(mutant, rng)
            return mutant, text, run(mutant)
        except (RuntimeError, TypeError, ValueError, IndexError, AttributeError):
            continue
