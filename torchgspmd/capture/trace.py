"""Capture: a module or function becomes one flat ATen graph at global shapes.

Forward and backward are traced together, and marks stay in the graph as nodes. The program runs
once on fake tensors inside make_fx, so nothing is allocated. FunctionalTensorMode turns in-place
updates into values. Calling torch.autograd.grad inside the trace traces the backward.
Activation checkpointing is then visible as a second computation in the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import traceback as fx_traceback

from ..compat.fx_nodes import fake_mode
from ..compat.patches import setting
from ..compat.private_apis import _pytree as pytree
from ..compat.private_apis import make_fx
from ..errors import ShardingError
from ..layout.mark import recorded_mark
from ..layout.mesh import Mesh
from ..layout.prefix_specs import argument_names
from ..rules.registry import memory_order
from .argument_sizes import ArgumentSizes
from .assumed_sizes import SIDES, AssumingShapeEnv, insert_checks
from .builtin_numbers import replaced
from .captured import ARGUMENT, BUFFER, PARAMETER, Captured, Input
from .draws import traced_generator
from .functionalize import FunctionalTensor
from .normalize import normalize
from .rewrites.microbatches import Microbatches
from .rewrites.new_tensors import WRITTEN, WRITTEN_ERROR
from .state.dependencies import HookTables
from .state.mutable_tables import names_of
from .state.mutations import Tables
from .state.object_trees import leaves_with_paths, opened
from .state.recorder import record_reads
from .state.run_guards import ArgumentKeys, FunctionFacts, ModuleFacts, RunGuards
from .state.source import Source
from .state.state_inputs import Retrace, State, TensorInput, Varying
from .state.symbolic_numbers import Computed
from .state.value_guards import ValueGuards, WholeNumbers
from .trace_context import (
    IS_EAGER,
    MESH,
    RewriteSites,
    no_other_random_numbers,
    rewriting,
    without_gc,
)
from .traced_program import Casts, TracedProgram
from .unsupported import (
    check_arguments,
    check_constants,
    check_dense,
    check_module,
    translate_errors,
)

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
    return _Capture(
        fn,
        *opened((args, kwargs)),
        mesh=mesh,
        grad=grad,
        hooks=hooks,
        state=state or State(),
        varying=varying or Varying(),
        param_dtype=param_dtype,
        dynamic=dynamic or ArgumentSizes(),
        microbatches=microbatches,
    ).run()


@dataclass
class _Capture:
    """One call of `capture`: a program and its options, traced until a trace is conclusive."""

    fn: Any
    args: tuple
    kwargs: dict
    mesh: Mesh
    grad: bool
    hooks: bool
    state: State
    varying: Varying
    param_dtype: torch.dtype | None
    dynamic: ArgumentSizes
    microbatches: int

    def __post_init__(self) -> None:
        self.is_module = isinstance(self.fn, nn.Module)
        # Parameters and buffers; tied ones under the first name only.
        self.module_state: dict[str, Tensor] = (
            {**dict(self.fn.named_parameters()), **dict(self.fn.named_buffers())}
            if self.is_module
            else {}
        )
        for module in self.fn.modules() if self.is_module else ():
            if check := getattr(type(module), "check_model", None):  # StackedBlocks
                check(module, self.module_state)
        self.leaves, self.tree = pytree.tree_flatten((self.args, self.kwargs))
        self.slots = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, Tensor)]
        self.names = leaf_names(self.fn, self.args, self.kwargs)
        # Parameters and buffers are inputs already; only the state's other tensors are added.
        self.module_tensor_ids = frozenset(map(id, self.module_state.values()))
        # This order is that of the inputs; the state's tensors follow.
        self.tensors = [*self.module_state.values(), *(self.leaves[i] for i in self.slots)]

    def run(self) -> Captured:
        """Trace until a trace has found out nothing that would make it another one."""
        check_arguments(self.names, self.leaves)
        state, reasons = self.state, list[str]()
        flags = state.is_looking, state.is_counting, state.is_settled
        asked = {*state.asked}, {*state.tested}
        state.is_eager = True
        # transformers' first forward registers the hooks that collect hidden states.
        hooks = HookTables(self.fn.modules() if self.is_module else ())
        try:
            # A trace's findings about the state may lead to another program, which reads more.
            while len(reasons) < MOST_RETRACES:
                inputs = self._state_inputs()
                readable = self._readable_inputs(inputs), self._whole_numbers()
                value_guards = ValueGuards(*readable, self.leaves, state)
                sites = RewriteSites(state.kept_sites)
                try:
                    with self._conclusive(inputs, value_guards), rewriting(sites):
                        captured, fill_constants = self._trace(inputs, value_guards)
                        fill_constants()
                    if needed := sites.needed(captured.graph):
                        keep = partial(state.kept_sites.update, needed)
                        raise Retrace(f"it uses a value of {min(needed)}", keep)
                    return captured
                except Retrace as retrace:
                    hooks.restore()
                    retrace.learn()
                    reasons.append(str(retrace))
        except Exception:
            # The error is the program's own: the next call begins with the knowledge before it.
            state.is_looking, state.is_counting, state.is_settled = flags
            state.asked, state.tested = asked
            raise
        raise ShardingError.here(
            f"the program has been traced {MOST_RETRACES} times, and each time it was another one",
            why=f"the last reason: {reasons[-1]}",
            fix="register what it changes as buffers of the module",
        )

    def _state_inputs(self) -> list[TensorInput]:
        return self.state.inputs(self.module_tensor_ids, self.varying.now)

    @contextmanager
    def _conclusive(self, inputs: list[TensorInput], value_guards: ValueGuards) -> Iterator[None]:
        """Raise Retrace if a trace had other values than the program has.

        Numbers are symbolic, buffers' values unknown, state tensors constants until they are
        inputs, inputs contiguous, and a compiler seems to run. Without any of these an error is the
        program's own, and passes.
        """
        state, error, text = self.state, None, ""
        space: dict[str, Any] | None = None
        is_branch = False
        try:
            yield
        except Exception as raised:
            error, text = raised, f"{type(raised).__name__}: {raised}".partition("\n")[0]
            if state.may_compile:
                raise Retrace(f"no compiler runs in a trace ({text})", state.be_compiled) from error
            # Python's int() and max() take no symbols; the next trace replaces them in that module.
            space = error.namespace if isinstance(error, ShardingError) else None
            if any(space is known for known in state.namespaces):
                space = None
            is_branch = space is None and state.branches.learn(error.__cause__)
            # The value was symbolic for the trace, and is known in a run: with its value the error
            # may vanish.
            if value_guards.symbolic:
                raise Retrace(f"{value_guards.symbolic[0]} ({text})", state.look) from error
            if value_guards.asked and space is None:  # the last one is nearest to the error
                raise value_guards.asked[-1] from error
            numbers = [str(each.source) for each in inputs if each.kind == "number"]
            if numbers:  # some functions in C++ take plain numbers only
                reason = f"{', '.join(numbers)}: symbolic ({text})"
                raise Retrace(reason, state.stop_counting) from error
            dense = (x for x in self.tensors if x.layout is torch.strided)
            if not state.asks_order and not all(x.is_contiguous() for x in dense):
                # A view that the caller's order allows.
                reason = f"the trace has contiguous inputs ({text})"
                raise Retrace(reason, state.ask_order) from error
            if WRITTEN_ERROR in text and WRITTEN not in state.kept_sites:
                keep = partial(state.kept_sites.add, WRITTEN)
                raise Retrace(f"it writes into new tensors ({text})", keep) from error
            # Code for compilers may lack a case, such as LongT5's call without a mask.
            if not state.is_eager and not isinstance(raised, ShardingError):
                reason = f"torch.compiler.is_compiling() is True in a trace ({text})"
                raise Retrace(reason, state.be_eager) from error
        if space is not None:
            raise Retrace(f"a number is not known ({text})", lambda: state.namespaces.append(space))
        if is_branch:
            raise Retrace(f"it branches on a value ({text})")
        before = {each.source for each in inputs}
        if new := [str(x.source) for x in self._state_inputs() if x.source not in before]:
            raise Retrace(f"the program writes {', '.join(new)}") from error
        if error is not None:
            raise error

    def _trace(
        self, state_inputs: list[TensorInput], value_guards: ValueGuards
    ) -> tuple[Captured, Callable[[], None]]:
        """Return one trace's program, and a function that fills in cached constants."""
        fn, leaves, slots, mesh, state = self.fn, self.leaves, self.slots, self.mesh, self.state
        inputs = [
            _input(PARAMETER if isinstance(t, nn.Parameter) else BUFFER, name, t, mesh)
            for name, t in self.module_state.items()
        ]
        inputs += [_input(ARGUMENT, self.names[i], leaves[i], mesh) for i in slots]
        state_tensors = [each.tensor() for each in state_inputs]
        inputs += [
            _input(ARGUMENT, name, tensor, mesh)
            for name, tensor in zip(names_of(fn, state_inputs), state_tensors)
        ]
        tensors, first = [*self.tensors, *state_tensors], len(self.tensors)
        tables = Tables(fn, FunctionalTensor, state, self.varying.now)
        call = fn if self.hooks else fn.forward
        if self.microbatches > 1 and self.grad and self.is_module and fn.training:
            call = Microbatches(call, self.microbatches, fn)
        masked = _mask_leaves(leaves, slots)
        program = TracedProgram(
            fn,
            call,
            names=list(self.module_state),
            leaves=masked,
            slots=slots,
            tree=self.tree,
            grad=self.grad,
            tables=tables,
            state_inputs=state_inputs,
            value_guards=value_guards,
            casts=Casts(self.param_dtype),
        )
        read_recorder = (
            record_reads(tables.modules, tables.objects, tables.called)
            if self.is_module
            else nullcontext()
        )
        shape_env = AssumingShapeEnv(mesh.size)
        mode = fake_mode(allow_non_fake_inputs=True, shape_env=shape_env, static_shapes=True)
        with translate_errors(bool(self.dynamic.dims)), read_recorder as tables.recorder, mode:
            shapes = self.dynamic.shapes(tensors, len(self.module_state), shape_env)
            ordered = bool(state.asks_order)
            fakes = [_empty_like(t, shape, ordered) for t, shape in zip(tensors, shapes)]
            requires = [t.requires_grad for t in tensors]
            with (
                no_other_random_numbers(),
                traced_generator(),
                fx_traceback.preserve_node_meta(),
                torch.set_grad_enabled(self.grad or torch.is_grad_enabled()),
                replaced(state.namespaces),
                setting(MESH, mesh),
                setting(IS_EAGER, state.is_eager),
            ):
                traced = make_fx(lambda *flat: program.run(flat, requires))(*fakes)
        del mode
        program.asked.check([each.name for each in inputs], tensors, state)
        program.keep(traced.graph, insert_checks(traced.graph, shape_env))
        constants = program.take_constants(traced.graph)
        used = program.drop_unused(traced.graph)
        inputs = [each for i, each in enumerate(inputs) if i < first or i - first in used]
        graph, inputs, units = normalize(traced.graph, inputs, program.tangents)
        check_constants(graph, traced)
        captured = Captured(
            graph=graph,
            constants=traced,
            inputs=tuple(inputs),
            outputs=tuple(program.outputs),
            arguments=self.tree,
            leaves=masked,
            results=program.results,
            result_leaves=_mask_leaves(program.result_leaves, program.result_slots),
            result_slots=tuple(program.result_slots),
            number_slots=tuple(
                i for i, leaf in enumerate(program.result_leaves) if isinstance(leaf, Computed)
            ),
            has_backward=bool(program.tangents),
            opened=program.opened,
            writes=tuple(write.resolve_numbers(False) for write in program.writes),
            observed=tuple(write.resolve_numbers(True) for write in program.observed),
            tensors=tensors[: len(self.module_state)],
            reads=tables.guards(used, program.constants.operands),
            state_inputs=tuple(each for i, each in enumerate(state_inputs) if i in used),
            looks=tuple(value_guards.looks.values()),
            functions=tuple(tables.called),
            dynamic=self.dynamic.of_trace(units, shape_env),
            few=tuple(sorted(SIDES.get().few)),
            run_guards=RunGuards(
                ArgumentKeys.of(self.names, self.leaves, bool(state.asks_order)),
                ModuleFacts(fn) if self.is_module else None,
                FunctionFacts(
                    tables.reach,
                    self.is_module,
                    {*tables.changed, *(each.source.entry for each in state_inputs)},
                ),
            ),
            breakpoints=program.breakpoints,
        )
        return captured, lambda cached=program.constants: cached.fill_values(constants, traced)

    def _readable_inputs(self, inputs: list[TensorInput]) -> dict[int, TensorInput]:
        """Return buffers, and tensors in attributes and tables, by input index.

        Buffers come first, the others behind the arguments.
        """
        readable = {}
        for i, (name, tensor) in enumerate(self.module_state.items()):
            if not isinstance(tensor, nn.Parameter):
                owner, _, last = name.rpartition(".")
                readable[i] = TensorInput(Source(self.fn.get_submodule(owner)._buffers, (last,)))
        first = len(self.tensors)
        return readable | {first + i: x for i, x in enumerate(inputs) if x.kind == "tensor"}

    def _whole_numbers(self) -> dict[int, WholeNumbers]:
        """Return the arguments that are no floats, by input index."""
        first = len(self.module_state)
        return {
            first + i: WholeNumbers(self.names[slot], slot)
            for i, slot in enumerate(self.slots)
            if not (self.leaves[slot].is_floating_point() or self.leaves[slot].is_complex())
        }


def _mask_leaves(leaves: list, tensor_slots: list[int]) -> tuple[Any, ...]:
    return tuple(None if i in set(tensor_slots) else leaf for i, leaf in enumerate(leaves))


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
        result += [
            name + "".join(f"_{getattr(k, 'key', getattr(k, 'idx', k))}" for k in path)
            for path, _ in leaves_with_paths(value)
        ]
    return result
