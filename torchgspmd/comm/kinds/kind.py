"""Row types: Kind, for collectives and for the other steps between layouts.

A kind is the target of its nodes. It cannot be called: code that meets one in a graph asks it for
`simulate`, `localize` or `lower`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, NoReturn, Protocol

from torch import Tensor, fx

from ...compat.private_apis import OpOverload
from ...layout.mesh import Mesh
from ...shard_spec import Axes, ShardSpec
from ..collective import Lowering, MergedLowering, split_axes
from ..gloo_rewriter import GlooRewriter
from ..hosts import HostLevels


class ReshardProblem(Protocol):
    """A value that is to be laid out as `after`: partition.reshard_search.ReshardSearch."""

    mesh: Mesh
    shape: tuple[int, ...]
    itemsize: int  # bytes
    after: ShardSpec

    @property
    def targets(self) -> tuple[ShardSpec, ...]:
        """The layout `after`, and layouts from which a gather leads there."""
        ...

    def shard_bytes(self, spec: ShardSpec) -> float:
        """Count one shard's bytes."""
        ...

    def padded_bytes(self, spec: ShardSpec, dim: int, axes: Axes) -> float:
        """Count a shard's bytes, with a dimension padded to a multiple of further axes."""
        ...

    def nests(self, dim: int, coarse: Axes, fine: Axes) -> bool:
        """Return whether a dimension's fine shards lie within coarse ones."""
        ...

    def remaining_cost(self, spec: ShardSpec) -> float:
        """Return a lower bound on the cost from a layout to `after`."""
        ...

    def fee(self, kind: CollectiveKind) -> float:
        """Return a step's cost besides the bytes sent."""
        ...


class LocalSteps(Protocol):
    """Builds one step's local nodes: fx_passes.localize.StepEmitter."""

    shape: tuple[int, ...]  # the value's, global

    def sizes(self, x: fx.Node) -> tuple[Any, ...]:
        """Return the global shape, with nodes for sizes that only a run knows."""
        ...

    def call(self, op: Callable[..., Any], *args: Any) -> fx.Node:
        """Return a new node that calls an operation."""
        ...

    def collective(self, *args: object) -> fx.Node:
        """Return a new node whose target is the step's own kind."""
        ...

    def index(self, axes: str) -> fx.Node:
        """Return the node that gives the device's position along `axes`."""
        ...

    def count(self, axes: str) -> int:
        """Count the devices along `axes`."""
        ...

    def shard_rows(self, dim: int) -> fx.Node:
        """Return the rows that a shard has after the step, for a size that only a run knows."""
        ...

    def padded(self, x: fx.Node, dim: int) -> fx.Node:
        """Return a padded value, whose shards of a dimension have whole row groups.

        Only a dimension whose size a run knows has groups: n rows flattened with 3 others.
        """
        ...

    def exchange(self, x: fx.Node, before: str, after: str) -> fx.Node:
        """Return a new node whose target is the step's own kind, from one layout to another.

        Its last argument is the global shape.
        """
        ...

    def trimmed(self, gathered: fx.Node, dim: int) -> fx.Node:
        """Return a value without the padding in a dimension that was gathered whole."""
        ...


@dataclass(frozen=True)
class Step:
    """One move: all_to_all(x, 0, 1, data) leads from [data, _] to [_, data].

    args: the arguments after the tensor. spec: the layout after the step.
    """

    target: StepKind
    args: tuple[Any, ...]
    spec: ShardSpec
    axes: Axes
    payload: float = 0.0  # bytes
    sent: float = 0.0  # bytes a device sends

    @property
    def kind(self) -> str:
        """Return the kind's name."""
        return self.target.name

    @property
    def collective(self) -> str | None:
        """Return the kind that a plan reports; None if nothing is sent."""
        kind = self.target
        # A halo whose windows need no other shard sends nothing, so a plan does not list it.
        if not isinstance(kind, CollectiveKind) or kind.counts_as and not self.sent:
            return None
        return kind.counts_as or kind.name


@dataclass(frozen=True)
class WireOp:
    """An operation by which the ranks communicate.

    reduces: it computes with the payload, by the reduction that is its second argument. functional:
    the operation that does the same without writing over its operand, if it does that. over_gloo:
    rewrites the call between CPU processes.
    """

    op: OpOverload
    reduces: bool = False
    functional: OpOverload | None = None
    over_gloo: Callable[[GlooRewriter], None] | None = None


@dataclass(frozen=True)
class MergedForm:
    """How several collectives of one kind are sent as one.

    shared: positions, after the tensor, at which merged collectives have the same argument.
    """

    shared: tuple[int, ...]
    lower: Callable[..., MergedLowering]  # (builder, operands, local shapes, arguments by operand)


def unset(*_: object) -> NoReturn:
    """Stand for a function that a row lacks."""
    raise NotImplementedError(
        "this kind of collective is not complete; tests/test_kinds.py says why"
    )


def no_moves(problem: ReshardProblem, spec: ShardSpec, left: float) -> Iterator[Step]:
    """Yield nothing: no search takes this kind's steps."""
    yield from ()


def localize_unchanged(build: LocalSteps, *args: object) -> fx.Node:
    """Return a step's local form: the same call."""
    return build.collective(*args)


