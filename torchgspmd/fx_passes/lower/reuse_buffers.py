"""Write results over operands at their last use, and new input values over the old ones.

before   %g = add(%a, %b);  %h = scatter(%zeros, 1, %i, %g)      # the last uses of %a and of %zeros
after    %g = add_(%a, %b);  %h = scatter_(%zeros, 1, %i, %g)
before   %p = input;  %u = adam(%p, %g, %m, %v, ...);  return %u[0]   # the new value of %p
after    %p = input;  adam_([%p], [%g], [%m], [%v], ...);  return %p
needs    one rank's program, lowered and checked (verify_in_flight.py); meta["shape"] and
         meta["dtype"] where they are known, and meta["dynamic"] where they depend on values
ensures  the same values; inputs that are not changed, outputs and collectives in flight keep theirs

Only memory that this program allocated is written, and only after all its views were read for the
last time. A changed input is written by the operations that lead to its new value. Copying the
zeros that a gradient is scattered into took 2 % of a small model's step.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from ...capture import MUTATION
from ...capture.assumed_sizes import CHECKS
from ...compat.fx_nodes import allocates
from ...compat.operators import aten, c10d, find
from ...compat.private_apis import OpOverload
from ...rules.custom_ops.updates import adam, adam_
from ..loop_call import BodyCall
from ..program import Program

ADAM = adam._opoverload
# Besides elementwise operations, those that can write their result over their first operand.
_OVER_FIRST = (
    aten.addmm.default,
    aten.scatter.src,
    aten.scatter.value,
    aten.scatter_add.default,
    aten.index_put.default,
    aten.index_add.default,
    aten.index_copy.default,
    aten.masked_fill.Scalar,
)
# The result of these may lie in either operand.
_COMMUTE = (aten.add.Tensor, aten.mul.Tensor)
_VIEWS = (
    aten.reshape.default,
    aten.transpose.int,
    aten.permute.default,
    aten.squeeze.dims,
    aten.unsqueeze.default,
)
# Besides elementwise operations, those that allocate their results, without overlapping elements.
_ALLOCATE = {
    *_OVER_FIRST,
    aten.linear.default,
    aten.matmul.default,
    aten.mm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.sum.dim_IntList,
    aten.clone.default,
    aten.full.default,
    aten.embedding.default,
    aten.embedding_dense_backward.default,
    aten.gather.default,
    aten._softmax.default,
    aten._log_softmax.default,
    aten._softmax_backward_data.default,
    aten._log_softmax_backward_data.default,
    aten.native_layer_norm.default,
    aten.native_layer_norm_backward.default,
    ADAM,
}


def reuse_buffers(graph: fx.Graph, changed: Mapping[fx.Node, fx.Node] | None = None) -> fx.Graph:
    """Rewrite the graph in place and return it. changed: each changed input's new value."""
    memory = _Memory(graph, changed or {})
    for node in graph.nodes:
        op = _in_place_op(node)
        for operand, others in _candidate_operands(node) if op else ():
            if _same_type(node, operand) and memory.is_free(operand, others, node):
                memory.merge(node, operand)
                node.target, node.args = op, (operand, *others, *node.args[1 + len(others) :])
                break
    for group in _alike(graph):
        _step_in_place(graph, group, memory)
    return graph


def reuse_memory(program: Program) -> fx.Graph:
    """Run the pass on a program, which says which inputs change."""
    return reuse_buffers(program.graph, changed_inputs(program))


def changed_inputs(program: Program) -> dict[fx.Node, fx.Node]:
    """Return the new value for each input that a program's forward changes.

    Without inputs that it returns besides, or views of them: these have memory of their own.
    """
    if program.backward is None:
        return {}
    inputs, values = program.placeholders, program.graph.output_node().args[0]
    bases = [_base_of(value) for value in values if isinstance(value, fx.Node)]
    return {
        inputs[out.input]: value
        for out, value in zip(program.captured.outputs, values)
        if out.kind == MUTATION and isinstance(value, fx.Node) and bases.count(value) == 1
    }


class _Memory:
    """The buffers that each value may lie in, and each buffer's last read.

    A buffer is named by the node that allocates it.
    """

    def __init__(self, graph: fx.Graph, changed: Mapping[fx.Node, fx.Node]) -> None:
        self.position = {node: at for at, node in enumerate(graph.nodes)}
        # A run that ends at a check has changed nothing: another program begins with the inputs.
        checked = max((at for node, at in self.position.items() if _may_end(node)), default=-1)
        chains = {x: _chain(x, value) for x, value in changed.items()}
        self.writers = {
            x: chain
            for x, chain in chains.items()
            if all(self.position[node] > checked for node in chain)
        }
        self.buffers: dict[fx.Node, frozenset[fx.Node]] = {}
        self.last_read: dict[fx.Node, int] = {}
        self.reused: dict[fx.Node, fx.Node] = {}  # result written over an operand -> its buffer
        # Two getitem nodes of one result lie in one buffer.
        results: dict[tuple, fx.Node] = {}  # arguments of getitem -> first such node
        for at, node in enumerate(graph.nodes):
            read = frozenset().union(*(self.buffers[x] for x in node.all_input_nodes))
            self.last_read |= dict.fromkeys(read, at)
            if node.target is operator.getitem and _is_new(node.args[0]):
                self.buffers[node] = frozenset([results.setdefault(node.args, node)])
            else:
                self.buffers[node] = read if read and not _is_new(node) else frozenset([node])

    def is_free(self, value: fx.Node, others: tuple, node: fx.Node) -> bool:
        """Return True if a node may write over a value: it reads the buffer last.

        The program has allocated the buffer, or this node changes the input that lies in it. The
        other operands must not lie in the buffer.
        """
        # Other memory is the caller's: writing to it would change tensors outside of the program.
        base, at = _base_of(value), self.position[node]
        if (
            base not in self.reused
            and not _is_new(base.args[0] if base.target is operator.getitem else base)
            and node not in self.writers.get(value, ())
        ):
            return False
        buffer, read = self._buffer_of(base), []
        # Of x + x.T the second operand would change while it is read.
        fx.map_arg(others, read.append)
        return self.last_read[buffer] == at and all(
            buffer not in map(self._current, self.buffers[x]) for x in read
        )

    def merge(self, result: fx.Node, operand: fx.Node) -> None:
        """Record that a result is written over an operand's buffer."""
        buffer = self.reused[result] = self._buffer_of(_base_of(operand))
        # From now on whoever reads the result reads the buffer.
        self.last_read[buffer] = self.last_read.get(result, self.last_read[buffer])

    def _buffer_of(self, base: fx.Node) -> fx.Node:
        return self._current(next(iter(self.buffers[base])))

    def _current(self, buffer: fx.Node) -> fx.Node:
        return self.reused.get(buffer, buffer)


