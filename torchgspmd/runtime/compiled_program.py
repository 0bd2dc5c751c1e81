"""CompiledProgram: one call's forward and backward graph, between its caller and autograd."""

from __future__ import annotations

from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ..capture import ARGUMENT, BUFFER, GRADIENT, MUTATION, OUTPUT, PARAMETER, TANGENT, Captured
from ..capture.state.dependencies import slot_of
from ..dtensor.storage import gradient_like, local_of, store_gradient, takes_gradient, whole_of
from ..fx_passes.stages import verifies
from .autograd_boundary import (
    PartialBackward,
    check_results,
    check_versions,
    detach_aliases,
    detach_inputs,
    forbid_double_backward,
    is_asked_for,
    memory_of,
    note_results,
    rows_of_tensors,
    saved_tensors_for,
    tensors_of_rows,
)


class CompiledProgram:
    """One call's forward and backward graph, for a module on a mesh.

    A backend compiles them. forward: takes the inputs; returns the outputs, mutated inputs' new
    values and the values for the backward. backward: takes a list with the values for it, then the
    outputs' gradients, and empties it; returns the inputs' gradients and the observed values.
    """

    forward: Callable[..., Sequence[Any]]
    backward: Callable[[list], Sequence[Any]]
    by_values = False  # whether the backward needs numbers, besides tensors

    def __init__(self, captured: Captured, model: nn.Module) -> None:
        self.captured = captured
        inputs, outputs = captured.inputs, captured.outputs
        self.slots = [slot_of(model, i.name) for i in inputs if i.kind in (PARAMETER, BUFFER)]
        self.gradient_inputs = [o.input for o in outputs if o.kind == GRADIENT]
        is_argument = [inputs[i].kind == ARGUMENT for i in self.gradient_inputs]
        self.argument_gradients = [i for i, yes in zip(self.gradient_inputs, is_argument) if yes]
        self.parameter_gradients = [
            i for i, yes in zip(self.gradient_inputs, is_argument) if not yes
        ]
        self.inputs_without_gradient = captured.without_gradient()
        self.output_groups = captured.parts()
        self.tangent_outputs = [i.output for i in inputs if i.kind == TANGENT]
        self.mutated = [o.input for o in outputs if o.kind == MUTATION]
        self.outputs = sum(o.kind == OUTPUT for o in outputs)
        # Results from which others follow, by index.
        self.followers = {i: o.of for i, o in enumerate(outputs[: self.outputs]) if o.of}
        self.read_again: list[int] | None = None

    def place(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the tensors in arguments and attributes as the program takes them."""
        return tensors

    def sizes_taken(self, flat: Sequence[Tensor]) -> list[int]:
        """Return the argument sizes that the program takes, before its tensors."""
        return []

    def wrap(self, output: int, value: Tensor) -> Tensor:
        """Return an output as the caller gets it."""
        return value

    def inputs(self, leaves: list) -> tuple[list[Tensor], list[Tensor]]:
        """Return parameters and buffers, then the tensors among arguments and attributes."""
        tensors = (leaf for leaf in leaves if isinstance(leaf, Tensor))
        return [table[name] for table, name in self.slots], [
            *tensors,
            *self.captured.state_tensors(),
        ]

    def __call__(self, leaves: list, call: tuple[tuple, dict]) -> Any:
        state, tensors = self.inputs(leaves)
        if self.mutated:
            # A tensor that is written must not come in under a second name.
            self.captured.check_aliases([*state, *tensors])
        placed = self.place(tensors)
        flat = [*state, *placed]
        if self.captured.has_backward:
            outs = _Run.apply(self, *detach_inputs(flat, self.inputs_without_gradient))
        else:
            outs = self.run_forward(flat)[0]
        if placed is not tensors:
            self._copy_back(tensors, placed)
        wrapped = [self.wrap(i, value) for i, value in enumerate(outs)]
        if self.followers:
            note_results(outs, wrapped, self.followers)
        return self.captured.result(wrapped, call)

    @torch.no_grad()
    def _copy_back(self, tensors: list[Tensor], placed: list[Tensor]) -> None:
        """Copy the mutated arguments that were placed into the caller's."""
        for index in (i - len(self.slots) for i in self.mutated if i >= len(self.slots)):
            if tensors[index] is not placed[index]:
                tensors[index].copy_(placed[index])

    def run_forward(self, flat: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Any]]:
        """Return (outputs, saved values) and write the mutated inputs."""
        with torch.no_grad():
            results = self.forward(*self.sizes_taken(flat), *map(local_of, flat))
            count = self.outputs + len(self.mutated)
            for index, value in zip(self.mutated, results[self.outputs : count]):
                local_of(flat[index]).copy_(value)
        return results[: self.outputs], results[count:]

    def versions_of_saved(
        self, flat: Sequence[Tensor], saved: Sequence[object]
    ) -> list[tuple[int, Tensor, int]]:
        """Return (index, tensor, version) for each DTensor whose memory the backward reads."""
        if self.read_again is None:  # the same in each call
            places = [(i, local_of(t)) for i, t in enumerate(flat) if isinstance(t, DTensor)]
            # Tensors of XLA have no memory to compare; autograd checks their versions.
            tensors = [t for t in saved if isinstance(t, Tensor)] if places else []
            kept = {memory_of(t) for t in tensors}
            self.read_again = [i for i, t in places if memory_of(t) in kept]
        return [(i, flat[i], flat[i]._version) for i in self.read_again]

    def run_backward(self, ctx: Any, boxed: list, grads: tuple) -> Sequence[Any]:
        """Return the gradients that autograd needs; None for others, if they are all of one kind.

        grads: the outputs', as autograd passes them. boxed: see `backward`.
        """
        if self.argument_gradients and self.parameter_gradients and not self.captured.observed:
            nodes = [node for node, _ in ctx.next_functions]
            if not is_asked_for(nodes[i] for i in self.parameter_gradients):
                if (pieces := self.in_pieces()) is not None:
                    results, shared = pieces.gradients_of_arguments(boxed)
                    ctx.shared = shared, grads
                    return results
            elif not is_asked_for(nodes[i] for i in self.argument_gradients):
                shared, before = getattr(ctx, "shared", (None, ()))
                # Only the same backward goes on: other gradients need both pieces anew.
                pieces = self.in_pieces() if all(map(is_, grads, before)) else None
                if shared is not None and pieces is not None:
                    ctx.shared = None, ()
                    return pieces.gradients_of_parameters(boxed, shared)
        return self.backward(boxed)

    def in_pieces(self) -> PartialBackward | None:
        """Return the backward's pieces; None if it cannot be run in pieces."""
        return None

    def observe(self, values: Sequence[Tensor]) -> None:
        """Pass the last outputs, values that gradient hooks store, to the captured program."""
        first = len(self.captured.outputs) - len(values)
        self.captured.observe([self.wrap(first + i, value) for i, value in enumerate(values)])


