"""All devices' programs, evaluated in lockstep, with their own collectives table.

A value that says which value in the partitioned graph it is (meta "value") is a claim.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import torch
from torch import Tensor, fx, nn

from ...comm.kinds import CollectiveKind
from ...errors import ShardingError
from ...fx_passes.simulator import Simulator
from ...layout.halo_window import Window
from ...layout.mesh import Mesh
from ...shard_spec import ShardSpec
from .claimed_layouts import COMBINE, cut, gathered, poison
from .one_device import drawn


@dataclass(frozen=True)
class At:
    """Where devices are in a stage's loop; empty where all compute the same iteration.

    microbatches: of the devices that have work; two, where a forward and a backward are one
    program. depth: how many loops are around the stages.
    """

    microbatches: Mapping[int, Sequence[int]] = field(default_factory=dict)
    depth: int = 0

    def of(self, node: fx.Node) -> dict[int, int]:
        """Return the microbatches of a node's devices."""
        which = -1 if node.meta.get("backward") else 0
        return {device: each[which] for device, each in self.microbatches.items()}


Claim = Callable[[str, fx.Node, list[Tensor], At], None]
"""Takes a node's path through the loops, the node, its shards, and where the devices are."""


def _in_groups(
    mesh: Mesh, axes: str, x: list[Tensor], run: Callable[[list[Tensor]], list[Tensor]]
) -> list[Tensor]:
    results = list(x)
    for group in mesh.groups(tuple(axes.split("+"))):
        for rank, value in zip(group, run([x[r] for r in group])):
            results[rank] = value
    return results


def _parts(x: Tensor, dim: int, count: int) -> list[Tensor]:
    """Cut a dimension into equal parts; the last ones are padded."""
    rows = -(-x.shape[dim] // count)
    missing = rows * count - x.shape[dim]
    if missing:
        shape = [*x.shape]
        shape[dim] = missing
        # Poison, so that a value which reads the padding is found.
        x = torch.cat([x, poison(shape, x)], dim)
    return list(x.split(rows, dim))


def _all_gather(mesh: Mesh, x: list[Tensor], dim: int, axes: str) -> list[Tensor]:
    return _in_groups(mesh, axes, x, lambda shards: [torch.cat(shards, dim)] * len(shards))


def _all_reduce(mesh: Mesh, x: list[Tensor], reduction: str, axes: str) -> list[Tensor]:
    combine = COMBINE[reduction]
    return _in_groups(mesh, axes, x, lambda terms: [reduce(combine, terms)] * len(terms))


def _reduce_scatter(
    mesh: Mesh, x: list[Tensor], reduction: str, dim: int, axes: str
) -> list[Tensor]:
    combine = COMBINE[reduction]
    return _in_groups(mesh, axes, x, lambda terms: _parts(reduce(combine, terms), dim, len(terms)))


def _all_to_all(mesh: Mesh, x: list[Tensor], gather: int, scatter: int, axes: str) -> list[Tensor]:
    def run(shards: list[Tensor]) -> list[Tensor]:
        parts = [_parts(shard, scatter, len(shards)) for shard in shards]
        return [torch.cat([each[i] for each in parts], gather) for i in range(len(shards))]

    return _in_groups(mesh, axes, x, run)


def _exchange(
    mesh: Mesh, x: list[Tensor], before: str, after: str, shape: Sequence[int]
) -> list[Tensor]:
    """Exchange boxes. Devices with different terms of a pending sum exchange apart."""
    here, there = ShardSpec.parse(before), ShardSpec.parse(after)
    results = list(x)
    apart = mesh.groups(here.pending) if here.pending else ([rank] for rank in range(mesh.size))
    # One device of each group: together they hold one term of the sum.
    terms = list(zip(*apart)) if here.pending else [range(mesh.size)]
    for ranks in terms:
        shards = cut(gathered(x, here.with_pending(()), mesh, shape, ranks), there, mesh, ranks)
        for rank, shard in zip(ranks, shards):
            results[rank] = shard
    return results


def _halo(mesh: Mesh, x: list[Tensor], dim: int, axes: str, text: str, size: int) -> list[Tensor]:
    window = Window.parse(text)

    def run(shards: list[Tensor]) -> list[Tensor]:
        # Without the padding behind the last rows, which is no neighbor's row.
        whole = torch.cat(shards, dim).narrow(dim, 0, size)
        lay = ShardSpec.replicated(whole.dim()).with_window(dim, window)
        return [_window(whole, lay, dim, i) for i in range(len(shards))]

    return _in_groups(mesh, axes, x, run)


def _window(whole: Tensor, spec: ShardSpec, dim: int, index: int) -> Tensor:
    window = spec.window(dim)
    assert window is not None
    shape = [*whole.shape]
    shape[dim] = window.length
    result = poison(shape, whole)
    if window.fill is not None:
        result.fill_(window.fill)
    for k in range(window.length):
        row = window.first(index) + k
        if window.begin <= row < window.end:
            source = row % window.wrap if window.wrap else row
            result.select(dim, k).copy_(whole.select(dim, source))
    return result


# Written anew, not shared with comm/: a fault there must not hide itself.
COLLECTIVES: dict[str, Callable[..., list[Tensor]]] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "permute": _exchange,
    "halo": _halo,
    "halos": _exchange,
}