def rename_axes(
    args: tuple[object, ...], axes: Axes, rename: Callable[[Axes], Axes]
) -> tuple[object, ...]:
    """Return a step's arguments, with its `axes` renamed."""
    return tuple("+".join(rename(axes)) if arg == "+".join(axes) else arg for arg in args)


def rename_specs(
    args: tuple[Any, ...], axes: Axes, rename: Callable[[Axes], Axes]
) -> tuple[object, ...]:
    """Return a step's arguments, which are layouts, with axes renamed."""
    return tuple(str(ShardSpec.parse(text).map_axes(rename)) for text in args)


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Kind:
    """A node kind, and its nodes' target.

    signature: an example that the tests run, such as all_gather(f32[8@a, 6], 0, a) -> f32[8, 6].
    meaning: its effect, and its meaning on one device. picture: devices before and after. feature:
    the folder in features/ that the row belongs to; "core" for none.
    """

    name: str
    feature: str = "core"
    signature: str = ""
    meaning: str = ""
    picture: str = ""

    @property
    def __name__(self) -> str:
        """Return the name that fx gives to nodes."""
        return self.name

    def __str__(self) -> str:
        return self.name

    __repr__ = __str__

    def __call__(self, *_: object) -> NoReturn:
        raise RuntimeError(
            f"{self.name} is a node of a plan's graph; run it with Plan.simulate or parallelize"
        )

    def missing(self) -> list[str]:
        """Return the attributes that the row lacks though it has to have them."""
        # None is a value here: some rows have no merged form and no name in XLA.
        return [f.name for f in fields(self) if getattr(self, f.name) in ("", (), unset)]


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class StepKind(Kind):
    """A step from one layout to another.

    suffix: ends a value's name behind the step. moves: yields the steps from a layout that a search
    may take, but for those that cost `left` or more. localize: returns the node in one device's
    program, from (builder, operand, *arguments). rename: returns the arguments with axes renamed.
    gathers: devices get others' shards, and keep all they have. relays: devices pass received
    values on, or their sum, so that it enters a host once.
    """

    suffix: str = ""
    moves: Callable[[ReshardProblem, ShardSpec, float], Iterator[Step]] = no_moves
    localize: Callable[..., fx.Node] = localize_unchanged
    rename: Callable[[tuple[Any, ...], Axes, Callable[[Axes], Axes]], tuple[Any, ...]] = rename_axes
    gathers: bool = False
    relays: bool = False


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class LocalStepKind(StepKind):
    """A step that sends nothing: `localize` gives operations on one device."""

    localize: Callable[..., fx.Node] = unset


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class CollectiveKind(StepKind):
    """A step by which devices communicate.

    payload: names the tensor that is the payload. sent: returns the bytes that a device sends, from
    the payload's bytes and the number of devices in a group. fee: the constant that it costs
    besides, a name in fx_passes/partition/cost_constants.py. simulate: returns all devices'
    results, from (mesh, all devices' operands, *arguments). lower: see Lowering. merged: None if a
    bucket cannot have it. wire: all operations that `lower` and `merged` communicate by.

    reduces: it adds up terms, by the reduction that is its first argument. sliced: the kind that
    does the same if devices use only their slices. counts_as: the kind that a plan reports instead,
    where bytes are sent. over_hosts: replaces it by collectives in two levels, if that sends fewer
    bytes between hosts. xla: its name in XLA; payload_from: the payload's bytes, from the result's
    bytes and n.
    """

    payload: str = ""
    sent: Callable[[float, int], float] = unset
    fee: str = "collective_fee"
    simulate: Callable[..., list[Tensor]] = unset
    lower: Callable[..., Lowering] = unset
    wire: tuple[WireOp, ...] = ()
    merged: MergedForm | None = None
    reduces: bool = False
    sliced: CollectiveKind | None = None
    counts_as: str | None = None
    over_hosts: Callable[[HostLevels], None] | None = None
    xla: str | None = None
    payload_from: Callable[[float, int], float] = lambda result, n: result

    def step(
        self, mesh: Mesh, args: tuple[Any, ...], spec: ShardSpec, axes: Axes, payload: float
    ) -> Step:
        """Return the step to `spec` in groups over `axes`, with its price."""
        return Step(self, args, spec, axes, payload, self.sent(payload, mesh.count(axes)))


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class FusedKind(Kind):
    """A collective that is computed together with matmuls.

    replaces: the collective. simulate: as for that. lower: returns the node in one rank's program,
    from (builder, *arguments). runs: the functions that such nodes call. flops: operations in a
    device's matmuls, from (devices in a group, operand shapes, *arguments).
    """

    replaces: CollectiveKind
    simulate: Callable[..., Sequence[Any]] = unset
    flops: Callable[..., int] = unset
    lower: Callable[..., fx.Node] = unset
    runs: tuple[Callable[..., Any], ...] = ()


def in_groups(
    axes: str, mesh: Mesh, x: Sequence[Tensor], run: Callable[[list[Tensor]], Sequence[Tensor]]
) -> list[Tensor]:
    """Apply `run` to the tensors in every device group over `axes`."""
    results = list(x)
    for group in mesh.groups(split_axes(axes)):
        for rank, result in zip(group, run([x[rank] for rank in group])):
            results[rank] = result
    return results
