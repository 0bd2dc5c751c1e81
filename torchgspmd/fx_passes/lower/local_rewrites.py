"""Local rewrites of one rank's program: fewer copies, views, bytes and zeros."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ...comm.collective import wait
from ...comm.kinds import WIRE_OPS
from ...compat.fx_nodes import allocates, drop_unused
from ...compat.operators import aten, c10d


def functional_reductions(graph: fx.Graph) -> fx.Graph:
    """Replace in-place reductions, which Inductor does not functionalize.

    before   %r = all_reduce_(%x, sum, g)
    after    %r = all_reduce(%x, sum, g)
    needs    one rank's program
    """
    for node in graph.nodes:
        if node.target in WIRE_OPS and (op := WIRE_OPS[node.target].functional):
            node.target = op
    return graph


def separate_sums(graph: fx.Graph) -> fx.Graph:
    """Keep a product at its place, in front of a sum that Inductor would merge it with.

    before   %p = mm(%a, %b);  %w = wait_tensor(%r);  %s = add(%p, %y)
    after    %p = mm(%a, %b);  %w = wait_tensor(%r);  %n = neg(%p);  %s = sub(%y, %n)
    needs    one rank's program
    ensures  no sum has an operand that was computed on the other side of a start or wait

    Inductor merges a product and a sum into addmm, at the sum's place. Then a product that hides a
    message no longer does. `y - (-p)` has the bits of `y + p`, and no Inductor pattern takes it.
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    messages = [order[n] for n in order if n.target in WIRE_OPS or n.target is _WAIT]
    for node in graph.find_nodes(op="call_function", target=aten.add.Tensor):
        operands = node.args
        if node.kwargs or not all(isinstance(x, fx.Node) for x in operands):
            continue
        # Only a value with one use is merged: Inductor would have to compute others twice.
        own = [x for x in operands if len(x.users) == 1 and x.op == "call_function"]
        far = [x for x in own if bisect(messages, order[x]) < bisect(messages, order[node])]
        if far and node.meta["dtype"].is_floating_point:
            # Both operands may be the term: x + x has no other one.
            other = next((x for x in operands if x is not far[0]), far[0])
            with graph.inserting_before(node):
                negated = graph.call_function(aten.neg.default, (far[0],))
            negated.meta = dict(far[0].meta)
            node.target, node.args = aten.sub.Tensor, (other, negated)
    return graph


_WAIT = c10d.wait_tensor.default


def elide_copies(graph: fx.Graph) -> fx.Graph:
    """Elide copies to contiguous memory for values that are contiguous at run time.

    before   %t = transpose(%attention, 1, 2);  %c = clone(%t, contiguous_format)
    after    %t = transpose(%attention, 1, 2);  %c = contiguous(%t)
    needs    one device's program, before collectives are lowered: none reduces shared memory in
             place
    ensures  inputs and results share no memory that they did not share before

    The copy was captured on fake tensors. It is free here: the CPU's kernel returns %t contiguous.
    """
    for node in graph.nodes:
        contiguous = node.kwargs.get("memory_format") is torch.contiguous_format
        if (
            node.target is aten.clone.default
            and contiguous
            and not _reads_input(node)
            and not _is_returned(node)
        ):
            node.target, node.kwargs = aten.contiguous.default, {}
    return graph


def _reads_input(node: fx.Node) -> bool:
    """Return True if a node may read (a view of) a program input.

    A collective's result has memory of its own.
    """
    source = node.args[0]
    while source.op == "call_function" and source.target is not wait and not allocates(source):
        if not isinstance(source.args[0], fx.Node):  # a loop, whose results may be inputs
            return True
        source = source.args[0]
    return source.op != "call_function"


def _is_returned(node: fx.Node) -> bool:
    """Return True if a value, or a view of it, may be a program result."""
    return any(
        user.op == "output" or not allocates(user) and _is_returned(user) for user in node.users
    )


_RESHAPE = aten.reshape.default
_VIEWS = {
    _RESHAPE,
    aten.transpose.int,
    aten.permute.default,
    aten.unsqueeze.default,
    aten.expand.default,
    aten.contiguous.default,
}


def fold_views(graph: fx.Graph) -> fx.Graph:
    """Remove redundant views from one rank's program.

    before   %a = reshape(%x, [8, 4]);  %b = reshape(%a, [32]);  %c = reshape(%x, [32])
    after    %b = reshape(%x, [32])
    needs    nothing; uses meta["shape"] where it is known

    Forward and backward share no view, since saving its base is enough.
    """
    seen: dict[tuple, fx.Node] = {}
    # list(): views are replaced, but erased only after the loop.
    for node in list(graph.nodes):
        if node.target not in _VIEWS:
            continue
        source = node.args[0]
        # Only reshapes merge: their result depends on the elements' order alone.
        if node.target is _RESHAPE and source.target is _RESHAPE:
            source = source.args[0]
            node.replace_input_with(node.args[0], source)
        if node.target is _RESHAPE and _keeps_shape(source.meta.get("shape"), list(node.args[1])):
            node.replace_all_uses_with(source)
            continue
        same = seen.setdefault(
            (node.target, repr((node.args, node.kwargs)), node.meta.get("backward", False)), node
        )
        if same is not node:
            node.replace_all_uses_with(same)
    drop_unused(graph)
    return graph


