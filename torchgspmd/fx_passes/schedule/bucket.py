"""Merge small collectives of one kind into buckets.

before   %a_r = all_reduce(%a, sum, data);  %b = mm(...);  %b_r = all_reduce(%b, sum, data)
after    %b = mm(...);  %a_r_start = start(all_reduce, [%a, %b], ...)
         %a_r = wait(%a_r_start, 0);  %b_r = wait(%a_r_start, 1)
needs    one device's program
ensures  only collectives with equal keys are joined, in the same order on every rank

Reductions, mostly of gradients, fill buckets in the order in which their operands are computed.
For gradients that is from the last layer to the first. A bucket waits for its last operand. Gathers
of inputs (weights) move up to the first of their bucket. Other gathers are merged only if adjacent.

No bucket is larger than Hardware.bucket_bytes. The collectives of one key fill at least PARTS
buckets. The first reduction is then sent while there is something left to compute, and the first
weights arrive soon. Buckets do not get much smaller than SMALL bytes, since starting a collective
costs time too. Where the cores that compute also send, one bucket for reductions is enough.

A sum may be divided by another sum before it is reduced, as a loss is by a count. Then it is
reduced before the division, together with the other. Source: the buckets in PyTorch's
DistributedDataParallel (arXiv 2006.15704, section 3.2.3), which have 25 MB, the first 1 MB.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import fx

from ...comm.collective import split_axes, start, wait
from ...comm.hardware import Hardware
from ...comm.kinds import CollectiveKind
from ...compat.fx_nodes import origin_of
from ...layout.mesh import Mesh
from ...rules import quotient
from ..units import size_text
from .liveness import bytes_of


def start_wait(graph: fx.Graph) -> fx.Graph:
    """Split every collective into the start and the wait for its result.

    before   %w_g = all_gather(%w, 0, data)
    after    %w_g_start = start(all_gather, [%w], [[0, data]]);  %w_g = wait(%w_g_start, 0)
    needs    one device's program
    ensures  nothing but `start` communicates; the wait follows its start at once, and later passes
             move the two apart
    """
    for node in list(graph.nodes):
        if isinstance(node.target, CollectiveKind):
            join(graph, [node])
    # In reverse: erasing a wait may leave its start without users.
    for node in reversed(graph.nodes):
        if node.target in (start, wait) and not node.users:
            graph.erase_node(node)
    return graph


def join(graph: fx.Graph, run: Sequence[fx.Node]) -> None:
    """Merge adjacent collectives of one kind into one start. Each becomes a wait.

    None uses another's result.
    """
    first = run[0]
    with graph.inserting_before(first):
        operands, arguments = tuple(n.args[0] for n in run), tuple(tuple(n.args[1:]) for n in run)
        started = graph.create_node(
            "call_function",
            start,
            (first.target.name, operands, arguments),
            name=f"{first.name}_start",
        )
    started.meta = {
        "source": None,
        "backward": False,
        **origin_of(first),
        "dtype": first.meta["dtype"],
        "bytes": sum(map(bytes_of, run)),
    }
    started.meta["collective"] = label = _label(run)
    for i, node in enumerate(run):
        node.meta["collective"] = label
        node.target, node.args = wait, (started, i)


def _label(run: Sequence[fx.Node]) -> str:
    """Return a start's kind, first operand, result bytes and axes."""
    first, rest = run[0], f" and {len(run) - 1} more" if len(run) > 1 else ""
    step = first.meta.get("step")
    axes = ", " + "+".join(step.axes) if step is not None else ""
    size = size_text(sum(map(bytes_of, run)))
    return f"{first.target.name} {first.args[0]}{rest}, {size}{axes}"


SMALL = 2**20  # About the smallest bucket of a key that fills several, in bytes.
PARTS = 4  # Buckets of one key, if they do not get smaller than SMALL.


Keys = Mapping[fx.Node, tuple[Any, ...]]


def _keys(graph: fx.Graph, halves: bool) -> dict[fx.Node, tuple[object, ...]]:
    """Return the collectives' keys, equal for those that can be merged, by node.

    A key has the kind, the kind's own key (reduction, axes), and dtype. If forward and backward are
    programs of their own, it also tells which has the node.
    """
    return {
        node: (
            node.target,
            *(node.args[1 + i] for i in node.target.merged.shared),
            node.meta["dtype"],
            halves and node.meta["backward"],
        )
        for node in graph.nodes
        if isinstance(node.target, CollectiveKind)
        and node.target.merged is not None
        and not node.meta.get("unknown")
    }


