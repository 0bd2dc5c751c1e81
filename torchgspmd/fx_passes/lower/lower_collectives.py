"""A program's collectives as torch.distributed's functional collectives, for one rank.

before   %s = start(all_gather, [%x], [[0, data]]);  ...;  %y = wait(%s, 0)
after    %s = all_gather_into_tensor(%x, 2, g);  ...;  %y = wait_tensor(%s)
needs    start_wait, localize: the first inputs are a device's coordinates
ensures  coordinates are numbers, and arithmetic on them alone is done here

At its `start` a collective becomes the reshapes that bring its dimension to the front, and the
call. At its first `wait` it becomes torch.distributed's wait and the reshapes back. These are plain
nodes; no Python runs beside them. If only a run knows the operand's size, the collective is one
call that does all this, and waits.

Memory in flight: between its start and its wait a collective reads its operand and writes its
result. Nobody writes the operand, since programs do not write in place. The in-place all_reduce_
does, and is used only where nobody else reads the operand's memory. Only the wait reads the result.
torch.distributed keeps both alive. verify_in_flight.py checks this.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx

from ...comm.collective import CollectiveBuilder, Lowering, MergedLowering, start, wait
from ...comm.gloo_rewriter import GlooLimits, GlooRewriter
from ...comm.hosts import HostLevels, crosses_hosts, ranks_of_a_host
from ...comm.kinds import WIRE_OPS, FusedKind, collective_kinds
from ...comm.process_groups import ProcessGroups
from ...compat.fx_nodes import add_node
from ...compat.operators import aten, c10d
from ..loop_call import BodyCall

CARRIERS = {
    torch.int16: torch.float16,
    torch.uint16: torch.float16,
    torch.uint32: torch.int32,
    torch.uint64: torch.int64,
} | {getattr(torch, name): torch.uint8 for name in dir(torch) if name.startswith("float8_")}


def wire_dtypes(graph: fx.Graph) -> fx.Graph:
    """Send dtypes that gloo and NCCL do not support as others of the same size.

    before   %r = all_to_all_single(%x, ...);  %w = wait_tensor(%r)                 # %x is int16
    after    %v = view(%x, float16);  %r = all_to_all_single(%v, ...)
             %y = wait_tensor(%r);  %w = view(%y, int16)
    needs    one rank's program; meta["dtype"] on collectives
    ensures  reductions keep their dtype, but for complex sums: they are sums of real numbers
    """
    for node in graph.nodes:
        if node.target not in WIRE_OPS:
            continue
        dtype, reduces = node.meta["dtype"], WIRE_OPS[node.target].reduces
        # Both parts of a complex sum add up by themselves; those of a product do not.
        if dtype.is_complex and (not reduces or node.args[1] == "sum"):
            _convert(graph, node, (aten.view_as_real.default,), (aten.view_as_complex.default,))
        # Bits are copied unchanged, but added as numbers: a reduction needs the true dtype.
        elif dtype in CARRIERS and not reduces:
            _convert(graph, node, (aten.view.dtype, CARRIERS[dtype]), (aten.view.dtype, dtype))
    return graph


def _convert(graph: fx.Graph, node: fx.Node, encode: tuple, decode: tuple) -> None:
    """Encode a collective's operand and decode its result.

    encode and decode are an operation and its arguments after the first.
    """
    with graph.inserting_before(node):
        node.update_arg(0, graph.call_function(encode[0], (node.args[0], *encode[1:])))
    wait = next(iter(node.users))
    users = list(wait.users)
    with graph.inserting_after(wait):
        arrived = graph.call_function(decode[0], (wait, *decode[1:]))
    for user in users:
        user.replace_input_with(wait, arrived)


WITHIN = GlooLimits(few=2**21, many=2**62)  # for ranks that share memory
# A link between hosts is slow in both directions at once for one large message of gloo: of 4 MiB
# each way over 50 Mbit/s an exchange takes 0.9 to 1.3 s, in pieces 0.67, an all_reduce 0.66.
ACROSS = GlooLimits(few=2**18, many=2**18)


def gloo_all_to_all(graph: fx.Graph, groups: ProcessGroups) -> fx.Graph:
    """Lower collectives over gloo to all_to_all and arithmetic.

    Torch's own are slow or unsafe over gloo. Examples for two ranks, on rank 0:

    before   %r = reduce_scatter_tensor(%x, sum, 2, g);  %w = wait_tensor(%r)
    after    %r = all_to_all_single(%x, [1, 1], [1, 1], g);  %y = wait_tensor(%r)
             %w = sum(%y, [0], True)
    before   %r = all_reduce_(%x, sum, g);  %w = wait_tensor(%r)         # of few bytes
    after    %r = all_to_all_single(%x, [0, 8], [0, 8], g);  %y = wait_tensor(%r)
             %w = add_(%x, %y)
    before   %r = all_gather_into_tensor(%x, 2, g);  %w = wait_tensor(%r)
    after    %r = all_to_all_single(%x, [0, 8], [0, 8], g);  %y = wait_tensor(%r)
             %w = cat([%x, %y])
    needs    the program of one rank, operands contiguous; meta["shape"] and meta["dtype"] on
             collectives
    ensures  every rank has the same result, and sends the bytes that the plan says. One case sends
             more: an all_reduce of more than two ranks whose dtype no library reduces sends all
             terms to each.

    Fast: over gloo torch computes a reduce_scatter by an all_reduce, which sends twice the bytes.
    32 MB between two processes take 53 ms that way, 24 ms this way. A small all_reduce takes a
    process 0.8 ms, an exchange 0.3.

    Safe: gloo's two threads write the name of the work they finished into one string, without a
    lock (ProcessGroupGloo::runLoop, lastCompletedWorkName). A name of more than 15 characters lies
    on the heap, where one thread writes memory that the other has freed. The process dies of
    "malloc(): unaligned tcache chunk detected", once in some ten thousand overlapping collectives
    (torch 2.13.0 alone does). Of those in use only all_gather_into_tensor has such a name,
    ALLGATHER_COALESCED. With tensors of CUDA that operation ends the process at once (torch 2.11).
    """
    for node in graph.nodes:
        wire = WIRE_OPS.get(node.target)
        if wire is not None and wire.over_gloo is not None:
            # Neither gloo nor NCCL has these reductions.
            is_unsupported = wire.reduces and (
                (dtype := node.meta["dtype"]) in CARRIERS
                or dtype.is_complex
                and node.args[1] != "sum"
            )
            if groups.is_gloo or is_unsupported:
                limits = ACROSS if crosses_hosts(groups, node.args[-1]) else WITHIN
                wire.over_gloo(GlooRewriter(graph, node, groups, limits, is_unsupported))
    return graph


# Bytes of the payload. A further exchange inside a host takes 0.3 ms, as long as these bytes take
# at 7 Gbit/s.
LEAST = 2**18


def host_levels(graph: fx.Graph, groups: ProcessGroups) -> fx.Graph:
    """Split large collectives over gloo in two levels: inside hosts, and between them.

    before   %r = all_gather_into_tensor(%x, 4, g);  %w = wait_tensor(%r)   # hosts of two ranks
    after    %b = all_gather_into_tensor(%x, 2, across);  %y = wait_tensor(%b)
             %i = all_gather_into_tensor(%y, 2, inside);  %z = wait_tensor(%i)
             %w = permute(%z, ...)                                     # shards in order of ranks
    needs    the program of one rank, before gloo_all_to_all; meta["shape"] and meta["dtype"] on
             collectives
    ensures  a rank sends as many bytes, at most 1/n of them to other hosts that have n ranks each
    source   2-D gradient summation of arXiv 2011.03641

    Gloo knows no hosts: an exchange of n ranks a host sends each host a shard n times. NCCL's rings
    and trees follow hosts by themselves.
    """
    kinds = {w.op: k for k in collective_kinds().values() if k.over_hosts for w in k.wire}
    for node in list(graph.nodes) if groups.is_gloo and groups.hosts else ():
        if (kind := kinds.get(node.target)) is not None and kind.over_hosts is not None:
            name = node.args[-1]
            bytes_ = math.prod(node.meta["shape"]) * node.meta["dtype"].itemsize
            is_large = kind.payload_from(bytes_, groups.size(name)) >= LEAST
            if is_large and (each := ranks_of_a_host(groups, name)):
                kind.over_hosts(HostLevels(graph, node, groups, each))
    return graph


_MANY = 64  # lowered programs that a collective of any size keeps
_ARITHMETIC = {
    operator.add,
    operator.sub,
    operator.mul,
    operator.floordiv,
    operator.mod,
    operator.neg,
    operator.eq,
    operator.ne,
    operator.lt,
    operator.le,
    operator.gt,
    operator.ge,
}


def lower_collectives(
    graph: fx.Graph, groups: ProcessGroups, carriers: Collection[str] = ()
) -> fx.Graph:
    """Return one rank's program; its inputs are the input shards. carriers: see the builder."""
    return _Lowerer(graph, groups, carriers).run()


