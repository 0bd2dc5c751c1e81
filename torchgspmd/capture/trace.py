"""Capture: a module or function becomes one flat ATen graph at global shapes.

Forward and backward are traced together, and marks stay in the graph as nodes. The program runs
once on fake tensors inside make_fx, so nothing is allocated. FunctionalTensorMode turns in-place
updates into values. Calling torch.autograd.grad inside the trace traces the backward.
Activation checkpointing is then visible as a second computation in the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import traceback as fx_traceback

from ..compat.fake_mode import fake_mode
from ..compat.private_apis import _pytree as pytree
from ..compat.private_apis import make_fx
from ..errors import ShardingError, user_line
from ..layout.mark import recorded_mark
from ..layout.mesh import Mesh
from ..layout.prefix_specs import argument_names
from ..rules.memory_order import memory_order
from .argument_sizes import ArgumentSizes
from .asked_orders import AskedOrders
from .assumed_sizes import AssumingShapeEnv, insert_checks
from .builtin_numbers import replaced
from .captured import ARGUMENT, BUFFER, PARAMETER, Captured, Input
from .compute_dtype import Casts
from .draws import traced_generator
from .functionalize import FunctionalTensor
from .normalize import normalize
from .rewrite_sites import RewriteSites, rewriting
from .rewrites.microbatches import Microbatches
from .state.mutations import Tables
from .state.object_trees import opened
from .state.recorder import record_reads
from .state.run_guards import ArgumentKeys, FunctionFacts, ModuleFacts, RunGuards
from .state.source import Source
from .state.state_inputs import Retrace, State, TensorInput, Varying
from .state.symbolic_numbers import Computed
from .state.value_guards import ValueGuards
from .trace_context import no_other_random_numbers
from .traced_program import TracedProgram
from .unsupported import (
    check_arguments,
    check_constants,
    check_dense,
    check_module,
    translate_errors,
)
from .without_gc import without_gc

MOST_RETRACES = 256  # each makes at least one more tensor or number an input


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
    param_dtype: torch.dtype | None = None,
    dynamic: ArgumentSizes | None = None,
    microbatches: int = 1,
) -> Captured:
    """Trace fn; with grad also its backward, whose cotangents become tangent inputs.

    hooks: whether the module's hooks are part of the program. state: attributes and tables in which
    the module's programs store values, as far as known. A trace that finds more is repeated.
    varying: the float arguments that become inputs. param_dtype: floating parameters
    and arguments are cast to it. dynamic: the argument sizes that may differ between runs.
    microbatches: the parts into which a training module's batch is divided.
    """
    if isinstance(fn, nn.Module):
        check_module(fn)
    state, varying = state or State(), varying or Varying()
    module_state = _module_state(fn) if isinstance(fn, nn.Module) else {}
    args, kwargs = opened((args, kwargs))
    # Parameters and buffers are inputs already; only the state's other tensors are added.
    module_tensor_ids = frozenset(map(id, module_state.values()))
    tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    dense = [x for x in (*module_state.values(), *tensors) if x.layout is torch.strided]
    has_orders = not all(x.is_contiguous() for x in dense)
    reasons: list[str] = []
    flags = state.is_looking, state.is_counting
    try:
        # A trace's findings about the state may lead to another program, which reads more of it.
        while len(reasons) < MOST_RETRACES:
            inputs = state.inputs(module_tensor_ids, varying.now)
            readable = _readable_inputs(fn, module_state, (args, kwargs), inputs)
            value_guards, sites = ValueGuards(readable, state), RewriteSites(state.kept_sites)
            try:
                with (
                    _conclusive(
                        inputs,
                        lambda: state.inputs(module_tensor_ids, varying.now),
                        state,
                        value_guards,
                        has_orders,
                    ),
                    rewriting(sites),
                ):
                    captured, fill_constants = _trace_once(
                        fn,
                        module_state,
                        args,
                        kwargs=kwargs,
                        mesh=mesh,
                        grad=grad,
                        hooks=hooks,
                        stored_state=state,
                        state_inputs=inputs,
                        varying=varying,
                        value_guards=value_guards,
                        param_dtype=param_dtype,
                        dynamic=dynamic or ArgumentSizes(),
                        microbatches=microbatches,
                    )
                    fill_constants()
                if needed := sites.needed(captured.graph):
                    keep = partial(state.kept_sites.update, needed)
                    raise Retrace(f"it uses a value of {min(needed)}", keep)
                return captured
            except Retrace as retrace:
                retrace.learn()
                reasons.append(str(retrace))
    except Exception:
        # The error is the program's own: the next call begins with the knowledge before it.
        state.is_looking, state.is_counting = flags
        raise
    raise ShardingError(
        f"the program has been traced {MOST_RETRACES} times, and each time it was another one",
        where=user_line(),
        why=f"the last reason: {reasons[-1]}",
        fix="register what it changes as buffers of the module",
    )


@contextmanager
def _conclusive(
    inputs: list[TensorInput],
    inputs_now: Callable[[], list[TensorInput]],
    state: State,
    value_guards: ValueGuards,
    has_orders: bool,
) -> Iterator[None]:
    """Raise Retrace if a trace had other values than the program has.

    Numbers are symbolic, buffers' values unknown, and state tensors constants until they are
    inputs. Without any of these an error is the program's own, and passes. has_orders: whether the
    caller's tensors have another order in memory than the trace's.
    """
    error, text = None, ""
    try:
        yield
    except Exception as raised:
        error, text = raised, f"{type(raised).__name__}: {raised}".partition("\n")[0]
        # The value was symbolic for the trace, and is known in a run: with its value the error may
        # vanish.
        if value_guards.symbolic:
            raise Retrace(f"{value_guards.symbolic[0]} ({text})", state.look) from error
        numbers = [str(each.source) for each in inputs if each.kind == "number"]
        if numbers:  # some functions in C++ take plain numbers only
            reason = f"{', '.join(numbers)}: symbolic ({text})"
            raise Retrace(reason, state.stop_counting) from error
        if has_orders and not state.asks_order:  # a view that the caller's order allows
            raise Retrace(f"the trace has contiguous inputs ({text})", state.ask_order) from error
    # Python's int() and max() take no symbols; the next trace replaces them in that module.
    space = error.namespace if isinstance(error, ShardingError) else None
    if space is not None and all(space is not known for known in state.namespaces):
        raise Retrace(f"a number is not known ({text})", lambda: state.namespaces.append(space))
    before = {each.source for each in inputs}
    if new := [str(each.source) for each in inputs_now() if each.source not in before]:
        raise Retrace(f"the program writes {', '.join(new)}") from error
    if error is not None:
        raise error


def _trace_once(
    fn: Callable | nn.Module,
    state: dict[str, Tensor],
    args: tuple,
    kwargs: dict,
    mesh: Mesh,
    grad: bool,
    hooks: bool,
    stored_state: State,
    state_inputs: list[TensorInput],
    varying: Varying,
    value_guards: ValueGuards,
    param_dtype: torch.dtype | None,
    dynamic: ArgumentSizes,
    microbatches: int,
) -> tuple[Captured, Callable[[], None]]:
    """Return one trace's program, and a function that fills in cached constants."""
    leaves, tree = pytree.tree_flatten((args, kwargs))
    tensor_slots = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    names = leaf_names(fn, args, kwargs)
    check_arguments(names, leaves)
    inputs = [
        _input(PARAMETER if isinstance(t, nn.Parameter) else BUFFER, name, t, mesh)
        for name, t in state.items()
    ]
    inputs += [_input(ARGUMENT, names[i], leaves[i], mesh) for i in tensor_slots]
    state_tensors = [each.tensor() for each in state_inputs]
    owners = (
        {id(m): f"{name}." for name, m in fn.named_modules() if name}
        if isinstance(fn, nn.Module)
        else {}
    )
    inputs += [
        _input(ARGUMENT, owners.get(id(each.source.root), "") + each.name, tensor, mesh)
        for each, tensor in zip(state_inputs, state_tensors)
    ]
    # This order is that of the inputs: parameters and buffers, arguments, state.
    tensors = [*state.values(), *(leaves[i] for i in tensor_slots), *state_tensors]
    tables = Tables(fn, FunctionalTensor, stored_state, varying.now)
    call = fn if hooks else fn.forward
    if microbatches > 1 and grad and isinstance(fn, nn.Module) and fn.training:
        call = Microbatches(call, microbatches, fn)
    program = TracedProgram(
        fn=fn,
        call=call,
        names=list(state),
        leaves=_mask_leaves(leaves, tensor_slots),
        slots=tensor_slots,
        tree=tree,
        grad=grad,
        tables=tables,
        state_inputs=state_inputs,
        value_guards=value_guards,
        casts=Casts(param_dtype),
        asked=AskedOrders(),
    )
    read_recorder = (
        record_reads(tables.modules, tables.objects, tables.called)
        if isinstance(fn, nn.Module)
        else nullcontext()
    )
    shape_env = AssumingShapeEnv(mesh.size)
    mode = fake_mode(allow_non_fake_inputs=True, shape_env=shape_env, static_shapes=True)
    with translate_errors(bool(dynamic.dims)), read_recorder as tables.recorder, mode:
        shapes = dynamic.shapes(tensors, len(state), shape_env)
        ordered = bool(stored_state.asks_order)
        fakes = [_empty_like(t, shape, ordered) for t, shape in zip(tensors, shapes)]
        requires = [t.requires_grad for t in tensors]
        grad_mode = torch.enable_grad() if grad else torch.set_grad_enabled(torch.is_grad_enabled())
        with (
            no_other_random_numbers(),
            traced_generator(),
            fx_traceback.preserve_node_meta(),
            grad_mode,
            replaced(stored_state.namespaces),
        ):
            traced = make_fx(lambda *flat: program.run(flat, requires))(*fakes)
    del mode
    program.asked.check([each.name for each in inputs], tensors, stored_state)
    insert_checks(traced.graph, shape_env)
    constants = program.take_constants(traced.graph)
    used = program.drop_unused(traced.graph)
    first = len(tensors) - len(state_inputs)
    inputs = [each for i, each in enumerate(inputs) if i < first or i - first in used]
    graph, inputs, units = normalize(traced.graph, inputs, program.tangents)
    check_constants(graph, traced)
    computed = tuple(
        i for i, leaf in enumerate(program.result_leaves) if isinstance(leaf, Computed)
    )
    captured = Captured(
        graph=graph,
        constants=traced,
        inputs=tuple(inputs),
        outputs=tuple(program.outputs),
        arguments=tree,
        leaves=_mask_leaves(leaves, tensor_slots),
        results=program.results,
        result_leaves=_mask_leaves(program.result_leaves, program.result_slots),
        result_slots=tuple(program.result_slots),
        number_slots=computed,
        has_backward=bool(program.tangents),
        opened=program.opened,
        writes=tuple(write.resolve_numbers(False) for write in program.writes),
        observed=tuple(write.resolve_numbers(True) for write in program.observed),
        tensors=tensors[: len(state)],
        reads=tables.guards(used, program.constants.operands),
        state_inputs=tuple(each for i, each in enumerate(state_inputs) if i in used),
        looks=tuple(value_guards.looks.values()),
        functions=tuple(tables.called),
        dynamic=dynamic.of_trace(units, shape_env),
        run_guards=_run_guards(
            fn, names, leaves, tables, state_inputs, bool(stored_state.asks_order)
        ),
        breakpoints=program.breakpoints,
    )
    return captured, lambda cached=program.constants: cached.fill_values(constants, traced)


