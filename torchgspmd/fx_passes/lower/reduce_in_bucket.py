"""Compute a merged all_reduce's members in the memory where they are reduced.

before   %a = mm(%x, %y);  ...;  %flat = cat([reshape(%a, [-1]), reshape(%b, [-1])])
         %r = all_reduce_(%flat)
after    %bucket = empty(%x, 96);  %parts = split_with_sizes(%bucket, [64, 32])
         %a = reshape(%parts[0], [8, 8]);  mm(%x, %y, out=%a);  ...
         _foreach_copy_([%parts[1]], [reshape(%b, [-1])]);  %r = all_reduce_(%bucket)
needs    one rank's program, lowered and checked (verify_in_flight.py). Afterwards result views
         stand before the wait that fills them.
ensures  the same numbers at the same places in the same collectives

Products and sums, the gradients of weights and biases, are written to the bucket. Other values are
copied as before. With 14 MB of gradients on two CPU processes the copies took 4 ms of a step's 210.
The bucket is the last step's if its gradients have been freed.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, fx

from ...comm.kinds import WIRE_OPS
from ...compat.operators import aten, c10d
from ...compat.private_apis import _foreach_copy_, _storage_Use_Count

MOST = 2**20  # Elements: larger weights are freed one by one.
LEAST = 16  # Elements that stay together. With fewer, the copies are as fast.
FEW = 4  # weights


class Interleaved:
    """Rows [n, sum(sizes)] as a vector: all rows of the first size, then all of the second ..."""

    def __init__(self, count: int, sizes: list[int]) -> None:
        self.together = math.gcd(*sizes)
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        blocks = [
            (row * sum(sizes) + start + first) // self.together
            for start, size in zip(starts, sizes)
            for row in range(count)
            for first in range(0, size, self.together)
        ]
        self.blocks, self.memory = torch.tensor(blocks), BucketMemory()

    def interleave(self, rows: Tensor) -> Tensor:
        """Return the vector."""
        if self.blocks.device != rows.device:
            self.blocks = self.blocks.to(rows.device)
        vector = self.memory.empty(rows, rows.numel(), rows.dtype)
        blocks = rows.reshape(-1, self.together)
        torch.index_select(blocks, 0, self.blocks, out=vector.view(-1, self.together))
        return vector

    vars(interleave)["owns"] = True  # see fx_nodes.allocates


def interleave_rows(graph: fx.Graph) -> fx.Graph:
    """Bring the shards that one gather brings together by one operation, not one a weight.

    before   %p = split_with_sizes(%rows, [64, 32], 1)          rows: [2, 96], a row for each device
             %a = contiguous(reshape(%p[0], [16, 8]));  %b = contiguous(reshape(%p[1], [64]))
    after    %v = interleave(%rows);  %p = split_with_sizes(%v, [128, 64])
             %a = reshape(%p[0], [16, 8]);  %b = %p[1]
    before   %f = cat([%x, %y]);  %r = all_to_all_single(%f, ...)
    after    %f = bucket.cat([%x, %y]);  ...
    needs    one rank's program, lowered; no pass that looks for the copies comes after it
    ensures  the same numbers; gathers of up to MOST elements, which are one tensor from here on

    A copy takes 5 us, whatever its size: 69 small weights took 0.47 ms, and take 0.26. Both
    memories are the last step's if they are free, as in reduce_in_bucket.py.
    """
    for node in graph.find_nodes(op="call_function", target=aten.cat.default):
        if any(map(_sends, node.users)):
            node.target = BucketMemory().cat
    for node in graph.find_nodes(op="call_function", target=aten.split_with_sizes.default):
        rows, sizes, *dim = node.args
        if dim != [1] or rows.target is not aten.reshape.default or len(rows.args[1]) != 2:
            continue
        count = rows.args[1][0]
        if (
            len(sizes) >= FEW
            and all(type(n) is int for n in (count, *sizes))
            and count * sum(sizes) <= MOST
            and math.gcd(*sizes) >= LEAST
            and all(u.target is operator.getitem for u in node.users)
        ):
            _interleave(graph, node, count)
    return graph


def _interleave(graph: fx.Graph, split: fx.Node, count: int) -> None:
    """Split a vector, in which the shards of a weight follow each other."""
    rows, sizes, _ = split.args
    with graph.inserting_before(split):
        vector = graph.call_function(Interleaved(count, sizes).interleave, (rows,))
    split.args = vector, [count * size for size in sizes]
    for piece in [*split.users]:
        size = sizes[piece.args[1]]
        for user in [*piece.users]:
            if user.target is not aten.reshape.default:
                with graph.inserting_after(piece):
                    shaped = graph.call_function(aten.reshape.default, (piece, [count, size]))
                user.replace_input_with(piece, shaped)
                continue
            # The reshape is a view now, in contiguous memory.
            for copy in [u for u in user.users if _copies(u)]:
                copy.replace_all_uses_with(user)
                graph.erase_node(copy)
            if list(user.args[1]) == [count * size]:
                user.replace_all_uses_with(piece)
                graph.erase_node(user)


def _sends(node: fx.Node) -> bool:
    """Return whether a node sends its operand, or is contiguous already."""
    if node.target is aten.contiguous.default:
        return any(map(_sends, node.users))
    return node.target in WIRE_OPS


def _copies(node: fx.Node) -> bool:
    formats = (None, torch.contiguous_format)
    return node.target is aten.contiguous.default and node.kwargs.get("memory_format") in formats


WITH_OUT = {  # The functions that write their result to out=.
    aten.mm.default: torch.mm,
    aten.bmm.default: torch.bmm,
    aten.sum.dim_IntList: torch.sum,
}
ALIGNMENT = 16  # Bytes. GPUs write slower to memory that is not aligned so.
_IN_ORDER = (None, torch.contiguous_format)


def reduce_in_bucket(graph: fx.Graph) -> fx.Graph:
    """Rewrite the graph in place and return it."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in order:
        if node.target in WIRE_OPS and WIRE_OPS[node.target].functional is not None:
            flat = node.args[0]
            if flat.target is aten.cat.default and len(flat.users) == 1 and len(flat.args) == 1:
                _write_to_bucket(graph, node, flat, order)
    return graph