class _Lowerer(CollectiveBuilder):
    """Builder for one rank's program, node by node along the source graph."""

    def __init__(
        self, source: fx.Graph, groups: ProcessGroups, carriers: Collection[str] = ()
    ) -> None:
        super().__init__(groups, carriers)
        self.source = source

    def run(self) -> fx.Graph:
        new: dict[fx.Node, Any] = {}
        coordinates = dict(
            zip((n for n in self.source.nodes if n.op == "placeholder"), self.mesh.names)
        )
        for node in self.source.nodes:
            self.node = node
            if node in coordinates:
                new[node] = self.groups.coordinates[coordinates[node]]
            elif node.target is start:
                new[node] = self._start(node, new)
            elif node.target is wait:
                new[node] = self._with_meta(new[node.args[0]].results(self)[node.args[1]])
            elif isinstance(node.target, FusedKind):
                new[node] = self._with_meta(
                    node.target.lower(self, *fx.map_arg(node.args, new.__getitem__))
                )
            # Folded here, as every rank has its own program: nothing is left to compute per step.
            elif node.target in _ARITHMETIC and not any(
                isinstance(new.get(a, a), fx.Node) for a in node.args
            ):
                new[node] = node.target(
                    *(new.get(a, a) if isinstance(a, fx.Node) else a for a in node.args)
                )
            else:
                new[node] = self._copy(node, new)
        return self.graph

    def _start(self, node: fx.Node, new: dict[fx.Node, object]) -> _CollectiveInFlight:
        """Lower a start to the nodes up to its collective's call."""
        name, operands, arguments = node.args
        kind = collective_kinds()[name]
        shapes = [list(x.meta["shape"]) for x in operands]
        # The lowering needs numbers for its reshapes, so it has to wait for the run.
        if any(x.meta.get("unknown") for x in operands):
            arguments = fx.map_arg(arguments[0], new.__getitem__)
            collective = CollectiveOfAnySize(name, self.groups, operands[0].meta["dtype"])
            return _CollectiveInFlight(
                _at_once(self.call(collective, new[operands[0]], *arguments))
            )
        if len(operands) > 1:
            assert kind.merged is not None, f"no bucket has several {name}"
            lowering = kind.merged.lower(self, [new[x] for x in operands], shapes, arguments)
        else:
            lowering = _as_merged(kind.lower(self, new[operands[0]], shapes[0], *arguments[0]))
        return _CollectiveInFlight(lowering)

    def _copy(self, node: fx.Node, new: dict[fx.Node, object]) -> fx.Node:
        args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), new.__getitem__)
        copy = add_node(self.graph, node.op, node.target, args, kwargs, node.name)
        copy.meta.update(node.meta)
        if isinstance(node.target, BodyCall):
            node.target.connect(self.groups)
        return copy

    def _with_meta(self, result: fx.Node) -> fx.Node:
        """Give a lowering's result the lowered node's metadata."""
        result.meta = dict(self.node.meta)
        return result


