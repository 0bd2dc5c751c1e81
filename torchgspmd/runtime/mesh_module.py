"""MeshModule: a module whose calls are programs on a mesh, whatever compiles and runs these."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from types import MethodType
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn

from ..capture import (
    ARGUMENT,
    ArgumentSizes,
    Captured,
    Varying,
    capture,
    capture_sized,
    is_capturing,
    leaf_names,
    not_compiled,
    opened,
    sizes_of,
    unrolling,
)
from ..capture.assumed_sizes import OtherSide
from ..capture.state.dependencies import torch_modes
from ..compat.private_apis import _pytree as pytree
from ..compiler.options import Options
from ..compiler.plan import Plan
from ..compiler.plan_summary import gathered_text, idle_axes_text
from ..errors import RankError, user_line
from ..fx_passes.replication_report import ReplicatedOp
from ..fx_passes.stages import verifies
from ..fx_passes.units import size_text
from ..layout.layout_rules import bound
from ..layout.mesh import Mesh
from ..layout.prefix_specs import is_same, spread_inputs
from ..layout.spec_notation import SAME
from ..rules.registry import order_text
from ..shard_spec import ShardSpec
from .changing_sizes import (
    Shapes,
    SizeHistory,
    kind_of,
    warn_of_numbers,
    warn_of_sizes,
    without_sizes,
)
from .compiled_program import CompiledProgram, unwritten
from .module_proxy import ModuleProxy, leaf_key
from .stored_inputs import Stored

# Modules of torch.nn.utils.parametrize compute parameters, and stay as they are.
_PARAMETRIZATIONS = "parametrizations"


class ModuleCall(NamedTuple):
    """A module call: its arguments, the same with their objects opened, and its key.

    varying: the numbers among the leaves that are program inputs; None if there are none. sizes:
    which tensor sizes are symbols in the program. leaf_keys: the leaves' keys with all sizes as
    numbers.
    """

    passed: tuple[tuple, dict]
    args: tuple
    kwargs: dict
    leaves: list
    key: tuple
    varying: Varying | None
    leaf_keys: tuple
    sizes: ArgumentSizes = ArgumentSizes()

    @property
    def shapes(self) -> Shapes:
        return tuple(tuple(x.shape) for x in self.leaves if isinstance(x, Tensor))

    @property
    def symbolic_shapes(self) -> Shapes:
        """Return the tensors' shapes if some sizes are symbols in the program, else nothing."""
        return self.shapes if self.sizes.dims else ()

    @property
    def numbers(self) -> dict:
        """Return the varying numbers' present values."""
        return self.varying.now if self.varying else {}