class DeviceError(Exception):
    """A node fails on some device, in the innermost loop that has it."""

    def __init__(self, node: fx.Node, error: Exception) -> None:
        super().__init__(str(error).partition("\n")[0])
        self.node = node


class Devices(Simulator):
    """Evaluates the one-device program on all devices."""

    def __init__(
        self,
        program: nn.Module,
        mesh: Mesh,
        graph: fx.Graph,
        claims: Claim,
        path: str = "",
        at: At = At(),  # noqa: B008
    ) -> None:
        super().__init__(program, mesh, graph)
        self.claims, self.path, self.at = claims, path, at
        self.pieces: dict[fx.Graph, int] = {}  # of stages, numbered
        # fx would put the node's text in front of the error.
        self.extra_traceback = False

    def inner(self, graph: fx.Graph) -> Devices:
        path = f"{self.path}{self.node}/"
        return Devices(nn.Module(), self.mesh, graph, self.claims, path, self.at)

    def run_body(
        self, graph: fx.Graph, inputs: Sequence[list], at: Mapping[int, Sequence[int]]
    ) -> list[list]:
        """Run a piece of a stage; devices without work have poison."""
        number = self.pieces.setdefault(graph, len(self.pieces))
        path, where = f"{self.path}{self.node}:{number}/", At(at, self.path.count("/"))
        body = Devices(nn.Module(), self.mesh, graph, self.claims, path, where)
        values = body.run_devices(inputs)
        return [[column[i] for column in values] for i in range(self.mesh.size)]

    def run_node(self, n: fx.Node) -> Any:
        try:
            result = super().run_node(n)
        except (ShardingError, DeviceError):
            raise
        except Exception as error:
            raise DeviceError(n, error) from error
        # The inputs of a body come from outside, or from the iteration before.
        is_input = n.op == "placeholder" and self.path
        if n.op != "output" and not is_input and {"value", "spec"} <= n.meta.keys() and result:
            if all(isinstance(x, Tensor) for x in result):
                self.claims(f"{self.path}{n}", n, list(result), self.at)
        return result

    def collective(
        self, kind: CollectiveKind, x: list[Tensor], arguments: Sequence[Any]
    ) -> list[Tensor]:
        """Run a collective by the table here; a user's kind has its own."""
        return COLLECTIVES.get(kind.name, kind.simulate)(self.mesh, x, *arguments)

    def call(self, target: Any, args: tuple, kwargs: dict) -> Any:
        # Seeded by the value's name, as on one device: both draw the same numbers.
        return drawn(target, self.node.meta.get("value", self.node.name), args, kwargs)


class StageShards:
    """Keeps shards until all devices that a comparison needs have come to their microbatch.

    Stages of a pipeline compute one microbatch at different times.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh = mesh
        # How often a device has computed a claim for a microbatch: a stage may have loops.
        self.turns: dict[tuple[str, int, int], int] = {}
        self.held: dict[tuple[str, int, int], dict[int, Tensor]] = {}

    def complete(
        self, path: str, shards: Sequence[Tensor], spec: ShardSpec, at: Mapping[int, int]
    ) -> Iterator[tuple[int, int, list[Tensor], list[int]]]:
        """Take shards; yield (microbatch, turn, shards, devices) of sums that have all terms."""
        groups = {rank: group for group in self.mesh.groups(spec.pending) for rank in group}
        for rank, microbatch in at.items():
            turn = self.turns.get((path, rank, microbatch), 0)
            self.turns[path, rank, microbatch] = turn + 1
            held = self.held.setdefault((path, microbatch, turn), {})
            held[rank] = shards[rank]
            if all(other in held for other in groups[rank]):
                terms = {other: held.pop(other) for other in groups[rank]}
                # Nobody compares devices outside of the group.
                filled = [terms.get(r, shards[rank]) for r in range(self.mesh.size)]
                yield microbatch, turn, filled, [*terms]