def _run_guards(
    fn: Callable | nn.Module,
    names: list[str],
    leaves: list[Any],
    tables: Tables,
    state_inputs: list[TensorInput],
    ordered: bool,
) -> RunGuards:
    is_module = isinstance(fn, nn.Module)
    besides = {*tables.changed, *(each.source.entry for each in state_inputs)}
    return RunGuards(
        ArgumentKeys.of(names, leaves, ordered),
        ModuleFacts(fn) if is_module else None,
        FunctionFacts(tables.reach, is_module, besides),
    )


def _mask_leaves(leaves: list, tensor_slots: list[int]) -> tuple[Any, ...]:
    """Return the leaves with None in the slots."""
    return tuple(None if i in set(tensor_slots) else leaf for i, leaf in enumerate(leaves))


def _module_state(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and buffers by name; tied ones under the first name only."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _readable_inputs(
    module: Any, module_state: dict[str, Tensor], arguments: Any, inputs: list[TensorInput]
) -> dict[int, TensorInput]:
    """Return buffers, and tensors in attributes and tables, by input index.

    Buffers come first, the others behind the arguments.
    """
    readable = {}
    for i, (name, tensor) in enumerate(module_state.items()):
        if not isinstance(tensor, nn.Parameter):
            owner, _, last = name.rpartition(".")
            readable[i] = TensorInput(Source(module.get_submodule(owner)._buffers, (last,)))
    leaves = pytree.tree_leaves(arguments)
    first = len(module_state) + sum(isinstance(leaf, Tensor) for leaf in leaves)
    return readable | {first + i: x for i, x in enumerate(inputs) if x.kind == "tensor"}