class MeshModule(ModuleProxy):
    """Base of parallelize's modules. A backend says how it compiles (`_build`) and runs (`_run`).

    plan: the latest call's Plan; None before the first, and where there is none. planning_seconds:
    the time to compile the latest new program.
    """

    runs_submodules = False  # whether a submodule that is called directly runs on the mesh

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        device_type: str,
        in_specs: object,
        out_specs: object,
        options: Options,
        hooks: bool = True,
        **attributes: object,
    ) -> None:
        self.__dict__.update(
            _mesh=mesh,
            _device_type=device_type,
            _in_specs=in_specs,
            _out_specs=out_specs,
            _options=options,
            _hooks=hooks,
            _history=SizeHistory(),
            _layout=None,  # parallelize's, a MeshLayout
            plan=None,
            planning_seconds=0.0,
            # `old = model.forward; model.forward = lambda x: old(x) * 2` calls it in the program.
            _plain_forward=vars(model).get("forward") or MethodType(type(model).forward, model),
            **attributes,
        )
        super().__init__(model)
        if hooks:
            install_calls(model, self._called, submodules=self.runs_submodules)

    def __deepcopy__(self, memo: dict) -> MeshModule:
        """Return a copy on the same devices, which has had no calls."""
        module = cast(MeshModule, super().__deepcopy__(memo))
        module.__dict__["_history"] = SizeHistory()
        module.__dict__["_plain_forward"] = copy.deepcopy(self._plain_forward, memo)
        if (audit := vars(self).get("_audit")) is not None:
            module.__dict__["_audit"] = audit.of_copy(module._model)
        return module

    def _called(self, module: nn.Module) -> nn.Module:
        """Return the module that computes a direct call, on the model itself or on a submodule.

        The model's own hooks run outside such a call.
        """
        # Hooks run around the whole call, in eager mode; inside, the program has none of them.
        has_hooks = module._forward_hooks or module._forward_pre_hooks
        return self if module is self._model and not has_hooks else self._submodule(module)

    def _submodule(self, module: nn.Module) -> nn.Module:
        raise NotImplementedError

    @not_compiled
    def forward(self, *args: object, **kwargs: object) -> Any:
        if is_capturing():
            return self._plain_forward(*args, **kwargs)
        call = self._call(args, kwargs)
        try:
            program = self._program_for(
                call.key, lambda: self._timed_build(call), call.leaves, call.symbolic_shapes
            )
        except Stored:  # inputs of the call are others now
            return self.forward(*args, **kwargs)
        except Exception as error:
            if (
                isinstance(error, RankError)
                or not call.sizes.dims
                or self._options.dynamic is not True
            ):
                raise
            # The program needs the number, so from now on it has one program a size.
            warn_of_numbers(error)
            self._history.use_numbers(call.sizes)
            return self.forward(*args, **kwargs)
        try:
            if not verifies():
                return self._run(program, call)
            state, tensors = program.inputs(call.leaves)
            with unwritten([*state, *tensors], besides=program.mutated):
                return self._run(program, call)
        except OtherSide as other:  # on all ranks, before the program has written anything
            with other.turned():
                return self.forward(*args, **kwargs)

    def _call(self, args: tuple, kwargs: dict) -> ModuleCall:
        passed = args, kwargs
        # The common call passes plain tensors alone, and needs no tree.
        if kwargs or not all(isinstance(a, Tensor) and a.layout is torch.strided for a in args):
            args, kwargs = opened(passed)
            leaves, tree = pytree.tree_flatten((args, kwargs))
        else:
            leaves, tree = list(args), len(args)
        leaf_keys, varying = [*map(leaf_key, leaves)], None
        if float in map(type, leaves):
            varying = self._varying(tree, leaves, leaf_keys)
        rest = (
            # All that a program depends on, besides the arguments.
            self._structure_version(),
            self._modes(),
            tuple([table[name].requires_grad for table, name in self._slots]),
            is_same(self._out_specs),
            *torch_modes(self._device_type),
        )
        if self._state.asks_order:
            rest = (tuple(order_text(x) for x in leaves if isinstance(x, Tensor)), *rest)
        key = (tree, tuple(leaf_keys), *rest)
        call = ModuleCall(
            passed=passed,
            args=args,
            kwargs=kwargs,
            leaves=leaves,
            key=key,
            varying=varying,
            leaf_keys=key[1],
        )
        dynamic = self._options.dynamic
        # A program for these very numbers is the fastest.
        if dynamic is False or dynamic is True and key in self._programs:
            return call
        sizes = self._sizes(call)
        if not sizes.dims:
            return call
        keys = tuple(without_sizes(leaf_keys, sizes))
        return call._replace(key=(tree, keys, *rest), sizes=sizes)

    def _sizes(self, call: ModuleCall) -> ArgumentSizes:
        """Return which of a call's sizes are symbols."""
        if self._options.dynamic is not True:
            names = leaf_names(self._model, call.args, call.kwargs)
            return sizes_of(self._options.dynamic, names, call.leaves, programs_for_small=True)
        tree, leaf_keys, *rest = call.key
        shared = tree, tuple(map(kind_of, leaf_keys)), *rest
        return self._history.sizes_for(shared, call.shapes, call.key, self._symbol_dims)

    def _symbol_dims(self, key: tuple) -> set[tuple[int, int]]:
        """Return the tensor dimensions that may be symbols in programs like a key's."""
        return set()

    def _timed_build(self, call: ModuleCall) -> CompiledProgram:
        start = time.perf_counter()
        with bound(self._layout):
            program = self._build(call)
        self.__dict__["planning_seconds"] = time.perf_counter() - start
        names = [each.name for each in program.captured.inputs if each.kind == ARGUMENT]
        warn_of_sizes(call.key, self._programs, names)
        return program

    def _build(self, call: ModuleCall) -> CompiledProgram:
        raise NotImplementedError

    def _run(self, program: object, call: ModuleCall) -> Any:
        raise NotImplementedError

    def _unrolls(self) -> bool:
        """Return whether loops become their iterations, as the backend has none."""
        return False

    def _capture(self, call: ModuleCall) -> tuple[Captured, list[ShardSpec | None]]:
        """Return a call's captured program, and the layouts that its arguments need."""
        # With dynamic=True the next trace has numbers, whatever the error is.
        traced = capture if self._options.dynamic is True else capture_sized
        with unrolling() if self._unrolls() else nullcontext():
            captured = traced(
                self._model,
                call.args,
                call.kwargs,
                self._mesh,
                grad=torch.is_grad_enabled(),
                hooks=self._hooks,
                state=self._state,
                varying=call.varying,
                param_dtype=self._options.param_dtype,
                dynamic=call.sizes,
                microbatches=self._options.microbatches if self._hooks else 1,
            )
        if self._layout is not None and self._hooks:  # no submodule, which has a part of the marks
            self._layout.check_used()
        specs = spread_inputs(self._in_specs, call.args, call.kwargs, self._mesh, self._model)
        return captured, [*specs, *(None for _ in captured.state_inputs)]


