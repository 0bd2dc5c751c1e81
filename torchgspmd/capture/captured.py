"""What a capture gives: a graph, and how values go in and out of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..compat.private_apis import _pytree as pytree
from ..errors import ShardingError, user_line
from ..shard_spec import ShardSpec
from .state.argument_mutations import ArgumentMutation, StateMutation, apply_mutations
from .state.guards import Guards
from .state.object_trees import Opened, closed
from .state.places import Place
from .state.value_guards import ValueGuard

PARAMETER, BUFFER, ARGUMENT, TANGENT = "parameter", "buffer", "argument", "tangent"
OUTPUT, MUTATION, GRADIENT, OBSERVED = "output", "mutation", "gradient", "observed"


@dataclass(frozen=True)
class Input:
    """A placeholder of the captured graph."""

    kind: str  # parameter, buffer, argument or tangent
    name: str  # qualified name of a parameter or buffer, path of an argument
    shape: tuple[int, ...]
    dtype: torch.dtype
    mark: ShardSpec | None = None  # what mark_sharding recorded on it
    source: str | None = None  # where
    output: int = -1  # of a tangent: the output it belongs to


@dataclass(frozen=True)
class Output:
    """A result of the captured graph."""

    # output, mutation (new value of an input), gradient (of an input), or observed: what hooks of
    kind: str
    # gradients keep of them
    input: int = (
        -1
    )  # which input is mutated or differentiated; of an output: in whose place it is put
    open: bool = (
        False  # of an output: it leaves the program as it is laid out, if nobody asks for a layout
    )
    of: frozenset[int] = frozenset()  # of a gradient: the outputs whose cotangents flow to it
    # of an output: autograd's graph of it has no operation in common with those of other parts
    part: int = 0


@dataclass
class Captured:
    """The graph with its calling convention. Node metadata: val (fake tensor), source (file:line),
    backward (bool).
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
    number_slots: tuple[int, ...]  # and which are Computed
    has_backward: bool = False
    opened: bool = False  # whether the result has objects that hold tensors
    effects: tuple[ArgumentMutation, ...] = ()  # on the containers among the arguments
    left: tuple[StateMutation, ...] = ()  # in attributes of the module, and in tables that it names
    observed: tuple[StateMutation, ...] = ()  # the same, by the backward
    tensors: list[Tensor] = field(
        default_factory=list
    )  # the module's own parameters and buffers, in input order
    reads: Guards = field(default_factory=Guards)  # of a module's attributes that became part of it
    places: tuple[Place, ...] = ()  # whose tensors and numbers are the last arguments
    looks: tuple[ValueGuard, ...] = ()  # at the values of buffers

    def result(self, outputs: Sequence[Any], arguments: tuple[tuple, dict]) -> Any:
        """The function's result, of what the graph computes; containers among the given (args,
        kwargs), and others, are changed.

        outputs: a value for every output of kind OUTPUT. Those behind the result's own are for
        these.
        """
        leaves = list(self.result_leaves)
        for slot, value in zip(self.result_slots, outputs):
            leaves[slot] = value
        for slot in self.number_slots:
            leaves[slot] = leaves[slot].now()
        left_here = [left.fill(outputs) for left in self.left]  # before any of them is written
        tree = pytree.tree_unflatten(leaves, self.results)
        if self.effects:
            apply_mutations(self.effects, outputs, arguments)
        for left in left_here:
            left.write()
        return closed(tree, arguments) if self.opened else tree

    def holds(self) -> bool:
        """Whether all that it read is as it was."""
        return self.reads.hold() and all(look.holds() for look in self.looks)

    def differing(self) -> list[str]:
        """What is not."""
        return [
            *self.reads.differing(),
            *(f"a buffer at {look.where}" for look in self.looks if not look.holds()),
        ]

    def check_looks(self) -> None:
        """ShardingError where buffers have other values than it was made for."""
        for look in self.looks:
            if not look.holds():
                raise ShardingError(
                    "a buffer has another value than when this was planned",
                    where=look.where,
                    why=f"the program is the one for {look.described()}",
                    fix="plan it again",
                )

    def at_places(self) -> list[Tensor]:
        """The arguments that no caller passes: what is now in attributes and tables."""
        return [place.tensor() for place in self.places]

    def numbers(self, besides: dict | None = None) -> list[tuple[str, int | float]]:
        """Those that it takes as tensors, by their names; other than those in this table."""
        return [
            (place.name, place.value())
            for place in self.places
            if place.kind == "number" and place.root is not besides
        ]

    def described(
        self, owners: Mapping[int, str], besides: dict | None = None
    ) -> list[tuple[str, str]]:
        """What it has read, and the numbers that it takes: their names and values now. owners: see
        Reads.described.
        """
        return [
            *self.reads.described(owners),
            *((f"'{name}'", str(value)) for name, value in self.numbers(besides)),
        ]

    def kept_tensors(self, owners: Mapping[int, str]) -> list[tuple[str, Tensor]]:
        """Tensors with values that are part of it: those that it has read, by their names, and
        others without one.
        """
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
        """ShardingError if one tensor is given as two inputs, of which the program changes one."""
        places: dict[int, list[int]] = {}
        for i, tensor in enumerate(tensors):
            places.setdefault(id(tensor), []).append(i)
        for out in self.outputs:
            both = places[id(tensors[out.input])] if out.kind == MUTATION else []
            if len(both) > 1:
                names = " and ".join(repr(self.inputs[i].name) for i in both)
                raise ShardingError(
                    f"one tensor is passed as {names}, and changed in place",
                    where=user_line(),
                    why="a program takes them for two tensors",
                    fix="pass a clone() of it",
                )

    def without_gradient(self) -> list[int]:
        """The parameters and arguments that it computes no gradients of: in eager PyTorch no
        backward comes to these.
        """
        through = {out.input for out in self.outputs if out.kind == GRADIENT}
        return [
            i
            for i, each in enumerate(self.inputs)
            if each.kind in (PARAMETER, ARGUMENT) and i not in through
        ]

    def parts(self) -> dict[int, int]:
        """Of outputs that have a cotangent; none if all are one part."""
        components = {
            each.output: self.outputs[each.output].part
            for each in self.inputs
            if each.kind == TANGENT
        }
        return components if len(set(components.values())) > 1 else {}

    def flowing(self, with_cotangent: set[int], gradients: Sequence[Any]) -> Sequence[Any]:
        """Outputs of kind GRADIENT: None where eager PyTorch computes none, as it comes from
        outputs of which none has a cotangent.
        """
        gradient_outputs = (out for out in self.outputs if out.kind == GRADIENT)
        return [
            value if out.of & with_cotangent or not out.of else None
            for out, value in zip(gradient_outputs, gradients)
        ]

    def observe(self, values: Sequence[Any]) -> None:
        """Puts the outputs of kind OBSERVED where the program's hooks of gradients put them."""
        for left in self.observed:
            left.fill(values).write()

    def visible(self) -> set[int]:
        """The outputs that pytree finds in the result; if all of its tensors are in objects, those
        in objects.
        """
        tree = pytree.tree_unflatten([*range(len(self.result_leaves))], self.results)
        places = {slot: output for output, slot in enumerate(self.result_slots)}
        seen = [
            leaf
            for leaf in pytree.tree_leaves(tree, is_leaf=lambda x: isinstance(x, Opened))
            if isinstance(leaf, int)
        ]
        visible_outputs = {places[leaf] for leaf in seen if leaf in places}
        return visible_outputs or set(places.values())