def bucket(graph: fx.Graph, mesh: Mesh, hardware: Hardware, halves: bool) -> fx.Graph:
    """Rewrite the graph in place and return it. halves: it becomes a forward and a backward."""
    keys = _keys(graph, halves)
    reductions = [node for node in keys if node.target.reduces]
    # First: a sum in front of its division can share a bucket with the divisor's.
    _reduce_before_division(reductions, keys)
    # Up to the operand, from the first use (for gradients, the end).
    for node in reductions:
        if node.args[0].op == "call_function":
            node.args[0].append(node)
    _move_tails_down(graph, reductions)
    caps = _caps(keys, mesh, hardware)
    order = {node: i for i, node in enumerate(graph.nodes)}
    last = len(order)
    deadline = {
        n: min((order[u] for u in n.users if u.op != "output"), default=last) for n in order
    }
    _fill_buckets(
        order,
        caps,
        {node: keys[node] for node in reductions},
        # A bucket is sent at its last member, so none may be used before that.
        lambda members, n: all(deadline[m] > order[n] for m in members),
        _move_to_last,
    )
    _fill_buckets(
        order,
        caps,
        {n: k for n, k in keys.items() if n.target.gathers and n.args[0].op == "placeholder"},
        # Their operands are inputs, so a bucket may begin at its first member.
        lambda members, n: True,
        _move_to_first,
    )
    for node in list(graph.nodes):
        if node in keys and len(run := _adjacent_run(node, keys, caps)) > 1:
            join(graph, run)
            for member in run:
                del keys[member]
    return graph


def _move_to_last(members: list[fx.Node]) -> None:
    """Move a bucket's members right before the last one."""
    for node in members[:-1]:
        members[-1].prepend(node)


def _move_to_first(members: list[fx.Node]) -> None:
    """Move a bucket's members right behind the first one."""
    for node in reversed(members[1:]):
        members[0].append(node)


def _largest(kind: CollectiveKind, axes: str, mesh: Mesh, hardware: Hardware) -> float:
    """Return the largest bucket's payload in bytes, for a kind over axes."""
    names = split_axes(axes)
    sent = hardware.bucket_bytes(mesh, names, kind.name, kind.relays)
    return sent if not hardware.beside else sent / (kind.sent(1.0, mesh.count(names)) or 1.0)


def _caps(keys: Keys, mesh: Mesh, hardware: Hardware) -> dict[object, float]:
    """Return the largest bucket size in bytes, for every key."""
    totals: dict[Any, float] = defaultdict(float)
    for node, key in keys.items():
        totals[key] += _payload(node)
    # Without messages beside computation, several buckets hide nothing and cost more starts.
    buckets = {k: PARTS if hardware.beside or k[0].gathers else 1 for k in totals}
    return {
        k: min(
            _largest(k[0], k[-3], mesh, hardware),
            total / min(buckets[k], max(1, round(total / SMALL))),
        )
        for k, total in totals.items()
    }


def _reduce_before_division(reductions: list[fx.Node], keys: Keys) -> None:
    """Reduce a sum before it is divided by another sum that is reduced alike."""
    for node in reductions:
        divided = node.args[0]
        operands = quotient(divided)
        if operands is None or len(divided.users) > 1 or node.args[1] != "sum":
            continue
        terms, count = operands
        if keys.get(count) == keys[node] and all(
            terms.meta[k] == node.meta[k] for k in ("shape", "dtype")
        ):
            node.replace_all_uses_with(divided)
            divided.replace_input_with(terms, node)
            # The quotient is whole now, and the sum of the terms is no value of the plan.
            divided.meta |= {k: node.meta[k] for k in ("spec", "value") if k in node.meta}
            node.meta.pop("value", None)
            node.args = (terms, *node.args[1:])
            divided.prepend(node)
            node.meta.pop("captured", None)  # it has the sum of the terms now
            divided.meta["spec"] = node.meta["spec"]


def _move_tails_down(graph: fx.Graph, reductions: list[fx.Node]) -> None:
    """Move operations on a reduction alone to the first other use, where they close no bucket.

    That is the output, or an optimizer step.
    """
    end = graph.output_node()
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in reductions:
        chain = []
        while (
            len(node.users) == 1
            and (user := next(iter(node.users))) is not end
            and user.all_input_nodes == [node]
        ):
            chain.append(user)
            node = user
        before = min(node.users, key=order.__getitem__, default=end)
        for tail in chain:
            before.prepend(tail)


def _fill_buckets(
    order: dict[fx.Node, int],
    caps: dict[object, float],
    keys: Keys,
    fits: Callable[[list[fx.Node], fx.Node], bool],
    move: Callable[[list[fx.Node]], None],
) -> None:
    """Fill buckets in program order. A bucket is moved when the next member does not fit."""
    buckets: dict[Any, list[fx.Node]] = {}
    filled: dict[Any, int] = defaultdict(int)
    for node in order:
        if node not in keys:
            continue
        kind, size = keys[node], _payload(node)
        members = buckets.setdefault(kind, [])
        if members and not (filled[kind] + size <= caps[kind] and fits(members, node)):
            move(members)
            members = buckets[kind] = []
            filled[kind] = 0
        members.append(node)
        filled[kind] += size
    for members in buckets.values():
        move(members)


def _adjacent_run(node: fx.Node, keys: Keys, caps: dict[object, float]) -> list[fx.Node]:
    """Return the node and the collectives right behind it that can be merged with it.

    They have an equal key, and none uses another's result.
    """
    run, total = [node], _payload(node)
    while keys.get(run[-1].next) == keys[node] and run[-1].next.args[0] not in run:
        total += _payload(run[-1].next)
        if total > caps[keys[node]]:
            break
        run.append(run[-1].next)
    return run


def _payload(node: fx.Node) -> int:
    """Return the whole tensor's bytes, which do not depend on the device count."""
    return max(bytes_of(node), bytes_of(node.args[0]))