@contextmanager
def unwritten(tensors: Sequence[object], besides: Collection[int] = ()) -> Generator[None]:
    """Raise AssertionError, for a bug in torchgspmd, if the block writes to one of the tensors.

    besides: the indices that the user's own program writes to.
    """
    shards = [local_of(t) for t in tensors if isinstance(t, Tensor)]
    # Inference tensors count no versions.
    before = [None if t.is_inference() else t._version for t in shards]
    yield
    written = [
        i
        for i, (t, version) in enumerate(zip(shards, before))
        if version is not None and t._version != version and i not in besides
    ]
    assert not written, f"a program writes to its inputs {written}; please report this"


class _Run(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, program: CompiledProgram, *flat: Tensor) -> tuple[Tensor, ...]:
        outs, saved = program.run_forward(flat)
        outs = detach_aliases(outs, program.tangent_outputs)
        likes = [flat[i] for i in program.gradient_inputs]
        ctx.program = program
        ctx.flat = [like if isinstance(like, DTensor) else None for like in likes]
        ctx.versions = program.versions_of_saved(flat, saved)
        saved, ctx.lists = tensors_of_rows(saved)
        if program.by_values:  # Autograd saves tensors only.
            ctx.numbers = [None if isinstance(v, Tensor) else v for v in saved]
            saved = [v if isinstance(v, Tensor) else None for v in saved]
        ctx.save_for_backward(*saved)
        ctx.count = len(flat)
        # A gradient that is None says that an output was not used.
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *[
                o
                for i, o in enumerate(outs)
                if i not in program.tangent_outputs and isinstance(o, Tensor)
            ]
        )
        ctx.shapes = [
            (outs[i].shape, outs[i].dtype, outs[i].device) for i in program.tangent_outputs
        ]
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        program: CompiledProgram = ctx.program
        # Autograd may reach this node without a gradient of any output.
        if all(grad is None for grad in grads):
            return (None,) * (1 + ctx.count)
        tangents = [
            torch.zeros(shape, dtype=dtype, device=device) if grad is None else whole_of(grad)
            for grad, (shape, dtype, device) in zip(
                (grads[i] for i in program.tangent_outputs), ctx.shapes
            )
        ]
        outputs = {i for i, grad in enumerate(grads) if grad is not None}
        check_results(getattr(ctx, "results", ()), outputs)
        check_versions(ctx.versions, program.captured.inputs)
        saved = saved_tensors_for(ctx, program.output_groups, outputs)
        if program.by_values:
            saved = [t if n is None else n for t, n in zip(saved, ctx.numbers)]
        saved = rows_of_tensors(saved, ctx.lists)
        boxed = [*saved, *tangents]
        ctx.maybe_clear_saved_tensors()  # They stay if the backward runs again.
        del saved, tangents
        held = [*boxed] if verifies() else []
        with torch.no_grad(), unwritten(held):
            results = program.run_backward(ctx, boxed, grads)
        del held
        del grads
        gradients = (
            results
            if len(outputs) == len(program.tangent_outputs)
            else program.captured.flowing(outputs, results)
        )
        flat: list[Tensor | None] = [None] * ctx.count
        nodes = ctx.next_functions
        # Gradients are recorded in a backward with create_graph=True only.
        first_order = not torch.is_grad_enabled()
        for index, like, value in zip(program.gradient_inputs, ctx.flat, gradients):
            if like is not None and value is not None:
                value = gradient_like(value, like)
                if first_order and takes_gradient(like, nodes[index][0]):
                    store_gradient(like, value)
                    continue
            flat[index] = value
        if program.captured.observed:
            program.observe(results[len(program.gradient_inputs) :])
        return None, *(flat if first_order else forbid_double_backward(flat))