def install_calls(
    model: nn.Module, wrap: Callable[[nn.Module], nn.Module], submodules: bool = True
) -> None:
    """Replace the model's forward, and its submodules'; wrap: returns the new function."""
    for name, module in model.named_modules() if submodules else [("", model)]:
        has_forward = type(module).forward is not nn.Module.forward or "forward" in module.__dict__
        if has_forward and _PARAMETRIZATIONS not in name.split("."):
            module.__dict__["forward"] = SubmoduleCall(module, wrap, module.__dict__.get("forward"))


class SubmoduleCall:
    """Replaces a submodule's forward.

    own_forward: the forward that was set on the instance before; None: its class's.
    """

    def __init__(
        self,
        module: nn.Module,
        wrap: Callable[[nn.Module], nn.Module],
        own_forward: Callable | None,
    ) -> None:
        self.module, self.wrap, self.own_forward = module, wrap, own_forward
        self.wrapped: nn.Module | None = None
        self.__wrapped__ = own_forward or MethodType(type(module).forward, module)  # the signature

    def __call__(self, *args: object, **kwargs: object) -> Any:
        if is_capturing():
            return (
                self.own_forward(*args, **kwargs)
                if self.own_forward
                else type(self.module).forward(self.module, *args, **kwargs)
            )
        # Made at the first direct call: most submodules never get one.
        if self.wrapped is None:
            self.wrapped = self.wrap(self.module)
        return self.wrapped.forward(*args, **kwargs)

    def __deepcopy__(self, memo: dict) -> SubmoduleCall:
        return SubmoduleCall(
            copy.deepcopy(self.module, memo), self.wrap, copy.deepcopy(self.own_forward, memo)
        )


# The first call's warning: replicated or gathered work that no mark asks for.

LARGE_OP = 2**20  # Bytes. What is smaller takes no time that one would see in a step.
LARGE_WEIGHT = 2**16  # Bytes. Gathering fewer is a matter of latency, and marked biases are common.
SHOWN = 3


def warn_of_work(plan: Plan, has_inputs: bool, has_outputs: bool) -> bool:
    """Warn about idle axes, gathered results and replicated work; return whether there is any.

    has_inputs, has_outputs: whether in_specs and out_specs are given.
    """
    results = () if has_outputs else plan.gathered_results
    large = [(name, sent) for name, sent in results if sent >= LARGE_OP]
    texts = [
        *idle_axes_text(plan.mesh, () if has_inputs else plan.idle_axes),
        *(
            f"{line}, at every call, at {user_line()}; write "
            f'parallelize(..., out_specs="{SAME}"), or return only the loss from forward'
            for line in gathered_text(large)
        ),
        *unasked_text(plan.replicated_ops),
    ]
    for text in texts:
        warnings.warn(text, stacklevel=6)
    return bool(texts)


def unasked_text(replicated: Sequence[ReplicatedOp]) -> Iterator[str]:
    """Yield a text about the largest of a plan's replicated_ops, if one is large.

    replicated: the largest is first.
    """
    large = [
        each for each in replicated if each.bytes >= (LARGE_WEIGHT if each.weight else LARGE_OP)
    ]
    if not large:
        return
    # Three are shown: the first ones are most of the cost.
    count = f"{len(large)} operations and weights" if len(large) > 1 else "one operation or weight"
    lines = [
        f"no mark asks for it: {count} of this program, at {user_line()}, "
        "run whole on every device or are gathered",
        *(f"  {size_text(each.bytes)}  {_described(each)}" for each in large[:SHOWN]),
        "  all of them, with reasons: model.plan.replicated_ops; parallelize(..., strict=True) "
        "makes an error of it",
    ]
    yield "\n".join(lines)


def _described(each: ReplicatedOp) -> str:
    """Return the gathered or whole value, its operation, and where that is."""
    where = f" at {each.source}" if each.source else ""
    if each.weight is not None:
        return f"weight '{each.weight}', against its mark, for {each.op}{where}"
    value = f"%{each.value}, gathered for " if each.value else ""
    return f"{value}{each.op}{where}: {each.why}"
