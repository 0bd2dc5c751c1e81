"""Between autograd and a program: tensors without gradients, no second-order gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor, fx

from ..capture import Input
from ..compat.fx_nodes import reached
from ..compat.private_apis import _pytree as pytree
from ..compat.private_apis import _will_engine_execute_node
from ..errors import ShardingError

Run = Callable[[list], Sequence[Any]]


def detach_aliases(outputs: Sequence[Tensor], differentiable: Sequence[int]) -> Sequence[Tensor]:
    """Detach outputs without a gradient that alias one with a gradient: y.detach() beside y."""
    if len(outputs) == len(differentiable):
        return outputs
    # One object cannot be marked as non-differentiable and still get a gradient.
    with_gradient = {id(outputs[i]) for i in differentiable}
    return [
        y.detach() if id(y) in with_gradient and i not in differentiable else y
        for i, y in enumerate(outputs)
    ]


def detach_inputs(inputs: list[Tensor], indices: Sequence[int]) -> list[Tensor]:
    """Return the inputs, detached at `indices`: the program computes no gradients for these.

    Example: forward uses only `self.hidden.detach()`. The backward must not go on there.
    """
    for i in indices:
        if inputs[i].requires_grad:
            inputs[i] = inputs[i].detach()
    return inputs


def memory_of(tensor: Tensor) -> int:
    """Return a number that is equal for tensors in the same memory."""
    return tensor.untyped_storage().data_ptr()


def check_versions(versions: Sequence[tuple[int, Tensor, int]], inputs: Sequence[Input]) -> None:
    """Raise ShardingError for a DTensor that was changed after the forward that saved it.

    Autograd checks the versions of saved tensors, but a change of a DTensor counts on the DTensor
    alone, not on this rank's part, which is saved.
    """
    for i, tensor, version in versions:
        if tensor._version != version:
            raise ShardingError.here(
                f"'{inputs[i].name}' was changed between a forward and its backward",
                why="the backward would read the new value",
                fix="call backward() before the change (an optimizer's step), or forward again",
            )


def note_results(
    outputs: Sequence[Tensor], wrapped: Sequence[Tensor], followers: Mapping[int, frozenset[int]]
) -> None:
    """Store results from which others follow with their call, for `check_results`."""
    noted = [(ref(wrapped[i]), after - _same(outputs, i)) for i, after in followers.items()]
    for i in followers:
        if (node := outputs[i].grad_fn) is not None:
            setattr(node, "results", noted)  # noqa: B010 (torch's type has no such attribute)
            return


def _same(outputs: Sequence[Tensor], index: int) -> set[int]:
    return {i for i, output in enumerate(outputs) if output is outputs[index]}


def check_results(noted: Iterable[tuple[Any, frozenset[int]]], outputs: set[int]) -> None:
    """Raise ShardingError if a result keeps a gradient of which only a part would reach it.

    outputs: those with a cotangent.
    """
    for result, after in noted:
        tensor = result()
        if after & outputs and tensor is not None and tensor.retains_grad:
            raise ShardingError.here(
                f"retain_grad() on a result {list(tensor.shape)} from which the model computes "
                "another result",
                why="one program computes both, so what flows from the one to the other inside "
                "would be missing",
                fix="in forward, or in a forward hook, call "
                "register_hook(gradients.append) on the tensor",
            )


def saved_tensors_for(ctx: Any, groups: dict[int, int], outputs: set[int]) -> Sequence[Tensor]:
    """Return the tensors that forward saved, for a backward from these outputs.

    groups: each output's independent graph (Captured.parts). Tensors stay saved until each
    graph has had a backward. Eager PyTorch frees no graph without a backward either.
    """
    if not groups:
        return ctx.saved_tensors
    saved, before = getattr(ctx, "pending_saved", None) or (ctx.saved_tensors, set())
    # torch frees all saved tensors at the first backward, though other outputs may need theirs.
    used = before | {groups[i] for i in outputs}
    ctx.pending_saved = None if used == {*groups.values()} else (saved, used)
    return saved


def tensors_of_rows(saved: Sequence[object]) -> tuple[Sequence[object], object]:
    """Return values with each row list replaced by its rows; and the way back."""
    # Autograd saves tensors only.
    if list not in map(type, saved):  # in C: a hundred values at each call
        return saved, None
    return pytree.tree_flatten([*saved])


def rows_of_tensors(values: Sequence[Any], lists: Any) -> Sequence[Any]:
    return values if lists is None else pytree.tree_unflatten(values, lists)


def forbid_double_backward(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the gradients for create_graph=True; differentiating them is an error.

    The backward program is not differentiable, so a second backward would silently lose a term.
    """
    guarded = iter(
        _FirstOrderOnly.apply(
            torch.zeros((), requires_grad=True), *(g for g in gradients if g is not None)
        )
    )
    return [None if g is None else next(guarded) for g in gradients]


