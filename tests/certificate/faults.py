"""Faults that are put into planned programs: a table of kinds, each changes one node of a graph."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import fx

from torchgspmd import Plan
from torchgspmd.comm.collective import start, wait
from torchgspmd.comm.local_ops import mask_padding, take_part, take_window
from torchgspmd.fx_passes.loop_call import BodyCall, LoopCall, loop_calls
from torchgspmd.layout.halo_window import Window

aten = torch.ops.aten
OTHERS = {
    aten.add.Tensor: aten.sub.Tensor,
    aten.sub.Tensor: aten.add.Tensor,
    aten.mul.Tensor: aten.add.Tensor,
    aten.div.Tensor: aten.mul.Tensor,
    aten.gelu.default: aten.relu.default,
    aten.relu.default: aten.tanh.default,
    aten.tanh.default: aten.sigmoid.default,
    aten.exp.default: aten.tanh.default,
    aten.maximum.default: aten.minimum.default,
    aten.amax.default: aten.amin.default,
    aten.lt.Scalar: aten.gt.Scalar,
    aten.ne.Scalar: aten.eq.Scalar,
    aten.rsqrt.default: aten.sqrt.default,
    aten.neg.default: aten.abs.default,
}
Change = Callable[[fx.Node, Random], bool]
"""Changes a node of a graph in place; returns whether there was something to change."""


@dataclass(frozen=True)
class Injected:
    """A fault: its kind, the node that was changed, and the names that an error may name."""

    kind: str
    node: str
    near: frozenset[str]


def shape_of(node: fx.Node) -> tuple[int, ...] | None:
    """Return the shape of a tensor, at any level."""
    shape = node.meta.get("shape", getattr(node.meta.get("val"), "shape", None))
    return None if shape is None else tuple(shape)


def dtype_of(node: fx.Node) -> torch.dtype | None:
    """Return the dtype of a tensor, at any level."""
    return node.meta.get("dtype", getattr(node.meta.get("val"), "dtype", None))


def _replace(node: fx.Node, other: fx.Node) -> bool:
    """Let the users of a node take another value."""
    node.replace_all_uses_with(other, lambda user: user is not other)
    return True


def _set(node: fx.Node, at: int, value: Any) -> bool:
    if value == node.args[at]:
        return False
    node.update_arg(at, value)
    return True


def _insert(node: fx.Node, target: Any, args: tuple, kwargs: dict | None = None) -> fx.Node:
    with node.graph.inserting_after(node):
        new = node.graph.call_function(target, args, kwargs or {})
    # Before localization each node has a layout; behind it, one with a layout is a claim.
    dropped = ("value", "spec") if "value" in node.meta else ("captured",)
    new.meta = {k: v for k, v in node.meta.items() if k not in dropped}
    return new


def _alike(node: fx.Node, rng: Random) -> fx.Node | None:
    """Return another value of the same shape and dtype that stands before a node."""
    shape, dtype = shape_of(node), dtype_of(node)
    before = []
    for each in node.graph.nodes:
        if each is node:
            break
        if shape is not None and (shape_of(each), dtype_of(each)) == (shape, dtype):
            before.append(each)
    return rng.choice(before) if before else None


# ------------------------------------------------------------------------------------ collectives


def _is_start(node: fx.Node, kinds: tuple[str, ...] = ()) -> bool:
    return node.target is start and (not kinds or node.args[0] in kinds)


def leave_out(node: fx.Node, rng: Random) -> bool:
    if node.target is not wait:
        return False
    return _replace(node, node.args[0].args[1][node.args[1]])


def repeat(node: fx.Node, rng: Random) -> bool:
    if node.target is not wait or node.args[0].args[0] != "all_reduce":
        return False
    arguments = node.args[0].args[2][node.args[1]]
    users = list(node.users)
    again = _insert(node, start, ("all_reduce", (node,), (arguments,)))
    result = _insert(again, wait, (again, 0))
    for user in users:
        user.replace_input_with(node, result)
    return True


def _rewritten(node: fx.Node, change: Callable[[tuple], tuple | None], rng: Random) -> bool:
    """Change the arguments of one collective of a start."""
    arguments = list(node.args[2])
    at = rng.randrange(len(arguments))
    new = change(arguments[at])
    if new is None or new == arguments[at]:
        return False
    arguments[at] = new
    node.update_arg(2, tuple(arguments))
    return True


def other_axis(node: fx.Node, rng: Random) -> bool:
    if not _is_start(node, ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")):
        return False
    names = [n.name.removeprefix("coordinate_") for n in node.graph.find_nodes(op="placeholder")]
    names = [n for n in names if f"coordinate_{n}" in {p.name for p in node.graph.nodes}]
    return _rewritten(node, lambda a: (*a[:-1], rng.choice(names)) if names else None, rng)


def other_dim(node: fx.Node, rng: Random) -> bool:
    if not _is_start(node, ("all_gather", "reduce_scatter", "all_to_all")):
        return False

    def change(a: tuple) -> tuple:
        at = rng.choice([i for i, x in enumerate(a) if isinstance(x, int)])
        return tuple((x + 1) % 3 if i == at else x for i, x in enumerate(a))

    return _rewritten(node, change, rng)


def other_reduction(node: fx.Node, rng: Random) -> bool:
    if not _is_start(node, ("all_reduce", "reduce_scatter")):
        return False
    return _rewritten(node, lambda a: ({"sum": "max"}.get(a[0], "sum"), *a[1:]), rng)


def shift_halo(node: fx.Node, rng: Random) -> bool:
    if not _is_start(node, ("halo",)):
        return False

    def change(a: tuple) -> tuple:
        return (*a[:2], _shifted(a[2], rng), *a[3:])

    return _rewritten(node, change, rng)


def _shifted(text: str, rng: Random) -> str:
    window = Window.parse(text)
    fields = {**window.__dict__, "start": window.start + rng.choice([-1, 1]) * window.every}
    return str(Window(**fields))


def neighbor(node: fx.Node, rng: Random) -> bool:
    if node.target is not wait or (n := len(node.args[0].args[1])) < 2:
        return False
    return _set(node, 1, (node.args[1] + 1) % n)


def rotate_bucket(node: fx.Node, rng: Random) -> bool:
    if not _is_start(node) or len(node.args[1]) < 2:
        return False
    first, *rest = node.args[1]
    return _set(node, 1, (*rest, first))


def rotate_arguments(node: fx.Node, rng: Random) -> bool:
    if not _is_start(node) or len(set(node.args[2])) < 2:
        return False
    first, *rest = node.args[2]
    return _set(node, 2, (*rest, first))


def send_another(node: fx.Node, rng: Random) -> bool:
    if not _is_start(node):
        return False
    at = rng.randrange(len(node.args[1]))
    other = _alike(node.args[1][at], rng)
    operands = list(node.args[1])
    if other is None:
        return False
    operands[at] = other
    return _set(node, 1, tuple(operands))


# --------------------------------------------------------------------------- shards and padding


def no_mask(node: fx.Node, rng: Random) -> bool:
    return node.target is mask_padding and _replace(node, node.args[0])


def mask_size(node: fx.Node, rng: Random) -> bool:
    if node.target is not mask_padding or not isinstance(node.args[3], int):
        return False
    return _set(node, 3, node.args[3] + rng.choice([-1, 1]))


def mask_fill(node: fx.Node, rng: Random) -> bool:
    return node.target is mask_padding and _set(node, 4, 1.0 if node.args[4] == 0 else 0.0)


def mask_dim(node: fx.Node, rng: Random) -> bool:
    if node.target is not mask_padding or len(shape_of(node) or ()) < 2:
        return False
    return _set(node, 1, (node.args[1] + 1) % len(shape_of(node)))


def _indices(node: fx.Node) -> Iterator[fx.Node]:
    yield from (a for a in node.all_input_nodes if a.name.startswith("coordinate_"))


def other_coordinate(node: fx.Node, rng: Random) -> bool:
    mine = next(_indices(node), None)
    others = [
        n
        for n in node.graph.find_nodes(op="placeholder")
        if n.name.startswith("coordinate_") and n is not mine
    ]
    if mine is None or not others:
        return False
    node.replace_input_with(mine, rng.choice(others))
    return True


def first_part(node: fx.Node, rng: Random) -> bool:
    return node.target is take_part and _set(node, 2, 0)


def part_dim(node: fx.Node, rng: Random) -> bool:
    if node.target is not take_part or len(shape_of(node) or ()) < 2:
        return False
    return _set(node, 1, (node.args[1] + 1) % len(shape_of(node)))


def shift_window(node: fx.Node, rng: Random) -> bool:
    return node.target is take_window and _set(node, 3, _shifted(node.args[3], rng))


def shift_narrow(node: fx.Node, rng: Random) -> bool:
    names = (aten.narrow.default, aten.slice.Tensor, aten.select.int)
    if node.target not in names or not isinstance(node.args[2], int):
        return False
    return _set(node, 2, max(0, node.args[2] + rng.choice([-1, 1])))


def index_arithmetic(node: fx.Node, rng: Random) -> bool:
    others = {
        operator.mul: operator.add,
        operator.add: operator.mul,
        operator.mod: operator.floordiv,
    }
    if node.target not in others:
        return False
    node.target = others[node.target]
    return True


# ------------------------------------------------------------------------------- local operations


def swap_operands(node: fx.Node, rng: Random) -> bool:
    tensors = [a for a in node.all_input_nodes if shape_of(a) is not None]
    pairs = [
        (a, b)
        for i, a in enumerate(tensors)
        for b in tensors[i + 1 :]
        if (shape_of(a), dtype_of(a)) == (shape_of(b), dtype_of(b))
    ]
    commutes = node.target in (aten.add.Tensor, aten.mul.Tensor, aten.maximum.default)
    if node.op != "call_function" or not pairs or commutes:
        return False
    a, b = rng.choice(pairs)
    exchanged = {a: b, b: a}
    node.args, node.kwargs = fx.map_arg(
        (node.args, dict(node.kwargs)), lambda n: exchanged.get(n, n)
    )
    return True


def rewire(node: fx.Node, rng: Random) -> bool:
    tensors = [a for a in node.all_input_nodes if shape_of(a) is not None]
    if node.op != "call_function" or not tensors:
        return False
    mine = rng.choice(tensors)
    other = _alike(mine, rng)
    if other is None or other is node:
        return False
    node.replace_input_with(mine, other)
    return True


def other_operation(node: fx.Node, rng: Random) -> bool:
    if node.target not in OTHERS:
        return False
    node.target = OTHERS[node.target]
    return True


def drop_summand(node: fx.Node, rng: Random) -> bool:
    if node.target is not aten.add.Tensor or not isinstance(node.args[0], fx.Node):
        return False
    same = shape_of(node.args[0]) == shape_of(node)
    return same and _replace(node, node.args[0])


def negate(node: fx.Node, rng: Random) -> bool:
    dtype = dtype_of(node)
    if node.op != "call_function" or dtype is None or not dtype.is_floating_point:
        return False
    users = list(node.users)
    new = _insert(node, aten.neg.default, (node,))
    for user in users:
        user.replace_input_with(node, new)
    return bool(users)


def zero(node: fx.Node, rng: Random) -> bool:
    dtype = dtype_of(node)
    if node.op != "call_function" or dtype is None or shape_of(node) is None:
        return False
    users = list(node.users)
    new = _insert(node, aten.zeros_like.default, (node,))
    for user in users:
        user.replace_input_with(node, new)
    return bool(users)


def scale(node: fx.Node, rng: Random) -> bool:
    numbers = [i for i, a in enumerate(node.args) if type(a) is float and a not in (0.0,)]
    if node.op != "call_function" or node.target is mask_padding or not numbers:
        return False
    at = rng.choice(numbers)
    return _set(node, at, node.args[at] * 2)


def transpose_einsum(node: fx.Node, rng: Random) -> bool:
    if getattr(node.target, "__name__", "") != "einsum.default":
        return False
    operands, _, result = node.args[0].partition("->")
    if len(result) < 2:
        return False
    i = rng.randrange(len(result) - 1)
    changed = result[:i] + result[i + 1] + result[i] + result[i + 2 :]
    return _set(node, 0, f"{operands}->{changed}")


def other_sum_dim(node: fx.Node, rng: Random) -> bool:
    names = (aten.sum.dim_IntList, aten.amax.default, aten.mean.dim)
    if node.target not in names or len(node.args) < 2 or not node.args[1]:
        return False
    rank = len(shape_of(node.args[0]) or ())
    return rank > 1 and _set(node, 1, [(d + 1) % rank for d in node.args[1]])


def reverse_cat(node: fx.Node, rng: Random) -> bool:
    if node.target not in (aten.cat.default, aten.stack.default) or len(node.args[0]) < 2:
        return False
    return _set(node, 0, list(reversed(node.args[0])))


def permute_other(node: fx.Node, rng: Random) -> bool:
    if node.target is not aten.permute.default or len(node.args[1]) < 2:
        return False
    first, second, *rest = node.args[1]
    return _set(node, 1, [second, first, *rest])


def narrow_dtype(node: fx.Node, rng: Random) -> bool:
    """Round a value to 16 bits."""
    if dtype_of(node) not in (torch.float32, torch.float64):
        return False
    users = list(node.users)
    small = _insert(node, aten._to_copy.default, (node,), {"dtype": torch.bfloat16})
    new = _insert(small, aten._to_copy.default, (small,), {"dtype": dtype_of(node)})
    for user in users:
        user.replace_input_with(node, new)
    return node.op == "call_function" and bool(users)


def getitem_next(node: fx.Node, rng: Random) -> bool:
    if node.target is not operator.getitem or not isinstance(node.args[1], int):
        return False
    return _set(node, 1, node.args[1] + 1)


# ------------------------------------------------------------------------------------------- ends


def swap_results(node: fx.Node, rng: Random) -> bool:
    if node.op != "output":
        return False
    values = list(node.args[0])
    shapes = [shape_of(v) if isinstance(v, fx.Node) else None for v in values]
    pairs = [
        (i, j)
        for i in range(len(values))
        for j in range(i)
        if shapes[i] is not None and shapes[i] == shapes[j] and values[i] is not values[j]
    ]
    if not pairs:
        return False
    i, j = rng.choice(pairs)
    values[i], values[j] = values[j], values[i]
    node.args = (tuple(values),)
    return True


def swap_inputs(node: fx.Node, rng: Random) -> bool:
    if node.op != "placeholder" or shape_of(node) is None:
        return False
    other = _alike(node, rng)
    return other is not None and _replace(node, other)


def reverse_loop(node: fx.Node, rng: Random) -> bool:
    call = node.target
    if not isinstance(call, LoopCall) or call.loop.length < 2:
        return False
    changed = copy.copy(call)
    changed.__dict__.pop("compiled", None)
    changed.loop = type(call.loop)(
        call.loop.number, call.loop.visit, call.loop.length, not call.loop.reverse, call.loop.ends
    )
    node.target = changed
    return True


def shorten_loop(node: fx.Node, rng: Random) -> bool:
    call = node.target
    if not isinstance(call, LoopCall) or call.loop.length < 2 or call.loop.ends:
        return False
    changed = copy.copy(call)
    changed.__dict__.pop("compiled", None)
    loop = call.loop
    changed.loop = type(loop)(loop.number, loop.visit, loop.length - 1, loop.reverse, loop.ends)
    node.target = changed
    return True


KINDS: dict[str, Change] = {
    each.__name__: each
    for each in (
        *(leave_out, repeat, other_axis, other_dim, other_reduction, shift_halo, neighbor),
        *(rotate_bucket, rotate_arguments, send_another, no_mask, mask_size, mask_fill, mask_dim),
        *(other_coordinate, first_part, part_dim, shift_window, shift_narrow, index_arithmetic),
        *(swap_operands, rewire, other_operation, drop_summand, negate, zero, scale),
        *(transpose_einsum, other_sum_dim, reverse_cat, permute_other, narrow_dtype, getitem_next),
        *(swap_results, swap_inputs, reverse_loop, shorten_loop),
    )
}


def graphs_of(graph: fx.Graph) -> list[fx.Graph]:
    """Return a graph, and the bodies of its loops and stages."""
    bodies = [body.graph for _, call in loop_calls(graph) for body in call.bodies]
    return [graph, *(inner for body in bodies for inner in graphs_of(body))]


def _calls(graph: fx.Graph) -> dict[fx.Graph, fx.Node]:
    """Return the node that runs each body, down to bodies in bodies."""
    pairs = [(body.graph, node) for node, call in loop_calls(graph) for body in call.bodies]
    inner = [_calls(body) for body, _ in pairs]
    return dict(pairs) | {body: node for each in inner for body, node in each.items()}


Compared = Callable[[fx.Node], bool]
"""Whether a certificate compares a node's value."""


