"""Lockstep simulator: all devices of a mesh in one process, without a process group.

Every node runs on each device before the next node. Values are lists with one tensor per device.
Collectives are computed on these lists.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx

from ..compat.private_apis import OpOverload
from ..halo import Window
from ..mesh import Mesh
from ..shard_spec import ShardSpec
from .box_exchange import exchange, pack, unpack
from .collective import (
    SENDING,
    all_gather,
    all_reduce,
    all_to_all,
    halo,
    permute,
    reduce_scatter,
    split_axes,
    start,
)
from .local_ops import join_pieces, take_part
from .ring_einsum import einsum_scatter, gather_einsum

COMBINE: dict[str, Callable] = {
    "sum": operator.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "prod": operator.mul,
}


class Simulator(fx.Interpreter):
    """Interpreter of a device program for all devices; inputs and results are lists over these."""

    def __init__(self, program: fx.GraphModule, mesh: Mesh) -> None:
        super().__init__(program)
        self.mesh = mesh

    def run_devices(self, inputs: Sequence[list]) -> Any:
        coordinates = [self.mesh.coordinates(rank) for rank in range(self.mesh.size)]
        places = [[c[name] for c in coordinates] for name in self.mesh.names]
        return self.run(*map(_PerDevice, places), *map(_PerDevice, inputs))

    def get_attr(self, target: str, args: tuple, kwargs: dict) -> list:
        return _PerDevice([super().get_attr(target, args, kwargs)] * self.mesh.size)

    def call_function(self, target: Any, args: tuple, kwargs: dict) -> list:
        if target is start:
            kind, operands, arguments = args
            results = [
                _COLLECTIVES[SENDING[kind]](self.mesh, x, *rest)
                for x, rest in zip(operands, arguments)
            ]
            return _PerDevice(zip(*results))
        if target in _COLLECTIVES:
            return _PerDevice(_COLLECTIVES[target](self.mesh, *args, **kwargs))
        random = isinstance(target, OpOverload) and torch.Tag.nondeterministic_seeded in target.tags
        state = torch.get_rng_state() if random else None
        results = []
        for device in range(self.mesh.size):
            if random:
                torch.set_rng_state(state)  # all devices draw the same numbers
            mine = operator.itemgetter(device)
            results.append(target(*_map(args, mine), **_map(kwargs, mine)))
        return _PerDevice(results)

    def output(self, target: Any, args: tuple, kwargs: dict) -> Any:
        return args[0]


class _PerDevice(list):
    """List with one value per device; other lists are arguments of an operation."""


def _map(args: Any, mine: Callable) -> Any:
    """Replace the per-device values in arguments by those of one device."""
    if isinstance(args, _PerDevice):
        return mine(args)
    if isinstance(args, (tuple, list)):
        return type(args)(_map(a, mine) for a in args)
    if isinstance(args, dict):
        return {k: _map(a, mine) for k, a in args.items()}
    return args


def _in_groups(
    axes: str, mesh: Mesh, x: list[Tensor], run: Callable[[list[Tensor]], list[Tensor]]
) -> list[Tensor]:
    """Apply `run` to the tensors of every group of devices over `axes`."""
    results: list[Any] = [None] * mesh.size
    for group in mesh.groups(split_axes(axes)):
        for rank, result in zip(group, run([x[rank] for rank in group])):
            results[rank] = result
    return results


def _all_reduce(mesh: Mesh, x: list[Tensor], reduction: str, axes: str) -> list[Tensor]:
    return _in_groups(
        axes, mesh, x, lambda terms: [functools.reduce(COMBINE[reduction], terms)] * len(terms)
    )


def _all_gather(mesh: Mesh, x: list[Tensor], dim: int, axes: str) -> list[Tensor]:
    return _in_groups(axes, mesh, x, lambda shards: [torch.cat(shards, dim)] * len(shards))


def _reduce_scatter(
    mesh: Mesh, x: list[Tensor], reduction: str, dim: int, axes: str
) -> list[Tensor]:
    def run(terms: list[Tensor]) -> list[Tensor]:
        total = functools.reduce(COMBINE[reduction], terms)
        return [take_part(total, dim, i, len(terms)) for i in range(len(terms))]

    return _in_groups(axes, mesh, x, run)


def _all_to_all(
    mesh: Mesh, x: list[Tensor], gather_dim: int, scatter_dim: int, axes: str
) -> list[Tensor]:
    def run(shards: list[Tensor]) -> list[Tensor]:
        return [
            torch.cat([take_part(x, scatter_dim, i, len(shards)) for x in shards], gather_dim)
            for i in range(len(shards))
        ]

    return _in_groups(axes, mesh, x, run)


def _permute(
    mesh: Mesh, x: list[Tensor], before: str, after: str, shape: tuple[int, ...]
) -> list[Tensor]:
    plan = exchange(mesh, tuple(shape), ShardSpec.parse(before), ShardSpec.parse(after))
    transfers = [plan.transfer(mesh.coordinates(rank)) for rank in range(mesh.size)]
    results: list[Any] = [None] * mesh.size
    for group in mesh.groups(plan.axes):
        for place, rank in enumerate(group):
            arriving = [transfers[r].sends[place] for r in group]
            boxes = [pack(x[r], [box]) for r, box in zip(group, arriving) if box is not None]
            moved = torch.cat(boxes) if boxes else x[rank].new_empty(0)
            results[rank] = unpack(
                x[rank],
                moved,
                [b for b in transfers[rank].receives if b is not None],
                transfers[rank].keep,
                transfers[rank].shape,
                math.nan if moved.is_floating_point() else 0,
            )
    return results


def _halo(mesh: Mesh, x: list[Tensor], dim: int, axes: str, text: str, size: int) -> list[Tensor]:
    window = Window.parse(text)

    def run(shards: list[Tensor]) -> list[Tensor]:
        def window_of(index: int) -> Tensor:
            pieces = [
                (place, shards[owner].narrow(dim, row, rows))
                for owner, row, place, rows in window.pieces(index, size, len(shards))
            ]
            return join_pieces(
                pieces, window, dim, shards[0], math.nan if shards[0].is_floating_point() else 0
            )

        return [window_of(i) for i in range(len(shards))]

    return _in_groups(axes, mesh, x, run)


def _gather_einsum(
    mesh: Mesh,
    x: list[Tensor],
    others: Sequence[list[Tensor]],
    dim: int,
    axes: str,
    equations: Sequence[str],
    sides: Sequence[int],
    keep: bool,
) -> list[tuple[Tensor, ...]]:
    whole = _all_gather(mesh, x, dim, axes)
    results = [
        [torch.einsum(equation, *((y, w) if side else (w, y))) for w, y in zip(whole, other)]
        for equation, side, other in zip(equations, sides, others)
    ]
    return list(zip(*results, *([whole] if keep else [])))


def _einsum_scatter(
    mesh: Mesh, a: list[Tensor], b: list[Tensor], dim: int, axes: str, equation: str
) -> list[Tensor]:
    return _reduce_scatter(
        mesh, [torch.einsum(equation, x, y) for x, y in zip(a, b)], "sum", dim, axes
    )


_COLLECTIVES: dict[Callable, Callable] = {
    all_reduce: _all_reduce,
    all_gather: _all_gather,
    reduce_scatter: _reduce_scatter,
    all_to_all: _all_to_all,
    halo: _halo,
    permute: _permute,
    gather_einsum: _gather_einsum,
    einsum_scatter: _einsum_scatter,
}


def split_global(tensor: Tensor, spec: ShardSpec, mesh: Mesh, poison: bool = False) -> list[Tensor]:
    """Return the shards of a global tensor. poison: pad with NaN to detect leaking padding."""
    shards = []
    for rank in range(mesh.size):
        shard, c = tensor, mesh.coordinates(rank)
        for d, axes in enumerate(spec.dims):
            if axes:
                count = mesh.count(axes)
                rows = -(-tensor.shape[d] // count) * count
                if rows != shard.shape[d]:
                    fill = float("nan") if shard.is_floating_point() else 0
                    shard = F.pad(
                        shard,
                        [0, 0] * (shard.dim() - 1 - d) + [0, rows - shard.shape[d]],
                        value=fill if poison else 0,
                    )
                shard = take_part(shard, d, mesh.index(axes, c), count)
        shards.append(shard)
    return shards


def join_global(shards: list[Tensor], spec: ShardSpec, shape: Sequence[int], mesh: Mesh) -> Tensor:
    """Return the global tensor of shards; replicas must agree."""
    rows = spec.local_shape(shape, mesh)
    result = shards[0].new_empty([n * mesh.count(axes) for n, axes in zip(rows, spec.dims)])
    for rank in reversed(range(mesh.size)):
        c = mesh.coordinates(rank)
        where = tuple(
            slice(mesh.index(axes, c) * n, (mesh.index(axes, c) + 1) * n)
            for n, axes in zip(rows, spec.dims)
        )
        result[where] = shards[rank]
    return result[tuple(slice(0, n) for n in shape)].contiguous()