class _FirstOrderOnly(torch.autograd.Function):
    """Identity whose backward raises ShardingError."""

    @staticmethod
    def forward(ctx: object, anchor: Tensor, *gradients: Tensor) -> tuple[Tensor, ...]:
        return tuple(g.detach() for g in gradients)

    @staticmethod
    def backward(ctx: object, *_: object) -> NoReturn:
        raise ShardingError.here(
            "a gradient of a sharded module is differentiated again",
            why="its backward is a program, of which there is no backward",
            fix="compute in the module's forward what needs both, "
            "with torch.autograd.grad(..., create_graph=True)",
        )


# A backward in two pieces:
#     cotangents, saved -> gradients of arguments, values that both pieces need
#     these values, saved -> gradients of parameters
# Zero-bubble pipeline schedules ask for the first, send it to the stage before, and ask for the
# second when they would wait otherwise. The first alone is torch.autograd.grad for inputs.
class PartialBackward:
    """A backward graph's pieces. compile: returns a graph's function.

    of_arguments: the outputs that are argument gradients.
    """

    def __init__(
        self, graph: fx.Graph, of_arguments: Iterable[int], compile: Callable[[fx.Graph], Run]
    ) -> None:
        self.of_arguments = set(of_arguments)
        returned = graph.output_node().args[0]
        ours = [value for i, value in enumerate(returned) if i in self.of_arguments]
        others = [value for i, value in enumerate(returned) if i not in self.of_arguments]
        first, later = _needed_for(ours), _needed_for(others)
        # Values on the border only: what a shared value is computed from stays in the first piece.
        shared = [
            n
            for n in graph.nodes
            if n in first and n in later and n.op == "call_function"
            if n in others or any(user in later and user not in first for user in n.users)
        ]
        self.count, self.outputs = len(ours), len(returned)
        self.first = compile(_piece(graph, first, [], [*ours, *shared]))
        self.later = compile(_piece(graph, later - first, shared, others))

    def gradients_of_arguments(self, boxed: list) -> tuple[list, list]:
        """Return the argument gradients, and the values for the second piece."""
        results = self.first(boxed)
        return self._all(results[: self.count], True), list(results[self.count :])

    def gradients_of_parameters(self, boxed: list, shared: list) -> list:
        """Return the other gradients. shared: the first piece's."""
        boxed += shared
        return self._all(self.later(boxed), False)

    def _all(self, values: Sequence[object], of_arguments: bool) -> list:
        """Return values with None for the other piece's gradients."""
        rest = iter(values)
        return [
            next(rest) if (i in self.of_arguments) == of_arguments else None
            for i in range(self.outputs)
        ]


def _needed_for(values: Sequence[object]) -> set[fx.Node]:
    """Return the nodes that values are computed from, themselves included."""
    return {*reached(value for value in values if isinstance(value, fx.Node))}


def _piece(
    graph: fx.Graph, nodes: set[fx.Node], inputs: list[fx.Node], outputs: Sequence[object]
) -> fx.Graph:
    """Return some nodes' graph. inputs: besides the whole graph's."""
    piece, copies = fx.Graph(), {}
    # Both pieces get the same list of inputs, so both have all placeholders.
    for node in graph.find_nodes(op="placeholder"):
        copies[node] = piece.node_copy(node)
    for node in inputs:
        copies[node] = piece.placeholder(node.name)
        copies[node].meta = dict(node.meta)
    for node in graph.nodes:
        if node.op == "get_attr" or node in nodes and node not in copies:
            copies[node] = piece.node_copy(node, copies.__getitem__)
    piece.output(tuple(copies[x] if isinstance(x, fx.Node) else x for x in outputs))
    piece.eliminate_dead_code()
    return piece


def is_asked_for(accumulators: Iterable[object]) -> bool:
    """Return whether the running backward needs the gradient that goes to any of these nodes."""
    return any(node is not None and _is_executed(node) for node in accumulators)


def _is_executed(node: object) -> bool:
    try:
        return _will_engine_execute_node(node)
    except RuntimeError:  # torch.autograd.grad computes this gradient
        return True