def _behind(node: fx.Node, calls: dict[fx.Graph, fx.Node], compared: Compared) -> frozenset[str]:
    """Return the names of a node and of the nodes that read it, as far as the first compared.

    calls: of bodies. What leaves a body enters its call's bodies again, and the call's results.
    """
    reached, stack = {node}, [node]
    while stack:
        last = stack.pop()
        users = list(last.users)
        if last.op == "output" and last.graph in calls:
            users = [calls[last.graph]]
        if isinstance(last.target, BodyCall):
            graphs = (body.graph for body in last.target.bodies)
            users += [x for graph in graphs for x in graph.find_nodes(op="placeholder")]
        for user in users:
            if user not in reached:
                reached.add(user)
                # Inputs of bodies are not compared.
                stack += [] if compared(user) and user.op != "placeholder" else [user]
    names = {each.name for each in reached}
    return frozenset(names | {str(each.meta.get("value")) for each in reached})


def inject(graph: fx.Graph, rng: Random, compared: Compared) -> Injected | None:
    """Put a fault into a graph in place; return it, or None if none of the tries fits."""
    calls = _calls(graph)
    for _ in range(20):
        kind = rng.choice(sorted(KINDS))
        chosen = rng.choice(graphs_of(graph))
        nodes = list(chosen.nodes)
        rng.shuffle(nodes)
        for node in nodes:
            before = _behind(node, calls, compared)
            if KINDS[kind](node, rng):
                chosen.lint()
                return Injected(kind, node.name, before | _behind(node, calls, compared))
    return None


def with_program(plan: Plan, graph: fx.Graph) -> Plan:
    """Return a plan with another program of one device."""
    other = copy.copy(plan)
    vars(other).pop("program", None)
    other.program_graph = graph
    other._later = {"program": lambda: fx.GraphModule(plan.captured.constants, graph)}
    return other
