"""Verify the memory that collectives in flight use, and that operations write to.

needs    one rank's program, with torch.distributed's functional collectives
ensures  every collective has one wait, which alone reads its result;
         no later node reads the operand of an in-place all_reduce_, nor does a collective in flight
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator

from torch import fx

from ...comm.kinds import WIRE_OPS
from ...compat.fx_nodes import viewed_operands, written_operands
from ...compat.operators import c10d
from ...compat.private_apis import OpOverload


def verify_owned(graph: fx.Graph, changed: Collection[fx.Node] = ()) -> fx.Graph:
    """Verify that a program writes only to memory that it has allocated.

    before   %x = input;  %y = add_(%x, 1)
    after    an AssertionError: %y writes to %x, which may lie in the memory of %x
    needs    the program of one rank, or the body of a loop in it
    ensures  the same program; no operation writes to memory that may be that of an input or an
             attribute: arguments, parameters, saved values and gradients of outputs are the
             caller's

    changed: the inputs that the user's own program writes to.
    """
    owners: dict[fx.Node, frozenset[fx.Node]] = {}  # value -> the inputs that it may lie in
    faults: list[str] = []
    for node in graph.nodes:
        faults += [
            f"%{node} writes to %{operand}, which may lie in the memory of %{owner}"
            for operand in written_operands(node)
            for owner in owners[operand]
            if owner not in changed
        ]
        owners[node] = (
            frozenset([node])
            if node.op in ("placeholder", "get_attr")
            else frozenset().union(*(owners[x] for x in viewed_operands(node)))
        )
    if faults:
        raise AssertionError(
            "memory of the caller is written; please report this:\n  " + "\n  ".join(faults)
        )
    return graph


STARTS = WIRE_OPS.keys()
WAIT = c10d.wait_tensor.default


def verify_in_flight(graph: fx.Graph) -> fx.Graph:
    """Return the graph. Raise AssertionError, for a bug in torchgspmd, if it is not legal."""
    order = {node: i for i, node in enumerate(graph.nodes)}
    faults = [fault for node in order if node.target in STARTS for fault in _faults(node, order)]
    if faults:
        raise AssertionError(
            "memory of a collective in flight is touched; please report this:\n  "
            + "\n  ".join(faults)
        )
    return graph


def _faults(collective: fx.Node, order: dict[fx.Node, int]) -> Iterator[str]:
    """Yield a message for every illegal use of a collective's memory."""
    waits = [user for user in collective.users if user.target is WAIT]
    if len(waits) != 1:
        yield f"%{collective} is waited for {len(waits)} times"
    yield from (
        f"%{user} uses %{collective}, which is in flight"
        for user in collective.users
        if user.target is not WAIT
    )
    # Only reductions in place write their operand; others may share it with readers.
    if WIRE_OPS[collective.target].functional is None:
        return
    for user, value in _readers(_base_of(collective.args[0])):
        # A collective reads its operand until it is waited for, not only where it starts.
        end = (
            max((order[w] for w in user.users), default=order[user])
            if user.target in STARTS
            else order[user]
        )
        if user is not collective and end > order[collective]:
            yield f"%{user} reads %{value}, which %{collective} writes over"


def _base_of(value: fx.Node) -> fx.Node:
    """Return the value that a chain of views starts from."""
    while _is_view(value):
        value = value.args[0]
    return value


def _readers(value: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Yield (user, the value that it reads) for everyone who reads a value or its views."""
    for user in value.users:
        if _is_view(user):
            yield from _readers(user)
        else:
            yield user, value


def _is_view(node: fx.Node) -> bool:
    if node.target is operator.getitem:
        return True
    return (
        isinstance(node.target, OpOverload)
        and node.target not in STARTS
        and any(r.alias_info for r in node.target._schema.returns)
    )