def _write_to_bucket(
    graph: fx.Graph, reduction: fx.Node, flat: fx.Node, order: dict[fx.Node, int]
) -> None:
    """Replace the concatenation `flat` by a bucket that its members are written to."""
    split = _split_of(reduction)
    if split is None:
        return
    sizes = list(split.args[1])
    producers = dict(_writable_members(flat, sizes))  # position -> node
    if not producers:
        return
    # The bucket has to exist before its first member is computed.
    first = min(producers.values(), key=order.__getitem__)
    with graph.inserting_before(first):
        source = next(x for x in first.args if isinstance(x, fx.Node))
        bucket = graph.call_function(
            BucketMemory().empty, (source, sum(sizes), first.meta["dtype"])
        )
        views = graph.call_function(aten.split_with_sizes.default, (bucket, sizes))
        pieces = [graph.call_function(operator.getitem, (views, i)) for i in range(len(sizes))]
    outputs = {}
    for i, node in producers.items():
        args, shape = _without_kept_dims(node)
        with graph.inserting_before(node):
            outputs[i] = (
                pieces[i]
                if len(shape) == 1
                else graph.call_function(aten.reshape.default, (pieces[i], shape))
            )
            # out= needs a view of the member's shape: torch would resize any other tensor.
            graph.call_function(WITH_OUT[node.target], args, {"out": outputs[i]})
    others = [
        (piece, _vector_base(member))
        for i, (piece, member) in enumerate(zip(pieces, flat.args[0]))
        if i not in producers
    ]
    if others:
        with graph.inserting_before(flat):
            graph.call_function(_foreach_copy_, tuple(map(list, zip(*others))))
    flat.replace_all_uses_with(bucket)
    for i, piece in enumerate(pieces):
        _read_from_bucket(graph, split, i, piece, outputs.get(i))
    _erase(graph, flat)
    graph.erase_node(split)


def _split_of(reduction: fx.Node) -> fx.Node | None:
    """Return the node that splits the reduced bucket into its members."""
    waited = next(iter(reduction.users), None)
    users = waited.users if waited is not None and waited.target is c10d.wait_tensor.default else ()
    return next((u for u in users if u.target is aten.split_with_sizes.default), None)


