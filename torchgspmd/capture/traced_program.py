"""The user's program as a function on flat tensors: forward, backward and mutations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..compat.patches import setting
from ..compat.private_apis import _pytree as pytree
from ..errors import ShardingError
from .assumed_sizes import EMPTY_IS_NOTHING
from .cached_constants import CachedConstants
from .call_interceptor import CallInterceptor, SourceTracker, autograd_grad
from .captured import GRADIENT, MUTATION, OBSERVED, OUTPUT, Output
from .functionalize import Functional, FunctionalTensor
from .prints import Breakpoint, Breakpoints, Prints, Side
from .rewrites.branch_effects import TRACE
from .rewrites.numpy_arrays import check_left
from .stand_in_sizes import NUMBERS
from .state.dependencies import named_tensors, with_tensors
from .state.mutations import Tables
from .state.object_trees import closed, is_opened, opened
from .state.state_inputs import AskedOrders, TensorInput, Varying
from .state.symbolic_numbers import to_computed
from .state.value_guards import ValueGuards
from .state.writes import WatchedArguments, Write, rebound_buffers, rebound_parameters
from .trace_context import capturing
from .traced_values import connected_components, reachable_inputs, unwrap, was_mutated


@dataclass(eq=False)
class TracedProgram:
    """The user's program as a function from flat tensors to flat tensors."""

    fn: Callable | nn.Module
    call: Callable
    names: list[str]
    leaves: tuple[object, ...]
    slots: list[int]
    tree: pytree.TreeSpec
    grad: bool
    tables: Tables
    state_inputs: list[TensorInput]
    value_guards: ValueGuards
    casts: Casts
    asked: AskedOrders = field(default_factory=AskedOrders)
    outputs: list[Output] = field(default_factory=list)
    tangents: list[tuple[int, Any]] = field(default_factory=list)
    rebound: dict[int, Tensor] = field(default_factory=dict)
    breakpoints: tuple[Breakpoint, ...] = ()
    observed_values: list[Tensor] = field(default_factory=list)  # that gradient hooks store

    def __post_init__(self) -> None:
        self.parameters = (
            [name for name, _ in self.fn.named_parameters()]
            if isinstance(self.fn, nn.Module)
            else []
        )
        self.constants = CachedConstants(FunctionalTensor)
        self.sources: dict[int, frozenset[int]] = {}  # outputs that reach each input
        self.followers: dict[int, frozenset[int]] = {}  # outputs that reach each output
        self.replaced: dict[int, int] = {}  # by output: the argument that it replaces
        self.writes: list[Write] = []
        self.observed: list[Write] = []

    def run(self, flat: tuple[Tensor, ...], requires: list[bool]) -> list[Tensor | None]:
        """Run forward and backward on traced tensors, and return the graph's outputs."""
        with (mode := Functional(self.tables, self.value_guards)):
            self.ask = mode.ask
            inputs: list[Any] = [FunctionalTensor.to_functional(t) for t in flat]
            self.shapes = [t.shape for t in flat]
            before = [unwrap(t) for t in inputs]
            for tensor, needed in zip(inputs, requires):
                if needed:
                    tensor.requires_grad_()
            tracker = SourceTracker(__file__, self.fn)
            interceptor = CallInterceptor(tracker, self.constants, mode, self.asked)
            with setting(EMPTY_IS_NOTHING, None), interceptor, capturing():
                outputs, grads = self._with_state(inputs, tracker)
            tracker.clear()
            mutated = [
                i
                for i, (t, old) in enumerate(zip(inputs, before))
                if i in self.rebound or was_mutated(t, old)
            ]
            for i in mutated:
                if i not in self.rebound:
                    self._check_shape(i, unwrap(inputs[i]).shape)
            components = connected_components(outputs)
            self.outputs = [
                *(
                    Output(
                        OUTPUT,
                        self._input_in_place(i, t),
                        i >= self.result_count,
                        of=self.followers.get(i, frozenset()),
                        part=components[i],
                    )
                    for i, t in enumerate(outputs)
                ),
                *(Output(MUTATION, i) for i in mutated),
                *(Output(GRADIENT, i, of=self.sources[i]) for i in grads),
                *(Output(OBSERVED, open=True) for _ in self.observed_values),
            ]
            # As outputs, the constants keep their nodes; take_constants removes them again.
            constants = self.constants.tensors()
            self.constant_ids = [*map(id, constants)]
            return [
                unwrap(t) if isinstance(t, FunctionalTensor) else t
                for t in (
                    *outputs,
                    *(self.rebound.get(i, inputs[i]) for i in mutated),
                    *grads.values(),
                    *self.observed_values,
                    *constants,
                )
            ]

    def _check_shape(self, index: int, now: torch.Size) -> None:
        if now == self.shapes[index]:
            return
        place = index - len(self.names)
        what = f"'{self.names[index]}'" if place < 0 else f"tensor {place} of its arguments"
        before, after = (list(shape) for shape in (self.shapes[index], now))
        raise ShardingError.here(
            f"the program changes the shape of {what} in place, from {before} to {after}",
            why="its layout and those of later calls are for its shape",
            fix=f"return a new tensor; as out=, pass one of shape {after}",
        )

    def _input_in_place(self, output: int, tensor: Tensor) -> int:
        """Return the input whose source receives an output with as many dimensions, or -1.

        Attributes have the same shape.
        """
        if output in self.replaced:
            return self.replaced[output]
        sources = {
            source
            for write in self.writes
            for source, index in write.output_sources()
            if index == output
        }
        first = len(self.names) + len(self.slots)
        return next(
            (
                first + i
                for i, each in enumerate(self.state_inputs)
                if each.kind == "tensor"
                and each.source in sources
                and self.shapes[first + i] == tensor.shape
            ),
            -1,
        )

    def keep(self, graph: fx.Graph, nodes: list[fx.Node]) -> None:
        """Compute nodes behind the program's results, where nobody reads them."""
        first = sum(out.kind == OUTPUT for out in self.outputs)
        self.outputs[first:first] = [Output(OUTPUT, open=True) for _ in nodes]
        values = [*graph.output_node().args[0]]
        values[first:first] = nodes
        graph.output_node().args = (tuple(values),)

    def take_constants(self, graph: fx.Graph) -> dict[int, fx.Node]:
        """Remove the trace's constants from the outputs; return their nodes by id."""
        output = graph.output_node()
        values = list(output.args[0])
        count = len(values) - len(self.constant_ids)
        output.args = (values[:count],)
        return dict(zip(self.constant_ids, values[count:]))

    def drop_unused(self, graph: fx.Graph) -> set[int]:
        """Erase placeholders for unused state; return the used state inputs."""
        first = len(self.names) + len(self.slots)
        changed = {out.input for out in self.outputs if out.kind == MUTATION}
        new_positions, erased = {}, 0
        for i, node in enumerate([*graph.find_nodes(op="placeholder")]):
            # State inputs come last; the inputs before keep their places even if unused.
            if i < first or node.users or i in changed:
                new_positions[i] = i - erased
            else:
                erased += 1
                graph.erase_node(node)
        self.outputs = [
            replace(out, input=new_positions.get(out.input, -1)) for out in self.outputs
        ]
        return {i - first for i in new_positions if i >= first}

    def _with_state(
        self, inputs: list[Tensor], tracker: SourceTracker
    ) -> tuple[list[Tensor], dict[int, Tensor | None]]:
        """Run forward and backward with the traced tensors in place of the module's own."""
        stand_ins = inputs[len(inputs) - len(self.state_inputs) :]
        used = self._cast(inputs)
        tables, module = self.tables, self.fn if isinstance(self.fn, nn.Module) else None
        tensors = {} if module is None else dict(named_tensors(module))
        self.registered = {id(tensors[name]): x for name, x in zip(self.names, used)}

        def forward_backward() -> tuple[list[Tensor], dict[int, Tensor | None]]:
            results = self._forward_backward(inputs, used, tracker)
            self.rebound = self._rebound(used)
            return results

        with (
            tables.substitute(self.state_inputs, stand_ins, self.registered),
            tables.state.branches.rewritten(),
            setting(TRACE, (self.ask, lambda: tables.tables, Side, self._is_passed_by_none)),
        ):
            if module is None:
                return self._forward_backward(inputs, used, tracker)
            return with_tensors(module, dict(zip(self.names, used)), forward_backward)

    def _is_passed_by_none(self, error: Exception) -> bool:
        """Return whether a trace fails at a value with which no trace can go on."""
        guards = self.value_guards
        is_known_later = guards.asked or guards.symbolic
        return not is_known_later and self.tables.state.branches.is_passed_by_none(error)

    def _cast(self, inputs: list[Tensor]) -> list[Tensor]:
        first = len(self.names)
        names = {i: f"parameter '{name}'" for i, name in enumerate(self.parameters)}
        names |= {first + i: f"tensor {i} of its arguments" for i in range(len(self.slots))}
        return [self.casts.cast(names[i], t) if i in names else t for i, t in enumerate(inputs)]

    def _rebound(self, inputs: list[Tensor]) -> dict[int, Tensor]:
        assert isinstance(self.fn, nn.Module)
        return rebound_parameters(self.fn, self.parameters, inputs) | rebound_buffers(
            self.fn, self.names, inputs
        )

    def _forward_backward(
        self, inputs: list[Tensor], used: list[Tensor], tracker: SourceTracker
    ) -> tuple[list[Tensor], dict[int, Tensor | None]]:
        """Run forward on the traced tensors, record its mutations, then run the backward."""
        leaves = list(self.leaves)
        for slot, tensor in zip(self.slots, used[len(self.names) :]):
            leaves[slot] = tensor
        # Floats that vary between calls are symbolic numbers in this trace.
        for i, leaf in enumerate(leaves):
            leaves[i] = self.tables.varying.get(Varying.named(i), leaf)
        args, kwargs = closed(pytree.tree_unflatten(leaves, self.tree))
        watched = WatchedArguments((args, kwargs))
        try:
            with (prints := Prints(self.ask)).recorded(), (stops := Breakpoints()).recorded():
                called = self.call(*args, **kwargs)
            self.breakpoints = tuple(stops.found)
            for leaf in pytree.tree_leaves(called):
                check_left(leaf, "returns")
            result = opened(to_computed(called), watched.origins)
            self.result_leaves, self.results = pytree.tree_flatten(result)
            self.result_slots = [
                i for i, leaf in enumerate(self.result_leaves) if isinstance(leaf, Tensor)
            ]
            outputs = [self.result_leaves[i] for i in self.result_slots]
            argument_writes = watched.writes(outputs)
            before, positions = watched.tensors(), {id(t): i for i, t in enumerate(used)}
            self.replaced = {
                index: positions[id(before[source])]
                for write in argument_writes
                for source, index in write.output_sources()
                if id(before.get(source)) in positions
                and before[source].dim() == outputs[index].dim()
            }
            self.result_count = len(outputs)
            self.rebound = self._rebound(used) if isinstance(self.fn, nn.Module) else {}
            # A change of a copy from _cast would be lost.
            self.casts.check_unchanged()
            for i in self.rebound if self.casts.dtype else ():
                if i < len(self.parameters):
                    raise self.casts.change_error(f"parameter '{self.parameters[i]}'")
            state_writes = self.tables.writes(
                outputs, [*used[: len(self.names)], *self.rebound.values()]
            )
            self.writes = [*argument_writes, *state_writes, *prints.writes(outputs)]
        finally:
            # Also after an error: the caller's containers must not keep traced tensors.
            watched.restore()
        if any(isinstance(leaf, Iterator) for leaf in self.result_leaves):
            raise ShardingError.here(
                "the program returns an iterator, of whose values none is computed yet",
                fix="return a list",
            )
        if any(
            isinstance(leaf, NUMBERS)
            for leaf in (
                *self.result_leaves,
                *pytree.tree_leaves([write.value for write in argument_writes]),
            )
        ):
            raise ShardingError.here(
                "the program returns a number that is known only when it runs",
                fix="return the tensor, and call item() on the result",
            )
        self.opened = any(map(is_opened, pytree.tree_leaves(result, is_leaf=is_opened)))
        self.tables.take_trained(self.constants.operands, self.registered)
        self.tables.start_backward()
        grads = self._backward(outputs, inputs, tracker) if self.grad else {}
        self.observed = self.tables.writes(self.observed_values, used[: len(self.names)])
        return outputs, grads

    def _backward(
        self, outputs: list[Tensor], inputs: list[Tensor], tracker: SourceTracker
    ) -> dict[int, Tensor | None]:
        differentiable = [
            i for i, t in enumerate(outputs) if isinstance(t, Tensor) and t.requires_grad
        ]
        differentiated = [i for i, t in enumerate(inputs) if t.requires_grad]
        results = [outputs[i] for i in differentiable]
        given = [inputs[i] for i in differentiated]
        reachable = reachable_inputs(results, [*given, *results])
        if self.rebound:
            self._check_rebound(results, inputs)
        self.sources = {
            i: frozenset(out for out, to in zip(differentiable, reachable) if to >> k & 1)
            for k, i in enumerate(differentiated)
        }
        self.followers = {
            i: frozenset(out for out, to in zip(differentiable, reachable) if to >> k & 1)
            for k, i in enumerate(differentiable, len(given))
        }
        if not differentiable or not differentiated:
            return {}
        tracker.start_backward(results)
        seeds = []
        for i in differentiable:  # normalize.py replaces the seeds by placeholders
            seeds.append(torch.ones_like(outputs[i]))
            self.tangents.append((i, unwrap(seeds[-1])))
        grads = autograd_grad(results, given, seeds, allow_unused=True)
        return {i: g for i, g in zip(differentiated, grads) if g is not None}

    def _check_rebound(self, outputs: list[Tensor], inputs: list[Tensor]) -> None:
        """Raise ShardingError if a result depends on a replaced parameter, or on its successor.

        An optimizer holds the replaced one: its gradient would be lost.
        """
        for i, now in self.rebound.items():
            if i < len(self.parameters) and any(reachable_inputs(outputs, [inputs[i], now])):
                raise ShardingError.here(
                    "forward puts another parameter in the place of "
                    f"'{self.parameters[i]}', on which its result depends",
                    why="an optimizer has the one that was there: the gradient would be "
                    "lost silently",
                    fix="change its values in the optimizer's step, or make it a buffer",
                )


