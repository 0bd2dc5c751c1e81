"""A capture's result: a graph and its calling convention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..compat.private_apis import _pytree as pytree
from ..errors import ShardingError
from ..shard_spec import ShardSpec
from .argument_sizes import ArgumentSizes
from .assumed_sizes import SIDES
from .prints import Breakpoint
from .state.guards import Guards
from .state.object_trees import Opened, closed
from .state.run_guards import ArgumentKeys, Change, RunGuards
from .state.state_inputs import TensorInput
from .state.value_guards import ValueGuard
from .state.writes import Write, apply_writes

PARAMETER, BUFFER, ARGUMENT, TANGENT = "parameter", "buffer", "argument", "tangent"
UNKNOWN = -1  # the size, in a tangent's dimension, that only a run knows
OUTPUT, MUTATION, GRADIENT, OBSERVED = "output", "mutation", "gradient", "observed"


@dataclass(frozen=True)
class Input:
    """A placeholder in the captured graph."""

    kind: str  # parameter, buffer, argument or tangent
    name: str  # a parameter's or buffer's qualified name, an argument's path
    shape: tuple[int, ...]
    dtype: torch.dtype
    mark: ShardSpec | None = None  # recorded on it by mark_sharding
    source: str | None = None  # file:line of the mark
    output: int = -1  # for a tangent: its output


@dataclass(frozen=True)
class Output:
    """A result in the captured graph."""

    # output, mutation (new value of an input), gradient (of an input), or observed (a value that
    # gradient hooks store)
    kind: str
    input: int = -1  # the input that is mutated or differentiated, or that an output replaces
    open: bool = False  # whether an output keeps the layout it has, if no layout is requested
    of: frozenset[int] = frozenset()  # the outputs whose cotangents flow to this gradient or output
    part: int = 0  # for an output: its connected component in the autograd graph


@dataclass
class Captured:
    """A captured graph with its calling convention.

    Node metadata: val (fake tensor), source (file:line), backward (bool).
    """

    graph: fx.Graph
    constants: nn.Module  # owns the tensors that get_attr nodes name
    inputs: tuple[Input, ...]
    outputs: tuple[Output, ...]
    arguments: pytree.TreeSpec  # of (args, kwargs)
    leaves: tuple[Any, ...]  # flat (args, kwargs); None where a tensor goes
    results: pytree.TreeSpec  # of the function's result
    result_leaves: tuple[Any, ...]  # its flat leaves; None where a tensor goes
    result_slots: tuple[int, ...]  # which leaves are tensors
    number_slots: tuple[int, ...]  # which leaves are Computed
    has_backward: bool = False
    opened: bool = False  # whether the result has objects that hold tensors
    # to containers among the arguments, attributes, and tables with a name
    writes: tuple[Write, ...] = ()
    observed: tuple[Write, ...] = ()  # by the backward
    # the module's parameters and buffers, in input order
    tensors: list[Tensor] = field(default_factory=list)
    reads: Guards = field(default_factory=Guards)  # attributes and variables that were read
    # the state's tensors and numbers, which are the last arguments
    state_inputs: tuple[TensorInput, ...] = ()
    looks: tuple[ValueGuard, ...] = ()  # guards on values of buffers and arguments
    functions: tuple[FunctionType, ...] = ()  # Python functions that it may have called
    # argument sizes that may differ between runs
    dynamic: ArgumentSizes = field(default_factory=ArgumentSizes)
    few: tuple[str, ...] = ()  # the branches on sizes that it takes for few (assumed_sizes.py)
    run_guards: RunGuards | None = None  # on everything else that a plan's run depends on
    breakpoints: tuple[Breakpoint, ...] = ()  # in forward; a saved plan has none

    def result(self, outputs: Sequence[object], arguments: tuple[tuple, dict]) -> Any:
        """Return the function's result, and repeat its writes.

        outputs: a value for every output with kind OUTPUT; values after the result's tensors belong
        to writes.

        arguments: this call's (args, kwargs), whose containers are changed.
        """
        leaves = list(self.result_leaves)
        for slot, value in zip(self.result_slots, outputs):
            leaves[slot] = value
        for slot in self.number_slots:
            leaves[slot] = leaves[slot].now()
        tree = pytree.tree_unflatten(leaves, self.results)
        if self.writes:
            apply_writes(self.writes, outputs, arguments)
        return closed(tree, arguments) if self.opened else tree

    def holds(self, leaves: Sequence[Any], shapes: Sequence[Sequence[int]] = ()) -> bool:
        """Return whether the program is right for a call.

        leaves: of its arguments. shapes: theirs, if some of its sizes are symbols.
        """
        functions = self.run_guards and self.run_guards.functions
        return (
            {*self.few} == SIDES.get().few
            and (not shapes or self.dynamic.has_branches_of(shapes))
            and self.reads.hold()
            and all(look.holds(leaves) for look in self.looks)
            and (functions is None or functions.hold())
        )

    def differing(self, leaves: Sequence[Any]) -> list[str]:
        """Return words for the reads, buffers and arguments whose guards fail."""
        changed = (f"{x.name} at {x.where}" for x in self.looks if not x.holds(leaves))
        return [*(f"'{name}'" for name in self.reads.differing()), *changed]

    def check_unchanged(self, leaves: Sequence[object]) -> None:
        """Raise ShardingError if a run would have other values than the program has.

        leaves: of the run's arguments. Tensors are not compared: they are inputs.
        """
        if self.run_guards is not None:
            changes = [*self.run_guards.changes(leaves)]
        else:  # of a file
            names = [f"number {i}" for i in range(len(self.leaves))]
            changes = [*ArgumentKeys.of_file(names, self.leaves).changes(leaves)]
        changes += [Change(*each) for each in self.reads.changes()]
        if changes:
            also = "".join(f"; {each}" for each in changes[1:4])
            raise ShardingError.here(
                f"{changes[0]} when this was planned{also}",
                why="a plan has the numbers, flags and attributes that it was made with",
                fix="plan it again, with torchgspmd.plan(); or make it a tensor, which runs read",
            )

    def check_looks(self, leaves: Sequence[Any]) -> None:
        """Raise ShardingError if values differ from those that the program was specialized to."""
        for look in self.looks:
            if not look.holds(leaves):
                raise ShardingError(
                    f"{look.name} has another value than when this was planned",
                    where=look.where,
                    why=f"the program is the one for {look.described()}",
                    fix="plan it again",
                )

    def module_tensors(self) -> list[Tensor]:
        """Return the module's parameters and buffers, in input order."""
        module = self.run_guards and self.run_guards.module
        return self.tensors if module is None else module.tensors()

    def state_tensors(self) -> list[Tensor]:
        """Return the tensors and numbers that runs take from attributes and tables."""
        return [each.tensor() for each in self.state_inputs]

    def numbers(self, besides: dict | None = None) -> list[tuple[str, int | float]]:
        """Return name and value for the numbers that the program takes as tensors.

        besides: a table whose numbers are left out.
        """
        return [
            (each.name, each.source.read())
            for each in self.state_inputs
            if each.kind == "number" and each.source.root is not besides
        ]

    def described(
        self, owners: Mapping[int, str], besides: dict | None = None
    ) -> list[tuple[str, str]]:
        """Return name and current value for everything that the program read, and for its numbers.

        owners: see Guards.described.
        """
        return [
            *self.reads.described(owners),
            *((f"'{name}'", str(value)) for name, value in self.numbers(besides)),
        ]

    def kept_tensors(self, owners: Mapping[int, str]) -> list[tuple[str, Tensor]]:
        """Return the graph's constant tensors, each with the name it was read under or ""."""
        names = self.reads.tensors(owners)
        constants = [
            getattr(self.constants, node.target)
            for node in self.graph.nodes
            if node.op == "get_attr"
        ]
        return [
            (names.get(id(tensor), ""), tensor)
            for tensor in constants
            if isinstance(tensor, Tensor)
        ]

    def check_aliases(self, tensors: Sequence[Tensor]) -> None:
        """Raise ShardingError if inputs share memory, and one of them is mutated."""
        places: dict[int, list[int]] = {}
        for i, tensor in enumerate(tensors):
            places.setdefault(id(tensor), []).append(i)
        for out in self.outputs:
            if out.kind != MUTATION:
                continue
            both = places[id(tensors[out.input])]
            # Views of one tensor are found among arguments alone: a model has many buffers.
            if len(both) == 1 and self.inputs[out.input].kind == ARGUMENT:
                both = [
                    i
                    for i, (each, tensor) in enumerate(zip(self.inputs, tensors))
                    if each.kind == ARGUMENT and _share_elements(tensor, tensors[out.input])
                ]
            if len(both) > 1:
                names = " and ".join(repr(self.inputs[i].name) for i in both)
                raise ShardingError.here(
                    f"one tensor is passed as {names}, and changed in place",
                    why="a program takes them for tensors without common memory",
                    fix="pass a clone() of it",
                )

    def without_gradient(self) -> list[int]:
        """Return the parameters and arguments that get no gradient, as in eager PyTorch."""
        through = {out.input for out in self.outputs if out.kind == GRADIENT}
        return [
            i
            for i, each in enumerate(self.inputs)
            if each.kind in (PARAMETER, ARGUMENT) and i not in through
        ]

    def parts(self) -> dict[int, int]:
        """Return the component for each output that has a cotangent.

        Return {} if all are in one component.
        """
        components = {
            each.output: self.outputs[each.output].part
            for each in self.inputs
            if each.kind == TANGENT
        }
        return components if len(set(components.values())) > 1 else {}

    def flowing(self, with_cotangent: set[int], gradients: Sequence[object]) -> Sequence[Any]:
        """Return the gradients, with None where no output that reaches the input has a cotangent.

        Eager PyTorch computes no gradient there. with_cotangent: the outputs that have one.
        """
        gradient_outputs = (out for out in self.outputs if out.kind == GRADIENT)
        return [
            value if out.of & with_cotangent or not out.of else None
            for out, value in zip(gradient_outputs, gradients)
        ]

    def observe(self, values: Sequence[object]) -> None:
        """Store OBSERVED outputs where the program's gradient hooks put them."""
        apply_writes(self.observed, values)

    def visible(self) -> set[int]:
        """Return the outputs that pytree finds in the result.

        If all the result's tensors are inside objects, return those.
        """
        values = self.graph.output_node().args[0]
        leaves = list(self.result_leaves)
        # A user's class may check its tensors; two results may be one tensor.
        for slot, value in zip(self.result_slots, values):
            leaves[slot] = value.meta["val"].detach()
        tree = pytree.tree_unflatten(leaves, self.results)
        seen = {id(x) for x in pytree.tree_leaves(tree, is_leaf=lambda x: isinstance(x, Opened))}
        outputs = {*range(len(self.result_slots))}
        return {i for i in outputs if id(leaves[self.result_slots[i]]) in seen} or outputs


def _share_elements(x: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have an element of memory in common."""
    if x is other:
        return True
    pair = x, other
    if any(type(t) is not Tensor or t.layout is not torch.strided or t.is_meta for t in pair):
        return False
    if "xla" in (x.device.type, other.device.type):
        return False  # these have no storage
    if x.untyped_storage().data_ptr() != other.untyped_storage().data_ptr():
        return False
    if x.dtype != other.dtype or not all(t.numel() for t in pair):
        return False
    ends = [
        t.storage_offset() + sum((n - 1) * s for n, s in zip(t.shape, t.stride())) for t in pair
    ]
    first = min(t.storage_offset() for t in pair)
    if max(t.storage_offset() for t in pair) > min(ends):
        return False
    # Columns of a matrix lie between each other without common elements.
    marked = torch.zeros(max(ends) - first + 1, dtype=torch.bool)
    views = [marked.as_strided(t.shape, t.stride(), t.storage_offset() - first) for t in pair]
    views[0].fill_(True)
    return bool(views[1].any())
