"""XlaModule: backend "xla" of parallelize, with one process per host through torch_xla."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..capture import (
    ARGUMENT,
    BUFFER,
    GRADIENT,
    MUTATION,
    OBSERVED,
    OUTPUT,
    PARAMETER,
    TANGENT,
    Varying,
    capture,
    not_compiled,
    opened,
)
from ..compat.private_apis import _pytree as pytree
from ..errors import ShardingError, user_line
from ..fx_passes.lower.boxed_codegen import BoxedCodeGen
from ..fx_passes.lower.split_joint import split_joint
from ..fx_passes.pipeline import annotate_for_xla
from ..fx_passes.program import Program, Request
from ..mesh import Mesh
from ..prefix_specs import spread_inputs
from ..shard_spec import ShardSpec
from ..xla_backend.host import report_host_operations
from ..xla_backend.lower import PINS, lower, on_device
from ..xla_backend.recompute import mark_repeated, separate
from ..xla_backend.runtime import start
from ..xla_backend.sharding import check
from ..xla_backend.state import pin, place, place_tensor, sync
from .autograd_boundary import (
    detach_aliases,
    detach_inputs,
    forbid_double_backward,
    saved_tensors_for,
)
from .module_proxy import ModuleProxy, leaf_key, mark_on, named_tensors, slot_of


class XlaModule(ModuleProxy):
    """Module of parallelize with backend "xla"; parameters are XLA tensors, laid out as marked.

    Execution is lazy: forward, backward and optimizer are one XLA program per step. It runs after
    an optimizer step or when a value is read. planning_seconds: the time to prepare the latest new
    program. There is no plan: XLA partitions the program (see compare_with_xla).
    """

    def __init__(
        self, model: nn.Module, mesh: Mesh, in_specs: Any, out_specs: Any, pin: str
    ) -> None:
        if pin not in PINS:
            raise ShardingError(
                f"there is no pin '{pin}'; there are {', '.join(map(repr, PINS))}",
                where=user_line(),
            )
        specs = {name: _stored_spec(name, t, mesh) for name, t in named_tensors(model)}
        device = start(mesh)
        placed = place(model, specs, mesh, device)
        self.__dict__.update(
            _mesh=mesh,
            _device=device,
            _in_specs=in_specs,
            _out_specs=out_specs,
            _pin=pin,
            _specs=specs,
            _placed=placed,
            _versions=None,
            plan=None,
            planning_seconds=0.0,
        )
        super().__init__(model)
        self._hook_optimizers()

    def _hook_optimizers(self) -> None:
        hook = register_optimizer_step_post_hook(_after_step(weakref.ref(self)))
        weakref.finalize(self, hook.remove)

    def __deepcopy__(self, memo: dict) -> XlaModule:
        module = super().__deepcopy__(memo)
        module.__dict__.update(
            _placed=place(module._model, self._specs, self._mesh, self._device), _versions=None
        )
        module._hook_optimizers()
        return module

    @not_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if torch.is_inference_mode_enabled():  # torch_xla cannot create inference tensors.
            with torch.inference_mode(False), torch.no_grad():
                return self.forward(*args, **kwargs)
        call = args, kwargs
        args, kwargs = opened(call)
        leaves, tree = pytree.tree_flatten((args, kwargs))
        leaf_keys = [*map(leaf_key, leaves)]
        varying = self._varying(tree, leaves, leaf_keys)
        key = (
            tree,
            tuple(leaf_keys),
            self._structure_version(),
            self._modes(),
            torch.is_grad_enabled(),
            self._trainable(),
            _autocast(),
            torch.get_default_dtype(),
        )
        program = self._program_for(key, lambda: self._compile(args, kwargs, varying))
        self._pin_changed()
        return program(leaves, call)

    def _kind(self, name: str, value: Any) -> Any:
        if isinstance(value, nn.Parameter) and value.device not in (
            self._device,
            torch.device("meta"),
        ):
            raise self._device_error(name, value)
        return super()._kind(name, value)

    def _compile(self, args: tuple, kwargs: dict, varying: Varying) -> _Program:
        """Compile the program of a call."""
        begin = time.perf_counter()
        mesh, (enabled, dtype) = self._mesh, _autocast()
        with torch.autocast("cpu", dtype, enabled=enabled):
            captured = capture(
                self._model,
                args,
                kwargs,
                mesh,
                grad=torch.is_grad_enabled(),
                state=self._state,
                varying=varying,
            )
        required = [
            *spread_inputs(self._in_specs, args, kwargs, mesh),
            *(None for _ in captured.state_inputs),
        ]
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
        annotated = annotate_for_xla(request, self._pin)
        program = _Program(annotated, self._model, mesh, self._device, self._pin)
        self.__dict__["planning_seconds"] = time.perf_counter() - begin
        return program

    def _pin_changed(self) -> None:
        """Pin the layouts of parameters and buffers again if any was assigned or loaded."""
        tensors = [table[key] for table, key, _ in self._placed]
        if self._versions == [(id(t), t._version) for t in tensors]:
            return
        for tensor, (_, key, spec) in zip(tensors, self._placed):
            if tensor.device != self._device:
                raise self._device_error(key, tensor)
            pin(tensor, self._mesh, spec)
        sync()
        self.__dict__["_versions"] = [(id(t), t._version) for t in tensors]

    def _device_error(self, name: str, tensor: Tensor) -> ShardingError:
        return ShardingError(
            f"'{name}' is on {tensor.device}, not on {self._device}",
            where=user_line(),
            fix="model.to_empty(device='xla') after a model on meta, then initialize it; "
            "other changes before it is wrapped",
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
            self.__dict__["_versions"] = None
            self._pin_changed()


def _after_step(module: weakref.ref) -> Any:
    """Return an optimizer hook that does not keep the module alive."""

    def hook(optimizer: Optimizer, args: tuple, kwargs: dict) -> None:
        if module() is not None:
            module()._finish_step(optimizer)

    return hook


class _Program:
    """The forward and backward graph of lazy operations for one call."""

    def __init__(
        self, annotated: Program, model: nn.Module, mesh: Mesh, device: torch.device, pin: str
    ) -> None:
        self.captured, self.mesh, self.device = annotated.captured, mesh, device
        inputs, outputs = self.captured.inputs, self.captured.outputs
        self.slots = [slot_of(model, i.name) for i in inputs if i.kind in (PARAMETER, BUFFER)]
        self.gradient_inputs = [o.input for o in outputs if o.kind == GRADIENT]
        self.inputs_without_gradient = self.captured.without_gradient()
        self.output_groups = self.captured.parts()
        self.tangent_outputs = [i.output for i in inputs if i.kind == TANGENT]
        self.mutated = [o.input for o in outputs if o.kind == MUTATION]
        self.outputs = sum(o.kind == OUTPUT for o in outputs)
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

    def __call__(self, leaves: list, call: tuple[tuple, dict]) -> Any:
        """Run a call (args, kwargs) with these leaves."""
        tensors = [
            *(leaf for leaf in leaves if isinstance(leaf, Tensor)),
            *self.captured.state_tensors(),
        ]
        arguments = [
            place_tensor(t, spec, self.mesh, self.device)
            for t, spec in zip(tensors, self.arguments)
        ]
        flat = [*(table[key] for table, key in self.slots), *arguments]
        self.captured.check_aliases([*flat[: len(self.slots)], *tensors])
        originals = [*flat[: len(self.slots)], *tensors]
        with torch.autocast("xla", enabled=False):
            outs = (
                _Run.apply(self, *detach_inputs(flat, self.inputs_without_gradient))
                if self.captured.has_backward
                else self.run_forward(flat)[0]
            )
        with torch.no_grad():
            for index in self.mutated:
                if originals[index] is not flat[index]:
                    originals[index].copy_(flat[index])
        return self.captured.result(outs, call)

    def run_forward(self, flat: Sequence[Tensor]) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
        """Return (outputs, saved values) and write the mutated inputs."""
        with torch.no_grad():
            results = self.forward(*flat)
            count = self.outputs + len(self.mutated)
            for index, value in zip(self.mutated, results[self.outputs : count]):
                flat[index].copy_(value)
        return results[: self.outputs], results[count:]


class _ReportingGraph:
    """A callable graph that reports host operations on its first call."""

    def __init__(self, module: fx.GraphModule) -> None:
        self.module, self.new = module, True

    def __call__(self, *inputs: Any) -> Any:
        if not self.new:
            return self.module.forward(*inputs)
        self.new = False
        return report_host_operations(self.module.graph, lambda: self.module.forward(*inputs))


class _Run(torch.autograd.Function):
    """Autograd node of a whole program."""

    @staticmethod
    def forward(ctx: Any, program: _Program, *flat: Tensor) -> tuple[Tensor, ...]:
        outs, saved = program.run_forward(flat)
        outs = detach_aliases(outs, program.tangent_outputs)
        ctx.program, ctx.count = program, len(flat)
        ctx.save_for_backward(*saved)
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(
            *[
                o
                for i, o in enumerate(outs)
                if i not in program.tangent_outputs and isinstance(o, Tensor)
            ]
        )
        ctx.like = [outs[i].detach() for i in program.tangent_outputs]
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        program: _Program = ctx.program
        # Autograd may reach this node without a gradient of any output.
        if all(grad is None for grad in grads):
            return (None,) * (1 + ctx.count)
        outputs = {i for i, grad in enumerate(grads) if grad is not None}
        tangents = [
            torch.zeros_like(like) if grads[i] is None else grads[i]
            for i, like in zip(program.tangent_outputs, ctx.like)
        ]
        with torch.no_grad(), torch.autocast("xla", enabled=False):
            results = program.backward(
                [*saved_tensors_for(ctx, program.output_groups, outputs), *tangents]
            )
        flat: list[Tensor | None] = [None] * ctx.count
        for index, value in zip(
            program.gradient_inputs, program.captured.flowing(outputs, results)
        ):
            flat[index] = value
        program.captured.observe(results[len(program.gradient_inputs) :])
        return None, *(forbid_double_backward(flat) if torch.is_grad_enabled() else flat)


def _stored_spec(name: str, tensor: Tensor, mesh: Mesh) -> ShardSpec:
    mark = mark_on(tensor, mesh)
    return check(mark.closed(), mesh, f"'{name}'") if mark else ShardSpec.replicated(tensor.dim())


def _autocast() -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled("xla"), torch.get_autocast_dtype("xla")
