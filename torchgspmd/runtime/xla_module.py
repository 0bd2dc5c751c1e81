"""XlaModule: parallelize's backend "xla", with one process per host through torch_xla."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..capture import ARGUMENT, BUFFER, GRADIENT, MUTATION, OBSERVED, PARAMETER, not_compiled
from ..capture.state.dependencies import named_tensors
from ..compat.private_apis import _pytree as pytree
from ..compiler.options import Options
from ..errors import ShardingError
from ..fx_passes.lower.convert_boundary import split_joint
from ..fx_passes.lower.torch_bindings import BoxedCodeGen
from ..fx_passes.program import Program, Request
from ..layout.mesh import Mesh
from ..shard_spec import ShardSpec
from ..xla_backend.lower import annotate_for_xla, lower, mark_repeated, on_device, separate
from ..xla_backend.runtime import pin, place, place_tensor, report_host_operations, start, sync
from ..xla_backend.sharding import check
from .compiled_program import CompiledProgram
from .mesh_module import MeshModule, ModuleCall
from .module_proxy import mark_on


class XlaModule(MeshModule):
    """The module that backend "xla" returns; parameters are XLA tensors, laid out as marked.

    Execution is lazy: forward, backward and optimizer are one XLA program per step. It runs after
    an optimizer step or when a value is read. planning_seconds: the time to prepare the latest new
    program. There is no plan: XLA partitions the program (see compare_with_xla).
    """

    def __init__(
        self, model: nn.Module, mesh: Mesh, in_specs: object, out_specs: object, options: Options
    ) -> None:
        specs = {name: _stored_spec(name, t, mesh) for name, t in named_tensors(model)}
        device = start(mesh)
        placed = place(model, specs, mesh, device)
        super().__init__(
            model,
            mesh,
            "xla",
            in_specs,
            out_specs,
            # XLA compiles for fixed sizes.
            replace(options, dynamic=False),
            _device=device,
            _specs=specs,
            _placed=placed,
            _versions=None,
        )
        self._hook_optimizers()

    def _hook_optimizers(self) -> None:
        module = weakref.ref(self)  # the hook does not keep the module alive

        def finish(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
            if (alive := module()) is not None:
                alive._finish_step(optimizer)

        hook = register_optimizer_step_post_hook(finish)
        weakref.finalize(self, hook.remove)

    def __deepcopy__(self, memo: dict) -> XlaModule:
        module = super().__deepcopy__(memo)
        assert isinstance(module, XlaModule)
        module.__dict__.update(
            _placed=place(module._model, self._specs, self._mesh, self._device), _versions=None
        )
        module._hook_optimizers()
        return module

    @not_compiled
    def forward(self, *args: object, **kwargs: object) -> Any:
        if torch.is_inference_mode_enabled():  # torch_xla cannot create inference tensors.
            with torch.inference_mode(False), torch.no_grad():
                return super().forward(*args, **kwargs)
        return super().forward(*args, **kwargs)

    def _run(self, program: _Program, call: ModuleCall) -> Any:
        self._pin_changed()
        return program(call.leaves, call.passed)

    def _check_tensors(self) -> None:
        for name, value in self._model.named_parameters():
            if value.device not in (self._device, torch.device("meta")):
                raise self._device_error(name, value)

    def _unrolls(self) -> bool:
        return True

    def _build(self, call: ModuleCall) -> _Program:
        mesh, dtype = self._mesh, torch.get_autocast_dtype("xla")
        # Captured on the CPU, with the casts that autocast asks for on XLA.
        with torch.autocast("cpu", dtype, enabled=torch.is_autocast_enabled("xla")):
            captured, required = self._capture(call)
        request = Request(
            captured,
            mesh,
            required,
            self._out_specs,
            stored={
                i.name: self._specs.get(i.name, ShardSpec.replicated(len(i.shape)))
                for i in captured.inputs
                if i.kind in (PARAMETER, BUFFER)
            },
        )
        annotated = annotate_for_xla(request, self._options.advanced.pin)
        return _Program(annotated, self._model, mesh, self._device, self._options.advanced.pin)

    def _pin_changed(self) -> None:
        """Pin parameter and buffer layouts again if any was assigned or loaded."""
        tensors = [table[key] for table, key, _ in self._placed]
        # Nearly always: nothing but a step or a load changes them.
        if self._versions == [(id(t), t._version) for t in tensors]:
            return
        for tensor, (_, key, spec) in zip(tensors, self._placed):
            if tensor.device != self._device:
                raise self._device_error(key, tensor)
            pin(tensor, self._mesh, spec)
        # Before the next program, which would be compiled for the other layouts.
        sync()
        self.__dict__["_versions"] = [(id(t), t._version) for t in tensors]

    def _device_error(self, name: str, tensor: Tensor) -> ShardingError:
        return ShardingError.here(
            f"'{name}' is on {tensor.device}, not on {self._device}",
            fix="call model.to_empty(device='xla') for a model on meta, then initialize it; "
            "make other changes before it is wrapped",
        )

    def _finish_step(self, optimizer: Optimizer) -> None:
        """Lay out an optimizer's states as their parameters, and run the step."""
        specs = {id(table[key]): spec for table, key, spec in self._placed}
        mine = [p for group in optimizer.param_groups for p in group["params"] if id(p) in specs]
        for parameter in mine:
            state = [
                t
                for t in pytree.tree_leaves(optimizer.state.get(parameter))
                if isinstance(t, Tensor)
            ]
            for tensor in (parameter, parameter.grad, *state):
                if (
                    tensor is not None
                    and tensor.device == self._device
                    and tensor.shape == parameter.shape
                ):
                    pin(tensor, self._mesh, specs[id(parameter)])
        if mine:
            # The step has written to parameters, and torch_xla may have changed their layouts.
            self.__dict__["_versions"] = None
            self._pin_changed()