def _writable_members(flat: fx.Node, sizes: Sequence[int]) -> Iterator[tuple[int, fx.Node]]:
    """Yield (position, node) for members without other users that can be written with out=."""
    for i, node in enumerate(flat.args[0]):
        while (
            node.target in (aten.reshape.default, aten.contiguous.default) and len(node.users) == 1
        ):
            node = node.args[0]
        if (
            node.target in WITH_OUT
            and not node.kwargs
            and len(node.users) == 1
            and all(map(node.meta.get, ("shape", "dtype")))
        ):
            offset = sum(sizes[:i]) * node.meta["dtype"].itemsize
            if offset % ALIGNMENT == 0 and math.prod(node.meta["shape"]) == sizes[i]:
                yield i, node


def _without_kept_dims(node: fx.Node) -> tuple[tuple, list[int]]:
    """Return (arguments, result shape) for a member's node; a sum has no keepdim there."""
    shape = list(node.meta["shape"])
    if node.target is not aten.sum.dim_IntList or len(node.args) < 3 or not node.args[2]:
        return node.args, shape
    x, dims, _, *rest = node.args
    summed = {d % len(shape) for d in dims or range(len(shape))}
    return (x, dims, False, *rest), [n for d, n in enumerate(shape) if d not in summed]


def _vector_base(member: fx.Node) -> fx.Node:
    """Return the base behind a member that reshapes a vector, or else the member."""
    base = member.args[0] if member.target is aten.reshape.default else member
    return base if len(base.meta.get("shape") or ()) == 1 else member


def _read_from_bucket(
    graph: fx.Graph, split: fx.Node, i: int, piece: fx.Node, output: fx.Node | None
) -> None:
    """Redirect a reduced member's users to the bucket, where its terms were written.

    piece is the member as a vector, output is the view that its producer writes.
    """
    for member in [u for u in split.users if u.args[1] == i]:
        member.replace_all_uses_with(piece)
        graph.erase_node(member)
    for view in [u for u in piece.users if u.target is aten.reshape.default and u is not output]:
        shape = list(view.args[1])
        # The bucket's pieces are contiguous, so a copy to that format is the piece itself.
        for copy in [
            u
            for u in view.users
            if u.target is aten.contiguous.default and u.kwargs.get("memory_format") in _IN_ORDER
        ]:
            copy.replace_all_uses_with(view)
            graph.erase_node(copy)
        if len(shape) == 1:
            same = piece
        elif output is not None and output is not piece and shape == list(output.args[1]):
            same = output
        else:
            continue
        view.replace_all_uses_with(same)
        graph.erase_node(view)


def _erase(graph: fx.Graph, node: fx.Node) -> None:
    """Erase a node without users, and the operands that only it used."""
    operands = node.all_input_nodes
    graph.erase_node(node)
    for operand in operands:
        if not operand.users and operand.op == "call_function":
            _erase(graph, operand)


class BucketMemory:
    """Reusable memory for one bucket on a CPU.

    Without it, libc returns freed buckets to the system, and the next step faults in every page.
    With 53 MB in gradients that is 13,000 pages, or 30 ms in a 720 ms step.
    On a GPU, torch's allocator reuses memory itself.
    """

    def __init__(self) -> None:
        self.storage: torch.UntypedStorage | None = None
        self.idle_count = 0  # the storage's reference count while no tensor uses it

    def empty(self, like: Tensor, size: int, dtype: torch.dtype) -> Tensor:
        """Return a vector on the device of `like`, in the last one's memory if that is free."""
        if like.device.type != "cpu":
            return like.new_empty([size], dtype=dtype)
        if self.storage is None or _use_count(self.storage) != self.idle_count:
            self.storage = torch.UntypedStorage(size * dtype.itemsize)
            self.idle_count = _use_count(self.storage)
        return torch.empty(0, dtype=dtype).set_(self.storage)

    def cat(self, parts: list[Tensor], dim: int = 0) -> Tensor:
        """Return parts with one dtype joined, as torch.cat does."""
        shape = [*parts[0].shape]
        shape[dim] = sum(part.shape[dim] for part in parts)
        out = self.empty(parts[0], math.prod(shape), parts[0].dtype).view(shape)
        return torch.cat(parts, dim, out=out)

    vars(empty)["owns"] = vars(cat)["owns"] = True  # see fx_nodes.allocates


def _use_count(storage: torch.UntypedStorage) -> int:
    return _storage_Use_Count(storage._cdata)
