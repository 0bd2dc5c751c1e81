"""A module or function as one flat ATen graph at global shapes: forward and backward together,
marks kept as nodes.

The program runs once on fake tensors (nothing is allocated, whatever its size) inside make_fx;
FunctionalTensorMode turns in-place updates into values. The backward is traced by calling
torch.autograd.grad inside of the trace, so that activation checkpointing shows as it is: as a
second computation in the backward.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx import traceback as fx_traceback
from torch.overrides import TorchFunctionMode

from ..annotate import mark_sharding, recorded_mark
from ..compat.private_apis import FakeTensorMode, ShapeEnv, _engine_run_backward, make_fx
from ..compat.private_apis import _pytree as pytree
from ..errors import ShardingError, user_line, user_line_of
from ..mesh import Mesh
from ..without_gc import without_gc
from .autograd_reach import connected_components, reachable_inputs
from .cached_constants import CachedConstants
from .captured import (
    ARGUMENT,
    BUFFER,
    GRADIENT,
    MUTATION,
    OBSERVED,
    OUTPUT,
    PARAMETER,
    Captured,
    Input,
    Output,
)
from .functionalize import (
    Functional,
    FunctionalTensor,
    UnlistedMutation,
    set_data,
    unwrap,
    was_mutated,
)
from .normalize import NUMBERS, normalize
from .rewrites import sparse_coo
from .rewrites.inline_python import bodies
from .rewrites.masked_indexing import SELECTIONS
from .rewrites.products import REPLACEMENTS
from .rewrites.value_free import VALUE_REPLACEMENTS
from .state.argument_mutations import ArgumentMutation, StateMutation, WatchedArguments
from .state.mutations import Tables, rebound_buffers, rebound_parameters
from .state.object_trees import closed, is_opened, opened
from .state.places import NumberPlace, Place, State, Varying
from .state.recorder import record_reads
from .state.symbolic_numbers import Computed, specialize_tree, to_computed
from .state.value_guards import ValueGuards
from .trace_context import (
    at_once,
    capturing,
    check_constants,
    check_dense,
    check_module,
    is_transforming,
    no_other_random_numbers,
    translate_errors,
)


@without_gc()
def capture(
    fn: Callable | nn.Module,
    args: tuple,
    kwargs: dict,
    mesh: Mesh,
    *,
    grad: bool = False,
    hooks: bool = True,
    state: State | None = None,
    varying: Varying | None = None,
) -> Captured:
    """Traces fn; with grad also its backward, whose cotangents become inputs (kind tangent). hooks:
    those of a module too. state: what programs of it are known to leave in attributes and tables;
    more of it, found in a trace, makes another one necessary. varying: the floats among the
    arguments that are to be inputs.
    """
    if isinstance(fn, nn.Module):
        check_module(fn)
    state, varying = state or State(), varying or Varying()
    own = _module_state(fn) if isinstance(fn, nn.Module) else {}
    args, kwargs = opened((args, kwargs))
    besides = frozenset(map(id, own.values()))
    while True:
        places, numbered = state.places(besides), state.numbers(varying.now)
        value_guards = ValueGuards(
            _buffers(fn, own) | _places_after(own, (args, kwargs), places),
            state.is_looking,
            state.shapes,
        )
        try:
            captured, fill_constants = _capture(
                fn,
                own,
                args,
                kwargs,
                mesh,
                grad,
                hooks,
                state,
                [*places, *numbered],
                varying,
                value_guards,
            )
            fill_constants()
        except UnlistedMutation as error:
            if error.entry in state:
                raise ShardingError(
                    f"the program changes a tensor in place that shares its memory with '{error.entry[1][-1]}'",
                    where=user_line_of(error),
                    why="each tensor that a module keeps is an input of its own",
                    fix="keep one of them, and take views of it in forward",
                ) from None
            state.add(*error.entry)
            continue
        except Exception:
            if value_guards.could_look:  # not when it has looked
                state.is_looking = True
            elif numbered:
                state.is_counting = False  # of what is not written in Python some take numbers only
            elif len(state.places(besides)) == len(places):
                raise
            continue
        if len(state.places(besides)) == len(places) and len(state.numbers(varying.now)) == len(
            numbered
        ):
            return captured


def _capture(
    fn: Callable | nn.Module,
    state: dict[str, Tensor],
    args: tuple,
    kwargs: dict,
    mesh: Mesh,
    grad: bool,
    hooks: bool,
    keeps: State,
    places: list[Place],
    varying: Varying,
    value_guards: ValueGuards,
) -> tuple[Captured, Callable[[], None]]:
    """A program, and what then gives values to constants of the trace that are still there."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    names = _leaf_names(fn, args, kwargs)
    inputs = [
        _input(PARAMETER if isinstance(t, nn.Parameter) else BUFFER, name, t, mesh)
        for name, t in state.items()
    ]
    inputs += [_input(ARGUMENT, names[i], leaves[i], mesh) for i in slots]
    state_tensors = [place.tensor() for place in places]
    owners = (
        {id(m.__dict__): f"{name}." for name, m in fn.named_modules() if name}
        if isinstance(fn, nn.Module)
        else {}
    )
    inputs += [
        _input(ARGUMENT, owners.get(id(place.root), "") + place.name, tensor, mesh)
        for place, tensor in zip(places, state_tensors)
    ]
    real = [*state.values(), *(leaves[i] for i in slots), *state_tensors]
    tables = Tables(fn, FunctionalTensor, keeps, varying.now)
    program = _Program(
        fn,
        fn if hooks else fn.forward,
        list(state),
        _mask_leaves(leaves, slots),
        slots,
        tree,
        grad,
        tables,
        places,
        value_guards,
    )
    watched = (
        record_reads(tables.modules, tables.objects, tables.called)
        if isinstance(fn, nn.Module)
        else nullcontext()
    )
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True)
    with translate_errors(), watched as tables.recorder, mode:
        fakes = [_empty_like(t) for t in real]
        requires = [t.requires_grad for t in real]
        grad_mode = torch.enable_grad() if grad else torch.set_grad_enabled(torch.is_grad_enabled())
        with no_other_random_numbers(), fx_traceback.preserve_node_meta(), grad_mode:
            traced = make_fx(lambda *flat: program.run(flat, requires))(*fakes)
    del mode
    constants = program.take_constants(traced.graph)
    used = program.drop_unused(traced.graph)
    first = len(real) - len(places)
    inputs = [each for i, each in enumerate(inputs) if i < first or i - first in used]
    graph, inputs = normalize(traced.graph, inputs, program.tangents)
    check_constants(graph, traced)
    left, observed = (
        tuple(each.resolve_numbers(False) for each in program.left),
        tuple(each.resolve_numbers(True) for each in program.observed),
    )
    computed = tuple(
        i for i, leaf in enumerate(program.result_leaves) if isinstance(leaf, Computed)
    )
    reads = tables.reads(used, program.constants.operands)
    captured = Captured(
        graph,
        traced,
        tuple(inputs),
        tuple(program.outputs),
        tree,
        _mask_leaves(leaves, slots),
        program.results,
        _mask_leaves(program.result_leaves, program.result_slots),
        tuple(program.result_slots),
        computed,
        bool(program.tangents),
        program.opened,
        tuple(program.effects),
        left,
        observed,
        real[: len(state)],
        reads,
        tuple(place for i, place in enumerate(places) if i in used),
        tuple(value_guards.looks.values()),
    )
    return captured, lambda escaped=program.constants: escaped.fill_values(constants, traced)


