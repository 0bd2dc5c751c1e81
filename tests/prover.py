"""The prover: whether the rule of an operation is true.

    prove(aten.mm.default, x, w)

For each factor that the rule lets be sharded: the operands are split along it over 2 and 3 devices,
their padding poisoned, the operation is run on the parts as the rule says, the results are joined
and compared with the operation itself.
"""

from __future__ import annotations

import itertools
import operator

import torch
from helpers import assert_same
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from torchgspmd import Mesh, ShardSpec
from torchgspmd.fx_passes import localize_graph
from torchgspmd.fx_passes.ir import call_of, results_of
from torchgspmd.fx_passes.partition.reshard import Resharder
from torchgspmd.fx_passes.propagate.factors import assemble, operand_layout, result_pending
from torchgspmd.fx_passes.simulator import Simulator, join_global, split_global
from torchgspmd.rules import rule_of


def one_operation(op, args, kwargs) -> tuple[fx.Graph, fx.Node, list[Tensor]]:
    """A graph of one operation that returns all of its results; the operation's node; its tensor
    operands.
    """
    leaves, tree = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    graph, mode = fx.Graph(), FakeTensorMode()
    fakes = [mode.from_tensor(t) for t in tensors]
    nodes = [graph.placeholder(f"x{i}") for i in range(len(tensors))]
    for node, fake in zip(nodes, fakes):
        node.meta["val"] = fake

    def filled(with_: list) -> tuple[tuple, dict]:
        rest = iter(with_)
        return pytree.tree_unflatten(
            [next(rest) if isinstance(leaf, Tensor) else leaf for leaf in leaves], tree
        )

    node = graph.call_function(op, *filled(nodes))
    fake_args, fake_kwargs = filled(fakes)
    with mode:
        node.meta["val"] = op(*fake_args, **fake_kwargs)
    val = node.meta["val"]
    if isinstance(val, (tuple, list)):
        node.meta["val"] = val = tuple(val)
        for i, v in enumerate(val):
            if isinstance(v, Tensor):
                graph.call_function(operator.getitem, (node, i)).meta["val"] = v
    graph.output(tuple(n for n in results_of(node)))
    return graph, node, tensors


def shard(
    graph: fx.Graph, node: fx.Node, assignment: dict, mesh: Mesh
) -> tuple[fx.Graph, list[ShardSpec], list[ShardSpec]] | None:
    """The graph with the operation's factors sharded as given and its pending results reduced;
    layouts of inputs and outputs. None where no layout of whole dimensions expresses the
    assignment.
    """
    rule = rule_of(call_of(node))
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    needs = [
        operand_layout(rule, i, tuple(n.meta["val"].shape), assignment, mesh)
        for i, n in enumerate(placeholders)
    ]
    outs = [assemble(dims, assignment, rule.sizes, mesh) for dims in rule.results]
    if None in needs or None in outs:
        return None
    specs = [
        ShardSpec(axes, (), *result_pending(rule, dims, assignment))
        for axes, dims in zip(outs, rule.results)
    ]
    for given, need in zip(placeholders, needs):
        given.meta["spec"] = need.plain()
        with graph.inserting_before(node):
            node.replace_input_with(given, resharded(graph, given, need.plain(), need, mesh))
    node.meta |= {"rule": rule, "assignment": assignment, "result_specs": specs}
    returned = []
    for value, spec in zip(results_of(node), specs):
        value.meta["spec"] = spec
        with graph.inserting_before(graph.output_node()):
            returned.append(resharded(graph, value, spec, spec.with_pending(()), mesh))
    graph.output_node().args = (tuple(returned),)
    return graph, [need.plain() for need in needs], [s.with_pending(()) for s in specs]


def resharded(
    graph: fx.Graph, value: fx.Node, before: ShardSpec, after: ShardSpec, mesh: Mesh
) -> fx.Node:
    shape, size = tuple(value.meta["val"].shape), value.meta["val"].element_size()
    for step in Resharder(mesh).steps(shape, size, before, after):
        made = graph.call_function(step.target, (value, *step.args))
        made.meta = {"val": value.meta["val"], "spec": step.spec, "step": step}
        value = made
    return value


def run(
    graph: fx.Graph, mesh: Mesh, tensors: list[Tensor], ins: list[ShardSpec], outs: list[ShardSpec]
) -> list[Tensor]:
    program = fx.GraphModule(nn.Module(), localize_graph(graph, mesh))
    parts = Simulator(program, mesh).run_devices(
        [split_global(t, spec, mesh, poison=True) for t, spec in zip(tensors, ins)]
    )
    shapes = [n.meta["val"].shape for n in graph.output_node().args[0]]
    return [join_global(p, spec, shape, mesh) for p, spec, shape in zip(parts, outs, shapes)]


def expected(op, args, kwargs) -> list[Tensor]:
    torch.manual_seed(1)
    return [
        t.contiguous() for t in pytree.tree_leaves(op(*args, **kwargs)) if isinstance(t, Tensor)
    ]


def check(op, args: tuple, kwargs: dict, assignment: dict, mesh: Mesh) -> None:
    """One assignment of mesh axes to factors."""
    graph, node, tensors = one_operation(op, args, kwargs)
    made = shard(graph, node, assignment, mesh)
    if made is None:
        return
    torch.manual_seed(1)
    assert_same(
        run(made[0], mesh, tensors, *made[1:]),
        expected(op, args, kwargs),
        f"{op} {assignment} {mesh!r}",
    )


def shardable(op, args: tuple, kwargs: dict) -> list[str]:
    """The factors of a call that may be sharded."""
    rule = rule_of(call_of(one_operation(op, args, kwargs)[1]))
    return [factor for factor in rule.sizes if factor not in rule.replicated]


def prove(op, *args, **kwargs) -> list[str]:
    """Shard every factor of a call, two at a time, and each over two axes. Returns the factors."""
    op = getattr(op, "_opoverload", op)
    factors = shardable(op, args, kwargs)
    check(op, args, kwargs, {}, Mesh(m=2))
    for factor in factors:
        for mesh in (Mesh(m=2), Mesh(m=3)):
            check(op, args, kwargs, {factor: ("m",)}, mesh)
        check(op, args, kwargs, {factor: ("b", "a")}, Mesh(a=2, b=2))
    for one, two in itertools.permutations(factors[:4], 2):
        check(op, args, kwargs, {one: ("a",), two: ("b",)}, Mesh(a=2, b=3))
    return factors