def _may_end(node: fx.Node) -> bool:
    """Return whether a run may end at a node, since a size has another number."""
    if isinstance(node.target, BodyCall):
        return any(_may_end(n) for body in node.target.bodies for n in body.graph.nodes)
    return node.target in CHECKS


def _chain(x: fx.Node, value: fx.Node) -> set[fx.Node]:
    """Return the operations that lead from an input to its new value, each read by the next alone.

    Each may be written over the one before, the first over the input.
    """
    if value.target is operator.getitem and value.args[0].target is ADAM:
        return {value.args[0]}
    chain = {value}
    while _in_place_op(value):
        operands = [operand for operand, _ in _candidate_operands(value)]
        if x in operands:
            return chain
        # A second reader would see the new value in place of the old one.
        value = next((o for o in operands if len(o.users) == 1), x)
        chain.add(value)
    return set()


def _base_of(node: fx.Node) -> fx.Node:
    """Return the value that a chain of views starts from."""
    while node.target in _VIEWS:
        node = node.args[0]
    return node


def _is_new(node: fx.Node) -> bool:
    """Return True if an operation allocates its results, and their elements do not overlap."""
    op: Any = node.target
    return allocates(node) and (
        op in _ALLOCATE
        or isinstance(op, OpOverload)
        and op.namespace == "aten"
        and torch.Tag.pointwise in op.tags
    )


def _in_place_op(node: fx.Node) -> OpOverload | None:
    """Return the operation variant that writes its result over the first operand."""
    op = node.target
    if (
        not _is_new(node)
        or torch.Tag.pointwise not in op.tags
        and op not in _OVER_FIRST
        or node.kwargs
    ):
        return None
    name, _, overload = str(op).removeprefix("aten.").partition(".")
    return find("aten", name + "_", overload)


def _candidate_operands(node: fx.Node) -> Iterator[tuple[fx.Node, tuple]]:
    """Yield (operand to write over, other operands)."""
    first, *others = node.args
    if isinstance(first, fx.Node):
        yield first, tuple(others)
    if node.target in _COMMUTE and isinstance(others[0], fx.Node):
        yield others[0], (first, *others[1:])


def _same_type(node: fx.Node, operand: fx.Node) -> bool:
    """Return True if both nodes have the same shape and dtype on every run."""
    # A size that only a run knows may differ from the operand's in a later run.
    types = [
        (tuple(x.meta["shape"]), x.meta["dtype"])
        if x.meta.get("shape") is not None and not x.meta.get("dynamic")
        else None
        for x in (node, operand)
    ]
    return types[0] is not None and types[0] == types[1]


# ------------------------------------------------------------------------- steps of optimizers


def _alike(graph: fx.Graph) -> list[list[fx.Node]]:
    """Return the adam calls in groups that one call computes, in the last one's place.

    Between them nothing is waited for, and nothing reads a result.
    """
    groups: list[list[fx.Node]] = []
    key, results = None, set()
    for node in graph.nodes:
        if node.target is ADAM:
            p, *_, step = node.args[:5]  # a padded input says no dtype: it gets a call of its own
            if (mine := (step, *node.args[5:], p.meta.get("dtype", node))) != key:
                key, results = mine, set()
                groups.append([])
            groups[-1].append(node)
            results.update(node.users)
        # One call stands at the last of a group: a reader in between, or a wait, would come too
        # late.
        elif node.target is c10d.wait_tensor.default or results & {*node.all_input_nodes}:
            key = None
    return groups


def _step_in_place(graph: fx.Graph, group: list[fx.Node], memory: _Memory) -> None:
    """Replace adam calls by one that writes over the old values, or over copies."""
    rows = []
    for node in group:
        p, g, m, v = node.args[:4]
        new = {}
        for i, x in enumerate((p, m, v)):
            others = tuple(y for y in (p, g, m, v) if y is not x)
            new[i] = x
            if not memory.is_free(x, others, node):
                with graph.inserting_before(node):
                    new[i] = graph.call_function(aten.clone.default, (x,))
                new[i].meta = dict(x.meta)
        rows.append((new[0], g, new[1], new[2]))
        for result in list(node.users):
            result.replace_all_uses_with(new[result.args[1]])
            graph.erase_node(result)
    with graph.inserting_before(group[-1]):
        graph.call_function(adam_, (*map(list, zip(*rows)), *group[-1].args[4:]))
    for node in group:
        graph.erase_node(node)