class _CollectiveInFlight:
    """A collective between its start and its wait."""

    def __init__(self, lowering: MergedLowering) -> None:
        self.lowering = lowering
        self.output: list[fx.Node] | None = None
        try:
            self.begun = next(lowering)
        except StopIteration as done:  # This rank sends nothing.
            self.output = done.value

    def results(self, builder: CollectiveBuilder) -> list[fx.Node]:
        """Return the results, after a wait that the first caller adds."""
        if self.output is None:
            try:
                # The lowering is a generator: it yields the message, and goes on with the received
                # tensor.
                self.lowering.send(builder.call(c10d.wait_tensor.default, self.begun))
            except StopIteration as done:
                self.output = done.value
        assert self.output is not None, "a lowering sends one message"
        return self.output


class CollectiveOfAnySize:
    """A collective on values whose size only a run knows: it is lowered when the size is known."""

    sends = True

    def __init__(self, kind: str, groups: ProcessGroups, dtype: torch.dtype) -> None:
        self.kind, self.groups, self.dtype = kind, groups, dtype
        self.__name__ = f"{kind}_of_any_size"
        self.programs: dict[tuple, fx.GraphModule] = {}  # by shape and arguments

    def __call__(self, x: Tensor, *args: object) -> Tensor:
        """Return the collective's result. args: those of its kind."""
        key = (tuple(x.shape), repr(args))
        if key not in self.programs:
            # Bounded: a long job may meet ever new sizes. The oldest program goes first.
            if len(self.programs) == _MANY:
                self.programs.pop(next(iter(self.programs)))
            self.programs[key] = self._lower(x, args)
        return self.programs[key].forward(x)[0]

    def _lower(self, x: Tensor, args: tuple) -> fx.GraphModule:
        """Return one rank's program that communicates and waits."""
        graph = fx.Graph()
        for name in self.groups.mesh.names:
            graph.placeholder(f"coordinate_{name}")
        operand = graph.placeholder("x")
        begun = graph.call_function(start, (self.kind, [operand], [list(args)]))
        graph.output((graph.call_function(wait, (begun, 0)),))
        for node in graph.nodes:
            node.meta = {"shape": tuple(x.shape), "dtype": self.dtype, "backward": False}
        lowered = _Lowerer(graph, self.groups).run()
        lowered = gloo_all_to_all(host_levels(lowered, self.groups), self.groups)
        return fx.GraphModule(torch.nn.Module(), wire_dtypes(lowered))


def _at_once(result: fx.Node) -> MergedLowering:
    """Return the lowering for a collective that one call computes."""
    return [result]
    # Never reached: it makes the function a generator, as lowerings are.
    yield


def _as_merged(lowering: Lowering) -> MergedLowering:
    """Return one collective's lowering, with its result in a list."""
    return [(yield from lowering)]