def _mask_leaves(leaves: list, slots: list[int]) -> tuple[Any, ...]:
    """The leaves with None in these slots."""
    return tuple(None if i in set(slots) else leaf for i, leaf in enumerate(leaves))


class _Program:
    """The user's program as a function of flat tensors that returns flat tensors."""

    def __init__(self, fn, call, names, leaves, slots, tree, grad, tables, places, value_guards):
        self.fn, self.call, self.names, self.leaves, self.slots, self.tree, self.grad = (
            fn,
            call,
            names,
            leaves,
            slots,
            tree,
            grad,
        )
        self.parameters = (
            [name for name, _ in fn.named_parameters()] if isinstance(fn, nn.Module) else []
        )
        self.tables: Tables = tables
        self.places: list[Place] = places
        self.value_guards: ValueGuards = value_guards
        self.constants = CachedConstants(FunctionalTensor)
        self.outputs: list[Output] = []
        self.tangents: list[tuple[int, Any]] = []
        self.sources: dict[int, frozenset[int]] = {}  # of the gradient of an input: outputs
        self.rebound: dict[int, Tensor] = {}
        self.effects: list[ArgumentMutation] = []
        self.left: list[StateMutation] = []
        self.observed: list[StateMutation] = []
        self.seen: list[Tensor] = []  # by hooks of gradients

    def run(self, flat: tuple[Tensor, ...], requires: list[bool]) -> list[Tensor | None]:
        with (mode := Functional(self.tables, self.value_guards)):
            inputs = [FunctionalTensor.to_functional(t) for t in flat]
            self.shapes = [t.shape for t in flat]
            before = [unwrap(t) for t in inputs]
            for tensor, needed in zip(inputs, requires):
                if needed:
                    tensor.requires_grad_()
            tracker = _SourceTracker()
            with _Interceptor(tracker, self.constants, mode), capturing():
                outs, grads = self._with_state(inputs, tracker)
            tracker.clear()
            mutated = [
                i
                for i, (t, old) in enumerate(zip(inputs, before))
                if i in self.rebound or was_mutated(t, old)
            ]
            components = connected_components(outs)
            self.outputs = [
                *(
                    Output(OUTPUT, self._input_in_place(i, t), i >= self.asked, part=components[i])
                    for i, t in enumerate(outs)
                ),
                *(Output(MUTATION, i) for i in mutated),
                *(Output(GRADIENT, i, of=self.sources[i]) for i in grads),
                *(Output(OBSERVED, open=True) for _ in self.seen),
            ]
            constants = self.constants.tensors()
            self.constant_ids = [*map(id, constants)]
            return [
                unwrap(t) if isinstance(t, FunctionalTensor) else t
                for t in (
                    *outs,
                    *(self.rebound.get(i, inputs[i]) for i in mutated),
                    *grads.values(),
                    *self.seen,
                    *constants,
                )
            ]

    def _input_in_place(self, output: int, tensor: Tensor) -> int:
        """Which input is in the place that a run puts an output of the same shape into; -1: there
        is none.
        """
        entries = {
            (id(left.root), path)
            for left in self.left
            for path, index in left.output_paths()
            if index == output
        }
        first = len(self.names) + len(self.slots)
        return next(
            (
                first + i
                for i, place in enumerate(self.places)
                if (id(place.root), place.path) in entries
                and self.shapes[first + i] == tensor.shape
                and not isinstance(place, NumberPlace)
            ),
            -1,
        )

    def take_constants(self, graph: fx.Graph) -> dict[int, fx.Node]:
        """What computes the constants of the trace, by their ids; they are outputs no more."""
        output = graph.output_node()
        values = list(output.args[0])
        count = len(values) - len(self.constant_ids)
        output.args = (values[:count],)
        return dict(zip(self.constant_ids, values[count:]))

    def drop_unused(self, graph: fx.Graph) -> set[int]:
        """Takes the placeholders of places away whose tensors are not used; which are."""
        first = len(self.names) + len(self.slots)
        changed = {out.input for out in self.outputs if out.kind == MUTATION}
        new_positions, erased = {}, 0
        for i, node in enumerate([*graph.find_nodes(op="placeholder")]):
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
        self, inputs: list[Tensor], tracker: _SourceTracker
    ) -> tuple[list[Tensor], dict[int, Tensor]]:
        """Forward and backward, for a module with the traced tensors in place of its own for the
        whole time.
        """
        stand_ins = inputs[len(inputs) - len(self.places) :]
        if not isinstance(self.fn, nn.Module):
            with self.tables.substitute(self.places, stand_ins):
                return self._forward_backward(inputs, tracker)

        def forward_backward() -> tuple[list[Tensor], dict[int, Tensor]]:
            results = self._forward_backward(inputs, tracker)
            self.rebound = self._rebound(inputs)
            return results

        state = {f"module.{name}": tensor for name, tensor in zip(self.names, inputs)}
        with self.tables.substitute(self.places, stand_ins):
            return torch.func.functional_call(
                _Wrapper(self.fn, forward_backward), state, (), tie_weights=True
            )

    def _rebound(self, inputs: list[Tensor]) -> dict[int, Tensor]:
        """What forward put in the place of parameters and buffers."""
        return rebound_parameters(self.fn, self.parameters, inputs) | rebound_buffers(
            self.fn, self.names, inputs
        )

    def _forward_backward(
        self, inputs: list[Tensor], tracker: _SourceTracker
    ) -> tuple[list[Tensor], dict[int, Tensor]]:
        leaves = list(self.leaves)
        for slot, tensor in zip(self.slots, inputs[len(self.names) :]):
            leaves[slot] = tensor
        for i, leaf in enumerate(leaves):
            leaves[i] = self.tables.varying.get(Varying.named(i), leaf)
        args, kwargs = closed(pytree.tree_unflatten(leaves, self.tree))
        watched = WatchedArguments((args, kwargs))
        try:
            result = opened(to_computed(self.call(*args, **kwargs)), watched.origins)
            self.result_leaves, self.results = pytree.tree_flatten(result)
            self.result_slots = [
                i for i, leaf in enumerate(self.result_leaves) if isinstance(leaf, Tensor)
            ]
            outs = [self.result_leaves[i] for i in self.result_slots]
            self.effects = watched.effects(outs)
            self.asked = len(outs)
            self.rebound = self._rebound(inputs) if isinstance(self.fn, nn.Module) else {}
            self.left = self.tables.left(outs, [*inputs[: len(self.names)], *self.rebound.values()])
        finally:
            watched.restore()
        if any(isinstance(leaf, Iterator) for leaf in self.result_leaves):
            raise ShardingError(
                "the program returns an iterator, of whose values none is computed yet",
                where=user_line(),
                fix="return a list",
            )
        if any(
            isinstance(leaf, NUMBERS)
            for leaf in (
                *self.result_leaves,
                *pytree.tree_leaves([e.changed for e in self.effects]),
            )
        ):
            raise ShardingError(
                "the program returns a number that is known only when it runs",
                where=user_line(),
                fix="return the tensor, and call item() on the result",
            )
        self.opened = any(map(is_opened, pytree.tree_leaves(result, is_leaf=is_opened)))
        self.tables.start_backward()
        grads = self._backward(outs, inputs, tracker) if self.grad else {}
        self.observed = self.tables.left(self.seen, inputs[: len(self.names)])
        return outs, grads

    def _backward(
        self, outs: list[Tensor], inputs: list[Tensor], tracker: _SourceTracker
    ) -> dict[int, Tensor | None]:
        differentiable = [
            i for i, t in enumerate(outs) if isinstance(t, Tensor) and t.requires_grad
        ]
        differentiated = [i for i, t in enumerate(inputs) if t.requires_grad]
        reachable = reachable_inputs(
            [outs[i] for i in differentiable], [inputs[i] for i in differentiated]
        )
        if self.rebound:
            self._check_rebound([outs[i] for i in differentiable], inputs)
        self.sources = {
            i: frozenset(out for out, to in zip(differentiable, reachable) if to >> k & 1)
            for k, i in enumerate(differentiated)
        }
        if not differentiable or not differentiated:
            return {}
        tracker.start_backward([outs[i] for i in differentiable])
        seeds = []
        for i in differentiable:  # placeholders take their place in clean.py
            seeds.append(torch.ones_like(outs[i]))
            self.tangents.append((i, unwrap(seeds[-1])))
        grads = _grad(
            [outs[i] for i in differentiable],
            [inputs[i] for i in differentiated],
            seeds,
            allow_unused=True,
        )
        return {i: g for i, g in zip(differentiated, grads) if g is not None}

    def _check_rebound(self, outs: list[Tensor], inputs: list[Tensor]) -> None:
        """ShardingError if results depend on a parameter that forward replaced, or on the one that
        it put there.
        """
        for i, now in self.rebound.items():
            if i < len(self.parameters) and any(reachable_inputs(outs, [inputs[i], now])):
                raise ShardingError(
                    f"forward puts another parameter in the place of '{self.parameters[i]}', on which its result depends",
                    where=user_line(),
                    why="an optimizer has the one that was there: the gradient would be lost silently",
                    fix="change its values in the optimizer's step, or make it a buffer",
                )