def _input(kind: str, name: str, tensor: Tensor, mesh: Mesh) -> Input:
    mark, source = None, None
    check_dense(f"{kind} '{name}'", tensor)
    if (recorded := recorded_mark(tensor)) is not None:
        marked_mesh, mark, source = recorded
        if marked_mesh != mesh:
            raise ShardingError(
                f"{kind} '{name}' is marked on mesh {marked_mesh}, but the program runs on "
                f"mesh {mesh}",
                where=source,
                fix="use one Mesh for all marks of a program",
            )
    return Input(kind, name, tuple(tensor.shape), tensor.dtype, mark, source)


def _empty_like(tensor: Tensor, shape: Sequence[Any], ordered: bool) -> Tensor:
    """Return an empty tensor with a shape; for meta and XLA tensors one on the CPU.

    All a trace's inputs are on one device. ordered: whether it has the tensor's order in memory.
    """
    # Operators decide by the device, and refuse two of them in one call.
    device = "cpu" if tensor.device.type in ("meta", "xla") else tensor.device
    # Otherwise contiguous, so that ranks whose arguments differ in order have one program.
    if not ordered or tensor.is_contiguous():
        return torch.empty(shape, dtype=tensor.dtype, device=device)
    if all(isinstance(n, int) for n in shape):
        strides = tensor.stride()
        return torch.empty_strided(tuple(shape), strides, dtype=tensor.dtype, device=device)
    order = memory_order(tensor)
    back = [order.index(d) for d in range(tensor.dim())]
    sizes = [shape[d] for d in order]
    return torch.empty(sizes, dtype=tensor.dtype, device=device).permute(back)


def leaf_names(fn: Callable, args: tuple, kwargs: dict) -> list[str]:
    """Return a readable name for every leaf of (args, kwargs)."""
    result = []
    for name, value in (*zip(argument_names(fn, args), args), *kwargs.items()):
        paths, _ = pytree.tree_flatten_with_path(value)
        result += [
            name + "".join(f"_{getattr(k, 'key', getattr(k, 'idx', k))}" for k in path)
            for path, _ in paths
        ]
    return result
