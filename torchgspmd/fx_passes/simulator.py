"""Lockstep simulator: a mesh's devices in one process, without a process group.

Every node runs on each device before the next node. Values are lists with one tensor per device.
Collectives are computed on these lists by their kinds' `simulate`.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..comm.collective import start
from ..comm.kinds import CollectiveKind, FusedKind, collective_kinds
from ..comm.local_ops import pad_rows, part_order, take_part, user_order
from ..comm.profiled_code import limit_of
from ..compat.operators import draws
from ..errors import ShardingError, outside_error
from ..layout.mesh import Mesh
from ..shard_spec import ShardSpec
from .loop_call import BodyCall, LoopCall


class Simulator(fx.Interpreter):
    """Interprets a device program for all devices; inputs and results are lists over these.

    graph: another than the program's. No GraphModule is needed, whose code nobody would run.
    """

    def __init__(self, program: nn.Module, mesh: Mesh, graph: fx.Graph | None = None) -> None:
        super().__init__(program, graph=graph)
        self.mesh = mesh
        self.node: fx.Node  # that runs

    def run_node(self, n: fx.Node) -> Any:
        self.node = n
        return super().run_node(n)

    def run_devices(self, inputs: Sequence[list], sizes: Sequence[int] = ()) -> Any:
        """Run on all devices' inputs. sizes: the argument sizes that the program takes."""
        coordinates = [self.mesh.coordinates(rank) for rank in range(self.mesh.size)]
        places = [[c[name] for c in coordinates] for name in self.mesh.names]
        places += [[size] * self.mesh.size for size in sizes]
        try:
            return self.run(*map(_PerDevice, places), *map(_PerDevice, inputs))
        except (IndexError, RuntimeError) as error:
            if (outside := self.outside_error(error)) is not None:
                raise outside from error
            raise

    def outside_error(self, error: Exception) -> ShardingError | None:
        """Return the error for an index that the last node found outside of its table."""
        meta, devices = self.node.meta, [self.env.get(n) for n in self.node.all_input_nodes]
        operands = [x for values in devices if isinstance(values, list) for x in values]
        module = str(meta.get("module") or "").rpartition("/")[2]
        return outside_error(error, meta.get("source"), module, limit_of(self.node), operands)

    def get_attr(self, target: str, args: tuple, kwargs: dict) -> list:
        return _PerDevice([super().get_attr(target, args, kwargs)] * self.mesh.size)

    def call_function(self, target: Any, args: tuple, kwargs: dict) -> list:
        if target is start:
            name, operands, arguments = args
            numbers = _map(arguments, operator.itemgetter(0))  # the same on all devices
            kind = collective_kinds()[name]
            results = [self.collective(kind, x, rest) for x, rest in zip(operands, numbers)]
            return _PerDevice(zip(*results))
        if isinstance(target, CollectiveKind):
            numbers = _map(args[1:], operator.itemgetter(0))
            return _PerDevice(self.collective(target, args[0], numbers))
        if isinstance(target, FusedKind):
            return _PerDevice(target.simulate(self.mesh, *args, **kwargs))
        if isinstance(target, LoopCall):
            return self.run_loop(target, args, self.node.meta.get("source"))
        if isinstance(target, BodyCall):
            devices = [_map(args, operator.itemgetter(i)) for i in range(self.mesh.size)]
            return _PerDevice(target.simulate(self.mesh, devices, self.run_body))
        state = torch.get_rng_state() if draws(target) else None
        results = []
        for device in range(self.mesh.size):
            if state is not None:
                torch.set_rng_state(state)  # all devices draw the same numbers
            mine = operator.itemgetter(device)
            results.append(self.call(target, _map(args, mine), _map(kwargs, mine)))
        return _PerDevice(results)

    def call(self, target: Any, args: tuple, kwargs: dict) -> Any:
        """Run an operation on one device; return its result."""
        return target(*args, **kwargs)

    def collective(
        self, kind: CollectiveKind, x: list[Tensor], arguments: Sequence[Any]
    ) -> list[Tensor]:
        """Run a collective; return its results on all devices."""
        return kind.simulate(self.mesh, x, *arguments)

    def inner(self, graph: fx.Graph) -> Simulator:
        return Simulator(nn.Module(), self.mesh, graph)

    def run_loop(self, call: LoopCall, args: tuple, where: str | None) -> list:
        bodies = [self.inner(graph) for graph in call.graphs()]
        devices = range(self.mesh.size)
        loops = [call.runs(*_map(args, operator.itemgetter(i))) for i in devices]
        values: list[list] | None = None
        while True:
            inputs, results, which = [], [], 1
            for i, loop in enumerate(loops):
                try:
                    sent = None if values is None else [column[i] for column in values]
                    which, values_in = next(loop) if sent is None else loop.send(sent)
                    inputs.append(values_in)
                except StopIteration as done:
                    results.append(done.value)
            if not inputs:
                return _PerDevice(results)
            if results:
                # Devices that left the loop would not take part in its collectives.
                raise ShardingError(
                    f"{call.__name__} ends on {len(results)} of {len(loops)} devices",
                    where=where,
                    why="what decides on a branch or a loop has other values on other devices",
                    fix="reduce it before",
                )
            values = bodies[which].run_devices([list(column) for column in zip(*inputs)])

    def run_body(
        self, graph: fx.Graph, inputs: Sequence[list], at: Mapping[int, Sequence[int]]
    ) -> list[list]:
        """Run a body on all devices; return each device's results."""
        values = self.inner(graph).run_devices(inputs)
        return [[column[i] for column in values] for i in range(self.mesh.size)]

    def output(self, target: object, args: tuple, kwargs: dict) -> Any:
        return args[0]