class Casts:
    """Copies of parameters and arguments in another floating dtype, for a whole trace.

    dtype: None leaves all tensors as they are.
    """

    def __init__(self, dtype: torch.dtype | None) -> None:
        self.dtype = dtype
        self.copies: list[tuple[str, Tensor, Tensor]] = []  # name, copy, its value at first

    def cast(self, name: str, tensor: Tensor) -> Tensor:
        """Return a floating tensor in the dtype, any other as it is."""
        if self.dtype in (None, tensor.dtype) or not tensor.is_floating_point():
            return tensor
        copy = tensor.to(self.dtype)
        self.copies.append((name, copy, unwrap(copy)))
        return copy

    def check_unchanged(self) -> None:
        """Raise ShardingError if forward changed a copy in place: the change would be lost."""
        for name, copy, before in self.copies:
            if was_mutated(copy, before):
                raise self.change_error(name)

    def change_error(self, name: str) -> ShardingError:
        return ShardingError.here(
            f"forward changes {name}",
            why=f"with param_dtype it computes with a copy in {self.dtype}: "
            "the change would be lost",
            fix="make it a buffer, which keeps its dtype, or use torch.autocast",
        )


def check_dtypes(**dtypes: object) -> None:
    """Raise ShardingError unless each is None or a real floating dtype."""
    for name, dtype in dtypes.items():
        if dtype is not None and not (
            isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize > 1
        ):
            raise ShardingError.here(
                f"{name}={dtype!r} is no floating dtype that gradients can be computed in",
                fix=f"give {name}=torch.bfloat16, torch.float16, torch.float32 or torch.float64",
            )