class _Program(CompiledProgram):
    """One call's forward and backward graph, with lazy operations."""

    def __init__(
        self, annotated: Program, model: nn.Module, mesh: Mesh, device: torch.device, pin: str
    ) -> None:
        super().__init__(annotated.captured, model)
        self.mesh, self.device = mesh, device
        inputs, outputs = self.captured.inputs, self.captured.outputs
        graph = annotated.graph
        placed = [n.meta["spec"].closed() for n in graph.nodes if n.op == "placeholder"]
        self.arguments = [
            check(spec, mesh, f"argument '{i.name}'")
            for i, spec in zip(inputs, placed)
            if i.kind == ARGUMENT
        ]
        pinned = {i: spec.closed() for i, spec in enumerate(annotated.results) if spec is not None}
        pinned |= {
            i: placed[o.input] for i, o in enumerate(outputs) if o.kind in (GRADIENT, MUTATION)
        }
        # Before `lower`, which copies these marks to its nodes.
        mark_repeated(graph)
        graph = lower(graph, mesh, device, pin, pinned)
        forward, backward = split_joint(
            graph,
            len(self.tangent_outputs),
            len(self.gradient_inputs) + sum(o.kind == OBSERVED for o in outputs),
        )
        separate(backward).set_codegen(BoxedCodeGen())
        constants = on_device(self.captured.constants, device)
        self.forward, self.backward = (
            _ReportingGraph(fx.GraphModule(constants, g)) for g in (forward, backward)
        )

    def place(self, tensors: list[Tensor]) -> list[Tensor]:
        """Return the arguments on XLA, in their layouts."""
        return [
            place_tensor(t, spec, self.mesh, self.device)
            for t, spec in zip(tensors, self.arguments)
        ]


class _ReportingGraph:
    """A callable graph that reports host operations on its first call."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module, self.new = module, True

    def __call__(self, *inputs: object) -> Any:
        # The captured program has the casts already.
        with torch.autocast("xla", enabled=False):
            if not self.new:
                return self.module.forward(*inputs)
            self.new = False
            return report_host_operations(self.module.graph, lambda: self.module.forward(*inputs))


def _stored_spec(name: str, tensor: Tensor, mesh: Mesh) -> ShardSpec:
    mark = mark_on(tensor, mesh)
    return check(mark.closed(), mesh, f"'{name}'") if mark else ShardSpec.replicated(tensor.dim())