class _Wrapper(nn.Module):
    """Calls `run` while functional_call has put other tensors in the module's place."""

    def __init__(self, module: nn.Module, run: Callable):
        super().__init__()
        self.module, self.run = module, run
        self.training = module.training

    def forward(self) -> Any:
        return self.run()


class _Interceptor(TorchFunctionMode):
    """Sees every call of PyTorch's Python interface: notes its source line and makes the
    replacements of products and values.
    """

    def __init__(self, tracker: _SourceTracker, constants: CachedConstants, mode: Functional):
        super().__init__()
        self.tracker, self.constants, self.mode = tracker, constants, mode

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.tracker.before()
        self.constants.record_operands(args, kwargs)
        if func in (
            torch.tensor,
            torch.as_tensor,
        ):  # which have their own way to look at what they are given
            args, kwargs = specialize_tree(args), specialize_tree(kwargs)
        if func in _BACKWARDS:
            with self:  # what a backward recomputes is seen as well
                return _BACKWARDS[func](*args, **kwargs)
        if func is mark_sharding and not isinstance(args[0], FunctionalTensor):
            raise ShardingError(
                "mark_sharding is called inside of the program on a tensor that is no part of it",
                where=user_line(),
                why="it is neither a parameter, buffer or argument nor computed from one",
                fix="register it as a buffer, or pass it as an argument",
            )
        if isinstance(kwargs.get("generator"), torch.Generator):
            raise ShardingError(
                "the program draws from a torch.Generator of its own",
                where=user_line(),
                why="numbers are drawn by the place of an element, from a seed of the default generator",
                fix="leave the generator out and call torch.manual_seed, or draw outside and pass the numbers",
            )
        if func == _SET_DATA:
            return set_data(*args)
        if func is Tensor.tolist and (values := self.mode.ask(args[0])) is not None:
            return values.tolist()
        if func in SELECTIONS and len(args) > 1 and "out" not in kwargs:
            func, args = SELECTIONS[func](self.mode, *args)
        if (
            any(map(sparse_coo.is_sparse, (*args, *kwargs.values())))
            or func is torch.sparse_coo_tensor
        ):
            return self._run_sparse(func, args, kwargs)
        for value in args if func in REPLACEMENTS else ():
            if isinstance(value, Tensor):
                check_dense(f"an operand of {func.__name__}", value)
        replacement = REPLACEMENTS.get(func) or VALUE_REPLACEMENTS.get(func)
        if (
            kwargs.get("out") is not None
            or is_transforming()
            or kwargs
            and not _accepts(replacement, args, kwargs)
        ):
            replacement = None  # torch.func does not take operations of ours
        result = replacement(*args, **kwargs) if replacement is not None else NotImplemented
        if result is NotImplemented:
            result = self._run(func, args, kwargs)
        self.tracker.after(result)
        self.constants.record_result(args, kwargs, result)
        return result

    def _run_sparse(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        if func is torch.sparse_coo_tensor:
            result = sparse_coo.sparse_coo_tensor(*args, **kwargs)
            return func(*args, **kwargs) if result is NotImplemented else result
        if (body := sparse_coo.body(func)) is None:
            return func(*args, **kwargs)
        with at_once():  # of constants
            args, kwargs = pytree.tree_map(sparse_coo.with_entries, (args, kwargs))
        with self:
            result = body(*args, **kwargs) if _accepts(body, args, kwargs) else NotImplemented
        if result is NotImplemented:
            check_dense(
                f"an operand of {func.__name__}",
                next(filter(sparse_coo.is_sparse, (*args, *kwargs.values()))),
            )
        return result

    def _run(self, func: Callable, args: tuple, kwargs: dict) -> Any:
        for body in bodies(func):
            with self:
                result = body(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return func(*args, **kwargs)


def _accepts(function: Callable | None, args: tuple, kwargs: dict) -> bool:
    """Whether it has arguments of these names; some of PyTorch's functions have several names for
    one.
    """
    try:
        return (
            function is not None and inspect.signature(function).bind(*args, **kwargs) is not None
        )
    except TypeError:
        return False


def _grad(
    outputs,
    inputs,
    grad_outputs=None,
    retain_graph=None,
    create_graph=False,
    only_inputs=True,
    allow_unused=None,
    is_grads_batched=False,
    materialize_grads=False,
):
    """torch.autograd.grad, which would switch the interceptor off for the whole backward."""
    outputs, inputs = ([t] if isinstance(t, Tensor) else list(t) for t in (outputs, inputs))
    if is_grads_batched:
        raise ShardingError(
            "torch.autograd.grad(is_grads_batched=True) cannot be captured",
            where=user_line(),
            fix="call it once for every gradient",
        )
    cotangents = (
        [grad_outputs] * len(outputs)
        if grad_outputs is None or isinstance(grad_outputs, Tensor)
        else list(grad_outputs)
    )
    seeds = tuple(torch.ones_like(t) if g is None else g for t, g in zip(outputs, cotangents))
    grads = _engine_run_backward(
        tuple(outputs),
        seeds,
        create_graph if retain_graph is None else retain_graph,
        create_graph,
        tuple(inputs),
        bool(allow_unused) or materialize_grads,
        accumulate_grad=False,
    )
    return tuple(
        torch.zeros_like(t) if g is None and materialize_grads else g for g, t in zip(grads, inputs)
    )


def _tensor_backward(self, gradient=None, retain_graph=None, create_graph=False, inputs=None):
    torch.autograd.backward(self, gradient, retain_graph, create_graph, inputs=inputs)


_BACKWARDS = {torch.autograd.grad: _grad, Tensor.backward: _tensor_backward}
_SET_DATA = Tensor.data.__set__


class _SourceTracker:
    """Writes the user's line, and whether the backward has begun, into the metadata of nodes as
    they are made.
    """

    def __init__(self):
        self.backward = False

    def before(self) -> None:
        if not self.backward:
            fx_traceback.get_current_meta()["custom"] = {"source": user_line(), "backward": False}

    def after(self, result: Any) -> None:
        if self.backward:
            return
        source = fx_traceback.get_current_meta()["custom"]
        for tensor in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(tensor, Tensor) and tensor.grad_fn is not None:
                tensor.grad_fn.metadata.setdefault("torchgspmd", source["source"])

    def clear(self) -> None:
        fx_traceback.get_current_meta().pop("custom", None)

    def start_backward(self, outputs: list[Tensor]) -> None:
        """From here on a node has the line of the forward operation that it differentiates."""
        fx_traceback.get_current_meta()["custom"] = {"source": None, "backward": True}
        self.backward = True
        stack = [(t.grad_fn, None) for t in outputs if t.grad_fn is not None]
        seen = set()
        while stack:
            node, inherited = stack.pop()
            if node in seen:
                continue
            seen.add(node)
            source = node.metadata.get("torchgspmd", inherited)
            node.register_prehook(_set_source(source))
            stack.extend(
                (parent, source) for parent, _ in node.next_functions if parent is not None
            )


def _set_source(source: str | None) -> Callable:
    meta = {"source": source, "backward": True}

    def hook(grads: Any) -> None:
        fx_traceback.get_current_meta()["custom"] = meta

    return hook


def _module_state(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers by name; of tied ones only the first name."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _buffers(module: Any, own: dict[str, Tensor]) -> dict[int, tuple[Place, Tensor]]:
    """Where a module's buffers are, and what is there, by their place among the inputs."""
    buffers = {}
    for i, (name, tensor) in enumerate(own.items()):
        if not isinstance(tensor, nn.Parameter):
            owner, _, last = name.rpartition(".")
            buffers[i] = Place(module.get_submodule(owner)._buffers, (last,)), tensor
    return buffers


def _places_after(
    own: dict[str, Tensor], arguments: Any, places: list[Place]
) -> dict[int, tuple[Place, Tensor]]:
    """The same of tensors that are kept in these places: they are inputs behind the module's own
    and those that are given.
    """
    first = len(own) + sum(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(arguments))
    return {first + i: (place, place.tensor()) for i, place in enumerate(places)}


def _input(kind: str, name: str, tensor: Tensor, mesh: Mesh) -> Input:
    mark, source = None, None
    check_dense(f"{kind} '{name}'", tensor)
    if recorded_mark(tensor) is not None:
        marked_mesh, mark, source = recorded_mark(tensor)
        if marked_mesh != mesh:
            raise ShardingError(
                f"{kind} '{name}' is marked on mesh {marked_mesh}, but the program runs on mesh {mesh}",
                where=source,
                fix="use one Mesh for all marks of a program",
            )
    return Input(kind, name, tuple(tensor.shape), tensor.dtype, mark, source)


def _empty_like(tensor: Tensor) -> Tensor:
    """A tensor without content; one on meta or XLA becomes one on the CPU, so that all of them are
    on one device.
    """
    device = "cpu" if tensor.device.type in ("meta", "xla") else tensor.device
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)


def _leaf_names(fn: Callable, args: tuple, kwargs: dict) -> list[str]:
    """A readable name for every leaf of (args, kwargs)."""
    try:
        parameters = list(
            inspect.signature(fn.forward if isinstance(fn, nn.Module) else fn).parameters.values()
        )
    except (TypeError, ValueError):
        parameters = []
    positional = [
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    names = positional[: len(args)] + [f"arg{i}" for i in range(len(positional), len(args))]
    result = []
    for name, value in (*zip(names, args), *kwargs.items()):
        paths, _ = pytree.tree_flatten_with_path(value)
        result += [
            name + "".join(f"_{getattr(k, 'key', getattr(k, 'idx', k))}" for k in path)
            for path, _ in paths
        ]
    return result
