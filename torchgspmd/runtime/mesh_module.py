"""MeshModule: a module whose calls are programs on a mesh, whatever compiles and runs these."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
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
from ..capture.state.dependencies import torch_modes
from ..compat.private_apis import _pytree as pytree
from ..compiler.options import Options
from ..errors import RankError
from ..fx_passes.stages import verifies
from ..layout.layout_rules import bound
from ..layout.mesh import Mesh
from ..layout.prefix_specs import is_same, spread_inputs
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
            shapes = call.shapes if call.sizes.dims else ()
            program = self._program_for(
                call.key, lambda: self._timed_build(call), call.leaves, shapes
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
        if not verifies():
            return self._run(program, call)
        state, tensors = program.inputs(call.leaves)
        with unwritten([*state, *tensors], besides=program.mutated):
            return self._run(program, call)

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