class _PerDevice(list):
    """List with one value per device; other lists are an operation's arguments."""


def _map(args: object, mine: Callable) -> Any:
    """Replace the per-device values in arguments by one device's."""
    if isinstance(args, _PerDevice):
        return mine(args)
    if isinstance(args, (tuple, list)):
        return type(args)(_map(a, mine) for a in args)
    if isinstance(args, dict):
        return {k: _map(a, mine) for k, a in args.items()}
    return args


def split_global(
    tensor: Tensor, spec: ShardSpec, mesh: Mesh, poison: bool = False, groups: Sequence[int] = ()
) -> list[Tensor]:
    """Split a global tensor into its shards.

    poison: pad with NaN to detect leaking padding. groups: for each dimension, how many rows stay
    together.
    """
    shards, groups, tensor = [], groups or [1] * tensor.dim(), part_order(tensor, spec, mesh)
    for rank in range(mesh.size):
        shard, c = tensor, mesh.coordinates(rank)
        for d, axes in enumerate(spec.dims):
            if axes:
                count, group = mesh.count(axes), groups[d]
                rows = -(-tensor.shape[d] // (count * group)) * count * group
                fill = float("nan") if poison and shard.is_floating_point() else 0.0
                shard = pad_rows(shard, d, rows, fill)
                shard = take_part(shard, d, mesh.index(axes, c), count, group)
        shards.append(shard)
    return shards


def join_global(shards: list[Tensor], spec: ShardSpec, shape: Sequence[int], mesh: Mesh) -> Tensor:
    """Return the global tensor of shards; replicas must agree."""
    rows = tuple(shards[0].shape)  # of a shard, which may have whole groups of rows
    result = shards[0].new_empty([n * mesh.count(axes) for n, axes in zip(rows, spec.dims)])
    for rank in reversed(range(mesh.size)):
        c = mesh.coordinates(rank)
        where = tuple(
            slice(mesh.index(axes, c) * n, (mesh.index(axes, c) + 1) * n)
            for n, axes in zip(rows, spec.dims)
        )
        result[where] = shards[rank]
    result = result[tuple(slice(0, n) for n in shape)]
    return user_order(result, spec, mesh).contiguous()