def _keeps_shape(shape: Sequence[object] | None, wanted: list) -> bool:
    return shape is not None and (list(shape) == wanted or len(shape) == 1 and wanted == [-1])


_INDEXED = {aten.gather.default: (0, 2), aten.scatter_add.default: (0, 2, 3)}  # op -> tensors


def index_rows(graph: fx.Graph) -> fx.Graph:
    """Index the rows of a batch of one without the batch's dimension.

    before   %y = gather(%x, 1, %i)                                            # %x [1, r, m]
    after    %a = squeeze(%x, [0]);  %b = squeeze(%i, [0]);  %c = gather(%a, 0, %b)
             %y = unsqueeze(%c, 0)
    needs    one rank's program; meta["shape"] where it is known
    ensures  the same values; scatter_add in the same way

    Along the first dimension PyTorch copies whole rows on CPUs, else single numbers. For 1,280 rows
    of 256 it takes 0.14 ms instead of 0.89. A device has one batch where rows of experts are
    exchanged.
    """
    for node in [n for n in graph.nodes if n.target in _INDEXED and not n.kwargs]:
        tensors = _INDEXED[node.target]
        if node.args[1] != 1 or not all(_is_batch_of_one(node.args[i]) for i in tensors):
            continue
        args: list[Any] = [*node.args]
        args[1] = 0
        with graph.inserting_before(node):
            for i in tensors:
                args[i] = _call_on_rows(graph, args[i], aten.squeeze.dims, args[i], [0])
            rows = _call_on_rows(graph, node, node.target, *args)
            result = graph.call_function(aten.unsqueeze.default, (rows, 0))
        result.meta = dict(node.meta)
        node.replace_all_uses_with(result)
        graph.erase_node(node)
    return graph


def _is_batch_of_one(x: fx.Node) -> bool:
    """Return True for a [1, rows, width] whose sizes no run changes."""
    shape, varies = x.meta.get("shape"), x.meta.get("dynamic") or x.meta.get("unknown")
    return shape is not None and len(shape) == 3 and shape[0] == 1 and not varies


def _call_on_rows(graph: fx.Graph, like: fx.Node, target: Any, *args: Any) -> fx.Node:
    """Add a call whose result is that of `like` without the first dimension."""
    result = graph.call_function(target, args)
    result.meta = {**like.meta, "shape": [*like.meta["shape"]][1:]}
    return result


def nll_backward(graph: fx.Graph) -> fx.Graph:
    """Compute the gradient of cross entropy without its zeros.

    It is the gradient of a log softmax whose own gradient has one number in each row.

    before   %g = scatter(%zeros, 1, %i, %v)                                    # i, v: [rows, 1]
             %x = _log_softmax_backward_data(%g, %y, 1, f32)
    after    %e = exp(%y);  %n = neg(%v);  %p = mul(%e, %n);  %x = scatter_add(%p, 1, %i, %v)
    needs    one rank's program; meta["shape"] and meta["dtype"] where they are known
    ensures  the same values but for the rounding of a product: x = v [class i] - exp(y) sum(v)

    It reads and writes a third as many numbers, and the zeros need no memory. For 512 x 50257
    numbers it takes 53 ms instead of 96. In half precision PyTorch's kernel rounds only once, and
    stays.
    """
    for node in graph.find_nodes(
        op="call_function", target=aten._log_softmax_backward_data.default
    ):
        gradient, y, dim, _ = node.args
        if y is not gradient and _is_one_hot(gradient, node, dim):
            index, value = gradient.args[2:]
            with graph.inserting_before(node):
                # y is the log softmax, so exp(y) is the softmax that the gradient needs.
                softmax = _call(graph, node, aten.exp.default, y)
                negated = _call(graph, value, aten.neg.default, value)
                product = _call(graph, node, aten.mul.Tensor, softmax, negated)
                result = _call(graph, node, aten.scatter_add.default, product, dim, index, value)
            node.replace_all_uses_with(result)
            for replaced in (node, gradient, gradient.args[0]):
                graph.erase_node(replaced)
    return graph


def _is_one_hot(gradient: fx.Node, node: fx.Node, dim: int) -> bool:
    """Return True if only this node reads the gradient, and each row has one nonzero number.

    The precision has to be single or double.
    """
    if (
        gradient.target is not aten.scatter.src
        or gradient.args[1] != dim
        or [*gradient.users] != [node]
    ):
        return False
    zeros, _, index, value = gradient.args
    shape, dtype = node.meta.get("shape"), node.meta.get("dtype")
    if (
        zeros.target is not aten.full.default
        or zeros.args[1] != 0
        or [*zeros.users] != [gradient]
        or shape is None
        or node.meta.get("unknown")
    ):
        return False
    row = [*shape]
    # One index and one value per row: otherwise the sum over a row is no single number.
    row[dim] = 1
    return (
        dtype in (torch.float32, torch.float64)
        and node.args[3] == dtype
        and all(list(x.meta.get("shape") or ()) == row for x in (index, value))
    )


def _call(graph: fx.Graph, like: fx.Node, target: Any, *args: Any) -> fx.Node:
    """Add a call with the metadata that the node `like` has."""
    result = graph.call_function(target, args)
    result.meta = dict(like.meta)
    return result
