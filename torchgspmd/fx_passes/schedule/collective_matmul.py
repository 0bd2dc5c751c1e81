"""Compute products with gathered operands or scattered results in a ring, if it is faster.

before   %x_g = all_gather(%x, 1, model)
         %y = einsum(cdb,ab->cda, %x_g, %w);  %z = einsum(cdb,ab->cda, %x_g, %v)
after    %r = gather_einsum(%x, [%w, %v], 1, model, ...);  %y = %r[0];  %z = %r[1]
before   %y = einsum(cdb,ab->cda, %x, %w);  %y_rs = reduce_scatter(%y, sum, 1, model)
after    %y_rs = einsum_scatter(%x, %w, 1, model, cdb,ab->cda)
needs    one device's program, before start_wait
ensures  the same bytes are sent, in steps that are hidden behind the products; one text for every
         device count
source   windowed einsum, arXiv 2105.04663. XLA too compares a step's compute and transfer to tell
         when it pays.

Gathered inputs (weights), and sums that the backward only returns (gradients), are left alone. The
operations between their start and their wait hide them as well, in larger pieces.
"""

from __future__ import annotations

import operator

from torch import fx

from ...comm.collective import split_axes
from ...comm.hardware import Hardware
from ...comm.kinds import einsum_scatter, gather_einsum
from ...compat.fx_nodes import origin_of
from ...layout.mesh import Mesh
from ...rules.custom_ops.nd import einsum
from .arithmetic import flops
from .liveness import bytes_of

EINSUM = einsum._opoverload
GAIN = 0.9  # Use a ring only if it takes at most this share of the time of product and collective.


def collective_matmul(graph: fx.Graph, mesh: Mesh, hardware: Hardware) -> fx.Graph:
    """Rewrite the graph in place and return it."""
    if not hardware.beside:
        return graph
    order = {node: i for i, node in enumerate(graph.nodes)}
    for node in list(graph.nodes):
        if node.meta.get("unknown") or any(n.meta.get("unknown") for n in node.all_input_nodes):
            continue
        if node.target is gather_einsum.replaces and node.args[0].op == "call_function":
            _fuse_gather(graph, node, order, mesh, hardware)
        elif (
            node.target is einsum_scatter.replaces
            and node.args[1] == "sum"
            and not (node.meta["backward"] and _is_returned(node))
        ):
            _fuse_scatter(graph, node, mesh, hardware)
    return graph


def _fuse_gather(
    graph: fx.Graph, node: fx.Node, order: dict[fx.Node, int], mesh: Mesh, hardware: Hardware
) -> None:
    """Replace a gather and its products by gather_einsum, if that pays.

    Products are fused if they are in the same phase and their other operands exist before the first
    product.
    """
    x, dim, axes = node.args
    users = sorted(node.users, key=order.__getitem__)
    # A first user other than a product needs the gathered operand at once: no ring can hide it.
    if users[0].target is not EINSUM:
        return
    first = users[0]
    members = [
        u
        for u in users
        if u.target is EINSUM
        and u.args[1] is not u.args[2]
        and u.meta["backward"] == node.meta["backward"]
        and order[_other(u, node)] < order[first]
    ]
    if first not in members or not pays(
        hardware, members, bytes_of(node), mesh.count(split_axes(axes))
    ):
        return
    keep = len(members) < len(users)
    with graph.inserting_before(first):
        ring = graph.create_node(
            "call_function",
            gather_einsum,
            name=f"{node.name}_ring",
            args=(
                x,
                tuple(_other(u, node) for u in members),
                dim,
                axes,
                tuple(u.args[0] for u in members),
                tuple(int(u.args[2] is node) for u in members),
                keep,
            ),
        )
    ring.meta = {**origin_of(node), **{key: node.meta[key] for key in ("dtype", "step")}}
    order[ring] = order[node] = order[first]
    for i, member in enumerate(members):
        member.target, member.args = operator.getitem, (ring, i)
    if keep:
        ring.append(node)
        node.target, node.args = operator.getitem, (ring, len(members))
    else:
        graph.erase_node(node)


def _is_returned(node: fx.Node) -> bool:
    """Return True if only the output uses a value, maybe through operations on it alone."""
    return all(
        user.op == "output" or user.all_input_nodes == [node] and _is_returned(user)
        for user in node.users
    )


def _other(product: fx.Node, operand: fx.Node) -> fx.Node:
    return product.args[1] if product.args[2] is operand else product.args[2]


def _fuse_scatter(graph: fx.Graph, node: fx.Node, mesh: Mesh, hardware: Hardware) -> None:
    """Replace a product and its reduce_scatter by einsum_scatter, if that pays."""
    product, _, dim, axes = node.args
    if product.target is not EINSUM or len(product.users) > 1:
        return
    equation, a, b = product.args
    n = mesh.count(split_axes(axes))
    if product.meta["shape"][dim] % n or not pays(hardware, [product], bytes_of(product), n):
        return
    node.target, node.args = einsum_scatter, (a, b, dim, axes, equation)
    graph.erase_node(product)


def pays(hardware: Hardware, products: list[fx.Node], payload: float, n: int) -> bool:
    """Return True if a ring of n steps is faster than the collective and the products in turn.

    Each step computes 1/n of the products during 1/n of the communication.
    """
    itemsize = products[0].meta["dtype"].itemsize
    compute = sum(map(flops, products)) / hardware.rate(itemsize)
    link = hardware.links[0]
    step = link.latency + payload / n / link.bandwidth
    copies = 2 * sum(map(bytes_of, products)) / hardware.memory_bandwidth  # of results, joined
    apart = compute + link.latency + (n - 1) / n * payload / link.bandwidth
    return n > 1 and (n - 1) * max(compute / n, step) + compute / n + copies < GAIN * apart
